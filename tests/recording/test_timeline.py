"""The page that shows a recorded session: what it draws, in rows that fit into any window."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.audio.wav import wav_header
from antiphon.recording.tape import RecordedAudio, RecordedEvent, RecordedMessage, SessionFacts, Tape, TapeEntry
from antiphon.recording.timeline import render, tool_calls, write_timeline

WEATHER = '{"city": "Oslo"}'
CALL: list[tuple[float, dict[str, Any]]] = [
    (1.0, {"type": "input_audio_buffer.speech_started", "item_id": "item_1"}),
    (2.0, {"type": "input_audio_buffer.committed", "item_id": "item_1"}),
    (2.1, {"type": "response.created", "response": {"id": "resp_1"}}),
    (2.3, {"type": "conversation.item.added",
           "item": {"id": "item_2", "type": "function_call", "call_id": "call_1", "name": "weather", "arguments": ""}}),
    (2.4, {"type": "response.function_call_arguments.done", "response_id": "resp_1", "item_id": "item_2",
           "call_id": "call_1", "name": "weather", "arguments": WEATHER}),
    (2.5, {"type": "response.done", "response": {"id": "resp_1", "status": "completed"}}),
    (3.1, {"type": "conversation.item.added",
           "item": {"id": "item_3", "type": "function_call_output", "call_id": "call_1", "output": "<rain>"}}),
    (3.2, {"type": "response.created", "response": {"id": "resp_2"}}),
    (3.4, {"type": "response.output_text.delta", "response_id": "resp_2", "delta": "It rains."}),
    (3.6, {"type": "response.done", "response": {"id": "resp_2", "status": "completed"}}),
]  # fmt: skip
OUTPUT = {"type": "conversation.item.create",
          "item": {"type": "function_call_output", "call_id": "call_1", "output": "<rain>"}}  # fmt: skip


def tape_of(events: list[tuple[float, dict[str, Any]]], *, began: int = 0) -> Tape:
    entries: list[TapeEntry] = [RecordedEvent(t, json.dumps(e)) for t, e in events]
    return Tape(SessionFacts(id="sess-1", began=began), entries, np.zeros(0, np.float32))


def with_output(at_s: float = 3.0) -> Tape:
    """Return the session of CALL, in which the client sent the output of the call at `at_s`."""
    tape = tape_of(CALL)
    tape.entries.insert(6, RecordedMessage(at_s, json.dumps(OUTPUT)))
    return tape


def wide(page: str) -> str:
    """Return the chart for wide windows."""
    return page.partition("<div class=wide>")[2].partition("<div class=narrow>")[0]


def test_when_an_answer_calls_a_function_then_the_call_and_its_output_are_drawn() -> None:
    (call,) = tool_calls(with_output())
    assert (call.name, call.arguments, call.output, call.response_id) == ("weather", WEATHER, "<rain>", "resp_1")
    # The bar lasts from the completion of the call's arguments until the client sent the output.
    assert (call.at_s, call.output_s) == (2.4, 3.0)
    page = render(with_output())
    assert "weather({&quot;city&quot;: &quot;Oslo&quot;}) = &lt;rain&gt; (600 ms)" in page
    assert '<rect class="tool"' in wide(page)
    assert "<rain>" not in page


def test_when_no_output_came_then_the_call_lasts_to_the_end_and_says_so() -> None:
    (call,) = tool_calls(tape_of(CALL[:6]))
    assert call.output_s is None
    assert "no output came" in render(tape_of(CALL[:6]))


def test_when_a_response_follows_an_output_then_its_times_are_from_the_output() -> None:
    row = re.findall(r"<tr><td>.*?(?=<tr>|</table>)", render(with_output()))[1]
    assert "(output of weather)" in row
    assert re.findall(r"<td>([^<]*)", row) == ["2", "", "400", "", "600", "completed"]


def test_when_the_connection_is_cut_and_resumed_then_both_are_events() -> None:
    page = render(tape_of([*CALL, (4.0, {"type": "session.moving"}), (5.0, {"type": "session.resumed"})]))
    assert "connection cut: the session moves" in wide(page)
    assert "connection resumed" in wide(page)
    assert "<td>5.00 s<td class=text>connection resumed" in page


def test_when_a_label_is_near_the_edge_then_it_ends_there_and_is_whole_in_the_table() -> None:
    message = "The server is shutting down, and this is said at length. " * 4
    page = render(tape_of([*CALL, (20.0 - 0.01, {"type": "error", "error": {"message": message}})]))
    label = re.search(r'<text x="([\d.]+)%" dx="(-?\d+)"[^>]*text-anchor="(\w+)">(The server[^<]*)', wide(page))
    assert label
    assert (float(label[1]) > 95, int(label[2]) < 0, label[3]) == (True, True, "end")
    assert label[4].endswith("…")
    assert f"<td class=text>{message}" in page


def test_when_a_session_is_long_then_its_rows_hold_all_of_it_in_windows_of_both_sizes() -> None:
    tape = tape_of([(t, {"type": "error", "error": {"message": f"at {t}"}}) for t in (0.0, 19.5, 20.0, 40.0)])
    page = render(tape)
    narrow = page.partition("<div class=narrow>")[2]
    assert (wide(page).count("<div class=row>"), narrow.count("<div class=row>")) == (3, 7)
    for chart in (wide(page), narrow.partition("<h2>")[0]):
        assert [chart.count(f"at {t}</title>") for t in (0.0, 19.5, 20.0, 40.0)] == [1, 1, 1, 1]
    # Positions are fractions of the width, so nothing extends beyond the window.
    assert not re.search(r'<svg[^>]*width="\d{3,}"', page)
    assert all(0 <= float(x) <= 100 for x in re.findall(r' x1?="([\d.]+)%"', page))


def test_when_a_session_has_a_begin_then_the_wall_clock_is_shown() -> None:
    page = render(tape_of([(0.0, {"type": "x"}), (25.0, {"type": "x"})], began=1_700_000_000))
    assert "Began <time datetime=\"2023-11-14T22:13:20Z\">2023-11-14 22:13:20 UTC" in page  # fmt: skip
    # The second row begins 20 s later.
    assert ">22:13:40<" in wide(page)
    assert "Began" not in render(tape_of(CALL))


def test_when_a_recording_has_sound_then_it_can_be_played_and_else_not() -> None:
    tape = tape_of(CALL)
    assert "<audio" not in render(tape)
    tape.input_pcm = np.full(1600, 0.1, np.float32)
    tape.entries.append(RecordedAudio(4.0, 0, 1600))
    page = render(tape)
    assert page.count("<audio") == 1
    assert "From the microphone, 0.1 s" in page
    tape.output_pcm = np.zeros(2400, np.float32)
    assert render(tape).count('src="data:audio/wav;base64,UklGR') == 2
    tape.input_pcm = np.zeros(601 * 16_000, np.float32)
    assert "601 s, too long" in render(tape)


def test_when_a_client_wrote_half_a_character_then_the_page_is_written(tmp_path: Path) -> None:
    output = {"type": "function_call_output", "call_id": "call_1", "output": "\ud83d"}
    lines = [{"t": t, "out": e} for t, e in CALL[:6]]
    lines.append({"t": 3.0, "in": {"type": "conversation.item.create", "item": output}})
    (tmp_path / "session.json").write_text('{"id": "sess-1"}')
    (tmp_path / "events.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "in.wav").write_bytes(wav_header(16_000, 0))
    write_timeline(tmp_path, tmp_path / "t.html")
    assert "weather(" in (tmp_path / "t.html").read_text()


def test_when_messages_are_of_any_shape_then_they_are_no_calls() -> None:
    odd: list[tuple[float, Any]] = [
        (0.1, {"type": 7, "call_id": "a"}),
        (0.2, {"item": {"type": "function_call", "call_id": 7}}),
        (0.3, {"item": {"type": "function_call_output", "call_id": "nobody's", "output": 7}}),
        (0.4, [1]),
        (0.5, {"type": ["session.resumed"]}),
    ]
    assert tool_calls(tape_of(odd)) == []
    assert "<html" in render(tape_of(odd[:3] + odd[4:]))


def recorded(folder: Path, began: int, events: list[tuple[float, dict[str, Any]]], level: int, *, id: str) -> Path:
    """Write a recording with a second of audio, which starts 0.5 s after the recording began."""
    folder.mkdir()
    (folder / "session.json").write_text(json.dumps({"version": 1, "id": id, "began": began}))
    lines = [{"t": 0.5, "sound": [0, 16_000]}, *({"t": at_s, "out": event} for at_s, event in events)]
    (folder / "events.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    sound = np.full(16_000, level, "<i2").tobytes()
    (folder / "in.wav").write_bytes(wav_header(16_000, len(sound)) + sound)
    return folder


def test_when_a_session_moved_then_its_recordings_are_drawn_as_one(tmp_path: Path) -> None:
    moving, resumed = {"type": "session.moving"}, {"type": "session.resumed"}
    first = recorded(tmp_path / "1", 100, [(4.0, moving)], 1000, id="sess-1")
    second = recorded(tmp_path / "2", 107, [(1.0, resumed)], 2000, id="sess-1")
    recorded(tmp_path / "3", 103, [(1.0, resumed)], 3000, id="sess-2")
    for folder in (first, second):
        whole = Tape.read_whole(folder)
        assert [(e.at_s, type(e)) for e in whole.entries] == [
            (0.5, RecordedAudio), (4.0, RecordedEvent), (7.5, RecordedAudio), (8.0, RecordedEvent),
        ]  # fmt: skip
        sounds = [e for e in whole.entries if isinstance(e, RecordedAudio)]
        heard = [round(whole.input_pcm[e.start + e.num_samples - 1] * 32768) for e in sounds]
        assert (heard, whole.facts.began, whole.num_parts) == ([1000, 2000], 100, 2)
        write_timeline(folder, tmp_path / "t.html")
        page = (tmp_path / "t.html").read_text()
        assert "joined from 2 recordings" in page
        assert page.index("the session moves") < page.index("connection resumed")
    assert Tape.read_whole(tmp_path / "3").num_parts == 1
