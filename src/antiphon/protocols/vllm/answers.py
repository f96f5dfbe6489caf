"""Responses in vLLM's dialect, for a client that named a conversation model: docs/wire/vllm-realtime.md.

The text of a response is sent as a transcript; its audio has separate events.
"""

from __future__ import annotations

from base64 import b64encode
from collections import deque

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
    """Writes the responses of one connection's requests.

    A request gets one response for each segment of its audio, one after another. The event that ends its last response
    repeats the text of all its responses.
    """

    def __init__(self) -> None:
        self._text, self._has_audio, self._tokens = "", False, (0, 0)
        # Whether the current request has been partly answered: a segment was answered, but the request has not ended.
        self._is_open = False
        # One entry for each requested response that has not ended: whether it is the last response of its request.
        self._asked = deque[bool]()

    @property
    def num_asked(self) -> int:
        """Number of responses that were requested and have not ended."""
        return len(self._asked)

    def ask(self, *, final: bool) -> None:
        """Register a requested response. `final`: it is the last response of its request."""
        self._asked.append(final)

    def forget(self) -> list[Frame]:
        """Drop the response that was requested last, because it was refused.

        If it was the last response of its request, the response to the previous segment now ends the request. If all
        segments are answered, the request ends at once. If it has no other segment, the refusal itself ends it.
        """
        was_final = self._asked.pop() if self._asked else False
        if was_final and self._asked and not self._asked[-1]:
            self._asked[-1] = True
        elif was_final and not self._asked and self._is_open:
            return self._ended()
        return []

    def finish(self) -> list[Frame]:
        """End the request with the response that was requested last, or at once if no response is in progress."""
        if self._asked:
            self._asked[-1] = True
            return []
        return self._ended()

    def frames(self, output: TranscriptionEvent | ConversationEvent) -> list[Frame]:
        """Return the frames of an event. Most events have no frames.

        Audio is PCM16 in base64, at the model's sample rate. Each delta states that rate.
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
                final = self._asked.popleft() if self._asked else True
                if used := response.usage:
                    prompt, completion = self._tokens
                    self._tokens = max(prompt, used.prompt_tokens), completion + used.completion_tokens
                self._is_open = not final
                if response.status == "failed":
                    if final:
                        self._ended()
                    return [message(type="error", error=response.error, code="processing_error")]
                return self._ended() if final else []
            case CommandRejected(code, text):
                # Only a cancellation or a response can be rejected here.
                ended = [] if code == "response_cancel_not_active" else self.forget()
                return [message(type="error", error=text, code=code), *ended]
            case _:
                return []

    def _ended(self) -> list[Frame]:
        """Return the frames that end a request, and reset its text and token counts."""
        text, has_audio, usage = self._text, self._has_audio, usage_of(*self._tokens)
        self._text, self._has_audio, self._tokens, self._is_open = "", False, (0, 0), False
        return [
            message(type="transcription.done", text=text, usage=usage),
            message(type="response.output_audio.done", has_audio=has_audio),
        ]
