"""`/v1/video/chat/stream` on a real server: frames in, answers with the text on them out.

Its models are the default ones, except for a small language model.
"""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from antiphon.audio.pcm import to_pcm16
from antiphon.cli.watch import WatchRequest, watch
from antiphon.settings import EngineOptions, Settings, SpeechSettings
from tests.adapters import tiny_vlm as tiny_pictures
from tests.conftest import SMALL, Process, Recording, Serve

LIMIT_S = 90


@pytest.fixture(scope="module")
def server(serve: Serve) -> Process:
    return serve("--language-model", SMALL, "--synthesizer", "hibari-heart")


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def screen(text: str, colour: str = "white", kind: str = "JPEG") -> str:
    """Return an image of a screen with a text, 640 x 360 pixels, in base64."""
    image = Image.new("RGB", (640, 360), colour)
    ImageDraw.Draw(image).text((60, 140), text, "black", ImageFont.load_default(64))
    file = io.BytesIO()
    image.save(file, kind)
    return b64encode(file.getvalue()).decode()


def url(server: Process) -> str:
    return server.url.replace("http", "ws") + "/v1/video/chat/stream"


async def opened(socket: ClientConnection, *, max_tokens: int = 60, **config: Any) -> None:
    """Configure the session. Answers have a maximum length, since the smallest model may never stop."""
    fields = {"modalities": ["text"], "sampling_params_list": [{"max_tokens": max_tokens}]}
    await socket.send(json.dumps({"type": "session.config"} | fields | config))


async def say(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind} | fields))


async def until(socket: ClientConnection, kind: str) -> list[dict[str, Any]]:
    """Return the events up to the first of a kind."""
    out: list[dict[str, Any]] = []
    while not out or out[-1]["type"] != kind:
        out.append(json.loads(await socket.recv()))
    return out


def test_when_a_question_is_asked_then_the_text_on_the_screen_is_answered_in_text_and_audio(server: Process) -> None:
    async def main() -> list[dict[str, Any]]:
        async with connect(url(server), max_size=None) as socket:
            # The other frame filter does not detect a change of the text.
            await opened(socket, modalities=["text", "audio"], frame_filter="blocks")
            for i, text in enumerate(("WELCOME", "WELCOME", "EXIT 42")):
                await say(socket, "video.frame", data=screen(text), frame_id=f"f{i}", pts_ms=1000 * i)
            events = await until(socket, "video.frame.ack")
            await asyncio.sleep(3)
            await say(socket, "video.query", text="What does the screen say?")
            await say(socket, "video.done")
            events += await until(socket, "session.done")
            with pytest.raises(ConnectionClosed):
                await socket.recv()
            return events

    events = run(main())
    acks = [e for e in events if e["type"] == "video.frame.ack"]
    assert [(a["frame_id"], a["accepted"]) for a in acks] == [("f0", True), ("f1", False), ("f2", True)]
    (consumed,) = (e for e in events if e["type"] == "video.frames.consumed")
    assert consumed["frame_ids"] == ["f0", "f2"]
    (done,) = (e for e in events if e["type"] == "response.text.done")
    assert done["text"] == "".join(e["delta"] for e in events if e["type"] == "response.text.delta")
    # The text was certainly read, but such a small model may not answer well.
    assert "EXIT" in done["text"] or "WELCOME" in done["text"] or "cannot see" in done["text"]
    wavs = [b64decode(e["data"]) for e in events if e["type"] == "response.audio.delta"]
    assert wavs
    assert all(w[:4] == b"RIFF" for w in wavs)
    kinds = [e["type"] for e in events]
    assert kinds.index("response.start") < kinds.index("response.text.done") < kinds.index("response.audio.done")


def test_when_audio_came_then_a_question_about_it_is_answered(
    server: Process, recordings: dict[str, Recording]
) -> None:
    async def main() -> str:
        pcm = to_pcm16(recordings["jfk"].pcm)
        async with connect(url(server), max_size=None) as socket:
            await opened(socket)
            await say(socket, "video.frame", data=screen("OPEN"))
            for at in range(0, len(pcm), 32_000):
                await say(socket, "audio.chunk", data=b64encode(pcm[at : at + 32_000]).decode())
            await say(socket, "video.query", text="What was said?")
            events = await until(socket, "response.text.done")
            return str(events[-1]["text"])

    assert run(main())


def test_when_messages_are_wrong_then_each_is_named_and_the_session_goes_on(server: Process) -> None:
    async def main() -> list[str]:
        broken = b64encode(b64decode(screen("X"))[:2000]).decode()
        async with connect(url(server), max_size=None) as socket:
            await opened(socket)
            await say(socket, "video.query", text="Anything?")
            await say(socket, "video.frame", data="AAAA")
            await say(socket, "video.frame", data=broken)
            await say(socket, "video.frame", data="A" * ((10 << 20) + 4))
            await socket.send("{")
            await socket.send(b"\xff\xfe")
            await say(socket, "audio.chunk", data=b64encode(bytes(3 << 20)).decode())
            await say(socket, "audio.chunk", data=b64encode(bytes(3 << 20)).decode())
            await say(socket, "video.frame", data=screen("GOOD", kind="PNG"), frame_id="good")
            events = await until(socket, "video.frame.ack")
            await say(socket, "ping")
            assert (await until(socket, "pong"))[-1] == {"type": "pong"}
            return sorted(e["message"] for e in events if e["type"] == "error")

    assert run(main()) == [
        "Audio buffer overflow",
        "Frame decode failed",
        "Frame too large",
        "Invalid JSON",
        "Invalid JSON",
        "Invalid image data",
        "No frames buffered",
    ]


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ('{"type":"video.frame","data":"AAAA"}', "Expected session.config, got: video.frame"),
        ("no", "Invalid JSON in session.config"),
        ('{"type":"session.config","num_frames":0}', "Invalid session config: num_frames is from 1 to 128"),
    ],
)
def test_when_the_configuration_is_wrong_then_the_session_ends(server: Process, first: str, message: str) -> None:
    async def main() -> str:
        async with connect(url(server)) as socket:
            await socket.send(first)
            found = json.loads(await socket.recv())["message"]
            with pytest.raises(ConnectionClosed):
                await socket.recv()
            return str(found)

    assert run(main()) == message


def test_when_four_hundred_frames_come_at_once_then_each_is_acknowledged_in_order(server: Process) -> None:
    """All frames are handled in order, none is silently dropped, and the server survives."""

    async def main() -> list[dict[str, Any]]:
        frames = [screen(str(i), kind="JPEG") for i in range(10)]
        acks: list[dict[str, Any]] = []
        async with connect(url(server), max_size=None) as socket:
            await opened(socket, max_frames=8, frame_filter="blocks")

            async def send() -> None:
                for i in range(400):
                    await say(socket, "video.frame", data=frames[i % 10], frame_id=str(i), pts_ms=i)

            sending = asyncio.create_task(send())
            while len(acks) < 400:
                acks.append(json.loads(await socket.recv()))
            await sending
        return acks

    acks = run(main())
    assert [a["frame_id"] for a in acks] == [str(i) for i in range(400)]
    assert max(a["buffered_frames"] for a in acks) == 8


def test_when_a_client_leaves_during_an_answer_then_no_session_is_left(server: Process) -> None:
    async def main() -> None:
        async with connect(url(server), max_size=None) as socket:
            await opened(socket, max_tokens=2000)
            await say(socket, "video.frame", data=screen("LONG STORY"))
            await say(socket, "video.query", text="Tell me a very long story about it.")
            await until(socket, "response.start")
            socket.transport.abort()
        async with httpx.AsyncClient() as client:
            async with asyncio.timeout(20):
                while True:
                    text = (await client.get(f"{server.url}/metrics")).text
                    open_now = [
                        line for line in text.splitlines() if line.startswith("antiphon_sessions{") and "video" in line
                    ]
                    if all(line.endswith(" 0.0") for line in open_now):
                        break
                    await asyncio.sleep(0.1)

    run(main())


def test_when_a_stream_is_resumed_then_it_goes_on(server: Process) -> None:
    async def main() -> list[str]:
        async with connect(url(server) + "?resume=1", max_size=None) as socket:
            created = json.loads(await socket.recv())
            assert created["type"] == "session.created"
            await opened(socket)
            await say(socket, "video.frame", data=screen("STAY"), frame_id="a")
            await until(socket, "video.frame.ack")
            socket.transport.abort()
        resume = {"session_id": created["session_id"], "resume_token": created["resume_token"]}
        async with connect(url(server) + f"?resume={created['session_id']}", max_size=None) as socket:
            await say(socket, "session.resume", last_received_server_event_seq=1, **resume)
            first = json.loads(await socket.recv())
            assert first["type"] == "session.resumed", first
            # The server has received the configuration and the frame. The client would send any other message again.
            assert first["received_events"] == 2
            await say(socket, "video.query", text="What is written?")
            return [e["type"] for e in await until(socket, "response.text.done")]

    assert "response.start" in run(main())


def test_when_the_server_drains_then_the_answer_under_way_is_completed(serve: Serve) -> None:
    leaving = serve("--language-model", SMALL)

    async def main() -> tuple[list[str], int]:
        async with connect(url(leaving), max_size=None) as socket:
            await opened(socket)
            await say(socket, "video.frame", data=screen("CLOSING"))
            await say(socket, "video.query", text="What does it say?")
            await until(socket, "response.start")
            leaving.terminate()
            kinds = [e["type"] for e in await until(socket, "session.done")]
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd
            return kinds, closed.value.rcvd.code

    kinds, code = run(main())
    assert "response.text.done" in kinds
    assert code == 1001


def test_when_a_client_reads_nothing_then_its_session_ends_all_the_same(serve: Serve) -> None:
    """Even if the session can be resumed, its waiting frames are not kept forever."""
    patient = serve("--language-model", SMALL, "--grace-s", "1", "--journal-mb", "1")

    async def main() -> None:
        async with connect(url(patient) + "?resume=1", max_size=None, max_queue=1) as socket:
            await opened(socket, enable_frame_filter=False)
            await say(socket, "video.frame", data=screen("X"), frame_id="n" * 1000)
            await say(socket, "video.frame", data=screen("Y"), frame_id="n" * 200)
            for _ in range(50):
                await say(socket, "ping")
            socket.transport.abort()
        async with httpx.AsyncClient() as client:
            while True:
                text = (await client.get(f"{patient.url}/metrics")).text
                if 'antiphon_sessions{dialect="video"} 0.0' in text:
                    return
                await asyncio.sleep(0.1)

    run(main())


def test_when_no_language_model_is_loaded_then_the_upgrade_is_a_404(serve: Serve) -> None:
    bare = serve()

    async def main() -> int:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(url(bare)):
                pass
        return refused.value.response.status_code

    assert run(main()) == 404


def test_when_async_chunks_are_off_then_text_and_audio_come_in_one_piece_each(serve: Serve) -> None:
    whole = serve("--language-model", SMALL, "--synthesizer", "hibari-heart", "--video-async-chunk", "off")

    async def main() -> list[str]:
        async with connect(url(whole) + "?events=ga", max_size=None) as socket:
            await opened(socket, modalities=["text", "audio"])
            await say(socket, "video.frame", data=screen("DONE"))
            await say(socket, "video.query", text="What is this?")
            await say(socket, "video.done")
            return [e["type"] for e in await until(socket, "session.done")]

    assert run(main()) == [
        "response.start",
        "response.text.done",
        "response.output_audio.delta",
        "response.output_audio.done",
        "session.done",
    ]


def test_when_an_image_claims_50_megapixels_then_it_is_refused_before_it_is_decoded(server: Process) -> None:
    """The PNG is small; only its header claims 50 megapixels."""
    import zlib

    data = bytearray(b64decode(screen("X", kind="PNG")))
    data[16:24] = (10_000).to_bytes(4, "big") + (5_000).to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")

    async def main() -> dict[str, Any]:
        async with connect(url(server), max_size=None) as socket:
            await opened(socket)
            await say(socket, "video.frame", data=b64encode(bytes(data)).decode())
            return (await until(socket, "error"))[-1]

    error = run(main())
    assert error["message"] == "Frame decode failed"
    assert "million" in error["detail"]


@pytest.mark.parametrize("mode", ["CMYK", "RGBA", "L", "I;16", "P", "1"])
def test_when_an_image_has_another_mode_then_it_is_accepted(server: Process, mode: str) -> None:
    file = io.BytesIO()
    if mode == "I;16":
        Image.fromarray((np.arange(64 * 64).reshape(64, 64) * 16).astype(np.uint16)).save(file, "PNG")
    else:
        Image.new("RGB", (64, 64), "teal").convert(mode).save(file, "JPEG" if mode == "CMYK" else "PNG")

    async def main() -> dict[str, Any]:
        async with connect(url(server), max_size=None) as socket:
            await opened(socket)
            await say(socket, "video.frame", data=b64encode(file.getvalue()).decode(), frame_id="x")
            return (await until(socket, "video.frame.ack"))[-1]

    assert run(main())["accepted"]


def test_when_a_vision_model_is_loaded_then_it_answers_each_question(
    serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tiny_pictures.write(tmp_path_factory.mktemp("smolvlm"))
    seeing = serve("--video-model", str(folder), "--weights", "fp32")

    async def main() -> tuple[list[str], list[dict[str, Any]]]:
        async with connect(url(seeing), max_size=None) as socket:
            await opened(socket)
            said = []
            for turn in range(3):
                await say(socket, "video.frame", data=screen(str(turn)), frame_id=str(turn))
                await say(socket, "video.query", text="What is it?")
                said.append((await until(socket, "response.text.done"))[-1]["text"])
        async with httpx.AsyncClient() as client:
            models = (await client.get(f"{seeing.url}/v1/models")).json()["data"]
        return said, models

    said, models = run(main())
    assert all(said)
    assert [m.get("video") for m in models if m["id"] == folder.name] == ["pictures"]


def test_when_no_vision_model_is_loaded_then_the_models_list_says_text(server: Process) -> None:
    models = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [m["video"] for m in models if "video" in m] == ["text"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a video file that shows a screen for three seconds."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=5)
        stream.width, stream.height = 640, 360
        for _ in range(15):
            file.mux(stream.encode(av.VideoFrame.from_image(Image.open(io.BytesIO(b64decode(screen("EXIT 42")))))))
        file.mux(stream.encode())
    return path


def test_when_the_example_gets_questions_then_it_answers_each_about_the_clip(server: Process, clip: Path) -> None:
    script = Path(__file__).parents[3] / "examples" / "ask_what_is_seen.py"
    given = [str(clip), "--url", url(server), "--ask", "What does the screen say?", "--ask", "What is written there?"]
    done = subprocess.run(
        [sys.executable, str(script), *given], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert len(done.stdout.splitlines()) == 2
    assert "42" in done.stdout.splitlines()[0]


def test_when_the_example_gets_typed_questions_then_it_answers_them(server: Process, clip: Path) -> None:
    script = Path(__file__).parents[3] / "examples" / "ask_what_is_seen.py"
    with subprocess.Popen(
        [sys.executable, str(script), str(clip), "--url", url(server)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write("What does the screen say?\n")
        process.stdin.flush()
        assert "42" in process.stdout.readline()
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0


@pytest.mark.slow
def test_when_a_clip_is_watched_without_a_server_then_the_question_is_answered(
    clip: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(engine=EngineOptions(language_model=SMALL), speech=SpeechSettings(synthesizer="none"))
    asyncio.run(watch(settings, WatchRequest(str(clip), ("What does the screen say?",), fps=0.5)))
    assert "42" in capsys.readouterr().out
