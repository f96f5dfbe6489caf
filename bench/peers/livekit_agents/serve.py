"""Serves a LiveKit Agents voice agent over those events of the OpenAI Realtime API that `antiphon certify` reads.

    python tests/clients/run.py livekit   (creates the environment)
    antiphon serve --port 8000 &
    tests/clients/.venv-livekit/bin/python bench/peers/livekit_agents/serve.py --parts http://127.0.0.1:8000
    antiphon certify --url ws://127.0.0.1:8766 --kinds conversation --minutes 0 --out peer.json

The package is unmodified, and so is its turn-taking: its VAD, the turn detector that it uses without its cloud
(`turn-detector-v1-mini`), preemptive answers, its default delays. Its models are antiphon's, through the OpenAI plugin:
streaming transcription, chat completions, speech. There is no room. Audio goes over a WebSocket, which saves the time
of WebRTC's jitter buffers. The client receives `speech_started` when the agent's audio is paused or dropped, because
that is when the agent falls silent in a room.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import logging
import time
from typing import Any

from aiohttp import WSMsgType, web
from livekit import rtc
from livekit.agents import Agent, AgentSession, inference, utils
from livekit.agents.voice import io
from livekit.plugins import openai

RATE_HZ = 24_000
log = logging.getLogger("serve")


class Microphone(io.AudioInput):
    """The audio that the client sends."""

    def __init__(self) -> None:
        super().__init__(label="socket")
        self.frames: asyncio.Queue[rtc.AudioFrame] = asyncio.Queue()

    async def __anext__(self) -> rtc.AudioFrame:
        return await self.frames.get()


class Loudspeaker(io.AudioOutput):
    """Plays in real time like a client, and sends the same audio to the client."""

    def __init__(self, send: Any) -> None:
        super().__init__(label="socket", capabilities=io.AudioOutputCapabilities(pause=True), sample_rate=RATE_HZ)
        self._send, self._number = send, 0
        self._begun_s = self._seconds = 0.0
        self._paused_s: float | None = None
        self._ends: asyncio.Task[None] | None = None
        self._is_open = False

    @property
    def _played_s(self) -> float:
        now_s = time.monotonic() if self._paused_s is None else self._paused_s
        return min(self._seconds, now_s - self._begun_s)

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if not self._is_open:
            self._is_open, self._seconds, self._begun_s = True, 0.0, time.monotonic()
            self._paused_s = None
            self._number += 1
            self._tell("response.created", response={"id": f"resp_{self._number}"})
            self.on_playback_started(created_at=time.time())
        self._seconds += frame.duration
        delta = base64.b64encode(bytes(frame.data)).decode()
        self._tell("response.output_audio.delta", item_id=f"item_{self._number}", delta=delta)

    def flush(self) -> None:
        super().flush()
        if self._is_open and self._ends is None:
            self._ends = asyncio.create_task(self._play())

    async def _play(self) -> None:
        while self._paused_s is not None or self._played_s < self._seconds:
            await asyncio.sleep(0.01)
        self._over(interrupted=False)

    def clear_buffer(self) -> None:
        if self._is_open:
            if self._ends:
                self._ends.cancel()
            self._tell("input_audio_buffer.speech_started")
            self._over(interrupted=True)

    def pause(self) -> None:
        if self._is_open and self._paused_s is None:
            self._paused_s = time.monotonic()
            self._tell("input_audio_buffer.speech_started")

    def resume(self) -> None:
        if self._paused_s is not None:
            self._begun_s += time.monotonic() - self._paused_s
            self._paused_s = None

    def _over(self, *, interrupted: bool) -> None:
        played_s, self._is_open, self._ends, self._paused_s = self._played_s, False, None, None
        status = "cancelled" if interrupted else "completed"
        self._tell("response.done", response={"id": f"resp_{self._number}", "status": status})
        self.on_playback_finished(playback_position=played_s, interrupted=interrupted)

    def _tell(self, kind: str, **fields: Any) -> None:
        self._send({"type": kind, **fields})


async def serve(request: web.Request) -> web.WebSocketResponse:
    """Hold one conversation with a client."""
    socket = web.WebSocketResponse(max_msg_size=0)
    await socket.prepare(request)
    out: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def write() -> None:
        while True:
            await socket.send_json(await out.get())

    writing = asyncio.create_task(write())
    microphone, session = Microphone(), None
    out.put_nowait({"type": "session.created"})
    try:
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                break
            event = json.loads(message.data)
            if event["type"] == "session.update" and session is None:
                session = await begin(request.app["parts"], event["session"], microphone, out)
                out.put_nowait({"type": "session.updated", "session": {}})
            elif event["type"] == "input_audio_buffer.append":
                pcm = base64.b64decode(event["audio"])
                microphone.frames.put_nowait(rtc.AudioFrame(pcm, RATE_HZ, 1, len(pcm) // 2))
    finally:
        writing.cancel()
        if session:
            await session.aclose()
    return socket


async def begin(parts: str, asked: dict[str, Any], microphone: Microphone, out: Any) -> AgentSession[None]:
    """Start a session of LiveKit Agents that uses antiphon's models."""
    at = {"base_url": f"{parts}/v1", "api_key": "none"}
    session: AgentSession[None] = AgentSession(
        stt=openai.STT(model="default", language="en", use_realtime=True, **at),
        llm=openai.LLM(model="default", max_completion_tokens=asked.get("max_output_tokens") or 60, **at),
        tts=openai.TTS(model="default", voice="heart", response_format="pcm", **at),
        turn_handling={"turn_detection": inference.TurnDetector()},
    )
    session.input.audio = microphone
    session.output.audio = Loudspeaker(out.put_nowait)

    def heard(event: Any) -> None:
        if event.is_final:
            done = "conversation.item.input_audio_transcription.completed"
            out.put_nowait({"type": done, "transcript": event.transcript})

    session.on("user_input_transcribed", heard)
    session.on("error", lambda event: log.warning("%s", event.error))
    await session.start(Agent(instructions=asked.get("instructions") or "Answer briefly."), record=False)
    return session


async def main() -> None:
    parser = argparse.ArgumentParser(description="A voice agent of LiveKit Agents behind a WebSocket.")
    parser.add_argument("--parts", required=True, help="the URL of an antiphon server, whose models it takes")
    parser.add_argument("--port", type=int, default=8766)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    app = web.Application()
    app["parts"] = arguments.parts
    app.router.add_get("/{path:.*}", serve)
    runner = web.AppRunner(app)
    async with utils.http_context.open():
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", arguments.port).start()
        print(f"ready at ws://127.0.0.1:{arguments.port}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
