"""Heads over an encoder's frames: over Smart Turn's own encoder, and over graphs of random weights."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from antiphon.adapters.encoder_head.turn_detector import EncoderHead
from antiphon.adapters.spec import LaneModelOptions
from antiphon.errors import ModelError
from antiphon.loading.loader import prepare, store_of
from antiphon.loading.selection import TURN_ROLES, selected_models
from antiphon.pipelines.turn_blend import BlendPart, TurnBlend, logit
from antiphon.settings import load as load_settings

RNG = np.random.default_rng(4)
TURN = RNG.normal(0, 0.1, 24000).astype(np.float32)
FRAMES, STEPS, WIDTH = 800, 400, 8


def written(path: Path, given: str, shape: tuple[int, ...], found: str, out: tuple[int, ...], scale: float) -> None:
    """Write a graph that multiplies with random weights: the mels of each two frames, or the mean of all steps."""
    nodes, weights = [], []
    if given == "input_features":
        nodes += [helper.make_node("MaxPool", [given], ["pooled"], kernel_shape=[2], strides=[2])]
        nodes += [helper.make_node("Transpose", ["pooled"], ["rows"], perm=[0, 2, 1])]
    else:
        weights.append(numpy_helper.from_array(np.array([1], np.int64), "axis"))
        nodes += [helper.make_node("ReduceMean", [given, "axis"], ["rows"], keepdims=0)]
    size = shape[1] if given == "input_features" else shape[2]
    matrix = np.random.default_rng(7).normal(0, scale, (size, out[-1])).astype(np.float32)
    weights.append(numpy_helper.from_array(matrix, "matrix"))
    nodes.append(helper.make_node("MatMul", ["rows", "matrix"], ["product"]))
    nodes.append(helper.make_node("Identity" if found != "probability" else "Sigmoid", ["product"], [found]))
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in ((given, shape), (found, out))]
    graph = helper.make_graph(nodes, "small", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 8
    onnx.save(model, str(path))


def made(folder: Path, found: str = "probability", scale: float = 1.0, width: int = WIDTH, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "encoder_head"} | config))
    written(folder / "encoder.onnx", "input_features", (1, 80, FRAMES), "frames", (1, STEPS, WIDTH), 0.2)
    written(folder / "head.onnx", "frames", (1, STEPS, width), found, (1, 1), scale)
    return folder


@contextmanager
def loaded(folder: Path) -> Iterator[EncoderHead]:
    detector = EncoderHead(folder, folder.name, LaneModelOptions())
    try:
        yield detector
    finally:
        detector.lane.close()


def judged(folder: Path, pcm: np.ndarray = TURN) -> float:
    with loaded(folder) as detector:
        return asyncio.run(detector.complete(pcm))


def test_only_the_end_of_the_turn_counts_and_the_threshold_moves_the_judgement(tmp_path: Path) -> None:
    plain = judged(made(tmp_path / "plain"))
    assert 0.01 < plain < 0.99
    long = np.concatenate((TURN, RNG.normal(0, 0.1, 8 * 16000).astype(np.float32)))
    assert judged(tmp_path / "plain", long) == judged(tmp_path / "plain", long[-8 * 16000 :]) != plain
    strict = judged(made(tmp_path / "strict", threshold=0.9))
    assert logit(strict) == pytest.approx(logit(plain) - logit(0.9), abs=1e-5)
    # The same head, whose last step is missing.
    raw = judged(made(tmp_path / "raw", found="value", is_logit=True))
    assert raw == pytest.approx(plain, abs=1e-6)
    assert judged(made(tmp_path / "as-it-is", is_normalized=False)) != plain


@pytest.mark.slow
def test_a_head_runs_over_the_encoder_of_smart_turn(tmp_path: Path) -> None:
    settings = load_settings({}, os.environ)
    (source,) = selected_models(settings, TURN_ROLES)
    released = prepare(settings, store_of(settings.models), source) / "smart-turn.onnx"
    folder = made(tmp_path / "real", width=384, frames="layer_norm_8", scale=0.05)
    onnx.utils.extract_model(str(released), str(folder / "encoder.onnx"), ["input_features"], ["layer_norm_8"])
    assert judged(folder) != judged(folder, -TURN[::-1])


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"threshold": 1.0}, "threshold"),
        ({"frames": "states"}, "expected states; the graph has frames"),
        ({"head": "other.onnx"}, "name the .onnx file"),
        ({"languages": "en"}, "languages"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path, config: dict[str, Any], error: str) -> None:
    with pytest.raises(ModelError, match=error):
        judged(made(tmp_path / "bad", **config))


def test_a_head_of_another_width_is_refused_before_the_first_pause(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="failed"):
        judged(made(tmp_path / "wide", width=WIDTH + 1))


def test_a_head_that_answers_no_probability_or_takes_another_rate_leaves_the_pause_to_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = [made(tmp_path / "value", found="value", scale=100.0), made(tmp_path / "rate", rate_hz=8000)]
    with loaded(folders[0]) as value, loaded(folders[1]) as rate, loaded(made(tmp_path / "good")) as good:
        blend = TurnBlend([BlendPart("value", value), BlendPart("rate", rate), BlendPart("good", good)])
        stream = blend.open()

        async def main() -> list[float]:
            return [await stream.complete(0, TURN), await stream.complete(0, TURN), await good.complete(TURN)]

        first, second, alone = asyncio.run(main())
    assert first == second == alone
    logged = [r.message for r in caplog.records if "(error)" in r.message]
    assert sorted(message.split(" (")[0] for message in logged) == [
        "turns are decided without rate", "turns are decided without value"
    ]  # fmt: skip
    assert "takes audio of 8000 Hz" in caplog.text
    assert "no probability" in caplog.text
