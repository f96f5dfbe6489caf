"""TLS in the server: what it adds to the start, to a connection, and to the first sound of a text.

    antiphon bench tls [--sections ready,connections] [--starts 6] [--texts 50] [-- FLAGS]

The server is started without and with `--tls self-signed`, in turns, with the default models.

- ready: seconds from the start of the process until it is ready. The certificate is made by the first start.
- connections: the time of a request on a new connection, and from a text to its first sound on an open speech stream.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
from bench.common import HERE, Server, measured, options, percentile, server, show, spread

from antiphon.client import Client

TEXT = "Good morning, how are you today?"
WAYS: dict[str, tuple[str, ...]] = {"http": (), "https": ("--tls", "self-signed")}


def ready(starts: int, models: Sequence[str]) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(starts + 1):
        for name, flags in WAYS.items():
            since_s = time.perf_counter()
            with server(*flags, *models):
                took_s = time.perf_counter() - since_s
            # The first of each reads the files of the models from the disk.
            if number:
                times[name].append(took_s)
    row: dict[str, Any] = {f"{name}_p50_s": percentile(found, 50) for name, found in times.items()}
    row |= {"flags": list(models), "added_p50_s": row["https_p50_s"] - row["http_p50_s"], "starts": times}
    show("seconds until ready", [{name: value for name, value in row.items() if "_s" in name}])
    return row


async def first_sound(client: Client) -> float:
    async with client.speech() as speech:
        since_s, first_s = time.perf_counter(), 0.0
        await speech.say(TEXT)
        await speech.finish()
        async for audio in speech:
            if not first_s and audio.pcm:
                first_s = time.perf_counter() - since_s
        return first_s


def trust(srv: Server) -> ssl.SSLContext | None:
    """Return a context that trusts the certificate that a server of this machine shows; None without TLS."""
    parts = urlsplit(srv.url)
    if parts.scheme == "http":
        return None
    return ssl.create_default_context(cadata=ssl.get_server_certificate(("127.0.0.1", parts.port or 0)))


async def connections(servers: dict[str, Server], texts: int) -> dict[str, Any]:
    """Measure each way in turns. The first turn is left out."""
    requests: dict[str, list[float]] = {name: [] for name in servers}
    sounds: dict[str, list[float]] = {name: [] for name in servers}
    trusted = {name: trust(srv) for name, srv in servers.items()}
    for _ in range(texts + 1):
        for name, srv in servers.items():
            async with httpx.AsyncClient(verify=trusted[name] or True, trust_env=False) as client:
                since_s = time.perf_counter()
                (await client.get(f"{srv.url}/health")).raise_for_status()
                requests[name].append(1000 * (time.perf_counter() - since_s))
            async with Client(srv.url, ca=trusted[name]) as client:
                sounds[name].append(1000 * await first_sound(client))
    rows = {
        name: spread(requests[name][1:], "request", "ms") | spread(sounds[name][1:], "first_sound", "ms")
        for name in servers
    }
    show("a request on a new connection; the first sound of a text", rows)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = options("antiphon bench tls", __doc__, ("ready", "connections"))
    parser.add_argument("--starts", type=int, default=6, help="starts of each way [%(default)s]")
    parser.add_argument("--texts", type=int, default=50, help="texts of each way [%(default)s]")
    parser.add_argument("flags", nargs="*", help="after --: flags of `serve` for `ready`, such as other models")
    args = parser.parse_args(argv)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE.parent, capture_output=True, text=True).stdout

    def section_connections() -> dict[str, Any]:
        only_voice = ("--language-model", "none", "--turn-detector", "none")
        with ExitStack() as stack:
            servers = {name: stack.enter_context(server(*flags, *only_voice)) for name, flags in WAYS.items()}
            return asyncio.run(connections(servers, args.texts))

    measured(
        "tls",
        args.sections,
        {"ready": lambda: ready(args.starts, args.flags), "connections": section_connections},
        commit=commit.strip(),
        load=os.getloadavg()[0],
    )


if __name__ == "__main__":
    main()
