"""Live transcription: audio in, final words out. If its session on the server ends, another session continues it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass

from antiphon.client.audio import Audio, WireAudio, encoded
from antiphon.client.link import (
    FIRST_WAIT_S,
    MAX_WAIT_S,
    JsonObject,
    LinkedSession,
    ResumingLink,
    ServerMessage,
    SessionEnded,
)

log = logging.getLogger(__name__)
PATH = "/v1/realtime"
# The protocol's sample rate.
RATE_HZ = 16_000
BYTES_PER_S = 2 * RATE_HZ
# The audio since the last word is kept for another session, up to this limit in bytes of PCM.
MAX_KEPT_BYTES = 300 * BYTES_PER_S
# Timeout of `stop` for the last words, in seconds.
LAST_S = 2.0
# Codes of SessionEnded after which another session continues the captions.
ENDS_A_SESSION = frozenset(
    {
        "session_expired",
        "server_shutting_down",
        "unknown_session",
        "resync_required",
        "client_gap",
        "restored_too_often",
        "invalid_resume_token",
    }
)


@dataclass(frozen=True, slots=True)
class CaptionWord:
    """A word with its start and end, in seconds from the beginning of all audio sent."""

    text: str
    start_s: float
    end_s: float


class SentAudio:
    """A queue of what was sent since the last word: pieces of PCM, and None for each end of a transcript."""

    def __init__(self) -> None:
        self._entries: deque[bytes | None] = deque()
        # The offset of the first entry in all audio, and the size of all entries, both in bytes; the number of entries
        # that the current session has been sent.
        self.start = self.size = self.num_given = 0

    @property
    def is_finished(self) -> bool:
        """Whether the last entry is the end of a transcript that is not complete yet."""
        return bool(self._entries) and self._entries[-1] is None

    def add(self, entry: bytes | None) -> None:
        """Append an entry. If the size exceeds MAX_KEPT_BYTES, drop the oldest audio that the session has been sent."""
        self._entries.append(entry)
        self.size += len(entry or b"")
        while self.size > MAX_KEPT_BYTES and self.num_given > 1 and self._entries[0]:
            self._drop()

    def next(self) -> tuple[bool, bytes | None]:
        """Return True and the first entry that the session has not been sent; (False, None) if all were sent."""
        if self.num_given == len(self._entries):
            return False, None
        return True, self._entries[self.num_given]

    def settle(self, at: int) -> None:
        """Drop the sent audio before the offset `at`, in bytes, because its words are known."""
        while self.num_given > 0 and (head := self._entries[0]) is not None:
            if self.start + len(head) > at:
                break
            self._drop()

    def done(self) -> None:
        """Drop everything up to the end of the oldest transcript."""
        while self._entries and self._entries[0] is not None:
            self._drop()
        if self._entries:
            self._drop()

    def restart(self, at: int) -> int:
        """Start over for another session, from the offset `at`.

        Returns:
            The offset in all audio at which that session's audio begins, in bytes.
        """
        self.num_given = len(self._entries)
        self.settle(at)
        self.num_given = 0
        if self._entries and (head := self._entries[0]) is not None and self.start < at:
            cut = min(len(head), at - self.start)
            self._entries[0] = head[cut:]
            self.start, self.size = self.start + cut, self.size - cut
        # Merge into pieces of a second: many small messages at once would exceed the server's limits.
        entries, self._entries = self._entries, deque()
        for entry in entries:
            last = self._entries[-1] if self._entries else None
            if entry and last and len(last) < BYTES_PER_S:
                self._entries[-1] = last + entry
            else:
                self._entries.append(entry)
        return self.start

    def _drop(self) -> None:
        num_bytes = len(self._entries.popleft() or b"")
        self.start, self.size = self.start + num_bytes, self.size - num_bytes
        self.num_given = max(0, self.num_given - 1)


class ClientCaptions(LinkedSession):
    """A live transcription. It is entered with `async with`; each iteration yields the words up to the next `finish`.

    It survives a broken connection, the end of a session on the server, and the server's restart: the audio since the
    last word is then sent to another session.

    Attributes:
        text: The text since the last `finish`.
        words: The words since the last `finish`, with their times.
        num_sessions: The number of sessions used so far.
        warnings: The server's warnings: one for each requested field that it ignored.
    """

    def __init__(
        self, open_link: Callable[[], ResumingLink], config: JsonObject, rate_hz: int, give_up_s: float
    ) -> None:
        super().__init__(open_link())
        self._open_link, self._give_up_s = open_link, give_up_s
        self._config = {"word_timestamps": True, **config}
        self._audio = WireAudio(rate_hz, RATE_HZ)
        self._sent, self._giving = SentAudio(), asyncio.Lock()
        # Offsets in all audio, in bytes: the beginning of the session's audio, and the end of the last word.
        self._base = self._settled = 0
        # Entries: new words, None for the end of a transcript, or an error of the server.
        self._found: asyncio.Queue[tuple[str, list[CaptionWord]] | SessionEnded | None] = asyncio.Queue()
        self._feeding: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._renewed = asyncio.Event()
        self._over: SessionEnded | None = None
        # The timer of `stop`, and the number of transcripts that the timer ended before the server did.
        self._last_call: asyncio.TimerHandle | None = None
        self._num_given_up = 0
        # Whether the transcript has words; whether the next words are the first words of another session; whether the
        # next iteration begins a new transcript.
        self._has_words, self._joins, self._begins_anew = False, False, True
        self.text, self.words = "", list[CaptionWord]()
        self.num_sessions = 1

    async def _begin(self) -> None:
        await self._configure(self._link)
        self._reading = asyncio.create_task(self._read())

    async def _configure(self, link: ResumingLink) -> None:
        """Send a session its configuration and wait for the answer. Raises SessionEnded if the server refuses it."""
        await link.send({"type": "session.update", **self._config})
        while True:
            message = await link.receive()
            _raise_error(message)
            if isinstance(message, dict) and message.get("type") == "session.updated":
                return self._warn(message)

    async def configure(self, *, language: str | None = None, prompt: str | None = None) -> None:
        """Change the configuration of the running transcription. Arguments that are None stay as they are.

        If the server refuses the change, the iteration raises SessionEnded.

        Args:
            language: The language, ISO 639-1; "": the server detects it.
            prompt: Names and words to expect.

        Raises:
            SessionEnded: The session is over.
        """
        given = {name: value for name, value in (("language", language), ("prompt", prompt)) if value is not None}
        await self._link.send({"type": "session.update", "model": self._config["model"], **given})
        self._config |= given

    async def send(self, audio: Audio) -> None:
        """Send more audio. Waits while the client's send buffer is full, and while another session begins.

        Args:
            audio: Mono audio at the rate that the captions were opened with.

        Raises:
            SessionEnded: The captions are over.
            ValueError: The audio ends in the middle of a sample.
        """
        if pcm := self._audio.feed(audio):
            await self._push(pcm)

    async def finish(self) -> None:
        """End the transcript: the iteration ends after its last word.

        Raises:
            SessionEnded: The captions are over.
        """
        if rest := self._audio.flush():
            await self._push(rest)
        await self._push(None)

    async def stop(self) -> None:
        """Stop `feed` and finish: the iteration ends after the last word, or after LAST_S (2 s).

        Raises:
            SessionEnded: The captions are over.
        """
        if self._feeding:
            self._feeding.cancel()
            await asyncio.gather(self._feeding, return_exceptions=True)
        if not self._last_call:
            self._last_call = asyncio.get_running_loop().call_later(LAST_S, self._give_up_last)
            if not self._sent.is_finished:
                await self.finish()

    def _give_up_last(self) -> None:
        self._last_call = None
        self._num_given_up += 1
        self._found.put_nowait(None)

    def feed(self, pieces: AsyncIterable[Audio] | Iterable[Audio]) -> None:
        """Send pieces of audio in the background as they arrive, then call `finish`.

        Args:
            pieces: Mono audio. An iterable that is not asynchronous is read in a worker thread.

        Raises:
            RuntimeError: Another `feed` is still running.
        """
        if self._feeding and not self._feeding.done():
            raise RuntimeError("another `feed` is still running")
        self._feeding = asyncio.create_task(self._feed(pieces))

    async def _feed(self, pieces: AsyncIterable[Audio] | Iterable[Audio]) -> None:
        async for audio in pieces if isinstance(pieces, AsyncIterable) else _taken(iter(pieces)):
            await self.send(audio)
        await self.finish()

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield words as the server sends them, until the transcript is complete.

        Raises:
            SessionEnded: The captions are over, or the server reported an error.
            Exception: Whatever `feed` raised in the background.
        """
        if self._begins_anew:
            self.text, self.words, self._begins_anew = "", [], False
        while (found := await self._next()) is not None:
            delta, words = found
            self.text += delta
            self.words += words
            yield delta
        self._begins_anew = True

    async def _next(self) -> tuple[str, list[CaptionWord]] | None:
        """Return the next words; None at the end of a transcript. Raises SessionEnded, and what `feed` raised."""
        taking = asyncio.ensure_future(self._found.get())
        try:
            if feeding := self._feeding:
                await asyncio.wait({taking, feeding}, return_when=asyncio.FIRST_COMPLETED)
                if feeding.done():
                    self._feeding = None
                    if not feeding.cancelled():
                        feeding.result()
            found = await taking
        finally:
            taking.cancel()
        if isinstance(found, SessionEnded):
            if found is self._over:
                self._found.put_nowait(found)
            raise found
        return found

    async def close(self) -> None:
        """End the transcription and close its connection. Words that have not arrived are lost."""
        tasks = [task for task in (self._feeding, self._reading) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._last_call:
            self._last_call.cancel()
        self._end(SessionEnded("closed"))
        await self._link.close()

    # --- the sessions of the server -----------------------------------------------------------------------------------

    async def _push(self, entry: bytes | None) -> None:
        """Send audio, or None for the end of a transcript, to this session or the next one. Raises SessionEnded."""
        self._sent.add(entry)
        while True:
            renewed = self._renewed
            try:
                return await self._give()
            except SessionEnded:
                if not self._over:
                    await renewed.wait()
                if self._over:
                    raise self._over from None

    async def _give(self) -> None:
        """Send the session all entries that it has not been sent. Raises SessionEnded if it is over."""
        async with self._giving:
            while (more := self._sent.next())[0]:
                pcm = more[1]
                # Count the entry before sending it, because its words may arrive before `send` returns. If the session
                # ends first, everything is sent again to another session.
                self._sent.num_given += 1
                if pcm is None:
                    await self._link.send({"type": "input_audio_buffer.commit", "final": True})
                elif pcm:
                    await self._link.send({"type": "input_audio_buffer.append", "audio": encoded(pcm)})

    async def _read(self) -> None:
        """Receive messages from the session, and from its successors when it ends."""
        wait_s = FIRST_WAIT_S
        try:
            while True:
                settled = self._settled
                try:
                    await self._give()
                    while True:
                        self._take(await self._link.receive())
                except SessionEnded as ended:
                    if ended.code not in ENDS_A_SESSION:
                        raise
                    log.info("captions continue in another session: %s", ended)
                    # Back off while sessions end without a word.
                    wait_s = FIRST_WAIT_S if self._settled > settled else min(2 * wait_s, MAX_WAIT_S)
                    await self._renew(wait_s)
        except SessionEnded as ended:
            self._end(ended)

    async def _renew(self, wait_s: float) -> None:
        """Begin another session. Raises SessionEnded after a final refusal, or after `give_up_s` of refusals."""
        begun_s = time.monotonic()
        await self._link.close()
        while True:
            link = self._open_link()
            link.start()
            try:
                await self._configure(link)
                break
            except BaseException as error:
                await link.close()
                waits_s = error.retry_after_s if isinstance(error, SessionEnded) else None
                if waits_s is None or time.monotonic() - begun_s > self._give_up_s:
                    raise
            await asyncio.sleep(max(wait_s * random.uniform(0.5, 1.0), waits_s))
            wait_s = min(2 * wait_s, MAX_WAIT_S)
        # The lock is free only after the task that sent to the previous session has noticed its end.
        async with self._giving:
            self._base = self._sent.restart(self._settled)
            self._link, self._joins = link, self._has_words
        self.num_sessions += 1
        renewed, self._renewed = self._renewed, asyncio.Event()
        renewed.set()

    def _take(self, message: ServerMessage | bytes) -> None:
        """Handle one message. Raises SessionEnded for an error that ends the session."""
        try:
            _raise_error(message)
        except SessionEnded as refused:
            if refused.code in ENDS_A_SESSION:
                raise
            self._found.put_nowait(refused)
            return
        assert isinstance(message, dict)
        self._warn(message)
        if message.get("type") == "transcription.delta":
            self._heard(message)
        elif message.get("type") == "transcription.done":
            self._sent.done()
            self._has_words = self._joins = False
            if self._num_given_up:
                self._num_given_up -= 1
                return
            if self._last_call:
                self._last_call.cancel()
                self._last_call = None
            self._found.put_nowait(None)

    def _heard(self, message: ServerMessage) -> None:
        base_s, delta = self._base / BYTES_PER_S, str(message["delta"])
        words = [
            CaptionWord(str(w["word"]), base_s + w["start"], base_s + w["end"]) for w in message.get("words") or ()
        ]
        if words:
            # Rounded to a whole sample of two bytes.
            self._settled = max(self._settled, 2 * round(words[-1].end_s * RATE_HZ))
            self._sent.settle(self._settled)
        if self._joins and delta and not delta[0].isspace():
            delta = f" {delta}"
        self._has_words, self._joins = True, False
        self._found.put_nowait((delta, words))

    def _end(self, ended: SessionEnded) -> None:
        if not self._over:
            self._over = ended
            self._found.put_nowait(ended)
            self._renewed.set()


def _raise_error(message: ServerMessage | bytes) -> None:
    if isinstance(message, dict) and message.get("type") == "error":
        raise SessionEnded(str(message.get("code") or "error"), str(message.get("error") or ""))


async def _taken(pieces: Iterator[Audio]) -> AsyncIterator[Audio]:
    """Read each piece in a worker thread, because an iterator over a microphone blocks."""
    done = object()
    while (audio := await asyncio.to_thread(next, pieces, done)) is not done:
        yield audio  # type: ignore[misc]
