"""Class names are unique, commands are verbs, events are in the past tense, and private names stay private."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

from antiphon.events.conversation import ConversationCommand, ConversationEvent
from antiphon.events.duplex import DuplexCommand, DuplexEvent
from antiphon.events.speech import SpeechCommand, SpeechEvent
from antiphon.events.transcription import TranscriptionCommand, TranscriptionEvent
from antiphon.events.video import VideoCommand, VideoEvent

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "antiphon"
SOURCES = sorted(SRC.rglob("*.py"))
# Folders of tests that contain virtual environments of third-party clients.
TESTS = sorted(p for p in (ROOT / "tests").rglob("*.py") if not any(part.startswith(".") for part in p.parts))
COMMANDS = (TranscriptionCommand, SpeechCommand, ConversationCommand, DuplexCommand, VideoCommand)
EVENTS = (TranscriptionEvent, SpeechEvent, ConversationEvent, DuplexEvent, VideoEvent)
VERBS = (
    *("Acknowledge", "Append", "Ask", "BargeIn", "Cancel", "Clear", "Commit", "Configure", "Continue", "Create"),
    *("Delete", "Finish", "Flush", "Hold", "Pause", "Retrieve", "Signal", "Skip", "Truncate"),
)
# Endings of an event's name. An event reports what happened, or is a piece of an output.
PAST = ("ed", "Began", "Done", "Taken", "Ending")
PIECES = ("Delta", "Partial", "Audio")
# A private name of something else than `self` or `cls`. A file without one is not parsed.
FOREIGN = re.compile(r"(?<!\bself)(?<!\bcls)\._[a-zA-Z]")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def trees(paths: list[Path]) -> dict[Path, ast.Module]:
    return {path: parsed(path) for path in paths}


@cache
def private_names_of_folder(folder: Path) -> set[str]:
    return {name for tree in trees(sorted(folder.glob("*.py"))).values() for name in private_names(tree)}


def test_a_public_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for path, tree in trees(SOURCES).items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(relative(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_command_is_named_by_a_verb() -> None:
    names = [command.__name__ for union in COMMANDS for command in get_args(union)]
    assert [name for name in names if not name.startswith(VERBS)] == []


def test_an_event_is_named_in_the_past_tense() -> None:
    names = [event.__name__ for union in EVENTS for event in get_args(union)]
    assert [name for name in names if not name.endswith(PAST + PIECES)] == []


def private_names(tree: ast.Module) -> Iterator[str]:
    """Return the private attributes, methods and functions that a module defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name


def foreign_private_accesses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each `thing._name` in which `thing` is not `self` or `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            base = isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
            if not itself and not (base and node.value.func.id == "super"):
                yield node.lineno, node.attr


@cache
def ours() -> set[str]:
    """Return all private names that the package defines."""
    return {name for tree in trees(SOURCES).values() for name in private_names(tree) if name.startswith("_")}


def private_accesses(path: Path, foreign: set[str]) -> list[str]:
    """Return where a module uses one of the `foreign` names of something else, as "file, line: name"."""
    found = foreign_private_accesses(parsed(path)) if FOREIGN.search(path.read_text(encoding="utf-8")) else ()
    return [f"{relative(path)}, line {line}: {name}" for line, name in found if name in foreign]


def test_no_module_touches_what_is_private_to_another_folder() -> None:
    folders = {path.parent: ours() - private_names_of_folder(path.parent) for path in SOURCES}
    assert [found for path in SOURCES for found in private_accesses(path, folders[path.parent])] == []


def test_no_test_touches_what_is_private_in_the_package() -> None:
    found = {path: accesses for path in TESTS if (accesses := private_accesses(path, ours()))}
    own = {path: set(private_names(parsed(path))) for path in found}
    assert [each for path, accesses in found.items() for each in accesses if each.split()[-1] not in own[path]] == []
