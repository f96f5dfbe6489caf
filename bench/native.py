"""A model that takes turns by itself: a session of hours, and clients of a server with the tests' tiny model.

    antiphon bench native [--sections sound,hours,answers,worker] [--sessions N] [--minutes N] [--units N] [--clients N]
        [--seconds N]

`sound` has sessions that speak to a server in real time. The sound of each code tells its session and its place in the
turn (tests/adapters/marked_minicpmo.py). It counts missed units, checks that all sound arrives once and in order, and
compares the server's memory at the end with that after a minute.
`hours` runs one session of the tiny random model at full speed, while its window drops the oldest units. It checks that
late steps take no longer than early ones, and that memory stays constant. In `answers` and `worker`, the model speaks
with a tiny token2wav of two steps. A unit then takes little time, so mostly the server is measured.
`answers` has push-to-talk clients, AT_ONCE at a time, which send nothing after their commit. `worker` has the player of
the MiniCPM-o demo, which schedules its audio. `bench/gpu.sh --only minicpmo` measures a unit with the released
dimensions on a GPU.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import websockets
from bench.common import Server, measured, options, percentile, server, show, spread, together
from bench.models import Silent
from tests.adapters import marked_minicpmo
from tests.adapters import tiny_minicpmo as tiny

from antiphon.adapters.minicpmo.model import MiniCpmO
from antiphon.adapters.minicpmo.speech_decoder import UNIT_CODES
from antiphon.adapters.spec import EngineModelOptions
from antiphon.certify.native_client import UNIT_S, UnitTimer
from antiphon.certify.wire import read_event
from antiphon.client import AudioToPlay, Client, ResponseEnds, ServerError
from antiphon.contracts import NativeOptions, Unit
from antiphon.events.duplex import NativeSampling

RATE_HZ, AT_ONCE, LIMIT_S = 24_000, 10, 60
# Seconds for which a player waits after the first result of a turn, as a reserve for delays of network and model.
PLAYER_DELAY_S = 0.2
# The tiny model would speak without end, so it has to listen once in TURN_S units.
TURN_S = 15


@dataclass(slots=True)
class Heard:
    """What one session of `sound` got."""

    # The delay of each unit's result, in seconds.
    delays: list[float] = field(default_factory=list)
    # Units with sound.
    spoken: int = 0
    # Turns that the model has begun.
    turns: int = 0
    # Codes of another session, or not in the place where they belong.
    wrong_codes: int = 0
    # Units within a turn whose sound is not a second.
    wrong_units: int = 0


@cache
def quiet(unit: int) -> str:
    """Return a second of sound, as base64, that the server's scripted detector does not take for speech."""
    pcm = (tiny.sound(unit) * 0.001).clip(-0.0004, 0.0004) * 32767
    return b64encode(pcm.astype("<i2").tobytes()).decode()


async def sound_of(srv: Server, number: int, seconds: int) -> Heard:
    """Hold session `number` for `seconds` units. The units of all sessions come at the same moments."""
    heard, timer, lengths = Heard(), UnitTimer(), list[int]()
    session = {
        "instructions": tiny.PROMPT,
        "temperature": 0.7,
        "turn_detection": None,
        "ref_audio": marked_minicpmo.reference(number),
        "extra_body": {"force_listen_count": 0, "seed": number},
    }
    # Without pings: a server that is behind is measured, and not left.
    async with websockets.connect(f"{srv.ws}/v1/duplex", max_size=None, ping_interval=None) as socket:
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        await socket.recv()

        async def speak() -> None:
            begun_s = math.ceil(time.monotonic())
            for unit in range(seconds):
                await asyncio.sleep(max(0.0, begun_s + (unit + 1) * UNIT_S - time.monotonic()))
                await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": quiet(unit % 64)}))
                timer.sent(time.monotonic())

        async def hear() -> None:
            turn = next_code = 0
            while len(timer.delays) < seconds:
                message = json.loads(data := await socket.recv())
                if message["type"] == "response.done":
                    # The server keeps events for a client that may resume, until they are acknowledged.
                    acknowledged = {"type": "session.event_ack", "server_event_seq": message["server_event_seq"]}
                    await socket.send(json.dumps(acknowledged))
                timer.see(read_event(data), time.monotonic())
                match message["type"]:
                    case "error":
                        raise RuntimeError(message)
                    case "response.created":
                        turn, next_code = 0, 0
                        heard.turns += 1
                    case "response.output_audio.delta" if message["delta"]:
                        pcm = np.frombuffer(b64decode(message["delta"]), "<i2").astype(np.float32) / 32768
                        marks = marked_minicpmo.marks_of(pcm)
                        turn = turn or marks[0].turn
                        expected = [marked_minicpmo.Mark(number, turn, next_code + n) for n in range(len(marks))]
                        heard.wrong_codes += sum(a != b for a, b in zip(marks, expected, strict=True))
                        next_code += len(marks)
                        heard.spoken += 1
                        lengths.append(len(marks))
                    case "response.done":
                        # The first and the last unit of a turn may be shorter.
                        heard.wrong_units += sum(length != UNIT_CODES for length in lengths[1:-1])
                        lengths.clear()

        # A server that is behind is measured to its end.
        async with asyncio.timeout(2 * seconds + LIMIT_S):
            await asyncio.gather(speak(), hear())
    heard.wrong_units += sum(length != UNIT_CODES for length in lengths[1:-1])
    heard.delays = list(timer.delays)
    return heard


def sound(sessions: int, minutes: float) -> dict[str, Any]:
    """Measure `sound` with this number of sessions, in real time."""
    seconds = round(60 * minutes)
    with tempfile.TemporaryDirectory() as folder:
        environment = {"ANTIPHON_TEST_MODEL": str(tiny.write(Path(folder)))}
        with patch.dict(os.environ, environment), server(module="tests.adapters.marked_minicpmo") as srv:

            async def main() -> tuple[list[float], list[float], list[Heard]]:
                running = asyncio.ensure_future(together(sessions, lambda n: sound_of(srv, n, seconds)))
                rss, held = list[float](), list[float]()
                while not running.done():
                    await asyncio.wait([running], timeout=min(60, seconds / 2))
                    rss.append(srv.rss_mb())
                    held.append(srv.metric("antiphon_held_bytes") / 1e6)
                return rss, held, await running

            begun_s = srv.cpu_s()
            rss_mb, held_mb, heard = asyncio.run(main())
            cpu_s, late = srv.cpu_s() - begun_s, srv.metric('antiphon_units_total{what="late"}')
    delays = [delay for one in heard for delay in one.delays]
    found = {
        "sessions": sessions,
        "units": len(delays),
        "missed_units": sum(delay > UNIT_S for delay in delays),
        # All sessions send at the same moments, so one stall of the machine is one moment at which all miss a unit.
        "moments_of_them": len({n for one in heard for n, delay in enumerate(one.delays) if delay > UNIT_S}),
        "late_by_the_server": int(late),
        **spread(delays, "result", qs=(50, 95, 100)),
        "units_with_sound": sum(one.spoken for one in heard),
        "turns": sum(one.turns for one in heard),
        "cpu_ms_a_unit": 1000 * cpu_s / len(delays),
        "wrong_codes": sum(one.wrong_codes for one in heard),
        "wrong_units": sum(one.wrong_units for one in heard),
        # Each minute: the memory of the process, and what it holds for clients: histories, and events to send again.
        "rss_mb": [round(value, 1) for value in rss_mb],
        "held_mb": [round(value, 2) for value in held_mb],
        "memory_ratio": round(rss_mb[-1] / rss_mb[0], 4),
    }
    show("sound in real time (tiny random model)", [found])
    return found


async def hours(count: int) -> dict[str, Any]:
    """Run `count` units of one session. The default window is scaled to the tiny model's 4,096 rows."""
    sounds, process = [tiny.sound(i) for i in range(64)], psutil.Process()
    took, rss, rows = list[float](), list[float](), list[int]()
    with tempfile.TemporaryDirectory() as folder:
        chosen = EngineModelOptions(weights="fp32", threads=1)
        model = MiniCpmO(tiny.write(Path(folder)), "tiny", chosen, window=(1600, 1200), vocoder=Silent())
        talk = await model.open(NativeOptions(tiny.PROMPT, sampling=NativeSampling(temperature=0.7, seed=1)))
        for number in range(count):
            started = time.perf_counter()
            await talk.append(Unit(sounds[number % 64]))
            await talk.step()
            took.append((time.perf_counter() - started) * 1000)
            rows.append(talk.context_rows)
            rss.append(process.memory_info().rss / 1e6)
        talk.close()
        held = (await model.engine.state()).kv_bytes
        model.close()
    tenth = count // 10
    found = {
        "units": count,
        "hours": round(count / 3600, 2),
        "step_ms_early": round(percentile(took[tenth : 2 * tenth], 50), 2),
        "step_ms_late": round(percentile(took[-tenth:], 50), 2),
        "rss_mb_early": round(rss[tenth], 1),
        "rss_mb_late": round(rss[-1], 1),
        "rows_most": max(rows),
        "kv_bytes_after_close": held,
    }
    show("one session (tiny random model)", [found])
    return found


@contextmanager
def speaking() -> Iterator[Server]:
    """Run a server with the tiny model, which always speaks."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny.write(Path(folder), voice=True))
        with server("--conversation-model", model, "--weights", "fp32", "--flow-steps", "2") as srv:
            yield srv


async def push_to_talk(srv: Server, seed: int, *, asks: bool) -> float:
    """Say two units, commit, and send nothing more. Return seconds to the first sound; infinite if no answer comes."""
    session = {"temperature": 0.7, "turn_detection": None, "extra_body": {"seed": seed}}
    async with Client(srv.url) as client, client.conversation(instructions=tiny.PROMPT, session=session) as talk:
        for unit in range(2):
            await talk.send_audio((tiny.sound(seed + unit) * 32767).astype("<i2").tobytes())
            await asyncio.sleep(1.0)
        begun_s = time.perf_counter()
        await talk.end_turn()
        if asks:
            await talk.respond()
        try:
            async with asyncio.timeout(LIMIT_S):
                async for event in talk:
                    match event:
                        case AudioToPlay():
                            return time.perf_counter() - begun_s
                        case ResponseEnds():
                            break
                        case ServerError():
                            raise RuntimeError(event.message)
        except TimeoutError:
            pass
    return float("inf")


async def answers(srv: Server, count: int) -> dict[str, Any]:
    places, out = asyncio.Semaphore(AT_ONCE), dict[str, dict[str, Any]]()
    for name, asks in (("commit", False), ("commit, response.create", True)):

        async def one(seed: int, asks: bool = asks) -> float:
            async with places:
                return await push_to_talk(srv, seed, asks=asks)

        sounds = [sound_s for sound_s in await together(count, one) if sound_s < float("inf")]
        most = {"first_sound_most_s": max(sounds, default=float("nan"))}
        out[name] = {"asked": count, "answered": len(sounds)} | spread(sounds, "first_sound") | most
    show("push-to-talk: from the commit to the answer (a unit is 1 s)", out)
    return out


async def worker(srv: Server, seconds: int) -> dict[str, Any]:
    """Play the results of `/ws/duplex` as that dialect's front end does: each when the one before has been played."""
    drifts, lengths, late, turns, spoken = list[float](), set[int](), 0, 0, 0
    async with websockets.connect(f"{srv.ws}/ws/duplex", max_size=None) as socket:
        await socket.send(json.dumps({"type": "prepare", "system_prompt": tiny.PROMPT}))
        await socket.recv()
        begun_s = time.perf_counter()
        # The time at which everything will have been played; None before a turn's first result.
        until_s: float | None = None
        scheduled_s = 0.0
        for second in range(seconds):
            audio = b64encode(tiny.sound(second % 64).astype("<f4").tobytes()).decode()
            chunk = {"type": "audio_chunk", "audio_base64": audio, "force_listen": second % TURN_S == TURN_S - 1}
            await socket.send(json.dumps(chunk))
            result = json.loads(await socket.recv())
            now_s = time.perf_counter()
            if until_s is None:
                until_s = scheduled_s = now_s + PLAYER_DELAY_S
            late += now_s > until_s
            start_s = max(now_s, until_s)
            drifts.append(start_s - scheduled_s)
            samples = len(b64decode(result["audio_data"])) // 4
            spoken += not result["is_listen"]
            until_s, scheduled_s = start_s + samples / RATE_HZ, scheduled_s + 1.0
            if result["end_of_turn"]:
                # The last result is shorter. After it, the schedule starts over.
                turns, until_s = turns + 1, None
            else:
                lengths.add(samples)
            await asyncio.sleep(max(0.0, begun_s + second + 1 - time.perf_counter()))
        await socket.send(json.dumps({"type": "stop"}))
    found = {
        "seconds": seconds,
        "spoken": spoken,
        "turns": turns,
        "results_of_other_length": sorted(lengths - {RATE_HZ}),
        "late_results": late,
        "drift_ms_most": 1000 * max(map(abs, drifts)),
    }
    show("the demo's player against /ws/duplex", [found])
    return found


def main() -> None:
    parser = options("antiphon bench native", __doc__, ("sound", "hours", "answers", "worker"))
    parser.add_argument("--sessions", type=int, default=8, help="sessions in `sound`")
    parser.add_argument("--minutes", type=float, default=10, help="minutes of `sound`")
    parser.add_argument("--units", type=int, default=7200)
    parser.add_argument("--clients", type=int, default=100, help="number of push-to-talk clients")
    parser.add_argument("--seconds", type=int, default=600, help="seconds of the worker's player")
    args = parser.parse_args()

    def served(work: Any, size: int) -> dict[str, Any]:
        with speaking() as srv:
            found: dict[str, Any] = asyncio.run(work(srv, size))
        return found

    sections = {
        "sound": lambda: sound(args.sessions, args.minutes),
        "hours": lambda: asyncio.run(hours(args.units)),
        "answers": lambda: served(answers, args.clients),
        "worker": lambda: served(worker, args.seconds),
    }
    measured("native", args.sections, sections)


if __name__ == "__main__":
    main()
