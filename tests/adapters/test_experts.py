"""Mixtures of experts: a decode pass is grouped products, and reads no value on the host."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from antiphon.adapters.qwen3_omni import checkpoint
from antiphon.adapters.vlm.qwen_vl import QwenVl
from antiphon.engine.api import EngineSettings
from antiphon.engine.local.decode import PassShape, PassSize
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
def pass_operators(decoder: TextDecoder, size: PassSize) -> list[str]:
    """Return the operators of a pass over fake tensors. They have no values: reading one raises."""
    runner = Runner(decoder, dtype=DTYPE, kv_dtype=DTYPE, position_axes=3, input_width=decoder.input_width)
    pool = runner.storage(EngineSettings(kv_bytes=4 << 20, kv_layout="paged"))
    assert isinstance(pool, PagePool)
    shape = PassShape(runner.decoder_pass, pool, torch.zeros(1, 1, runner.width, dtype=DTYPE), 3, size)
    with FakeTensorMode(allow_non_fake_inputs=True), Operators() as operators:
        output = shape.compute()
    assert output.logits.shape == (size.tiles, runner.vocabulary_size)
    # Fake tensors are asked for their device. That is not an operator.
    return [name for name in operators.names if not name.startswith("prim.")]


@pytest.mark.parametrize("name", ["thinker", "talker", "vlm"])
def test_a_pass_of_a_mixture_is_grouped_products_and_reads_nothing(decoders: dict[str, TextDecoder], name: str) -> None:
    decoder = decoders[name]
    assert decoder.config._experts_implementation == EXPERTS
    # Passes of decode steps, and passes with prefill.
    for few, many in ((PassSize(1, 1, 1, 2), PassSize(8, 8, 1, 2)), (PassSize(16, 8, 16, 2), PassSize(128, 16, 16, 2))):
        found = pass_operators(decoder, few)
        assert found.count("aten._grouped_mm.default") == PRODUCTS_OF_A_LAYER * decoder.config.num_hidden_layers
        assert found == pass_operators(decoder, many)


@pytest.mark.parametrize("name", ["thinker", "talker", "vlm"])
def test_a_pass_expert_by_expert_reads_which_experts_have_rows(decoders: dict[str, TextDecoder], name: str) -> None:
    decoder = decoders[name]
    decoder.text.set_experts_implementation("eager")
    try:
        with pytest.raises(DynamicOutputShapeException):
            pass_operators(decoder, PassSize(4, 4, 1, 2))
    finally:
        decoder.text.set_experts_implementation(EXPERTS)
