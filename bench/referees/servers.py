"""The servers that a referee measures: this one in both modes of turn detection, and two peers of bench/peers.

Every server gets the same instructions and the same limit of an answer. Each runs alone, with its own process. A peer
that cannot be started is not an error: the result has the reason.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import HERE, server
from bench.driver import WIRE_HZ

INSTRUCTIONS = "You are a guide who talks. Answer with a story of three long sentences."
# Fifteen seconds of speech, so that there is time to speak over it.
ANSWER_TOKENS = 56
MODES = ("semantic_vad", "server_vad")
SPEECH_TO_SPEECH, LIVEKIT_AGENTS = "speech-to-speech", "livekit-agents"
PEERS = (SPEECH_TO_SPEECH, LIVEKIT_AGENTS)
NAMES = (*MODES, *PEERS)
# Seconds in which a peer has to start, with its models.
START_S = 240.0
LIVEKIT_PYTHON = HERE.parent / "tests" / "clients" / ".venv-livekit" / "bin" / "python"


class Unavailable(Exception):
    """A peer cannot be measured here. The message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running server: its URL (`http://HOST:PORT`), and the configuration of a session."""

    name: str
    url: str
    session: dict[str, Any]


def environment(peer: str) -> Path:
    """Return the Python of a peer's environment, which `bench/peers/setup.sh` makes first if there is none.

    Raises Unavailable if its packages cannot be installed.
    """
    command = [str(HERE / "peers" / "setup.sh"), peer]
    done = subprocess.run(command, env={"PYTHON": sys.executable} | os.environ, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"its packages cannot be installed: {last_line(done.stderr)}")
    return HERE / "peers" / f".venv-{peer}" / "bin" / "python"


def last_line(text: str) -> str:
    """Return the last line of a program's messages, which is the error of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def session(turn_detection: str | None) -> dict[str, Any]:
    """Return a session's configuration. None leaves the turn detection to the server."""
    audio: dict[str, Any] = {
        "input": {"format": {"type": "audio/pcm", "rate": WIRE_HZ}, "transcription": {"model": "whisper-1"}},
        "output": {"format": {"type": "audio/pcm", "rate": WIRE_HZ}},
    }
    if turn_detection:
        audio["input"]["turn_detection"] = {"type": turn_detection}
    return {"type": "realtime", "instructions": INSTRUCTIONS, "max_output_tokens": ANSWER_TOKENS, "audio": audio}


@contextmanager
def measured_server(name: str) -> Iterator[Target]:
    """Run one of NAMES, and stop it afterwards. Raises Unavailable if it is a peer that does not start."""
    with ExitStack() as stack:
        if name in MODES:
            own = stack.enter_context(server())
            yield Target(name, own.url, session(name))
        elif name == SPEECH_TO_SPEECH:
            command = [str(environment("speech_to_speech")), str(HERE / "peers" / "speech_to_speech" / "serve.py")]
            url = stack.enter_context(_running([*command, "--port", str(_free_port())]))
            yield Target(name, url, session("server_vad"))
        else:
            if not LIVEKIT_PYTHON.is_file():
                raise Unavailable("its environment is missing: python tests/clients/run.py livekit")
            parts = stack.enter_context(server())
            command = [str(LIVEKIT_PYTHON), str(HERE / "peers" / "livekit_agents" / "serve.py"), "--parts", parts.url]
            url = stack.enter_context(_running([*command, "--port", str(_free_port())]))
            yield Target(name, url, session("server_vad"))


def _free_port() -> int:
    """Return a port that is free, as are the two after it in all likelihood."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running(command: list[str]) -> Iterator[str]:
    """Run a peer until it prints its URL, yield that, and stop the peer with its children."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        late = threading.Timer(START_S, _kill, (process, signal.SIGKILL))
        late.start()
        try:
            assert process.stdout
            found = (re.search(r"ws://([^/\s]+)", line) for line in process.stdout)
            address = next((match[1] for match in found if match), None)
            late.cancel()
            if address is None:
                log.seek(0)
                raise Unavailable(f"it did not start within {START_S:g} s: {last_line(log.read())}")
            # Whatever it prints later would fill the pipe.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield f"http://{address}"
        finally:
            late.cancel()
            _kill(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            # Also ends children that have not ended with it.
            _kill(process, signal.SIGKILL)
            process.wait()


def _kill(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal the process and its children; nothing if they have ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
