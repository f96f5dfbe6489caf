"""Tests that the journal numbers frames, keeps them and sends them again."""

from __future__ import annotations

import json
import random

import pytest

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.wire import Frame, message
from antiphon.transports.journal import Journal, JournalGap, ResumeToken


def numbered_journal(**options: int) -> Journal:
    return Journal(lambda: 0.0, True, **options)


def drained(journal: Journal) -> list[dict[str, object]]:
    out = []
    while (text := journal.next()) is not None:
        out.append(json.loads(text))
    return out


def numbers(journal: Journal) -> list[object]:
    return [f.get("server_event_seq") for f in drained(journal)]


def test_frames_are_numbered_as_they_are_sent_except_those_about_the_connection() -> None:
    journal = numbered_journal()
    for kind, numbered in (("session.created", False), ("a", True), ("session.resumed", False), ("b", True)):
        journal.push(Frame({"type": kind}, numbered=numbered))
    assert numbers(journal) == [None, 1, None, 2]


def test_without_numbers_frames_are_sent_unchanged() -> None:
    journal = Journal(lambda: 0.0)
    journal.push(message(type="a"))
    assert journal.next() == '{"type":"a"}'
    assert journal.next() is None


def test_when_a_client_resumes_then_missed_frames_come_before_waiting_ones() -> None:
    journal = numbered_journal()
    for name in "abcd":
        journal.push(message(type=name))
    assert [journal.next() and None for _ in range(3)] == [None] * 3
    journal.rewind(1)
    journal.push(Frame({"type": "session.resumed"}, numbered=False), first=True)
    out = drained(journal)
    assert [(f["type"], f.get("server_event_seq")) for f in out] == [
        ("session.resumed", None),
        ("b", 2),
        ("c", 3),
        ("d", 4),
    ]
    # Rewind again, while earlier frames are still being sent again.
    journal.rewind(2)
    journal.next()
    journal.rewind(2)
    assert numbers(journal) == [3, 4]


def test_when_a_missed_frame_was_acknowledged_or_dropped_then_the_rewind_is_refused() -> None:
    journal = numbered_journal()
    for name in "abc":
        journal.push(message(type=name))
    drained(journal)
    journal.acknowledge(2)
    with pytest.raises(JournalGap, match="journal_gap"):
        journal.rewind(1)
    journal.rewind(2)
    assert numbers(journal) == [3]
    for wrong in (4, -1):
        with pytest.raises(RemoteProtocolError) as reported:
            journal.acknowledge(wrong)
        assert reported.value.code == "invalid_event_ack"
        with pytest.raises(RemoteProtocolError):
            journal.rewind(wrong)


def test_sent_frames_are_kept_up_to_a_size_and_an_age() -> None:
    small = numbered_journal(max_bytes=400)
    for k in range(20):
        small.push(message(type="x", k=k))
        small.next()
    with pytest.raises(JournalGap):
        small.rewind(1)
    small.rewind(15)
    clock = [0.0]
    old = Journal(lambda: clock[0], True, max_s=60)
    for clock[0] in (0.0, 50.0, 100.0):
        old.push(message(type="x"))
        old.next()
    with pytest.raises(JournalGap):
        old.rewind(0)
    old.rewind(1)


def test_when_more_waits_than_is_kept_then_the_journal_is_overfull() -> None:
    journal = numbered_journal(max_bytes=200)
    for _ in range(3):
        journal.push(message(type="x" * 50))
    assert not journal.is_overfull
    for _ in range(3):
        journal.push(message(type="x" * 50))
    assert journal.is_overfull
    # Sent frames have a separate limit: the oldest are dropped.
    drained(journal)
    assert not journal.is_overfull


def test_media_frames_of_an_older_epoch_are_neither_sent_nor_sent_again() -> None:
    journal = numbered_journal()
    journal.push(Frame({"type": "old", "n": 0}, 0))
    journal.next()
    journal.push(Frame({"type": "old", "n": 1}, 0))
    journal.push(message(type="fact"))
    assert journal.raise_epoch(1) == 1
    journal.push(Frame({"type": "new"}, 1))
    journal.rewind(0)
    assert [f["type"] for f in drained(journal)] == ["fact", "new"]
    # Frames that were skipped leave no gap.
    journal.rewind(1)
    assert numbers(journal) == [2, 3]


@pytest.mark.parametrize("seed", range(50))
def test_however_often_the_connection_breaks_each_frame_comes_once_and_in_order(seed: int) -> None:
    draw = random.Random(seed)
    journal = numbered_journal()
    received: list[int] = []
    last = pushed = 0
    for _ in range(400):
        match draw.randrange(5):
            case 0 | 1:
                journal.push(message(type="x", n=pushed))
                pushed += 1
            case 2:
                # Sent, but possibly lost in transit.
                if (text := journal.next()) and draw.random() < 0.8:
                    event = json.loads(text)
                    if event["server_event_seq"] == last + 1:
                        received.append(event["n"])
                        last += 1
                    else:
                        # An earlier frame was lost, so the connection and this frame are lost too.
                        journal.rewind(last)
            case 3:
                journal.acknowledge(draw.randint(0, last))
            case 4:
                journal.rewind(last)
    journal.rewind(last)
    received += [f["n"] for f in drained(journal)]  # type: ignore[misc]
    assert received == list(range(pushed))


def test_a_token_is_valid_until_its_successor_is_confirmed() -> None:
    token = ResumeToken()
    first = token.renew()
    assert len(first) >= 43
    assert token.matches(first)
    assert not token.matches(first + "x")
    assert not token.matches("")
    second = token.renew()
    # Until the client sends a message, it may not have received the new token.
    assert token.matches(first)
    third = token.renew()
    assert not token.matches(second)
    assert token.matches(third)
    token.confirm()
    assert not token.matches(first)
    assert token.matches(third)
    assert ResumeToken.stored(token.hash).matches(third)
    fourth = token.renew()
    both = ResumeToken.stored(token.hash)
    assert both.matches(fourth)
    assert both.matches(third)
    assert third.encode() not in token.hash
