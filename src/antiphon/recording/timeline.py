"""Draws a recorded session as one self-contained HTML file (`antiphon timeline DIR`)."""

from __future__ import annotations

import html
import json
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.audio.wav import wav_header
from antiphon.recording.tape import Mark, RecordedAudio, RecordedMessage, RecordedTurn, Tape, marks, turns

# In pixels: the width of the labels on the left, the heights of a lane and of a line of text, the mean width of a
# letter.
LEFT_PX, LANE_PX, TEXT_PX, LETTER_PX = 104, 46, 15, 6.6
LANES = ("Microphone", "You speak", "Thinking", "Answer made", "Tool runs", "Events")
TOOLS, EVENTS = 4, 5
# The number of lines for the labels of events.
EVENT_LINES = 3
CHART_PX = EVENTS * LANE_PX + EVENT_LINES * TEXT_PX + 10
# Sound longer than this, in seconds, is left out of the page, because it would take tens of megabytes.
MAX_SOUND_S = 600
STYLE = f"""
:root {{
  color-scheme: light dark;
  --ink: #1b1d22; --soft: #5b616e; --paper: #fbfaf7; --line: #d9d6cd;
  --you: #2f6f4f; --think: #c08a1e; --answer: #2b5aa8; --tool: #7a4b9a; --stop: #b3372f;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --ink: #ecebe6; --soft: #a4a9b4; --paper: #17181b; --line: #34373d;
    --you: #76c69a; --think: #e0b356; --answer: #86aef0; --tool: #c79be6; --stop: #f0837b;
  }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 1rem; font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }}
h1 {{ font-size: 1.25rem; margin: 0; overflow-wrap: anywhere; }} h2 {{ font-size: 1rem; margin: 1rem 0 .25rem; }}
p {{ margin: .25rem 0; color: var(--soft); }}
.row {{ border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: 0 6px 0 {LEFT_PX}px; }}
.row > svg {{ display: block; width: 100%; height: {CHART_PX + 22}px; overflow: visible; }}
svg text {{ fill: var(--ink); font: 12px system-ui, sans-serif; }} svg .soft {{ fill: var(--soft); }}
.narrow {{ display: none; }}
@media (max-width: 45rem) {{ .wide {{ display: none; }} .narrow {{ display: block; }} }}
.you {{ fill: var(--you); }} .think {{ fill: var(--think); }} .answer {{ fill: var(--answer); }}
.tool {{ fill: var(--tool); }} .stop {{ stroke: var(--stop); }} .grid {{ stroke: var(--line); }}
.scroll {{ overflow-x: auto; }} audio {{ display: block; width: 100%; max-width: 40rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }}
th, td {{ white-space: nowrap; }}
th.text, td.text {{ text-align: left; min-width: 9rem; max-width: 26rem; }}
th.text, td.text {{ white-space: normal; overflow-wrap: anywhere; }}
"""
# The headings of the table, each with the field of RecordedTurn in its column.
COLUMNS = (
    ("Transcript", "transcribed"),
    ("First words", "first_text"),
    ("First sound", "first_sound"),
    ("Done", "done"),
)
# Labels of the server's events about the connection.
CONNECTION = {
    "session.resumed": "connection resumed",
    "session.replaced": "connection cut: another one took over",
    "session.moving": "connection cut: the session moves",
    "session.resync_required": "connection not resumed",
    "session.expired": "session expired",
}


@dataclass(slots=True)
class RecordedCall:
    """A function call of an answer, with the output that the client sent for it."""

    # When the call was complete, in seconds of the session.
    at_s: float
    # The response that made the call.
    response_id: str
    # The function's name.
    name: str
    # The call's arguments, as JSON text.
    arguments: str
    # When the output arrived; None without output.
    output_s: float | None = None
    # The output of the function.
    output: str = ""

    @property
    def text(self) -> str:
        """The call, its output and the time between the two, in one line."""
        if self.output_s is None:
            return f"{self.name}({self.arguments}): no output came"
        return f"{self.name}({self.arguments}) = {self.output} ({_ms(self.output_s - self.at_s)} ms)"


@dataclass(frozen=True, slots=True)
class Box:
    """Something with a duration, in one lane of the chart."""

    # The number of the lane.
    lane: int
    # Its CSS class.
    kind: str
    # When it began, in seconds of the session.
    start_s: float
    # When it ended.
    end_s: float
    # Text that is shown when the pointer is over the box.
    title: str
    # Text next to the box.
    label: str = ""


@dataclass(frozen=True, slots=True)
class DrawnSession:
    """The parts of a tape that are drawn on its page."""

    # The recorded session.
    tape: Tape
    # The turns of the user with their responses.
    turns: list[RecordedTurn]
    # The function calls.
    calls: list[RecordedCall]
    # Cuts, errors and connection events, ordered by time.
    marks: list[Mark]
    # Speech, thinking, responses and calls.
    boxes: list[Box]
    # The microphone's audio as (time, height in pixels).
    levels: list[tuple[float, float]]


def render(tape: Tape) -> str:
    """Return the HTML page: lanes over time, the turns, the events, and the sound, if any.

    The page is self-contained and has no script.
    """
    outputs = tape.outputs()
    recorded_turns, calls = turns(outputs), tool_calls(tape)
    shown = sorted([*marks(outputs), *_connection(tape)], key=lambda mark: mark.at_s)
    boxes = [box for turn in recorded_turns for box in _boxes(turn, tape.duration_s)]
    boxes += [
        Box(TOOLS, "tool", c.at_s, tape.duration_s if c.output_s is None else c.output_s, c.text, c.name) for c in calls
    ]
    session = DrawnSession(tape, recorded_turns, calls, shown, boxes, _levels(tape))
    title = html.escape(f"{tape.facts.id}, {tape.duration_s:.1f} s")
    return (
        f'<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>{_began(tape)}"
        f"<p>{html.escape(', '.join(tape.facts.models))}</p>{_left_out(tape)}{_parts(tape)}"
        f"<div class=wide>{_chart(session, 20, 1100)}</div><div class=narrow>{_chart(session, 6, 240)}</div>"
        f"{_sounds(tape)}{_turn_table(session)}{_event_table(session)}</html>\n"
    )


# --- the other content of a tape


def _decoded(tape: Tape) -> Iterator[tuple[float, bool, dict[str, Any]]]:
    """Yield the messages of both sides as (time, whether it is the client's, message)."""
    for entry in tape.entries:
        if not isinstance(entry, RecordedAudio):
            message = json.loads(entry.text)
            if isinstance(message, dict):
                yield entry.at_s, isinstance(entry, RecordedMessage), message


def tool_calls(tape: Tape) -> list[RecordedCall]:
    """Return the function calls of a session, in order, each with its output, if any."""
    found: dict[str, RecordedCall] = {}
    for at_s, _, message in _decoded(tape):
        item = message.get("item")
        fields = item if isinstance(item, dict) else message
        call_id = fields.get("call_id")
        if not isinstance(call_id, str):
            continue
        kind = str(fields.get("type", ""))
        if kind == "function_call_output":
            # The output arrives in the client's message, and the server's message repeats it. Only the first one
            # counts.
            call = found.get(call_id)
            if call and call.output_s is None:
                call.output_s, call.output = at_s, str(fields.get("output", ""))
        elif kind == "function_call" or kind.endswith("function_call_arguments.done"):
            call = found.setdefault(call_id, RecordedCall(at_s, "", "", ""))
            # The time of a call is that of the last message about it, which completes it.
            if call.output_s is None and (fields.get("arguments") or not call.arguments):
                call.at_s = at_s
            call.response_id = str(message.get("response_id") or call.response_id)
            call.name = str(fields.get("name") or call.name)
            call.arguments = str(fields.get("arguments") or call.arguments)
    return list(found.values())


def _connection(tape: Tape) -> list[Mark]:
    """Return the marks at which the connection was cut or resumed."""
    return [
        Mark(at_s, CONNECTION[message["type"]])
        for at_s, is_clients, message in _decoded(tape)
        if not is_clients and isinstance(message.get("type"), str) and message["type"] in CONNECTION
    ]


def _asked_by(turn: RecordedTurn, calls: list[RecordedCall]) -> RecordedCall | None:
    """Return the call whose output triggered a response without a user's turn: the last call before the response."""
    if turn.ended is not None or turn.asked is None:
        return None
    before = [call for call in calls if call.output_s is not None and call.output_s <= turn.asked]
    return max(before, key=lambda call: call.output_s or 0.0, default=None)


def _boxes(turn: RecordedTurn, end_s: float) -> Iterator[Box]:
    """Yield the turn's speech, thinking and response. A part without an end lasts until the session's `end_s`."""
    done_s = end_s if turn.done is None else turn.done
    if turn.started is not None:
        yield Box(1, "you", turn.started, end_s if turn.ended is None else turn.ended, turn.transcript)
    if turn.asked is not None:
        spoken = turn.first_sound if turn.first_sound is not None else turn.first_text
        yield Box(2, "think", turn.asked, done_s if spoken is None else spoken, "thinking")
        if spoken is not None:
            yield Box(3, "answer", spoken, done_s, turn.answer)


# --- the chart


def _chart(session: DrawnSession, row_s: int, width_px: int) -> str:
    """Return the lanes, in rows of `row_s` seconds, each as wide as the window and at least `width_px` wide.

    Horizontal positions are in percent of the width, so a row fits every window and the text keeps its size.
    """
    whole_s = session.tape.duration_s
    span_s = float(min(row_s, max(5, int(whole_s) + 1)))
    num_rows = int(whole_s / span_s) + 1
    return "".join(_row(session, k * span_s, span_s, width_px) for k in range(num_rows))


def _row(session: DrawnSession, start_s: float, span_s: float, width_px: int) -> str:
    end_s = start_s + span_s

    def x(at_s: float) -> str:
        return f"{(at_s - start_s) / span_s * 100:.2f}%"

    parts = [f'<div class=row><svg role="img" aria-label="From {start_s:.0f} to {end_s:.0f} s">']
    step = 1 if span_s * 40 <= width_px else 2
    for second in range(int(start_s), int(end_s), step):
        parts.append(f'<line class="grid" x1="{x(second)}" x2="{x(second)}" y1="0" y2="{CHART_PX}"/>')
        parts.append(f'<text class="soft" x="{x(second)}" dx="2" y="{CHART_PX + 14}">{second} s</text>')
    if session.tape.facts.began:
        at = _wall_clock(session.tape.facts.began + start_s)
        parts.append(f'<text class="soft" x="{6 - LEFT_PX}" y="{CHART_PX + 14}">{at:%H:%M:%S}</text>')
    parts += [f'<text x="{6 - LEFT_PX}" y="{k * LANE_PX + 22}">{name}</text>' for k, name in enumerate(LANES)]
    parts.append(_loudness(session.levels, start_s, span_s))
    here = [b for b in session.boxes if b.start_s < end_s and (b.end_s > start_s or b.start_s >= start_s)]
    for box in here:
        left, right = max(box.start_s, start_s), min(box.end_s, end_s)
        width = f"{max(0.15, (right - left) / span_s * 100):.2f}%"
        parts.append(
            f'<rect class="{box.kind}" x="{x(left)}" y="{box.lane * LANE_PX + 8}" width="{width}" height="20">'
            f"<title>{html.escape(box.title)}</title></rect>"
        )
        if box.label:
            parts.append(_label(box.label, (left - start_s) / span_s, box.lane * LANE_PX + 41, width_px, box.title))
    parts += _marks([m for m in session.marks if start_s <= m.at_s < end_s], start_s, span_s, width_px)
    return "".join([*parts, "</svg></div>"])


def _label(text: str, place: float, y: float, width_px: int, title: str = "") -> str:
    """Return text next to a place in the row (from 0 to 1), on the side with more room, truncated to fit."""
    before = place > 0.5
    room = int(width_px * (place if before else 1 - place) / LETTER_PX) - 1
    shown = text if len(text) <= room else text[: max(1, room - 1)] + "…"
    anchor, shift = ("end", -4) if before else ("start", 4)
    more = f"<title>{html.escape(title)}</title>" if title else ""
    at = f'x="{place * 100:.2f}%" dx="{shift}" y="{y:.0f}"'
    return f'<text {at} text-anchor="{anchor}">{html.escape(shown)}{more}</text>'


def _marks(shown: list[Mark], start_s: float, span_s: float, width_px: int) -> Iterator[str]:
    """Yield the events of a row as lines across it, with staggered labels."""
    for k, mark in enumerate(shown):
        place = (mark.at_s - start_s) / span_s
        y = EVENTS * LANE_PX + TEXT_PX * (k % EVENT_LINES + 1)
        yield f'<line class="stop" x1="{place * 100:.2f}%" x2="{place * 100:.2f}%" y1="0" y2="{y + 3}"/>'
        yield _label(mark.label, place, y, width_px, mark.label)


def _levels(tape: Tape) -> list[tuple[float, float]]:
    """Return the microphone's audio as (time of arrival, height in pixels), in order."""
    found = []
    for entry in tape.entries:
        if isinstance(entry, RecordedAudio):
            pcm: Pcm = tape.input_pcm[entry.start : entry.start + entry.num_samples]
            if len(pcm):
                level = float(np.sqrt(np.mean(pcm**2)))
                # From 0 pixels at -60 dB of full scale to 30 pixels at 0 dB.
                height = min(1.0, max(0.0, (20 * np.log10(level + 1e-6) + 60) / 60)) * 30
                found.append((entry.at_s - entry.num_samples / SAMPLE_RATE_HZ, height))
    return sorted(found)


def _loudness(levels: list[tuple[float, float]], start_s: float, span_s: float) -> str:
    """Return the microphone's level over a row."""
    here = levels[bisect_left(levels, (start_s,)) : bisect_left(levels, (start_s + span_s,))]
    bars = "".join(f"M{at_s - start_s:.2f} {18 - height / 2:.1f}v{height:.1f}" for at_s, height in here)
    return (
        f'<svg width="100%" height="{LANE_PX}" viewBox="0 0 {span_s:g} {LANE_PX}" preserveAspectRatio="none">'
        f'<path d="{bars}" fill="none" style="stroke:var(--you);vector-effect:non-scaling-stroke"/></svg>'
    )


# --- the rest of the page


def _wall_clock(unix_s: float) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(seconds=unix_s)


def _left_out(tape: Tape) -> str:
    if tape.facts.redaction == "off":
        return ""
    return f"<p>Redacted ({html.escape(tape.facts.redaction)}): the audio was recorded as silence.</p>"


def _parts(tape: Tape) -> str:
    if tape.num_parts == 1:
        return ""
    return (
        f"<p>The session moved: joined from {tape.num_parts} recordings; the gap between two is exact to a second.</p>"
    )


def _began(tape: Tape) -> str:
    if not tape.facts.began:
        return ""
    at = _wall_clock(tape.facts.began)
    return f'<p>Began <time datetime="{at:%Y-%m-%dT%H:%M:%SZ}">{at:%Y-%m-%d %H:%M:%S} UTC</time></p>'


def _sounds(tape: Tape) -> str:
    """Return audio players for the recording's sound."""
    parts = []
    for name, pcm, rate_hz in (
        ("From the microphone", tape.input_pcm, SAMPLE_RATE_HZ),
        ("Of the answers", tape.output_pcm, tape.output_hz),
    ):
        if not len(pcm):
            continue
        if len(pcm) > MAX_SOUND_S * rate_hz:
            parts.append(f"<p>{name}: {len(pcm) / rate_hz:.0f} s, too long for this page</p>")
            continue
        data = to_pcm16(pcm)
        wav = b64encode(wav_header(rate_hz, len(data)) + data).decode()
        label = f"{name}, {len(pcm) / rate_hz:.1f} s"
        parts.append(
            f'<p>{label}</p><audio controls preload=metadata aria-label="{label}" src="data:audio/wav;base64,{wav}">'
            "</audio>"
        )
    return f"<h2>Sound, without the pauses between</h2>{''.join(parts)}" if parts else ""


def _turn_table(session: DrawnSession) -> str:
    headings = "".join(f"<th scope=col>{name}" for name, _ in COLUMNS)
    rows = "".join(_turn_row(k, turn, session.calls) for k, turn in enumerate(session.turns, 1))
    return (
        "<h2>Turns</h2><p>In ms from the end of the turn, or from the output of the tool</p>"
        "<div class=scroll tabindex=0><table>"
        f"<tr><th scope=col>Turn<th class=text scope=col>Said<th class=text scope=col>Answered{headings}"
        f"<th scope=col>Status</tr>{rows}</table></div>"
    )


def _turn_row(k: int, turn: RecordedTurn, calls: list[RecordedCall]) -> str:
    asked_by = _asked_by(turn, calls)
    from_s = asked_by.output_s if asked_by else turn.ended
    times = [getattr(turn, name) for _, name in COLUMNS]
    cells = "".join(f"<td>{_ms(t - from_s) if t is not None and from_s is not None else ''}" for t in times)
    said = f"(output of {asked_by.name})" if asked_by else turn.transcript
    called = [call.text for call in calls if call.response_id and call.response_id == turn.response_id]
    answer = "<br>".join(html.escape(line) for line in [turn.answer, *called] if line)
    return f"<tr><td>{k}<td class=text>{html.escape(said)}<td class=text>{answer}{cells}<td>{html.escape(turn.status)}"


def _event_table(session: DrawnSession) -> str:
    rows = [(mark.at_s, mark.label) for mark in session.marks]
    if not rows:
        return ""
    body = "".join(f"<tr><td>{at_s:.2f} s<td class=text>{html.escape(label)}" for at_s, label in rows)
    return (
        f"<h2>Events</h2><div class=scroll tabindex=0><table><tr><th scope=col>Time<th class=text scope=col>What"
        f"{body}</table></div>"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"


def write_timeline(folder: Path, target: Path) -> None:
    """Read the recording in `folder`, with the session's other recordings next to it, and write its page to `target`.

    Raises StoreError if `folder` is not a recorded session.
    """
    target.write_text(render(Tape.read_whole(folder)), encoding="utf-8", errors="replace")
