"""Recordings can be read back, and comparing two runs shows only the differences that matter."""

from __future__ import annotations

import base64
import json
import os
import re
import threading
import time
import wave
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from antiphon.cli.main import main
from antiphon.cli.replay import compare
from antiphon.errors import StoreError
from antiphon.protocols.dialects import field_names
from antiphon.recording.disk import DiskWriter, Keep, prune
from antiphon.recording.recorder import Recorder
from antiphon.recording.redaction import Redactor
from antiphon.recording.tape import (
    Mark,
    RecordedAudio,
    RecordedEvent,
    RecordedMessage,
    SessionFacts,
    Tape,
    TapeEntry,
    marks,
    sessions_in,
    turns,
)
from antiphon.recording.timeline import render, write_timeline

TRANSCRIPTION = "conversation.item.input_audio_transcription"
ANSWER: list[tuple[float, dict[str, Any]]] = [
    (1.0, {"type": "input_audio_buffer.speech_started", "item_id": "item_1", "audio_start_ms": 0}),
    (2.0, {"type": "input_audio_buffer.committed", "item_id": "item_1"}),
    (2.1, {"type": f"{TRANSCRIPTION}.completed", "item_id": "item_1", "transcript": "Hello <b>."}),
    (2.2, {"type": "response.created", "response": {"id": "resp_1"}}),
    (2.3, {"type": "response.output_audio_transcript.delta", "response_id": "resp_1", "delta": "Hi"}),
    (2.4, {"type": "sound", "delta": [0, 10, "item_2"]}),
    (2.5, {"type": "response.done", "response": {"id": "resp_1", "status": "completed"}}),
]  # fmt: skip


def entries(events: list[tuple[float, dict[str, Any]]]) -> list[RecordedEvent]:
    return [RecordedEvent(t, json.dumps(e)) for t, e in events]


def record(folder: Path) -> Recorder:
    now = iter(range(100))
    facts = SessionFacts(id="sess-1", began=7, opening=msgspec.Raw(b'{"model":"one"}'), models=("one",))
    return Recorder(folder, facts, clock=lambda: next(now) / 10)


def content(entry: TapeEntry) -> Any:
    assert not isinstance(entry, RecordedAudio)
    return json.loads(entry.text)


def test_when_a_session_is_recorded_then_the_same_is_read_back(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    recorder.event_in('{"type": "session.update"}')
    recorder.event_in('{"type": "input_audio_buffer.append", "audio": "AAAA"}')
    recorder.event_in("{not json")
    heard = recorder.audio_in(np.array([0.1, -0.5, 2.0], np.float32))
    recorder.audio_out("item_1", np.zeros(7, np.float32), 24_000)
    recorder.event_out('{"type": "response.output_audio.delta", "delta": "AAAA"}')
    recorder.event_out('{"type": "error", "error": {"message": "no"}}')
    recorder.close()
    recorder.join()
    tape = Tape.read(recorder.folder)
    assert (tape.facts.id, tape.facts.began, tape.facts.models) == ("sess-1", 7, ("one",))
    assert bytes(tape.facts.opening) == b'{"model":"one"}'
    update, append, unreadable, audio, sound, error = tape.entries
    assert isinstance(update, RecordedMessage)
    assert content(update) == {"type": "session.update"}
    # The append is kept without its audio, because it may identify the dialect.
    assert content(append) == {"type": "input_audio_buffer.append", "audio": ""}
    assert content(unreadable) == {"unreadable": "{not json"}
    assert audio == RecordedAudio(0.4, 0, 3)
    assert tape.outputs() == [sound, error]
    assert content(sound) == {"type": "sound", "delta": [0, 7, "item_1"]}
    assert np.array_equal(tape.input_pcm, heard)
    assert (len(tape.output_pcm), tape.output_hz) == (7, 24_000)
    assert "AAAA" not in (recorder.folder / "events.jsonl").read_text()


def test_when_messages_hold_any_character_then_they_are_read_back(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    said = "a\u2028b\x85c"
    recorder.event_out(json.dumps({"type": "x", "delta": said}))
    recorder.event_in('{"type": "conversation.item.create", "text": "\\ud83d"}')
    recorder.event_in("[" * 100_000)
    recorder.close()
    recorder.join()
    tape = Tape.read(recorder.folder)
    assert content(tape.entries[0])["delta"] == said
    assert [content(e).get("text", "")[:1] for e in tape.entries[1:]] == ["\ud83d", ""]


def test_when_the_disk_is_full_then_the_recording_ends_and_not_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_close = wave.Wave_write.close

    def write_fails(self: wave.Wave_write, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    def close_fails(self: wave.Wave_write) -> None:
        real_close(self)
        raise OSError(28, "No space left on device")

    recorder = record(tmp_path)
    monkeypatch.setattr(wave.Wave_write, "writeframes", write_fails)
    monkeypatch.setattr(wave.Wave_write, "close", close_fails)
    assert len(recorder.audio_in(np.zeros(320, np.float32))) == 320
    recorder.event_out('{"type": "x"}')
    recorder.close()
    recorder.join()
    assert (recorder.folder / "events.jsonl").read_text() == ""


def test_when_a_recording_was_killed_then_its_complete_lines_are_read(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    recorder.audio_in(np.zeros(320, np.float32))
    recorder.close()
    recorder.join()
    with (recorder.folder / "events.jsonl").open("a") as file:
        file.write('{"t": 1.0, "in": {"ty')
    assert [type(e) for e in Tape.read(recorder.folder).entries] == [RecordedAudio]


def test_when_a_session_has_a_token_and_sound_in_any_field_then_neither_is_recorded(tmp_path: Path) -> None:
    sound = base64.b64encode(bytes(range(256)) * 4).decode()
    image = base64.b64encode(b"\xff\xd8\xff" + bytes(300)).decode()
    recorder = record(tmp_path)
    recorder.event_in(json.dumps({"type": "push_chunk", "anything": [sound], "frame": image}))
    recorder.event_in(json.dumps({"type": "conversation.item.create", "audio": sound}))
    recorder.event_out(
        json.dumps({"type": "session.created", "resume_token": "rt-secret", "x": {"token": "t2-secret"}})
    )
    recorder.close()
    recorder.join()
    chunk, item, created = (content(entry) for entry in Tape.read(recorder.folder).entries)
    assert chunk == {"type": "push_chunk", "anything": [""], "frame": image}
    assert item["audio"] == sound
    assert created["resume_token"].startswith("sha256:")
    assert "secret" not in (recorder.folder / "events.jsonl").read_text()


def test_when_the_disk_stalls_then_the_session_does_not_and_what_is_lost_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun, free = threading.Event(), threading.Event()
    writer = DiskWriter("it", max_waiting_bytes=1000)
    written: list[int] = []
    writer.put(10, lambda: (begun.set(), free.wait()))
    begun.wait()
    assert [writer.put(400, lambda k=k: written.append(k)) for k in range(4)] == [True, True, False, False]
    free.set()
    writer.close(lambda: written.append(-1))
    writer.join()
    assert written == [0, 1, -1]
    assert writer.num_dropped == 2
    assert [m for m in caplog.messages if "slow" in m or "2 entries" in m] == caplog.messages
    assert len(caplog.messages) == 2


def test_when_recordings_take_too_much_then_the_oldest_go_and_those_under_way_stay(tmp_path: Path) -> None:
    running = record(tmp_path)
    for day in range(1, 4):
        folder = tmp_path / f"2020010{day}-000000-sess-{day}"
        folder.mkdir()
        (folder / "session.json").write_bytes(bytes(1000))
    (tmp_path / "notes").mkdir()
    prune(tmp_path, Keep(max_bytes=2500))
    assert sorted(p.name[:8] for p in tmp_path.iterdir())[:-2] == ["20200102", "20200103"]
    prune(tmp_path, Keep(max_bytes=1))
    assert sorted(tmp_path.iterdir()) == sorted((running.folder, tmp_path / "notes"))
    running.close()
    running.join()


def test_recordings_that_are_too_old_go_and_those_under_way_stay(tmp_path: Path) -> None:
    running = record(tmp_path)
    for age_hours in (1, 30):
        folder = tmp_path / f"2020010{age_hours % 10}-000000-sess-{age_hours}"
        folder.mkdir()
        (folder / "session.json").write_bytes(b"{}")
        (folder / "in.wav").write_bytes(b"")
        for file in folder.iterdir():
            os.utime(file, times=(at_s := time.time() - age_hours * 3600, at_s))
    for file in running.folder.iterdir():
        os.utime(file, times=(0, 0))
    prune(tmp_path, Keep(max_hours=24))
    assert {p.name[16:] for p in tmp_path.iterdir()} == {"sess-1"}
    assert len(list(tmp_path.iterdir())) == 2
    assert running.folder.exists()
    running.close()
    running.join()


def test_what_another_process_deletes_meanwhile_stops_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day in (1, 2):
        folder = tmp_path / f"2020010{day}-000000-sess-{day}"
        folder.mkdir()
        (folder / "session.json").write_bytes(bytes(1000))
    stat = Path.stat

    def gone(path: Path, **options: Any) -> Any:
        if path.parent.name.startswith("20200101"):
            raise FileNotFoundError(path)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", gone)
    prune(tmp_path, Keep(max_bytes=500))
    assert [p.name[:8] for p in tmp_path.iterdir()] == ["20200101"]


def test_what_is_redacted_is_recorded_as_silence_and_without_its_words(tmp_path: Path) -> None:
    opening = msgspec.Raw(b'{"model":"one","session":{"instructions":"You speak with jane@example.org, 4711."}}')
    facts = SessionFacts(id="sess-1", opening=opening, redaction="mask")
    recorder = Recorder(tmp_path, facts, redactor=Redactor("mask", field_names(), ["one"]))
    loud = np.full(320, 0.5, np.float32)
    # The session hears the unchanged audio.
    assert np.abs(recorder.audio_in(loud)).max() > 0.4
    recorder.audio_out("item_2", loud, 24_000)
    recorder.event_in(json.dumps({"type": "session.update", "session": {"instructions": "Ask for 4711."}}))
    recorder.event_in("no JSON, but 4711")
    said = {"type": f"{TRANSCRIPTION}.completed", "item_id": "item_4711", "transcript": "My PIN is 4711."}
    recorder.event_out(json.dumps(said))
    recorder.event_out(json.dumps({"type": f"{TRANSCRIPTION}.delta", "item_id": "item_4711", "delta": " PIN 47"}))
    recorder.close()
    recorder.join()
    tape = Tape.read(recorder.folder)
    assert not tape.input_pcm.any()
    assert len(tape.input_pcm) == 320
    with wave.open(str(recorder.folder / "out.wav")) as out:
        assert out.readframes(1000) == bytes(640)
    written = (recorder.folder / "events.jsonl").read_text()
    assert "My PIN is [number]." in written
    assert "Ask for [number]." in written
    about = (recorder.folder / "session.json").read_text()
    assert "You speak with [email], [number]." in about
    assert '"model":"one"' in about
    assert "47" not in re.sub("sha256:[0-9a-f]{16}", "", written)
    # Events that belong together still have the same id.
    assert len(set(re.findall('"item_id": "(sha256:.*?)"', written))) == 1
    assert "silence" in render(tape)
    assert main(["replay", str(recorder.folder)]) == 1


@pytest.mark.parametrize("spoil", ["session.json", "events.jsonl", "in.wav"])
def test_when_a_folder_holds_no_recorded_session_then_the_error_says_so(tmp_path: Path, spoil: str) -> None:
    recorder = record(tmp_path)
    recorder.close()
    recorder.join()
    (recorder.folder / spoil).unlink()
    with pytest.raises(StoreError, match="is not a recorded session"):
        Tape.read(recorder.folder)


def test_when_a_recording_is_of_another_version_then_the_error_names_it(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    recorder.close()
    recorder.join()
    (recorder.folder / "session.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(StoreError, match="version 99"):
        Tape.read(recorder.folder)


def test_when_nothing_can_be_written_then_the_error_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot record"):
        record(tmp_path / "file")


def test_when_turns_are_gathered_then_each_has_its_times() -> None:
    (turn,) = turns(entries(ANSWER))
    assert (turn.transcript, turn.answer, turn.status) == ("Hello <b>.", "Hi", "completed")
    assert (turn.started, turn.ended, turn.transcribed, turn.asked, turn.first_text, turn.first_sound, turn.done) == (
        1.0, 2.0, 2.1, 2.2, 2.3, 2.4, 2.5,
    )  # fmt: skip


def test_when_the_dialect_is_another_then_its_events_are_read_too() -> None:
    beta: list[tuple[float, dict[str, Any]]] = [
        (1.0, {"type": "conversation.item.created", "item": {"id": "a", "role": "user", "content": [{"text": "Hi?"}]}}),
        (1.1, {"type": "conversation.item.created", "item": {"id": "b", "type": "function_call"}}),
        (1.2, {"type": "response.created", "response": {"id": "r", "status": "in_progress"}}),
        (1.3, {"type": "response.text.delta", "response_id": "r", "delta": "Hello."}),
        (1.4, {"type": "response.done", "response": {"id": "r", "status": "completed"}}),
        (1.5, {"type": "conversation.item.truncated", "item_id": "c", "audio_end_ms": 1234567}),
        (1.6, {"type": "error", "error": {"message": "no"}}),
        (1.7, {"type": "error", "error": "not so"}),
        (1.8, {"type": "error", "error": None}),
        (1.9, {"type": "nothing.that.is.read", "item": None}),
        (2.0, {"no": "type"}),
    ]
    (turn,) = turns(entries(beta))
    assert (turn.item_id, turn.transcript, turn.answer, turn.status) == ("a", "Hi?", "Hello.", "completed")
    assert marks(entries(beta)) == [Mark(1.5, "cut at 1234567 ms"), Mark(1.6, "no"), Mark(1.7, "not so"), Mark(1.8, "")]


@pytest.mark.parametrize(
    "line", ["[]", "7", '{"t": 1.0}', '{"t": "x", "in": {}}', '{"t": 1.0, "sound": [1]}', "\udc80"]
)
def test_when_a_line_is_damaged_then_the_others_are_read(tmp_path: Path, line: str) -> None:
    recorder = record(tmp_path)
    recorder.event_in('{"type": "x"}')
    recorder.close()
    recorder.join()
    with (recorder.folder / "events.jsonl").open("ab") as file:
        file.write(line.encode(errors="surrogateescape") + b"\n")
    assert [content(e) for e in Tape.read(recorder.folder).entries] == [{"type": "x"}]


def test_when_two_runs_are_compared_then_drawn_words_and_pieces_are_no_difference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    then = entries(ANSWER)
    assert compare(then, then) == 0
    # The model says other words, in other pieces and later.
    other = [(t + 1, dict(e)) for t, e in ANSWER]
    other[4][1]["delta"] = "Good day"
    other.insert(5, other[4])
    assert compare(then, entries(other)) == 0
    assert "Good day" in capsys.readouterr().out
    misheard = [(t, e | {"transcript": "Yellow."} if "transcript" in e else e) for t, e in ANSWER]
    assert compare(then, entries(misheard)) == 1
    assert "Yellow." in capsys.readouterr().out
    failed = [*ANSWER[:-1], (2.5, {"type": "response.done", "response": {"id": "resp_1", "status": "failed"}})]
    assert compare(then, entries(failed)) == 1
    # There is one more event, and one more turn.
    assert compare(then, entries([*ANSWER, (3.0, {"type": "error", "error": {"message": "no"}})])) == 1
    assert compare(then, entries([*ANSWER, (3.0, ANSWER[0][1] | {"item_id": "item_3"})])) == 2


def test_when_a_session_is_drawn_then_the_page_has_its_turns_and_refers_to_nothing_else(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    recorder.audio_in(np.full(3200, 0.3, np.float32))
    for _, event in ANSWER:
        recorder.event_out(json.dumps(event))
    recorder.event_out('{"type": "conversation.item.truncated", "item_id": "item_2", "audio_end_ms": 750}')
    recorder.close()
    recorder.join()
    write_timeline(recorder.folder, tmp_path / "t.html")
    page = (tmp_path / "t.html").read_text()
    assert page == render(Tape.read(recorder.folder))
    assert "Hello &lt;b&gt;." in page
    assert "cut at 750 ms" in page
    assert "http" not in page
    assert "<script" not in page


def test_when_a_folder_holds_several_sessions_then_they_are_found_in_order(tmp_path: Path) -> None:
    for name, began, lines in (
        ("b", 2, '{"t": 1.5, "out": {}}\n{"t": 9.'),
        ("a", 5, ""),
        ("c", 1, '{"t": 3, "in": {}}\n'),
    ):
        (tmp_path / name).mkdir()
        facts = SessionFacts(id=f"sess-{name}", began=began)
        (tmp_path / name / "session.json").write_bytes(msgspec.json.encode(facts))
        (tmp_path / name / "events.jsonl").write_text(lines)
    # This line is longer than LAST_LINES_BYTES.
    (tmp_path / "a" / "events.jsonl").write_text(json.dumps({"t": 4.0, "in": {"image": "A" * 200_000}}) + "\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "session.json").write_text("{")
    found = sessions_in(tmp_path)
    assert [(s.folder.name, s.facts.id, s.seconds) for s in found] == [
        ("c", "sess-c", 3.0),
        ("b", "sess-b", 1.5),
        ("a", "sess-a", 4.0),
    ]
    assert sessions_in(tmp_path / "a") == []
    assert sessions_in(tmp_path / "missing") == []


@pytest.mark.parametrize("command", ["timeline", "replay"])
def test_when_the_folder_of_all_recordings_is_given_then_its_sessions_are_listed(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = record(tmp_path)
    recorder.event_in("{}")
    recorder.close()
    recorder.join()
    assert main([command, str(tmp_path)]) == 1
    listed = capsys.readouterr()
    assert listed.out.startswith(f"{recorder.folder}  sess-1  ")
    assert listed.out.endswith(" s\n")
    assert "name one of them" in listed.err
    assert main([command, str(tmp_path / "missing")]) == 1
    assert capsys.readouterr().err.endswith("missing is not a recorded session: there is no such folder\n")
