"""A Qwen3-ASR of tiny dimensions, with the files and names of the released checkpoint.

The random seed of each weight is the checksum of its name. The published package (qwen-asr 0.0.6) read the same folder
when the golden hypotheses were made.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

GOLDEN = Path(__file__).parent / "golden"
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<asr_text>",
]
FIRST = 256
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% else %}"
    "<|im_start|>user\n{% for part in m.content %}{% if part.type == 'audio' %}"
    "<|audio_start|><|audio_pad|><|audio_end|>{% endif %}{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen3ASRForConditionalGeneration"],
    "model_type": "qwen3_asr",
    "thinker_config": {
        "audio_token_id": FIRST + 5,
        "audio_start_token_id": FIRST + 3,
        "audio_config": {
            "num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
            "d_model": 32, "n_window": 50, "n_window_infer": 800, "output_dim": 64, "downsample_hidden_size": 8,
            "max_source_positions": 1500, "conv_chunksize": 500,
        },
        "text_config": {
            "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
            "rope_theta": 1000000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
    },
}  # fmt: skip


def write(folder: Path) -> Path:
    """Write the checkpoint into an existing folder, and return the folder."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    made = Tokenizer(BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.save(str(folder / "tokenizer.json"))
    named = {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE, "extra_special_tokens": named, **named,
    }))  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "sampling_rate": 16000,
        "hop_length": 160, "n_fft": 400, "chunk_length": 30, "return_attention_mask": True, "padding_value": 0.0,
    }))  # fmt: skip
    names = json.loads((GOLDEN / "qwen3_asr_names.json").read_text())
    save_file({name: weight(name, tuple(shape)) for name, shape in names.items()}, folder / "model.safetensors")
    return folder


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor of the checkpoint, float32, with a seed from its name: the same on every machine."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if "norm" in name or "ln_" in name:
        return (1.0 if name.endswith("weight") else 0.0) + 0.1 * drawn
    if name.endswith("bias"):
        return 0.05 * drawn
    if "embed_tokens" in name or "lm_head" in name:
        # Most tokens are letters, a few are bytes of incomplete characters, and the end is rare.
        ids = np.array([sorted(ByteLevel.alphabet()).index(chr(c)) for c in range(0x21, 0x7F)])
        scale = np.full(shape[0], 0.2, np.float32)
        scale[ids] = 1.0
        scale[[sorted(ByteLevel.alphabet()).index(chr(c)) for c in (0xC3, 0xA9)]] = 0.8
        scale[FIRST + 2] = 1.05
        return np.ascontiguousarray(0.7 * scale[:, None] * drawn, np.float32)
    fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else shape[0]
    louder = 4.0 if "proj2" in name else 2.2 if "thinker.model" in name else 1.3
    return np.ascontiguousarray(louder * drawn / np.sqrt(fan_in), np.float32)


def sound(seconds: int) -> np.ndarray:
    """Return speech-like audio that is louder after 9 s: float32 [16000 * seconds]."""
    rng = np.random.default_rng(5)
    t = np.arange(16000 * seconds) / 16000
    pitch = 120 + 25 * np.sin(2 * np.pi * 0.7 * t)
    phase = 2 * np.pi * np.cumsum(pitch) / 16000
    voice = sum(np.sin(k * phase + k) / k * (1 + 0.6 * np.sin(2 * np.pi * (0.3 + 0.17 * k) * t)) for k in range(1, 22))
    syllables = np.clip(np.sin(2 * np.pi * 3.3 * t + np.sin(t)), 0, None) ** 2
    level = np.where(t < 9.1, 0.05, 0.3)
    return (level * voice * syllables / 3 + 1e-7 * rng.standard_normal(len(t))).astype(np.float32)
