"""The MiniCPM-o demo's worker (`/ws/duplex`), so that its stock front end works: docs/wire/bridges.md. Sans-IO.

The client sends a second of sound at a time, and each gets one result: a second of the answer's sound, or that the partner listens.
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
    """One connection."""

    dialect = "minicpmo"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._paused = False
        self._results = 0
        self._kv_rows = 0
        self._text = ""
        self._add_audio: list[Pcm] = []
        self._speaking = False

    def _handle_event(self, kind: str, event: dict[str, Any]) -> None:
        match kind:
            case "prepare":
                prompt = event.get("system_prompt")
                prompt = prompt if isinstance(prompt, str) else ""
                # What the model hears its voice in, or what the sound is made of: one is enough.
                given = event.get("ref_audio_base64") or event.get("tts_ref_audio_base64")
                pcm = self._decode_f32(given) if given else np.zeros(0, np.float32)
                data = to_pcm16(pcm)
                self._begin(prompt, reference=wav_header(SAMPLE_RATE_HZ, len(data)) + data if data else b"")
                self._add_frame(type="prepared", prompt_length=len(prompt))
            case "audio_chunk":
                self._require_session()
                begun = self._now_s()
                pcm = self._decode_f32(event.get("audio_base64"))
                if event.get("force_listen") is True:
                    self._commands.append(BargeIn("client_force_listen"))
                if len(pcm) and not self._paused:
                    self._commands.append(AppendAudio(pcm))
                self._add_result(begun)
            case "pause" | "resume":
                self._require_session()
                self._paused = kind == "pause"
                self._add_frame(type="paused" if self._paused else "resumed")
            case "stop":
                self.closing = True
            case _:
                raise RemoteProtocolError("unknown_event", f"There is no event '{kind}'.", "type")

    def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        """See Bridge."""
        self._add_frame(type="error", error=error.message, code=error.code)

    def _send(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """See Bridge."""
        match output:
            case ResponseTextDelta(_, text):
                self._text += text
                self._speaking = True
            case ResponseAudioDelta(at, pcm, rate_hz):
                self._add_audio.append(self._resample(at.item_id, pcm, rate_hz))
                self._speaking = True
            case ContentPartDone(at):
                self._add_audio.append(self._flush_audio(at.item_id))
            case ResponseDone(response):
                self._speaking = False
                if response.usage:
                    self._kv_rows = response.usage.prompt_tokens + response.usage.completion_tokens
            case EpochRaised():
                # What was not heard is not heard any more.
                self._add_audio, self._text, self._speaking = [], "", False
            case _:
                return

    def closed(self) -> None:
        """See Bridge."""
        self._add_frame(type="stopped")

    def _add_result(self, begun: float) -> None:
        """What the last second gave: exactly a second of sound, or the rest of the turn."""
        waiting = np.concatenate(self._add_audio) if self._add_audio else np.zeros(0, np.float32)
        over = not self._speaking
        sound = waiting[:OUT_HZ] if over or len(waiting) >= OUT_HZ else waiting[:0]
        self._add_audio = [waiting[len(sound) :]]
        said = len(sound) > 0 or (bool(self._text) and not self._voices)
        last = over and said and len(waiting) == len(sound)
        # Words come with the second they are said in; where nothing sounds, as they are written.
        text, self._text = (self._text, "") if len(sound) or not self._voices else ("", self._text)
        took_ms = round((self._now_s() - begun) * 1000, 1)
        self._add_frame(
            type="result",
            is_listen=not (len(sound) or text),
            text=text,
            audio_data=f32_base64(sound) if len(sound) else None,
            end_of_turn=last,
            current_time=self._results,
            wall_clock_ms=took_ms,
            kv_cache_length=self._kv_rows,
            cost_all_ms=took_ms,
        )
        self._results += 1
