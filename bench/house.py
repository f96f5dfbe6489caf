"""Measures the structure of the code: sizes, types, documentation, line widths, folders, repetition, private accesses.

    python bench/house.py [--repo DIR] [--rev REV ...] [--json FILE] [--list FIGURE]

Without --rev the working tree is measured; with it each revision is, side by side. --list prints the places behind a
figure of the first column instead of the table. Needs git and the standard library only. "Source" is every *.py under
src/antiphon; files that git ignores are left out. The figures:

    lines, modules           Physical lines and files of the source.
    module median, p90, max  Physical lines of a module; p90 is the value at index floor(0.9 n) of the sorted lengths.
    functions                Every def, methods and nested ones included, from its `def` line to its last line.
    broad excepts            Handlers that catch Exception, BaseException or everything, alone or within a tuple.
    dict[str, Any]           Subscripts written exactly so, wherever a type stands.
    untyped maps             The same of any spelling: subscripts of a dict or Mapping class whose values are Any or
                             object, and uses of a name that a module defines as such a map or imports so defined.
    public docstrings        Share of the classes and functions without a leading underscore that have a docstring.
    docstring words          Median of the words, split at white space, of these docstrings.
    comment lines            Share of the source's physical lines that hold a comment and nothing else.
    over 120 columns         Lines of more than 120 characters in *.py and *.md, table rows included. "docs" is docs/
                             and the *.md files of the repository's root; "other" is bench, examples and the rest.
    flat modules             Modules in the package's root, __init__.py and __main__.py left out.
    folders in the root      Folders directly in the package's root that hold modules, at any depth.
    folders                  Folders that hold modules, at any depth below the package's root.
    folders over 12          The same with more than twelve modules, __init__.py left out.
    duplicated runs          Pairs of modules (or a module and itself) that share a run of six or more code lines, equal
                             after one consistent renaming of names, strings and numbers. Blank lines, comments,
                             docstrings, imports and lines of brackets alone are passed over; six lines with fewer than
                             24 tokens are too thin to count. From Python 3.12 on an f-string is several tokens.
    duplicated statements    Duplicated runs among the lines of function bodies alone: dataclasses' fields, signatures
                             and tables, whose shapes are alike without saying the same, are passed over.
    exact duplicated runs    Duplicated runs with no renaming.
    shared class names       Names of public classes at module level that more than one module defines.
    private in tests         Accesses `x._name` in tests where x is neither `self` nor `cls`; dunder names left out.
    private in source        The same in the source.
    private across packages  Of these, the ones whose name no module of the accessing module's own folder defines.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import keyword
import statistics
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path, PurePosixPath
from typing import TypeVar

RESULT = Path(__file__).resolve().parent / "results" / "house.json"
PACKAGE = PurePosixPath("src/antiphon")
COLUMNS = 120
MOST_MODULES = 12
MOST_FUNCTION_LINES = 40
RUN_LINES = 6
RUN_TOKENS = 24
KINDS = {tokenize.NAME: "n", tokenize.STRING: "s", tokenize.NUMBER: "0"}
MAPS = {"dict", "Dict", "defaultdict", "OrderedDict", "Mapping", "MutableMapping"}

Figure = int | float
Node = TypeVar("Node", bound=ast.AST)
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file: its path from the repository's root, its text and its syntax tree."""

    path: PurePosixPath
    text: str
    tree: ast.Module

    @property
    def length(self) -> int:
        return len(self.text.splitlines())

    def place(self, node: ast.expr | ast.stmt | ast.excepthandler) -> str:
        return f"{self.path}:{node.lineno}"


@dataclass(slots=True)
class Report:
    """Figures by name, and for those that count places the places themselves."""

    figures: dict[str, Figure] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)

    def count(self, name: str, places: Iterable[str]) -> None:
        self.places[name] = list(places)
        self.figures[name] = len(self.places[name])


def measure(root: Path) -> Report:
    """All figures of the tree at `root`."""
    files = {path: (root / path).read_text(encoding="utf-8") for path in paths(root)}
    modules = [Module(p, t, ast.parse(t, str(p))) for p, t in files.items() if p.suffix == ".py"]
    source = [m for m in modules if m.path.is_relative_to(PACKAGE)]
    if not source:
        raise SystemExit(f"house: no modules under {root / PACKAGE}")
    report = Report()
    sizes(report, source)
    types(report, source)
    documentation(report, source)
    widths(report, files)
    folders(report, source)
    repetition(report, source)
    privacy(report, source, [m for m in modules if m.path.parts[0] == "tests"])
    return report


def paths(root: Path) -> list[PurePosixPath]:
    """The *.py and *.md files below `root`; in a git checkout those that git does not ignore."""
    if (root / ".git").exists():
        listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0")
        found = [PurePosixPath(name) for name in listed if name and (root / name).is_file()]
    else:
        found = [PurePosixPath(path.relative_to(root).as_posix()) for path in root.rglob("*") if path.is_file()]
    return sorted(path for path in found if path.suffix in (".py", ".md"))


def sizes(report: Report, source: Sequence[Module]) -> None:
    lengths = sorted(module.length for module in source)
    report.figures |= {
        "lines": sum(lengths),
        "modules": len(lengths),
        "module median": statistics.median(lengths),
        "module p90": lengths[int(len(lengths) * 0.9)],
        "module max": lengths[-1],
    }
    functions = {
        m.place(n): (n.end_lineno or n.lineno) - n.lineno + 1
        for m in source
        for n in definitions(m)
        if not isinstance(n, ast.ClassDef)
    }
    long = [place for place, lines in functions.items() if lines > MOST_FUNCTION_LINES]
    report.figures["functions <= 40 lines, %"] = percent(len(functions) - len(long), len(functions))
    report.figures["longest function"] = max(functions.values())
    report.places["functions <= 40 lines, %"] = long


def types(report: Report, source: Sequence[Module]) -> None:
    report.count(
        "broad excepts",
        (m.place(n) for m in source for n in nodes(m, ast.ExceptHandler) if is_broad(n)),
    )
    subscripts = [(m, n) for m in source for n in nodes(m, ast.Subscript)]
    report.count("dict[str, Any]", (m.place(n) for m, n in subscripts if ast.unparse(n) == "dict[str, Any]"))
    aliases = {name for m in source for name in map_aliases(m)}
    uses = [m.place(n) for m in source for n in alias_uses(m, aliases)]
    report.count("untyped maps", [m.place(n) for m, n in subscripts if is_untyped_map(n)] + uses)


def is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(last_name(one) in ("Exception", "BaseException") for one in caught)


def is_untyped_map(node: ast.Subscript) -> bool:
    if last_name(node.value) not in MAPS or not isinstance(node.slice, ast.Tuple):
        return False
    return last_name(node.slice.elts[-1]) in ("Any", "object")


def map_aliases(module: Module) -> Iterator[str]:
    """The names that the module defines as an untyped map, or as a union or container of one."""
    for node in module.tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        is_type = isinstance(target, ast.Name) and isinstance(value, ast.Subscript | ast.BinOp)
        if is_type and any(isinstance(n, ast.Subscript) and is_untyped_map(n) for n in ast.walk(value)):
            yield target.id


def alias_uses(module: Module, aliases: set[str]) -> Iterator[ast.Name]:
    """The names in the module that mean one of the aliases: it defines the name itself, or imports it."""
    imported = {a.asname or a.name for node in nodes(module, ast.ImportFrom) for a in node.names if a.name in aliases}
    known = imported | set(map_aliases(module))
    return (n for n in nodes(module, ast.Name) if n.id in known and isinstance(n.ctx, ast.Load))


def documentation(report: Report, source: Sequence[Module]) -> None:
    public = [(m, n) for m in source for n in definitions(m) if not n.name.startswith("_")]
    words = [len(text.split()) for _, n in public if (text := ast.get_docstring(n))]
    report.figures["public docstrings, %"] = percent(len(words), len(public))
    report.places["public docstrings, %"] = [m.place(n) for m, n in public if not ast.get_docstring(n)]
    report.figures["docstring words"] = statistics.median(words) if words else 0
    comments = sum(line.lstrip().startswith("#") for m in source for line in m.text.splitlines())
    report.figures["comment lines, %"] = percent(comments, sum(m.length for m in source))


def definitions(module: Module) -> Iterator[Definition]:
    yield from nodes(module, ast.ClassDef)
    yield from nodes(module, ast.FunctionDef)
    yield from nodes(module, ast.AsyncFunctionDef)


def widths(report: Report, files: dict[PurePosixPath, str]) -> None:
    wide: dict[str, list[str]] = {"src": [], "tests": [], "docs": [], "other": []}
    for path, text in files.items():
        top = "docs" if len(path.parts) == 1 and path.suffix == ".md" else path.parts[0]
        lines = enumerate(text.splitlines(), 1)
        wide[top if top in wide else "other"] += [f"{path}:{n}" for n, line in lines if len(line) > COLUMNS]
    for top, places in wide.items():
        report.count(f"over 120 columns, {top}", places)
    report.count("over 120 columns", chain.from_iterable(wide.values()))


def folders(report: Report, source: Sequence[Module]) -> None:
    modules: dict[PurePosixPath, list[str]] = defaultdict(list)
    for path in (m.path for m in source):
        modules[path.parent] += [path.name] if path.name != "__init__.py" else []
    below = [folder for folder in modules if folder != PACKAGE]
    report.count("flat modules", sorted(n for n in modules[PACKAGE] if n != "__main__.py"))
    report.count("folders in the root", sorted({folder.relative_to(PACKAGE).parts[0] for folder in below}))
    report.count("folders", map(str, below))
    report.count("folders over 12", (f"{f}: {n}" for f in below if (n := len(modules[f])) > MOST_MODULES))


def repetition(report: Report, source: Sequence[Module]) -> None:
    lines = {m.path: code_lines(m) for m in source}
    report.count("duplicated runs", repeated(lines, shape))
    inside = {m.path: statement_lines(m) for m in source}
    statements = {path: [line for line in own if line.number in inside[path]] for path, own in lines.items()}
    report.count("duplicated statements", repeated(statements, shape))
    report.count("exact duplicated runs", repeated(lines, exact))
    homes: dict[str, list[str]] = defaultdict(list)
    for module in source:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module.place(node))
    report.count("shared class names", (f"{n}: {', '.join(at)}" for n, at in sorted(homes.items()) if len(at) > 1))


@dataclass(frozen=True, slots=True)
class Line:
    """A line of code: its number, and each token's text with its kind: keyword or operator "", else "n", "s" or "0"."""

    number: int
    tokens: tuple[tuple[str, str], ...]


def code_lines(module: Module) -> list[Line]:
    """The lines that repetition is looked for in, in order; a string of several lines stands on its first."""
    passed = set[int]()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Expr) and not is_code(node):
            passed.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.string.strip() and token.type != tokenize.COMMENT and token.start[0] not in passed:
            kind = "" if keyword.iskeyword(token.string) else KINDS.get(token.type, "")
            lines[token.start[0]].append((token.string, kind))
    words = {n for n, tokens in lines.items() if any(kind or text.isalpha() for text, kind in tokens)}
    return [Line(n, tuple(tokens)) for n, tokens in lines.items() if n in words]


def statement_lines(module: Module) -> set[int]:
    """The numbers of the lines inside function bodies."""
    found = set[int]()
    for kind in (ast.FunctionDef, ast.AsyncFunctionDef):
        for node in nodes(module, kind):
            found.update(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
    return found


def is_code(node: ast.stmt) -> bool:
    """Whether a statement is neither an import nor a string that stands alone, which is a docstring."""
    if isinstance(node, ast.Expr):
        return not (isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
    return not isinstance(node, ast.Import | ast.ImportFrom)


def shape(run: Sequence[Line]) -> str:
    """The run with its names, strings and numbers replaced by the order in which each first occurs."""
    order: dict[tuple[str, str], int] = {}
    return "\n".join(
        " ".join(f"{kind}{order.setdefault((text, kind), len(order))}" if kind else text for text, kind in line.tokens)
        for line in run
    )


def exact(run: Sequence[Line]) -> str:
    return "\n".join(" ".join(text for text, _ in line.tokens) for line in run)


def repeated(lines: dict[PurePosixPath, list[Line]], key: Callable[[Sequence[Line]], str]) -> list[str]:
    """One place for each pair of modules that share a run: the first of the pair's shared runs."""
    runs: dict[str, list[tuple[PurePosixPath, int]]] = defaultdict(list)
    for path, own in lines.items():
        for start in range(len(own) - RUN_LINES + 1):
            run = own[start : start + RUN_LINES]
            if sum(len(line.tokens) for line in run) >= RUN_TOKENS:
                runs[key(run)].append((path, start))
    pairs: dict[tuple[PurePosixPath, PurePosixPath], str] = {}
    for places in runs.values():
        for (a, at), (b, other) in combinations(places, 2):
            if a != b or other - at >= RUN_LINES:
                pairs.setdefault((a, b), f"{a}:{lines[a][at].number} ~ {b}:{lines[b][other].number}")
    return list(pairs.values())


def privacy(report: Report, source: Sequence[Module], tests: Sequence[Module]) -> None:
    report.count("private in tests", (m.place(n) for m in tests for n in foreign(m)))
    report.count("private in source", (m.place(n) for m in source for n in foreign(m)))
    known: dict[PurePosixPath, set[str]] = defaultdict(set)
    for module in source:
        known[module.path.parent] |= set(defined(module))
    report.count(
        "private across packages",
        (m.place(n) for m in source for n in foreign(m) if n.attr not in known[m.path.parent]),
    )


def foreign(module: Module) -> Iterator[ast.Attribute]:
    """Accesses to private attributes of anything but `self` and `cls`."""
    for node in nodes(module, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not own and node.attr.startswith("_") and not node.attr.endswith("__"):
            yield node


def defined(module: Module) -> Iterator[str]:
    """Names that the module defines: functions, classes, variables, fields, and attributes set on `self` or `cls`."""
    for node in ast.walk(module.tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def nodes(module: Module, kind: type[Node]) -> Iterator[Node]:
    return (node for node in ast.walk(module.tree) if isinstance(node, kind))


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c` and of `c`; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1) if whole else 0.0


def git(root: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True)
    if done.returncode:
        raise SystemExit(f"house: {done.stderr.decode().strip()}")
    return done.stdout


def measure_revision(root: Path, revision: str) -> Report:
    """The figures of a commit, read from git; the working tree is left alone."""
    with tempfile.TemporaryDirectory(prefix="house-") as folder:
        with tarfile.open(fileobj=io.BytesIO(git(root, "archive", revision))) as archive:
            archive.extractall(folder, filter="data")
        return measure(Path(folder))


def show(columns: dict[str, Report]) -> None:
    names = list(dict.fromkeys(name for report in columns.values() for name in report.figures))
    width = max(map(len, names))
    print(" " * width + "".join(f"  {column:>12}" for column in columns))
    for name in names:
        cells = (f"{report.figures.get(name, float('nan')):,}" for report in columns.values())
        print(name.ljust(width) + "".join(f"  {cell:>12}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the structure of the code.")
    parser.add_argument("--repo", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--rev", nargs="+", action="extend", default=[], help="commits; the working tree if not given")
    parser.add_argument("--json", type=Path, default=RESULT, metavar="FILE", help="where the figures go [%(default)s]")
    parser.add_argument("--list", metavar="FIGURE", help="print the places behind a figure, and write nothing")
    args = parser.parse_args()
    root = args.repo.resolve()
    columns = {rev: measure_revision(root, rev) for rev in args.rev} or {"working tree": measure(root)}
    if args.list:
        first = next(iter(columns.values()))
        if args.list not in first.places:
            parser.error(f"--list: one of {', '.join(map(repr, first.places))}")
        print("\n".join(first.places[args.list]))
        return
    show(columns)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({c: r.figures for c, r in columns.items()}, indent=1) + "\n")
    print(f"\nwritten: {args.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
