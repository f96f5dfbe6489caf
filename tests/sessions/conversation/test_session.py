"""One conversation with a listener and a partner that do as they are told: who answers when, and what is closed how."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest
from PIL import Image

from antiphon.contracts import (
    AudioPart,
    ConversationProfile,
    ImagePart,
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    VoiceOptions,
    Window,
)
from antiphon.errors import MediaError, ModelError
from antiphon.events.conversation import (
    CancelResponse,
    CommandRejected,
    ContentPart,
    ContentPosition,
    ConversationConfig,
    CreateItem,
    CreateResponse,
    IdleTimeoutReached,
    Item,
    ItemTruncated,
    OutputItemAdded,
    PlaybackCleared,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    TruncateItem,
    UserTurnCommitted,
)
from antiphon.events.duplex import SkipResponse
from antiphon.events.tools import Tool
from antiphon.events.transcription import (
    AppendAudio,
    CommitAudio,
    GuessDropped,
    OverlapDecided,
    OverlapStarted,
    ServerVad,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptGuessed,
    TranscriptionConfig,
    TranscriptPartial,
    TurnCleared,
    TurnCommitted,
)
from antiphon.sessions.conversation.session import ConversationSession
from antiphon.sessions.inbox import Inbox
from antiphon.vision.images import EncodedImage
from tests.scripted import ScriptedDetector, ScriptedTranscriber, heard, speech, text

RATE_HZ = 24_000


class Partner:
    """Says a word when `go` is set, then the rest; remembers what it was asked."""

    native = None

    def __init__(self, fails: bool = False) -> None:
        self.profile = ConversationProfile("scripted", RATE_HZ, ("one",))
        self.asked: list[tuple[Message, ...]] = []
        self.prefilled: list[tuple[Message, ...]] = []
        self.go, self.end = asyncio.Event(), asyncio.Event()
        self.end.set()
        self.fails = fails
        self.left = 0

    async def open(self) -> Partner:
        return self

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        self.prefilled.append(tuple(messages))

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        self.asked.append(tuple(messages))
        try:
            await self.go.wait()
            yield TextDelta("One two.")
            yield ResponseAudio(np.zeros(RATE_HZ, np.float32))
            if self.fails:
                raise ModelError("no")
            await self.end.wait()
            yield ReplyDone("stop", 5, 2, 3)
        finally:
            self.left += 1

    def close(self) -> None:
        pass


class Scene:
    """A session whose listener is played by hand."""

    def __init__(self, **config: Any) -> None:
        self.partner = Partner(config.pop("fails", False))
        self.partner.profile = replace(self.partner.profile, accepts_media=config.pop("accepts_media", False))
        self.out: list[Any] = []
        self.overlaps: list[Any] = []
        count = itertools.count()
        self.playback = config.pop("playback", None)
        vad = config.pop("vad", ServerVad())
        config.setdefault("allows_backchannels", bool(vad and vad.patience_ms))
        transcriber = config.pop("transcriber", None) or ScriptedTranscriber()
        talk = ConversationConfig(TranscriptionConfig(vad=vad, preflight=True), **config)
        self.inbox = Inbox(60)
        self.session = ConversationSession(
            talk, transcriber, ScriptedDetector(), self.partner, self.inbox, self.emit,
            new_id=lambda prefix: f"{prefix}{next(count)}", playback=self.playback,
        )  # fmt: skip
        self.turn = -1

    async def emit(self, output: Any) -> None:
        # What a conversation's dialect does not tell.
        (self.overlaps if isinstance(output, OverlapStarted | OverlapDecided) else self.out).append(output)

    async def __aenter__(self) -> Scene:
        self.task = asyncio.create_task(self.session.run())
        await self.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.inbox.close()
        async with asyncio.timeout(10):
            await self.task

    async def settle(self) -> None:
        for _ in range(60):
            await asyncio.sleep(0)

    async def begins(self) -> None:
        self.turn += 1
        await self.session._heard(SpeechStarted(self.turn, 0))
        await self.settle()

    async def stops(self) -> int:
        await self.session._heard(SpeechStopped(self.turn, 0))
        await self.session._heard(TurnCommitted(self.turn, 0, 100, 100))
        await self.settle()
        return self.turn

    async def pauses(self, text: str) -> None:
        """A pause that may end the turn, and what has been said up to it."""
        await self.session._heard(TranscriptGuessed(self.turn, text, 100))
        await self.settle()

    async def goes_on(self) -> None:
        await self.session._heard(GuessDropped(self.turn))
        await self.settle()

    async def known(self, turn: int, text: str) -> None:
        await self.session._heard(TranscriptDone(turn, text, text, (), "en", 1.0, 0, 0))
        await self.settle()

    async def says(self, text: str) -> None:
        await self.begins()
        await self.known(await self.stops(), text)

    def responses(self) -> list[str]:
        return [f"{o.response.status} {o.response.reason}".strip() for o in self.out if isinstance(o, ResponseDone)]

    @property
    def created(self) -> int:
        return sum(isinstance(o, ResponseCreated) for o in self.out)


def play(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_a_turn_is_answered_once_and_the_answer_remembered() -> None:
    async def main() -> Scene:
        async with Scene(instructions="Be kind.") as scene:
            scene.partner.go.set()
            await scene.says("Hello.")
            await scene.says("Again.")
        return scene

    scene = play(main())
    assert scene.responses() == ["completed", "completed"]
    assert [m.text for m in scene.partner.asked[1]] == ["Be kind.", "Hello.", "One two.", "Again."]


def test_nothing_said_is_not_answered() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            await scene.says("  ")
        return scene

    assert play(main()).created == 0


def test_nobody_is_answered_while_they_speak_again() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.partner.go.set()
            await scene.begins()
            first = await scene.stops()
            # They go on before the first part is transcribed.
            await scene.begins()
            await scene.known(first, "I would like")
            assert scene.created == 0
            await scene.known(await scene.stops(), "a cup of tea.")
        return scene

    scene = play(main())
    assert scene.created == 1
    assert [m.text for m in scene.partner.asked[0]] == ["I would like", "a cup of tea."]


def test_two_turns_that_are_known_together_have_one_answer() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.partner.go.set()
            await scene.begins()
            first = await scene.stops()
            await scene.begins()
            second = await scene.stops()
            await scene.known(first, "One.")
            await scene.known(second, "Two.")
        return scene

    assert play(main()).created == 1


def test_speech_interrupts_and_is_answered() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            await scene.says("Tell me a story.")
            scene.partner.go.clear()
            await scene.begins()
            assert scene.responses() == ["cancelled turn_detected"]
            scene.partner.go.set()
            await scene.known(await scene.stops(), "No, wait.")
        return scene

    scene = play(main())
    assert scene.responses() == ["cancelled turn_detected", "completed"]
    assert scene.partner.left == 2


def test_a_noise_before_the_answer_began_does_not_silence_it() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            await scene.says("Are you there?")
            # A cough: speech that has no words.
            await scene.begins()
            scene.partner.go.set()
            await scene.known(await scene.stops(), "")
        return scene

    assert play(main()).responses() == ["cancelled turn_detected", "completed"]


def test_a_turn_that_is_thrown_away_is_over() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.partner.go.set()
            await scene.begins()
            first = await scene.stops()
            # They begin again, and the client clears its buffer: no stop follows.
            await scene.begins()
            await scene.known(first, "One.")
            assert scene.created == 0
            await scene.session._heard(TurnCleared())
            await scene.settle()
        return scene

    assert play(main()).created == 1


def test_a_turn_whose_transcript_fails_does_not_hold_others_up() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.partner.go.set()
            await scene.begins()
            first = await scene.stops()
            await scene.begins()
            second = await scene.stops()
            await scene.known(first, "One.")
            await scene.session._heard(TranscriptFailed(second, "no"))
            await scene.settle()
        return scene

    assert play(main()).created == 1


def test_an_answer_that_may_not_be_interrupted_is_followed_by_the_next() -> None:
    async def main() -> Scene:
        async with Scene(interrupt_response=False) as scene:
            await scene.says("One?")
            await scene.says("Two?")
            assert scene.responses() == []
            scene.partner.go.set()
            await scene.settle()
        return scene

    assert play(main()).responses() == ["completed", "completed"]


def test_what_is_asked_waits_for_the_transcript_it_is_about() -> None:
    async def main() -> Scene:
        async with Scene(create_response=False) as scene:
            scene.partner.go.set()
            await scene.begins()
            turn = await scene.stops()
            await scene.session.handle(CreateResponse())
            await scene.settle()
            assert scene.created == 0
            await scene.known(turn, "Well?")
        return scene

    scene = play(main())
    assert [m.text for m in scene.partner.asked[0]] == ["Well?"]


def test_a_failure_under_way_ends_that_answer_only() -> None:
    async def main() -> Scene:
        async with Scene(fails=True) as scene:
            scene.partner.go.set()
            await scene.says("One?")
            scene.partner.fails = False
            await scene.says("Two?")
        return scene

    scene = play(main())
    assert scene.responses() == ["failed", "completed"]


def test_what_never_became_sound_was_not_said() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.partner.go.set()
            scene.partner.end.clear()
            await scene.session.handle(CreateResponse())
            await scene.settle()
            await scene.session.handle(CancelResponse())
            await scene.settle()
            assert scene.responses() == ["cancelled client_cancelled"]
            scene.partner.end.set()
            await scene.says("Go on.")
        return scene

    scene = play(main())
    # It had written, and no word of it had a place in the sound.
    assert [m.text for m in scene.partner.asked[-1]] == ["Go on."]


def test_an_answer_begun_at_the_pause_is_the_answer_and_is_not_heard_before() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.partner.go.set()
            await scene.begins()
            await scene.pauses("Hello.")
            assert [m.text for m in scene.partner.asked[0]] == ["Hello."]
            assert scene.created == 0
            assert not scene.session.conversation.items
            await scene.known(await scene.stops(), "Hello.")
        return scene

    scene = play(main())
    assert scene.responses() == ["completed"]
    assert len(scene.partner.asked) == 1


def test_who_goes_on_after_a_pause_never_hears_what_was_begun() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.partner.go.set()
            scene.partner.end.clear()
            await scene.begins()
            await scene.pauses("I would like")
            await scene.goes_on()
            assert scene.partner.left == 1
            scene.partner.end.set()
            await scene.pauses("I would like a cup of tea.")
            await scene.known(await scene.stops(), "I would like a cup of tea.")
        return scene

    scene = play(main())
    assert scene.responses() == ["completed"]
    assert [m.text for m in scene.partner.asked[-1]] == ["I would like a cup of tea."]
    assert len(scene.partner.asked) == 2


def test_a_transcript_unlike_its_guess_is_answered_anew() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.partner.go.set()
            scene.partner.end.clear()
            await scene.begins()
            await scene.pauses("Hello the")
            turn = await scene.stops()
            scene.partner.end.set()
            await scene.known(turn, "Hello there.")
        return scene

    scene = play(main())
    assert scene.responses() == ["completed"]
    assert [m[-1].text for m in scene.partner.asked] == ["Hello the", "Hello there."]


def test_nothing_is_begun_while_an_answer_is_spoken_or_where_turns_are_not_answered() -> None:
    async def main() -> tuple[Scene, Scene]:
        async with Scene(interrupt_response=False) as spoken:
            await spoken.says("One?")
            await spoken.begins()
            await spoken.pauses("Two?")
            assert len(spoken.partner.asked) == 1
            spoken.partner.go.set()
        async with Scene(create_response=False) as silent:
            await silent.begins()
            await silent.pauses("Two?")
        return spoken, silent

    assert play(main())[1].partner.asked == []


def test_a_failure_of_what_was_begun_is_told_when_it_is_asked_for() -> None:
    async def main() -> Scene:
        async with Scene(fails=True) as scene:
            scene.partner.go.set()
            await scene.begins()
            await scene.pauses("One?")
            turn = await scene.stops()
            await scene.known(turn, "One?")
            scene.partner.fails = False
            await scene.says("Two?")
        return scene

    assert play(main()).responses() == ["failed", "completed"]


def test_the_partner_takes_in_what_is_said_while_it_is_said() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            await scene.begins()
            await scene.session._heard(TranscriptDelta(0, "I would"))
            await scene.session._heard(TranscriptDelta(0, " like"))
        return scene

    assert [m[-1].text for m in play(main()).partner.prefilled] == ["I would", "I would like"]


MEANING = ServerVad(0.5, 300, 300, 4000)


def test_an_acknowledgement_leaves_the_answer_and_the_history_alone() -> None:
    async def main() -> Scene:
        async with Scene(vad=MEANING) as scene:
            scene.partner.end.clear()
            scene.partner.go.set()
            await scene.says("Tell me a story.")
            before = len(scene.out)
            await scene.says("Mm-hm.")
            assert scene.out[before:] == []
            assert scene.session.answering
            scene.partner.end.set()
            await scene.settle()
        return scene

    scene = play(main())
    assert scene.responses() == ["completed"]
    assert [i.text for i in scene.session.conversation.items] == ["Tell me a story.", "One two."]


def test_an_answer_that_was_stopped_does_not_sound_any_more() -> None:
    async def main() -> Scene:
        async with Scene(vad=MEANING) as scene:
            scene.partner.go.set()
            await scene.says("Are you sure?")
            item = next(o.item.id for o in scene.out if isinstance(o, OutputItemAdded))
            await scene.session.handle(TruncateItem(item, 0, 300))
            await scene.says("Yes.")
        return scene

    assert play(main()).created == 2


def test_an_interruption_is_told_from_an_acknowledgement_by_its_words() -> None:
    async def main() -> Scene:
        async with Scene(vad=MEANING) as scene:
            scene.partner.end.clear()
            scene.partner.go.set()
            await scene.says("Tell me a story.")
            await scene.begins()
            await scene.session._heard(TranscriptPartial(scene.turn, "No wait"))
            await scene.settle()
            assert scene.responses() == ["cancelled turn_detected"]
            scene.partner.end.set()
            await scene.known(await scene.stops(), "No, wait.")
        return scene

    assert play(main()).responses() == ["cancelled turn_detected", "completed"]


def test_nobody_speaks_for_a_while_and_the_partner_speaks_again() -> None:
    async def main() -> Scene:
        async with Scene(idle_timeout_ms=10) as scene:
            scene.partner.go.set()
            scene.session._sounding._clock = lambda: float("inf")
            await scene.says("Hello.")
            async with asyncio.timeout(10):
                while scene.created < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            scene.session.config = replace(scene.session.config, idle_timeout_ms=None)
        return scene

    scene = play(main())
    idle = next(o for o in scene.out if isinstance(o, IdleTimeoutReached))
    assert any(isinstance(o, UserTurnCommitted) and o.item.id == idle.item_id for o in scene.out)
    assert scene.responses()[:2] == ["completed", "completed"]


class Loudspeaker:
    """Plays nothing, and says what it is told to have played."""

    def __init__(self) -> None:
        self.cut: list[tuple[ContentPosition, int]] = []

    def silence(self) -> list[tuple[ContentPosition, int]]:
        return self.cut


def test_where_the_server_plays_speech_cuts_the_answer_to_what_was_heard() -> None:
    async def main() -> Scene:
        async with Scene(playback=Loudspeaker()) as scene:
            scene.partner.end.clear()
            scene.partner.go.set()
            await scene.says("Tell me a story.")
            place = next(o.at for o in scene.out if isinstance(o, ResponseAudioDelta))
            scene.playback.cut = [(place, 250)]
            await scene.begins()
        return scene

    scene = play(main())
    kinds = [type(o) for o in scene.out]
    assert PlaybackCleared in kinds
    # Only once the answer is closed is it cut.
    assert kinds.index(ResponseDone) < kinds.index(ItemTruncated)
    assert next(o for o in scene.out if isinstance(o, ItemTruncated)).audio_end_ms == 250


class Reader:
    """Reads when told to; fails on what is no image."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def read(self, image: EncodedImage) -> tuple[str, ...]:
        await self.go.wait()
        if image.data != b"abc":
            raise MediaError("the image cannot be read")
        return ("Gate 7", "11:20")


def shown(item_id: str, data: str) -> CreateItem:
    parts = [ContentPart("input_text", "When?"), ContentPart("input_image", image=f"data:image/png;base64,{data}")]
    return CreateItem(Item(item_id, parts=parts), event_id="mine")


def test_an_answer_waits_until_the_images_are_read() -> None:
    play(_reads())


async def _reads() -> None:
    async with Scene(audio_output=False) as scene:
        scene.session._looking._reader = reader = Reader()
        scene.partner.go.set()
        await scene.session.handle(shown("a", "YWJj"))
        await scene.session.handle(CreateResponse())
        await scene.settle()
        assert not scene.partner.asked
        reader.go.set()
        await scene.settle()
        assert "Gate 7\n11:20" in scene.partner.asked[0][0].text
        assert scene.partner.asked[0][0].text.startswith("When?")
        assert not [o for o in scene.out if isinstance(o, CommandRejected)]


async def looked_at(scene: Scene, item: CreateItem) -> None:
    """The item, once its images are known."""
    done, looking = asyncio.Event(), scene.session._looking
    then = looking._done

    async def told() -> None:
        await then()
        done.set()

    looking._done = told
    await scene.session.handle(item)
    await done.wait()


def test_a_partner_that_hears_and_sees_is_given_what_was_said_and_shown() -> None:
    play(_hears_and_sees())


async def _hears_and_sees() -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    async with Scene(audio_output=False, accepts_media=True) as scene:
        assert scene.session._sounds
        scene.partner.go.set()
        await looked_at(scene, shown("a", base64.b64encode(file.getvalue()).decode()))
        await scene.session._sounds.hear(np.full(3_200, 0.5, np.float32))
        await scene.says("Hello.")
        shows, says = scene.partner.asked[0]
        assert [type(p) for p in shows.parts] == [str, ImagePart]
        assert isinstance(shows.parts[1], ImagePart)
        assert shows.parts[1].image.data == file.getvalue()
        # The turn was from 0 to 100 ms, and 100 ms more are heard; its transcript is for those who read.
        (sound,) = says.parts
        assert isinstance(sound, AudioPart)
        assert (len(sound.pcm), says.text) == (3_200, "Hello.")
        await scene.says("Again.")
        assert scene.partner.asked[1][1] is not says
        assert scene.partner.asked[1][1] == says


def test_an_answer_begun_at_a_pause_is_that_to_the_turns_sound() -> None:
    async def main() -> Scene:
        async with Scene(accepts_media=True) as scene:
            assert scene.session._sounds
            await scene.begins()
            await scene.session._sounds.hear(np.full(3_200, 0.5, np.float32))
            await scene.pauses("Hello.")
            scene.partner.go.set()
            await scene.known(await scene.stops(), "Hello.")
            await scene.settle()
        return scene

    scene = play(main())
    assert len(scene.partner.asked) == 1
    (sound,) = scene.partner.asked[0][0].parts
    assert isinstance(sound, AudioPart)
    assert len(sound.pcm) == 3_200
    assert scene.responses() == ["completed"]


@pytest.mark.parametrize("vad", [ServerVad(0.5, 96, 192), ServerVad(0.5, 96, 640), None])
@pytest.mark.parametrize("chunk", [512, 4_000, 16_000])
@pytest.mark.parametrize("slow", [False, True])
def test_a_partner_hears_the_words_of_the_turn_it_answers(vad: ServerVad | None, chunk: int, slow: bool) -> None:
    """A real listener, whose guesses come before a turn's end or after it: no other turn's words, and none missing."""
    turns = [(1, 3), (11, 4), (21, 2)]
    gates: list[anyio.Event] = []

    def gate(_: Window) -> object:
        # A decode that takes until some more sound has come.
        if slow:
            gates.append(anyio.Event())
            return gates[-1]
        return None

    async def main() -> Scene:
        async with Scene(accepts_media=True, vad=vad, transcriber=ScriptedTranscriber(gate=gate)) as scene:
            scene.partner.go.set()
            for first, count in turns:
                # A breath inside the turn, shorter than what ends it.
                head, tail = speech(first, count - 1, 4), speech(first + count - 1, 1, 40)
                pcm = np.concatenate((head, tail))
                for at in range(0, len(pcm), chunk):
                    await scene.inbox.put(AppendAudio(pcm[at : at + chunk]))
                    await scene.settle()
                    for event in gates[:-1]:
                        event.set()
                if vad is None:
                    await scene.inbox.put(CommitAudio(final=True))
                    await scene.inbox.put(CreateResponse())
                for _ in range(20):
                    for event in gates:
                        event.set()
                    await scene.settle()
        return scene

    scene = play(main())
    assert scene.created == len(turns)
    answered = [asked for asked in scene.partner.asked if asked[-1].role == "user"]
    last = {asked[-1].text: asked[-1] for asked in answered}
    for first, count in turns:
        (part,) = last[text(first, count)].parts
        assert isinstance(part, AudioPart)
        assert [word for word, a, b in heard(part.pcm) if b - a > 500] == list(range(first, first + count))
    if vad and not slow and chunk == 512:
        # What was begun at the pause was the answer: it was asked for once. What was begun in the breath was not.
        asked = [messages[-1].text for messages in scene.partner.asked]
        assert asked == [text(*part) for a, n in turns for part in ((a, n - 1), (a, n))]
    assert scene.session._sounds
    assert not scene.session._sounds._turns


def test_what_has_no_words_is_heard_by_nobody() -> None:
    async def main() -> Scene:
        async with Scene(accepts_media=True) as scene:
            assert scene.session._sounds
            scene.partner.go.set()
            await scene.session._sounds.hear(np.full(3_200, 0.5, np.float32))
            await scene.says("  ")
            await scene.says("Hello.")
        return scene

    scene = play(main())
    assert [m.text for m in scene.partner.asked[0]] == ["Hello."]


def test_what_the_client_commits_is_heard_words_or_none() -> None:
    async def main() -> Scene:
        async with Scene(accepts_media=True, vad=None) as scene:
            assert scene.session._sounds
            scene.partner.go.set()
            await scene.session._sounds.hear(np.full(3_200, 0.5, np.float32))
            scene.turn = 0
            await scene.session._heard(TurnCommitted(0, 0, 200))
            await scene.session.handle(CreateResponse())
            await scene.known(0, "")
        return scene

    scene = play(main())
    (asked,) = scene.partner.asked
    (sound,) = asked[0].parts
    assert isinstance(sound, AudioPart)
    assert len(sound.pcm) == 3_200


def test_a_failed_transcript_leaves_what_is_owed() -> None:
    """One turn waits for its answer; another, which the client wants none to, cannot be transcribed."""

    async def main() -> Scene:
        async with Scene(accepts_media=True) as scene:
            scene.partner.go.set()
            await scene.begins()
            first = await scene.stops()
            await scene.session.handle(SkipResponse())
            await scene.begins()
            second = await scene.stops()
            await scene.known(first, "Hello.")
            await scene.session._heard(TranscriptFailed(second, "no"))
            await scene.settle()
        return scene

    assert play(main()).responses() == ["completed"]


def test_a_turn_without_a_transcript_is_answered_by_who_heard_it() -> None:
    async def main(hears: bool) -> Scene:
        async with Scene(accepts_media=hears) as scene:
            scene.partner.go.set()
            if scene.session._sounds:
                await scene.session._sounds.hear(np.full(3_200, 0.5, np.float32))
            await scene.begins()
            turn = await scene.stops()
            await scene.session._heard(TranscriptFailed(turn, "no"))
            await scene.settle()
        return scene

    assert play(main(True)).responses() == ["completed"]
    assert play(main(False)).responses() == []


@pytest.mark.parametrize("accepts_media", [False, True])
def test_sound_that_comes_in_an_item_is_heard_or_transcribed(accepts_media: bool) -> None:
    async def main() -> Scene:
        async with Scene(
            audio_output=False, accepts_media=accepts_media, transcriber=ScriptedTranscriber(fail=99)
        ) as scene:
            scene.partner.go.set()
            for name, first, known in (("a", 1, ""), ("b", 5, "As the client knows."), ("c", 99, "")):
                part = ContentPart("input_audio", known, media=AudioPart(speech(first, 2)))
                await scene.session.handle(CreateItem(Item(name, parts=[part])))
            await scene.session.handle(CreateResponse())
            await scene.settle()
        return scene

    scene = play(main())
    (asked,) = scene.partner.asked
    if accepts_media:
        sounds = [part for m in asked for part in m.parts]
        assert [[n for n, *_ in heard(s.pcm)] for s in sounds if isinstance(s, AudioPart)] == [
            [1, 2],
            [5, 6],
            [99, 100],
        ]
        assert not [o for o in scene.out if isinstance(o, CommandRejected)]
    else:
        said = ["w1 w2", "As the client knows.", "[Sound that could not be heard.]"]
        assert [(m.text, m.parts) for m in asked] == [(text, ()) for text in said]
        assert [o.code for o in scene.out if isinstance(o, CommandRejected)] == ["invalid_audio"]


def test_what_is_no_image_is_told_to_a_partner_that_sees() -> None:
    async def main() -> Scene:
        async with Scene(audio_output=False, accepts_media=True) as scene:
            scene.partner.go.set()
            await looked_at(scene, shown("a", "YWJj"))
            await scene.session.handle(CreateResponse())
            await scene.settle()
        return scene

    scene = play(main())
    assert [o.code for o in scene.out if isinstance(o, CommandRejected)] == ["invalid_image"]
    assert scene.partner.asked[0][0].parts == ()
    assert "could not be read" in scene.partner.asked[0][0].text


def test_a_conversation_holds_so_much_of_images() -> None:
    async def main() -> list[str]:
        async with Scene(audio_output=False) as scene:
            for name in "abc":
                await scene.session.handle(shown(name, "A" * (25 << 20)))
            return [o.code for o in scene.out if isinstance(o, CommandRejected)]

    assert play(main()) == ["image_limit_exceeded"]


def test_an_image_that_cannot_be_read_is_told_and_answered_over() -> None:
    play(_does_not_read())


async def _does_not_read() -> None:
    async with Scene(audio_output=False) as scene:
        scene.session._looking._reader = reader = Reader()
        reader.go.set()
        scene.partner.go.set()
        # Beside the conversation too.
        await scene.session.handle(CreateResponse(stored=False, items=(shown("b", "AAAA").item,)))
        await scene.settle()
        assert "could not be read" in scene.partner.asked[0][0].text
        await scene.session.handle(shown("a", "AAAA"))
        await scene.settle()
        told = [o for o in scene.out if isinstance(o, CommandRejected)]
        assert [(o.code, o.event_id) for o in told] == [("invalid_image", None), ("invalid_image", "mine")]
