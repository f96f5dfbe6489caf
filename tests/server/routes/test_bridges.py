"""The bridges over real sockets, on a server that records."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import connect

from antiphon.server.state import ServerState
from antiphon.settings import Settings
from tests.scripted import speech
from tests.server.scripted import Echo, serving

LIMIT_S = 30


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ServerState, Echo]]:
    settings = Settings()
    folder = tmp_path_factory.mktemp("boxes")
    with serving(replace(settings, server=replace(settings.server, record=str(folder)))) as it:
        yield it


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def f32(pcm: np.ndarray) -> str:
    return b64encode(pcm.astype("<f4").tobytes()).decode()


def test_when_an_omni_client_talks_then_its_turns_are_answered_and_recorded(
    recorded: tuple[str, ServerState, Echo],
) -> None:
    async def main() -> tuple[list[Any], bytes]:
        seen, sound = [], b""
        async with connect(f"{recorded[0]}/v1/omni") as socket:
            await socket.send(json.dumps({"type": "session.config", "instructions": "Say it back."}))
            for k in range(2):
                pcm = speech(1 + 3 * k, 3)
                await socket.send((pcm * 32768).round().astype("<i2").tobytes())
                await socket.send(json.dumps({"type": "input.done"}))
                while (
                    not seen
                    or seen[-1]["type"] != "turn.done"
                    or len([e for e in seen if e["type"] == "turn.done"]) <= k
                ):
                    data = await socket.recv()
                    if isinstance(data, bytes):
                        assert data[:4] == b"RIFF"
                        sound += data[44:]
                    else:
                        seen.append(json.loads(data))
        return seen, sound

    seen, sound = run(main())
    assert [e["text"] for e in seen if e["type"] == "turn.done"] == ["w1 w2 w3", "w4 w5 w6"]
    assert len(sound) == 2 * 3 * round(0.3 * 24_000) * 2
    # The second turn arrived before any audio of the first response was heard.
    assert recorded[2].asked[-1] == ("Say it back.", "w1 w2 w3", "w4 w5 w6")
    assert list(Path(recorded[1].settings.server.record).iterdir())


def test_when_the_minicpmo_demo_talks_then_each_chunk_is_answered_and_health_counts_it(
    recorded: tuple[str, ServerState, Echo],
) -> None:
    async def main() -> list[dict[str, Any]]:
        out = []
        async with connect(f"{recorded[0]}/ws/duplex") as socket:
            await socket.send(json.dumps({"type": "prepare", "system_prompt": "Say it back."}))
            assert json.loads(await socket.recv())["type"] == "prepared"
            first, silence = speech(1, 3), np.zeros(16_000, np.float32)
            while not out or not out[-1]["end_of_turn"]:
                second = first if not out else silence
                await socket.send(json.dumps({"type": "audio_chunk", "audio_base64": f32(second)}))
                out.append(json.loads(await socket.recv()))
                # Sends silence until the response is produced.
                await asyncio.sleep(0.05)
            await socket.send(json.dumps({"type": "stop"}))
            assert json.loads(await socket.recv())["type"] == "stopped"
        return out

    results = run(main())
    spoken = [r for r in results if not r["is_listen"]]
    assert "".join(r["text"] for r in spoken) == "w1 w2 w3"
    audio = [np.frombuffer(b64decode(r["audio_data"]), "<f4") for r in results]
    assert {len(a) for a, r in zip(audio, results, strict=True) if not r["end_of_turn"]} == {24_000}
    assert sum(np.count_nonzero(a) for a in audio) == 3 * round(0.3 * 24_000)
    assert spoken[-1]["end_of_turn"] is True
    health = httpx.get(recorded[0].replace("ws", "http", 1) + "/health").json()
    assert health["status"] == "ok"
    assert health["worker_status"] in ("idle", "duplex_active")
    assert health["total_requests"] >= 1


def test_when_the_openbmb_sdk_connects_then_its_subprotocol_is_chosen(recorded: tuple[str, ServerState, Echo]) -> None:
    async def main() -> list[str]:
        kinds = []
        protocols: Any = ["map.realtime"]
        async with connect(f"{recorded[0]}/v1/realtime?mode=audio&model=x", subprotocols=protocols) as socket:
            assert socket.subprotocol == "map.realtime"
            kinds.append(json.loads(await socket.recv())["type"])
            await socket.send(json.dumps({"type": "session.init", "payload": {}}))
            sound = np.concatenate((speech(1, 2), np.zeros(16_000 * 6, np.float32)))
            for at in range(0, len(sound), 8_000):
                await socket.send(json.dumps({"type": "input.append", "input": {"audio": f32(sound[at : at + 8_000])}}))
            while kinds[-1] != "response.listen":
                kinds.append(json.loads(await socket.recv())["type"])
            await socket.send(json.dumps({"type": "session.close"}))
            while kinds[-1] != "session.closed":
                kinds.append(json.loads(await socket.recv())["type"])
        return kinds

    kinds = run(main())
    assert kinds[:2] == ["session.queue_done", "session.created"]
    assert {"response.output_text.delta", "response.output_audio.delta", "response.done"} <= set(kinds)
