"""The figures of a referee: from what was heard of each line of all calls. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.turn_taking.figures import bootstrap, percentile, share


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a referee measured of one line, in seconds of the call."""

    # The line's name.
    line: str
    # What has to follow: "respond", "stop" or "ignore".
    expected: str
    # The recording of the line.
    recording: str
    # Whether the server was speaking when the line began.
    was_speaking: bool
    # Whether an answer began after the line had begun, and went on after its end, before the next line.
    is_answered: bool
    # From the end of the line to the answer; negative if the answer began in a pause of the line; None without one.
    latency_s: float | None
    # Whether the server spoke into the pause of the line.
    is_talked_into: bool
    # Seconds in which an answer to the line sounded while the line went on.
    talked_over_s: float
    # From the beginning of the line to the end of the speech that it interrupted; None if there was none.
    stop_s: float | None
    # Whether the interrupted speech ended in time.
    is_stopped: bool
    # The words that the server reported.
    transcript: str


def figures(found: Sequence[Heard]) -> dict[str, Any]:
    """Return the figures of all calls with one server, with 95 % intervals."""
    pauses = [h for h in found if h.line == "pause"]
    whole = [h for h in found if h.expected == "respond" and h.line != "pause"]
    cuts = [h for h in found if h.expected == "stop" and h.was_speaking]
    sounds = [h for h in found if h.expected == "ignore" and h.was_speaking]
    turns = [h for h in found if h.expected != "ignore"]
    return {
        "pauses_talked_into": share(sum(h.is_talked_into for h in pauses), len(pauses)),
        "pauses_that_cost_more_than_400_ms": share(sum(h.talked_over_s > 0.4 for h in pauses), len(pauses)),
        "barge_ins_that_stop_it": share(sum(h.is_stopped for h in cuts), len(cuts)),
        "barge_in_to_silence": _delays([h.stop_s for h in cuts if h.stop_s is not None]),
        "sounds_that_stop_it": share(sum(h.is_stopped for h in sounds), len(sounds)),
        "voice_to_voice": _delays([h.latency_s for h in whole if h.latency_s is not None]),
        "turns_without_an_answer": share(sum(not h.is_answered for h in turns), len(turns)),
    }


def _delays(values: Sequence[float]) -> dict[str, Any]:
    """Return p50, with its interval, and the maximum of delays in seconds."""
    low, high = bootstrap(values, lambda drawn: percentile(drawn, 50))
    return {
        "of": len(values),
        "p50_s": round(percentile(values, 50), 3),
        "p50_interval": [round(low, 3), round(high, 3)],
        "max_s": round(max(values), 3) if values else None,
    }


def row(found: dict[str, Any]) -> dict[str, str]:
    """Return the figures of one server as text, for a table."""

    def counted(name: str) -> str:
        part = found[name]
        low, high = part["interval"]
        return f"{part['count']} of {part['of']} ({low:.0f} to {high:.0f} %)"

    def delay(name: str) -> str:
        part = found[name]
        if not part["of"]:
            return "-"
        low, high = part["p50_interval"]
        return f"{part['p50_s']:.2f} ({low:.2f} to {high:.2f}) / {part['max_s']:.2f}"

    return {
        "pauses talked into": counted("pauses_talked_into"),
        "barge-in to silence, p50 / max": delay("barge_in_to_silence"),
        "sounds that stop it": counted("sounds_that_stop_it"),
        "voice to voice, p50 / max": delay("voice_to_voice"),
        "turns without an answer": counted("turns_without_an_answer"),
    }
