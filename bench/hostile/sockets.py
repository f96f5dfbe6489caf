"""Attacks with connections and sessions: too many, unread, silent, resumed at once, with wrong types or other keys."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from bench.hostile.client import PATIENCE_S, Target, error_code, hold
from tests.fuzz.mutations import mutated_frame, recorded_frames
from websockets.asyncio.client import ClientConnection

DOORS = ("/v1/duplex", "/v1/realtime?resume=sess-0", "/v1/omni", "/v1/audio/speech/stream")


async def read(socket: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        event: dict[str, Any] = json.loads(await socket.recv())
    return event


def name_of(answer: dict[str, Any]) -> str:
    return error_code(answer) if answer["type"] == "error" else str(answer["type"])


async def unread(target: Target) -> None:
    """Send small events that have large replies, and do not read them."""
    size, count = (100 << 10, 20) if target.quick else (5 << 20, 250)
    async with target.socket(max_queue=1) as socket:
        if socket is None:
            return
        session = {"type": "realtime", "instructions": "a" * size}
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        for _ in range(count):
            target.tried += 1
            try:
                async with asyncio.timeout(5):
                    await socket.send('{"type":"session.update","session":{"type":"realtime"}}')
            except TimeoutError:
                target.outcomes["not read any more"] += 1
                break
        target.outcomes["asked and not read"] += 1
        # Waits until the server closes the connection.
        await socket.wait_closed()
        target.outcomes[f"closed {socket.close_code}"] += 1


async def silent(target: Target) -> None:
    """Open connections without a key that never send a byte."""
    parts = urlsplit(target.url)
    writers = []
    for _ in range(50 if target.quick else 1000):
        target.tried += 1
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, parts.port), PATIENCE_S)
        except (OSError, TimeoutError):
            target.outcomes["connection refused"] += 1
            continue
        writers.append((reader, writer))

    async def wait_for_end(reader: asyncio.StreamReader) -> None:
        await reader.read()
        target.outcomes["connection closed"] += 1

    await asyncio.gather(*(wait_for_end(reader) for reader, _ in writers))


async def resume(at: Target, target: Target, session: tuple[str, str], seq: int) -> None:
    """Resume a session at a host, after event number `seq`, and count the reply by its name."""
    session_id, token = session
    ask = {"type": "session.resume", "session_id": session_id, "resume_token": token}
    # The socket counts as a try of `at`. The reply is counted at `target`, so the try is counted there, too.
    target.tried += at is not target
    async with at.socket(f"/v1/realtime?resume={session_id}") as socket:
        if socket is not None:
            await socket.send(json.dumps(ask | {"last_received_server_event_seq": seq}))
            target.outcomes[name_of(await read(socket))] += 1


async def resumes(target: Target) -> None:
    """Resume sessions again and again, half of them from two sockets at once."""

    async def one(twice: bool) -> None:
        async with target.socket("/v1/realtime?resume=1") as socket:
            if socket is None:
                return
            created = await read(socket)
        session = created["session"]["id"], created["resume_token"]
        for _ in range(3 if target.quick else 40):
            seqs = [random.Random(target.tried + k).choice((0, 1, 5, 10**9)) for k in range(1 + twice)]
            await asyncio.gather(*(resume(target, target, session, seq) for seq in seqs))

    await asyncio.gather(*(one(n % 2 == 0) for n in range(4 if target.quick else 25)))


async def storms(target: Target) -> None:
    """Resume twenty sessions from two hundred connections at once, both at their own host and at another one."""
    many, at_once = (4, 4) if target.quick else (20, 10)
    at = (target, replace(target, url=target.beside))
    async with AsyncExitStack() as stack:
        sessions = []
        for _ in range(many):
            socket = await stack.enter_async_context(target.socket("/v1/realtime?resume=1"))
            if socket is not None:
                created = await read(socket)
                # The other host finds a session by its row in the store.
                await socket.send('{"type":"session.update","session":{"type":"realtime","instructions":"Be brief."}}')
                await read(socket)
                sessions.append((created["session"]["id"], created["resume_token"]))
    asked = (resume(at[(n + k) % 2], target, session, 0) for n, session in enumerate(sessions) for k in range(at_once))
    await asyncio.gather(*asked)


async def first_frames(target: Target) -> None:
    """Open sockets of dialects whose sessions begin with a first frame, and never send that frame."""
    async with AsyncExitStack() as stack:
        for n in range(16 if target.quick else 300):
            socket = await stack.enter_async_context(target.socket(DOORS[n % len(DOORS)]))
            if socket is not None:
                target.outcomes["accepted"] += 1
        await hold()


async def answers(target: Target) -> None:
    """Request hundreds of answers outside of the conversation, all at once, in one session."""
    content = [{"type": "input_text", "text": "Count to a thousand."}]
    message = {"type": "message", "role": "user", "content": content}
    response = {"conversation": "none", "output_modalities": ["text"], "input": [message], "max_output_tokens": 500}
    asked = {"type": "response.create", "response": response}
    await target.send_all([asked] * (20 if target.quick else 400), None)


async def types(target: Target) -> None:
    """Send recorded frames of every dialect, with fields that have a wrong type, are out of range, missing or renamed.

    If the server closes the connection, the close is counted by its code (1011: the session failed), and a new one
    opened.
    """
    for number, (path, frames) in enumerate(recorded_frames().items()):
        draw = random.Random(number)
        mutated = (mutated_frame(frames, draw) for _ in range(20 if target.quick else 300))
        await target.send_all(mutated, 0.2 if target.quick else 2, path)


async def two_keys(target: Target) -> None:
    """Try to reach what belongs to another key: its voices, its sessions, its calls, and its prompts in the KV."""
    guess = {"role": "user", "content": "The vault code of the branch in Zurich is 7 3 9 1."}
    async with target.client() as client:
        for method, path in (
            ("DELETE", "/v1/audio/voices/bystander"),
            ("POST", "/v1/realtime/calls/rtc_0/hangup"),
            ("POST", "/v1/realtime/calls/sess-0/hangup"),
            ("GET", "/v1/models/%2e%2e/x"),
        ):
            await target.request(client, method, path)
        body = {"model": "default", "max_tokens": 1, "messages": [guess]}
        await target.request(client, "POST", "/v1/chat/completions", json=body)
        foreign = {"Authorization": "Bearer nobody"}
        for path in ("/v1/models", "/v1/audio/voices"):
            await target.request(client, "GET", path, headers=foreign)
    ask = {"type": "session.resume", "session_id": "sess-0", "resume_token": "0" * 32}
    async with target.socket("/v1/realtime?resume=sess-0") as socket:
        if socket is not None:
            target.tried += 1
            await socket.send(json.dumps(ask))
            target.outcomes[error_code(await read(socket))] += 1


async def idle(target: Target) -> None:
    """Open sessions and leave them unused. Measures the memory of one session, and the delay of other sessions."""
    async with AsyncExitStack() as stack:
        for _ in range(20 if target.quick else 900):
            socket = await stack.enter_async_context(target.socket())
            if socket is not None:
                await read(socket)
                target.outcomes["held"] += 1
        await hold()
