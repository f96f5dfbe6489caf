"""Speech over REST through a door: when its host is lost, another host makes the audio again, and the client gets the
rest.

The door keeps the request, and a digest of what the client has received. The other host's answer has to begin with the
same bytes. So the request gets a seed: with the same seed and text, each host makes the same audio.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

import anyio
import httpx
from starlette.requests import Request

from antiphon.client.held_session import fields_of
from antiphon.client.held_speech import MAX_SEED
from antiphon.cluster.door.hosts import Hosts
from antiphon.signals import become

PATH = "/v1/audio/speech"
# Interval, in seconds, at which it is checked whether the host still counts as alive.
CHECK_S = 0.5
T = TypeVar("T")
Ask = Callable[[str], Awaitable[httpx.Response]]


def is_speech(request: Request, path: str) -> bool:
    """Return whether a request asks for speech."""
    return request.method == "POST" and path == PATH


def with_seed(body: bytes) -> bytes:
    """Return the body of a speech request with a seed, so that each host makes the same audio of it."""
    fields = fields_of(body)
    if not fields or fields.get("seed") is not None:
        return body
    return json.dumps(fields | {"seed": random.randrange(MAX_SEED)}, ensure_ascii=False).encode()


async def unless_gone(hosts: Hosts, url: str, wait: Callable[[], Awaitable[T]]) -> T:
    """Await `wait()`. Raises httpx.ReadTimeout if the host is no longer alive according to the store."""
    found: list[T] = []
    failure: Exception = httpx.ReadTimeout(f"the host {url} hangs")

    async def watch() -> None:
        await become(lambda: not hosts.has(url), CHECK_S)
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            found.append(await wait())
        except Exception as error:
            # Raised outside of the task group, which would wrap it.
            failure = error
        group.cancel_scope.cancel()
    if not found:
        raise failure
    return found[0]


class OtherAudio(httpx.HTTPError):
    """Raised if another host makes other audio of a request than the host that was lost."""


class SpokenAnswer:
    """The body of one host's answer to a speech request, continued by other hosts. Iterate once, then call `aclose`.

    `answer` is the answer of the host at `url`. `ask` makes the request at another host, and raises httpx.HTTPError.
    `lost` is called with a host's URL and the failure. Iterating raises httpx.HTTPError if no host makes the same
    audio.
    """

    def __init__(
        self, answer: httpx.Response, url: str, hosts: Hosts, ask: Ask, lost: Callable[[str, Exception], None]
    ) -> None:
        self._answer, self._url, self._hosts, self._ask, self._lost = answer, url, hosts, ask, lost
        self._status, self._kind = answer.status_code, answer.headers.get("content-type")
        self._digest, self._num_bytes = hashlib.sha256(), 0
        self._tried = {url}

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        while True:
            try:
                async for piece in self._rest():
                    self._num_bytes += len(piece)
                    self._digest.update(piece)
                    yield piece
                return
            except httpx.HTTPError as error:
                self._fails(self._url, error)
                await self._answer.aclose()
                await self._ask_another(error)

    async def aclose(self) -> None:
        """Close the answer of the last host."""
        await self._answer.aclose()

    async def _ask_another(self, error: httpx.HTTPError) -> None:
        """Make the request at another host. Raises `error` if that fails at each."""
        for url in self._hosts.in_order():
            if url in self._tried:
                continue
            self._tried.add(url)
            try:
                self._answer = await self._ask(url)
            except httpx.HTTPError as failure:
                self._fails(url, failure)
                continue
            if (self._answer.status_code, self._answer.headers.get("content-type")) == (self._status, self._kind):
                self._url = url
                return
            await self._answer.aclose()
        raise error

    def _fails(self, url: str, error: httpx.HTTPError) -> None:
        self._lost(url, error)
        if not isinstance(error, OtherAudio):
            self._hosts.failed(url)

    async def _rest(self) -> AsyncIterator[bytes]:
        """Yield the host's audio after what the client has received. Raises httpx.HTTPError if that is not the same."""
        left, digest = self._num_bytes, hashlib.sha256()
        pieces = aiter(self._answer.aiter_raw())
        while (piece := await unless_gone(self._hosts, self._url, lambda: anext(pieces, None))) is not None:
            known, new = piece[:left], piece[left:]
            left -= len(known)
            digest.update(known)
            if known and not left and digest.digest() != self._digest.digest():
                raise OtherAudio("another host makes other audio")
            if new:
                yield new
        if left:
            raise OtherAudio("another host makes less audio")
