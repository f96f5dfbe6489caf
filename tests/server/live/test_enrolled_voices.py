"""Enrolled voices: uploaded, looked up by key and name, processed once, and recognized in sessions."""

from __future__ import annotations

import asyncio
import io
import json
import wave
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect

from antiphon.audio import Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.errors import Refused, RemoteProtocolError
from antiphon.events.conversation import ConfigureConversation
from antiphon.events.transcription import AppendAudio, EnrolledVoice
from antiphon.loading.loaded import LoadedModels
from antiphon.protocols.negotiation import RealtimeConnection
from antiphon.protocols.opening import Opening
from antiphon.server.credentials import Caller
from antiphon.server.live import enrolled_voices
from antiphon.server.live.enrolled_voices import EnrolledVoices
from antiphon.server.live.moving.persistence import restored, stored_session
from antiphon.server.live.moving.resume_point import ResumePoint
from antiphon.server.live.open_wire import context_of, prepare_voices
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.settings import load
from antiphon.shares.places import current_owner
from antiphon.signals import become
from antiphon.store.voices import StoredVoice, VoiceStore
from antiphon.transports.journal import ResumeToken
from tests.scripted import OTHERS, ScriptedDetector, ScriptedTranscriber, ScriptedVoices, speech
from tests.server.scripted import Echo, serving

PARAM = "session.audio.input.enrolled_voice"


def wav(pcm: Pcm) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(to_pcm16(pcm))
    return file.getvalue()


# 3.2 s of the user's voice, with pauses before and after.
USER = wav(np.concatenate((np.zeros(16_000, np.float32), speech(1, 10, 40))))
SHORT, SILENT = wav(speech(1, 5, 200)), wav(np.zeros(160_000, np.float32))


@dataclass(slots=True)
class Shelf:
    """Uploaded voices of several keys, and the lookup under test."""

    home: Path
    voices: EnrolledVoices
    model: ScriptedVoices

    def store(self, key: str = "") -> VoiceStore:
        return VoiceStore(self.home, key, 20)

    def add(self, name: str, sample: bytes | None, key: str = "", embedding: tuple[float, ...] = ()) -> None:
        voice = StoredVoice(name, "yes", 0, "", "", "audio/wav", len(sample or b""), embedding)
        self.store(key).add(voice, sample)

    async def find(self, name: str, key: str = "") -> tuple[EnrolledVoice, ...]:
        models: Any = replace(loaded(), speaker_model=self.model)
        await self.voices.prepare(key, name, self.store(key), models)
        return self.voices.find(key, name, PARAM)

    async def error(self, name: str, key: str = "") -> RemoteProtocolError:
        with pytest.raises(RemoteProtocolError) as refused:
            await self.find(name, key)
        assert refused.value.param == PARAM
        return refused.value


def loaded(speaker_model: ScriptedVoices | None = None) -> LoadedModels:
    return LoadedModels(
        transcriber=ScriptedTranscriber(),
        vad=ScriptedDetector(),
        turn_detector=None,
        language_model=None,
        synthesizer=None,
        image_reader=None,
        conversation_model=Echo(),
        video_model=None,
        names=("scripted",),
        lanes=(),
        speaker_model=speaker_model,
    )


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path, EnrolledVoices(), ScriptedVoices())


def test_when_a_voice_is_looked_up_then_its_recording_is_listened_to_once(shelf: Shelf) -> None:
    async def main() -> None:
        shelf.add("Ann", USER)
        voices = await shelf.find("ann")
        assert len(voices) == shelf.model.num_embedded == 4
        # The pauses are left out, except at the edges of the words.
        assert {round(voice.speech_s, 1) for voice in voices} == {3.4}
        assert await shelf.find("Ann") == voices
        shelf.add("Ann", wav(speech(1, 12)))
        assert await shelf.find("Ann") != voices
        assert shelf.model.num_embedded == 8
        # The duration of a lookup reveals nothing to another key.
        shelf.add("Ann", USER, key="alice")
        await shelf.find("Ann", "alice")
        assert shelf.model.num_embedded == 12

    anyio.run(main)


def test_when_a_voice_cannot_be_enrolled_then_the_error_says_why(shelf: Shelf) -> None:
    async def main() -> None:
        assert (await shelf.error("Ann")).code == "voice_not_found"
        shelf.add("Ann", USER, key="alice")
        for key in ("", "bob"):
            assert (await shelf.error("Ann", key)).message == "No voice `Ann` was uploaded."
        shelf.add("Vector", None, embedding=(0.1, 0.2))
        shelf.add("Short", SHORT)
        shelf.add("Silent", SILENT)
        shelf.add("Noise", b"no audio at all")
        for name, message in (
            ("Vector", "The voice `Vector` was uploaded as an embedding; a recording is needed."),
            ("Short", "The voice `Short` has 1.7 s of speech in its first 60 s; 3 s are needed."),
            ("Silent", "The voice `Silent` has 0.0 s of speech in its first 60 s; 3 s are needed."),
        ):
            error = await shelf.error(name)
            assert (error.code, error.message) == ("invalid_value", message)
        assert (await shelf.error("Noise")).code == "invalid_value"
        assert (await shelf.error("x" * 10_000)).code == "voice_not_found"
        shelf.store().delete("Short")
        assert (await shelf.error("Short")).code == "voice_not_found"

    anyio.run(main)


def test_when_the_model_fails_or_is_busy_then_the_voice_is_listened_to_the_next_time(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(pcm: Pcm) -> Pcm:
        raise Refused("the lane is full", 1.0)

    async def main() -> None:
        shelf.add("Ann", USER)
        shelf.model.fails = True
        assert (await shelf.error("Ann")).code == "server_error"
        shelf.model.fails = False
        with monkeypatch.context() as patch:
            patch.setattr(shelf.model, "embed", full)
            assert (await shelf.error("Ann")).code == "resource_exhausted"
        assert await shelf.find("Ann")

    anyio.run(main)


def test_when_a_key_has_many_recordings_to_be_listened_to_then_another_keys_is_the_next_but_one(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = shelf.model.embed

    async def main() -> None:
        order, gate = list[str](), anyio.Event()

        async def embed_later(pcm: Pcm) -> Pcm:
            await gate.wait()
            return await embed(pcm)

        monkeypatch.setattr(shelf.model, "embed", embed_later)

        async def look_up(key: str, name: str) -> None:
            current_owner.set(key)
            await shelf.find(name, key)
            order.append(key)

        for number in range(5):
            shelf.add(f"{number}", USER, key="alice")
        shelf.add("Ann", USER, key="bob")
        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(look_up, "alice", f"{number}")
            places = shelf.voices.listening
            await become(lambda: places.num_waiting == 4, 0.001)
            group.start_soon(look_up, "bob", "Ann")
            await become(lambda: places.num_waiting == 5, 0.001)
            gate.set()
        assert order == ["alice", "bob", *["alice"] * 4]

    anyio.run(main)


def test_what_is_remembered_of_names_is_bounded_and_shared_by_keys(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolled_voices, "MAX_OUTCOMES", 20)
    shelf.voices = EnrolledVoices()

    async def main() -> None:
        shelf.add("Ann", USER)
        voices = await shelf.find("Ann")
        for number in range(20):
            await shelf.error(f"nobody {number}", "alice")
        assert shelf.voices.find("", "Ann", PARAM) == voices
        for number in range(20):
            await shelf.error(f"nobody {number}")
        with pytest.raises(RemoteProtocolError):
            shelf.voices.find("", "Ann", PARAM)
        assert await shelf.find("Ann")
        assert shelf.model.num_embedded == 4

    anyio.run(main)


def test_when_a_conversation_is_restored_then_its_voice_is_found_again_unless_it_was_deleted(tmp_path: Path) -> None:
    def started() -> ServerState:
        return ServerState(load({"home": str(tmp_path)}), Metrics(), loaded(ScriptedVoices()))

    async def main() -> None:
        state, caller = started(), Caller("alice")
        state.uploaded_voices(caller).add(StoredVoice("Ann", "yes", 0, "", "", "audio/wav", len(USER)), USER)
        wire = RealtimeConnection(Opening(dialect="openai"), context_of(state, caller))
        wire.open()
        await prepare_voices(state, caller, UPDATE)
        assert wire.feed(UPDATE).commands
        row = stored_session(caller, wire, ResumeToken(), [], ResumePoint())
        assert row
        later = started()
        await prepare_voices(later, caller, row.snapshot)
        again, _, _ = restored(later, caller, row)
        first = again.feed(AppendAudio(np.zeros(0, np.float32))).commands[0]
        assert isinstance(first, ConfigureConversation)
        assert len(first.config.transcription.enrolled_voices) == 4
        state.uploaded_voices(caller).delete("Ann")
        await prepare_voices(later, caller, row.snapshot)
        with pytest.raises(RemoteProtocolError, match="No voice `Ann` was uploaded"):
            restored(later, caller, row)

    anyio.run(main)


# --- a server's sessions --------------------------------------------------------------------------------------------

INPUT = {
    "format": {"type": "audio/pcm", "rate": 16000},
    "transcription": {},
    "turn_detection": {"type": "server_vad", "silence_duration_ms": 200},
}


def updated(voice: str = "Ann", mode: str = "enrolled") -> str:
    named = {"enrolled_voice": voice} if mode == "enrolled" else {}
    audio = {"input": INPUT | {"primary_speaker": mode} | named}
    session = {"type": "realtime", "output_modalities": ["text"], "audio": audio}
    return json.dumps({"type": "session.update", "session": session})


UPDATE = updated()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = load({"home": str(tmp_path_factory.mktemp("home"))})
    with serving(settings, speaker_model=ScriptedVoices()) as (url, _, _):
        for name, sample in (("Ann", USER), ("Brief", SHORT)):
            upload(url, name, sample)
        yield url


def upload(url: str, name: str, sample: bytes) -> None:
    form, file = {"name": name, "consent": "Ann's"}, {"audio_sample": ("a.wav", sample, "audio/wav")}
    answer = httpx.post(f"http{url[2:]}/v1/audio/voices", data=form, files=file)
    assert answer.status_code == 200, answer.text


class Talk:
    """A client's conversation over a socket."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        # Events read while waiting for others: an answer may be done before the transcript of its turn.
        self.passed: list[dict[str, Any]] = []

    async def until(self, *kinds: str) -> dict[str, Any]:
        """Return the next event of these kinds. Returns each event only once."""
        while not (found := [event for event in self.passed if event["type"] in kinds]):
            self.passed.append(json.loads(await self.socket.recv()))
        self.passed.remove(found[0])
        return found[0]

    async def set(self, update: str) -> dict[str, Any]:
        await self.socket.send(update)
        return await self.until("session.updated", "error")

    async def say(self, first: int) -> str:
        """Speak a turn, and return which voice it was attributed to."""
        pcm = speech(first, 4, 20)
        for at in range(0, len(pcm), 1600):
            audio = b64encode(to_pcm16(pcm[at : at + 1600])).decode()
            await self.socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        done = await self.until("conversation.item.input_audio_transcription.completed")
        return str(done.get("speaker"))

    async def answer(self) -> str:
        done = await self.until("response.done")
        return str(done["response"]["output"][0]["content"][0]["text"])


@asynccontextmanager
async def talk(url: str, query: str = "?dialect=openai") -> AsyncIterator[Talk]:
    async with asyncio.timeout(30), connect(f"{url}/v1/realtime{query}") as socket:
        yield Talk(socket)


def test_when_a_voice_is_enrolled_then_only_its_turns_are_answered_from_the_first_on(server: str) -> None:
    async def main() -> None:
        async with talk(server) as client:
            shown = (await client.set(UPDATE))["session"]["audio"]["input"]
            assert (shown["primary_speaker"], shown["enrolled_voice"]) == ("enrolled", "Ann")
            assert await client.say(OTHERS) == "other"
            assert await client.say(11) == "user"
            # The first answer is the answer to the user.
            assert (await client.answer()).startswith("w11 ")
            await client.set(updated(mode="off"))
            assert await client.say(OTHERS + 20) == "None"
            assert (await client.answer()).startswith(f"w{OTHERS + 20} ")

    asyncio.run(main())


def test_when_a_voice_cannot_be_enrolled_then_the_session_goes_on_as_it_was(server: str) -> None:
    async def main() -> None:
        async with talk(server) as client:
            for name, code in (("Nobody", "voice_not_found"), ("Brief", "invalid_value")):
                error = (await client.set(updated(name)))["error"]
                assert (error["code"], error["param"]) == (code, PARAM)
            assert (await client.set(updated(mode="off")))["type"] == "session.updated"
            await client.say(OTHERS)
            assert (await client.answer()).startswith(f"w{OTHERS} ")

    asyncio.run(main())


def test_when_a_client_secret_enrols_a_voice_then_the_session_that_it_opens_has_it(server: str) -> None:
    session = json.loads(UPDATE)["session"]
    address = f"http{server[2:]}/v1/realtime/client_secrets"
    made = httpx.post(address, json={"session": session}).json()
    assert made["session"]["audio"]["input"]["enrolled_voice"] == "Ann"
    wrong = session | {"audio": {"input": {"primary_speaker": "enrolled", "enrolled_voice": "Nobody"}}}
    assert httpx.post(address, json={"session": wrong}).json()["error"]["code"] == "voice_not_found"

    async def main() -> None:
        header = {"Authorization": f"Bearer {made['value']}"}
        async with asyncio.timeout(30), connect(f"{server}/v1/realtime", additional_headers=header) as socket:
            client = Talk(socket)
            assert await client.say(OTHERS) == "other"
            assert await client.say(11) == "user"
            assert (await client.answer()).startswith("w11 ")

    asyncio.run(main())


@pytest.mark.parametrize("path", ["realtime", "duplex"])
def test_when_the_voice_of_a_client_secret_is_deleted_then_it_opens_no_session(server: str, path: str) -> None:
    upload(server, "Passing", USER)
    session = json.loads(updated("Passing"))["session"]
    made = httpx.post(f"http{server[2:]}/v1/realtime/client_secrets", json={"session": session}).json()
    assert httpx.delete(f"http{server[2:]}/v1/audio/voices/Passing").status_code == 200

    async def main() -> dict[str, Any]:
        header = {"Authorization": f"Bearer {made['value']}"}
        async with asyncio.timeout(30), connect(f"{server}/v1/{path}?model=echo", additional_headers=header) as socket:
            return dict(json.loads(await socket.recv()))

    error = asyncio.run(main())["error"]
    assert (error["code"], error["param"]) == ("voice_not_found", PARAM)


def test_when_the_voice_is_deleted_then_the_session_that_has_it_keeps_it_and_no_other_gets_it(server: str) -> None:
    async def main() -> None:
        async with talk(server) as client, talk(server) as other:
            await client.set(UPDATE)
            async with httpx.AsyncClient() as http:
                assert (await http.delete(f"http{server[2:]}/v1/audio/voices/ann")).status_code == 200
            assert (await other.set(UPDATE))["error"]["code"] == "voice_not_found"
            assert await client.say(OTHERS) == "other"
            assert await client.say(11) == "user"
            assert (await client.answer()).startswith("w11 ")

    asyncio.run(main())
