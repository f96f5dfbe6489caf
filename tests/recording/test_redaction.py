"""What redaction removes from a recording (numbers and e-mail addresses, or all text), and what stays readable."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.protocols.dialects import field_names
from antiphon.recording.redaction import Redaction, Redactor, masked

# An id of the form that the server generates.
HEX = "0123456789abcdef0123"
HASH = re.compile("sha256:[0-9a-f]{16}")


def redacted(event: object, redaction: Redaction, *, by_client: bool = False) -> Any:
    return Redactor(redaction, field_names(), ["tara", "gpt-4o-2024-12-17"]).redacted(event, by_client=by_client)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("Call me at 030 / 123-456.", "Call me at [number]."),
        ("My card is 4111 1111 1111 1111, thanks.", "My card is [number], thanks."),
        ("It costs 3.50 euros.", "It costs [number] euros."),
        ("Reach jane.doe+x@mail.example.org today.", "Reach [email] today."),
        ("It is jane dot doe at example dot org.", "It is [email]."),
        ("The code is four, seven, one, one.", "The code is [number]."),
        ("One of us saw two birds.", "One of us saw two birds."),
        ("(+49) 30 1234", "[number]"),
        ('{"phone": "0301234", "city": "Bonn"}', '{"phone": "[number]", "city": "Bonn"}'),
        ("No number at all, nor an address @ home.", "No number at all, nor an address @ home."),
    ],
)
def test_numbers_and_addresses_are_masked(said: str, kept: str) -> None:
    assert masked(said) == kept


@given(st.text())
def test_no_digit_is_left(text: str) -> None:
    assert not any(c.isdigit() and c.isascii() for c in masked(text))


EVENT: dict[str, Any] = {
    "type": "response.done",
    "event_id": f"event_{HEX}",
    "audio_end_ms": 1200,
    "response": {
        "id": f"resp_{HEX}",
        "status": "completed",
        "output_modalities": ["audio"],
        "output": [{"type": "message", "role": "assistant", "content": [{"type": "text", "text": "It is 42."}]}],
        "something_new": ["It is 42."],
    },
}


@pytest.mark.parametrize(("redaction", "text"), [("off", "It is 42."), ("mask", "It is [number]."), ("drop", "")])
def test_what_is_no_word_of_the_protocol_is_redacted(redaction: Any, text: str) -> None:
    response = EVENT["response"]
    content = [{"type": "text", "text": text}]
    output = [{"type": "message", "role": "assistant", "content": content}]
    expected = {**EVENT, "response": {**response, "output": output, "something_new": [text]}}
    assert redacted(EVENT, redaction) == expected


@pytest.mark.parametrize("redaction", ["mask", "drop"])
def test_pieces_of_text_are_dropped_since_a_number_may_be_cut_by_their_seam(redaction: Any) -> None:
    pieces = [{"type": "a.delta", "item_id": f"item_{HEX}", "delta": piece} for piece in ("My PIN is 47", "11.")]
    assert [redacted(p, redaction) for p in pieces] == [{**p, "delta": ""} for p in pieces]
    hashed = {"type": "session.resume", "token": "sha256:0123456789abcdef"}
    assert redacted(hashed, redaction) == hashed


SOUND = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAwF0AAIC7AAACABAAZGF0YQAAAAA" * 20


@pytest.mark.parametrize("redaction", ["mask", "drop"])
@pytest.mark.parametrize(
    "event",
    [
        # Sound and pictures of any kind.
        {"type": "conversation.item.create", "item": {"content": [{"type": "input_audio", "audio": SOUND}]}},
        {"type": "session.init", "ref_audio": f"data:audio/wav;base64,{SOUND}"},
        {
            "type": "conversation.item.create",
            "item": {"content": [{"image_url": "data:image/png;base64,iVBOR5551234"}]},
        },
        # Parts of a text, none of which may appear in the recording.
        {"type": "x.completed", "words": [{"word": "five"}, {"word": "five"}, {"word": "one"}, {"word": "jane@x.org"}]},
        {"type": "x.completed", "logprobs": [{"token": " five", "logprob": -0.1, "bytes": [32, 102, 105]}]},
        # Names that clients choose.
        {"type": "response.create", "metadata": {"state": "jane@x.org", "user_id": "555 1234", "0301234": 5551234}},
        # Values that a client chose: ids of all kinds, names, and numbers that are JSON numbers.
        {"type": "conversation.item.create", "previous_item_id": "555 1234", "item": {"id": "item_5551234"}},
        {"type": "conversation.item.delete", "event_id": "jane@x.org", "item_id": "555-1234"},
        {"type": "conversation.item.create", "item": {"type": "function_call_output", "call_id": "call_5551234"}},
        {"type": "session.init", "session_id": 5551234, "pts_ms": "555 1234", "user_id": "jane"},
        {"type": "session.update", "session": {"voice": "jane-5551234", "model": "jane/5551234"}},
        {"type": "session.update", "session": {"transcription": {"known_speaker_names": ["jane", "555 1234"]}}},
        {"type": "session.update", "session": {"audio": {"output": {"voice": {"id": "jane"}}}}},
        {"type": "session.update", "phone": 5551234, "nested": {"code": 5551234, "audio_end_ms": 5551234}},
        {"type": "session.update", "role": 5551234, "session": {"5551234": True, "x": {"jane@x.org": None}}},
        {"type": "session.update", "context": {"state": "5551234", "reason": "jane@x.org", "id": "jane"}},
        {"type": "session.update", "state": "x5551234", "language": "jane@x.org", "token": "sha256:5551234"},
        {
            "type": "session.update",
            "session": {"tools": [{"name": "call_5551234", "parameters": {"properties": {"to_5551234": {}}}}]},
        },
        {
            "type": "session.update",
            "session": {"tools": [{"parameters": {"enum": [5551234], "const": 5551234.5, "required": ["5551234"]}}]},
        },
        {"type": "response.create", "response": {"prompt": {"id": "jane", "variables": {"555 1234": 5551234}}}},
        # Values that look like words of the protocol, but are not.
        {"type": "x", "item_id": "call 555 1234", "reason": "jane@x.org wrote me", "text": "sha256: 555 1234"},
    ],
)
def test_no_other_way_leads_into_a_recording(event: dict[str, Any], redaction: Any) -> None:
    kept = HASH.sub("", str(redacted(event, redaction, by_client=True)))
    for said in ("5551234", "555 1234", "jane", "x.org", "five", "102", SOUND[:60], "iVBOR"):
        assert said not in kept
    assert event["type"] in kept


@pytest.mark.parametrize("redaction", ["mask", "drop"])
@pytest.mark.parametrize(
    "event",
    [
        # Copies by the server of values that a client chose.
        {"type": "error", "error": {"event_id": "jane", "message": "Item '5551234'", "param": "item.content5551234"}},
        {
            "type": "conversation.item.added",
            "previous_item_id": "5551234",
            "item": {"id": "jane", "name": "at_5551234"},
        },
        {"type": "session.updated", "session": {"voice": "jane", "tools": [{"parameters": {"5551234": 5551234}}]}},
        {"type": "response.done", "response": {"metadata": {"jane": "5551234"}, "output": [{"call_id": "5551234"}]}},
        {"type": "conversation.item.input_audio_transcription.completed", "speaker_label": "jane", "transcript": ""},
    ],
)
def test_what_the_server_shows_of_a_clients_choice_is_redacted_too(event: dict[str, Any], redaction: Any) -> None:
    kept = HASH.sub("", str(redacted(event, redaction)))
    assert "jane" not in kept
    assert "5551234" not in kept


@pytest.mark.parametrize("redaction", ["mask", "drop"])
def test_what_the_server_makes_and_what_the_protocol_says_stays(redaction: Any) -> None:
    sent = {"type": "response.done", "event_id": f"event_{HEX}", "response": {"id": f"resp_{HEX}", "status": "failed"}}
    sent |= {"usage": {"total_tokens": 5551234}, "audio_end_ms": 1200, "error": {"param": "item.content[0].type"}}
    sent |= {"session": {"id": f"sess-{HEX}", "voice": "tara", "model": "gpt-4o-2024-12-17", "type": "realtime"}}
    assert redacted(sent, redaction) == sent
    came = {"type": "conversation.item.truncate", "item_id": f"item_{HEX}", "audio_end_ms": 1200, "content_index": 0}
    came |= {"previous_item_id": "root", "session": {"input_audio_format": {"format": "pcm16"}, "speed": 1.5}}
    came |= {"token": "sha256:0123456789abcdef", "server_event_seq": 17}
    assert redacted(came, redaction, by_client=True) == came


def test_names_of_properties_are_texts_of_the_client() -> None:
    event = {"type": "session.update", "jane_is_ill": {"since": True}, "session": {"speed": 1.0}}
    assert redacted(event, "mask", by_client=True) == event
    dropped = redacted(event, "drop", by_client=True)
    assert [HASH.sub("#", name) for name in dropped] == ["type", "#", "session"]


def test_equal_ids_have_equal_hashes_in_one_recording_and_others_in_the_next() -> None:
    redactor, event = Redactor("mask"), {"item_id": "555 1234", "call_id": "555 1235"}
    once = redactor.redacted(event)
    assert (redactor.redacted(event, by_client=True), Redactor("mask").redacted(event) == once) == (once, False)
    assert isinstance(once, dict)
    assert once["item_id"] != once["call_id"]


def test_a_long_text_takes_time_in_proportion() -> None:
    """Letters without an address, and spaces without a number, must not be searched again from each position."""
    for text in ("A" * 100_000, "a." * 50_000, "at " * 33_000, "1 " * 50_000, "one " * 25_000, "(" * 100_000):
        began = time.process_time()
        masked(text)
        # Milliseconds. A quadratic search would take minutes.
        assert time.process_time() - began < 5
