"""The layout: which rooms may import which, which rooms are pure, and how large files and folders may be."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "antiphon"
MAX_LINES, MAX_MODULES = 500, 16

BELOW_MODELS = {"audio", "contracts", "errors", "events", "text", "vision"}
BELOW_SERVER = BELOW_MODELS | {
    "engine",
    "loading",
    "protocols",
    "recording",
    "roles",
    "sessions",
    "settings",
    "shares",
    "signals",
    "store",
    "turns",
}
# Each room, with the other rooms that it may import. A room is a folder of the package, or a module in the package's
# root.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "extras": {"errors"},
    "roles": set(),
    "shares": set(),
    "settings": {"errors"},
    "signals": set(),
    "state_machine": {"errors"},
    "audio": {"errors"},
    "vision": {"errors"},
    "engine": {"errors", "shares"},
    "store": {"errors", "released", "roles"},
    "released": set(),
    "events": {"audio"},
    "text": {"events"},
    "contracts": {"audio", "events", "vision"},
    "turns": {"audio", "contracts", "events", "state_machine"},
    "modeling": BELOW_MODELS | {"engine", "pipelines", "shares", "signals"},
    "pipelines": BELOW_MODELS | {"shares", "signals"},
    "adapters": BELOW_MODELS | {"engine", "modeling", "pipelines", "remote", "roles", "shares", "signals"},
    "loading": {
        "adapters",
        "audio",
        "contracts",
        "engine",
        "errors",
        "extras",
        "pipelines",
        "released",
        "remote",
        "roles",
        "settings",
        "store",
    },
    "sessions": BELOW_MODELS | {"shares", "signals", "state_machine", "turns"},
    "protocols": {"audio", "contracts", "errors", "events", "turns"},
    "transports": {"audio", "contracts", "errors", "events", "protocols", "signals", "state_machine"},
    "recording": {"audio", "errors", "events"},
    "remote": {"audio", "contracts", "engine", "errors", "events", "roles", "settings", "shares", "text", "wyoming"},
    "client": {"audio", "errors", "protocols"},
    "cluster": {"audio", "client", "errors", "events", "protocols", "settings", "signals", "store", "transports"},
    "server": BELOW_SERVER | {"admission", "cluster", "extras", "remote", "transports", "wyoming"},
    "cli": BELOW_SERVER
    | {"admission", "certify", "client", "cluster", "extras", "released", "remote", "server", "transports"},
    "wyoming": set(),
    "admission": {"errors"},
    "certify": {"admission", "audio", "errors"},
}
# The package itself and `python -m antiphon`, which only call rooms.
UNRULED = {"__init__", "__main__"}
# Rooms whose folders must not import each other. The value has the shared folders that all of them may import.
SIBLINGS: dict[str, set[str]] = {"adapters": set(), "protocols": {"realtime", "rest", "speech"}}
# Rooms that do no I/O, and use neither a clock nor an event loop.
PURE = {"audio", "contracts", "events", "protocols", "state_machine", "text", "turns", "vision", "wyoming"}
PURE_FILES = (
    {"engine/api.py", "engine/generation.py", "engine/rows.py"}
    | {f"engine/local/{name}.py" for name in ("kv/cache", "scheduler", "step")}
    | {f"transports/{name}.py" for name in ("journal", "lifecycle")}
)
IMPURE = {"asyncio", "time", "torch", "starlette", "anyio", "uvicorn", "websockets"}
# Code that may use anyio's threads and the event loop's default executor. These threads are for the server's own work,
# so that no client can occupy them all. Work for clients runs in threads that belong to one API key.
OWN_THREADS = (
    "cli/",
    "client/",
    "cluster/",
    "server/watches.py",
    "server/routes/control.py",
    "server/memory.py",
    "server/run.py",
    "server/http/tls.py",
    "remote/allowed_hosts.py",
    "shares/threads.py",
)
# Code that may import torch.
TORCH = {"adapters", "modeling"}
TORCH_FILES = {
    f"engine/local/{name}.py"
    for name in (
        "attention",
        "decode",
        "device_sampling",
        "packed",
        "runner",
        "sampling",
        "streams",
        "tiles",
        "weights",
    )
}
TORCH_FILES |= {f"engine/local/kv/{name}.py" for name in ("page_pool", "parked", "session_tensors", "shape")}
TORCH_FILES |= {f"engine/local/kernels/{name}.py" for name in ("attention", "graphs", "norms")}
TORCH_FILES |= {"engine/checkpoint_files.py", "engine/threads.py", "engine/profiling.py"}

MODULES = sorted(SRC.rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(SRC))


def room(parts: tuple[str, ...]) -> str:
    return parts[0] if parts else ""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{a.name}" for a in node.names if node.module == "antiphon"}
    return found


def own_imports(path: Path) -> list[tuple[str, ...]]:
    """Return the module's imports from this package, as paths below the package."""
    names = [n.split(".") for n in imports(path) if n.split(".")[0] == "antiphon"]
    return [tuple(parts[1:]) for parts in names if parts[1:] not in ([], ["__version__"])]


def named_imports(path: Path) -> list[tuple[str, ...]]:
    """Return the names that it imports from modules of this package, each as the module's path and the name."""
    nodes = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.ImportFrom)]
    found = [(*(n.module or "").split("."), a.name) for n in nodes for a in n.names]
    return [parts[1:] for parts in found if parts[0] == "antiphon"]


def imported_where(is_forbidden: Callable[[Path, tuple[str, ...]], bool]) -> list[str]:
    """Return the imports of this package that a rule forbids, as "module imports module"."""
    return [
        f"{relative(path)} imports antiphon.{'.'.join(theirs)}"
        for path in MODULES
        for theirs in own_imports(path)
        if is_forbidden(path, theirs)
    ]


def outside(path: Path) -> set[str]:
    """Return the packages that a module imports."""
    return {name.split(".")[0] for name in imports(path)}


def test_imports_follow_the_table() -> None:
    def is_forbidden(path: Path, theirs: tuple[str, ...]) -> bool:
        mine = room(path.relative_to(SRC).with_suffix("").parts)
        return mine not in UNRULED and room(theirs) not in MAY_IMPORT[mine] | {mine}

    assert imported_where(is_forbidden) == []


def test_no_adapter_imports_another_and_no_dialect_a_sibling() -> None:
    folders = {name: {p.name for p in (SRC / name).iterdir() if p.is_dir()} for name in SIBLINGS}

    def is_forbidden(path: Path, theirs: tuple[str, ...]) -> bool:
        parts = path.relative_to(SRC).parts
        if parts[0] not in SIBLINGS or len(parts) < 3 or theirs[:1] != parts[:1]:
            return False
        return theirs[1] in folders[parts[0]] - {parts[1]} - SIBLINGS[parts[0]]

    assert imported_where(is_forbidden) == []


def test_loading_knows_no_adapter_by_name() -> None:
    adapters = [p.name for p in (SRC / "adapters").iterdir() if p.is_dir() and not p.name.startswith("_")]
    for path in sorted((SRC / "loading").glob("*.py")):
        said = re.sub(r"[^a-z0-9]", "", path.read_text(encoding="utf-8").lower())
        assert [name for name in adapters if name.replace("_", "") in said] == [], relative(path)


def test_models_know_engines_by_the_contract() -> None:
    """Only modules that create a local engine name its class. No module of a model names the engine's sessions."""
    for path in MODULES:
        if room(path.relative_to(SRC).parts) == "engine":
            continue
        named = {theirs[3] for theirs in named_imports(path) if theirs[:3] == ("engine", "local", "engine")}
        calls = (n for n in ast.walk(parsed(path)) if isinstance(n, ast.Call)) if named else ()
        called = {n.func.id for n in calls if isinstance(n.func, ast.Name)}
        assert named <= {"LocalEngine"} & called, relative(path)


def test_pure_rooms_do_no_io() -> None:
    pure = [p for p in MODULES if relative(p) in PURE_FILES or room(p.relative_to(SRC).parts) in PURE]
    assert {relative(path): found for path in pure if (found := outside(path) & IMPURE)} == {}


def test_the_work_of_clients_is_done_in_threads_that_keys_share() -> None:
    for path in MODULES:
        if not relative(path).startswith(OWN_THREADS):
            assert "anyio.to_thread" not in imports(path), relative(path)
            # The same for the event loop's default executor.
            assert "asyncio.to_thread(" not in path.read_text(encoding="utf-8"), relative(path)


def test_torch_stays_where_it_belongs() -> None:
    others = set(MAY_IMPORT) - TORCH
    without = [p for p in MODULES if relative(p) not in TORCH_FILES and room(p.relative_to(SRC).parts) in others]
    libraries = {"torch", "transformers", "accelerate"}
    assert {relative(path): found for path in without if (found := outside(path) & libraries)} == {}


def test_a_module_is_documented_and_of_bounded_size() -> None:
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
    assert [relative(path) for path in MODULES if not ast.get_docstring(parsed(path))] == []


def test_a_folder_holds_at_most_sixteen_modules() -> None:
    folders: dict[Path, int] = {}
    for path in MODULES:
        if path.name != "__init__.py":
            folders[path.parent] = folders.get(path.parent, 0) + 1
    assert {relative(folder): count for folder, count in folders.items() if count > MAX_MODULES} == {}


# Limits for figures that should not grow, at their current values. They are lowered, never raised.
MAX_OF = {
    "dict[str, Any]": 11,
    "untyped maps": 51,
    "modules under 60 lines": 36,
    "attributes of a class": 27,
    "own imports of a module": 23,
}
MAPS = {"dict", "Dict", "defaultdict", "OrderedDict", "Mapping", "MutableMapping"}


def last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_untyped_map(node: ast.AST) -> bool:
    if not isinstance(node, ast.Subscript) or last_name(node.value) not in MAPS:
        return False
    return isinstance(node.slice, ast.Tuple) and last_name(node.slice.elts[-1]) in ("Any", "object")


def map_names(tree: ast.Module) -> set[str]:
    """Return the names that a module gives to untyped maps, and to unions and containers of them."""
    given = [n for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign) and n.value]
    types = [n for n in given if isinstance(n.value, ast.Subscript | ast.BinOp)]
    named = [n for n in types if any(map(is_untyped_map, ast.walk(n.value)))]
    return {last_name(n.targets[0] if isinstance(n, ast.Assign) else n.target) for n in named}


def untyped_maps(tree: ast.Module, names: set[str]) -> list[str]:
    """Return the maps whose values may be anything: written as types, as maps without types, or by one of `names`."""
    annotations = [getattr(n, name, None) for n in ast.walk(tree) for name in ("annotation", "returns")]
    parts = [part for a in annotations if isinstance(a, ast.AST) for part in ast.walk(a)]
    typed = {id(part.value) for part in parts if isinstance(part, ast.Subscript)}
    bare = [part for part in parts if last_name(part) in MAPS and id(part) not in typed]
    known = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    known = (known & names) | map_names(tree)
    loaded = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in known]
    return [ast.unparse(node) for node in (*filter(is_untyped_map, ast.walk(tree)), *bare, *loaded)]


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the fields of a class that has methods, and the attributes of `self` that its methods set."""
    if not any(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for n in node.body):
        return set()
    fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    stored = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return fields | {n.attr for n in stored if last_name(n.value) == "self"}


def modules_imported(path: Path) -> set[str]:
    """Return the package's modules that a module imports at its own import."""
    names = {n.module or "" for n in parsed(path).body if isinstance(n, ast.ImportFrom)}
    return {name for name in names if name.split(".")[0] == "antiphon"}


def test_there_is_no_more_of_what_nobody_wants() -> None:
    names = {name for path in MODULES for name in map_names(parsed(path))}
    maps = [found for path in MODULES for found in untyped_maps(parsed(path), names)]
    lengths = [len(p.read_text(encoding="utf-8").splitlines()) for p in MODULES if p.name != "__init__.py"]
    classes = [n for path in MODULES for n in ast.walk(parsed(path)) if isinstance(n, ast.ClassDef)]
    counts = {
        "dict[str, Any]": maps.count("dict[str, Any]"),
        "untyped maps": len(maps),
        "modules under 60 lines": sum(length < 60 for length in lengths),
        "attributes of a class": max(len(attributes(node)) for node in classes),
        "own imports of a module": max(len(modules_imported(path)) for path in MODULES),
    }
    assert {name: count for name, count in counts.items() if count > MAX_OF[name]} == {}


def test_untyped_maps_are_found_in_any_spelling() -> None:
    typed = "def f(a: dict[str, int]) -> Mapping[str, list[int]]:\n    return dict(a)"
    untyped = "Json = dict[str, Any]\ndef f(a: dict, b: Mapping[str, object], c: list[dict]) -> Json | None: ..."
    assert untyped_maps(ast.parse(typed), set()) == []
    found = ["dict[str, Any]", "Mapping[str, object]", "dict", "dict", "Json"]
    assert untyped_maps(ast.parse(untyped), set()) == found
    assert untyped_maps(ast.parse("from a import Json\nx: Json"), {"Json"}) == ["Json"]


def test_attributes_are_fields_and_what_methods_set() -> None:
    source = "class A:\n    a: int\n    def f(self, other):\n        self.b, self.c, other.d = self.a, 1, 2"
    assert attributes(ast.parse(source).body[0]) == {"a", "b", "c"}  # type: ignore[arg-type]
