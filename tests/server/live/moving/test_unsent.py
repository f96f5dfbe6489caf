"""Frames wait while anything is stored, keep their order, and none comes after the last."""

from __future__ import annotations

from antiphon.protocols.wire import Frame, message
from antiphon.server.live.moving.unsent import UnsentFrames


def frames(*kinds: str) -> list[Frame]:
    return [message(type=kind) for kind in kinds]


def test_frames_of_others_wait_too_while_one_is_stored() -> None:
    sent: list[Frame] = []
    first, item, answer, last = frames("first", "item", "answer", "last")
    unsent = UnsentFrames([first], sent.append)
    unsent.frames.append(item)
    with unsent.held():
        unsent.push([answer])
        with unsent.held():
            unsent.push()
        unsent.push([last])
        assert sent == []
    unsent.push()
    assert sent == [first, item, answer, last]
    unsent.push()
    assert len(sent) == 4


def test_what_ends_a_session_goes_out_at_once() -> None:
    sent: list[Frame] = []
    item, closed, replaced, late = frames("item", "closed", "replaced", "late")
    unsent = UnsentFrames((), sent.append)
    with unsent.held():
        unsent.push([item])
        unsent.push([closed], at_once=True)
        assert sent == [item, closed]
        unsent.push([item])
        unsent.close_with([replaced])
        unsent.push([late], at_once=True)
    unsent.push([late])
    assert sent == [item, closed, replaced]
