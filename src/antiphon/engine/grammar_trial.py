"""Compiles clients' grammars in a separate process on trial, before any other code compiles them.

A grammar library is native code, which cannot be stopped from within its own process. The intersection of a few
patterns can take gigabytes and hours. Therefore each grammar is first compiled in a forked child of a small process
(`python -m` this module). The kernel ends the child after `GrammarLimits.cpu_s` of processor time or at
`GrammarLimits.memory_mb` of memory. A grammar that passes this trial takes no more time and memory in the server.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from antiphon.engine.api import Grammar
from antiphon.errors import EngineError, GrammarError

# The maximum number of results that are cached by the grammar's digest. Similar sessions send the same grammars.
MAX_REMEMBERED = 1024
# A child that gets no processor time is killed after STARVED times its limit of processor time, plus a second.
STARVED = 10
# A token given by its id. A trial's tokenizer does not have that token, so the trial uses token 257, which it has.
_TOKEN_BY_ID, _ANY_TOKEN = re.compile(r"<\[\d+\]>"), "<[257]>"


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """The limits for the grammars of one message: processor time in seconds, and memory in MiB, to compile them."""

    cpu_s: float = 2.0
    memory_mb: int = 512


class TriedGrammar(NamedTuple):
    """The result of a trial.

    `fault`: why no engine can enforce the grammar, in one line; "" if one can. `memory_mb`: the memory that compiling
    it takes, in MiB.
    """

    fault: str
    memory_mb: float


class GrammarTrials:
    """Tries grammars. May be used from any thread; threads that call it at the same time use separate processes.

    Processes start on demand. `limits`: the limits of later trials.
    """

    def __init__(self, limits: GrammarLimits | None = None) -> None:
        self.limits = limits or GrammarLimits()
        # Bound: MAX_REMEMBERED; the oldest is dropped.
        self._remembered: dict[bytes, TriedGrammar] = {}
        # Bound: one for each thread that asks at the same time. The grammar lane has few threads.
        self._idle: list[_TrialProcess] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start a process ahead of the first trial, without waiting for it. A no-op if one exists."""
        with self._lock:
            if not self._idle:
                self._idle.append(_TrialProcess())

    def close(self) -> None:
        """End the idle processes. A later trial starts another one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    @property
    def pids(self) -> list[int]:
        """The ids of the idle processes."""
        with self._lock:
            return [process.pid for process in self._idle]

    def check(self, grammar: Grammar) -> float:
        """Return the memory that compiling the grammar takes, in MiB. Raises the errors of `check_all`."""
        return self.check_all([grammar])[0]

    def check_all(self, grammars: Sequence[Grammar]) -> list[float]:
        """Return the memory that compiling each grammar takes, in MiB. All of them together share the limits.

        Returns at once for grammars that were tried recently. Otherwise blocks for milliseconds, and for at most
        GrammarLimits.cpu_s if a processor is free. Raises GrammarError, with the grammar's `index`, if no engine can
        enforce a grammar, whatever its tokenizer, or if it exceeds the limits. Raises EngineError if no process starts.
        """
        digests = [_digest(grammar) for grammar in grammars]
        with self._lock:
            known = {digest: self._remembered[digest] for digest in digests if digest in self._remembered}
        new = {d: g for d, g in zip(digests, grammars, strict=True) if d not in known}
        if new:
            found = dict(zip(new, self._try(list(new.values())), strict=False))
            known |= found
            with self._lock:
                self._remembered |= found
                for digest in list(self._remembered)[: max(0, len(self._remembered) - MAX_REMEMBERED)]:
                    del self._remembered[digest]
        for i, digest in enumerate(digests):
            if known[digest].fault:
                raise GrammarError(known[digest].fault, i)
        return [known[digest].memory_mb for digest in digests]

    def _try(self, grammars: Sequence[Grammar]) -> list[TriedGrammar]:
        """The results of the grammars, up to the first with a fault."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process:
            # The process may have ended meanwhile, for example because the machine ran out of memory.
            with suppress(OSError, ValueError):
                return self._attempt(process, grammars)
        try:
            return self._attempt(_TrialProcess(), grammars)
        except (OSError, ValueError) as error:
            raise EngineError(f"the process that tries grammars failed: {error}") from error

    def _attempt(self, process: _TrialProcess, grammars: Sequence[Grammar]) -> list[TriedGrammar]:
        try:
            found = process.attempt(grammars, self.limits)
        except BaseException:
            process.end()
            raise
        if process.is_alive:
            with self._lock:
                self._idle.append(process)
        return found


class _TrialProcess:
    """A process whose children try grammars, one batch after another. Used by one thread at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", __name__]
        # The process runs in its own process session, so that a Ctrl-C in the server's terminal does not reach it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.pid, self.is_alive = self._process.pid, True

    def attempt(self, grammars: Sequence[Grammar], limits: GrammarLimits) -> list[TriedGrammar]:
        """Return the results, up to the first with a fault. Raises OSError or ValueError if the process ended."""
        assert self._process.stdin
        asked = {
            "cpu_s": limits.cpu_s,
            "memory_mb": limits.memory_mb,
            "grammars": [[g.kind, _TOKEN_BY_ID.sub(_ANY_TOKEN, g.text)] for g in grammars],
        }
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        line = self._line(STARVED * limits.cpu_s + 1.0)
        if line is None:
            self.end()
            return [TriedGrammar(f"compiling it takes more than {limits.cpu_s:g} s", 0.0)]
        return [TriedGrammar(fault, memory_mb) for fault, memory_mb in json.loads(line)]

    def end(self) -> None:
        """Kill the process and its children, and wait for it."""
        self.is_alive = False
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(BrokenPipeError):
            self._process.communicate()

    def _line(self, timeout_s: float) -> bytes | None:
        """The process's next line; None if it does not arrive in time. Raises OSError if the process ended."""
        assert self._process.stdout
        out, line, until_s = self._process.stdout, b"", time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            if not select.select([out], [], [], max(0.0, until_s - time.monotonic()))[0]:
                return None
            piece = os.read(out.fileno(), 1 << 16)
            if not piece:
                raise OSError("the process ended")
            line += piece
        return line


# The trials of this process. A server sets their limits when it starts.
TRIALS = GrammarTrials()
atexit.register(TRIALS.close)


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind}\n{grammar.text}".encode(errors="surrogatepass")).digest()


# --- the process that tries ------------------------------------------------------------------------------------------


def _serve() -> None:
    """Answer batches, one line each, until the server closes the pipe or ends."""
    # Imported once, before the first fork, so that each child can begin within milliseconds.
    from antiphon.engine.grammar import fault_of

    fault_of(Grammar("json_schema", "{}"))
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        limits = GrammarLimits(asked["cpu_s"], asked["memory_mb"])
        grammars = [Grammar(kind, text) for kind, text in asked["grammars"]]
        sys.stdout.buffer.write(json.dumps(_tried(grammars, limits)).encode() + b"\n")
        sys.stdout.buffer.flush()


def _tried(grammars: Sequence[Grammar], limits: GrammarLimits) -> list[tuple[str, float]]:
    """Try the grammars in a child. Returns each one's fault and memory, up to the first with a fault."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _try_here(grammars, limits, writing)
    os.close(writing)
    with open(reading, "rb") as results:
        lines = results.read().splitlines()
    status = os.waitpid(child, 0)[1]
    found: list[tuple[str, float]] = [(fault, memory_mb) for fault, memory_mb in map(json.loads, lines)]
    if status:
        timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU)
        limit = f"{limits.cpu_s:g} s" if timed_out else f"{limits.memory_mb} MB"
        found.append((f"compiling it takes more than {limit}", 0.0))
    return found


def _try_here(grammars: Sequence[Grammar], limits: GrammarLimits, writing: int) -> None:
    """Write a line for each grammar, up to the first with a fault, and end this process."""
    from antiphon.engine.grammar import fault_of

    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if (size := _address_space()) is not None:
            limit = size + (limits.memory_mb << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        # The timer's signal ends the process. It counts processor time, so a busy machine refuses no grammar.
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        before = _peak_mb()
        for grammar in grammars:
            fault, peak = fault_of(grammar), _peak_mb()
            os.write(writing, json.dumps([fault, peak - before]).encode() + b"\n")
            before = peak
            if fault:
                break
        status = 0
    finally:
        os._exit(status)


def _address_space() -> int | None:
    """The size of this process's address space in bytes; None if the system neither reports nor limits it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def _peak_mb() -> float:
    """This process's peak memory, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1 << 20)


if __name__ == "__main__":
    # A Ctrl-C in the terminal is meant for the server, which closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve()
