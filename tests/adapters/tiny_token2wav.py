"""A token2wav of tiny dimensions, with the files and names of the released one.

The random seed of each weight is the checksum of its name. The published code ran with the same weights when the golden
numbers were made (published_token2wav.py).
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from antiphon.adapters.minicpmo.token2wav.files import read_flow_config
from antiphon.adapters.minicpmo.token2wav.flow import Flow
from tests.adapters import tiny_hift

# The golden frames.
GOLDEN = Path(__file__).parent / "golden" / "token2wav_flow.npz"
# The released flow.yaml, with other sizes.
FLOW = """
flow: !new:cosyvoice2.flow.flow.CausalMaskedDiffWithXvec
  input_size: 32
  output_size: {bands}
  spk_embed_dim: 192
  output_type: 'mel'
  vocab_size: {codes}
  encoder: !new:cosyvoice2.transformer.upsample_encoder_v2.UpsampleConformerEncoderV2
    input_size: 32
    output_size: 32
    input_layer: 'linear'
    pre_lookahead_len: 3
    num_blocks: 2
    num_up_blocks: 2
    up_stride: 2
    up_scale_factor: 2
    attention_heads: 4
    pos_enc_layer_type: 'rel_pos_espnet'
    selfattention_layer_type: 'rel_selfattn'
    key_bias: true
    linear_units: 48
    dropout_rate: 0.1
    positional_dropout_rate: 0.1
    attention_dropout_rate: 0.1
    normalize_before: True
    activation_type: 'swish'
  decoder: !new:cosyvoice2.flow.flow_matching.CausalConditionalCFM
    inference_cfg_rate: 0.7
    estimator: !new:cosyvoice2.flow.decoder_dit.DiT
      in_channels: {channels}
      out_channels: {bands}
      mlp_ratio: 2.0
      depth: 2
      num_heads: 2
      head_dim: 16
      hidden_size: 32
"""
# The codes of the golden run's flow, and of a checkpoint's, which has a code of silence.
GOLDEN_CODES, CHECKPOINT_CODES = 100, 6561


def flow_yaml(bands: int = 80, codes: int = CHECKPOINT_CODES) -> str:
    """Return a flow.yaml for frames of `bands` mel bands."""
    return FLOW.format(bands=bands, codes=codes, channels=4 * bands)


def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of flow.pt, float32."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        return torch.from_numpy(drawn / np.sqrt(np.prod(shape[1:]), dtype=np.float32))
    return torch.from_numpy(0.1 * drawn + (1.0 if "norm" in name and name.endswith("weight") else 0.0))


def fill(flow: torch.nn.Module) -> None:
    """Give a flow's parameters their values."""
    with torch.no_grad():
        for name, value in flow.state_dict().items():
            value.copy_(weight(name, tuple(value.shape)))


def write(folder: Path) -> Path:
    """Write the checkpoint's files into an existing folder, and return the folder."""
    (folder / "flow.yaml").write_text(flow_yaml())
    flow = Flow(read_flow_config(folder / "flow.yaml"))
    fill(flow)
    torch.save(flow.state_dict(), folder / "flow.pt")
    fields = tiny_hift.CAUSAL_FIELDS | {"f0_predictor": {"cond_channels": tiny_hift.F0_WIDTH}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"hift": fields}))
    names = json.loads(str(np.load(tiny_hift.GOLDEN)["names"]))["causal"]
    torch.save(tiny_hift.weights(names), folder / "hift.pt")
    _write_networks(folder)
    return folder


def _write_networks(folder: Path) -> None:
    """Write the networks that read a voice.

    A code is from the loudness of its mel frames, and the speaker's vector from that of each band.
    """
    # Only a few tests need the package.
    from onnx import TensorProto, helper, numpy_helper, save_model

    node, info = helper.make_node, helper.make_tensor_value_info
    save = {"opset_imports": [helper.make_opsetid("", 17)], "ir_version": 9}
    constants = {"band": np.array([1]), "scale": np.float32(40), "low": np.int32(0), "high": np.int32(97)}
    nodes = [
        node("ReduceMean", ["feats"], ["bands"], axes=[1], keepdims=1),
        node("AveragePool", ["bands"], ["pooled"], kernel_shape=[4], strides=[4], ceil_mode=1),
        node("Squeeze", ["pooled", "band"], ["flat"]),
        node("Abs", ["flat"], ["loud"]),
        node("Mul", ["loud", "scale"], ["scaled"]),
        node("Cast", ["scaled"], ["whole"], to=TensorProto.INT32),
        # The length is an input that only pads.
        node("Min", ["whole", "high"], ["most"]),
        node("Min", ["most", "feats_length"], ["codes"]),
    ]
    given = [info("feats", TensorProto.FLOAT, [1, 128, "t"]), info("feats_length", TensorProto.INT32, [1])]
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "tiny", given, [info("codes", TensorProto.INT32, [1, "k"])], held)
    save_model(helper.make_model(graph, **save), folder / "speech_tokenizer_v2_25hz.onnx")
    nodes = [
        node("ReduceMean", ["input"], ["bands"], axes=[1], keepdims=0),
        node("Concat", ["bands", "bands", "part"], ["vector"], axis=1),
    ]
    part = numpy_helper.from_array(np.ones((1, 32), np.float32), "part")
    given = [info("input", TensorProto.FLOAT, [1, "t", 80])]
    graph = helper.make_graph(nodes, "tiny", given, [info("vector", TensorProto.FLOAT, [1, 192])], [part])
    save_model(helper.make_model(graph, **save), folder / "campplus.onnx")


# The golden run: the streams, each with the number of codes in its voice's prompt, and its windows: their numbers of
# codes; the last one ends the stream.
BANDS = 6
STEPS = 3
STREAMS = (
    # A prompt of fewer frames than a stream keeps besides it, so that the newest frames are forgotten.
    (20, (28, 28, 28, 28, 11, 28, 4)),
    (70, (28, 28, 9, 28, 28, 3)),
    # Its only window is the last.
    (33, (1,)),
    (70, (8, 28, 28, 28, 28, 7)),
)


def voice(prompt_codes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a voice of that length: codes [k], embedding [192] and mel frames [2 * k, BANDS]."""
    drawn = torch.Generator().manual_seed(prompt_codes)
    codes = torch.randint(GOLDEN_CODES, (prompt_codes,), generator=drawn)
    return (
        codes,
        torch.randn(192, generator=drawn),
        torch.randn(2 * prompt_codes, BANDS, generator=drawn),
    )


def windows(stream: int) -> list[tuple[list[int], bool]]:
    """Return the windows of a stream: its codes, and True if it is the last one."""
    drawn = torch.Generator().manual_seed(1000 + stream)
    sizes: Any = STREAMS[stream][1]
    return [
        (torch.randint(GOLDEN_CODES, (size,), generator=drawn).tolist(), at == len(sizes) - 1)
        for at, size in enumerate(sizes)
    ]


def noise() -> torch.Tensor:
    """Return the noise of the golden run, [frames, BANDS]."""
    return torch.randn(400, BANDS, generator=torch.Generator().manual_seed(7))
