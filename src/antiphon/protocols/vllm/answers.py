"""What the vLLM dialect says of an answer, where the model that a client named writes and speaks. Pure."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

from antiphon.audio.pcm import to_pcm16
from antiphon.events.conversation import (
    CommandRejected,
    ConversationEvent,
    ResponseAudioDelta,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.transcription import TranscriptionEvent


class VllmResponses:
    """The answers of one connection, one after the other."""

    def __init__(self) -> None:
        self._text, self._sounded = "", False

    def frames(self, output: TranscriptionEvent | ConversationEvent) -> list[dict[str, Any]]:
        """The frames an output is; most have none."""
        match output:
            case ResponseTextDelta(_, text):
                self._text += text
                return [{"type": "transcription.delta", "delta": text}]
            case ResponseAudioDelta(_, pcm, rate_hz) if len(pcm):
                self._sounded = True
                audio = b64encode(to_pcm16(pcm)).decode()
                sound = {"audio": audio, "format": "pcm16", "sample_rate_hz": rate_hz}
                return [{"type": "response.output_audio.delta"} | sound]
            case ResponseDone(response):
                text, sounded = self._text, self._sounded
                self._text, self._sounded = "", False
                if response.status == "failed":
                    return [{"type": "error", "error": response.error, "code": "processing_error"}]
                used = response.usage
                prompt, completion = (used.prompt_tokens, used.completion_tokens) if used else (0, 0)
                usage = {
                    "prompt_tokens": prompt,
                    "completion_tokens": completion,
                    "total_tokens": prompt + completion,
                }
                return [
                    {"type": "transcription.done", "text": text, "usage": usage},
                    {"type": "response.output_audio.done", "has_audio": sounded},
                ]
            case CommandRejected(code, message):
                return [{"type": "error", "error": message, "code": code}]
            case _:
                return []
