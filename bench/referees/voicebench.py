"""voicebench (PyPI) as the referee: it plays a scripted call, records both sides, and measures them by their levels.

The package is unmodified and runs in an environment of its own (bench/peers/voicebench). Added is only an adapter that
speaks the OpenAI Realtime API. Its detector of the server's speech joins pauses of less than a second, because a pause
between two sentences would else count as the end of an answer.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common import HERE
from bench.driver import CONVERSATION, WIRE_HZ
from bench.referees.calls import ANSWER_MS, Line
from bench.referees.figures import Heard
from bench.referees.servers import Target, environment, last_line

ADAPTER = HERE / "peers" / "voicebench"
SENTENCE_GAP_MS = 1000
# Milliseconds in which an interrupted answer has to stop, and in which a sound stops it.
STOP_MS, SOUND_MS = 3_000, 1_500
# Milliseconds of the longest call.
CALL_MS = 240_000


def scenario(lines: Sequence[Line], target: Target, folder: Path) -> Path:
    """Write the recordings of a call and its scenario into a folder, which gets its events, too. Return its path.

    A scenario is YAML, of which JSON is a part.
    """
    turns = [
        {
            "id": line.name,
            "audio": {"file": str(line.write(folder))},
            "start": {"after": line.after, "delay_ms": line.delay_ms, "timeout_ms": line.patience_ms},
            "expect": line.expected,
            "response_timeout_ms": ANSWER_MS,
            "max_stop_ms": STOP_MS if line.expected == "stop" else SOUND_MS,
        }
        | ({"text": line.text} if line.text else {})
        for line in lines
    ]
    document = {
        "name": target.name,
        "sample_rate": WIRE_HZ,
        "frame_ms": 20,
        # By default a call ends 3 s after its last line, and the answer to that may come later.
        "tail_ms": ANSWER_MS,
        "max_duration_ms": CALL_MS,
        "vad": {"agent": {"min_silence_ms": SENTENCE_GAP_MS}},
        "adapter": {
            "type": "realtime:RealtimeAdapter",
            "options": {
                "url": target.url.replace("http", "ws", 1) + CONVERSATION,
                "configuration": target.session,
                "log": str(folder / "events.jsonl"),
            },
        },
        "turns": turns,
    }
    path = folder / "scenario.yaml"
    path.write_text(json.dumps(document))
    return path


def call(lines: Sequence[Line], target: Target, folder: Path) -> list[Heard]:
    """Hold one call, and return what voicebench heard of each line. `folder` gets its files.

    Raises RuntimeError if voicebench ends with an error.
    """
    python = environment("voicebench")
    command = [str(python.parent / "voicebench"), "run", str(scenario(lines, target, folder))]
    done = subprocess.run(
        [*command, "--out", str(folder), "--format", "json", "--quiet"],
        env=os.environ | {"PYTHONPATH": str(ADAPTER)},
        capture_output=True,
        text=True,
        timeout=2 * CALL_MS / 1000,
    )
    if done.returncode:
        raise RuntimeError(f"voicebench ended with {done.returncode}: {last_line(done.stderr or done.stdout)}")
    report = json.loads((folder / "report.json").read_text())
    return heard(report["sessions"][0], lines, silenced_s(folder / "events.jsonl"))


def silenced_s(log: Path) -> list[float]:
    """Return the seconds of a call at which the server silenced its answer, from the log of its events."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [event["at_s"] for event in events if event["type"] == "input_audio_buffer.speech_started"]


def heard(session: dict[str, Any], lines: Sequence[Line], silenced_s: Sequence[float]) -> list[Heard]:
    """Return what voicebench measured of each line of a session in its report.

    For voicebench, a sound has stopped an answer that ends soon after it. Many answers end then by themselves, so the
    server has to silence the answer in that time (`silenced_s`), too.
    """
    agent = [tuple(segment) for segment in session["agent_segments"]]
    user = [tuple(segment) for segment in session["user_segments"]]
    turns = session["turns"]
    nexts = [turn["start_s"] for turn in turns[1:]] + [session["duration_s"]]
    out = []
    for line, turn, next_s in zip(lines, turns, nexts, strict=True):
        onset, offset = turn["user_onset_s"], turn["user_offset_s"]
        if onset is None:
            continue
        is_silenced = any(onset <= at_s <= onset + SOUND_MS / 1000 for at_s in silenced_s)
        own = [(max(a, onset), min(b, offset)) for a, b in user if a < offset and b > onset]
        begun = [segment for segment in agent if onset < segment[0] < next_s]
        out.append(
            Heard(
                line=line.name,
                expected=line.expected,
                recording=line.recording,
                was_speaking=any(a <= onset < b for a, b in agent),
                # Speech that only began before the user had finished, and stopped then, is no answer.
                is_answered=any(b > offset + 0.5 for _, b in begun),
                latency_s=None if turn["response_latency_ms"] is None else turn["response_latency_ms"] / 1000,
                is_talked_into=line.name == "pause" and bool(turn["talk_over"]),
                talked_over_s=round(sum(max(0.0, min(b, d) - max(a, c)) for a, b in own for c, d in begun), 3),
                stop_s=None if turn["stop_latency_ms"] is None else turn["stop_latency_ms"] / 1000,
                is_stopped=bool(
                    turn["false_barge_in"] and is_silenced if line.expected == "ignore" else turn["stopped"]
                ),
                transcript=turn["transcript"] or "",
            )
        )
    return out
