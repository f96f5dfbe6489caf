"""A client of Gemini Live: turns, an interruption, functions, typed text, pictures, a handle, and what is invalid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.traces.harness import Socket, Stage, b64, image, pcm16, pieces, scenario

URL = "/ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent"
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}, "required": ["city"]},
}


async def opened(stage: Stage, **setup: Any) -> Socket:
    socket = await stage.connect(URL)
    await socket.send({"setup": {"model": "models/gemini-live", **setup}})
    assert "setupComplete" in await socket.next()
    return socket


async def until(socket: Socket, reached: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Read up to a frame for which `reached` is true, and return it."""
    while True:
        frame = await socket.next()
        if reached(frame):
            return dict(frame)


def content(name: str) -> Callable[[dict[str, Any]], Any]:
    """Whether a frame has this field of `serverContent`."""
    return lambda frame: frame.get("serverContent", {}).get(name)


async def speak(stage: Stage, socket: Socket, text: str, silence_s: float) -> None:
    for part in pieces(pcm16(text, silence_s, 16_000), 3200):
        await socket.send({"realtimeInput": {"audio": {"data": b64(part), "mimeType": "audio/pcm;rate=16000"}}})
        await stage.wait(0.1)


def said(socket: Socket, name: str) -> str:
    texts = (frame.get("serverContent", {}).get(name, {}).get("text", "") for frame in socket.seen)
    return "".join(texts)


@scenario()
async def gemini_turns(stage: Stage) -> None:
    """A spoken turn, an answer that is interrupted, typed text, and a picture."""
    socket = await opened(
        stage,
        generationConfig={
            "responseModalities": ["AUDIO"],
            "speechConfig": {"voiceConfig": {"prebuiltVoiceConfig": {"voiceName": "Puck"}}},
        },
        systemInstruction={"parts": [{"text": "Be brief."}], "role": "user"},
        inputAudioTranscription={},
        outputAudioTranscription={},
        proactivity={"proactiveAudio": True},
    )
    await speak(stage, socket, "what is the time?", 1.5)
    # The response is generated at once, and the turn is complete when its sound has been played.
    assert any(map(content("generationComplete"), socket.seen))
    assert not any(map(content("turnComplete"), socket.seen))
    await until(socket, content("turnComplete"))
    assert said(socket, "inputTranscription").strip() == "what is the time?"
    assert said(socket, "outputTranscription") == "You said: what is the time?."
    await speak(stage, socket, "tell me a story.", 2.0)
    await speak(stage, socket, "stop now. please tell me the time?", 1.5)
    await until(socket, content("interrupted"))
    assert (await socket.next())["serverContent"] == {"turnComplete": True}
    await until(socket, content("turnComplete"))
    await socket.send(
        {"client_content": {"turns": [{"role": "user", "parts": [{"text": "hello."}]}], "turn_complete": True}}
    )
    await until(socket, content("turnComplete"))
    await socket.send({"realtime_input": {"video": {"data": b64(image(3)), "mime_type": "image/png"}}})
    await speak(stage, socket, "hello. what is the weather", 1.5)
    await until(socket, content("turnComplete"))
    await socket.leave()


@scenario()
async def gemini_tools(stage: Stage) -> None:
    """A function is called and answered; another call is cancelled by an interruption; activity by hand."""
    manual = {"automaticActivityDetection": {"disabled": True}}
    socket = await opened(
        stage,
        generationConfig={"responseModalities": ["TEXT"]},
        tools=[{"functionDeclarations": [WEATHER]}],
        realtimeInputConfig=manual,
    )
    await socket.send({"realtimeInput": {"activityStart": {}}})
    await speak(stage, socket, "what is the weather", 0.0)
    await socket.send({"realtimeInput": {"activityEnd": {}}})
    call = (await until(socket, lambda frame: "toolCall" in frame))["toolCall"]["functionCalls"][0]
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    answer = {"id": call["id"], "name": "get_weather", "response": {"output": "sunny"}}
    await socket.send({"toolResponse": {"functionResponses": [answer]}})
    await until(socket, content("turnComplete"))
    await socket.send({"clientContent": {"turns": [{"parts": [{"text": "weather please"}]}], "turnComplete": True}})
    await until(socket, lambda frame: "toolCall" in frame)
    await socket.send({"realtimeInput": {"text": "hello."}})
    await until(socket, lambda frame: "toolCallCancellation" in frame)
    await until(socket, content("turnComplete"))
    # Too late: the call was cancelled.
    await socket.send({"toolResponse": {"functionResponses": [answer]}})
    await socket.leave()


@scenario()
async def gemini_resumed(stage: Stage) -> None:
    """A session continues with its handle, on another connection and after a restart; an old handle is refused."""
    socket = await opened(stage, sessionResumption={})
    handle = (await socket.next())["sessionResumptionUpdate"]["newHandle"]
    await speak(stage, socket, "hello.", 1.5)
    await until(socket, content("turnComplete"))
    await socket.leave(1006)
    again = await opened(stage, sessionResumption={"handle": handle}, systemInstruction={"parts": [{"text": "Sing."}]})
    newer = (await until(again, lambda frame: "sessionResumptionUpdate" in frame))["sessionResumptionUpdate"]
    await again.send({"clientContent": {"turns": [{"parts": [{"text": "hello."}]}], "turnComplete": True}})
    await until(again, content("turnComplete"))
    await stage.kill()
    third = await opened(stage, sessionResumption={"handle": newer["newHandle"]})
    await third.send({"clientContent": {"turns": [{"parts": [{"text": "hello."}]}], "turnComplete": True}})
    await until(third, content("turnComplete"))
    stage.drain()
    await until(third, lambda frame: "goAway" in frame)
    await third.leave()
    refused = await stage.connect(URL)
    await refused.send({"setup": {"sessionResumption": {"handle": "sess-1.none"}}})
    await refused.end()


@scenario()
async def gemini_errors(stage: Stage) -> None:
    """What is invalid closes the connection; no message has an error."""
    wrong: tuple[Any, ...] = (
        "{",
        {"realtimeInput": {"text": "hello."}},
        {"setup": {"generationConfig": {"temperature": 9}}},
        {"setup": {"tools": [{"googleSearch": {}}]}},
        {"setup": []},
    )
    for frame in wrong:
        socket = await stage.connect(URL)
        await socket.send(frame)
        assert (await socket.end())[0] == 1007
    blobs = ({"data": "*"}, {"data": b64(b"abc")}, {"data": "AAAA", "mimeType": "audio/ogg"})
    for blob in blobs:
        socket = await opened(stage)
        await socket.send({"realtimeInput": {"audio": blob}})
        assert (await socket.end())[0] == 1007
