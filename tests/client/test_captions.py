"""Captions of our own client continue when the server's sessions end, and are complete before they stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from antiphon.audio import Pcm
from antiphon.client import Client, ClientCaptions, SessionEnded, SyncClient
from antiphon.client import captions as client_captions
from antiphon.client.captions import BYTES_PER_S, SentAudio
from antiphon.client.link import ResumingLink
from antiphon.settings import Settings
from tests.scripted import speech, text
from tests.server.scripted import serving

LIMIT_S = 60
WORD_S = 0.32


@pytest.fixture(scope="module")
def scripted() -> Iterator[str]:
    with serving() as (url, _, _):
        yield url.replace("ws", "http", 1)


def of_server(**values: Any) -> Settings:
    return replace(Settings(), server=replace(Settings().server, **values))


def captioned(url: str, use: Callable[[ClientCaptions], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with Client(url, **options) as client, client.captions() as captions:
            return await use(captions)

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def all_words(captions: ClientCaptions) -> str:
    return " ".join("".join([delta async for delta in captions]).split())


def pieces(pcm: Pcm, size: int = 3200) -> list[Pcm]:
    return [pcm[at : at + size] for at in range(0, len(pcm), size)]


def times(captions: ClientCaptions) -> list[float]:
    return [word.start_s for word in captions.words]


async def ended_by(captions: ClientCaptions, code: str) -> None:
    """End the current session as the server would."""
    captions.link.end(SessionEnded(code))


CODES = ("session_expired", "server_shutting_down", "unknown_session", "resync_required", "client_gap")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("at", [1, 7, 12])
def test_another_session_goes_on_with_what_has_no_words_yet(at: int, code: str, scripted: str) -> None:
    """Each word arrives once, with its position in all audio, whatever ends the session after a piece."""

    async def use(captions: ClientCaptions) -> tuple[str, list[float], int]:
        for number, piece in enumerate(pieces(speech(1, 10, silence_frames=40))):
            if number == at:
                await ended_by(captions, code)
            await captions.send(piece)
        await captions.finish()
        return await all_words(captions), times(captions), captions.num_sessions

    words, starts, num_sessions = captioned(scripted, use)
    assert words == text(1, 10)
    assert starts == pytest.approx([WORD_S * k for k in range(10)], abs=0.01)
    assert num_sessions == 2


@pytest.mark.parametrize("size", [2000, 3200, 100_000])
def test_what_has_its_words_is_not_said_again_by_another_session(size: int, scripted: str) -> None:
    async def use(captions: ClientCaptions) -> tuple[str, list[float], int]:
        found = []
        for first in (1, 6, 11):
            for piece in pieces(speech(first, 5), size):
                await captions.send(piece)
            words = aiter(captions)
            found += [await anext(words)]
            await ended_by(captions, "session_expired")
        await captions.finish()
        await all_words(captions)
        return captions.text, times(captions), captions.num_sessions

    words, starts, num_sessions = captioned(scripted, use)
    assert words == text(1, 15)
    assert starts == pytest.approx([WORD_S * k for k in range(15)], abs=0.01)
    assert num_sessions == 4


def test_the_transcripts_of_captions_that_go_on_end_where_they_were_finished(scripted: str) -> None:
    async def use(captions: ClientCaptions) -> list[str]:
        found = []
        for first in (1, 30, 60):
            for piece in pieces(speech(first, 4, silence_frames=40)):
                await captions.send(piece)
            await captions.finish()
            await ended_by(captions, "session_expired")
            found.append(await all_words(captions))
        return found

    assert captioned(scripted, use) == [text(1, 4), text(30, 4), text(60, 4)]


def test_they_go_on_over_the_length_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a slow machine, the last words take more sessions of this length than fit into 2 s.
    monkeypatch.setattr(client_captions, "LAST_S", 30.0)

    async def use(captions: ClientCaptions) -> tuple[str, int]:
        await captions.send(speech(1, 4))
        while captions.num_sessions < 3:
            await captions.send(np.zeros(1600, np.float32))
        await captions.send(speech(5, 4, silence_frames=40))
        await captions.stop()
        return await all_words(captions), captions.num_sessions

    with serving(of_server(session_s=0.3)) as (url, _, _):
        words, num_sessions = captioned(url.replace("ws", "http", 1), use)
    assert words == text(1, 8)
    assert num_sessions >= 3


@pytest.mark.parametrize("says", ["nothing", "a line"])
def test_a_stop_ends_the_feeding_and_has_the_last_words(says: str, scripted: str) -> None:
    async def microphone() -> AsyncIterator[Pcm]:
        if says == "a line":
            yield speech(1, 5)
        was_heard.set()
        await asyncio.Event().wait()

    was_heard = asyncio.Event()

    async def use(captions: ClientCaptions) -> tuple[str, str]:
        captions.feed(microphone())
        await was_heard.wait()
        await asyncio.gather(captions.stop(), captions.stop())
        first = await all_words(captions)
        # `feed` may be called again.
        captions.feed(pieces(speech(20, 3)))
        return first, await all_words(captions)

    assert captioned(scripted, use) == (text(1, 5) if says == "a line" else "", text(20, 3))


def test_a_stop_does_not_wait_for_a_server_that_says_nothing(scripted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def is_lost(captions: ClientCaptions) -> None:
        return

    monkeypatch.setattr("antiphon.client.captions.LAST_S", 0.0)
    monkeypatch.setattr(ClientCaptions, "finish", is_lost)

    async def use(captions: ClientCaptions) -> str:
        await captions.stop()
        return await all_words(captions)

    assert captioned(scripted, use) == ""


def new_links_receive(
    monkeypatch: pytest.MonkeyPatch, captions: ClientCaptions, refusals: list[SessionEnded], *, always: bool
) -> None:
    """Make the sessions after this one fail: all with the first refusal if `always`, else one for each refusal."""
    receive = ResumingLink.receive

    async def refused(link: ResumingLink) -> dict[str, Any] | bytes:
        if link is not present and refusals:
            raise refusals[0] if always else refusals.pop()
        return await receive(link)

    present = captions.link
    monkeypatch.setattr(ResumingLink, "receive", refused)


@pytest.mark.parametrize(
    ("refusal", "code"),
    [(SessionEnded("invalid_api_key"), "invalid_api_key"), (SessionEnded("full", retry_after_s=0.0), "full")],
)
def test_a_server_that_refuses_another_session_ends_them_by_its_word(
    refusal: SessionEnded, code: str, scripted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(captions: ClientCaptions) -> None:
        new_links_receive(monkeypatch, captions, [refusal], always=True)
        await ended_by(captions, "session_expired")
        for again in (captions.send(speech(1, 2)), all_words(captions), all_words(captions)):
            with pytest.raises(SessionEnded) as ended:
                await again
            assert ended.value.code == code

    captioned(scripted, use, give_up_s=0.2)


def test_a_full_server_says_when_to_ask_again() -> None:
    async def main() -> float | None:
        async with Client(url) as client, client.captions():
            with pytest.raises(SessionEnded) as full:
                async with client.captions():
                    pass
        return full.value.retry_after_s

    with serving(of_server(max_sessions=1)) as (ws, _, _):
        url = ws.replace("ws", "http", 1)
        assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)) == 10


def test_a_server_that_is_full_for_a_while_is_asked_again(scripted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [SessionEnded("full", retry_after_s=0.0), SessionEnded("connection_lost", retry_after_s=0.0)]

    async def use(captions: ClientCaptions) -> str:
        new_links_receive(monkeypatch, captions, refusals, always=False)
        await ended_by(captions, "session_expired")
        await captions.send(speech(1, 3))
        await captions.finish()
        return await all_words(captions)

    assert captioned(scripted, use) == text(1, 3)
    assert not refusals


def test_two_captions_at_once_have_their_own_words(scripted: str) -> None:
    async def main() -> list[str]:
        async with Client(scripted) as client, client.captions() as one, client.captions() as two:
            for captions, first in ((one, 1), (two, 50)):
                captions.feed(pieces(speech(first, 6, silence_frames=20)))
            await ended_by(one, "session_expired")
            return [await all_words(captions) for captions in (one, two)]

    assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)) == [text(1, 6), text(50, 6)]


def test_the_language_is_changed_in_mid_call_or_refused_and_they_go_on(scripted: str) -> None:
    with SyncClient(scripted) as client, client.captions(language="en") as captions:
        captions.configure(language="xx")
        with pytest.raises(SessionEnded, match="Unsupported language: xx"):
            list(captions)
        captions.configure(language="")
        captions.send(speech(1, 3))
        captions.stop()
        assert "".join(captions).split() == text(1, 3).split()
        assert [word.text for word in captions.words] == text(1, 3).split()


def test_without_a_loop_another_thread_stops_them(scripted: str) -> None:
    was_heard = threading.Event()

    def microphone() -> Iterator[Pcm]:
        yield speech(1, 4)
        was_heard.set()
        yield np.zeros(0, np.float32)
        ended.wait()

    ended = threading.Event()
    with SyncClient(scripted) as client, client.captions() as captions:
        captions.feed(microphone())

        def stop() -> None:
            was_heard.wait()
            captions.stop()

        stopping = threading.Thread(target=stop)
        stopping.start()
        assert "".join(captions).split() == text(1, 4).split()
        stopping.join()
        ended.set()


def entries(sent: SentAudio) -> list[int | None]:
    found: list[int | None] = []
    while (more := sent.next())[0]:
        found.append(None if more[1] is None else len(more[1]))
        sent.num_given += 1
    return found


@pytest.mark.parametrize(
    ("settled", "restarts_at", "again"),
    [(0, 0, [200, None, 100]), (100, 100, [100, None, 100]), (150, 150, [50, None, 100]), (200, 200, [None, 100])],
)
def test_what_has_words_is_not_sent_again(settled: int, restarts_at: int, again: Sequence[int | None]) -> None:
    sent = SentAudio()
    for entry in (bytes(100), bytes(100), None, bytes(100)):
        sent.add(entry)
    assert entries(sent) == [100, 100, None, 100]
    sent.settle(settled)
    assert sent.restart(settled) == restarts_at
    assert entries(sent) == list(again)
    sent.done()
    assert sent.restart(settled) == 200
    assert entries(sent) == [100]


def test_of_hours_of_silence_five_minutes_are_kept() -> None:
    sent = SentAudio()
    for _ in range(1000):
        sent.add(bytes(BYTES_PER_S))
        entries(sent)
    assert sent.size == 300 * BYTES_PER_S
    assert sent.start == 700 * BYTES_PER_S
