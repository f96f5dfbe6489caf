"""A server that traces its turns: the traces at a collector, compared with the black box, and exemplars."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
import websockets

from antiphon.recording.tracing.turns import STAGES
from tests.cluster.processes import Host
from tests.scripted import speech
from tests.server.clients import b64
from tests.server.collector import collector

pytestmark = pytest.mark.server
CLIENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
TURNS = 3


def test_every_turn_is_one_trace_whose_stages_add_up_and_agree_with_the_black_box(tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    with collector() as (url, spans):
        flags = ("--otel-endpoint", url, "--otel-sample", "1", "--record", str(folder))
        host = Host("host", ("tests.cluster.scripted_host",), flags, tmp_path)
        host.start()
        host.wait()
        metrics = asyncio.run(talk(host))
        host.popen.terminate()  # type: ignore[union-attr]
        host.end()
    roots = sorted((s for s in spans if s.name == "antiphon.turn"), key=lambda s: s.start_time_unix_nano)
    assert len(roots) == TURNS
    reported = black_box(folder)
    for root, (stopped_s, word_s) in zip(roots, reported, strict=True):
        own = {s.name: s for s in spans if s.trace_id == root.trace_id and s is not root}
        assert {f"antiphon.{stage}" for stage in STAGES} <= set(own)
        assert all(s.parent_span_id == root.span_id for s in own.values())
        assert [link.trace_id.hex() for link in root.links] == ["ab" * 16]
        attributes = {a.key: a.value for a in root.attributes}
        assert attributes["antiphon.dialect"].string_value == "realtime"
        stages_ms = sum(own[f"antiphon.{s}"].end_time_unix_nano - own[f"antiphon.{s}"].start_time_unix_nano
                        for s in STAGES) / 1e6  # fmt: skip
        assert stages_ms == pytest.approx(attributes["antiphon.voice_to_voice_ms"].double_value, abs=5)
        # Both agree on the time between two instants, up to the delays of the machine.
        between_ns = own["antiphon.first_token"].end_time_unix_nano - own["antiphon.endpoint"].end_time_unix_nano
        assert between_ns / 1e6 == pytest.approx((word_s - stopped_s) * 1000, abs=100)
    assert f'trace_id="{roots[-1].trace_id.hex()}"' in metrics
    assert "antiphon_voice_to_voice_seconds_count 3.0" in metrics


async def talk(host: Host) -> str:
    async with websockets.connect(
        f"{host.ws}/v1/realtime?model=gpt-realtime", additional_headers={"traceparent": CLIENT}
    ) as socket:
        for turn in range(TURNS):
            for piece in (speech(10 * turn + 1, 3), speech(0, 0, 40)):
                await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": b64(piece, 24_000)}))
            while json.loads(await socket.recv())["type"] != "response.done":
                pass
    async with httpx.AsyncClient(base_url=host.url, trust_env=False) as client:
        asked = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert asked.headers["content-type"].startswith("application/openmetrics-text")
        return asked.text


def black_box(folder: Path) -> list[tuple[float, float]]:
    """Return the times of each turn's end and of the first word of its answer, from the recording."""
    (file,) = folder.glob("*/events.jsonl")
    out, stopped_s = list[tuple[float, float]](), 0.0
    for line in map(json.loads, file.read_text().splitlines()):
        kind = line.get("out", {}).get("type", "")
        if kind == "input_audio_buffer.speech_stopped":
            stopped_s = line["t"]
        elif kind == "response.output_audio_transcript.delta" and stopped_s:
            out.append((stopped_s, line["t"]))
            stopped_s = 0.0
    return out


def test_without_opentelemetry_the_start_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").write_text("raise ImportError('not here')")
    env = {"PYTHONPATH": str(tmp_path)}
    host = Host("host", ("tests.cluster.scripted_host",), ("--otel-endpoint", "http://127.0.0.1:9"), tmp_path, env)
    host.start()
    assert host.end() == 2
    assert "pip install '.[otel]'" in host.log


def test_a_collector_that_is_not_there_stops_nothing(tmp_path: Path) -> None:
    host = Host("host", ("tests.cluster.scripted_host",), ("--otel-endpoint", "http://127.0.0.1:9"), tmp_path)
    host.start()
    host.wait()
    assert "antiphon_voice_to_voice_seconds_count" in asyncio.run(talk(host))
    host.kill()
