"""A Synthesizer on other servers.

A text is sent again, to another server if there is one, if its first request fails before the first sound or is late.
After the first sound it is never repeated, because the listener may have heard it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Protocol
from urllib.parse import urlsplit

from antiphon.audio import Pcm
from antiphon.contracts import SpeechChunk, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.errors import ModelError, RemoteError, SettingsError
from antiphon.remote.address import ServerAddress, split_api
from antiphon.remote.http import PROBE_TIMEOUT_S
from antiphon.remote.pool import Endpoint, Pool
from antiphon.remote.synthesizer.rest import RestSpeech
from antiphon.remote.synthesizer.sound import SampleFormat
from antiphon.remote.synthesizer.stream import StreamSpeech
from antiphon.remote.synthesizer.voices import ServerVoices, ask_voices, ordered_voices
from antiphon.remote.synthesizer.wyoming import WyomingSpeech
from antiphon.remote.wyoming import described
from antiphon.settings import RemoteSettings

log = logging.getLogger(__name__)

# The schemes with TLS, and those of the same protocols without it.
KINDS = {"https": "http", "wss": "ws"}
# The ends of URLs, which are optional over HTTP.
REST_PATH, STREAM_PATH = "/audio/speech", "/audio/speech/stream"
# The name that stands for a server's own voice, which is not sent to it.
SERVERS_VOICE = "default"
# Bound: seconds of audio of a text. A voice that speaks without end would otherwise never leave the floor.
FREE_S, S_A_CHAR = 10.0, 0.5
# The most seconds of one chunk, so that word times and playback follow the audio closely.
CHUNK_S = 0.5
# The texts that are spoken ahead of the one whose audio is taken, so that there is no gap between them.
TEXTS_AHEAD = 1


class SpeechWire(Protocol):
    """A protocol in which servers are asked to speak. `speeds`: the slowest and the fastest tempo."""

    speeds: tuple[float, float]

    def speak(self, endpoint: Endpoint, text: str, options: VoiceOptions, to_hz: int) -> AsyncGenerator[Pcm, None]:
        """Yield the audio of a text: float32 [num_samples], mono, at `to_hz`. Closing the generator ends the work.

        Raises RemoteError, Refused and ModelError.
        """
        ...


class RemoteSynthesizer:
    """A Synthesizer that other servers run.

    The constructor asks the servers for their voices, which takes up to some seconds. A server that does not answer yet
    is logged and is not an error. Raises ModelError if a server does not accept the key, or has no voice that the
    settings name, and SettingsError if the URLs are of different protocols.

    `key`: sent as a bearer token; "" for none. `voices`: those to use, the default first; empty: those that are listed.
    """

    def __init__(self, address: ServerAddress, key: str, voices: tuple[str, ...], remote: RemoteSettings) -> None:
        schemes = {KINDS.get(scheme := urlsplit(url).scheme, scheme) for url in address.urls}
        if len(schemes) > 1:
            raise SettingsError("--synthesizer: all URLs must be of one kind, http://, ws:// or tcp://")
        endpoints = [Endpoint(_base(url)) for url in address.urls]
        self.pool = Pool(
            "synthesizer", endpoints, key, max_s=remote.remote_answer_s, hedges=remote.remote_hedge, look=self._look
        )
        raw = SampleFormat(remote.synthesizer_rate)
        self._wire: SpeechWire = RestSpeech(self.pool, address.model, remote.synthesizer_format, raw)
        if "ws" in schemes:
            self._wire = StreamSpeech(self.pool, address.model, raw)
        elif "tcp" in schemes:
            self._wire = WyomingSpeech()
        self._model, self._next_s = address.model, remote.remote_token_s
        listed = self._listed()
        self._lists_default = SERVERS_VOICE in (*listed.voices, *voices)
        self.profile = SynthesizerProfile(
            address.model,
            remote.synthesizer_rate,
            ordered_voices(voices, listed.voices) or (SERVERS_VOICE,),
            listed.languages,
            self._wire.speeds,
            word_times=False,
            follows_instructions=True,
            texts_ahead=TEXTS_AHEAD,
        )

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """Synthesize a text, in chunks. Closing the generator ends the work at the server.

        Raises RemoteError, Refused and ModelError.
        """
        if options.voice == SERVERS_VOICE and not self._lists_default:
            options = replace(options, voice="")
        rate_hz = self.profile.sample_rate_hz
        left_s = (FREE_S + S_A_CHAR * len(text)) / min(options.speed, 1.0)
        request = partial(self._sound, text=text, options=options)
        async with aclosing(self.pool.stream(request, next_s=self._next_s)) as sound:
            async for pcm in sound:
                left_s -= len(pcm) / rate_hz
                if left_s < 0:
                    raise RemoteError("the voice's server sends more audio than the text can take")
                for piece in _pieces(pcm, round(CHUNK_S * rate_hz)):
                    yield SpeechChunk(piece)

    def close(self) -> None:
        """Do nothing: connections are closed with their event loop."""

    async def _sound(self, endpoint: Endpoint, text: str, options: VoiceOptions) -> AsyncGenerator[Pcm, None]:
        is_silent = True
        async with aclosing(self._wire.speak(endpoint, text, options, self.profile.sample_rate_hz)) as sound:
            async for pcm in sound:
                is_silent = False
                yield pcm
        if is_silent:
            raise RemoteError("the voice's server sent no audio")

    async def _look(self, endpoint: Endpoint) -> str:
        """Return what a server is, in words. Raises ModelError if it does not work."""
        found = await self._asked(endpoint)
        if found.models and self._model not in found.models:
            raise RemoteError(f"has no model {self._model}; it has {', '.join(found.models[:20])}")
        voices = f"{len(found.voices)} voices" if found.voices else "no list of its voices"
        return f"speaks with {self._model}, {voices}"

    async def _asked(self, endpoint: Endpoint) -> ServerVoices:
        """Ask a server for its voices and models. Raises RemoteError and ModelError."""
        if not endpoint.url.startswith("tcp"):
            return await ask_voices(endpoint.url, self.pool.key)
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, voices = await described(endpoint)
        if not voices:
            raise ModelError(f"{endpoint.url} is a Wyoming server without voices")
        return ServerVoices(tuple(dict.fromkeys(voices)))

    def _listed(self) -> ServerVoices:
        """Return the first list of voices of a server. Notes which servers are away."""
        found = list[ServerVoices]()
        for endpoint in self.pool.all:
            try:
                found.append(asyncio.run(self._asked(endpoint)))
            except (RemoteError, TimeoutError) as error:
                log.warning("%s does not list its voices: %s", endpoint.url, error)
                endpoint.is_away = True
                continue
            if found[-1].models and self._model not in found[-1].models:
                known = ", ".join(found[-1].models[:20])
                log.warning("%s has no model %s; it has %s", endpoint.url, self._model, known)
        return next((one for one in found if one.voices), ServerVoices())


def _base(url: str) -> str:
    """Return the base of a server's API as an http:// URL: without the path of speech."""
    base, _ = split_api(url, (STREAM_PATH, REST_PATH))
    return "http" + base.removeprefix("ws") if base.startswith("ws") else base


def _pieces(pcm: Pcm, num_samples: int) -> Iterator[Pcm]:
    for at in range(0, len(pcm), num_samples):
        yield pcm[at : at + num_samples]
