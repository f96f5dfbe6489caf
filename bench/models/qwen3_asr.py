"""Qwen3-ASR."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from bench.models.weights import filled, made_tokenizer, write_tokenizer
from tests.adapters import tiny_qwen3_asr as tiny
from tokenizers import Tokenizer
from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration

from antiphon.adapters.qwen3_asr.audio_encoder import WindowedAudioEncoder
from antiphon.adapters.qwen3_asr.checkpoint import END, Qwen3AsrParts
from antiphon.adapters.qwen3_asr.transcriber import Qwen3Asr
from antiphon.adapters.spec import EngineModelOptions
from antiphon.engine.local.weights import weights_for
from antiphon.modeling.text_decoder import TextDecoder
from antiphon.modeling.tokens import Vocabulary

TEXT = {
    "vocab_size": 152064,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
}
# Each size: `audio_config` and `text_config`. Qwen/Qwen3-ASR-0.6B and -1.7B, config.json.
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny": (
        dict(tiny.CONFIG["thinker_config"]["audio_config"]),
        {
            k: v
            for k, v in tiny.CONFIG["thinker_config"]["text_config"].items()
            if k not in ("rope_theta", "rope_scaling")
        },
    ),
    "0.6B": (
        {
            "num_mel_bins": 128,
            "encoder_layers": 18,
            "encoder_attention_heads": 14,
            "encoder_ffn_dim": 3584,
            "d_model": 896,
            "output_dim": 1024,
        },
        TEXT,
    ),
    "1.7B": (
        {
            "num_mel_bins": 128,
            "encoder_layers": 24,
            "encoder_attention_heads": 16,
            "encoder_ffn_dim": 4096,
            "d_model": 1024,
            "output_dim": 2048,
        },
        TEXT | {"hidden_size": 2048, "intermediate_size": 6144},
    ),
}
# Sound that is something like speech, float32 [16000 * seconds].
sound = tiny.sound


def transcriber(size: str, options: EngineModelOptions, words: Tokenizer | None = None) -> Qwen3Asr:
    """Return the model of a size of SIZES. `words`: a tokenizer of its family; None: one that is made here."""
    torch.manual_seed(0)
    audio, text = SIZES[size]
    dtype, whole = weights_for(options.device, options.weights)[1], Qwen3ASRForConditionalGeneration
    with init_empty_weights(include_buffers=False):
        model: Any = whole(Qwen3ASRConfig(audio_config=audio, text_config=text | {"tie_word_embeddings": False}))
    filled(model, torch.device(options.device), dtype)
    # The head is the table of embeddings.
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    if words is None:
        words = made_tokenizer(tiny.SPECIAL, trained=size != "tiny")
    else:
        words.add_special_tokens(tiny.SPECIAL)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(words, Path(folder), END)
        vocabulary = Vocabulary(Path(folder), END)
    # Random weights say an end as seldom as anything else.
    decoder = TextDecoder(model.model.language_model, model.lm_head)
    parts = Qwen3AsrParts(vocabulary, WindowedAudioEncoder(model.model), decoder)
    return Qwen3Asr(parts, f"qwen3-asr-{size.lower()}", options)
