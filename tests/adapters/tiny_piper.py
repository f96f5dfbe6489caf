"""Small Piper voices with random weights: the operators and the form of the published graphs, and their JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CHANNELS, HOP, NUM_SYMBOLS = 6, 256, 64
PHONEMES = "abdefghijklmnopstuvwzæçðŋɐɑɔəɚɛɜɡɪɫɹɾʃʊʌʒʔˈˌːθ,.?!:; "


def write_voice(folder: Path, name: str, *, speakers: int = 1, rate_hz: int = 16_000, **fields: Any) -> Path:
    """Write NAME.onnx and NAME.onnx.json into a folder, and return the graph's path. `fields` are added to the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.onnx"
    onnx.save(_model(speakers), str(path))
    symbols = {"_": [0], "^": [1], "$": [2]} | {symbol: [k] for k, symbol in enumerate(PHONEMES, 3)}
    config: dict[str, Any] = {
        "audio": {"sample_rate": rate_hz, "quality": "medium"},
        "espeak": {"voice": "en-us"},
        "language": {"code": "en_US"},
        "inference": {"noise_scale": 0.667, "length_scale": 1, "noise_w": 0.8},
        "phoneme_type": "espeak",
        "phoneme_id_map": symbols,
        "num_symbols": NUM_SYMBOLS,
        "num_speakers": speakers,
        "speaker_id_map": {f"p{k}": k for k in range(speakers)} if speakers > 1 else {},
    }
    (folder / f"{name}.onnx.json").write_text(json.dumps(config | fields))
    return path


class _Graph:
    """Collects nodes and weights. Each method adds nodes, and returns the name of their result."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self._random = np.random.default_rng(61)

    def node(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        name = out or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def value(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def drawn(self, *shape: int, scale: float = 0.4) -> str:
        return self.value(self._random.standard_normal(shape) * scale, np.float32)

    def conv(self, x: str, into: int, of: int, kernel: int, dilation: int = 1) -> str:
        reach = (kernel - 1) * dilation // 2
        weight = self.drawn(into, of, kernel, scale=1 / np.sqrt(of * kernel))
        return self.node("Conv", x, weight, kernel_shape=[kernel], dilations=[dilation], pads=[reach, reach])

    def up(self, x: str, into: int, of: int, stride: int) -> str:
        weight, pad = self.drawn(of, into, 2 * stride, scale=1 / np.sqrt(of)), stride // 2
        return self.node(
            "ConvTranspose", x, weight, kernel_shape=[2 * stride], strides=[stride], pads=[pad, stride - pad]
        )

    def scale(self, k: int) -> str:
        return self.node("Gather", "scales", self.value(k), axis=0)


def _model(speakers: int) -> Any:
    g, c = _Graph(), CHANNELS
    x = g.node("Transpose", g.node("Gather", g.drawn(NUM_SYMBOLS, c, scale=1), "input"), perm=[0, 2, 1])
    x = g.node("Add", x, g.conv(x, c, c, 3))
    speaker = ""
    if speakers > 1:
        vector = g.node("Gather", g.drawn(speakers, c, scale=1), "sid")
        speaker = g.node("Unsqueeze", vector, g.value([2]))
    # The durations, with noise.
    rate = g.conv(x, 1, c, 1)
    rate = g.node("Add", rate, g.node("Mul", g.node("RandomNormalLike", rate), g.scale(2)))
    durations = g.node("Ceil", g.node("Mul", g.node("Exp", rate), g.scale(1)))
    # Each frame is of the symbol in whose time it is.
    ends = g.node("CumSum", g.node("Reshape", durations, g.value([-1, 1])), g.value(0))
    total = g.node("ReduceSum", durations, keepdims=0)
    zero, one = g.value(0, np.float32), g.value(1, np.float32)
    frames = g.node("Unsqueeze", g.node("Range", zero, total, one), g.value([0]))
    before = g.node("Cast", g.node("Less", frames, ends), to=TensorProto.FLOAT)
    starts = g.node("Sub", ends, g.node("Reshape", durations, g.value([-1, 1])))
    path = g.node("Sub", before, g.node("Cast", g.node("Less", frames, starts), to=TensorProto.FLOAT))
    mean = g.node("MatMul", x, path)
    latents = g.node("Add", mean, g.node("Mul", g.node("RandomNormalLike", mean), g.scale(0)))
    latents = g.node("Add", latents, g.conv(latents, c, c, 5))
    # The decoder.
    y = g.conv(latents, 8, c, 7)
    if speaker:
        y = g.node("Add", y, g.conv(speaker, 8, c, 1))
    y = g.up(g.node("LeakyRelu", y, alpha=0.1), 4, 8, 16)
    y = g.node("Add", y, g.conv(g.node("LeakyRelu", y, alpha=0.1), 4, 4, 5, dilation=6))
    y = g.up(g.node("LeakyRelu", y, alpha=0.1), 2, 4, 16)
    y = g.node("Mul", g.conv(g.node("LeakyRelu", y, alpha=0.1), 1, 2, 7), g.value(0.1, np.float32))
    y = g.node("Tanh", y)
    g.node("Unsqueeze", y, g.value([1]), out="output")
    info = helper.make_tensor_value_info
    inputs = [
        info("input", TensorProto.INT64, [1, "phonemes"]),
        info("input_lengths", TensorProto.INT64, [1]),
        info("scales", TensorProto.FLOAT, [3]),
        *([info("sid", TensorProto.INT64, [1])] if speakers > 1 else []),
    ]
    # The published graphs use the lengths to mask batches.
    g.node("Identity", "input_lengths", out="lengths")
    outputs = [info("output", TensorProto.FLOAT, [1, 1, 1, "time"])]
    graph = helper.make_graph(g.nodes, "voice", inputs, outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)
