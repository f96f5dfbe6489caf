"""The lock has everything that the project requires, each file with its hash, and pip accepts no other file."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
SUM = "0" * 64


def script() -> ModuleType:
    """Return `deploy/lock.py` as a module."""
    spec = importlib.util.spec_from_file_location("lock", ROOT / "deploy" / "lock.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # Data classes look up their own module in `sys.modules`.
    sys.modules["lock"] = module
    spec.loader.exec_module(module)
    return module


LOCK = script()


def required(lines: list[str]) -> set[str]:
    """Return the packages that these requirement lines name, including those of the project's own extras."""
    own = [extra for line in lines if (m := re.fullmatch(r"antiphon\[(.*)\]", line)) for extra in m[1].split(",")]
    names = {LOCK.normalized(re.split(r"[\[<>=]", line)[0]) for line in lines} - {"antiphon"}
    return names.union(*(required(EXTRAS[extra]) for extra in own))


@pytest.mark.parametrize("extra", ["base", *EXTRAS])
def test_the_lock_has_what_the_project_requires(extra: str) -> None:
    lines = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"], *EXTRAS.get(extra, ())]
    there = {package.name for package in LOCK.selected(LOCK.read(TEXT), [extra])}
    assert required(lines) <= there


def test_the_lock_is_of_the_project_as_it_is() -> None:
    assert f"# sha256 of what pyproject.toml requires: {LOCK.digest(PROJECT)}\n" in TEXT, "make lock"
    changed = PROJECT | {"project": PROJECT["project"] | {"dependencies": ["numpy>=3"]}}
    assert LOCK.digest(changed) != LOCK.digest(PROJECT)


def test_every_line_has_a_sum_and_none_names_an_index() -> None:
    packages = LOCK.read(TEXT)
    assert len(packages) > 100
    assert not [name for name, package in packages.items() if not package.hashes]
    assert not re.search(r"://|--index|--find|--trusted|-r |-e ", TEXT)
    # Every line that pip takes for a requirement was read.
    assert len(re.findall(r"^[^#\s]", TEXT, re.MULTILINE)) == len(packages)


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://packages.example/simple",
        "a>=1 \\",
        "a @ https://packages.example/a.whl",
        "-e .",
        "a==1 \\\n    --hash=md5:00000000000000000000000000000000",
        f"a==1 \\\n    --hash=sha256:{SUM[1:]}",
        f"a==1 \\\n    --hash=sha256:{SUM} --no-binary :all:",
        f"a==1 \\\n    --hash=sha256:{SUM}\n    # for base\na==2 \\\n    --hash=sha256:{SUM}",
    ],
)
def test_a_lock_with_anything_else_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"not a line of a lock|twice"):
        LOCK.read(line)


def test_what_serves_is_installed_without_what_develops_and_without_cuda_where_torch_needs_none() -> None:
    packages = LOCK.read(TEXT)
    image = {package.name for package in LOCK.selected(packages, ["all", "otel", "cluster"])}
    assert {"torch", "redis", "psycopg-binary", "opentelemetry-sdk"} <= image
    # Ray's uvicorn requires uvloop. With uvloop installed, our uvicorn would use it as its event loop.
    assert not image & {"mypy", "pytest", "ray", "uvloop", "matplotlib"}
    cuda = {name for name in packages if LOCK.CUDA.match(name)}
    assert {"triton", "nvidia-cublas", "cuda-toolkit"} <= cuda
    assert not {p.name for p in LOCK.selected(packages, ["speech", "webrtc"])} & cuda


def wheel(folder: Path, text: str, name: str = "toy", version: str = "1") -> Path:
    """Write a wheel with one module of this text."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    members = {
        f"{name}.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(zipfile.ZipInfo(member), content)
    return path


@pytest.mark.slow
def test_a_file_that_is_not_the_locks_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself is used, with an index that has a file with another hash as well as the file in the lock."""
    good = hashlib.sha256(wheel(tmp_path, "GOOD = True").read_bytes()).hexdigest()
    package = LOCK.Locked("toy", "1", (f"toy==1 --hash=sha256:{good}",), frozenset({"base"}))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "to"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    options = ["--no-index", "--find-links", str(tmp_path)]
    LOCK.pip_install([package], *options)
    assert (tmp_path / "to" / "toy.py").read_text() == "GOOD = True"
    wheel(tmp_path, "GOOD = False")
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "other"))
    with pytest.raises(SystemExit):
        LOCK.pip_install([package], *options)
    assert not (tmp_path / "other" / "toy.py").exists()


@pytest.mark.parametrize("archive", [{"hashes": {"sha256": SUM}, "hash": f"sha256={SUM}"}, {"hash": f"sha256={SUM}"}])
def test_the_sum_in_a_report_is_read_as_pip_of_debian_12_and_newer_ones_write_it(archive: dict[str, Any]) -> None:
    assert LOCK.sum_of(archive) == SUM


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "build"), [("cpu", "1+cpu"), ("cuda", "1"), ("both", "1+cpu")])
def test_of_torchs_builds_that_is_installed_which_pip_would_take(
    folder: str, build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hashes alone, pip installs any build in its index that has a hash: 3 GB on a machine for the small build."""
    sums = {}
    for version in ("1", "1+cpu"):
        places = {"1": ("cuda", "both"), "1+cpu": ("cpu", "both")}[version]
        for place in places:
            (tmp_path / place).mkdir(exist_ok=True)
            path = wheel(tmp_path / place, f"BUILD = {version!r}", "torch", version)
        sums[version] = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / folder))
    lines = ("torch==1 \\", *(f"    --hash=sha256:{one} \\" for one in sums.values()))
    torch = LOCK.Locked("torch", "1", lines, frozenset({"talk"}))
    assert LOCK.chosen_build(torch, "").lines == (f"torch=={build} --hash=sha256:{sums[build]}",)
    unknown = LOCK.Locked("torch", "1", (f"torch==1 --hash=sha256:{SUM}",), frozenset({"talk"}))
    with pytest.raises(SystemExit, match="not in the lock: `make lock TORCH_INDEX"):
        LOCK.chosen_build(unknown, "")


def test_an_environment_that_is_not_the_locks_is_named(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    said = {"numpy": LOCK.read(TEXT)["numpy"].version, "torch": "0.1+cpu", "slipped_in": "1", "antiphon": "9"}
    for name, version in said.items():
        (packages / f"{name}-{version}.dist-info").mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (packages / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    assert [line.split(":")[0] for line in LOCK.compare(tmp_path)] == ["slipped-in 1", "torch 0.1"]


def test_what_installs_checks_sums() -> None:
    """The image, the Makefile and the pages install with the script. Without it, they install only antiphon itself."""
    files = {name: (ROOT / name).read_text() for name in ("deploy/Dockerfile", "Makefile", "docs/deploy.md")}
    for name, text in files.items():
        assert "deploy/lock.py install" in text, name
        for line in re.findall(r"pip install (.*)", text.replace("\\\n", "")):
            assert name.startswith("docs") or "--no-deps" in line or "==" in line, (name, line)
        assert "-c requirements.lock" not in text, name
    said = subprocess.run(
        [sys.executable, ROOT / "deploy" / "lock.py", "install", "nothing"], capture_output=True, text=True, check=False
    )
    assert (said.returncode, said.stderr) == (1, "no such extra: nothing\n")
