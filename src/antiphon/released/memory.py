"""The memory of a model's weights and of a session's KV on a GPU, from its tensors and its configuration. Pure.

Weights take two bytes each, and four in the parts that compute in float32. KV is bfloat16. The working memory of a step
and the memory of CUDA itself are not included. `docs/gpu.md` has the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from antiphon.released.comparison import expected_tensors
from antiphon.released.headers import StoredTensor
from antiphon.released.manifest import Decoder, Family, Fields, Release, SessionLoad

# The bytes of a key or a value, and of a weight; of a weight in float32.
HALF_BYTES, FLOAT_BYTES = 2, 4


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a model's weights and one of its sessions take."""

    # Number of weights in bfloat16.
    parameters: int
    # Number of weights in float32.
    float32_parameters: int
    # For each part that has KV (a decoder that an engine steps, or MiniCPM-o's audio encoder): its layers, KV heads and
    # head width.
    decoders: tuple[tuple[int, int, int], ...]
    # What one session holds.
    session: SessionLoad

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights on the device."""
        return HALF_BYTES * self.parameters + FLOAT_BYTES * self.float32_parameters

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """The bytes of the keys and values of one row in all layers, for each of `decoders`."""
        return tuple(2 * HALF_BYTES * layers * heads * width for layers, heads, width in self.decoders)

    @property
    def session_bytes(self) -> int:
        """The bytes of one session: its KV, and its slot in the vocoder."""
        kv = sum(count * size for count, size in zip(self.session.rows, self.row_bytes, strict=True))
        return kv + self.session.slot_bytes


def is_read(family: Family, release: Release, name: str) -> bool:
    """Return whether the adapter reads a tensor of a release."""
    return not name.startswith((*family.unread, *release.unread))


def memory_of(family: Family, release: Release) -> ModelMemory:
    """Return what a release takes."""
    return memory_of_tensors(family, release, release.fields, expected_tensors(family, release, release.fields))


def memory_of_tensors(
    family: Family, release: Release, fields: Fields, tensors: Mapping[str, StoredTensor]
) -> ModelMemory:
    """Return what a folder takes whose configuration may differ from that of its release.

    `tensors`: those that are expected in the folder. Raises ValueError if the configuration does not state the layers
    or heads of a decoder.
    """
    sizes = {False: 0, True: 0}
    for name, tensor in tensors.items():
        if is_read(family, release, name):
            sizes[name.startswith(family.float32)] += tensor.num_elements
    return ModelMemory(
        sizes[False],
        sizes[True] + family.beside_parameters,
        tuple(_shape(family, release, fields, decoder) for decoder in family.decoders),
        family.session or SessionLoad("nothing", tuple(0 for _ in family.decoders)),
    )


def _shape(family: Family, release: Release, fields: Fields, decoder: Decoder) -> tuple[int, int, int]:
    released = release.fields

    def find(name: str) -> int | None:
        path = f"{decoder.at}.{name}" if decoder.at else name
        value = fields.get(path, released.get(path, family.defaults.get(path)))
        return int(value) if isinstance(value, int | float) else None

    def number(name: str) -> int:
        if (value := find(name)) is None:
            raise ValueError(f"the configuration does not state {decoder.at or 'config.json'}'s {name}")
        return value

    heads = find(decoder.kv_heads) or number(decoder.heads)
    width = find(decoder.head_width) or number(decoder.width) // number(decoder.heads)
    return number(decoder.layers), heads, width


def gb(size: float) -> str:
    """Return bytes in GB (10^9 bytes), with one decimal, or with two if below 10 GB."""
    number = size / 1e9
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
