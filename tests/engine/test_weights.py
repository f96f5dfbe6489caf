"""int8 products: close to the float ones, and the same for a row whatever rows are beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from antiphon.engine.weights import Int8Linear, _pack, quantized


class Block(nn.Module):
    """Projections as a decoder names them: three share an input, one stands alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(64, 32), nn.Linear(64, 16), nn.Linear(64, 16, bias=False)
        self.o_proj = nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return [q, k, v, self.o_proj(q)]


def packed(block: Block) -> Any:
    _pack(block, {n: quantized(m.weight) for n, m in block.named_modules() if isinstance(m, nn.Linear)})
    return block


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 50])
@torch.inference_mode()
def test_a_product_is_close_whatever_the_rows(rows: int) -> None:
    torch.manual_seed(0)
    block = Block()
    x = torch.randn(1, rows, 64)
    expected = block(x)
    got = packed(block)(x)
    assert isinstance(block.q_proj, Int8Linear)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, atol=0.03, rtol=0.03)


@torch.inference_mode()
def test_a_row_is_the_same_in_any_company() -> None:
    torch.manual_seed(0)
    block = packed(Block())
    # A neighbour a thousand times as loud changes nothing.
    x = torch.cat((torch.randn(1, 5, 64), 1000 * torch.randn(1, 3, 64)), 1)
    together = block(x)
    for row in range(8):
        alone = block(x[:, row : row + 1].clone())
        assert all(torch.equal(a[:, 0], t[:, row]) for a, t in zip(alone, together, strict=True))
