"""Runs the tests of changed modules and of the modules that import them: `make quick`.

    python -m tests.affected [--base REVISION] [PYTEST ARGUMENTS]

Changed files are those that differ from REVISION (HEAD by default), including untracked files. A test module is
affected if it changed itself, if its folder mirrors the folder of a changed module, or if it imports a changed module,
directly or through other modules. Tests marked `server`, `slow` or `heavy` are excluded; `make test` runs them.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Tests of the rules for the whole tree and for its pages. They run for any change.
RULES = ("tests/test_layout.py", "tests/test_names.py", "tests/test_docs.py")
LEFT_OUT = "not server and not slow and not heavy"
HOW = ("-n", "2", "--dist", "loadfile")


def changed_files(base: str) -> list[str]:
    """Return the paths, from the root of the checkout, of the files that differ from `base` or are untracked."""
    commands = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    outputs = (subprocess.run(["git", *c], cwd=ROOT, check=True, capture_output=True, text=True) for c in commands)
    return sorted({line for output in outputs for line in output.stdout.splitlines()})


def module_name(path: str) -> str:
    """Return the dotted name under which `path` is imported."""
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(source: str) -> set[str]:
    """Return the dotted names that a module may import: of modules, and of things in modules."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def affected(changed: Iterable[str], sources: Mapping[str, str]) -> list[str]:
    """Return the paths of the test modules that a change affects.

    Args:
        changed: Paths of the changed files, from the root.
        sources: The text of every Python file by its path.
    """
    imports = {path: imported(text) for path, text in sources.items()}
    modules = {module_name(path) for path in changed if path.endswith(".py")}
    near = modules | {module_name(path) for path, names in imports.items() if names & modules}
    mirrors = {f"tests/{Path(path).parent.relative_to('src/antiphon')}/" for path in changed if is_source(path)}
    tests = {path for path in sources if Path(path).name.startswith("test_") and path.startswith("tests/")}
    found = {path for path in tests if path in changed or imports[path] & near}
    return sorted(found | {path for path in tests if f"{Path(path).parent}/" in mirrors})


def is_source(path: str) -> bool:
    return path.startswith("src/antiphon/") and Path(path).parent != Path("src/antiphon")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="revision to compare with")
    args, others = parser.parse_known_args()
    changed = [path for path in changed_files(args.base) if (ROOT / path).exists()]
    files = (path for folder in ("src", "tests", "bench") for path in (ROOT / folder).rglob("*.py"))
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files if is_ours(path)}
    tests = sorted({*affected(changed, sources), *RULES}) if changed else []
    print(f"{len(changed)} changed files, {len(tests)} test modules", flush=True)
    if tests:
        sys.exit(
            subprocess.run([sys.executable, "-m", "pytest", *HOW, "-m", LEFT_OUT, *others, *tests], cwd=ROOT).returncode
        )


def is_ours(path: Path) -> bool:
    """Return whether the file is outside of the virtual environments that tests create."""
    return not any(part.startswith(".") or part == "node_modules" for part in path.relative_to(ROOT).parts)


if __name__ == "__main__":
    main()
