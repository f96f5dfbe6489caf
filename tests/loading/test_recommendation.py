"""`antiphon doctor`: the recommended profile, from the speed of one of the models."""

from __future__ import annotations

import pytest

from antiphon.loading.recommendation import MEMORY_GB, SIZES, Speed, recommended
from antiphon.store.registry import PROFILES


@pytest.mark.parametrize(
    ("profile", "speed", "free_gb", "expected"),
    [
        # A model of half a billion parameters: fast enough, three times as fast, and too slow.
        ("default", Speed(0.1, 20.0), 16.0, "default"),
        ("default", Speed(0.03, 60.0), 16.0, "large"),
        ("default", Speed(0.5, 8.0), 16.0, "default"),
        ("default", Speed(0.7, 8.0), 16.0, "light"),
        # The same machine, measured by the large model's speed.
        ("large", Speed(0.1, 20.0), 16.0, "large"),
        # It would be fast enough, but does not fit.
        ("default", Speed(0.03, 60.0), 3.0, "default"),
        ("default", Speed(0.03, 60.0), 1.5, "light"),
        # Nothing is fast enough.
        ("default", Speed(9.0, 0.1), 16.0, "light"),
    ],
)
def test_the_largest_profile_that_answers_in_time_and_fits_is_recommended(
    profile: str, speed: Speed, free_gb: float, expected: str
) -> None:
    name, why = recommended(profile, speed, free_gb)
    assert name == expected
    assert all(one in why for one in SIZES)
    assert "the largest profile that takes at most 0.8 s is chosen" in why


def test_every_profile_can_be_recommended() -> None:
    assert set(SIZES) == set(MEMORY_GB) == set(PROFILES) - {"hub"}
