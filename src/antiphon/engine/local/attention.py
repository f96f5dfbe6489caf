"""The attention of packed sessions, registered with `transformers`, and the memory their keys and values lie in.

One forward pass carries rows of many sessions side by side. Everything in a decoder but attention treats rows one by
one; here each session's rows meet the keys of that session only. The decoder runs unmodified: it finds this function by
the name of its attention implementation, and the step's segments arrive as a keyword argument that decoders hand down.

This module knows neither sessions nor when their memory is given back; `kv_cache.py` does the bookkeeping.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

# The name under which `transformers` finds `attend`.
ATTENTION_NAME = "antiphon"


class KvTensors:
    """The Storage of a decoder's KV: a handle is one tensor [layers, 2, rows, kv_heads, head_dim].

    `dtype`, `device`: of these tensors. `folder`: where files of parked copies go; None: the system's temporary folder.
    `frequencies`: radians by which the halves of a key are turned for each position, float32 [head_dim / 2]; None where
    this model's keys are turned otherwise, and so cannot be moved.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        folder: Path | None = None,
        frequencies: torch.Tensor | None = None,
    ) -> None:
        self._layers, self._kv_heads, self._head_dim = layers, kv_heads, head_dim
        self._frequencies = frequencies
        self._dtype, self._device, self._folder = dtype, device, folder

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's keys and values over all layers."""
        return 2 * self._layers * self._kv_heads * self._head_dim * self._dtype.itemsize

    def allocate(self, rows: int) -> torch.Tensor:
        """Return a tensor for `rows` rows, not initialized. Raises torch.OutOfMemoryError where the device is full."""
        shape = (self._layers, 2, rows, self._kv_heads, self._head_dim)
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def copy(self, source: torch.Tensor, target: torch.Tensor, rows: int) -> None:
        """Copy the first `rows` rows of `source` into `target`, on the device."""
        target[:, :, :rows].copy_(source[:, :, :rows])

    def evict(self, handle: torch.Tensor, first: int, end: int, stop: int) -> bool:
        """Move rows end .. stop down to `first` and turn their keys by as many positions, layer by layer.

        Turning a rotary key back by the positions it moves gives the key that would have been computed there
        (arXiv:2104.09864, section 3.2). Values carry no position and are copied. Returns False without `frequencies`.
        """
        if self._frequencies is None:
            return False
        into = slice(first, first + stop - end)
        angles = self._frequencies * (first - end)
        cos, sin = torch.cos(angles), torch.sin(angles)
        for layer in handle:
            low, high = layer[0, end:stop].float().chunk(2, dim=-1)
            layer[0, into] = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(layer.dtype)
            layer[1, into] = layer[1, end:stop].clone()
        return True

    def to_host(self, source: torch.Tensor, rows: int) -> torch.Tensor:
        """Return a contiguous copy of the first `rows` rows in host memory; waits for the device."""
        return source[:, :, :rows].to("cpu", copy=True).contiguous()

    def to_disk(self, parked: torch.Tensor) -> ParkedFile:
        """Write a parked copy to an unnamed file, which disappears with the process. Raises OSError for a full disk."""
        with tempfile.TemporaryFile(dir=self._folder, prefix="antiphon-kv-") as file:
            file.write(_bytes(parked))
            file.flush()
            return ParkedFile(os.dup(file.fileno()), tuple(parked.shape), parked.dtype)

    def restore(self, parked: torch.Tensor | ParkedFile, target: torch.Tensor, rows: int) -> None:
        """Copy the first `rows` rows of a parked copy into `target`. Raises OSError where its file cannot be read."""
        copy = parked.read() if isinstance(parked, ParkedFile) else parked
        target[:, :, :rows].copy_(copy[:, :, :rows])

    def discard(self, parked: torch.Tensor | ParkedFile) -> None:
        """Free a parked copy: a file is closed, which deletes it; a tensor goes with its last reference."""
        if isinstance(parked, ParkedFile):
            os.close(parked.descriptor)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's memory."""
    flat: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


@dataclass(frozen=True, slots=True)
class ParkedFile:
    """A parked tensor of `shape` and `dtype` in an unlinked file; `descriptor` is open until it is discarded."""

    descriptor: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """Return the whole tensor, read into host memory. Raises OSError where the file is shorter than it was."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        into, at = _bytes(tensor), 0
        while at < len(into):
            count = os.preadv(self.descriptor, [into[at:]], at)
            if not count:
                raise OSError("a parked session's file is shorter than it was")
            at += count
        return tensor


@dataclass(slots=True)
class AttentionSegment:
    """One session's rows in a step: packed rows first .. last, of a session with `past` rows in the KV already.

    The tensors are views of the session's memory, one for each layer: `new_keys` and `new_values` [count, kv_heads,
    head_dim] are to be written, `keys` and `values` [1, kv_heads, past + count, head_dim] to be read. `masks`: those
    made so far, by window, so that layers share them.
    """

    first: int
    last: int
    past: int
    new_keys: Sequence[torch.Tensor]
    new_values: Sequence[torch.Tensor]
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    masks: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, handle: torch.Tensor, first: int, count: int, past: int) -> AttentionSegment:
        """Return the segment of `count` rows, packed from `first` on, that follow `past` rows in `handle`."""
        stop = past + count
        whole = handle[:, :, :stop].transpose(2, 3).unsqueeze(2)
        fresh = handle[:, :, past:stop]
        return cls(
            first,
            first + count,
            past,
            fresh[:, 0].unbind(0),
            fresh[:, 1].unbind(0),
            whole[:, 0].unbind(0),
            whole[:, 1].unbind(0),
        )

    def mask(self, window: int, groups: int, like: torch.Tensor) -> torch.Tensor:
        """Return the additive mask [groups * count, past + count], in the type and on the device of `like`.

        Row i sees the rows up to its own, and of these the last `window` (0: all). The rows repeat for each group.
        """
        if window not in self.masks:
            count, stop = self.last - self.first, self.past + self.last - self.first
            rows = torch.arange(self.past, stop, device=like.device)[:, None]
            columns = torch.arange(stop, device=like.device)[None]
            seen = columns <= rows
            if window:
                seen &= columns > rows - window
            mask = torch.zeros(count, stop, dtype=like.dtype, device=like.device)
            self.masks[window] = mask.masked_fill_(~seen, float("-inf")).repeat(groups, 1)
        return self.masks[window]


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
    segments: Sequence[AttentionSegment] = (),
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend each segment's rows to the keys of its own session, and write the new keys and values on the way.

    `query` [1, heads, rows, head_dim], `key` and `value` [1, kv_heads, rows, head_dim], rotated. `segments` cover all
    rows. `attention_mask` is ignored: segments make their own. Returns [1, rows, heads, head_dim] and no weights, as
    `transformers` expects. Raises RuntimeError outside a step, where there are no segments.
    """
    if not segments:
        raise RuntimeError("this attention works inside an engine's step only")
    layer: int = module.layer_idx  # type: ignore[assignment]
    heads, rows = query.shape[1:3]
    groups = heads // key.shape[1]
    queries, keys, values = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if segments[0].keys[layer].dtype != query.dtype:
        # The KV may be kept narrower than the decoder computes.
        queries = queries.to(segments[0].keys[layer].dtype)
    out = query.new_empty(rows, heads, value.shape[-1])
    for segment in segments:
        own = slice(segment.first, segment.last)
        segment.new_keys[layer].copy_(keys[own])
        segment.new_values[layer].copy_(values[own])
        out[own] = _attend_segment(segment, layer, queries[own], groups, sliding_window or 0, scaling, softcap)
    return out[None], None


def _attend_segment(
    segment: AttentionSegment,
    layer: int,
    query: torch.Tensor,
    groups: int,
    window: int,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """The output [count, heads, head_dim] of one session's rows: query [count, heads, head_dim] to its own keys."""
    count, width, mask = len(query), query.shape[-1], None
    k, v = segment.keys[layer], segment.values[layer]
    # The heads of a group are rows of one query, so that a group's keys are read once: with 7 heads a group, 15 rows
    # and 3,000 keys take half as long as head by head.
    q = query.reshape(count, -1, groups, width).permute(1, 2, 0, 3).reshape(1, -1, groups * count, width)
    if count > 1:
        mask = segment.mask(window, groups, q)
    elif window:
        k, v = k[:, :, -window:], v[:, :, -window:]
    attended = _weighted_values(q, k, v, mask, scaling, softcap)[0]
    return attended.view(-1, groups, count, attended.shape[-1]).permute(2, 0, 1, 3).flatten(1, 2)


def _weighted_values(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    # Gemma 2 squashes the scores (arXiv:2408.00118, section 2), which no fused kernel here does.
    scores = torch.matmul(q, k.transpose(-1, -2)) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)


AttentionInterface.register(ATTENTION_NAME, attend)
