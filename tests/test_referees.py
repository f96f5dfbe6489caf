"""The referees: the lines of a call, the scripts for the callers, and the figures of what they measured."""

from __future__ import annotations

import json
import runpy
import sys
import types
import wave
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from bench.common import HERE
from bench.hearing.clips import DATA
from bench.referees import hotato, voicebench
from bench.referees.calls import PAUSE_S, Line, calls
from bench.referees.figures import Heard, figures, row
from bench.referees.measure import referee
from bench.referees.servers import MODES, Target, Unavailable, session

TARGET = Target("semantic_vad", "http://127.0.0.1:1", session("semantic_vad"))


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    return calls(DATA, 1)[0]


def test_a_call_has_every_kind_of_line_from_other_recordings(lines: list[Line]) -> None:
    assert [line.expected for line in lines] == ["respond", "stop", "respond", "ignore", "ignore", "respond"]
    said = [line.recording for line in lines if line.expected != "ignore"]
    assert len(set(said)) == len(said)
    (pause,) = (line for line in lines if line.name == "pause")
    longest, run = 0, 0
    for step in range(0, len(pause.pcm) - 160, 160):
        run = run + 1 if abs(pause.pcm[step : step + 160]).max() < 0.01 else 0
        longest = max(longest, run)
    assert longest * 0.01 >= PAUSE_S - 0.02


def test_the_scenario_of_voicebench_has_the_lines_and_the_session(lines: list[Line], tmp_path: Path) -> None:
    document = json.loads(voicebench.scenario(lines, TARGET, tmp_path).read_text())
    assert document["adapter"]["options"]["configuration"]["audio"]["input"]["turn_detection"]["type"] == "semantic_vad"
    assert [turn["expect"] for turn in document["turns"]] == [line.expected for line in lines]
    assert document["turns"][1]["start"]["after"] == "agent_speech_start"
    for line, turn in zip(lines, document["turns"], strict=True):
        with wave.open(turn["audio"]["file"]) as file:
            assert file.getframerate() == document["sample_rate"]
            assert file.getnframes() / file.getframerate() == pytest.approx(len(line.pcm) / 16_000, abs=1e-3)


def turn(start_s: float, onset_s: float, offset_s: float, **measured: Any) -> dict[str, Any]:
    none = ("response_latency_ms", "stop_latency_ms", "stopped", "false_barge_in", "transcript")
    facts = {"start_s": start_s, "user_onset_s": onset_s, "user_offset_s": offset_s, "talk_over": False}
    return dict.fromkeys(none) | facts | measured


def some(*names: str, lines: list[Line]) -> list[Line]:
    return [line for line in lines if line.name in names]


def test_a_pause_that_is_talked_into_needs_an_answer_after_its_end(lines: list[Line]) -> None:
    spoken = turn(1, 1.0, 6.0, response_latency_ms=-2500, talk_over=True)
    report = {"turns": [spoken], "user_segments": [[1, 3], [4.2, 6]], "duration_s": 20}
    only = some("pause", lines=lines)
    (cut,) = voicebench.heard(report | {"agent_segments": [[3.5, 4.6]]}, only, [])
    assert (cut.is_talked_into, cut.is_answered, cut.talked_over_s) == (True, False, 0.4)
    (later,) = voicebench.heard(report | {"agent_segments": [[3.5, 4.6], [6.8, 12]]}, only, [])
    assert (later.is_answered, later.latency_s) == (True, -2.5)


def test_the_speech_that_a_line_interrupts_is_no_answer_to_it(lines: list[Line]) -> None:
    cut = turn(10, 10.1, 13, stop_latency_ms=300, stopped=True)
    report = {"turns": [cut], "user_segments": [[10.1, 13]], "duration_s": 30}
    only = some("interruption", lines=lines)
    (unanswered,) = voicebench.heard(report | {"agent_segments": [[5, 10.4]]}, only, [10.4])
    assert (unanswered.was_speaking, unanswered.is_stopped, unanswered.stop_s) == (True, True, 0.3)
    assert not unanswered.is_answered


@pytest.mark.parametrize(("silenced_s", "is_stopped"), [(10.4, True), (9.9, False), (12.0, False)])
def test_a_sound_stops_only_an_answer_that_does_not_end_by_itself(
    silenced_s: float, is_stopped: bool, lines: list[Line], tmp_path: Path
) -> None:
    sneeze = turn(10, 10.1, 10.5, false_barge_in=True)
    report = {"turns": [sneeze], "user_segments": [[10.1, 10.5]], "duration_s": 30, "agent_segments": [[5, 11.0]]}
    events = [("response.done", 10.2), ("input_audio_buffer.speech_started", silenced_s)]
    log = tmp_path / "events.jsonl"
    log.write_text("".join(json.dumps({"at_s": at_s, "type": kind}) + "\n" for kind, at_s in events))
    (found,) = voicebench.heard(report, some("sound-1", lines=lines), voicebench.silenced_s(log))
    assert (found.was_speaking, found.is_stopped) == (True, is_stopped)


def heard(line: str, expected: str, **measured: Any) -> Heard:
    facts = {"was_speaking": expected != "respond", "is_answered": True, "latency_s": None, "is_talked_into": False}
    facts |= {"talked_over_s": 0.0, "stop_s": None, "is_stopped": False, "transcript": ""}
    return Heard(line=line, expected=expected, recording="r", **(facts | measured))


def test_the_figures_count_only_what_could_happen() -> None:
    found = figures(
        [
            heard("question", "respond", latency_s=0.8),
            heard("interruption", "stop", stop_s=0.3, is_stopped=True),
            heard("interruption", "stop", was_speaking=False, is_answered=False),
            heard("pause", "respond", latency_s=-1.0, is_talked_into=True, talked_over_s=0.5),
            heard("pause", "respond", latency_s=1.1),
            heard("sound-1", "ignore", is_stopped=True),
            heard("sound-2", "ignore", was_speaking=False, is_answered=False),
            heard("last", "respond", latency_s=None, is_answered=False),
        ]
    )
    counts = {name: (part["count"], part["of"]) for name, part in found.items() if "count" in part}
    assert counts == {
        "pauses_talked_into": (1, 2),
        "pauses_that_cost_more_than_400_ms": (1, 2),
        "barge_ins_that_stop_it": (1, 1),
        "sounds_that_stop_it": (1, 1),
        "turns_without_an_answer": (2, 6),
    }
    assert (found["voice_to_voice"]["p50_s"], found["voice_to_voice"]["of"]) == (0.8, 1)
    assert row(found)["barge-in to silence, p50 / max"] == "0.30 (0.30 to 0.30) / 0.30"
    assert row(figures([]))["voice to voice, p50 / max"] == "-"


def score(gap_s: float | None, premature_s: float, **barge_in: Any) -> dict[str, Any]:
    return {
        "measurements": {"agent_talking_at_onset": barge_in.pop("talking", False)},
        "signals": {
            "barge_in": {"did_yield": False, "time_to_yield_sec": None, "talk_over_sec": 0.0} | barge_in,
            "latency": {"response_gap_sec": gap_s, "premature_start_sec": premature_s},
        },
    }


def test_the_signals_of_hotato_become_the_same_figures(lines: list[Line]) -> None:
    question, interruption, pause, *_ = lines
    plain = hotato.heard(question, {"onset": score(0.9, 0.0), "end": score(0.9, 0.0)})
    assert (plain.latency_s, plain.is_answered) == (0.9, True)
    cut = {"onset": score(None, 0.0, talking=True, did_yield=True, time_to_yield_sec=0.4), "end": score(None, 0.0)}
    stopped = hotato.heard(interruption, cut)
    assert (stopped.stop_s, stopped.is_stopped, stopped.is_answered) == (0.4, True, False)
    into = hotato.heard(pause, {"onset": score(None, 1.7, talk_over_sec=0.3), "end": score(0.8, 0.0)})
    assert (into.is_talked_into, into.latency_s, into.talked_over_s, into.is_answered) == (True, -1.7, 0.3, True)


def test_the_plan_of_hotato_waits_for_what_each_line_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands in for the package, which is only in its own environment: the plan is data.
    for name, names in {
        "hotato.caller": ("run_caller",), "hotato.caller_session": ("WebSocketCallerSession",),
        "hotato.core": ("run_single",),
    }.items():  # fmt: skip
        module = types.ModuleType(name)
        for attribute in names:
            setattr(module, attribute, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "hotato", types.ModuleType("hotato"))
    sys.modules["hotato.caller"].PLAN_SCHEMA = "schema"  # type: ignore[attr-defined]
    sys.modules["hotato.core"].ScoreConfig = dict  # type: ignore[attr-defined]
    plan = runpy.run_path(str(HERE / "peers" / "hotato" / "drive.py"))["plan"]
    given = [
        {"name": "question", "after": "session_start", "delay_ms": 0, "expected": "respond"},
        {"name": "cut", "after": "agent_speech_start", "delay_ms": 1500, "expected": "stop"},
        {"name": "last", "after": "agent_speech_end", "delay_ms": 10, "expected": "respond"},
    ]
    nodes = plan(given)["nodes"]
    kinds = [(node["type"], node.get("until", {}).get("any", [{}])[0].get("status")) for node in nodes]
    assert kinds == [
        ("say", None), ("listen", "agent_speech_started"), ("wait", None), ("say", None),
        ("listen", "agent_speech_started"), ("listen", "agent_speech_ended"), ("wait", None), ("say", None),
        ("wait", None), ("hangup", None),
    ]  # fmt: skip
    assert [node["next"] for node in nodes[:-1]] == [node["id"] for node in nodes[1:]]


def test_a_peer_that_cannot_run_is_in_the_result_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unavailable(name: str) -> None:
        raise Unavailable("its models are on a hub")

    monkeypatch.setattr("bench.referees.measure.measured_server", unavailable)
    monkeypatch.setattr("bench.referees.measure.RESULTS", tmp_path)
    path = referee("voicebench", DATA, ["livekit-agents"], 1)
    assert json.loads(path.read_text())["livekit-agents"]["cannot_run"] == "its models are on a hub"


def test_a_call_that_is_not_held_to_its_end_does_not_end_the_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = iter(([heard("question", "respond", latency_s=0.7)], RuntimeError("the ping timed out")))

    def call(lines: list[Line], target: Target, folder: Path) -> list[Heard]:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("bench.referees.measure.measured_server", lambda name: nullcontext(TARGET))
    monkeypatch.setattr("bench.referees.measure.REFEREES", {"voicebench": call})
    monkeypatch.setattr("bench.referees.measure.RESULTS", tmp_path)
    result = json.loads(referee("voicebench", DATA, ["server_vad"], 2).read_text())["server_vad"]
    assert result["failed_calls"] == ["the ping timed out"]
    assert (result["turns_without_an_answer"]["of"], len(result["calls"])) == (1, 1)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["voicebench", "hotato"])
def test_the_package_holds_a_call_with_this_server(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.referees.measure.RESULTS", tmp_path)
    result = json.loads(referee(name, DATA, MODES[:1], 1).read_text())[MODES[0]]
    assert result["turns_without_an_answer"] == result["turns_without_an_answer"] | {"of": 4, "count": 0}
    assert result["barge_in_to_silence"]["of"] == 1
    assert 0.1 < result["voice_to_voice"]["p50_s"] < 10
