"""A model that takes turns by itself, as the partner of a conversation: nobody asks it for answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from antiphon.contracts import ConversationProfile, Message, NativeModel, ReplyOptions, ResponseChunk, VoiceOptions
from antiphon.errors import RemoteProtocolError
from antiphon.events.tools import Tool

# Of a model without a voice: nothing is said at it.
NO_RATE_HZ = 24_000


class NativeConversationModel:
    """See Partner. The conversation feeds `native` with units."""

    def __init__(self, native: NativeModel) -> None:
        self.native = native
        facts = native.profile
        self.profile = ConversationProfile(facts.id, facts.sample_rate_hz or NO_RATE_HZ, facts.voices)

    async def open(self) -> NativePlaceholderStream:
        """What it says is not asked of it here."""
        return NativePlaceholderStream()

    def close(self) -> None:
        """Stop its workers."""
        self.native.close()


class NativePlaceholderStream:
    """See Talk."""

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """It has heard everything already."""

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Raises RemoteProtocolError: it speaks when it wants to."""
        raise RemoteProtocolError("response_create_unsupported", "This model decides by itself when to speak.")
        yield

    def close(self) -> None:
        """Nothing is open."""
