"""Reads a Qwen2.5-Omni checkpoint: the thinker with its encoders, and the talker with its vocoder where it has them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_submodules
from safetensors import safe_open
from torch import nn
from transformers import (
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniThinkerForConditionalGeneration,
)

from antiphon.adapters.qwen2_5_omni.token2wav import Speaker, WavDecoder
from antiphon.modeling.omni.conversation import ThinkerParts, tokenizer
from antiphon.modeling.text_decoder import LAST, TextDecoder

# The file of a released folder that has the voices.
SPEAKERS = "spk_dict.pt"


class TalkerDecoder(TextDecoder):
    """The talker and its head, as the engine's runner steps it: rows go through its projection first.

    `codes`: the table of codes, as wide as the thinker. `projection`: from there to the talker's width.
    """

    def __init__(self, talker: Any) -> None:
        super().__init__(talker.model, talker.codec_head)
        self.codes: Any = talker.get_input_embeddings()
        # In a tuple: it is no part of the decoder whose weights are rounded to int8.
        self._unrounded = (talker.thinker_to_talker_proj,)

    @property
    def projection(self) -> Any:
        """The module from rows [n, width of the thinker] to the talker's input rows."""
        return self._unrounded[0]

    def get_input_embeddings(self) -> Any:
        """Return the module that turns codes, int [n], into the talker's input rows."""
        return nn.Sequential(self.codes, self.projection)


@dataclass(frozen=True, slots=True)
class VoiceParts:
    """The voice on its device.

    `decoder`: the talker, which the engine steps. `speakers`: by their names in lower case.
    `ends`: the codes that end the audio. `bos`, `pad`, `mask`: codes that are no audio. `text_eos`, `text_pad`: the
    text tokens that end a reply's text, and follow it.
    """

    decoder: TalkerDecoder
    token2wav: WavDecoder
    speakers: dict[str, Speaker]
    ends: frozenset[int]
    bos: int
    pad: int
    mask: int
    text_eos: int
    text_pad: int


def read(folder: Path, device: str, talker_device: str, dtype: torch.dtype) -> tuple[ThinkerParts, VoiceParts | None]:
    """Load a checkpoint's folder: the thinker on one device, the talker and its vocoder on another or the same.

    There is no talker where config.json switches it off, or the folder has no voices or no weights of it. Waits for a
    minute and more. Raises OSError, ValueError, KeyError or RuntimeError for a folder that is no such checkpoint, or
    lacks something.
    """
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if settings.get("enable_audio_output", True) and (folder / SPEAKERS).is_file() and _has_voice(folder):
        kind: Any = Qwen2_5OmniForConditionalGeneration
        where = {"thinker": device, "talker": talker_device, "token2wav": talker_device}
        whole = kind.from_pretrained(folder, dtype=dtype, local_files_only=True, device_map=where).eval()
        # The hooks move a part's inputs to its device; here each part is given its inputs where it is.
        remove_hook_from_submodules(whole)
        thinker = whole.thinker
        return _thinker(thinker, folder, LAST), _talker(whole)
    config: Any = Qwen2_5OmniConfig.from_pretrained(folder, local_files_only=True)
    model: Any = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(
        folder, config=config.thinker_config, dtype=dtype, local_files_only=True
    )
    return _thinker(model.to(device).eval(), folder), None


def _has_voice(folder: Path) -> bool:
    """Whether the checkpoint has weights of the talker and its vocoder."""
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
        # The makers' default voice is the first.
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
