"""Reads the released files of token2wav: configurations as data, and weights without running code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
import yaml

from antiphon.errors import ModelError


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The flow's encoder: a conformer over the embeddings of codes."""

    # Width of a code's embedding.
    input_size: int
    # Width of the layers.
    output_size: int
    # Attention heads of each layer.
    attention_heads: int
    # Width of the MLPs.
    linear_units: int
    # Layers over codes.
    num_blocks: int
    # Layers over frames.
    num_up_blocks: int
    # Codes ahead that each code depends on.
    pre_lookahead_len: int = 3
    # True if the projection of keys has a bias.
    key_bias: bool = True
    # Frames for each code, in the convolution over frames.
    up_stride: int = 2
    # Frames for each code, before that convolution.
    up_scale_factor: float = 2
    # True if norms are before attention and MLP.
    normalize_before: bool = True
    # The activation of the MLPs.
    activation_type: str = "swish"
    # The kind of the input layer.
    input_layer: str = "linear"
    # The kind of positions.
    pos_enc_layer_type: str = "rel_pos_espnet"
    # The kind of attention.
    selfattention_layer_type: str = "rel_selfattn"


class DitConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The flow's diffusion transformer, which computes mel frames from noise."""

    # Width of its input: a noisy frame, its conditions, the voice and a given frame, each of `out_channels`.
    in_channels: int
    # Width of a mel frame.
    out_channels: int
    # Width of the layers.
    hidden_size: int
    # Number of layers.
    depth: int
    # Attention heads of each layer.
    num_heads: int
    # Width of a head.
    head_dim: int
    # The width of the MLPs, in widths of the layers.
    mlp_ratio: float = 4.0


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the flow uses its diffusion transformer. `inference_cfg_rate`: the strength of the guidance."""

    estimator: DitConfig
    inference_cfg_rate: float = 0.7


class FlowConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The `flow` of flow.yaml."""

    # The network that turns codes into conditions.
    encoder: EncoderConfig
    # The network that turns noise into mel frames.
    decoder: DecoderConfig
    # Width of a code's embedding.
    input_size: int = 512
    # Width of a mel frame.
    output_size: int = 80
    # Width of the speaker's embedding.
    spk_embed_dim: int = 192
    # Number of codes.
    vocab_size: int = 5121


# The values that the flow's code assumes.
ASSUMED = {
    "up_stride": 2,
    "up_scale_factor": 2,
    "normalize_before": True,
    "activation_type": "swish",
    "input_layer": "linear",
    "pos_enc_layer_type": "rel_pos_espnet",
    "selfattention_layer_type": "rel_selfattn",
}


def read_flow_config(path: Path) -> FlowConfig:
    """Read flow.yaml. Raises ModelError, which names the file and the field, if it is missing or of another kind."""
    try:
        config = msgspec.convert(read_part(path, "flow"), FlowConfig)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}") from None
    encoder, dit = config.encoder, config.decoder.estimator
    for name, value in ASSUMED.items():
        if getattr(encoder, name) != value:
            raise ModelError(f"{path}: {name} is {getattr(encoder, name)!r}, not {value!r}")
    if dit.out_channels != config.output_size or dit.in_channels != 4 * config.output_size:
        raise ModelError(f"{path}: the estimator's channels do not belong to {config.output_size} mel bands")
    return config


def read_part(path: Path, name: str) -> object:
    """Return the value of a top-level key of a configuration, as data; None: it has no such key.

    Tags, which name code, are ignored. A value `<key>` becomes that of the top-level key. Raises ModelError, which
    names the file, if it is missing or is not a mapping.
    """
    try:
        given = _plain(yaml.compose(path.read_text(), yaml.SafeLoader))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict):
        raise ModelError(f"{path}: not a mapping")

    def resolved(value: object) -> object:
        if isinstance(value, dict):
            return {key: resolved(each) for key, each in value.items()}
        if isinstance(value, list):
            return [resolved(each) for each in value]
        found = re.fullmatch(r"<(\w+)>", value) if isinstance(value, str) else None
        return given.get(found[1], value) if found else value

    return resolved(given.get(name))


def _plain(node: object) -> object:
    """Return the value of a node of YAML, whatever its tag."""
    if isinstance(node, yaml.MappingNode):
        return {_plain(key): _plain(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(each) for each in node.value]
    if not isinstance(node, yaml.ScalarNode):
        return None
    number = node.tag.rpartition(":")[2] in ("int", "float", "bool", "null")
    return yaml.safe_load(node.value) if number else node.value


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a .pt file by name, mapped from the file.

    Raises ModelError, which names the file, if it is missing or has anything but tensors.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from None
    except Exception as error:
        # The unpickler raises errors of many kinds.
        raise ModelError(f"{path}: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(found, dict) or not all(isinstance(each, torch.Tensor) for each in found.values()):
        raise ModelError(f"{path}: expected tensors by name")
    return found


def load_weights(module: torch.nn.Module, weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Load tensors into a module. Raises ModelError, which names the file and the first difference."""
    wanted = module.state_dict()
    if missing := sorted(wanted.keys() - weights.keys()):
        raise ModelError(f"{path}: {missing[0]} is missing")
    if unknown := sorted(weights.keys() - wanted.keys()):
        raise ModelError(f"{path}: {unknown[0]} is unknown")
    for name, value in wanted.items():
        if value.shape != weights[name].shape:
            raise ModelError(f"{path}: {name} is {list(weights[name].shape)}, not {list(value.shape)}")
    module.load_state_dict(dict(weights))
