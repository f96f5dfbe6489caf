"""Speech that has ended a response by its sound turns out to be none: the response goes on where it was stopped."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any
from unittest import mock

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import (
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    VoiceOptions,
)
from antiphon.events.conversation import (
    CancelResponse,
    CreateResponse,
    DeleteItem,
    ItemTruncated,
    ResponseAudioDelta,
    ResponseDone,
    ResponseTextDelta,
    TruncateItem,
)
from antiphon.events.transcription import (
    GuessDropped,
    ServerVad,
    SpeechStarted,
    TranscriptFailed,
    TranscriptPartial,
    TurnCleared,
)
from antiphon.events.words import Word
from antiphon.turns.floor_claim import FloorClaim
from tests.sessions.conversation.scripted import RATE_HZ, Scene, ScriptedModel, play

MEANING = ServerVad(0.5, 300, 4000, "medium")
# Four seconds of sent audio, each sample different, and one second that the model says after `more` is set.
SENT = np.linspace(-0.9, 0.9, 4 * RATE_HZ, dtype=np.float32)
LATER = np.full(RATE_HZ, 0.25, np.float32)
WORDS = tuple(Word(word, i, i + 1, 1.0) for i, word in enumerate(["What", "would", "you", "like?"]))
CHUNKS = (TextDelta("What would you like? We have"), ResponseAudio(SENT, WORDS))
MORE = (TextDelta(" soup."), ResponseAudio(LATER, (Word("soup.", 4, 5, 1.0),)))


class Speaker(ScriptedModel):
    """Says CHUNKS, and MORE once `more` is set. `at_once` is the most responses that were generated at once."""

    def __init__(self) -> None:
        super().__init__()
        self.more = anyio.Event()
        self.chunks = CHUNKS
        self.go.set()
        self.running = self.at_once = 0

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        self.asked.append(tuple(messages))
        self.running += 1
        self.at_once = max(self.at_once, self.running)
        try:
            for chunk in self.chunks:
                yield chunk
            await self.more.wait()
            for chunk in MORE:
                yield chunk
            yield ReplyDone("stop", 5, 2, 3)
        finally:
            self.running -= 1


class Room(Scene):
    """A conversation with a client that plays the responses itself and cannot pause. `now_s` is the clock."""

    def __init__(self, **config: Any) -> None:
        self.now_s = 0.0
        super().__init__(vad=MEANING, clock=lambda: self.now_s, model=Speaker(), **config)
        self.speaker: Any = self.model

    async def stop_by_sound(self, heard_s: float) -> None:
        """Let the user begin to speak after this time of the response, so that the sound decides."""
        await self.append(np.zeros(int(3 * SAMPLE_RATE_HZ), np.float32))
        self.now_s += heard_s
        await self.start_turn(3000)
        await self.claim_floor()

    def sound(self, number: int) -> Pcm:
        """Return the audio of a response."""
        done = [o.response.id for o in self.out if isinstance(o, ResponseDone)]
        chunks = [o.pcm for o in self.out if isinstance(o, ResponseAudioDelta) and o.at.response_id == done[number]]
        return np.concatenate([np.zeros(0, np.float32), *chunks])

    def words(self, number: int) -> str:
        """Return the text of a response."""
        done = [o.response.id for o in self.out if isinstance(o, ResponseDone)]
        return "".join(
            o.text for o in self.out if isinstance(o, ResponseTextDelta) and o.at.response_id == done[number]
        )

    def texts(self) -> list[str]:
        return [m.text for m in self.model.asked[-1]]


def play_in(act: Callable[[Room], Awaitable[None]], **config: Any) -> Room:
    async def main() -> Room:
        async with Room(**config) as room:
            await room.say("I am hungry.")
            await act(room)
        return room

    return play(main())


@pytest.mark.parametrize("words", ["Mm-hm.", "", "Yeah, okay."])
@pytest.mark.parametrize("truncates", [False, True])
def test_when_the_words_are_a_backchannel_then_the_rest_is_said_from_the_sample_where_it_stopped(
    words: str, truncates: bool
) -> None:
    async def act(room: Room) -> None:
        await room.stop_by_sound(1.5)
        assert room.responses() == ["cancelled turn_detected"]
        if truncates:
            spoken = room.session.history.items[1]
            await room.session.handle(TruncateItem(spoken.id, 0, 1250))
        await room.transcribe(await room.end_turn(3300), words)
        room.speaker.more.set()
        await room.settle()
        room.now_s += 60
        await room.say("Soup, please.", 60_000)

    room = play_in(act)
    at = int((1.25 if truncates else 1.5) * RATE_HZ)
    assert room.responses()[:2] == ["cancelled turn_detected", "completed"]
    np.testing.assert_allclose(room.sound(1), np.concatenate((SENT[at:], LATER)), atol=1 / 32767)
    assert room.words(1) == "would you like? We have soup."
    assert [o.audio_end_ms for o in room.out if isinstance(o, ItemTruncated)] == [1250 if truncates else 1500]
    # The model gets one message, as if nobody had spoken, and was asked for it once.
    assert room.texts() == ["I am hungry.", "What would you like? We have soup.", "Soup, please."]
    assert (len(room.model.asked), room.speaker.at_once) == (2, 1)
    first, second = [i for i in room.session.history.items if i.role == "assistant"][:2]
    assert second.continues == first.id
    # Times of words count from the beginning of their own message.
    assert [(w.text, w.start_s, w.end_s) for w in second.parts[0].words][-2:] == [
        ("like?", 3 - at / RATE_HZ, 4 - at / RATE_HZ),
        ("soup.", 4 - at / RATE_HZ, 5 - at / RATE_HZ),
    ]


def test_when_the_response_was_complete_but_not_heard_then_the_rest_is_said() -> None:
    async def act(room: Room) -> None:
        room.speaker.more.set()
        await room.settle()
        await room.stop_by_sound(4.5)
        await room.transcribe(await room.end_turn(3300), "Mm-hm.")
        await room.settle()

    room = play_in(act)
    assert room.responses() == ["completed", "completed"]
    np.testing.assert_allclose(room.sound(1), LATER[: RATE_HZ // 2], atol=1 / 32767)
    assert len(room.model.asked) == 1


def test_when_it_is_stopped_twice_then_nothing_is_lost_or_said_twice() -> None:
    async def act(room: Room) -> None:
        await room.stop_by_sound(1.5)
        await room.transcribe(await room.end_turn(3300), "Mm-hm.")
        await room.settle()
        room.now_s += 1
        await room.start_turn(9000)
        await room.claim_floor()
        await room.transcribe(await room.end_turn(9300), "Yeah.")
        room.speaker.more.set()
        await room.settle()
        room.now_s += 60
        await room.say("Soup, please.", 60_000)

    room = play_in(act)
    assert room.responses()[:3] == ["cancelled turn_detected", "cancelled turn_detected", "completed"]
    at = int(2.5 * RATE_HZ)
    np.testing.assert_allclose(room.sound(2), np.concatenate((SENT[at:], LATER)), atol=2 / 32767)
    assert room.texts() == ["I am hungry.", "What would you like? We have soup.", "Soup, please."]
    assert (len(room.model.asked), room.speaker.at_once) == (2, 1)


@pytest.mark.parametrize("early", [False, True])
def test_when_the_words_take_the_floor_then_they_are_answered_and_the_rest_is_dropped(early: bool) -> None:
    async def act(room: Room) -> None:
        await room.stop_by_sound(1.5)
        room.speaker.more.set()
        await room.settle()
        # The generation waits until there are words.
        assert room.speaker.running == 1
        if early:
            await room.transcription(TranscriptPartial(room.turn, "No, wait"))
            assert room.speaker.running == 0
        await room.transcribe(await room.end_turn(3300), "No, wait.")
        await room.settle()

    room = play_in(act)
    assert room.texts()[0::2] == ["I am hungry.", "No, wait."]
    assert (len(room.model.asked), room.speaker.at_once) == (2, 1)


async def _cancel(room: Room) -> None:
    # The client's cancel is refused, since nothing is under way, but it wants no rest.
    await room.session.handle(CancelResponse(None))


async def _ask(room: Room) -> None:
    await room.session.handle(CreateResponse())


async def _speak(room: Room) -> None:
    await room.end_turn(3300)
    await room.start_turn(3600)


async def _delete(room: Room) -> None:
    await room.session.handle(DeleteItem(room.session.history.items[1].id))


async def _fail(room: Room) -> None:
    await room.transcription(TranscriptFailed(room.turn, "no"))


async def _clear(room: Room) -> None:
    await room.transcription(TurnCleared())


@pytest.mark.parametrize("meanwhile", [_cancel, _ask, _speak, _delete, _fail, _clear])
def test_when_something_else_happens_before_the_words_then_the_rest_is_not_said(
    meanwhile: Callable[[Room], Awaitable[None]],
) -> None:
    async def act(room: Room) -> None:
        await room.stop_by_sound(1.5)
        turn = room.turn
        await meanwhile(room)
        if meanwhile not in (_fail, _clear):
            if room.turn == turn:
                await room.end_turn(3300)
            await room.transcribe(turn, "Mm-hm.")
        room.speaker.more.set()
        await room.settle()

    room = play_in(act)
    assert not any(item.continues for item in room.session.history.items)
    assert (room.speaker.running, room.speaker.at_once) == (0, 1)


def test_a_response_that_calls_a_function_is_not_continued() -> None:
    async def act(room: Room) -> None:
        await room.stop_by_sound(1.5)
        await room.transcribe(await room.end_turn(3300), "Mm-hm.")
        await room.settle()

    async def main() -> Room:
        async with Room() as room:
            room.model.chunks = (*CHUNKS, ToolCallStarted("call_1", "book"), ToolCallDelta("{}"))
            await room.say("I am hungry.")
            await act(room)
        return room

    assert not any(item.continues for item in play(main()).session.history.items)


def test_when_the_client_asks_for_responses_itself_then_the_sound_ends_none() -> None:
    async def main() -> Room:
        async with Room(create_response=False) as room:
            await room.say("I am hungry.")
            await room.session.handle(CreateResponse())
            await room.settle()
            await room.stop_by_sound(1.5)
            assert room.session.progress.is_responding
            room.speaker.more.set()
            await room.settle()
        return room

    assert play(main()).responses()[0] == "completed"


def test_when_the_session_ends_at_once_then_the_generation_that_waits_ends_too() -> None:
    async def act(room: Room) -> None:
        await room.append(np.zeros(3 * SAMPLE_RATE_HZ, np.float32))
        room.turn += 1
        # Nothing else runs before the session ends.
        await room.session.handle_transcription(SpeechStarted(room.turn, 3000))
        with mock.patch.object(FloorClaim, "claims", True):
            await room.session.audio_heard()

    room = play_in(act)
    assert room.speaker.running == 0
    assert room.responses() == ["cancelled turn_detected"]


ACTIONS = (
    "speak", "claim", "guess", "nod", "words", "nothing", "fail", "end", "cancel", "ask", "truncate", "more", "wait",
)  # fmt: skip


@given(st.lists(st.sampled_from(ACTIONS), max_size=30), st.sampled_from([0.0, 0.3, 1.5, 3.9]))
@settings(max_examples=80, deadline=None)
def test_whatever_happens_each_response_is_closed_and_no_sample_is_said_twice(
    actions: list[str], step_s: float
) -> None:
    """Random walks with decisions by sound at every phase of the floor."""

    async def act(room: Room) -> None:
        is_open, unread, at_ms = False, list[int](), 3000
        await room.append(np.zeros(int(3 * SAMPLE_RATE_HZ), np.float32))
        for action in actions:
            room.now_s += step_s
            at_ms += 400
            match action:
                case "speak" if not is_open:
                    await room.start_turn(at_ms)
                    is_open = True
                case "claim":
                    await room.claim_floor()
                case "guess" if is_open:
                    await room.pause("Mm-hm.")
                    await room.transcription(GuessDropped(room.turn))
                case "end" if is_open:
                    unread.append(await room.end_turn(at_ms))
                    is_open = False
                case "nod" | "words" | "nothing" if unread:
                    text = {"nod": "Yeah.", "words": "No, wait.", "nothing": ""}[action]
                    await room.transcribe(unread.pop(0), text)
                case "fail" if unread:
                    await room.transcription(TranscriptFailed(unread.pop(0), "no"))
                case "cancel":
                    await room.session.handle(CancelResponse(None))
                case "ask":
                    await room.session.handle(CreateResponse())
                case "truncate":
                    spoken = [i for i in room.session.history.items if i.role == "assistant"]
                    if spoken:
                        await room.session.handle(TruncateItem(spoken[-1].id, 0, 700))
                case "more":
                    room.speaker.more.set()
            await room.settle()
            assert room.speaker.running <= 1
        if is_open:
            unread.append(await room.end_turn(at_ms))
        for turn in unread:
            await room.transcribe(turn, "No.")
        room.speaker.more.set()
        await room.settle()

    room = play_in(act)
    kinds = [type(o).__name__ for o in room.out]
    assert kinds.count("ResponseCreated") == kinds.count("ResponseDone")
    assert (room.speaker.running, room.speaker.at_once) == (0, 1)
    items = {item.id: item for item in room.session.history.items}
    for item in items.values():
        spoken = [item]
        while (before := items.get(spoken[-1].continues)) and item.role == "assistant":
            spoken.append(before)
        # Together, the parts say the response at most once.
        earlier = sum(part.parts[0].audio_s for part in spoken[1:])
        assert len(spoken) == 1 or earlier + item.parts[0].produced().audio_s <= 5 + 0.01
