"""A door's state of a session: neither side loses a frame or gets one twice, wherever the connection breaks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.client.held_session import (
    MAX_CAPTIONS_BYTES,
    MAX_GONE_BYTES,
    MAX_KEPT_BYTES,
    CannotResume,
    HeldSession,
)

CREATED = '{"type":"session.created","event_id":"e","session":{"id":"sess-1"},"resume_token":"t1"}'


def numbered(seq: int, **fields: Any) -> str:
    return json.dumps({"type": "x", **fields, "server_event_seq": seq}, separators=(",", ":"))


def resumed(received: int, token: str = "t2", **facts: Any) -> str:
    return json.dumps({"type": "session.resumed", "received_events": received, "resume_token": token} | facts)


def opened() -> HeldSession:
    held = HeldSession()
    held.receive(CREATED)
    return held


def sent(held: HeldSession) -> list[Any]:
    frames = []
    while (frame := held.next_frame()) is not None:
        frames.append(frame)
    return frames


def test_the_client_gets_a_session_without_token_and_numbers() -> None:
    held = HeldSession()
    assert not held.can_resume
    assert json.loads(str(held.receive(CREATED))) == {
        "type": "session.created",
        "event_id": "e",
        "session": {"id": "sess-1"},
    }
    assert held.receive(numbered(1, text='ä,"server_event_seq":9}')) == json.dumps(
        {"type": "x", "text": 'ä,"server_event_seq":9}'}, separators=(",", ":")
    )
    assert held.receive(b"\x01\x02") == b"\x01\x02"
    assert json.loads(held.resume_request()) == {
        "type": "session.resume",
        "session_id": "sess-1",
        "resume_token": "t1",
        # The binary frame counts, although it has no sequence number.
        "last_received_server_event_seq": 2,
    }


def test_the_words_that_the_next_host_needs_are_not_the_clients() -> None:
    held = opened()
    first, second = (
        numbered(1, delta="a", resume_words="Ym9"),
        numbered(2, delta=',"resume_words":"', resume_words="eA=="),
    )
    assert [held.receive(first), held.receive(second)] == [
        '{"type":"x","delta":"a"}',
        json.dumps({"type": "x", "delta": ',"resume_words":"'}, separators=(",", ":")),
    ]
    # An event without words does not make those of an earlier event invalid.
    held.receive(numbered(3, delta=',"resume_words":"b"'))
    asked = json.loads(held.resume_request())
    assert (asked["resume_words"], asked["last_received_server_event_seq"]) == ("eA==", 3)


@pytest.mark.parametrize("kind", ["session.moving", "session.state_degraded", "session.replaced"])
def test_what_is_said_of_the_connection_is_not_the_clients(kind: str) -> None:
    held = opened()
    assert held.receive(f'{{"type":"{kind}","event_id":"e","server_event_seq":7}}') is None
    assert json.loads(held.resume_request())["last_received_server_event_seq"] == 7


@pytest.mark.parametrize("frame", ["", "no json", "[]", '{"type":"x"}', '{"a":",\\"server_event_seq\\":"}'])
def test_a_frame_without_a_number_is_passed_on_as_it_is(frame: str) -> None:
    held = opened()
    assert held.receive(frame) == frame
    assert json.loads(held.resume_request())["last_received_server_event_seq"] == 0


def test_when_the_host_has_received_less_than_was_sent_then_the_rest_is_sent_again() -> None:
    held = opened()
    for frame in ("a", "b", b"c"):
        held.keep(frame)
    assert sent(held) == ["a", "b", b"c"]
    held.resumed(resumed(1))
    assert held.unsent_bytes == 2
    held.keep("d")
    assert sent(held) == ["b", b"c", "d"]
    assert held.unsent_bytes == 0
    assert json.loads(held.resume_request())["resume_token"] == "t2"


def append(audio: str) -> str:
    return json.dumps({"type": "input_audio_buffer.append", "audio": audio})


def held_with(*frames: str, max_kept_bytes: int) -> HeldSession:
    held = HeldSession(max_kept_bytes)
    held.receive(CREATED)
    for frame in frames:
        held.keep(frame)
        held.next_frame()
    return held


def test_when_the_host_needs_audio_that_is_no_longer_kept_then_it_gets_silence_of_the_same_length() -> None:
    frames = [append("abcd"), append("efgh"), '{"type":"x"}', append("ijklmnop"), append("qrst"), append("uvwx")]
    held = held_with(*frames, max_kept_bytes=2 * len(append("abcd")))
    held.resumed(resumed(1))
    silent = [append("AAAA"), '{"type":"x"}', append("AAAAAAAA")]
    assert [json.loads(frame) for frame in sent(held)] == [json.loads(frame) for frame in (*silent, *frames[4:])]
    # The next host may lack them too.
    held.resumed(resumed(2))
    assert len(sent(held)) == 4


def test_when_the_host_needs_a_long_message_that_is_no_longer_kept_then_the_session_cannot_go_on() -> None:
    held = held_with("a" * (MAX_GONE_BYTES + 1), append("abcd"), append("efgh"), max_kept_bytes=1)
    with pytest.raises(CannotResume, match="client_gap") as lost:
        held.resumed(resumed(0))
    assert lost.value.is_final
    held.resumed(resumed(1))
    assert sent(held)[-1] == append("efgh")


@pytest.mark.parametrize(
    ("updated", "max_bytes"),
    [
        ({"type": "session.updated", "session": {"type": "transcription"}}, MAX_CAPTIONS_BYTES),
        ({"type": "transcription_session.updated", "session": {}}, MAX_CAPTIONS_BYTES),
        ({"type": "session.updated", "model": "m"}, MAX_CAPTIONS_BYTES),
        ({"type": "session.updated", "session": {"type": "realtime"}}, MAX_KEPT_BYTES),
    ],
)
def test_a_transcription_session_keeps_less_audio_than_a_conversation(updated: dict[str, Any], max_bytes: int) -> None:
    held = opened()
    held.receive(numbered(1, **updated))
    frame = append("abcd" * 16_000)
    for _ in range(2 * MAX_KEPT_BYTES // len(frame)):
        held.keep(frame)
        held.next_frame()
    held.resumed(resumed(0))
    assert sent(held).count(frame) == max_bytes // len(frame)


def test_frames_that_no_host_was_sent_are_never_dropped() -> None:
    held = HeldSession(max_kept_bytes=2)
    held.receive(CREATED)
    for frame in ("aaa", "bbb"):
        held.keep(frame)
    assert sent(held) == ["aaa", "bbb"]


@pytest.mark.parametrize(
    ("answer", "code", "final"),
    [
        ('{"type":"error","error":{"code":"unknown_session","message":"no"}}', "unknown_session", False),
        ('{"type":"error","error":{"code":"invalid_resume_token"}}', "invalid_resume_token", True),
        ('{"type":"error","error":{"code":"resource_exhausted","retryable":true}}', "resource_exhausted", False),
        ('{"type":"session.resync_required","reason":"journal_gap"}', "resync_required", True),
        ('{"type":"session.created"}', "session.created", False),
        ("garbage", "None", False),
        (b"\xff", "None", False),
    ],
)
def test_any_other_answer_to_a_resume_is_a_refusal(answer: str | bytes, code: str, final: bool) -> None:
    with pytest.raises(CannotResume) as refused:
        opened().resumed(answer)
    assert (refused.value.code, refused.value.is_final) == (code, final)


def test_pieces_of_responses_are_acknowledged_in_batches_and_other_events_at_once() -> None:
    held = opened()
    reported = []
    for seq in range(1, 100):
        held.receive(numbered(seq, type="x" if seq in (40, 41) else "response.output_audio.delta"))
        if acknowledgement := held.acknowledgement():
            reported.append(json.loads(acknowledgement)["server_event_seq"])
    assert reported == [32, 40, 41, 73]
    assert held.acknowledgement() is None


class Host:
    """A host that numbers its events, and counts the frames that it received, like a real host."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.said: list[str] = []

    def say(self) -> None:
        self.said.append(f"event {len(self.said) + 1}")


@given(st.lists(st.sampled_from(["client", "host", "deliver", "drop", "cut"]), max_size=60))
def test_wherever_the_connection_breaks_then_both_sides_get_everything_once(steps: list[str]) -> None:
    held, host, client = opened(), Host(), []
    num_said_by_client, in_flight = 0, 0
    for step in [*steps, "cut", "deliver", "deliver"]:
        match step:
            case "client":
                num_said_by_client += 1
                held.keep(f"frame {num_said_by_client}")
            case "host":
                host.say()
            case "deliver":
                host.received += sent(held)
                while in_flight < len(host.said):
                    in_flight += 1
                    client.append(held.receive(numbered(in_flight, text=host.said[in_flight - 1])))
            case "drop":
                # The frames on their way to the host are lost with the connection.
                sent(held)
                held.resumed(resumed(len(host.received)))
            case "cut":
                in_flight = json.loads(held.resume_request())["last_received_server_event_seq"]
                held.resumed(resumed(len(host.received)))
    assert host.received == [f"frame {n}" for n in range(1, num_said_by_client + 1)]
    assert [json.loads(str(frame))["text"] for frame in client] == host.said
