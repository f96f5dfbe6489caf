"""The commit that this copy of antiphon was built from, for `antiphon --version` and reports of faults."""

from __future__ import annotations

from pathlib import Path

from antiphon import __version__

PACKAGE = Path(__file__).parents[1]


def shown_version() -> str:
    """Return the version and the commit, as in "antiphon 0.1.0 (1a2b3c4d5e6f)"; without the commit if it is unknown."""
    known = commit()
    return f"antiphon {__version__}{f' ({known})' if known else ''}"


def commit(package: Path = PACKAGE) -> str:
    """Return the first twelve digits of the commit; "" if it is unknown.

    Reads the file COMMIT of a release, or the folder `.git` of a checkout. Does not run the program git.
    """
    try:
        return (package / "COMMIT").read_text(encoding="ascii").strip()[:12]
    except OSError:
        pass
    try:
        git = package.parents[1] / ".git"
        if git.is_file():
            # In a worktree, `.git` is a file that names a folder. The file `commondir` there names the repository's.
            git = git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head[:12]
        return _of_reference(git, head.removeprefix("ref: "))[:12]
    except (OSError, IndexError):
        return ""


def _of_reference(git: Path, name: str) -> str:
    """The commit of a branch, from its own file or the packed ones."""
    shared = git / "commondir"
    folders = [git, git / shared.read_text(encoding="utf-8").strip()] if shared.exists() else [git]
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8").strip()
        packed = folder / "packed-refs"
        for line in packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else ():
            if line.endswith(f" {name}"):
                return line.split()[0]
    return ""
