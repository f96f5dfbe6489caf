"""A Qwen3-Omni checkpoint's folder: the thinker with its eyes and ears, and where it has them the talker and what makes sound of its codes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_submodules
from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

from antiphon.adapters.qwen3_omni.code2wav import Code2Wav
from antiphon.modeling.codec_talker import CodePredictor
from antiphon.modeling.text_decoder import TextDecoder

# Of its sound.
RATE_HZ = 24_000
TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class OmniSpecialIds:
    """Ids that are no sound: of the talker's codes, and of the text."""

    end: int
    bos: int
    pad: int
    no_think: int
    think_bos: int
    think_eos: int
    text_bos: int
    text_eos: int
    text_pad: int


@dataclass(frozen=True, slots=True)
class ThinkerParts:
    """`model`: a Qwen3OmniMoeThinkerForConditionalGeneration, for its encoders; `decoder`: its text model, for the engine."""

    model: Any
    decoder: TextDecoder
    tokenizer: Any


@dataclass(frozen=True, slots=True)
class TalkerParts:
    """`model`: a Qwen3OmniMoeTalkerForConditionalGeneration, for its projections; `speakers`: names to codes; `roles`: tokens that begin a
    turn, and that say whose it is: the user's."""

    model: Any
    decoder: TextDecoder
    inner: CodePredictor
    vocoder: Code2Wav
    marks: OmniSpecialIds
    speakers: dict[str, int]
    roles: tuple[int, int]


def read(folder: Path, device: str, speaking: str, dtype: torch.dtype) -> tuple[ThinkerParts, TalkerParts | None]:
    """Load it: the thinker on one device, the talker on another or the same. Raises OSError, ValueError, KeyError, RuntimeError."""
    kind: Any = Qwen3OmniMoeForConditionalGeneration
    where = {"thinker": device, "talker": speaking, "code2wav": speaking}
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not given.get("enable_audio_output", True):
        where = {"thinker": device}
    whole = kind.from_pretrained(folder, dtype=dtype, local_files_only=True, device_map=where).eval()
    # Each part is given what it computes with where it is.
    remove_hook_from_submodules(whole)
    return parts_of(whole, tokenizer(folder))


def parts_of(whole: Any, words: Any) -> tuple[ThinkerParts, TalkerParts | None]:
    """The parts of a loaded Qwen3OmniMoeForConditionalGeneration. Raises ValueError for dimensions that do not fit."""
    config, thinker = whole.config, whole.thinker
    tap = int(config.talker_config.accept_hidden_layer) if whole.has_talker else 0
    deep = len(config.thinker_config.vision_config.deepstack_visual_indexes or ())
    if tap > int(config.thinker_config.text_config.num_hidden_layers) - 1:
        raise ValueError(f"its talker wants layer {tap} of a thinker that has fewer")
    decoder = TextDecoder(thinker.model.language_model, thinker.lm_head, deep, tap)
    thinking = ThinkerParts(thinker, decoder, words)
    return thinking, _talker(whole) if whole.has_talker else None


def _talker(whole: Any) -> TalkerParts:
    config, talker = whole.config, whole.talker
    given, codes = config.talker_config, talker.code_predictor
    width = int(given.text_config.hidden_size)
    inner = CodePredictor(codes.model, codes.model.codec_embedding, codes.lm_head, width)
    if int(codes.model.config.hidden_size) != width:
        raise ValueError("its code predictor is not as wide as its talker")
    vocoder = Code2Wav(config.code2wav_config)
    vocoder.load_state_dict(whole.code2wav.float().state_dict(), assign=True)
    marks = OmniSpecialIds(
        given.codec_eos_token_id,
        given.codec_bos_id,
        given.codec_pad_id,
        given.codec_nothink_id,
        given.codec_think_bos_id,
        given.codec_think_eos_id,
        config.tts_bos_token_id,
        config.tts_eos_token_id,
        config.tts_pad_token_id,
    )
    speakers = {n.lower(): int(i) for n, i in (given.speaker_id or {}).items()}
    roles = (int(config.im_start_token_id), int(config.user_token_id))
    return TalkerParts(
        talker, TextDecoder(talker.model, talker.codec_head), inner, vocoder.eval(), marks, speakers, roles
    )


def tokenizer(folder: Path) -> Any:
    """Its tokenizer, with its chat template. Raises OSError, ValueError."""
    made: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for name in TEMPLATES if not made.chat_template else ():
        # As released, the template is beside the tokenizer.
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8")
            made.chat_template = json.loads(text)["chat_template"] if name.endswith(".json") else text
    if not made.chat_template:
        raise ValueError(f"it lacks a chat template ({', '.join(TEMPLATES)})")
    return made
