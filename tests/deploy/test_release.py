"""The parts of a release, the reasons to refuse one, and the commit that an installed copy reports."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from antiphon.cli.commit import commit
from deploy import release

ROOT = Path(__file__).parents[2]
LOG = (
    "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-01-02\n\n- It hears.\n\n## [0.1.0] - 2026-01-01\n\n- It is.\n"
)


def git(root: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *own, *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository that has everything a release reads, all with version 0.2.0."""
    texts = {
        "pyproject.toml": '[project]\nname = "antiphon"\nversion = "0.2.0"\n',
        "src/antiphon/__init__.py": '__version__ = "0.2.0"\n',
        "src/antiphon/web/client/package.json": '{"version": "0.2.0"}\n',
        "deploy/chart/Chart.yaml": "version: 9.9.9\nappVersion: 0.2.0\n",
        "docs/stability.md": "# Stability\n\nOf antiphon 0.2.0.\n",
        "CHANGELOG.md": LOG,
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def test_files_that_agree_can_be_released(checkout: Path) -> None:
    assert release.problems(checkout) == []


@pytest.mark.parametrize(
    "path",
    [
        "src/antiphon/__init__.py",
        "src/antiphon/web/client/package.json",
        "deploy/chart/Chart.yaml",
        "docs/stability.md",
        "CHANGELOG.md",
    ],
)
def test_a_file_with_another_version_refuses_the_release(checkout: Path, path: str) -> None:
    file = checkout / path
    file.write_text(file.read_text().replace("0.2.0", "0.3.0"))
    git(checkout, "commit", "-qam", "another")
    assert f"{path} names version 0.3.0, not 0.2.0" in release.problems(checkout)


def test_changes_that_are_not_committed_refuse_the_release(checkout: Path) -> None:
    (checkout / "new.py").write_text("")
    assert release.problems(checkout) == ["the working tree has changes that are not committed"]
    assert release.problems(checkout, allow_changes=True) == []


def test_the_notes_are_the_section_of_the_version() -> None:
    assert release.notes(LOG, "0.2.0") == "- It hears.\n"
    assert release.notes(LOG, "0.1.0") == "- It is.\n"
    for version in ("0.3.0", "Unreleased"):
        with pytest.raises(ValueError, match=f"no section for {version}"):
            release.notes(LOG, version)


def test_this_checkout_names_one_version() -> None:
    assert len(set(release.versions(ROOT).values())) == 1
    assert release.problems(ROOT, allow_changes=True) == []


def test_an_installation_is_tried_with_every_extra_that_users_have() -> None:
    assert {"", "speech", "talk", "video", "webrtc", "devices", "all", "redis", "postgres", "otel"} <= {
        *release.extras(ROOT)
    }


def test_a_checkout_and_a_worktree_say_their_commit_and_a_bare_folder_none(checkout: Path, tmp_path: Path) -> None:
    wanted = git(checkout, "rev-parse", "HEAD")[:12]
    package = checkout / "src" / "antiphon"
    assert commit(package) == wanted
    git(checkout, "pack-refs", "--all")
    assert commit(package) == wanted
    git(checkout, "checkout", "-q", "--detach")
    assert commit(package) == wanted
    git(checkout, "worktree", "add", "-q", "-b", "other", str(tmp_path / "other"))
    assert commit(tmp_path / "other" / "src" / "antiphon") == wanted
    (tmp_path / "bare" / "src" / "antiphon").mkdir(parents=True)
    assert commit(tmp_path / "bare" / "src" / "antiphon") == ""
    (tmp_path / "bare" / "src" / "antiphon" / "COMMIT").write_text("0123456789abcdef\n")
    assert commit(tmp_path / "bare" / "src" / "antiphon") == "0123456789ab"


@pytest.mark.heavy
def test_the_built_files_have_what_they_need(tmp_path: Path) -> None:
    version = release.versions(ROOT)["pyproject.toml"]
    release.build(ROOT, tmp_path / "out", version)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        f"antiphon-{version}.tar.gz",
        f"antiphon-{version}-py3-none-any.whl",
        f"antiphon-{version}-image.tar.gz",
        f"antiphon-{version}-sbom.json",
        f"antiphon-client-{version}.tgz",
        "NOTES.md",
        "SHA256SUMS",
    }
    with zipfile.ZipFile(tmp_path / "out" / f"antiphon-{version}-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path / "wheel")
    for name in ("py.typed", "COMMIT", "web/index.html", "web/client/antiphon.js"):
        assert (tmp_path / "wheel" / "antiphon" / name).is_file(), name
    said = subprocess.run(
        [sys.executable, "-m", "antiphon", "--version"],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "wheel")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.strip() == f"antiphon {version} ({git(ROOT, 'rev-parse', 'HEAD')[:12]})"
    with tarfile.open(tmp_path / "out" / f"antiphon-{version}-image.tar.gz") as recipe:
        assert f"antiphon-{version}/deploy/Dockerfile" in recipe.getnames()
    with tarfile.open(tmp_path / "out" / f"antiphon-client-{version}.tgz") as package:
        assert {"package/antiphon.js", "package/types/antiphon.d.ts"} <= set(package.getnames())
