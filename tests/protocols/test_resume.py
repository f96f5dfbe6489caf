"""Frames that are numbered, kept and sent again."""

from __future__ import annotations

import json
import random

import pytest

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.resume.journal import Journal, JournalGap, ResumeToken
from antiphon.protocols.wire import MediaFrame, frame


def journal(**options: int) -> Journal:
    return Journal(lambda: 0.0, True, **options)


def drained(it: Journal) -> list[dict[str, object]]:
    out = []
    while (text := it.next()) is not None:
        out.append(json.loads(text))
    return out


def numbers(it: Journal) -> list[object]:
    return [f.get("server_event_seq") for f in drained(it)]


def test_frames_are_numbered_as_they_are_sent_and_those_of_the_connection_are_not() -> None:
    it = journal()
    for kind in ("session.created", "a", "session.resumed", "b"):
        it.push(frame(type=kind))
    assert numbers(it) == [None, 1, None, 2]


def test_a_plain_queue_changes_nothing() -> None:
    it = Journal(lambda: 0.0)
    it.push('{"type":"a"}')
    assert it.next() == '{"type":"a"}'
    assert it.next() is None


def test_who_comes_back_gets_what_was_missed_and_then_what_waited() -> None:
    it = journal()
    for name in "abcd":
        it.push(frame(type=name))
    assert [it.next() and None for _ in range(3)] == [None] * 3
    it.rewind(1)
    it.push(frame(type="session.resumed"), first=True)
    out = drained(it)
    assert [(f["type"], f.get("server_event_seq")) for f in out] == [
        ("session.resumed", None), ("b", 2), ("c", 3), ("d", 4),
    ]  # fmt: skip
    # And again, cut off within what was sent again.
    it.rewind(2)
    it.next()
    it.rewind(2)
    assert numbers(it) == [3, 4]


def test_what_was_acknowledged_or_let_go_is_a_gap() -> None:
    it = journal()
    for name in "abc":
        it.push(frame(type=name))
    drained(it)
    it.acknowledge(2)
    with pytest.raises(JournalGap, match="journal_gap"):
        it.rewind(1)
    it.rewind(2)
    assert numbers(it) == [3]
    for wrong in (4, -1):
        with pytest.raises(RemoteProtocolError) as told:
            it.acknowledge(wrong)
        assert told.value.code == "invalid_event_ack"
        with pytest.raises(RemoteProtocolError):
            it.rewind(wrong)


def test_it_keeps_so_many_bytes_and_so_long() -> None:
    small = journal(max_bytes=400)
    for k in range(20):
        small.push(frame(type="x", k=k))
        small.next()
    with pytest.raises(JournalGap):
        small.rewind(1)
    small.rewind(15)
    clock = [0.0]
    old = Journal(lambda: clock[0], True, max_s=60)
    for clock[0] in (0.0, 50.0, 100.0):
        old.push(frame(type="x"))
        old.next()
    with pytest.raises(JournalGap):
        old.rewind(0)
    old.rewind(1)


def test_what_nobody_takes_overflows() -> None:
    it = journal(max_bytes=200)
    for _ in range(3):
        it.push(frame(type="x" * 50))
    assert not it.check_overflow()
    for _ in range(3):
        it.push(frame(type="x" * 50))
    assert it.check_overflow()
    assert len(it) == 0
    with pytest.raises(JournalGap, match="journal_overflow"):
        it.rewind(0)


def test_what_an_older_epoch_said_is_neither_sent_nor_sent_again() -> None:
    it = journal()
    it.push(MediaFrame(frame(type="old", n=0), 0))
    it.next()
    it.push(MediaFrame(frame(type="old", n=1), 0))
    it.push(frame(type="fact"))
    assert it.raise_epoch(1) == 1
    it.push(MediaFrame(frame(type="new"), 1))
    it.rewind(0)
    assert [f["type"] for f in drained(it)] == ["fact", "new"]
    # What was left out is no gap.
    it.rewind(1)
    assert numbers(it) == [2, 3]


@pytest.mark.parametrize("seed", range(50))
def test_however_often_it_is_cut_each_frame_comes_once_and_in_order(seed: int) -> None:
    draw = random.Random(seed)
    it = journal()
    received: list[int] = []
    last = pushed = 0
    for _ in range(400):
        match draw.randrange(5):
            case 0 | 1:
                it.push(frame(type="x", n=pushed))
                pushed += 1
            case 2:
                # Sent, and it may be lost on the way.
                if (text := it.next()) and draw.random() < 0.8:
                    event = json.loads(text)
                    if event["server_event_seq"] == last + 1:
                        received.append(event["n"])
                        last += 1
                    else:
                        # One before it was lost: the connection is gone, and with it this one.
                        it.rewind(last)
            case 3:
                it.acknowledge(draw.randint(0, last))
            case 4:
                it.rewind(last)
    it.rewind(last)
    received += [f["n"] for f in drained(it)]  # type: ignore[misc]
    assert received == list(range(pushed))


def test_tokens() -> None:
    token = ResumeToken()
    first = token.renew()
    assert len(first) >= 43
    assert token.matches(first)
    assert not token.matches(first + "x")
    assert not token.matches("")
    second = token.renew()
    # Until the client was heard it may not have got the new one.
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
