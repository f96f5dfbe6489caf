"""Codes to sound, 1920 samples a frame: the vocoder of Qwen3-TTS but for how it begins. A stream that is kept is the one-shot output, however it is cut.

A transposed convolution here gives only what two inputs made: of a stream's first input the first samples are missing, 555 in all, and frame n begins
at n * 1920 - 555. Chunks decoded by themselves lose them each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from antiphon.modeling.codec_vocoder import (
    CausalConv,
    CausalUpsample,
    ConvNext,
    Snake,
    Transformer,
    UpsampleBlock,
    VocoderState,
)


class Code2Wav(nn.Module):
    """`config`: a Qwen3OmniMoeCode2WavConfig. Names under `code2wav.`"""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, rates = int(config.hidden_size), list(config.upsample_rates)
        inside, self._size = int(config.decoder_dim), int(config.codebook_size)
        shape = {
            "hidden_size": width,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", None),
            "sliding_window": config.sliding_window,
            "attention_bias": config.attention_bias,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_hidden_layers,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_parameters["rope_theta"],
        }
        self.code_embedding = nn.Embedding(self._size * int(config.num_quantizers), width)
        self.pre_transformer = Transformer(shape, projects=False)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalUpsample(width, width, r, r), ConvNext(width)]) for r in config.upsampling_ratios
        )
        uppers = [
            UpsampleBlock(inside // 2**i, inside // 2 ** (i + 1), rate, trim_start=True) for i, rate in enumerate(rates)
        ]
        last = inside // 2 ** len(rates)
        self.decoder = nn.ModuleList([CausalConv(width, inside, 7), *uppers, Snake(last), CausalConv(last, 1, 7)])
        self.frame_samples = prod([*rates, *config.upsampling_ratios])

    @torch.inference_mode()
    def forward(self, frames: Sequence[Sequence[int]], past: VocoderState) -> torch.Tensor:
        """Sound of more frames of a stream, each of one code a codebook: float32 [samples], in [-1, 1]."""
        table = self.code_embedding
        codes = torch.tensor(frames, dtype=torch.long, device=table.weight.device)
        x: torch.Tensor = table(codes + torch.arange(codes.shape[1], device=codes.device) * self._size).mean(1)[None]
        x = self.pre_transformer(x, past).transpose(1, 2)
        upsample: Any = self.upsample
        for part in (*(p for parts in upsample for p in parts), *self.decoder):
            x = part(x, past)
        return x[0, 0].float().clamp(-1, 1).cpu()
