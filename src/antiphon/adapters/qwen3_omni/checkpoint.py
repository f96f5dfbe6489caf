"""Reads a Qwen3-Omni checkpoint: the thinker and its encoders, and the talker and its vocoder if it has them.

`transformers` loads the whole model. This module splits it into decoders, which engines step, and the modules that are
called between steps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_submodules
from transformers import Qwen3OmniMoeForConditionalGeneration

from antiphon.adapters.qwen3_omni.code2wav import Code2Wav
from antiphon.engine.local.weights import load_whole
from antiphon.modeling.codec.talker import CodePredictor
from antiphon.modeling.omni.conversation import ThinkerParts, tokenizer
from antiphon.modeling.text_decoder import EXPERTS, TextDecoder


@dataclass(frozen=True, slots=True)
class OmniSpecialIds:
    """The ids that control the talker: codes without audio, and text tokens. The talker chooses the language itself."""

    # The code that ends the audio.
    end: int
    # The code that begins the audio.
    bos: int
    # The code that pads rows without audio.
    pad: int
    # The code that leaves the language to the talker. This code and the next two precede the speaker's code.
    no_think: int
    # The code that begins the (empty) language field.
    think_bos: int
    # The code that ends the language field.
    think_eos: int
    # The text token that begins a text.
    text_bos: int
    # The text token that ends a text.
    text_eos: int
    # The text token that pads rows without text.
    text_pad: int


@dataclass(frozen=True, slots=True)
class TalkerParts:
    """The parts of the voice, on its device."""

    # A Qwen3OmniMoeTalkerForConditionalGeneration, for its projections.
    model: Any
    # The talker, which the engine steps.
    decoder: TextDecoder
    # Predicts the codes of a frame after the first.
    code_predictor: CodePredictor
    # Turns codes into audio.
    vocoder: Code2Wav
    # The ids that control the talker.
    special_ids: OmniSpecialIds
    # The codes of the speakers, by lower-case name.
    speakers: dict[str, int]
    # The token that begins a turn.
    turn_start: int
    # The token after `turn_start` in the user's turns.
    user: int


def read(folder: Path, device: str, talker_device: str, dtype: torch.dtype) -> tuple[ThinkerParts, TalkerParts | None]:
    """Load a checkpoint's folder: the thinker on `device`, the talker and its vocoder on `talker_device`.

    The talker is None if config.json disables it. Takes a minute or more. Raises OSError, ValueError, KeyError or
    RuntimeError if the folder is not such a checkpoint, or is incomplete.
    """
    kind: Any = Qwen3OmniMoeForConditionalGeneration
    where = {"thinker": device, "talker": talker_device, "code2wav": talker_device}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not config.get("enable_audio_output", True):
        where = {"thinker": device}
    whole = load_whole(kind, folder, dtype=dtype, device_map=where, experts_implementation=EXPERTS)
    # The hooks move inputs to the device of each part. Here the inputs are already on it.
    remove_hook_from_submodules(whole)
    return parts_of(whole, tokenizer(folder))


def parts_of(whole: Any, words: Any) -> tuple[ThinkerParts, TalkerParts | None]:
    """Return the parts of a loaded Qwen3OmniMoeForConditionalGeneration. They share its weights.

    `words`: the tokenizer. The vocoder is converted to float32. Raises ValueError if the dimensions of the parts do not
    match.
    """
    config, thinker = whole.config, whole.thinker
    tap = int(config.talker_config.accept_hidden_layer) if whole.has_talker else 0
    num_deepstack = len(config.thinker_config.vision_config.deepstack_visual_indexes or ())
    if tap > int(config.thinker_config.text_config.num_hidden_layers) - 1:
        raise ValueError(f"its talker reads layer {tap} of a thinker that has fewer layers")
    decoder = TextDecoder(thinker.get_decoder(), thinker.lm_head, num_deepstack, tap)
    parts = ThinkerParts(thinker, decoder, words)
    return parts, _talker(whole) if whole.has_talker else None


def _talker(whole: Any) -> TalkerParts:
    config, talker = whole.config, whole.talker
    given, codes = config.talker_config, talker.code_predictor
    width = int(given.text_config.hidden_size)
    code_predictor = CodePredictor(codes.model, codes.model.codec_embedding, codes.lm_head, width)
    if int(codes.model.config.hidden_size) != width:
        raise ValueError("its code predictor is not as wide as its talker")
    vocoder = Code2Wav(config.code2wav_config)
    vocoder.load_state_dict(whole.code2wav.float().state_dict(), assign=True)
    special_ids = OmniSpecialIds(
        end=given.codec_eos_token_id,
        bos=given.codec_bos_id,
        pad=given.codec_pad_id,
        no_think=given.codec_nothink_id,
        think_bos=given.codec_think_bos_id,
        think_eos=given.codec_think_eos_id,
        text_bos=config.tts_bos_token_id,
        text_eos=config.tts_eos_token_id,
        text_pad=config.tts_pad_token_id,
    )
    return TalkerParts(
        model=talker,
        decoder=TextDecoder(talker.model, talker.codec_head),
        code_predictor=code_predictor,
        vocoder=vocoder.eval(),
        special_ids=special_ids,
        speakers={n.lower(): int(i) for n, i in (given.speaker_id or {}).items()},
        turn_start=int(config.im_start_token_id),
        user=int(config.user_token_id),
    )
