"""Scripted models of `scripted_host.py` whose answers show what they know: a native model and a video model."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import anyio
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import (
    ListenStep,
    NativeLoad,
    NativeOptions,
    NativeProfile,
    NativeStep,
    ReplyDone,
    ResponseChunk,
    SpeakStep,
    TextDelta,
    Unit,
    VideoFrame,
    VideoProfile,
    VideoQuestion,
)
from antiphon.text.said import USER
from tests.scripted import WORD_SAMPLES, heard

RATE_HZ = 24_000
UNIT_S = 0.2


class EchoNative:
    """A native model that repeats the user's words after a silent unit, one word in each unit.

    If it has to speak and has heard nothing, it repeats the user's last line of its history. If `is_silent`, it says
    nothing.
    """

    def __init__(self) -> None:
        self.is_silent = False
        self.profile = NativeProfile("echo-native", UNIT_S, RATE_HZ, ("one",), 2, 1, (100, 50))

    async def open(self, options: NativeOptions) -> EchoNativeStream:
        return EchoNativeStream(self, options)

    def load(self) -> NativeLoad:
        return NativeLoad(0, 100)

    def close(self) -> None:
        return


class EchoNativeStream:
    def __init__(self, model: EchoNative, options: NativeOptions) -> None:
        self._model = model
        lines = [line.partition(": ")[2] for line in options.recall().splitlines() if line.startswith(f"{USER}: ")]
        self._last_line = lines[-1] if lines else ""
        self._pcm: Pcm = np.zeros(0, np.float32)
        self._typed = ""
        self._saying: deque[str] = deque()
        self._is_speaking = False

    async def append(self, unit: Unit) -> None:
        await anyio.lowlevel.checkpoint()
        self._typed += unit.text
        if np.any(np.rint(unit.pcm * 1000)):
            self._pcm = np.concatenate((self._pcm, unit.pcm))
        elif len(self._pcm):
            # A word of which less than half was heard is none, as for the transcriber.
            words = [f"w{n}" for n, begin, end in heard(self._pcm) if end - begin >= WORD_SAMPLES // 2]
            self._pcm = self._pcm[:0]
            self._saying.extend(words)

    async def step(self, *, must_speak: bool = False) -> NativeStep:
        await anyio.sleep(0.02)
        if self._typed and not self._is_speaking:
            self._saying.extend(self._typed.split())
            self._typed = ""
        if must_speak and not self._saying:
            self._saying.extend(self._last_line.split() or ["hello"])
        if self._model.is_silent or not self._saying:
            return ListenStep()
        word = self._saying.popleft()
        # Unlike the audio of a scripted user, so that the echo guard does not confuse the two.
        noise = np.random.default_rng(0).normal(0.0, 0.05, round(UNIT_S * RATE_HZ)).astype(np.float32)
        text, self._is_speaking = f" {word}" if self._is_speaking else word, bool(self._saying)
        return SpeakStep(text, noise, not self._saying)

    def interrupt(self) -> None:
        self._saying.clear()
        self._is_speaking = False

    def close(self) -> None:
        return


class Seer:
    """A video model that answers with the question, the grey values of its frames, and the number of questions that it
    remembers. Each word takes `pace_s`.
    """

    def __init__(self, pace_s: float = 0.0, name: str = "seer") -> None:
        self.profile = VideoProfile(name, "pictures", RATE_HZ, ())
        self.pace_s = pace_s

    async def open(self, instructions: str, owner: object = None) -> SeerStream:
        return SeerStream(self, instructions)

    def close(self) -> None:
        return


class SeerStream:
    def __init__(self, seer: Seer, instructions: str) -> None:
        self._seer = seer
        self._num_known = sum(line.startswith(f"{USER}: ") for line in instructions.splitlines())
        self._greys: dict[int, int] = {}

    async def run(self) -> None:
        await anyio.sleep_forever()

    async def append_frame(self, frame: VideoFrame) -> None:
        self._greys[frame.number] = int(frame.image.overview()[0, 0, 0])

    def append_audio(self, pcm: Pcm, at_s: float) -> None:
        return

    def select_frames(self, frames: tuple[int, ...]) -> None:
        return

    def drop_frame(self, frame: int) -> None:
        self._greys.pop(frame, None)

    async def settled(self) -> None:
        return

    def forget(self, before_s: float) -> None:
        return

    async def answer(self, question: VideoQuestion, *options: Any) -> AsyncGenerator[ResponseChunk, None]:
        greys = [self._greys[number] for number in question.frames]
        seconds = 0.0 if question.pcm is None else len(question.pcm) / SAMPLE_RATE_HZ
        for number, word in enumerate(said(question.text, greys, seconds, self._num_known).split()):
            await anyio.sleep(self._seer.pace_s)
            yield TextDelta(f" {word}" if number else word)
        self._num_known += 1
        yield ReplyDone("stop", 1, 0, 1)

    def close(self) -> None:
        return


def said(question: str, greys: Sequence[int], audio_s: float, num_known: int) -> str:
    """Return what a Seer answers to a question with these frames and this much audio."""
    shown = " ".join(map(str, greys))
    return f"{question} | saw {shown} | heard {audio_s:.1f} s | knows {num_known}"
