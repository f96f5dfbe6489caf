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
    # Sample rate of the audio of its responses, in Hz.
    sample_rate_hz: int
    # Names of its voices, the default first. Empty: it does not speak.
    voices: tuple[str, ...]
    # True if it accepts audio and images in messages. Other models get text instead.
    accepts_media: bool = False
    # Limit of preemptive responses per conversation and minute; None: no limit.
    max_preemptive: int | None = None
    # The length of the sound windows of the VideoParts that it accepts, in seconds. 0: it does not accept VideoParts,
    # and gets frames as images and sound as audio.
    video_window_s: float = 0.0
    # The length of the windows of audio that it encodes independently, in milliseconds. The windows of an open turn may
    # therefore be prefilled (`AudioPart.grows`). 0: audio is encoded after its turn has ended.
    audio_window_ms: int = 0
    # True if function calls are constrained to the tools' schemas, which must therefore compile into a grammar.
    keeps_to_schemas: bool = False


@dataclass(frozen=True, slots=True)
class ResponseAudio:
    """The next piece of a response's audio. pcm: float32 [num_samples], mono, at the profile's rate.

    `words` are the words that begin in this audio, with times in seconds from the start of the response's audio. If the
    voice has no word times, they are the words that are estimated to have ended by the end of this audio.
    """

    pcm: Pcm
    words: tuple[Word, ...] = ()


ResponseChunk = TextDelta | ToolCallStarted | ToolCallDelta | ResponseAudio | ReplyDone


class ConversationStream(Protocol):
    """One conversation with a conversation model. It runs one response at a time. Call nothing after `close`."""

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Prepare a response to messages that may still continue, so that the response begins sooner.

        Returns without waiting for the computation, except that of audio that grows. A model may treat it as a no-op.
        KV that an earlier call prefilled is freed if `messages` do not contain its text.

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
        """The native model, if this model takes turns by itself; None for all other models. A native model consumes
        units of audio and is never asked for a response.
        """
        ...

    async def open(self, owner: Hashable | None = None) -> ConversationStream:
        """Open a conversation.

        Args:
            owner: The owner of the conversation. Conversations whose owners are equal may share KV. None: this
                conversation shares KV with no other.

        Raises:
            Refused: There is no room for its KV.
        """
        ...
