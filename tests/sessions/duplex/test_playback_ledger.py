"""How much of each response was heard: by acknowledgements, by the clock, and which acknowledgements are too late."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ContentPart, ContentPartDone, ContentPosition, ResponseAudioDelta
from antiphon.events.duplex import AcknowledgePlayback, PlaybackCursors
from antiphon.sessions.duplex.playback_ledger import PlaybackLedger

A, B = ContentPosition("resp_a", "item_a", 0), ContentPosition("resp_b", "item_b", 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def generated(ledger: PlaybackLedger, at: ContentPosition, seconds: float, *, done: bool = True) -> None:
    ledger.follow(ResponseAudioDelta(at, np.zeros(int(1000 * seconds), np.float32), 1000))
    if done:
        ledger.follow(ContentPartDone(at, ContentPart("output_audio")))


def test_when_a_client_acknowledges_nothing_then_audio_is_heard_as_it_would_be_played() -> None:
    clock = Clock()
    ledger = PlaybackLedger(clock)
    generated(ledger, A, 2.0)
    clock.now = 0.5
    assert ledger.is_playing
    assert ledger.silence() == [(A, 500)]
    assert not ledger.is_playing
    assert ledger.silence() == []


def test_when_audio_was_heard_to_its_end_then_it_is_not_cut() -> None:
    clock = Clock()
    ledger = PlaybackLedger(clock)
    generated(ledger, A, 2.0)
    clock.now = 2.5
    assert not ledger.is_playing
    assert ledger.silence() == []


def test_when_a_client_acknowledges_then_its_cursors_say_what_was_heard() -> None:
    clock = Clock()
    ledger = PlaybackLedger(clock)
    generated(ledger, A, 2.0)
    known, truncation = ledger.acknowledge(AcknowledgePlayback(700, 600))
    assert known.cursors == PlaybackCursors(2000, 2000, 700, 600)
    assert (known.history_exact, truncation) == (False, None)
    clock.now = 9.0
    assert ledger.silence() == [(A, 600)]


def test_cursors_only_move_forward_and_no_further_than_the_audio() -> None:
    ledger = PlaybackLedger(Clock())
    generated(ledger, A, 2.0, done=False)
    for played, committed, expected in ((900, 800, (900, 800)), (100, 100, (900, 800)), (9000, 9000, (2000, 2000))):
        known, _ = ledger.acknowledge(AcknowledgePlayback(played, committed, "resp_a"))
        assert (known.played_ms, known.committed_ms) == expected
    # More audio may follow.
    assert not known.history_exact
    ledger.follow(ContentPartDone(A, ContentPart("output_audio")))
    assert ledger.acknowledge(AcknowledgePlayback(2000, 2000, "resp_a"))[0].history_exact


def test_when_more_is_acknowledged_after_a_cut_then_the_item_is_cut_anew() -> None:
    ledger = PlaybackLedger(Clock())
    generated(ledger, A, 2.0)
    ledger.acknowledge(AcknowledgePlayback(300, 300))
    assert ledger.silence() == [(A, 300)]
    assert ledger.acknowledge(AcknowledgePlayback(450, 450))[1] == (A, 450)
    assert ledger.acknowledge(AcknowledgePlayback(450, 450))[1] is None


def test_when_the_user_has_committed_another_turn_then_an_acknowledgement_is_too_late() -> None:
    ledger = PlaybackLedger(Clock())
    generated(ledger, A, 2.0)
    assert ledger.settle() == []
    generated(ledger, B, 1.0)
    for ack in (AcknowledgePlayback(1, 1, "resp_a"), AcknowledgePlayback(1, 1, None, "item_a")):
        with pytest.raises(RemoteProtocolError) as raised:
            ledger.acknowledge(ack)
        assert raised.value.code == "playback_ack_too_late"
    assert ledger.acknowledge(AcknowledgePlayback(1, 1))[0].item_id == "item_b"


def test_with_acks_only_nothing_else_was_heard() -> None:
    clock = Clock()
    ledger = PlaybackLedger(clock, acks_only=True)
    generated(ledger, A, 2.0)
    generated(ledger, B, 1.0)
    ledger.acknowledge(AcknowledgePlayback(1000, 1000, "resp_b"))
    clock.now = 60.0
    assert ledger.settle() == [(A, 0)]


@pytest.mark.parametrize(
    ("response_id", "item_id", "code"),
    [
        ("resp_x", None, "playback_item_not_found"),
        (None, "item_x", "playback_item_not_found"),
        ("resp_a", "item_b", "playback_item_mismatch"),
        ("resp_a", "item_x", "playback_item_mismatch"),
        ("resp_x", "item_a", "playback_item_mismatch"),
    ],
)
def test_when_an_acknowledgement_names_no_item_then_it_is_an_error(
    response_id: str | None, item_id: str | None, code: str
) -> None:
    ledger = PlaybackLedger(Clock())
    generated(ledger, A, 1.0)
    generated(ledger, B, 1.0)
    with pytest.raises(RemoteProtocolError) as raised:
        ledger.acknowledge(AcknowledgePlayback(1, 1, response_id, item_id))
    assert raised.value.code == code


def test_an_item_may_be_named_after_its_response() -> None:
    ledger = PlaybackLedger(Clock())
    with pytest.raises(RemoteProtocolError):
        ledger.acknowledge(AcknowledgePlayback(1, 1))
    generated(ledger, A, 1.0)
    assert ledger.acknowledge(AcknowledgePlayback(1, 1, "resp_a", "item_resp_a"))[0].item_id == "item_a"


def test_when_a_first_acknowledgement_is_of_0_ms_then_it_corrects_the_clock() -> None:
    clock = Clock()
    ledger = PlaybackLedger(clock)
    generated(ledger, A, 2.0)
    clock.now = 1.0
    assert ledger.silence() == [(A, 1000)]
    assert ledger.acknowledge(AcknowledgePlayback(0, 0))[1] == (A, 0)


def test_while_playback_is_on_hold_its_clock_stands_still() -> None:
    clock = Clock()
    ledger = PlaybackLedger(clock)
    generated(ledger, A, 2.0)
    clock.now = 0.5
    ledger.hold(True)
    clock.now = 9.0
    assert ledger.is_playing
    ledger.hold(False)
    clock.now = 9.5
    assert ledger.silence() == [(A, 1000)]


def test_when_the_client_has_truncated_an_item_then_it_is_cut_no_further() -> None:
    ledger = PlaybackLedger(Clock())
    generated(ledger, A, 2.0)
    ledger.cut("item_a", 700)
    assert ledger.silence() == []
    assert not ledger.is_playing
