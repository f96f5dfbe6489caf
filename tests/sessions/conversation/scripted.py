"""A conversation session between a scripted conversation model and transcription events from the test."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar
from unittest import mock

import numpy as np

from antiphon.audio import Pcm
from antiphon.contracts import (
    ConversationProfile,
    ConversationStream,
    ImageReader,
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    VoiceOptions,
)
from antiphon.contracts.language import ToolServers
from antiphon.contracts.playback import PlaybackTracker
from antiphon.contracts.speaker import SpeakerModel
from antiphon.errors import ModelError
from antiphon.events.conversation import (
    ContentPart,
    ConversationConfig,
    CreateItem,
    Item,
    ResponseCreated,
    ResponseDone,
)
from antiphon.events.tools import CallOptions, Tool
from antiphon.events.transcription import (
    AppendAudio,
    EnrolledVoice,
    GuessDropped,
    OverlapDecided,
    OverlapStarted,
    PrimarySpeakerMode,
    ServerVad,
    SpeechStarted,
    SpeechStopped,
    TranscriptDone,
    TranscriptGuessed,
    TranscriptionConfig,
    TranscriptionEvent,
    TurnCommitted,
)
from antiphon.sessions.conversation.context import ConversationContext
from antiphon.sessions.conversation.session import ConversationSession
from antiphon.sessions.inbox import Inbox
from antiphon.turns.floor_claim import FloorClaim
from tests.scripted import ScriptedDetector, ScriptedTranscriber

RATE_HZ = 24_000

T = TypeVar("T")


class ScriptedModel:
    """Says "One two." with one second of audio once `go` is set, and ends once `end` is set, which it is at first.

    `asked` and `prefilled` hold the messages of each call, and `options` those of each response; `left` counts the
    responses that have ended. With `fails`, a response raises ModelError after its audio.
    """

    native = None

    def __init__(self, fails: bool = False, *, accepts_media: bool = False, audio_window_ms: int = 0) -> None:
        self.profile = ConversationProfile(
            "scripted", RATE_HZ, ("one",), accepts_media=accepts_media, audio_window_ms=audio_window_ms
        )
        self.asked: list[tuple[Message, ...]] = []
        self.options: list[ReplyOptions] = []
        self.prefilled: list[tuple[Message, ...]] = []
        self.go, self.end = asyncio.Event(), asyncio.Event()
        self.end.set()
        self.fails = fails
        self.left = 0
        # What a response consists of.
        self.chunks: tuple[ResponseChunk, ...] = (TextDelta("One two."), ResponseAudio(np.zeros(RATE_HZ, np.float32)))

    async def open(self, owner: object = None) -> ScriptedModel:
        return self

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        self.prefilled.append(tuple(messages))

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        self.asked.append(tuple(messages))
        self.options.append(options)
        try:
            await self.go.wait()
            for chunk in self.chunks:
                yield chunk
            if self.fails:
                raise ModelError("no")
            await self.end.wait()
            yield ReplyDone("stop", 5, 2, 3)
        finally:
            self.left += 1

    def close(self) -> None:
        pass


class PlayedTurns:
    """The test's input to a conversation session, and the session's output. Base class of both kinds of scene.

    `session` runs inside `async with`. `out` holds the events for a client, except those about overlaps, which a
    conversation's dialect does not send.
    """

    session: ConversationSession

    def __init__(self, model: ScriptedModel, inbox: Inbox) -> None:
        self.model = model
        self.inbox = inbox
        self.out: list[Any] = []
        self.turn = -1
        self._emitted = asyncio.Event()

    async def emit(self, output: Any) -> None:
        if not isinstance(output, OverlapStarted | OverlapDecided):
            self.out.append(output)
            self._emitted.set()

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self.session.run())
        await self.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.inbox.close()
        async with asyncio.timeout(10):
            await self.task

    async def settle(self) -> None:
        """Let every task run until it waits for an action of the test."""
        for _ in range(60):
            await asyncio.sleep(0)

    async def until(self, kind: type, count: int = 1, most_s: float = 10) -> None:
        """Wait until `count` events of this kind were sent. For work in threads, which `settle` does not wait for."""
        async with asyncio.timeout(most_s):
            while sum(isinstance(o, kind) for o in self.out) < count:
                self._emitted.clear()
                await self._emitted.wait()

    async def append(self, pcm: Pcm) -> None:
        """Put audio from the client into the inbox, in order with the commands."""
        await self.inbox.put(AppendAudio(pcm))
        await self.settle()

    async def transcription(self, event: TranscriptionEvent) -> None:
        """Pass an event of the transcription session, as if it had found it in the audio."""
        await self.session.handle_transcription(event)
        await self.settle()

    async def start_turn(self, at_ms: int = 0) -> None:
        self.turn += 1
        await self.transcription(SpeechStarted(self.turn, at_ms))

    async def claim_floor(self) -> None:
        """Let the speech sound as if it claims the floor, as the listener judges it when audio was analysed."""
        with mock.patch.object(FloorClaim, "claims", True):
            await self.session.audio_heard()
        await self.settle()

    async def end_turn(self, at_ms: int = 0) -> int:
        """End the turn, which lasted 100 ms, and return its number. Its transcript is still to come."""
        await self.session.handle_transcription(SpeechStopped(self.turn, at_ms))
        await self.transcription(TurnCommitted(self.turn, at_ms, at_ms + 100, at_ms + 100))
        return self.turn

    async def pause(self, text: str) -> None:
        """Begin a pause that may end the turn, with the transcript up to it."""
        await self.transcription(TranscriptGuessed(self.turn, text, 100))

    async def resume(self) -> None:
        """Let the user continue: the pause was not the end of the turn."""
        await self.transcription(GuessDropped(self.turn))

    async def transcribe(self, turn: int, text: str) -> None:
        await self.transcription(TranscriptDone(turn, text, text, (), "en", 1.0, 0, 0))

    async def say(self, text: str, at_ms: int = 0) -> None:
        """Say a whole turn, with its transcript."""
        await self.start_turn(at_ms)
        await self.transcribe(await self.end_turn(at_ms), text)

    def responses(self) -> list[str]:
        """Return status and reason of each response that is done."""
        return [f"{o.response.status} {o.response.reason}".strip() for o in self.out if isinstance(o, ResponseDone)]

    @property
    def num_created(self) -> int:
        return sum(isinstance(o, ResponseCreated) for o in self.out)


class Scene(PlayedTurns):
    """A conversation session. Other keyword arguments are those of ConversationConfig."""

    def __init__(
        self,
        *,
        fails: bool = False,
        accepts_media: bool = False,
        audio_window_ms: int = 0,
        vad: ServerVad | None = ServerVad(),  # noqa: B008 (frozen)
        transcriber: ScriptedTranscriber | None = None,
        reader: ImageReader | None = None,
        playback: PlaybackTracker | None = None,
        clock: Callable[[], float] = time.monotonic,
        speaker_model: SpeakerModel | None = None,
        enrolled: tuple[EnrolledVoice, ...] = (),
        model: ScriptedModel | None = None,
        tool_servers: ToolServers | None = None,
        say: Callable[[str], ConversationStream] | None = None,
        operator_calls: CallOptions = CallOptions(),  # noqa: B008 (frozen)
        first_id: int = 0,
        **config: Any,
    ) -> None:
        model = model or ScriptedModel(fails, accepts_media=accepts_media, audio_window_ms=audio_window_ms)
        super().__init__(model, Inbox(60))
        config.setdefault("allows_backchannels", bool(vad and vad.eagerness))
        listens_to: PrimarySpeakerMode = "enrolled" if enrolled else "auto" if speaker_model else "off"
        count = itertools.count(first_id)
        # Counters by name.
        self.counted: Counter[str] = Counter()
        self.session = ConversationSession(
            ConversationConfig(
                TranscriptionConfig(vad=vad, preflight=True, primary_speaker=listens_to, enrolled_voices=enrolled),
                **config,
            ),
            ConversationContext(
                transcriber=transcriber or ScriptedTranscriber(),
                detector=ScriptedDetector(),
                model=self.model,
                new_id=lambda prefix: f"{prefix}{next(count)}",
                image_reader=reader,
                speaker_model=speaker_model,
                tool_servers=tool_servers,
                say=say,
                calls=operator_calls,
                clock=clock,
                count=self._count,
            ),
            self.inbox,
            self.emit,
            playback=playback,
        )

    def _count(self, what: str, number: int) -> None:
        self.counted[what] += number


def shown(item_id: str, data: str) -> CreateItem:
    """Return the command for a user message "When?" with a PNG image, `data` in base64, with the event id "mine"."""
    parts = [ContentPart("input_text", "When?"), ContentPart("input_image", image=f"data:image/png;base64,{data}")]
    return CreateItem(Item(item_id, parts=parts), event_id="mine")


def play(scenario: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(scenario)
