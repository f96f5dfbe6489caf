"""The client programs in examples/, run against real servers as a user runs them."""

from __future__ import annotations

import subprocess
import sys
import wave
from pathlib import Path

import pytest

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import Resampler, to_pcm16
from antiphon.audio.wav import wav_header
from tests.adapters import tiny_minicpmo
from tests.conftest import Process, Recording, Serve

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 60


def run(name: str, *flags: str | Path, stdin: str = "", limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, flags)],
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
        check=False,
    )


def seconds(path: Path) -> float:
    with wave.open(str(path), "rb") as file:
        return file.getnframes() / file.getframerate()


@pytest.fixture
def question(recordings: dict[str, Recording], tmp_path: Path) -> Path:
    """Return a recording in the format that the examples need."""
    data, path = to_pcm16(recordings["lj-LJ001-0008"].pcm), tmp_path / "question.wav"
    path.write_bytes(wav_header(SAMPLE_RATE_HZ, len(data)) + data)
    return path


def test_a_recording_is_transcribed_as_it_is_sent(server: Process, question: Path) -> None:
    done = run("realtime_audio", question, "--speed", "5", "--url", f"{server.ws}/v1/realtime")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].strip().lower() == "has never been surpassed."
    wrong = run("realtime_audio", question, "--model", "nonsense", "--url", f"{server.ws}/v1/realtime")
    assert wrong.returncode == 1
    assert "nonsense" in wrong.stderr


def test_a_text_is_spoken_sentence_by_sentence(speaker: Process, tmp_path: Path) -> None:
    text, out = "Good morning. It is raining\nin the city. Goodbye!\n", tmp_path / "out.wav"
    done = run("speech_stream", "--out", out, "--url", f"{speaker.ws}/v1/audio/speech/stream", stdin=text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == text.split()
    assert len(done.stdout.splitlines()) >= 3
    assert 2 < seconds(out) < 8
    wrong = run("speech_stream", "--voice", "nobody", "--url", f"{speaker.ws}/v1/audio/speech/stream", stdin=text)
    assert wrong.returncode == 1
    assert "nobody" in wrong.stderr


def test_a_cascade_answers_in_full_duplex(partner: Process, question: Path, tmp_path: Path) -> None:
    out = tmp_path / "answer.wav"
    given = ("--max-tokens", "12", "--out", out, "--url", f"{partner.ws}/v1/realtime?duplex=1")
    done = run("duplex_demo", question, *given)
    assert done.returncode == 0, done.stderr
    assert "surpassed" in done.stdout
    assert seconds(out) > 0.3


def test_a_caller_is_answered_and_an_application_follows(
    partner: Process, recordings: dict[str, Recording], tmp_path: Path
) -> None:
    path, out = tmp_path / "question.wav", tmp_path / "heard.wav"
    data = to_pcm16(Resampler(SAMPLE_RATE_HZ, 8000).feed(recordings["lj-LJ001-0008"].pcm))
    path.write_bytes(wav_header(8000, len(data)) + data)
    command = [sys.executable, "-u", str(EXAMPLES / "telephone" / "application.py"), "--once", "--url", partner.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as application:
        try:
            given = ("--out", out, "--enough-s", "1", "--url", f"{partner.ws}/v1/telephone/media")
            done = run("telephone/caller", path, *given)
            said, errors = application.communicate(timeout=LIMIT_S)
        finally:
            application.kill()
    assert done.returncode == 0, done.stderr
    assert application.returncode == 0, errors
    assert "caller: has never been surpassed" in said.lower()
    assert said.splitlines()[-1].endswith("caller_hung_up")
    assert seconds(out) > 0.3


def test_a_native_model_answers_what_is_committed(
    serve: Serve, tmp_path_factory: pytest.TempPathFactory, question: Path, tmp_path: Path
) -> None:
    native = serve(
        *("--conversation-model", str(tiny_minicpmo.write(tmp_path_factory.mktemp("native"), brief=True))),
        *("--weights", "fp32"),
    )
    out = tmp_path / "answer.wav"
    given = ("--push-to-talk", "--instructions", tiny_minicpmo.PROMPT, "--url", f"{native.ws}/v1/duplex")
    done = run("duplex_demo", question, *given, "--out", out)
    assert done.returncode == 0, done.stderr
    # The tiny model has no voice, and answers with random characters.
    assert done.stdout.replace("> has never been surpassed.", "").strip()
    assert seconds(out) == 0
