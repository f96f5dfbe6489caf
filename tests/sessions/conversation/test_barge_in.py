"""Speech over a response: barge-in, backchannels, and which part of a cut response is kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from antiphon.contracts import ReplyDone, ResponseAudio, ResponseChunk, TextDelta
from antiphon.events.conversation import (
    ConfigureConversation,
    ContentPartDone,
    ContentPosition,
    ItemDone,
    ItemTruncated,
    OutputItemAdded,
    OutputItemDone,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    TruncateItem,
    UserTurnCommitted,
)
from antiphon.events.playback import PlaybackCleared, PlaybackHoldChanged
from antiphon.events.transcription import (
    CommitAudio,
    ServerVad,
    SpeechStarted,
    TranscriptPartial,
)
from antiphon.events.words import Word
from tests.scripted import ScriptedTranscriber, speech, text
from tests.sessions.conversation.scripted import Scene, ScriptedModel, play


def test_when_speech_starts_over_a_response_then_it_is_cancelled_and_the_speech_answered() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            await scene.say("Tell me a story.")
            scene.model.go.clear()
            await scene.start_turn()
            assert scene.responses() == ["cancelled turn_detected"]
            scene.model.go.set()
            await scene.transcribe(await scene.end_turn(), "No, wait.")
        return scene

    scene = play(main())
    assert scene.responses() == ["cancelled turn_detected", "completed"]
    assert scene.model.left == 2


def test_when_a_noise_cancels_a_response_that_has_no_output_then_it_is_created_again() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            await scene.say("Are you there?")
            # A cough: speech without words.
            await scene.start_turn()
            scene.model.go.set()
            await scene.transcribe(await scene.end_turn(), "")
        return scene

    assert play(main()).responses() == ["cancelled turn_detected", "completed"]


def test_when_speech_may_not_interrupt_then_the_next_response_follows_the_first() -> None:
    async def main() -> Scene:
        async with Scene(interrupt_response=False) as scene:
            await scene.say("One?")
            await scene.say("Two?")
            assert scene.responses() == []
            scene.model.go.set()
            await scene.settle()
        return scene

    assert play(main()).responses() == ["completed", "completed"]


MEANING = ServerVad(0.5, 300, 4000, "medium")


def test_when_a_backchannel_overlaps_a_response_then_response_and_history_stay_as_they_are() -> None:
    async def main() -> Scene:
        async with Scene(vad=MEANING) as scene:
            scene.model.end.clear()
            scene.model.go.set()
            await scene.say("Tell me a story.")
            before = len(scene.out)
            await scene.say("Mm-hm.")
            assert scene.out[before:] == []
            assert scene.session.progress.is_responding
            scene.model.end.set()
            await scene.settle()
        return scene

    scene = play(main())
    assert scene.responses() == ["completed"]
    assert [i.text for i in scene.session.history.items] == ["Tell me a story.", "One two."]


def test_when_the_client_ends_a_turn_over_a_response_then_it_is_committed_whatever_was_said() -> None:
    async def main() -> Scene:
        async with Scene(vad=MEANING) as scene:
            scene.model.end.clear()
            scene.model.go.set()
            await scene.say("Tell me a story.")
            before = len(scene.out)
            # Too short for a word: without the commit it would be an unreported noise.
            await scene.append(speech(1, 1)[:2048])
            assert scene.out[before:] == []
            await scene.inbox.put(CommitAudio())
            await scene.until(UserTurnCommitted, 2)
            scene.model.end.set()
        return scene

    # The turn has no words, so the question is still to be answered.
    assert play(main()).responses() == ["cancelled turn_detected", "cancelled session_ended"]


def test_when_a_response_was_truncated_then_an_acknowledgement_is_a_turn_of_its_own() -> None:
    async def main() -> Scene:
        async with Scene(vad=MEANING) as scene:
            scene.model.go.set()
            await scene.say("Are you sure?")
            item = next(o.item.id for o in scene.out if isinstance(o, OutputItemAdded))
            await scene.session.handle(TruncateItem(item, 0, 300))
            await scene.say("Yes.")
        return scene

    assert play(main()).num_created == 2


def test_when_the_words_of_an_overlap_take_the_floor_then_the_response_is_cancelled() -> None:
    async def main() -> Scene:
        async with Scene(vad=MEANING) as scene:
            scene.model.end.clear()
            scene.model.go.set()
            await scene.say("Tell me a story.")
            await scene.start_turn()
            await scene.transcription(TranscriptPartial(scene.turn, "No wait"))
            assert scene.responses() == ["cancelled turn_detected"]
            scene.model.end.set()
            await scene.transcribe(await scene.end_turn(), "No, wait.")
        return scene

    assert play(main()).responses() == ["cancelled turn_detected", "completed"]


class Watched(Scene):
    """Records with every event how much audio is settled at that time, and which texts of the user are kept."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.noted: list[tuple[Any, float, list[str]]] = []

    async def emit(self, output: Any) -> None:
        unread = self.session.progress.unread_items
        kept = [i.text for i in self.session.history.items if i.role == "user" and i.id not in unread]
        self.noted.append((output, self.session.progress.settled_ms, kept))
        await super().emit(output)


class Late(ScriptedTranscriber):
    """Has no words for a window before it has ended."""

    def busy(self) -> bool:
        return True

    def overdue(self) -> bool:
        return True


def test_the_sound_of_speech_over_a_response_is_unsettled_until_its_words_are_kept() -> None:
    """Whenever the host dies, the turn is in the history or its audio is sent again."""

    async def main() -> Watched:
        async with Watched(vad=MEANING, transcriber=Late()) as scene:
            scene.model.end.clear()
            scene.model.go.set()
            await scene.append(speech(1, 2, 200))
            await scene.until(ResponseCreated)
            await scene.append(speech(3, 2, 200))
            await scene.until(UserTurnCommitted, 2)
            scene.model.end.set()
        return scene

    scene = play(main())
    started = [event for event, *_ in scene.noted if isinstance(event, SpeechStarted)][-1]
    after = scene.noted[[event for event, *_ in scene.noted].index(started) :]
    assert any(text(3, 2) in kept for _, _, kept in after)
    assert all(settled_ms <= started.at_ms for _, settled_ms, kept in after if text(3, 2) not in kept)


class GoesOn(ScriptedModel):
    """Continues to speak once `end` is set."""

    async def respond(self, *asked: Any) -> AsyncGenerator[ResponseChunk, None]:
        yield TextDelta("One two.")
        yield ResponseAudio(np.zeros(24_000, np.float32), (Word("One", 0.0, 0.3, 1.0), Word("two.", 0.3, 1.0, 1.0)))
        await self.end.wait()
        yield TextDelta(" Three.")
        yield ResponseAudio(np.zeros(24_000, np.float32), (Word("Three.", 1.0, 2.0, 1.0),))
        yield ReplyDone("stop", 5, 2, 3)


def test_when_the_client_truncates_an_item_that_goes_on_then_the_rest_is_not_in_the_history() -> None:
    async def main() -> Scene:
        scene = Scene()
        scene.model.end.clear()
        scene.model.respond = partial(GoesOn.respond, scene.model)  # type: ignore[method-assign]
        async with scene:
            await scene.say("Count.")
            item = next(o.item.id for o in scene.out if isinstance(o, OutputItemAdded))
            for end_ms in (1000, 400):
                await scene.session.handle(TruncateItem(item, 0, end_ms))
            scene.model.end.set()
            await scene.until(ResponseDone)
            await scene.settle()
        return scene

    scene = play(main())
    assert scene.session.history.items[-1].text == "One"
    assert [o.audio_end_ms for o in scene.out if isinstance(o, ItemTruncated)] == [1000, 400]
    # The response's events have the text as it was made, the history's item the text that was heard.
    (part,) = [o.part.text for o in scene.out if isinstance(o, ContentPartDone)]
    (output,) = [o.item.text for o in scene.out if isinstance(o, OutputItemDone)]
    (response,) = [o.response.output[0].text for o in scene.out if isinstance(o, ResponseDone)]
    assert part == output == response == "One two. Three."
    assert [o.item.text for o in scene.out if isinstance(o, ItemDone) and o.item.role == "assistant"] == ["One"]


class Loudspeaker:
    """Plays nothing, and reports what the test says was played."""

    def __init__(self) -> None:
        self.cut: list[tuple[ContentPosition, int]] = []
        self.holds: list[bool] = []

    def hold(self, held: bool) -> None:
        self.holds.append(held)

    def silence(self) -> list[tuple[ContentPosition, int]]:
        return self.cut


def test_when_the_server_plays_the_audio_then_speech_truncates_the_response_to_what_was_heard() -> None:
    async def main() -> Scene:
        loudspeaker = Loudspeaker()
        async with Scene(playback=loudspeaker) as scene:
            scene.model.end.clear()
            scene.model.go.set()
            await scene.say("Tell me a story.")
            place = next(o.at for o in scene.out if isinstance(o, ResponseAudioDelta))
            loudspeaker.cut = [(place, 250)]
            await scene.start_turn()
        return scene

    scene = play(main())
    kinds = [type(o) for o in scene.out]
    assert PlaybackCleared in kinds
    # It is cut only once the answer is closed.
    assert kinds.index(ResponseDone) < kinds.index(ItemTruncated)
    assert next(o for o in scene.out if isinstance(o, ItemTruncated)).audio_end_ms == 250


@pytest.mark.parametrize(
    ("words", "holds", "reported"),
    [
        # A backchannel: the answer continues from where it was paused.
        ("Mm-hm", [True, False], [PlaybackHoldChanged(True), PlaybackHoldChanged(False)]),
        # Other words: the paused audio is dropped, and the start of speech says so.
        ("No, wait", [True], [PlaybackHoldChanged(True)]),
    ],
)
@pytest.mark.parametrize("reports", [False, True])
def test_when_somebody_speaks_over_a_response_then_it_pauses_until_it_is_known_what_for(
    words: str, holds: list[bool], reported: list[PlaybackHoldChanged], reports: bool
) -> None:
    loudspeaker = Loudspeaker()

    async def main() -> Scene:
        async with Scene(playback=loudspeaker, allows_backchannels=True, reports_ducking=reports) as scene:
            scene.model.end.clear()
            scene.model.go.set()
            await scene.say("Tell me a story.")
            await scene.start_turn()
            assert loudspeaker.holds == []
            await scene.claim_floor()
            assert loudspeaker.holds == [True]
            await scene.transcribe(await scene.end_turn(), words)
        return scene

    scene = play(main())
    assert loudspeaker.holds == holds
    assert scene.counted["ducks"] == 1
    assert scene.counted["ducks_without_interruption"] == holds.count(False)
    assert [o for o in scene.out if isinstance(o, PlaybackHoldChanged)] == (reported if reports else [])


def test_when_the_floor_is_not_taken_after_all_then_what_was_paused_goes_on() -> None:
    loudspeaker = Loudspeaker()

    async def main() -> Scene:
        async with Scene(playback=loudspeaker, allows_backchannels=True) as scene:
            scene.model.end.clear()
            scene.model.go.set()
            await scene.say("Tell me a story.")
            await scene.start_turn()
            await scene.claim_floor()
            # Meanwhile the client has decided that speech ends no response.
            config = replace(scene.session.config, interrupt_response=False)
            await scene.session.handle(ConfigureConversation(config))
            await scene.transcribe(await scene.end_turn(), "No, wait")
        return scene

    play(main())
    assert loudspeaker.holds == [True, False]


class Counted(Scene):
    """Records with every event of a response how many responses another host would have to generate again."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.due: list[tuple[type, int]] = []

    async def emit(self, output: Any) -> None:
        progress = self.session.progress
        self.due.append((type(output), len(progress.owed_responses) + len(progress.closing_responses)))
        await super().emit(output)


@pytest.mark.parametrize("fails", [False, True])
def test_a_response_has_to_be_generated_again_until_its_last_event(fails: bool) -> None:
    async def main() -> list[tuple[type, int]]:
        async with Counted(fails=fails) as scene:
            scene.model.go.set()
            scene.model.end.set()
            await scene.say("Hello?")
            await scene.until(ResponseDone)
            return scene.due

    due = play(main())
    kinds = [kind for kind, _ in due]
    first, last = kinds.index(ResponseCreated), kinds.index(ResponseDone)
    assert last - first > (0 if fails else 2)
    assert {count for _, count in due[first : last + 1]} == {1}
