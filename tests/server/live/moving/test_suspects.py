"""Sessions that may have crashed their hosts are delayed longer each time, and are refused in the end."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import CreateResponse
from antiphon.server.live.moving.resume_point import OpenResponse, ResumePoint
from antiphon.server.live.moving.take_up import MAX_DELAY_S, MAX_IDLE_RESTORES, MAX_RESTORES, delay_s
from antiphon.store.sessions import StoredSession

IDLE = ResumePoint(received=4)
BUSY = [
    ResumePoint(owed=[CreateResponse()]),
    ResumePoint(unread_items=["item_1"]),
    ResumePoint(open_response=OpenResponse("resp_1", True)),
]


def row(continued: ResumePoint | None, restores: int) -> StoredSession:
    snapshot = msgspec.json.encode({"wire": {}, "items": [], "continued": continued})
    return StoredSession("sess-1", "who", b"hash", snapshot, "host-1", 1, restores=restores)


def longest(continued: ResumePoint | None, restores: int) -> float:
    return max(delay_s(row(continued, restores)) for _ in range(300))


@pytest.mark.parametrize("continued", [IDLE, None, *BUSY])
def test_after_a_first_death_nobody_waits(continued: ResumePoint | None) -> None:
    assert delay_s(row(continued, 0)) == 0.0


@pytest.mark.parametrize("continued", BUSY)
def test_a_session_with_something_to_do_waits_from_the_second_death_on_and_is_then_refused(
    continued: ResumePoint,
) -> None:
    assert 0.8 < longest(continued, 1) <= 1.0
    assert 1.6 < longest(continued, 2) <= 2.0
    with pytest.raises(RemoteProtocolError) as refused:
        delay_s(row(continued, MAX_RESTORES))
    assert refused.value.code == "restored_too_often"


@pytest.mark.parametrize("continued", [IDLE, None])
def test_a_session_with_nothing_to_do_is_suspected_after_many(continued: ResumePoint | None) -> None:
    assert delay_s(row(continued, MAX_RESTORES)) == 0.0
    assert 0.8 < longest(continued, MAX_RESTORES + 1) <= 1.0
    assert longest(continued, MAX_IDLE_RESTORES - 1) <= MAX_DELAY_S
    with pytest.raises(RemoteProtocolError, match="12 servers"):
        delay_s(row(continued, MAX_IDLE_RESTORES))


def test_what_cannot_be_read_is_refused_by_whoever_restores_it() -> None:
    assert delay_s(replace(row(IDLE, 2), snapshot=b"\xff")) == 0.0
