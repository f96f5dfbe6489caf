"""The listening socket, and the errors of a server that does not start."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from antiphon.errors import ModelError, SettingsError, StoreError
from antiphon.server.http.listening import bind
from antiphon.server.run import first_cause, serve
from antiphon.settings import Settings
from tests.forking import run


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_when_a_client_connects_then_nagles_delay_is_off(host: str) -> None:
    async def main() -> int:
        seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = bind(host, 0)
        async with await asyncio.start_server(accepted, sock=listening):
            _, writer = await asyncio.open_connection(host, listening.getsockname()[1])
            nodelay = await seen
            writer.close()
            await writer.wait_closed()
            return nodelay

    try:
        socket.socket(socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    assert asyncio.run(main()) == 1


def test_when_an_address_is_taken_then_the_error_names_it() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(SettingsError, match="cannot listen on"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_when_a_socket_is_handed_over_then_it_serves_and_is_closed_where_the_start_fails(tmp_path: Path) -> None:
    settings = Settings()
    models = replace(settings.models, profile="light", home=str(tmp_path), offline=True)
    # This machine does not have this address, so the server would fail if it bound another socket.
    settings = replace(
        settings, models=models, server=replace(settings.server, host="203.0.113.1", allow_anonymous=True)
    )
    bound = bind("127.0.0.1", 0)
    with pytest.raises(StoreError, match="is missing"):
        anyio.run(serve, settings, lambda url: None, bound)
    assert bound.fileno() == -1


@pytest.mark.slow
def test_when_a_model_does_not_load_then_the_error_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_omni_moe"}')
    flags = ("--conversation-model", str(tmp_path), "--synthesizer", "none", "--port", "0")
    ended = run("antiphon", "serve", *flags)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    refused = f"antiphon: --conversation-model {tmp_path}: it has no weights"
    assert ended.stderr.splitlines()[-1].startswith(refused)


def test_when_several_things_fail_then_the_first_antiphon_error_is_reported() -> None:
    reported = ModelError("the voice broke")
    group = ExceptionGroup("a", [ValueError("no"), ExceptionGroup("b", [reported, ModelError("later")])])
    assert first_cause(group) is reported
    assert isinstance(first_cause(ExceptionGroup("a", [ValueError("no")])), ValueError)
    assert first_cause(reported) is reported
