"""fennec-handoff: the probability that the user has not finished, by the words of the turn alone. English.

A sequence classifier of ModernBERT's shape with one output. Its folder has a `heads.json` next to the checkpoint, which
names the task, the input's format and a temperature (fennec-voice 0.1.1 on PyPI, Apache-2.0). The format `plain-1` is
the words in lower case, without anything but letters and apostrophes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from antiphon.adapters.spec import LaneModelOptions
from antiphon.engine.lane import Lane
from antiphon.errors import ModelError

FORMAT = "plain-1"
_NO_WORDS = re.compile(r"[^a-z' ]")


class _Heads(msgspec.Struct):
    """The fields of heads.json that are used."""

    task: str = "handoff"
    input_format: str = FORMAT
    temperature: float = 1.0
    max_len: int = 48


def plain(words: str) -> str:
    """Return the words as the model was trained on them; empty if there are none."""
    return " ".join(_NO_WORDS.sub("", words.lower()).split())


class Handoff:
    """A WordsTurnDetector. Its lane has one thread, which computes on one core."""

    languages = frozenset(("en",))

    def __init__(self, folder: Path, model_id: str, options: LaneModelOptions) -> None:
        """Load the checkpoint. Raises ModelError if it does not load, or if it is for another task or format."""
        try:
            self._heads = heads = msgspec.json.decode((folder / "heads.json").read_bytes(), type=_Heads)
        except (OSError, msgspec.MsgspecError) as error:
            raise ModelError(f"{model_id}: heads.json: {error}") from None
        if not heads.task.startswith("handoff") or heads.input_format != FORMAT or heads.temperature <= 0:
            raise ModelError(f"{model_id}: heads.json has the task {heads.task} and the format {heads.input_format}")
        # Imported here, because it takes a second.
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model, report = AutoModelForSequenceClassification.from_pretrained(
                folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"{model_id} does not load: {error}") from error
        if missing := report["missing_keys"]:
            raise ModelError(f"{model_id}: the weights lack {', '.join(sorted(missing)[:3])}")
        self._model = model.eval()
        self.lane: Lane[str, float] = Lane(
            f"turn-{model_id}", self._work, max_queue=options.max_queue, observe=options.observe
        )

    async def finished(self, words: str) -> float | None:
        """Return the probability, in [0, 1], that the user has finished after these words; None without words.

        Waits in the lane. Raises Refused if the lane is full, and ModelError.
        """
        text = plain(words)
        return await self.lane.run(text) if text else None

    def _work(self, jobs: Sequence[str]) -> list[float]:
        with torch.inference_mode():
            given = self._tokenizer(
                list(jobs), truncation=True, max_length=self._heads.max_len, padding=True, return_tensors="pt"
            )
            found = self._model(**given).logits[:, 0] / self._heads.temperature
        return [1 - float(p) for p in torch.sigmoid(found)]
