"""Points voicebench at a server of the OpenAI Realtime API: its own WebSocket adapter with other messages.

voicebench loads this class by its name (`voicebench run SCENARIO --adapter realtime:RealtimeAdapter`). The scenario's
sample rate has to be that of the session, 24 kHz. Like an ordinary client, it plays what arrives, drops it at
`speech_started`, and reports then how much was played.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, ClassVar

from voicebench import audio
from voicebench.adapters import AgentAudio, AgentClear, Transcript
from voicebench.adapters.websocket import WebSocketAdapter

TRANSCRIBED = "conversation.item.input_audio_transcription.completed"


class RealtimeAdapter(WebSocketAdapter):
    """A session of the Realtime API. `configuration` is sent as its first `session.update`.

    `log`: a file that gets each event of the server without its audio, with the second at which it came; "": none.
    """

    name: ClassVar[str] = "realtime"

    def __init__(self, configuration: dict[str, Any], log: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._log = Path(log) if log else None
        self._configuration = configuration
        self._answers: list[str] = []
        # The item that plays, its seconds so far, and the time at which all of it will have been played.
        self._item, self._seconds, self._ends_s = "", 0.0, 0.0

    async def connect(self) -> None:
        await super().connect()
        await self._send({"type": "session.update", "session": self._configuration})

    async def _send(self, event: dict[str, Any]) -> None:
        assert self._ws is not None
        await self._ws.send(json.dumps(event))

    async def send_audio(self, pcm: audio.FloatArray) -> None:
        for event in self._answers:
            await self._ws.send(event)
        self._answers.clear()
        await super().send_audio(pcm)

    def encode_audio(self, pcm: audio.FloatArray) -> str:
        data = base64.b64encode(audio.to_pcm16(pcm)).decode()
        return json.dumps({"type": "input_audio_buffer.append", "audio": data})

    def handle_text(self, message: str, now: float) -> None:
        event = json.loads(message)
        kind = event["type"]
        if self._log:
            row = {"at_s": round(now, 3)} | {name: value for name, value in event.items() if name != "delta"}
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if kind == "response.output_audio.delta":
            self._play(event, audio.from_pcm16(base64.b64decode(event["delta"])), now)
        elif kind == "input_audio_buffer.speech_started":
            self.emit(AgentClear(now))
            self._truncate(now)
        elif kind == TRANSCRIBED:
            self.emit(Transcript("user", event["transcript"], now))
        elif kind == "response.output_audio_transcript.done":
            self.emit(Transcript("agent", event["transcript"], now))

    def _play(self, event: dict[str, Any], pcm: audio.FloatArray, now: float) -> None:
        self.emit(AgentAudio(pcm, now))
        if event.get("item_id", "") != self._item:
            self._item, self._seconds = event.get("item_id", ""), 0.0
        seconds = pcm.size / self.session.sample_rate
        self._seconds += seconds
        self._ends_s = max(now, self._ends_s) + seconds

    def _truncate(self, now: float) -> None:
        left_s = self._ends_s - now
        if self._item and left_s > 0:
            played_ms = max(0, round(1000 * (self._seconds - left_s)))
            event = {"type": "conversation.item.truncate", "item_id": self._item, "content_index": 0}
            self._answers.append(json.dumps(event | {"audio_end_ms": played_ms}))
        self._item, self._ends_s = "", now
