"""The audio that a loudspeaker gets, and the reports about it: complete, without repetition, soft while ducked."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.client import AudioToPlay, Ducked, Interrupted, ResponseWords
from antiphon.client.devices.playback import DUCKED_GAIN, Playback
from antiphon.client.devices.sound import INPUT_BLOCK, MAX_BLOCKS, OUTPUT_BLOCK, sound_devices
from antiphon.errors import SettingsError

RATE_HZ = 24_000


def piece(start: int, num_samples: int, level: int = 0) -> AudioToPlay:
    """Make a piece whose samples count up from `start`, or all have one level."""
    samples = np.full(num_samples, level) if level else np.arange(start, start + num_samples)
    return AudioToPlay("resp", "item", samples.astype("<i2").tobytes(), RATE_HZ, start / RATE_HZ * 1000)


@given(st.lists(st.integers(0, 500), max_size=8), st.lists(st.integers(1, 700), min_size=1, max_size=20))
def test_what_is_put_is_taken_once_in_order_with_silence_behind_it(sizes: list[int], takes: list[int]) -> None:
    received = list[tuple[AudioToPlay, float]]()
    playback = Playback(lambda *what: received.append(what))
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    pieces = [piece(start, size) for start, size in zip(starts, sizes, strict=True)]
    for one in pieces:
        playback.follow(one)
    taken = b"".join(playback.take(num) for num in takes)
    asked, there = sum(takes), sum(sizes)
    expected = np.arange(min(asked, there)).astype("<i2").tobytes()
    assert taken == expected + bytes(2 * max(0, asked - there))
    # Each piece that was taken completely is reported as complete, once and in order.
    whole = [one for one, part in received if part == 1.0]
    assert (
        whole
        == [p for p, start, size in zip(pieces, starts, sizes, strict=True) if start + size <= asked][: len(whole)]
    )
    assert all(
        p in whole for p, start, size in zip(pieces, starts, sizes, strict=True) if 0 < start + size <= asked - 1
    )


def test_a_long_piece_is_told_as_it_is_played() -> None:
    received = list[float]()
    playback = Playback(lambda _, part: received.append(part))
    playback.follow(piece(0, RATE_HZ, 100))
    for _ in range(50):
        playback.take(RATE_HZ // 50)
    assert received == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])


def test_what_is_interrupted_is_dropped_and_told_as_far_as_it_was_taken() -> None:
    received = list[tuple[float, float]]()
    playback = Playback(lambda one, part: received.append((one.start_ms, part)))
    playback.follow(piece(0, 1200))
    playback.follow(piece(1200, 1200))
    playback.take(300)
    assert not playback.is_empty
    playback.follow(Interrupted())
    assert playback.is_empty
    assert received == [(0.0, 0.25)]
    assert playback.take(100) == bytes(200)
    playback.follow(Interrupted())
    assert len(received) == 1


def test_while_somebody_speaks_over_it_it_is_soft_and_then_as_before() -> None:
    playback = Playback()
    playback.follow(piece(0, 4000, 10_000))
    playback.follow(ResponseWords("resp", "Words ask nothing of a loudspeaker."))

    def level() -> tuple[int, int]:
        samples = np.frombuffer(playback.take(1000), "<i2")
        return int(samples[0]), int(samples[-1])

    assert level() == (10_000, 10_000)
    playback.follow(Ducked(True))
    # The gain reaches its target without a jump.
    assert level() == (10_000, 10_000 * DUCKED_GAIN)
    playback.follow(Ducked(False))
    assert level() == (10_000 * DUCKED_GAIN, 10_000)
    assert level() == (10_000, 10_000)


class Stream:
    """A stream of sounddevice, whose callbacks the test calls."""

    opened: list[Any] = []  # noqa: RUF012

    def __init__(self, hz: int, size: int, device: Any, **options: Any) -> None:
        if device == "none of these":
            raise ValueError("No input device matching 'none of these'")
        self.device, self.callback, self.is_open = device, options["callback"], True
        self.opened.append(self)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open = False


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    Stream.opened = []
    found = SimpleNamespace(RawInputStream=Stream, RawOutputStream=Stream, PortAudioError=OSError)
    monkeypatch.setitem(sys.modules, "sounddevice", found)  # type: ignore[arg-type]


@pytest.mark.usefixtures("devices")
def test_the_microphone_is_heard_and_the_loudspeaker_is_given_what_waits() -> None:
    playback = Playback()
    playback.follow(piece(1, OUTPUT_BLOCK))

    async def main() -> tuple[list[bytes], bytes]:
        with sound_devices(playback, "3", "head") as microphone:
            heard, played = Stream.opened
            assert (heard.device, played.device) == (3, "head")
            # Blocks from before the iteration began are stale.
            heard.callback(bytes(2 * INPUT_BLOCK), INPUT_BLOCK, None, None)
            await asyncio.sleep(0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(first := asyncio.ensure_future(block_of(microphone))), 0.01)
            for number in range(MAX_BLOCKS + 5):
                heard.callback(bytes([number]) * 2 * INPUT_BLOCK, INPUT_BLOCK, None, None)
            out = bytearray(2 * OUTPUT_BLOCK)
            played.callback(out, OUTPUT_BLOCK, None, None)
            await asyncio.sleep(0)
            taken = [await first, *[await block_of(microphone) for _ in range(MAX_BLOCKS - 1)]]
            # The queue had no room for the last blocks.
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(block_of(microphone), 0.01)
        assert not heard.is_open
        assert not played.is_open
        return taken, bytes(out)

    taken, out = asyncio.run(main())
    assert [block[0] for block in taken] == list(range(MAX_BLOCKS))
    assert np.frombuffer(out, "<i2").tolist() == list(range(1, OUTPUT_BLOCK + 1))


async def block_of(microphone: AsyncIterator[bytes]) -> bytes:
    return await anext(microphone)


@pytest.mark.usefixtures("devices")
def test_a_device_that_is_not_there_is_an_error_and_none_is_left_open() -> None:
    async def main() -> None:
        with pytest.raises(SettingsError, match="none of these"), sound_devices(Playback(), "1", "none of these"):
            pass

    asyncio.run(main())
    assert [one.is_open for one in Stream.opened] == [False]


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (ModuleNotFoundError("no sounddevice"), r"pip install '\.\[devices\]'"),
        (OSError("PortAudio library not found"), "apt install libportaudio2"),
    ],
)
def test_without_sound_on_this_machine_it_is_said_what_to_install(
    failure: Exception, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(_: str) -> None:
        raise failure

    monkeypatch.setattr("antiphon.client.devices.sound.import_module", absent)

    async def main() -> None:
        with pytest.raises(SettingsError, match=says), sound_devices(Playback()):
            pass

    asyncio.run(main())
