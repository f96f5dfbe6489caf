"""The frames for a client that missed events because their host died just after it had stored them."""

from __future__ import annotations

import json
from typing import Any

from antiphon.events.conversation import CreateResponse
from antiphon.protocols.wire import message
from antiphon.server.live.moving.resume_point import AskedResponse, OpenResponse, ResumePoint, with_missed
from antiphon.transports.journal import Journal, SentFrame

DONE = AskedResponse(OpenResponse("resp_1", True, ["item_1"]), CreateResponse(event_id="asked"))


def frame(seq: int, **fields: Any) -> SentFrame:
    return SentFrame(seq, json.dumps({**fields, "server_event_seq": seq}, separators=(",", ":")))


def received(continued: ResumePoint) -> list[dict[str, Any]]:
    return [json.loads(f.frame) for f in continued.journal]


# Frames 4 to 6 are deltas of the response, which are not stored.
JOURNAL = [
    frame(2, type="response.created", response={"id": "resp_1"}),
    frame(3, type="conversation.item.added", item={"id": "item_1"}),
    frame(7, type="conversation.item.done", item={"id": "item_1"}),
    frame(8, type="conversation.item.added", item={"id": "item_2"}),
    frame(9, type="response.done", response={"id": "resp_1"}),
]


def test_when_a_client_lacks_the_end_alone_then_it_is_told_it_under_the_numbers_it_expects() -> None:
    found = with_missed(ResumePoint(journal=JOURNAL, finished=DONE, owed=[]), 6)
    assert [(f["type"], f["server_event_seq"]) for f in received(found)] == [
        ("conversation.item.done", 7),
        ("conversation.item.added", 8),
        ("response.done", 9),
    ]
    assert found.is_whole
    assert (found.open_response, found.owed) == (None, [])


def test_when_a_client_has_all_then_it_is_told_nothing_again() -> None:
    for last_received in (9, 12):
        found = with_missed(ResumePoint(journal=JOURNAL, finished=DONE), last_received)
        assert (found.journal, found.open_response, found.owed) == ([], None, [])


def test_when_a_client_lacks_pieces_of_the_last_response_then_it_is_begun_anew() -> None:
    waiting = CreateResponse(event_id="later")
    for last_received in (3, 5):
        found = with_missed(ResumePoint(journal=JOURNAL, finished=DONE, owed=[waiting]), last_received)
        # The frame of the user's item is kept. The response's end is reported when the session continues.
        assert [(f["item"]["id"], f["server_event_seq"]) for f in received(found)] == [("item_2", last_received + 1)]
        assert found.open_response == DONE.response
        assert found.owed == [DONE.request, waiting]


def test_when_a_client_lacks_pieces_of_a_response_out_of_band_then_that_one_is_begun_anew() -> None:
    beside = AskedResponse(OpenResponse("resp_1", False), CreateResponse(stored=False))
    found = with_missed(ResumePoint(journal=JOURNAL, finished_beside=[beside]), 5)
    assert (found.beside, found.owed, found.open_response) == ([beside], [beside.request], None)
    assert not any("resp_1" in str(frame.frame) for frame in found.journal)
    # If the client has not seen its beginning, only the new response is reported.
    later = [
        frame(5, type="session.updated"),
        frame(7, type="response.created", response={"id": "resp_1"}),
        JOURNAL[-1],
    ]
    found = with_missed(ResumePoint(journal=later, finished_beside=[beside]), 4)
    assert (found.beside, found.owed) == ([], [beside.request])


def test_when_a_client_lacks_the_beginning_too_then_it_is_told_that_first() -> None:
    found = with_missed(ResumePoint(journal=JOURNAL, finished=DONE), 1)
    assert [(f["type"], f["server_event_seq"]) for f in received(found)] == [
        ("response.created", 2),
        ("conversation.item.added", 3),
        ("conversation.item.added", 4),
    ]
    assert found.open_response == DONE.response


def test_when_pieces_of_a_response_before_the_last_turn_are_missing_then_what_ended_it_is_told() -> None:
    found = with_missed(ResumePoint(journal=JOURNAL), 3)
    assert [f["server_event_seq"] for f in received(found)] == [4, 5, 6]
    assert found.open_response is None


def test_when_a_host_has_handed_over_then_its_journal_stays_as_it_is() -> None:
    whole = ResumePoint(journal=JOURNAL, finished=DONE, is_whole=True)
    assert with_missed(whole, 3) is whole


def test_frames_are_kept_under_the_numbers_they_will_have_and_without_pieces() -> None:
    journal = Journal(lambda: 0.0, numbered=True)
    kinds = ["a", "response.output_audio.delta", "b", "c"]
    for kind in kinds:
        journal.push(message(type=kind))
    assert [journal.next() for _ in range(3)]
    journal.acknowledge(1)
    coming = [message(type="response.output_text.delta"), message(type="d")]
    found = journal.unacknowledged(coming, 1 << 20)
    assert [(f.seq, json.loads(f.frame)["type"]) for f in found] == [(3, "b"), (4, "c"), (6, "d")]
    # The frames are sent with these numbers.
    for frame in coming:
        journal.push(frame)
    sent = [json.loads(journal.next() or "") for _ in range(3)]
    assert [(s["server_event_seq"], s["type"]) for s in sent][::2] == [(4, "c"), (6, "d")]
    # If the limit is small, only the newest frames are kept.
    assert [f.seq for f in journal.unacknowledged([], len(found[-1].frame) * 2)] == [4, 6]
    assert Journal(lambda: 0.0).unacknowledged(coming, 1 << 20) == []
