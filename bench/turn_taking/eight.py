"""The section `eight` of `antiphon bench turns`: voice to voice with one, four and eight conversations at once.

The measurement is `latency` of `antiphon bench talk`, at the default endpoint of a conversation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.common import Server, table
from bench.talk import latency, whole_turns
from bench.turn_taking.figures import delays

COUNTS = (1, 4, 8)
# The default of `silence_duration_ms`.
ENDPOINT_MS = 200


async def eight(srv: Server, data: Path, turns: int) -> dict[str, Any]:
    """From the true end of speech to the first sound of the answer; at most so many turns of each conversation."""
    found = await latency(srv, whole_turns(data), list(COUNTS), [ENDPOINT_MS], turns)
    out: dict[str, Any] = {"endpoint_ms": ENDPOINT_MS}
    for name, each in found["turns"].items():
        out[name] = found[name] | delays([turn["sound"] for turn in each], "s")
    table(
        "voice to voice, s",
        ("conversations, endpoint", "answered", "p50", "95 %", "p95", "95 %"),
        [
            (
                *(name, f"{row['answered']} of {row['turns']}", row["p50_s"], row["p50_interval"]),
                *(row["p95_s"], row["p95_interval"]),
            )
            for name, row in out.items()
            if isinstance(row, dict)
        ],
    )
    return out | {"each": found["turns"]}
