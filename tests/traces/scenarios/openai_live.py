"""A client of OpenAI's Live API: it hears what is due, interrupts, answers a call, appends, and closes."""

from __future__ import annotations

from typing import Any

from tests.traces.harness import Socket, Stage, b64, pcm16, pieces, scenario

URL = "/v1/live/sessions"
TRANSCRIPT, HEARD = "session.output_transcript.delta", "session.input_transcript.delta"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


async def opened(stage: Stage, **session: Any) -> Socket:
    socket = await stage.connect(URL)
    await socket.say("session.start", event_id="start", session={"model": "gpt-live-1", **session})
    await socket.until("session.started")
    return socket


async def speak(stage: Stage, socket: Socket, text: str, silence_s: float) -> None:
    for part in pieces(pcm16(text, silence_s), 4800):
        await socket.say("session.input_audio.append", audio=b64(part))
        await stage.wait(0.1)


@scenario()
async def live_turns(stage: Stage) -> None:
    """A spoken turn, a response that is interrupted, a mute, and the close."""
    socket = await opened(
        stage,
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
        ],
    )
    await speak(stage, socket, "what is the time?", 1.5)
    await socket.until(TRANSCRIPT)
    await speak(stage, socket, "", 2.5)
    assert socket.joined(HEARD) == "what is the time?"
    assert socket.joined(TRANSCRIPT) == "You said: what is the time?."
    await speak(stage, socket, "tell me a story.", 2.0)
    await speak(stage, socket, "stop now. please tell me the time?", 3.0)
    said = socket.joined(TRANSCRIPT)
    # What was not played is not in the transcript.
    assert "Once upon a time" in said
    assert "garden" not in said
    await socket.say("session.input_audio.mute", event_id="mute")
    await speak(stage, socket, "hello.", 1.0)
    await socket.say("session.input_audio.unmute")
    await socket.until("session.input_audio.unmuted")
    assert "hello." not in socket.joined(HEARD)
    await socket.say("session.close")
    closed = await socket.until("session.closed")
    # It sends as much audio as time has passed.
    sent_s = socket.num_bytes("session.output_audio.delta") / 48_000
    assert abs(sent_s - closed["usage"]["seconds"]) < 1
    await socket.end()


@scenario()
async def live_functions(stage: Stage) -> None:
    """A function is called and answered, in another format; texts for the model; and what is refused."""
    socket = await stage.connect(URL)
    await socket.say("session.input_audio.append", audio="")
    await socket.say("session.start", session={"model": "gpt-live-1", "speed": 2})
    await socket.say(
        "session.start",
        session={"model": "m", "delegation": {"type": "responses", "responses": {"tools": [{"type": "web_search"}]}}},
    )
    assert [frame["error"]["code"] for frame in socket.of("error")] == [
        "session_start_required",
        "unknown_parameter",
        "unsupported_server_tool",
    ]
    backend = {"model": "gpt-5.6", "instructions": "Use tools.", "reasoning": {"effort": "low"}}
    await socket.say(
        "session.start",
        session={
            "model": "gpt-live-1",
            "audio": {"format": {"type": "audio/pcmu"}, "output": {"voice": "marin"}},
            "delegation": {"type": "responses", "responses": backend},
        },
    )
    await socket.until("session.started")
    update = {"delegation": {"type": "responses", "responses": {"tools": [WEATHER]}}}
    await socket.say("session.update", event_id="tools", session=update)
    assert (await socket.until("session.updated"))["session"]["delegation"]["responses"]["instructions"] == "Use tools."
    await socket.say("session.commentary.append", content="what is the weather", delegation_id=None)
    await socket.until("session.delegation.created")
    done = (await socket.until("response.event", count=2))["event"]
    await socket.say("response.create", event_id="early")
    assert (await socket.until("error"))["error"]["client_event_id"] == "early"
    assert (done["type"], done["item"]["name"]) == ("response.output_item.done", "get_weather")
    output = {"type": "function_call_output", "call_id": done["item"]["call_id"], "output": "sunny"}
    await socket.say("response.item.create", item=output)
    await socket.say("response.create")
    await socket.until(TRANSCRIPT)
    await stage.wait(1.5)
    assert "sunny" in socket.joined(TRANSCRIPT)
    await socket.say("session.thinking.append", content="x", delegation_id=None)
    await socket.say("session.instructions.append", content="y", delegation_id="z")
    await socket.until("error")
    await socket.say("session.start", session={"model": "gpt-live-1"})
    await socket.until("error")
    await socket.leave()


@scenario()
async def live_pause(stage: Stage) -> None:
    """Ours: nobody speaks, the session pauses, and speech wakes it; then by hand."""
    socket = await opened(stage, idle_timeout_s=2)
    # What the client sends is never due together with what the server plays.
    await stage.wait(0.013)
    await speak(stage, socket, "", 3.0)
    await socket.until("session.paused")
    quiet = len(socket.of("session.output_audio.delta"))
    await speak(stage, socket, "", 2.0)
    assert len(socket.of("session.output_audio.delta")) == quiet
    await speak(stage, socket, "what is the time?", 1.5)
    await socket.until("session.resumed")
    await socket.until(TRANSCRIPT)
    assert socket.joined(HEARD) == "what is the time?"
    await speak(stage, socket, "", 3.0)
    await socket.say("session.pause")
    await socket.until("session.paused")
    await socket.say("session.wake")
    await socket.until("session.resumed")
    await socket.say("session.close")
    await socket.end()
