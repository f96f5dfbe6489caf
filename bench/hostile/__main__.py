"""One attack, in a separate process: python -m bench.hostile CLASS URL KEY [--beside URL] [--quick]

It attacks until its standard input ends, but at least once. It prints a line `attacking` when the data of the attack is
ready, and at the end one JSON object with `tried` and `outcomes` (see bench.hostile.client.Target).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable

from bench.hostile import bodies, doors, model_server, sockets
from bench.hostile.client import Target

CLASSES: dict[str, Callable[[Target], Awaitable[None]]] = {
    "bodies": bodies.bodies,
    "files": bodies.files,
    "text": bodies.text,
    "json": bodies.json_documents,
    "sdp": bodies.sdp,
    "images": bodies.images,
    "unread": sockets.unread,
    "silent": sockets.silent,
    "resumes": sockets.resumes,
    "storms": sockets.storms,
    "first-frames": sockets.first_frames,
    "answers": sockets.answers,
    "types": sockets.types,
    "two-keys": sockets.two_keys,
    "idle": sockets.idle,
    "schemas": bodies.schemas,
    "door-paths": doors.paths,
    "door-bodies": doors.bodies,
    "fetches": bodies.fetches,
    **{f"model-{name}": bodies.chats for name in model_server.CLASSES},
}
# Seconds between two rounds of a class. Without them, refusals at once would only measure how fast the attacker is.
PAUSE_S = 0.05


async def attack(name: str, target: Target) -> None:
    """Attack in rounds until standard input ends. That cancels the current round."""
    stop = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while not stop.done():
        one = asyncio.ensure_future(CLASSES[name](target))
        await asyncio.wait([one, stop], return_when=asyncio.FIRST_COMPLETED)
        one.cancel()
        ended = await asyncio.gather(one, return_exceptions=True)
        if isinstance(ended[0], Exception) and not stop.done():
            # The round ends if the server hangs or closes the connection. That is a result, not a failure.
            target.outcomes[f"the attack's {type(ended[0]).__name__}"] += 1
            traceback.print_exception(ended[0])
        await asyncio.wait([stop], timeout=PAUSE_S)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hostile", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", choices=CLASSES)
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("--beside", default="", help="URL of an extra server, for classes that need one")
    parser.add_argument("--quick", action="store_true", help="small numbers")
    args = parser.parse_args()
    # Lowest priority, because a real attacker would not use the server's cores.
    os.nice(10)
    target = Target(args.url, args.key, args.quick, args.beside)
    print("attacking", flush=True)
    asyncio.run(attack(args.name, target))
    print(json.dumps({"tried": target.tried, "outcomes": dict(target.outcomes.most_common())}), flush=True)


if __name__ == "__main__":
    main()
