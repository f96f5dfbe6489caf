"""The attention of packed sessions, registered with `transformers`.

One forward pass carries rows of many sessions side by side. Everything in a decoder but attention treats rows one by
one; here each session's rows meet the keys of that session only. The decoder runs unmodified: it finds `attend` by the
name of its attention implementation, and the attention of the step at hand (`StepAttention`) arrives as a keyword
argument that decoders hand down.

This module knows neither sessions nor where their keys and values lie; the folder `kv/` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from antiphon.engine.local.kv.shape import KvRange

# The name under which `transformers` finds `attend`.
ATTENTION_NAME = "antiphon"


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer weighs keys: its scores are scaled by `scaling` (None: head_dim ** -0.5).

    `window`: the keys that a row sees, its own included; 0: all. `softcap`: scores are squashed into +-`softcap`.
    """

    scaling: float | None = None
    window: int = 0
    softcap: float | None = None


class StepAttention(Protocol):
    """The attention of one step, over the KV of its sessions."""

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Store the new keys and values, and return what each row attends to, [rows, heads, head_dim].

        `query` [rows, heads, head_dim], `keys` and `values` [rows, kv_heads, head_dim], rotated: the packed rows.
        """
        ...


class StepRows(Protocol):
    """Where the keys and values of a step's sessions lie. `dtype`: the type they are kept in."""

    dtype: torch.dtype

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the step's new keys and values, each [rows, kv_heads, head_dim], packed in the order of the ranges."""
        ...

    def read(self, layer: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a range's keys and values from its session's first row on, each [1, kv_heads, rows, head_dim]."""
        ...


class SegmentedAttention:
    """Attends session by session: one call of the kernel for each range of rows and layer.

    `ranges`: the rows of the step, packed in this order. `rows`: where their keys and values lie.
    """

    def __init__(self, ranges: Sequence[KvRange], rows: StepRows) -> None:
        self._ranges, self._rows = ranges, rows
        # Those made so far, by range and window, so that layers share them.
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Store the new keys and values, and attend each range's rows to the keys of its own session."""
        self._rows.write(layer, keys, values)
        # The KV may be kept narrower than the decoder computes.
        given = query if query.dtype == self._rows.dtype else query.to(self._rows.dtype)
        out, at = query.new_empty(*query.shape[:2], values.shape[-1]), 0
        for number, place in enumerate(self._ranges):
            own = slice(at, at + place.count)
            out[own] = self._attend_range(number, layer, given[own], scoring)
            at += place.count
        return out

    def _attend_range(self, number: int, layer: int, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        count, mask = len(query), None
        keys, values = self._rows.read(layer, number)
        groups = query.shape[1] // keys.shape[1]
        # The heads of a group are rows of one query, so that a group's keys are read once: with 7 heads a group, 15
        # rows and 3,000 keys take half as long as head by head.
        q = query.reshape(count, -1, groups, query.shape[-1]).permute(1, 2, 0, 3).flatten(1, 2)[None]
        if count > 1:
            mask = self._mask(number, scoring.window, groups, q)
        elif scoring.window:
            keys, values = keys[:, :, -scoring.window :], values[:, :, -scoring.window :]
        attended = weighted_values(q, keys, values, mask, scoring)[0]
        return attended.view(-1, groups, count, attended.shape[-1]).permute(2, 0, 1, 3).flatten(1, 2)

    def _mask(self, number: int, window: int, groups: int, like: torch.Tensor) -> torch.Tensor:
        """The additive mask [groups * count, stop] of a range, in the type and on the device of `like`.

        Row i sees the rows up to its own, and of these the last `window` (0: all). The rows repeat for each group.
        """
        if (number, window) not in self._masks:
            place = self._ranges[number]
            rows = torch.arange(place.start, place.stop, device=like.device)[:, None]
            columns = torch.arange(place.stop, device=like.device)[None]
            seen = columns <= rows
            if window:
                seen &= columns > rows - window
            mask = torch.zeros(place.count, place.stop, dtype=like.dtype, device=like.device)
            self._masks[number, window] = mask.masked_fill_(~seen, float("-inf")).repeat(groups, 1)
        return self._masks[number, window]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    step_attention: StepAttention | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend the rows of a step, as `transformers` calls an attention implementation.

    `query` [1, heads, rows, head_dim], `key` and `value` [1, kv_heads, rows, head_dim], rotated. `attention_mask` is
    ignored: which rows see which, `step_attention` knows. Returns [1, rows, heads, head_dim] and no weights. Raises
    RuntimeError outside a step.
    """
    if step_attention is None:
        raise RuntimeError("this attention works inside an engine's step only")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scoring = Scoring(scaling, sliding_window or 0, softcap)
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return step_attention.attend(layer, *rows, scoring)[None], None


def weighted_values(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Return the values weighed by the queries' scores, [batch, heads, rows, head_dim].

    `q`, `k`, `v`: [batch, heads, rows, head_dim]. `mask`: added to the scores; None: every row sees every key.
    """
    if scoring.softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scaling)
    # Gemma 2 squashes the scores (arXiv:2408.00118, section 2), which no fused kernel here does.
    scale = scoring.scaling if scoring.scaling is not None else q.shape[-1] ** -0.5
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)


AttentionInterface.register(ATTENTION_NAME, attend)
