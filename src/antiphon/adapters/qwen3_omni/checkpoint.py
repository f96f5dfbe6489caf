"""Reads a Qwen3-Omni checkpoint: the thinker with its encoders, and the talker with its vocoder where it has them.

`transformers` loads the whole; here it is taken apart into what each engine steps and what is called between steps.
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
from antiphon.modeling.codec_talker import CodePredictor
from antiphon.modeling.omni.conversation import ThinkerParts, tokenizer
from antiphon.modeling.text_decoder import TextDecoder


@dataclass(frozen=True, slots=True)
class OmniSpecialIds:
    """The ids that control the talker: codes that are no audio, and the text tokens that begin, end and pad a text.

    `end` ends the audio. `no_think`, `think_bos` and `think_eos` stand before the speaker: the talker chooses the
    language.
    """

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
class TalkerParts:
    """The voice on its device.

    `model`: a Qwen3OmniMoeTalkerForConditionalGeneration, for its projections. `decoder`: the talker, which the engine
    steps. `speakers`: lower-case names to codes. `turn_start`, `user`: the tokens that begin a turn, and that make it
    the user's.
    """

    model: Any
    decoder: TextDecoder
    code_predictor: CodePredictor
    vocoder: Code2Wav
    special_ids: OmniSpecialIds
    speakers: dict[str, int]
    turn_start: int
    user: int


def read(folder: Path, device: str, talker_device: str, dtype: torch.dtype) -> tuple[ThinkerParts, TalkerParts | None]:
    """Load a checkpoint's folder: the thinker on one device, the talker and its vocoder on another or the same.

    There is no talker where config.json switches it off. Waits for a minute and more. Raises OSError, ValueError,
    KeyError or RuntimeError for a folder that is no such checkpoint, or lacks something.
    """
    kind: Any = Qwen3OmniMoeForConditionalGeneration
    where = {"thinker": device, "talker": talker_device, "code2wav": talker_device}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not config.get("enable_audio_output", True):
        where = {"thinker": device}
    whole = kind.from_pretrained(folder, dtype=dtype, local_files_only=True, device_map=where).eval()
    # The hooks move a part's inputs to its device; here each part is given its inputs where it is.
    remove_hook_from_submodules(whole)
    return parts_of(whole, tokenizer(folder))


def parts_of(whole: Any, words: Any) -> tuple[ThinkerParts, TalkerParts | None]:
    """Return the parts of a loaded Qwen3OmniMoeForConditionalGeneration, which they share the weights of.

    `words`: the tokenizer. The vocoder is converted to float32. Raises ValueError for dimensions that do not fit.
    """
    config, thinker = whole.config, whole.thinker
    tap = int(config.talker_config.accept_hidden_layer) if whole.has_talker else 0
    num_deepstack = len(config.thinker_config.vision_config.deepstack_visual_indexes or ())
    if tap > int(config.thinker_config.text_config.num_hidden_layers) - 1:
        raise ValueError(f"its talker wants layer {tap} of a thinker that has fewer")
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
