"""A call that Twilio announces, and one that Vonage brings."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from tests.traces.harness import Frame, Socket, Stage, dumps, pcm16, pieces, scenario

FRAME_BYTES, FRAME_S = 640, 0.02


async def audio(stage: Stage, socket: Socket, text: str, silence_s: float) -> None:
    """Speak at 16 kHz, in binary frames of 20 ms, as fast as they sound."""
    for part in pieces(pcm16(text, silence_s, 16_000), FRAME_BYTES):
        await socket.send(part.ljust(FRAME_BYTES, b"\0"))
        await stage.wait(FRAME_S)


def notes(socket: Socket) -> list[Frame]:
    return [frame for frame in socket.seen if isinstance(frame, dict)]


@scenario()
async def telephone(stage: Stage) -> None:
    form = b"CallSid=CA1&AccountSid=AC1&From=%2B4930111&To=%2B4930222"
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = await stage.request("POST", "/v1/telephone/twilio", body=form, headers=headers)
    found = re.search(r'url="([^"]*)"', answer.body.decode())
    assert found
    twilio = await stage.connect(urlsplit(found[1]).path)
    await twilio.send('{"event": "start", "start": {"streamSid": "MZ1", "callSid": "CA1", "accountSid": "AC1"}}')
    await stage.wait(0.1)
    calls = await stage.request("GET", "/v1/telephone/calls")
    assert calls.json["data"][0]["from"] == "+4930111"
    await twilio.send('{"event": "stop", "stop": {}}')
    assert await twilio.end() == (1000, "caller_hung_up")

    socket = await stage.connect("/v1/telephone/media")
    await socket.send('{"event": "websocket:connected", "content-type": "audio/l16;rate=16000", "order": "17"}')
    await audio(stage, socket, "tell me a story.", 2.0)
    marks = [frame["payload"]["mark"] for frame in notes(socket)]
    assert marks
    await socket.send(dumps({"event": "websocket:notify", "payload": {"mark": marks[2]}}))
    await audio(stage, socket, "stop stop", 1.5)
    assert {"action": "clear"} in notes(socket)
    await socket.send('{"event": "websocket:dtmf", "digit": "5"}')
    await socket.send('{"event": "websocket:dtmf", "digit": "#"}')
    await audio(stage, socket, "", 3.0)
    await socket.leave()
