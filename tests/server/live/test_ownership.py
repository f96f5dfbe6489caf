"""Servers that share a store: one owns a session. The others refuse it until the owner is dead or releases it."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from antiphon.errors import StoreError, SupersededError
from antiphon.loading.loaded import LoadedModels
from antiphon.server.credentials import Credentials
from antiphon.server.live.moving import stored_row
from antiphon.server.live.moving.take_up import MAX_IDLE_RESTORES
from antiphon.server.state import ServerState
from antiphon.server.watches import as_host, keep_registered
from antiphon.store.sessions import ClaimRefusal, SessionStore, StoredSession, open_store
from antiphon.store.sessions.sqlite import FILE
from tests.server.clients import Wire, connect
from tests.server.scripted import serving, with_resume
from tests.store.sessions.test_contract import until

SESSION = {"type": "realtime", "output_modalities": ["text"]}


@dataclass
class Server:
    ws: str
    state: ServerState
    store: SessionStore
    # Drains the server.
    stop: ExitStack

    def row(self, session_id: str) -> StoredSession:
        found = self.store.get(session_id)
        assert found
        return found


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    """Yield two servers of one store that cannot reach each other."""
    with sharing(tmp_path, 2) as found:
        yield found


@contextmanager
def sharing(
    folder: Path, count: int, *, reachable: bool = False, models: Callable[[], LoadedModels] | None = None
) -> Iterator[list[Server]]:
    """Yield servers of one store, each with its own store object, host name and models."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            store = open_store(str(folder), 3600, 1000.0)
            stack.callback(store.close)
            stop = stack.enter_context(ExitStack())
            ws, state, _ = stop.enter_context(serving(models=models() if models else None))
            state.sessions.store = store
            state.sessions.address = ws.replace("ws", "http", 1) if reachable else ""
            store.renew(as_host(state))
            found.append(Server(ws, state, store, stop))
        yield found


async def say(wire: Wire, text: str) -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    await wire.say("conversation.item.create", item=item)


async def answer(wire: Wire, text: str) -> str:
    """Send a text, and return the answer of the model, which repeats it."""
    await say(wire, text)
    await wire.say("response.create")
    done = await wire.until("response.done")
    return str(done["response"]["output"][0]["content"][0]["text"])


@asynccontextmanager
async def conversation(server: Server) -> AsyncIterator[tuple[Wire, str, str]]:
    """Yield a conversation that has had an answer, its id and its token."""
    async with connect(server.ws, "?resume=1") as wire:
        created = await wire.read()
        await wire.say("session.update", session=SESSION)
        assert await answer(wire, "one two") == "one two"
        yield wire, created["session"]["id"], created["resume_token"]


@asynccontextmanager
async def resuming(
    server: Server, session_id: str, token: str, last_received: int = 0
) -> AsyncIterator[tuple[Wire, dict[str, Any]]]:
    """Yield a client that resumes, and the first frame that it receives."""
    async with connect(server.ws, f"?resume={session_id}") as wire:
        about = {"session_id": session_id, "resume_token": token, "last_received_server_event_seq": last_received}
        await wire.say("session.resume", **about)
        yield wire, await wire.read()


def last_seq(wire: Wire) -> int:
    """Return the number of the last received event."""
    return max(int(frame.get("server_event_seq", 0)) for frame in wire.seen)


async def refusal(server: Server, session_id: str, token: str) -> tuple[dict[str, Any], int]:
    """Try to resume; return the error and the close code."""
    async with resuming(server, session_id, token) as (wire, frame):
        with pytest.raises(ConnectionClosed):
            await wire.socket.recv()
        assert frame["type"] == "error", frame
        return frame["error"], int(wire.socket.close_code or 0)


def test_when_the_owner_lives_then_another_server_refuses_its_session_and_it_goes_on(servers: list[Server]) -> None:
    one, two = servers

    async def main() -> None:
        async with conversation(one) as (wire, session_id, token):
            row = one.row(session_id)
            assert (row.owner, row.fence, row.restores) == (one.state.sessions.host_name, 1, 0)
            assert row.received.events == 3
            error, code = await refusal(two, session_id, token)
            assert (error["code"], error["retryable"], code) == ("session_elsewhere", True, 1013)
            assert one.row(session_id) == row
            assert two.state.admission.num_sessions == 0
            assert await answer(wire, "three") == "three"

    asyncio.run(main())


def test_when_the_owner_is_dead_for_others_then_it_ends_its_session_and_acknowledges_nothing(
    servers: list[Server],
) -> None:
    """The owner was cut off from the store, and a supervisor reported it dead."""
    one, two = servers

    async def main() -> None:
        async with conversation(one) as (wire, session_id, token):
            two.store.unregister(one.state.sessions.host_name)
            async with resuming(two, session_id, token, last_seq(wire)) as (second, resumed):
                assert (resumed["type"], resumed["restored"], resumed["num_items"]) == ("session.resumed", True, 2)
                claimed = two.row(session_id)
                assert (claimed.owner, claimed.fence, claimed.restores) == (two.state.sessions.host_name, 2, 1)
                await say(wire, "lost")
                seen = len(wire.seen)
                replaced = await wire.until("session.replaced")
                assert replaced["session_id"] == session_id
                assert not [f["type"] for f in wire.seen[seen:] if f["type"].endswith("done")]
                with pytest.raises(ConnectionClosed):
                    await wire.socket.recv()
                assert wire.socket.close_code == 1000
                assert await answer(second, "three four") == "three four"
                latest = two.row(session_id)
                assert (latest.fence, latest.restores) == (2, 0)
                assert latest.received.events == claimed.received.events + 2
                assert b"lost" not in latest.snapshot
                # The first server deletes nothing from the store.
                assert one.state.admission.num_sessions == 0
                assert two.store.get(session_id)

    asyncio.run(main())


@pytest.mark.parametrize("is_heard", [False, True], ids=["with the token of before", "with the token of the claim"])
def test_when_a_client_comes_back_to_a_server_that_lost_its_session_then_it_is_carried_to_the_one_that_has_it(
    tmp_path: Path, *, is_heard: bool
) -> None:
    """The first server hung for longer than its lease, and does not know of the claim."""
    with sharing(tmp_path, 2, reachable=True) as (one, two):

        async def main() -> None:
            async with conversation(one) as (wire, session_id, token):
                wire.socket.transport.abort()
                two.store.unregister(one.state.sessions.host_name)
                async with resuming(two, session_id, token, last_seq(wire)) as (second, resumed):
                    assert resumed["how"] == "claimed"
                    if is_heard:
                        assert await answer(second, "three") == "three"
                        token = resumed["resume_token"]
                    last = last_seq(second) if is_heard else last_seq(wire)
                    second.socket.transport.abort()
                    async with resuming(one, session_id, token, last) as (third, again):
                        assert (again["type"], again.get("how")) == ("session.resumed", "relayed")
                        assert await answer(third, "four") == "four"
                assert two.row(session_id).owner == two.state.sessions.host_name
                assert session_id not in one.state.sessions.resumable

        asyncio.run(main())


def test_when_the_store_cannot_say_who_has_a_session_then_it_goes_on_where_it_is(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = servers

    def fails(_: str) -> StoredSession | None:
        raise StoreError("the disk is slow")

    async def main() -> None:
        async with conversation(one) as (wire, session_id, token):
            wire.socket.transport.abort()
            monkeypatch.setattr(one.store, "get", fails)
            async with resuming(one, session_id, token, last_seq(wire)) as (again, resumed):
                assert resumed["how"] == "attached"
                assert await answer(again, "three") == "three"

    asyncio.run(main())


def test_when_a_server_drains_then_the_next_one_has_its_sessions_at_once(servers: list[Server]) -> None:
    one, two = servers

    async def main() -> None:
        async with conversation(one) as (wire, session_id, token):
            await asyncio.to_thread(one.stop.close)
            await wire.until("session.moving")
            row = two.row(session_id)
            assert (row.owner, row.fence) == ("", 1)
            assert two.store.host(one.state.sessions.host_name)
            async with resuming(two, session_id, token) as (second, resumed):
                assert (resumed["num_items"], resumed["how"]) == (2, "handed_over")
                assert two.row(session_id).fence == 2
                # This client has received nothing, so it gets all events of the first server, then the new ones.
                missed = await second.until("response.done")
                assert missed["response"]["output"][0]["content"][0]["text"] == "one two"
                assert await answer(second, "three") == "three"

    asyncio.run(main())


def test_when_a_hand_over_is_replayed_then_it_is_refused_and_the_session_goes_on(servers: list[Server]) -> None:
    """Attempts come from a client with the previous token, and from the previous owner, which writes its old state."""
    one, two = servers

    async def main() -> None:
        async with conversation(one) as (wire, session_id, token):
            await asyncio.to_thread(one.stop.close)
            await wire.until("session.moving")
            before = two.row(session_id)
            async with resuming(two, session_id, token) as (second, _):
                await second.until("response.done")
                assert await answer(second, "three") == "three"
                error, _ = await refusal(two, session_id, token)
                assert error["code"] == "invalid_resume_token"
                assert isinstance(two.store.claim(session_id, "another/1", before.fence), ClaimRefusal)
                for fence in (1, 2):
                    stale = replace(before, owner=one.state.sessions.host_name, fence=fence)
                    with pytest.raises(SupersededError):
                        two.store.put(stale).result(10)
                assert await answer(second, "four") == "four"
                assert (two.row(session_id).fence, two.row(session_id).owner) == (2, two.state.sessions.host_name)

    asyncio.run(main())


@pytest.mark.parametrize(("harmless_s", "restores"), [(60.0, 1), (0.0, 0)])
def test_a_session_in_which_nobody_speaks_counts_as_harmless_in_time(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, harmless_s: float, restores: int
) -> None:
    one, two = servers
    monkeypatch.setattr(stored_row, "HARMLESS_S", harmless_s)

    async def main() -> None:
        async with conversation(one) as (wire, session_id, token):
            two.store.unregister(one.state.sessions.host_name)
            async with resuming(two, session_id, token, last_seq(wire)) as (_, resumed):
                assert resumed["how"] == "claimed"
                assert two.row(session_id).restores == restores

    asyncio.run(main())


@pytest.mark.parametrize(
    ("column", "value", "code"),
    [
        ("restores", MAX_IDLE_RESTORES, "restored_too_often"),
        ("version", 7, "unknown_session"),
        ("fence", "?", "unknown_session"),
        ("kept", b"\xff", "unknown_session"),
        ("who", "another key", "unknown_session"),
        ("token", b"another token", "invalid_resume_token"),
    ],
)
def test_when_a_row_is_bad_or_of_others_then_it_is_refused_by_name_and_stays(
    servers: list[Server], tmp_path: Path, column: str, value: Any, code: str
) -> None:
    one, two = servers

    async def main() -> None:
        async with conversation(one) as (_, session_id, token), conversation(one) as (other, *_):
            one.store.unregister(one.state.sessions.host_name)
            with closing(sqlite3.connect(tmp_path / FILE)) as db:
                db.execute(f"update sessions set {column} = ? where id = ?", (value, session_id))
                db.commit()
            error, _ = await refusal(two, session_id, token)
            assert error["code"] == code
            with closing(sqlite3.connect(tmp_path / FILE)) as db:
                found = db.execute(f"select {column} from sessions where id = ?", (session_id,)).fetchone()
            assert found == (value,)
            assert two.state.admission.num_sessions == 0
            assert await answer(other, "still here") == "still here"

    asyncio.run(main())


def test_when_another_key_names_a_session_then_its_owners_resume_does_not_wait_for_that(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = servers
    for server in servers:
        server.state.credentials = Credentials(("alice", "bob"), server.state.memory)
    read, asked, gate = two.store.get, threading.Event(), threading.Event()

    def slow_at_first(session_id: str) -> StoredSession | None:
        if not asked.is_set():
            asked.set()
            assert gate.wait(10)
        return read(session_id)

    def as_key(server: Server, key: str, query: str) -> AbstractAsyncContextManager[Wire]:
        return connect(server.ws, query, additional_headers={"Authorization": f"Bearer {key}"})

    async def main() -> None:
        async with as_key(one, "alice", "?resume=1") as wire:
            created = await wire.read()
            await wire.say("session.update", session=SESSION)
            await answer(wire, "one two")
            session_id, token, seq = created["session"]["id"], created["resume_token"], last_seq(wire)
            one.store.unregister(one.state.sessions.host_name)
            monkeypatch.setattr(two.store, "get", slow_at_first)
            async with as_key(two, "bob", "?duplex=1") as stranger, as_key(two, "alice", "?duplex=1") as owner:
                await stranger.say("session.resume", session_id=session_id, resume_token="x" * 32)
                await asyncio.to_thread(asked.wait, 10)
                about = {"session_id": session_id, "resume_token": token, "last_received_server_event_seq": seq}
                await owner.say("session.resume", **about)
                assert (await owner.read()).get("how") == "claimed"
                gate.set()
                assert (await stranger.read())["error"]["code"] == "unknown_session"

    try:
        asyncio.run(main())
    finally:
        gate.set()


def test_when_the_store_can_be_had_again_then_the_host_is_registered_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(str(tmp_path), 3600, 1000.0)
    with (
        serving(with_resume(host_ttl_s=0.1)) as (_, state, _),
        closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other,
    ):

        async def main() -> None:
            other.execute("begin immediate")
            task = asyncio.create_task(keep_registered(state, store))
            await asyncio.to_thread(until, lambda: "cannot be renewed" in caplog.text)
            assert store.host(state.sessions.host_name) is None
            other.execute("rollback")
            await asyncio.to_thread(until, lambda: store.host(state.sessions.host_name))
            task.cancel()

        caplog.set_level(logging.ERROR)
        asyncio.run(main())
    store.close()
