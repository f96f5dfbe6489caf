"""Tests vLLM's transcription dialect without a socket."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import TuningLimits
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import CancelResponse, CreateResponse, Response, ResponseDone, ResponseTextDelta
from antiphon.events.transcription import AppendAudio, CommitAudio, ConfigureTranscription, StreamTuning
from antiphon.protocols.connection import Context
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.vllm.dialect import MAX_ASKED, VllmDialect
from tests.protocols.realtime_connection import OUTPUTS, connect, exchange, frames, pcm, trace
from tests.scripted import PROFILE


def test_the_recorded_session_is_replayed_and_its_deltas_join_to_its_transcript() -> None:
    events: list[dict[str, Any]] = [
        {"type": "session.update", "model": "default", "rollback_tokens": 3, "word_timestamps": True},
        {"type": "input_audio_buffer.append", "audio": pcm(3200)},
        {"type": "input_audio_buffer.commit", "final": True},
        {"type": "nonsense"},
    ]
    got = trace("vllm", connect(), events, OUTPUTS)
    got = [f for f in got if f["type"].startswith("transcription.")]
    assert [f["type"] for f in got] == ["transcription.delta", "transcription.delta", "transcription.done"]
    assert got[0]["delta"] + got[1]["delta"] == got[2]["text"]


@pytest.mark.parametrize(
    ("event", "code", "message"),
    [
        ("{", "invalid_json", "Invalid JSON"),
        ("[]", "invalid_event", "An event is a JSON object"),
        ({"type": "boo"}, "unknown_event", "Unknown event type: boo"),
        ({"type": "session.update"}, "invalid_event", "Missing required field: model"),
        (
            {"type": "session.update", "model": "gpt-4o-transcribe"},
            "model_not_found",
            "The model `gpt-4o-transcribe` does not exist.",
        ),
        ({"type": "session.update", "model": "default", "rollback_tokens": -1}, "invalid_event", None),
        (
            {"type": "session.update", "model": "default", "rollback_tokens": 1.5},
            "invalid_event",
            "Invalid value for 'rollback_tokens': expected a whole number.",
        ),
        (
            {"type": "session.update", "model": "default", "max_prefix_tokens": 1025},
            "invalid_event",
            "Invalid value for 'max_prefix_tokens': expected 1 to 1024.",
        ),
        (
            {"type": "session.update", "model": "default", "max_audio_s": 301},
            "invalid_event",
            "Invalid value for 'max_audio_s': expected 5 to 300.",
        ),
        (
            {"type": "session.update", "model": "default", "realtime_max_tokens": 513},
            "invalid_event",
            "Invalid value for 'realtime_max_tokens': expected 1 to 512.",
        ),
        ({"type": "session.update", "model": "default", "keep_context": "yes"}, "invalid_event", None),
        (
            {"type": "session.update", "model": "default", "language": "tlh"},
            "invalid_event",
            "Unsupported language: tlh",
        ),
        ({"type": "session.update", "model": "default", "prompt": 5}, "invalid_event", "Invalid field: prompt"),
        ({"type": "input_audio_buffer.append", "audio": "%%%"}, "invalid_audio", "Invalid audio data"),
        ({"type": "input_audio_buffer.append", "audio": pcm(3)}, "invalid_audio", "Invalid audio data"),
        ({"type": "input_audio_buffer.append", "audio": pcm(64_002)}, "invalid_audio", "Invalid audio data"),
        ({"type": "input_audio_buffer.append", "audio": ["hello"]}, "invalid_audio", "Invalid audio data"),
        ({"type": "input_audio_buffer.append"}, "invalid_audio", "Invalid audio data"),
        ({"type": "input_audio_buffer.commit", "final": "yes"}, "invalid_event", "Invalid field: final"),
    ],
)
def test_when_an_event_is_wrong_then_the_error_is_flat_and_nothing_changes(
    event: Any, code: str, message: str | None
) -> None:
    connection = connect(dialect="vllm")
    exchange(connection, type="session.update", model="default")
    connection.commands()
    connection.receive(event if isinstance(event, str) else json.dumps(event))
    (answer,) = frames(connection)
    assert set(answer) == {"type", "error", "code"}
    assert (answer["type"], answer["code"]) == ("error", code)
    assert message is None or answer["error"] == message
    assert connection.commands() == []


@pytest.mark.parametrize("kind", ["append", "commit"])
def test_when_audio_comes_before_a_model_is_named_then_it_is_refused(kind: str) -> None:
    connection = connect(dialect="vllm")
    frames(connection)
    (answer,) = exchange(connection, type=f"input_audio_buffer.{kind}", audio=pcm(2))
    assert answer["code"] == "model_not_validated"


SOURCE = {
    "segment_duration_s": 2.0,
    "rollback_tokens": 5,
    "unfixed_chunks": 2,
    "max_prefix_tokens": 1024,
    "max_audio_s": 300.0,
    "realtime_max_tokens": 128,
}
LARGE = replace(PROFILE, limits=TuningLimits(600.0, 4096, 4096, context_tokens=512, context_audio=True))


def test_the_tuning_of_vllm_is_followed_and_told() -> None:
    connection = connect(dialect="vllm", transcriber=LARGE)
    frames(connection)
    (answer,) = exchange(connection, type="session.update", model="default", **SOURCE)
    assert answer == {"type": "session.updated", "model": "default", **SOURCE, "keep_context": False}
    (command,) = connection.commands()
    assert isinstance(command, ConfigureTranscription)
    assert command.config.tuning == StreamTuning(2.0, 5, 2, 1024, 300.0, 128)


def test_when_a_model_can_do_less_than_is_asked_for_then_the_client_is_told_what_is_done() -> None:
    connection = connect(dialect="vllm", transcriber=PROFILE)
    frames(connection)
    (answer,) = exchange(connection, type="session.update", model="default", **SOURCE, keep_context=True)
    less = {"max_prefix_tokens": 180, "max_audio_s": 22, "realtime_max_tokens": 128, "keep_context": False}
    assert answer == {"type": "session.updated", "model": "default", **SOURCE, **less}


def test_what_an_update_leaves_out_stays_and_without_tuning_its_answer_has_none() -> None:
    connection = connect(dialect="vllm", transcriber=LARGE)
    frames(connection)
    assert exchange(connection, type="session.update", model="default", language="en") == [
        {"type": "session.updated", "model": "default"}
    ]
    (one,) = exchange(connection, type="session.update", model="default", keep_context=True, max_audio_s=60)
    (two,) = exchange(connection, type="session.update", model="default", rollback_tokens=3)
    assert (one["keep_context"], one["max_audio_s"], one["rollback_tokens"]) == (True, 60, PROFILE.rollback_tokens)
    assert two == one | {"rollback_tokens": 3}
    (error,) = exchange(connection, type="session.update", model="default", max_audio_s=1, rollback_tokens=9)
    assert error["error"] == "Invalid value for 'max_audio_s': expected 5 to 300."
    (three,) = exchange(connection, type="session.update", model="default", keep_context=True)
    assert three == two


class Hearing:
    """A connection with a conversation model that hears."""

    def __init__(self, *, hears: bool = True, **update: Any) -> None:
        names = ModelNames(("omni",), hears=hears)
        context = Context(
            models=ModelNames(("asr",)), now_s=lambda: 0.0, steady_s=lambda: 0.0, conversation_models=names
        )
        self.dialect = VllmDialect(context)
        self.answers: list[dict[str, Any]] = []
        self.say("session.update", model="omni", **update)

    def say(self, kind: str, **fields: Any) -> list[Any]:
        """Return the session's commands: seconds of audio, "commit", "cancel", and how a response is requested."""
        received = self.dialect.feed(json.dumps({"type": kind, **fields}))
        self.answers += [json.loads(frame.encode()) for frame in received.answers]
        out: list[Any] = []
        for command in received.commands:
            match command:
                case AppendAudio(samples):
                    out.append(len(samples) / SAMPLE_RATE_HZ)
                case CommitAudio(final=final):
                    out.append("commit" if final else "nothing")
                case CreateResponse(when_busy=when_busy):
                    out.append(when_busy)
                case CancelResponse():
                    out.append("cancel")
        return out

    def append(self, seconds: float) -> list[Any]:
        return self.say("input_audio_buffer.append", audio=pcm(int(2 * seconds * SAMPLE_RATE_HZ)))

    def commit(self, *, final: bool) -> list[Any]:
        return self.say("input_audio_buffer.commit", final=final)

    def answer(self, text: str, status: str = "completed") -> list[tuple[str, Any]]:
        response = Response("resp", False, None, None, None, True)
        response.status = status  # type: ignore[assignment]
        delta = ResponseTextDelta(None, text, False)  # type: ignore[arg-type]
        sent = [*self.dialect.send(delta), *self.dialect.send(ResponseDone(response))]
        events = [json.loads(frame.encode()) for frame in sent]
        return [(e["type"], e.get("delta", e.get("text"))) for e in events]


FULL = RemoteProtocolError("memory_limit_exceeded", "This was not kept.")


DELTA, DONE_TEXT, AUDIO_DONE = "transcription.delta", "transcription.done", "response.output_audio.done"


def test_when_a_commit_is_not_final_then_its_segment_is_answered_while_more_is_appended() -> None:
    one = Hearing()
    # Like vLLM's clients, begin the request before sending audio.
    assert one.commit(final=False) == []
    assert one.append(1.0) == [1.0]
    assert one.commit(final=False) == ["commit", "cut"]
    assert one.append(0.5) == [0.5]
    assert one.answer("One") == [(DELTA, "One")]
    assert one.commit(final=True) == ["commit", "wait"]
    # The end repeats the text of the whole request.
    assert one.answer(" two") == [(DELTA, " two"), (DONE_TEXT, "One two"), (AUDIO_DONE, None)]
    # Audio after the end belongs to another request.
    assert one.append(0.5) == [0.5]
    assert one.commit(final=True) == ["commit", "cut"]
    assert one.answer("Three") == [(DELTA, "Three"), (DONE_TEXT, "Three"), (AUDIO_DONE, None)]


def test_when_a_request_goes_on_then_every_five_seconds_are_a_segment() -> None:
    one = Hearing()
    # No request has begun, so the audio is one turn.
    assert one.append(6.0) == [6.0]
    assert one.commit(final=False) == ["commit", "cut"]
    assert one.append(12.0) == [5.0, "commit", "wait", 5.0, "commit", "wait", 2.0]
    assert Hearing(segment_duration_s=2.0).append(3.0) == [3.0]
    other = Hearing(segment_duration_s=2.0)
    other.commit(final=False)
    assert other.append(3.0) == [2.0, "commit", "cut", 1.0]


def test_when_the_answers_do_not_keep_up_then_segments_grow() -> None:
    one = Hearing()
    one.commit(final=False)
    commands = one.append(30.0)
    assert commands.count("commit") == MAX_ASKED
    assert commands[-1] == 10.0
    assert one.commit(final=False) == []
    assert one.commit(final=True) == ["commit", "wait"]
    ends = [one.answer("x") for _ in range(MAX_ASKED + 1)]
    assert [len(end) for end in ends] == [1] * MAX_ASKED + [3]


def test_when_a_request_ends_without_more_audio_then_its_end_comes_with_the_last_answer() -> None:
    one = Hearing()
    one.commit(final=False)
    one.append(1.0)
    one.commit(final=False)
    assert one.commit(final=True) == []
    assert [answer["type"] for answer in one.answers] == ["session.updated"]
    assert one.answer("One") == [(DELTA, "One"), (DONE_TEXT, "One"), (AUDIO_DONE, None)]
    one.commit(final=False)
    one.append(1.0)
    one.commit(final=False)
    one.answer("Two")
    assert one.commit(final=True) == []
    assert [e["type"] for e in one.answers] == ["session.updated", DONE_TEXT, AUDIO_DONE]
    assert one.answers[1]["text"] == "Two"


def test_when_an_answer_is_cut_then_its_end_comes_and_the_next_is_its_own() -> None:
    one = Hearing()
    one.append(1.0)
    one.commit(final=True)
    # Audio alone does not cut off a response, because microphones send audio all the time.
    assert one.append(1.0) == [1.0]
    assert one.say("response.cancel") == ["cancel"]
    assert one.answer("On", "cancelled") == [(DELTA, "On"), (DONE_TEXT, "On"), (AUDIO_DONE, None)]
    assert one.commit(final=True) == ["commit", "cut"]
    assert one.answer("Two") == [(DELTA, "Two"), (DONE_TEXT, "Two"), (AUDIO_DONE, None)]


def refused(one: Hearing) -> list[Any]:
    return [json.loads(frame.encode())["type"] for frame in one.dialect.refuse(FULL, None)]


def test_when_the_last_segment_of_a_request_is_refused_then_the_request_ends_with_the_answers_that_it_has() -> None:
    one = Hearing()
    one.append(1.0)
    one.commit(final=False)
    one.append(1.0)
    one.commit(final=True)
    assert refused(one) == ["error"]
    assert one.answer("One") == [(DELTA, "One"), (DONE_TEXT, "One"), (AUDIO_DONE, None)]
    # If all segments of the request were already answered, the request ends at once.
    one.append(1.0)
    one.commit(final=False)
    assert one.answer("Two") == [(DELTA, "Two")]
    one.append(1.0)
    one.commit(final=True)
    assert refused(one) == ["error", DONE_TEXT, AUDIO_DONE]
    # A request with one segment ends with the error; an earlier request continues.
    one.append(1.0)
    one.commit(final=True)
    one.append(1.0)
    one.commit(final=True)
    assert refused(one) == ["error"]
    assert one.answer("Three") == [(DELTA, "Three"), (DONE_TEXT, "Three"), (AUDIO_DONE, None)]
    one.append(1.0)
    one.commit(final=True)
    assert refused(one) == ["error"]


def test_when_a_response_is_refused_on_a_connection_then_the_vllm_client_is_told_in_its_own_shape() -> None:
    connection = connect(dialect="vllm")
    exchange(connection, type="session.update", model="default")
    (frame,) = connection.refuse(FULL, None)
    assert json.loads(frame.encode()) == {
        "type": "error", "error": "This was not kept.", "code": "memory_limit_exceeded",
    }  # fmt: skip


def test_when_there_is_no_response_to_cancel_since_the_model_transcribes_then_that_is_an_error() -> None:
    connection = connect(dialect="vllm")
    exchange(connection, type="session.update", model="default")
    (answer,) = exchange(connection, type="response.cancel")
    assert answer["code"] == "response_cancel_not_active"


def test_when_a_model_only_reads_then_a_commit_that_is_not_final_changes_nothing() -> None:
    one = Hearing(hears=False)
    one.append(7.0)
    assert one.commit(final=False) == ["nothing"]
    assert one.append(7.0) == [7.0]
    assert one.commit(final=True) == ["commit", "cut"]
