"""The flow's encoder: a conformer without convolutions that turns codes into conditions, two frames for each code.

It sees `lookahead` codes ahead. Its first layers attend over codes, the others over frames. Attention has relative
positions: the distance between two frames that a stream holds is that of their numbers, even if frames between them
were forgotten.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from antiphon.adapters.minicpmo.token2wav.files import EncoderConfig
from antiphon.adapters.minicpmo.token2wav.history import FramePlaces, continued, extended

# Frames for each code.
FRAMES_A_CODE = 2


class EncoderTables(NamedTuple):
    """What the encoder keeps of the streams, one row for each slot and a spare one."""

    # The last outputs of the first convolution, [slots + 1, width, 2].
    ahead: torch.Tensor
    # The last inputs of the convolution over frames, [slots + 1, width, 4].
    up: torch.Tensor
    # Keys and values of codes, [layers, slots + 1, positions, 2 * width].
    codes: torch.Tensor
    # Keys and values of frames, [layers, slots + 1, positions, 2 * width].
    frames: torch.Tensor


class _Embedding(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(width_in, width), nn.LayerNorm(width, eps=1e-5))
        self._scale = math.sqrt(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) * self._scale  # type: ignore[no-any-return]


class _Lookahead(nn.Module):
    """Mixes each code with the codes ahead, and then with the two codes before it."""

    def __init__(self, width: int, lookahead: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, lookahead + 1)
        self.conv2 = nn.Conv1d(width, width, 3)

    def forward(self, x: torch.Tensor, table: torch.Tensor, places: FramePlaces) -> torch.Tensor:
        ahead = F.leaky_relu(self.conv1(x.transpose(1, 2)))
        mixed: torch.Tensor = self.conv2(continued(table, places.slots, places.ends(table.shape[2]), ahead))
        return mixed.transpose(1, 2) + x[:, : mixed.shape[2]]


class _Upsampling(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 2 * FRAMES_A_CODE + 1)

    def forward(self, x: torch.Tensor, table: torch.Tensor, places: FramePlaces) -> torch.Tensor:
        frames = x.transpose(1, 2).repeat_interleave(FRAMES_A_CODE, 2)
        made: torch.Tensor = self.conv(continued(table, places.slots, places.ends(table.shape[2]), frames))
        return made.transpose(1, 2)


class _Scores(NamedTuple):
    """What all layers over the same frames share in one call."""

    # Where the frames are.
    places: FramePlaces
    # See FramePlaces.mask.
    mask: torch.Tensor
    # For each new frame and each position: the index of their distance, [streams, 1, frames, positions].
    distances: torch.Tensor

    @classmethod
    def of(cls, places: FramePlaces, held: torch.Tensor, dtype: torch.dtype) -> _Scores:
        """`held`: the number of frames that each stream holds already, int64 [streams]."""
        frames, positions = places.new.shape[1], places.numbers.shape[1]
        numbers = held[:, None] + torch.arange(frames, device=held.device)
        # The smallest distance is that of the first new frame to the last one.
        found = numbers[:, :, None] - places.numbers[:, None] + frames - 1
        return cls(places, places.mask(dtype), found.clamp(0, positions + frames - 2)[:, None])


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, key_bias: bool) -> None:
        super().__init__()
        self.linear_q, self.linear_v, self.linear_out = (nn.Linear(width, width) for _ in range(3))
        self.linear_k = nn.Linear(width, width, bias=key_bias)
        self.linear_pos = nn.Linear(width, width, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(heads, width // heads))
        self.pos_bias_v = nn.Parameter(torch.zeros(heads, width // heads))
        # The vectors of all distances, [heads, head width, distances], and the index of distance 0.
        self.distances, self.zero = torch.zeros(0), 0

    def prepare(self, vectors: torch.Tensor, zero: int) -> None:
        """Compute the vectors of all distances from those of the sinusoids, [distances, width]."""
        heads, width = self.pos_bias_u.shape
        self.distances, self.zero = self.linear_pos(vectors).view(-1, heads, width).permute(1, 2, 0).contiguous(), zero

    def forward(self, x: torch.Tensor, table: torch.Tensor, scores: _Scores) -> torch.Tensor:
        count, frames, full = x.shape
        heads, width = self.pos_bias_u.shape
        query = self.linear_q(x).view(count, frames, heads, width)
        held = extended(table, scores.places, torch.cat([self.linear_k(x), self.linear_v(x)], 2))
        key, value = held.view(count, -1, 2, heads, width).permute(2, 0, 3, 1, 4)
        first = self.zero - (frames - 1)
        reach = self.distances[..., first : first + key.shape[2] + frames - 1]
        by_distance = (query + self.pos_bias_v).transpose(1, 2) @ reach
        position = by_distance.gather(3, scores.distances.expand(-1, heads, -1, -1))
        bias = torch.add(scores.mask, position, alpha=1 / math.sqrt(width))
        mixed = F.scaled_dot_product_attention((query + self.pos_bias_u).transpose(1, 2), key, value, attn_mask=bias)
        out: torch.Tensor = self.linear_out(mixed.transpose(1, 2).reshape(count, frames, full))
        return out


class _FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w_2(F.silu(self.w_1(x)))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.output_size
        self.self_attn = _Attention(width, config.attention_heads, key_bias=config.key_bias)
        self.feed_forward = _FeedForward(width, config.linear_units)
        self.norm_mha, self.norm_ff = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: torch.Tensor, table: torch.Tensor, scores: _Scores) -> torch.Tensor:
        x = x + self.self_attn(self.norm_mha(x), table, scores)
        return x + self.feed_forward(self.norm_ff(x))  # type: ignore[no-any-return]


class CodeEncoder(nn.Module):
    """Turns windows of codes into conditions. Parameters have their names in the checkpoint.

    `lookahead`: the number of codes that follow those that yield frames. The last window of a stream has none.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width, self.lookahead = config.output_size, config.pre_lookahead_len
        self.embed, self.up_embed = _Embedding(config.input_size, width), _Embedding(width, width)
        self.pre_lookahead_layer = _Lookahead(width, self.lookahead)
        self.encoders = nn.ModuleList([_Layer(config) for _ in range(config.num_blocks)])
        self.up_layer = _Upsampling(width)
        self.up_encoders = nn.ModuleList([_Layer(config) for _ in range(config.num_up_blocks)])
        self.after_norm = nn.LayerNorm(width, eps=1e-5)

    def tables(self, slots: int, codes: int, frames: int) -> EncoderTables:
        """Return tables of zeros for `slots` streams that hold at most `codes` codes and `frames` frames."""
        like, width = self.after_norm.weight, self.after_norm.weight.shape[0]
        return EncoderTables(
            like.new_zeros(slots + 1, width, 2),
            like.new_zeros(slots + 1, width, 2 * FRAMES_A_CODE),
            like.new_zeros(len(self.encoders), slots + 1, codes, 2 * width),
            like.new_zeros(len(self.up_encoders), slots + 1, frames, 2 * width),
        )

    def prepare(self, codes: int, frames: int) -> None:
        """Compute the vectors of all distances within `codes` codes and `frames` frames. Called once."""
        width = self.after_norm.weight.shape[0]
        for layers, most in ((self.encoders, codes), (self.up_encoders, frames)):
            vectors = _sinusoids(torch.arange(1 - most, most), width).to(self.after_norm.weight)
            for module in layers.modules():
                if isinstance(module, _Attention):
                    module.prepare(vectors, most - 1)

    def forward(
        self,
        x: torch.Tensor,
        tables: EncoderTables,
        codes: FramePlaces,
        frames: FramePlaces,
        held: torch.Tensor,
        given: torch.Tensor,
    ) -> torch.Tensor:
        """Return the conditions of the windows `x`, [streams, codes + lookahead, input width].

        They are [streams, frames, width]. Each window has as many codes as `codes` has new places.

        `held`, int64 [streams]: the number of codes that each stream holds. `given`, int64 [streams]: the number of
        codes in each window of `x`. What follows them is read as nothing, as the end of a stream is.
        """
        is_given = torch.arange(x.shape[1], device=x.device) < given[:, None]
        x = self.embed(x).masked_fill(~is_given[..., None], 0.0)
        x = self.pre_lookahead_layer(x, tables.ahead, codes)
        scores = _Scores.of(codes, held, x.dtype)
        for layer, table in zip(self.encoders, tables.codes, strict=True):
            x = layer(x, table, scores)
        x = self.up_embed(self.up_layer(x, tables.up, frames))
        scores = _Scores.of(frames, FRAMES_A_CODE * held, x.dtype)
        for layer, table in zip(self.up_encoders, tables.frames, strict=True):
            x = layer(x, table, scores)
        return self.after_norm(x)  # type: ignore[no-any-return]


def _sinusoids(distances: torch.Tensor, width: int) -> torch.Tensor:
    """Return the vector of each distance, float32 [distances, width], computed as the makers do."""
    rates = torch.exp(torch.arange(0, width, 2).float() * -(math.log(10_000.0) / width))
    angles = distances[:, None].float() * rates
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)
