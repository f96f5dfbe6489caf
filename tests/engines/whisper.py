"""Whisper's checkpoint in the form of transformers, made of the CTranslate2 files that antiphon has.

The registries have no other weights of Whisper.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

# From CTranslate2's source: the types of a variable, by number.
TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
# The attention's names in transformers, and the matrices that CTranslate2 joins into each `linear_N`.
SELF = (("q_proj", "k_proj", "v_proj"), ("out_proj",))
CROSS = (("q_proj",), ("k_proj", "v_proj"), ("out_proj",))


def variables(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Return the variables of a `model.bin` of version 6, by name."""
    data, at = path.read_bytes(), 0

    def read(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return int(value)

    def text() -> str:
        nonlocal at
        size = read("H")
        found = data[at : at + size - 1].decode()
        at += size
        return found

    assert read("I") == 6, "another version of the file"
    text(), read("I")
    for _ in range(read("I")):
        name = text()
        shape = [read("I") for _ in range(read("B"))]
        kind, size = TYPES[read("B")], read("I")
        yield name, np.frombuffer(data, kind, size // np.dtype(kind).itemsize, at).reshape(shape)
        at += size


def state(found: dict[str, np.ndarray], layers: int) -> Iterator[tuple[str, np.ndarray]]:
    """Return the variables by their names in transformers."""

    def norm(ours: str, theirs: str) -> Iterator[tuple[str, np.ndarray]]:
        yield f"{theirs}.weight", found[f"{ours}/gamma"]
        yield f"{theirs}.bias", found[f"{ours}/beta"]

    def attention(ours: str, theirs: str, joined: tuple[tuple[str, ...], ...]) -> Iterator[tuple[str, np.ndarray]]:
        for number, names in enumerate(joined):
            for kind in ("weight", "bias"):
                parts = np.split(found[f"{ours}/linear_{number}/{kind}"], len(names))
                for name, part in zip(names, parts, strict=True):
                    if (name, kind) != ("k_proj", "bias"):
                        yield f"{theirs}.{name}.{kind}", part

    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", found[f"{side}/position_encodings/encodings"]
        yield from norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for layer in range(layers):
            ours, theirs = f"{side}/layer_{layer}", f"model.{side}.layers.{layer}"
            yield from norm(f"{ours}/self_attention/layer_norm", f"{theirs}.self_attn_layer_norm")
            yield from attention(f"{ours}/self_attention", f"{theirs}.self_attn", SELF)
            if side == "decoder":
                yield from norm(f"{ours}/attention/layer_norm", f"{theirs}.encoder_attn_layer_norm")
                yield from attention(f"{ours}/attention", f"{theirs}.encoder_attn", CROSS)
            yield from norm(f"{ours}/ffn/layer_norm", f"{theirs}.final_layer_norm")
            for number in (0, 1):
                for kind in ("weight", "bias"):
                    yield f"{theirs}.fc{number + 1}.{kind}", found[f"{ours}/ffn/linear_{number}/{kind}"]
    for number in (1, 2):
        for kind in ("weight", "bias"):
            yield f"model.encoder.conv{number}.{kind}", found[f"encoder/conv{number}/{kind}"]
    yield "model.decoder.embed_tokens.weight", found["decoder/embeddings/weight"]


def made(source: Path, folder: Path) -> None:
    """Write Whisper base, multilingual, into a folder, of the files in `source`."""
    found = {name: value.astype(np.float32) for name, value in variables(source / "model.bin")}
    vocabulary, width = found["decoder/embeddings/weight"].shape
    layers = sum(name.startswith("encoder/layer_") and name.endswith("ffn/linear_0/bias") for name in found)
    heads, inner = width // 64, len(found["encoder/layer_0/ffn/linear_0/bias"])
    mels = found["encoder/conv1/weight"].shape[1]
    config = WhisperConfig(
        vocab_size=vocabulary,
        num_mel_bins=mels,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=inner,
        decoder_ffn_dim=inner,
        bos_token_id=50257,
        eos_token_id=50257,
        pad_token_id=50257,
        decoder_start_token_id=50258,
        torch_dtype="float32",
    )
    model = WhisperForConditionalGeneration(config)
    named = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in state(found, layers)}
    missing, unexpected = model.load_state_dict(named, strict=False)
    # The last matrix is that of the embeddings.
    assert set(missing) <= {"proj_out.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=mels).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    settings = {"tokenizer_class": "WhisperTokenizerFast", "model_max_length": 448, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
