"""A Transcriber on other servers.

A session passes the whole window with each decode. So the audio of an open turn is always here, and if a server fails
in the middle of it, the next server gets all of it. What has been sent to the client is never taken back, because each
hypothesis begins after the words that were sent (`heard.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, Hashable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import (
    FileInfo,
    FileOptions,
    Hypothesis,
    TranscriberProfile,
    TranscriptSegment,
    Window,
)
from antiphon.contracts.file_parts import transcribed_parts
from antiphon.errors import ModelError, Refused, RemoteError
from antiphon.events.languages import LANGUAGE_NAMES
from antiphon.events.words import Word
from antiphon.remote.address import ServerAddress
from antiphon.remote.pool import Pool
from antiphon.remote.transcriber.heard import HeardText, WordTokens
from antiphon.remote.transcriber.kinds import Server, TranscriberEndpoint, find, said
from antiphon.remote.transcriber.rest import RestServer
from antiphon.remote.transcriber.sockets import StreamingServer, Utterance
from antiphon.remote.transcriber.wyoming import WyomingServer
from antiphon.settings import RemoteSettings
from antiphon.shares.places import current_owner

log = logging.getLogger(__name__)

# A partial of a streaming server waits up to NEWS_S for words. Meanwhile, new audio is sent as it arrives.
NEWS_S = 1.0
# A final that failed within QUICK_S is tried again by the session, after RETRY_S. A server may be restarting.
QUICK_S, RETRY_S = 2.0, 1.0
# The time of a window server is proportional to the audio and OVERHEAD_S more.
OVERHEAD_S = 2.0
# Files are sent in parts of up to PART_S, split at the quietest place of the last PART_SLACK_S.
PART_S, PART_SLACK_S = 24.0, 6.0


class RemoteTranscriber:
    """A Transcriber that other servers run.

    The constructor asks each server what it is, which takes up to some seconds. A server that does not answer yet is
    logged, unless no server answers and the URLs do not say their kind. Raises ModelError if a server is no
    transcriber's, does not have the model or does not accept the key, and RemoteError if the kind of all is unknown.

    - `key`: the servers'; "" for none.
    """

    def __init__(self, address: ServerAddress, key: str, settings: RemoteSettings) -> None:
        self._model = address.model
        endpoints = [TranscriberEndpoint(url) for url in address.urls]
        self.pool = Pool("transcriber", endpoints, key, max_s=settings.remote_answer_s, look=self._look)
        asyncio.run(self._find_all())
        self._profile = _profile(self._model, self.pool.all)

    @property
    def profile(self) -> TranscriberProfile:
        """The facts of the transcriber, which depend on the kinds of its servers."""
        return self._profile

    def busy(self) -> bool:
        """Return whether partials wait for a place at a server, so that a speculative decode would delay finals."""
        return any(e.server.pace.num_waiting for e in self.pool.all if isinstance(e.server, RestServer | WyomingServer))

    def overdue(self) -> bool:
        """Return False: the servers decide the order of their work."""
        return False

    def open(self) -> RemoteTranscriptionStream:
        """Open the stream of a new session. Nothing is sent before its first window."""
        return RemoteTranscriptionStream(self)

    async def align(self, pcm: Pcm, words: Sequence[str], language: str) -> tuple[Word, ...]:
        """Return (): no server aligns given words."""
        return ()

    async def transcribe(
        self, slabs: AsyncIterable[Pcm], options: FileOptions
    ) -> AsyncGenerator[FileInfo | TranscriptSegment, None]:
        """Yield a segment for each part of the file that contains speech, then one FileInfo. Parts have up to 30 s.

        The language that the server reports first is used for the rest. Raises Refused and ModelError.
        """
        stream = self.open()
        found = transcribed_parts(
            slabs, options, lambda window: stream.decode_file(window, options), PART_S, PART_SLACK_S
        )
        async with aclosing(found):
            async for one in found:
                # The tokens of this model are its own, not those of a vocabulary.
                yield replace(one, tokens=()) if isinstance(one, TranscriptSegment) else one

    def close(self) -> None:
        """Do nothing: connections are closed with their event loop."""

    async def server_of(self, endpoint: TranscriberEndpoint) -> Server:
        """Return an endpoint's server, which is asked what it is if that is unknown. Raises the errors of `find`."""
        if endpoint.server is None:
            await self._look(endpoint)
        assert endpoint.server
        return endpoint.server

    async def _look(self, endpoint: TranscriberEndpoint) -> str:
        return await find(self.pool, endpoint, self._model)

    async def _find_all(self) -> None:
        reasons = list[str]()
        for endpoint in self.pool.all:
            try:
                log.info("%s: %s", endpoint.url, await self._look(endpoint))
            except (RemoteError, Refused) as error:
                log.warning("%s does not answer yet: %s", endpoint.url, error)
                reasons.append(str(error))
                endpoint.is_away = True
                endpoint.server = said(self.pool, endpoint, self._model)
        if not any(endpoint.server for endpoint in self.pool.all):
            raise RemoteError(
                f"no server of the transcriber answers, and its kind is unknown ({'; '.join(reasons)}); start it "
                "first, or say the kind by the end of the URL, /audio/transcriptions"
            )


class RemoteTranscriptionStream:
    """The windows of one session. A TranscriptionStream, used from one event loop."""

    def __init__(self, model: RemoteTranscriber) -> None:
        self._model, self._pool = model, model.pool
        self._tokens = WordTokens()
        # The audio of the open window at a streaming server; None if none was sent.
        self._utterance: Utterance | None = None
        # Whether that server has sent words of it.
        self._has_spoken = False
        # The window of the partial in progress, which newer audio may replace.
        self._partial: Window | None = None
        # The time until which no partial is sent to a window server, in monotonic seconds.
        self._rest_until_s = 0.0

    async def decode(self, window: Window) -> Hypothesis:
        """Decode one window.

        If a server fails, the next one gets the whole window. Partials at window servers wait for their turn. Raises
        Refused if no server has room or the failure may be short, and ModelError.
        """
        if window.final:
            return self._tokens.hypothesis(window, await self._final(window))
        self._partial = window
        try:
            heard = await self._partial_heard(window)
            # The newest window has the same start and prefix.
            return self._tokens.hypothesis(self._partial, heard)
        finally:
            self._partial = None

    async def decode_file(self, window: Window, options: FileOptions) -> Hypothesis:
        """Decode a part of a file. Raises Refused and ModelError."""
        return self._tokens.hypothesis(window, await self._final(window, options))

    def replace(self, window: Window) -> bool:
        """Replace the window of the partial in progress. A streaming server gets the new audio at once."""
        if self._partial is None or self._partial.start_sample != window.start_sample:
            return False
        self._partial = window
        if self._utterance and self._is_at(self._utterance, window):
            self._utterance.feed(window)
        return True

    def close(self) -> None:
        """End the connection of an open window. Returns at once."""
        self._drop()

    def _drop(self) -> None:
        utterance, self._utterance = self._utterance, None
        if utterance:
            utterance.close()

    def _is_at(self, utterance: Utterance, window: Window) -> bool:
        return utterance.is_open and utterance.start_sample == window.start_sample

    def _current(self, window: Window) -> TranscriberEndpoint | None:
        """Return the endpoint that has the beginning of a window. Drops an utterance that cannot continue."""
        utterance = self._utterance
        endpoint = next((e for e in self._pool.all if utterance and e is utterance.endpoint), None)
        if utterance is None or endpoint is None or self._is_at(utterance, window):
            return endpoint
        if utterance.failure:
            self._pool.failed(endpoint, current_owner.get(), utterance.failure)
        self._drop()
        return None

    # --- finals -------------------------------------------------------------------------------------------------------

    async def _final(self, window: Window, options: FileOptions | None = None) -> HeardText:
        bound = self._current(window)
        num_sent = self._utterance.num_fed if self._utterance else 0
        size = OVERHEAD_S + (len(window.pcm) - num_sent) / SAMPLE_RATE_HZ
        since_s = time.monotonic()
        try:
            return await self._pool.ask(
                partial(self._final_at, window, options), current_owner.get(), size=size, bound=bound
            )
        except RemoteError as error:
            if options is None and time.monotonic() - since_s < QUICK_S:
                raise Refused(f"The transcriber's servers do not answer: {error}", RETRY_S) from error
            raise

    async def _final_at(self, window: Window, options: FileOptions | None, endpoint: TranscriberEndpoint) -> HeardText:
        server = await self._model.server_of(endpoint)
        task, temperature = (options.task, options.temperature) if options else ("transcribe", 0.0)
        if not isinstance(server, StreamingServer):
            return await server.hear(window, task, temperature)
        if task == "translate":
            raise ModelError("the transcriber's server does not translate")
        utterance = self._utterance
        if utterance and utterance.endpoint is endpoint and self._is_at(utterance, window):
            self._utterance = None
        else:
            utterance = server.open(window)
        try:
            utterance.feed(window, final=True)
            return await utterance.final()
        finally:
            utterance.close()

    # --- partials -----------------------------------------------------------------------------------------------------

    async def _partial_heard(self, window: Window) -> HeardText:
        tried, owner = list[TranscriberEndpoint](), current_owner.get()
        while True:
            endpoint = self._current(window) or self._pool.choose(owner, avoid=tried)
            try:
                server = await self._model.server_of(endpoint)
                if isinstance(server, StreamingServer):
                    return await self._followed(server)
                return await self._paced(server, endpoint, owner)
            except (RemoteError, Refused) as error:
                if self._utterance or endpoint.server is None:
                    self._pool.failed(endpoint, owner, error)
                self._drop()
                tried.append(endpoint)
                if len(set(tried)) == len(self._pool.all):
                    raise

    async def _followed(self, server: StreamingServer) -> HeardText:
        """Return what a streaming server has heard, as soon as it has words that were not sent, or after NEWS_S."""
        assert self._partial
        if self._utterance is None:
            self._utterance, self._has_spoken = server.open(self._partial), False
        self._utterance.feed(self._partial)
        until_s = time.monotonic() + NEWS_S
        while True:
            heard, left_s = self._utterance.heard, until_s - time.monotonic()
            if self._tokens.has_news(self._partial, heard) or left_s <= 0:
                if heard.words and not self._has_spoken:
                    self._has_spoken = True
                    self._utterance.endpoint.succeeded(current_owner.get())
                return heard
            await self._utterance.news(left_s)

    async def _paced(
        self, server: RestServer | WyomingServer, endpoint: TranscriberEndpoint, owner: Hashable | None
    ) -> HeardText:
        """Send the newest window to a window server when it is this session's turn."""
        if (rest_s := self._rest_until_s - time.monotonic()) > 0:
            await asyncio.sleep(rest_s)
        await server.pace.begin()
        assert self._partial
        window = self._partial
        # From now on, newer audio does not replace the window.
        self._partial = None
        size, since_s, took_s = OVERHEAD_S + len(window.pcm) / SAMPLE_RATE_HZ, time.monotonic(), None
        try:
            heard = await self._pool.once(lambda _: server.hear(window), endpoint, owner, size=size)
            took_s = time.monotonic() - since_s
        finally:
            self._partial = window
            self._rest_until_s = time.monotonic() + server.pace.end(took_s, size)
        return heard


def _profile(model: str, endpoints: Sequence[TranscriberEndpoint]) -> TranscriberProfile:
    """Return the profile of streaming servers, or that of window servers if there is one, whose words may change."""
    languages = next((e.languages for e in endpoints if e.languages), tuple(dict.fromkeys(LANGUAGE_NAMES.values())))
    streams = all(e.is_streaming for e in endpoints)
    of_windows = TranscriberProfile(
        id=model,
        languages=languages,
        step_s=0.3,
        first_step_s=0.3,
        agreement_s=0.6,
        first_agreement_s=0.3,
        # Each word is one token here.
        rollback_tokens=1,
        min_probability=0.0,
        unfixed_chunks=0,
        settle_s=0.5,
        context_pause_s=0.0,
        pause_s=0.8,
        long_window_s=14.0,
        long_pause_s=0.3,
        max_window_s=26.0,
        context_tokens=0,
        max_tokens=448,
        max_prefix_tokens=448,
        translates=not any(isinstance(e.server, StreamingServer | WyomingServer) for e in endpoints),
        aligns_words=all(e.is_antiphon for e in endpoints),
    )
    if not streams:
        return of_windows
    # A streaming server does not take words back, so they are sent when they have come.
    return replace(of_windows, step_s=0.1, first_step_s=0.1, agreement_s=0.0, first_agreement_s=0.0, rollback_tokens=0)
