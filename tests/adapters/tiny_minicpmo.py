"""A MiniCPM-o 4.5 of tiny dimensions, with the files and names of the released checkpoint.

The random seed of each weight is the checksum of its name. The published code read the same folder when the golden
numbers were made.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from antiphon.audio.wav import wav_header
from tests.adapters import tiny_token2wav

GOLDEN = Path(__file__).parent / "golden"
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<unk>",
    "<image>",
    "</image>",
    "<slice>",
    "</slice>",
    "<image_id>",
    "</image_id>",
    "<unit>",
    "</unit>",
    "<|audio_start|>",
    "<|audio|>",
    "<|audio_end|>",
    "<|spk_bos|>",
    "<|spk|>",
    "<|spk_eos|>",
    "<|tts_bos|>",
    "<|tts_eos|>",
    "<|listen|>",
    "<|speak|>",
    "<|interrupt|>",
    "<|vad_start|>",
    "<|vad_end|>",
    "<|turn_bos|>",
    "<|turn_eos|>",
    "<|chunk_eos|>",
    "<|chunk_bos|>",
    "<|chunk_tts_bos|>",
    "<|chunk_tts_eos|>",
    "<|tts_pad|>",
]
FIRST_SPECIAL = 256
# Factors for the rows of these tokens in the head. They make the tokens likelier than bytes, so that all decisions
# occur within a few units.
HEAD_FACTORS = {
    "<|listen|>": -3.42,
    "<|speak|>": 2.78,
    "<|chunk_eos|>": 1.215,
    "<|turn_eos|>": 2.3,
    "<|chunk_tts_eos|>": 1.15,
}
# A further factor of the row that ends a turn: after every second word, on average, no other token is as likely.
BRIEF_FACTOR = 5.0
CONFIG = {
    "architectures": ["MiniCPMO"],
    "model_type": "minicpmo",
    "version": "4.5",
    "vocab_size": 304,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "query_num": 16,
    "drop_vision_last_layer": False,
    "audio_pool_step": 5,
    "audio_chunk_length": 1.0,
    "slice_config": {"max_slice_nums": 1, "patch_size": 14, "scale_resolution": 448, "model_type": "minicpmv"},
    "vision_config": {
        "hidden_size": 48,
        "image_size": 980,
        "intermediate_size": 96,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "patch_size": 14,
    },
    "audio_config": {
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 256,
        "num_mel_bins": 80,
        "max_source_positions": 400,
        "model_type": "whisper",
        "activation_function": "gelu",
        "decoder_layers": 1,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "vocab_size": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "tts_config": {
        "model_type": "minicpmtts",
        "llm_dim": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
        "num_audio_tokens": 98,
        "num_text_tokens": 304,
        "num_vq": 1,
        "audio_bos_token_id": 300,
        "text_eos_token_id": 301,
        "projector_type": "mlp",
        "normalize_projected_hidden": True,
        "hidden_act": "silu",
        "audio_tokenizer_type": "s3tokenizer_step_audio",
        "backbone_model": "llama",
        "attention_type": "full_attention",
        "condition_type": "hidden_text_merge",
        "top_p": 0.7,
        "top_k": 20,
        "repetition_penalty": 1.0,
    },
}


def write(folder: Path, *, voice: bool = False, brief: bool = False) -> Path:
    """Write the checkpoint into an existing folder, and return the folder.

    With `voice`, the checkpoint has token2wav, and the model's speech is audio. With `brief`, turns end after a few
    words; otherwise one may take half a minute.
    """
    if voice:
        (folder / "assets" / "token2wav").mkdir(parents=True)
        tiny_token2wav.write(folder / "assets" / "token2wav")
        data = (sound(0) * 32767).astype("<i2").tobytes()
        (folder / "assets" / "HT_ref_audio.wav").write_bytes(wav_header(16_000, len(data)) + data)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "unk_token": "<unk>",
                "bad_token_ids": [7, 9],
            }
        )
    )
    names = json.loads((GOLDEN / "minicpmo_names.json").read_text())
    weights = {name: weight(name, tuple(shape)) for name, shape in names.items()}
    if brief:
        weights["llm.lm_head.weight"][FIRST_SPECIAL + SPECIAL.index("<|turn_eos|>")] *= BRIEF_FACTOR
    save_file(weights, folder / "model.safetensors")
    return folder


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor of the checkpoint, float32, with a seed from its name: the same on every machine."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if "norm" in name or "ln_" in name:
        return (1.0 if name.endswith("weight") else 0.0) + 0.1 * drawn
    if name.endswith("bias"):
        return 0.05 * drawn
    if "emb" in name:
        return 0.7 * drawn
    fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else shape[0]
    out = 1.3 * drawn / np.sqrt(fan_in)
    if name.endswith("original0"):
        out = 1.5 + 0.2 * np.abs(drawn)
    if name == "llm.lm_head.weight":
        out *= 2.0
        for token, factor in HEAD_FACTORS.items():
            out[FIRST_SPECIAL + SPECIAL.index(token)] *= factor
    if name == "tts.head_code.0.parametrizations.weight.original0":
        # The last code ends the audio.
        out[-1] *= 1.6
    return np.ascontiguousarray(out, np.float32)


def _tokenizer() -> Tokenizer:
    """Return a tokenizer of single bytes and the special tokens."""
    made = Tokenizer(BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return made


def sound(unit: int) -> np.ndarray:
    """Return one second of speech-like audio or, every fourth time, near silence: float32 [16000]."""
    rng = np.random.default_rng(1000 + unit)
    noise = 0.002 * rng.standard_normal(16000)
    if unit % 4 == 3:
        return noise.astype(np.float32)
    t = np.arange(16000) / 16000
    pitch = 110 + 30 * rng.random() + 20 * np.sin(2 * np.pi * 2 * t)
    phase = 2 * np.pi * np.cumsum(pitch) / 16000
    voice = sum(np.sin(k * phase) * rng.random() / k for k in range(1, 25))
    syllables = np.clip(np.sin(2 * np.pi * (3 + rng.random()) * t), 0, None)
    return (0.15 * voice * syllables + noise).astype(np.float32)


def picture(number: int) -> Image.Image:
    """Return a frame with waves of colour: 400 x 300 pixels, and 1000 x 700 from number 150 on."""
    rng = np.random.default_rng(number)
    height, width = (300, 400) if number < 150 else (700, 1000)
    y, x = np.mgrid[0:height, 0:width]
    planes = [127 + 100 * np.sin(x / (10 + 40 * rng.random()) + y / (10 + 40 * rng.random())) for _ in range(3)]
    return Image.fromarray(np.stack(planes, -1).astype(np.uint8))


# The golden run. In order: the number of units; the frames and the limit of slices by unit; the units that the client
# interrupts; the number of units at the start that only listen; the window of the context; the instructions.
NUM_UNITS = 22
FRAMES = {3: 1, 8: 2, 15: 1}
SLICES = {15: 4}
FORCED = (6, 12, 18)
FORCED_FIRST = 1
WINDOW = (330, 230)
PROMPT = "You are a helpful assistant."


def reference() -> np.ndarray:
    """Return audio of the reference voice: float32 [24000], 16 kHz, 1.5 s."""
    return np.concatenate([sound(100), sound(101)])[:24000]
