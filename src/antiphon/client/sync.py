"""The blocking client, for programs without an event loop: the same sessions, with methods that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from antiphon.client.audio import Audio
from antiphon.client.captions import CaptionWord, ClientCaptions
from antiphon.client.client import DEFAULT_URL, Client
from antiphon.client.conversation import ClientConversation
from antiphon.client.events import ConversationEvent
from antiphon.client.link import ServerWarning
from antiphon.client.speech import ClientSpeech, SpeechAudio
from antiphon.client.video import ClientVideo

T = TypeVar("T")
P = ParamSpec("P")
Run = Callable[[Coroutine[Any, Any, Any]], Any]


class _Entered(Protocol):
    warnings: list[ServerWarning]

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


S = TypeVar("S", bound=_Entered)


class _Blocking(Generic[S]):
    """A session that runs on the event loop's thread and is used from other threads.

    Several threads may share one session: one thread iterates, the others send.
    """

    def __init__(self, session: S, run: Run) -> None:
        self._session, self._run = session, run

    @property
    def warnings(self) -> list[ServerWarning]:
        """The server's warnings: one for each requested field that it ignored."""
        return self._session.warnings

    def __enter__(self) -> Self:
        self._run(self._session.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._session.__aexit__(kind, error, trace))

    def _each(self, items: AsyncIterator[T]) -> Iterator[T]:
        while True:
            try:
                yield self._run(_next(items))
            except StopAsyncIteration:
                return


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)


def _blocking(method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[_Blocking[S], P], T]:
    """Return the blocking version of a session's coroutine method."""

    @wraps(method)
    def call(self: _Blocking[S], /, *args: P.args, **options: P.kwargs) -> T:
        result: T = self._run(method(self._session, *args, **options))
        return result

    return call


class SyncConversation(_Blocking[ClientConversation]):
    """A ClientConversation with methods that block instead of coroutines."""

    send_audio = _blocking(ClientConversation.send_audio)
    send_text = _blocking(ClientConversation.send_text)
    end_turn = _blocking(ClientConversation.end_turn)
    interrupt = _blocking(ClientConversation.interrupt)
    respond = _blocking(ClientConversation.respond)
    configure = _blocking(ClientConversation.configure)
    played = _blocking(ClientConversation.played)

    def __iter__(self) -> Iterator[ConversationEvent]:
        """Yield the conversation's events. After a loop that ended early, the next loop continues with the next event.

        Raises:
            SessionEnded: The session ended before it was closed.
        """
        return self._each(aiter(self._session))


class SyncCaptions(_Blocking[ClientCaptions]):
    """A ClientCaptions with methods that block instead of coroutines."""

    send = _blocking(ClientCaptions.send)
    finish = _blocking(ClientCaptions.finish)
    stop = _blocking(ClientCaptions.stop)
    configure = _blocking(ClientCaptions.configure)

    @property
    def text(self) -> str:
        """The text of all words since the last `finish`."""
        return self._session.text

    @property
    def words(self) -> list[CaptionWord]:
        """All words since the last `finish`, with their times."""
        return self._session.words

    def feed(self, pieces: Iterable[Audio]) -> None:
        """Send pieces of audio in the background, then call `finish`. The iterable is read in a worker thread.

        Args:
            pieces: Mono audio; each piece is sent as the iterable yields it.

        Raises:
            RuntimeError: Another `feed` is still running.
        """
        self._run(_begin(self._session, pieces))

    def __iter__(self) -> Iterator[str]:
        """Yield words as the server sends them, until the transcript is complete.

        Raises:
            SessionEnded: The session ended, or the server reported an error.
        """
        return self._each(aiter(self._session))


class SyncSpeech(_Blocking[ClientSpeech]):
    """A ClientSpeech with methods that block instead of coroutines."""

    say = _blocking(ClientSpeech.say)
    finish = _blocking(ClientSpeech.finish)
    cancel = _blocking(ClientSpeech.cancel)

    def __iter__(self) -> Iterator[SpeechAudio]:
        """Yield the utterance's audio as the server generates it.

        Raises:
            SessionEnded: The server refused the request, or could not speak a sentence.
        """
        return self._each(aiter(self._session))


class SyncVideo(_Blocking[ClientVideo]):
    """A ClientVideo with methods that block instead of coroutines."""

    show = _blocking(ClientVideo.show)
    ask = _blocking(ClientVideo.ask)

    def stream(self, question: str) -> Iterator[str]:
        """Ask a question and yield the words of its answer as they arrive; see `ClientVideo.stream`."""
        return self._each(self._session.stream(question))


class SyncClient:
    """A Client whose sessions block. It is entered with `with`. An event loop runs in a thread until the block ends.

    The constructor and the methods take the same arguments as those of `Client`.
    """

    def __init__(self, url: str = DEFAULT_URL, key: str | None = None, **options: Any) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client = Client(url, key, **options)

    def __enter__(self) -> Self:
        self._loop = loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="antiphon-client", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run(self._client.__aexit__(kind, error, trace))
            self._run(_cancel_all())
        finally:
            loop, self._loop = self._loop, None
            assert loop
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()

    def conversation(self, **options: Any) -> SyncConversation:
        """Return a conversation, which is then entered with `with`. Takes the arguments of `Client.conversation`."""
        return SyncConversation(self._client.conversation(**options), self._run)

    def captions(self, **options: Any) -> SyncCaptions:
        """Return a live transcription, which is then entered with `with`. Takes the arguments of `Client.captions`."""
        return SyncCaptions(self._client.captions(**options), self._run)

    def speech(self, **options: Any) -> SyncSpeech:
        """Return a speech stream, which is then entered with `with`. Takes the arguments of `Client.speech`."""
        return SyncSpeech(self._client.speech(**options), self._run)

    def video(self, **options: Any) -> SyncVideo:
        """Return a video session, which is then entered with `with`. Takes the arguments of `Client.video`."""
        return SyncVideo(self._client.video(**options), self._run)

    def transcribe(self, file: str | Path | bytes, **options: Any) -> str:
        """Return the transcript of an audio file; see `Client.transcribe`."""
        return str(self._run(self._client.transcribe(file, **options)))

    def speak(self, text: str, **options: Any) -> bytes:
        """Return a text as a file of speech; see `Client.speak`."""
        return bytes(self._run(self._client.speak(text, **options)))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._loop:
            work.close()
            raise RuntimeError("use a SyncClient within its `with` block")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except (KeyboardInterrupt, CancelledError):
            future.cancel()
            raise


async def _begin(session: ClientCaptions, pieces: Iterable[Audio]) -> None:
    session.feed(pieces)


async def _cancel_all() -> None:
    """Cancel all other tasks on this event loop: calls from other threads, and leftover tasks of sessions."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
