"""`antiphon talk` with a real server over scripted models, and with a real server that it starts itself."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from antiphon.audio.pcm import to_pcm16
from antiphon.cli import talk as command
from antiphon.cli.talk import Screen, TalkRequest, talk
from antiphon.client import (
    Client,
    Heard,
    NothingSaid,
    Reconnected,
    ResponseBegins,
    ResponseEnds,
    ResponseWords,
    ServerError,
    UserSaid,
    UserSpeaks,
    UserWords,
)
from tests.conftest import SMALL, VOICE
from tests.forking import run
from tests.scripted import speech, text
from tests.server.scripted import WORD_S, serving

LIMIT_S = 60


def recording(folder: Path, *parts: tuple[int, int], silence_frames: int) -> str:
    """Write a WAV file of scripted words, in parts of (first, count), with silence after each part."""
    file = folder / "said.wav"
    with wave.open(str(file), "wb") as out:
        out.setparams((1, 2, 16_000, 0, "NONE", ""))
        for first, count in parts:
            out.writeframes(to_pcm16(speech(first, count, silence_frames)))
    return str(file)


def test_a_recording_is_answered_aloud_and_both_sides_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "QUIET_S", 0.3)
    said, played, out = recording(tmp_path, (1, 3), silence_frames=40), tmp_path / "played.wav", io.StringIO()

    async def main(url: str) -> None:
        async with Client(url) as client:
            await talk(client, TalkRequest(hear=said, into=str(played)), out)

    with serving() as (url, _, _):
        asyncio.run(asyncio.wait_for(main(url.replace("ws", "http", 1)), LIMIT_S))
    assert out.getvalue() == f"you: {text(1, 3)}\nantiphon: {text(1, 3)}\n"
    with wave.open(str(played)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        assert file.getframerate() == 24_000
    # The answer is complete, in one piece.
    loud = np.flatnonzero(samples)
    assert (loud[-1] - loud[0] + 1) / 24_000 == pytest.approx(3 * WORD_S, abs=0.05)


def test_a_recording_of_silence_ends_without_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "QUIET_S", 0.2)
    said, out = recording(tmp_path, (0, 0), silence_frames=20), io.StringIO()

    async def main(url: str) -> None:
        async with Client(url) as client:
            await talk(client, TalkRequest(hear=said), out)

    with serving() as (url, _, _):
        asyncio.run(asyncio.wait_for(main(url.replace("ws", "http", 1)), LIMIT_S))
    assert out.getvalue() == ""


def test_each_turn_has_a_line_and_what_was_heard_of_an_answer_stands_below_it() -> None:
    out = io.StringIO()
    screen, idle = Screen(out), list[bool]()
    assert screen.is_idle
    for event in (
        UserSpeaks(),
        UserWords("i1", " Tell me"),
        UserWords("i1", " a story."),
        UserSaid("i1", "Tell me a story."),
        ResponseBegins("r1"),
        ResponseWords("r1", "Once upon"),
        ResponseWords("r1", " a time"),
        UserSpeaks(),
        ResponseEnds("r1", "cancelled", "Once upon a time"),
        Heard("i2", 400),
        Heard("i2", 600),
        # Words may appear only when they are complete.
        UserSaid("i3", "Stop."),
        ResponseWords("r2", "Fine."),
        ResponseEnds("r2", "completed", "Fine."),
        Reconnected("replayed"),
        ServerError("invalid_value", "No."),
        UserSpeaks(),
        NothingSaid("noise"),
    ):
        screen.show(event)
        idle.append(screen.is_idle)
    # A turn is under way from its speech until it is answered completely or found empty. A cut answer does not end it.
    assert idle == [False] * 13 + [True] * 3 + [False, True]
    assert out.getvalue().splitlines() == [
        "you: Tell me a story.",
        "antiphon: Once upon a time -",
        "(of that answer, 0.6 s were heard)",
        "you: Stop.",
        "antiphon: Fine.",
        "(the connection broke and is restored)",
        "(error invalid_value: No.)",
    ]


@pytest.mark.heavy
def test_without_a_url_a_server_is_started_for_the_conversation(tmp_path: Path) -> None:
    question = tmp_path / "question.wav"
    antiphon = [sys.executable, "-m", "antiphon"]
    spoken = ["say", "What is the capital of France?", "-o", str(question)]
    subprocess.run([*antiphon, *spoken], check=True, timeout=120)
    models = ["--language-model", SMALL, "--synthesizer", VOICE]
    done = subprocess.run(
        [*antiphon, "talk", "--hear", str(question), *models, "--instructions", "Answer in one short sentence."],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said, answered, *_ = done.stdout.splitlines()
    assert said.startswith("you: ")
    assert "capital of France" in said
    assert len(answered.removeprefix("antiphon: ")) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["--hear", "/missing.wav", "--url", "http://127.0.0.1:9"], "/missing.wav: ", 2),
        (["--hear", "README.md", "--url", "http://127.0.0.1:9"], "README.md: ", 2),
        (["--into", "x.wav"], "--into works only with --hear", 2),
        (["--hear", "tests/data/audio/jfk.flac", "--url", "ftp://here"], "--url: the server's address", 2),
        (["--hear", "tests/data/audio/jfk.flac", "--url", "http://127.0.0.1:9"], "no server answers there", 1),
    ],
)
def test_what_cannot_be_used_is_told_in_a_line(arguments: list[str], says: str, code: int) -> None:
    done = run("antiphon", "talk", *arguments)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
