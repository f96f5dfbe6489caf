"""A process of clients: `python -m antiphon.capacity.worker`, which `antiphon certify` starts.

Reads one line of JSON from its input, a Work, and writes a line of JSON for each turn, until it is ended. Clients begin
spread over `spread_s`, and a client's first turn is not told: until then it warms up.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from antiphon.capacity.certificate import Kind
from antiphon.capacity.clients import Report, Turn, run_client
from antiphon.capacity.recordings import read_recordings


class Work(msgspec.Struct, frozen=True):
    """What a process of clients does: so many `sessions` of each kind, at a server, with the recordings of a folder."""

    url: str
    key: str
    data: str
    sessions: dict[Kind, int]
    spread_s: float
    seed: int


async def _run(work: Work) -> None:
    recordings = read_recordings(Path(work.data))
    kinds = [kind for kind, count in work.sessions.items() for _ in range(count)]
    async with asyncio.TaskGroup() as group:
        for number, kind in enumerate(kinds):
            client = partial(run_client, kind, work.url, work.key, recordings, work.seed + number)
            group.create_task(_client(client, work.spread_s * number / len(kinds)))


async def _client(run: Callable[[Report], Coroutine[Any, Any, None]], after_s: float) -> None:
    await asyncio.sleep(after_s)
    told = False

    def report(turn: Turn) -> None:
        nonlocal told
        # A failure is told, even the first.
        if told or turn.failed:
            sys.stdout.buffer.write(msgspec.json.encode(turn) + b"\n")
            sys.stdout.buffer.flush()
        told = True

    await run(report)


if __name__ == "__main__":
    asyncio.run(_run(msgspec.json.decode(sys.stdin.buffer.readline(), type=Work)))
