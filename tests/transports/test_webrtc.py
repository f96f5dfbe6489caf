"""A call without a network: how items arrive, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame

from antiphon.events.transcription import AppendAudio
from antiphon.transports.webrtc import MAX_ARRIVED_ITEMS, WebRtcCall


class Channel:
    """A data channel whose events the test sends."""

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[..., None]] = {}

    def on(self, name: str, handler: Callable[..., None]) -> None:
        self.handlers[name] = handler


class BrokenTrack(MediaStreamTrack):
    """A microphone whose second frame cannot be decoded."""

    kind = "audio"
    num_frames = 0

    async def recv(self) -> AudioFrame:
        self.num_frames += 1
        if self.num_frames > 1:
            raise ValueError("broken")
        frame = AudioFrame(format="s16", layout="mono", samples=320)
        frame.planes[0].update(np.zeros(320, np.int16).tobytes())
        frame.sample_rate = 16_000
        return frame


class InvertedTrack(MediaStreamTrack):
    """A microphone whose right channel is its inverted left one, as with a wrongly wired cable."""

    kind = "audio"
    num_frames = 0

    async def recv(self) -> AudioFrame:
        self.num_frames += 1
        if self.num_frames > 10:
            raise MediaStreamError
        left = (8000 * np.sin(np.arange(320) * 2 * np.pi * 500 / 16_000)).astype(np.int16)
        frame = AudioFrame.from_ndarray(np.stack([left, -left], 1).reshape(1, -1), "s16", "stereo")
        frame.sample_rate = 16_000
        return frame


def test_when_the_channels_of_a_microphone_cancel_then_it_is_heard() -> None:
    async def main() -> list[Any]:
        call = WebRtcCall(())
        call.peer.emit("track", InvertedTrack())
        async with asyncio.timeout(10):
            received = [await call.receive() for _ in range(11)]
        await call.hang_up()
        return received

    *audio, end = asyncio.run(main())
    assert end is None
    assert [np.abs(item.pcm).max() for item in audio] == pytest.approx([8000 / 32768] * 10, rel=0.01)


def test_when_more_arrives_than_is_kept_then_that_is_logged_and_the_end_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> list[Any]:
        call, channel = WebRtcCall(()), Channel()
        call.peer.emit("datachannel", channel)
        for number in range(MAX_ARRIVED_ITEMS + 5):
            channel.handlers["message"](str(number))
        channel.handlers["close"]()
        # Items after the end do not displace other items, in particular not the end.
        for _ in range(MAX_ARRIVED_ITEMS):
            channel.handlers["message"]("late")
        received = [await call.receive() for _ in range(MAX_ARRIVED_ITEMS)]
        await call.hang_up()
        return received

    with caplog.at_level(logging.WARNING, "antiphon.transports.webrtc"):
        received = asyncio.run(main())
    assert received[-2:] == [str(MAX_ARRIVED_ITEMS + 4), None]
    assert len(caplog.records) == 1


def test_when_the_microphone_cannot_be_read_then_that_is_logged_and_the_call_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> list[Any]:
        call = WebRtcCall(())
        call.peer.emit("track", BrokenTrack())
        async with asyncio.timeout(10):
            received = [await call.receive(), await call.receive()]
        await call.hang_up()
        return received

    with caplog.at_level(logging.WARNING, "antiphon.transports.webrtc"):
        audio, end = asyncio.run(main())
    assert isinstance(audio, AppendAudio)
    assert end is None
    assert len(caplog.records) == 1
