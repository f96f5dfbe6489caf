"""Mixtures of experts: a decode pass is grouped products, and reads no value on the host."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from antiphon.adapters.qwen3_omni import checkpoint
from antiphon.adapters.vlm.qwen_vl import QwenVl
from antiphon.engine.api import EngineSettings
from antiphon.engine.local.decode import DecodeShape
from antiphon.engine.local.kv.page_pool import PagePool
from antiphon.engine.local.runner import Runner
from antiphon.modeling.text_decoder import EXPERTS, TextDecoder
from tests.adapters import tiny_qwen3_omni, tiny_vlm
from tests.engine.local.operators import Operators

DTYPE = torch.bfloat16
# Each layer has two products of experts: into their width, and back.
PRODUCTS_OF_A_LAYER = 2


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextDecoder]:
    omni = tiny_qwen3_omni.write(tmp_path_factory.mktemp("omni"))
    thinker, talker = checkpoint.read(omni, "cpu", "cpu", DTYPE)
    assert talker
    mixed = tiny_vlm.write(tmp_path_factory.mktemp("vlm"), "qwen3_vl_moe")
    seen = QwenVl(mixed, "cpu", DTYPE, "qwen3_vl_moe").decoder
    return {"thinker": thinker.decoder, "talker": talker.decoder, "vlm": seen}


@torch.inference_mode()
def pass_operators(decoder: TextDecoder, sessions: int) -> list[str]:
    """Return the operators of a decode pass over fake tensors. They have no values: reading one raises."""
    runner = Runner(decoder, dtype=DTYPE, kv_dtype=DTYPE, position_axes=3, input_width=decoder.input_width)
    pool = runner.storage(EngineSettings(kv_bytes=4 << 20, kv_layout="paged"))
    assert isinstance(pool, PagePool)
    rows = torch.zeros(1, sessions, runner.width, dtype=DTYPE)
    shape = DecodeShape(runner.decoder_pass, pool, rows, 3, sessions, 2)
    with FakeTensorMode(allow_non_fake_inputs=True), Operators() as operators:
        logits, _ = shape.compute()
    assert logits.shape == (sessions, runner.vocabulary_size)
    # Fake tensors are asked for their device. That is not an operator.
    return [name for name in operators.names if not name.startswith("prim.")]


@pytest.mark.parametrize("name", ["thinker", "talker", "vlm"])
def test_a_pass_of_a_mixture_is_grouped_products_and_reads_nothing(decoders: dict[str, TextDecoder], name: str) -> None:
    decoder = decoders[name]
    assert decoder.config._experts_implementation == EXPERTS
    one, many = pass_operators(decoder, 1), pass_operators(decoder, 8)
    assert one.count("aten._grouped_mm.default") == PRODUCTS_OF_A_LAYER * decoder.config.num_hidden_layers
    assert one == many


@pytest.mark.parametrize("name", ["thinker", "talker", "vlm"])
def test_a_pass_expert_by_expert_reads_which_experts_have_rows(decoders: dict[str, TextDecoder], name: str) -> None:
    decoder = decoders[name]
    decoder.text.set_experts_implementation("eager")
    try:
        with pytest.raises(DynamicOutputShapeException):
            pass_operators(decoder, 4)
    finally:
        decoder.text.set_experts_implementation(EXPERTS)
