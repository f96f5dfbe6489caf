"""Limits of what a further session in a step costs the host, which `antiphon bench host` counts with tiny models."""

from __future__ import annotations

import pytest
from bench.host import counted


@pytest.mark.slow
def test_one_more_text_adds_almost_nothing_to_a_frame_of_speech_and_no_step() -> None:
    found = counted("tts", [1, 8])["8"]
    assert found["passes"] <= 1.05
    assert found["adds"] <= 0.25
