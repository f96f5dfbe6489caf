"""Counts the server's Python calls on the path of one event, the modules they are in, and the moves between modules.

Four paths run in the application of the wire traces (`tests/traces`). It runs in memory, with scripted models and a
virtual clock, so every machine counts the same.

- append: from the client's append of 100 ms that makes the first delta of the transcript due, to this delta.
- text: from the first of three text chunks that make one sentence, to the first audio of the speech stream.
- onset: from the segmenter's chunk in which speech over a response begins (FIRST), to the function of the echo guard
  that ends the response's audio (LAST), after its playback was stopped.
- resume: from the client's connection to another host, after its own host was killed, to the `session.resumed` frame.

Each start of a function, method, lambda or comprehension counts (`sys.setprofile`) if its source is in `src/antiphon`.
Resumed generators and coroutines, generated methods (a dataclass's `__init__`), C functions and other packages do not
count. *modules* is the number of files of these functions. *moves* is the number of consecutive calls that are in
different files. Each path runs twice. The second run counts, because it imports nothing.

Run `PYTHONPATH=src .venv/bin/python bench/event_path.py [--list append] [--save]` in the root of a worktree. `--list
PATH` also prints the calls in order. `--save` writes bench/results/event-path.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType

ROOT = Path.cwd()
SOURCE = f"{ROOT}/src/antiphon/"
sys.path.insert(0, str(ROOT))

from tests.traces import clock  # noqa: E402

# Has to come before the import of the server; see clock.py.
clock.install()

from bench.common import machine, save, table  # noqa: E402
from tests.traces import harness  # noqa: E402
from tests.traces.harness import Frame, Socket, Stage, Trace, b64, pcm16, pieces, scenario  # noqa: E402
from tests.traces.scenarios.conversation import APPEND, DONE, listening, opened, write  # noqa: E402
from tests.traces.scenarios.resume import come_back  # noqa: E402

# The functions at which the path of an onset begins and ends.
FIRST, LAST = "Segmenter.feed", "EchoGuard.cut_reference"


class Counter:
    """Counts calls from `begin` to the first message of the server for which `ends` is true."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []  # The file and the function of each call.
        self.ends: Callable[[Frame], bool] | None = None  # None after the end.

    def begin(self, ends: Callable[[Frame], bool]) -> None:
        """Count from here on, and drop the earlier count."""
        self.calls, self.ends = [], ends
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # The argument of the RESUME instruction is 0 at the start of a function, not when it continues.
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_code[frame.f_lasti + 1] & 3:
            self.calls.append((code.co_filename.removeprefix(SOURCE), code.co_qualname))


COUNTER = Counter()


class Watched(Socket):
    """A client's socket that stops the count."""

    async def asgi_send(self, message: Frame) -> None:
        if COUNTER.ends and COUNTER.ends(message):
            sys.setprofile(None)
            COUNTER.ends = None
        await super().asgi_send(message)


harness.Socket = Watched  # type: ignore[misc]


def is_event(kind: str) -> Callable[[Frame], bool]:
    """Return whether a message is an event of this type."""
    return lambda message: bool(message.get("text")) and json.loads(message["text"])["type"] == kind


async def speak_until(stage: Stage, socket: Socket, kind: str) -> None:
    """Speak until the server sends an event of this type. Count from the append that makes the event due."""
    for piece in pieces(pcm16("what is the time please tell me"), 4800):
        COUNTER.begin(is_event(kind))
        await socket.say(APPEND, audio=b64(piece))
        await stage.wait(0.1)
        if COUNTER.ends is None:
            return


@scenario()
async def append(stage: Stage) -> None:
    socket = await stage.connect("/v1/realtime?intent=transcription&model=gpt-4o-transcribe")
    await socket.until("session.created")
    await speak_until(stage, socket, "conversation.item.input_audio_transcription.delta")


@scenario()
async def text(stage: Stage) -> None:
    socket = await stage.connect("/v1/audio/speech/stream")
    await socket.say("session.config", response_format="pcm", stream_audio=True)
    COUNTER.begin(lambda message: bool(message.get("bytes")))
    for chunk in ("Once upon ", "a time there ", "was a king. "):
        await socket.say("input.text", text=chunk)
    await stage.wait(1)


@scenario()
async def onset(stage: Stage) -> None:
    socket = await opened(stage, audio=listening())
    await write(socket, "tell me a story")
    await socket.say("response.create")
    await socket.until("response.output_audio.delta", count=3)
    await speak_until(stage, socket, DONE)


@scenario()
async def resume(stage: Stage) -> None:
    socket = await stage.connect("/v1/realtime?resume=1")
    created = await socket.until("session.created")
    await write(socket, "hello")
    await socket.say("response.create")
    last = (await socket.until(DONE))["server_event_seq"]
    await stage.kill()
    COUNTER.begin(is_event("session.resumed"))
    await come_back(stage, created, last)


def played(way: str) -> list[tuple[str, str]]:
    """Return the calls on a path."""
    for _ in range(2):
        clock.run(harness.SCENARIOS[way](Trace()))
        assert COUNTER.ends is None, f"{way}: the frame that ends the way was not sent"
    names = [function for _, function in COUNTER.calls]
    return COUNTER.calls[names.index(FIRST) : names.index(LAST) + 1] if way == "onset" else COUNTER.calls


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the Python calls on the way of an event.")
    parser.add_argument("--list", metavar="WAY", help="also print the calls of this way, in their order")
    parser.add_argument("--save", action="store_true", help="write bench/results/event-path.json")
    args = parser.parse_args()
    figures = {}
    for way in ("append", "text", "onset", "resume"):
        calls = played(way)
        moves = sum(a[0] != b[0] for a, b in pairwise(calls))
        figures[way] = {"calls": len(calls), "modules": len({file for file, _ in calls}), "moves": moves}
        if args.list == way:
            print("\n".join(f"{file}: {function}" for file, function in calls))
    table("the way of an event", ("way", "calls", "modules", "moves"), [(w, *f.values()) for w, f in figures.items()])
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    document = {"machine": machine(), "commit": commit, "ways": figures}
    print(json.dumps(document))
    if args.save:
        print(save("event-path", document))


if __name__ == "__main__":
    main()
