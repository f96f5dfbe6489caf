"""Follows the telephone calls of a server, prints what is said, and adds a function that the model may call.

    pip install websockets
    python examples/telephone/application.py --url http://127.0.0.1:8000 --key KEY

`opening_hours` is answered here. `hang_up` and the other functions of the telephone remain with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import urllib.request

import websockets

POLL_S = 0.5
HOURS = {
    "type": "function",
    "name": "opening_hours",
    "description": "Tells when the surgery is open.",
    "parameters": {"type": "object", "properties": {}, "required": []},
}


def live_calls(url: str, headers: dict[str, str]) -> list[dict]:
    """Return the live calls of the key."""
    request = urllib.request.Request(f"{url}/v1/telephone/calls", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)["data"]


async def follow(url: str, headers: dict[str, str], call: dict) -> None:
    """Take part in one call until it ends."""
    print(f"{call['id']}: a call of {call['from'] or 'an unknown number'}, {call['parameters']}")
    address = f"{url.replace('http', 'ws', 1)}/v1/realtime?call_id={call['id']}"
    async with websockets.connect(address, additional_headers=headers) as socket:

        async def say(type: str, **fields: object) -> None:
            await socket.send(json.dumps({"type": type, **fields}))

        audio = {"input": {"transcription": {"model": "whisper-1"}}}
        await say("session.update", session={"type": "realtime", "audio": audio, "tools": [HOURS]})
        async for data in socket:
            event = json.loads(data)
            match event["type"]:
                case "conversation.item.input_audio_transcription.completed":
                    print(f"{call['id']}: caller: {event['transcript']}")
                case "response.output_audio_transcript.done":
                    print(f"{call['id']}: model: {event['transcript']}")
                case "input_audio_buffer.dtmf_event_received":
                    print(f"{call['id']}: key {event['event']}")
                case "response.function_call_arguments.done" if event["name"] == "opening_hours":
                    output = {"type": "function_call_output", "call_id": event["call_id"], "output": "8 to 12 o'clock"}
                    await say("conversation.item.create", item=output)
                    await say("response.create")
                case "error":
                    print(f"{call['id']}: {event['error']['message']}")
    print(f"{call['id']}: {socket.close_reason}")


async def main() -> None:
    """Read the arguments, and follow each call as soon as it is live."""
    parser = argparse.ArgumentParser(description="Follow the telephone calls of a server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="")
    parser.add_argument("--once", action="store_true", help="end after the first call")
    args = parser.parse_args()
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    followed: dict[str, asyncio.Task[None]] = {}
    while True:
        for call in await asyncio.to_thread(live_calls, args.url, headers):
            if call["id"] not in followed:
                followed[call["id"]] = asyncio.create_task(follow(args.url, headers, call))
        if args.once and followed:
            await asyncio.gather(*followed.values())
            return
        await asyncio.sleep(POLL_S)


if __name__ == "__main__":
    asyncio.run(main())
