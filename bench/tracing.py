"""What following and sending every turn costs: `python bench/tracing.py`.

Turns of as many events as a conversation's have (50 pieces of sound a second, 60 deltas of an answer), followed and
sent to an exporter that drops them. The share is of one core, while one session takes a turn every six seconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import machine, save, table

from antiphon.events.conversation import (
    ContentPosition,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.transcription import SpeechStarted, SpeechStopped, TurnCommitted
from antiphon.tracing.otel import TurnExporter
from antiphon.tracing.turns import TurnTracer

TURNS, TURN_S, DELTAS, PIECES_A_S = 2000, 6.0, 60, 50


class Dropped(SpanExporter):
    """Takes spans and keeps none."""

    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def measure(exporter: TurnExporter | None) -> float:
    """The CPU seconds of the process for one turn, with its threads."""
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


def main() -> None:
    figures = {}
    for name, exporter in (("followed", None), ("followed and sent", TurnExporter("http://nowhere", Dropped()))):
        seconds = min(measure(exporter) for _ in range(3)) if exporter is None else measure(exporter)
        figures[name] = {"cpu_a_turn_ms": round(seconds * 1000, 3), "core_percent": round(100 * seconds / TURN_S, 4)}
    rows = [(name, f"{f['cpu_a_turn_ms']} ms", f"{f['core_percent']} %") for name, f in figures.items()]
    table("every turn of one session", ("", "CPU a turn", "of a core"), rows)
    print(f"\nwritten: {save('tracing', {'machine': machine(), 'tracing': figures})}")


if __name__ == "__main__":
    main()
