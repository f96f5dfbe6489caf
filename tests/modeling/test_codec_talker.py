"""The code predictor's frame, compared with a simple implementation."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from transformers import DynamicCache, Qwen3Config, Qwen3Model

from antiphon.engine.api import Sampling
from antiphon.engine.local.device_sampling import RandomNumbers, RowChoices, draw_tokens
from antiphon.engine.local.kernels.norms import fuse_norms
from antiphon.modeling.codec.talker import SPECIAL_CODES, CodePredictor, FirstCodeChooser
from tests.engine.local.operators import Operators

WIDTH, NUM_CODES = 48, 7
PARAMS = (
    Sampling(temperature=0.9, top_k=50, seed=1),
    Sampling(temperature=1.0, top_k=5, top_p=0.8, seed=2),
    Sampling(temperature=0.0),
    Sampling(temperature=1.2, seed=3),
)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def predictor(request: pytest.FixtureRequest) -> CodePredictor:
    torch.manual_seed(0)
    model = Qwen3Model(
        Qwen3Config(
            vocab_size=1,
            pad_token_id=None,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
    )
    tables = nn.ModuleList(nn.Embedding(200, WIDTH) for _ in range(NUM_CODES))
    heads = nn.ModuleList(nn.Linear(32, 200, bias=False) for _ in range(NUM_CODES))
    # The logits get the spread of a trained model's logits.
    for head in heads:
        nn.init.normal_(head.weight, std=0.5)
    return CodePredictor(model, tables, heads, WIDTH).to(getattr(torch, request.param)).eval()


@torch.inference_mode()
def frame_by_growing_cache(
    predictor: CodePredictor, thoughts: torch.Tensor, first: torch.Tensor, randoms: Sequence[RandomNumbers]
) -> tuple[list[list[int]], torch.Tensor]:
    """Return a frame that was computed with a growing cache, and whose codes were sampled separately."""
    past, rows, codes, summed = DynamicCache(config=predictor.model.config), [thoughts, first], [], first.clone()
    for head, table in zip(predictor.lm_head, predictor.codec_embedding, strict=True):
        given = predictor.small_to_mtp_projection(torch.stack(rows, 1))
        hidden = predictor.model(inputs_embeds=given, past_key_values=past, use_cache=True).last_hidden_state
        logits = head(hidden[:, -1]).float()
        uniforms = [torch.tensor(r.take(1), dtype=torch.float64) for r in randoms]
        choices = [RowChoices.of((p,), logits.device) for p in PARAMS]
        codes.append([int(draw_tokens(row[None], c, u)) for row, c, u in zip(logits, choices, uniforms, strict=True)])
        rows = [table(torch.tensor(codes[-1]))]
        summed += rows[0]
    return [list(frame) for frame in zip(*codes, strict=True)], summed


def test_a_frame_in_fixed_memory_is_the_frame_of_a_growing_cache(predictor: CodePredictor) -> None:
    dtype = predictor.model.norm.weight.dtype
    ahead, one_by_one = ([RandomNumbers(p) for p in PARAMS] for _ in range(2))
    for _ in range(5):
        thoughts, first = (torch.randn(len(PARAMS), WIDTH).to(dtype) for _ in range(2))
        wanted, wanted_sum = frame_by_growing_cache(predictor, thoughts, first, one_by_one)
        uniforms = torch.tensor([r.take(NUM_CODES) for r in ahead], dtype=torch.float64)
        codes, summed = predictor(thoughts, first, RowChoices.of(PARAMS, thoughts.device), uniforms)
        assert codes.tolist() == wanted
        assert torch.equal(summed, wanted_sum)


def test_with_fused_norms_a_predictor_has_the_same_codes_and_fewer_operators(predictor: CodePredictor) -> None:
    dtype, greedy = predictor.model.norm.weight.dtype, RowChoices.of([Sampling()] * 3, torch.device("cpu"))
    thoughts, first = (torch.randn(3, WIDTH).to(dtype) for _ in range(2))
    found, counts, fused = list[list[list[int]]](), list[int](), copy.deepcopy(predictor)
    # Two layers with four norms each, and the last norm.
    assert fuse_norms(fused) == 9
    for each in (predictor, fused):
        with Operators() as operators:
            codes, _ = each(thoughts, first, greedy, torch.zeros(3, NUM_CODES).double())
        found.append(codes.tolist())
        counts.append(len(operators.names))
    assert found[0] == found[1]
    assert counts[1] < counts[0]


def test_no_value_of_a_frame_is_read_before_its_end(predictor: CodePredictor) -> None:
    # Tensors of the meta device have no values: reading one on the host raises.
    device = torch.device("meta")
    shapes = {name: p.to(device) for name, p in predictor.state_dict().items()}
    given = torch.empty(2, WIDTH, device=device)
    uniforms = torch.empty(2, NUM_CODES, device=device, dtype=torch.float64)
    arguments = (given, given, RowChoices.of(PARAMS[:2], device), uniforms)
    predictor.model.rotary_emb.to(device)
    try:
        codes, summed = torch.func.functional_call(predictor, shapes, arguments)
    finally:
        predictor.model.rotary_emb = type(predictor.model.rotary_emb)(predictor.model.config)
    assert codes.shape == (2, NUM_CODES)
    assert summed.shape == (2, WIDTH)


def test_of_the_control_codes_only_the_end_is_chosen_and_not_before_its_time() -> None:
    size = SPECIAL_CODES + 8
    end = size - 5
    logits = torch.arange(size).float()
    logits[end] += 10
    chooser = FirstCodeChooser(Sampling(repetition_penalty=9.0), end, size, min_frames=2)
    # Each chosen code is penalized.
    found = [chooser.accept(int(FirstCodeChooser.choose([chooser], logits[None]))) for _ in range(3)]
    assert found == [7, 6, end]
    assert logits[end] == end + 10
