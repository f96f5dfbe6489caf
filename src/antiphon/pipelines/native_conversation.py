"""Wraps a native model, which takes turns by itself, as a conversation model. No response is ever requested from it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Sequence

from antiphon.contracts import ConversationProfile, Message, NativeModel, ReplyOptions, ResponseChunk, VoiceOptions
from antiphon.errors import RemoteProtocolError
from antiphon.events.tools import Tool

# The profile's rate for a model without a voice, which sends no audio.
DEFAULT_RATE_HZ = 24_000


class NativeConversationModel:
    """A ConversationModel that wraps a native model.

    The conversation session feeds units of audio to `native`. This object owns it, and `close` closes it.
    """

    def __init__(self, native: NativeModel) -> None:
        self.native = native
        facts = native.profile
        self.profile = ConversationProfile(facts.id, facts.sample_rate_hz or DEFAULT_RATE_HZ, facts.voices)

    async def open(self, owner: Hashable | None = None) -> NativePlaceholderStream:
        """Return a stream that refuses to respond. The session opens a stream of `native` itself."""
        return NativePlaceholderStream()

    def close(self) -> None:
        """Stop the native model's workers, for all sessions."""
        self.native.close()


class NativePlaceholderStream:
    """A ConversationStream for sessions whose model speaks by itself. Every request for a response is an error."""

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Do nothing: the model has already heard the audio, unit by unit."""

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Raise RemoteProtocolError `response_create_unsupported` at the first step."""
        raise RemoteProtocolError("response_create_unsupported", "This model decides by itself when to speak.")
        yield

    def close(self) -> None:
        """Do nothing: no stream is open."""
