"""The backchannel detector: chunks of 40 ms with the state of the response, on a graph of its published shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon.adapters.sound_backchannel.detector import SoundBackchannelDetector
from antiphon.adapters.spec import LaneModelOptions
from antiphon.contracts import OverlapSound
from antiphon.errors import ModelError
from antiphon.loading.loader import load, store_of
from antiphon.modeling.onnx_stream import OnnxStream
from antiphon.pipelines.turn_blend import CheckedBackchannel, DetectorFailures
from antiphon.settings import ModelSettings, Settings
from tests.adapters.onnx_graphs import streaming_graph

RNG = np.random.default_rng(3)
PCM = RNG.normal(0, 0.2, 640 * 5).astype(np.float32)
RESPONSE = RNG.uniform(0, 1, (10, 8)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bc").mkdir()
    (tmp_path / "bc" / "config.json").write_text('{"model_type": "backchannel-detector"}')
    streaming_graph(
        tmp_path / "bc" / "backchannel-fp32.onnx",
        audio="chunk",
        chunk=640,
        extra=("bot_state", (1, 2, 8)),
        outputs=[("intent", (1, 2, 5))],
        states=[("conv_cache", "conv_cache_out"), ("gru_state", "gru_state_out")],
        softmax=True,
    )
    return tmp_path / "bc"


@pytest.fixture
def detector(folder: Path) -> Iterator[SoundBackchannelDetector]:
    detector = SoundBackchannelDetector(folder, "bc", LaneModelOptions())
    yield detector
    detector.lane.close()


def test_each_chunk_is_judged_with_the_response_in_its_frames_however_it_arrives(
    folder: Path, detector: SoundBackchannelDetector
) -> None:
    async def fed(*frames: int) -> list[OverlapSound]:
        stream, found, at = detector.open(), list[OverlapSound](), 0
        for count in frames:
            pcm = PCM[at * 320 : (at + count) * 320]
            found += await stream.feed(pcm, RESPONSE[at : at + count])
            at += count
        return found

    whole = asyncio.run(fed(10))
    assert asyncio.run(fed(1, 2, 3, 4)) == whole
    graph = OnnxStream(folder / "backchannel-fp32.onnx", "bc")
    state = graph.state
    for k, sound in enumerate(whole):
        given = {"chunk": PCM[None, 640 * k : 640 * (k + 1)], "bot_state": RESPONSE[None, 2 * k : 2 * k + 2]}
        values, state = graph.step(given, state)
        last = values["intent"][0, -1]
        assert (sound.backchannel, sound.floor) == pytest.approx((last[0] + last[1], last[2] + last[3]))
    assert len(whole) == 5


def test_when_the_audio_is_no_number_then_the_detector_fails_and_it_is_counted(
    detector: SoundBackchannelDetector,
) -> None:
    failures = DetectorFailures()
    stream = CheckedBackchannel(detector, failures).open()
    with pytest.raises(ModelError, match="not a number"):
        asyncio.run(stream.feed(np.full(640, np.nan, np.float32), RESPONSE[:2]))
    assert failures.counts["bc", "error"] == 1


def test_the_settings_name_the_folder(folder: Path) -> None:
    settings = Settings(models=ModelSettings(backchannel_detector=str(folder), turn_detector="none"))
    models = load(settings, store_of(settings.models), roles=("turn", "backchannel"))
    try:
        assert models.backchannel_detector
        assert (models.backchannel_detector.id, models.turn_detector) == ("bc", None)
        assert models.names == ()
    finally:
        models.close()


@pytest.mark.parametrize(
    "config", [{"output": "vad_"}, {"audio": "x"}, {"threshold": 1}, {"frame_ms": 30}, {"floor": ["wait"]}]
)
def test_a_folder_of_another_shape_does_not_load(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "backchannel-detector", **config}))
    with pytest.raises(ModelError):
        SoundBackchannelDetector(folder, "bc", LaneModelOptions())
