"""`--profile auto`: its choice, the reason it gives, and when it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from antiphon.engine.local import weights
from antiphon.loading.profile_choice import SPEED_FILE, choose_profile
from antiphon.loading.recommendation import MEMORY_GB
from antiphon.loading.selection import selected_models
from antiphon.settings import EngineOptions, ModelSettings, Settings


def never() -> float:
    raise AssertionError("the machine was measured")


@pytest.mark.parametrize(
    ("seconds_a_billion", "expected"),
    # A fast machine, a laptop, and two that are too slow or busy: `light` is only chosen for lack of memory.
    [(0.01, "large"), (0.06, "default"), (0.15, "default"), (0.5, "default")],
)
def test_the_largest_profile_that_answers_in_time_is_chosen(
    seconds_a_billion: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.loading.profile_choice.free_gb", lambda: 16.0)
    choice = choose_profile(Settings(), lambda: seconds_a_billion)
    assert choice.profile == expected
    assert "the largest profile that takes at most 0.8 s is chosen" in choice.reason
    assert choice.applied(Settings()).models.profile == expected


def test_a_profile_that_does_not_fit_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.loading.profile_choice.free_gb", lambda: MEMORY_GB["large"] - 0.1)
    choice = choose_profile(Settings(), lambda: 0.01)
    assert choice.profile == "default"
    assert f"needs {MEMORY_GB['large']:g} GB" in choice.reason


def test_where_the_default_profile_does_not_fit_the_light_one_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.loading.profile_choice.free_gb", lambda: MEMORY_GB["default"] - 0.1)
    assert choose_profile(Settings(), lambda: 0.01).profile == "light"


def test_where_nothing_may_be_fetched_only_what_is_there_is_chosen(tmp_path: Path) -> None:
    settings = Settings(models=ModelSettings(home=str(tmp_path), offline=True))
    assert choose_profile(settings, lambda: 0.01).profile == "default"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(models=ModelSettings(profile="large")), "large"),
        (Settings(models=ModelSettings(profile="hub")), "hub"),
        (Settings(engine=EngineOptions(language_model="none")), "default"),
        (Settings(engine=EngineOptions(conversation_model="somewhere")), "default"),
        (Settings(models=ModelSettings(device="cuda")), "large"),
    ],
)
def test_where_the_settings_leave_nothing_open_the_machine_is_not_measured(settings: Settings, expected: str) -> None:
    choice = choose_profile(settings, never)
    assert choice.profile == expected
    assert choice.reason


def test_the_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, measured = Settings(models=ModelSettings(home=str(tmp_path))), list[int]()

    def measure(threads: int) -> float:
        measured.append(threads)
        return 0.06

    monkeypatch.setattr(weights, "seconds_a_billion", measure)
    choices = [choose_profile(settings).profile for _ in range(2)]
    assert (choices, measured) == (["default"] * 2, [0])
    # Another machine's result in a shared folder is ignored, and a damaged file is replaced by a new measurement.
    file = tmp_path / SPEED_FILE
    for text in (json.dumps(json.loads(file.read_text()) | {"key": "another"}), "{", json.dumps({"key": None})):
        file.write_text(text)
        choose_profile(settings)
    assert len(measured) == 4


def test_a_machine_has_a_speed() -> None:
    assert 1e-4 < weights.seconds_a_billion(1) < 10


def test_a_profile_that_nobody_has_chosen_is_the_default_one() -> None:
    assert selected_models(Settings()) == selected_models(Settings(models=ModelSettings(profile="default")))
