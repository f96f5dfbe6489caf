"""Turns codes into audio, 1920 samples a frame: the vocoder of Qwen3-TTS, except at the start of a stream.

In this model, a transposed convolution returns only samples that depend on two inputs. So the first 555 samples of a
stream are missing, and frame n begins at sample n * 1920 - 555. With the stream's state, the audio does not depend on
how the frames are split into chunks. Chunks that are decoded without a state lose 555 samples each.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import nn

from antiphon.modeling.codec.vocoder import StreamVocoder
from antiphon.modeling.codec.vocoder_layers import (
    CausalConv,
    CausalUpsample,
    ConvNext,
    Snake,
    Transformer,
    UpsampleBlock,
    VocoderStreams,
    VocoderTransformerConfig,
)


class Code2Wav(StreamVocoder):
    """The vocoder of all conversations. The state of a stream is its VocoderState.

    `config`: a Qwen3OmniMoeCode2WavConfig. Parameters have their names in the checkpoint, under `code2wav.`.
    `frame_samples`: samples of audio in a frame.
    """

    trims_start = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, rates = int(config.hidden_size), list(config.upsample_rates)
        channels, self._codebook_size = int(config.decoder_dim), int(config.codebook_size)
        transformer = VocoderTransformerConfig(
            hidden_size=width,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            sliding_window=config.sliding_window,
            head_dim=getattr(config, "head_dim", None),
            attention_bias=config.attention_bias,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=float(config.rope_parameters["rope_theta"]),
        )
        self.num_codebooks = int(config.num_quantizers)
        self.code_embedding = nn.Embedding(self._codebook_size * int(config.num_quantizers), width)
        self.pre_transformer = Transformer(transformer, projects=False)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalUpsample(width, width, r, r), ConvNext(width)]) for r in config.upsampling_ratios
        )
        blocks = [
            UpsampleBlock(channels // 2**i, channels // 2 ** (i + 1), rate, trim_start=True)
            for i, rate in enumerate(rates)
        ]
        last = channels // 2 ** len(rates)
        self.decoder = nn.ModuleList([CausalConv(width, channels, 7), *blocks, Snake(last), CausalConv(last, 1, 7)])
        self.frame_samples = prod([*rates, *config.upsampling_ratios])

    def vocode(self, codes: torch.Tensor, streams: VocoderStreams) -> torch.Tensor:
        """Return the audio [n, samples] of the next frames of n streams. `codes`: int [n, frames, codebooks].

        The first chunk of a stream is 555 samples short.
        """
        offsets = torch.arange(codes.shape[2], device=codes.device) * self._codebook_size
        x: torch.Tensor = self.code_embedding(codes + offsets).mean(2)
        x = self.pre_transformer(x, streams).transpose(1, 2)
        upsample: Any = self.upsample
        for part in (*(p for parts in upsample for p in parts), *self.decoder):
            x = part(x, streams)
        return x[:, 0]
