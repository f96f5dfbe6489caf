"""Codes to sound, 1920 samples a frame: causal, so a stream that keeps what each layer has seen last is its one-shot output, however it is cut.

Module names are the checkpoint's (`speech_tokenizer/`, `decoder.`). Sizes: its config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, gelu, scaled_dot_product_attention, silu

DILATIONS = (1, 3, 9)


@dataclass(slots=True)
class VocoderState:
    """What the layers of one stream have seen last, by layer; and how many frames the transformer has."""

    seen: dict[int, torch.Tensor] = field(default_factory=dict)
    frames: int = 0


class CausalConv(nn.Module):
    """A convolution that sees no future."""

    def __init__(self, inside: int, out: int, kernel: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inside, out, kernel, dilation=dilation, groups=groups)
        self._reach = (kernel - 1) * dilation

    def forward(self, x: torch.Tensor, past: VocoderState) -> torch.Tensor:
        """[1, inside, frames] to [1, out, frames]."""
        if self._reach:
            before = past.seen.get(id(self))
            x = torch.cat((x.new_zeros(*x.shape[:2], self._reach) if before is None else before, x), 2)
            past.seen[id(self)] = x[..., -self._reach :]
        out: torch.Tensor = self.conv(x)
        return out


class CausalUpsample(nn.Module):
    """A transposed convolution that is cut to its inputs' frames; not `whole`: to what all inputs within its kernel made, of a stream's first some are
    missing."""

    def __init__(self, inside: int, out: int, kernel: int, stride: int, *, whole: bool = True) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inside, out, kernel, stride)
        self._stride, self._reach = stride, -(-(kernel - stride) // stride)
        self._lost = 0 if whole else kernel - stride

    def forward(self, x: torch.Tensor, past: VocoderState) -> torch.Tensor:
        """[1, inside, frames] to [1, out, frames * stride]."""
        count, lost = x.shape[2], 0
        if self._reach:
            before = past.seen.get(id(self))
            lost = self._lost if before is None else 0
            x = torch.cat((x.new_zeros(*x.shape[:2], self._reach) if before is None else before, x), 2)
            past.seen[id(self)] = x[..., -self._reach :]
        start = self._reach * self._stride
        out: torch.Tensor = self.conv(x)
        return out[..., start + lost : start + count * self._stride]


class Snake(nn.Module):
    """x + sin²(x·e^alpha) / e^beta (arXiv:2006.08195)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor, past: VocoderState) -> torch.Tensor:
        """[1, width, frames], the same out."""
        alpha, beta = self.alpha.exp()[None, :, None], self.beta.exp()[None, :, None]
        return x + torch.sin(x * alpha).square() / (beta + 1e-9)


class ConvNext(nn.Module):
    """A block of ConvNeXt (arXiv:2201.03545)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, past: VocoderState) -> torch.Tensor:
        """[1, width, frames], the same out."""
        inner = self.norm(self.dwconv(x, past).transpose(1, 2))
        out: torch.Tensor = self.gamma * self.pwconv2(gelu(self.pwconv1(inner)))
        return x + out.transpose(1, 2)


class Residual(nn.Module):
    """Two convolutions beside what they were given."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.act1, self.conv1 = Snake(width), CausalConv(width, width, 7, dilation)
        self.act2, self.conv2 = Snake(width), CausalConv(width, width, 1)

    def forward(self, x: torch.Tensor, past: VocoderState) -> torch.Tensor:
        """[1, width, frames], the same out."""
        out: torch.Tensor = self.conv2(self.act2(self.conv1(self.act1(x, past), past), past), past)
        return out + x


class UpsampleBlock(nn.Module):
    """More samples, fewer channels."""

    def __init__(self, inside: int, out: int, rate: int, *, whole: bool = True) -> None:
        super().__init__()
        up = CausalUpsample(inside, out, 2 * rate, rate, whole=whole)
        parts = [Snake(inside), up, *(Residual(out, d) for d in DILATIONS)]
        self.block = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor, past: VocoderState) -> torch.Tensor:
        """[1, inside, frames] to [1, out, frames * rate]."""
        for part in self.block:
            x = part(x, past)
        return x


class RmsNorm(nn.Module):
    """Root mean square to one."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width], the same out."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)).to(x.dtype)


class WindowAttention(nn.Module):
    """Over the last `window` frames."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
        self._size = config.get("head_dim") or width // heads
        self._window, bias = config["sliding_window"], config.get("attention_bias", False)
        self.q_proj = nn.Linear(width, heads * self._size, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(width, kv_heads * self._size, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(heads * self._size, width, bias=bias)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], past: VocoderState) -> torch.Tensor:
        """[1, frames, width], the same out; `turn`: cosines and sines of the frames' places [frames, size]."""
        count = x.shape[1]
        q, k, v = (p(x).view(1, count, -1, self._size).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        fresh = torch.stack((_turned(k, *turn), v))
        if (before := past.seen.get(id(self))) is not None:
            fresh = torch.cat((before, fresh), 3)
        past.seen[id(self)] = fresh[..., -(self._window - 1) :, :]
        length = fresh.shape[3]
        away = torch.arange(length - count, length, device=x.device)[:, None] - torch.arange(length, device=x.device)
        seen = (away >= 0) & (away < self._window)
        out = scaled_dot_product_attention(_turned(q, *turn), fresh[0], fresh[1], attn_mask=seen, enable_gqa=True)
        made: torch.Tensor = self.o_proj(out.transpose(1, 2).reshape(1, count, -1))
        return made


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class LayerScale(nn.Module):
    """A learnt scale a channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))


class GatedMlp(nn.Module):
    """Gated."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)


class TransformerLayer(nn.Module):
    """One of the transformer's."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config.get("rms_norm_eps", 1e-5)
        self.self_attn, self.mlp = WindowAttention(config), GatedMlp(width, config["intermediate_size"])
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(width, eps), RmsNorm(width, eps)
        self.self_attn_layer_scale, self.mlp_layer_scale = LayerScale(width), LayerScale(width)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], past: VocoderState) -> torch.Tensor:
        """[1, frames, width], the same out."""
        x = x + self.self_attn_layer_scale.scale * self.self_attn(self.input_layernorm(x), turn, past)
        inner, mlp = self.post_attention_layernorm(x), self.mlp
        made: torch.Tensor = mlp.down_proj(silu(mlp.gate_proj(inner)) * mlp.up_proj(inner))
        return x + self.mlp_layer_scale.scale * made


class Transformer(nn.Module):
    """What is between the codes and the convolutions."""

    def __init__(self, config: dict[str, Any], *, projects: bool = True) -> None:
        super().__init__()
        width, latent = config["hidden_size"], config.get("latent_dim", 1024)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RmsNorm(width, config.get("rms_norm_eps", 1e-5))
        self.input_proj: nn.Module = nn.Linear(latent, width) if projects else nn.Identity()
        self.output_proj: nn.Module = nn.Linear(width, latent) if projects else nn.Identity()
        self._size = config.get("head_dim") or width // config["num_attention_heads"]
        self._theta = float(config.get("rope_theta", 10000))

    def forward(self, x: torch.Tensor, past: VocoderState) -> torch.Tensor:
        """[1, frames, latent], the same out."""
        count = x.shape[1]
        each = self._theta ** -(torch.arange(0, self._size, 2, device=x.device).float() / self._size)
        places = torch.arange(past.frames, past.frames + count, device=x.device).float()
        angles = (places[:, None] * each).repeat(1, 2)
        turn = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        past.frames += count
        x = self.input_proj(x)
        for layer in self.layers:
            x = layer(x, turn, past)
        out: torch.Tensor = self.output_proj(self.norm(x))
        return out


class Codebook(nn.Module):
    """Codes to vectors: sums of what was given each code in training, and how often."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.cluster_usage, self.embedding_sum = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size, width))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """int [frames] to [frames, width]."""
        return embedding(codes, self.embedding_sum) / embedding(codes, self.cluster_usage.clamp(min=1e-5)[:, None])


class Quantizer(nn.Module):
    """Several codebooks summed."""

    def __init__(self, count: int, size: int, width: int, outside: int) -> None:
        super().__init__()
        self.vq = nn.ModuleDict(
            {"layers": nn.ModuleList(nn.ModuleDict({"_codebook": Codebook(size, width)}) for _ in range(count))}
        )
        self.output_proj = nn.Conv1d(width, outside, 1, bias=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """int [codebooks, frames] to [1, outside, frames]."""
        books: Any = self.vq["layers"]
        summed = sum(books[i]["_codebook"](row) for i, row in enumerate(codes))
        out: torch.Tensor = self.output_proj(summed.T[None])
        return out


class CodecVocoder(nn.Module):
    """`config`: decoder_config of speech_tokenizer/config.json. Names under `decoder.`"""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        books, size = config["num_quantizers"], config["codebook_size"]
        inner, latent, width = config["codebook_dim"], config.get("latent_dim", 1024), config["decoder_dim"]
        rates, ratios = config["upsample_rates"], config["upsampling_ratios"]
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

    @torch.inference_mode()
    def forward(self, frames: Sequence[Sequence[int]], past: VocoderState) -> torch.Tensor:
        """Sound of more frames of a stream, each of one code a codebook: float32 [samples], in [-1, 1]."""
        codes = torch.tensor(frames, dtype=torch.long, device=self.pre_conv.conv.weight.device).T
        x: torch.Tensor = self.quantizer["rvq_first"](codes[:1]) + self.quantizer["rvq_rest"](codes[1:])
        x = self.pre_transformer(self.pre_conv(x, past).transpose(1, 2), past).transpose(1, 2)
        upsample: Any = self.upsample
        for part in (*(p for parts in upsample for p in parts), *self.decoder):
            x = part(x, past)
        return x[0, 0].float().clamp(-1, 1).cpu()
