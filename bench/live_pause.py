"""Paused sessions of `/v1/live/sessions`: their memory, their CPU, and whether a wake keeps the first word.

    python -m bench.live_pause [--sections cost,wake] [--sessions 50] [--seconds 30] [--wakes 40]

- cost: the CPU of the server for each session, in percent of a core, and the memory by which it grows: for sessions
  that are paused, without and with the microphone of a quiet room (100 ms in each message), and before the pause.
- wake: after a pause, a recording is played. The transcript is compared with that of a session that is not paused.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import HERE, Server, measured, options, server, show
from bench.words import norm
from websockets.asyncio.client import ClientConnection, connect

from antiphon.audio.containers import decode_all
from antiphon.audio.pcm import Resampler, to_pcm16

RATE_HZ, PART = 24_000, 2400
AUDIO = HERE.parent / "tests" / "data" / "audio"
# Recordings of English speech.
SPOKEN = ("lj-", "ps-cards", "tau2-")
# Seconds for which a wake or a transcript is awaited.
WOKEN_S = 15.0
# Power of a quiet room's noise: -60 dB of full scale.
NOISE = 0.001


class Session:
    """One session with a pause after a second, whose events are read all the time."""

    def __init__(self, socket: ClientConnection, seed: int) -> None:
        self.socket = socket
        self.kinds: list[str] = []
        self.heard = ""
        self._random = np.random.default_rng(seed)
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, url: str, seed: int = 1, **fields: Any) -> Session:
        session = cls(await connect(f"{url}/v1/live/sessions", max_size=None, compression=None), seed)
        await session.say("session.start", session={"model": "gpt-live-1", **fields})
        await session.until("session.started")
        return session

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind} | fields))

    async def _read(self) -> None:
        async for data in self.socket:
            event = json.loads(data)
            if event["type"] == "session.input_transcript.delta":
                self.heard += event["delta"]
            if event["type"] != "session.output_audio.delta":
                self.kinds.append(event["type"])

    async def comes(self, kind: str, seconds: float) -> bool:
        """Wait for an event of this kind. Return whether it has come within this time."""
        for _ in range(int(seconds * 50)):
            if kind in self.kinds:
                return True
            await asyncio.sleep(0.02)
        return False

    async def until(self, kind: str, seconds: float = 60) -> None:
        if not await self.comes(kind, seconds):
            raise TimeoutError(f"no {kind}: {self.kinds[-5:]}")

    async def hear(self, seconds: float, pcm: np.ndarray | None = None) -> None:
        """Send this audio (float32 at RATE_HZ) over the noise of the room, as a microphone does."""
        speech = np.zeros(int(seconds * RATE_HZ), np.float32) if pcm is None else pcm
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        for number, at in enumerate(range(0, len(speech), PART)):
            part = speech[at : at + PART]
            part = part + self._random.normal(0, NOISE, len(part)).astype(np.float32)
            await self.say("session.input_audio.append", audio=b64encode(to_pcm16(part)).decode())
            await asyncio.sleep(max(0.0, begun_s + (number + 1) * PART / RATE_HZ - loop.time()))

    async def close(self) -> None:
        self._reading.cancel()
        await self.socket.close()


async def cost(srv: Server, count: int, seconds: float) -> dict[str, Any]:
    async def cpu_of(sessions: Sequence[Session], *, hears: bool) -> float:
        """The part of a core that each session takes in percent."""
        before = srv.cpu_s()
        if hears:
            await asyncio.gather(*(session.hear(seconds) for session in sessions))
        else:
            await asyncio.sleep(seconds)
        return 100 * (srv.cpu_s() - before) / seconds / max(1, len(sessions))

    # The first sessions make what all sessions share.
    for _ in range(3):
        first = await Session.open(srv.ws, idle_timeout_s=1)
        await first.hear(2)
        await first.close()
    idle = await cpu_of([], hears=False)
    rss_mb = srv.rss_mb()
    sessions = [await Session.open(srv.ws, idle_timeout_s=2) for _ in range(count)]
    await asyncio.sleep(1)
    open_mb = srv.rss_mb()
    awake = await cpu_of(sessions, hears=True)
    await asyncio.gather(*(session.until("session.paused", seconds=120) for session in sessions))
    gc.collect()
    paused_mb = srv.rss_mb()
    rows = {
        "the server without sessions": {"cpu_pct": idle},
        "open": {"kb": 1000 * (open_mb - rss_mb) / count},
        "hears and pauses": {"cpu_pct": awake},
        "paused, no audio": {"cpu_pct": await cpu_of(sessions, hears=False), "kb": 1000 * (paused_mb - rss_mb) / count},
        "paused, a quiet room": {"cpu_pct": await cpu_of(sessions, hears=True)},
    }
    woken = sum(session.kinds.count("session.resumed") for session in sessions)
    await asyncio.gather(*(session.close() for session in sessions))
    rows["paused, a quiet room"]["woken"] = woken
    show(f"{count} sessions, each", rows)
    return rows


async def wake(srv: Server, wakes: int, together: int) -> dict[str, Any]:
    """Play recordings to paused sessions. A session that is not paused hears the same audio at the same time."""
    files = sorted(path for path in AUDIO.iterdir() if path.name.startswith(SPOKEN))
    played = [(number, files[number % len(files)]) for number in range(wakes)]
    found: list[Wake] = []
    for at in range(0, wakes, together):
        found += await asyncio.gather(*(woken(srv, number, file) for number, file in played[at : at + together]))
    kept = sum(one.is_kept for one in found)
    row = {
        "wakes": wakes,
        "first_word_kept": kept,
        "first_word_equal": sum(norm(one.paused)[:1] == norm(one.open)[:1] for one in found),
        "until_resumed_p50_s": float(np.median([one.seconds for one in found])),
        "lost": [f"{one.file}: {one.paused[:60]!r}, {one.open[:60]!r}" for one in found if not one.is_kept],
    }
    show("wakes", [{name: value for name, value in row.items() if name != "lost"}])
    return row


@dataclass(frozen=True, slots=True)
class Wake:
    """What two sessions heard of one recording: one that was paused, and one that was not.

    `seconds`: from the recording's first sample to `session.resumed`.
    """

    file: str
    paused: str
    open: str
    seconds: float

    @property
    def is_kept(self) -> bool:
        """Whether the paused session heard a first word, if the other one did.

        The transcriber may hear one word as another ("than", "then") in two runs. Then the second words are equal.
        """
        mine, other = norm(self.paused), norm(self.open)
        return mine[:1] == other[:1] or (len(mine) > 1 and mine[1:2] == other[1:2])


async def woken(srv: Server, number: int, file: Path) -> Wake:
    resampler = Resampler(16_000, RATE_HZ)
    speech = np.concatenate((resampler.feed(decode_all(str(file))), resampler.flush()))[: 4 * RATE_HZ]
    # Speech begins anywhere in a message, and some time after the pause.
    lead = np.zeros(int(np.random.default_rng(number).uniform(0.2, 1.7) * RATE_HZ), np.float32)
    pcm = np.concatenate((lead, speech, np.zeros(2 * RATE_HZ, np.float32)))
    loop = asyncio.get_running_loop()

    async def heard(*, pauses: bool) -> tuple[str, float]:
        # Responses would be spoken over the recording.
        fields = {"instructions": "Say nothing but yes."} | ({"idle_timeout_s": 1} if pauses else {})
        session = await Session.open(srv.ws, seed=number, **fields)
        await session.hear(1)
        while pauses and "session.paused" not in session.kinds:
            await session.hear(0.5)
        since_s = loop.time() + len(lead) / RATE_HZ
        playing = asyncio.create_task(session.hear(0, pcm))
        has_woken = not pauses or await session.comes("session.resumed", WOKEN_S)
        until_s = loop.time() - since_s if has_woken else WOKEN_S
        await playing
        # A word that no session hears is the transcriber's.
        await session.comes("session.input_transcript.delta", WOKEN_S)
        await asyncio.sleep(1)
        await session.close()
        return session.heard, until_s

    (paused, seconds), (other, _) = await asyncio.gather(heard(pauses=True), heard(pauses=False))
    print(f"{file.name}: {paused[:60]!r}, not paused {other[:60]!r}", flush=True)
    return Wake(file.name, paused, other, seconds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = options("python -m bench.live_pause", __doc__, ("cost", "wake"))
    parser.add_argument("--sessions", type=int, default=50, help="paused sessions [%(default)s]")
    parser.add_argument("--seconds", type=float, default=30, help="of each measurement of CPU [%(default)s]")
    parser.add_argument("--wakes", type=int, default=40, help="wakes [%(default)s]")
    parser.add_argument("--together", type=int, default=4, help="wakes at the same time [%(default)s]")
    args = parser.parse_args(argv)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE.parent, capture_output=True, text=True).stdout
    with server() as srv:
        measured(
            "live_pause",
            args.sections,
            {
                "cost": lambda: asyncio.run(cost(srv, args.sessions, args.seconds)),
                "wake": lambda: asyncio.run(wake(srv, args.wakes, args.together)),
            },
            commit=commit.strip(),
            load=os.getloadavg()[0],
        )


if __name__ == "__main__":
    main()
