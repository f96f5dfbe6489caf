"""The microphone and loudspeaker of a conversation: those of this machine, by sounddevice, or files in their place."""

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
# What a device gives and takes at once.
BLOCK_S = 0.02
INPUT_BLOCK, OUTPUT_BLOCK = int(INPUT_HZ * BLOCK_S), int(OUTPUT_HZ * BLOCK_S)
# Blocks of the microphone that nobody has taken: what comes beyond them is dropped, a second of it.
MAX_BLOCKS = 50


@contextmanager
def sound_devices(
    playback: Playback, microphone: str | None = None, loudspeaker: str | None = None
) -> Iterator[AsyncIterator[bytes]]:
    """Play on the loudspeaker while the block runs, and give what the microphone hears: PCM of 16 bits at INPUT_HZ.

    Devices are named as sounddevice does, by a part of their names or a number; None: the system's. Used on an event
    loop. Raises SettingsError where there is no such device, or no sounddevice.
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
    # What was heard before anybody listened is old.
    while not blocks.empty():
        blocks.get_nowait()
    while True:
        yield await blocks.get()


@contextmanager
def sound_files(playback: Playback, microphone: str, loudspeaker: str | None = None) -> Iterator[HeardFile]:
    """As `sound_devices`, in real time, but a file is heard, and what is played is written into a WAV file.

    After the file's end silence is heard, until the caller stops. Raises SettingsError for files that cannot be used.
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
    """A recording as a microphone gives it, block by block in real time, and silence behind it."""

    def __init__(self, pcm: bytes, playback: Playback, out: wave.Wave_write | None) -> None:
        self._pcm, self._playback, self._out = pcm, playback, out
        self._at = 0
        # When the last block was due, monotonic: the recording begins when somebody listens.
        self._due_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether all of the recording was given."""
        return self._at >= len(self._pcm)

    async def __anext__(self) -> bytes:
        """Wait until the next block is due; meanwhile as much is played."""
        self._due_s = (time.monotonic() if self._due_s is None else self._due_s) + BLOCK_S
        await asyncio.sleep(max(0.0, self._due_s - time.monotonic()))
        played = self._playback.take(OUTPUT_BLOCK)
        if self._out:
            self._out.writeframes(played)
        block = self._pcm[self._at : self._at + 2 * INPUT_BLOCK]
        self._at += len(block)
        return block + bytes(2 * INPUT_BLOCK - len(block))


def check_sound() -> None:
    """Raise SettingsError where this machine lacks what `sound_devices` needs. Opens no device."""
    _sounddevice()


def _sounddevice() -> Any:
    try:
        return import_module("sounddevice")
    except ModuleNotFoundError:
        raise SettingsError("devices need sounddevice, which is not installed: pip install '.[devices]'") from None
    except OSError:
        raise SettingsError("sounddevice finds no PortAudio: on Debian, apt install libportaudio2") from None
