"""`antiphon doctor` asks each server of models elsewhere once."""

from __future__ import annotations

import asyncio

import pytest

from antiphon.cli.doctor import print_servers
from tests.contracts.transcribers import remote
from tests.remote.transcriber.faults import FaultProxy, on_a_port
from tests.server.scripted import serving


def test_a_server_that_works_is_described_and_one_that_does_not_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as (url, _, _):
        proxy = FaultProxy(int(url.rpartition(":")[2]))
        with on_a_port(proxy.serve) as port:
            transcriber = remote(f"{url.replace('ws', 'http', 1)}/v1", f"http://127.0.0.1:{port}/v1")
            proxy.set("killed")
            asyncio.run(print_servers([transcriber.pool]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(": ")[1] == "another antiphon, default, word times and probabilities"
    assert lines[1].startswith(f"  transcriber      http://127.0.0.1:{port}/v1: FAILS: ")
