"""Turn detectors that read: a checkpoint of fennec-handoff's shape with random weights, and its part in a blend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ModernBertConfig, ModernBertForSequenceClassification, PreTrainedTokenizerFast

from antiphon.adapters.spec import LaneModelOptions
from antiphon.adapters.turn_words.handoff import Handoff, plain
from antiphon.errors import ModelError
from antiphon.loading.loader import load, store_of
from antiphon.pipelines.turn_blend import BlendPart, TurnBlend, logit
from antiphon.settings import ModelSettings, Settings

TURN = np.zeros(16_000, np.float32)
WORDS = ("[PAD]", "[UNK]", "i", "want", "to", "fly", "from", "mumbai", "um")


def handoff(folder: Path, **heads: Any) -> Path:
    """Write a folder with the files of fennec-handoff: a small ModernBERT with one label."""
    torch.manual_seed(3)
    config = ModernBertConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_labels=1, pad_token_id=0, bos_token_id=1, eos_token_id=1, cls_token_id=1, sep_token_id=1,
    )  # fmt: skip
    model = ModernBertForSequenceClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=2.0)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    facts = {"task": "handoff-binary", "input_format": "plain-1", "temperature": 1.0, "max_len": 8, "acts": []}
    (folder / "heads.json").write_text(json.dumps(facts | heads))
    return folder


@contextmanager
def loaded(folder: Path) -> Iterator[Handoff]:
    detector = Handoff(folder, folder.name, LaneModelOptions())
    try:
        yield detector
    finally:
        detector.lane.close()


def test_the_words_are_read_as_the_model_was_trained_on_them(tmp_path: Path) -> None:
    assert plain(" I'd  fly, from 2 Mumbai…") == "i'd fly from mumbai"
    with loaded(handoff(tmp_path / "f")) as detector, loaded(handoff(tmp_path / "g", temperature=4.0)) as mild:

        async def main() -> list[float | None]:
            said = ("I want to fly!", "i want to fly", "I want to um", "?!", "")
            return [*[await detector.finished(words) for words in said], await mild.finished(said[0])]

        first, same, other, *none, cooler = asyncio.run(main())
    assert first == same != other
    assert none == [None, None]
    assert first is not None
    assert cooler is not None
    assert logit(cooler) == pytest.approx(logit(first) / 4, abs=1e-4)


@pytest.mark.parametrize("heads", [{"task": "interrupt"}, {"input_format": "plain-2"}, {"temperature": 0}])
def test_a_model_of_another_task_or_format_is_refused(tmp_path: Path, heads: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"heads\.json"), loaded(handoff(tmp_path / "f", **heads)):
        pass


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = handoff(tmp_path / "f") / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("classifier")}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="the weights lack classifier"), loaded(tmp_path / "f"):
        pass


class Ear:
    async def complete(self, pcm: np.ndarray) -> float:
        return 0.9


class Reader:
    def __init__(self, answer: float | Exception | None) -> None:
        self.answer = answer

    async def finished(self, words: str) -> float | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def blended(answer: float | Exception | None, *ears: Ear) -> tuple[list[float | None], dict[tuple[str, str], int]]:
    """Return the judgements by sound, with the words, and of the next pause by sound, and the failures."""
    blend = TurnBlend([*(BlendPart("ear", ear) for ear in ears), BlendPart("reader", Reader(answer), 3.0)])

    async def main() -> list[float | None]:
        stream = blend.open()
        found: list[float | None] = []
        for words in ("i want", None):
            try:
                found.append(await stream.complete(0, TURN))
            except ModelError:
                found.append(None)
            if words:
                found.append(await stream.read(words))
        return found

    return asyncio.run(main()), dict(blend.failures.counts)


def test_the_words_correct_the_judgement_by_sound_until_the_next_pause() -> None:
    found, failures = blended(0.2, Ear())
    assert found[0] == found[2] == 0.9
    assert logit(found[1] or 0) == pytest.approx((logit(0.9) + 3 * logit(0.2)) / 4)
    assert failures == {}
    assert blended(0.2)[0] == [None, pytest.approx(0.2), None]


@pytest.mark.parametrize(
    ("answer", "reason"), [(float("nan"), "not_a_number"), (ModelError("it died"), "error"), (None, "")]
)
def test_a_reader_without_a_judgement_leaves_that_by_sound(answer: Any, reason: str) -> None:
    found, failures = blended(answer, Ear())
    assert found == [0.9, None, 0.9]
    assert failures == ({("reader", reason): 1} if reason else {})


def test_the_setting_loads_a_reader_beside_others(tmp_path: Path) -> None:
    folders = f"{handoff(tmp_path / 'one')},{handoff(tmp_path / 'other')}*2"
    settings = Settings(models=ModelSettings(turn_detector=folders))
    models = load(settings, store_of(settings.models), roles=("turn",))
    try:
        asyncio.run(models.warm())
        assert models.turn_detector
        assert asyncio.run(models.turn_detector.open().read("I want to fly")) is not None
        assert dict(models.turn_detector.failures.counts) == {}
    finally:
        models.close()
