"""The contract of conversation models, which answer in a conversation as text or speech."""

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
    """Facts of a conversation model, which do not change while it is loaded."""

    # The model's name for clients.
    id: str
    # Sample rate of the audio of its responses.
    sample_rate_hz: int
    # Names of its voices, the default first. Empty: it does not speak.
    voices: tuple[str, ...]
    # It hears audio and sees images in messages. Other models are given text instead.
    accepts_media: bool = False
    # Limit of preemptive responses per conversation and minute; None: no limit.
    max_preemptive: int | None = None
    # It takes VideoParts, whose sound is in windows of this length. 0: frames are images, and sound is audio.
    video_window_s: float = 0.0
    # It encodes audio in windows of this length, each by itself, so the windows of an open turn may be prefilled
    # (`AudioPart.grows`). 0: audio is encoded after its turn has ended.
    audio_window_ms: int = 0
    # Function calls are constrained to their tools' schemas, which must therefore compile into a grammar.
    keeps_to_schemas: bool = False


@dataclass(frozen=True, slots=True)
class ResponseAudio:
    """More of a response's audio. pcm: float32 [num_samples], mono, at the profile's rate.

    `words` begin in this audio; their times are seconds from the start of the response's audio. If the voice has no
    word times, `words` are the words estimated to have ended by the end of this audio.
    """

    pcm: Pcm
    words: tuple[Word, ...] = ()


ResponseChunk = TextDelta | ToolCallStarted | ToolCallDelta | ResponseAudio | ReplyDone


class ConversationStream(Protocol):
    """One conversation with a conversation model. It runs one response at a time. Call nothing after `close`."""

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Prepare a response to messages that may still continue, so that the response begins sooner.

        Returns without waiting for the computation. A model may treat it as a no-op. What an earlier call prefilled and
        `messages` do not contain is freed.

        Args:
            messages: The conversation so far.
            tools: The functions that the model may call in the response.

        Raises:
            ModelError: The model failed.
        """
        ...

    def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Respond to the last message: text as it is generated, and audio from the first clause on.

        Closing the generator ends the response within one step of the model. A barge-in ends it that way.

        Args:
            messages: The conversation so far.
            options: How to generate the text.
            voice: How to speak; None: the response is text only.

        Returns:
            The chunks of the response. All text arrives as TextDelta, including spoken text. ReplyDone is the last
            chunk.

        Raises:
            Refused: The model has no room.
            ModelError: The model failed.
            RemoteProtocolError: The request asks for something that the model cannot do.
        """
        ...

    def close(self) -> None:
        """End the conversation and free its resources, including its KV. Does not wait."""
        ...


class ConversationModel(Protocol):
    """A conversation model, shared by all sessions: a cascade of models, or one that hears and speaks by itself."""

    @property
    def profile(self) -> ConversationProfile:
        """The model's facts, which do not change while it is loaded."""
        ...

    @property
    def native(self) -> NativeModel | None:
        """The native model that takes turns by itself: it consumes units of audio and is never asked for a response.
        None for all other models.
        """
        ...

    async def open(self, owner: Hashable | None = None) -> ConversationStream:
        """Open a conversation.

        Args:
            owner: The conversation may share KV with conversations of an equal owner; None: with no other.

        Raises:
            Refused: There is no room for its KV.
        """
        ...
