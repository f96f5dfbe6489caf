"""Many connections resume the same sessions at once, at all hosts. Each gets a reply, and one gets the session.

The sockets and the hosts, which share a store, are real.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import websockets
from websockets.exceptions import ConnectionClosed

from tests.server.clients import Wire, connect
from tests.server.live.test_ownership import SESSION, Server, answer, last_seq, sharing

NUM_SESSIONS, NUM_AT_ONCE = 20, 10
LIMIT_S = 60.0
# The replies that are allowed: the session; "try again", because another connection was faster; "the token is
# outdated". A host has 64 places for connections without a first event, and tells further ones to try again (1013).
SERVED = {"attached", "relayed", "claimed"}
REFUSED = {"session_elsewhere", "invalid_resume_token", "session.replaced", "resource_exhausted", "closed 1013"}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Server]]:
    """Return three hosts that share a store and can reach each other."""
    with sharing(tmp_path, 3, reachable=True) as found:
        yield found


async def begun(host: Server, name: str) -> tuple[str, str, int]:
    """Begin a session, say a name in it, and wait for the answer. Return its id, its token and its last event."""
    async with connect(host.ws, "?resume=1") as wire:
        created = await wire.read()
        await wire.say("session.update", session=SESSION)
        assert await answer(wire, name) == name
        return created["session"]["id"], created["resume_token"], last_seq(wire)


async def storm(stack: AsyncExitStack, host: Server, session: tuple[str, str, int]) -> tuple[str, Wire | None]:
    """Resume a session. Return what the first frame says, and the connection if it got the session."""
    session_id, token, last = session
    socket = await stack.enter_async_context(
        websockets.connect(f"{host.ws}/v1/realtime?resume={session_id}", max_size=None, open_timeout=LIMIT_S)
    )
    wire = Wire(socket)
    about = {"session_id": session_id, "resume_token": token, "last_received_server_event_seq": last}
    try:
        await wire.say("session.resume", **about)
        frame = json.loads(await socket.recv())
    except ConnectionClosed as closed:
        return f"closed {closed.rcvd.code if closed.rcvd else 'without a word'}", None
    if frame["type"] == "session.resumed":
        return str(frame["how"]), wire
    return str(frame["error"]["code"] if frame["type"] == "error" else frame["type"]), None


async def alive(wire: Wire) -> bool:
    """Return whether a connection still has its session, whose answer then has the name that was said before."""
    try:
        return await answer(wire, "still") == "still"
    except ConnectionClosed:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True], ids=["the owner lives", "the owner is dead"])
def test_when_200_connections_resume_20_sessions_at_once_then_each_is_answered_and_each_session_is_served_once(
    hosts: list[Server], dies: bool
) -> None:
    one = hosts[0]
    at = hosts[1:] if dies else hosts

    async def main() -> None:
        sessions = [await begun(one, f"session-{n}") for n in range(NUM_SESSIONS)]
        if dies:
            one.state.sessions.store = None
            at[0].store.unregister(one.state.sessions.host_name)
        async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
            asked = [
                storm(stack, at[(n + k) % len(at)], session)
                for n, session in enumerate(sessions)
                for k in range(NUM_AT_ONCE)
            ]
            reported = await asyncio.gather(*asked)
            outcomes = Counter(what for what, _ in reported)
            assert set(outcomes) <= SERVED | REFUSED, outcomes
            served: list[Any] = []
            for n in range(NUM_SESSIONS):
                wires = [wire for _, wire in reported[n * NUM_AT_ONCE : (n + 1) * NUM_AT_ONCE] if wire]
                served.append(sum([await alive(wire) for wire in wires]))
            # Connections may get the session one after the other. The last of these has it.
            assert served == [1] * NUM_SESSIONS, (served, outcomes)
            owners = Counter(session_id for host in at for session_id in host.state.sessions.resumable)
            assert owners == Counter(session_id for session_id, _, _ in sessions)
            assert not any(host.state.sessions.restoring for host in at)

    asyncio.run(main())
