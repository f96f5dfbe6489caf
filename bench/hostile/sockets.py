"""Attacks with connections and sessions: not reading, not writing, too many, at once, with wrong types, as another."""

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


async def unread(target: Target) -> None:
    """Small events whose answers are large, from a client that reads none of them."""
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
        # Until the server gives up on the client.
        await socket.wait_closed()
        target.outcomes[f"closed {socket.close_code}"] += 1


async def silent(target: Target) -> None:
    """Connections that never send a byte, and have no key."""
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


async def resumes(target: Target) -> None:
    """Sessions that are resumed over and over, half of them by two sockets at once."""

    async def one(twice: bool) -> None:
        async with target.socket("/v1/realtime?resume=1") as socket:
            if socket is None:
                return
            session = await read(socket)
        for _ in range(3 if target.quick else 40):
            await asyncio.gather(*(resume(session) for _ in range(1 + twice)))

    async def resume(session: dict[str, Any]) -> None:
        ask = {
            "type": "session.resume",
            "session_id": session["session"]["id"],
            "resume_token": session.get("resume_token") or session["session"].get("resume_token"),
            "last_received_server_event_seq": random.Random(target.tried).choice((0, 1, 5, 10**9)),
        }
        async with target.socket(f"/v1/realtime?resume={session['session']['id']}") as socket:
            if socket is None:
                return
            await socket.send(json.dumps(ask))
            answer = await read(socket)
            target.outcomes[error_code(answer) if answer["type"] == "error" else answer["type"]] += 1

    await asyncio.gather(*(one(n % 2 == 0) for n in range(4 if target.quick else 25)))


async def storms(target: Target) -> None:
    """Two hundred connections at once that resume twenty sessions, at the host that has them and at another one."""
    many, at_once = (4, 4) if target.quick else (20, 10)
    at = (target, replace(target, url=target.beside))
    async with AsyncExitStack() as stack:
        sessions = []
        for _ in range(many):
            socket = await stack.enter_async_context(target.socket("/v1/realtime?resume=1"))
            if socket is not None:
                created = await read(socket)
                # Another host finds a session by what is stored of it.
                await socket.send('{"type":"session.update","session":{"type":"realtime","instructions":"Be brief."}}')
                await read(socket)
                sessions.append((created["session"]["id"], created["resume_token"]))
    asked = (storm(at[(n + k) % 2], target, session) for n, session in enumerate(sessions) for k in range(at_once))
    await asyncio.gather(*asked)


async def storm(at: Target, target: Target, session: tuple[str, str]) -> None:
    """Resume a session at one of two hosts, and count the answers by name."""
    session_id, token = session
    ask = {"type": "session.resume", "session_id": session_id, "resume_token": token}
    async with at.socket(f"/v1/realtime?resume={session_id}") as socket:
        if socket is not None:
            target.tried += 1
            await socket.send(json.dumps(ask | {"last_received_server_event_seq": 0}))
            answer = await read(socket)
            target.outcomes[error_code(answer) if answer["type"] == "error" else answer["type"]] += 1


async def first_frames(target: Target) -> None:
    """Sockets of sessions that begin with a first frame, which never comes."""
    async with AsyncExitStack() as stack:
        for n in range(16 if target.quick else 300):
            socket = await stack.enter_async_context(target.socket(DOORS[n % len(DOORS)]))
            if socket is not None:
                target.outcomes["accepted"] += 1
        await hold()


async def answers(target: Target) -> None:
    """One session that asks for hundreds of answers beside its conversation, all at once."""
    async with target.socket() as socket:
        if socket is None:
            return
        noting = asyncio.create_task(target.note_errors(socket))
        message = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Count to a thousand."}],
        }
        response = {"conversation": "none", "output_modalities": ["text"], "input": [message], "max_output_tokens": 500}
        for _ in range(20 if target.quick else 400):
            target.tried += 1
            await socket.send(json.dumps({"type": "response.create", "response": response}))
        await noting


async def types(target: Target) -> None:
    """Recorded frames of every dialect with fields of the wrong type, out of range, missing or renamed.

    A connection that is closed is counted by its code (1011: the session failed), and opened anew.
    """
    per_socket = 20 if target.quick else 300
    for number, (path, frames) in enumerate(recorded_frames().items()):
        draw = random.Random(number)
        async with target.socket(path) as socket:
            if socket is None:
                continue
            noting = asyncio.create_task(target.note_errors(socket))
            for _ in range(per_socket):
                target.tried += 1
                await socket.send(mutated_frame(frames, draw))
            await asyncio.wait([noting], timeout=0.2 if target.quick else 2)
            noting.cancel()


async def two_keys(target: Target) -> None:
    """A key that tries the doors of another: its voices, sessions, calls, and its prompts in the KV."""
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
    """Sessions that are opened and never used: what one holds, and whom it slows."""
    async with AsyncExitStack() as stack:
        for _ in range(20 if target.quick else 900):
            socket = await stack.enter_async_context(target.socket())
            if socket is not None:
                await read(socket)
                target.outcomes["held"] += 1
        await hold()
