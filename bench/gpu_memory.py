"""The GPU memory that the released models need, computed from their shapes: the tables of docs/gpu.md.

    python -m bench.gpu_memory

The sums are those of `antiphon inspect` (`antiphon.released.memory`), from the manifests of the releases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from antiphon.released import families, releases
from antiphon.released.memory import ModelMemory, gb, memory_of

# Numbers of open sessions, the columns of the second table.
SESSIONS = (1, 8, 32, 64)
# Memory bandwidth of the H200 as published by NVIDIA. It limits a step that computes one row per session.
BYTES_A_SECOND = 4.8e12
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
    return TableRow(name, replace(memory, load=load, rows=rows) if load else memory)


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
        lines.append(f"| {model.name} | {memory.load} | {memory.session_bytes / 1e6:.0f} | {totals} |")
    return "\n".join(lines)


def steps_table() -> str:
    """Return the third table in Markdown: the shortest possible decode step of Qwen3-8B, which reads all data once."""
    lines = ["| sessions | rows in each | read a step, GB | least ms a step |", "|---|---|---|---|"]
    model = MODELS[0].memory
    for sessions, rows in ((1, 2_000), (16, 2_000), (64, 2_000), (1, 45_000), (16, 45_000)):
        read = model.weight_bytes - UNREAD + sessions * rows * model.row_bytes[0]
        lines.append(f"| {sessions} | {rows:,} | {gb(read)} | {read / BYTES_A_SECOND * 1e3:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(rows_table(), sessions_table(), steps_table(), sep="\n\n")
