"""A narrator: text in pieces in, speech out while it is made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from antiphon.client.link import JsonObject, LinkedSession, ResumingLink, SessionEnded

PATH = "/v1/audio/speech/stream"
# How the server begins to say that it could not speak a sentence; it goes on with the next.
OF_A_SENTENCE = "Generation failed"


@dataclass(frozen=True, slots=True)
class SpeechAudio:
    """More speech: mono PCM of 16 bits, little-endian, at `rate_hz`, of the sentence `text`."""

    pcm: bytes
    rate_hz: int
    text: str


class ClientSpeech(LinkedSession):
    """One speech stream. Entered with `async with`; iterated for its audio, once for each `finish`.

    It survives cuts of its connection. Half a minute without text ends it.
    """

    def __init__(self, link: ResumingLink, config: JsonObject) -> None:
        super().__init__(link)
        self._config = config
        self._sentence, self._rate_hz = "", 0

    async def _begin(self) -> None:
        await self._link.send({"type": "session.config", **self._config})
        # The server speaks first; what it refuses of the configuration comes with the first utterance.
        await self._link.receive()

    async def say(self, text: str) -> None:
        """Add to the utterance. Sentences are spoken as they are complete. Raises SessionEnded."""
        await self._link.send({"type": "input.text", "text": text})

    async def finish(self) -> None:
        """End the utterance: the iteration ends with its last audio. Raises SessionEnded."""
        await self._link.send({"type": "input.done"})

    async def cancel(self) -> None:
        """Say nothing more of the utterance; the iteration ends. Raises SessionEnded."""
        await self._link.send({"type": "input.cancel"})

    async def __aiter__(self) -> AsyncIterator[SpeechAudio]:
        """Yield the utterance's audio as it is made, until it ends. Raises SessionEnded for what the server refuses; at
        the utterance's end for a sentence that could not be spoken.
        """
        failure: str | None = None
        while True:
            message = await self._link.receive()
            if isinstance(message, bytes):
                yield SpeechAudio(message, self._rate_hz, self._sentence)
                continue
            match message.get("type"):
                case "audio.start":
                    self._sentence = message["sentence_text"]
                    self._rate_hz = message.get("sample_rate") or self._rate_hz
                case "session.done":
                    if failure:
                        raise SessionEnded("processing_error", failure)
                    return
                case "error" if str(message.get("message")).startswith(OF_A_SENTENCE):
                    failure = failure or str(message.get("message"))
                case "error":
                    raise SessionEnded("error", str(message.get("message")))
