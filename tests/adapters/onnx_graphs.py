"""Small ONNX graphs of random weights, with the shapes of published turn models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HIDDEN = 4


def streaming_graph(
    path: Path,
    *,
    audio: str,
    chunk: int,
    outputs: Sequence[tuple[str, tuple[int, ...]]],
    states: Sequence[tuple[str, str]],
    extra: tuple[str, tuple[int, ...]] | None = None,
    softmax: bool = False,
    seed: int = 0,
) -> None:
    """Write a recurrent graph: state' = tanh(audio A + state B [+ extra C]), output = sigmoid(state' D).

    `audio`: the input of shape [1, chunk]. `outputs`: names and shapes, which begin with 1. `states`: pairs of the
    state input and the output with its next value, of shape [1, HIDDEN]. `extra`: another input. `softmax`: over an
    output's last axis, in place of the sigmoid.
    """
    rng = np.random.default_rng(seed)
    inputs = [helper.make_tensor_value_info(audio, TensorProto.FLOAT, (1, chunk))]
    found, nodes, weights = [], [], []

    def weight(name: str, *shape: int) -> str:
        scale = 3.0 / np.sqrt(shape[0])
        weights.append(numpy_helper.from_array((rng.normal(size=shape) * scale).astype(np.float32), name))
        return name

    if extra:
        inputs.append(helper.make_tensor_value_info(extra[0], TensorProto.FLOAT, extra[1]))
        size = int(np.prod(extra[1]))
        weights.append(numpy_helper.from_array(np.array([1, size], np.int64), "flat"))
        nodes.append(helper.make_node("Reshape", [extra[0], "flat"], ["extra_flat"]))
    for k, (state, after) in enumerate(states):
        inputs.append(helper.make_tensor_value_info(state, TensorProto.FLOAT, (1, HIDDEN)))
        found.append(helper.make_tensor_value_info(after, TensorProto.FLOAT, (1, HIDDEN)))
        nodes.append(helper.make_node("MatMul", [audio, weight(f"a{k}", chunk, HIDDEN)], [f"x{k}"]))
        nodes.append(helper.make_node("MatMul", [state, weight(f"b{k}", HIDDEN, HIDDEN)], [f"h{k}"]))
        nodes.append(helper.make_node("Add", [f"x{k}", f"h{k}"], [f"s{k}"]))
        if extra:
            nodes.append(helper.make_node("MatMul", ["extra_flat", weight(f"c{k}", size, HIDDEN)], [f"e{k}"]))
            nodes.append(helper.make_node("Add", [f"s{k}", f"e{k}"], [f"t{k}"]))
        nodes.append(helper.make_node("Tanh", [f"t{k}" if extra else f"s{k}"], [after]))
    last = states[-1][1]
    for name, shape in outputs:
        size = int(np.prod(shape))
        found.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        weights.append(numpy_helper.from_array(np.array(shape, np.int64), f"shape_{name}"))
        nodes.append(helper.make_node("MatMul", [last, weight(f"d_{name}", HIDDEN, size)], [f"y_{name}"]))
        nodes.append(helper.make_node("Reshape", [f"y_{name}", f"shape_{name}"], [f"z_{name}"]))
        nodes.append(helper.make_node("Softmax" if softmax else "Sigmoid", [f"z_{name}"], [name]))
    graph = helper.make_graph(nodes, "small", inputs, found, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, str(path))


# The states of turn-1-mini's graph.
TURN_1_MINI_STATES = tuple(
    (f"state_{name}", f"new_state_{name}") for name in ("audio", "conv1", "conv2", "k", "v", "k_valid", "h6")
)


def turn_1_mini(folder: Path) -> None:
    """Write a folder with the names and the sizes of turn-1-mini's input and output."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "turn-1-mini"}')
    streaming_graph(
        folder / "turn-1-mini.step.onnx",
        audio="audio",
        chunk=2560,
        outputs=[("probs", (1, 8))],
        states=TURN_1_MINI_STATES,
    )


def streaming_turn(folder: Path) -> None:
    """Write a folder with the chunk and the outputs of streaming-turn; the other names are not published."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "streaming-turn"}')
    streaming_graph(
        folder / "model.onnx",
        audio="chunk",
        chunk=640,
        outputs=[("eot", (1, 1)), ("eot_late", (1, 1))],
        states=[("gru_state", "gru_state_out")],
    )
