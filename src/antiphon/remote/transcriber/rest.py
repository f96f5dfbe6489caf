"""Window servers over REST: `POST /v1/audio/transcriptions`, one request for each window.

The server is asked for `verbose_json`, which has the language and, if asked for, word times. A server that refuses it
is asked for `json` from then on, which has only the text.
"""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from typing import Any

import httpx
import msgspec

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.audio.wav import wav_header
from antiphon.contracts import TranscriptionTask, Window
from antiphon.errors import ModelError, RemoteError
from antiphon.events.languages import language_code
from antiphon.events.words import Word
from antiphon.remote.http import MAX_DOCUMENT_BYTES, chunks, decoded, optional, read_failure, reason, without_key
from antiphon.remote.pool import Endpoint, Pool
from antiphon.remote.transcriber.heard import HeardText, timed_words, words_of
from antiphon.remote.transcriber.pace import Pace
from antiphon.shares.threads import FILE_THREADS, in_thread

# Longer windows are converted in a thread, because that takes more than a millisecond.
MAX_INLINE_SAMPLES = 4 * SAMPLE_RATE_HZ
# A window is noise if all its segments have a higher probability of no speech and a lower mean log-probability than
# these (OpenAI's thresholds, whisper/transcribe.py).
NO_SPEECH_PROBABILITY, NO_SPEECH_LOGPROB = 0.6, -1.0


class _Transcript(msgspec.Struct):
    text: str
    language: msgspec.Raw = msgspec.Raw(b"null")
    words: msgspec.Raw = msgspec.Raw(b"[]")
    segments: msgspec.Raw = msgspec.Raw(b"[]")


class _TimedWord(msgspec.Struct):
    """A word. Servers call its probability by one of two names, or leave it out."""

    word: str
    start: float
    end: float
    confidence: float | None = None
    probability: float | None = None


class _Segment(msgspec.Struct):
    no_speech_prob: float | None = None
    avg_logprob: float | None = None
    words: list[_TimedWord] | None = None


_decoder, _text_decoder = msgspec.json.Decoder(_Transcript), msgspec.json.Decoder(str)
_words_decoder, _segments_decoder = msgspec.json.Decoder(list[_TimedWord]), msgspec.json.Decoder(list[_Segment])


class RestServer:
    """A server of a pool that transcribes files. `base_url`: the URL before `/audio/transcriptions`."""

    name = "transcription over REST"

    def __init__(self, pool: Pool[Any], endpoint: Endpoint, base_url: str, model: str) -> None:
        self.pace = Pace()
        self._pool, self._endpoint, self._base_url, self._model = pool, endpoint, base_url, model
        self._is_verbose = True

    async def hear(self, window: Window, task: TranscriptionTask = "transcribe", temperature: float = 0.0) -> HeardText:
        """Transcribe a window. Raises Refused if the server has no room, and RemoteError."""
        verbose = self._is_verbose and (window.final or window.word_times)
        try:
            return await self._asked(window, task, temperature, verbose=verbose)
        except _NotAccepted as error:
            if not verbose:
                raise RemoteError(f"{self._endpoint.host} does not accept this: {error}") from None
        found = await self._plain(window, task, temperature)
        self._is_verbose = False
        return found

    async def _plain(self, window: Window, task: TranscriptionTask, temperature: float) -> HeardText:
        try:
            return await self._asked(window, task, temperature, verbose=False)
        except _NotAccepted as error:
            raise RemoteError(f"{self._endpoint.host} does not accept this: {error}") from None

    async def _asked(self, window: Window, task: TranscriptionTask, temperature: float, *, verbose: bool) -> HeardText:
        form: dict[str, str | list[str]] = {
            "model": self._model,
            "response_format": "verbose_json" if verbose else "json",
            "temperature": f"{temperature:g}",
        }
        if window.language and task == "transcribe":
            form["language"] = window.language
        if prompt := " ".join(filter(None, (window.context.strip(), window.prompt.strip()))):
            form["prompt"] = prompt
        if verbose:
            form["timestamp_granularities[]"] = ["word", "segment"] if window.word_times else ["segment"]
        file = await wav_of(window.pcm)
        path = "/audio/translations" if task == "translate" else "/audio/transcriptions"
        try:
            client = await self._pool.client()
            async with client.stream(
                "POST",
                self._base_url + path,
                headers=self._pool.headers(),
                data=form,
                files={"file": ("audio.wav", file, "audio/wav")},
            ) as answer:
                if answer.status_code != 200:
                    raise await self._failure(answer)
                async with aclosing(chunks(answer, MAX_DOCUMENT_BYTES)) as found:
                    data = b"".join([chunk async for chunk in found])
        except httpx.HTTPError as error:
            raise RemoteError(f"{self._endpoint.host}: {reason(error)}") from error
        return _heard(decoded(_decoder, without_key(data, self._pool.key), "transcript"))

    async def _failure(self, answer: httpx.Response) -> Exception:
        said = await read_failure(self._endpoint.host, answer, self._pool.key)
        if isinstance(said, str):
            return _NotAccepted(said)
        # A key that one server refuses may be accepted by the next one.
        return RemoteError(str(said)) if isinstance(said, ModelError) else said


class _NotAccepted(Exception):
    """The server does not accept a request. The message is its own."""


async def wav_of(pcm: Pcm) -> bytes:
    """Return audio as a WAV file: PCM16, mono, 16 kHz."""
    make = partial(to_pcm16, pcm)
    data = make() if len(pcm) <= MAX_INLINE_SAMPLES else await in_thread(make, places=FILE_THREADS)
    return wav_header(SAMPLE_RATE_HZ, len(data)) + data


def _heard(found: _Transcript) -> HeardText:
    words = words_of(found.text)
    segments = optional(_segments_decoder, found.segments) or []
    timed = optional(_words_decoder, found.words) or [w for s in segments for w in s.words or ()]
    if timed:
        words = timed_words(words, [Word(w.word, w.start, w.end, _probability(w)) for w in timed])
    language = optional(_text_decoder, found.language) or ""
    is_noise = bool(segments) and all(
        (s.no_speech_prob or 0.0) > NO_SPEECH_PROBABILITY and (s.avg_logprob or 0.0) < NO_SPEECH_LOGPROB
        for s in segments
    )
    return HeardText(words, language_code(language) if language else "", not is_noise)


def _probability(word: _TimedWord) -> float:
    found = next((p for p in (word.confidence, word.probability) if p is not None), 1.0)
    return min(1.0, max(0.0, found))
