"""The flow's decoder: a diffusion transformer that turns noise into mel frames, in a few Euler steps.

Each step has keys, values and convolution inputs of its own, which later windows of the same stream attend to.
Attention has no positions. Every frame is computed with the conditions and without them; the difference guides it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from antiphon.adapters.minicpmo.token2wav.files import DecoderConfig, DitConfig
from antiphon.adapters.minicpmo.token2wav.history import FramePlaces, continued, extended

# Frames of its input that each convolution keeps.
KEPT_FRAMES = 2


class DitTables(NamedTuple):
    """What the steps keep of the streams. Each slot has two rows: with the conditions, and without them."""

    # Keys and values, [steps, layers, 2 * (slots + 1), positions, 2 * heads * head width].
    attention: torch.Tensor
    # The last inputs of both convolutions, [steps, layers, 2 * (slots + 1), 2 * width, KEPT_FRAMES].
    convolutions: torch.Tensor


class _Shared(NamedTuple):
    """What all layers share in one call: see FramePlaces and its methods."""

    places: FramePlaces
    mask: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, places: FramePlaces, dtype: torch.dtype) -> _Shared:
        """`dtype`: the type of attention scores."""
        return cls(places, places.mask(dtype), places.ends(KEPT_FRAMES))


class _Attention(nn.Module):
    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        inner, self._heads, self._width = config.num_heads * config.head_dim, config.num_heads, config.head_dim
        self.to_q, self.to_k, self.to_v = (nn.Linear(config.hidden_size, inner) for _ in range(3))
        self.q_norm, self.k_norm = nn.LayerNorm(config.head_dim), nn.LayerNorm(config.head_dim)
        self.proj = nn.Linear(inner, config.hidden_size)

    def forward(self, x: torch.Tensor, table: torch.Tensor, shared: _Shared) -> torch.Tensor:
        count, frames, _ = x.shape
        heads = (count, -1, self._heads, self._width)
        query, key = self.q_norm(self.to_q(x).view(heads)), self.k_norm(self.to_k(x).view(heads))
        held = extended(table, shared.places, torch.cat([key.flatten(2), self.to_v(x)], 2).to(table.dtype))
        keys, values = held.view(count, -1, 2, self._heads, self._width).permute(2, 0, 3, 1, 4)
        queries = query.transpose(1, 2).to(table.dtype)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=shared.mask).to(x.dtype)
        return self.proj(mixed.transpose(1, 2).reshape(count, frames, -1))  # type: ignore[no-any-return]


class _Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))  # type: ignore[no-any-return]


class _Convolutions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        kernel = KEPT_FRAMES + 1
        self.block = nn.ModuleDict(
            {"1": nn.Conv1d(width, width, kernel), "3": nn.LayerNorm(width), "6": nn.Conv1d(width, width, kernel)}
        )

    def forward(self, x: torch.Tensor, table: torch.Tensor, shared: _Shared) -> torch.Tensor:
        slots, (first, second) = shared.places.slots, table.chunk(2, 1)
        made = self.block["1"](continued(first, slots, shared.ends, x.transpose(1, 2)))
        made = F.mish(self.block["3"](made.transpose(1, 2))).transpose(1, 2)
        return self.block["6"](continued(second, slots, shared.ends, made)).transpose(1, 2)  # type: ignore[no-any-return]


class _Block(nn.Module):
    """A layer. Its norms are scaled and shifted, and its parts are weighted, by vectors of the step."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attn, self.conv = _Attention(config), _Convolutions(width)
        self.mlp = _Mlp(width, int(width * config.mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 9 * width))

    def forward(
        self,
        x: torch.Tensor,
        vectors: torch.Tensor,
        attention: torch.Tensor,
        convolutions: torch.Tensor,
        shared: _Shared,
    ) -> torch.Tensor:
        """`vectors`, [9, width]: the shift, scale and weight of attention, MLP and convolutions."""
        mixed = self.attn(_modulated(x, vectors[0], vectors[1]), attention, shared)
        x = torch.addcmul(x, vectors[2], mixed)
        x = torch.addcmul(x, vectors[8], self.conv(_modulated(x, vectors[6], vectors[7]), convolutions, shared))
        return torch.addcmul(x, vectors[5], self.mlp(_modulated(x, vectors[3], vectors[4])))


class _Final(nn.Module):
    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(config.hidden_size, 2 * config.hidden_size))
        self.linear = nn.Linear(config.hidden_size, config.out_channels)

    def forward(self, x: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        return self.linear(_modulated(x, vectors[0], vectors[1]))  # type: ignore[no-any-return]


class _TimeEmbedding(nn.Module):
    NUM_WAVES = 128

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * self.NUM_WAVES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-math.log(10_000.0) * torch.arange(self.NUM_WAVES) / self.NUM_WAVES).to(times)
        angles = (times * 1000)[:, None] * rates
        return self.mlp(torch.cat([angles.cos(), angles.sin()], 1))  # type: ignore[no-any-return]


class _Estimator(nn.Module):
    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.t_embedder = _TimeEmbedding(config.hidden_size)
        self.in_proj = nn.Linear(config.in_channels, config.hidden_size)
        self.blocks = nn.ModuleList([_Block(config) for _ in range(config.depth)])
        self.final_layer = _Final(config)


class MelDecoder(nn.Module):
    """Turns noise into mel frames. Parameters have their names in the checkpoint.

    `bands`: the number of mel bands.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.estimator, self.bands = _Estimator(config.estimator), config.estimator.out_channels
        self._config, self._guidance = config.estimator, config.inference_cfg_rate
        # The sizes of the steps, and for each step the vectors of all blocks and of the final layer.
        self._sizes: list[float] = []
        self._vectors: list[list[torch.Tensor]] = []

    @property
    def num_steps(self) -> int:
        """The number of Euler steps, which `prepare` sets."""
        return len(self._sizes)

    def prepare(self, num_steps: int) -> None:
        """Compute what depends only on the times of the steps. Called once."""
        estimator, like = self.estimator, self.estimator.in_proj.weight
        span = 1 - torch.cos(torch.linspace(0, 1, num_steps + 1, dtype=like.dtype) * (0.5 * torch.pi))
        time, times, sizes = span[0], list[torch.Tensor](), list[torch.Tensor]()
        for end in span[1:]:
            # The makers add up the sizes, which is not exactly the end of the step.
            times.append(time)
            sizes.append(end - time)
            time = time + sizes[-1]
        embedded = estimator.t_embedder(torch.stack(times).to(like.device))
        parts = (*estimator.blocks, estimator.final_layer)
        made = [part.adaLN_modulation(embedded).view(num_steps, -1, like.shape[0]) for part in parts]
        for vectors in made:
            # The scales of the norms are around 1.
            vectors[:, 1::3] += 1
        self._sizes = [float(size) for size in sizes]
        self._vectors = [[vectors[step] for vectors in made] for step in range(num_steps)]

    def tables(self, slots: int, frames: int, dtype: torch.dtype) -> DitTables:
        """Return tables of zeros for `slots` streams that hold at most `frames` frames.

        `dtype`: the type of keys and values, in which attention is computed.
        """
        like, config = self.estimator.in_proj.weight, self._config
        rows = (self.num_steps, config.depth, 2 * (slots + 1))
        return DitTables(
            like.new_zeros(*rows, frames, 2 * config.num_heads * config.head_dim, dtype=dtype),
            like.new_zeros(*rows, 2 * config.hidden_size, KEPT_FRAMES),
        )

    def forward(
        self,
        noise: torch.Tensor,
        conditions: torch.Tensor,
        speakers: torch.Tensor,
        given: torch.Tensor | None,
        tables: DitTables,
        places: FramePlaces,
    ) -> torch.Tensor:
        """Return mel frames, [streams, frames, bands].

        `noise`, `conditions`: the noise to begin with and the encoder's conditions, both of that shape. `speakers`:
        the voices, [streams, bands]. `given`: the frames themselves, in the prompt of a voice; None: no frames.
        """
        frames, shared = noise.shape[1], _Shared.of(places.guided(), tables.attention.dtype)
        conditions = torch.cat([conditions, speakers[:, None].expand(-1, frames, -1)], 2)
        if given is not None:
            conditions = torch.cat([conditions, given], 2)
        weight, bias = self.estimator.in_proj.weight, self.estimator.in_proj.bias
        of_noise, of_conditions = weight[:, : self.bands], weight[:, self.bands : self.bands + conditions.shape[2]]
        with_them = F.linear(conditions, of_conditions, bias)
        fixed = torch.stack([with_them, bias.expand_as(with_them)], 1)
        x = noise
        for step, size in enumerate(self._sizes):
            made = self._velocity(x, of_noise, fixed, step, tables, shared)
            velocity = torch.lerp(made[:, 1], made[:, 0], 1 + self._guidance)
            x = torch.add(x, velocity, alpha=size)
        return x

    def _velocity(
        self,
        x: torch.Tensor,
        of_noise: torch.Tensor,
        fixed: torch.Tensor,
        step: int,
        tables: DitTables,
        shared: _Shared,
    ) -> torch.Tensor:
        """Return the velocities with the conditions and without them, [streams, 2, frames, bands]."""
        vectors, estimator = self._vectors[step], self.estimator
        hidden = (F.linear(x, of_noise)[:, None] + fixed).flatten(0, 1)
        kept = zip(vectors, tables.attention[step], tables.convolutions[step], strict=False)
        for block, (own, attention, convolutions) in zip(estimator.blocks, kept, strict=False):
            hidden = block(hidden, own, attention, convolutions, shared)
        made: torch.Tensor = estimator.final_layer(hidden, vectors[-1])
        return made.view(len(x), 2, *made.shape[1:])


def _modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, shift.shape, scale, shift, 1e-6)
