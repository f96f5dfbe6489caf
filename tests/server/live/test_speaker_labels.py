"""Labels of live turns and remembered speakers, on a real server. Words above 200 are another voice's."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import connect

from antiphon.audio import Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.server.credentials import Caller
from antiphon.server.state import ServerState
from antiphon.settings import load
from antiphon.store.voices import SpeakerStore, StoredSpeaker
from tests.audio.sound_files import pcm16, wav
from tests.scripted import OTHERS, ScriptedVoices, speech
from tests.server.scripted import serving

Headers = dict[str, str]
NOBODY: Headers = {}
# 6.4 s of each voice.
ONE, OTHER = speech(1, 20, 20), speech(OTHERS + 1, 20, 20)
LABELS = {"speaker_labels": True}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def running(home: Path) -> Iterator[tuple[str, ServerState]]:
    settings = load({"home": str(home), "speakers_per_key": 3, "speaker_days": 30})
    with serving(settings, speaker_model=ScriptedVoices()) as (url, state, _):
        yield url, state


@pytest.fixture
def url(running: tuple[str, ServerState]) -> Iterator[str]:
    yield running[0]
    for name in [entry["name"] for entry in httpx.get(http(running[0])).json()["data"]]:
        assert httpx.delete(f"{http(running[0])}/{name}").status_code == 200


def http(url: str) -> str:
    return f"http{url[2:]}/v1/speakers"


def remember(url: str, name: str, pcm: Pcm = ONE, **fields: str) -> httpx.Response:
    form = {"name": name, "consent": "I agree.", **fields}
    return httpx.post(http(url), data=form, files={"file": ("a.wav", wav(pcm16(pcm)))}, timeout=30)


# --- the labels of turns --------------------------------------------------------------------------------------------


def labels_of(url: str, query: str, update: dict[str, Any], *firsts: int) -> list[str | None]:
    """Return the labels of turns of 1.6 s each that begin with these words."""
    done = ("conversation.item.input_audio_transcription.completed", "transcription.done")

    async def main() -> list[str | None]:
        found = list[str | None]()
        async with asyncio.timeout(30), connect(f"{url}/v1/realtime{query}") as socket:
            await socket.send(json.dumps(update))
            for first in firsts:
                pcm = speech(first, 5, 40)
                for at in range(0, len(pcm), 1600):
                    audio = b64encode(to_pcm16(pcm[at : at + 1600])).decode()
                    await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
                if "model" in update:
                    await socket.send(json.dumps({"type": "input_audio_buffer.commit", "final": True}))
                while (event := json.loads(await socket.recv()))["type"] not in done:
                    assert event["type"] != "error", event
                found.append(event.get("speaker_label"))
        return found

    return asyncio.run(main())


def updated(kind: str, **transcription: Any) -> dict[str, Any]:
    heard = {"format": {"type": "audio/pcm", "rate": 16000}, "transcription": transcription}
    return {"type": "session.update", "session": {"type": kind, "audio": {"input": heard}}}


@pytest.mark.parametrize(
    ("query", "update"),
    [
        ("?intent=transcription", updated("transcription", **LABELS)),
        ("?dialect=openai&model=echo", updated("realtime", **LABELS)),
        ("", {"type": "session.update", "model": "t", **LABELS}),
    ],
    ids=["transcription", "conversation", "vLLM"],
)
def test_each_turn_has_the_label_of_its_voice(url: str, query: str, update: dict[str, Any]) -> None:
    assert labels_of(url, query, update, 11, OTHERS, 21, OTHERS + 10) == ["A", "B", "A", "B"]


def test_without_the_field_there_are_no_labels(url: str) -> None:
    assert labels_of(url, "?intent=transcription", updated("transcription"), 11) == [None]


@pytest.mark.parametrize(
    ("query", "update"),
    [
        ("?intent=transcription", updated("transcription", **LABELS, known_speaker_names=["ann"])),
        ("?dialect=openai&model=echo", updated("realtime", **LABELS, known_speaker_names=["Ann"])),
        ("", {"type": "session.update", "model": "t", **LABELS, "known_speaker_names": ["Ann"]}),
    ],
    ids=["transcription", "conversation", "vLLM"],
)
def test_turns_of_remembered_speakers_have_their_names(url: str, query: str, update: dict[str, Any]) -> None:
    assert remember(url, "Ann", OTHER).status_code == 200
    assert labels_of(url, query, update, 11, OTHERS, 21) == ["A", "Ann", "A"]


@pytest.mark.parametrize(
    ("names", "code"), [(["Bob"], "speaker_not_found"), ([str(k) for k in range(21)], "invalid_value")]
)
def test_a_session_is_not_changed_for_unknown_or_too_many_speakers(url: str, names: list[str], code: str) -> None:
    async def main() -> dict[str, Any]:
        async with asyncio.timeout(30), connect(f"{url}/v1/realtime?intent=transcription") as socket:
            await socket.send(json.dumps(updated("transcription", **LABELS, known_speaker_names=names)))
            while (event := json.loads(await socket.recv()))["type"] != "error":
                assert event["type"] == "session.created"
            return dict(event["error"])

    error = asyncio.run(main())
    assert (error["code"], error["param"]) == (code, "session.audio.input.transcription.known_speaker_names")


def test_a_server_without_a_speaker_model_refuses_labels() -> None:
    with serving() as (url, _, _):

        async def main() -> dict[str, Any]:
            async with asyncio.timeout(30), connect(f"{url}/v1/realtime?intent=transcription") as socket:
                await socket.send(json.dumps(updated("transcription", **LABELS)))
                await socket.recv()
                return dict(json.loads(await socket.recv())["error"])

        error = asyncio.run(main())
        assert error["param"] == "session.audio.input.transcription.speaker_labels"
        assert "--speaker-model" in error["message"]
        assert "labels_speakers" not in httpx.get(f"http{url[2:]}/ready").json()


def test_a_client_can_find_out_whether_there_are_labels(url: str) -> None:
    assert httpx.get(f"http{url[2:]}/ready").json()["labels_speakers"] is True


def test_a_model_that_fails_costs_the_label_and_not_the_transcript() -> None:
    voices = ScriptedVoices()
    voices.fails = True
    with serving(speaker_model=voices) as (url, _, _):
        assert labels_of(url, "?intent=transcription", updated("transcription", **LABELS), 11) == [None]


# --- remembered speakers --------------------------------------------------------------------------------------------


def test_speakers_are_listed_and_forgotten(url: str, home: Path) -> None:
    answer = remember(url, "Ann Lee").json()
    assert answer["expires_at"] == answer["created_at"] + 30 * 86400
    assert (answer["name"], answer["consent"], answer["encoder"]) == ("Ann Lee", "I agree.", "scripted")
    assert answer["speech_seconds"] == pytest.approx(6.4, abs=0.2)
    assert httpx.get(http(url)).json() == {"object": "list", "data": [answer]}
    # Only the vector is kept, and neither the sound nor the name in a path.
    kept = [path for path in (home / "speakers").rglob("*") if path.is_file()]
    assert [path.name for path in kept] == ["speaker.json"]
    assert kept[0].stat().st_size < 1000
    # A second recording replaces the first.
    assert remember(url, "ann lee", OTHER).status_code == 200
    assert [entry["name"] for entry in httpx.get(http(url)).json()["data"]] == ["ann lee"]
    assert httpx.delete(f"{http(url)}/Ann%20Lee").json() == {"object": "speaker", "name": "Ann Lee", "deleted": True}
    assert httpx.delete(f"{http(url)}/Ann%20Lee").json()["error"]["code"] == "speaker_not_found"
    assert not [path for path in (home / "speakers").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("name", "pcm", "fields", "param", "said"),
    [
        ("", ONE, {}, "name", "Missing"),
        ("Ann", ONE, {"consent": " "}, "consent", "Missing"),
        ("Ann", ONE, {"consent": "x" * 3000}, "consent", "at most"),
        ("A\u0007", ONE, {}, "name", "control characters"),
        ("A\u202eB", ONE, {}, "name", "control characters"),
        ("x" * 65, ONE, {}, "name", "1 to 64"),
        ("..", ONE, {}, "name", "part of a path"),
        ("Ann", ONE[: 4 * 16_000], {}, "file", "5 to 30 s"),
        ("Ann", np.tile(ONE, 5), {}, "file", "5 to 30 s"),
        ("Ann", speech(1, 1, 200), {}, "file", "3 s are needed"),
        ("Ann", np.zeros(96_000, np.float32), {}, "file", "no clear speech"),
        ("Ann", np.concatenate((ONE, OTHER)), {}, "file", "two voices"),
    ],
)
def test_speakers_without_a_name_a_consent_or_one_voice_are_refused(
    url: str, name: str, pcm: Pcm, fields: dict[str, str], param: str, said: str
) -> None:
    answer = remember(url, name, pcm, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert said in answer.json()["error"]["message"]
    assert httpx.get(http(url)).json()["data"] == []


def test_a_file_that_is_no_sound_is_refused(url: str) -> None:
    form = {"name": "Ann", "consent": "yes"}
    assert httpx.post(http(url), data=form).json()["error"]["param"] == "file"
    answer = httpx.post(http(url), data=form, files={"file": ("a.wav", b"no sound")})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")


def test_a_key_has_a_limited_number_of_speakers(url: str) -> None:
    assert [remember(url, name).status_code for name in ("a", "b", "c", "d")] == [200, 200, 200, 507]


def test_files_have_the_names_of_remembered_speakers(url: str) -> None:
    remember(url, "Ann", OTHER)

    def post(**fields: Any) -> httpx.Response:
        form = {"model": "default", "response_format": "diarized_json", **fields}
        files = {"file": ("a.wav", wav(pcm16(np.concatenate((ONE, OTHER)))))}
        return httpx.post(f"http{url[2:]}/v1/audio/transcriptions", data=form, files=files, timeout=30)

    answer = post(**{"known_speaker_names[]": "Ann"})
    assert [s["speaker"] for s in answer.json()["segments"]] == ["A", "Ann"]
    # One with a reference, one without.
    one = "data:audio/wav;base64," + b64encode(wav(pcm16(ONE))).decode()
    answer = post(**{"known_speaker_names[]": ["Bob", "Ann"], "known_speaker_references[]": [one, ""]})
    assert [s["speaker"] for s in answer.json()["segments"]] == ["Bob", "Ann"]
    answer = post(**{"known_speaker_names[]": "Eve"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "known_speaker_names")


def test_a_server_that_was_not_told_to_remembers_nobody(tmp_path: Path) -> None:
    with serving(load({"home": str(tmp_path)}), speaker_model=ScriptedVoices()) as (url, _, _):
        for answer in (remember(url, "Ann"), httpx.get(http(url))):
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_supported")
            assert "--speakers-per-key" in answer.json()["error"]["message"]
        assert not (tmp_path / "speakers").exists()
    with serving(load({"home": str(tmp_path), "speakers_per_key": 1})) as (url, _, _):
        assert remember(url, "Ann").json()["error"]["code"] == "model_not_found"


# --- what is kept, by key and by age --------------------------------------------------------------------------------


def stored(name: str, age_s: float = 0.0, encoder: str = "scripted") -> StoredSpeaker:
    return StoredSpeaker(name, "yes", int(time.time() - age_s), encoder, (0.0, 1.0), 6.0)


def test_a_speaker_belongs_to_one_key(tmp_path: Path) -> None:
    alice, bob = (SpeakerStore(tmp_path, key, 3, 0.0) for key in ("alice", "bob"))
    alice.add(stored("Ann"))
    assert (alice.get("ANN"), bob.get("Ann"), bob.list(), bob.delete("Ann")) == (alice.list()[0], None, [], False)
    assert not [path for path in tmp_path.rglob("*") if "alice" in path.name or "ann" in path.name.lower()]


def test_old_speakers_of_all_keys_are_deleted(tmp_path: Path) -> None:
    for key, age_s in (("alice", 99.0), ("bob", 0.0), ("", 99.0)):
        SpeakerStore(tmp_path, key, 3, 0.0).add(stored("Ann", age_s))
    assert SpeakerStore(tmp_path, "alice", 3, 50.0).get("Ann") is None
    assert [s.name for s in SpeakerStore(tmp_path, "bob", 3, 50.0).list()] == ["Ann"]
    assert len([*tmp_path.rglob("speaker.json")]) == 1


def test_a_speaker_of_another_encoder_is_not_compared(running: tuple[str, ServerState], url: str) -> None:
    running[1].remembered_speakers(Caller()).add(stored("Ann", encoder="another"))
    form = {"model": "default", "response_format": "diarized_json", "known_speaker_names[]": "Ann"}
    files = {"file": ("a.wav", wav(pcm16(ONE)))}
    answer = httpx.post(f"http{url[2:]}/v1/audio/transcriptions", data=form, files=files, timeout=30)
    assert answer.status_code == 400
    assert "post it again" in answer.json()["error"]["message"]
