"""A text language model on the engine, loaded from a checkpoint's folder.

How it holds conversations is `modeling/chat.py`; how its files are converted beforehand is `checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from antiphon.engine.api import EngineSettings
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.weights import load_model
from antiphon.engine.threads import load_errors
from antiphon.modeling.chat import ChatModel


class CausalLm(ChatModel):
    """A LanguageModel for any decoder that `transformers` loads with AutoModelForCausalLM.

    `folder` holds the checkpoint as `transformers` or `antiphon pull` writes it; nothing is downloaded. The caller owns
    the model and has to close it, which stops its engine's thread.
    """

    def __init__(
        self,
        folder: Path,
        model_id: str,
        *,
        settings: EngineSettings | None = None,
        device: str = "cpu",
        weights: str = "auto",
        threads: int = 0,
        observe: Callable[[int, int, float], None] | None = None,
    ) -> None:
        """Load the weights and the tokenizer, and start the engine. Waits for seconds.

        `weights`: auto, int8, bf16 or fp32. `threads`: of the CPU's products, 0 for one a core. `observe`: the engine's
        observer, called after each step. Raises ModelError for a checkpoint that does not load.
        """
        # Side by side: either takes a second, and most of it outside the interpreter.
        with load_errors(model_id, folder), ThreadPoolExecutor(1) as pool:
            loading = pool.submit(AutoTokenizer.from_pretrained, folder, local_files_only=True)
            runner = load_model(folder, device=device, weights=weights, threads=threads)
            tokenizer: Any = loading.result()
        engine = LocalEngine(runner, settings, tokenizer=tokenizer.backend_tokenizer, observe=observe)
        try:
            super().__init__(folder, model_id, engine, tokenizer)
        except BaseException:
            engine.close()
            raise
