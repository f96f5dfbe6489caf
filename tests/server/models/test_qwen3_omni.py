"""Qwen3-Omni with tiny random weights on a real server: conversations, the vLLM dialect, video and chat."""

from __future__ import annotations

import asyncio
import io
import json
from base64 import b64decode, b64encode
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from websockets.asyncio.client import connect

from tests.adapters import tiny_qwen3_omni as tiny
from tests.conftest import Process, Recording, Serve
from tests.server.clients import Wire, b64
from tests.server.clients import connect as opened

LIMIT_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny-omni"))


@pytest.fixture(scope="module")
def server(serve: Serve, folder: Path) -> Process:
    # The language model is the checkpoint's own thinker part.
    return serve("--conversation-model", str(folder), "--weights", "fp32", "--language-model", "")


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def picture() -> str:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (48, 80, 3)).astype(np.uint8)).save(file, "PNG")
    return b64encode(file.getvalue()).decode()


def test_speech_and_images_are_answered_aloud_and_in_text(
    server: Process, folder: Path, recordings: dict[str, Recording]
) -> None:
    recording = next(r for r in recordings.values() if r.language == "en" and r.seconds < 8)

    async def main() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with opened(server.ws, f"?model={folder.name}") as wire:
            await wire.until("session.created")
            await wire.say(
                "session.update",
                session={"type": "realtime", "max_output_tokens": 6, "audio": {"input": {"turn_detection": None}}},
            )
            await wire.until("session.updated")
            # The model's answer is sampled, and may be empty.
            heard: list[dict[str, Any]] = []
            kinds = {"response.output_audio.delta", "response.output_audio_transcript.delta"}
            while not kinds <= {e["type"] for e in heard}:
                before = len(wire.seen)
                await wire.sound(recording.pcm)
                await wire.say("input_audio_buffer.commit")
                await wire.say("response.create")
                done = await wire.until("response.done")
                heard = wire.seen[before:]
            image = {"type": "input_image", "image_url": f"data:image/png;base64,{picture()}"}
            await wire.say(
                "conversation.item.create",
                item={"type": "message", "role": "user", "content": [image, {"type": "input_text", "text": "And?"}]},
            )
            await wire.say("response.create", response={"output_modalities": ["text"]})
            await wire.until("response.done")
            assert done["response"]["status"] in ("completed", "incomplete")
            return heard, wire.seen[before + len(heard) :]

    spoken, written = run(main())
    sound = b"".join(b64decode(e["delta"]) for e in spoken if e["type"] == "response.output_audio.delta")
    assert sound
    said = "".join(e["delta"] for e in spoken if e["type"] == "response.output_audio_transcript.delta")
    done = next(e for e in written if e["type"] == "response.done")["response"]
    assert said
    assert done["usage"]["output_tokens"]
    assert not [e for e in written if e["type"] == "response.output_audio.delta"]
    # The audio is in the prompt, 13 rows a second, and these rows of the second prompt are cached.
    first = next(e for e in spoken if e["type"] == "response.done")["response"]["usage"]
    assert first["input_tokens"] > 13 * recording.seconds
    assert done["usage"]["input_token_details"]["cached_tokens"] > 13 * recording.seconds


def test_when_server_vad_ends_a_turn_then_it_is_answered(server: Process, recordings: dict[str, Recording]) -> None:
    recording = next(r for r in recordings.values() if r.language == "en" and r.seconds < 8)

    async def main() -> list[dict[str, Any]]:
        async with opened(server.ws) as wire:
            vad = {"type": "server_vad", "interrupt_response": False}
            session = {"type": "realtime", "max_output_tokens": 6, "audio": {"input": {"turn_detection": vad}}}
            await wire.say("session.update", session=session)
            await wire.until("session.updated")
            # The model's answer is sampled, and may be empty.
            turn: list[dict[str, Any]] = []
            while not any(e["type"] == "response.output_audio.delta" for e in turn):
                before = len(wire.seen)
                await wire.sound(np.concatenate((recording.pcm, np.zeros(32_000, np.float32))))
                await wire.until("response.done")
                turn = wire.seen[before:]
            return turn

    seen = run(main())
    kinds = [e["type"] for e in seen]
    assert kinds.index("input_audio_buffer.committed") < kinds.index("response.output_audio.delta")
    done = seen[-1]["response"]
    assert done["usage"]["input_tokens"] > 13 * recording.seconds


def test_when_the_model_speaks_then_the_vllm_dialect_has_audio(
    server: Process, recordings: dict[str, Recording]
) -> None:
    recording = next(r for r in recordings.values() if r.language == "en" and r.seconds < 8)

    async def turn(wire: Wire) -> list[dict[str, Any]]:
        before = len(wire.seen)
        await wire.sound(recording.pcm)
        await wire.say("input_audio_buffer.commit", final=True)
        await wire.until("response.output_audio.done")
        return wire.seen[before:]

    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    name = next(m["id"] for m in listed if m["id"].startswith("tiny-omni"))

    async def main() -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
        async with opened(server.ws) as wire:
            await wire.say("session.update", model=name, prompt="Be brief.", voice="chelsie", realtime_max_tokens=8)
            turns = [await turn(wire), await turn(wire)]
            # The model's answer is sampled, and may be empty.
            while not any(events[-1]["has_audio"] for events in turns):
                turns.append(await turn(wire))
            await wire.say("session.update", model="default")
            return turns, await wire.until("error")

    turns, refused = run(main())
    for events in turns:
        kinds = [e["type"] for e in events if e["type"] != "session.created"]
        assert kinds[-2:] == ["transcription.done", "response.output_audio.done"]
        done = next(e for e in events if e["type"] == "transcription.done")
        assert done["text"] == "".join(e["delta"] for e in events if e["type"] == "transcription.delta")
        assert done["usage"]["prompt_tokens"] > 13 * recording.seconds
        assert done["usage"]["completion_tokens"] <= 8
        sounds = [e for e in events if e["type"] == "response.output_audio.delta"]
        assert all((s["format"], s["sample_rate_hz"]) == ("pcm16", 24_000) for s in sounds)
        assert all(b64decode(s["audio"]) for s in sounds)
        assert events[-1]["has_audio"] == bool(sounds)
    # Both turns belong to one conversation.
    prompts = [next(e for e in events if e["type"] == "transcription.done")["usage"] for events in turns]
    assert prompts[1]["prompt_tokens"] > 2 * 13 * recording.seconds
    assert refused["code"] == "invalid_event"


def test_when_commits_are_not_final_then_the_vllm_dialect_answers_while_audio_is_appended(
    server: Process, recordings: dict[str, Recording]
) -> None:
    recording = next(r for r in recordings.values() if r.language == "en" and r.seconds < 8)
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    name = next(m["id"] for m in listed if m["id"].startswith("tiny-omni"))
    half = len(recording.pcm) // 2

    async def main() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with opened(server.ws) as wire:
            await wire.say("session.update", model=name, realtime_max_tokens=8)
            # Begins like vLLM's clients. The sampled answer may be empty, so the test asks until the model speaks.
            await wire.say("input_audio_buffer.commit", final=False)
            while not any(e["type"] == "transcription.delta" for e in wire.seen):
                await wire.sound(recording.pcm[:half])
                await wire.say("input_audio_buffer.commit", final=False)
                with suppress(TimeoutError):
                    async with asyncio.timeout(2):
                        await wire.until("transcription.delta")
            before = len(wire.seen)
            await wire.sound(recording.pcm[half:])
            await wire.say("input_audio_buffer.commit", final=True)
            await wire.until("response.output_audio.done")
            return wire.seen[:before], wire.seen

    early, seen = run(main())
    assert all(e["type"] not in ("error", "transcription.done") for e in early)
    assert any(e["type"] == "transcription.delta" for e in early)
    (done,) = (e for e in seen if e["type"] == "transcription.done")
    assert done["text"] == "".join(e["delta"] for e in seen if e["type"] == "transcription.delta")
    assert seen[-1]["has_audio"] == any(e["type"] == "response.output_audio.delta" for e in seen)


def test_when_an_answer_is_cancelled_or_overtaken_then_the_vllm_dialect_goes_on(
    server: Process, recordings: dict[str, Recording]
) -> None:
    recording = next(r for r in recordings.values() if r.language == "en" and r.seconds < 8)
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    name = next(m["id"] for m in listed if m["id"].startswith("tiny-omni"))

    async def main() -> list[dict[str, Any]]:
        async with opened(server.ws) as wire:
            # Long answers, which are still under way when they are cancelled.
            await wire.say("session.update", model=name, realtime_max_tokens=2000)
            await wire.sound(recording.pcm)
            for cut in ("", "response.cancel", "commit"):
                if cut == "response.cancel":
                    await wire.say(cut)
                    await wire.until("response.output_audio.done")
                await wire.say("input_audio_buffer.commit", final=True)
                if cut == "commit":
                    await wire.until("response.output_audio.done")
                await wire.until("response.output_audio.delta")
                # Audio alone does not end an answer.
                await wire.sound(recording.pcm)
            await wire.say("response.cancel")
            await wire.until("response.output_audio.done")
            # An answer that is cancelled before it has begun ends as well.
            await wire.say("input_audio_buffer.commit", final=True)
            await wire.say("response.cancel")
            await wire.until("response.output_audio.done")
            return wire.seen

    seen = run(main())
    assert [e for e in seen if e["type"] == "error"] == []
    assert sum(e["type"] == "transcription.done" for e in seen) == 4


def test_spoken_questions_about_a_video_are_answered_aloud(server: Process, recordings: dict[str, Recording]) -> None:
    recording = next(r for r in recordings.values() if r.language == "en" and r.seconds < 8)

    async def main() -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = []
        async with connect(f"{server.ws}/v1/video/chat/stream", max_size=None) as socket:

            async def say(kind: str, **fields: Any) -> None:
                await socket.send(json.dumps({"type": kind, **fields}))

            await say("session.config", modalities=["text", "audio"])
            for _ in range(3):
                await say("video.frame", data=picture())
            await say("audio.chunk", data=b64(recording.pcm))
            for text in ("What was said?", "And now?"):
                await say("video.query", text=text)
                while not seen or not seen[-1]["type"].endswith("audio.done"):
                    seen.append(json.loads(await socket.recv()))
                    assert seen[-1]["type"] != "error", seen[-1]
                seen.append({"type": "asked"})
        return seen

    seen = run(main())
    texts = [e["text"] for e in seen if e["type"] == "response.text.done"]
    assert len(texts) == 2
    assert all(texts)
    assert [e for e in seen if e["type"] == "response.audio.delta"]
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [m["video"] for m in listed if "video" in m] == ["pictures"]


def test_the_thinker_serves_chat_completions(server: Process) -> None:
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "default", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 5},
        timeout=LIMIT_S,
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5
