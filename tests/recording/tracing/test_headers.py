"""Trace headers that clients send: valid ones link the turn to the client's trace, and none causes an error."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
import websockets

from tests.cluster.processes import Host
from tests.scripted import speech
from tests.server.clients import b64
from tests.server.collector import collector

VALID = f"00-{'ab' * 16}-{'cd' * 8}-01"
OTHER = f"00-{'ef' * 16}-{'cd' * 8}-00"
Sent = list[tuple[str, str]]
# Headers, and whether they link the turn to a trace.
HEADERS: dict[str, tuple[Sent, bool]] = {
    "well formed": ([("traceparent", VALID)], True),
    "in capitals": ([("TraceParent", VALID)], True),
    "with state and baggage": (
        [
            ("traceparent", VALID),
            ("tracestate", ",".join(f"k{n}=not-logged" for n in range(32))),
            ("baggage", "user=not-logged;p=1"),
        ],
        True,
    ),
    "two": ([("traceparent", VALID), ("traceparent", OTHER)], False),
    "two in one": ([("traceparent", f"{VALID},{OTHER}")], False),
    "of 8 KB": ([("traceparent", VALID + "0" * 8000)], False),
    "of a later version": ([("traceparent", VALID.replace("00-", "01-", 1) + "-more")], False),
    "of the version that is none": ([("traceparent", VALID.replace("00-", "ff-", 1))], False),
    "in capital digits": ([("traceparent", VALID.upper())], False),
    "with other bytes": ([("traceparent", "\xff\xfe" * 27)], False),
    "with a tab": ([("traceparent", VALID.replace("-", "\t"))], False),
    "empty": ([("traceparent", ""), ("tracestate", ""), ("baggage", "")], False),
    "a state of 512 members": ([("tracestate", ",".join(f"a{n}=not-logged" for n in range(512)))], False),
    "a state that is none": ([("tracestate", "=,=,,;\t==")], False),
    "baggage of 8 KB": ([("baggage", "k=" + "v" * 8100)], False),
    "baggage with line breaks": ([("baggage", "k=not-logged%0d%0aX-Request-Id:%201")], False),
    "baggage in 100 headers": ([("baggage", f"k{n}=not-logged") for n in range(100)], False),
    "of others": (
        [
            ("b3", "1"),
            ("x-b3-traceid", "zz"),
            ("uber-trace-id", "1:2:3:4"),
            ("grpc-trace-bin", "AAA"),
            ("sentry-trace", "-"),
        ],
        False,
    ),
}


@pytest.mark.server
def test_whatever_a_client_says_of_its_trace_is_a_link_or_nothing(tmp_path: Path) -> None:
    with collector() as (url, spans):
        host = Host("host", ("tests.cluster.scripted_host",), ("--otel-endpoint", url, "--otel-sample", "1"), tmp_path)
        host.start()
        host.wait()

        async def all_at_once() -> None:
            async with asyncio.TaskGroup() as group:
                for name, (headers, _) in HEADERS.items():
                    group.create_task(a_turn(host, name, headers))

        asyncio.run(all_at_once())
        host.popen.terminate()  # type: ignore[union-attr]
        assert host.end() == 0
    roots = [span for span in spans if span.name == "antiphon.turn"]
    linked = sorted(link.trace_id.hex() for root in roots for link in root.links)
    assert len(roots) == len(HEADERS)
    assert linked == ["ab" * 16] * sum(is_linked for _, is_linked in HEADERS.values())
    assert "not-logged" not in host.log + str(spans)
    assert not [line for line in host.log.splitlines() if "Traceback" in line or " ERROR " in line]


async def a_turn(host: Host, name: str, headers: Sent) -> None:
    """Send an HTTP request, and a turn over a WebSocket, with these headers. Both succeed."""
    raw = [(key.encode(), value.encode("latin-1")) for key, value in headers]
    async with httpx.AsyncClient(base_url=host.url, trust_env=False, timeout=60) as client:
        assert (await client.get("/v1/models", headers=raw)).status_code == 200, name
    async with websockets.connect(f"{host.ws}/v1/realtime?model=gpt-realtime", additional_headers=headers) as socket:
        for piece in (speech(1, 3), speech(0, 0, 40)):
            await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": b64(piece, 24_000)}))
        while (event := json.loads(await socket.recv()))["type"] != "response.done":
            assert event["type"] != "error", (name, event)
