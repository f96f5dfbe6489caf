"""Reads what other servers answer: not compressed, and bounded in bytes and in time. All requests go through here.

The event loop gets a turn after each CHUNKS_A_TURN chunks, also of an answer that has come whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import httpx
import msgspec

from antiphon.errors import RemoteError

# Bounds: an answer that is streamed, the seconds that it is waited for in all, and a document, as a list of models.
MAX_ANSWER_BYTES, MAX_ANSWER_S, MAX_DOCUMENT_BYTES = 64 << 20, 600.0, 2 << 20
CHUNKS_A_TURN = 64
# Bound: objects of one document or event, which are made at once; 32,768 take some tens of milliseconds.
MAX_OBJECTS = 1 << 15

T = TypeVar("T")


async def chunks(answer: httpx.Response, max_bytes: int = MAX_ANSWER_BYTES) -> AsyncGenerator[bytes, None]:
    """Yield an answer's bytes as they come.

    Raises RemoteError for an answer that is compressed, which no request asks for: a few bytes of one would be
    gigabytes here. So it does for one with more bytes, and for one that takes longer than MAX_ANSWER_S. The time that
    the caller takes is not counted.
    """
    if encoding := answer.headers.get("content-encoding", "").strip().lower().removeprefix("identity"):
        raise RemoteError(f"the model's server compresses its answer ({encoding[:40]}), which was not asked for")
    num_bytes = num_chunks = 0
    waited_s, since_s = 0.0, time.monotonic()
    async for chunk in answer.aiter_raw():
        num_bytes += len(chunk)
        num_chunks += 1
        waited_s += time.monotonic() - since_s
        if num_bytes > max_bytes:
            raise RemoteError(f"the model's server sent more than {max_bytes} bytes in one answer")
        if waited_s > MAX_ANSWER_S:
            raise RemoteError(f"the model's server took longer than {MAX_ANSWER_S:g} s for one answer")
        yield chunk
        if num_chunks % CHUNKS_A_TURN == 0:
            await asyncio.sleep(0)
        since_s = time.monotonic()


# The body is whatever JSON a server is sent.
async def ask(
    client: httpx.AsyncClient, method: str, url: str, headers: Mapping[str, str], body: Any = None
) -> tuple[int, bytes]:
    """Send a request; return the status of its answer, and all of its bytes.

    Raises RemoteError for more than MAX_DOCUMENT_BYTES, and what `chunks` raises; httpx.HTTPError.
    """
    async with (
        client.stream(method, url, headers=headers, json=body) as answer,
        aclosing(chunks(answer, MAX_DOCUMENT_BYTES)) as found,
    ):
        return answer.status_code, b"".join([chunk async for chunk in found])


def decoded(decoder: msgspec.json.Decoder[T], data: bytes, what: str) -> T:
    """What a server's JSON says. Raises RemoteError, "the model's server sent what is no `what`", for what is none, is
    too deep, or has more than MAX_OBJECTS objects.
    """
    if data.count(b"{") > MAX_OBJECTS:
        raise RemoteError(f"the model's server sent what is no {what}: it has too many objects")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteError(f"the model's server sent what is no {what}: {error}") from None


def optional(decoder: msgspec.json.Decoder[T], data: bytes | msgspec.Raw) -> T | None:
    """What a server's JSON says of what may be missing; None where that is of another type than it should be."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
