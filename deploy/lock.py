"""Writes `requirements.lock` from `pyproject.toml`, and installs from it. Needs only Python's standard library.

    python deploy/lock.py write [--upgrade] [--torch-index URL]    needs uv
    python deploy/lock.py install EXTRAS [--torch-index URL]       into the environment of this Python
    python deploy/lock.py compare FOLDER                           with the packages of an environment

The lock has one version of each package for all platforms (PLATFORMS), with the SHA-256 of each of the package's files.
pip accepts no other file. EXTRAS are extras of `pyproject.toml`, separated by commas; "" stands for the package without
extras.

One version of torch has several builds. The lock has the hashes of the builds on the package index, which need the CUDA
packages. It also has hashes of CPU builds: of the build that pip selects on the machine that writes the lock and, with
`--torch-index`, of the builds on that index. `install` installs the CUDA packages only if the selected build needs
them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCK, PROJECT = ROOT / "requirements.lock", ROOT / "pyproject.toml"
OLDEST, BEFORE, MACHINES = "3.11", "3.15", ("aarch64", "x86_64")
PLATFORMS = [f"sys_platform == 'linux' and platform_machine == '{m}' and python_version < '{BEFORE}'" for m in MACHINES]
# The environment markers for PLATFORMS, which uv writes on each line.
_EVERYWHERE = f"python_full_version < '{BEFORE}' and ({{}})".format(
    " or ".join(f"(platform_machine == '{m}' and sys_platform == 'linux')" for m in MACHINES)
)
# Prefixes of the packages that only CUDA builds of torch need.
CUDA = re.compile(r"(cuda|nvidia)-|triton\b")
OURS, BASE = "antiphon", "base"
HEAD = """\
# Written by `make lock` from pyproject.toml: Linux on {machines}, Python {oldest} to before {before}. Do not edit.
# sha256 of what pyproject.toml requires: {digest}
"""


@dataclass(frozen=True, slots=True)
class Locked:
    """One package of the lock: its `lines`, and the `extras` that need it. BASE stands for all installations."""

    name: str
    version: str
    lines: tuple[str, ...]
    extras: frozenset[str]

    @property
    def hashes(self) -> tuple[str, ...]:
        """The SHA-256 of each of its files, in hex."""
        return tuple(found for line in self.lines for found in re.findall(r"--hash=sha256:([0-9a-f]{64})(?!\S)", line))


def read(text: str) -> dict[str, Locked]:
    """Return the packages of a lock by name. Raises ValueError for a line that a lock cannot have."""
    found: dict[str, Locked] = {}
    lines: list[str] = []
    for line in [*text.splitlines(), "end==0"]:
        if not line or line.startswith("#"):
            continue
        if line[0].isspace():
            lines.append(line)
            continue
        if lines:
            one = _locked(lines)
            if one.name in found:
                raise ValueError(f"{one.name} is there twice")
            found[one.name] = one
        lines = [line]
    return found


def _locked(lines: list[str]) -> Locked:
    start = re.match(r"([a-z0-9-]+)==([^ ;]+)( ; [^\\]+)?( \\)?$", lines[0])
    strange = [k for k in lines[1:] if not re.match(r"    (--hash=sha256:[0-9a-f]{64}( \\)?|# for .*)$", k)]
    if start is None or strange:
        raise ValueError(f"not a line of a lock: {strange[0] if strange else lines[0]}")
    extras = {extra for line in lines[1:] if "#" in line for extra in line.split("# for ")[1].split(", ")}
    return Locked(start[1], start[2], tuple(lines), frozenset(extras))


def normalized(name: str) -> str:
    """Return a package's name in the spelling of the lock."""
    return re.sub(r"[-_.]+", "-", name).lower()


def digest(project: Mapping[str, Any]) -> str:
    """Return the hash of everything in the project that determines the content of the lock."""
    own = project["project"]
    said = [own["requires-python"], own["dependencies"], own["optional-dependencies"], project["build-system"]]
    return hashlib.sha256(json.dumps([*said, PLATFORMS]).encode()).hexdigest()


def selected(lock: Mapping[str, Locked], extras: Iterable[str]) -> list[Locked]:
    """Return the packages that the project needs with these extras."""
    wanted = {BASE, *extras}
    return [package for package in lock.values() if package.extras & wanted]


def install(extras: list[str], torch_index: str) -> None:
    """Install the packages that the extras need, without antiphon itself.

    Checks each file, and runs no build scripts.
    """
    everything = read(LOCK.read_text())
    if unknown := set(extras) - {extra for package in everything.values() for extra in package.extras}:
        sys.exit(f"no such extra: {', '.join(sorted(unknown))}")
    lock = {package.name: package for package in selected(everything, extras)}
    torch = lock.pop("torch", None)
    if torch:
        pip_install([chosen_build(torch, torch_index)], *index_options(torch_index))
    pip_install([package for package in lock.values() if not CUDA.match(package.name)])
    if torch:
        # A new process, because this one may have cached the environment's packages.
        code = "from importlib.metadata import requires; print(*requires('torch'), sep='\\n')"
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        if any(CUDA.match(line) for line in said.splitlines()):
            pip_install([package for package in lock.values() if CUDA.match(package.name)])


def pip_install(packages: list[Locked], *options: str) -> None:
    """Install packages whose files have the hashes of the lock. Exits if pip fails."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(line for package in packages for line in package.lines) + "\n")
        file.flush()
        command = [sys.executable, "-m", "pip", "install", "-q", "--require-hashes", "--no-deps"]
        done = subprocess.run([*command, "--only-binary", ":all:", *options, "-r", file.name], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def compare(folder: Path) -> list[str]:
    """Report the packages of an environment that the lock lacks, or has in another version. Ignores antiphon itself."""
    lock = read(LOCK.read_text())
    paths = [str(path) for path in folder.glob("lib/python3*/site-packages")]
    found = {normalized(one.name): one.version for one in metadata.distributions(path=paths)}
    there = {name: version.split("+")[0] for name, version in found.items() if name != OURS}
    return [
        f"{name} {version}: the lock has {lock[name].version if name in lock else 'none'}"
        for name, version in sorted(there.items())
        if name not in lock or lock[name].version != version
    ]


def write(upgrade: bool, torch_index: str) -> None:
    """Resolve the project again. Versions are kept where possible; an upgrade takes the newest ones."""
    project = tomllib.loads(PROJECT.read_text())
    before = {} if upgrade or not LOCK.exists() else read(LOCK.read_text())
    everything = [*project["project"]["optional-dependencies"]]
    versions = "".join(f"{package.name}=={package.version}\n" for package in before.values())
    text = _resolved(project, everything, versions)
    needs: dict[str, list[str]] = {}
    for extra in [BASE, *everything]:
        for name in re.findall(r"^([a-z0-9-]+)==", _resolved(project, [extra], text), re.MULTILINE):
            needs.setdefault(name, []).append(extra)
    lines = HEAD.format(
        machines=" and ".join(MACHINES), oldest=OLDEST, before=BEFORE, digest=digest(project)
    ).splitlines()
    for package in read(text).values():
        sums = set(package.hashes)
        if package.name == "torch":
            kept = before.get("torch")
            sums |= {*cpu_builds(package.version, torch_index)}
            sums |= {*kept.hashes} if kept and kept.version == package.version else set()
        extras = needs[package.name]
        lines.append(package.lines[0])
        lines += [f"    --hash=sha256:{one} \\" for one in sorted(sums)]
        lines[-1] = lines[-1].removesuffix(" \\")
        lines.append(f"    # for {BASE if BASE in extras else ', '.join(extras)}")
    LOCK.write_text("\n".join(lines) + "\n")


def _resolved(project: Mapping[str, Any], extras: list[str], versions: str) -> str:
    """Return uv's resolution of the project, these extras and the build requirements. Keeps the `versions` that fit."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "build.in").write_text("\n".join(project["build-system"]["requires"]) + "\n")
        (Path(folder) / "pyproject.toml").write_text(
            f"{PROJECT.read_text()}\n[tool.uv]\nenvironments = {json.dumps(PLATFORMS)}\n"
        )
        (Path(folder) / "lock").write_text(versions)
        uv = ["uv", "pip", "compile", "-q", "pyproject.toml", "build.in", "--universal", "--python-version", OLDEST]
        uv += ["--generate-hashes", "--only-binary", ":all:", "--no-header", "--no-annotate", "--no-emit-index-url"]
        uv += [f"--extra={extra}" for extra in extras if extra != BASE]
        subprocess.run([*uv, "-o", "lock"], cwd=folder, check=True)
        text = (Path(folder) / "lock").read_text()
    return text.replace(f" ; {_EVERYWHERE}", "")


def index_options(index: str) -> list[str]:
    """Return pip's options for an index; "" stands for pip's default index."""
    return ["--index-url", index] if index else []


def found_build(version: str, index: str) -> tuple[str, str]:
    """Return the version, with its build tag, and the hash of the torch that pip would select."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--ignore-installed"]
    pip += ["--only-binary", ":all:", *index_options(index), "--report", "-", f"torch=={version}"]
    (one,) = json.loads(subprocess.run(pip, stdout=subprocess.PIPE, text=True, check=True).stdout)["install"]
    return one["metadata"]["version"], sum_of(one["download_info"]["archive_info"])


def sum_of(archive: dict[str, Any]) -> str:
    """Return the SHA-256 of a file in pip's report.

    Before version 23.1 (Debian 12), pip writes it as a single string.
    """
    found: str = archive["hashes"]["sha256"] if "hashes" in archive else archive["hash"].removeprefix("sha256=")
    return found


def chosen_build(torch: Locked, index: str) -> Locked:
    """Return the build of torch that pip would select without hashes. Exits if the lock does not have that build.

    With hashes, pip would ignore the CPU build in a folder, and select a build of its index that the lock has.
    """
    version, found = found_build(torch.version, index)
    if found not in torch.hashes:
        sys.exit(
            f"torch {version} as pip finds it is not in the lock: `make lock TORCH_INDEX=URL` adds an index's builds"
        )
    return Locked(torch.name, version, (f"torch=={version} --hash=sha256:{found}",), torch.extras)


def cpu_builds(version: str, index: str) -> set[str]:
    """Return the hashes of torch's CPU builds: the build that pip selects here, and those on an index, if given."""
    found = {found_build(version, "")[1]}
    if index:
        uv = ["uv", "pip", "compile", "-q", "-", "--universal", "--no-deps", "--no-header", "--generate-hashes"]
        uv += ["--only-binary", ":all:", "--python-version", OLDEST, "--index-url", index, "--no-emit-index-url"]
        said = subprocess.run(uv, input=f"torch=={version}+cpu\n", capture_output=True, text=True, check=True).stdout
        found |= set(re.findall(r"--hash=sha256:([0-9a-f]{64})", said))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("write", "install"):
        one = commands.add_parser(name)
        one.add_argument("--torch-index", default="", metavar="URL", help="an index that has torch's builds for a CPU")
    commands.choices["write"].add_argument("--upgrade", action="store_true", help="take the newest versions")
    commands.choices["install"].add_argument("extras", type=lambda text: [e for e in text.split(",") if e])
    commands.add_parser("compare").add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.command == "write":
        write(args.upgrade, args.torch_index)
    elif args.command == "install":
        install(args.extras, args.torch_index)
    elif differences := compare(args.folder):
        sys.exit("\n".join(["the environment is not the lock's:", *differences]))


if __name__ == "__main__":
    main()
