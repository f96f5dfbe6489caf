"""Answers of other servers on a real socket: never compressed, bounded in bytes and time, and without cookies."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from antiphon.errors import AntiphonError, RemoteError
from antiphon.remote import http
from antiphon.remote.http import MAX_DOCUMENT_BYTES, LoopClients, ask_document, chunks, read_failure
from tests.remote.chat.scripted_server import Answer, Script, ScriptedServer, scripted_server
from tests.remote.turns import turns_of_others

LIMIT_S = 30


def asked(script: Script, use: Callable[[httpx.AsyncClient, ScriptedServer], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        clients = LoopClients()
        async with scripted_server(script) as server:
            try:
                return await use(await clients.client(), server)
            finally:
                await clients.close()

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def sends(*parts: bytes, status: int = 200, **headers: str) -> Script:
    async def script(answer: Answer) -> None:
        await answer.head(status, "application/json", **headers)
        for part in parts:
            await answer.raw(part)

    return script


async def document(client: httpx.AsyncClient, server: ScriptedServer) -> tuple[int, bytes]:
    return await ask_document(client, "POST", server.url + "/x", {}, {})


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP", "identity, gzip", "x-unknown"])
def test_a_compressed_answer_is_refused_by_name_and_not_opened(encoding: str) -> None:
    with pytest.raises(RemoteError, match="compresses its answer"):
        asked(sends(gzip.compress(b"{}" * 1000), content_encoding=encoding), document)


def test_no_answer_is_asked_for_compressed_and_one_that_says_so_is_read() -> None:
    async def use(client: httpx.AsyncClient, server: ScriptedServer) -> None:
        assert await document(client, server) == (200, b"{}")
        assert server.asked[0].headers["accept-encoding"] == "identity"

    asked(sends(b"{}", content_encoding="identity"), use)


def test_a_document_is_read_to_a_bound() -> None:
    with pytest.raises(RemoteError, match="more than 2097152 bytes"):
        asked(sends(*[b"x" * (1 << 16)] * (MAX_DOCUMENT_BYTES // (1 << 16) + 1)), document)


def test_an_answer_that_drips_is_ended_by_the_time_that_it_has_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_ANSWER_S", -1.0)
    with pytest.raises(RemoteError, match="took longer than"):
        asked(sends(b"{}"), document)


def test_chunks_that_come_at_once_let_others_take_their_turns() -> None:
    async def use(client: httpx.AsyncClient, server: ScriptedServer) -> int:
        async with client.stream("POST", server.url + "/x", json={}) as answer:
            found = chunks(answer)
            # From here on, everything has arrived.
            await anext(found)
            with turns_of_others() as turns:
                num_bytes = sum([len(chunk) async for chunk in found])
        assert num_bytes == 8_000 - 1
        return turns.count

    assert asked(sends(b"1\r\nx\r\n" * 8_000 + b"0\r\n\r\n", transfer_encoding="chunked"), use) >= 8_000 // 64


def test_the_cookies_of_an_answer_are_not_kept() -> None:
    async def use(client: httpx.AsyncClient, server: ScriptedServer) -> None:
        for _ in range(2):
            await document(client, server)
        assert "cookie" not in server.asked[1].headers
        assert not client.cookies.jar

    asked(sends(b"{}", set_cookie="tracked=1; path=/"), use)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"error": {"message": "no"}}', "no"),
        (b"[" * 50_000, "[" * 300),
        (b'{"error": "\xff\xfe"}', '{"error": "\ufffd\ufffd"}'),
        (b'{"error": "\\ud800"}', '{"error": "\\ud800"}'),
        (b'{"error": 1e999}', '{"error": 1e999}'),
        (b'{"error": {"message": ["a"]}}', "['a']"),
        (b"", ""),
    ],
)
def test_whatever_an_error_is_made_of_it_is_a_sentence(data: bytes, said: str) -> None:
    async def use(client: httpx.AsyncClient, server: ScriptedServer) -> AntiphonError | str:
        async with client.stream("POST", server.url + "/x", json={}) as answer:
            return await read_failure("it", answer, "")

    assert asked(sends(data, status=400), use) == said
