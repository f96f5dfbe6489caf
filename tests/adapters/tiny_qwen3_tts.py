"""A Qwen3-TTS of tiny dimensions, with the files and names of the released checkpoint.

The random seed of each weight is the checksum of its name. The published package (qwen-tts 0.1.1) read the same folder
when the golden codes and audio were made.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

GOLDEN = Path(__file__).parent / "golden"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"]
# Words that are one token each, as in the released tokenizer: the published code splits prompts by token counts.
WORDS = ["assistant", "user"]
FIRST = 256
CODES, GROUPS = 128, 4
VOCODER = {
    "codebook_size": CODES,
    "codebook_dim": 16,
    "hidden_size": 32,
    "latent_dim": 24,
    "max_position_embeddings": 800,
    "rope_theta": 10000,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "sliding_window": 6,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_quantizers": GROUPS,
    "upsample_rates": [4, 2],
    "upsampling_ratios": [2, 2],
    "decoder_dim": 16,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_scale_initial_scale": 0.01,
}
FRAME_SAMPLES = 32
TALKER = {
    "vocab_size": CODES + 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "num_code_groups": GROUPS,
    "text_hidden_size": 48,
    "text_vocab_size": 272,
    "rope_scaling": {"rope_type": "default", "interleaved": True, "mrope_section": [4, 2, 2]},
    "codec_bos_id": 140,
    "codec_pad_id": 141,
    "codec_eos_token_id": 142,
    "codec_think_id": 143,
    "codec_nothink_id": 144,
    "codec_think_bos_id": 145,
    "codec_think_eos_id": 146,
    "codec_language_id": {"english": 210, "chinese": 211, "german": 212, "sichuan_dialect": 213},
    "spk_id": {"ada": 200, "eric": 201},
    "spk_is_dialect": {"ada": False, "eric": "sichuan_dialect"},
    "code_predictor_config": {
        "vocab_size": CODES,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "num_code_groups": GROUPS,
    },
}
# The attention window is longer than the sample, so that it has no effect. The published code (transformers 4.57, sdpa)
# ignores the window, and `transformers` 5 applies it.
ENCODER = {
    "hidden_size": 16,
    "num_filters": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "codebook_size": CODES,
    "codebook_dim": 8,
    "vector_quantization_hidden_dimension": 8,
    "num_quantizers": 6,
    "num_semantic_quantizers": 1,
    "upsampling_ratios": [2, 2, 2, 2],
    "upsample_groups": 16,
    "sampling_rate": 24000,
    "frame_rate": 750.0,
    "sliding_window": 2000,
    "max_position_embeddings": 2000,
}
SPEAKER = {
    "mel_dim": 128,
    "enc_dim": 64,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 8,
    "enc_res2net_scale": 4,
    "enc_se_channels": 8,
    "sample_rate": 24000,
}


def config(kind: str) -> dict[str, Any]:
    """Return the config.json of a checkpoint of this kind: custom_voice, voice_design or base."""
    voices = {} if kind == "custom_voice" else {"spk_id": {}, "spk_is_dialect": {}}
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "1b7",
        "tts_model_type": kind,
        "im_start_token_id": FIRST + 1,
        "im_end_token_id": FIRST + 2,
        "assistant_token_id": FIRST + 6,
        "tts_pad_token_id": FIRST + 3,
        "tts_bos_token_id": FIRST + 4,
        "tts_eos_token_id": FIRST + 5,
        "talker_config": TALKER | voices,
        "speaker_encoder_config": SPEAKER,
    }


def write(folder: Path, kind: str = "custom_voice") -> Path:
    """Write the checkpoint into an existing folder, and return the folder."""
    (folder / "config.json").write_text(json.dumps(config(kind)))
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        )
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "repetition_penalty": 1.05, "subtalker_dosample": False})
    )
    names = json.loads((GOLDEN / "qwen3_tts_names.json").read_text())
    save_file({n: weight(n, tuple(s)) for n, s in names["model"].items()}, folder / "model.safetensors")
    where = folder / "speech_tokenizer"
    where.mkdir()
    (where / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen3_tts_tokenizer_12hz",
                "decoder_config": VOCODER,
                "encoder_config": ENCODER,
                "output_sample_rate": 24000,
                "input_sample_rate": 24000,
                "decode_upsample_rate": FRAME_SAMPLES,
                "encode_downsample_rate": FRAME_SAMPLES,
                "encoder_valid_num_quantizers": GROUPS,
            }
        )
    )
    save_file({n: weight(n, tuple(s)) for n, s in names["vocoder"].items()}, where / "model.safetensors")
    return folder


def tokenizer() -> Tokenizer:
    """Return a tokenizer of single bytes, the special tokens, and WORDS."""
    made = Tokenizer(BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return made


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor of the checkpoint, float32, with a seed from its name: the same on every machine."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if "norm" in name:
        return (1.0 if name.endswith("weight") else 0.0) + 0.1 * drawn
    if name.endswith((".alpha", ".beta", "bias")):
        return 0.1 * drawn
    if name.endswith((".scale", ".gamma")):
        return 0.3 + 0.1 * drawn
    if name.endswith("initialized"):
        return np.ones(shape, np.float32)
    if name.endswith("cluster_usage"):
        return 1.0 + np.abs(drawn)
    if "embed" in name:
        return 0.7 * drawn
    fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else shape[0]
    loud = {"talker.model": 2.2, "encoder.": 1.6, "talker": 1.3}
    louder = next((by for start, by in loud.items() if name.startswith(start)), 0.6)
    out = louder * drawn / np.sqrt(fan_in)
    if name == "talker.codec_head.weight":
        # Make the end slightly likelier.
        out[TALKER["codec_eos_token_id"]] *= 1.25
    return np.ascontiguousarray(out, np.float32)


def reference() -> np.ndarray:
    """Return a second of a voice: float32 [24000], 24 kHz."""
    t = np.arange(24000) / 24000
    phase = 2 * np.pi * np.cumsum(170 + 20 * np.sin(6 * t)) / 24000
    return (0.2 * sum(np.sin(k * phase) / k for k in range(1, 12)) * np.clip(np.sin(20 * t), 0, None)).astype(
        np.float32
    )


def reference_codes() -> list[list[int]]:
    """Return codes as an encoder might return them for the reference: 7 frames."""
    return np.random.default_rng(9).integers(0, CODES, (7, GROUPS)).tolist()
