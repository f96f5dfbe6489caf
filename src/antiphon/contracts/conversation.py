"""The contract of conversation models, which answer in a conversation in text or by voice."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from antiphon.audio import Pcm
from antiphon.contracts.language import Message, ReplyDone, ReplyOptions, TextDelta, ToolCallDelta, ToolCallStarted
from antiphon.contracts.native import NativeModel
from antiphon.contracts.speech import VoiceOptions
from antiphon.events.tools import Tool
from antiphon.events.words import Word


@dataclass(frozen=True, slots=True)
class ConversationProfile:
    """Facts of a conversation model.

    - `id`: its name for clients.
    - `sample_rate_hz`: of the audio of its responses.
    - `voices`: by name, the first is the default; empty: it does not speak.
    - `accepts_media`: it hears audio and sees images in messages; other models are given text in their place.
    - `max_preemptive`: the responses that a conversation may begin in a minute before they are asked for; None: any
      number.
    - `keeps_to_schemas`: calls are held to the schemas of tools, which must therefore compile into a grammar.
    - `video_window_s`: it takes VideoParts, whose sound is in windows of so many seconds; 0: frames are images, and
      sound is audio.
    - `audio_window_ms`: audio is encoded in windows of so many milliseconds, each by itself, so that those of a turn
      that goes on may be prefilled (`AudioPart.grows`). 0: audio is taken in once its turn has ended.
    """

    id: str
    sample_rate_hz: int
    voices: tuple[str, ...]
    accepts_media: bool = False
    max_preemptive: int | None = None
    video_window_s: float = 0.0
    audio_window_ms: int = 0
    keeps_to_schemas: bool = False


@dataclass(frozen=True, slots=True)
class ResponseAudio:
    """More of a response's audio. pcm: float32 [num_samples], mono, at the profile's rate.

    `words`: words that begin in it, with their times in seconds from the start of the response's audio. Where the voice
    gives no word times, they are words that, as estimated, have ended by its end.
    """

    pcm: Pcm
    words: tuple[Word, ...] = ()


ResponseChunk = TextDelta | ToolCallStarted | ToolCallDelta | ResponseAudio | ReplyDone


class ConversationStream(Protocol):
    """One conversation with a conversation model. One response at a time; nothing may be called after `close`."""

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Prepare a response to these messages, which may still go on, so that it begins sooner. Returns without
        waiting for the computation. A model may do nothing. What was prefilled before and is not among these messages
        is given back. Raises ModelError.
        """
        ...

    def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Respond to the last message: text as it is generated, and audio as soon as there is a clause of text.

        `voice` None: the response is text only. All text comes as TextDelta, also what is spoken; ReplyDone is last.
        Closing the generator ends the response within one step of the model, which is how a barge-in ends it. Raises
        Refused, ModelError, and RemoteProtocolError for what the model cannot do.
        """
        ...

    def close(self) -> None:
        """End the conversation and give back what it holds, its KV above all. Does not wait."""
        ...


class ConversationModel(Protocol):
    """A conversation model, shared by all sessions: a cascade of models, or one that hears and speaks by itself."""

    @property
    def profile(self) -> ConversationProfile:
        """The model's facts, which do not change while it is loaded."""
        ...

    @property
    def native(self) -> NativeModel | None:
        """The native model behind it, which takes turns by itself: it is fed units of audio and never asked for a
        response. None for every other model.
        """
        ...

    async def open(self, owner: Hashable | None = None) -> ConversationStream:
        """Open a conversation, which may share KV with those of an equal `owner`; None: with no other.

        Raises Refused where there is no room for its KV.
        """
        ...
