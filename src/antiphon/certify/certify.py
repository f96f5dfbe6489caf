"""Measures how many sessions a server holds: `antiphon certify`. Steps of clients in a process of their own, and a
search over their number for each kind; then a mixture.
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

# A step has so many seconds at most for its turns, beside those in which it warms up: while the number is searched, and
# where it decides. A turn is some six seconds of one session.
STEP_S, EDGE_S = 60.0, 240.0
# A step at the edge ends early only with so many times the turns over the objective that it may have.
HOPELESS = 3
# A number that is tried once more may be over its objective by this part of it.
TOLERANCE = 0.1
# The clients of a step begin over this many seconds, and so much longer is waited for their first counted turns.
SPREAD_S, WARM_S = 4.0, 20.0
# How long a number is held at a time where it is held for minutes.
CHECK_S = 300.0
# No kind is searched further, and where its search begins.
MOST_SESSIONS, FIRST_SESSIONS = 1024, 4
# The loads of mixtures, in the order in which they are tried.
MIXED_LOADS = (1.0, 0.85, 0.7, 0.55, 0.4)
# A server that is started here has so long to be ready.
READY_S = 600.0
# So that it admits whatever comes.
UNBOUNDED = {
    # For its clients alone, whatever the environment says of a server for others.
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
    """The turns of one kind in a step. A turn that failed counts as one whose delay has no end."""

    turns: list[Turn] = field(default_factory=list)
    ended_early: bool = False

    def over(self, objective: Objective) -> int:
        """How many turns are over an objective."""
        return sum(delay > objective.p95_s for delay in self.delays)

    @property
    def delays(self) -> list[float]:
        return [math.inf if t.delay_s is None else t.delay_s for t in self.turns]

    def step(self, sessions: int, objective: Objective) -> Step:
        """What they say of so many sessions."""
        delays = self.delays
        p50, p95 = (percentile(delays, q) for q in (50, 95))
        met = p95 is not None and p95 <= objective.p95_s
        finite = [None if v is None or math.isinf(v) else round(v, 3) for v in (p50, p95)]
        failed = sum(t.delay_s is None for t in self.turns)
        return Step(sessions, len(delays), failed, finite[0], finite[1], met)


@asynccontextmanager
async def started_server(flags: Sequence[str], log: Path) -> AsyncIterator[str]:
    """Run `antiphon serve` with these flags on a free port, until it is left, and yield its URL. It refuses nobody.

    Raises RemoteError where it does not start; what it logs is in the file `log`.
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
            # Whatever it prints from here on is not read: it prints next to nothing.
            return words[4]
    raise RemoteError("the server did not start")


class Certifier:
    """Measures one server. `url`, `key`: where and how it is reached. `data`: the folder of recordings.

    `minutes`: for each kind's search; 0: nothing is searched. `say`: told of each step as it ends. `turn_detection`: of
    the one caller's conversations.
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
        """The server's models, by /v1/models; none where it does not tell."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            async with httpx.AsyncClient(headers=headers, timeout=10.0, trust_env=False) as client:
                found = (await client.get(f"{self._url.replace('ws', 'http', 1)}/v1/models")).raise_for_status().json()
                return tuple(str(model["id"]) for model in found["data"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return ()

    async def alone(self, kinds: Collection[Kind], turns: int) -> SingleCallerFigures:
        """Measure what one caller of these kinds gets, in so many turns of each sort."""
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
        """Search how many sessions of a kind are held, until that is known or the time is over.

        Only a number that was tried is certified; the curve says by how many turns of each number.
        """
        until_s, search = time.monotonic() + self.minutes * 60, SessionSearch(first, most)
        objective, counted = self._objectives[kind], dict[int, Counted]()
        while (trial := search.next()) is not None and time.monotonic() < until_s:
            found = (await self.trial({kind: trial.sessions}, trial))[kind]
            search.tell(trial, len(found.turns), found.over(objective), ended_early=found.ended_early)
            counted.setdefault(trial.sessions, Counted()).turns.extend(found.turns)
        curve = tuple(counted[number].step(number, objective) for number in sorted(counted))
        return CertifiedKind(search.held, objective, curve, bounded=search.held == most)

    async def held(self, kind: Kind, number: int) -> Step:
        """Hold so many sessions of a kind for `minutes`, in steps of CHECK_S, or for one step of EDGE_TURNS."""
        left_s, counted = self.minutes * 60, Counted()
        if not left_s:
            return (await self.step({kind: number}, Trial(number, EDGE_TURNS, is_edge=True)))[kind]
        while left_s > 0:
            for_good = Trial(number, 1 << 30, is_edge=True)
            counted.turns += (await self.trial({kind: number}, for_good, min(left_s, CHECK_S)))[kind].turns
            left_s -= CHECK_S
        return counted.step(number, self._objectives[kind])

    async def mixture(self, kinds: Mapping[Kind, CertifiedKind]) -> tuple[Mixture, ...]:
        """Find the load up to which kinds may be mixed: equal parts of each, of loads that become less."""
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
        """Do one trial, and return what it says of each kind."""
        found = await self.trial(sessions, trial, most_s)
        return {kind: found[kind].step(count, self._objectives[kind]) for kind, count in sessions.items()}

    async def trial(
        self, sessions: Mapping[Kind, int], trial: Trial, most_s: float | None = None
    ) -> dict[Kind, Counted]:
        """Let so many sessions of each kind take the trial's turns, of each, in at most `most_s` seconds.

        Each session takes one at least: those that come first are the quick ones. A trial ends before where an
        objective cannot be met any more; one at the edge, where it is missed by far.
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
            self.say(told(kind, counted[kind].step(count, self._objectives[kind]), counted[kind].turns))
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
                c.ended_early = is_lost(c.delays, self._objectives[kind].p95_s, wanted[kind], times)
            if any(c.ended_early for c in counted.values()):
                return


@asynccontextmanager
async def _working(work: Work) -> AsyncIterator[AsyncIterator[bytes]]:
    """Run a process of clients while the block runs, and yield the lines that it writes. Raises RemoteError where it
    ends by itself.
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


def told(kind: str, step: Step, turns: Sequence[Turn]) -> str:
    """A step as a line: what was measured, and why turns failed."""
    spread = " / ".join("-" if v is None else f"{v:.2f}" for v in (step.p50_s, step.p95_s))
    sessions = f"{step.sessions} session{'s' if step.sessions > 1 else ''}"
    line = f"{kind:<13}{sessions:<14}{'held' if step.met else 'not held':<10}p50 / p95 {spread} s, {step.turns} turns"
    reasons = sorted({t.failed for t in turns if t.failed})
    return line + (f", {step.failed} failed: {'; '.join(reasons[:2])}" if reasons else "")


def plan(kinds: Sequence[Kind], sole_kinds: Sequence[Kind], minutes: float, turns: int, *, mixed: bool) -> str:
    """What will be measured, in its order, with what bounds its time."""
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
    """Measure what one caller gets, these kinds one after another, then their mixture.

    `url`: of a server that was not started for it. `turns_alone`: of one caller, of each kind of turn; 0: none.
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
        # Less than the least that was tried and did not hold.
        mixed=min(1.0, best) if best else min(m.load for m in mixtures) / 2 if mixtures else None,
        mixtures=mixtures,
        url=url,
        alone=alone,
    )
