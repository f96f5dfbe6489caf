"""Which messages of a video stream its client sends again to another host, and which results it gets."""

from __future__ import annotations

import msgspec
import pytest

from antiphon.events.video import AppendFrame, AppendVideoAudio, AskQuestion, FrameInfo
from antiphon.server.live.moving import video_messages
from antiphon.server.live.moving.video_messages import Exchange, LaterMessage, VideoMessages, VideoPoint
from antiphon.sessions.video.session import VideoState
from tests.scripted import speech

FRAME, SOUND, QUESTION = AppendFrame(b"", FrameInfo(0.0)), AppendVideoAudio(speech(1, 1)), AskQuestion("q")


def point(messages: VideoMessages, **fields: object) -> VideoPoint:
    given = {"has_heard": messages.has_heard, "has_seen": messages.has_seen} | fields
    said = list(messages.exchanges)
    return VideoPoint("m", "{}", False, messages.received, messages.later(), said, VideoState(), **given)  # type: ignore[arg-type]


def test_a_question_is_sent_again_until_the_end_of_its_answer_has_arrived() -> None:
    messages = VideoMessages()
    messages.took(1, [], 10, 0)
    messages.took(2, [SOUND, QUESTION], 10, 0)
    messages.answer_began(0)
    messages.settle(0, 8)
    assert (messages.received, messages.later(), messages.has_question) == (1, [], True)
    messages.answer_done("q", "a", 5)
    messages.settle(4, 8)
    assert (messages.received, messages.later()) == (1, [LaterMessage(2, False, 5)])
    # A client that lacks event 5 asks again; its answer is no part of the history.
    assert point(messages).for_client(4).exchanges == []
    assert point(messages).for_client(4).later == []
    assert point(messages).for_client(5).exchanges == [Exchange("q", "a", 5)]
    messages.settle(5, 8)
    assert (messages.received, messages.has_question) == (2, False)


def test_audio_is_sent_again_until_its_question_is_answered() -> None:
    messages = VideoMessages()
    for number, command in enumerate((SOUND, QUESTION, SOUND), 1):
        messages.took(number, [command], 10, 0)
    messages.answer_began(0)
    messages.answer_done("q", "a", 3)
    messages.settle(3, 8)
    assert (messages.received, messages.has_heard) == (2, True)


def test_the_newest_frames_are_sent_again_although_their_results_have_arrived() -> None:
    messages = VideoMessages()
    for number in range(1, 6):
        messages.took(number, [FRAME], 10, number - 1)
        messages.frame_done(number)
    messages.settle(5, 3)
    assert (messages.received, messages.has_seen) == (2, True)
    assert messages.later() == [LaterMessage(n, True, n) for n in (3, 4, 5)]
    stored = VideoMessages(stores_frames=True)
    stored.took(1, [FRAME], 10, 0)
    stored.frame_done(1)
    stored.settle(1, 3)
    assert stored.received == 1


def test_a_question_that_cuts_an_answer_or_is_refused_ends_the_one_before() -> None:
    messages = VideoMessages()
    for number in (1, 2, 3):
        messages.took(number, [QUESTION], 10, 0)
    messages.answer_began(1)
    messages.answer_began(4)
    messages.question_refused(9)
    assert messages.later() == [LaterMessage(1, False, 4), LaterMessage(2, False, 9), LaterMessage(3, False, 9)]
    assert not messages.exchanges


def test_what_a_client_sends_again_and_has_the_result_of_is_known() -> None:
    before = VideoMessages()
    for number, command in enumerate((FRAME, FRAME, QUESTION), 1):
        before.took(number, [command], 10, 0)
    before.frame_done(1)
    before.frame_done(2)
    before.answer_began(2)
    before.answer_done("q", "a", 4)
    after = VideoMessages(before=point(before).for_client(4))
    assert [after.known(n) and after.known(n).is_frame for n in (1, 2, 3, 4)] == [True, True, False, None]  # type: ignore[union-attr]
    # If this host dies too before they are sent again, the next one knows the same.
    assert after.later() == before.later()
    after.took(1, [FRAME], 10, 4)
    after.took(2, [FRAME], 10, 4)
    after.took(3, [], 10, 4)
    after.took(4, [FRAME], 10, 4)
    after.frame_done(5)
    assert after.later() == [*before.later(), LaterMessage(4, True, 5)]


def test_images_and_audio_beyond_the_limit_are_given_up_and_a_question_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_messages, "MAX_AGAIN_BYTES", 25)
    messages = VideoMessages()
    for number, command in enumerate((SOUND, FRAME, QUESTION, FRAME, FRAME), 1):
        messages.took(number, [command], 10, 0)
    messages.settle(0, 8)
    assert (messages.received, messages.has_heard, messages.has_seen) == (2, True, True)


def test_a_long_history_keeps_its_newest_questions() -> None:
    messages = VideoMessages()
    for number in range(1, 12):
        messages.took(number, [QUESTION], 10, 0)
        messages.answer_began(number)
        messages.answer_done("q", "a" * 999, number)
    assert [each.seq for each in messages.exchanges] == list(range(4, 12))


def test_a_row_of_another_version_is_read_as_far_as_it_is_known_and_impossible_numbers_are_refused() -> None:
    messages = VideoMessages()
    messages.took(1, [QUESTION], 10, 0)
    encoded = msgspec.json.decode(msgspec.json.encode(point(messages)))
    del encoded["has_seen"]
    assert msgspec.convert(encoded | {"of_a_later_version": 1}, VideoPoint) == point(messages)
    wrong = msgspec.structs.replace(point(messages), later=[LaterMessage(2, True, 1), LaterMessage(2, True, 1)])
    assert not wrong.is_possible
    assert not msgspec.structs.replace(point(messages), received=-1).is_possible
