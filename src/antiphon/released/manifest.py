"""The manifests of released checkpoints: what a release's folder contains, by files, configuration and tensors.

`releases/` has a JSON file for each release, with the sources of its facts. `families.json` has what the releases of
one architecture share: which part of a configuration counts the layers of which tensors, and which tensors are not
read. `unread_fields.json` has the fields of configurations that are not read, with the reasons. All are data, and
nothing here reads a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from itertools import product

import msgspec

# A value of a configuration. A list is kept as its JSON text.
Scalar = str | int | float | bool | None
# A configuration's values by their dotted names, such as "talker_config.hidden_size".
Fields = Mapping[str, Scalar]
# A range or a list of numbers in a tensor's name: {0..27} or {0,2,5}.
NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}|\{(\d+(?:,\d+)*)\}")


class TensorPattern(msgspec.Struct, frozen=True):
    """Tensors of one shape and one dtype. `name` contains ranges of numbers, such as `layers.{0..27}.weight`.

    `dtype`: its name in safetensors. The tensors of a subfolder begin with its name and a slash.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class ReleaseFile(msgspec.Struct, frozen=True):
    """A file of a release. `size` in bytes and `sha256` in hex are 0 and "" if no source states them."""

    name: str
    size: int = 0
    sha256: str = ""


class SessionLoad(msgspec.Struct, frozen=True):
    """What one session holds in the memory tables.

    `load`: in words. `rows`: the rows of each decoder. `slot_bytes`: the bytes of a slot in a vocoder.
    """

    load: str
    rows: tuple[int, ...]
    slot_bytes: int = 0


class Decoder(msgspec.Struct, frozen=True, kw_only=True):
    """A part that has KV, and the fields of its section of the configuration that say how much."""

    # The section's dotted name. "": the top level.
    at: str = ""
    # The number of layers.
    layers: str = "num_hidden_layers"
    # The number of KV heads of each layer.
    kv_heads: str = "num_key_value_heads"
    # The number of heads of each layer, if the configuration does not state the width of a head.
    heads: str = "num_attention_heads"
    # The width of the layers, likewise.
    width: str = "hidden_size"
    # The width of a head.
    head_width: str = "head_dim"


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What the releases of one architecture share."""

    # The architecture's name.
    title: str
    # Prefixes of tensors, up to the layer's number, and the field of the configuration that counts these layers.
    layers: dict[str, str] = {}
    # Tensors whose first dimension is a field of the configuration: the size of a vocabulary.
    vocabularies: dict[str, str] = {}
    # Prefixes of tensors that compute in float32. All others have two bytes on a GPU.
    float32: tuple[str, ...] = ()
    # Number of weights in float32 that are in other files than those of the tensors.
    beside_parameters: int = 0
    # Prefixes of tensors that no part of the adapter reads.
    unread: tuple[str, ...] = ()
    # The parts that have KV.
    decoders: tuple[Decoder, ...] = (Decoder(),)
    # The numbers that apply if a configuration leaves the field out.
    defaults: dict[str, int] = {}
    # What one session holds in the memory tables.
    session: SessionLoad | None = None
    # Files that the adapter reads in addition to the weights. Of names joined by "|", one is enough.
    needs: tuple[str, ...] = ()
    # Subfolders that have weights of their own.
    parts: tuple[str, ...] = ()
    # Further arguments of the command that serves such a model.
    flags: tuple[str, ...] = ()


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of one released checkpoint."""

    # The name for `antiphon pull` and in reports.
    id: str
    # The repository of the hub.
    repository: str
    # The commit or branch of the repository that the facts describe.
    revision: str = "main"
    # The files of the folder.
    files: tuple[ReleaseFile, ...]
    # config.json as released.
    config: msgspec.Raw
    # Other JSON files as released, by their names.
    beside: dict[str, msgspec.Raw] = {}
    # The tensors in all files.
    tensors: tuple[TensorPattern, ...]
    # The ids of the tokenizer's special tokens.
    special_tokens: dict[str, int] = {}
    # Prefixes of tensors that the adapter does not read in this release, in addition to the family's.
    unread: tuple[str, ...] = ()
    # Where the facts come from, by a short name.
    sources: dict[str, str] = {}
    # The names of the sources of each group of facts. A group with one name has one source.
    facts: dict[str, tuple[str, ...]] = {}
    # Further facts that only one source states.
    single_source: tuple[str, ...] = ()

    @property
    def fields(self) -> Fields:
        """The values of config.json by dotted names."""
        return flat(bytes(self.config))

    @property
    def model_type(self) -> str:
        """The `model_type` of config.json, which names the family."""
        return str(self.fields["model_type"])


@cache
def families() -> Mapping[str, Family]:
    """Return the families by the `model_type` of their configurations."""
    return msgspec.json.decode((files(__package__) / "families.json").read_bytes(), type=dict[str, Family])


@cache
def releases() -> Mapping[str, Release]:
    """Return the manifests of all releases by id, in the order of their files' names."""
    paths = sorted((p for p in (files(__package__) / "releases").iterdir() if p.name.endswith(".json")), key=str)
    found = (msgspec.json.decode(path.read_bytes(), type=Release) for path in paths)
    return {release.id: release for release in found}


@cache
def unread_fields(model_type: str, *, shared: bool = True) -> Mapping[str, str]:
    """Return patterns of the fields of config.json that nothing reads here, with the reason: `*` stands for any text.

    `shared`: with those of all families.
    """
    listed = msgspec.json.decode(
        (files(__package__) / "unread_fields.json").read_bytes(), type=dict[str, dict[str, list[str]]]
    )
    chosen = [listed.get(model_type, {}), *([listed[""]] if shared else [])]
    return {pattern: reason for part in chosen for reason, patterns in part.items() for pattern in patterns}


def flat(text: bytes) -> Fields:
    """Return the values of a JSON object by dotted names. Raises ValueError if `text` is no JSON object."""
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise ValueError("it is no JSON object")
    return dict(_leaves("", decoded))


def _leaves(prefix: str, value: object) -> Iterator[tuple[str, Scalar]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), inner)
    elif isinstance(value, str | int | float | bool) or value is None:
        yield prefix, value
    else:
        yield prefix, msgspec.json.encode(value).decode()


def expanded(pattern: str, counts: Mapping[str, int] | None = None) -> Iterator[str]:
    """Yield the names that a pattern stands for.

    `counts`: the number of layers by the text before the range, which replaces the range's own numbers. An earlier
    range in that text is a star.
    """
    parts, ranges, at, before = list[str](), list[list[str]](), 0, ""
    for found in NUMBERS.finditer(pattern):
        parts.append(pattern[at : found.start()])
        first, last, listed = found.groups()
        numbers = [int(n) for n in listed.split(",")] if listed else list(range(int(first), int(last) + 1))
        count = (counts or {}).get(before + parts[-1])
        if count is not None:
            # A list of some layers keeps those that exist.
            numbers = [n for n in numbers if n < count] if listed else list(range(int(first), count))
        ranges.append([str(n) for n in numbers])
        before, at = f"{before}{parts[-1]}*", found.end()
    for chosen in product(*ranges):
        yield "".join(part + number for part, number in zip(parts, chosen, strict=True)) + pattern[at:]
