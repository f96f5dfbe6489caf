"""The attention of packed sessions, registered with `transformers`.

One forward pass carries rows of many sessions side by side. All parts of a decoder except attention process each row by
itself. In the attention of this module, each session's rows attend only to the keys of that session. The decoder runs
unmodified: it finds `attend` by the name of its attention implementation, and passes on the current step's attention
(`StepAttention`) as a keyword argument.

This module knows neither sessions nor the location of their keys and values, which the folder `kv/` handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from antiphon.engine.local.kv.shape import KvRange

# The name by which `transformers` finds `attend`.
ATTENTION_NAME = "antiphon"


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer scores keys. `scaling`: the factor of its scores; None: head_dim ** -0.5.

    `window`: the number of newest keys that a row sees, including its own; 0: all. `softcap`: the bound to which tanh
    limits the scores; None: no bound. `whole`: a row also sees the later rows of its
    session in the step. Kernels need these rows to be one tile.
    """

    scaling: float | None = None
    window: int = 0
    softcap: float | None = None
    whole: bool = False


class StepAttention(Protocol):
    """The attention of one step, over the KV of its sessions."""

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Store the new keys and values, and return each row's attention output, [rows, heads, head_dim].

        The arguments hold the packed rows, already rotated: `query` [rows, heads, head_dim], `keys` and `values` [rows,
        kv_heads, head_dim].
        """
        ...


class StepRows(Protocol):
    """Access to the keys and values of a step's sessions. `dtype`: the type they are stored in."""

    dtype: torch.dtype

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the step's new keys and values, each [rows, kv_heads, head_dim], packed in the order of the ranges."""
        ...

    def read(self, layer: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a range's keys and values from its session's first row on, each [1, kv_heads, rows, head_dim]."""
        ...


class SegmentedAttention:
    """Attends session by session: one call of the kernel for each range of rows and layer.

    `ranges`: the rows of the step, packed in this order. `rows`: access to their keys and values.
    """

    def __init__(self, ranges: Sequence[KvRange], rows: StepRows) -> None:
        self._ranges, self._rows = ranges, rows
        # The masks so far, by range and scoring, shared by all layers.
        self._masks: dict[tuple[int, Scoring], torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Store the new keys and values, and attend each range's rows to the keys of its own session."""
        self._rows.write(layer, keys, values)
        # The KV may be stored in a narrower type than the decoder computes in.
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
        # Query heads that share a key head become rows of one query, so that the keys are read once for the group. With
        # 7 heads in a group, 15 rows and 3,000 keys, this takes half the time of separate heads.
        q = query.reshape(count, -1, groups, query.shape[-1]).permute(1, 2, 0, 3).flatten(1, 2)[None]
        if count > 1:
            mask = self._mask(number, scoring, groups, q)
        elif scoring.window:
            keys, values = keys[:, :, -scoring.window :], values[:, :, -scoring.window :]
        attended = weighted_values(q, keys, values, mask, scoring)[0]
        return attended.view(-1, groups, count, attended.shape[-1]).permute(2, 0, 1, 3).flatten(1, 2)

    def _mask(self, number: int, scoring: Scoring, groups: int, like: torch.Tensor) -> torch.Tensor:
        """The additive mask [groups * count, stop] of a range, in the type and on the device of `like`.

        Row i sees the rows that `scoring` lets it see. The rows repeat for each group.
        """
        if (number, scoring) not in self._masks:
            place = self._ranges[number]
            rows = torch.arange(place.start, place.stop, device=like.device)[:, None]
            columns = torch.arange(place.stop, device=like.device)[None]
            seen = columns < place.stop if scoring.whole else columns <= rows
            if scoring.window:
                seen = seen & (columns > rows - scoring.window)
            mask = torch.zeros(place.count, place.stop, dtype=like.dtype, device=like.device)
            self._masks[number, scoring] = mask.masked_fill_(~seen, float("-inf")).repeat(groups, 1)
        return self._masks[number, scoring]


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
    """Attend the rows of a step, called by `transformers` as an attention implementation.

    `query` [1, heads, rows, head_dim], `key` and `value` [1, kv_heads, rows, head_dim], rotated. Ignores
    `attention_mask`, because `step_attention` knows which rows see which. Returns [1, rows, heads, head_dim] and no
    weights. Raises RuntimeError outside a step.
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
    """Return the values weighted by the queries' scores, [batch, heads, rows, head_dim].

    `q`, `k`, `v`: [batch, heads, rows, head_dim]. `mask`: added to the scores; None: every row sees every key.
    """
    if scoring.softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scaling)
    # Gemma 2 squashes the scores (arXiv:2408.00118, section 2). No fused kernel here supports that.
    scale = scoring.scaling if scoring.scaling is not None else q.shape[-1] ** -0.5
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)


AttentionInterface.register(ATTENTION_NAME, attend)
