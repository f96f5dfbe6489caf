"""The turn detectors of the settings, loaded from real folders, as one blend."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from antiphon.errors import ModelError
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import load, store_of
from antiphon.pipelines.turn_blend import logit
from antiphon.remote.turn_detector import RemoteTurnDetector
from antiphon.remote.turn_socket import RemoteTurnSocket
from antiphon.settings import ModelSettings, Settings
from tests.adapters.onnx_graphs import streaming_turn, turn_1_mini

TURN = np.random.default_rng(2).normal(0, 0.1, 16000).astype(np.float32)


def loaded(text: str) -> LoadedModels:
    settings = Settings(models=ModelSettings(turn_detector=text))
    return load(settings, store_of(settings.models), roles=("turn",))


def test_the_named_detectors_are_loaded_and_blended_by_their_weights(tmp_path: Path) -> None:
    turn_1_mini(tmp_path / "mini")
    streaming_turn(tmp_path / "stream")
    one, other = str(tmp_path / "mini"), str(tmp_path / "stream")
    models = [loaded(text) for text in (one, other, f"{one},{other}*3")]
    try:
        alone, second, both = (asyncio.run(m.turn_detector.complete(TURN)) for m in models if m.turn_detector)
        assert logit(both) == pytest.approx((logit(alone) + 3 * logit(second)) / 4)
        assert [lane.name for lane in models[2].lanes] == ["turn-mini", "turn-stream"]
    finally:
        for m in models:
            m.close()
    assert loaded("none").turn_detector is None


def test_a_detector_that_cannot_judge_does_not_stop_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    turn_1_mini(tmp_path / "mini")
    (tmp_path / "mini" / "config.json").write_text('{"model_type": "turn-1-mini", "rate_hz": 8000}')
    models = loaded(f"{tmp_path / 'mini'},http://127.0.0.1:9/judge")
    try:
        asyncio.run(models.warm())
        assert models.turn_detector
        failed = {name for name, reason in models.turn_detector.failures.counts if reason == "error"}
        assert failed == {"mini", "127.0.0.1:9"}
        assert "takes audio of 8000 Hz" in caplog.text
    finally:
        models.close()


def test_the_scheme_of_a_url_tells_how_the_server_is_asked() -> None:
    models = loaded("http://127.0.0.1:9/judge,wss://127.0.0.1:10/turns*2")
    try:
        assert models.turn_detector
        kinds = [type(part.detector) for part in models.turn_detector.parts]
        assert kinds == [RemoteTurnDetector, RemoteTurnSocket]
    finally:
        models.close()


def test_a_folder_without_a_graph_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "mini").mkdir()
    (tmp_path / "mini" / "config.json").write_text('{"model_type": "turn-1-mini"}')
    with pytest.raises(ModelError, match=r"name the \.onnx file"):
        loaded(str(tmp_path / "mini"))
