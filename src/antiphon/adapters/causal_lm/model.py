"""Language models that `transformers` runs, as they are: one decoder, any checkpoint of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from antiphon.engine.api import EngineSettings
from antiphon.engine.local.weights import load_model
from antiphon.engine.threads import load_errors
from antiphon.modeling.chat import ChatModel


class CausalLm(ChatModel):
    """The loaded model: `folder` holds a checkpoint as `transformers` or `antiphon pull` writes it."""

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
        """Raises ModelError for a checkpoint that does not load."""
        # Side by side: either takes a second, and most of it outside the interpreter.
        with load_errors(model_id, folder), ThreadPoolExecutor(1) as pool:
            found = pool.submit(AutoTokenizer.from_pretrained, folder, local_files_only=True)
            runner = load_model(folder, device=device, weights=weights, threads=threads)
            tokenizer: Any = found.result()
        super().__init__(folder, model_id, runner, tokenizer, settings, observe)
