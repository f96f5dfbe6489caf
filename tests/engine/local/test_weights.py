"""int8 products are close to the float ones, and a row's result does not depend on the other rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from antiphon.engine.local import packed as packed_weights
from antiphon.engine.local.weights import (
    Int8Linear,
    load_int8_model,
    quantize_linear_layers,
    write_int8,
    write_packed,
)


class Block(nn.Module):
    """Projections with the same names as a decoder's. Three share an input, and one has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(64, 32), nn.Linear(64, 16), nn.Linear(64, 16, bias=False)
        self.o_proj = nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return [q, k, v, self.o_proj(q)]


def int8(block: Block) -> Any:
    quantize_linear_layers(block)
    return block


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 50])
@torch.inference_mode()
def test_int8_products_are_close_for_any_number_of_rows(rows: int) -> None:
    torch.manual_seed(0)
    block = Block()
    x = torch.randn(1, rows, 64)
    expected = block(x)
    got = int8(block)(x)
    assert isinstance(block.q_proj, Int8Linear)
    for output, reference in zip(got, expected, strict=True):
        assert output.shape == reference.shape
        torch.testing.assert_close(output, reference, atol=0.03, rtol=0.03)


@pytest.mark.heavy
@pytest.mark.server
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_int8_products_are_close_without_vnni(isa: str) -> None:
    test = f"{__file__}::test_int8_products_are_close_for_any_number_of_rows"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
    run = subprocess.run(
        command, env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa}, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout


@torch.inference_mode()
def test_a_row_is_the_same_whatever_rows_are_beside_it() -> None:
    torch.manual_seed(0)
    block = int8(Block())
    # A neighbour a thousand times as large changes nothing.
    x = torch.cat((torch.randn(1, 5, 64), 1000 * torch.randn(1, 3, 64)), 1)
    together = block(x)
    for row in range(8):
        alone = block(x[:, row : row + 1].clone())
        assert all(torch.equal(a[:, 0], t[:, row]) for a, t in zip(alone, together, strict=True))


def write_checkpoint(folder: Path) -> nn.Module:
    """Write a folder with a tiny checkpoint in int8, packed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    model.config.save_pretrained(folder)
    write_int8(model, folder)
    write_packed(folder)
    return model


@torch.inference_mode()
def test_packed_weights_are_mapped_and_give_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path)
    x = torch.arange(8)[None]
    # The weights are loaded from the file, and none is packed.
    with monkeypatch.context() as patch:
        patch.setattr(packed_weights, "pack", None)
        mapped = load_int8_model(tmp_path)(x).logits
    (tmp_path / packed_weights.INDEX_FILE).unlink()
    assert torch.equal(mapped, load_int8_model(tmp_path)(x).logits)


@pytest.mark.parametrize("damage", ["another machine", "cut short", "no data", "no JSON", "another layer"])
@torch.inference_mode()
def test_when_packed_weights_do_not_fit_they_are_packed_anew(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path)
    x = torch.arange(8)[None]
    expected = load_int8_model(tmp_path)(x).logits
    index, data = tmp_path / packed_weights.INDEX_FILE, tmp_path / packed_weights.DATA_FILE
    match damage:
        case "another machine":
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
            assert not packed_weights.fits_machine(tmp_path)
        case "cut short":
            data.write_bytes(data.read_bytes()[:-10])
        case "no data":
            data.unlink()
        case "no JSON":
            index.write_text("{")
        case "another layer":
            index.write_text(index.read_text().replace("layers.1.self_attn.o_proj", "layers.7.self_attn.o_proj"))
    assert torch.equal(load_int8_model(tmp_path)(x).logits, expected)
