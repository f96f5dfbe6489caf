"""The engines that the contract tests test. To test another engine, add an entry to `ENGINES`.

Each engine has a model whose likeliest tokens are known without the engine, so that every test knows the expected
output.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from antiphon.engine.api import Capabilities, Engine, EngineSettings
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner
from antiphon.remote.engine import EngineServers
from antiphon.remote.engine.engine import VllmEngine
from antiphon.remote.engine.server import ModelFacts
from tests.engine.contract.resubmitting import ResubmittingEngine
from tests.engine.local import tiny
from tests.engine.local.scripted import VOCABULARY, ScriptedRunner
from tests.engine.local.smollm2 import checkpoint
from tests.remote.engine.scripted_sglang import ScriptedSglang
from tests.remote.engine.scripted_vllm import ScriptedVllm

# The number of rows in a context that a test fills: two pages of the local engine.
SMALL_CONTEXT = 128


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine, and the expected tokens of its model.

    `make(context_rows)`: creates a new engine; with 0, the context is the model's own limit. `likeliest(rows, count)`:
    the `count` tokens that the model generates after the tokens `rows` at temperature 0. `embed(ids)`: the embeddings
    of these tokens. `tokenizer`: None if the engine works without text. `end`: a token that ends a text. `words`:
    tokens that the model knows.
    """

    make: Callable[[int], Engine]
    likeliest: Callable[[Sequence[int], int], list[int]]
    embed: Callable[[Sequence[int]], Any]
    words: range
    tokenizer: Tokenizer | None = None
    end: int = 0


def needs(engine: Engine, capability: Capabilities) -> None:
    """Skip the test if the engine lacks the capability."""
    if capability not in engine.capabilities:
        pytest.skip(f"{engine.name} has no {capability.name}")


def counted(rows: Sequence[int], count: int) -> list[int]:
    return [(rows[-1] + 1 + i) % VOCABULARY for i in range(count)]


def scripted() -> EngineUnderTest:
    def make(context_rows: int) -> Engine:
        runner = ScriptedRunner(context_rows=context_rows or 4096)
        return LocalEngine(runner, EngineSettings(kv_bytes=1 << 16, reserve_rows=64))

    return EngineUnderTest(make, counted, lambda ids: [[float(i)] for i in ids], range(500))


def resubmitting() -> EngineUnderTest:
    return EngineUnderTest(
        lambda context_rows: ResubmittingEngine(context_rows or 4096),
        counted,
        lambda ids: [[float(i)] for i in ids],
        range(500),
    )


def served(made: type[ScriptedVllm] = ScriptedVllm, **options: bool) -> EngineUnderTest:
    """vLLM's engine with a scripted server, of vLLM or SGLang. Each engine gets its own server."""
    tokenizer, vocabulary = tiny_tokenizer(), tiny.VOCABULARY

    def make(context_rows: int) -> Engine:
        return EngineWithServer(made(tokenizer, vocabulary, context_rows=context_rows or 4096, **options))

    def likeliest(rows: Sequence[int], count: int) -> list[int]:
        return [(rows[-1] + 1 + i) % vocabulary for i in range(count)]

    end = vocabulary - 1
    return EngineUnderTest(make, likeliest, lambda ids: [[0.0] for _ in ids], range(end), tokenizer, end)


class EngineWithServer(VllmEngine):
    """An engine that stops its scripted server when it is closed."""

    def __init__(self, server: ScriptedVllm) -> None:
        self.scripted = server
        facts = ModelFacts(1 << 20, server.vocabulary, 1, frozenset((server.eos,)))
        kind = "sglang" if isinstance(server, ScriptedSglang) else "vllm"
        super().__init__(EngineServers(kind, (server.url,)), server.tokenizer, facts)

    def close(self, timeout_s: float = 10.0) -> None:
        super().close(timeout_s)
        if self.scripted.is_alive:
            self.scripted.stop()


def greedy(reference: Any) -> Callable[[Sequence[int], int], list[int]]:
    """The likeliest tokens, computed by the model itself with its own cache."""

    @torch.inference_mode()
    def likeliest(rows: Sequence[int], count: int) -> list[int]:
        given, past, found = list(rows), None, list[int]()
        while len(found) < count:
            out = reference(input_ids=torch.tensor([given]), past_key_values=past, use_cache=True)
            past, given = out.past_key_values, [int(out.logits[0, -1].argmax())]
            found += given
        return found

    return likeliest


def embedder(reference: Any) -> Callable[[Sequence[int]], Any]:
    @torch.inference_mode()
    def embed(ids: Sequence[int]) -> torch.Tensor:
        return reference.get_input_embeddings()(torch.tensor(list(ids)))

    return embed


def tiny_tokenizer() -> Tokenizer:
    """A tokenizer with a token for each printable ASCII character, one for a line break, and `<end>`."""
    characters = ["\u0120" if code == 32 else chr(code) for code in range(32, 127)] + ["\u010a"]
    found = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)} | {"<end>": tiny.VOCABULARY - 1}, []))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found.add_special_tokens(["<end>"])
    return found


def random_weights(**options: Any) -> EngineUnderTest:
    reference, tokenizer = tiny.model("qwen3"), tiny_tokenizer()

    def make(context_rows: int) -> Engine:
        runner = Runner(tiny.model("qwen3"), rotate_half=True)
        settings = EngineSettings(kv_bytes=4 << 20, reserve_rows=64, context_rows=context_rows, **options)
        return LocalEngine(runner, settings, tokenizer=tokenizer)

    end = tiny.VOCABULARY - 1
    return EngineUnderTest(make, greedy(reference), embedder(reference), range(end), tokenizer, end)


def smollm2() -> EngineUnderTest:
    reference, tokenizer = checkpoint()
    runner = Runner(copy.deepcopy(reference), rotate_half=True)

    def make(context_rows: int) -> Engine:
        settings = EngineSettings(kv_bytes=256 << 20, reserve_rows=64, context_rows=context_rows)
        return LocalEngine(runner, settings, tokenizer=tokenizer.backend_tokenizer)

    return EngineUnderTest(
        make,
        greedy(reference),
        embedder(reference),
        range(500, 1500),
        tokenizer.backend_tokenizer,
        int(tokenizer.eos_token_id),
    )


def real_vllm(url: str) -> EngineUnderTest:
    """A vLLM server with SmolLM2 in float32: `make engines`."""
    reference, tokenizer = checkpoint()
    words, end = tokenizer.backend_tokenizer, int(tokenizer.eos_token_id)
    facts = ModelFacts(8192, reference.config.vocab_size, reference.config.hidden_size, frozenset((end,)))

    def make(context_rows: int) -> Engine:
        settings = EngineSettings(context_rows=context_rows)
        return VllmEngine(EngineServers("vllm", (url,), first_token_s=60), words, facts, settings)

    return EngineUnderTest(make, greedy(reference), lambda ids: [[0.0] for _ in ids], range(500, 1500), words, end)


ENGINES: list[Any] = [
    pytest.param(cache(resubmitting), id="resubmitting"),
    pytest.param(cache(served), id="vllm, scripted"),
    pytest.param(cache(partial(served, generates=True)), id="vllm, scripted, tokens in and out"),
    pytest.param(cache(partial(served, takes_grammars=False)), id="vllm, scripted, no grammars"),
    pytest.param(cache(partial(served, ScriptedSglang)), id="sglang, scripted"),
    pytest.param(cache(partial(served, ScriptedSglang, incremental=True)), id="sglang, scripted, new tokens only"),
    pytest.param(cache(partial(served, ScriptedSglang, takes_grammars=False)), id="sglang, scripted, no grammars"),
    pytest.param(cache(scripted), id="local, scripted"),
    pytest.param(cache(random_weights), id="local, random weights"),
    pytest.param(cache(partial(random_weights, kv_layout="paged")), id="local, paged"),
    pytest.param(cache(partial(random_weights, kv_layout="paged", decode_shapes="bucketed")), id="local, bucketed"),
    pytest.param(cache(partial(random_weights, step_ahead=True)), id="local, one step ahead"),
    # A real model, of which each test takes seconds; `test_smollm2.py` has what random weights cannot show.
    pytest.param(cache(smollm2), id="local, SmolLM2", marks=(pytest.mark.server, pytest.mark.heavy)),
]
if vllm := os.environ.get("ANTIPHON_TEST_VLLM"):
    made = cache(partial(real_vllm, vllm))
    ENGINES.append(pytest.param(made, id="vLLM", marks=pytest.mark.server))
