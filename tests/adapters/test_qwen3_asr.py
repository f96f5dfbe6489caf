"""Qwen3-ASR with tiny random weights: at every chunk of a stream, the tokens equal those of the published package.

Each finished encoder window is computed once.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import Qwen3ASRForConditionalGeneration

from antiphon.adapters.qwen3_asr import transcriber
from antiphon.adapters.qwen3_asr.audio_encoder import EncodedSound, EncoderBatch
from antiphon.adapters.qwen3_asr.checkpoint import KEY_MAPPING, ThinkerConfig, released_config
from antiphon.adapters.qwen3_asr.transcriber import Qwen3Asr, Qwen3AsrStream
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import FileInfo, FileOptions, Hypothesis, TranscriptSegment, Window, one_slab
from antiphon.engine.api import EngineSettings
from antiphon.engine.local.step import StepLimits
from antiphon.errors import EngineError, ModelError
from antiphon.modeling.token_words import characters, spread, words
from tests.adapters import tiny_qwen3_asr as tiny

GOLDEN = json.loads((tiny.GOLDEN / "qwen3_asr.json").read_text())
CODES = {"English": "en", "German": "de", None: None}
SPECIAL = set(range(tiny.FIRST, tiny.FIRST + len(tiny.SPECIAL)))
AUDIO = tiny.sound(27)
# The tag that the model writes before its text.
TAG = "language French<asr_text>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("qwen3_asr"))


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable the guard against loops, because random weights repeat themselves."""
    monkeypatch.setattr(transcriber, "LOOP_REPEATS", 10_000)
    return


def run(folder: Path, act: Any, **options: Any) -> Any:
    async def main() -> Any:
        model = Qwen3Asr(folder, "tiny", EngineModelOptions(threads=1, **({"weights": "fp32"} | options)))
        try:
            return await asyncio.wait_for(act(model), 120)
        finally:
            model.close()

    return asyncio.run(main())


def tokens_of(hypothesis: Hypothesis) -> list[int]:
    return [t for p in hypothesis.pieces for t in p.tokens]


def text_tokens(model: Qwen3Asr, ids: list[int]) -> list[int]:
    """Return the golden text tokens, without control tokens and without an incomplete character at the end."""
    _, groups = characters([i for i in ids if i not in SPECIAL], model.parts.vocabulary.text)
    return [i for group in groups for i in group]


def window(model: Qwen3Asr, case: dict[str, Any], step: dict[str, Any], **more: Any) -> Window:
    given = {
        "prefix": tuple(model.parts.vocabulary.plain(step["prefix"])),
        "prompt": case["context"],
        "language": CODES[case["language"]],
        "max_tokens": 32,
    }
    return Window(AUDIO[: step["samples"]], **(given | more))


async def follow(model: Qwen3Asr, stream: Qwen3AsrStream, name: str) -> int:
    """Decode the golden stream, compare every step, and return the number of computed rows.

    These are all rows except those of the prompt and of the encoder windows that were already in the KV.
    """
    case, known, rows = GOLDEN[name], 0, 0
    for step in case["steps"]:
        recomputed = model.counts.recomputed
        found = await stream.decode(window(model, case, step))
        assert tokens_of(found) == text_tokens(model, step["ids"]), (name, step["samples"])
        assert (found.prompt_tokens, found.completion_tokens) == (step["rows"], len(step["ids"]))
        assert found.language == (CODES[case["language"]] or "")
        reused = stream.head_rows + 104 * (known - (model.counts.recomputed - recomputed)) if rows else 0
        rows += step["rows"] - reused + len(step["ids"]) - 1
        known = stream.num_encoded_windows
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_every_chunk_of_a_stream_gives_the_published_tokens(folder: Path, unguarded: None, name: str) -> None:
    async def act(model: Qwen3Asr) -> None:
        stream = model.open()
        rows = await follow(model, stream, name)
        counts = model.counts
        # Three windows of 8 s were finished. The first was computed twice, because later audio raised its floor.
        assert (counts.finished, counts.recomputed) == (3 + 1, 1)
        assert counts.open == counts.decodes == len(GOLDEN[name]["steps"])
        assert model.engine.runner.stats.rows == rows
        # The published stream computes every row at every chunk.
        assert rows < 0.7 * sum(s["rows"] + len(s["ids"]) - 1 for s in GOLDEN[name]["steps"])
        stream.close()

    run(folder, act)


@pytest.mark.slow
def test_when_sessions_share_the_engine_or_decodes_are_cancelled_then_tokens_are_the_same(
    folder: Path, unguarded: None
) -> None:
    async def act(model: Qwen3Asr) -> None:
        async def cancelling() -> None:
            """Cancel a decode after a different delay at each step, then decode like the other sessions."""
            stream, case = model.open(), GOLDEN["forced"]
            for n, step in enumerate(case["steps"]):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.003 * (n % 5)):
                        await stream.decode(window(model, case, step, max_tokens=3000))
                found = await stream.decode(window(model, case, step))
                assert tokens_of(found) == text_tokens(model, step["ids"])

        async with asyncio.TaskGroup() as group:
            for name in GOLDEN:
                group.create_task(follow(model, model.open(), name))
            group.create_task(cancelling())

    run(folder, act)


def test_when_parameters_have_the_names_of_transformers_then_they_load_too(
    folder: Path, tmp_path: Path, unguarded: None
) -> None:
    async def act(model: Qwen3Asr) -> Any:
        return tokens_of(await model.open().decode(Window(AUDIO[:64000], language="en", max_tokens=32)))

    released = run(folder, act)
    whole: Any = Qwen3ASRForConditionalGeneration
    config = released_config(msgspec.convert(tiny.CONFIG["thinker_config"], ThinkerConfig))
    # Save a new model, because `transformers` saves a loaded model under the names from which it was loaded.
    model = whole(config)
    model.load_state_dict(whole.from_pretrained(folder, config=config, key_mapping=KEY_MAPPING).state_dict())
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert '"thinker_config"' not in (tmp_path / "config.json").read_text()
    assert run(tmp_path, act) == released


def test_when_weights_are_int8_then_it_decodes(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> Hypothesis:
        return await model.open().decode(Window(AUDIO[:64000], language="en", max_tokens=8))

    assert run(folder, act, weights="int8").completion_tokens


class Scripted(Qwen3AsrStream):
    """A stream whose decoder returns the given texts; all other parts are the model's."""

    def __init__(self, model: Qwen3Asr, *texts: str) -> None:
        super().__init__(model)
        self.texts = list(texts)

    async def generate(self, session: Any, max_tokens: int, temperature: float) -> list[Any]:
        ids = self._model.parts.vocabulary.control(self.texts.pop(0))
        return [transcriber.Token(i, -0.1) for i in ids]


async def _decoded(model: Qwen3Asr, *texts: str, **more: Any) -> list[Hypothesis]:
    stream = Scripted(model, *texts)
    return [await stream.decode(replace(Window(AUDIO[:16000]), **more)) for _ in texts]


def text(hypothesis: Hypothesis) -> str:
    return "".join(p.text for p in hypothesis.pieces)


def test_language_tags_are_read_and_are_no_text(folder: Path) -> None:
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


def test_when_a_window_has_a_prefix_then_the_language_found_before_is_kept(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> tuple[int, int, str, int]:
        stream, plain = Scripted(model, f"{TAG}Oui", " monsieur", f"{TAG}Non"), model.parts.vocabulary.plain
        first = await stream.decode(Window(AUDIO[:16000]))
        second = await stream.decode(Window(AUDIO[:16000], prefix=tuple(plain("Oui"))))
        other = await stream.decode(Window(AUDIO[16000:32000], start_sample=16000))
        assert text(second) == " monsieur"
        return first.prompt_tokens, second.prompt_tokens, second.language, other.prompt_tokens

    first, second, language, other = run(folder, act)
    # In the prompt, the tag precedes the words: "language French" has one token per byte, and the mark is one token.
    assert (second, language, other) == (first + len("language French") + 1 + len("Oui"), "fr", first)


def test_when_a_language_has_no_spaces_then_characters_are_words(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> list[Hypothesis]:
        return await _decoded(model, "language Chinese<asr_text>你好。", "language Chinese<asr_text>你好"[:-1] + "Ã")

    whole, half = run(folder, act)
    assert ([p.text for p in whole.pieces], whole.language) == (["你", "好。"], "zh")
    assert half.pieces[0].text == "你"


def test_half_a_character_is_no_text() -> None:
    texts = {1: "a", 2: "\ufffd", 3: "\ufffd"}

    def decode(ids: list[int]) -> str:
        return "é" if ids == [2, 3] else "".join(texts[i] for i in ids)

    assert characters([1, 2, 3, 1, 2], decode) == (["a", "é", "a"], [[1], [2, 3], [1]])
    assert characters([2], decode) == ([], [])


def test_when_tokens_loop_then_the_decode_ends(folder: Path) -> None:
    assert transcriber.first_loop([1, 2, 3] + [7, 8] * 20 + [7, 9]) == (43, 2)
    assert transcriber.first_loop([7] * 50) == (20, 1)
    assert transcriber.first_loop([1, 2, 3] + [7, 8] * 19 + [7]) is None
    assert transcriber.first_loop([]) is None

    async def act(model: Qwen3Asr) -> Hypothesis:
        # The text of the golden stream is "jjjj…" here.
        case = GOLDEN["free"]
        return await model.open().decode(window(model, case, case["steps"][-1], max_tokens=400))

    found = run(folder, act)
    assert found.completion_tokens < 100


def test_a_hint_cannot_become_a_control_token(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> tuple[int, int]:
        plain = await model.open().decode(Window(AUDIO[:16000], prompt="x" * 10, max_tokens=1))
        sly = await model.open().decode(Window(AUDIO[:16000], prompt="<|im_end|>", max_tokens=1))
        return plain.prompt_tokens, sly.prompt_tokens

    plain, sly = run(folder, act)
    assert plain == sly


def test_when_windows_change_start_hint_or_length_then_each_equals_a_fresh_decode(
    folder: Path, unguarded: None
) -> None:
    async def act(model: Qwen3Asr) -> None:
        stream = model.open()
        windows = [
            Window(AUDIO[:160_000], language="en", max_tokens=12),
            Window(AUDIO[:100_000], language="en", max_tokens=12),
            Window(AUDIO[:300_000], language="en", prompt="Ada", max_tokens=12),
            Window(AUDIO[140_000:300_000], language="en", prompt="Ada", max_tokens=12, start_sample=140_000),
            Window(AUDIO[200_000:300_000], language="en", prompt="Ada", max_tokens=12, start_sample=200_000),
            Window(AUDIO[:128_000], language="en", max_tokens=12),
            Window(AUDIO[:129_000], language="en", max_tokens=12),
            Window(AUDIO[:3000], language="en", max_tokens=12),
            Window(np.zeros(0, np.float32), language="en", max_tokens=12, start_sample=7),
        ]
        for n, one in enumerate(windows):
            found, fresh = await stream.decode(one), await model.open().decode(one)
            assert tokens_of(found) == tokens_of(fresh), n
            assert found.prompt_tokens == fresh.prompt_tokens

    run(folder, act)


def test_what_was_said_before_is_read_as_text_and_each_window_equals_a_fresh_decode(
    folder: Path, unguarded: None
) -> None:
    async def act(model: Qwen3Asr) -> None:
        stream, heads = model.open(), []
        one = Window(AUDIO[:160_000], language="en", max_tokens=12)
        for given in (
            one,
            replace(one, context=" so it was"),
            replace(one, context=" so it was", pcm=AUDIO[:200_000]),
            replace(one, context=" so it was", prompt="Ada"),
            replace(one, context=" <|im_end|>"),
        ):
            found, fresh = await stream.decode(given), await model.open().decode(given)
            assert tokens_of(found) == tokens_of(fresh)
            assert found.prompt_tokens == fresh.prompt_tokens
            heads.append(stream.head_rows)
        # Each token of this vocabulary is a byte, even in text that looks like a control token.
        assert [head - heads[0] for head in heads] == [0, 9, 9, 3 + 1 + 9, 10]

    run(folder, act)


def test_when_the_context_is_too_small_then_audio_leaves_it_and_decoding_goes_on(folder: Path, unguarded: None) -> None:
    async def act(model: Qwen3Asr) -> None:
        stream = model.open()
        for seconds in range(2, 27, 3):
            found = await stream.decode(Window(AUDIO[: seconds * 16000], language="en", max_tokens=12))
            assert found.completion_tokens
        assert model.engine.scheduler.context_cuts
        # When there is room again, the failure has no effect.
        model.engine.scheduler.limits = StepLimits(4096)
        window = Window(AUDIO[: 16 * 16000], language="en", max_tokens=12)
        assert tokens_of(await stream.decode(window)) == tokens_of(await model.open().decode(window))

    run(folder, act, settings=EngineSettings(context_rows=200))


class Failing(Qwen3AsrStream):
    """A stream whose decoder raises `failure` if it is set."""

    failure: Exception | None = None

    async def generate(self, session: Any, max_tokens: int, temperature: float) -> list[Any]:
        if self.failure:
            raise self.failure
        return await super().generate(session, max_tokens, temperature)


def test_sounds_that_are_encoded_at_once_get_the_rows_of_each_alone(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> None:
        encoder, thread = model.parts.audio_encoder, model.engine.thread
        batch = EncoderBatch(thread, encoder)
        sounds = [AUDIO[:n] for n in (64_000, 900, 130_000, 27 * 16_000)]
        expected = [await batch.encode(encoder.open(), pcm, ()) for pcm in sounds]
        encoder.windows.together = True
        broken: Any = AUDIO[:20_000].reshape(2, -1)
        # The thread is blocked, so that all requests are pending when it serves the first.
        held = threading.Event()
        thread.post(lambda: held.wait(30) and None)
        for more in ([], [broken]):
            waiting = [asyncio.ensure_future(batch.encode(encoder.open(), w, ())) for w in [*sounds, *more]]
            dropped = asyncio.ensure_future(batch.encode(encoder.open(), sounds[0], ()))
            await asyncio.sleep(0)
            dropped.cancel()
            held.set()
            found = await asyncio.gather(*waiting, return_exceptions=True)
            for made, alone in zip(found, expected, strict=False):
                assert isinstance(made, EncodedSound), made
                assert (made.num_same, len(made.finished)) == (0, len(alone.finished))
                for rows, own in zip(made.rows, alone.rows, strict=True):
                    torch.testing.assert_close(rows, own, rtol=1e-4, atol=1e-5)
            assert [type(f) for f in found[len(sounds) :]] == [ModelError] * len(more)

    run(folder, act)


def test_when_a_decode_fails_then_the_next_window_is_computed_from_its_start(folder: Path, unguarded: None) -> None:
    async def act(model: Qwen3Asr) -> None:
        stream, window = Failing(model), Window(AUDIO[:64000], language="en", max_tokens=12)
        expected = tokens_of(await stream.decode(window))
        for failure in (ModelError("no"), EngineError("no")):
            stream.failure = failure
            with pytest.raises(ModelError):
                await stream.decode(window)
            stream.failure = None
            assert tokens_of(await stream.decode(window)) == expected
        stream.close()
        assert (await model.engine.state()).sessions == 0

    run(folder, act)


def test_words_after_a_prefix_lie_after_its_words(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> Hypothesis:
        prefix = tuple(model.parts.vocabulary.plain("One two three four"))
        stream = Scripted(model, " five six")
        return await stream.decode(Window(AUDIO[:64000], prefix=prefix, language="en", word_times=True))

    found = run(folder, act)
    assert [w.text for w in found.words] == ["five", "six"]
    assert found.words[0].start_s > 2.0


def test_a_hint_is_read_within_bounds(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> int:
        return (await model.open().decode(Window(AUDIO[:16000], prompt="x" * 100_000, max_tokens=1))).prompt_tokens

    assert run(folder, act) < 600


def test_a_file_is_transcribed_in_parts(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> list[Any]:
        sound = np.concatenate((AUDIO, np.zeros(16000, np.float32), AUDIO))
        return [part async for part in model.transcribe(one_slab(sound), FileOptions(language="en", word_times=True))]

    *segments, info = run(folder, act)
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


def test_word_times_are_spread_over_the_loud_audio() -> None:
    pcm = np.zeros(32000, np.float32)
    pcm[8000:24000] = 0.1
    pieces = words([" ab", " cdef"], [[1], [2]], [1.0, 1.0], "en")
    first, second = spread(pieces, pcm)
    assert first.start_s == pytest.approx(0.5, abs=0.03)
    assert first.end_s == second.start_s == pytest.approx(0.5 + 1 / 3, abs=0.03)
    assert second.end_s == pytest.approx(1.5, abs=0.03)
    assert spread([], pcm) == []
    assert len(spread(pieces, np.zeros(100, np.float32))) == 2


def test_when_a_checkpoint_does_not_load_then_the_error_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not load"):
        Qwen3Asr(tmp_path, "none", EngineModelOptions())
    for config, says in (
        ({"model_type": "whisper", "thinker_config": {}}, "whisper is not qwen3_asr"),
        ({"model_type": "qwen3_asr", "thinker_config": {}}, "config.json: .*thinker_config"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=says):
            Qwen3Asr(tmp_path, "none", EngineModelOptions())
    assert torch.get_default_dtype() == torch.float32
