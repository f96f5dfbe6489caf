"""Builds a release into dist/VERSION, and checks it: what `make release` runs.

    python deploy/release.py [--check] [--extras speech,talk] [--allow-changes]

It refuses a working tree with changes, files that disagree about the version, and a changelog without a section for the
version (`--check` stops there). Then it builds the sdist, the wheel, the npm package, the image recipe, the bill of
materials (SBOM) and the notes, all from the committed files, and writes SHA256SUMS. At the end, it installs the wheel
with each extra from requirements.lock into an empty environment, and starts it. `--extras` limits this to some extras;
"" skips it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Extras whose packages the lock does not have, or that only tests need.
NOT_INSTALLED = ("dev", "ray")
# The image recipe: the files that `deploy/build.sh` and the compose file read, in addition to the wheel's sources.
RECIPE = ("deploy", "requirements.lock", "pyproject.toml", "LICENSE", "README.md")


def versions(root: Path) -> dict[str, str]:
    """Return the version that each file states, by the file's path."""
    texts = {
        "src/antiphon/__init__.py": r'^__version__ = "([^"]+)"',
        "src/antiphon/web/client/package.json": r'"version": "([^"]+)"',
        "deploy/chart/Chart.yaml": r"^appVersion: (\S+)",
        "CHANGELOG.md": r"^## \[(\d[^\]]*)\]",
        "docs/stability.md": r"antiphon (\d+\.\d+\.\d+)",
    }
    found = {"pyproject.toml": str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])}
    for path, pattern in texts.items():
        match = re.search(pattern, (root / path).read_text(encoding="utf-8"), re.MULTILINE)
        found[path] = match[1] if match else "none"
    return found


def notes(changelog: str, version: str) -> str:
    """Return the section of a changelog for a version. Raises ValueError if the section is missing or empty."""
    match = re.search(rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    if match is None or not match[1].strip():
        raise ValueError(f"CHANGELOG.md has no section for {version}")
    return match[1].strip() + "\n"


def problems(root: Path, *, allow_changes: bool = False) -> list[str]:
    """Return the reasons why a checkout cannot be released, one per line."""
    found, named = list[str](), versions(root)
    version = named["pyproject.toml"]
    found += [f"{path} names version {other}, not {version}" for path, other in named.items() if other != version]
    try:
        notes((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    except ValueError as error:
        found.append(str(error))
    if not allow_changes and _git(root, "status", "--porcelain"):
        found.append("the working tree has changes that are not committed")
    return found


def build(root: Path, out: Path, version: str) -> None:
    """Build all files of a release from the committed files, into the folder `out`."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(tree, filter="data")
        (tree / "src" / "antiphon" / "COMMIT").write_text(_git(root, "rev-parse", "HEAD"))
        hooks = f"from setuptools import build_meta as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
        _run([sys.executable, "-c", hooks], tree)
        recipe = out / f"antiphon-{version}-image.tar.gz"
        with tarfile.open(recipe, "w:gz") as tar:
            for name in RECIPE:
                tar.add(tree / name, f"antiphon-{version}/{name}")
        npm = tree / "src" / "antiphon" / "web" / "client"
        _run(["npm", "install", "--silent", "--no-audit", "--no-fund"], npm)
        _run(["npm", "pack", "--silent", "--pack-destination", str(out)], npm)
    _run(["make", "-s", "sbom"], root)
    shutil.copy(root / "build" / "sbom.json", out / f"antiphon-{version}-sbom.json")
    (out / "NOTES.md").write_text(notes((root / "CHANGELOG.md").read_text(encoding="utf-8"), version))
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}" for p in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("\n".join(sums) + "\n")


def extras(root: Path) -> list[str]:
    """Return the extras with which an installation is checked; "" is the package alone."""
    named = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return ["", *(extra for extra in named if extra not in NOT_INSTALLED)]


def try_install(root: Path, wheel: Path, extra: str, expected: str) -> None:
    """Install a wheel with one extra into an empty environment, and start it.

    Raises RuntimeError if its version is not `expected`, or if a package of the extra is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "bin" / "python"
        _run([sys.executable, "-m", "venv", folder], root)
        _run([str(python), "deploy/lock.py", "install", extra], root)
        _run([str(python), "-m", "pip", "install", "-q", "--no-deps", str(wheel)], root)
        said = _run([str(python.with_name("antiphon")), "--version"], Path(folder)).strip()
        if said != expected:
            raise RuntimeError(f"antiphon[{extra}] says {said!r}, not {expected!r}")
        code = f"from antiphon.extras import missing_packages as m; print(*m({extra!r}))" if extra else "print()"
        if missing := _run([str(python), "-c", code], Path(folder)).strip():
            raise RuntimeError(f"antiphon[{extra}] lacks {missing}")


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)[:200]} ended with {done.returncode}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="only say whether a release can be made")
    parser.add_argument("--extras", help="extras to install for the check, comma separated (all); '' for none")
    parser.add_argument("--allow-changes", action="store_true", help="although files are not committed: for trying")
    args = parser.parse_args()
    if found := problems(ROOT, allow_changes=args.allow_changes):
        sys.exit("\n".join(["no release can be made:", *found]))
    version = versions(ROOT)["pyproject.toml"]
    if args.check:
        print(f"antiphon {version} can be released")
        return
    out = ROOT / "dist" / version
    build(ROOT, out, version)
    (wheel,) = out.glob("*.whl")
    expected = f"antiphon {version} ({_git(ROOT, 'rev-parse', 'HEAD')[:12]})"
    chosen = extras(ROOT) if args.extras is None else [e for e in args.extras.split(",") if e]
    for extra in chosen:
        try_install(ROOT, wheel, extra, expected)
        print(f"installed: antiphon{f'[{extra}]' if extra else ''}")
    print(json.dumps({path.name: path.stat().st_size for path in sorted(out.iterdir())}, indent=1))


if __name__ == "__main__":
    main()
