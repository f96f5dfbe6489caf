"""How turns are traced: stages that add up, decisions, turns without an answer, and the exported spans."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from antiphon.events.conversation import (
    ContentPosition,
    Item,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
    UserTurnCommitted,
)
from antiphon.events.duplex import OverlapReported
from antiphon.events.playback import PlaybackCleared, PlaybackStarted
from antiphon.events.transcription import (
    SpeechStarted,
    SpeechStopped,
    TranscriptFailed,
    TurnCleared,
    TurnCommitted,
)
from antiphon.recording.tracing.otel import TurnExporter, is_kept
from antiphon.recording.tracing.turns import MOST_TURNS, STAGES, TurnTrace, TurnTracer
from antiphon.remote.trace_context import current_traceparent, follow_session, trace_headers, valid_traceparent

BEGAN_S = 100.0
FINAL = object()


def heard_for(tracer: TurnTracer, seconds: float, piece_ms: int = 40) -> None:
    """Feed audio in real time. Each piece arrives when its last sample has been recorded."""
    for number in range(1, int(seconds * 1000) // piece_ms + 1):
        tracer.sound(piece_ms * 16, BEGAN_S + number * piece_ms / 1000)


def response(number: str, status: Any = "in_progress") -> Response:
    return Response(number, True, None, 60, status=status)


def text(number: str) -> ResponseTextDelta:
    return ResponseTextDelta(ContentPosition(number, "i", 0), "Hi.", spoken=True)


def sound(number: str) -> ResponseAudioDelta:
    return ResponseAudioDelta(ContentPosition(number, "i", 0), np.zeros(240, np.float32), 24_000)


def follow(tracer: TurnTracer, *happened: tuple[float, Any]) -> list[TurnTrace]:
    out = list[TurnTrace]()
    for at_s, event in happened:
        if event is FINAL:
            tracer.final(BEGAN_S + at_s)
        elif isinstance(event, str):
            tracer.decided(event, BEGAN_S + at_s)
        else:
            out += tracer.follow(event, BEGAN_S + at_s)
    return out


def a_turn(turn: int = 0, number: str = "r", status: str = "completed") -> list[tuple[float, Any]]:
    return [
        (0.3, SpeechStarted(turn, 200)),
        (2.5, SpeechStopped(turn, 2500)),
        (2.5, TurnCommitted(turn, 200, 2500, 2000)),
        (2.7, FINAL),
        (2.71, ResponseCreated(response(number))),
        (2.9, text(number)),
        (3.1, sound(number)),
        (3.2, sound(number)),
        (3.25, PlaybackStarted(number)),
        (5.0, ResponseDone(response(number, status))),
    ]


def test_the_stages_of_a_turn_add_up_to_voice_to_voice() -> None:
    tracer = TurnTracer()
    heard_for(tracer, 2.5)
    (trace,) = follow(tracer, *a_turn())
    assert trace.voice_to_voice_s == pytest.approx(1.1)
    stages = trace.stages()
    assert [(name, round(end - begin, 3)) for name, begin, end in stages] == [
        ("endpoint", 0.5),
        ("final", 0.2),
        ("first_token", 0.2),
        ("first_sound", 0.2),
        ("heard", 0.15),
    ]
    assert sum(end - begin for name, begin, end in stages if name in STAGES) == pytest.approx(1.1)
    assert (trace.status, trace.speech_start_s) == ("completed", pytest.approx(BEGAN_S + 0.2))
    assert tracer.traceparent == ""


@given(st.permutations([2.6, 2.7, 3.1]), st.booleans())
def test_however_instants_lie_stages_follow_each_other_and_add_up(order: list[float], committed_late: bool) -> None:
    """A preemptive answer may be audible before its turn's transcript is reported."""
    tracer = TurnTracer()
    heard_for(tracer, 2.5)
    final, token, heard = order
    happened = [
        (2.5, SpeechStopped(0, 2500)),
        (2.55 if committed_late else 2.5, TurnCommitted(0, 200, 2500, 2000)),
        *sorted(
            [
                (final, FINAL),
                (2.56, ResponseCreated(response("r"))),
                (token, text("r")),
                (heard, sound("r")),
            ],
            key=lambda h: h[0],
        ),
        (5.0, ResponseDone(response("r", "completed"))),
    ]
    (trace,) = follow(tracer, (0.3, SpeechStarted(0, 200)), *happened)
    stages = [s for s in trace.stages() if s[0] in STAGES]
    assert all(before[2] == after[1] for before, after in pairwise(stages))
    assert all(begin <= end for _, begin, end in stages)
    assert trace.voice_to_voice_s is not None
    assert sum(end - begin for _, begin, end in stages) == pytest.approx(trace.voice_to_voice_s, abs=0.005)


def test_decisions_are_told_with_their_turn() -> None:
    tracer = TurnTracer()
    heard_for(tracer, 8)
    first = a_turn()[:-1]
    (trace,) = follow(
        tracer,
        (1.0, SpeechStarted(0, 900)),
        (1.5, "begun_ahead"),
        (1.6, "dropped"),
        *first[1:],
        (4.3, SpeechStarted(1, 3900)),
        (4.31, PlaybackCleared("r")),
        (4.32, ResponseDone(response("r", "cancelled"))),
    )
    assert [d.name for d in trace.decisions] == ["begun_ahead", "dropped", "interrupted"]
    assert trace.status == "cancelled"
    (second,) = follow(
        tracer,
        (4.4, OverlapReported("smart", "barge_in", "words")),
        (6.0, UserTurnCommitted(1, Item("i"), None, 5500)),
        (6.1, FINAL),
        (6.1, ResponseCreated(response("s"))),
        (6.2, ResponseDone(response("s", "failed"))),
    )
    assert [d.name for d in second.decisions] == ["barge_in"]
    assert (second.status, second.voice_to_voice_s) == ("failed", None)
    assert second.speech_end_s == pytest.approx(BEGAN_S + 5.5)


def test_a_turn_that_is_cleared_is_none_and_one_that_failed_is_told() -> None:
    tracer = TurnTracer()
    heard_for(tracer, 3)
    assert not follow(tracer, (0.3, SpeechStarted(0, 200)), (1.0, TurnCleared()))
    (trace,) = follow(tracer, (2.0, TurnCommitted(0, 1000, 2000)), (2.1, TranscriptFailed(0, "broken")))
    assert (trace.status, trace.endpoint_s, trace.speech_end_s) == ("failed", BEGAN_S + 2.0, BEGAN_S + 2.0)


def test_a_transcript_that_fails_under_an_answer_is_a_decision_and_no_turn_of_its_own() -> None:
    tracer = TurnTracer()
    heard_for(tracer, 3)
    turn = a_turn()
    (trace,) = follow(
        tracer, *turn[:6], (2.95, TranscriptFailed(0, "broken")), *turn[6:], (6.0, TranscriptFailed(0, ""))
    )
    assert trace.status == "completed"
    assert [d.name for d in trace.decisions] == ["transcript_failed"]


def test_turns_that_are_never_answered_are_bounded() -> None:
    tracer = TurnTracer()
    for turn in range(10 * MOST_TURNS):
        assert not follow(tracer, (turn, SpeechStarted(turn, 0)), (turn + 0.5, TurnCommitted(turn, 0, 100)))
    for number in range(100_000):
        tracer.sound(160, BEGAN_S + number)
    assert tracer.traceparent


@pytest.mark.parametrize("piece_ms", [20, 100, 1000])
def test_where_speech_ended_is_known_within_a_piece_of_sound(piece_ms: int) -> None:
    tracer = TurnTracer()
    heard_for(tracer, 4, piece_ms)
    (trace,) = follow(tracer, *a_turn())
    assert trace.speech_end_s == pytest.approx(BEGAN_S + 2.0, abs=0.001)


# --- what is sent -----------------------------------------------------------------------------------------------------


def a_trace(status: str = "completed", late_s: float = 0.0) -> TurnTrace:
    tracer = TurnTracer()
    heard_for(tracer, 2.5)
    turn = [(at_s + (late_s if at_s > 2.8 else 0), event) for at_s, event in a_turn(status=status)]
    (trace,) = follow(tracer, *turn)
    return trace


def test_a_turn_is_sent_as_one_trace_with_its_stages_and_linked_to_the_client() -> None:
    exporter = InMemorySpanExporter()
    sender = TurnExporter("http://nowhere", exporter)
    trace, client = a_trace(), f"00-{'ab' * 16}-{'cd' * 8}-01"
    sender.send(trace, {"antiphon.session": "sess_1"}, client)
    sender.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans["antiphon.turn"]
    assert set(spans) == {"antiphon.turn", "antiphon.listen", *(f"antiphon.{s}" for s in (*STAGES, "heard"))}
    assert (f"{root.context.trace_id:032x}", f"{root.context.span_id:016x}") == (trace.trace_id, trace.span_id)
    assert {s.context.trace_id for s in spans.values()} == {root.context.trace_id}
    assert all(s.parent.span_id == root.context.span_id for s in spans.values() if s is not root)
    assert [f"{link.context.trace_id:032x}" for link in root.links] == ["ab" * 16]
    assert root.attributes["antiphon.session"] == "sess_1"
    stages_ms = sum(spans[f"antiphon.{s}"].end_time - spans[f"antiphon.{s}"].start_time for s in STAGES) / 1e6
    assert stages_ms == pytest.approx(root.attributes["antiphon.voice_to_voice_ms"], abs=1)


def test_a_failed_turn_is_an_error_and_has_decisions_as_events() -> None:
    exporter = InMemorySpanExporter()
    sender = TurnExporter("http://nowhere", exporter)
    tracer = TurnTracer()
    (trace,) = follow(
        tracer,
        (0.1, SpeechStarted(0, 0)),
        (0.2, "ducked"),
        (2.0, TurnCommitted(0, 0, 2000)),
        (2.1, TranscriptFailed(0, "broken")),
    )
    sender.send(trace, {}, "")
    sender.close()
    (root,) = (s for s in exporter.get_finished_spans() if s.name == "antiphon.turn")
    assert not root.status.is_ok
    assert [event.name for event in root.events] == ["ducked"]


def test_every_late_or_failed_turn_is_kept_and_the_sample_of_the_rest() -> None:
    assert all(is_kept(a_trace(late_s=1.0), 1.5, 0.0) for _ in range(20))
    assert all(is_kept(a_trace("failed"), 1.5, 0.0) for _ in range(20))
    assert not any(is_kept(a_trace(), 1.5, 0.0) for _ in range(20))
    trace = a_trace()
    kept = 0
    for number in range(1000):
        trace.trace_id = f"{number * (2**32 // 1000):08x}" + "0" * 24
        kept += is_kept(trace, 1.5, 0.1)
    assert 95 <= kept <= 105


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (f"00-{'ab' * 16}-{'cd' * 8}-01", True),
        (f"00-{'00' * 16}-{'cd' * 8}-01", False),
        (f"00-{'ab' * 16}-{'00' * 8}-01", False),
        (f"01-{'ab' * 16}-{'cd' * 8}-01", False),
        (f"00-{'AB' * 16}-{'cd' * 8}-01", False),
        ("00-x", False),
        ("", False),
    ],
)
def test_a_clients_traceparent_is_checked(text: str, valid: bool) -> None:
    assert valid_traceparent(text) == (text if valid else "")


def test_other_servers_are_told_of_the_turn_under_way() -> None:
    assert trace_headers() == {}
    current = follow_session()
    assert trace_headers() == {}
    current.traceparent = "00-x"
    assert trace_headers() == {"traceparent": "00-x"}
    assert current_traceparent() == "00-x"
