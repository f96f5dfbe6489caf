"""Qwen3-TTS with tiny random weights: codes and audio equal those of the published package, frame by frame."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.adapters.qwen3_tts import synthesizer
from antiphon.adapters.qwen3_tts.prompt import TalkerPrompt
from antiphon.adapters.qwen3_tts.synthesizer import Qwen3Tts
from antiphon.adapters.qwen3_tts.text_pieces import long_text_parts, tokens_of_words
from antiphon.adapters.qwen3_tts.voice_cloning import ClonedVoice
from antiphon.adapters.spec import EngineModelOptions
from antiphon.audio.pcm import to_pcm16
from antiphon.audio.wav import wav_header
from antiphon.contracts import Urgency, VoiceOptions
from antiphon.errors import ModelError, RemoteProtocolError
from antiphon.events.speech import VoiceSample
from antiphon.modeling.codec.frames import FrameProgram, TokenPieces
from antiphon.modeling.codec.vocoder import VocoderState
from tests.adapters import tiny_qwen3_tts as tiny

GOLDEN = json.loads((tiny.GOLDEN / "qwen3_tts.json").read_text())
CASES = GOLDEN["cases"]
LANGUAGES = {"English": "en", "German": "de", "Auto": None}
# The golden codes end here if the model does not end them earlier.
MAX_FRAMES = 39


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {k: tiny.write(tmp_path_factory.mktemp(k), k) for k in ("custom_voice", "voice_design", "base")}


def run(folder: Path, act: Any, **options: Any) -> Any:
    async def main() -> Any:
        model = Qwen3Tts(folder, "tiny", EngineModelOptions(threads=1, **({"weights": "fp32"} | options)))
        try:
            return await asyncio.wait_for(act(model), 120)
        finally:
            model.close()

    return asyncio.run(main())


async def prompt_of(model: Qwen3Tts, case: dict[str, Any]) -> TalkerPrompt:
    sample = None
    if case.get("clone"):
        sample = await model.listen(tiny.reference())
        if case["clone"] == "icl":
            codes = tuple(tuple(f) for f in tiny.reference_codes())
            sample = ClonedVoice(sample.speaker, tuple(model.parts.vocabulary.plain(case["ref_text"])), codes)
    return TalkerPrompt(
        case.get("speaker") or "", LANGUAGES[case["language"]], case.get("instruct", ""), sample, whole=case["non"]
    )


async def codes(model: Qwen3Tts, case: dict[str, Any], words: bool = False) -> list[list[int]]:
    """Return the codes of a golden case's frames. `words`: its text arrives letter by letter."""
    ids, more = model.parts.vocabulary.plain(case["text"]), None
    if words:

        async def slowly() -> AsyncIterator[str]:
            for letter in case["text"]:
                await asyncio.sleep(0)
                yield letter

        more = TokenPieces(tokens_of_words(slowly(), model.parts.vocabulary.plain))
        ids = await anext(more)
    out = []
    async with aclosing(model.frames(ids, more, await prompt_of(model, case), model.parts.sampling)) as frames:
        async for frame in frames:
            out.append(frame)
            if len(out) == MAX_FRAMES:
                break
    return out


def of(kind: str) -> list[dict[str, Any]]:
    return [c for c in CASES if c["kind"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["custom_voice", "voice_design", "base"])
def test_greedy_codes_are_the_published_ones(folders: dict[str, Path], kind: str) -> None:
    async def act(model: Qwen3Tts) -> None:
        for case in of(kind):
            assert await codes(model, case) == case["codes"], case["text"]

    run(folders[kind], act)


def test_when_a_text_comes_word_by_word_then_its_codes_are_the_same(folders: dict[str, Path]) -> None:
    async def act(model: Qwen3Tts) -> None:
        for case in (c for c in of("custom_voice") if not c["non"]):
            assert await codes(model, case, words=True) == case["codes"]

    run(folders["custom_voice"], act)


@pytest.mark.parametrize("kind", ["custom_voice", "base"])
def test_when_texts_are_spoken_together_and_some_broken_off_then_codes_do_not_change(
    folders: dict[str, Path], kind: str
) -> None:
    async def act(model: Qwen3Tts) -> None:
        async def broken(case: dict[str, Any], count: int) -> None:
            ids = model.parts.vocabulary.plain(case["text"])
            async with aclosing(model.frames(ids, None, await prompt_of(model, case), model.parts.sampling)) as frames:
                async for _ in frames:
                    count -= 1
                    if count < 0:
                        break

        async def whole(case: dict[str, Any]) -> None:
            assert await codes(model, case) == case["codes"]

        async with asyncio.TaskGroup() as group:
            for number, case in enumerate(of(kind)):
                group.create_task(whole(case))
                group.create_task(broken(case, 3 * number))
        assert (await model.engine.state()).sessions == 0

    run(folders[kind], act)


def test_when_frames_are_vocoded_in_chunks_then_the_audio_is_the_published_one(folders: dict[str, Path]) -> None:
    async def act(model: Qwen3Tts) -> None:
        vocoder = model.parts.vocoder
        for number, case in enumerate(CASES):
            before = tiny.reference_codes() if case.get("clone") == "icl" else []
            frames = before + case["codes"]
            whole = vocoder([frames], [VocoderState()])[0].numpy()
            heard = whole[len(before) * tiny.FRAME_SAMPLES :]
            assert len(heard) == tiny.FRAME_SAMPLES * len(case["codes"])
            np.testing.assert_allclose(heard[:640], case["wav"], atol=1e-4)
            assert np.square(heard, dtype=np.float64).sum() == pytest.approx(case["sum"], rel=1e-3)
            chance = random.Random(number)
            past, at, made = VocoderState(), 0, []
            while at < len(frames):
                size = chance.choice((1, 1, 2, 3, 7, 20))
                made.append(vocoder([frames[at : at + size]], [past])[0].numpy())
                at += size
            np.testing.assert_allclose(np.concatenate(made), whole, atol=1e-4)

    run(folders["custom_voice"], act)


def test_the_speakers_vector_is_the_published_one(folders: dict[str, Path]) -> None:
    async def act(model: Qwen3Tts) -> torch.Tensor:
        return (await model.listen(tiny.reference())).speaker

    np.testing.assert_allclose(run(folders["base"], act).numpy(), GOLDEN["speaker"], atol=1e-3)


def test_the_codes_of_a_sample_are_the_published_ones(folders: dict[str, Path]) -> None:
    async def act(model: Qwen3Tts) -> ClonedVoice:
        return await model.listen(tiny.reference(), "Hi you.")

    sample = run(folders["base"], act)
    assert len(sample.codes) == GOLDEN["frames"]
    assert [list(f) for f in sample.codes[:200]] == GOLDEN["heard"]
    assert len(set(sample.codes)) > 20


async def sound(model: Qwen3Tts, text: str, **options: Any) -> np.ndarray:
    made = []
    async for part in model.speak(text, VoiceOptions(model.profile.voices[0], **options), lambda: Urgency.FINAL):
        made.append(part.pcm)
    return np.concatenate(made)


def test_audio_comes_in_growing_chunks(folders: dict[str, Path]) -> None:
    async def act(model: Qwen3Tts) -> None:
        case = of("custom_voice")[0]
        parts = [s async for s in model.speak(case["text"], VoiceOptions("ada", language="en"), lambda: Urgency.FINAL)]
        assert [p.num_frames for p in parts] == [1, 2, 4, 2]
        heard = np.concatenate([p.pcm for p in parts])
        np.testing.assert_allclose(heard, case["wav"][: len(heard)], atol=1e-4)
        assert len(heard) == tiny.FRAME_SAMPLES * 9

    run(folders["custom_voice"], act)


@pytest.mark.slow
def test_when_seeds_are_equal_then_the_audio_is_equal(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, "custom_voice")
    (folder / "generation_config.json").unlink()

    async def act(model: Qwen3Tts) -> None:
        assert model.parts.sampling.first.temperature == 0.9
        one, same, other = [await sound(model, "Hi there.", seed=seed, max_frames=12) for seed in (1, 1, 2)]
        assert np.array_equal(one, same)
        assert not np.array_equal(one[: len(other)], other[: len(one)])

    run(folder, act)


@pytest.mark.parametrize(("kind", "first"), [("custom_voice", 0), ("custom_voice", 2), ("base", 7)])
def test_when_a_request_says_how_the_text_is_given_then_the_audio_is_that_of_the_published_package(
    folders: dict[str, Path], kind: str, first: int
) -> None:
    async def act(model: Qwen3Tts) -> None:
        for case in CASES[first : first + 2]:
            given = None
            if kind == "base":
                given = VoiceSample(embedding=tuple((await model.listen(tiny.reference())).speaker.tolist()))
            options = VoiceOptions(
                case.get("speaker") or "",
                language=LANGUAGES[case["language"]],
                instructions=case.get("instruct", ""),
                sample=given,
                max_frames=20,
                whole_text=case["non"],
            )
            heard = np.concatenate([c.pcm async for c in model.speak(case["text"], options, lambda: Urgency.FINAL)])
            np.testing.assert_allclose(heard[: len(case["wav"])], case["wav"][: len(heard)], atol=1e-4)

    run(folders[kind], act)


def test_when_parameters_are_given_then_the_codes_are_chosen_so(folders: dict[str, Path]) -> None:
    async def act(model: Qwen3Tts) -> None:
        async def spoken(**parameters: float) -> np.ndarray:
            return await sound(model, "Hi there.", seed=3, max_frames=12, parameters=parameters)

        greedy = await spoken()
        # The checkpoint samples greedily. With a temperature, `top_k` of 1 gives the same codes; plain sampling gives
        # others.
        assert np.array_equal(greedy, await spoken(temperature=1.5, top_k=1.0))
        assert np.array_equal(greedy, await spoken(subtalker_temperature=1.5, subtalker_top_k=1.0))
        for drawn in ({"temperature": 1.5}, {"subtalker_temperature": 1.5}):
            other = await spoken(**drawn)
            assert not np.array_equal(greedy[: len(other)], other[: len(greedy)])
        made = synthesizer.sampling_of(
            model.parts.sampling,
            VoiceOptions("ada", parameters={"top_k": 7.0, "subtalker_top_p": 0.5, "repetition_penalty": 1.2}),
        )
        assert (made.first.top_k, made.first.repetition_penalty, made.rest.top_p) == (7, 1.2, 0.5)
        assert made.first.temperature == model.parts.sampling.first.temperature
        assert set(model.profile.parameters) == {
            *("temperature", "top_k", "top_p", "repetition_penalty"),
            *("subtalker_temperature", "subtalker_top_k", "subtalker_top_p"),
        }

    run(folders["custom_voice"], act)


def test_when_text_is_live_then_audio_comes_before_it_is_complete(folders: dict[str, Path]) -> None:
    async def act(model: Qwen3Tts) -> None:
        gate, begun = asyncio.Event(), asyncio.Event()

        async def texts() -> AsyncIterator[str]:
            yield "Hello the"
            yield "re, fri"
            await gate.wait()
            yield "end."

        made = []
        async with aclosing(model.speak_live(texts(), VoiceOptions("ada", language="en"))) as sounds:
            async for part in sounds:
                made.append(part.pcm)
                if not begun.is_set():
                    # Audio arrives before the text is complete.
                    assert not gate.is_set()
                    begun.set()
                    gate.set()
        heard, case = np.concatenate(made), of("custom_voice")[1]
        np.testing.assert_allclose(heard[:640], case["wav"], atol=1e-4)

    run(folders["custom_voice"], act)


def test_when_text_is_live_in_a_cloned_voice_then_its_end_mark_is_not_in_the_prompt(folders: dict[str, Path]) -> None:
    async def act(model: Qwen3Tts) -> None:
        special, plain = model.parts.special_ids, model.parts.vocabulary.plain
        sample = (await prompt_of(model, of("base")[2])).sample
        prompt = TalkerPrompt("", "en", "", sample, whole=False)
        for first in ("a", "Many words that are more than the sample has frames."):
            rows, left = await model.prompt_rows(plain(first), prompt, live=True)
            # More tokens follow later, so the end token is not among these.
            assert left is not None
            assert special.text_eos not in left
            whole, rest = await model.prompt_rows(plain(first), prompt)
            assert len(whole) == len(rows)
            assert (rest or [special.text_eos])[-1] == special.text_eos

    run(folders["base"], act)


@pytest.mark.slow
def test_a_sample_is_encoded_once_and_within_bounds(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def file(samples: int) -> bytes:
        data = to_pcm16(np.resize(tiny.reference(), samples))
        return wav_header(24000, len(data)) + data

    async def act(model: Qwen3Tts) -> None:
        asked: list[int] = []
        listen = model.listen

        async def spy(pcm: Any, text: str = "") -> ClonedVoice:
            asked.append(len(pcm))
            return await listen(pcm, text)

        monkeypatch.setattr(model, "listen", spy)
        monkeypatch.setattr(synthesizer, "MAX_SAMPLE_S", 3)
        long = VoiceSample(file(4 * 24000), "Hi.")
        one = await sound(model, "Hi.", sample=long, max_frames=3)
        # The sample is encoded once, and only its first 3 s.
        assert np.array_equal(one, await sound(model, "Hi.", sample=long, max_frames=3))
        assert asked == [3 * 24000]
        with pytest.raises(RemoteProtocolError, match="a voice needs"):
            await sound(model, "Hi.", sample=VoiceSample(file(300)))
        with pytest.raises(RemoteProtocolError, match="speaker_embedding has 64"):
            await sound(model, "Hi.", sample=VoiceSample(embedding=(1.0,)))

    run(folders["base"], act)


def test_when_a_long_first_chunk_is_asked_for_then_it_has_25_frames(folders: dict[str, Path]) -> None:
    async def act(model: Qwen3Tts) -> list[int]:
        options = VoiceOptions("ada", first_frames=2000, max_frames=120, language="de", instructions="Whisper it.")
        return [p.num_frames async for p in model.speak("Guten Tag", options, lambda: Urgency.FINAL)]

    sizes = run(folders["custom_voice"], act)
    assert sizes[0] == 25
    assert max(sizes) == 25


def test_when_logits_are_not_numbers_then_only_their_own_text_fails(folders: dict[str, Path]) -> None:
    async def act(model: Qwen3Tts) -> None:
        case, predict = of("custom_voice")[0], model.parts.code_predictor.forward

        def spoiled(thoughts: torch.Tensor, first: torch.Tensor, *others: Any) -> Any:
            # If a step has at least two texts, the last one fails.
            if len(thoughts) > 1:
                thoughts = torch.cat((thoughts[:-1], torch.full_like(thoughts[-1:], torch.nan)))
            return predict(thoughts, first, *others)

        model.parts.code_predictor.forward = spoiled
        done = await asyncio.gather(*(codes(model, case) for _ in range(3)), return_exceptions=True)
        assert [d for d in done if not isinstance(d, ModelError)] == [case["codes"]]
        for error in done:
            if isinstance(error, ModelError):
                assert "not a number" in str(error)
        del model.parts.code_predictor.forward
        assert await codes(model, case) == case["codes"]
        assert (await model.engine.state()).sessions == 0
        sampling = model.parts.sampling
        with pytest.raises(ValueError, match="does not support penalties"):
            FrameProgram(model.frame_maker, replace(sampling, rest=replace(sampling.rest, forbid=(1,))), 5, 2000)

    run(folders["custom_voice"], act)


def test_when_live_text_has_no_words_then_there_is_no_audio(folders: dict[str, Path]) -> None:
    async def act(model: Qwen3Tts) -> list[Any]:
        async def texts() -> AsyncIterator[str]:
            yield "  "
            yield "\n"

        return [s async for s in model.speak_live(texts(), VoiceOptions("ada"))]

    assert run(folders["custom_voice"], act) == []


def test_live_text_is_cut_only_where_no_token_lies_across() -> None:
    async def pieces(text: str, cuts: list[int]) -> list[str]:
        async def texts() -> AsyncIterator[str]:
            for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
                yield text[a:b]

        # The tokenizer has a token for each character.
        return ["".join(map(chr, ids)) async for ids in tokens_of_words(texts(), lambda t: [ord(c) for c in t])]

    for text, most in (
        (" Well,  said she:\nno, or yes. ", [" Well,  said", " she:\nno,", " or", " yes. "]),
        ("你好，世界。再见", ["你好，", "世界。", "再见"]),
    ):
        for cuts in ([], [3], list(range(1, len(text))), [5, 6]):
            found = asyncio.run(pieces(text, cuts))
            assert "".join(found) == text
            # The splits are among those of a text that arrives letter by letter.
            ends = {len("".join(most[:n])) for n in range(len(most) + 1)}
            assert {len("".join(found[:n])) for n in range(len(found) + 1)} <= ends
        assert asyncio.run(pieces(text, list(range(1, len(text))))) == most


def test_long_texts_are_spoken_in_parts() -> None:
    text = " ".join(f"This is sentence number {n}, no more." for n in range(60))
    parts = list(long_text_parts(text))
    assert " ".join(parts) == text
    assert len(parts) > 2
    assert max(map(len, parts)) <= 600
    # A short text is not changed.
    assert list(long_text_parts("你好。世界\n很大。")) == ["你好。世界\n很大。"]
    unmarked = list(long_text_parts("word " * 400))
    assert len(unmarked) > 2
    assert max(map(len, unmarked)) <= 600


def test_when_a_request_or_a_checkpoint_is_wrong_then_the_error_says_why(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="does not load"):
        Qwen3Tts(tmp_path, "none", EngineModelOptions())
    for config, says in (
        ({"model_type": "whisper"}, "whisper  is not qwen3_tts of 12 Hz"),
        (tiny.config("base") | {"tokenizer_type": "qwen3_tts_tokenizer_25hz"}, "25hz is not qwen3_tts of 12 Hz"),
        (tiny.config("base") | {"talker_config": {}}, "config.json: .*talker_config"),
        (tiny.config("base") | {"speaker_encoder_config": {}}, "config.json: .*speaker_encoder_config"),
        (tiny.config("custom_voice") | {"speaker_encoder_config": {}}, "speech_tokenizer"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=says):
            Qwen3Tts(tmp_path, "none", EngineModelOptions())

    async def act(model: Qwen3Tts) -> None:
        assert not [part async for part in model.speak(" … ", VoiceOptions("ada"), lambda: Urgency.FINAL)]
        with pytest.raises(RemoteProtocolError, match="own voices"):
            await model.listen(tiny.reference())
        profile = model.profile
        assert (profile.voices, profile.languages) == (("ada", "eric"), ("en", "zh", "de"))
        assert (profile.follows_instructions, profile.streams_text, profile.sample_rate_hz) == (True, True, 24000)

    run(folders["custom_voice"], act)


def test_when_the_code_predictor_fails_then_the_text_fails_and_the_engine_lives(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(model: Qwen3Tts) -> None:
        case = of("custom_voice")[0]
        heads = model.parts.code_predictor.lm_head
        kept, heads[0] = heads[0], torch.nn.Linear(3, 3)
        with pytest.raises(ModelError, match="RuntimeError"):
            await codes(model, case)
        heads[0] = kept
        assert await codes(model, case) == case["codes"]
        assert (await model.engine.state()).sessions == 0

    run(folders["custom_voice"], act)


def test_when_weights_are_int8_then_it_speaks(folders: dict[str, Path]) -> None:
    async def act(model: Qwen3Tts) -> int:
        case = replace(VoiceOptions("ada"), seed=1)
        async for part in model.speak("Hi.", case, lambda: Urgency.FINAL):
            return len(part.pcm)
        return 0

    assert run(folders["custom_voice"], act, weights="int8") == tiny.FRAME_SAMPLES
