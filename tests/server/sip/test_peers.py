"""Calls by Debian's baresip and sipp, unmodified. They are skipped where the programs are not installed."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import numpy as np
import pytest
from bench.softphones import Baresip, missing, sipp

from antiphon.audio import Pcm
from antiphon.audio.pcm import Resampler
from antiphon.protocols.wire import Frame
from antiphon.server.live.realtime import LiveRealtime
from antiphon.server.live.sideband import Sideband
from antiphon.signals import become
from antiphon.transports.leg import Leg
from tests.scripted import speech
from tests.server.scripted import Echo
from tests.server.sip.harness import SipPort, port

LIMIT_S = 20.0
FRAME_S = 0.02


class Application:
    """A program beside a call: it has the events of the session."""

    def __init__(self, served: SipPort) -> None:
        self.events: list[dict[str, Any]] = []
        (live,) = served.state.sessions.calls.values()
        cast(LiveRealtime, live).sidebands.add(cast(Sideband, self))

    def put(self, frame: Frame) -> None:
        self.events.append(json.loads(frame.encode()))

    def end(self, code: int, reason: str) -> None:
        return

    def of(self, type: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == type]


def silence(seconds: float) -> Pcm:
    return np.zeros(int(16_000 * seconds), np.float32)


def said(*parts: Pcm, rate_hz: int = 8000) -> Pcm:
    """Return 16 kHz audio at the rate of a telephone's file."""
    return Resampler(16_000, rate_hz).feed(np.concatenate((*parts, silence(0.2))))


def sounds_s(pcm: Pcm, rate_hz: int) -> list[tuple[float, float]]:
    """Return the start and the end of each stretch of sound, in seconds. Pauses below 0.2 s are part of a stretch."""
    frames = pcm[: len(pcm) // (rate_hz // 50) * (rate_hz // 50)].reshape(-1, rate_hz // 50)
    found: list[tuple[float, float]] = []
    for number in np.flatnonzero(np.abs(frames).max(1) > 0.01):
        at_s = float(number) * FRAME_S
        if found and at_s - found[-1][1] < 0.2:
            found[-1] = found[-1][0], at_s + FRAME_S
        else:
            found.append((at_s, at_s + FRAME_S))
    return found


async def established(served: SipPort, phone: Baresip) -> Leg:
    """Dial the server, and return the leg of the call."""
    phone.command("dial", f"sip:bot@127.0.0.1:{served.number}")
    await asyncio.to_thread(phone.until, "CALL_ESTABLISHED")
    async with asyncio.timeout(LIMIT_S):
        await become(lambda: bool(served.state.sessions.legs), 0.01)
    (leg,) = served.state.sessions.legs.values()
    return leg


async def count(app: Application, type: str, num: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        await become(lambda: len(app.of(type)) >= num, 0.01)


@pytest.mark.skipif(bool(missing("baresip")), reason=missing("baresip"))
def test_what_baresip_has_recorded_is_what_the_history_says_was_heard() -> None:
    """It speaks over the greeting, presses a key over the answer and then another one, and is hung up."""

    async def main() -> None:
        pcm = said(silence(1.2), speech(1, 6))
        async with port(Echo(), telephone_greeting="Hello.") as served:
            with Baresip(pcm) as phone:
                await established(served, phone)
                app = Application(served)
                await count(app, "conversation.item.truncated", 1)
                # The greeting may have begun before the application was attached.
                begun = len(app.of("output_audio_buffer.started"))
                await count(app, "output_audio_buffer.started", begun + 1)
                await asyncio.sleep(0.5)
                phone.command("sndcode", "4")
                await count(app, "conversation.item.truncated", 2)
                phone.command("sndcode", "#")
                await count(app, "output_audio_buffer.started", begun + 2)
                (live,) = served.state.sessions.calls.values()
                live.hang_up()
                assert await asyncio.to_thread(phone.until, "CALL_CLOSED")
                heard = sounds_s(phone.heard(), phone.rate_hz)
        keys = [event["event"] for event in app.of("input_audio_buffer.dtmf_event_received")]
        assert keys == ["4", "#"]
        assert "4#" in served.echo.asked[-1][-1]
        kept_s = [event["audio_end_ms"] / 1000 for event in app.of("conversation.item.truncated")][:2]
        assert [end - start for start, end in heard[:2]] == pytest.approx(kept_s, abs=0.1)
        assert min(kept_s) > 0.2

    asyncio.run(main())


@pytest.mark.heavy
@pytest.mark.parametrize(("codec", "srtp"), [("PCMU/8000/1", True), ("G722/16000/1", False), ("opus/48000/2", False)])
@pytest.mark.skipif(bool(missing("baresip")), reason=missing("baresip"))
def test_baresip_hears_the_answer_in_each_codec_and_with_srtp(codec: str, srtp: bool) -> None:
    async def main() -> None:
        rate_hz = {"PCMU/8000/1": 8000, "G722/16000/1": 16_000, "opus/48000/2": 48_000}[codec]
        pcm = said(silence(0.3), np.clip(speech(1, 3) * 100, -0.9, 0.9), rate_hz=rate_hz)
        async with port(Echo(), telephone_greeting="Hi.", sip_codecs="opus,G722,PCMU") as served:
            with Baresip(pcm, codec=codec, srtp=srtp) as phone:
                leg = await established(served, phone)
                async with asyncio.timeout(LIMIT_S):
                    await become(lambda: bool(served.echo.asked) and not leg.playback.is_responding, 0.01)
                await asyncio.sleep(0.5)
                phone.command("hangup")
                async with asyncio.timeout(LIMIT_S):
                    await become(lambda: not served.state.sessions.calls, 0.01)
                assert leg.ended_by == "caller_hung_up"
                await asyncio.sleep(0.2)
                heard = sounds_s(phone.heard(), phone.rate_hz)
        assert heard, phone.events

    asyncio.run(main())


@pytest.mark.heavy
@pytest.mark.skipif(bool(missing("sipp")), reason=missing("sipp"))
def test_ten_calls_of_sipp_are_answered_at_once_and_end_well() -> None:
    async def main() -> None:
        async with port(Echo(), telephone_greeting="Hi.") as served:
            most = 0
            with sipp(served.number, said(speech(1, 3), silence(1.0)), calls=10, for_s=2.0, a_second=20) as caller:
                async with asyncio.timeout(LIMIT_S):
                    while caller.poll() is None:
                        most = max(most, len(served.state.sessions.calls))
                        await asyncio.sleep(0.05)
                assert caller.returncode == 0, caller.stdout and caller.stdout.read()
            assert most == 10
            async with asyncio.timeout(LIMIT_S):
                await become(lambda: not served.state.sessions.calls, 0.01)
            # The server got the audio of the callers from the ports that they named, and answered what they said.
            assert sum("w1" in asked[-1] for asked in served.echo.asked) >= 10
            assert b'rtp_packets_total{what="foreign"} 0.0' in served.state.metrics.text()

    asyncio.run(main())
