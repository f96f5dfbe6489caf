"""The commands as a user runs them, in separate processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.containers import decode_all
from antiphon.recording.disk import Keep
from antiphon.recording.recorder import Recorder
from antiphon.recording.tape import SessionFacts
from antiphon.released import releases
from antiphon.store import MODELS
from tests.audio.sound_files import pcm16, wav
from tests.conftest import DATA, SMALL


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "antiphon", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.slow
def test_when_a_file_is_transcribed_then_text_subtitles_or_json_are_printed() -> None:
    file = str(DATA / "audio" / "jfk.flac")
    plain = run("transcribe", file)
    assert plain.returncode == 0, plain.stderr
    # The same as the server's transcript of a posted file, not of live speech with a pause.
    assert plain.stdout == (
        "And so my fellow Americans, ask not what your country can do for you, ask what you can do for your country.\n"
    )
    subtitles = run("transcribe", "--srt", "--language", "en", file).stdout
    assert re.match(r"1\n00:00:0\d,\d{3} --> 00:00:\d\d,\d{3}\n", subtitles)
    document = json.loads(run("transcribe", "--json", file).stdout)
    words = [w for s in document["segments"] for w in s["words"]]
    assert document["language"] == "en"
    assert words[-1]["word"].lower().startswith("country")
    assert 9.0 < words[-1]["end"] <= 11.0


@pytest.mark.heavy
def test_when_speakers_are_asked_for_then_each_line_has_one(tmp_path: Path) -> None:
    one = decode_all(str(DATA / "audio" / "jfk.flac"))
    other = np.concatenate([decode_all(str(path)) for path in sorted((DATA / "audio").glob("lj-*.flac"))])
    pause = np.zeros(SAMPLE_RATE_HZ // 2, np.float32)
    dialogue = np.concatenate((one, pause, other, pause))
    (tmp_path / "a.wav").write_bytes(wav(pcm16(dialogue)))
    lines = run("transcribe", "--speakers", str(tmp_path / "a.wav")).stdout.splitlines()
    assert {line[:3] for line in lines} == {"A: ", "B: "}
    assert "country" in " ".join(line for line in lines if line.startswith("A"))
    assert "modern" in " ".join(line for line in lines if line.startswith("B"))
    sides = np.zeros((len(dialogue), 2), np.float32)
    sides[: len(one), 1], sides[len(one) :, 0] = one, dialogue[len(one) :]
    (tmp_path / "b.wav").write_bytes(wav(pcm16(sides), channels=2))
    document = json.loads(run("transcribe", "--channels", "separate", "--json", str(tmp_path / "b.wav")).stdout)
    assert document["segments"][0]["speaker"] == "B"
    assert document["segments"][-1]["speaker"] == "A"
    assert "country" in " ".join(s["text"] for s in document["segments"] if s["speaker"] == "B")


@pytest.mark.slow
@pytest.mark.parametrize("live", [False, True])
def test_when_the_language_is_none_of_the_models_then_the_error_is_one_line(live: bool) -> None:
    with (DATA / "audio" / "jfk.flac").open("rb") as file:
        done = run("transcribe", "--language", "zz", "-" if live else file.name, stdin=file)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "antiphon: --language: this model does not know the language 'zz'.\n"


@pytest.mark.slow
def test_when_the_file_is_a_dash_then_standard_input_is_transcribed() -> None:
    with (DATA / "audio" / "lj-LJ001-0008.flac").open("rb") as file:
        done = run("transcribe", "-", stdin=file)
    assert "never been surpassed" in done.stdout.lower()


@pytest.mark.slow
def test_when_a_file_cannot_be_decoded_then_the_error_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_text("no sound")
    for name in (str(tmp_path / "a.wav"), str(tmp_path / "missing.wav")):
        done = run("transcribe", name)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("antiphon: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_when_a_model_is_missing_offline_then_the_error_names_its_file(tmp_path: Path) -> None:
    done = run("serve", "--port", "0", "--home", str(tmp_path), "--offline")
    assert done.returncode == 1
    assert "model.bin" in done.stderr
    assert "Traceback" not in done.stderr
    assert run("doctor", "--home", str(tmp_path)).returncode == 1
    listed = run("pull", "--list", "--home", str(tmp_path)).stdout
    assert listed.count("missing") == len(MODELS) + len(releases())


@pytest.mark.heavy
def test_when_the_doctor_is_asked_then_it_prints_models_and_speeds() -> None:
    done = run("doctor", "--language-model", SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"first token in \d+ ms, then \d+ tokens a second", done.stdout)
    assert "here, verified" in done.stdout
    assert re.search(r"final, 5 s +\d+ ms", done.stdout)


def test_when_settings_are_wrong_then_the_start_stops_and_they_are_named() -> None:
    done = run("serve", "--port", "99999")
    assert (done.returncode, done.stderr) == (2, "antiphon: --port: 99999 is above 65535\n")
    done = run("serve", env=os.environ | {"ANTIPHON_OVERFLOW": "drop"})
    assert done.returncode == 2
    assert "ANTIPHON_OVERFLOW" in done.stderr
    assert run("nonsense").returncode == 2


def test_when_a_timeline_cannot_be_written_then_the_error_is_one_line(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, SessionFacts(id="sess-1", began=0), keep=Keep(max_bytes=1 << 20))
    recorder.close()
    (folder,) = tmp_path.iterdir()
    target = tmp_path / "missing" / "x.html"
    done = run("timeline", str(folder), "-o", str(target))
    assert (done.returncode, done.stderr) == (1, f"antiphon: {target} cannot be written: No such file or directory\n")
