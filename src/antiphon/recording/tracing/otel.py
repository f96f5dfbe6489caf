"""Exports each turn as an OpenTelemetry trace over OTLP (`--otel-endpoint`). Needs the extra `[otel]`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from antiphon import __version__
from antiphon.errors import SettingsError
from antiphon.recording.tracing.turns import TurnTrace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

# The value of an attribute.
Fact = str | bool | int | float
# Bounds of the export queue and of a batch, and the interval between batches. A full queue drops turns, which the SDK
# logs.
QUEUE, BATCH, EVERY_MS = 2048, 256, 2000
# Turns with these statuses are sampled. Turns with other statuses, and turns that missed the objective, are all
# exported.
GOOD = ("completed", "cancelled", "")


def is_kept(trace: TurnTrace, objective_s: float, sample: float) -> bool:
    """Whether a turn is exported: always if it missed the objective or failed, otherwise sampled by its trace id."""
    took_s = trace.voice_to_voice_s
    if trace.status not in GOOD or (took_s is not None and took_s > objective_s):
        return True
    return int(trace.trace_id[:8], 16) < sample * 2**32


class TurnExporter:
    """Exports turns.

    `exporter`: the SDK's exporter; None creates one for the OTLP endpoint, `http://HOST:4318` or a URL with a path.
    Raises SettingsError if OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                has_path = "/" in endpoint.split("://", 1)[-1].rstrip("/")
                exporter = OTLPSpanExporter(endpoint=endpoint if has_path else f"{endpoint.rstrip('/')}/v1/traces")
        except ImportError:
            raise SettingsError("--otel-endpoint needs the extra: pip install '.[otel]'") from None
        self._ids = _GivenIds()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "antiphon", "service.version": __version__}),
            id_generator=_id_generator(self._ids),
            shutdown_on_exit=False,
        )
        processor = BatchSpanProcessor(
            exporter, max_queue_size=QUEUE, max_export_batch_size=BATCH, schedule_delay_millis=EVERY_MS
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("antiphon")
        # From monotonic seconds to Unix nanoseconds.
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def send(self, trace: TurnTrace, facts: Mapping[str, Fact], client: str) -> None:
        """Queue one turn: a root span, a child for each stage, and the decisions as events. Does not wait.

        `facts`: attributes of the root. `client`: the client's `traceparent`, to which the root is linked; "" for none.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        begin_s, end_s = _bounds(trace)
        self._ids.give(trace)
        root = self._tracer.start_span(
            "antiphon.turn",
            context=Context(),
            links=_links(client),
            start_time=self._ns(begin_s),
            attributes=dict(facts) | _measured(trace),
        )
        for decision in trace.decisions:
            root.add_event(decision.name, timestamp=self._ns(decision.at_s))
        if trace.status == "failed":
            root.set_status(Status(StatusCode.ERROR))
        within = set_span_in_context(root)
        stages = trace.stages()
        if trace.speech_start_s is not None and trace.speech_end_s is not None:
            stages.insert(0, ("listen", trace.speech_start_s, max(trace.speech_start_s, trace.speech_end_s)))
        for name, begin, end in stages:
            child = self._tracer.start_span(f"antiphon.{name}", context=within, start_time=self._ns(begin))
            child.end(self._ns(end))
        root.end(self._ns(end_s))

    def close(self) -> None:
        """Send the queued turns, and stop. Blocks for some seconds at most."""
        self._provider.shutdown()

    def _ns(self, at_s: float) -> int:
        return int(at_s * 1e9) + self._offset_ns


def _bounds(trace: TurnTrace) -> tuple[float, float]:
    instants = [trace.speech_start_s, trace.speech_end_s, trace.endpoint_s, trace.final_s, trace.first_token_s]
    instants += [trace.first_sound_s, trace.heard_s, trace.ended_s, *(d.at_s for d in trace.decisions)]
    known = [at_s for at_s in instants if at_s is not None]
    return (min(known), max(known)) if known else (0.0, 0.0)


def _measured(trace: TurnTrace) -> dict[str, Fact]:
    found: dict[str, Fact] = {"antiphon.turn": trace.turn, "antiphon.status": trace.status or "unanswered"}
    if trace.response_id:
        found["antiphon.response"] = trace.response_id
    if trace.voice_to_voice_s is not None:
        found["antiphon.voice_to_voice_ms"] = round(trace.voice_to_voice_s * 1000, 1)
    return found


def _links(client: str) -> list[Any]:
    if not client:
        return []
    from opentelemetry.trace import Link, SpanContext, TraceFlags

    _, trace_id, span_id, flags = client.split("-")
    return [
        Link(SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))))
    ]


class _GivenIds:
    """The ids of the next root span, which were already sent to other servers."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def give(self, trace: TurnTrace) -> None:
        self._ids = {"trace": int(trace.trace_id, 16), "span": int(trace.span_id, 16)}

    def take(self, name: str) -> int | None:
        return self._ids.pop(name, None)


def _id_generator(given: _GivenIds) -> Any:
    """Return an IdGenerator of the SDK that uses the given ids first."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            return given.take("trace") or super().generate_trace_id()

        def generate_span_id(self) -> int:
            return given.take("span") or super().generate_span_id()

    return Ids()
