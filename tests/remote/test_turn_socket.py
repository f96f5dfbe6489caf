"""A turn detector behind a WebSocket: what it gets while a turn is said, and what counts as no answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Response

from antiphon.audio.pcm import from_pcm16
from antiphon.errors import RemoteError
from antiphon.pipelines.turn_blend import BlendPart, TurnBlend
from antiphon.remote import turn_socket
from antiphon.remote.turn_socket import RemoteTurnSocket

TURN = np.linspace(-0.5, 0.5, 32_000).astype(np.float32)
Reply = Callable[[ServerConnection, int], Awaitable[None]]


@dataclass
class Detector:
    """A real server, which keeps what it gets: the turns of each connection, and the headers."""

    reply: Reply
    turns: list[list[np.ndarray]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, socket: ServerConnection) -> None:
        assert socket.request
        self.keys.append(socket.request.headers.get("Authorization"))
        assert json.loads(await socket.recv()) == {"type": "start", "sample_rate": 16000, "encoding": "pcm_s16le"}
        self.turns.append([])
        async for message in socket:
            if isinstance(message, bytes):
                self.turns[-1][-1] = np.concatenate((self.turns[-1][-1], from_pcm16(message)))
            elif json.loads(message)["type"] == "turn":
                self.turns[-1].append(np.zeros(0, np.float32))
            else:
                await self.reply(socket, json.loads(message)["id"])
        self.closed.set()


async def judged(socket: ServerConnection, number: int) -> None:
    # An answer to an earlier request comes late.
    for id, probability in ((number - 1, 0.1), (number, 0.75)):
        await socket.send(json.dumps({"type": "prediction", "id": id, "probability": probability}))


@asynccontextmanager
async def running(reply: Reply = judged):
    detector = Detector(reply)
    async with serve(detector.serve, "127.0.0.1", 0) as server:
        yield detector, f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/turns"


def test_each_sample_of_a_turn_is_sent_once_and_another_turn_begins_anew() -> None:
    async def main() -> None:
        async with running() as (detector, url):
            stream = RemoteTurnSocket(url, "K").open()
            await stream.follow(5, TURN[:8000])
            await stream.follow(5, TURN[:16000])
            assert await stream.complete(5, TURN[:16320]) == 0.75
            assert await stream.complete(90, TURN[:4000]) == 0.75
            await stream.close()
            assert detector.keys == ["Bearer K"]
            (turns,) = detector.turns
            assert [len(turn) for turn in turns] == [16320, 4000]
            assert np.abs(turns[0] - TURN[:16320]).max() < 1e-4

    asyncio.run(main())


def test_a_detector_without_a_session_gets_the_last_seconds_and_a_connection_of_its_own() -> None:
    async def main() -> None:
        async with running() as (detector, url):
            assert await RemoteTurnSocket(url).complete(np.zeros(10 * 16000, np.float32)) == 0.75
            await asyncio.wait_for(detector.closed.wait(), 5)
            assert (len(detector.turns[0][0]), detector.keys) == (8 * 16000, [None])

    asyncio.run(main())


@pytest.mark.parametrize("answer", ["no", "{}", '{"type": "prediction", "id": 1}', "x" * (1 << 17)])
def test_any_other_answer_is_a_failure_and_the_next_pause_is_judged_by_a_new_connection(answer: str) -> None:
    async def main() -> None:
        async def reply(socket: ServerConnection, number: int) -> None:
            await (socket.send(answer) if number == 1 else judged(socket, number))

        async with running(reply) as (detector, url):
            stream = RemoteTurnSocket(url).open()
            with pytest.raises(RemoteError, match="no judgement"):
                await stream.complete(0, TURN)
            assert await stream.complete(0, TURN) == 0.75
            assert [len(turns[0]) for turns in detector.turns] == [len(TURN), len(TURN)]
            await stream.close()

    asyncio.run(main())


def test_a_server_that_hangs_or_dies_is_given_up_and_the_others_judge(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turn_socket, "ANSWER_S", 0.02)

    class Sure:
        async def complete(self, pcm: np.ndarray) -> float:
            return 0.9

    async def silent(socket: ServerConnection, number: int) -> None:
        """Answer nothing."""

    async def main() -> list[float]:
        async with running(silent) as (_, url):
            parts = [BlendPart("far", RemoteTurnSocket(url)), BlendPart("near", Sure())]
            stream = TurnBlend(parts).open()
            found = [await stream.complete(0, TURN)]
        # The server is gone.
        return [*found, await stream.complete(0, TURN), await stream.complete(0, TURN)]

    assert asyncio.run(main()) == [0.9, 0.9, 0.9]
    assert [r.message for r in caplog.records if "without far (error)" in r.message] == [
        "turns are decided without far (error): the turn detector's server gave no judgement (TimeoutError)"
    ]


def test_a_redirect_is_not_followed() -> None:
    async def main() -> None:
        async with running() as (detector, url):
            moved = Response(302, "Found", Headers({"Location": url}))
            async with serve(detector.serve, "127.0.0.1", 0, process_request=lambda *_: moved) as server:
                port = server.sockets[0].getsockname()[1]
                with pytest.raises(RemoteError, match="302"):
                    await RemoteTurnSocket(f"ws://127.0.0.1:{port}/turns", "K").open().complete(0, TURN)
            assert detector.keys == []

    asyncio.run(main())


def test_an_idle_connection_is_closed_and_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_socket, "IDLE_S", 0.01)

    async def main() -> None:
        async with running() as (detector, url):
            stream = RemoteTurnSocket(url).open()
            await stream.complete(0, TURN[:8000])
            await asyncio.wait_for(detector.closed.wait(), 5)
            assert await stream.complete(0, TURN[:9000]) == 0.75
            assert [len(turns[0]) for turns in detector.turns] == [8000, 9000]
            await stream.close()

    asyncio.run(main())
