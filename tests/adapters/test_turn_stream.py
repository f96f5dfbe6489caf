"""Streaming turn detectors: however the audio arrives, the state gives the judgement of the turn as a whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon.adapters.spec import LaneModelOptions
from antiphon.adapters.turn_stream.turn_detector import StreamedTurnDetector
from antiphon.errors import ModelError
from antiphon.modeling.onnx_stream import OnnxStream
from antiphon.pipelines.turn_blend import logit
from tests.adapters.onnx_graphs import streaming_graph, streaming_turn, turn_1_mini

RNG = np.random.default_rng(1)
TURN = RNG.normal(0, 0.1, 16000).astype(np.float32)


@contextmanager
def loaded(folder: Path) -> Iterator[StreamedTurnDetector]:
    detector = StreamedTurnDetector(folder, folder.name, LaneModelOptions())
    try:
        yield detector
    finally:
        detector.lane.close()


@pytest.mark.parametrize("make", [turn_1_mini, streaming_turn])
def test_the_state_gives_the_judgement_of_the_whole_turn_however_it_arrives(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "model")
    with loaded(tmp_path / "model") as detector:

        async def main() -> tuple[list[float], list[float]]:
            stream, pieces, wholes = detector.open(), list[float](), list[float]()
            for end in (100, 3000, 3321, 9000, 9001, 16000):
                await stream.follow(7, TURN[: end - 50])
                pieces.append(await stream.complete(7, TURN[:end]))
                wholes.append(await detector.complete(TURN[:end]))
            # Another turn begins with an empty state.
            pieces.append(await stream.complete(8, TURN[:9000]))
            return pieces, [*wholes, wholes[3]]

        pieces, wholes = asyncio.run(main())
    assert pieces == wholes
    assert len(set(wholes[1:])) > 3
    assert all(0 <= p <= 1 for p in pieces)


def test_a_frame_that_fills_no_chunk_counts_and_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    turn_1_mini(tmp_path / "model")
    with loaded(tmp_path / "model") as detector:

        async def main() -> tuple[float, float, int]:
            stream = detector.open()
            whole = await stream.complete(0, TURN[:2560])
            later = await stream.complete(0, TURN[: 2560 + 640])
            return whole, later, stream.num_done

        whole, later, num_done = asyncio.run(main())
    assert (whole != later, num_done) == (True, 2560)


def test_the_output_that_is_farthest_above_its_own_threshold_counts(tmp_path: Path) -> None:
    streaming_turn(tmp_path / "model")
    with loaded(tmp_path / "model") as detector:
        graph = OnnxStream(tmp_path / "model" / "model.onnx", "model")
        values, _ = graph.step({"chunk": TURN[None, :640]}, graph.state)
        above = [logit(float(values[n][0, 0])) - logit(t) for n, t in (("eot", 0.6), ("eot_late", 0.4))]
        assert logit(asyncio.run(detector.complete(TURN[:640]))) == pytest.approx(max(above))


def test_a_long_turn_of_which_nothing_was_computed_is_judged_by_its_end(tmp_path: Path) -> None:
    turn_1_mini(tmp_path / "model")
    config = {"model_type": "turn-1-mini", "history_s": 0.32}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with loaded(tmp_path / "model") as detector:
        long = np.concatenate((RNG.normal(0, 0.1, 2560 * 4).astype(np.float32), TURN[: 2560 * 2]))
        ask: Callable[[Any], Awaitable[float]] = detector.complete
        assert asyncio.run(ask(long)) == asyncio.run(ask(TURN[: 2560 * 2]))  # type: ignore[arg-type]


def test_when_a_model_wants_another_rate_then_each_judgement_says_so(tmp_path: Path) -> None:
    turn_1_mini(tmp_path / "model")
    config = {"model_type": "turn-1-mini", "rate_hz": 8000}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with loaded(tmp_path / "model") as detector, pytest.raises(ModelError, match="8000 Hz"):
        asyncio.run(detector.complete(TURN))


def test_when_a_graph_computes_no_number_then_the_judgement_fails_and_the_next_begins_anew(tmp_path: Path) -> None:
    turn_1_mini(tmp_path / "model")
    with loaded(tmp_path / "model") as detector:

        async def main() -> None:
            stream = detector.open()
            await stream.complete(0, TURN)
            broken = TURN.copy()
            broken[-2000:] = np.nan
            with pytest.raises(ModelError, match="not a number"):
                await stream.complete(0, np.concatenate((broken, broken)))
            assert await stream.complete(0, TURN) == await detector.complete(TURN)

        asyncio.run(main())


def test_a_folder_of_its_own_shape_needs_only_its_chunk_and_its_outputs(tmp_path: Path) -> None:
    config = {"model_type": "turn_stream", "chunk_ms": 80, "outputs": {"over": 0.5}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    streaming_graph(
        tmp_path / "any.onnx", audio="x", chunk=1280, outputs=[("over", (1, 4))], states=[("h_in", "h_out")]
    )
    with loaded(tmp_path) as detector:
        assert 0 < asyncio.run(detector.complete(TURN)) < 1


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "turn_stream"}, "chunk_ms"),
        ({"model_type": "turn-1-mini", "outputs": {"probs": 2}}, "threshold"),
        ({"model_type": "turn-1-mini", "outputs": 5}, "outputs"),
        ({"model_type": "turn-1-mini", "outputs": {"other": 0.5}}, "no output other"),
        ({"model_type": "turn-1-mini", "audio": "sound"}, "one input for audio"),
        ({"model_type": "turn-1-mini", "states": {"state_k": "gone"}}, "no gone"),
        ({"model_type": "turn-1-mini", "file": "gone.onnx"}, "name the .onnx file"),
        ([], "Expected `object`"),
    ],
)
def test_a_folder_that_does_not_describe_its_graph_does_not_load(tmp_path: Path, config: Any, says: str) -> None:
    turn_1_mini(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=says):
        StreamedTurnDetector(tmp_path / "model", "model", LaneModelOptions())
