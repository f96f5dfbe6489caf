"""Starts server processes by forking, because imports take 5 s of CPU time per process and the tests start a hundred.

The forking process has imported the servers' modules and has no threads. Each server is a fork of it. The fork gets its
own arguments, environment and files, and runs the module as `python -m` would. From then on it is an ordinary server.
`run` runs a command to its end in the same way. Tests of the command line itself start `python -m antiphon`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from subprocess import CompletedProcess
from types import TracebackType
from typing import IO, NoReturn

# What the tests' servers import. The order matters, because OpenMP reads variables when it loads, and the command line
# sets them.
PRELOADED = (
    "antiphon.cli.main",
    "antiphon.server.run",
    "antiphon.server.app",
    "antiphon.cli.preparation",
    "antiphon.adapters.causal_lm.model",
    "av",
    "ctranslate2",
    "antiphon.engine.grammar",
)
MAX_REQUEST_BYTES = 1 << 20


class ForkedProcess:
    """A forked process, with those methods of subprocess.Popen that tests use."""

    def __init__(self, pid: int, stdout: IO[str]) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stdout.close()
        self.wait()


class Forker:
    """A handle of the forking process."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forking", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
            )
        self._lock = threading.Lock()
        self._processes: dict[int, ForkedProcess] = {}
        self._started: list[int] = []
        self._has_started = threading.Semaphore(0)
        threading.Thread(target=self._read, name="forker", daemon=True).start()

    def start(self, arguments: Sequence[str], stderr: IO[str], env: dict[str, str]) -> ForkedProcess:
        """Start `python -m` with these arguments, whose standard output is a pipe."""
        ours, theirs = os.pipe()
        request = json.dumps({"arguments": list(arguments), "env": env, "cwd": os.getcwd()}).encode()
        with self._lock:
            socket.send_fds(self._control, [request], [theirs, stderr.fileno()])
            os.close(theirs)
            self._has_started.acquire()
            pid = self._started.pop()
            process = self._processes[pid]
        process.stdout = os.fdopen(ours)
        return process

    def _read(self) -> None:
        while message := self._control.recv(1000):
            pid, code = json.loads(message)
            if code is None:
                self._processes[pid] = ForkedProcess(pid, sys.stdout)
                self._started.append(pid)
                self._has_started.release()
            else:
                process = self._processes.pop(pid)
                process.returncode = code
                process.ended.set()


@cache
def forker() -> Forker:
    """Return this process's forker. It ends when this process ends."""
    return Forker()


def run(*arguments: str, env: Mapping[str, str] | None = None, timeout: float = 60.0) -> CompletedProcess[str]:
    """Run `python -m` with these arguments until it ends; after `timeout` seconds it is killed.

    `env` adds environment variables. The result has the exit status, and the text of both outputs.
    """
    with tempfile.TemporaryFile("w+") as stderr:
        process = forker().start(arguments, stderr, {**os.environ, **(env or {})})
        killer = threading.Timer(timeout, process.kill)
        killer.start()
        with process:
            stdout = process.stdout.read()
        killer.cancel()
        stderr.seek(0)
        return CompletedProcess(arguments, process.wait(), stdout, stderr.read())


def leave(status: int) -> NoReturn:
    """End this process at once. To free all modules, as the interpreter does, takes a forked process 0.3 s."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# --- in the process that forks ----------------------------------------------------------------------------------------


def _serve(control: socket.socket) -> list[str] | None:
    """Fork for each request.

    Returns the arguments in each fork, and None in the forking process after the last request.
    """
    ends, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    import select

    while True:
        readable, _, _ = select.select([control, ends], [], [])
        if ends in readable:
            os.read(ends, 1000)
            _tell_ended(control)
        if control not in readable:
            continue
        request, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 2)
        if not request:
            return None
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (ends, wakeup):
                os.close(fd)
            control.close()
            return _become(json.loads(request), *fds)
        for fd in fds:
            os.close(fd)
        control.send(json.dumps([pid, None]).encode())


def _tell_ended(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            control.send(json.dumps([found[0], os.waitstatus_to_exitcode(found[1])]).encode())


def _become(request: dict[str, object], stdout: int, stderr: int) -> list[str]:
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    sys.stdout, sys.stderr = (open(fd, "w", closefd=False, buffering=1) for fd in (1, 2))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["env"])  # type: ignore[call-overload]
    os.chdir(str(request["cwd"]))
    # Runs the code that hides or adds packages, as the interpreter does when it starts.
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    return list(request["arguments"])  # type: ignore[call-overload]


def main() -> None:
    """Import everything, fork for each request, and run the requested module in the fork."""
    for name in PRELOADED:
        import_module(name)
    # Otherwise each fork searches and copies these objects when it collects garbage, which takes a second.
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, threading.enumerate()
    arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    if arguments is not None:
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
