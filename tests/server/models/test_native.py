"""MiniCPM-o with tiny random weights on a real server: sessions that share it, frames, and the demo's worker."""

from __future__ import annotations

import asyncio
import io
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect

from antiphon.adapters.minicpmo.model import MiniCpmO
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import NativeOptions, SpeakStep, Unit
from antiphon.events.duplex import NativeSampling
from tests.adapters import tiny_minicpmo as tiny
from tests.conftest import Process, Serve

# The length of a sampled answer is random.
LIMIT_S = 240
NUM_UNITS = 9
SESSION = {
    "instructions": tiny.PROMPT,
    "temperature": 0,
    "turn_detection": None,
    "extra_body": {"force_listen_count": tiny.FORCED_FIRST},
}
# Turns end after a few words. A unit takes a second of real time, because a client that sends nothing is silent.
BRIEF = SESSION | {"extra_body": {"force_listen_count": tiny.FORCED_FIRST, "length_penalty": 0.1, "seed": 3}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("minicpmo"))


@pytest.fixture(scope="module")
def native(serve: Serve, folder: Path) -> Process:
    return serve("--conversation-model", str(folder), "--weights", "fp32")


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def append(unit: int, first: int, **more: Any) -> str:
    pcm = (tiny.sound(first + unit) * 32768).clip(-32768, 32767).astype("<i2").tobytes()
    return json.dumps({"type": "input_audio_buffer.append", "audio": b64encode(pcm).decode(), **more})


def picture(number: int) -> str:
    file = io.BytesIO()
    tiny.picture(number).save(file, "PNG")
    return b64encode(file.getvalue()).decode()


async def units(socket: ClientConnection, first: int, frames: bool, count: int) -> list[str]:
    """Return the text of the first units, "" for each unit in which the model listened.

    Sends all units at the start, so that the server does not insert silence.
    """
    for unit in range(NUM_UNITS):
        await socket.send(append(unit, first, **({"video_frames": [picture(unit)]} if frames and unit == 2 else {})))
    out: list[str] = []
    while len(out) < count:
        event = json.loads(await socket.recv())
        assert event["type"] != "error", event
        if event["type"] == "response.output_text.delta":
            out.append(event["delta"])
        elif event["type"] == "response.listen" and event["response"]["metadata"]["reason"] == "model":
            out.append("")
    return out


async def session(url: str, first: int, count: int, frames: bool = False) -> list[str]:
    async with connect(f"{url}/v1/duplex") as socket:
        await socket.send(json.dumps({"type": "session.update", "session": SESSION}))
        created = json.loads(await socket.recv())
        facts = created["session"]["capabilities"]
        assert facts["implementation_level"] == "model_native_duplex"
        assert facts["chunk_period_ms"] == 1000
        assert facts["optional_modalities"] == ["video"]
        return await units(socket, first, frames, count)


def alone(folder: Path, first: int, frames: bool = False) -> list[str]:
    """Return the text of the same units, computed without a server."""

    async def main() -> list[str]:
        model = MiniCpmO(folder, "tiny", EngineModelOptions(weights="fp32", threads=1))
        talk = await model.open(
            NativeOptions(tiny.PROMPT, listen_only_units=tiny.FORCED_FIRST, sampling=NativeSampling(temperature=0.0))
        )
        out = []
        for unit in range(NUM_UNITS):
            pcm = np.frombuffer((tiny.sound(first + unit) * 32768).clip(-32768, 32767).astype("<i2").tobytes(), "<i2")
            file = io.BytesIO()
            tiny.picture(unit).save(file, "PNG")
            shown = (file.getvalue(),) if frames and unit == 2 else ()
            await talk.append(Unit(pcm.astype(np.float32) / 32768, shown))
            step = await talk.step()
            if not isinstance(step, SpeakStep):
                out.append("")
            elif step.text:
                out.append(step.text)
        model.close()
        return out

    return run(main())  # type: ignore[no-any-return]


def test_sessions_that_share_the_model_say_what_each_says_alone(native: Process, folder: Path) -> None:
    wanted = [alone(folder, 0), alone(folder, 30), alone(folder, 60, frames=True)]

    async def main() -> list[list[str]]:
        url = native.url.replace("http", "ws")
        firsts = ((0, False), (30, False), (60, True))
        return await asyncio.gather(
            *(session(url, first, len(w), frames) for (first, frames), w in zip(firsts, wanted, strict=True))
        )

    together = run(main())
    # A row computed in a batch may differ in its last bit from the same row computed alone. If two tokens are nearly
    # equal, the other one is then chosen, and the texts differ from there on. A leak from another session would show at
    # once.
    for texts, expected in zip(together, wanted, strict=True):
        parted = next((i for i, (a, b) in enumerate(zip(texts, expected, strict=True)) if a != b), len(expected))
        first_spoken = next(i for i, text in enumerate(expected) if text)
        assert parted > first_spoken, (texts, expected)
    assert any(texts == expected for texts, expected in zip(together, wanted, strict=True))
    # The sessions speak, and their texts differ.
    assert any(wanted[0])
    assert wanted[0] != wanted[1]
    assert wanted[2] != alone(folder, 60)


def test_when_the_demos_worker_forces_it_then_the_model_listens(native: Process) -> None:
    async def main() -> list[dict[str, Any]]:
        out = []
        async with connect(native.url.replace("http", "ws") + "/ws/duplex") as socket:
            await socket.send(json.dumps({"type": "prepare", "system_prompt": tiny.PROMPT}))
            assert json.loads(await socket.recv())["type"] == "prepared"
            for unit in range(4):
                sound = b64encode(tiny.sound(unit).astype("<f4").tobytes()).decode()
                await socket.send(json.dumps({"type": "audio_chunk", "audio_base64": sound, "force_listen": True}))
                out.append(json.loads(await socket.recv()))
        return out

    for result in run(main()):
        assert result["type"] == "result"
        assert result["is_listen"]


async def answered(socket: ClientConnection) -> list[dict[str, Any]]:
    """Return the events up to the end of an answer."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] != "response.done":
        events.append(json.loads(await socket.recv()))
        assert events[-1]["type"] != "error", events[-1]
    return events


@pytest.mark.parametrize(
    "asks", [("input_audio_buffer.commit",), ("response.create",), ("input_audio_buffer.commit", "response.create")]
)
def test_when_a_client_commits_or_asks_and_sends_nothing_more_then_it_is_answered(
    native: Process, asks: tuple[str, ...]
) -> None:
    async def main() -> list[dict[str, Any]]:
        async with connect(native.url.replace("http", "ws") + "/v1/duplex") as socket:
            # Units in which the model is forced to listen do not keep it from answering.
            await socket.send(json.dumps({"type": "session.update", "session": BRIEF | {"temperature": 0.7}}))
            await socket.send(append(0, 0))
            await socket.send(append(1, 0))
            for kind in asks:
                await socket.send(json.dumps({"type": kind}))
            return await answered(socket)

    # Tiny random weights sometimes say nothing.
    for _ in range(5):
        events = run(main())
        assert [e["type"] for e in events].count("response.created") == 1
        if "response.output_text.delta" in [e["type"] for e in events]:
            break
    assert "response.output_text.delta" in [e["type"] for e in events]


def test_when_a_client_types_and_sends_no_sound_then_it_is_answered(native: Process) -> None:
    async def main() -> list[dict[str, Any]]:
        async with connect(native.url.replace("http", "ws") + "/v1/duplex") as socket:
            await socket.send(json.dumps({"type": "session.update", "session": BRIEF}))
            await socket.send(json.dumps({"type": "push_text", "text": "Good morning! <|listen|>"}))
            return await answered(socket)

    assert "response.output_text.delta" in [e["type"] for e in run(main())]


def test_when_a_client_has_no_duplex_dialect_then_it_gets_responses_it_knows(native: Process) -> None:
    async def main() -> list[str]:
        async with connect(native.url.replace("http", "ws") + "/v1/realtime?model=default") as socket:
            assert json.loads(await socket.recv())["type"] == "session.created"
            sound = {"type": "audio/pcm", "rate": 24_000}
            session = {
                "type": "realtime",
                "instructions": tiny.PROMPT,
                "output_modalities": ["text"],
                "audio": {"input": {"format": sound, "turn_detection": None}},
            }
            await socket.send(json.dumps({"type": "session.update", "session": session}))
            for unit in range(14):
                pcm = np.repeat(tiny.sound(unit), 3)[::2]
                data = (pcm * 32768).clip(-32768, 32767).astype("<i2").tobytes()
                await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": b64encode(data).decode()}))
            kinds: list[str] = []
            while "response.output_text.delta" not in kinds:
                kinds.append(json.loads(await socket.recv())["type"])
            return kinds

    kinds = run(main())
    assert "error" not in kinds
    assert "response.created" in kinds


def test_when_a_folder_is_no_checkpoint_then_the_error_says_so(tmp_path: Path, folder: Path) -> None:
    from antiphon.errors import ModelError

    with pytest.raises(ModelError, match="is not a MiniCPM-o"):
        MiniCpmO(tmp_path, "none", EngineModelOptions())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ModelError, match="is not a MiniCPM-o"):
        MiniCpmO(tmp_path, "none", EngineModelOptions(weights="fp32"))
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG | {"model_type": "qwen3"}))
    with pytest.raises(ModelError, match="qwen3"):
        MiniCpmO(tmp_path, "none", EngineModelOptions(weights="fp32"))
