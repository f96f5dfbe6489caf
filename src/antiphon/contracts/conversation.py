"""Whoever answers in a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
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
    """Facts of a conversation partner. `voices`: the first is the default; empty: it does not speak. `takes_media`: it hears and sees what a message
    is made of; others are told in text."""

    id: str
    sample_rate_hz: int
    voices: tuple[str, ...]
    accepts_media: bool = False


@dataclass(frozen=True, slots=True)
class ResponseAudio:
    """More of the answer's sound. pcm: float32 [num_samples], mono, at the profile's rate.

    `words`: words that begin in it, or where the voice places none have ended by its end, with their places in the answer's sound so far, in seconds.
    """

    pcm: Pcm
    words: tuple[Word, ...] = ()


ResponseChunk = TextDelta | ToolCallStarted | ToolCallDelta | ResponseAudio | ReplyDone


class ConversationStream(Protocol):
    """One conversation with a partner."""

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Make ready to answer these messages, which may still go on. Does not wait for it. Raises ModelError."""
        ...

    def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Answer the last message: text as it is made, its sound as soon as there is a clause of it. `voice` None: in text only.

        All of the text comes as TextDelta, and all that is spoken of it as Speaking; ReplyDone is last. Closing the generator ends it
        within a step: that is barge-in. Raises Refused, ModelError, RemoteProtocolError.
        """
        ...

    def close(self) -> None:
        """End it."""
        ...


class ConversationModel(Protocol):
    """Whoever answers, shared by all sessions: a cascade of models, or one that hears and speaks by itself."""

    @property
    def profile(self) -> ConversationProfile: ...

    @property
    def native(self) -> NativeModel | None:
        """What it is, if it takes turns by itself: it is fed units, and nobody asks it for answers."""
        ...

    async def open(self) -> ConversationStream:
        """A new conversation. Raises Refused where there is no room."""
        ...
