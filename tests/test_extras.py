"""Without its extras, the package transcribes, and for other features its errors name what to install.

These tests hide packages from the interpreter. `make packages` uses environments that do not have them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import httpx
import pytest

from antiphon import extras
from antiphon.adapters import SPECS
from antiphon.errors import SettingsError
from antiphon.extras import EXTRAS, install_command, missing_packages, require_extra
from antiphon.loading.profile_choice import choose_profile
from antiphon.settings import Settings
from tests.conftest import DATA, SMALL

ROOT = Path(__file__).parents[1]
CLIENT = ROOT / "docs" / "packages.md"
# A program that hides the packages of some extras, and then runs the command with its arguments.
COMMAND = """
import sys

hidden, sys.argv = sys.argv[1].split(","), ["antiphon", *sys.argv[2:]]
for name in hidden:
    sys.modules[name] = None  # the import system takes it for a module that is not there
from antiphon.cli.main import main

sys.exit(main())
"""
HIDDEN = ",".join(name for packages in EXTRAS.values() for name in packages)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", COMMAND, HIDDEN, *arguments]


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120)


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {
        extra: {re.split(r"[\[<>=]", line)[0] for line in lines}
        for extra, lines in project["optional-dependencies"].items()
    }
    distributions = packages_distributions()
    for extra, packages in EXTRAS.items():
        assert {distributions[name][0].lower() for name in packages} == required[extra] - {"antiphon"}, extra
    assert all(spec.extra == "" or spec.extra in EXTRAS for spec in SPECS.values())
    # The base installation has none of these packages.
    assert not {re.split(r"[\[<>=]", line)[0] for line in project["dependencies"]} & {
        name for lines in required.values() for name in lines
    }


def test_what_is_installed_lacks_nothing() -> None:
    assert not any(missing_packages(extra) for extra in ("", *EXTRAS))


@pytest.mark.parametrize(("extra", "package"), [("talk", "torch"), ("video", "rapidocr")])
def test_what_needs_an_extra_says_how_to_install_it(extra: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == package else name)
    assert missing_packages(extra) == (package,)
    with pytest.raises(SettingsError, match=rf"the model needs {package}, which is not installed: .*\[{extra}\]"):
        require_extra(extra, "the model")


@pytest.mark.parametrize(
    ("missing", "without"),
    [("torch", {"language"}), ("hibari", {"synthesizer"}), ("", set[str]())],
)
def test_a_profile_that_is_chosen_leaves_out_what_cannot_run(
    missing: str, without: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == missing else name)
    choice = choose_profile(Settings(), lambda: 0.05)
    assert set(choice.without) == without
    assert not without or install_command("talk") in choice.reason
    applied = choice.applied(Settings())
    assert (applied.engine.language_model == "none") == ("language" in without)
    assert (applied.speech.synthesizer == "none") == ("synthesizer" in without)


def test_nothing_says_to_install_a_package_that_is_not_published() -> None:
    files = [ROOT / "README.md", *(f for folder in ("src", "docs", "deploy") for f in (ROOT / folder).rglob("*"))]
    texts = [f for f in files if f.suffix in {".py", ".md", ".js", ".html", ".yaml", ".service"}]
    assert [str(f) for f in texts if re.search(r"(pip|uv) install '?antiphon\b", f.read_text(encoding="utf-8"))] == []


def test_the_client_alone_needs_what_its_page_says() -> None:
    """All packages of the extras are hidden, and all packages of the base installation that the page does not name."""
    (needed,) = re.findall(r"^pip install ([a-z ]+) && pip install --no-deps \.$", CLIENT.read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = {re.split(r"[\[<>=]", line)[0] for line in project["dependencies"]}
    assert set(needed.split()) <= base
    # httpx requires these.
    others = base - set(needed.split()) - {"anyio", "httpcore"}
    packages = [name for name, found in packages_distributions().items() if {f.lower() for f in found} & others]
    program = COMMAND.split("from antiphon.cli", 1)[0] + "import antiphon.client"
    done = subprocess.run(
        [sys.executable, "-c", program, ",".join([*packages, HIDDEN])], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert {"starlette", "ctranslate2", "onnxruntime"} <= set(packages)


@pytest.mark.server
def test_without_extras_a_file_is_transcribed_and_the_server_hears() -> None:
    with subprocess.Popen(
        command("serve", "--port", "0", "--profile", "auto"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout
            url = next(found[1] for line in server.stdout if (found := re.search(r"ready at (\S+)", line)))
            with (DATA / "audio" / "jfk.flac").open("rb") as file:
                heard = httpx.post(
                    f"{url}/v1/audio/transcriptions", files={"file": file}, data={"model": "default"}, timeout=60
                )
            fields = {"sdp": (None, "v=0"), "session": (None, '{"type": "transcription"}')}
            offer = httpx.post(f"{url}/v1/realtime/calls", files=fields)
        finally:
            server.terminate()
        log = server.communicate(timeout=60)[1]
    assert "country" in heard.json()["text"]
    assert (offer.status_code, "pip install '.[webrtc]'" in offer.text) == (501, True)
    assert "without language and synthesizer model: pip install '.[talk]'" in log
    assert server.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("say", "Hello."), r"hibari-heart needs hibari, which is not installed: pip install '\.\[speech\]'"),
        (
            ("serve", "--port", "0", "--language-model", SMALL, "--synthesizer", "none"),
            r"needs torch, which is not installed: pip install '\.\[talk\]'",
        ),
        (
            ("serve", "--port", "0", "--profile", "light"),
            r"needs torch, which is not installed: pip install '\.\[talk\]'",
        ),
        (("serve", "--port", "0", "--device", "cuda"), r"PyTorch, which is not installed"),
    ],
)
def test_without_extras_a_command_that_needs_one_says_so_in_a_line(arguments: tuple[str, ...], says: str) -> None:
    done = ran(*arguments)
    assert done.returncode == 1 or done.returncode == 2
    assert re.search(says, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
