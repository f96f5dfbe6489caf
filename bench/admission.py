"""More callers than a certificate allows: `python -m bench.admission CERTIFICATE [--kind captions] [--data DIR]`.

It runs a server with the certificate, and clients of one kind: 1, 1.5 and 3 times the certified number (--factors), for
--seconds each. A refused client tries again after a second, as impatient clients do. Results: the delays of admitted
clients, the largest number of clients admitted at once, and the time from opening a connection to its refusal. With
--attacks, the certified number of clients runs again during each of these attacks (bench.hostile), which use another
API key.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from bench.common import machine, options, percentile, save, server, show, spread
from bench.driver import CONVERSATION, Session
from bench.hearing.client import TRANSCRIPTION
from bench.hearing.clips import with_data
from bench.hostile.stages import attacker

from antiphon.admission.certificate import Certificate, Kind, read
from antiphon.certify.clients import Turn, Work
from antiphon.client.link import SessionEnded

FACTORS = (1.0, 1.5, 3.0)
BYSTANDER, ATTACKER = "bystander", "attacker"
PATHS = {"captions": TRANSCRIPTION, "conversation": CONVERSATION}
WARM_S, KNOCK_EVERY_S = 15.0, 0.5


async def crowd(url: str, kind: Kind, count: int, seconds: float, data: Path) -> list[Turn]:
    """Return the turns that `count` clients take in `seconds`, without refused ones and those of the first WARM_S."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "antiphon.certify.clients", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(msgspec.json.encode(Work(url, BYSTANDER, str(data), {kind: count}, 4.0, 1)) + b"\n")
    await process.stdin.drain()
    found, begun = list[Turn](), time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WARM_S + seconds):
            async for line in process.stdout:
                turn = msgspec.json.decode(line, type=Turn)
                if time.monotonic() > begun + WARM_S and "HTTP 503" not in turn.failed:
                    found.append(turn)
    process.kill()
    await process.wait()
    return found


async def knock(url: str, path: str, seconds: float) -> tuple[list[float], int]:
    """Try to connect again and again. Return the seconds to each refusal, and the number of times it was admitted."""
    refused, inside, until = list[float](), 0, time.monotonic() + WARM_S + seconds
    await asyncio.sleep(WARM_S)
    while time.monotonic() < until:
        begun = time.perf_counter()
        try:
            async with Session(url, path, key=BYSTANDER):
                inside += 1
        except SessionEnded:
            refused.append(time.perf_counter() - begun)
        await asyncio.sleep(KNOCK_EVERY_S)
    return refused, inside


async def most_held(url: str, kind: Kind, seconds: float) -> int:
    """Return the largest number of admitted sessions of a kind at any time."""
    most, until = 0.0, time.monotonic() + WARM_S + seconds
    headers = {"Authorization": f"Bearer {BYSTANDER}"}
    async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=60) as client:
        while time.monotonic() < until:
            text = (await client.get(f"{url}/metrics")).text
            lines = [line for line in text.splitlines() if line.startswith(f'antiphon_held_sessions{{kind="{kind}"}}')]
            most = max([most, *(float(line.rsplit(" ", 1)[1]) for line in lines)])
            await asyncio.sleep(0.5)
    return int(most)


async def measure(
    url: str, certificate: Certificate, kind: Kind, seconds: float, data: Path, runs: Sequence[tuple[float, str]]
) -> dict[str, Any]:
    places, out = certificate.kinds[kind].sessions, {}
    for factor, attack in runs:
        count = max(1, round(factor * places))
        with attacker(attack, url, ATTACKER) if attack else contextlib.nullcontext({}) as hostile:
            turns, (refused, _), most = await asyncio.gather(
                crowd(url, kind, count, seconds, data), knock(url, PATHS[kind], seconds), most_held(url, kind, seconds)
            )
        delays = [turn.delay_s if turn.delay_s is not None else float("inf") for turn in turns]
        out[f"{factor:g} x {places}" + (f", {attack}" if attack else "")] = {
            "clients": count,
            "most_held": most,
            "turns": len(delays),
            "failed": sum(turn.delay_s is None for turn in turns),
            **{name: round(value, 3) for name, value in spread(delays).items()},
            "refusals": len(refused),
            "refusal_p50_ms": round(percentile(refused, 50) * 1000, 1) if refused else None,
            "refusal_p95_ms": round(percentile(refused, 95) * 1000, 1) if refused else None,
            "attack": hostile,
        }
        await asyncio.sleep(3)
    return out


def main() -> None:
    parser = with_data(options("python -m bench.admission", __doc__))
    parser.add_argument("certificate", type=Path)
    parser.add_argument("--kind", choices=tuple(PATHS), default="captions")
    parser.add_argument("--factors", default=",".join(f"{factor:g}" for factor in FACTORS))
    parser.add_argument("--attacks", default="", help="classes of bench.hostile, comma separated")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    certificate = read(args.certificate)
    # The server runs with the certificate's flags, but its headroom and keys are set here.
    os.environ |= {"ANTIPHON_HEADROOM": "true", "ANTIPHON_API_KEYS": f"{BYSTANDER},{ATTACKER}"}
    runs = [(float(factor), "") for factor in args.factors.split(",") if factor]
    runs += [(1.0, attack) for attack in args.attacks.split(",") if attack]
    flags = [str(flag) for flag in certificate.settings.get("flags", ())]
    with server("--certificate", str(args.certificate.resolve()), "--sessions-per-key", "4096", *flags) as srv:
        found = asyncio.run(measure(srv.url, certificate, args.kind, args.seconds, args.data, runs))
    objective = certificate.kinds[args.kind].objective.p95_s
    show(f"{args.kind}, within {objective:g} s", found)
    print(f"\nwritten: {save('admission', {'machine': machine(), args.kind: found})}")


if __name__ == "__main__":
    main()
