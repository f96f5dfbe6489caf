"""/v1/video/chat/stream: frames and sound in, answers out."""

from __future__ import annotations

from typing import Any

from tests.traces.harness import Socket, Stage, b64, image, pcm16, pieces, scenario

URL = "/v1/video/chat/stream"


async def opened(stage: Stage, query: str = "", **config: Any) -> Socket:
    """A video session with this configuration."""
    socket = await stage.connect(URL + query)
    await socket.say("session.config", **config)
    return socket


async def show(socket: Socket, name: str, grey: int, **more: Any) -> None:
    """One frame."""
    await socket.say("video.frame", data=b64(image(grey)), frame_id=name, **more)


@scenario()
async def video_chat(stage: Stage) -> None:
    """Frames, of which one is like the last; a typed question, a spoken one, and one that interrupts."""
    socket = await opened(stage, modalities=["text", "audio"], num_frames=2, max_frames=3, voice="two")
    for number, grey in enumerate((20, 20, 120, 220, 60)):
        await show(socket, f"f{number}", grey, pts_ms=1000 * number, capture_ts_ms=5 * number)
        await stage.wait(0.4)
    acks = socket.of("video.frame.ack")
    assert [a["accepted"] for a in acks] == [True, False, True, True, True]
    await socket.say("video.query", text="What is it?")
    await socket.until("response.audio.done")
    for piece in pieces(pcm16("what is the time?", 0.5, 16_000), 16_000):
        await socket.say("audio.chunk", data=b64(piece))
    await socket.say("video.query", text="")
    await socket.until("response.audio.done")
    await socket.say("video.query", text="read it to me")
    await socket.until("response.text.delta", count=2)
    await socket.say("video.query", text="read it as of 0:02")
    await socket.say("ping")
    await socket.say("video.done")
    await socket.until("session.done")
    await socket.end()
    # Of the one that was interrupted nothing more is said.
    assert [len(socket.of(f"response.{k}")) for k in ("start", "text.done")] == [4, 3]
    assert socket.num_bytes("response.audio.delta", "data") > 0


@scenario()
async def video_ga(stage: Stage) -> None:
    """With GA's names of events; in text only, with the other filter."""
    socket = await opened(stage, "?events=ga", modalities=["text", "audio"], frame_filter="blocks")
    await show(socket, "a", 30)
    await socket.say("video.query", text="What is it?")
    await socket.until("response.output_audio.done")
    written = await opened(stage, "?events=ga", modalities=["text"], evs_enabled=False, system_prompt="Be brief.")
    await show(written, "b", 30)
    await show(written, "c", 30)
    await written.say("video.query", text="hello", audio_data=b64(pcm16("hello.", 0.2, 16_000)))
    await stage.wait(3)
    await written.say("video.done")
    await written.end()
    assert "response.output_audio.delta" in socket.kinds
    assert [a["accepted"] for a in written.of("video.frame.ack")] == [True, True]


@scenario(video={"async_chunk": "off"})
async def video_whole(stage: Stage) -> None:
    """An answer in one piece of text and one of sound."""
    socket = await opened(stage)
    await show(socket, "a", 30)
    await socket.say("video.query", text="What is it?")
    await socket.until("response.audio.done")
    assert not socket.of("response.text.delta")
    assert len(socket.of("response.audio.delta")) == 1


@scenario(video={"video_config_timeout_s": 2.0, "video_idle_timeout_s": 5.0})
async def video_errors(stage: Stage) -> None:
    socket = await opened(stage, modalities=["text"])
    await socket.say("video.query", text="Anything?")
    await socket.say("video.frame", data="AAAA")
    await socket.say("video.frame", data=b64(image(9)[:900]), frame_id="cut")
    await socket.say("video.frame", data="A" * ((10 << 20) + 4))
    await socket.send("{")
    await socket.send("[]")
    await socket.send(b"\xff\xfe")
    await socket.say("boo")
    await socket.say("audio.chunk", data="*")
    await socket.say("audio.chunk", data=b64(bytes(3 << 20)))
    await socket.say("audio.chunk", data=b64(bytes(3 << 20)))
    await stage.wait(1)
    await show(socket, "good", 40)
    await socket.say("video.query", text="fail")
    await socket.until("response.text.done")
    messages = [f["message"] for f in socket.of("error")]
    assert {"No frames buffered", "Frame too large", "Invalid JSON", "Audio buffer overflow"} <= set(messages)
    await socket.end()
    assert socket.of("error")[-1]["message"] == "Idle timeout"
    for first in ('{"type":"ping"}', "no", '{"type":"session.config","num_frames":0}'):
        other = await stage.connect(URL)
        await other.send(first)
        await other.end()
        assert other.of("error")
    silent = await stage.connect(URL)
    await silent.end()


@scenario()
async def video_resume(stage: Stage) -> None:
    """The session outlives its connection."""
    socket = await stage.connect(f"{URL}?resume=1")
    created = await socket.until("session.created")
    await socket.say("session.config", modalities=["text"])
    await show(socket, "a", 70)
    await socket.say("video.query", text="What is it?")
    await socket.until("response.start")
    await socket.leave(1006)
    await stage.wait(1)
    again = await stage.connect(f"{URL}?resume={created['session_id']}")
    await again.say(
        "session.resume",
        session_id=created["session_id"],
        resume_token=created["resume_token"],
        last_received_server_event_seq=1,
    )
    await again.until("session.resumed")
    await again.until("response.text.done")
    await again.say("video.done")
    await again.end()
