"""Attention over the pages of many sessions, and storing new rows in them.

The kernels read the keys in place, by each session's page table, and never gather them. A program attends a tile (rows
of one session, with the query heads of one key head) to a share of the session's pages, with a running softmax
(arXiv:2205.14135). The shares are combined afterwards, as in Flash-Decoding. Only `antiphon.engine.local.kernels` uses
Triton: on a machine without it this module cannot be imported.
"""

from __future__ import annotations

import triton
import triton.language as tl


# Values that change from step to step must not cause a recompilation.
@triton.jit(do_not_specialize=["window", "table_stride", "num_rows", "shares"])
def attend_pages(
    query,
    rows,
    table,
    tile_session,
    tile_row,
    tile_count,
    tile_position,
    out,
    part,
    part_top,
    part_sum,
    scale,
    softcap,
    window,
    query_stride,
    rows_stride,
    values_offset,
    table_stride,
    num_rows,
    num_heads,
    shares,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAGE: tl.constexpr,
    SHARED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend one tile to one share of its session's pages. Grid: tiles, key heads, `shares`."""
    tile, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    session = tl.load(tile_session + tile)
    row = tl.load(tile_row + tile)
    count = tl.load(tile_count + tile)
    position = tl.load(tile_position + tile)

    m = tl.arange(0, BLOCK_M)
    own = m // GROUPS
    heads = head * GROUPS + m % GROUPS
    d = tl.arange(0, BLOCK_D)
    valid = own < count
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    at = (row + own).to(tl.int64)
    q = tl.load(query + at[:, None] * query_stride + heads[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)

    pages = (position + count - 1) // PAGE + 1
    first = 0
    if WINDOW:
        first = tl.maximum(position - window + 1, 0) // PAGE
    share = (pages - first + shares - 1) // shares
    begin = first + number * share
    end = tl.minimum(begin + share, pages)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    n = tl.arange(0, PAGE)
    key_at = n[:, None] * rows_stride + head * HEAD_DIM + d[None, :]
    key_mask = (n >= 0)[:, None] & (d < HEAD_DIM)[None, :]
    for page in range(begin, end):
        base = rows + tl.load(table + session * table_stride + page).to(tl.int64) * PAGE * rows_stride
        keys = tl.load(base + key_at, mask=key_mask, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        if SOFTCAP:
            scores = softcap * (2 / (1 + tl.exp(-2 * scores / softcap)) - 1)
        place = page * PAGE + n
        seen = place[None, :] <= (position + own)[:, None]
        if WHOLE:
            seen = place[None, :] < position + count
        if WINDOW:
            seen = seen & (place[None, :] > (position + own - window)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A row may see no key of this share.
        base_score = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base_score[:, None])
        shrunk = tl.exp(top - base_score)
        values = tl.load(base + values_offset + key_at, mask=key_mask, other=0.0)
        acc = acc * shrunk[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        total = total * shrunk + tl.sum(weights, 1)
        top = higher

    if not SHARED:
        done = acc / tl.where(total > 0, total, 1.0)[:, None]
        place_out = at[:, None] * num_heads * HEAD_DIM + heads[:, None] * HEAD_DIM + d[None, :]
        tl.store(out + place_out, done.to(out.dtype.element_ty), mask=inside)
    else:
        flat = (number * num_rows + at) * num_heads + heads
        tl.store(part + flat[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)
        tl.store(part_top + flat, top, mask=valid)
        tl.store(part_sum + flat, total, mask=valid)


@triton.jit(do_not_specialize=["num_rows", "shares"])
def add_shares(
    part,
    part_top,
    part_sum,
    out,
    num_rows,
    num_heads,
    shares,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MOST: tl.constexpr,
):
    """Combine the `shares` (at most MOST) of one row and head. Grid: rows, query heads."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s = tl.arange(0, MOST)
    d = tl.arange(0, BLOCK_D)
    flat = (s * num_rows + row) * num_heads + head
    there = s < shares
    top = tl.load(part_top + flat, mask=there, other=float("-inf"))
    total = tl.load(part_sum + flat, mask=there, other=0.0)
    highest = tl.max(top, 0)
    weight = tl.exp(top - highest)
    inside = there[:, None] & (d < HEAD_DIM)[None, :]
    acc = tl.load(part + flat[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    done = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + (row * num_heads + head) * HEAD_DIM + d, done.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def store_rows(
    keys,
    values,
    slots,
    rows,
    keys_stride,
    values_stride,
    rows_stride,
    values_offset,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store one row's keys and values at its slot; infinities and NaN become 0. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    into = rows + slot * rows_stride + i
    kind = rows.dtype.element_ty
    key = tl.load(keys + row * keys_stride + i, mask=inside, other=0.0).to(kind).to(tl.float32)
    value = tl.load(values + row * values_stride + i, mask=inside, other=0.0).to(kind).to(tl.float32)
    # x - x is 0 for finite numbers only.
    tl.store(into, tl.where(key - key == 0, key, 0.0).to(kind), mask=inside)
    tl.store(into + values_offset, tl.where(value - value == 0, value, 0.0).to(kind), mask=inside)
