"""A Synthesizer on another server.

A text is sent a second time if its first request fails before the first sound. After the first sound, it is never
repeated, because the listener may have heard it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from antiphon.audio import Pcm
from antiphon.contracts import SpeechChunk, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.errors import AntiphonError, ModelError, Refused, RemoteError
from antiphon.remote.breaker import ServerBreaker
from antiphon.remote.chat.client import MAX_WAIT_S, Counts, Timeouts
from antiphon.remote.speech.voices import ServerVoices
from antiphon.remote.sse import ReaderTask

log = logging.getLogger(__name__)

# The name that stands for the server's own voice, which is not sent to it.
SERVERS_VOICE = "default"
# Bound: seconds of audio of a text. A voice that speaks without end would otherwise never leave the floor.
FREE_S, S_A_CHAR = 10.0, 0.5
# The most seconds of one chunk, so that word times and playback follow the audio closely.
CHUNK_S = 0.5
# The texts that are spoken ahead of the one whose audio is taken, so that no gap is between them.
TEXTS_AHEAD = 1


class SpeechWire(Protocol):
    """A protocol in which a server is asked to speak. `speeds`: the tempos that it can be asked for."""

    speeds: tuple[float, float]

    def speak(self, text: str, options: VoiceOptions, to_hz: int) -> AsyncGenerator[Pcm, None]:
        """Yield the audio of a text: float32 [num_samples], mono, at `to_hz`. Closing the generator ends the work.

        Raises RemoteError, Refused and ModelError.
        """
        ...


@dataclass(frozen=True, slots=True)
class _End:
    """Follows the last audio of a text."""


class RemoteSynthesizer:
    """A Synthesizer that another server runs.

    - `model`: its name, for clients.
    - `rate_hz`: the rate of its audio here.
    - `listed`: the voices and languages that the server listed.
    - `voices`: the names of voices to use, the default first; empty: those of the list.
    - `is_there`: whether the server answered when it was asked for its voices.
    """

    def __init__(
        self,
        wire: SpeechWire,
        model: str,
        rate_hz: int,
        timeouts: Timeouts,
        listed: ServerVoices,
        voices: tuple[str, ...] = (),
        *,
        is_there: bool = True,
    ) -> None:
        self.profile = SynthesizerProfile(
            model,
            rate_hz,
            _ordered(voices, listed.voices) or (SERVERS_VOICE,),
            listed.languages,
            wire.speeds,
            word_times=False,
            follows_instructions=True,
            remote=True,
            texts_ahead=TEXTS_AHEAD,
        )
        self.counts = Counts()
        self.is_away = not is_there
        self._wire, self._timeouts = wire, timeouts
        self._lists_default = SERVERS_VOICE in self.profile.voices and SERVERS_VOICE in (*listed.voices, *voices)
        self._breaker = ServerBreaker()
        self._tasks: set[asyncio.Task[None]] = set()

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """Synthesize a text, in chunks. Closing the generator ends the work at the server.

        Raises RemoteError, Refused and ModelError.
        """
        if options.voice == SERVERS_VOICE and not self._lists_default:
            options = replace(options, voice="")
        self._breaker.check(None, time.monotonic())
        self.counts.answering += 1
        left_s = (FREE_S + S_A_CHAR * len(text)) / min(options.speed, 1.0)
        attempt: ReaderTask[Pcm | _End] | None = None
        try:
            sound, attempt = await self._first(text, options)
            while not isinstance(sound, _End):
                left_s -= len(sound) / self.profile.sample_rate_hz
                if left_s < 0:
                    raise RemoteError("the voice's server sends more audio than the text can take")
                for piece in _pieces(sound, round(CHUNK_S * self.profile.sample_rate_hz)):
                    yield SpeechChunk(piece)
                sound = await self._next(attempt, self._timeouts.next_s)
        except RemoteError as error:
            self._failed(error)
            raise
        finally:
            self.counts.answering -= 1
            if attempt:
                attempt.end()

    def close(self) -> None:
        """Do nothing: connections are closed with their event loop."""

    async def _first(self, text: str, options: VoiceOptions) -> tuple[Pcm | _End, ReaderTask[Pcm | _End]]:
        """Return the first audio of a text and the attempt that yields the rest. Makes a second attempt if necessary.

        The first attempt has half of the time.
        """
        failure: AntiphonError = RemoteError("the voice's server does not answer")
        for timeout_s in (self._timeouts.first_s / 2, self._timeouts.first_s):
            attempt = ReaderTask(self._attempt(text, options), self._tasks)
            self.counts.requests += 1
            try:
                sound = await self._next(attempt, timeout_s)
            except (RemoteError, Refused) as error:
                attempt.end()
                failure = error
                if isinstance(error, Refused):
                    self._breaker.refused(None, time.monotonic(), error.retry_after_s)
                    if error.retry_after_s > MAX_WAIT_S:
                        raise
                    await asyncio.sleep(error.retry_after_s)
                self.counts.failures += 1
                self.counts.second_attempts += timeout_s < self._timeouts.first_s
                continue
            except BaseException:
                attempt.end()
                raise
            self._breaker.succeeded(None)
            if self.is_away:
                log.info("the server of the voice %s answers again", self.profile.id)
            self.is_away = False
            return sound, attempt
        raise failure

    async def _attempt(self, text: str, options: VoiceOptions) -> AsyncGenerator[Pcm | _End, None]:
        num_samples = 0
        async with aclosing(self._wire.speak(text, options, self.profile.sample_rate_hz)) as sound:
            async for pcm in sound:
                num_samples += len(pcm)
                yield pcm
        if not num_samples:
            raise RemoteError("the voice's server sent no audio")
        yield _End()

    async def _next(self, attempt: ReaderTask[Pcm | _End], timeout_s: float) -> Pcm | _End:
        try:
            return await asyncio.wait_for(attempt.take(), timeout_s)
        except TimeoutError:
            raise RemoteError(f"the voice's server sent no audio for {timeout_s:g} s") from None

    def _failed(self, error: RemoteError) -> None:
        self._breaker.failed(None, time.monotonic())
        self.is_away = True
        log.warning("the server of the voice %s failed: %s", self.profile.id, error)


def _ordered(named: tuple[str, ...], listed: tuple[str, ...]) -> tuple[str, ...]:
    """Return the named voices, then the other voices of the list. Raises ModelError if a named voice is not listed."""
    if missing := [name for name in named if listed and name not in listed]:
        known = ", ".join(listed[:20]) + (" …" if len(listed) > 20 else "")
        raise ModelError(f"--voice: the voice's server has no {missing[0]}; it has {known}")
    return tuple(dict.fromkeys((*named, *listed)))


def _pieces(pcm: Pcm, num_samples: int) -> Iterator[Pcm]:
    for at in range(0, len(pcm), num_samples):
        yield pcm[at : at + num_samples]
