"""The bridge for the MiniCPM-o demo's stock front end (`/ws/duplex`): docs/wire/bridges.md.

The client sends a second of audio at a time, and each is answered with one result: a second of the response's audio, or
that the model listens. Audio of the response is therefore kept here until the client's next message.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.encode import wav_header
from antiphon.audio.pcm import to_pcm16
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ContentPartDone,
    ConversationEvent,
    ResponseAudioDelta,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.duplex import BargeIn, EpochRaised
from antiphon.events.transcription import AppendAudio, TranscriptionEvent
from antiphon.protocols.bridges.base import OUT_HZ, Bridge, f32_base64


class MinicpmoWorkerBridge(Bridge):
    """One connection of the demo's front end; it begins with `prepare`."""

    dialect = "minicpmo"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._paused = False
        self._num_results = 0
        self._kv_rows = 0
        self._text = ""
        self._pending_audio: list[Pcm] = []
        self._speaking = False

    def _handle_event(self, kind: str, event: dict[str, Any]) -> None:
        match kind:
            case "prepare":
                prompt = event.get("system_prompt")
                prompt = prompt if isinstance(prompt, str) else ""
                # The demo has a recording for the language model and one for the speech decoder. One is enough here.
                recording = event.get("ref_audio_base64") or event.get("tts_ref_audio_base64")
                pcm = self._decode_f32(recording) if recording else np.zeros(0, np.float32)
                data = to_pcm16(pcm)
                self._begin(prompt, reference=wav_header(SAMPLE_RATE_HZ, len(data)) + data if data else b"")
                self._add_frame(type="prepared", prompt_length=len(prompt))
            case "audio_chunk":
                self._require_session()
                received_s = self._now_s()
                pcm = self._decode_f32(event.get("audio_base64"))
                if event.get("force_listen") is True:
                    self._commands.append(BargeIn("client_force_listen"))
                if len(pcm) and not self._paused:
                    self._commands.append(AppendAudio(pcm))
                self._add_result(received_s)
            case "pause" | "resume":
                self._require_session()
                self._paused = kind == "pause"
                self._add_frame(type="paused" if self._paused else "resumed")
            case "stop":
                self.closing = True
            case _:
                raise RemoteProtocolError("unknown_event", f"There is no event '{kind}'.", "type")

    def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        """Queue an error, which is flat in this dialect: its text in `error`, its code beside it."""
        self._add_frame(type="error", error=error.message, code=error.code)

    def _send(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """Keep text and audio for the next result: this dialect sends nothing that was not asked for."""
        match output:
            case ResponseTextDelta(_, text):
                self._text += text
                self._speaking = True
            case ResponseAudioDelta(at, pcm, rate_hz):
                self._pending_audio.append(self._resample(at.item_id, pcm, rate_hz))
                self._speaking = True
            case ContentPartDone(at):
                self._pending_audio.append(self._flush_audio(at.item_id))
            case ResponseDone(response):
                self._speaking = False
                if response.usage:
                    self._kv_rows = response.usage.prompt_tokens + response.usage.completion_tokens
            case EpochRaised():
                # The response was cut off: what was not sent yet is not sent any more.
                self._pending_audio, self._text, self._speaking = [], "", False
            case _:
                return

    def closed(self) -> None:
        """Queue `stopped`, the answer to the client's `stop`."""
        self._add_frame(type="stopped")

    def _add_result(self, received_s: float) -> None:
        """Queue one result: exactly a second of audio while the response goes on, less only at its end.

        `received_s`: when the client's message came, for the time that its answer took.
        """
        waiting = np.concatenate(self._pending_audio) if self._pending_audio else np.zeros(0, np.float32)
        is_over = not self._speaking
        audio = waiting[:OUT_HZ] if is_over or len(waiting) >= OUT_HZ else waiting[:0]
        self._pending_audio = [waiting[len(audio) :]]
        is_response = len(audio) > 0 or (bool(self._text) and not self._voices)
        end_of_turn = is_over and is_response and len(waiting) == len(audio)
        # Words come with the second in which they begin to be heard; without a synthesizer, as they are written.
        text, self._text = (self._text, "") if len(audio) or not self._voices else ("", self._text)
        took_ms = round((self._now_s() - received_s) * 1000, 1)
        self._add_frame(
            type="result",
            is_listen=not (len(audio) or text),
            text=text,
            audio_data=f32_base64(audio) if len(audio) else None,
            end_of_turn=end_of_turn,
            current_time=self._num_results,
            wall_clock_ms=took_ms,
            kv_cache_length=self._kv_rows,
            cost_all_ms=took_ms,
        )
        self._num_results += 1
