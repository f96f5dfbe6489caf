"""Measures how many sessions a server holds: `antiphon certify`.

For each kind, it searches the number of sessions in steps. The clients of a step run in a separate process. It then
measures mixtures of the kinds.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from antiphon.admission.certificate import (
    KINDS,
    VERSION,
    Certificate,
    CertifiedKind,
    Kind,
    Mixture,
    Objective,
    SingleCallerFigures,
    Step,
    machine,
)
from antiphon.certify.clients import OBJECTIVES, Turn, Work
from antiphon.certify.recordings import read_recordings
from antiphon.certify.search import EDGE_TURNS, SEARCH_TURNS, SessionSearch, Trial, is_lost, percentile
from antiphon.certify.single_caller import SINGLE_CALLER_KINDS, SingleCaller, lines_of
from antiphon.errors import RemoteError

# Time limit of a step in seconds, without its warm-up: during the search, and at the edge. One session takes about six
# seconds for a turn.
STEP_S, EDGE_S = 60.0, 240.0
# A step at the edge ends early only if HOPELESS times the allowed number of turns are over the objective.
HOPELESS = 3
# When a certificate is checked, a delay may exceed its objective by this fraction.
TOLERANCE = 0.1
# The clients of a step start within SPREAD_S. After that, they have WARM_S until their first counted turns.
SPREAD_S, WARM_S = 4.0, 20.0
# Length of one step in seconds, if a number of sessions is held for minutes.
CHECK_S = 300.0
# The largest number of sessions in a search, and the first number.
MOST_SESSIONS, FIRST_SESSIONS = 1024, 4
# The loads of mixtures, in the order in which they are tried.
MIXED_LOADS = (1.0, 0.85, 0.7, 0.55, 0.4)
# Time limit in seconds for a server that is started here to become ready.
READY_S = 600.0
# Environment of a server that admits every session.
UNBOUNDED = {
    # Serves only the local clients, whatever the environment says.
    "ANTIPHON_HOST": "127.0.0.1",
    "ANTIPHON_API_KEYS": "",
    "ANTIPHON_HEADROOM": "false",
    "ANTIPHON_MAX_SESSIONS": "4096",
    "ANTIPHON_SESSIONS_PER_KEY": "4096",
    "ANTIPHON_CONNECTIONS_PER_ADDRESS": "8192",
}
Say = Callable[[str], None]


@dataclass(slots=True)
class Counted:
    """The turns of one kind in a step. A failed turn counts as an infinite delay."""

    turns: list[Turn] = field(default_factory=list)
    ended_early: bool = False

    def over(self, objective: Objective) -> int:
        """Return the number of turns over an objective."""
        return sum(delay > objective.p95_s for delay in self.delays)

    @property
    def delays(self) -> list[float]:
        return [math.inf if t.delay_s is None else t.delay_s for t in self.turns]

    def step(self, sessions: int, objective: Objective) -> Step:
        """Summarize the turns as the result of a step with `sessions` sessions."""
        delays = self.delays
        p50, p95 = (percentile(delays, q) for q in (50, 95))
        met = bool(delays) and self.over(objective) <= objective.most_over(len(delays))
        finite = [None if v is None or math.isinf(v) else round(v, 3) for v in (p50, p95)]
        failed = sum(t.delay_s is None for t in self.turns)
        units, missed = sum(t.units for t in self.turns), sum(t.missed for t in self.turns)
        return Step(sessions, len(delays), failed, finite[0], finite[1], met, units, missed)


@asynccontextmanager
async def started_server(flags: Sequence[str], log: Path) -> AsyncIterator[str]:
    """Run `antiphon serve` with these flags on a free port while the block runs, and yield its URL.

    The server refuses no session. Its log goes to the file `log`. Raises RemoteError if it does not start.
    """
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "antiphon", "serve", "--port", "0", *flags,
            stdout=asyncio.subprocess.PIPE, stderr=file, env=_environment(),
        )  # fmt: skip
        try:
            try:
                async with asyncio.timeout(READY_S):
                    url = await _ready_url(process)
            except (TimeoutError, RemoteError):
                raise RemoteError(f"the server did not start{_last_line(log)}") from None
            yield url
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


def _environment() -> dict[str, str]:
    return {name: value for name, value in (os.environ | UNBOUNDED).items() if value or name not in UNBOUNDED}


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f": {lines[-1]} ({log})" if lines else f" ({log})"


async def _ready_url(process: asyncio.subprocess.Process) -> str:
    assert process.stdout
    async for line in process.stdout:
        words = line.decode(errors="replace").split()
        if words[:4] == ["antiphon", "is", "ready", "at"]:
            # The rest of the server's output is not read, because it is too small to fill the pipe.
            return words[4]
    raise RemoteError("the server did not start")


class Certifier:
    """Measures one server.

    `url` and `key` are the server's address and API key. `data` is the folder of recordings. `minutes` is the time
    limit for the search of each kind; 0 skips the search. `say` is called with a line for each step when it ends.
    `turn_detection` is the setting for the conversations of the single caller.
    """

    def __init__(
        self,
        url: str,
        key: str,
        data: Path,
        *,
        minutes: float,
        say: Say,
        objectives: Mapping[Kind, Objective] = OBJECTIVES,
        turn_detection: str = "server_vad",
    ) -> None:
        self._turn_detection = turn_detection
        self._url, self._key, self._data, self.say = url, key, data, say
        self.minutes, self._objectives, self._seed = minutes, objectives, 0

    async def models(self) -> tuple[str, ...]:
        """Return the ids of the server's models from /v1/models; empty if the request fails."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            async with httpx.AsyncClient(headers=headers, timeout=10.0, trust_env=False) as client:
                found = (await client.get(f"{self._url.replace('ws', 'http', 1)}/v1/models")).raise_for_status().json()
                return tuple(str(model["id"]) for model in found["data"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return ()

    async def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds to measure unless others are chosen.

        All conversations of a native model are of one kind. A server without a native model is measured in all other
        kinds, since a server of another project does not tell what it serves.
        """
        try:
            async with httpx.AsyncClient(timeout=10.0, trust_env=False) as client:
                serves = (await client.get(f"{self._url.replace('ws', 'http', 1)}/ready")).json().get("serves", ())
        except (httpx.HTTPError, ValueError, AttributeError):
            serves = ()
        if "native" in serves:
            return tuple(kind for kind in KINDS if kind in serves and kind not in ("conversation", "duplex"))
        return tuple(kind for kind in KINDS if kind != "native")

    async def alone(self, kinds: Collection[Kind], turns: int) -> SingleCallerFigures:
        """Measure what a single caller gets, with `turns` turns of each sort."""
        recordings = read_recordings(self._data)
        caller = SingleCaller(self._url, self._key, recordings, turns, self.say, self._turn_detection)
        begun_s = time.monotonic()
        found = await caller.measure(kinds)
        minutes, seconds = divmod(round(time.monotonic() - begun_s), 60)
        self.say(f"one caller: done after {minutes} min {seconds} s")
        for name, value in lines_of(found):
            self.say(f"{name:<44}{value}")
        return found

    async def kind(self, kind: Kind, first: int = FIRST_SESSIONS, most: int = MOST_SESSIONS) -> CertifiedKind:
        """Search for the number of sessions of a kind that the server holds, until it is found or `minutes` are over.

        The certified number is always a number that was tried. The curve has the turns counted for each number.
        """
        objective, counted = self._objectives[kind], dict[int, Counted]()
        until_s, search = time.monotonic() + self.minutes * 60, SessionSearch(first, most, objective.allowed)
        while (trial := search.next()) is not None and time.monotonic() < until_s:
            found = (await self.trial({kind: trial.sessions}, trial))[kind]
            search.tell(trial, len(found.turns), found.over(objective), ended_early=found.ended_early)
            counted.setdefault(trial.sessions, Counted()).turns.extend(found.turns)
        curve = tuple(counted[number].step(number, objective) for number in sorted(counted))
        return CertifiedKind(search.held, objective, curve, bounded=search.held == most)

    async def held(self, kind: Kind, number: int) -> Step:
        """Hold `number` sessions for `minutes`, in steps of CHECK_S. If `minutes` is 0, run one step of EDGE_TURNS."""
        left_s, counted = self.minutes * 60, Counted()
        if not left_s:
            return (await self.step({kind: number}, Trial(number, EDGE_TURNS, is_edge=True)))[kind]
        while left_s > 0:
            for_good = Trial(number, 1 << 30, is_edge=True)
            counted.turns += (await self.trial({kind: number}, for_good, min(left_s, CHECK_S)))[kind].turns
            left_s -= CHECK_S
        return counted.step(number, self._objectives[kind])

    async def mixture(self, kinds: Mapping[Kind, CertifiedKind]) -> tuple[Mixture, ...]:
        """Find the load limit for mixed kinds. Tries MIXED_LOADS in order, with equal shares of all kinds."""
        held = {kind: found.sessions for kind, found in kinds.items() if found.sessions}
        tried = list[Mixture]()
        for load in MIXED_LOADS if len(held) > 1 else ():
            sessions = {kind: int(load * count / len(held)) for kind, count in held.items()}
            sessions = {kind: count for kind, count in sessions.items() if count}
            real = sum(count / held[kind] for kind, count in sessions.items())
            if len(sessions) < 2 or sessions in [m.sessions for m in tried]:
                continue
            steps = await self.step(sessions, Trial(sum(sessions.values()), SEARCH_TURNS, is_edge=False), 2 * STEP_S)
            met = all(step.met for step in steps.values())
            tried.append(
                Mixture(
                    {str(k): n for k, n in sessions.items()}, round(real, 3), {str(k): s for k, s in steps.items()}, met
                )
            )
            if met:
                break
        return tuple(tried)

    async def step(self, sessions: Mapping[Kind, int], trial: Trial, most_s: float = EDGE_S) -> dict[Kind, Step]:
        """Run one trial, and return its result for each kind."""
        found = await self.trial(sessions, trial, most_s)
        return {kind: found[kind].step(count, self._objectives[kind]) for kind, count in sessions.items()}

    async def trial(
        self, sessions: Mapping[Kind, int], trial: Trial, most_s: float | None = None
    ) -> dict[Kind, Counted]:
        """Run the sessions until each kind has the trial's number of turns, for at most `most_s` seconds.

        Counts at least as many turns as sessions, because quick turns end first. The trial ends early if an objective
        can no longer be met; at the edge, only if the objective is missed by far.
        """
        most_s = most_s or (EDGE_S if trial.is_edge else STEP_S)
        counted = {kind: Counted() for kind in sessions}
        self._seed += 1000
        spread_s = min(SPREAD_S, 0.5 * sum(sessions.values()))
        work = Work(self._url, self._key, str(self._data), dict(sessions), spread_s, self._seed)
        async with _working(work) as lines:
            with suppress(TimeoutError):
                async with asyncio.timeout(WARM_S + spread_s + most_s):
                    wanted = {kind: max(trial.turns, n) for kind, n in sessions.items()}
                    await self._count(lines, counted, wanted, HOPELESS if trial.is_edge else 1)
        for kind, count in sessions.items():
            self.say(summary(kind, counted[kind].step(count, self._objectives[kind]), counted[kind].turns))
        return counted

    async def _count(
        self, lines: AsyncIterator[bytes], counted: Mapping[Kind, Counted], wanted: Mapping[Kind, int], times: int
    ) -> None:
        async for line in lines:
            turn = msgspec.json.decode(line, type=Turn)
            for kind, of_kind in counted.items():
                if kind == turn.kind:
                    of_kind.turns.append(turn)
            if all(len(c.turns) >= wanted[kind] for kind, c in counted.items()):
                return
            for kind, c in counted.items():
                c.ended_early = is_lost(c.delays, self._objectives[kind], wanted[kind], times)
            if any(c.ended_early for c in counted.values()):
                return


@asynccontextmanager
async def _working(work: Work) -> AsyncIterator[AsyncIterator[bytes]]:
    """Run a process of clients while the block runs, and yield the lines that it writes.

    Raises RemoteError if the process ends by itself.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "antiphon.certify.clients",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    stdout = process.stdout

    async def lines() -> AsyncIterator[bytes]:
        async for line in stdout:
            yield line
        raise RemoteError("the process of clients has ended")

    process.stdin.write(msgspec.json.encode(work) + b"\n")
    await process.stdin.drain()
    try:
        yield lines()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def summary(kind: str, step: Step, turns: Sequence[Turn]) -> str:
    """Format a step as one line, with the reasons of failed turns."""
    spread = " / ".join("-" if v is None else f"{v:.2f}" for v in (step.p50_s, step.p95_s))
    sessions = f"{step.sessions} session{'s' if step.sessions > 1 else ''}"
    units = f", {step.missed} of {step.units} units missed" if step.units else ""
    line = f"{kind:<13}{sessions:<14}{'held' if step.met else 'not held':<10}p50 / p95 {spread} s, {step.turns} turns"
    reasons = sorted({t.failed for t in turns if t.failed})
    return line + units + (f", {step.failed} failed: {'; '.join(reasons[:2])}" if reasons else "")


def plan(kinds: Sequence[Kind], sole_kinds: Sequence[Kind], minutes: float, turns: int, *, mixed: bool) -> str:
    """Describe the measurements in their order, with the time limit of each."""
    parts = []
    if sole_kinds:
        parts.append(
            f"one caller alone ({turns} turns of each sort, some minutes for {' and '.join(sole_kinds)}; "
            "--turns-alone 0 leaves it out)"
        )
    if minutes > 0:
        each = " each" if len(kinds) > 1 else ""
        parts.append(f"{', '.join(kinds)} (at most {minutes:g} min{each})")
        if mixed and len(kinds) > 1:
            parts.append("a mixture")
    return f"to be measured: {', then '.join(parts) or 'nothing'}"


async def certify(
    certifier: Certifier,
    kinds: Sequence[Kind],
    *,
    flags: Sequence[str],
    url: str,
    mixed: bool,
    turns_alone: int,
) -> Certificate:
    """Measure what a single caller gets, then each kind, then their mixture.

    `url` is the address of a server that was already running, or "". `turns_alone` is the number of turns of each sort
    of the single caller; 0 skips it.
    """
    sole_kinds = [kind for kind in kinds if turns_alone and kind in SINGLE_CALLER_KINDS]
    certifier.say(plan(kinds, sole_kinds, certifier.minutes, turns_alone, mixed=mixed))
    alone = await certifier.alone(kinds, turns_alone) if sole_kinds else None
    found = {kind: await certifier.kind(kind) for kind in kinds} if certifier.minutes > 0 else {}
    mixtures = await certifier.mixture(found) if mixed else ()
    best = max((m.load for m in mixtures if m.met), default=None)
    return Certificate(
        VERSION,
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        {} if url else machine(),
        await certifier.models(),
        {"flags": list(flags)},
        {str(kind): one for kind, one in found.items()},
        # If the server held no mixture, the limit is half the smallest load that was tried.
        mixed=min(1.0, best) if best else min(m.load for m in mixtures) / 2 if mixtures else None,
        mixtures=mixtures,
        url=url,
        alone=alone,
    )
