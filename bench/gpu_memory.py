"""The GPU memory that the released models need, computed from their shapes: the tables of docs/gpu.md.

    python -m bench.gpu_memory

Weights take two bytes each, or four in vocoders. KV is bfloat16. The working memory of a step and the memory of CUDA
itself are not included.
"""

from __future__ import annotations

from dataclasses import dataclass

# Numbers of open sessions, the columns of the second table.
SESSIONS = (1, 8, 32, 64)
# Memory bandwidth of the H200 as published by NVIDIA. It limits a step that computes one row per session.
BYTES_A_SECOND = 4.8e12
# Qwen3-8B's embedding table. A step reads only one of its rows per session.
UNREAD = 2 * 151_936 * 4_096


@dataclass(frozen=True, slots=True)
class ReleasedModel:
    """A released model's shape."""

    # The model's name.
    name: str
    # Number of weights in bfloat16.
    parameters: int
    # For each part that has KV (a decoder that an engine steps, or MiniCPM-o's audio encoder): its layers, KV heads and
    # head width.
    decoders: tuple[tuple[int, int, int], ...]
    # What one session contains in the second table, in words.
    load: str
    # Number of rows of each part for such a session.
    rows: tuple[int, ...]
    # Number of weights of the vocoder, in float32.
    float32_parameters: int = 0
    # Bytes of one session's slot in the vocoder.
    slot_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights on the device."""
        return 2 * self.parameters + 4 * self.float32_parameters

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Return the bytes of the keys and values of one row in all layers, for each of `decoders`."""
        return tuple(2 * 2 * layers * heads * width for layers, heads, width in self.decoders)

    @property
    def session_bytes(self) -> int:
        """Return the bytes of one session of the second table: its KV, and its slot in the vocoder."""
        return self.slot_bytes + sum(count * size for count, size in zip(self.rows, self.row_bytes, strict=True))


# Parameters are counted on modules that are built from the released config.json. Shared embedding tables count once.
# Speech that is heard takes 13 rows per second. Speech that is generated takes 12.5, or 25 in MiniCPM-o's code decoder.
# Text in the same KV is not counted.
MODELS = (
    ReleasedModel("Qwen3-8B", 8_190_735_360, ((36, 8, 128),), "2,000 rows of text", (2_000,)),
    ReleasedModel("Qwen3-8B", 8_190_735_360, ((36, 8, 128),), "45,000 rows of text", (45_000,)),
    ReleasedModel("Qwen3-ASR 0.6B", 782_557_184, ((28, 8, 128),), "30 s heard", (390,)),
    ReleasedModel("Qwen3-ASR 1.7B", 2_038_314_624, ((28, 8, 128),), "30 s heard", (390,)),
    ReleasedModel("Qwen3-TTS 0.6B", 906_051_840, ((28, 8, 128),), "a minute spoken", (750,), 194_818_753),
    ReleasedModel("Qwen3-TTS 1.7B", 1_916_939_520, ((28, 8, 128),), "a minute spoken", (750,), 194_818_753),
    ReleasedModel(
        "Qwen3-Omni 30B-A3B",
        35_043_801_968,
        ((48, 4, 128), (20, 2, 128)),
        "five minutes heard, one spoken",
        (3_900, 750),
        216_016_577,
    ),
    ReleasedModel(
        "MiniCPM-o 4.5",
        9_343_468_016,
        ((36, 8, 128), (20, 12, 64), (24, 16, 64)),
        "a full window, a turn of a minute, 30 s heard",
        (8_000, 1_500, 1_500),
        # token2wav: the flow and the vocoder.
        155_802_352 + 20_765_597,
        881_275_200 + 626_808,
    ),
    ReleasedModel("Qwen2.5-VL 7B", 8_292_166_656, ((28, 4, 128),), "40 frames of 768 rows", (30_720,)),
    ReleasedModel("SmolVLM 256M", 256_484_928, ((30, 3, 64),), "100 frames of 64 rows", (6_400,)),
)


def gb(size: float) -> str:
    """Return bytes in GB (10^9 bytes), with one decimal, or with two if below 10 GB."""
    number = size / 1e9
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def rows_table() -> str:
    """Return the first table in Markdown: weights, and the KV of one row."""
    lines = ["| model | parameters | weights, GB | KV a row, KB |", "|---|---|---|---|"]
    seen = {model.name: model for model in MODELS}
    for model in seen.values():
        billions = (model.parameters + model.float32_parameters) / 1e9
        rows = " + ".join(f"{size / 1e3:.1f}" for size in model.row_bytes)
        lines.append(f"| {model.name} | {billions:.2f} billion | {gb(model.weight_bytes)} | {rows} |")
    return "\n".join(lines)


def sessions_table() -> str:
    """Return the second table in Markdown: weights and KV together, in GB, by the number of sessions."""
    head = " | ".join(str(count) for count in SESSIONS)
    lines = [f"| model | each session holds | MB a session | {head} |", "|---" * (3 + len(SESSIONS)) + "|"]
    for model in MODELS:
        totals = " | ".join(gb(model.weight_bytes + count * model.session_bytes) for count in SESSIONS)
        lines.append(f"| {model.name} | {model.load} | {model.session_bytes / 1e6:.0f} | {totals} |")
    return "\n".join(lines)


def steps_table() -> str:
    """Return the third table in Markdown: the shortest possible decode step of Qwen3-8B, which reads all data once."""
    lines = ["| sessions | rows in each | read a step, GB | least ms a step |", "|---|---|---|---|"]
    model = MODELS[0]
    for sessions, rows in ((1, 2_000), (16, 2_000), (64, 2_000), (1, 45_000), (16, 45_000)):
        read = model.weight_bytes - UNREAD + sessions * rows * model.row_bytes[0]
        lines.append(f"| {sessions} | {rows:,} | {gb(read)} | {read / BYTES_A_SECOND * 1e3:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(rows_table(), sessions_table(), steps_table(), sep="\n\n")
