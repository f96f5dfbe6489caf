"""Video streams and conversations with a native model, whose host dies: what the next host has, and what it names as
lost. Sockets and stores are real.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import websockets
from websockets.exceptions import ConnectionClosed

from antiphon.loading.loaded import LoadedModels
from antiphon.pipelines.native_conversation import NativeConversationModel
from antiphon.settings.sections import ResumeSettings
from tests.cluster.scripted_partners import EchoNative, Seer, said
from tests.cluster.test_captions import written
from tests.cluster.test_moving import dies
from tests.cluster.watchers import CONFIG, picture
from tests.scripted import speech, text
from tests.server.clients import Wire, b64, connect
from tests.server.live.test_ownership import Server, last_seq, resuming, sharing
from tests.server.scripted import Echo, scripted_models

SPOKEN = {
    "type": "realtime",
    "output_modalities": ["audio"],
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": 24_000},
            "turn_detection": {"type": "server_vad", "silence_duration_ms": 300},
            "transcription": {},
        }
    },
}


def models() -> LoadedModels:
    native = NativeConversationModel(EchoNative())
    return replace(scripted_models(Echo()), conversation_model=native, video_model=Seer())  # type: ignore[arg-type]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Server]]:
    """Two hosts of one store, with a native model and a video model."""
    with sharing(tmp_path, 2, models=models) as found:
        yield found


@asynccontextmanager
async def video(host: Server, query: str) -> AsyncIterator[Wire]:
    async with websockets.connect(f"{host.ws}/v1/video/chat/stream{query}", max_size=None) as socket:
        yield Wire(socket)


@asynccontextmanager
async def watching(host: Server, query: str = "?resume=1") -> AsyncIterator[tuple[Wire, str, str]]:
    """Yield a video stream that has shown three frames and had an answer, its id and its token."""
    async with video(host, query) as wire:
        created = await wire.read() if query else {}
        await wire.say("session.config", **CONFIG)
        for number in (1, 2, 3):
            await show(wire, number)
            await wire.until("video.frame.ack")
        assert await asked(wire, "q0") == said("q0", [1, 2, 3], 0.0, 0)
        yield wire, created.get("session_id", ""), created.get("resume_token", "")


@asynccontextmanager
async def continuing(
    host: Server, session_id: str, token: str, last: int
) -> AsyncIterator[tuple[Wire, dict[str, Any]]]:
    """Yield a client that resumes a video stream, and the first frame that it receives."""
    async with video(host, f"?resume={session_id}") as wire:
        about = {"session_id": session_id, "resume_token": token, "last_received_server_event_seq": last}
        await wire.say("session.resume", **about)
        yield wire, await wire.read()


async def show(wire: Wire, number: int) -> None:
    await wire.say("video.frame", frame_id=str(number), data=base64.b64encode(picture(number)).decode())


async def asked(wire: Wire, question: str) -> str:
    await wire.say("video.query", text=question)
    return str((await wire.until("response.text.done"))["text"])


def acknowledged(wire: Wire) -> list[str]:
    return [frame["frame_id"] for frame in wire.seen if frame["type"] == "video.frame.ack"]


def test_a_video_stream_goes_on_with_the_frames_that_its_client_sends_again_and_with_its_answers(
    hosts: list[Server], tmp_path: Path
) -> None:
    one, two = hosts

    async def main() -> None:
        async with watching(one) as (wire, session_id, token):
            await show(wire, 4)
            await wire.until("video.frame.ack")
            await wire.say("session.event_ack", server_event_seq=last_seq(wire))
            # With the next result, the first frame is settled: three are kept.
            await show(wire, 5)
            await wire.until("video.frame.ack")
            dies(one, two)
            # Neither images nor resume tokens are in the store, but the answer is.
            stored = written(tmp_path)
            assert base64.b64encode(picture(5))[40:80] not in stored
            assert picture(5)[40:] not in stored
            assert b"q0 | saw 1 2 3" in stored
            async with continuing(two, session_id, token, last_seq(wire)) as (again, resumed):
                assert (resumed["type"], resumed["how"]) == ("session.resumed", "claimed")
                assert resumed["lost"] == ["frames"]
                # The messages were the configuration, frames 1 to 3, the question, and frames 4 and 5.
                assert resumed["received_events"] == 3
                await show(again, 3)
                await again.say("video.query", text="q0")
                for number in (4, 5, 6):
                    await show(again, number)
                # The client has the results of all but the last.
                await again.until("video.frame.ack")
                assert await asked(again, "q1") == said("q1", [4, 5, 6], 0.0, 1)
                assert acknowledged(wire) + acknowledged(again) == ["1", "2", "3", "4", "5", "6"]

    asyncio.run(main())


def test_an_answer_begins_again_if_its_client_has_not_received_the_end(hosts: list[Server]) -> None:
    one, two = hosts

    async def main() -> None:
        async with watching(one) as (wire, session_id, token):
            dies(one, two)
            # The last two events of the answer have not arrived.
            before = [frame for frame in wire.seen if frame["type"] == "response.text.delta"]
            async with continuing(two, session_id, token, before[-2]["server_event_seq"]) as (again, resumed):
                assert resumed["received_events"] == 1
                assert "lost" not in resumed
                for number in (1, 2, 3):
                    await show(again, number)
                assert await asked(again, "q0") == said("q0", [1, 2, 3], 0.0, 0)
                assert again.seen[1]["type"] == "response.start"

    asyncio.run(main())


def test_with_stored_frames_the_next_host_has_the_newest_without_its_client(
    hosts: list[Server], tmp_path: Path
) -> None:
    one, two = hosts
    for host in hosts:
        host.state.settings = replace(host.state.settings, resume=ResumeSettings(store_frames=2))

    async def main() -> None:
        async with watching(one) as (wire, session_id, token):
            for number in range(4, 10):
                await wire.say("session.event_ack", server_event_seq=last_seq(wire))
                await show(wire, number)
                await wire.until("video.frame.ack")
            assert len(one.store.tail(session_id)) <= 4
            dies(one, two)
            assert picture(9)[40:] in written(tmp_path)
            async with continuing(two, session_id, token, last_seq(wire)) as (again, resumed):
                assert resumed["lost"] == ["frames"]
                # The last frame's result was not acknowledged.
                assert resumed["received_events"] == 10
                await show(again, 9)
                assert await asked(again, "q1") == said("q1", [8, 9], 0.0, 1)

    asyncio.run(main())


def test_a_video_stream_that_drains_is_handed_over_after_its_answer(hosts: list[Server]) -> None:
    one, two = hosts

    async def main() -> None:
        async with watching(one) as (wire, session_id, token):
            await wire.say("session.event_ack", server_event_seq=last_seq(wire))
            await asyncio.to_thread(one.stop.close)
            await wire.until("session.moving")
            with pytest.raises(ConnectionClosed):
                await wire.socket.recv()
            assert wire.socket.close_code == 1012
            async with continuing(two, session_id, token, last_seq(wire)) as (again, resumed):
                assert resumed["how"] == "handed_over"
                assert resumed["received_events"] == 1
                for number in (1, 2, 3):
                    await show(again, number)
                await again.say("video.query", text="q0")
                assert await asked(again, "q1") == said("q1", [1, 2, 3], 0.0, 1)

    asyncio.run(main())


def test_a_stream_that_cannot_be_resumed_is_not_stored(hosts: list[Server], tmp_path: Path) -> None:
    async def main() -> None:
        async with watching(hosts[0], ""):
            assert b"q0" not in written(tmp_path)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["native", "video"])
def test_a_host_without_the_model_refuses_by_its_name_and_leaves_the_session(hosts: list[Server], kind: str) -> None:
    one, two = hosts
    assert two.state.models
    other = {"native": {"conversation_model": Echo()}, "video": {"video_model": Seer(name="other")}}[kind]
    two.state.models = replace(two.state.models, **other)  # type: ignore[arg-type]

    async def main() -> None:
        opened = watching(one) if kind == "video" else talking(one)
        async with opened as (wire, session_id, token):
            dies(one, two)
            row = two.row(session_id)
            resumed = continuing if kind == "video" else resuming
            async with resumed(two, session_id, token, last_seq(wire)) as (again, refused):
                with pytest.raises(ConnectionClosed):
                    await again.socket.recv()
            assert (refused["error"]["code"], refused["error"]["retryable"]) == ("model_not_loaded", True)
            assert {"native": "`echo-native`", "video": "`seer`"}[kind] in refused["error"]["message"]
            assert two.row(session_id) == row

    asyncio.run(main())


@asynccontextmanager
async def talking(host: Server) -> AsyncIterator[tuple[Wire, str, str]]:
    """Yield a conversation with a native model that has answered a spoken turn, its id and its token."""
    async with connect(host.ws, "?resume=1") as wire:
        created = await wire.read()
        await wire.say("session.update", session=SPOKEN)
        await wire.say("input_audio_buffer.append", audio=b64(speech(1, 3, 30), 24_000))
        done = await wire.until("response.done")
        assert done["response"]["output"][0]["content"][0]["transcript"] == text(1, 3)
        yield wire, created["session"]["id"], created["resume_token"]


def test_a_native_model_begins_again_from_the_text_and_the_sound_of_the_open_turn(hosts: list[Server]) -> None:
    one, two = hosts

    async def main() -> None:
        async with talking(one) as (wire, session_id, token):
            await wire.say("input_audio_buffer.append", audio=b64(speech(4, 3), 24_000))
            await wire.until("speech_started")
            dies(one, two)
            async with resuming(two, session_id, token, last_seq(wire)) as (again, resumed):
                assert (resumed["how"], resumed["lost"]) == ("claimed", ["audio"])
                # The client sends the open turn again, which has no transcript yet, and the message in which it may
                # have begun.
                assert resumed["received_events"] == 1
                await again.say("input_audio_buffer.append", audio=b64(speech(1, 3, 30), 24_000))
                await again.say("input_audio_buffer.append", audio=b64(speech(4, 3), 24_000))
                await again.say("input_audio_buffer.append", audio=b64(np.zeros(16_000, np.float32), 24_000))
                done = await again.until(
                    lambda frame: frame["type"] == "response.done" and frame["response"]["status"] == "completed"
                )
                assert done["response"]["output"][0]["content"][0]["transcript"] == text(4, 3)

    asyncio.run(main())


def test_a_native_model_answers_a_turn_that_the_last_host_has_only_transcribed(hosts: list[Server]) -> None:
    """The model answers in text that it has not heard, since the turn is in its history."""
    one, two = hosts
    assert one.state.models
    silent = EchoNative()
    one.state.models = replace(one.state.models, conversation_model=NativeConversationModel(silent))

    async def main() -> None:
        async with connect(one.ws, "?resume=1") as wire:
            created = await wire.read()
            await wire.say("session.update", session=SPOKEN)
            silent.is_silent = True
            await wire.say("input_audio_buffer.append", audio=b64(speech(7, 3, 30), 24_000))
            await wire.until("transcription.completed")
            dies(one, two)
            async with resuming(two, created["session"]["id"], created["resume_token"], last_seq(wire)) as (again, _):
                done = await again.until("response.done")
                assert done["response"]["status"] == "completed"
                assert done["response"]["output"][0]["content"][0]["transcript"] == text(7, 3)
                kinds = [json.dumps(frame) for frame in again.seen if frame["type"] == "error"]
                assert not kinds

    asyncio.run(main())
