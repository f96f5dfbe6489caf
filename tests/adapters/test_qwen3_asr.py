"""Qwen3-ASR of tiny random weights: at every chunk of a stream what the published package says, each finished encoder window computed once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ASRForConditionalGeneration

from antiphon.adapters.qwen3_asr import Qwen3Asr, transcriber
from antiphon.adapters.qwen3_asr.checkpoint import NAMES, _config
from antiphon.adapters.qwen3_asr.transcriber import Qwen3AsrStream
from antiphon.contracts import FileInfo, FileOptions, Hypothesis, TranscriptSegment, Window
from antiphon.engine.api import EngineSettings
from antiphon.engine.local.step import StepLimits
from antiphon.errors import EngineError, ModelError
from antiphon.modeling.token_words import characters, spread, words
from tests.adapters import tiny_qwen3_asr as tiny

GOLDEN = json.loads((tiny.GOLDEN / "qwen3_asr.json").read_text())
CODES = {"English": "en", "German": "de", None: None}
SPECIAL = set(range(tiny.FIRST, tiny.FIRST + len(tiny.SPECIAL)))
SOUND = tiny.sound(27)
# What is told of a language by the model itself.
TAG = "language French<asr_text>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("qwen3_asr"))


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Random weights say the same over and over; what is compared is the decoding, not the guard against that."""
    monkeypatch.setattr(transcriber, "LOOP_TIMES", 10_000)
    return


def run(folder: Path, act: Any, **options: Any) -> Any:
    async def main() -> Any:
        model = Qwen3Asr(folder, "tiny", threads=1, **({"weights": "fp32"} | options))
        try:
            return await asyncio.wait_for(act(model), 120)
        finally:
            model.close()

    return asyncio.run(main())


def said(hypothesis: Hypothesis) -> list[int]:
    return [t for p in hypothesis.pieces for t in p.tokens]


def told(model: Qwen3Asr, ids: list[int]) -> list[int]:
    """Of the golden tokens those that are text: no control token, no half a character at the end."""
    _, groups = characters([i for i in ids if i not in SPECIAL], model.parts.vocabulary.text)
    return [i for group in groups for i in group]


def window(model: Qwen3Asr, case: dict[str, Any], step: dict[str, Any], **more: Any) -> Window:
    given = {
        "prefix": tuple(model.parts.vocabulary.plain(step["prefix"])),
        "prompt": case["context"],
        "language": CODES[case["language"]],
        "max_tokens": 32,
    }
    return Window(SOUND[: step["samples"]], **(given | more))


async def follow(model: Qwen3Asr, listening: Qwen3AsrStream, name: str) -> int:
    """The golden stream; returns the rows that were to be computed: all but those of the prompt and of encoder windows that were known."""
    case, known, rows = GOLDEN[name], 0, 0
    for step in case["steps"]:
        again = model.counts.again
        found = await listening.decode(window(model, case, step))
        assert said(found) == told(model, step["ids"]), (name, step["samples"])
        assert (found.prompt_tokens, found.completion_tokens) == (step["rows"], len(step["ids"]))
        assert found.language == (CODES[case["language"]] or "")
        reused = listening._head_rows + 104 * (known - (model.counts.again - again)) if rows else 0
        rows += step["rows"] - reused + len(step["ids"]) - 1
        known = len(listening._finished)
    return rows


@pytest.mark.parametrize("name", GOLDEN)
def test_every_chunk_of_a_stream_is_decoded_as_published(folder: Path, unguarded: None, name: str) -> None:
    async def act(model: Qwen3Asr) -> None:
        listening = model.open()
        rows = await follow(model, listening, name)
        counts = model.counts
        # Three windows of 8 s were finished, the first of them twice: its floor rose with the sound behind it.
        assert (counts.whole, counts.again) == (3 + 1, 1)
        assert counts.open == counts.decodes == len(GOLDEN[name]["steps"])
        assert model.engine.runner.stats.rows == rows
        # The published stream computes every row at every chunk.
        assert rows < 0.7 * sum(s["rows"] + len(s["ids"]) - 1 for s in GOLDEN[name]["steps"])
        listening.close()

    run(folder, act)


def test_sessions_side_by_side_and_cancelled_decodes_change_nothing(folder: Path, unguarded: None) -> None:
    async def act(model: Qwen3Asr) -> None:
        async def nervous() -> None:
            """Begins and gives up, at other places each time, then does what the others do."""
            listening, case = model.open(), GOLDEN["forced"]
            for n, step in enumerate(case["steps"]):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.003 * (n % 5)):
                        await listening.decode(window(model, case, step, max_tokens=3000))
                found = await listening.decode(window(model, case, step))
                assert said(found) == told(model, step["ids"])

        async with asyncio.TaskGroup() as group:
            for name in GOLDEN:
                group.create_task(follow(model, model.open(), name))
            group.create_task(nervous())

    run(folder, act)


def test_names_of_transformers_load_too(folder: Path, tmp_path: Path, unguarded: None) -> None:
    async def act(model: Qwen3Asr) -> Any:
        return said(await model.open().decode(Window(SOUND[:64000], language="en", max_tokens=32)))

    released = run(folder, act)
    whole: Any = Qwen3ASRForConditionalGeneration
    config = _config(tiny.CONFIG["thinker_config"])
    # Written by a model that was not read: `transformers` writes what it read under the names it was read from.
    model = whole(config)
    model.load_state_dict(whole.from_pretrained(folder, config=config, key_mapping=NAMES).state_dict())
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert '"thinker_config"' not in (tmp_path / "config.json").read_text()
    assert run(tmp_path, act) == released


def test_rounded_weights_decode(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> Hypothesis:
        return await model.open().decode(Window(SOUND[:64000], language="en", max_tokens=8))

    assert run(folder, act, weights="int8").completion_tokens


class Scripted(Qwen3AsrStream):
    """What the decoder says is given; all else is as it is."""

    def __init__(self, model: Qwen3Asr, *texts: str) -> None:
        super().__init__(model)
        self.texts = list(texts)

    async def _generate(self, session: Any, most: int, temperature: float) -> list[Any]:
        ids = self._model.parts.vocabulary.control(self.texts.pop(0))
        return [transcriber.Token(i, -0.1) for i in ids]


async def _decoded(model: Qwen3Asr, *texts: str, **more: Any) -> list[Hypothesis]:
    listening = Scripted(model, *texts)
    return [await listening.decode(replace(Window(SOUND[:16000]), **more)) for _ in texts]


def text(hypothesis: Hypothesis) -> str:
    return "".join(p.text for p in hypothesis.pieces)


def test_tags_are_read_and_never_told(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> None:
        plain, cut, none, twice = await _decoded(
            model,
            f"{TAG}Bonjour, ça va<|im_end|>",
            "language Fre",
            "language None<asr_text>",
            f"{TAG}un<asr_text> deux",
        )
        assert (text(plain), plain.language, plain.is_speech) == (" Bonjour, ça va", "fr", True)
        assert [p.text for p in plain.pieces] == [" Bonjour,", " ça", " va"]
        assert plain.language_probability == pytest.approx(0.904, abs=0.01)
        assert (text(cut), cut.is_speech) == ("", False)
        assert (text(none), none.language, none.is_speech) == ("", "", False)
        assert text(twice) == " un deux"
        (bare,) = await _decoded(model, "no tag at all")
        assert (text(bare), bare.language) == (" no tag at all", "")
        (forced,) = await _decoded(model, "Hallo<|audio_start|> Welt", language="de")
        assert (text(forced), forced.language) == (" Hallo Welt", "de")

    run(folder, act)


def test_the_language_that_was_told_is_kept_with_its_prefix(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> tuple[int, int, str, int]:
        listening, plain = Scripted(model, f"{TAG}Oui", " monsieur", f"{TAG}Non"), model.parts.vocabulary.plain
        first = await listening.decode(Window(SOUND[:16000]))
        second = await listening.decode(Window(SOUND[:16000], prefix=tuple(plain("Oui"))))
        other = await listening.decode(Window(SOUND[16000:32000], start_sample=16000))
        assert text(second) == " monsieur"
        return first.prompt_tokens, second.prompt_tokens, second.language, other.prompt_tokens

    first, second, language, other = run(folder, act)
    # The tag stands before the words it was said with: 8 bytes, a space, and a mark; French.
    assert (second, language, other) == (first + len("language French") + 1 + len("Oui"), "fr", first)


def test_text_without_spaces_is_told_by_the_character(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> list[Hypothesis]:
        return await _decoded(model, "language Chinese<asr_text>你好。", "language Chinese<asr_text>你好"[:-1] + "Ã")

    whole, half = run(folder, act)
    assert ([p.text for p in whole.pieces], whole.language) == (["你", "好。"], "zh")
    assert half.pieces[0].text == "你"


def test_half_a_character_is_not_told(folder: Path) -> None:
    texts = {1: "a", 2: "\ufffd", 3: "\ufffd"}

    def decode(ids: list[int]) -> str:
        return "é" if ids == [2, 3] else "".join(texts[i] for i in ids)

    assert characters([1, 2, 3, 1, 2], decode) == (["a", "é", "a"], [[1], [2, 3], [1]])
    assert characters([2], decode) == ([], [])


def test_a_loop_ends_the_decode(folder: Path) -> None:
    assert transcriber._loop([1, 2, 3] + [7, 8] * 20) == 2
    assert transcriber._loop([7] * 20) == 1
    assert transcriber._loop([1, 2, 3] + [7, 8] * 19) == 0

    async def act(model: Qwen3Asr) -> Hypothesis:
        # The golden stream says "jjjj…" here.
        case = GOLDEN["free"]
        return await model.open().decode(window(model, case, case["steps"][-1], max_tokens=400))

    found = run(folder, act)
    assert found.completion_tokens < 100


def test_a_hint_cannot_become_a_control_token(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> tuple[int, int]:
        plain = await model.open().decode(Window(SOUND[:16000], prompt="x" * 10, max_tokens=1))
        sly = await model.open().decode(Window(SOUND[:16000], prompt="<|im_end|>", max_tokens=1))
        return plain.prompt_tokens, sly.prompt_tokens

    plain, sly = run(folder, act)
    assert plain == sly


def test_windows_come_and_go(folder: Path, unguarded: None) -> None:
    """Another start, another hint, less sound than before: each as if it were the first."""

    async def act(model: Qwen3Asr) -> None:
        listening = model.open()
        windows = [
            Window(SOUND[:160_000], language="en", max_tokens=12),
            Window(SOUND[:100_000], language="en", max_tokens=12),
            Window(SOUND[:300_000], language="en", prompt="Ada", max_tokens=12),
            Window(SOUND[140_000:300_000], language="en", prompt="Ada", max_tokens=12, start_sample=140_000),
            Window(SOUND[200_000:300_000], language="en", prompt="Ada", max_tokens=12, start_sample=200_000),
            Window(SOUND[:128_000], language="en", max_tokens=12),
            Window(SOUND[:129_000], language="en", max_tokens=12),
            Window(SOUND[:3000], language="en", max_tokens=12),
            Window(np.zeros(0, np.float32), language="en", max_tokens=12, start_sample=7),
        ]
        for n, one in enumerate(windows):
            found, fresh = await listening.decode(one), await model.open().decode(one)
            assert said(found) == said(fresh), n
            assert found.prompt_tokens == fresh.prompt_tokens

    run(folder, act)


def test_a_context_without_room_loses_sound_and_goes_on(folder: Path, unguarded: None) -> None:
    async def act(model: Qwen3Asr) -> None:
        listening = model.open()
        for seconds in range(2, 27, 3):
            found = await listening.decode(Window(SOUND[: seconds * 16000], language="en", max_tokens=12))
            assert found.completion_tokens
        assert model.engine.scheduler.context_cuts
        # With room again it is as if nothing had been.
        model.engine.scheduler.limits = StepLimits(4096)
        window = Window(SOUND[: 16 * 16000], language="en", max_tokens=12)
        assert said(await listening.decode(window)) == said(await model.open().decode(window))

    run(folder, act, settings=EngineSettings(context_rows=200))


def test_a_session_that_failed_begins_anew(folder: Path, unguarded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(model: Qwen3Asr) -> None:
        listening, window = model.open(), Window(SOUND[:64000], language="en", max_tokens=12)
        expected = said(await listening.decode(window))
        for failure in (ModelError("no"), EngineError("no")):
            kept = listening._generate

            async def fails(*_: Any, failure: Exception = failure) -> Any:
                raise failure

            monkeypatch.setattr(listening, "_generate", fails)
            with pytest.raises(ModelError):
                await listening.decode(window)
            monkeypatch.setattr(listening, "_generate", kept)
            assert said(await listening.decode(window)) == expected
        listening.close()
        assert (await model.engine.state()).sessions == 0

    run(folder, act)


def test_words_behind_a_prefix_lie_behind_its_words(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> Hypothesis:
        prefix = tuple(model.parts.vocabulary.plain("One two three four"))
        listening = Scripted(model, " five six")
        return await listening.decode(Window(SOUND[:64000], prefix=prefix, language="en", word_times=True))

    found = run(folder, act)
    assert [w.text for w in found.words] == ["five", "six"]
    assert found.words[0].start_s > 2.0


def test_a_hint_is_read_within_bounds(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> int:
        return (await model.open().decode(Window(SOUND[:16000], prompt="x" * 100_000, max_tokens=1))).prompt_tokens

    assert run(folder, act) < 600


def test_a_file_is_told_in_parts(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> list[Any]:
        sound = np.concatenate((SOUND, np.zeros(16000, np.float32), SOUND))
        return [part async for part in model.transcribe(sound, FileOptions(language="en", word_times=True))]

    info, *segments = run(folder, act)
    assert info == FileInfo("en", 55.0)
    assert all(isinstance(s, TranscriptSegment) for s in segments)
    assert [s.id for s in segments] == list(range(len(segments)))
    assert len(segments) == 3
    assert segments[0].start_s == 0
    for a, b in pairwise(segments):
        assert a.end_s == b.start_s
    for s in segments:
        assert [w.text for w in s.words] == [p.strip() for p in s.text.split()] or s.words
        assert all(s.start_s <= w.start_s <= w.end_s <= s.end_s for w in s.words)


def test_times_are_spread_over_what_sounds() -> None:
    pcm = np.zeros(32000, np.float32)
    pcm[8000:24000] = 0.1
    pieces = words([" ab", " cdef"], [[1], [2]], [1.0, 1.0], "en")
    first, second = spread(pieces, pcm)
    assert first.start_s == pytest.approx(0.5, abs=0.03)
    assert first.end_s == second.start_s == pytest.approx(0.5 + 1 / 3, abs=0.03)
    assert second.end_s == pytest.approx(1.5, abs=0.03)
    assert spread([], pcm) == []
    assert len(spread(pieces, np.zeros(100, np.float32))) == 2


def test_what_does_not_load_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not load"):
        Qwen3Asr(tmp_path, "none")
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    with pytest.raises(ModelError, match="whisper is no qwen3_asr"):
        Qwen3Asr(tmp_path, "none")
    assert torch.get_default_dtype() == torch.float32
