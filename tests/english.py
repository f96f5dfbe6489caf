"""Phrases of a private grammar, and fields without a sentence: what tests/test_english.py does not let come back.

    python -m tests.english PATH...

prints each with its place. `PHRASES` has a pattern, and what to say instead.
"""

from __future__ import annotations

import ast
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PHRASES = {
    r"\bso (many|much|long|often|soon)\b": "the number's name, or what it counts",
    r"\btold\b": "sent, returned, reported, passed",
    r"\bthat there (is|are) not\b": "missing, unknown",
    r"\busual of\b": "normal for, typical of",
    r"\bas [`\w.]+ (has|have) (it|them)\b": "see, same as",
    r"\bwhoever\b": "the caller, the client",
    r"\blest\b": "so that ... not",
    r"\bof late\b": "recently",
    r"\banew\b": "again",
    r"\bbut for\b": "except",
    r"\bby so much\b": "the amount's name",
    r"\bnot any more\b": "no longer",
    r"\bere\b": "before",
    r"\bas much as (is|are|was) (left|there)\b": "the rest",
}
# A class with more fields than this has a sentence at each.
MAX_FIELDS = 5
SUFFIXES = (".py", ".md", ".js", ".ts", ".sh", ".html", ".toml", ".yaml", ".yml", ".cfg")
SKIPPED = (".", "node_modules", "golden", "traces", "results")
ONE = re.compile("|".join(f"(?:{pattern})" for pattern in PHRASES), re.IGNORECASE)


def phrases(path: Path) -> Iterator[str]:
    """Yield each phrase of the list in a file, as "path:line: phrase"."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for found in ONE.finditer(line):
            yield f"{path.relative_to(ROOT)}:{number}: {found[0]}"


def bare_fields(path: Path) -> Iterator[str]:
    """Yield each field without a sentence of a class with more than MAX_FIELDS, as "path:line: Class.field".

    A sentence is a comment above the field or beside it, a string below it, or a `help` or `option` within it.
    """
    text = path.read_text(encoding="utf-8")
    comments = {t.start[0] for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
        if len(fields) <= MAX_FIELDS:
            continue
        for field in fields:
            below = node.body[node.body.index(field) + 1 : node.body.index(field) + 2]
            has_string = any(isinstance(b, ast.Expr) and isinstance(b.value, ast.Constant) for b in below)
            named = field.value is not None and "option(" in ast.unparse(field.value)
            has_comment = bool(comments & set(range(field.lineno - 1, (field.end_lineno or field.lineno) + 1)))
            assert isinstance(field.target, ast.Name)
            if not (has_comment or has_string or named or field.target.id.startswith("_")):
                yield f"{path.relative_to(ROOT)}:{field.lineno}: {node.name}.{field.target.id}"


def short_docstrings(path: Path) -> Iterator[str]:
    """Yield each public docstring of five words or fewer, as "path:line: name"."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            said = ast.get_docstring(node)
            if said is not None and len(said.split()) <= 5:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}: {said}"


def files(*where: Path) -> Iterator[Path]:
    """Yield the files with text of ours below these paths."""
    for path in where:
        for folder, below, names in os.walk(path) if path.is_dir() else [(path.parent, [], [path.name])]:
            # Not walked: environments of clients have 100,000 files.
            below[:] = sorted(name for name in below if not name.startswith(SKIPPED))
            for file in (Path(folder, name) for name in sorted(names)):
                # The notes of the time before 0.1.0 stay as they were written.
                archive = file == ROOT / "docs" / "history.md" or file == Path(__file__).resolve()
                if file.suffix in SUFFIXES and not file.name.startswith(SKIPPED) and not archive:
                    yield file


def main() -> None:
    """Print what is found in the paths of the command line."""
    for file in files(*(Path(a).resolve() for a in sys.argv[1:])):
        for line in phrases(file):
            print("phrase", line)
        if file.suffix == ".py" and "src" in file.parts:
            for line in bare_fields(file):
                print("field", line)
            for line in short_docstrings(file):
                print("short", line)


if __name__ == "__main__":
    main()
