"""Servers that fail in every phase of a turn: another one gets the whole turn, and the stream stays usable.

The servers are real (another antiphon with a scripted transcriber, a scripted Wyoming server), and fail by a proxy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import TranscriptionStream, Window
from antiphon.errors import ModelError, Refused
from antiphon.remote.transcriber.transcriber import RemoteTranscriber
from tests.contracts.transcribers import ScriptedWyoming, remote
from tests.remote.transcriber.faults import Fault, FaultProxy, on_a_port
from tests.scripted import speech
from tests.server.scripted import serving

LIMIT_S = 30
STEP = SAMPLE_RATE_HZ * 2 // 5
NUM_WORDS = 8
# The end of the URL by kind of server.
PATHS = {"streaming": "/v1", "rest": "/v1/audio/transcriptions"}
FAULTS: tuple[Fault, ...] = ("killed", "hung", "garbage", "429", "500")
PHASES = ("start", "middle", "end")


def is_light(kind: str, fault: Fault, phase: str) -> bool:
    """Return whether a case runs each time."""
    if kind == "streaming":
        return phase == "middle" or fault == "killed"
    return (fault, phase) == ("killed", "middle")


CASES = [
    pytest.param(kind, fault, phase, marks=() if is_light(kind, fault, phase) else pytest.mark.heavy)
    for kind in ("streaming", "rest", "wyoming")
    for fault in FAULTS
    for phase in PHASES
    if kind != "wyoming" or fault not in ("429", "500")
]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, int]]:
    """The ports of a real server of each kind."""
    with serving() as (url, _, _), on_a_port(ScriptedWyoming("default").serve) as wyoming:
        yield {"http": int(url.rpartition(":")[2]), "tcp": wyoming}


@contextmanager
def behind_a_proxy(
    servers: dict[str, int], kind: str, *, second: bool, answer_s: float = 20.0
) -> Iterator[tuple[RemoteTranscriber, FaultProxy]]:
    """Yield a transcriber whose first server fails by the proxy, and perhaps a second server that does not."""
    scheme, path = ("tcp", "") if kind == "wyoming" else ("http", PATHS[kind])
    proxy = FaultProxy(servers[scheme])
    with on_a_port(proxy.serve) as port:
        urls = [f"{scheme}://127.0.0.1:{port}{path}"]
        urls += [f"{scheme}://127.0.0.1:{servers[scheme]}{path}"] if second else []
        yield remote(*urls, answer_s=answer_s), proxy


def run(transcriber: RemoteTranscriber, use: Awaitable[Any]) -> Any:
    async def main() -> Any:
        try:
            return await use
        finally:
            await transcriber.pool.close()

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def sent_words(stream: TranscriptionStream, pcm: Pcm) -> AsyncGenerator[list[str], None]:
    """Decode partials of a window as it grows. Yield the words that a session would have sent so far, after each."""
    prefix, words = tuple[int, ...](), list[str]()
    for end in range(STEP, len(pcm) + STEP, STEP):
        try:
            found = await stream.decode(Window(pcm[:end], prefix=prefix))
        except (ModelError, Refused):
            yield words
            continue
        # All but the newest word.
        for piece in found.pieces[:-1]:
            prefix += piece.tokens
            words.append(piece.text.strip())
        yield words


async def turn(stream: TranscriptionStream, fail: Any, phase: str) -> tuple[list[str], list[str]]:
    """Speak a turn, with a fault in one phase. Return the words that were sent, and those of the final."""
    pcm, sent = speech(1, NUM_WORDS, silence_frames=6), list[list[str]]()
    if phase == "start":
        fail()
    async for words in sent_words(stream, pcm):
        sent.append(words)
        if phase == "middle" and len(sent) == NUM_WORDS // 2:
            fail()
    if phase == "end":
        fail()
    final = await stream.decode(Window(pcm, final=True))
    return sent[-1], [piece.text.strip() for piece in final.pieces]


@pytest.fixture(autouse=True)
def _faster(monkeypatch: pytest.MonkeyPatch) -> None:
    # Here, audio arrives faster than it is spoken.
    monkeypatch.setattr("antiphon.remote.transcriber.transcriber.NEWS_S", 0.02)
    monkeypatch.setattr("antiphon.remote.transcriber.pace.REST", 0.0)


@pytest.mark.parametrize(("kind", "fault", "phase"), CASES)
def test_when_a_server_fails_the_other_one_gets_the_whole_turn(
    servers: dict[str, int], kind: str, fault: Fault, phase: str
) -> None:
    # Only a server that hangs is found by a deadline.
    with behind_a_proxy(servers, kind, second=True, answer_s=1.0 if fault == "hung" else 20.0) as (transcriber, proxy):
        stream = transcriber.open()
        sent, final = run(transcriber, turn(stream, lambda: proxy.set(fault), phase))
        names = [f"w{n}" for n in range(1, NUM_WORDS + 1)]
        assert final == names
        assert sent == names[: len(sent)]


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("streaming", "killed"),
        ("rest", "500"),
        *(pytest.param("streaming", fault, marks=pytest.mark.heavy) for fault in FAULTS[1:]),
        *(pytest.param("rest", fault, marks=pytest.mark.heavy) for fault in FAULTS[:-1]),
    ],
)
def test_when_the_only_server_fails_the_turn_fails_and_the_stream_works_when_it_is_back(
    servers: dict[str, int], kind: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.remote.breaker.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("antiphon.remote.breaker.MAX_PAUSE_S", 0.02)
    monkeypatch.setattr("antiphon.remote.breaker.Breaker.open", lambda *_: 0.0)

    async def use(stream: TranscriptionStream) -> list[str]:
        with pytest.raises((ModelError, Refused)):
            await turn(stream, lambda: proxy.set(fault), "middle")
        proxy.set("none")
        await asyncio.sleep(0.05)
        second = await turn(stream, lambda: None, "start")
        return second[1]

    answer_s = 1.0 if fault == "hung" else 20.0
    with behind_a_proxy(servers, kind, second=False, answer_s=answer_s) as (transcriber, proxy):
        assert run(transcriber, use(transcriber.open())) == [f"w{n}" for n in range(1, NUM_WORDS + 1)]


def test_an_answer_of_two_gigabytes_is_not_read(servers: dict[str, int]) -> None:
    with behind_a_proxy(servers, "rest", second=False) as (transcriber, proxy):
        proxy.set("endless")
        with pytest.raises(Refused, match="bytes in one answer"):
            run(transcriber, transcriber.open().decode(Window(speech(1, 3), final=True)))
        assert proxy.num_sent < 64 << 20


@pytest.mark.parametrize("kind", ["streaming", "rest"])
def test_a_redirect_to_another_host_is_not_followed(servers: dict[str, int], kind: str) -> None:
    caught = FaultProxy(servers["http"])
    with behind_a_proxy(servers, kind, second=False) as (transcriber, proxy), on_a_port(caught.serve) as port:
        proxy.elsewhere = port
        proxy.set("redirect")
        with pytest.raises(Refused, match="a redirect, which is not followed"):
            run(transcriber, transcriber.open().decode(Window(speech(1, 3), final=True)))
    assert caught.num_connections == 0
