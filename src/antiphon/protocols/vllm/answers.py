"""Responses in the vLLM dialect, for a client that named a conversation model: docs/wire/vllm-realtime.md.

The text of a response takes the place of a transcript, its audio has events of its own.
"""

from __future__ import annotations

from base64 import b64encode

from antiphon.audio.pcm import to_pcm16
from antiphon.events.conversation import (
    CommandRejected,
    ConversationEvent,
    ResponseAudioDelta,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.transcription import TranscriptionEvent
from antiphon.protocols.vllm.messages import usage_of
from antiphon.protocols.wire import Frame, message


class VllmResponses:
    """The frames of one connection's responses. They come one at a time, and the end repeats the whole text."""

    def __init__(self) -> None:
        self._text, self._has_audio = "", False

    def frames(self, output: TranscriptionEvent | ConversationEvent) -> list[Frame]:
        """The frames of an event; most events have none.

        Audio is PCM16 in base64, at the rate of the model, which each delta names.
        """
        match output:
            case ResponseTextDelta(_, text):
                self._text += text
                return [message(type="transcription.delta", delta=text)]
            case ResponseAudioDelta(_, pcm, rate_hz) if len(pcm):
                self._has_audio = True
                audio = b64encode(to_pcm16(pcm)).decode()
                kind = "response.output_audio.delta"
                return [message(type=kind, audio=audio, format="pcm16", sample_rate_hz=rate_hz)]
            case ResponseDone(response):
                text, has_audio = self._text, self._has_audio
                self._text, self._has_audio = "", False
                if response.status == "failed":
                    return [message(type="error", error=response.error, code="processing_error")]
                used = response.usage
                usage = usage_of(used.prompt_tokens, used.completion_tokens) if used else usage_of(0, 0)
                return [
                    message(type="transcription.done", text=text, usage=usage),
                    message(type="response.output_audio.done", has_audio=has_audio),
                ]
            case CommandRejected(code, text):
                return [message(type="error", error=text, code=code)]
            case _:
                return []
