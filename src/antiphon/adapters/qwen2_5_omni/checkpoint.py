"""Reads a Qwen2.5-Omni checkpoint: the thinker and its encoders, and the talker and its vocoder if it has them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_submodules
from safetensors import safe_open
from torch import nn
from transformers import (
    PreTrainedModel,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniThinkerForConditionalGeneration,
)

from antiphon.adapters.qwen2_5_omni.token2wav import Speaker, WavDecoder
from antiphon.engine.local.weights import load_whole
from antiphon.modeling.omni.conversation import ThinkerParts, tokenizer
from antiphon.modeling.text_decoder import LAST, TextDecoder

# The file with the voices in a released folder.
SPEAKERS = "spk_dict.pt"


class TalkerDecoder(TextDecoder):
    """The talker and its head, as the engine's runner steps them. Input rows pass through a projection first.

    `codes`: the embedding table of the codes, as wide as the thinker. `projection`: maps rows of that width to the
    talker's width.
    """

    def __init__(self, talker: Any) -> None:
        super().__init__(talker.model, talker.codec_head)
        self.codes: Any = talker.get_input_embeddings()
        # The tuple keeps the projection from being a submodule, whose weights would be rounded to int8.
        self._unrounded = (talker.thinker_to_talker_proj,)

    @property
    def projection(self) -> Any:
        """The module that maps rows [n, width of the thinker] to the talker's input rows."""
        return self._unrounded[0]

    def get_input_embeddings(self) -> Any:
        """Return the module that maps codes, int [n], to the talker's input rows."""
        return nn.Sequential(self.codes, self.projection)


@dataclass(frozen=True, slots=True)
class VoiceParts:
    """The parts of the voice, on its device."""

    # The talker, which the engine steps.
    decoder: TalkerDecoder
    # The vocoder.
    token2wav: WavDecoder
    # The voices by lower-case name, the default first.
    speakers: dict[str, Speaker]
    # The codes that end the audio.
    ends: frozenset[int]
    # The code that begins the audio.
    bos: int
    # The code that pads the rows before the audio.
    pad: int
    # The code that stands for the prompt.
    mask: int
    # The text token that ends a reply's text.
    text_eos: int
    # The text token that pads the rows after the reply's text.
    text_pad: int


def read(folder: Path, device: str, talker_device: str, dtype: torch.dtype) -> tuple[ThinkerParts, VoiceParts | None]:
    """Load a checkpoint's folder: the thinker on `device`, the talker and its vocoder on `talker_device`.

    The talker is None if config.json disables it, or if the folder has no voices or no weights for it. Waits for a
    minute or more. Raises OSError, ValueError, KeyError or RuntimeError if the folder is not such a checkpoint, or is
    incomplete.
    """
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if settings.get("enable_audio_output", True) and (folder / SPEAKERS).is_file() and _has_voice(folder):
        # The class's own `from_pretrained` also reads the voices, and cannot report the tensors that are missing.
        read_base: Any = PreTrainedModel.from_pretrained
        kind = SimpleNamespace(from_pretrained=partial(read_base.__func__, Qwen2_5OmniForConditionalGeneration))
        where = {"thinker": device, "talker": talker_device, "token2wav": talker_device}
        whole = load_whole(kind, folder, dtype=dtype, device_map=where)
        whole.load_speakers(folder / SPEAKERS)
        # The hooks move inputs to the device of each part. Here the inputs are already on it.
        remove_hook_from_submodules(whole)
        thinker = whole.thinker
        return _thinker(thinker, folder, LAST), _talker(whole)
    config: Any = Qwen2_5OmniConfig.from_pretrained(folder, local_files_only=True)
    thinker_kind: Any = Qwen2_5OmniThinkerForConditionalGeneration
    model = load_whole(thinker_kind, folder, config=config.thinker_config, dtype=dtype, device_map=device)
    return _thinker(model, folder), None


def _has_voice(folder: Path) -> bool:
    """Return whether the checkpoint has weights of the talker and of its vocoder."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    else:
        names = set()
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                names |= set(opened.keys())
    return all(any(name.startswith(part) for name in names) for part in ("talker.", "token2wav."))


def _thinker(model: Any, folder: Path, tap: int = 0) -> ThinkerParts:
    return ThinkerParts(model, TextDecoder(model.get_decoder(), model.lm_head, tap=tap), tokenizer(folder))


def _talker(whole: Any) -> VoiceParts:
    talker, device = whole.talker, whole.token2wav.device
    speakers = {
        name.lower(): Speaker(
            int(given["bos_token"]), given["cond"].to(device).float(), given["ref_mel"].to(device).float()
        )
        # The released default voice is the first.
        for name, given in sorted(whole.speaker_map.items(), key=lambda item: item[0] != "Chelsie")
    }
    if not speakers:
        raise ValueError(f"{SPEAKERS} has no voices")
    return VoiceParts(
        decoder=TalkerDecoder(talker),
        token2wav=WavDecoder(whole.token2wav.float()),
        speakers=speakers,
        ends=frozenset((talker.codec_pad_token, talker.codec_eos_token)),
        bos=talker.codec_bos_token,
        pad=talker.codec_pad_token,
        mask=talker.codec_mask_token,
        text_eos=talker.text_eos_token,
        text_pad=talker.text_pad_token,
    )
