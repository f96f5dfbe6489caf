"""Files with one person on each channel, over real sockets with the real transcriber."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import numpy as np
import pytest

from antiphon.audio import Pcm
from tests.audio.sound_files import pcm16, wav
from tests.conftest import Process, Recording

RATE_HZ = 16_000
JFK, LJ = "ask not what your country can do for you", "in being comparatively modern"


@pytest.fixture(scope="module")
def call(recordings: dict[str, Recording]) -> Pcm:
    """A question on the left channel, then an answer on the right one, which begins before the question ends."""
    left = recordings["jfk"].pcm[int(3.0 * RATE_HZ) : int(7.9 * RATE_HZ)]
    right = recordings["lj-LJ001-0002"].pcm
    start = len(left) - RATE_HZ // 4
    channels = np.zeros((2, start + len(right)), np.float32)
    channels[0, : len(left)] = left
    channels[1, start:] = right
    return channels


def post(server: Process, channels: Pcm, /, **fields: Any) -> httpx.Response:
    data = wav(pcm16(channels.T), channels=len(channels))
    form = {"model": "default", "channels": "separate", "language": "en", **fields}
    return httpx.post(f"{server.url}/v1/audio/transcriptions", data=form, files={"file": ("a.wav", data)}, timeout=60)


def letters(text: str) -> str:
    return re.sub(r"[^a-z ]", "", text.lower())


def test_each_channel_is_a_speaker(server: Process, call: Pcm) -> None:
    answer = post(server, call, response_format="diarized_json", **{"channel_names[]": ["caller", "agent"]}).json()
    said = {
        name: " ".join(s["text"] for s in answer["segments"] if s["speaker"] == name) for name in ("caller", "agent")
    }
    assert JFK in letters(said["caller"])
    assert LJ in letters(said["agent"])
    assert [s["id"] for s in answer["segments"]] == [f"seg_{k:03}" for k in range(1, len(answer["segments"]) + 1)]
    assert answer["text"] == " ".join(s["text"] for s in answer["segments"])
    assert answer["duration"] == pytest.approx(call.shape[1] / RATE_HZ, abs=0.01)
    assert answer["channels"] == [{"channel": 0, "speaker": "caller"}, {"channel": 1, "speaker": "agent"}]


@pytest.mark.heavy
def test_a_stream_has_each_segment_after_its_text(server: Process, call: Pcm) -> None:
    events = [
        json.loads(line.removeprefix("data: "))
        for line in post(server, call, response_format="diarized_json", stream="true").text.split("\n\n")
        if line
    ]
    deltas = [e for e in events if e["type"] == "transcript.text.delta"]
    segments = [e for e in events if e["type"] == "transcript.text.segment"]
    assert [d["segment_id"] for d in deltas] == [s["id"] for s in segments]
    assert [d["delta"].strip() for d in deltas] == [s["text"] for s in segments]
    assert {s["speaker"] for s in segments} == {"A", "B"}
    assert events[-1]["type"] == "transcript.text.done"
    assert events[-1]["text"] == "".join(d["delta"] for d in deltas)


def test_a_voice_on_eight_channels_is_transcribed_once(server: Process, recordings: dict[str, Recording]) -> None:
    pcm = recordings["jfk"].pcm[: 8 * RATE_HZ]
    pcm = np.stack([*[pcm] * 7, -pcm])
    answer = post(server, pcm, response_format="verbose_json").json()
    assert letters(answer["text"]).count("ask not") == 1
    assert {s["speaker"] for s in answer["segments"]} == {"A"}
    assert answer["channels"] == [{"channel": 0, "speaker": "A"}] + [
        {"channel": k, "speaker": "A", "same_as": 0} for k in range(1, len(pcm))
    ]


def test_channels_that_are_no_call_are_mixed(server: Process, recordings: dict[str, Recording]) -> None:
    said = recordings["tau2-yes"].pcm
    answer = post(server, np.stack([said, said]), channels="auto", response_format="verbose_json").json()
    assert "channels" not in answer
    assert all("speaker" not in s for s in answer["segments"])


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"channels": "both"}, 400, "invalid_value", "channels"),
        ({"channel_names[]": "a\nb"}, 400, "invalid_value", "channel_names"),
        ({"channel_names[]": "a\u202eb"}, 400, "invalid_value", "channel_names"),
        ({"channel_names[]": ""}, 400, "invalid_value", "channel_names"),
        ({"channel_names[]": "x" * 65}, 400, "invalid_value", "channel_names"),
        ({"channel_names[]": ["a", "a"]}, 400, "invalid_value", "channel_names"),
        ({"chanels": "separate"}, 400, "unknown_parameter", "chanels"),
        ({"channels": "mix", "response_format": "diarized_json"}, 404, "model_not_found", "response_format"),
        ({"channels": "auto", "response_format": "diarized_json"}, 404, "model_not_found", "response_format"),
    ],
)
def test_what_cannot_be_done_is_refused(
    server: Process, recordings: dict[str, Recording], fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    answer = post(server, recordings["tau2-yes"].pcm[None], **fields)
    assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (
        status,
        code,
        param,
    )


def test_too_many_voices_are_refused(server: Process) -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, (9, 2 * RATE_HZ)).astype(np.float32)
    # Each channel has sound at a time of its own.
    for channel in range(9):
        noise[channel, : channel * 3000] = noise[channel, channel * 3000 + 9000 :] = 0
    answer = post(server, noise)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "channels")
    assert "9 channels" in answer.json()["error"]["message"]
