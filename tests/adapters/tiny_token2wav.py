"""A token2wav of tiny dimensions, with the files and names of the released one.

The random seed of each weight is the checksum of its name (tiny_minicpmo.py). The published code ran with the same
weights when the golden numbers were made.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.adapters.tiny_minicpmo import weight

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


def fill(module: torch.nn.Module, prefix: str = "") -> None:
    """Give a module's parameters their tiny values."""
    with torch.no_grad():
        for name, value in module.state_dict().items():
            value.copy_(torch.from_numpy(weight(prefix + name, tuple(value.shape))))


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
