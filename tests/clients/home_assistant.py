"""Home Assistant's own Wyoming classes, without a running Home Assistant: what their drivers share."""

import asyncio
from dataclasses import fields
from importlib.util import find_spec
from types import SimpleNamespace

from homeassistant.components import conversation, stt
from homeassistant.components.wyoming.data import WyomingService
from homeassistant.components.wyoming.stt import WyomingSttProvider
from homeassistant.components.wyoming.tts import WyomingTtsProvider
from homeassistant.core import Context, HomeAssistant

METADATA = stt.SpeechMetadata(
    language="en",
    format=stt.AudioFormats.WAV,
    codec=stt.AudioCodecs.PCM,
    bit_rate=stt.AudioBitRates.BITRATE_16,
    sample_rate=stt.AudioSampleRates.SAMPLERATE_16000,
    channel=stt.AudioChannels.CHANNEL_MONO,
)


class Entities:
    """Home Assistant's entities for a server. `agent` is None in versions without a conversation entity."""

    def __init__(self, service: WyomingService, folder: str) -> None:
        """`folder` is that of a configuration."""
        self.hass = HomeAssistant(folder)
        entry = SimpleNamespace(
            entry_id="e",
            title="antiphon",
            async_create_background_task=lambda hass, work, name: asyncio.create_task(work, name=name),
        )
        self.ears = WyomingSttProvider(entry, service)
        self.voice = WyomingTtsProvider(entry, service)
        self.agent = None
        if find_spec("homeassistant.components.wyoming.conversation"):
            from homeassistant.components.wyoming.conversation import WyomingConversationEntity

            self.agent = WyomingConversationEntity(entry, service)
            self.agent.hass = self.hass

    @classmethod
    async def of(cls, uri: str, folder: str) -> "Entities":
        """Connect as Home Assistant does when a server is added."""
        host, _, port = uri.removeprefix("tcp://").rpartition(":")
        service = await WyomingService.create(host, int(port))
        assert service, "cannot connect"
        assert service.info.asr[0].name == "antiphon"
        return cls(service, folder)

    async def ask(self, text: str, conversation_id: str) -> str:
        """Return the conversation entity's answer."""
        given = {
            "text": text,
            "context": Context(),
            "conversation_id": conversation_id,
            "language": "en",
            "agent_id": "conversation.antiphon",
        }
        # Versions differ in the fields.
        names = [field.name for field in fields(conversation.ConversationInput)]
        result = await self.agent.async_process(conversation.ConversationInput(**{n: given.get(n) for n in names}))
        return result.response.speech["plain"]["speech"]
