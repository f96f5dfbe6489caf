"""`antiphon voices`: lists the voices, shows which are downloaded, and plays a sample."""

from __future__ import annotations

import shutil
import subprocess
import sys
import wave
from pathlib import Path

import pytest

from antiphon.cli.say import voice_lines, with_voices
from antiphon.errors import SettingsError
from antiphon.loading.selection import SPEECH_ROLES, selected_models
from antiphon.settings import Settings, load

HIBARI, JOE = ("heart", "emma", "fenrir", "fable", "kore"), "en_US-joe-medium"
NAMES = (*HIBARI, JOE)


def antiphon(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "antiphon", "voices", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_every_voice_has_a_line_and_what_is_missing_says_how_it_is_fetched(tmp_path: Path) -> None:
    found = voice_lines(load({"home": str(tmp_path)}, {}))
    assert [line.split()[0] for line in found[:6]] == list(NAMES)
    assert all(
        line.endswith(f"missing: antiphon voices --add {name}") for line, name in zip(found, NAMES, strict=False)
    )
    if shutil.which("espeak-ng"):
        assert "fallback" in found[6]
        assert "de, es, fr, it" in found[7]


def test_where_there_is_no_fallback_voice_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.adapters.espeak.PROGRAM", "no-such-program")
    assert (
        voice_lines(Settings())[-1]
        == "no fallback voice: no-such-program is not installed (apt install no-such-program)"
    )


@pytest.mark.parametrize(
    ("names", "loaded"),
    [
        ((), ("heart",)),
        (("heart",), ("heart",)),
        (("kore",), ("heart", "kore")),
        (("all",), HIBARI),
        ((JOE,), ("heart", f"piper-{JOE}")),
    ],
)
def test_the_voices_that_are_named_are_loaded_beside_the_default_one(
    names: tuple[str, ...], loaded: tuple[str, ...]
) -> None:
    models = selected_models(with_voices(Settings(), names), SPEECH_ROLES)
    assert tuple(m.id.removeprefix("hibari-") for m in models) == loaded


def test_a_name_of_no_voice_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match="there is no voice nobody; there are heart, emma"):
        with_voices(Settings(), ("nobody",))


@pytest.mark.server
def test_a_voice_is_heard(tmp_path: Path) -> None:
    file = tmp_path / "heart.wav"
    done = antiphon("--hear", "heart", "-o", str(file))
    assert (done.returncode, done.stdout) == (0, "")
    with wave.open(str(file)) as heard:
        assert heard.getnframes() > 2 * heard.getframerate()


@pytest.mark.slow
def test_what_cannot_be_is_told_in_a_line(tmp_path: Path) -> None:
    done = antiphon("-o", "x.wav")
    assert (done.returncode, done.stderr) == (2, "antiphon: -o works only with --hear\n")
    done = antiphon("--add", "emma", "--offline", "--home", str(tmp_path))
    assert done.returncode == 1
    assert "emma" in done.stderr
    assert "Traceback" not in done.stderr
