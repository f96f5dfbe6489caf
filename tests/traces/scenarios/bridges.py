"""The small duplex dialects: the MiniCPM-o demo's worker, the openbmb-realtime SDK, and /v1/omni."""

from __future__ import annotations

from tests.traces.harness import Socket, Stage, b64, f32, image, pcm16, pieces, scenario


async def chunks(stage: Stage, socket: Socket, text: str, silence_s: float, **last: bool) -> None:
    """Say this to the demo's worker, a second an event; each has its result."""
    parts = pieces(f32(text, silence_s), 64_000)
    for part in parts:
        await socket.say("audio_chunk", audio_base64=b64(part), **(last if part is parts[-1] else {}))
        await socket.until("result")
        await stage.wait(len(part) / 64_000)


@scenario()
async def worker(stage: Stage) -> None:
    health = await stage.request("GET", "/health")
    assert health.json["worker_status"] == "idle"
    socket = await stage.connect("/ws/duplex")
    await socket.say("audio_chunk", audio_base64=b64(f32("hello.")))
    await socket.say("prepare", system_prompt="Be brief.")
    await socket.until("prepared")
    await chunks(stage, socket, "what is the time?", 4.72)
    results = socket.of("result")
    assert "".join(r["text"] for r in results if not r["is_listen"]) == "You said: what is the time?."
    assert [r["end_of_turn"] for r in results].count(True) == 1
    await socket.say("pause")
    await chunks_paused(stage, socket)
    await socket.say("resume")
    await chunks(stage, socket, "tell me a story.", 2.72)
    await chunks(stage, socket, "", 1.0, force_listen=True)
    await chunks(stage, socket, "", 2.0)
    assert (await stage.request("GET", "/health")).json["worker_status"] == "duplex_active"
    await socket.say("boo")
    await socket.say("audio_chunk", audio_base64="*")
    await socket.send("{")
    await socket.say("stop")
    await socket.end()
    assert socket.of("stopped")
    assert len(socket.of("error")) == 4


async def chunks_paused(stage: Stage, socket: Socket) -> None:
    """Sound that a paused session does not take."""
    await socket.say("audio_chunk", audio_base64=b64(f32("hello.", 0.68)))
    await stage.wait(1)


@scenario()
async def openbmb(stage: Stage) -> None:
    socket = await stage.connect("/v1/realtime?mode=audio&model=x", subprotocols=["map.realtime"])
    await socket.until("session.queue_done")
    await socket.say("input.append", input={"audio": b64(f32("hello."))})
    await socket.say("session.init", payload={"system_prompt": "Be brief."})
    await socket.until("session.created")
    for part in pieces(f32("tell me a story.", 3.5), 32_000):
        await socket.say("input.append", input={"audio": b64(part)})
        await stage.wait(0.5)
    await socket.say("input.append", input={"audio": b64(f32("", 0.5)), "force_listen": True})
    await socket.say("input.append", input={"audio": b64(f32("", 0.5)), "video_frames": [b64(image(3))]})
    for wrong in ({}, {"audio": "*"}, {"audio": b64(b"abc")}):
        await socket.say("input.append", input=wrong)
    await socket.say("boo")
    await socket.send("{")
    await socket.say("session.close", reason="user_stop")
    await socket.end()
    assert socket.of("conversation.item.input_audio_transcription.completed")[0]["transcript"] == "tell me a story."
    assert socket.joined("response.output_text.delta", "text").startswith("Once upon a time")
    assert {"response.output_audio.delta", "response.done", "session.closed"} <= set(socket.kinds)


@scenario()
async def omni(stage: Stage) -> None:
    """Sound may come at once; turns end by a pause or by hand; who speaks again interrupts."""
    socket = await stage.connect("/v1/omni")
    await socket.say("session.config", instructions="Be brief.", voice="two", language="en")
    for part in pieces(pcm16("what is the time?", 0.0, 16_000), 6400):
        await socket.send(part)
        await stage.wait(0.2)
    await socket.say("input.done")
    assert (await socket.until("turn.done"))["text"] == "You said: what is the time?."
    await stage.wait(4)
    for part in pieces(pcm16("tell me a story.", 4.0, 16_000), 6400):
        await socket.send(part)
        await stage.wait(0.2)
    for part in pieces(pcm16("stop now. hello.", 3.0, 16_000), 6400):
        await socket.send(part)
        await stage.wait(0.2)
    await socket.send(b"abc")
    await socket.say("session.config", instructions="Too late.")
    await socket.say("boo")
    await socket.send("{")
    assert len(socket.of("error")) == 4
    assert "binary" in socket.kinds
    assert len(socket.of("turn.start")) >= 2


@scenario()
async def omni_at_once(stage: Stage) -> None:
    """Without a configuration; and what has no words."""
    socket = await stage.connect("/v1/omni?model=writer")
    for part in pieces(pcm16("hello.", 2.0, 16_000), 12_800):
        await socket.send(part)
        await stage.wait(0.4)
    await socket.until("turn.done")
    await stage.wait(2)
    await socket.send(pcm16("", 0.5, 16_000))
    await socket.say("input.done")
    await stage.wait(2)
    assert socket.of("turn.done")[0]["text"] == "You said: hello.."
