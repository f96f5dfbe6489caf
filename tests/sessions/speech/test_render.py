"""One text rendered as audio: its tempo, and the urgency of each chunk."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from antiphon.audio.pcm import from_pcm16
from antiphon.audio.playback_clock import PlaybackClock
from antiphon.contracts import Urgency, VoiceOptions
from antiphon.events.speech import SpeechConfig
from antiphon.sessions.speech.render import EncodedSpeech, speak, urgency
from tests.sessions.speech.scripted import RATE_HZ, Scripted


def test_when_the_speed_is_beyond_the_voice_then_the_audio_is_stretched() -> None:
    async def main(speed: float) -> tuple[float, float, VoiceOptions]:
        synthesizer = Scripted()
        config = SpeechConfig(format="pcm", stream=True, speed=speed)
        chunks = [c async for c in speak(synthesizer, "x" * 30, config)]
        words = [w for c in chunks for w in c.words]
        return sum(len(c.data) for c in chunks) / 2 / RATE_HZ, words[0].end_s, synthesizer.asked[0]

    for speed, own, seconds in ((4.0, 2.0, 1.5), (0.25, 0.5, 6.0), (1.5, 1.5, 3.0)):
        heard, word_s, options = asyncio.run(main(speed))
        assert options.speed == own
        # The scripted voice has no tempo: the change from 3 s is due to the stretch.
        assert heard == pytest.approx(seconds, rel=0.05)
        assert word_s == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 48_000])
@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_when_a_rate_is_asked_for_then_the_audio_has_it_and_loses_nothing(rate_hz: int, speed: float) -> None:
    async def main() -> list[EncodedSpeech]:
        config = SpeechConfig(format="pcm", stream=True, speed=speed, rate_hz=rate_hz)
        return [c async for c in speak(Scripted(), "x" * 30, config)]

    chunks = asyncio.run(main())
    pcm = from_pcm16(b"".join(c.data for c in chunks))
    assert chunks[-1].end_s == pytest.approx(len(pcm) / rate_hz)
    assert len(pcm) / rate_hz == pytest.approx(3.0 / max(1.0, speed / 2), abs=0.06)
    if speed == 1.0:
        # The scripted voice is a constant value, and its end arrives too.
        assert len(pcm) == 3 * rate_hz
        assert np.all(np.abs(pcm[rate_hz // 100 : -rate_hz // 100] - ord("x") / 1000) < 0.01)


def test_the_less_audio_a_listener_holds_the_more_urgent_is_the_next_chunk() -> None:
    now = [0.0]
    listener = PlaybackClock(lambda: now[0])
    assert urgency(listener) is Urgency.FINAL
    listener.add(1.0)
    assert urgency(listener) is Urgency.PARTIAL
    listener.add(5.0)
    assert urgency(listener) is Urgency.BULK
    now[0] = 5.8
    assert urgency(listener) is Urgency.FINAL
    # A gap that the listener has heard is not caught up.
    now[0] = 20.0
    listener.add(1.0)
    assert urgency(listener) is Urgency.PARTIAL
