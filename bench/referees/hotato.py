"""hotato (PyPI) as the referee: its scripted caller holds the call, and its scorer measures each line.

The package is unmodified and runs in an environment of its own (bench/peers/hotato). hotato's caller carries no media:
it sends lines to a session server over its protocol `hotato.caller-session.v1`. That server is here. It plays the lines
to the server that is measured, with the benchmarks' own client, plays and records both sides, and reports when the
server begins and ends to speak. hotato then scores the two-channel recording, one line at a time.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import HERE
from bench.driver import CHUNK_S, STEP, WIRE_HZ, Caller
from bench.referees.calls import Line
from bench.referees.figures import Heard
from bench.referees.servers import Target, environment, last_line
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_socket

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import from_pcm16, to_pcm16

DRIVER = HERE / "peers" / "hotato" / "drive.py"
PROTOCOL, SUBPROTOCOL = "hotato.caller-session.v1", "hotato.caller.v1"
OPERATIONS = {
    "send_text": "UNSUPPORTED", "send_audio": "SUPPORTED", "receive": "SUPPORTED", "send_dtmf": "UNSUPPORTED",
    "wait": "SUPPORTED", "silence": "SUPPORTED", "impairment": "UNSUPPORTED", "observe_transfer": "UNSUPPORTED",
    "hangup": "SUPPORTED",
}  # fmt: skip
# Bytes before the samples in a binary message: a magic word and the command's number.
HEADER_BYTES = 8
# The level from which a step of the loudspeaker is speech, and the seconds of silence after which speech has ended.
SPEECH_DBFS, ENDED_S = -45.0, 1.0
# Seconds without a report, after which hotato gets a timeout.
PATIENCE_S = 25.0
# Seconds before a line in the recording that hotato scores, and the longest call.
LEAD_S, CALL_S = 2.0, 300.0


class RecordedCaller(Caller):
    """A Caller whose both sides are recorded, in steps of CHUNK_S: `said` and `heard`."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.url, {}, session=target.session)
        self.said: list[bytes] = []

    async def append(self, pcm: bytes) -> None:
        """Send a step of the microphone."""
        self.said.append(pcm)
        await super().append(pcm)

    @property
    def is_saying(self) -> bool:
        """Return whether a recording is not said to its end."""
        return bool(self._queue)


def _is_speech(step: bytes) -> bool:
    level = float(np.mean(from_pcm16(step) ** 2))
    return 10 * np.log10(level + 1e-12) > SPEECH_DBFS


@dataclass(slots=True)
class SessionServer:
    """hotato's session server for one call. `began` has the step at which each line began, in order."""

    caller: RecordedCaller
    began: list[int]
    # A command is running that says a line. Nothing is reported meanwhile.
    is_saying: bool = False
    # Whether the server that is measured speaks, as last reported.
    is_reported: bool = False
    # The last step that was speech; negative before the first.
    spoke_at: int = -1_000_000

    async def serve(self, socket: ServerConnection) -> None:
        """Serve hotato's connection until it hangs up."""
        hello = json.loads(await socket.recv())
        ready = {"schema": PROTOCOL, "type": "ready", "nonce": hello["nonce"], "capabilities": OPERATIONS}
        await socket.send(json.dumps(ready | {"adapter": {"name": "antiphon-bench", "version": "1"}}))
        watching = asyncio.create_task(self._report(socket))
        try:
            async for message in socket:
                await self._obey(json.loads(message), socket)
        finally:
            watching.cancel()

    async def _obey(self, command: dict[str, Any], socket: ServerConnection) -> None:
        kind = command["command"]
        if kind == "send_audio":
            data = await socket.recv()
            assert isinstance(data, bytes)
            await self._say(from_pcm16(data[HEADER_BYTES:]))
        elif kind in ("wait", "silence"):
            await asyncio.sleep(command["payload"]["duration_ms"] / 1000)
        done = {"schema": PROTOCOL, "type": "command_result", "status": "completed", "receipt": {}}
        await socket.send(json.dumps(done | {"sequence": command["sequence"], "command": kind}))
        # What was reported before the line says nothing about the answer to it.
        self.is_saying = False

    async def _say(self, pcm: np.ndarray) -> None:
        self.is_saying, self.is_reported = True, False
        self.began.append(len(self.caller.said))
        await self.caller.say(pcm)
        while self.caller.is_saying:
            await asyncio.sleep(CHUNK_S)

    async def _report(self, socket: ServerConnection) -> None:
        seen, waits_s = 0, 0.0
        while True:
            await asyncio.sleep(CHUNK_S)
            waits_s = 0.0 if self.is_saying else waits_s + CHUNK_S
            for step in self.caller.heard[seen:]:
                seen += 1
                if _is_speech(step):
                    self.spoke_at = seen
            speaks = seen - self.spoke_at < ENDED_S / CHUNK_S
            if not self.is_saying and speaks != self.is_reported:
                self.is_reported = speaks
                event = {"kind": "lifecycle", "status": f"agent_speech_{'started' if speaks else 'ended'}"}
                await self._send_event(socket, event)
                waits_s = 0.0
            elif waits_s > PATIENCE_S:
                await self._send_event(socket, {"kind": "timeout"})
                waits_s = 0.0

    async def _send_event(self, socket: ServerConnection, event: dict[str, Any]) -> None:
        await socket.send(json.dumps({"schema": PROTOCOL, "type": "event", "event": event}))


def call(lines: Sequence[Line], target: Target, folder: Path) -> list[Heard]:
    """Hold one call, and return what hotato measured of each line. `folder` gets its files.

    Raises RuntimeError if hotato ends with an error.
    """
    caller, began = asyncio.run(_call(lines, target, folder))
    _drive("score", _slices(caller, began, lines, folder), folder / "scores.json", folder)
    scores = json.loads((folder / "scores.json").read_text())
    return [heard(line, score) for line, score in zip(lines, scores, strict=False)]


async def _call(lines: Sequence[Line], target: Target, folder: Path) -> tuple[RecordedCaller, list[int]]:
    script = []
    for line in lines:
        audio = folder / f"{line.name}.pcm"
        audio.write_bytes(to_pcm16(line.pcm))
        script.append(
            {"name": line.name, "audio": str(audio), "rate_hz": SAMPLE_RATE_HZ, "after": line.after}
            | {"delay_ms": line.delay_ms, "expected": line.expected}
        )
    began: list[int] = []
    async with RecordedCaller(target) as caller:
        sessions = SessionServer(caller, began)
        async with serve_socket(sessions.serve, "127.0.0.1", 0, subprotocols=[SUBPROTOCOL]) as server:
            url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await asyncio.to_thread(_drive, "call", script, folder / "package", folder, "--url", url)
    return caller, began


def _drive(what: str, lines: list[dict[str, Any]], out: Path, folder: Path, *arguments: str) -> None:
    """Run hotato's caller or scorer in its environment. Raises RuntimeError with its message if it fails."""
    given = folder / f"{what}.json"
    given.write_text(json.dumps(lines))
    command = [str(environment("hotato")), str(DRIVER), what, "--lines", str(given), "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_S + 30)
    if done.returncode:
        raise RuntimeError(f"hotato ended with {done.returncode}: {last_line(done.stderr or done.stdout)}")


def _slices(caller: RecordedCaller, began: Sequence[int], lines: Sequence[Line], folder: Path) -> list[dict[str, Any]]:
    """Write the recording of each line, up to the next line, and return hotato's facts about them."""
    sides = np.stack(
        [np.frombuffer(b"".join(side[: len(caller.said)]), "<i2") for side in (caller.said, caller.heard)], 1
    )
    out = []
    for k, (line, step) in enumerate(zip(lines, began, strict=False)):
        first = max(0, step - round(LEAD_S / CHUNK_S))
        last = began[k + 1] if k + 1 < len(began) else len(caller.said)
        path = folder / f"{line.name}.wav"
        with wave.open(str(path), "wb") as file:
            file.setparams((2, 2, WIRE_HZ, 0, "NONE", ""))
            file.writeframes(sides[first * STEP // 2 : last * STEP // 2].tobytes())
        onset_s = (step - first) * CHUNK_S
        end_s = onset_s + len(line.pcm) / SAMPLE_RATE_HZ
        out.append(
            {"recording": str(path), "onset_s": onset_s, "end_s": end_s, "expected": line.expected, "name": line.name}
        )
    return out


def heard(line: Line, score: dict[str, Any]) -> Heard:
    """Return what hotato measured of a line: its signals at the line's onset, and shortly before its end."""
    onset, end = score["onset"], score["end"]
    barge_in, latency = onset["signals"]["barge_in"], onset["signals"]["latency"]
    was_speaking = bool(onset["measurements"]["agent_talking_at_onset"])
    premature_s, gap_s = latency["premature_start_sec"], latency["response_gap_sec"]
    is_premature = bool(premature_s) and not was_speaking
    later = end["signals"]["latency"]["response_gap_sec"]
    goes_on = is_premature and not end["signals"]["barge_in"]["did_yield"]
    return Heard(
        line=line.name,
        expected=line.expected,
        recording=line.recording,
        was_speaking=was_speaking,
        is_answered=later is not None or goes_on,
        latency_s=-premature_s if is_premature else gap_s,
        is_talked_into=line.name == "pause" and is_premature,
        talked_over_s=0.0 if was_speaking else barge_in["talk_over_sec"],
        stop_s=barge_in["time_to_yield_sec"] if was_speaking else None,
        is_stopped=was_speaking and bool(barge_in["did_yield"]),
        transcript="",
    )
