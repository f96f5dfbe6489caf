"""The microphone and loudspeaker of a conversation: devices of this machine, through sounddevice, or files."""

from __future__ import annotations

import asyncio
import time
import wave
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from antiphon.audio.containers import decode_all
from antiphon.audio.pcm import to_pcm16
from antiphon.client.devices.playback import Playback
from antiphon.errors import MediaError, SettingsError

INPUT_HZ, OUTPUT_HZ = 16_000, 24_000
# The duration of one block of a device, in seconds, and the samples in it.
BLOCK_S = 0.02
INPUT_BLOCK, OUTPUT_BLOCK = int(INPUT_HZ * BLOCK_S), int(OUTPUT_HZ * BLOCK_S)
# Capacity of the microphone's queue, in blocks (one second); further blocks are dropped.
MAX_BLOCKS = 50


@contextmanager
def sound_devices(
    playback: Playback, microphone: str | None = None, loudspeaker: str | None = None
) -> Iterator[AsyncIterator[bytes]]:
    """Open the microphone and the loudspeaker while the `with` block runs. Needs a running event loop.

    Args:
        playback: The queue that the loudspeaker plays from.
        microphone: The device's number, or a part of its name, in the list of sounddevice; None: the system's default.
        loudspeaker: Same as `microphone`.

    Yields:
        The microphone's audio: 16-bit PCM at INPUT_HZ.

    Raises:
        SettingsError: The device does not exist or cannot be opened, or sounddevice is not installed.
    """
    sounddevice = _sounddevice()
    loop = asyncio.get_running_loop()
    blocks: asyncio.Queue[bytes] = asyncio.Queue(MAX_BLOCKS)

    def keep(block: bytes) -> None:
        if not blocks.full():
            blocks.put_nowait(block)

    def heard(data: Any, *_: Any) -> None:
        loop.call_soon_threadsafe(keep, bytes(data))

    def wanted(data: Any, num_samples: int, *_: Any) -> None:
        data[:] = playback.take(num_samples)

    shape = {"channels": 1, "dtype": "int16"}
    with ExitStack() as streams:
        try:
            for kind, device, hz, size, callback in (
                (sounddevice.RawInputStream, microphone, INPUT_HZ, INPUT_BLOCK, heard),
                (sounddevice.RawOutputStream, loudspeaker, OUTPUT_HZ, OUTPUT_BLOCK, wanted),
            ):
                named = int(device) if device and device.isdecimal() else device
                streams.enter_context(kind(hz, size, named, callback=callback, **shape))
        except (sounddevice.PortAudioError, ValueError) as error:
            raise SettingsError(f"no sound: {error} (python -m sounddevice lists the devices)") from None
        yield _taken(blocks)


async def _taken(blocks: asyncio.Queue[bytes]) -> AsyncIterator[bytes]:
    # Blocks from before the iteration began are stale.
    while not blocks.empty():
        blocks.get_nowait()
    while True:
        yield await blocks.get()


@contextmanager
def sound_files(playback: Playback, microphone: str, loudspeaker: str | None = None) -> Iterator[HeardFile]:
    """Use files instead of devices, in real time. After the recording's end the microphone yields silence.

    Args:
        playback: The queue that the loudspeaker's file is written from.
        microphone: The audio file to read instead of a microphone.
        loudspeaker: The WAV file to write; None: no file is written.

    Raises:
        SettingsError: A file cannot be read or written.
    """
    with ExitStack() as files:
        try:
            pcm = to_pcm16(decode_all(microphone))
            out = files.enter_context(wave.open(loudspeaker, "wb")) if loudspeaker else None
        except OSError as error:
            raise SettingsError(f"{error.filename}: {error.strerror}") from None
        except MediaError as error:
            raise SettingsError(str(error)) from None
        if out:
            out.setparams((1, 2, OUTPUT_HZ, 0, "NONE", ""))
        yield HeardFile(pcm, playback, out)


class HeardFile(AsyncIterator[bytes]):
    """A recording that is read like a microphone: block by block in real time, followed by silence."""

    def __init__(self, pcm: bytes, playback: Playback, out: wave.Wave_write | None) -> None:
        self._pcm, self._playback, self._out = pcm, playback, out
        self._at = 0
        # The monotonic time at which the last block was due. None before the first block, when the recording begins.
        self._due_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether the whole recording was read."""
        return self._at >= len(self._pcm)

    async def __anext__(self) -> bytes:
        """Wait until the next block is due and return it. Also takes a block of the same duration from the playback."""
        self._due_s = (time.monotonic() if self._due_s is None else self._due_s) + BLOCK_S
        await asyncio.sleep(max(0.0, self._due_s - time.monotonic()))
        played = self._playback.take(OUTPUT_BLOCK)
        if self._out:
            self._out.writeframes(played)
        block = self._pcm[self._at : self._at + 2 * INPUT_BLOCK]
        self._at += len(block)
        return block + bytes(2 * INPUT_BLOCK - len(block))


def check_sound() -> None:
    """Check that sounddevice and PortAudio are installed. Opens no device.

    Raises:
        SettingsError: One of them is missing.
    """
    _sounddevice()


def _sounddevice() -> Any:
    try:
        return import_module("sounddevice")
    except ModuleNotFoundError:
        raise SettingsError("devices need sounddevice, which is not installed: pip install '.[devices]'") from None
    except OSError:
        raise SettingsError("sounddevice finds no PortAudio: on Debian, apt install libportaudio2") from None
