"""The dependency rule of docs/architecture.md, checked on the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "antiphon"
PURE = (
    "events",
    "duplex_events",
    "ledger",
    "images",
    "frames",
    "video_events",
    "sounding",
    "overlap",
    "splitter",
    "turn_sounds",
    "talk_events",
    "conversation",
    "transcript",
    "turn",
    "protocols",
    "audio",
)
PURE_FILES = ("engine/sequence.py", "engine/kv_cache.py", "engine/scheduler.py")
# Where tensors may be known.
TORCH = ("engine/attention.py", "engine/runner.py", "engine/sampling.py", "engine/weights.py", "engine/packed.py")
FORBIDDEN_IN_PURE = {"asyncio", "time", "torch", "starlette", "anyio", "uvicorn", "websockets"}
# room -> rooms it may import
MAY_IMPORT = {
    "errors": set(),
    "audio": {"errors"},
    "events": {"audio"},
    "settings": {"errors"},
    "lanes": {"errors"},
    "store": {"errors"},
    "inbox": {"events", "audio", "errors", "duplex_events", "talk_events"},
    "turn": {"events", "audio", "adapters.base"},
    "transcript": {"events", "adapters.base", "audio"},
    "splitter": {"events"},
    "duplex_events": set(),
    "ledger": {"duplex_events", "errors", "talk_events"},
    "duplex": {"answering", "conversation", "duplex_events", "errors", "events", "ledger", "talk", "talk_events"},
    "talk_events": {"adapters.base", "audio", "duplex_events", "events"},
    "conversation": {"adapters.base", "errors", "events", "talk_events"},
    "responder": {"adapters.base", "ahead", "answering", "conversation", "errors", "events", "sounding", "talk_events"},
    "ahead": {"adapters.base", "answering"},
    "sounding": {"audio", "talk_events", "turn"},
    "images": {"errors"},
    "frames": {"images"},
    "video_events": {"audio"},
    "video": {"adapters.base", "audio", "errors", "frames", "images", "video_events"},
    "talk": {
        "adapters.base",
        "answering",
        "conversation",
        "duplex_events",
        "errors",
        "events",
        "inbox",
        "looking",
        "overlap",
        "responder",
        "session",
        "sounding",
        "talk_events",
        "turn",
        "turn_sounds",
        "units",
    },
    "looking": {"adapters.base", "answering", "conversation", "errors", "images", "talk_events"},
    "turn_sounds": {"adapters.base", "audio", "conversation", "events", "talk_events"},
    "units": {"adapters.base", "audio", "duplex_events", "errors", "events", "talk_events"},
    "overlap": {"events", "turn"},
    "answering": {"adapters.base", "conversation", "errors", "events", "talk_events"},
    "protocols": {"audio", "events", "errors", "adapters.base", "duplex_events", "talk_events", "turn", "video_events"},
    "engine": {"errors"},
    "adapters": {"adapters.base", "audio", "engine", "events", "errors", "frames", "images", "lanes", "splitter"},
    "adapters.base": {"audio", "events"},
    "models": {"adapters", "adapters.base", "audio", "engine", "errors", "lanes", "settings", "store"},
    "chat": {"adapters.base", "errors", "models", "settings"},
    "session": {"adapters.base", "audio", "decoding", "errors", "events", "inbox", "talk_events", "turn"},
    "decoding": {"adapters.base", "audio", "errors", "events", "transcript", "turn"},
    "speech": {"adapters.base", "audio", "errors", "events", "splitter"},
    "server": {
        "adapters.base",
        "answering",
        "audio",
        "blackbox",
        "conversation",
        "duplex",
        "duplex_events",
        "errors",
        "events",
        "inbox",
        "lanes",
        "models",
        "protocols",
        "session",
        "settings",
        "speech",
        "store",
        "talk",
        "talk_events",
        "video",
        "video_events",
        "",
    },
    "watch": {"errors", "models", "settings", "video", "video_events"},
    "say": {"adapters.base", "audio", "errors", "events", "models", "settings", "speech", "splitter"},
    "transcribe": {"adapters.base", "audio", "errors", "events", "inbox", "models", "protocols", "session", "settings"},
    "blackbox": {"audio", "errors"},
    "timeline": {"audio", "blackbox"},
    "replay": {"blackbox", "events", "models", "protocols", "server", "settings"},
    "doctor": {"adapters.base", "audio", "errors", "models", "settings", "store", ""},
}


def room(module: str) -> str:
    parts = module.split(".")
    if parts[:2] == ["adapters", "base"]:
        return "adapters.base"
    return parts[0]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{a.name}" for a in node.names if node.module == "antiphon"}
    return found


MODULES = sorted(p for p in SRC.rglob("*.py") if p.name not in ("__main__.py", "cli.py") and p != SRC / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_down(path: Path) -> None:
    mine = room(".".join(path.relative_to(SRC).with_suffix("").parts))
    for name in imports(path):
        if name.split(".")[0] != "antiphon" or name == "antiphon.__version__":
            continue
        theirs = room(name.removeprefix("antiphon").removeprefix("."))
        assert theirs in MAY_IMPORT[mine] | {mine}, f"{path} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_pure_rooms_do_no_io(path: Path) -> None:
    name = str(path.relative_to(SRC))
    if name in PURE_FILES or room(".".join(path.relative_to(SRC).with_suffix("").parts)) in PURE:
        assert not {n.split(".")[0] for n in imports(path)} & FORBIDDEN_IN_PURE


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_torch_stays_where_it_belongs(path: Path) -> None:
    name = str(path.relative_to(SRC))
    if name not in TORCH and not name.startswith("adapters/"):
        assert not {n.split(".")[0] for n in imports(path)} & {"torch", "transformers", "accelerate"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_a_file_stays_one_noun(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
