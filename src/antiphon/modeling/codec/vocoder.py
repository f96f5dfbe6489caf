"""A vocoder from frames of codes to audio, 1920 samples for each frame (12.5 frames a second at 24 kHz).

It is causal: a stream keeps the last inputs of each layer (`vocoder_layers.py`), so its samples do not depend on how it
is cut into chunks. Streams are vocoded together, one row each: a call for 64 streams has the same number of operators
as a call for two. Sizes are read from the config.json of Qwen3-TTS checkpoints. This module does not depend on the
model that produces the codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import nn

from antiphon.modeling.codec.vocoder_layers import (
    CausalConv,
    CausalUpsample,
    ConvNext,
    Quantizer,
    Snake,
    Transformer,
    UpsampleBlock,
    VocoderStreams,
    VocoderTransformerConfig,
)


class VocoderConfig(VocoderTransformerConfig, frozen=True, kw_only=True):
    """The sizes of a vocoder, by their names in the `decoder_config` of speech_tokenizer/config.json."""

    # The number of codebooks, which is the number of codes in a frame.
    num_quantizers: int
    # The number of codes in a codebook.
    codebook_size: int
    # The width of the quantizer's output. A codebook's vectors have half this width.
    codebook_dim: int
    # Channels before the first upsampling of `upsample_rates`. Each upsampling halves the channels.
    decoder_dim: int
    # The factors of the final upsampling.
    upsample_rates: tuple[int, ...]
    # The factors of the earlier upsampling, which keeps `latent_dim` channels.
    upsampling_ratios: tuple[int, ...]


@dataclass(slots=True, eq=False)
class VocoderState:
    """The state of one stream. A stream begins with an empty state, and belongs to one vocoder.

    `frames`: its frames so far. `kept`: the layers' states of all streams of the last call, one row each; None at the
    start. `row`: this stream's row. `slot`: its slot in `kept`, whose row is updated in place (`vocoder_batch.py`);
    None if `kept` is no longer written to. `is_shared`: another state uses the row, which must not be written to.
    """

    frames: int = 0
    kept: torch.Tensor | None = None
    row: int = 0
    slot: Any = None
    is_shared: bool = False

    def copy(self) -> VocoderState:
        """Return the state of another stream that continues from here. Copies no row yet."""
        self.is_shared = self.slot is not None
        return replace(self)


class StreamVocoder(nn.Module):
    """A vocoder of many streams, each with a VocoderState. `num_codebooks`: the number of codes in a frame.

    `trims_start`: a stream's first chunk is shorter than later ones, so first chunks are vocoded in separate calls.
    """

    trims_start = False
    num_codebooks: int

    @cached_property
    def layout(self) -> Mapping[int, tuple[int, tuple[int, ...]]]:
        """The start of each layer's state in a stream's row, and its shape, by the layer's id."""
        found, at = dict[int, tuple[int, tuple[int, ...]]](), 0
        for layer in self.modules():
            shape: Any = getattr(layer, "state_shape", None)
            if shape is not None:
                found[id(layer)] = (at, shape)
                at += prod(shape)
        return found

    @cached_property
    def state_size(self) -> int:
        """The length of a stream's row of state."""
        return sum(prod(shape) for _, shape in self.layout.values())

    def vocode(self, codes: torch.Tensor, streams: VocoderStreams) -> torch.Tensor:
        """Return the audio [n, samples] of the streams' next frames. `codes`: int [n, frames, codebooks]."""
        raise NotImplementedError

    @torch.inference_mode()
    def forward(self, frames: Sequence[Sequence[Sequence[int]]], states: Sequence[VocoderState]) -> torch.Tensor:
        """Return the audio of the next frames of n streams: float32 [n, samples] in [-1, 1] on the CPU, 24 kHz.

        `frames`: the same number of frames for each stream; a frame has one code for each codebook. `states`: the
        streams' states, which are advanced. With `trims_start`, either all streams are at their start or none is. Waits
        for the device once. Must be called in the model's thread.
        """
        like = next(self.parameters())
        streams = VocoderStreams(self.layout, self._together(states), [state.frames for state in states])
        codes = torch.tensor(frames, dtype=torch.long).to(like.device, non_blocking=True)
        audio = self.vocode(codes, streams).float().clamp(-1, 1).cpu()
        for row, state in enumerate(states):
            state.frames += codes.shape[1]
            state.kept, state.row, state.slot, state.is_shared = streams.after, row, None, False
        return audio

    def _together(self, states: Sequence[VocoderState]) -> torch.Tensor:
        """Return the rows of all streams, without a copy if these are the streams of the last call."""
        kept = states[0].kept
        if kept is not None and all(s.kept is kept and s.row == row for row, s in enumerate(states)):
            return kept[: len(states)]
        empty = next(self.parameters()).new_zeros(1, self.state_size)
        return torch.cat([empty if s.kept is None else s.kept[s.row : s.row + 1] for s in states])


class CodecVocoder(StreamVocoder):
    """The complete vocoder. Its parameters have the checkpoint's names under `decoder.`."""

    def __init__(self, config: VocoderConfig) -> None:
        super().__init__()
        books, size = config.num_quantizers, config.codebook_size
        self.num_codebooks = books
        inner, latent, width = config.codebook_dim, config.latent_dim, config.decoder_dim
        rates, ratios = config.upsample_rates, config.upsampling_ratios
        self.quantizer = nn.ModuleDict(
            {
                "rvq_first": Quantizer(1, size, inner // 2, inner),
                "rvq_rest": Quantizer(books - 1, size, inner // 2, inner),
            }
        )
        self.pre_conv = CausalConv(inner, latent, 3)
        self.pre_transformer = Transformer(config)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalUpsample(latent, latent, r, r), ConvNext(latent)]) for r in ratios
        )
        last = width // 2 ** len(rates)
        uppers = [UpsampleBlock(width // 2**i, width // 2 ** (i + 1), rate) for i, rate in enumerate(rates)]
        self.decoder = nn.ModuleList([CausalConv(latent, width, 7), *uppers, Snake(last), CausalConv(last, 1, 7)])

    def vocode(self, codes: torch.Tensor, streams: VocoderStreams) -> torch.Tensor:
        """Return the audio [n, samples] of the streams' next frames. `codes`: int [n, frames, codebooks]."""
        codes = codes.permute(2, 0, 1)
        x: torch.Tensor = self.quantizer["rvq_first"](codes[:1]) + self.quantizer["rvq_rest"](codes[1:])
        x = self.pre_transformer(self.pre_conv(x, streams).transpose(1, 2), streams).transpose(1, 2)
        upsample: Any = self.upsample
        for part in (*(p for parts in upsample for p in parts), *self.decoder):
            x = part(x, streams)
        return x[:, 0]
