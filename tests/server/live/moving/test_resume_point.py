"""The resume point of a conversation: its messages, its responses, and the frames that its client may lack."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    CommandRejected,
    ContentPart,
    CreateItem,
    CreateResponse,
    Item,
    ItemDeleted,
    Response,
    ResponseCreated,
    ResponseDone,
)
from antiphon.events.transcription import AppendAudio
from antiphon.protocols.wire import Frame
from antiphon.server.live.moving.resume_point import (
    MOVED,
    AskedResponse,
    OpenResponse,
    Progress,
    ResumePoint,
    check_counts,
    keeps_turn,
    recovered,
    with_journal,
)
from antiphon.sessions.conversation.history import IMAGE_GONE
from antiphon.sessions.conversation.responses.queue import SESSION_ENDED
from antiphon.sessions.inbox import Inbox
from antiphon.transports.journal import Journal, SentFrame

SECOND = AppendAudio(np.zeros(16_000, np.float32))


def conversation(settled_ms: float = 0.0, items: list[Item] | None = None, **facts: Any) -> Any:
    history = SimpleNamespace(items=items or [])
    given = {"settled_ms": settled_ms, "unread_items": [], "owed_responses": [], "closing_responses": []}
    given |= {"out_of_band": {}, "native_model": "", "unstored": [], "num_labels": 0}
    return cast(Any, SimpleNamespace(history=history, progress=SimpleNamespace(**given | facts)))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_audio_is_counted_by_itself_whatever_else_waits_in_the_inbox() -> None:
    inbox = Inbox(30.0)
    progress = Progress(inbox)
    item = CreateItem(Item("x" * 1000))
    for number, command in enumerate((item, SECOND), 1):
        await inbox.put(command)
        progress.took(number, [command])
    # The item counts as audio in the inbox's backlog, but not here.
    assert inbox.backlog_s > 1.0
    for _ in range(2):
        await inbox.get()
    assert progress.now(conversation(999.0)).received == 1
    assert progress.now(conversation(1000.0)).received == 2


@pytest.mark.anyio
async def test_audio_that_another_host_has_made_words_of_is_silence_here_and_no_more() -> None:
    inbox = Inbox(30.0)
    progress = Progress(inbox, ResumePoint(received=4, heard_ms=1500.0))
    second, other = np.ones(16_000, np.float32), CreateItem(Item("x"))
    heard = [c for pcm in (second, second, second) for c in progress.unheard([AppendAudio(pcm), other])]
    audio = [c.pcm for c in heard if isinstance(c, AppendAudio)]
    assert [float(pcm.sum()) for pcm in audio] == [0.0, 8_000.0, 16_000.0]
    assert heard[1::2] == [other] * 3
    assert second.sum() == 16_000
    assert progress.now(conversation(0.0)).heard_ms == 1500.0


@pytest.mark.anyio
async def test_what_was_owed_is_owed_until_the_session_has_taken_it() -> None:
    inbox = Inbox(30.0)
    first, second = CreateResponse(instructions="1"), CreateResponse(instructions="2")
    progress = Progress(inbox, ResumePoint(received=4, owed=[first, second]))

    def owed() -> list[str | None]:
        return [request.instructions for request in progress.now(conversation()).owed]

    assert owed() == ["1", "2"]
    await progress.ask_again()
    assert owed() == ["1", "2"]
    taken = await inbox.get()
    assert taken == replace(first, when_busy="wait")
    assert owed() == ["2"]
    await inbox.get()
    assert owed() == []


def test_a_response_that_is_open_is_told_of_until_it_is_done() -> None:
    progress = Progress(Inbox(30.0))
    response = Response("resp_1", True, None, None)
    items = [Item("a", role="user"), Item("b", role="assistant", status="in_progress")]
    progress.follow(ResponseCreated(response))
    assert progress.now(conversation(items=items)).open_response == OpenResponse("resp_1", True, ["b"])
    # The item is complete, and its response is not: it begins again, with another item.
    items[1].status = "completed"
    point = progress.now(conversation(items=items, closing_responses=[response.request]))
    assert [item.id for item in recovered(items, point)[0]] == ["a"]
    items[1].status = "incomplete"
    assert progress.now(conversation(items=items)).open_response == OpenResponse("resp_1", True, [])
    progress.follow(ResponseDone(response))
    assert progress.now(conversation(items=items)).open_response is None


def test_a_response_that_begins_while_its_session_leaves_the_host_is_owed_by_the_next_one() -> None:
    request, progress = CreateResponse(), Progress(Inbox(30.0))
    item = Item("b", role="assistant", status="incomplete")
    response = Response("resp_1", True, None, None, request=request)
    progress.follow(ResponseCreated(response))
    progress.follow(ResponseDone(replace(response, status="cancelled", reason=SESSION_ENDED, output=[item])))
    point = progress.now(conversation(items=[Item("a", role="user"), item]))
    assert (point.owed, point.open_response) == ([request], OpenResponse("resp_1", True, ["b"]))


@pytest.mark.parametrize(
    ("status", "reason", "keeps"),
    [("completed", None, True), ("cancelled", "turn_detected", True), ("cancelled", MOVED, False)],
)
def test_an_answer_that_ended_with_its_host_is_no_turn_that_was_kept(
    status: Any, reason: str | None, keeps: bool
) -> None:
    response = Response("resp_1", False, None, None, status=status, reason=reason)
    assert keeps_turn(ResponseDone(response)) is keeps


def test_what_has_no_end_is_deleted_and_the_client_is_told() -> None:
    items = [Item("a", role="user"), Item("b", role="assistant", status="in_progress"), Item("c", role="user")]
    continued = ResumePoint(unread_items=["c"], open_response=OpenResponse("resp_1", False, ["b"]))
    kept, _, reported = recovered(items, continued)
    assert [item.id for item in kept] == ["a"]
    done = reported[0]
    assert isinstance(done, ResponseDone)
    assert (done.response.id, done.response.status, done.response.reason) == ("resp_1", "cancelled", "session_moved")
    assert reported[1:] == [ItemDeleted("b"), ItemDeleted("c")]


@pytest.mark.parametrize(
    "continued",
    [ResumePoint(-1), ResumePoint(3, [3]), ResumePoint(heard_ms=-1.0), ResumePoint(heard_ms=math.nan)],
)
def test_counts_that_no_snapshot_has_are_refused(continued: ResumePoint) -> None:
    with pytest.raises(RemoteProtocolError):
        check_counts(continued)


def test_a_snapshot_survives_its_json() -> None:
    owed = CreateResponse(items=("a", Item("x", parts=[ContentPart("input_text", "hi")])), max_tokens=3)
    frames = [SentFrame(1, "{}"), SentFrame(2, None, b"\x00\xff", 4)]
    opened = OpenResponse("r", True, ["b"])
    continued = ResumePoint(5, [7], ["c"], opened, [owed], AskedResponse(opened, owed), True, frames)
    assert msgspec.json.decode(msgspec.json.encode(continued), type=ResumePoint) == continued


def journal() -> Journal:
    return Journal(lambda: 0.0, numbered=True)


def test_frames_that_are_handed_over_and_still_sent_have_one_number() -> None:
    """A host hands over the waiting frames while it still sends them: the client may have received any part of them."""
    one = journal()
    for number in range(4):
        one.push(Frame({"n": number}))
    one.next()
    frames = one.hand_over(1 << 20)
    assert [frame.seq for frame in frames] == [1, 2, 3, 4]
    sent = [one.next(), one.next()]
    assert sent == [frames[1].frame, frames[2].frame]
    # The client has three of the frames, and the next host sends the fourth.
    two = journal()
    assert two.take_over(frames, last_received=3)
    assert two.next() == frames[3].frame
    two.push(Frame({"n": 4}))
    assert two.next() == '{"n":4,"server_event_seq":5}'
    assert two.next() is None


@pytest.mark.parametrize("last", [0, 1, 6])
def test_a_journal_that_does_not_reach_to_what_the_client_has_is_not_taken_over(last: int) -> None:
    frames = [SentFrame(3, "c"), SentFrame(4, "d"), SentFrame(5, "e")]
    two = journal()
    assert not two.take_over(frames, last)
    assert two.next() is None


def test_frames_that_are_too_many_are_not_handed_over() -> None:
    one = journal()
    one.push(Frame({"text": "x" * 100}))
    assert one.hand_over(50) is None


def test_what_the_client_asks_for_waits_for_the_response_that_is_begun_anew() -> None:
    asked, done = CreateResponse(), Response("resp_1", True, None, None, status="completed")
    assert Progress(Inbox(30.0)).unheard([asked]) == [asked]
    progress = Progress(Inbox(30.0), ResumePoint(owed=[CreateResponse()]))
    assert progress.unheard([asked]) == [replace(asked, when_busy="wait")]
    # The end of the interrupted response is sent first.
    progress.follow(ResponseDone(replace(done, status="cancelled", reason=MOVED)))
    assert progress.unheard([asked]) == [replace(asked, when_busy="wait")]
    progress.follow(ResponseDone(done))
    assert progress.unheard([asked]) == [asked]


def test_a_response_whose_last_events_are_missing_is_owed_until_it_is_done() -> None:
    request, progress = CreateResponse(), Progress(Inbox(30.0))
    response = Response("resp", False, None, None, request=request)
    # Completed, and its items' last events are stored: the host may die before `ResponseDone`.
    closing = conversation(closing_responses=[request])
    assert progress.now(closing).owed == []
    progress.follow(ResponseCreated(response))
    point = progress.now(closing)
    assert (point.owed, point.open_response) == ([request], OpenResponse("resp", False))
    progress.follow(ResponseDone(replace(response, status="completed")))
    assert progress.now(closing).owed == []


def beside(*, image: bool = False) -> CreateResponse:
    part = ContentPart("input_image", IMAGE_GONE) if image else ContentPart("input_text", "hi")
    return CreateResponse(stored=False, items=(Item("x", parts=[part]),), metadata={"for": "me"}, event_id="asked")


def test_responses_out_of_band_are_owed_until_they_are_done() -> None:
    progress, request = Progress(Inbox(30.0)), beside()
    response = Response("resp_1", False, None, None, {"for": "me"}, stored=False, request=request)
    # A response that has begun, but whose beginning was not reported.
    assert progress.now(conversation(out_of_band={"resp_1": request})).owed == [request]
    progress.follow(ResponseCreated(response))
    point = progress.now(conversation(out_of_band={"resp_1": request}))
    assert point.owed == [request]
    assert [each.response.id for each in point.beside] == ["resp_1"]
    progress.follow(ResponseDone(replace(response, status="completed")))
    # Its last event is stored while its task has not ended.
    point = progress.now(conversation(out_of_band={"resp_1": request}))
    assert (point.owed, point.beside) == ([], [])
    assert [each.request for each in point.finished_beside] == [request]
    assert with_journal(point, [SentFrame(1, '{"id":"resp_1"}')], is_whole=False).finished_beside
    assert not with_journal(point, [SentFrame(2, '{"id":"resp_2"}')], is_whole=False).finished_beside


def test_a_response_out_of_band_that_ends_with_its_session_is_owed_by_the_next_host() -> None:
    progress, request = Progress(Inbox(30.0)), beside()
    response = Response("resp_1", False, None, None, stored=False, request=request)
    progress.follow(ResponseCreated(response))
    progress.follow(ResponseDone(replace(response, status="cancelled", reason=SESSION_ENDED)))
    point = progress.now(conversation(out_of_band={}))
    assert (point.owed, [each.request for each in point.beside]) == ([request], [request])


def test_a_response_out_of_band_ends_with_its_metadata_and_begins_again_unless_its_images_are_lost() -> None:
    whole, lacking, waiting = beside(), beside(image=True), replace(beside(image=True), event_id="waits")
    begun = [
        AskedResponse(OpenResponse(name, False), request) for name, request in (("resp_1", whole), ("resp_2", lacking))
    ]
    kept, owed, reported = recovered([], ResumePoint(beside=begun, owed=[whole, lacking, waiting]))
    assert (kept, owed) == ([], [whole])
    done = {event.response.id: event.response for event in reported if isinstance(event, ResponseDone)}
    assert (done["resp_1"].status, done["resp_1"].stored) == ("cancelled", False)
    assert (done["resp_2"].status, done["resp_2"].code) == ("failed", MOVED)
    assert done["resp_1"].metadata == done["resp_2"].metadata == {"for": "me"}
    (rejected,) = (event for event in reported if isinstance(event, CommandRejected))
    assert (rejected.code, rejected.event_id) == (MOVED, "waits")


def test_what_was_lost_on_one_host_stays_lost_and_a_native_model_is_named() -> None:
    progress = Progress(Inbox(30.0), ResumePoint(unstored=["images"]))
    point = progress.now(conversation(unstored=["audio"], native_model="m"))
    assert (point.unstored, point.native_model) == (["audio", "images"], "m")


def test_a_row_of_an_earlier_version_has_nothing_out_of_band() -> None:
    encoded = msgspec.json.decode(msgspec.json.encode(ResumePoint(received=3)))
    for field in ("beside", "finished_beside", "native_model", "unstored"):
        del encoded[field]
    assert msgspec.convert(encoded | {"of_a_later_version": 1}, ResumePoint) == ResumePoint(received=3)
