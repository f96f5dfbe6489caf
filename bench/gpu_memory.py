"""What the released models need on a GPU, computed from their shapes: the tables and the picture of docs/gpu.md.

    python -m bench.gpu_memory [gpu.json]

With the results of `bench/gpu.sh`, the picture has the measured times of a unit in place of the computed ones.
The sums are those of `antiphon inspect` (`antiphon.released.memory`), from the manifests of the releases.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from antiphon.released import families, releases
from antiphon.released.manifest import SessionLoad
from antiphon.released.memory import ModelMemory, gb, memory_of

# Numbers of open sessions, the columns of the second table.
SESSIONS = (1, 8, 32, 64)
# Memory bandwidth as published by NVIDIA. It limits a step that computes one row per session.
BYTES_A_SECOND = 4.8e12
BANDWIDTHS = {"H100": 3.35e12, "H200": BYTES_A_SECOND}
# Nominal memory of the cards, and what is left free for CUDA, its libraries, the allocator and logits.
CARDS, SPARE_BYTES = {"H100": 80e9, "H200": 141e9}, 2.5e9
# Qwen3-8B's embedding table. A step reads only one of its rows per session.
UNREAD = 2 * 151_936 * 4_096


@dataclass(frozen=True, slots=True)
class TableRow:
    """A released model in the tables: its name, and what it takes."""

    name: str
    memory: ModelMemory


def _row(name: str, release: str, load: str = "", *rows: int) -> TableRow:
    """Return the row of a release. `load` and `rows`: what a session holds, if not what its manifest says."""
    found = releases()[release]
    memory = memory_of(families()[found.model_type], found)
    return TableRow(name, replace(memory, session=SessionLoad(load, rows)) if load else memory)


# Speech that is heard takes 13 rows per second. Speech that is generated takes 12.5, or 25 in MiniCPM-o's code decoder.
# Text in the same KV is not counted.
MODELS = (
    _row("Qwen3-8B", "qwen3-8b"),
    _row("Qwen3-8B", "qwen3-8b", "45,000 rows of text", 45_000),
    _row("Qwen3-ASR 0.6B", "qwen3-asr-0.6b"),
    _row("Qwen3-ASR 1.7B", "qwen3-asr-1.7b"),
    _row("Qwen3-TTS 0.6B", "qwen3-tts-0.6b-base"),
    _row("Qwen3-TTS 1.7B", "qwen3-tts-1.7b-base"),
    _row("Qwen3-Omni 30B-A3B", "qwen3-omni-30b-a3b-instruct"),
    _row("MiniCPM-o 4.5", "minicpm-o-4.5"),
    _row("Qwen2.5-VL 7B", "qwen2.5-vl-7b-instruct"),
    _row("SmolVLM 256M", "smolvlm2-256m-video-instruct"),
)


# A unit of MiniCPM-o in which all sessions speak: the passes of the language model and of the code decoder. A kernel of
# a graph takes about KERNEL_S, and a pass of 32 sessions' units of sound 2 ms of arithmetic.
PASSES, CODE_PASSES, KERNEL_S, ENCODER_S = 21, 26, 1.7e-6, 2e-3 / 32
# The bytes of weights that these passes and the encoder read, and the kernels of each.
LANGUAGE_BYTES, CODE_BYTES, AUDIO_BYTES = 2 * (8_189_195_264 - 151_748 * 4_096), 2 * 198_854_400, 2 * 328_196_096
LANGUAGE_KERNELS, CODE_KERNELS, AUDIO_KERNELS = 1_000, 500, 500
# The rows of each part for a session with a mean window, in the middle of a turn, with all of the encoder's positions.
UNIT_ROWS = (7_000, 300, 1_500)
UNIT_SESSIONS = (1, 8, 16, 32, 48, 64, 96)


def rows_table() -> str:
    """Return the first table in Markdown: weights, and the KV of one row."""
    lines = ["| model | parameters | weights, GB | KV a row, KB |", "|---|---|---|---|"]
    seen = {model.name: model for model in MODELS}
    for model in seen.values():
        memory = model.memory
        billions = (memory.parameters + memory.float32_parameters) / 1e9
        rows = " + ".join(f"{size / 1e3:.1f}" for size in memory.row_bytes)
        lines.append(f"| {model.name} | {billions:.2f} billion | {gb(memory.weight_bytes)} | {rows} |")
    return "\n".join(lines)


def sessions_table() -> str:
    """Return the second table in Markdown: weights and KV together, in GB, by the number of sessions."""
    head = " | ".join(str(count) for count in SESSIONS)
    lines = [f"| model | each session holds | MB a session | {head} |", "|---" * (3 + len(SESSIONS)) + "|"]
    for model in MODELS:
        memory = model.memory
        totals = " | ".join(gb(memory.weight_bytes + count * memory.session_bytes) for count in SESSIONS)
        lines.append(f"| {model.name} | {memory.session.load} | {memory.session_bytes / 1e6:.0f} | {totals} |")
    return "\n".join(lines)


def steps_table() -> str:
    """Return the third table in Markdown: the shortest possible decode step of Qwen3-8B, which reads all data once."""
    lines = ["| sessions | rows in each | read a step, GB | least ms a step |", "|---|---|---|---|"]
    model = MODELS[0].memory
    for sessions, rows in ((1, 2_000), (16, 2_000), (64, 2_000), (1, 45_000), (16, 45_000)):
        read = model.weight_bytes - UNREAD + sessions * rows * model.row_bytes[0]
        lines.append(f"| {sessions} | {rows:,} | {gb(read)} | {read / BYTES_A_SECOND * 1e3:.1f} |")
    return "\n".join(lines)


def cards_table() -> str:
    """Return the fourth table in Markdown: how many sessions of the second table fit on a card beside the weights."""
    lines = [f"| model | each session holds | {' | '.join(CARDS)} |", "|---" * (2 + len(CARDS)) + "|"]
    for model in MODELS:
        memory = model.memory
        room = [size - SPARE_BYTES - memory.weight_bytes for size in CARDS.values()]
        fits = " | ".join(str(int(max(0.0, left) // memory.session_bytes)) for left in room)
        lines.append(f"| {model.name} | {memory.session.load} | {fits} |")
    return "\n".join(lines)


def unit_ms(card: str, sessions: int) -> float:
    """Return the shortest possible time of a unit of MiniCPM-o in which all sessions speak, without token2wav."""
    model = next(model for model in MODELS if model.name.startswith("MiniCPM-o"))
    kv = [sessions * rows * size for rows, size in zip(UNIT_ROWS, model.memory.row_bytes, strict=True)]
    parts = (
        (PASSES, LANGUAGE_BYTES + kv[0], LANGUAGE_KERNELS),
        (CODE_PASSES, CODE_BYTES + kv[1], CODE_KERNELS),
        (1, AUDIO_BYTES + kv[2], AUDIO_KERNELS),
    )
    seconds = [times * max(read / BANDWIDTHS[card], kernels * KERNEL_S) for times, read, kernels in parts]
    return 1e3 * (sum(seconds) + sessions * ENCODER_S)


def units_table() -> str:
    """Return the fifth table in Markdown: the shortest possible time of a unit, by the number of sessions."""
    lines = [
        f"| a unit, ms | {' | '.join(map(str, UNIT_SESSIONS))} |",
        "|---" * (1 + len(UNIT_SESSIONS)) + "|",
    ]
    lines += [f"| {card} | {' | '.join(f'{unit_ms(card, n):.0f}' for n in UNIT_SESSIONS)} |" for card in CARDS]
    return "\n".join(lines)


def units_picture(found: Mapping[str, Mapping[int, float]] | None = None) -> str:
    """Return a Mermaid chart of the time of a unit over sessions, with a line for each of `found`.

    `found`: milliseconds by number of sessions, by the name of the line. All lines have the same numbers. Without it,
    the lines are the computed ones of the cards.
    """
    title = "a unit of MiniCPM-o, " + ("measured: " if found else "computed: ")
    found = found or {card: {n: unit_ms(card, n) for n in UNIT_SESSIONS} for card in CARDS}
    counts = sorted(next(iter(found.values())))
    lines = [
        "```mermaid",
        "xychart-beta",
        f'    title "{title}{" above, ".join(found)}{" below" if len(found) > 1 else ""}"',
        f'    x-axis "sessions that speak" [{", ".join(map(str, counts))}]',
        '    y-axis "ms" 0 --> 1000',
    ]
    lines += [f"    line [{', '.join(f'{times[n]:.0f}' for n in counts)}]" for times in found.values()]
    return "\n".join([*lines, "```"])


def measured_units(results: Path) -> dict[str, dict[int, float]]:
    """Return the median and the 95th percentile of a unit by the number of sessions, from a `gpu.json`.

    Takes the sections `minicpmo` and `room`. Raises OSError, ValueError or KeyError for another file.
    """
    sections = json.loads(results.read_text(encoding="utf-8"))["sections"]
    found: dict[str, dict[int, float]] = {"p95": {}, "p50": {}}
    for name in ("minicpmo", "room"):
        for figure in sections.get(name, {}).get("figures", ()):
            if figure["measure"].startswith("unit p") and figure["value"] is not None:
                found[figure["measure"].removeprefix("unit ")][int(figure["load"].split()[0])] = figure["value"]
    return found


if __name__ == "__main__":
    if sys.argv[1:]:
        print(units_picture(measured_units(Path(sys.argv[1]))))
    else:
        print(rows_table(), sessions_table(), steps_table(), cards_table(), units_table(), units_picture(), sep="\n\n")
