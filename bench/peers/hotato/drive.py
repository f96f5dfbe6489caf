"""Runs hotato's caller and hotato's scorer, both unmodified, for bench/referees/hotato.py.

    drive.py call --url ws://127.0.0.1:PORT --lines lines.json --out FOLDER
    drive.py score --lines lines.json --out scores.json

`call` holds one call by a scripted caller plan. hotato connects to a session server (its protocol
`hotato.caller-session.v1`), which plays the audio to the server that is measured. Each line has `name`, `audio` (a file
of raw PCM16), `rate_hz`, `after` and `delay_ms`.

`score` scores two-channel recordings (caller, agent) of single lines. Each has `recording`, `onset_s`, `end_s` and
`expected`. Writes for each line hotato's signals at its onset, and those at its end, from which a last answer is seen.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotato.caller import PLAN_SCHEMA, run_caller
from hotato.caller_session import WebSocketCallerSession
from hotato.core import ScoreConfig, run_single

# In this version, the time to connect also limits the whole call. 300 s is the most that it takes.
CALL_S = 300.0
# The time limits of `listen` have no effect then. So the session server reports a timeout, which ends a `listen`, too.
TIMEOUT = {"event": "timeout"}
WAIT_MS = 30_000
# The server's voice pauses between sentences: an answer has stopped after a second of silence. The caller's sentence
# with a pause of 1.2 s is one turn.
CONFIG = ScoreConfig(yield_hangover_sec=1.0, turn_end_silence_sec=1.3)
# Before the end of a line, so that the caller is heard after the onset.
END_S = 0.2
# What a line waits for, in terms of the session server's events.
EVENTS = {
    "agent_speech_start": ("agent_speech_started",),
    "agent_speech_end": ("agent_speech_started", "agent_speech_ended"),
}


class Recordings:
    """A CallerTTS that says recordings by the names of their lines."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self._lines = {line["name"]: line for line in lines}

    def synthesize(self, text: str) -> Mapping[str, Any]:
        line = self._lines[text]
        source = {"provider": "recording", "model": "none", "voice": line["name"], "settings": {}}
        return source | {"pcm_s16le": Path(line["audio"]).read_bytes(), "sample_rate_hz": line["rate_hz"]}


def plan(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a scripted caller plan that says the lines in order."""
    nodes: list[dict[str, Any]] = []
    is_over = False
    for line in lines:
        name = line["name"]
        wanted = EVENTS.get(line["after"], ())
        if is_over and line["after"] == "agent_speech_end":
            # The beginning of this answer was waited for before.
            wanted = wanted[1:]
        for k, status in enumerate(wanted):
            until = {"any": [{"event": "lifecycle", "status": status}, TIMEOUT]}
            listen = {"id": f"{name}-hears-{k}", "type": "listen", "timeout_ms": WAIT_MS, "until": until}
            nodes.append(listen | {"max_events": 1000})
        if line["delay_ms"]:
            nodes.append({"id": f"{name}-waits", "type": "wait", "duration_ms": line["delay_ms"]})
        nodes.append({"id": name, "type": "say", "text": name})
        is_over = line["expected"] == "ignore"
    nodes.append({"id": "rest", "type": "wait", "duration_ms": 12_000})
    nodes.append({"id": "end", "type": "hangup", "reason": "the last line was said"})
    for node, after in itertools.pairwise(nodes):
        node["next"] = after["id"]
    limits = {"max_wait_ms": WAIT_MS, "max_events": 5000}
    return {
        "schema": PLAN_SCHEMA, "id": "call", "mode": "scripted", "start": nodes[0]["id"], "nodes": nodes,
        "limits": limits,
    }  # fmt: skip


def call(url: str, lines: list[dict[str, Any]], out: Path) -> None:
    """Hold a call. Raises SystemExit with hotato's error if it was not held to its end."""
    session = WebSocketCallerSession(url, connect_timeout=CALL_S, command_timeout=CALL_S)
    done = run_caller(plan(lines), session, str(out), tts=Recordings(lines))
    if done.result["status"] != "HUNG_UP":
        raise SystemExit(f"{done.result['status']}: {done.result.get('error')}")


def score(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return hotato's signals of each line."""

    def signals(line: dict[str, Any], onset_s: float) -> dict[str, Any]:
        expect = "hold" if line["expected"] == "ignore" else "yield"
        found = run_single(stereo=line["recording"], onset_sec=onset_s, expect=expect, cfg=CONFIG)
        return found["events"][0]

    return [
        {"onset": signals(line, line["onset_s"]), "end": signals(line, max(0.0, line["end_s"] - END_S))}
        for line in lines
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run hotato's caller or its scorer.")
    parser.add_argument("what", choices=("call", "score"))
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--url")
    arguments = parser.parse_args()
    lines = json.loads(arguments.lines.read_text())
    if arguments.what == "call":
        call(arguments.url, lines, arguments.out)
    else:
        arguments.out.write_text(json.dumps(score(lines)))


if __name__ == "__main__":
    main()
