"""Makes the folders of released checkpoints from their manifests: all names, shapes and shards, in sparse files.

Tensors are zero, which takes no space on the disk, or have small random values if a model computes with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.released import Release, families
from antiphon.released.comparison import expected_tensors
from antiphon.released.headers import DTYPE_BYTES, INDEX, WHOLE, StoredTensor
from antiphon.released.manifest import flat

# The size at which a release's weights are split into shards, as when they were saved.
SHARD_BYTES = 5_000_000_000
# The form of a chat in Qwen's models.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The largest number of values that are drawn; longer tensors repeat them.
DRAWN = 1 << 16


def config_of(release: Release, layers: int | None = None) -> Any:
    """Return a release's config.json; `layers`: the number of layers of each stack, if not all."""
    config = json.loads(bytes(release.config))
    for name in families()[release.model_type].layers.values() if layers is not None else ():
        *path, leaf = name.split(".")
        section = config
        for key in path:
            section = section.get(key, {})
        if leaf in section:
            section[leaf] = min(section[leaf], layers)
            for key in ("layer_types",):
                if section.get(key):
                    section[key] = section[key][: section[leaf]]
    return config


def write_release(
    folder: Path,
    release: Release,
    *,
    layers: int | None = None,
    values: bool = False,
    change: Callable[[dict[str, StoredTensor]], None] | None = None,
    config: Any = None,
    words: bool = True,
) -> Path:
    """Write a release's folder and return it.

    `layers`: layers of each stack. `values`: small random numbers instead of zeros. `change`: changes the tensors
    before they are written. `config`: another config.json. `words`: with a tokenizer
    that has the release's ids, which takes a second; otherwise its files are there, and empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = config or config_of(release, layers)
    (folder / "config.json").write_text(json.dumps(config))
    for name, text in release.beside.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes(text))
    tensors = expected_tensors(families()[release.model_type], release, flat(json.dumps(config).encode()))
    if change:
        change(tensors)
    if words:
        _write_tokenizer(folder, release)
    else:
        for name in ("tokenizer.json", "chat_template.json"):
            (folder / name).write_text("{}")
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    parts: dict[str, dict[str, StoredTensor]] = {"": {}}
    for name, tensor in tensors.items():
        part, _, inner = name.rpartition("/")
        parts.setdefault(part, {})[inner] = tensor
    for part, inside in parts.items():
        _write_part(folder / part, inside, values=values)
    return folder


def _write_part(folder: Path, tensors: Mapping[str, StoredTensor], *, values: bool) -> None:
    folder.mkdir(exist_ok=True)
    shards: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.num_bytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.num_bytes
    if len(shards) == 1:
        write_file(folder / WHOLE, shards[0], values=values)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(folder / name, shard, values=values)
        weight_map |= dict.fromkeys(shard, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_file(path: Path, tensors: Mapping[str, StoredTensor], *, values: bool = False) -> None:
    """Write one safetensors file, sparse where the values are zero."""
    entries, at = {}, 0
    for name, tensor in tensors.items():
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + tensor.num_bytes]}
        at += tensor.num_bytes
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in tensors.items() if values else ():
            file.seek(8 + len(header) + entries[name]["data_offsets"][0])
            file.write(_drawn(name, tensor))
        file.truncate(8 + len(header) + at)


def _drawn(name: str, tensor: StoredTensor) -> bytes:
    """Return a tensor's bytes: ones for the scales of norms, and small random numbers for the others."""
    count = tensor.num_elements
    if "norm" in name.rpartition(".")[0].rpartition(".")[2] and name.endswith("weight"):
        drawn = np.ones(min(count, DRAWN), np.float32)
    else:
        # Tensors of one size are equal, because some releases have the embedding table twice.
        drawn = np.random.default_rng(count).standard_normal(min(count, DRAWN)).astype(np.float32) * 0.02
    if DTYPE_BYTES[tensor.dtype] == 2:
        drawn = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    return np.resize(drawn, count).tobytes()


def _write_tokenizer(folder: Path, release: Release) -> None:
    """Write a tokenizer of single bytes with the release's special tokens at their ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    special = {token: i for token, i in release.special_tokens.items() if "*" not in token}
    alphabet = sorted(ByteLevel.alphabet())
    least = min((i for i in special.values() if i > 300), default=300)
    vocab = {c: 100 + i for i, c in enumerate(alphabet)}
    vocab |= {f"\u0120x{i}": i for i in range(least) if i not in set(vocab.values()) | set(special.values())}
    words = Tokenizer(BPE(vocab=vocab | special, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([AddedToken(token, special=True) for token in special])
    words.save(str(folder / "tokenizer.json"))
    end = next((t for t in ("<|im_end|>", "<end_of_utterance>") if t in special), None)
    added = {str(i): {"content": token, "special": True} for token, i in special.items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "added_tokens_decoder": added}
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
