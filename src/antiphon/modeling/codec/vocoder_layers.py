"""The layers of vocoders: causal convolutions, window attention and upsampling, for many streams in one call.

A layer is causal: it keeps the last inputs of each stream, so its outputs do not depend on how a stream is cut.
Parameter names are those of Qwen3-TTS checkpoints (`speech_tokenizer/`, under `decoder.`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.functional import embedding, gelu, scaled_dot_product_attention, silu

# The dilations of the residual blocks after each upsampling.
DILATIONS = (1, 3, 9)


class VocoderTransformerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a vocoder's transformer, by their names in config.json."""

    # The width of the rows between layers.
    hidden_size: int
    # The width inside the feed-forward part.
    intermediate_size: int
    # The number of layers.
    num_hidden_layers: int
    # The number of query heads of a layer.
    num_attention_heads: int
    # The number of key heads of a layer.
    num_key_value_heads: int
    # The number of frames that attention sees, including the frame itself.
    sliding_window: int
    # The width of an attention head; None: hidden_size / num_attention_heads.
    head_dim: int | None = None
    # The width of the transformer's input and output if it has projections.
    latent_dim: int = 1024
    # Whether the attention's projections have biases.
    attention_bias: bool = False
    # The epsilon of the RMS norms.
    rms_norm_eps: float = 1e-5
    # The base of the rotary positions.
    rope_theta: float = 10000.0

    @property
    def head_size(self) -> int:
        """The width of an attention head: `head_dim`, or an equal share of the layer's width."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class VocoderStreams:
    """The layers' state of the streams of one call, before and after it.

    `layout`: the start of a layer's state in a stream's row, and its shape, by the layer's id. `before`: the streams'
    rows, [streams, size]. `frames`: the number of frames of each stream so far. `is_start`: the streams begin.
    """

    def __init__(
        self, layout: Mapping[int, tuple[int, tuple[int, ...]]], before: torch.Tensor, frames: Sequence[int]
    ) -> None:
        self.after = torch.empty_like(before)
        self.is_start = frames[0] == 0
        self._layout, self._before, self._frames = layout, before, frames
        self._seen: tuple[int, torch.Tensor] | None = None

    def before(self, layer: nn.Module) -> torch.Tensor:
        """Return the layer's state of each stream, [streams, ...]; zeros at the start."""
        return self._part(self._before, layer)

    def keep(self, layer: nn.Module, end: torch.Tensor) -> None:
        """Keep the end of the layer's input, [streams, ...]."""
        self._part(self.after, layer).copy_(end)

    def positions(self, count: int) -> torch.Tensor:
        """Return the positions of the next frames, float32 [count], or [streams, 1, count] if they differ by stream."""
        device = self._before.device
        if len(set(self._frames)) == 1:
            return torch.arange(self._frames[0], self._frames[0] + count, device=device).float()
        first = torch.tensor(self._frames).to(device, non_blocking=True)
        return (first[:, None, None] + torch.arange(count, device=device)).float()

    def window(self, held: int, count: int) -> tuple[int, torch.Tensor]:
        """Return the number of visible earlier frames, at most `held`, and the mask of the frames that new ones see.

        The mask is bool [count, frames], or [streams, 1, count, frames], where frames are the visible and the new ones.
        """
        if self._seen is None:
            self._seen = self._window(held, count)
        return self._seen

    def _window(self, held: int, count: int) -> tuple[int, torch.Tensor]:
        # The largest number of earlier frames of any stream.
        most, device = min(max(self._frames), held), self._before.device
        seen = in_reach(most, held, count, device)
        if len(set(self._frames)) > 1:
            had = torch.tensor([min(n, held) for n in self._frames]).to(device, non_blocking=True)
            seen = seen & has_been(most, had, count)
        return most, seen

    def _part(self, rows: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        start, shape = self._layout[id(layer)]
        return rows[:, start : start + prod(shape)].view(len(rows), *shape)


def in_reach(before: int, held: int, count: int, device: torch.device) -> torch.Tensor:
    """A mask, bool [count, before + count], of the earlier and new frames that each new frame may see."""
    distance = torch.arange(before, before + count, device=device)[:, None] - torch.arange(
        before + count, device=device
    )
    return (distance >= 0) & (distance <= held)


def has_been(before: int, had: torch.Tensor, count: int) -> torch.Tensor:
    """A mask of the frames that exist in streams with `had` earlier frames: [streams, 1, 1, before + count]."""
    return torch.arange(before + count, device=had.device) >= before - had[:, None, None, None]


class CausalConv(nn.Module):
    """A convolution that sees no later frames: the stream's state, or zeros at its start, precedes the input."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel, dilation=dilation, groups=groups)
        self._reach = (kernel - 1) * dilation
        self.state_shape = (in_channels, self._reach)

    def forward(self, x: torch.Tensor, streams: VocoderStreams) -> torch.Tensor:
        """Return [n, out_channels, frames] for x, [n, in_channels, frames], and keep x's end."""
        if self._reach:
            x = torch.cat((streams.before(self), x), 2)
            streams.keep(self, x[..., -self._reach :])
        out: torch.Tensor = self.conv(x)
        return out


class CausalUpsample(nn.Module):
    """A transposed convolution whose output is cut to `stride` samples for each input frame.

    `trim_start`: leave out the first samples of a stream, which depend on fewer inputs than later samples do. The
    stream is then shorter by kernel - stride samples.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int, *, trim_start: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(in_channels, out_channels, kernel, stride)
        self._stride, self._reach = stride, -(-(kernel - stride) // stride)
        self._trim = kernel - stride if trim_start else 0
        self.state_shape = (in_channels, self._reach)

    def forward(self, x: torch.Tensor, streams: VocoderStreams) -> torch.Tensor:
        """Return [n, out_channels, frames * stride] for x, [n, in_channels, frames]; fewer at a trimmed start."""
        count, trim = x.shape[2], 0
        if self._reach:
            trim = self._trim if streams.is_start else 0
            x = torch.cat((streams.before(self), x), 2)
            streams.keep(self, x[..., -self._reach :])
        first = self._reach * self._stride
        out: torch.Tensor = self.conv(x)
        return out[..., first + trim : first + count * self._stride]


class Snake(nn.Module):
    """The activation x + sin²(x·e^alpha) / e^beta, with alpha and beta learned for each channel (arXiv:2006.08195)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor, streams: VocoderStreams) -> torch.Tensor:
        """Return [n, width, frames] for x of the same shape."""
        alpha, beta = self.alpha.exp()[None, :, None], self.beta.exp()[None, :, None]
        return x + torch.sin(x * alpha).square() / (beta + 1e-9)


class ConvNext(nn.Module):
    """A block of ConvNeXt with a causal depthwise convolution (arXiv:2201.03545)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, streams: VocoderStreams) -> torch.Tensor:
        """Return [n, width, frames] for x of the same shape."""
        inner = self.norm(self.dwconv(x, streams).transpose(1, 2))
        out: torch.Tensor = self.gamma * self.pwconv2(gelu(self.pwconv1(inner)))
        return x + out.transpose(1, 2)


class Residual(nn.Module):
    """A residual block: two causal convolutions, the first dilated, each after a Snake activation."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.act1, self.conv1 = Snake(width), CausalConv(width, width, 7, dilation)
        self.act2, self.conv2 = Snake(width), CausalConv(width, width, 1)

    def forward(self, x: torch.Tensor, streams: VocoderStreams) -> torch.Tensor:
        """Return [n, width, frames] for x of the same shape."""
        out: torch.Tensor = self.conv2(self.act2(self.conv1(self.act1(x, streams), streams), streams), streams)
        return out + x


class UpsampleBlock(nn.Module):
    """Upsamples by `rate` to fewer channels, then applies residual blocks. `trim_start`: as in CausalUpsample."""

    def __init__(self, in_channels: int, out_channels: int, rate: int, *, trim_start: bool = False) -> None:
        super().__init__()
        up = CausalUpsample(in_channels, out_channels, 2 * rate, rate, trim_start=trim_start)
        parts = [Snake(in_channels), up, *(Residual(out_channels, d) for d in DILATIONS)]
        self.block = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor, streams: VocoderStreams) -> torch.Tensor:
        """Return [n, out_channels, frames * rate] for x, [n, in_channels, frames]; fewer at a trimmed start."""
        for part in self.block:
            x = part(x, streams)
        return x


class RmsNorm(nn.Module):
    """Root mean square normalization (arXiv:1910.07467), computed in float32 for every input type."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., width] for x of the same shape and type."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)).to(x.dtype)


class WindowAttention(nn.Module):
    """Causal attention with rotary positions over the last `sliding_window` frames, with grouped keys."""

    def __init__(self, config: VocoderTransformerConfig) -> None:
        super().__init__()
        width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self._size, self._held, bias = config.head_size, config.sliding_window - 1, config.attention_bias
        self.state_shape = (2, kv_heads, self._held, self._size)
        self.q_proj = nn.Linear(width, heads * self._size, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(width, kv_heads * self._size, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(heads * self._size, width, bias=bias)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], streams: VocoderStreams
    ) -> torch.Tensor:
        """Return [n, frames, width] for x of the same shape.

        `rotary`: cosines and sines of the frames' positions, each [frames, head_dim], or [n, 1, frames, head_dim] if
        the streams have had different numbers of frames. Keeps keys and values of the window, with zeros for frames
        that a stream has not had.
        """
        streams_count, count = x.shape[:2]
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).view(streams_count, count, -1, self._size).transpose(1, 2) for p in projections)
        fresh = torch.stack((_rotated(k, *rotary), v), 1)
        fresh = torch.cat((streams.before(self), fresh), 3)
        streams.keep(self, fresh[..., count:, :])
        most, seen = streams.window(self._held, count)
        keys, values = fresh[..., self._held - most :, :].unbind(1)
        out = scaled_dot_product_attention(_rotated(q, *rotary), keys, values, attn_mask=seen, enable_gqa=True)
        made: torch.Tensor = self.o_proj(out.transpose(1, 2).reshape(streams_count, count, -1))
        return made


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class LayerScale(nn.Module):
    """The learned scale of each channel, as a parameter. The layer that owns it does the multiplication."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))


class GatedMlp(nn.Module):
    """The parameters of a gated feed-forward part. The layer that owns them computes down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)


class TransformerLayer(nn.Module):
    """One layer: window attention and a gated feed-forward part, each normalized before and scaled afterwards."""

    def __init__(self, config: VocoderTransformerConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = WindowAttention(config), GatedMlp(width, config.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(width, eps), RmsNorm(width, eps)
        self.self_attn_layer_scale, self.mlp_layer_scale = LayerScale(width), LayerScale(width)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], streams: VocoderStreams
    ) -> torch.Tensor:
        """Return [n, frames, width] for x of the same shape; `rotary` as in WindowAttention."""
        x = x + self.self_attn_layer_scale.scale * self.self_attn(self.input_layernorm(x), rotary, streams)
        inner, mlp = self.post_attention_layernorm(x), self.mlp
        made: torch.Tensor = mlp.down_proj(silu(mlp.gate_proj(inner)) * mlp.up_proj(inner))
        return x + self.mlp_layer_scale.scale * made


class Transformer(nn.Module):
    """The layers between codes and convolutions, `hidden_size` wide. `projects`: map from and to `latent_dim`."""

    def __init__(self, config: VocoderTransformerConfig, *, projects: bool = True) -> None:
        super().__init__()
        width, latent = config.hidden_size, config.latent_dim
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(width, config.rms_norm_eps)
        self.input_proj: nn.Module = nn.Linear(latent, width) if projects else nn.Identity()
        self.output_proj: nn.Module = nn.Linear(width, latent) if projects else nn.Identity()
        self._size, self._theta = config.head_size, config.rope_theta

    def forward(self, x: torch.Tensor, streams: VocoderStreams) -> torch.Tensor:
        """Return [n, frames, latent] for x of the same shape."""
        frequencies = self._theta ** -(torch.arange(0, self._size, 2, device=x.device).float() / self._size)
        positions = streams.positions(x.shape[1])
        angles = (positions[..., None] * frequencies).repeat(*(1 for _ in positions.shape), 2)
        rotary = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        x = self.input_proj(x)
        for layer in self.layers:
            x = layer(x, rotary, streams)
        out: torch.Tensor = self.output_proj(self.norm(x))
        return out


class Codebook(nn.Module):
    """A table from codes to vectors, stored as the sum and the count of the vectors that training assigned to each."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.cluster_usage, self.embedding_sum = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size, width))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the mean vectors [..., width] of codes, int [...]."""
        return embedding(codes, self.embedding_sum) / embedding(codes, self.cluster_usage.clamp(min=1e-5)[:, None])


class Quantizer(nn.Module):
    """The decoding half of a residual quantizer: `count` codebooks, whose vectors are summed and projected."""

    def __init__(self, count: int, size: int, width: int, out_channels: int) -> None:
        super().__init__()
        self.vq = nn.ModuleDict(
            {"layers": nn.ModuleList(nn.ModuleDict({"_codebook": Codebook(size, width)}) for _ in range(count))}
        )
        self.output_proj = nn.Conv1d(width, out_channels, 1, bias=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return [n, out_channels, frames] for codes, int [codebooks, n, frames]."""
        books: Any = self.vq["layers"]
        summed = sum(books[i]["_codebook"](row) for i, row in enumerate(codes))
        out: torch.Tensor = self.output_proj(summed.transpose(1, 2))
        return out
