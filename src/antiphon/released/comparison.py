"""Compares the tensors and the configuration of a folder with a release's manifest. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from antiphon.released.headers import StoredTensor
from antiphon.released.manifest import Family, Fields, Release, expanded, unread_fields

# Fields of a configuration that hold a size of the model or its kind. Releases of a family differ in them, and a
# fine-tuned model keeps them. Layers and vocabularies are left out: a folder may have others.
SIZES = frozenset(
    {
        *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts", "head_dim", "d_model"),
        *("num_attention_heads", "num_key_value_heads", "encoder_ffn_dim", "output_dim", "text_hidden_size"),
        *("out_hidden_size", "llm_dim", "embed_dim", "num_code_groups", "enc_dim", "tts_model_type", "scale_factor"),
    }
)
# The largest number of tensors for which a close name is looked for, and of names in one line.
MAX_GUESSED, MAX_NAMED = 40, 3
# Names that are not of the model's weights: buffers that every loader computes.
COMPUTED = ("*.inv_freq", "*.position_ids", "*.rotary_emb.*")


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """The tensors of a folder beside those of a manifest.

    `num_found`: those with the expected name and shape. `missing`: expected and absent. `unknown`: present and not in
    the manifest. `wrong`: those of another shape, by name: the shape in the file, and the expected one.
    """

    num_found: int
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    wrong: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


def closest(fields: Fields, among: Collection[Release]) -> Release | None:
    """Return the release whose sizes are those of a folder's configuration; None if there is none.

    Of several releases with these sizes, the one with the most equal values.
    """
    same = [r for r in among if r.model_type == fields.get("model_type") and _has_sizes(r.fields, fields)]
    return max(same, key=lambda r: sum(fields.get(n, "") == v for n, v in r.fields.items()), default=None)


def _has_sizes(released: Fields, fields: Fields) -> bool:
    """Whether a configuration has a release's sizes. A size that it leaves out has the default of both."""
    return all(
        released[name] == fields[name]
        for name in released.keys() & fields.keys()
        if name.rpartition(".")[2] in SIZES and released[name] is not None
    )


def layer_counts(family: Family, release: Release, fields: Fields) -> dict[str, int]:
    """Return the number of layers of each of the family's prefixes in a folder, where it is not the release's."""
    released = release.fields
    counts = {}
    for prefix, name in family.layers.items():
        count = fields.get(name, released.get(name))
        if isinstance(count, int) and count != released.get(name):
            counts[prefix] = count
    return counts


def expected_tensors(family: Family, release: Release, fields: Fields) -> dict[str, StoredTensor]:
    """Return the tensors of a release with a folder's configuration: its numbers of layers, its vocabularies."""
    counts, found = layer_counts(family, release, fields), dict[str, StoredTensor]()
    for pattern in release.tensors:
        for name in expanded(pattern.name, counts):
            shape = pattern.shape
            size = fields.get(family.vocabularies.get(name, ""))
            if isinstance(size, int):
                shape = (size, *shape[1:])
            found[name] = StoredTensor(shape, pattern.dtype, "")
    return found


def compare(expected: Mapping[str, StoredTensor], found: Mapping[str, StoredTensor]) -> TensorComparison:
    """Compare the tensors by name and shape. The dtype may differ: a loader converts it."""
    wrong = {n: (found[n].shape, e.shape) for n, e in expected.items() if n in found and found[n].shape != e.shape}
    return TensorComparison(
        sum(name in found for name in expected) - len(wrong),
        tuple(name for name in expected if name not in found),
        tuple(n for n in found if n not in expected and not any(fnmatchcase(n, p) for p in COMPUTED)),
        wrong,
    )


def tensor_problems(found: TensorComparison) -> Iterator[str]:
    """Yield what keeps a folder from loading, one line each: tensors that are missing, renamed or of other shapes."""
    for name, (shape, expected) in list(found.wrong.items())[:MAX_NAMED]:
        if shape == expected[::-1]:
            yield f"{name} is transposed: {list(shape)}, not {list(expected)}"
        elif shape[1:] == expected[1:] and len(shape) == 2:
            yield f"{name} has {shape[0]:,} rows, and config.json asks for {expected[0]:,}: a file of another model"
        else:
            yield f"{name} is {list(shape)}, not {list(expected)}"
    if len(found.wrong) > MAX_NAMED:
        yield f"{len(found.wrong) - MAX_NAMED} further tensors are of other shapes"
    if not found.missing:
        return
    if prefix := _common_prefix(found.missing, found.unknown):
        there, here = prefix
        yield f"the names of {len(found.missing):,} tensors begin with {there!r} instead of {here!r}"
        return
    guesses = {}
    if max(len(found.missing), len(found.unknown)) <= MAX_GUESSED:
        guesses = {name: close[0] for name in found.missing if (close := get_close_matches(name, found.unknown, 1))}
    for name, guess in list(guesses.items())[:MAX_NAMED]:
        yield f"{name} is missing; {guess}, which is unknown, may be its name in these files"
    rest = [name for name in found.missing if name not in list(guesses)[:MAX_NAMED]]
    if rest:
        yield f"{named(rest)} {'is' if len(rest) == 1 else 'are'} missing"


def _common_prefix(missing: Sequence[str], unknown: Sequence[str]) -> tuple[str, str] | None:
    """Return the beginning of all unknown names and that of all missing ones, if only the beginnings differ."""
    if len(missing) != len(unknown) or len(missing) < 2:
        return None
    one, other = min(missing), min(unknown)
    while one and other and one[-1] == other[-1]:
        one, other = one[:-1], other[:-1]
    same = {name.removeprefix(one) for name in missing} == {name.removeprefix(other) for name in unknown}
    return (other, one) if same and one != other else None


def named(names: Sequence[str]) -> str:
    """Return some names as words: the first few, and the number of the others."""
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED:,} more"


def unknown_fields(fields: Fields, among: Collection[Release]) -> tuple[str, ...]:
    """Return the fields of a configuration that no release of the family has, and that are not known to be unread."""
    known = {name for release in among for name in release.fields}
    unread = unread_fields(str(fields.get("model_type")))
    # The keys of a table, such as the ids of speakers, are not fields.
    tables = {name.rpartition(".")[0] for name in known} | known
    return tuple(
        name
        for name in fields
        if name not in known
        and not any(fnmatchcase(name, pattern) for pattern in unread)
        and not (name.rpartition(".")[0] in tables and name.rpartition(".")[0].endswith(("_id", "_dialect")))
    )
