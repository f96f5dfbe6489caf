"""`antiphon top`: the board that it makes of a server's metrics."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from antiphon.admission.certificate import Certificate, CertifiedKind, Objective
from antiphon.admission.headroom import Headroom
from antiphon.cli.main import main
from antiphon.cli.top import TURN_STAGES, Reading, board, parsed, quantile
from antiphon.contracts import Urgency
from antiphon.recording.tracing.turns import TurnTrace
from antiphon.remote.pool import Endpoint, Pool
from antiphon.server.metrics import Metrics
from antiphon.sessions.conversation.native_units import UnitDone
from antiphon.settings import Settings
from tests.server.scripted import serving

HISTOGRAM = "antiphon_latency_seconds"


def reading(metrics: Metrics) -> Reading:
    return parsed(metrics.text().decode(), 0.0)


def shown(before: Reading, now: Reading) -> list[list[str]]:
    console = Console(width=120, file=io.StringIO())
    console.print(board("http://here", before, now))
    assert isinstance(console.file, io.StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_quantiles_lie_in_their_buckets_and_are_of_the_time_between_two_readings() -> None:
    metrics = Metrics()
    for _ in range(10):
        metrics.measure("final", 0.15)
    before = reading(metrics)
    assert quantile(before, before, HISTOGRAM, 0.5, kind="final") == pytest.approx(0.15)
    assert quantile(before, before, HISTOGRAM, 1.0, kind="final") == pytest.approx(0.2)
    for _ in range(4):
        metrics.measure("final", 0.04)
    metrics.measure("final", 100.0)
    now = reading(metrics)
    half = quantile(before, now, HISTOGRAM, 0.5, kind="final")
    assert half is not None
    assert 0.025 < half < 0.05
    # Above the last bound, only the bound is known.
    assert quantile(before, now, HISTOGRAM, 1.0, kind="final") == 10.0
    assert quantile(now, now, HISTOGRAM, 0.5, kind="vad") is None
    assert quantile(before, before, "nothing", 0.5) is None


def test_the_board_has_what_was_in_between_and_what_is_now() -> None:
    metrics = Metrics()
    metrics.sessions.labels("realtime").set(3)
    metrics.refused.labels("no_room").inc(5)
    metrics.measure("final", 0.3)
    metrics.step("language", Urgency.FINAL.value, 0.01, 0.02)
    before = reading(metrics)
    metrics.refused.labels("no_room").inc(2)
    metrics.measure("vad", 0.01)
    metrics.step("language", Urgency.FINAL.value, 0.01, 0.02)
    metrics.state_degraded.set(1)
    lines = shown(before, reading(metrics))
    assert lines[0] == ["http://here", "store", "failing"]
    assert lines[1] == ["sessions:", "3", "realtime;", "connections:", "0;", "refused:", "2"]
    rows = {line[0]: line for line in lines if line}
    assert rows["vad"][1] == "1"
    # No observations since the previous reading.
    assert rows["final"][1:] == ["0", "-", "-"]
    assert rows["language"][:3] == ["language", "final", "1"]


def test_without_a_certificate_the_board_names_no_load_and_no_room() -> None:
    metrics = Metrics()
    metrics.watch_headroom(Headroom(None, 256), {"conversation": 13})
    text = metrics.text().decode()
    assert "\nantiphon_load" not in text
    assert "\nantiphon_headroom_sessions" not in text
    lines = shown(reading(metrics), reading(metrics))
    assert ["load:", "unknown,", "no", "certificate;", "headroom:", "no", "light", "is", "red"] in lines
    assert ["conversation", "13", "-", "-"] in lines


def test_it_reads_a_server_and_its_key_and_says_what_it_cannot(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(Settings(), server=replace(Settings().server, metrics_key="of-metrics"))
    with serving(settings) as (ws, *_):
        url = ws.replace("ws", "http", 1)
        monkeypatch.delenv("ANTIPHON_METRICS_KEY", raising=False)
        assert main(["top", "--url", url, "--once"]) == 1
        assert "answers 401 for /metrics: it needs a key: ANTIPHON_METRICS_KEY" in capsys.readouterr().err
        monkeypatch.setenv("ANTIPHON_METRICS_KEY", "wrong")
        assert main(["top", "--url", url, "--once"]) == 1
        assert "it needs another key than ANTIPHON_METRICS_KEY" in capsys.readouterr().err
        monkeypatch.setenv("ANTIPHON_METRICS_KEY", "of-metrics")
        assert main(["top", "--url", f"{url}/metrics", "--once"]) == 0
        assert "sessions: none" in capsys.readouterr().out
    assert main(["top", "--url", url, "--once"]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_the_board_has_what_is_held_and_why_nobody_is_let_in() -> None:
    metrics = Metrics()
    kinds = {"captions": CertifiedKind(8, Objective(1.5, "a delay"), ())}
    headroom = Headroom(Certificate(1, "", {}, (), {}, kinds), 256)
    metrics.watch_headroom(headroom, {"captions": 2})
    trace = TurnTrace(0, "a" * 32, "b" * 16, speech_end_s=1.0, endpoint_s=1.4, final_s=1.5, first_sound_s=1.9)
    metrics.turn(trace)
    now = reading(metrics)
    lines = shown(now, now)
    assert ["captions", "2", "6", "8"] in lines
    assert ["speech", "0", "-", "-"] in lines, "not certified: how many more is not known"
    assert ["load:", "25%;", "headroom:", "no", "light", "is", "red"] in lines
    (whole,) = (line for line in lines if line[:3] == ["voice", "to", "voice"])
    assert whole[3] == "1"
    assert [line[0] for line in lines if line and line[0] in TURN_STAGES] == ["endpoint", "final", "first_sound"]
    for at_s in (0.0, 1.0, 2.0):
        headroom.overload.see({"loop": 9.0}, at_s)
    assert ["load:", "25%;", "headroom:", "none,", "loop", "red"] in shown(now, reading(metrics))


def test_late_units_of_a_native_model_are_on_the_board() -> None:
    metrics = Metrics()
    now = reading(metrics)
    assert "units:" not in str(shown(now, now))
    for delay_s in (0.2, 1.5, 0.4):
        metrics.unit(UnitDone(1.0, delay_s))
    now = reading(metrics)
    assert shown(now, now)[2][-4:] == ["units:", "3,", "late:", "1"]


def test_a_language_model_that_is_away_is_in_the_first_line() -> None:
    here = reading(Metrics())
    away = replace(here, samples={**here.samples, ("antiphon_language_model_away", ()): 1.0})
    assert shown(here, here)[0] == ["http://here", "serves"]
    assert shown(away, away)[0] == ["http://here", "language", "model", "away"]


def test_the_servers_of_models_elsewhere_are_shown_with_what_they_did() -> None:
    metrics = Metrics()
    one, other = Endpoint("http://a:1/v1"), Endpoint("tcp://b:10300")
    metrics.watch((), lambda: 0.0, pools=(Pool("transcriber", [one, other]),))
    before = reading(metrics)
    one.requests, one.failures, one.second_attempts, one.running = 7, 2, 1, 3
    one.times.note(0.25)
    other.is_away = True
    rows = shown(before, reading(metrics))
    assert ["a:1", "transcriber", "7", "2", "1", "3", "250"] in rows
    assert ["b:10300", "transcriber", "0", "0", "0", "0", "-", "away"] in rows
    assert not any("transcriber" in row for row in shown(reading(Metrics()), reading(Metrics())))


def test_the_telephone_calls_of_each_carrier_are_shown_with_what_has_ended_the_others() -> None:
    metrics = Metrics()
    assert not [row for row in shown(reading(metrics), reading(metrics)) if row[:1] == ["telephone"]]
    metrics.telephone_calls.labels("twilio", "incoming").set(2)
    metrics.telephone_calls_ended.labels("twilio", "hang_up").inc(3)
    before = reading(metrics)
    metrics.telephone_calls.labels("twilio", "outgoing").set(1)
    metrics.telephone_calls_ended.labels("twilio", "hang_up").inc()
    metrics.telephone_calls_ended.labels("twilio", "time_limit").inc()
    now = reading(metrics)
    assert ["twilio", "2", "1", "2", "hang_up", "1,", "time_limit", "1"] in shown(before, now)
    assert ["twilio", "2", "0", "3", "hang_up", "3"] in shown(before, before)
