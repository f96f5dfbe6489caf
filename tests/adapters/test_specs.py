"""The specs of adapters match their classes, and importing them does not import heavy libraries."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from antiphon import adapters
from antiphon.adapters import SPECS
from antiphon.adapters.spec import EngineModelOptions, LaneModelOptions
from antiphon.engine.api import Capabilities
from antiphon.store import MODELS

ROOT = Path(adapters.__file__).parent
HEAVY = ("torch", "transformers", "ctranslate2", "onnxruntime", "numpy")
# Methods and arguments in an adapter's code that show that its model needs a capability.
METHODS = {
    "append_embeddings": Capabilities.EMBEDDING_ROWS,
    "evict": Capabilities.EVICT,
    "fork": Capabilities.FORK,
    "settle": Capabilities.PREFILL_AHEAD,
}
ARGUMENTS = {"hidden": Capabilities.HIDDEN_STATES, "chooser": Capabilities.CHOOSER, "program": Capabilities.CHOOSER}


def named(name: str) -> Any:
    module, attribute = name.split(":")
    return getattr(import_module(module), attribute)


def modules(folder: Path) -> set[Path]:
    """Return an adapter's modules, and the shared modules that they import, except `chat`.

    `chat` uses embeddings only for models with encoders. Its code does not show whether an adapter's model has
    encoders.
    """
    own = set(folder.glob("*.py"))
    imported = {
        node.module.removeprefix("antiphon.modeling.").replace(".", "/")
        for path in own
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("antiphon.modeling.")
    }
    return own | {ROOT.parent / "modeling" / f"{name}.py" for name in imported - {"chat"}}


def used(folder: Path) -> Iterator[Capabilities]:
    """Return the capabilities that an adapter's modules use, as far as they can be found in its calls."""
    for path in modules(folder):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                if name in METHODS:
                    yield METHODS[name]
                if isinstance(node.func, ast.Name) and node.func.id == "Sampling":
                    yield from (ARGUMENTS[k.arg] for k in node.keywords if k.arg in ARGUMENTS)


def test_every_folder_is_in_the_table() -> None:
    assert set(SPECS) == {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("_")}


def test_when_the_table_is_read_then_no_library_is_imported_that_computes() -> None:
    code = f"import sys, antiphon.adapters; print([m for m in {HEAVY} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_names_things_of_its_own_folder(name: str) -> None:
    spec = SPECS[name]
    for wanted in filter(None, (spec.model, spec.prepare, spec.describe)):
        assert wanted.startswith(f"antiphon.adapters.{name}.")
        assert callable(named(wanted))


def test_a_spec_that_recognizes_folders_by_their_files_also_describes_them() -> None:
    assert [name for name, spec in SPECS.items() if bool(spec.files) != bool(spec.describe)] == []


@pytest.mark.parametrize("name", SPECS)
def test_a_class_takes_what_its_spec_says_it_is_given(name: str) -> None:
    spec = SPECS[name]
    parameters = inspect.signature(named(spec.model), eval_str=True).parameters
    options = EngineModelOptions if spec.runs_on == "engine" else LaneModelOptions
    assert parameters["options"].annotation is options
    given = [*spec.uses, *["voices"] * spec.takes_voices, *["partials"] * spec.takes_partials]
    assert set(given) <= {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_requires_what_the_adapters_code_uses(name: str) -> None:
    for capability in used(ROOT / name):
        assert capability in SPECS[name].requires, f"{name} uses {capability.name}"


def test_a_model_of_the_registry_has_the_role_of_its_adapter() -> None:
    for model in MODELS.values():
        assert SPECS[model.adapter].role == model.role
        if SPECS[model.adapter].takes_voices:
            assert model.id.startswith(f"{model.adapter}-")


def test_only_models_on_an_engine_require_something_of_it() -> None:
    assert [name for name, spec in SPECS.items() if spec.runs_on == "lane" and spec.requires] == []
