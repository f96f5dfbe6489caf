"""The client of the live benchmarks: what it sends, plays, drops and acknowledges, and the arrival times of events."""

from __future__ import annotations

import asyncio
import base64
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import psutil
import pytest
from bench.common import Server
from bench.driver import ACK_EVERY, CHUNK_S, STEP, Caller, Session, shared
from bench.hearing.client import Listener

from antiphon.client.link import SessionEnded

VAD = {"type": "server_vad"}


def in_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Decorate a test so that it runs in a new event loop."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    return run


class Wire:
    """A link that yields the test's events, and records what is sent over it."""

    def __init__(self) -> None:
        self.sent: list[Mapping[str, Any]] = []
        self.given: asyncio.Queue[dict[str, Any] | SessionEnded] = asyncio.Queue()

    def start(self) -> None:
        """Do nothing, because there is no connection."""

    async def send(self, message: Mapping[str, Any]) -> None:
        self.sent.append(message)

    async def receive(self) -> dict[str, Any]:
        found = await self.given.get()
        if isinstance(found, SessionEnded):
            raise found
        return found

    async def close(self) -> None:
        """Do nothing, because nothing is open."""


def wired(session: Session, *events: dict[str, Any] | SessionEnded) -> Wire:
    """Replace the session's link by a Wire whose events arrive at once."""
    session.link = wire = Wire()  # type: ignore[assignment]
    for event in events:
        wire.given.put_nowait(event)
    return wire


def delta(value: int, num_samples: int = STEP // 2, item: str = "i") -> dict[str, Any]:
    pcm = np.full(num_samples, value, np.int16).tobytes()
    return {"type": "response.output_audio.delta", "item_id": item, "delta": base64.b64encode(pcm).decode()}


def kinds(wire: Wire) -> list[str]:
    return [str(message["type"]) for message in wire.sent]


def said(message: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(message["audio"]), np.int16)


@in_a_loop
async def test_a_session_is_opened_and_keeps_what_comes() -> None:
    session = Session("http://host", "/v1/realtime", {"session": {"type": "realtime"}})
    wire = wired(session, {"type": "session.created"}, {"type": "a", "n": 1}, {"type": "b"}, {"type": "a", "n": 2})
    async with session:
        assert wire.sent == [{"type": "session.update", "session": {"type": "realtime"}}]
        at, event = await session.first(("b", "a"))
        assert event == {"type": "a", "n": 1}
        assert await session.until("b", 0) >= at
        assert (await session.first("a", 2))[1]["n"] == 2
        assert [event["n"] for event in session.of_type("a", 1)] == [1, 2]
        assert len(session.times("a", 2)) == 1


@in_a_loop
async def test_a_refused_session_is_not_entered() -> None:
    session = Session("http://host", "/v1/realtime")
    wire = wired(session, SessionEnded("server_busy", retry_after_s=3.0))
    with pytest.raises(SessionEnded) as refused:
        await session.__aenter__()
    assert refused.value.retry_after_s == 3.0
    assert wire.sent == []


@in_a_loop
async def test_waiting_ends_with_the_session() -> None:
    session = Session("http://host", "/v1/realtime")
    wired(session, {"type": "session.created"}, SessionEnded("connection_lost"))
    async with session:
        with pytest.raises(SessionEnded):
            await session.first("never")


@in_a_loop
async def test_a_client_has_acted_on_an_event_when_it_is_seen() -> None:
    acted = list[str]()

    class Acting(Session):
        async def hear(self, at: float, event: dict[str, Any]) -> None:
            assert len(self.events) == len(acted)
            acted.append(event["type"])

    session = Acting("http://host", "/v1/realtime")
    wired(session, {"type": "session.created"}, {"type": "a"})
    async with session:
        await session.until("a", 0)
        assert acted == ["session.created", "a"]


@in_a_loop
async def test_a_transcript_belongs_to_the_clip_that_it_was_heard_in() -> None:
    listener = Listener(Server("http://host", psutil.Process()))
    wired(listener)
    listener.sent_s = 1.0
    first = listener.begin()
    listener.sent_s = 5.0
    second = listener.begin()
    transcription = "conversation.item.input_audio_transcription"
    for item, start_ms, text in (("a", 1200, "one"), ("b", 4600, "two")):
        await listener.hear(
            10.0, {"type": "input_audio_buffer.speech_started", "item_id": item, "audio_start_ms": start_ms}
        )
        await listener.hear(11.0, {"type": f"{transcription}.delta", "item_id": item, "delta": text[:2]})
        await listener.hear(12.0, {"type": f"{transcription}.completed", "item_id": item, "transcript": text})
    await listener.hear(13.0, {"type": f"{transcription}.failed", "item_id": "b", "error": {"code": "x"}})
    assert (first.text, first.shown, second.text, second.turns) == ("one", "on", "two", [("tw", "two")])
    assert second.failures == ['{"code": "x"}']
    assert first.finals[0][0] == 12.0 - first.zero


@in_a_loop
async def test_an_event_that_the_client_cannot_take_ends_the_waiting() -> None:
    caller = Caller("http://host", VAD)
    wired(caller, {"type": "response.output_audio.delta"})
    with pytest.raises(SessionEnded, match="KeyError"):
        await caller.__aenter__()


@in_a_loop
async def test_a_caller_sends_what_is_said_and_then_silence() -> None:
    caller = Caller("http://host", VAD)
    wire = wired(caller)
    caller.begun_s = 10.0
    await caller.step()
    begins_s = await caller.say(np.full(int(1.5 * CHUNK_S * 16_000), 0.5, np.float32))
    assert begins_s == pytest.approx(10.0 + CHUNK_S)
    for _ in range(3):
        await caller.step()
    loud = [bool(np.abs(said(message)).max() > 1000) for message in wire.sent]
    assert loud == [False, True, True, False]
    assert {len(said(message)) for message in wire.sent} == {STEP // 2}


@in_a_loop
async def test_the_loudspeaker_plays_whole_steps_and_waits_while_ducked() -> None:
    caller = Caller("http://host", VAD)
    wired(caller)
    await caller.hear(0.0, delta(7, STEP // 4))
    assert not caller.sounding
    await caller.hear(0.1, delta(7, STEP // 2))
    await caller.step()
    await caller.hear(0.2, delta(8, STEP // 2))
    await caller.hear(0.3, {"type": "output_audio_buffer.ducked"})
    await caller.step()
    await caller.hear(0.4, {"type": "output_audio_buffer.unducked"})
    await caller.step()
    assert [int(np.frombuffer(step, np.int16)[0]) for step in caller.heard] == [7, 0, 7]
    assert [(mark.at, mark.kind) for mark in caller.marks] == [(0.3, "ducked"), (0.4, "unducked")]
    assert caller.sounded == 2


@in_a_loop
async def test_an_interruption_drops_the_answer_and_tells_what_was_heard() -> None:
    caller = Caller("http://host", VAD)
    wire = wired(caller)
    await caller.hear(0.0, {"type": "input_audio_buffer.speech_started"})
    assert caller.marks == []
    await caller.hear(0.0, delta(7, 3 * STEP // 2))
    await caller.step()
    await caller.hear(1.0, {"type": "input_audio_buffer.speech_started"})
    assert not caller.sounding
    assert [mark.kind for mark in caller.marks] == ["interrupted"]
    truncated = {"type": "conversation.item.truncate", "item_id": "i", "content_index": 0, "audio_end_ms": 20}
    assert wire.sent[-1] == truncated


@in_a_loop
async def test_a_caller_of_full_duplex_acknowledges_and_obeys_decisions() -> None:
    caller = Caller("http://host", None)
    wire = wired(caller)
    await caller.hear(0.0, delta(7, (ACK_EVERY + 2) * STEP // 2))
    for _ in range(ACK_EVERY + 1):
        await caller.step()
    acks = [message["played_ms"] for message in wire.sent if message["type"] == "playback.ack"]
    assert acks == [ACK_EVERY * 20]
    await caller.hear(1.0, {"type": "input_audio_buffer.speech_started"})
    await caller.hear(1.1, {"type": "overlap.decision", "action": "backchannel"})
    assert caller.sounding
    await caller.hear(1.2, {"type": "turn.event", "event": "duck"})
    await caller.hear(1.3, {"type": "overlap.decision", "action": "barge_in"})
    assert not caller.sounding
    assert [mark.kind for mark in caller.marks] == ["ducked", "interrupted"]
    assert wire.sent[-1] == {"type": "playback.ack", "item_id": "i", "played_ms": (ACK_EVERY + 1) * 20}


@in_a_loop
async def test_an_echo_comes_back_later_and_fainter() -> None:
    caller = Caller("http://host", VAD, echo=(-20.0, 2 * CHUNK_S))
    wire = wired(caller)
    await caller.hear(0.0, delta(1000))
    for _ in range(4):
        await caller.step()
    assert [int(said(message)[0]) for message in wire.sent] == [0, 0, 100, 0]


@in_a_loop
async def test_a_sound_is_told_from_an_answer_without_one() -> None:
    caller = Caller("http://host", VAD)
    wire = wired(caller)
    since = await caller.ask("Well?", 9)
    assert kinds(wire) == ["conversation.item.create", "response.create"]
    assert wire.sent[1]["response"]["max_output_tokens"] == 9
    caller.events += [(1.0, {"type": "response.created"}), (2.0, {"type": "response.done"})]
    assert not await caller.sounds(since)
    caller.events.insert(1, (1.5, delta(7)))
    assert await caller.sounds(since)
    assert not await caller.sounds(2)


@in_a_loop
async def test_an_answer_goes_on_while_it_is_made_or_has_a_second_to_sound() -> None:
    caller = Caller("http://host", VAD)
    wired(caller)
    assert not caller.goes_on
    caller.events.append((1.0, {"type": "response.created"}))
    assert caller.goes_on
    caller.events.append((2.0, {"type": "response.done"}))
    assert not caller.goes_on
    await caller.hear(3.0, delta(7, round(1.0 / CHUNK_S) * STEP // 2))
    assert caller.goes_on
    await caller.step()
    assert not caller.goes_on


@in_a_loop
async def test_items_are_shared_among_conversations() -> None:
    async def play(share: Any) -> list[tuple[int, ...]]:
        return [tuple(share)]

    assert await shared(range(5), 2, play) == [(0, 2, 4), (1, 3)]
