"""Measures the structure of the code: sizes, types, docstrings, imports, line widths, accesses to private names.

    python -m bench.house [--repo DIR] [--rev REV ...] [--json FILE] [--list FIGURE]

Without --rev, the working tree is measured; with it, the revisions, side by side. --list prints, instead of the table,
the places that a figure counts in the first column. Only git and the standard library are needed. "Source" is every
*.py under src/antiphon. Files that git ignores are left out. The figures:

    lines, modules           Physical lines and files of the source.
    modules under 60 lines   Modules with fewer lines, without __init__.py.
    functions                Every def, including methods and nested ones, from its `def` line to its last line.
    dict[str, Any]           Subscripts written exactly like this, in any type.
    untyped maps             The same in any spelling: subscripts of a dict or Mapping class whose values are Any or
                             object, and uses of a name that a module defines as such a map or imports as one.
    docstring words          Median words, split at white space, of docstrings of public classes and functions.
    attributes of a class    The most of one class: names that its body annotates or its methods set on `self`.
    own imports              The most modules of the source that one module imports at its own import.
    import circles           Cycles of such imports.
    over 120 columns         Lines of more than 120 characters in *.py and *.md, including table rows.
    private in tests         Accesses `x._name` in tests where x is neither `self` nor `cls`, without dunder names.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath
from typing import TypeVar

RESULT = Path(__file__).resolve().parent / "results" / "house.json"
PACKAGE = PurePosixPath("src/antiphon")
COLUMNS, SHORT_MODULE, LONG_FUNCTION = 120, 60, 40
MAPS = {"dict", "Dict", "defaultdict", "OrderedDict", "Mapping", "MutableMapping"}

Node = TypeVar("Node", bound=ast.AST)
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """A Python file. `name` is its dotted name."""

    path: PurePosixPath
    text: str
    tree: ast.Module

    @property
    def length(self) -> int:
        return len(self.text.splitlines())

    @property
    def name(self) -> str:
        return ".".join(self.path.with_suffix("").parts[1:]).removesuffix(".__init__")

    def place(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


@dataclass(slots=True)
class Report:
    """The figures of a tree. A figure that counts places in the code also lists them."""

    figures: dict[str, float] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)

    def count(self, name: str, places: Iterable[str]) -> None:
        self.places[name] = list(places)
        self.figures[name] = len(self.places[name])

    def most(self, name: str, counts: Mapping[str, int]) -> None:
        """Record the largest of these sizes as a figure. Its places are all of them, the largest first."""
        self.places[name] = [f"{at}: {n}" for at, n in sorted(counts.items(), key=lambda item: -item[1])]
        self.figures[name] = max(counts.values())


def measure(root: Path) -> Report:
    """Return all figures of the tree at `root`."""
    files = {path: (root / path).read_text(encoding="utf-8") for path in paths(root)}
    modules = [Module(p, t, ast.parse(t, str(p))) for p, t in files.items() if p.suffix == ".py"]
    source = [m for m in modules if m.path.is_relative_to(PACKAGE)]
    if not source:
        raise SystemExit(f"house: no modules under {root / PACKAGE}")
    report = Report()
    sizes(report, source)
    maps(report, source)
    public = (n for m in source for n in definitions(m) if not n.name.startswith("_"))
    words = [len(text.split()) for node in public if (text := ast.get_docstring(node))]
    report.figures["docstring words"] = statistics.median(words) if words else 0
    report.most(
        "attributes of a class",
        {f"{m.place(n)} {n.name}": len(attributes(n)) for m in source for n in nodes(m, ast.ClassDef)},
    )
    graph = imports(source)
    report.most("own imports", {name: len(own) for name, own in graph.items()})
    report.count("import circles", circles(graph))
    lines = ((path, n, line) for path, text in files.items() for n, line in enumerate(text.splitlines(), 1))
    report.count(f"over {COLUMNS} columns", (f"{path}:{n}" for path, n, line in lines if len(line) > COLUMNS))
    tests = [m for m in modules if m.path.parts[0] == "tests"]
    report.count("private in tests", (m.place(n) for m in tests for n in foreign(m)))
    return report


def paths(root: Path) -> list[PurePosixPath]:
    """Return the *.py and *.md files below `root`; in a git checkout, without ignored files."""
    if (root / ".git").exists():
        listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0")
        found = [PurePosixPath(name) for name in listed if name and (root / name).is_file()]
    else:
        found = [PurePosixPath(path.relative_to(root).as_posix()) for path in root.rglob("*") if path.is_file()]
    return sorted(path for path in found if path.suffix in (".py", ".md"))


def sizes(report: Report, source: Sequence[Module]) -> None:
    report.figures |= {"lines": sum(m.length for m in source), "modules": len(source)}
    short = (m for m in source if m.length < SHORT_MODULE and m.path.name != "__init__.py")
    report.count(f"modules under {SHORT_MODULE} lines", (f"{m.path}: {m.length}" for m in short))
    functions = [(m.place(n), n) for m in source for n in definitions(m) if not isinstance(n, ast.ClassDef)]
    long = [place for place, n in functions if (n.end_lineno or n.lineno) - n.lineno >= LONG_FUNCTION]
    name = f"functions <= {LONG_FUNCTION} lines, %"
    report.figures[name] = round(100 * (1 - len(long) / len(functions)), 1) if functions else 100
    report.places[name] = long


def maps(report: Report, source: Sequence[Module]) -> None:
    subscripts = [(m, n) for m in source for n in nodes(m, ast.Subscript)]
    report.count("dict[str, Any]", (m.place(n) for m, n in subscripts if ast.unparse(n) == "dict[str, Any]"))
    aliases = {name for m in source for name in map_aliases(m)}
    uses = [m.place(n) for m in source for n in alias_uses(m, aliases)]
    report.count("untyped maps", [m.place(n) for m, n in subscripts if is_untyped_map(n)] + uses)


def is_untyped_map(node: ast.Subscript) -> bool:
    if last_name(node.value) not in MAPS or not isinstance(node.slice, ast.Tuple):
        return False
    return last_name(node.slice.elts[-1]) in ("Any", "object")


def map_aliases(module: Module) -> Iterator[str]:
    """Return the names that the module gives to an untyped map, or to a union or container of one."""
    for node in module.tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        is_type = isinstance(target, ast.Name) and isinstance(value, ast.Subscript | ast.BinOp)
        if is_type and any(isinstance(n, ast.Subscript) and is_untyped_map(n) for n in ast.walk(value)):
            yield target.id


def alias_uses(module: Module, aliases: set[str]) -> Iterator[ast.Name]:
    """Return the module's uses of the aliases, under the names by which it defines or imports them."""
    imports = {a.asname or a.name for node in nodes(module, ast.ImportFrom) for a in node.names if a.name in aliases}
    known = imports | set(map_aliases(module))
    return (n for n in nodes(module, ast.Name) if n.id in known and isinstance(n.ctx, ast.Load))


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that the class annotates in its body, and those that its methods set on `self`."""
    found = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def imports(source: Sequence[Module]) -> dict[str, set[str]]:
    """Return for each module the source's modules that it imports, outside of functions and type-checking blocks."""
    known, graph = {m.name for m in source}, dict[str, set[str]]()
    for module in source:
        found = set[str]()
        for node in module.tree.body:
            match node:
                case ast.Import(names=names):
                    found |= {a.name for a in names}
                case ast.ImportFrom(module=str(origin), names=names):
                    found |= {inner if (inner := f"{origin}.{a.name}") in known else origin for a in names}
        graph[module.name] = (found & known) - {module.name}
    return graph


def circles(graph: dict[str, set[str]]) -> Iterator[str]:
    """Return each import cycle as a list of module names, and remove it from the graph."""
    while True:
        try:
            TopologicalSorter(graph).prepare()
            return
        except CycleError as error:
            names = error.args[1]
            yield " -> ".join(names)
            # The sorter reports one cycle at a time. After one import of that cycle is removed, it finds the next.
            graph[names[1]] -= {names[0]}


def foreign(module: Module) -> Iterator[ast.Attribute]:
    """Return all accesses to a private attribute of anything except `self` and `cls`."""
    for node in nodes(module, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not own and node.attr.startswith("_") and not node.attr.endswith("__"):
            yield node


def definitions(module: Module) -> Iterator[Definition]:
    for kind in (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
        yield from nodes(module, kind)


def nodes(module: Module, kind: type[Node]) -> Iterator[Node]:
    return (node for node in ast.walk(module.tree) if isinstance(node, kind))


def last_name(node: ast.expr) -> str:
    """Return `c` for both `a.b.c` and `c`; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def git(root: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr.decode().strip())
    return done.stdout


@contextmanager
def checkout(root: Path, revision: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit. Does not touch the working tree."""
    with tempfile.TemporaryDirectory(prefix="antiphon-") as folder:
        with tarfile.open(fileobj=io.BytesIO(git(root, "archive", revision))) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the structure of the code.")
    parser.add_argument("--repo", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--rev", nargs="+", action="extend", default=[], help="commits; the working tree if not given")
    parser.add_argument("--json", type=Path, default=RESULT, metavar="FILE", help="file for the figures [%(default)s]")
    parser.add_argument("--list", metavar="FIGURE", help="print the places of a figure, and write nothing")
    args = parser.parse_args()
    root = args.repo.resolve()
    columns = {} if args.rev else {"working tree": measure(root)}
    for revision in args.rev:
        with checkout(root, revision) as tree:
            columns[revision] = measure(tree)
    first = next(iter(columns.values()))
    if args.list:
        if args.list not in first.places:
            parser.error(f"--list: one of {', '.join(map(repr, first.places))}")
        print("\n".join(first.places[args.list]))
        return
    width = max(map(len, first.figures))
    print(" " * width + "".join(f"  {column:>12}" for column in columns))
    for name in first.figures:
        print(name.ljust(width) + "".join(f"  {report.figures[name]:>12,}" for report in columns.values()))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({c: r.figures for c, r in columns.items()}, indent=1) + "\n")
    print(f"\nwritten: {args.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
