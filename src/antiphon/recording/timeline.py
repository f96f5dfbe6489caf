"""Draws a recorded session as one self-contained HTML file (`antiphon timeline DIR`)."""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.recording.tape import Mark, RecordedAudio, RecordedEvent, RecordedTurn, Tape, marks, turns

# Pixels a second of time, of the labels on the left, and of one lane's height.
PX_PER_S, LEFT_PX, LANE_PX = 60, 110, 46
LANES = ("microphone", "you speak", "thinking", "answer made", "events")
STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1b1d22; --paper: #fbfaf7; --line: #d9d6cd;
  --you: #2f6f4f; --think: #c08a1e; --answer: #2b5aa8; --stop: #b3372f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #ecebe6; --paper: #17181b; --line: #34373d;
    --you: #76c69a; --think: #e0b356; --answer: #86aef0; --stop: #f0837b;
  }
}
body { margin: 1rem; font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.you { fill: var(--you); } .think { fill: var(--think); } .answer { fill: var(--answer); }
.stop { fill: var(--stop); stroke: var(--stop); } .grid { stroke: var(--line); }
table { border-collapse: collapse; margin-top: 1rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th.text, td.text { text-align: left; max-width: 26rem; }
"""
# Headings of the table, and the times of RecordedTurn that stand under them.
COLUMNS = (
    ("transcript", "transcribed"),
    ("first words", "first_text"),
    ("first sound", "first_sound"),
    ("done", "done"),
)


def render(tape: Tape) -> str:
    """The HTML page: lanes over time, and a table with a row for each turn. It refers to nothing outside itself and has
    no script.
    """
    outputs = tape.outputs()
    recorded_turns = turns(outputs)
    title = html.escape(f"{tape.facts.id}, {tape.duration_s:.1f} s")
    models = html.escape(", ".join(tape.facts.models))
    rows = "\n".join(_row(k, t) for k, t in enumerate(recorded_turns, 1))
    headings = "".join(f"<th scope=col>{name}" for name, _ in COLUMNS)
    return (
        f'<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1><p>{models}</p>"
        f"<div class=scroll tabindex=0>{_drawing(tape, outputs, recorded_turns)}</div>"
        f"<table><caption>From the end of the turn, ms</caption>"
        f"<tr><th scope=col>turn<th class=text scope=col>said<th class=text scope=col>answered{headings}"
        f"<th scope=col>status</tr>{rows}</table></html>\n"
    )


def _drawing(tape: Tape, outputs: list[RecordedEvent], recorded_turns: list[RecordedTurn]) -> str:
    """The lanes as one SVG."""
    width, height = LEFT_PX + int((tape.duration_s + 1) * PX_PER_S), LANE_PX * len(LANES)
    parts = [f'<svg width="{width}" height="{height + 24}" role="img" aria-label="The session over time">']
    for second in range(int(tape.duration_s) + 2):
        x = LEFT_PX + second * PX_PER_S
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{height}"/>')
        parts.append(f'<text x="{x + 2}" y="{height + 14}">{second} s</text>')
    parts += [f'<text x="4" y="{k * LANE_PX + 27}">{name}</text>' for k, name in enumerate(LANES)]
    parts.append(_loudness(tape))
    for turn in recorded_turns:
        parts += _boxes(turn, tape.duration_s)
    parts += [_mark(mark) for mark in marks(outputs)]
    return "".join([*parts, "</svg>"])


def _x(at_s: float) -> float:
    return LEFT_PX + at_s * PX_PER_S


def _box(lane: int, kind: str, start_s: float, end_s: float, label: str) -> str:
    width = max(1.5, (end_s - start_s) * PX_PER_S)
    return (
        f'<rect class="{kind}" x="{_x(start_s):.1f}" y="{lane * LANE_PX + 12}" width="{width:.1f}" height="22">'
        f"<title>{html.escape(label)}</title></rect>"
    )


def _loudness(tape: Tape) -> str:
    """The microphone's level, drawn at the time when the audio came."""
    bars = []
    for entry in tape.entries:
        if not isinstance(entry, RecordedAudio):
            continue
        pcm: Pcm = tape.input_pcm[entry.start : entry.start + entry.num_samples]
        if len(pcm):
            level = float(np.sqrt(np.mean(pcm**2)))
            # From nothing at -60 dB of full scale to 30 pixels at 0 dB.
            height = min(1.0, max(0.0, (20 * np.log10(level + 1e-6) + 60) / 60)) * 30
            x = _x(entry.at_s - entry.num_samples / SAMPLE_RATE_HZ)
            bars.append(f"M{x:.1f} {27 - height / 2:.1f}v{height:.1f}")
    return f'<path d="{"".join(bars)}" fill="none" style="stroke:var(--you)"/>'


def _boxes(turn: RecordedTurn, end: float) -> list[str]:
    """The turn's speech, thinking and response; what had no end lasts until the session's `end`, in seconds."""
    out = []
    if turn.started is not None:
        out.append(_box(1, "you", turn.started, turn.ended if turn.ended is not None else end, turn.transcript))
    if turn.asked is not None:
        spoken = turn.first_sound if turn.first_sound is not None else turn.first_text
        out.append(_box(2, "think", turn.asked, spoken if spoken is not None else turn.done or end, "thinking"))
        if spoken is not None:
            out.append(_box(3, "answer", spoken, turn.done if turn.done is not None else end, turn.answer))
    return out


def _mark(mark: Mark) -> str:
    x, y = _x(mark.at_s), 4 * LANE_PX
    return (
        f'<line class="stop" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{y + 36}"/>'
        f'<text x="{x + 4:.1f}" y="{y + 27}">{html.escape(mark.label)}</text>'
    )


def _row(k: int, turn: RecordedTurn) -> str:
    cells = []
    for _, name in COLUMNS:
        at_s = getattr(turn, name)
        took = f"{(at_s - turn.ended) * 1000:.0f}" if at_s is not None and turn.ended is not None else ""
        cells.append(f"<td>{took}")
    said, answer = html.escape(turn.transcript), html.escape(turn.answer)
    return f"<tr><td>{k}<td class=text>{said}<td class=text>{answer}{''.join(cells)}<td>{html.escape(turn.status)}</tr>"


def write_timeline(folder: Path, target: Path) -> None:
    """Read the recording in `folder` and write its page to `target`. Raises StoreError for a folder that holds no
    recorded session.
    """
    target.write_text(render(Tape.read(folder)), encoding="utf-8")
