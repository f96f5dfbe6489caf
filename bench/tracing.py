"""The cost of tracing and exporting every turn, and the difference between traces and recordings.

    python -m bench.tracing

Turns with as many events as in a conversation (50 audio chunks per second, 60 deltas of an answer) are traced and sent
to an exporter that drops them. The result is the share of one core that a session uses if it takes a turn every six
seconds.

Then a real server that traces every turn and records its sessions holds a conversation of real recordings (--turns).
For each turn, the time from its end to the first word of its answer is read from the traces and from the recording.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import HERE, machine, options, percentile, save, server, show
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from tests.server.collector import collector

from antiphon.certify.certify import Certifier
from antiphon.certify.search import Trial
from antiphon.events.conversation import (
    ContentPosition,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.transcription import SpeechStarted, SpeechStopped, TurnCommitted
from antiphon.recording.tracing.otel import TurnExporter
from antiphon.recording.tracing.turns import TurnTracer

TURNS, TURN_S, DELTAS, PIECES_A_S = 2000, 6.0, 60, 50


class Dropped(SpanExporter):
    """An exporter that drops all spans."""

    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def measure(exporter: TurnExporter | None) -> float:
    """Return the CPU seconds that the process and its threads use for one turn."""
    tracer, sound = TurnTracer(), np.zeros(480, np.float32)
    began, at_s = time.process_time(), 0.0
    for turn in range(TURNS):
        for piece in range(int(TURN_S * PIECES_A_S)):
            tracer.sound(320, at_s + piece / PIECES_A_S)
        begin_ms, name = int(at_s * 1000), f"resp_{turn}"
        place = ContentPosition(name, "item", 0)
        events = [
            SpeechStarted(turn, begin_ms),
            SpeechStopped(turn, begin_ms + 2000),
            TurnCommitted(turn, begin_ms, begin_ms + 2000, begin_ms + 1500),
            ResponseCreated(Response(name, True, None, 60)),
            *[ResponseTextDelta(place, "word", True), ResponseAudioDelta(place, sound, 24_000)] * (DELTAS // 2),
            ResponseDone(Response(name, True, None, 60, status="completed")),
        ]
        at_s += TURN_S
        for event in events:
            for trace in tracer.follow(event, at_s):
                if exporter:
                    exporter.send(trace, {"antiphon.session": "sess"}, "")
    if exporter:
        exporter.close()
    return (time.process_time() - began) / TURNS


def recorded(folder: Path) -> list[float]:
    """Return for each answered turn the milliseconds from its reported end to the first word, by the recordings."""
    found, stopped_s = list[float](), None
    for file in folder.glob("*/events.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            kind = line.get("out", {}).get("type", "")
            if kind == "input_audio_buffer.speech_stopped":
                stopped_s = line["t"]
            elif kind == "response.output_audio_transcript.delta" and stopped_s is not None:
                found.append((line["t"] - stopped_s) * 1000)
                stopped_s = None
    return found


def agreement(turns: int) -> dict[str, Any]:
    """Return the differences between the traces and the recording of the same conversation, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder, collector() as (url, spans):
        flags = ("--otel-endpoint", url, "--otel-sample", "1", "--record", folder)
        with server(*flags) as srv:
            certifier = Certifier(srv.url, "", HERE.parent / "tests" / "data", minutes=1, say=print)
            asyncio.run(certifier.step({"conversation": 1}, Trial(1, turns, is_edge=True), 60.0 * turns))
        ends: dict[bytes, dict[str, int]] = {}
        for span in spans:
            ends.setdefault(span.trace_id, {})[span.name] = span.end_time_unix_nano
        received = [own for own in ends.values() if "antiphon.first_token" in own]
        received.sort(key=lambda own: own["antiphon.endpoint"])
        traced = [(own["antiphon.first_token"] - own["antiphon.endpoint"]) / 1e6 for own in received]
        # A turn that is in progress at the end may be in only one of the two.
        both = list(zip(traced, recorded(Path(folder)), strict=False))
    apart = [abs(a - b) for a, b in both]
    if not apart:
        raise SystemExit(f"{len(received)} turns were traced, and {len(both)} are in both")
    return {"turns": len(apart), "p50_ms": round(percentile(apart, 50), 3), "most_ms": round(max(apart), 3)}


def main() -> None:
    parser = options("python -m bench.tracing", __doc__)
    parser.add_argument("--turns", type=int, default=12)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, exporter in (("followed", None), ("followed and sent", TurnExporter("http://nowhere", Dropped()))):
        seconds = min(measure(exporter) for _ in range(3)) if exporter is None else measure(exporter)
        figures[name] = {"cpu_a_turn_ms": round(seconds * 1000, 3), "core_percent": round(100 * seconds / TURN_S, 4)}
    show("every turn of one session", {n: {k: str(v) for k, v in row.items()} for n, row in figures.items()})
    figures["agreement with recordings"] = apart = agreement(args.turns)
    show("differences of traces and recordings", [apart])
    print(f"\nwritten: {save('tracing', {'machine': machine(), 'tracing': figures})}")


if __name__ == "__main__":
    main()
