"""A caller's leg against a carrier that is written from the carriers' documents, in virtual time."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from bench import carrier

from antiphon.audio.line.g711 import from_ulaw, to_ulaw
from antiphon.audio.line.telephone import tones
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ContentPart,
    ContentPartDone,
    ContentPosition,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
)
from antiphon.events.playback import PlaybackStarted, PlaybackStopped
from antiphon.events.tools import ToolResult
from antiphon.events.transcription import AppendAudio
from antiphon.protocols.telephony.asterisk import UUID, AudioSocketStream, framed
from antiphon.protocols.telephony.carriers import CarrierStream
from antiphon.protocols.telephony.stream import Started
from antiphon.transports.call_tools import CallTools
from antiphon.transports.leg import KEYS_PAUSE_S, LegOptions
from antiphon.transports.telephone import LEAD_S, UNBUFFERED_LEAD_S, CallerLeg
from antiphon.transports.transport import TransportClosed

# Seconds that a message takes between the carrier and the server.
ON_THE_WAY_S = 0.08
WORD_S, OUT_HZ = 0.3, 24_000
SILENCE = to_ulaw(np.zeros(160, np.float32))


class _Selector(selectors.DefaultSelector):
    """Advances the time of its loop instead of waiting."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits, and nothing is due"
            self.loop.now_s += max(timeout, 1e-6) if timeout else 0.0
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while everything waits."""

    now_s = 100.0

    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


class Carrier:
    """The carrier's end of a stream: plays what it gets, returns marks, and sends the caller's audio.

    With `echoes` false, it never returns a mark. It is the leg's socket.
    """

    def __init__(self, *, echoes: bool = True) -> None:
        self.loop = asyncio.get_running_loop()
        self.buffer = carrier.PlayBuffer(self.loop.time)
        self.echoes = echoes
        self.played: list[bytes] = []
        self.got: list[tuple[float, dict[str, Any]]] = []
        self.closed: tuple[int, str] | None = None
        self._last_s = 0.0
        self._to_server: asyncio.Queue[str | None] = asyncio.Queue()
        self.timer = self.loop.create_task(self._live())

    async def _live(self) -> None:
        """Send the caller's silence, and return marks, each 20 ms."""
        while True:
            await asyncio.sleep(0.02)
            self.speak(SILENCE)
            self._echo(self.buffer.due())

    def speak(self, payload: bytes) -> None:
        self.say(carrier.media(payload))

    def say(self, message: str | None) -> None:
        """Send a message to the server. It arrives after a while."""
        self._later(self._to_server.put_nowait, message)

    def _later(self, arrive: Callable[[Any], object], message: Any) -> None:
        """Let a message arrive after a while. Timers of one moment have no order, so each has a moment of its own."""
        self._last_s = max(self.loop.time() + ON_THE_WAY_S, self._last_s + 1e-6)
        self.loop.call_at(self._last_s, arrive, message)

    def _echo(self, names: list[str]) -> None:
        for name in names if self.echoes else ():
            self.say(carrier.mark(name))

    def _arrive(self, data: str) -> None:
        message = json.loads(data)
        self.got.append((self.loop.time(), message))
        self._echo(self.buffer.take(message))

    # --- the leg's socket

    async def receive(self) -> str | None:
        return await self._to_server.get()

    async def send(self, data: str | bytes) -> None:
        if self.closed:
            raise TransportClosed
        assert isinstance(data, str)
        self._later(self._arrive, data)

    async def close(self, code: int, reason: str) -> None:
        self.closed = code, reason


class Session:
    """The session behind a leg: takes what the leg brings, and answers when the test says so."""

    def __init__(
        self, sent: Carrier, *, transfer: Callable[[str], Awaitable[None]] | None = None, **options: Any
    ) -> None:
        self.carrier = sent
        stream = CarrierStream()
        (started,) = stream.read(carrier.start())
        assert isinstance(started, Started)
        clock = asyncio.get_running_loop().time
        self.leg = CallerLeg(sent, stream, started, LegOptions(**options), transfer=transfer, clock=clock)
        self.player = self.leg.playback
        self.reported: list[Any] = []
        self.player.attach(self.reported.append)
        self.frames: list[dict[str, Any]] = []
        self.heard_s = 0.0
        self.number = 0
        self.tools = CallTools(self.leg)
        self.tasks = [asyncio.create_task(self.leg.run()), asyncio.create_task(self._take())]

    async def _take(self) -> None:
        while (data := await self.leg.receive()) is not None:
            if isinstance(data, AppendAudio):
                self.heard_s += len(data.pcm) / 16_000
            else:
                self.frames.append(json.loads(data))

    def begin(self) -> ContentPosition:
        self.number += 1
        at = ContentPosition(f"resp_{self.number}", f"item_{self.number}", 0)
        self.player.send(ResponseCreated(Response(at.response_id, True, None, None)))
        return at

    def answer(self, num_words: int) -> ContentPosition:
        """Generate a whole response at once: words of 300 ms."""
        at = self.begin()
        pcm = np.full(int(num_words * WORD_S * OUT_HZ), 0.25, np.float32)
        self.player.send(ResponseAudioDelta(at, pcm, OUT_HZ))
        self.player.send(ContentPartDone(at, ContentPart("output_audio")))
        self.end(at)
        return at

    def call(self, name: str, arguments: str = "{}") -> asyncio.Task[ToolResult]:
        """Let the session carry out a function of the model."""
        return asyncio.create_task(self.tools.call("telephone", name, arguments))

    def end(self, at: ContentPosition) -> None:
        self.player.send(ResponseDone(Response(at.response_id, True, None, None)))

    def kinds(self) -> list[str]:
        return [frame["type"] for frame in self.frames]

    async def over(self) -> str:
        """Wait for the end of the leg, and return its reason."""
        await asyncio.gather(*self.tasks)
        self.carrier.timer.cancel()
        return self.leg.ended_by

    async def hang_up(self) -> str:
        self.carrier.say(carrier.stop())
        return await self.over()


def test_of_50_cuts_the_history_knows_48_to_a_word() -> None:
    """The caller interrupts at any moment of a response. What counts as heard is compared with what was played."""
    right = 0

    async def one(seed: int) -> tuple[float, float]:
        draw = random.Random(seed)
        session = Session(Carrier())
        at = session.answer(20)
        await asyncio.sleep(draw.uniform(0.0, 6.5))
        cut = {place.item_id: ms for place, ms in session.player.silence()}
        heard_s = cut.get(at.item_id, 20 * WORD_S * 1000) / 1000
        await asyncio.sleep(1.0)
        played_s = session.carrier.buffer.played_s
        # The marks that `clear` returned are here by now. They must not have become sound that was heard.
        assert session.reported.count(PlaybackStopped(at.response_id)) == (at.item_id not in cut)
        await session.hang_up()
        return heard_s, played_s

    async def main() -> None:
        nonlocal right
        for seed in range(50):
            heard_s, played_s = await one(seed)
            right += abs(int(heard_s / WORD_S) - int(played_s / WORD_S)) <= 1
            # Never more than what was heard.
            assert heard_s <= played_s + 1e-6

    run(main)
    assert right >= 48


def test_the_carrier_gets_audio_a_little_ahead_and_nothing_between_answers() -> None:
    async def main() -> None:
        session = Session(Carrier())
        await asyncio.sleep(2.0)
        assert session.carrier.got == []
        begun_s = session.carrier.loop.time()
        session.answer(10)
        await asyncio.sleep(5.0)
        sound = [(at_s, m) for at_s, m in session.carrier.got if m["event"] == "media"]
        sent_s = 0.0
        for at_s, message in sound:
            assert sent_s <= at_s - begun_s + LEAD_S + 0.2
            sent_s += len(carrier.base64.b64decode(message["media"]["payload"])) / 8000
        assert sent_s == pytest.approx(10 * WORD_S, abs=0.021)
        # One stretch without a gap.
        assert session.carrier.buffer.ends_s - session.carrier.buffer.spans[0][0] == pytest.approx(sent_s)
        assert session.reported == [PlaybackStarted("resp_1"), PlaybackStopped("resp_1")]
        assert await session.hang_up() == "caller_hung_up"

    run(main)


def test_when_playing_is_held_then_the_carrier_soon_falls_silent_and_goes_on_later() -> None:
    async def main() -> None:
        session = Session(Carrier())
        session.answer(10)
        await asyncio.sleep(1.0)
        session.player.hold(True)
        await asyncio.sleep(2.0)
        assert session.carrier.buffer.played_s == pytest.approx(1.0, abs=0.5)
        session.player.hold(False)
        await asyncio.sleep(4.0)
        assert session.carrier.buffer.played_s == pytest.approx(10 * WORD_S, abs=0.021)
        assert not [m for _, m in session.carrier.got if m["event"] == "clear"]
        await session.hang_up()

    run(main)


def test_a_carrier_that_returns_no_marks_is_believed_to_have_played() -> None:
    async def main() -> None:
        session = Session(Carrier(echoes=False))
        session.answer(10)
        await asyncio.sleep(4.0)
        assert session.reported == [PlaybackStarted("resp_1")]
        await asyncio.sleep(4.0)
        assert session.reported == [PlaybackStarted("resp_1"), PlaybackStopped("resp_1")]
        await session.hang_up()

    run(main)


def test_audio_is_resampled_once_and_keys_become_the_users_input() -> None:
    async def main() -> None:
        session = Session(Carrier())
        session.answer(10)
        await asyncio.sleep(1.0)
        for key in "12":
            session.carrier.say(carrier.dtmf(key))
            await asyncio.sleep(0.5)
        # The first key stops the response, as speech does.
        assert session.kinds() == ["output_audio_buffer.clear"]
        session.player.silence()
        await asyncio.sleep(KEYS_PAUSE_S)
        assert session.kinds()[1:] == ["conversation.item.create", "response.create"]
        assert "12" in session.frames[1]["item"]["content"][0]["text"]
        session.carrier.say(carrier.dtmf("3"))
        session.carrier.say(carrier.dtmf("#"))
        await asyncio.sleep(0.3)
        assert "3#" in session.frames[3]["item"]["content"][0]["text"]
        begun_s = session.carrier.loop.time()
        heard_s = session.heard_s
        await asyncio.sleep(10.0)
        assert session.heard_s - heard_s == pytest.approx(session.carrier.loop.time() - begun_s, abs=0.05)
        await session.hang_up()

    run(main)


def test_a_key_cancels_a_response_and_waits_for_its_end() -> None:
    async def main() -> None:
        session = Session(Carrier())
        at = session.begin()
        session.carrier.say(carrier.dtmf("#"))
        await asyncio.sleep(1.0)
        assert session.kinds() == ["response.cancel"]
        session.end(at)
        await asyncio.sleep(0.2)
        assert session.kinds() == ["response.cancel", "conversation.item.create", "response.create"]
        await session.hang_up()

    run(main)


def test_when_the_model_hangs_up_then_its_last_words_are_heard_first() -> None:
    async def main() -> None:
        session = Session(Carrier())
        at = session.begin()
        pcm = np.full(2 * OUT_HZ, 0.25, np.float32)
        session.player.send(ResponseAudioDelta(at, pcm, OUT_HZ))
        session.player.send(ContentPartDone(at, ContentPart("output_audio")))
        calling = session.call("hang_up")
        await asyncio.sleep(0.5)
        session.end(at)
        assert await session.over() == "hang_up"
        # All of it was played, and nothing was cleared.
        assert session.carrier.buffer.played_s == pytest.approx(2.0, abs=0.021)
        assert not [m for _, m in session.carrier.got if m["event"] == "clear"]
        # The end of the session cancels the call of the function.
        assert not calling.done()
        calling.cancel()

    run(main)


def test_a_caller_who_interrupts_the_last_words_is_not_hung_up() -> None:
    async def main() -> None:
        session = Session(Carrier())
        at = session.begin()
        session.player.send(ResponseAudioDelta(at, np.full(2 * OUT_HZ, 0.25, np.float32), OUT_HZ))
        session.end(at)
        calling = session.call("hang_up")
        await asyncio.sleep(0.5)
        session.player.silence()
        await asyncio.sleep(3.0)
        assert session.leg.ended_by == ""
        assert "went on" in calling.result().text
        await session.hang_up()

    run(main)


def test_digits_are_sent_as_tones_and_others_than_keys_are_refused() -> None:
    async def main() -> None:
        session = Session(Carrier())
        assert await session.call("send_digits", '{"digits": "12#"}') == ToolResult("sent")
        await asyncio.sleep(2.0)
        sound = [m["media"]["payload"] for _, m in session.carrier.got if m["event"] == "media"]
        played = np.concatenate([from_ulaw(carrier.base64.b64decode(payload)) for payload in sound])
        expected = tones("12#", 8000)
        assert np.abs(played[: len(expected)] - expected).max() < 0.02
        for wrong in ('{"digits": "one"}', "{}", "no JSON", '{"digits": 12}'):
            assert (await session.call("send_digits", wrong)).failure == "tool_execution_error"
        # A name that the client's own function has taken.
        assert await session.call("telephone__send_digits", '{"digits": "1"}') == ToolResult("sent")
        assert (await session.call("dance")).failure == "protocol_error"
        await session.hang_up()

    run(main)


def test_a_call_is_transferred_after_the_last_words_where_the_carrier_can() -> None:
    async def main() -> None:
        asked: list[str] = []

        async def transfer(target: str) -> None:
            if target == "+1":
                raise RemoteProtocolError("carrier_refused", "No such number.")
            asked.append(target)

        session = Session(Carrier(), transfers={"desk": "+4930"})
        assert [tool.name for tool in session.tools.tools] == ["hang_up", "send_digits"]
        assert (await session.call("transfer", '{"to": "+4930"}')).failure == "protocol_error"
        with pytest.raises(RemoteProtocolError):
            await session.leg.transfer("+4930")
        await session.hang_up()

        transfers = {"desk": "+49301234", "nobody": "+1"}
        session = Session(Carrier(), transfer=transfer, transfers=transfers)
        assert [tool.name for tool in session.tools.tools] == ["hang_up", "send_digits", "transfer"]
        assert session.tools.tools[2].parameters["properties"]["to"]["enum"] == ["desk", "nobody"]
        for wrong in ('{"to": "+4930"}', "{}", "desk"):
            assert (await session.call("transfer", wrong)).failure == "tool_execution_error"
        failed = ToolResult("No such number.", "tool_execution_error")
        assert await session.call("transfer", '{"to": "nobody"}') == failed
        assert session.leg.ended_by == ""
        session.answer(2)
        calling = session.call("transfer", '{"to": "desk"}')
        await asyncio.sleep(0.3)
        assert asked == []
        assert await session.over() == "transfer"
        assert (asked, calling.result()) == (["+49301234"], ToolResult("transferred"))

    run(main)


def test_a_peer_without_a_buffer_gets_each_frame_when_it_is_due() -> None:
    async def main() -> None:
        stream = AudioSocketStream()
        stream.read(framed(UUID, bytes(range(16))))
        started = stream.read(framed(0x12, bytes(640)))[0]
        assert isinstance(started, Started)
        loop, sent = asyncio.get_running_loop(), list[tuple[float, bytes]]()

        class Socket:
            async def receive(self) -> bytes | None:
                await asyncio.sleep(20.0)
                return None

            async def send(self, data: str | bytes) -> None:
                assert isinstance(data, bytes)
                sent.append((loop.time(), data))

            async def close(self, code: int, reason: str) -> None:
                return

        leg = CallerLeg(Socket(), stream, started, LegOptions(), clock=loop.time)
        reported: list[Any] = []
        leg.playback.attach(reported.append)
        running, begun_s = asyncio.create_task(leg.run()), loop.time()
        at = ContentPosition("resp_1", "item_1", 0)
        leg.playback.send(ResponseAudioDelta(at, np.full(2 * OUT_HZ, 0.25, np.float32), OUT_HZ))
        leg.playback.send(ContentPartDone(at, ContentPart("output_audio")))
        await asyncio.sleep(1.0)
        # What was sent counts as heard. There is nothing to clear.
        ((place, heard_ms),) = leg.playback.silence()
        assert (place, len(sent) * 20) == (at, heard_ms)
        assert heard_ms == pytest.approx(1000, abs=100)
        await asyncio.sleep(2.0)
        assert len(sent) * 20 == heard_ms
        assert {(data[0], len(data)) for _, data in sent} == {(0x12, 643)}
        for number, (at_s, _) in enumerate(sent):
            assert at_s - begun_s >= 0.02 * number - UNBUFFERED_LEAD_S - 0.01
        running.cancel()

    run(main)


def beep() -> bytes:
    return to_ulaw((0.3 * np.sin(2 * np.pi * 1000 * np.arange(4000) / 8000)).astype(np.float32))


def test_after_the_beep_of_an_answering_machine_the_model_leaves_a_message() -> None:
    async def main(voicemail: Any) -> tuple[Session, str]:
        session = Session(Carrier(), voicemail=voicemail)
        session.carrier.timer.cancel()
        data = beep() + to_ulaw(np.zeros(8000, np.float32))
        session.answer(10)
        await asyncio.sleep(0.5)
        for at in range(0, len(data), 160):
            session.carrier.speak(data[at : at + 160])
            await asyncio.sleep(0.02)
        return session, session.leg.ended_by or await session.hang_up()

    async def message() -> None:
        session, _ = await main("message")
        assert session.kinds() == ["conversation.item.create", "output_audio_buffer.clear", "response.create"]
        assert "machine" in session.frames[0]["item"]["content"][0]["text"]

    async def others() -> None:
        _, ended_by = await main("hang_up")
        assert ended_by == "voicemail"
        session, _ = await main("ignore")
        assert session.kinds() == []

    run(message)
    run(others)


def test_a_call_ends_at_its_limit_and_begins_with_its_greeting() -> None:
    async def main() -> None:
        session = Session(Carrier(), greeting="Good morning.", max_s=3.0)
        begun_s = session.carrier.loop.time()
        assert await session.over() == "time_limit"
        assert session.carrier.loop.time() - begun_s == pytest.approx(3.0, abs=0.05)
        (first,) = session.frames
        assert (first["type"], "Good morning." in first["response"]["instructions"]) == ("response.create", True)

    run(main)


def test_when_the_session_closes_then_the_carrier_knows_the_reason() -> None:
    async def main() -> None:
        session = Session(Carrier())
        await session.leg.close(1001, "server_shutting_down")
        assert await session.over() == "server_shutting_down"
        assert session.carrier.closed == (1001, "server_shutting_down")

    run(main)


def test_bad_audio_is_dropped_with_one_line_in_the_log_and_a_second_start_ends_the_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        session = Session(Carrier())
        for _ in range(3):
            session.carrier.speak(b"RIFF\0\0\0\0WAVEfmt " + b"\x55" * 160)
        await asyncio.sleep(1.0)
        assert session.heard_s == pytest.approx(1.0, abs=0.2)
        session.carrier.say(carrier.start())
        assert await session.over() == "bad_event"

    with caplog.at_level(logging.WARNING, "antiphon.transports.telephone"):
        run(main)
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "audio of a call of twilio is dropped",
        "a call of twilio is ended",
    ]


def test_when_the_carrier_is_gone_then_the_call_has_ended() -> None:
    async def main() -> None:
        session = Session(Carrier())
        session.carrier.say(None)
        assert await session.over() == "caller_hung_up"
        session = Session(Carrier())
        session.carrier.closed = (1006, "")
        session.answer(1)
        assert await session.over() == "caller_hung_up"

    run(main)
