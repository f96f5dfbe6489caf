"""What is left out of a recording: numbers and e-mail addresses, or every text; and what stays to be read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.recording.redaction import masked, redacted


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
    "event_id": "event_12",
    "audio_end_ms": 1200,
    "response": {
        "id": "resp_34",
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
    pieces = [{"type": "a.delta", "item_id": "item_1", "delta": piece} for piece in ("My PIN is 47", "11.")]
    assert [redacted(p, redaction) for p in pieces] == [{**p, "delta": ""} for p in pieces]
    hashed = {"type": "session.resume", "token": "sha256:0123"}
    assert redacted(hashed, redaction) == hashed
