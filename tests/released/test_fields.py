"""Each field of each released configuration is read by the code that loads the release, or listed with the reason."""

from __future__ import annotations

import ast
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from antiphon.released import Release, releases
from antiphon.released.manifest import unread_fields

ADAPTERS = Path(__file__).parents[2] / "src" / "antiphon" / "adapters"
MODELING = ADAPTERS.parent / "modeling"
# For each family: its adapter, and the models of `transformers` that compute its parts.
READERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen3": ("causal_lm", ("qwen3",)),
    "qwen3_asr": ("qwen3_asr", ("qwen3_asr", "qwen3")),
    "qwen3_tts": ("qwen3_tts", ("qwen3", "mimi")),
    "qwen3_omni_moe": ("qwen3_omni", ("qwen3_omni_moe",)),
    "qwen2_5_omni": ("qwen2_5_omni", ("qwen2_5_omni",)),
    "minicpmo": ("minicpmo", ("qwen3", "llama", "whisper", "idefics2")),
    "qwen2_5_vl": ("vlm", ("qwen2_5_vl",)),
    "qwen3_vl": ("vlm", ("qwen3_vl",)),
    "smolvlm": ("vlm", ("smolvlm", "llama")),
}


# Fields that are tables: their keys, such as the names of speakers, are no fields.
TABLES = ("spk_id", "spk_is_dialect", "codec_language_id", "speaker_id")


def field_of(name: str) -> str:
    """Return the last part of a dotted name, or the name of the table that it is a key of."""
    *_, last = (part for part in name.split(".") if part in TABLES) if set(name.split(".")) & {*TABLES} else [name]
    return last.rpartition(".")[2]


def transformers_modules(name: str) -> list[Path]:
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    own = sorted((root / "models" / name).glob("[mc]o*_*.py"))
    return [*own, root / "modeling_utils.py", root / "modeling_rope_utils.py", root / "masking_utils.py"]


@cache
def names_read(path: Path) -> frozenset[str]:
    """Return the fields that a module reads of a configuration, by attribute or by name, or declares in a class."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(value=base, attr=name, ctx=ast.Load()) if is_config(base, path):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) if path.is_relative_to(ADAPTERS.parent):
                found.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[base, ast.Constant(value=str(name)), *_]) if is_config(
                base, path
            ):
                found.add(name)
            case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[ast.Constant(value=str(name)), *_]):
                found.add(name)
    return frozenset(found)


def is_config(node: ast.expr, path: Path) -> bool:
    """Whether an expression is a configuration, by its name, or by the module's if it is `self`."""
    name = ast.unparse(node).rpartition(".")[2].lower()
    return name.endswith(("config", "given")) or (name == "self" and path.name.startswith("configuration_"))


@cache
def read_by(model_type: str) -> frozenset[str]:
    """Return the names of fields that the code of a family reads."""
    adapter, models = READERS[model_type]
    paths = [*sorted((ADAPTERS / adapter).rglob("*.py")), *sorted(MODELING.rglob("*.py"))]
    paths += [path for name in models for path in transformers_modules(name)]
    return frozenset().union(*map(names_read, paths))


@pytest.mark.parametrize("release", list(releases().values()), ids=list(releases()))
def test_a_field_is_read_or_listed_with_the_reason(release: Release) -> None:
    listed = unread_fields(release.model_type)
    read = read_by(release.model_type)
    neither = [
        name
        for name in release.fields
        if field_of(name) not in read and not any(fnmatchcase(name, pattern) for pattern in listed)
    ]
    assert neither == []


@pytest.mark.parametrize("model_type", READERS)
def test_what_is_listed_is_in_a_release_and_has_a_reason(model_type: str) -> None:
    names = {n for release in releases().values() if release.model_type == model_type for n in release.fields}
    listed = unread_fields(model_type, shared=False)
    assert [pattern for pattern in listed if not any(fnmatchcase(name, pattern) for name in names)] == []
    assert all(len(reason.split()) > 2 for reason in listed.values())


def test_every_family_has_its_readers() -> None:
    assert {release.model_type for release in releases().values()} == set(READERS)
