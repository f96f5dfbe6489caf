"""Speech over HTTP: `POST /v1/audio/speech`, and the audio of its answer as it arrives.

Servers answer with a WAV file, with samples, or with server-sent events, whatever was asked for. The answer's content
type and its first bytes decide how it is read.
"""

from __future__ import annotations

import binascii
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import httpx
import msgspec

from antiphon.audio import Pcm
from antiphon.contracts import VoiceOptions
from antiphon.errors import ModelError, RemoteError
from antiphon.remote.http import chunks, decoded, error_text, read_failure, without_key
from antiphon.remote.pool import Endpoint, Pool
from antiphon.remote.sse import events
from antiphon.remote.synthesizer.sound import SampleFormat, SoundReader

log = logging.getLogger(__name__)

# Bound of one event, in bytes. Some servers send a whole sentence in one event: a minute of PCM16 at 48 kHz fits.
MAX_EVENT_BYTES = 8 << 20
# Content types of samples without a header. Their parameters may tell the rate and the channels.
_SAMPLES = ("audio/pcm", "audio/l16", "audio/x-pcm", "audio/raw", "audio/x-raw")
_WAV = ("audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave")
# Headers in which servers tell the rate of samples.
_RATE_HEADERS = ("x-sample-rate", "x-audio-sample-rate", "x-pcm-sample-rate")
# Fields of a request that a server may refuse, and that are then no longer sent to it.
_OPTIONAL = ("stream_format", "stream", "instructions", "language", "speed", "seed")


class _Body(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The body of a request. Fields that are None are not sent."""

    # The model's name at the server.
    model: str
    # The text to speak.
    input: str
    # The name of the voice; None: the server's default.
    voice: str | None = None
    # "wav" or "pcm".
    response_format: str
    # Kokoro-FastAPI, LocalAI, SGLang-Omni and antiphon send audio while it is made if this is true.
    stream: bool | None = None
    # "audio": a body of audio, "sse": events. vLLM-Omni streams only with it.
    stream_format: str | None = None
    # The tempo; None: the normal one.
    speed: float | None = None
    # The language of the text as ISO-639-1.
    language: str | None = None
    # How to speak, in words.
    instructions: str | None = None
    # Seed of the random numbers.
    seed: int | None = None


class _Audio(msgspec.Struct):
    """The audio of an event of SGLang-Omni."""

    data: str = ""
    sample_rate: int | None = None


class _Event(msgspec.Struct):
    """One event of OpenAI's form, or of SGLang-Omni's."""

    type: str = ""
    audio: str | _Audio | None = None
    finish_reason: str | None = None
    # An object with a message, or a message: servers differ.
    error: Any = None


_decoder, _encoder = msgspec.json.Decoder(_Event), msgspec.json.Encoder()


class RestSpeech:
    """Speech by HTTP requests. Connections are kept for the next text.

    - `format`: "wav", "pcm" or "sse" (events with PCM).
    - `raw`: the format of samples for which a server does not tell it.
    """

    # The tempos that servers speak at themselves.
    speeds = (0.25, 4.0)

    def __init__(self, pool: Pool[Endpoint], model: str, format: str, raw: SampleFormat) -> None:
        self._pool, self._model = pool, model
        self._format, self._raw = format, raw
        # The optional fields that a server has refused.
        self._refused = set[str]()

    async def speak(
        self, endpoint: Endpoint, text: str, options: VoiceOptions, to_hz: int
    ) -> AsyncGenerator[Pcm, None]:
        """Yield the audio of a text: float32 [num_samples], mono, at `to_hz`. Closing the generator ends the request.

        Raises RemoteError if the server fails or its answer is not audio, Refused if it has no room, and ModelError if
        it does not accept the request.
        """
        headers = {"Content-Type": "application/json"} | self._pool.headers()
        url = endpoint.url + "/audio/speech"
        try:
            http = await self._pool.client()
            while True:
                body = _encoder.encode(self._body(text, options))
                async with http.stream("POST", url, content=body, headers=headers) as answer:
                    if answer.status_code == 200:
                        async with aclosing(self._sound(answer, to_hz)) as sound:
                            async for pcm in sound:
                                yield pcm
                        return
                    said = await read_failure("the voice's server", answer, self._pool.key)
                if not isinstance(said, str):
                    raise said
                if not self._mended(endpoint, said):
                    raise ModelError(f"the voice's server does not accept this: {said}")
        except httpx.HTTPError as error:
            raise RemoteError(f"the voice's server: {error or type(error).__name__}") from error

    def _body(self, text: str, options: VoiceOptions) -> _Body:
        body = _Body(
            model=self._model,
            input=text,
            voice=options.voice or None,
            response_format="wav" if self._format == "wav" else "pcm",
            stream=True,
            stream_format="sse" if self._format == "sse" else "audio",
            speed=options.speed if options.speed != 1.0 else None,
            language=options.language,
            instructions=options.instructions or None,
            seed=options.seed,
        )
        for name in self._refused:
            setattr(body, name, None)
        return body

    def _mended(self, endpoint: Endpoint, said: str) -> bool:
        """Return whether the next request is another one, because the server refused one of its optional fields."""
        name = next((n for n in _OPTIONAL if n not in self._refused and re.search(rf"\b{n}\b", said)), None)
        if name is None:
            return False
        log.info("%s does not accept the field %s, which is no longer sent", endpoint.url, name)
        self._refused.add(name)
        return True

    async def _sound(self, answer: httpx.Response, to_hz: int) -> AsyncGenerator[Pcm, None]:
        kind, _, parameters = answer.headers.get("content-type", "").lower().partition(";")
        kind = kind.strip()
        if kind == "text/event-stream":
            async with aclosing(self._events(answer, to_hz)) as sound:
                async for pcm in sound:
                    yield pcm
            return
        if kind and not kind.startswith(("audio/", "application/octet-stream", "binary/")):
            raise RemoteError(f"the voice's server answers with {kind[:60]} instead of audio")
        if kind.startswith("audio/") and kind not in _SAMPLES + _WAV:
            raise RemoteError(f"the voice's server sends {kind[:60]}, and WAV or PCM is read")
        raw = _told(parameters, answer.headers, self._raw)
        reader = SoundReader(to_hz, raw, sniffs=kind not in _SAMPLES)
        async with aclosing(chunks(answer)) as found:
            async for data in found:
                if len(pcm := reader.feed(data)):
                    yield pcm
        if len(pcm := reader.finish()):
            yield pcm

    async def _events(self, answer: httpx.Response, to_hz: int) -> AsyncGenerator[Pcm, None]:
        reader, is_done = SoundReader(to_hz, self._raw), False
        async with aclosing(events(chunks(answer), MAX_EVENT_BYTES)) as found:
            async for data in found:
                if data == b"[DONE]":
                    is_done = True
                    break
                event = decoded(_decoder, without_key(data, self._pool.key), "event of speech")
                if event.error is not None or event.type == "error":
                    raise RemoteError(f"the voice's server failed in its answer: {error_text(event.error)}")
                audio = event.audio
                if isinstance(audio, _Audio):
                    if audio.sample_rate and not reader.num_samples:
                        reader = SoundReader(to_hz, SampleFormat(audio.sample_rate))
                    audio = audio.data
                if audio and len(pcm := reader.feed(_bytes_of(audio))):
                    yield pcm
                is_done = is_done or event.finish_reason is not None or event.type.endswith((".done", ".completed"))
        if not is_done:
            raise RemoteError("the voice's server ended in the middle of its answer")
        if len(pcm := reader.finish()):
            yield pcm


def _bytes_of(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error as error:
        raise RemoteError(f"the voice's server sent no valid base64: {error}") from None


def _told(parameters: str, headers: Mapping[str, str], raw: SampleFormat) -> SampleFormat:
    """Return the format of samples, with the rate and the channels that an answer's headers tell."""
    stated = dict(re.findall(r"\b(rate|channels)=\"?(\d{1,7})", parameters))
    rate = stated.get("rate") or next((headers[name] for name in _RATE_HEADERS if name in headers), "")
    return SampleFormat(
        int(rate) if rate.isdecimal() and len(rate) < 8 else raw.rate_hz, int(stated.get("channels", raw.channels))
    )
