"""The network of CAM++ as an ONNX graph: Wang et al. 2023, CAM++: A fast and efficient network for speaker verification
using context-aware masking (arXiv 2303.00332).

A small residual network over mel bands, then three blocks of densely connected layers over time, each with a mask from
its context, then the mean and the deviation over time, projected to a vector. The names of the weights are those of
3D-Speaker.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

from antiphon.modeling.sound.voice_weights import Weights

NUM_BANDS = 80
# The layers of each block, and the dilation of their convolutions.
BLOCKS = ((12, 1), (24, 2), (16, 2))
EPSILON = 1e-5
# The longest input, in frames. Context is pooled in segments of 100 frames after halving, so there is only one.
MAX_FRAMES = 200


class _Graph:
    """An ONNX graph under construction. Each method adds nodes, and returns the name of their output."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, TensorProto] = {}

    def constant(self, name: str, value: npt.NDArray[np.generic]) -> str:
        self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        out = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, [*inputs], [out], **attributes))
        return out

    def norm(self, x: str, name: str, *, relu: bool = True) -> str:
        """Normalize by the statistics of the training, which are a scale and a shift."""
        mean, variance = (self.weights[f"{name}.running_{part}"] for part in ("mean", "var"))
        weight = self.weights.get(f"{name}.weight", np.ones_like(mean))
        bias = self.weights.get(f"{name}.bias", np.zeros_like(mean))
        parts = {"weight": weight, "bias": bias, "mean": mean, "variance": variance}
        names = [self.constant(f"{name}.{part}", value) for part, value in parts.items()]
        out = self.add("BatchNormalization", x, *names, epsilon=EPSILON)
        return self.add("Relu", out) if relu else out

    def conv(self, x: str, name: str, *, strides: tuple[int, ...] = (1,), dilation: int = 1) -> str:
        """Convolve, with as much padding as keeps the length."""
        kernel = self.weights[f"{name}.weight"]
        inputs = [x, self.constant(f"{name}.weight", kernel)]
        if (bias := self.weights.get(f"{name}.bias")) is not None:
            inputs.append(self.constant(f"{name}.bias", bias))
        rank = kernel.ndim - 2
        pads = [(size - 1) // 2 * dilation for size in kernel.shape[2:]]
        strides = strides if len(strides) == rank else (1,) * rank
        return self.add("Conv", *inputs, pads=[*pads, *pads], strides=[*strides], dilations=[dilation] * rank)


def network(weights: Weights) -> bytes:
    """Return the network as an ONNX model, from `frames` [count, num_frames, 80] to `vectors` [count, size].

    `num_frames` is at most MAX_FRAMES. Raises KeyError for weights of another network.
    """
    graph = _Graph(weights)
    x = graph.add("Transpose", "frames", perm=[0, 2, 1])
    x = graph.add("Unsqueeze", x, graph.constant("channel", np.array([1])))
    x = _bands(graph, x)
    x = graph.norm(graph.conv(x, "xvector.tdnn.linear", strides=(2,)), "xvector.tdnn.nonlinear.batchnorm")
    for block, (num_layers, dilation) in enumerate(BLOCKS, 1):
        for layer in range(1, num_layers + 1):
            x = graph.add("Concat", x, _layer(graph, x, f"xvector.block{block}.tdnnd{layer}", dilation), axis=1)
        x = graph.norm(x, f"xvector.transit{block}.nonlinear.batchnorm")
        x = graph.conv(x, f"xvector.transit{block}.linear")
    x = graph.norm(x, "xvector.out_nonlinear.batchnorm")
    x = graph.conv(_statistics(graph, x), "xvector.dense.linear")
    x = graph.norm(x, "xvector.dense.nonlinear.batchnorm", relu=False)
    graph.nodes.append(helper.make_node("Squeeze", [x, graph.constant("time", np.array([2]))], ["vectors"]))
    size = weights["xvector.dense.linear.weight"].shape[0]
    made = helper.make_graph(
        graph.nodes,
        "speaker encoder",
        [helper.make_tensor_value_info("frames", TensorProto.FLOAT, ["count", "num_frames", NUM_BANDS])],
        [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["count", size])],
        [*graph.constants.values()],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


def _bands(graph: _Graph, x: str) -> str:
    """Return the features of bands as channels, [count, channels, num_frames]."""
    x = graph.norm(graph.conv(x, "head.conv1"), "head.bn1")
    for name in (f"head.layer{layer}.{block}" for layer in (1, 2) for block in (0, 1)):
        strides = (2, 1) if name.endswith(".0") else (1, 1)
        y = graph.norm(graph.conv(x, f"{name}.conv1", strides=strides), f"{name}.bn1")
        y = graph.norm(graph.conv(y, f"{name}.conv2"), f"{name}.bn2", relu=False)
        if f"{name}.shortcut.0.weight" in graph.weights:
            x = graph.norm(graph.conv(x, f"{name}.shortcut.0", strides=strides), f"{name}.shortcut.1", relu=False)
        x = graph.add("Relu", graph.add("Add", y, x))
    x = graph.norm(graph.conv(x, "head.conv2", strides=(2, 1)), "head.bn2")
    channels = graph.weights["xvector.tdnn.linear.weight"].shape[1]
    return graph.add("Reshape", x, graph.constant("channels", np.array([0, channels, -1])))


def _layer(graph: _Graph, x: str, name: str, dilation: int) -> str:
    """Return the new channels of one densely connected layer."""
    x = graph.conv(graph.norm(x, f"{name}.nonlinear1.batchnorm"), f"{name}.linear1")
    x = graph.norm(x, f"{name}.nonlinear2.batchnorm")
    local = graph.conv(x, f"{name}.cam_layer.linear_local", dilation=dilation)
    # The context is the mean over all of the time plus that over a segment. Here, both are the same.
    mean = graph.add("ReduceMean", x, axes=[2], keepdims=1)
    context = graph.add("Relu", graph.conv(graph.add("Add", mean, mean), f"{name}.cam_layer.linear1"))
    mask = graph.add("Sigmoid", graph.conv(context, f"{name}.cam_layer.linear2"))
    return graph.add("Mul", local, mask)


def _statistics(graph: _Graph, x: str) -> str:
    """Return the mean and the unbiased deviation over time, [count, 2 * channels, 1]."""
    mean = graph.add("ReduceMean", x, axes=[2], keepdims=1)
    away = graph.add("Sub", x, mean)
    squares = graph.add("ReduceSumSquare", away, axes=[2], keepdims=1)
    length = graph.add("Gather", graph.add("Shape", x), graph.constant("axis", np.array(2)))
    degrees = graph.add(
        "Sub", graph.add("Cast", length, to=TensorProto.FLOAT), graph.constant("one", np.array(1, np.float32))
    )
    deviation = graph.add("Sqrt", graph.add("Div", squares, degrees))
    return graph.add("Concat", mean, deviation, axis=1)
