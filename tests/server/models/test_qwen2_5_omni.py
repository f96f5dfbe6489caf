"""Qwen2.5-Omni with tiny random weights on a real server: conversations, video with its sound, and chat."""

from __future__ import annotations

import asyncio
import io
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from websockets.asyncio.client import connect

from tests.adapters import tiny_qwen2_5_omni as tiny
from tests.conftest import Process, Recording, Serve
from tests.server.clients import b64
from tests.server.clients import connect as opened

LIMIT_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny-omni"))


@pytest.fixture(scope="module")
def server(serve: Serve, folder: Path) -> Process:
    return serve("--conversation-model", str(folder), "--weights", "fp32", "--language-model", "")


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def picture(number: int) -> str:
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 255, (48, 80, 3))
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return b64encode(file.getvalue()).decode()


def test_a_spoken_turn_is_heard_and_answered(server: Process, folder: Path, recordings: dict[str, Recording]) -> None:
    recording = next(r for r in recordings.values() if r.language == "en" and 4 < r.seconds < 8)

    async def main() -> dict[str, Any]:
        async with opened(server.ws, f"?model={folder.name}") as wire:
            await wire.until("session.created")
            session = {"type": "realtime", "max_output_tokens": 6, "audio": {"input": {"turn_detection": None}}}
            await wire.say("session.update", session=session)
            await wire.until("session.updated")
            await wire.sound(recording.pcm)
            await wire.say("input_audio_buffer.commit")
            await wire.say("response.create")
            done: dict[str, Any] = await wire.until("response.done")
            return done

    # The prompt has the audio, 25 rows a second, and ten other tokens. The wire's rate is 24 kHz.
    assert run(main())["response"]["usage"]["input_tokens"] == pytest.approx(25 * recording.seconds * 2 / 3 + 10, abs=2)


def test_a_video_with_its_sound_is_asked_about_again_and_again(
    server: Process, recordings: dict[str, Recording]
) -> None:
    recording = next(r for r in recordings.values() if r.language == "en" and 4 < r.seconds < 8)

    async def main() -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = []
        async with connect(f"{server.ws}/v1/video/chat/stream", max_size=None) as socket:

            async def say(kind: str, **fields: Any) -> None:
                await socket.send(json.dumps({"type": kind, **fields}))

            await say("session.config", modalities=["text"], sampling_params_list=[{"max_tokens": 8}])
            for turn in range(2):
                for second in range(int(recording.seconds)):
                    at_s = 20 * turn + second
                    await say("video.frame", data=picture(at_s), pts_ms=1000 * at_s)
                    await say("audio.chunk", data=b64(recording.pcm[16_000 * second : 16_000 * (second + 1)]))
                await say("video.query", text="What was that?")
                while not seen or seen[-1]["type"] != "response.text.done":
                    seen.append(json.loads(await socket.recv()))
                    assert seen[-1]["type"] != "error", seen[-1]
                seen.append({"type": "asked"})
            await say("video.done")
            while seen[-1]["type"] != "session.done":
                seen.append(json.loads(await socket.recv()))
                assert seen[-1]["type"] != "error", seen[-1]
        return seen

    seen = run(main())
    assert len([e["text"] for e in seen if e["type"] == "response.text.done"]) == 2
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [m["video"] for m in listed if "video" in m] == ["pictures"]


def test_the_thinker_serves_chat_completions(server: Process) -> None:
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "default", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 5},
        timeout=LIMIT_S,
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] <= 5
