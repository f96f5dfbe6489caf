"""A text language model on the engine, loaded from a checkpoint's folder.

How it holds conversations is `modeling/chat.py`; how its files are converted beforehand is `checkpoint.py`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from antiphon.adapters.spec import EngineModelOptions
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.weights import load_model
from antiphon.engine.threads import load_errors
from antiphon.modeling.chat import ChatModel


class CausalLm(ChatModel):
    """A LanguageModel for any decoder that `transformers` loads with AutoModelForCausalLM.

    `folder` holds the checkpoint as `transformers` or `antiphon pull` writes it; nothing is downloaded. The caller owns
    the model and has to close it, which stops its engine's thread.
    """

    def __init__(self, folder: Path, model_id: str, options: EngineModelOptions) -> None:
        """Load the weights and the tokenizer, and start the engine. Waits for seconds.

        Raises ModelError for a checkpoint that does not load.
        """
        # Side by side: either takes a second, and most of it outside the interpreter.
        with load_errors(model_id, folder), ThreadPoolExecutor(1) as pool:
            loading = pool.submit(AutoTokenizer.from_pretrained, folder, local_files_only=True)
            runner = load_model(folder, device=options.device, weights=options.weights, threads=options.threads)
            tokenizer: Any = loading.result()
        words = tokenizer.backend_tokenizer
        engine = LocalEngine(runner, options.settings, tokenizer=words, observe=options.observe)
        try:
            super().__init__(folder, model_id, engine, tokenizer)
        except BaseException:
            engine.close()
            raise
