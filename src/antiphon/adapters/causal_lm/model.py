"""A text language model on an engine, loaded from a checkpoint's folder.

Conversations are implemented in `modeling/chat.py`, and the conversion of the files in `checkpoint.py`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from antiphon.adapters.spec import EngineModelOptions
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.weights import load_model
from antiphon.engine.threads import load_errors
from antiphon.modeling.chat import ChatModel
from antiphon.remote.engine.engine import VllmEngine
from antiphon.remote.engine.server import ModelFacts


class CausalLm(ChatModel):
    """A LanguageModel for any decoder that `transformers` loads with AutoModelForCausalLM.

    `folder` holds the checkpoint in the layout of `transformers` or `antiphon pull`; nothing is downloaded. The caller
    owns the model and must close it, which stops its engine.
    """

    def __init__(self, folder: Path, model_id: str, options: EngineModelOptions) -> None:
        """Load the weights and the tokenizer, and start the engine. Takes several seconds.

        With `options.servers`, loads only the tokenizer, and checks the servers. Raises ModelError if the checkpoint
        does not load, or if the servers serve a different model.
        """
        if options.servers:
            super().__init__(folder, model_id, *engine_on_servers(folder, model_id, options))
            return
        # The two calls run in parallel, because each takes a second, mostly outside the interpreter.
        with load_errors(model_id, folder), ThreadPoolExecutor(1) as pool:
            loading = pool.submit(AutoTokenizer.from_pretrained, folder, local_files_only=True)
            runner = load_model(folder, device=options.device, weights=options.weights, threads=options.threads)
            tokenizer = with_template(loading.result())
        words = tokenizer.backend_tokenizer
        local = LocalEngine(runner, options.settings, tokenizer=words, observe=options.observe)
        try:
            super().__init__(folder, model_id, local, tokenizer)
        except BaseException:
            local.close()
            raise


# The tokenizers and configurations of `transformers` have dynamic attributes, hence Any.
def with_template(tokenizer: Any) -> Any:
    """Return the tokenizer. Raises ValueError if it has no chat template, as that of a base model."""
    if not tokenizer.chat_template:
        raise ValueError("it has no chat template: a base model, which continues texts")
    return tokenizer


def engine_on_servers(folder: Path, model_id: str, options: EngineModelOptions) -> tuple[VllmEngine, Any]:
    """Return an engine whose model runs on `options.servers`, and the model's tokenizer. No weights are read.

    Takes several seconds. Raises ModelError if the folder has no configuration or tokenizer, or if the servers serve a
    different model.
    """
    assert options.servers
    with load_errors(model_id, folder):
        tokenizer: Any = with_template(AutoTokenizer.from_pretrained(folder, local_files_only=True))
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)
        ends = GenerationConfig.from_model_config(config).eos_token_id
        facts = ModelFacts(
            int(config.max_position_embeddings),
            int(config.vocab_size),
            int(config.hidden_size),
            frozenset([ends] if isinstance(ends, int) else ends or ()),
        )
    return VllmEngine(options.servers, tokenizer.backend_tokenizer, facts, options.settings), tokenizer
