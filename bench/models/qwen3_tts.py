"""Qwen3-TTS with voices of its own (CustomVoice)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from bench.models.weights import filled, made_tokenizer, write_tokenizer
from tests.adapters import tiny_qwen3_tts as tiny
from tokenizers import Tokenizer

from antiphon.adapters.qwen3_tts.checkpoint import END, Qwen3TtsConfig, SpeechTokenizerConfig, build
from antiphon.adapters.qwen3_tts.synthesizer import Qwen3Tts
from antiphon.adapters.spec import EngineModelOptions
from antiphon.engine.local.weights import weights_for
from antiphon.modeling.codec_talker import DEFAULT_CODEC_SAMPLING
from antiphon.modeling.tokens import Vocabulary

# Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice, config.json; the vocoder as the published package (qwen-tts 0.1.1) has it by
# default. The 1.7B has a wider talker.
DECODER = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 32768,
}
TALKER = (
    tiny.TALKER
    | DECODER
    | {
        "vocab_size": 3072,
        "num_code_groups": 16,
        "text_hidden_size": 2048,
        "text_vocab_size": 152064,
        "codec_eos_token_id": 2150,
        "codec_bos_id": 2149,
        "codec_pad_id": 2148,
        "codec_think_id": 2154,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "code_predictor_config": DECODER | {"num_hidden_layers": 5, "vocab_size": 2048, "num_code_groups": 16},
    }
)
IDS = {f"tts_{name}_token_id": 151671 + i for i, name in enumerate(("pad", "bos", "eos"))}
VOCODER = {
    "codebook_size": 2048,
    "codebook_dim": 512,
    "hidden_size": 1024,
    "latent_dim": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "sliding_window": 72,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_quantizers": 16,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "decoder_dim": 1536,
}
# Each size: config.json, and the vocoder's configuration.
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny": (tiny.config("custom_voice"), tiny.VOCODER),
    "0.6B": (tiny.config("custom_voice") | {"talker_config": TALKER} | IDS, VOCODER),
    "1.7B": (
        tiny.config("custom_voice")
        | {"talker_config": TALKER | {"hidden_size": 2048, "intermediate_size": 6144}}
        | IDS,
        VOCODER,
    ),
}


def synthesizer(size: str, options: EngineModelOptions, words: Tokenizer | None = None) -> Qwen3Tts:
    """Return the model of a size of SIZES. `words`: a tokenizer of its family; None: one that is made here."""
    torch.manual_seed(0)
    where, dtype = torch.device(options.device), weights_for(options.device, options.weights)[1]
    if words is None:
        words = made_tokenizer(tiny.SPECIAL, tiny.WORDS, trained=size != "tiny")
    else:
        words.add_special_tokens(tiny.SPECIAL)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(words, Path(folder), END)
        vocabulary = Vocabulary(Path(folder), END)
    given, vocoder = SIZES[size]
    samples = tiny.FRAME_SAMPLES if size == "tiny" else 1920
    sound = {"decoder_config": vocoder, "decode_upsample_rate": samples, "output_sample_rate": 24000}
    config, tokenizer = msgspec.convert(given, Qwen3TtsConfig), msgspec.convert(sound, SpeechTokenizerConfig)
    parts = build(config, None, tokenizer, vocabulary, DEFAULT_CODEC_SAMPLING)
    for module in (parts.decoder, parts.text_embedding, parts.text_projection, parts.code_predictor):
        filled(module, where, dtype)
    filled(parts.vocoder, where, torch.float32)
    return Qwen3Tts(parts, f"qwen3-tts-{size.lower()}", options)
