"""How speech reaches a client: connection set-up and first sound, for each transport.

    antiphon bench tts --transports [--trials N]

Each trial opens a new connection. First sound is the time at which a listener hears sound. The voice begins with
silence, and a player that starts with the first received audio plays that silence first. In a call, the sound is the
decoded audio of the peer, after its jitter buffer. The conversations speak the same sentence as the requests. Their
language model is a process of this benchmark that answers at once. The request to it is part of their figures.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import websockets
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import AudioStreamTrack
from bench.common import Server, server, show, spread
from bench.engines import backend
from bench.realtime import talking

SENTENCE = "The weather will be mild tomorrow with some rain late in the evening."
WARM_UP, LIMIT_S = 3, 30
# 16-bit samples of at least this value count as sound in a call. Comfort noise and codec ripple are below it.
LOUD, RATE_HZ = 200, 24_000
SESSION = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
ASK = (
    {
        "type": "conversation.item.create",
        "item": {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is it like?"}]},
    },
    {"type": "response.create"},
)


class Player:
    """Plays 24 kHz PCM from the moment at which it first arrives, and records when the first sound is heard."""

    def __init__(self) -> None:
        self._begun_s: float | None = None
        self._played = 0

    def sound_at_s(self, data: bytes) -> float | None:
        """Return when the first sound of newly received audio is heard; None if all of it is silent."""
        now_s = time.perf_counter()
        if self._begun_s is None:
            self._begun_s = now_s
        pcm = np.abs(np.frombuffer(data[: len(data) // 2 * 2], "<i2").astype(int))
        loud = np.flatnonzero(pcm > LOUD)
        at, self._played = self._played + (int(loud[0]) if len(loud) else 0), self._played + len(pcm)
        return max(now_s, self._begun_s + at / RATE_HZ) if len(loud) else None


# One trial. It returns the seconds to set up the connection, and the seconds from the request to the first sound.
Trial = Callable[[Server], Awaitable[tuple[float, float]]]


async def over_http(srv: Server, **fields: Any) -> tuple[float, float]:
    """Request speech as PCM, or as server-sent events with `stream_format` `sse`."""
    connected_s, player = 0.0, Player()

    async def trace(event: str, _: dict[str, Any]) -> None:
        nonlocal connected_s
        if event == "connection.connect_tcp.complete":
            connected_s = time.perf_counter()

    body = {"input": SENTENCE, "response_format": "pcm"} | fields
    async with httpx.AsyncClient(timeout=LIMIT_S) as http:
        begun_s = time.perf_counter()
        request = http.stream("POST", f"{srv.url}/v1/audio/speech", json=body, extensions={"trace": trace})
        async with request as answer:
            parts = (event_audio(line) async for line in answer.aiter_lines()) if fields else answer.aiter_bytes()
            async for data in parts:
                if heard_s := player.sound_at_s(data):
                    return connected_s - begun_s, heard_s - connected_s
    raise RuntimeError("there was no sound")


def event_audio(line: str) -> bytes:
    return base64.b64decode(json.loads(line[6:]).get("audio", "")) if line.startswith("data: ") else b""


async def over_sse(srv: Server) -> tuple[float, float]:
    return await over_http(srv, stream_format="sse")


async def over_websocket(srv: Server) -> tuple[float, float]:
    """Request speech over the speech stream."""
    begun_s = time.perf_counter()
    async with websockets.connect(f"{srv.ws}/v1/audio/speech/stream", compression=None) as socket:
        opened_s = time.perf_counter()
        config = {"type": "session.config", "response_format": "pcm", "stream_audio": True}
        for message in (config, {"type": "input.text", "text": SENTENCE}, {"type": "input.done"}):
            await socket.send(json.dumps(message))
        player = Player()
        async for frame in socket:
            if isinstance(frame, bytes) and (heard_s := player.sound_at_s(frame)):
                return opened_s - begun_s, heard_s - opened_s
    raise RuntimeError("there was no sound")


async def talk_over_websocket(srv: Server) -> tuple[float, float]:
    """Hold a conversation. Its set-up ends when its session is configured."""
    begun_s = time.perf_counter()
    async with talking(srv.ws, SESSION) as talk:
        opened_s, player = time.perf_counter(), Player()
        for message in ASK:
            await talk.send(**message)
        while True:
            event = await talk.event()
            is_sound = event["type"] == "response.output_audio.delta"
            if is_sound and (heard_s := player.sound_at_s(base64.b64decode(event["delta"]))):
                return opened_s - begun_s, heard_s - opened_s


async def talk_over_webrtc(srv: Server) -> tuple[float, float]:
    """Hold a call. Its set-up ends when its data channel opens. Its first sound is in the decoded audio of the peer."""
    begun_s = time.perf_counter()
    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    peer.addTrack(AudioStreamTrack())
    channel, opened, first = peer.createDataChannel("oai-events"), asyncio.Event(), asyncio.Event()
    times = {"opened": 0.0, "first": 0.0}
    listening: list[asyncio.Task[None]] = []

    @channel.on("message")
    def message(text: str) -> None:
        # The first event confirms that the session is configured.
        if json.loads(text)["type"] == "session.created" and not opened.is_set():
            times["opened"] = time.perf_counter()
            opened.set()

    @peer.on("track")
    def track(audio: Any) -> None:
        async def listen() -> None:
            while not first.is_set():
                frame = await audio.recv()
                if opened.is_set() and np.abs(frame.to_ndarray().astype(int)).max() > LOUD:
                    times["first"] = time.perf_counter()
                    first.set()

        listening.append(asyncio.create_task(listen()))

    try:
        await peer.setLocalDescription(await peer.createOffer())
        async with httpx.AsyncClient(timeout=LIMIT_S) as http:
            files = {"sdp": (None, peer.localDescription.sdp), "session": (None, json.dumps(SESSION))}
            answer = await http.post(f"{srv.url}/v1/realtime/calls", files=files)
        await peer.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        async with asyncio.timeout(LIMIT_S):
            await opened.wait()
            for ask in ASK:
                channel.send(json.dumps(ask))
            await first.wait()
        return times["opened"] - begun_s, times["first"] - times["opened"]
    finally:
        for task in listening:
            task.cancel()
        await peer.close()


TRIALS: dict[str, Trial] = {
    "HTTP, chunks of PCM": over_http,
    "HTTP, server-sent events": over_sse,
    "WebSocket, speech stream": over_websocket,
    "WebSocket, conversation": talk_over_websocket,
    "WebRTC, conversation": talk_over_webrtc,
}


async def _trials(srv: Server, trials: int) -> dict[str, Any]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in TRIALS}
    # Takes the transports in turn, so that other load on the machine affects all of them.
    for round in range(trials + WARM_UP):
        for name, trial in TRIALS.items():
            times = await trial(srv)
            if round >= WARM_UP:
                found[name].append(times)
            await asyncio.sleep(0.1)
    return {
        name: spread([s * 1000 for s, _ in times], "setup", "ms") | spread([f * 1000 for _, f in times], "first", "ms")
        for name, times in found.items()
    }


def transports(trials: int) -> dict[str, Any]:
    """Measure all transports with a separate server, and print a table."""
    with backend(SENTENCE) as url, server("--language-model", url) as srv:
        out = asyncio.run(_trials(srv, trials))
    show("connection set-up and first sound of a 12-word sentence", out)
    return out
