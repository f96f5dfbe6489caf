"""What a user hears while a tool runs: `python -m bench.tool_talk [--sections filler,result,questions] [--times N]`.

A server with the default models has one MCP server, a process of this benchmark, whose tool takes a set time. The
model has to call it in its response to the user's turn. The times are those of a client on the same machine.

- filler: a call of 5 s. From the end of the response that calls to the first sound of the filler, one of two lines.
- result: from the end of a call to the first sound of the response to it, beside that of a function of the client's,
  whose result comes with its `response.create`.
- questions: while a call of 15 s runs, the user asks something aloud. Counts the answers in sound before its end.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import websockets
from bench.common import HERE, Server, measured, options, server, show, spread

from antiphon.audio.containers import decode_all
from antiphon.audio.pcm import to_pcm16

QUESTION = HERE.parent / "tests" / "data" / "audio" / "tau2-help-me.flac"
FILLERS = ("One moment, I am looking.", "Let me see.")
ASKED = "Look up order number seven."
RATE_HZ = 24_000
FIRST_SOUND = "response.output_audio.delta"
LIMIT_S = 120.0
SERVE_TOOL, START_S = "--serve-tool", 8.0
OWN = {
    "type": "function",
    "name": "look_up_order",
    "description": "Looks up an order.",
    "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
}


def tool_server(seconds: float) -> None:
    """Serve the tool, which takes this long, over the standard input and output."""
    import anyio
    from mcp.server.mcpserver import MCPServer

    made = MCPServer("orders")

    @made.tool()
    async def look_up_order(number: int) -> str:
        """Looks up an order."""
        await anyio.sleep(seconds)
        return f"Order {number} has been sent, and arrives on Monday."

    made.run()


class Client:
    """One conversation in sound. `at` has the times of the events so far, in seconds, with their types."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self._socket = socket
        self.events: list[tuple[float, dict[str, Any]]] = []

    async def say(self, type: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": type, **fields}))

    async def until(self, type: str) -> float:
        """Return the time at which the next event of this type comes."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                event = json.loads(await self._socket.recv())
                self.events.append((time.perf_counter(), event))
                if event["type"] == "error":
                    raise RuntimeError(event["error"]["message"])
                if event["type"] == type:
                    return self.events[-1][0]

    async def call(self) -> float:
        """Have the model call the tool. Returns the time at which its response has ended."""
        part = {"type": "input_text", "text": ASKED}
        await self.say("conversation.item.create", item={"type": "message", "role": "user", "content": [part]})
        await self.say("response.create", response={"tool_choice": "required"})
        return await self.until("response.done")

    async def speak(self) -> None:
        """Say the question, and a second of silence, in real time."""
        pcm = decode_all(str(QUESTION), RATE_HZ)
        data = to_pcm16(np.concatenate((pcm, np.zeros(RATE_HZ, np.float32))))
        for at in range(0, len(data), 4800):
            await self.say("input_audio_buffer.append", audio=base64.b64encode(data[at : at + 4800]).decode())
            await asyncio.sleep(0.1)


@asynccontextmanager
async def conversation(srv: Server, **session: Any) -> AsyncIterator[Client]:
    async with websockets.connect(f"{srv.ws}/v1/realtime?model=default", max_size=None) as socket:
        client = Client(socket)
        await client.until("session.created")
        await client.say("session.update", session={"type": "realtime", **session})
        await client.until("session.updated")
        yield client


@contextmanager
def serving(seconds: float, *flags: str) -> Iterator[Server]:
    """Run a server whose tool takes this long."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mcp.json"
        args = ["-m", "bench.tool_talk", SERVE_TOOL, str(seconds)]
        own = {"command": sys.executable, "args": args, "cwd": str(HERE.parent)}
        file.write_text(json.dumps({"mcpServers": {"orders": own}}))
        with server("--mcp", str(file), *flags) as srv:
            # The tool's process has to start too.
            time.sleep(START_S)
            yield srv


async def _fillers(srv: Server, times: int) -> dict[str, Any]:
    silences, from_request = [], []
    for _ in range(times):
        async with conversation(srv) as client:
            began_s = time.perf_counter()
            ended_s = await client.call()
            first_s = await client.until(FIRST_SOUND)
            silences.append(first_s - ended_s)
            from_request.append(first_s - began_s)
            await client.until("response.mcp_call.completed")
            await client.until("response.done")
    return {"n": times} | spread(silences, "silence", qs=(50, 95, 100)) | spread(from_request, "from_request")


async def _results(srv: Server, times: int) -> dict[str, Any]:
    of_server, of_client = [], []
    for _ in range(times):
        async with conversation(srv) as client:
            await client.call()
            known_s = await client.until("response.mcp_call.completed")
            of_server.append(await client.until(FIRST_SOUND) - known_s)
        async with conversation(srv, tools=[OWN]) as client:
            await client.call()
            call = next(e["item"] for _, e in client.events if e["type"] == "response.output_item.done")
            output = "Order 7 has been sent, and arrives on Monday."
            item = {"type": "function_call_output", "call_id": call["call_id"], "output": output}
            known_s = time.perf_counter()
            await client.say("conversation.item.create", item=item)
            await client.say("response.create")
            of_client.append(await client.until(FIRST_SOUND) - known_s)
    return {"n": times} | spread(of_server, "server") | spread(of_client, "client")


async def _questions(srv: Server, times: int) -> dict[str, Any]:
    answered, waits = 0, []
    for _ in range(times):
        async with conversation(srv) as client:
            await client.call()
            await client.speak()
            spoken_s = time.perf_counter()
            num = len(client.events)
            await client.until("response.mcp_call.completed")
            sounds = [at for at, event in client.events[num:] if event["type"] == FIRST_SOUND]
            answered += bool(sounds)
            waits += [sounds[0] - spoken_s + 1.0] if sounds else []
    return {"n": times, "answered": answered} | spread(waits, "end_of_words_to_sound")


def main() -> None:
    if SERVE_TOOL in sys.argv:
        tool_server(float(sys.argv[-1]))
        return
    sections = ("filler", "result", "questions")
    parser = options("python -m bench.tool_talk", __doc__, sections)
    parser.add_argument("--times", type=int, default=20, help="calls of each section")
    args, flags = parser.parse_known_args()

    def filler() -> dict[str, Any]:
        with serving(5, *(part for line in FILLERS for part in ("--filler", line)), *flags) as srv:
            found = asyncio.run(_fillers(srv, args.times))
        show("Silence while a tool takes 5 s, with a filler", [found])
        return found

    def result() -> dict[str, Any]:
        with serving(0.5, *flags) as srv:
            found = asyncio.run(_results(srv, args.times))
        show("Result of a call to first sound", [found])
        return found

    def questions() -> dict[str, Any]:
        with serving(15, *flags) as srv:
            found = asyncio.run(_questions(srv, args.times))
        show("Questions while a tool takes 15 s", [found])
        return found

    load = {"load": os.getloadavg()[0], "question": QUESTION.name, "fillers": FILLERS}
    measured("tool_talk", args.sections, {"filler": filler, "result": result, "questions": questions}, **load)


if __name__ == "__main__":
    main()
