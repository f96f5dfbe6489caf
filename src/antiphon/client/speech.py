"""Streamed speech synthesis: pieces of text in, audio out as it is generated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from antiphon.client.held_speech import OF_A_SENTENCE
from antiphon.client.link import JsonObject, LinkedSession, ResumingLink, SessionEnded


@dataclass(frozen=True, slots=True)
class SpeechAudio:
    """A piece of speech: mono 16-bit PCM, little-endian, at `rate_hz`. It belongs to the sentence `text`."""

    pcm: bytes
    rate_hz: int
    text: str


class ClientSpeech(LinkedSession):
    """One speech stream. It is entered with `async with`; each iteration yields the audio of one utterance.

    It survives a broken connection, and the loss of its host: another host continues it where its audio broke off. The
    server ends it after 30 s without text.
    """

    def __init__(self, link: ResumingLink, config: JsonObject) -> None:
        super().__init__(link)
        self._config = config
        self._sentence, self._rate_hz = "", 0

    async def _begin(self) -> None:
        await self._link.send({"type": "session.config", **self._config})
        # The server sends first. If it refuses the configuration, that error arrives with the first utterance.
        await self._link.receive()

    async def say(self, text: str) -> None:
        """Add text to the utterance. The server speaks each sentence as soon as it is complete.

        Raises:
            SessionEnded: The session is over.
        """
        await self._link.send({"type": "input.text", "text": text})

    async def finish(self) -> None:
        """End the utterance: the iteration ends after its last audio.

        Raises:
            SessionEnded: The session is over.
        """
        await self._link.send({"type": "input.done"})

    async def cancel(self) -> None:
        """Cancel the rest of the utterance; the iteration ends.

        Raises:
            SessionEnded: The session is over.
        """
        await self._link.send({"type": "input.cancel"})

    async def __aiter__(self) -> AsyncIterator[SpeechAudio]:
        """Yield the utterance's audio as it is generated, until the utterance ends.

        Raises:
            SessionEnded: The server refuses a message, or the session is over. If a sentence could not be spoken, this
                is raised at the end of the utterance.
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
