"""Certifying: the search, recordings and turns, the page, and every kind of client with a real server."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from antiphon.admission.certificate import (
    DEFAULT_MIXED,
    KINDS,
    Certificate,
    CertifiedKind,
    Kind,
    Objective,
    Step,
    differs,
    encode,
    machine,
    read,
)
from antiphon.certify.certify import HOPELESS, Certifier, Counted, certify, plan, summary
from antiphon.certify.clients import OBJECTIVES, Turn
from antiphon.certify.native_client import UNITS_A_TURN, UnitResults, UnitTimer
from antiphon.certify.page import page
from antiphon.certify.recordings import read_recordings, speech_end_s
from antiphon.certify.search import ALLOWED, EDGE_TURNS, SessionSearch, Trial, is_lost, percentile
from antiphon.certify.wire import Event, Loudspeaker, wire_pcm
from antiphon.cli.certify import RECORDINGS, kinds_of
from antiphon.errors import SettingsError
from tests.adapters import tiny_minicpmo
from tests.cluster.processes import Host
from tests.conftest import DATA, SMALL, VOICE, Serve
from tests.forking import run

GOAL = Objective(1.0, "a delay")


@pytest.mark.parametrize("holds", [0, 1, 2, 3, 7, 8, 9, 31, 100, 128])
@pytest.mark.parametrize("first", [1, 2, 5])
def test_the_search_finds_what_is_held_to_the_session(holds: int, first: int) -> None:
    search, tried = SessionSearch(first, 128), list[Trial]()
    while trial := search.next():
        tried.append(trial)
        lost = trial.sessions > holds
        search.tell(trial, 4 if lost else trial.turns, 4 if lost else 0, ended_early=lost)
    assert search.held == holds
    assert len(tried) <= 2 * 8 + 4
    # Both sides of the edge had enough turns.
    edge = {trial.sessions for trial in tried if trial.is_edge}
    assert edge >= {n for n in (holds, holds + 1) if 1 <= n <= 128}


def searched(seed: int, edge: float, growth: float) -> tuple[int, int]:
    """Search a simulated machine whose turns exceed the objective at random, more often with more sessions.

    Returns the number of sessions that the search finds, and the number of trials.
    """
    drawn, search, trials = random.Random(seed), SessionSearch(4, 1024), 0
    while trial := search.next():
        trials += 1
        delays = list[float]()
        part = ALLOWED * math.exp((trial.sessions - edge) * growth)
        lost, wanted = False, max(trial.turns, trial.sessions)
        while len(delays) < wanted and not lost:
            delays.append(2.0 if drawn.random() < part else 0.5)
            lost = is_lost(delays, GOAL, wanted, HOPELESS if trial.is_edge else 1)
        search.tell(trial, len(delays), sum(d > 1 for d in delays), ended_early=lost)
    return search.held, trials


@pytest.mark.parametrize(("edge", "growth", "spread"), [(18.5, 0.4, 1.0), (7.5, 0.6, 1.0), (60.5, 0.12, 3.0)])
def test_the_search_comes_near_an_edge_that_chance_blurs(edge: float, growth: float, spread: float) -> None:
    found = [searched(seed, edge, growth) for seed in range(60)]
    held = np.array([number for number, _ in found])
    assert abs(held.mean() - (edge - 0.5)) < spread / 2
    assert held.std() < spread
    assert max(trials for _, trials in found) < 40


def test_trials_that_contradict_each_other_are_read_together() -> None:
    search = SessionSearch(2, 64)
    search.tell(Trial(4, 20, is_edge=False), 20, 0, ended_early=False)
    # The trial of six sessions was unlucky, as the trial of eight shows.
    search.tell(Trial(6, 20, is_edge=False), 20, 2, ended_early=False)
    assert search.held == 4
    search.tell(Trial(8, 60, is_edge=True), 60, 1, ended_early=False)
    assert search.held == 8
    # A trial in which no turn ended does not hold its sessions.
    search.tell(Trial(9, 60, is_edge=True), 0, 0, ended_early=False)
    assert search.held == 8


def test_the_turn_that_ends_a_trial_is_not_held_against_it() -> None:
    one, other = SessionSearch(2, 64), SessionSearch(2, 64)
    one.tell(Trial(2, 20, is_edge=False), 20, 2, ended_early=False)
    other.tell(Trial(2, 20, is_edge=False), 20, 2, ended_early=True)
    assert one.tried[2].part == pytest.approx(0.1)
    assert other.tried[2].part == pytest.approx(1 / 19)


def test_a_turn_that_failed_counts_as_one_without_an_end() -> None:
    good = [Turn("captions", 0.5)] * 57
    assert Counted([*good, *[Turn("captions", None, "late")] * 3]).step(4, GOAL) == Step(4, 60, 3, 0.5, 0.5, True)
    assert not Counted([*good, *[Turn("captions", None, "late")] * 4]).step(4, GOAL).met
    assert Counted([]).step(4, GOAL) == Step(4, 0, 0, None, None, False)


def test_percentiles_are_values_that_came_and_know_infinity() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([float(n) for n in range(1, 61)], 95) == 57.0
    assert percentile([1.0, math.inf], 95) == math.inf
    assert percentile([1.0, 2.0, math.inf], 50) == 2.0
    assert percentile([], 50) is None


def test_a_step_ends_early_only_where_it_cannot_be_met() -> None:
    drawn = random.Random(1)
    for _ in range(200):
        delays = [drawn.choice([0.5, 0.5, 0.5, 0.5, 2.0]) for _ in range(60)]
        for count in range(1, 61):
            if is_lost(delays[:count], GOAL, 60):
                rest = [0.0] * (60 - count)
                assert (percentile(delays[:count] + rest, 95) or 0) > 1.0
                break


def test_sound_that_comes_late_is_seen_and_sound_that_comes_ahead_is_not() -> None:
    second = Event(delta="A" * 64_000, item_id="i")
    speaker = Loudspeaker()
    for at_s in (10.0, 10.1, 10.2, 12.9):
        speaker.take(second, at_s)
    assert (speaker.begun_s, speaker.late_s) == (10.0, 0.0)
    assert speaker.heard_by_s == pytest.approx(14.0)
    speaker.take(second, 14.5)
    assert speaker.late_s == pytest.approx(0.5)
    assert speaker.heard_by_s == pytest.approx(15.5)


def test_recordings_are_english_turns_that_end_where_their_speech_does() -> None:
    found = read_recordings(DATA)
    assert len(found) >= 8
    assert all(r.text and 0.5 < r.speech_end_s <= len(r.pcm) / 16_000 + 0.01 for r in found)
    tone = np.sin(np.arange(16_000) / 5).astype(np.float32)
    assert speech_end_s(np.concatenate([tone, np.zeros(8_000, np.float32)])) == pytest.approx(1.0, abs=0.02)
    assert len(wire_pcm(tone)) == 2 * 24_000


@pytest.mark.parametrize("manifest", [None, "", "{", '{"id": 1}', '{"kind": "noise", "language": "en"}'])
def test_a_folder_without_speech_is_refused_by_its_name(tmp_path: Path, manifest: str | None) -> None:
    if manifest is not None:
        (tmp_path / "manifest.jsonl").write_text(manifest)
    with pytest.raises(SettingsError, match=r"--data: .*manifest\.jsonl"):
        read_recordings(tmp_path)


def certificate() -> Certificate:
    steps = (Step(1, 60, 0, 0.3, 0.5, True), Step(2, 20, 9, None, None, False))
    kinds = {"captions": CertifiedKind(1, GOAL, steps), "speech": CertifiedKind(0, GOAL, ())}
    return Certificate(1, "2026-11-26T00:00:00Z", machine(), ("<m>",), {"flags": []}, kinds)


def test_a_certificate_is_read_as_it_was_written_and_drawn_without_what_it_lacks(tmp_path: Path) -> None:
    file = tmp_path / "certificate.json"
    file.write_bytes(encode(certificate()))
    assert read(file) == certificate()
    assert json.loads(file.read_text())["version"] == 1
    drawn = page(certificate())
    assert "&lt;m&gt;" in drawn
    assert "<m>" not in drawn
    assert drawn.count("<circle") == 1
    # No mixture was measured: the page shows none, and the limit is the cautious default.
    assert json.loads(file.read_text())["mixed"] is None
    assert "may be mixed" not in drawn
    assert "may be mixed up to a load of 0.7." in page(msgspec.structs.replace(certificate(), mixed=0.7))
    assert certificate().most_mixed == DEFAULT_MIXED
    assert "Nothing could be measured" in drawn


def test_a_certificate_of_another_machine_is_known_as_such() -> None:
    assert differs(machine()) == []
    assert differs(machine() | {"cpu": "another", "cores": 1000}) == ["cpu", "cores"]
    assert differs({}) == []


def test_without_another_folder_the_recordings_of_the_checkout_are_taken() -> None:
    assert read_recordings(RECORDINGS)


def test_kinds_are_named() -> None:
    assert kinds_of("") == ()
    assert kinds_of("native") == ("native",)
    assert kinds_of("speech, captions") == ("captions", "speech")
    with pytest.raises(SettingsError, match="there is no dancing; there are captions"):
        kinds_of("dancing")


@pytest.mark.heavy
@pytest.mark.server
def test_a_client_of_every_kind_takes_turns_with_a_real_server(serve: Serve) -> None:
    """One session of each kind, one after another. The objectives are generous, because this test checks no times."""
    # With the rounding of some machines, the smallest model may give an empty answer to a turn.
    server = serve("--language-model", SMALL, "--synthesizer", VOICE, "--weights", "fp32")
    said = list[str]()
    goals = {kind: Objective(30.0, one.delay) for kind, one in OBJECTIVES.items()}

    async def measure(kind: Kind) -> Step:
        certifier = Certifier(server.url, "", DATA, minutes=1, say=said.append, objectives=goals)
        return (await certifier.step({kind: 1}, Trial(1, 1, is_edge=True), 120.0))[kind]

    async def main() -> list[Step]:
        return [await measure(kind) for kind in kinds]

    kinds = [kind for kind in KINDS if kind != "native"]
    for kind, step in zip(kinds, asyncio.run(main()), strict=True):
        assert step.turns >= 1, (kind, said)
    assert len(said) == len(kinds)
    # On a busy machine audio may be late, and the smallest model may give an empty answer. Nothing else may fail.
    reasons = [reason for line in said for reason in line.partition(" failed: ")[2].split("; ") if reason]
    assert all(
        re.fullmatch(r"sound was \d+ ms late|an answer without audio: completed", reason) for reason in reasons
    ), said


@pytest.mark.heavy
@pytest.mark.server
def test_a_native_session_is_measured_by_its_units(tmp_path: Path) -> None:
    """One session, whose first ten units are not counted. The limit is generous, because this test checks no times."""
    environment = {"ANTIPHON_TEST_MODEL": str(tiny_minicpmo.write(tmp_path))}
    host = Host("host", ("tests.adapters.marked_minicpmo", "serve"), (), tmp_path, environment)
    said, goals = list[str](), {"native": msgspec.structs.replace(OBJECTIVES["native"], p95_s=30.0)}
    host.start()
    host.wait()
    try:
        certifier = Certifier(host.url, "", DATA, minutes=1, say=said.append, objectives=goals)
        assert asyncio.run(certifier.kinds()) == ("captions", "native")
        step = asyncio.run(certifier.step({"native": 1}, Trial(1, 1, is_edge=True), 60.0))["native"]
    finally:
        host.kill()
    assert (step.turns, step.units, step.failed, step.met) == (1, UNITS_A_TURN, 0, True), said
    assert f"of {UNITS_A_TURN} units missed" in said[0]


@pytest.mark.server
def test_a_server_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    command = ["antiphon", "certify", "--url", "ws://127.0.0.1:9", "--kinds", "captions"]
    done = run(*command, "--minutes", "0.05", "--out", str(out))
    assert done.returncode == 1
    assert "--url ws://127.0.0.1:9: no server answers there" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kinds", "dancing"], "--kinds: there is no dancing"),
        (["--data", "/nowhere"], "--data: /nowhere/manifest.jsonl cannot be read"),
        (["--check", "/nowhere"], "/nowhere: No such file"),
        (["--url", "ws://x", "--", "--profile", "light"], "--url measures a running server"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_started(arguments: list[str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "antiphon", "certify", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_no_unit_of_a_native_session_may_be_missed() -> None:
    goal, search = OBJECTIVES["native"], SessionSearch(4, 64, 0.0)
    good, late = Turn("native", 0.5, units=10), Turn("native", 1.5, units=10, missed=2)
    assert Counted([good] * 59).step(4, goal) == Step(4, 59, 0, 0.5, 0.5, True, 590, 0)
    assert Counted([*[good] * 59, late]).step(4, goal) == Step(4, 60, 0, 0.5, 0.5, False, 600, 2)
    assert summary("native", Counted([good, late]).step(4, goal), ()).endswith("2 turns, 2 of 20 units missed")
    assert is_lost([0.5, 1.5], goal, 60, HOPELESS)
    # The turn that ends a trial decides, because none may be over.
    search.tell(Trial(4, 60, is_edge=True), 12, 1, ended_early=True)
    assert search.held == 0


@pytest.mark.parametrize("holds", [0, 1, 5, 8, 31])
def test_the_search_finds_the_number_of_sessions_without_a_missed_unit(holds: int) -> None:
    search, trials = SessionSearch(4, 64, 0.0), 0
    while trial := search.next():
        trials += 1
        lost = trial.sessions > holds
        search.tell(trial, 3 if lost else trial.turns, int(lost), ended_early=lost)
    assert search.held == holds
    assert trials <= 16


def events(*types: str, **fields: object) -> list[Event]:
    return [msgspec.convert({"type": kind} | fields, Event) for kind in types]


def test_results_are_counted_by_unit_whatever_a_unit_has() -> None:
    listens = events("response.listen", response={"metadata": {"reason": "model"}})
    nothing_said = events("response.listen", response={"metadata": {"reason": "nothing_said"}})
    text, sound = events("response.output_audio_transcript.delta"), events("response.output_audio.delta", delta="AA==")
    empty = events("response.output_audio.delta")

    def done(units: int) -> list[Event]:
        return events("response.done", response={"status": "completed", "usage": {"output_tokens": units}})

    def counts(*parts: list[Event]) -> list[int]:
        results = UnitResults()
        return [[results.see(event) for event in part][-1] for part in parts]

    assert counts(listens, nothing_said, listens) == [1, 1, 2]
    # The first unit of a turn has text without sound, the second both, the third only sound, the fourth nothing.
    assert counts([*events("response.created"), *text], text + sound, sound, [*empty, *done(4)], listens) == [
        1, 2, 3, 4, 5,
    ]  # fmt: skip
    # A turn of two units, of which the second has nothing.
    assert counts(events("response.created"), done(2)) == [1, 2]
    # The first unit of a turn has nothing, so its sound comes a unit later.
    results = UnitResults()
    assert [results.see(events("response.created")[0], 1.0), results.see(sound[0], 2.0)] == [1, 2]
    # The first unit has text, and the second only sound: the time tells that they are two.
    results = UnitResults()
    spoken = zip([*events("response.created"), *text, *sound], [1.0, 1.0, 2.0], strict=True)
    assert [results.see(event, at_s) for event, at_s in spoken] == [1, 1, 2]
    # A turn that was cut off tells no usage.
    assert counts([*events("response.created"), *sound, *sound], done(0), listens) == [2, 2, 3]


def test_a_result_is_timed_from_the_unit_that_it_belongs_to() -> None:
    timer, listens = UnitTimer(), events("response.listen", response={"metadata": {"reason": "model"}})[0]
    for at_s in (1.0, 2.0, 3.0):
        timer.sent(at_s)
    for at_s in (1.25, 3.5):
        timer.see(listens, at_s)
    assert list(timer.delays) == [0.25, 1.5]
    assert timer.waiting_s(4.0) == 1.0
    # Silence that the server feeds in addition has a result too.
    timer.see(listens, 4.0)
    timer.see(listens, 5.0)
    timer.sent(6.0)
    timer.see(listens, 6.5)
    assert list(timer.delays) == [0.25, 1.5, 1.0, 0.5]
    assert timer.waiting_s(7.0) == 0.0


class Box(Certifier):
    """A certifier of a simulated machine that holds a number of sessions, or fewer in longer trials."""

    def __init__(self, holds: int, minutes: float, longer: int = 0) -> None:
        super().__init__("", "", DATA, minutes=minutes, say=lambda _: None, objectives=dict.fromkeys(KINDS, GOAL))
        self.holds, self.longer, self.tried = holds, longer, list[tuple[int, int]]()

    async def trial(
        self, sessions: Mapping[Kind, int], trial: Trial, most_s: float | None = None
    ) -> dict[Kind, Counted]:
        ((kind, number),) = sessions.items()
        self.tried.append((number, trial.turns))
        met = number <= self.holds - (self.longer if trial.is_edge else 0)
        return {kind: Counted([Turn(kind, 0.5 if met else 2.0)] * trial.turns, ended_early=not met)}


@pytest.mark.parametrize("holds", [0, 1, 3, 4, 7, 19, 60])
@pytest.mark.parametrize("longer", [0, 1, 2])
def test_what_is_certified_was_held_for_the_turns_of_the_edge(holds: int, longer: int) -> None:
    box = Box(holds, 1.0, longer)
    found = asyncio.run(box.kind("captions"))
    # Long trials outweigh the results of short ones.
    assert found.sessions == max(0, holds - longer)
    assert not found.sessions or (found.sessions, EDGE_TURNS) in box.tried
    assert [step.sessions for step in found.curve] == sorted({number for number, _ in box.tried})


def test_where_the_time_is_over_what_was_tried_is_the_answer() -> None:
    found = asyncio.run(Box(10, 0.0).kind("captions"))
    assert (found.sessions, found.curve) == (0, ())


def test_a_box_that_holds_more_than_is_tried_is_said_to() -> None:
    found = asyncio.run(Box(5000, 1.0).kind("captions", most=64))
    assert (found.sessions, found.bounded) == (64, True)


@pytest.mark.parametrize(("minutes", "seconds"), [(0.0, [None]), (11.0, [300.0, 300.0, 60.0])])
def test_a_number_is_tried_again_for_one_step_or_for_minutes(minutes: float, seconds: list[float | None]) -> None:
    class Held(Certifier):
        tried: ClassVar[list[float | None]] = []

        async def trial(
            self, sessions: Mapping[Kind, int], trial: Trial, most_s: float | None = None
        ) -> dict[Kind, Counted]:
            self.tried.append(most_s)
            return {"speech": Counted([Turn("speech", 0.1 if len(self.tried) > 1 else 0.2)] * 10)}

    certifier = Held("", "", DATA, minutes=minutes, say=lambda _: None)
    found = asyncio.run(certifier.held("speech", 7))
    assert certifier.tried == ([240.0] if seconds == [None] else seconds)
    assert (found.sessions, found.turns, found.met) == (7, 10 * len(seconds), True)


@pytest.mark.parametrize(
    ("kinds", "sole", "minutes", "says"),
    [
        (
            ("captions", "speech"),
            ("captions",),
            10.0,
            r"one caller .*20 turns.*, then captions, speech .*10 min each.*mix",
        ),
        (("speech",), (), 2.0, r": speech \(at most 2 min\)$"),
        (("captions",), ("captions",), 0.0, r"--turns-alone 0 leaves it out\)$"),
    ],
)
def test_it_says_first_what_it_measures_and_for_how_long(
    kinds: tuple[Kind, ...], sole: tuple[Kind, ...], minutes: float, says: str
) -> None:
    assert re.search(says, plan(kinds, sole, minutes, 20, mixed=True))


def test_of_one_kind_no_mixture_is_certified() -> None:
    class Alone(Box):
        async def models(self) -> tuple[str, ...]:
            return ()

    box, lines = Alone(3, 1.0), list[str]()
    box.say = lines.append
    found = asyncio.run(certify(box, ("speech",), flags=(), url="", mixed=True, turns_alone=20))
    assert lines[0] == "to be measured: speech (at most 1 min)"
    assert (found.kinds["speech"].sessions, found.mixed) == (3, None)
