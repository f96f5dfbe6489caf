"""Conversations over WebRTC: real peers on this host, with a recording instead of a microphone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fractions import Fraction
from typing import Any

import httpx
import numpy as np
import pytest
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame

from antiphon.audio import Pcm
from tests.conftest import Process, Recording
from tests.server.clients import until_idle
from tests.server.conversations import EVENT, LIMIT_S, talk

SDP = {"content-type": "application/sdp"}


class Microphone(MediaStreamTrack):
    """Plays a recording in real time, then silence."""

    kind = "audio"

    def __init__(self, pcm: Pcm) -> None:
        super().__init__()
        self._pcm, self._at, self._begun_s = pcm, 0, time.monotonic()

    def speak(self, pcm: Pcm) -> None:
        self._pcm = np.concatenate((self._pcm[: self._at], pcm))

    async def recv(self) -> AudioFrame:
        await asyncio.sleep(max(0.0, self._begun_s + self._at / 16000 - time.monotonic()))
        frame_pcm = np.zeros(320, np.float32)
        chunk = self._pcm[self._at : self._at + 320]
        frame_pcm[: len(chunk)] = chunk
        frame = AudioFrame(format="s16", layout="mono", samples=320)
        frame.planes[0].update((frame_pcm * 32767).astype(np.int16).tobytes())
        frame.pts, frame.sample_rate, frame.time_base = self._at, 16000, Fraction(1, 16000)
        self._at += 320
        return frame


class Caller:
    def __init__(self, pcm: Pcm) -> None:
        self.microphone = Microphone(pcm)
        self.peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.peer.addTrack(self.microphone)
        self.channel = self.peer.createDataChannel("oai-events")
        self.channel.on("message", lambda text: self.events.put_nowait(json.loads(text)))
        self.peer.on("track", self._track)
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.seen: list[dict[str, Any]] = []
        # The loudest sample of each 20 ms received.
        self.heard: list[int] = []
        self._tasks: list[asyncio.Task[None]] = []

    def _track(self, track: MediaStreamTrack) -> None:
        self._tasks.append(asyncio.create_task(self._listen(track)))

    async def _listen(self, track: MediaStreamTrack) -> None:
        try:
            while True:
                frame: Any = await track.recv()
                self.heard.append(int(np.abs(frame.to_ndarray().astype(int)).max()))
        except MediaStreamError:
            return

    def say(self, type: str, **fields: Any) -> None:
        self.channel.send(json.dumps({"type": type} | fields))

    async def until(self, type: str) -> dict[str, Any]:
        async with asyncio.timeout(LIMIT_S):
            while True:
                event = await self.events.get()
                EVENT.validate_python(event)
                self.seen.append(event)
                if event["type"] == type:
                    return event

    @property
    def kinds(self) -> list[str]:
        return [e["type"] for e in self.seen]


@asynccontextmanager
async def call(
    server: Process, pcm: Pcm, session: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> AsyncIterator[Caller]:
    caller = Caller(pcm)
    await caller.peer.setLocalDescription(await caller.peer.createOffer())
    offer = caller.peer.localDescription.sdp
    async with httpx.AsyncClient(base_url=server.url, timeout=30, headers=headers) as http:
        if session is None:
            answer = await http.post("/v1/realtime/calls", content=offer, headers=SDP)
        else:
            files = {"sdp": (None, offer), "session": (None, json.dumps({"type": "realtime"} | session))}
            answer = await http.post("/v1/realtime/calls", files=files)
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"].startswith("/v1/realtime/calls/")
    await caller.peer.setRemoteDescription(RTCSessionDescription(sdp=answer.text, type="answer"))
    try:
        await caller.until("session.created")
        yield caller
    finally:
        await caller.peer.close()


def test_when_a_call_is_hung_up_then_it_closes_without_an_error(partner: Process) -> None:
    async def main() -> Caller:
        async with call(partner, np.zeros(1600, np.float32)) as caller, httpx.AsyncClient(base_url=partner.url) as http:
            path = f"/v1/realtime/calls/{caller.seen[0]['session']['id']}/hangup"
            assert (await http.post(path)).status_code == 200
            await until_idle(partner)
            assert (await http.post(path)).status_code == 404
        return caller

    assert "error" not in asyncio.run(main()).kinds


def test_when_a_question_is_spoken_then_the_answer_is_played_and_no_event_has_audio(
    partner: Process, recordings: dict[str, Recording]
) -> None:
    pcm = np.concatenate((np.zeros(16000, np.float32), recordings["lj-LJ001-0008"].pcm))

    async def main() -> Caller:
        session = {"max_output_tokens": 24, "audio": {"input": {"transcription": {"model": "default"}}}}
        async with call(partner, pcm, session) as caller:
            await caller.until("output_audio_buffer.started")
            await caller.until("output_audio_buffer.stopped")
        return caller

    caller = asyncio.run(main())
    said = next(e for e in caller.seen if e["type"].endswith("transcription.completed"))
    assert "surpassed" in said["transcript"]
    assert "response.output_audio_transcript.delta" in caller.kinds
    assert "response.output_audio.delta" not in caller.kinds
    assert sum(loud > 500 for loud in caller.heard) > 10
    asyncio.run(until_idle(partner))


def test_when_the_user_barges_in_then_the_item_is_cut_to_what_was_played(
    partner: Process, recordings: dict[str, Recording]
) -> None:
    """The client does nothing, because the server knows how much it has played."""

    async def main() -> tuple[Caller, str, str]:
        async with call(partner, np.zeros(16000, np.float32), {"max_output_tokens": 120}) as caller:
            text = [{"type": "input_text", "text": "Tell me a long story about a king and his seven sons."}]
            caller.say("conversation.item.create", item={"type": "message", "role": "user", "content": text})
            caller.say("response.create")
            await caller.until("output_audio_buffer.started")
            caller.microphone.speak(np.concatenate((np.zeros(24000, np.float32), recordings["lj-LJ001-0004"].pcm)))
            await caller.until("input_audio_buffer.speech_started")
            cut = await caller.until("conversation.item.truncated")
            caller.say("conversation.item.retrieve", item_id=cut["item_id"])
            kept = (await caller.until("conversation.item.retrieved"))["item"]["content"][0]["transcript"]
            said = "".join(
                e["delta"]
                for e in caller.seen
                if e["type"].endswith("transcript.delta") and e.get("item_id") == cut["item_id"]
            )
            return caller, kept, said

    caller, kept, said = asyncio.run(main())
    assert "output_audio_buffer.cleared" in caller.kinds
    cut = next(e for e in caller.seen if e["type"] == "conversation.item.truncated")
    assert 500 < cut["audio_end_ms"] < 20_000
    assert kept
    assert said.startswith(kept)
    assert len(kept) < len(said)


def test_when_the_client_clears_the_output_then_the_item_is_cut(partner: Process) -> None:
    async def main() -> list[str]:
        async with call(partner, np.zeros(16000, np.float32), {"max_output_tokens": 80}) as caller:
            text = [{"type": "input_text", "text": "Count from one to thirty."}]
            caller.say("conversation.item.create", item={"type": "message", "role": "user", "content": text})
            caller.say("response.create")
            await caller.until("output_audio_buffer.started")
            caller.say("response.cancel")
            caller.say("output_audio_buffer.clear")
            await caller.until("conversation.item.truncated")
            return caller.kinds

    kinds = asyncio.run(main())
    assert "output_audio_buffer.cleared" in kinds


def test_when_an_offer_has_two_audio_sections_then_it_is_refused(partner: Process) -> None:
    """Any further track is refused, since it would be decoded without being used."""

    async def main() -> httpx.Response:
        caller = Caller(np.zeros(1600, np.float32))
        caller.peer.addTrack(Microphone(np.zeros(1600, np.float32)))
        await caller.peer.setLocalDescription(await caller.peer.createOffer())
        offer = caller.peer.localDescription.sdp
        async with httpx.AsyncClient(base_url=partner.url, timeout=30) as http:
            answer = await http.post("/v1/realtime/calls", content=offer, headers=SDP)
        await caller.peer.close()
        return answer

    answer = asyncio.run(main())
    assert answer.status_code == 400
    assert "2 audio" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"content": "nonsense", "headers": SDP}, 400),
        ({"content": "v=0\r\no=- 1 1 IN IP4 0.0.0.0\r\ns=-\r\nt=0 0\r\n", "headers": SDP}, 400),
        ({"content": "{}", "headers": {"content-type": "application/json"}}, 415),
        ({"files": {"session": (None, "{}")}}, 400),
        ({"files": {"sdp": (None, "v=0"), "session": (None, "{")}}, 400),
        ({"content": b"x" * (1 << 21), "headers": SDP}, 413),
    ],
)
def test_when_an_offer_is_wrong_then_it_is_refused_and_holds_no_place(
    partner: Process, request_: Any, status: int
) -> None:
    answer = httpx.post(f"{partner.url}/v1/realtime/calls", timeout=30, **request_)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    asyncio.run(until_idle(partner))


def test_when_a_websocket_clears_the_output_then_it_is_an_error(partner: Process) -> None:
    async def main() -> str:
        async with talk(partner) as wire:
            await wire.say("output_audio_buffer.clear")
            return str((await wire.until("error"))["error"]["code"])

    assert asyncio.run(main()) == "invalid_value"
