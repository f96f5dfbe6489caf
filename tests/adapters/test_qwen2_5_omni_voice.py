"""Qwen2.5-Omni's own voice, with tiny random weights: codes and audio equal those of the published generate()."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5OmniForConditionalGeneration

from antiphon.adapters.qwen2_5_omni.model import Qwen25Omni
from antiphon.adapters.qwen2_5_omni.talker import TALKER_SAMPLING
from antiphon.adapters.qwen2_5_omni.token2wav import WavStream
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import Message, ReplyDone, ResponseAudio, TextDelta, VoiceOptions
from antiphon.engine.api import EngineSettings
from tests.adapters import tiny_qwen2_5_omni as tiny
from tests.adapters.published_qwen2_5_omni import Whole
from tests.adapters.published_qwen3_omni import OPTIONS, PROMPTS, TOKENS, clip
from tests.adapters.published_video import frame, sound, video
from tests.pipelines.test_cascade import Voice

SMALL_KV = EngineSettings(kv_bytes=64 << 20)
# The number of codes of a reply: a talker with random weights does not end by itself.
CODES = 40
SEED = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("omni"), speaks=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Qwen25Omni]:
    loaded = Qwen25Omni(folder, "omni", EngineModelOptions(SMALL_KV, weights="fp32", threads=1))
    assert loaded.talker
    loaded.talker.sampling = replace(TALKER_SAMPLING, temperature=0.0, max_tokens=CODES)
    yield loaded
    loaded.close()


@dataclass
class Made:
    """The tokens of a reply, its codes, and the audio of all codes at once, float32 [num_samples]."""

    text: list[int]
    codes: list[int]
    audio: torch.Tensor


def with_mask(_: Any, args: Any, given: dict[str, Any]) -> Any:
    """Pass the published talker the mask that generate() of transformers 5.23 drops if it is all ones.

    Without a mask, its forward() neither adds the codes that begin a reply, nor finds the positions of media.
    """
    if given.get("attention_mask") is None:
        rows = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
        past = given["past_key_values"].get_seq_length()
        given["attention_mask"] = torch.ones(1, past + rows.shape[1], dtype=torch.long)
    return args, given


class Published:
    """The published model. It gets the whole conversation for each reply."""

    def __init__(self, folder: Path) -> None:
        kind: Any = Qwen2_5OmniForConditionalGeneration
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.talker.register_forward_pre_hook(with_mask, with_kwargs=True)
        self.thinker = Whole(folder)

    def generate(self, messages: list[Message], stop: int | None, speaker: str = "Chelsie") -> Made:
        ids, given = self.thinker.inputs(messages)
        # generate() also passes arguments without a prefix to the talker, which does not accept pictures.
        given = {f"thinker_{name}" if name.startswith("pixel") else name: value for name, value in given.items()}
        codes = list[torch.Tensor]()
        hook = self.model.token2wav.register_forward_pre_hook(lambda _, args: codes.append(args[0]))
        ends = [self.model.talker.codec_pad_token, self.model.talker.codec_eos_token]
        torch.manual_seed(SEED)
        text, wav = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            speaker=speaker,
            thinker_max_new_tokens=TOKENS,
            thinker_eos_token_id=stop,
            thinker_do_sample=False,
            talker_max_new_tokens=CODES,
            talker_do_sample=False,
            talker_eos_token_id=ends,
            **given,
        )
        hook.remove()
        return Made(text[0, ids.shape[1] :].tolist(), codes[0][0].tolist(), wav)


@pytest.fixture(scope="module")
def published(folder: Path) -> Published:
    return Published(folder)


async def answer(model: Qwen25Omni, stream: Any, messages: list[Message], speaker: str = "chelsie") -> Made:
    """Return the response of the model under test, with the codes of its audio."""
    assert model.talker
    streams = list[WavStream]()
    pcm = list[np.ndarray]()
    made: Any = stream.talker or await model.talker.open()
    stream.talker = made
    wav = made.wav
    made.wav = lambda *given: streams.append(wav(*given)) or streams[-1]
    async with aclosing(stream.respond(messages, OPTIONS, VoiceOptions(speaker, seed=SEED))) as parts:
        async for part in parts:
            if isinstance(part, ResponseAudio):
                pcm.append(part.pcm)
    made.wav = wav
    prompt = max(i for i, row in enumerate(stream.chat.rows) if row == tiny.ID["<|im_start|>"]) + 3
    text = [row for row in stream.chat.rows[prompt:] if isinstance(row, int)]
    return Made(text, list(streams[0].codes), torch.from_numpy(np.concatenate(pcm)))


def test_the_voices_are_the_checkpoints(model: Qwen25Omni) -> None:
    assert model.profile.voices == ("chelsie", "ethan")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_codes_are_those_of_the_published_model(model: Qwen25Omni, published: Published, name: str) -> None:
    model.thinker.stop_tokens = frozenset()

    async def run() -> Made:
        stream = await model.open()
        try:
            return await answer(model, stream, PROMPTS[name])
        finally:
            stream.close()

    made, expected = asyncio.run(run()), published.generate(PROMPTS[name], None)
    assert made.text == expected.text
    assert made.codes == expected.codes
    assert len(set(made.codes)) > 3
    assert len(made.audio) == len(expected.audio) == len(expected.codes) * tiny.CODE_SAMPLES


@pytest.mark.slow
def test_codes_of_a_video_with_its_sound(model: Qwen25Omni, published: Published) -> None:
    model.thinker.stop_tokens = frozenset()
    part = video([frame(i) for i in range(4)], 1.0, sound(4.3), model.profile.video_window_s)
    messages = [Message("system", "Look."), Message("user", "", parts=("See: ", part, "What was that?"))]

    async def run() -> Made:
        stream = await model.open()
        try:
            return await answer(model, stream, messages)
        finally:
            stream.close()

    made, expected = asyncio.run(run()), published.generate(messages, None)
    assert (made.text, made.codes) == (expected.text, expected.codes)


@pytest.mark.slow
def test_when_a_conversation_goes_on_then_only_what_is_new_is_computed(model: Qwen25Omni, published: Published) -> None:
    model.thinker.stop_tokens = frozenset()
    assert model.talker
    engine: Any = model.talker.engine
    first = [Message("system", "Be brief."), Message("user", "(sound)", parts=(clip(1.2, 5),))]

    async def run() -> tuple[list[Message], Made, int]:
        stream: Any = await model.open()
        said = await answer(model, stream, first)
        # The reply is repeated exactly as it was written, so that the thinker keeps its rows.
        text = model.thinker.tokenizer.decode(said.text[:6], skip_special_tokens=False)
        messages = [*first, Message("assistant", text), Message("user", "(sound)", parts=(clip(1.4, 6), "And now?"))]
        before = engine.runner.stats.rows
        made = await answer(model, stream, messages, "ethan")
        rows = engine.runner.stats.rows - before
        stream.close()
        return messages, made, rows

    messages, made, rows = asyncio.run(run())
    expected = published.generate(messages, None, "Ethan")
    assert (made.text, made.codes) == (expected.text, expected.codes)
    assert (
        rows < len(published.thinker.inputs(messages)[0][0]) - len(published.thinker.inputs(first)[0][0]) + CODES + 20
    )


@pytest.mark.slow
def test_a_reply_that_ends_by_itself_is_spoken_to_its_last_word(model: Qwen25Omni, published: Published) -> None:
    messages = PROMPTS["sound"]
    said = published.generate(messages, None).text
    stop = next(t for i, t in enumerate(said) if i >= 4 and t not in said[:i])
    model.thinker.stop_tokens = frozenset((stop,))

    async def run() -> Made:
        stream = await model.open()
        try:
            return await answer(model, stream, messages)
        finally:
            stream.close()

    made, expected = asyncio.run(run()), published.generate(messages, stop)
    assert made.text[-1] == stop
    assert (made.text, made.codes) == (expected.text, expected.codes)


def test_audio_of_a_whole_turn_is_that_of_the_published_model(model: Qwen25Omni, published: Published) -> None:
    assert model.talker
    parts = model.talker.parts
    expected = published.generate(PROMPTS["text"], None, "Ethan")
    assert expected.audio.abs().max() > 0.01
    random = torch.Generator().manual_seed(SEED)
    audio = parts.token2wav.whole(expected.codes, parts.speakers["ethan"], random)
    torch.testing.assert_close(audio, expected.audio, atol=1e-5, rtol=0)


def streamed(model: Qwen25Omni, codes: list[int], step: int) -> torch.Tensor:
    assert model.talker
    talker = model.talker

    async def run() -> list[np.ndarray]:
        random = torch.Generator().manual_seed(SEED)
        wav = WavStream(talker.parts.token2wav, talker.thread, talker.parts.speakers["ethan"], random)
        pcm = [await wav.feed(codes[i : i + step]) for i in range(0, len(codes), step)]
        return [*pcm, await wav.feed([], last=True)]

    return torch.from_numpy(np.concatenate(asyncio.run(run())))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4, 7, 8, 9, 31, 60])
def test_streamed_audio_has_every_sample_whatever_the_codes_come_in(model: Qwen25Omni, count: int) -> None:
    codes = np.random.default_rng(1).integers(0, tiny.CODES - 4, count).tolist()
    audio = streamed(model, codes, 1)
    assert len(audio) == count * tiny.CODE_SAMPLES
    torch.testing.assert_close(streamed(model, codes, 5), audio, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_when_the_context_is_all_there_is_then_streamed_audio_is_the_whole_turns(
    model: Qwen25Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.talker
    parts = model.talker.parts
    codes = np.random.default_rng(2).integers(0, tiny.CODES - 4, 40).tolist()
    whole = parts.token2wav.whole(codes, parts.speakers["ethan"], torch.Generator().manual_seed(SEED))
    near = streamed(model, codes, 1)
    # Most of the context that the published steps use is within the window.
    assert (near - whole).pow(2).mean() < 0.1 * whole.pow(2).mean()
    for name in ("BLOCKS_BACK", "BLOCKS_AHEAD"):
        monkeypatch.setattr(f"antiphon.adapters.qwen2_5_omni.token2wav.{name}", 100)
    torch.testing.assert_close(streamed(model, codes, 1), whole, atol=1e-5, rtol=0)


def test_no_code_is_chosen_that_is_no_audio(folder: Path) -> None:
    loaded = Qwen25Omni(folder, "omni", EngineModelOptions(SMALL_KV, weights="fp32", threads=1))
    assert loaded.talker
    parts = loaded.talker.parts
    assert loaded.talker.barred.nonzero().flatten().tolist() == [parts.bos]
    loaded.close()


@pytest.mark.slow
def test_when_a_response_is_closed_then_the_next_one_is_as_without_it(model: Qwen25Omni, published: Published) -> None:
    model.thinker.stop_tokens = frozenset()

    async def run() -> Made:
        stream: Any = await model.open()
        async with aclosing(stream.respond(PROMPTS["sound"], OPTIONS, VoiceOptions("ethan"))) as parts:
            async for part in parts:
                if isinstance(part, ResponseAudio):
                    break
        async with aclosing(stream.respond(PROMPTS["text"], OPTIONS, VoiceOptions("ethan"))) as parts:
            await anext(parts)
        made = await answer(model, stream, PROMPTS["text"])
        stream.close()
        return made

    made, expected = asyncio.run(run()), published.generate(PROMPTS["text"], None)
    assert (made.text, made.codes) == (expected.text, expected.codes)


def test_when_no_voice_is_wanted_then_there_is_text_alone(model: Qwen25Omni) -> None:
    model.thinker.stop_tokens = frozenset()

    async def run() -> list[Any]:
        stream = await model.open()
        async with aclosing(stream.respond(PROMPTS["both"], OPTIONS, None)) as parts:
            out = [part async for part in parts]
        stream.close()
        return out

    out = asyncio.run(run())
    assert {type(part) for part in out} == {TextDelta, ReplyDone}


@pytest.mark.parametrize("lacking", ["voices", "weights"])
def test_when_a_checkpoint_has_no_voice_then_the_synthesizer_speaks(tmp_path: Path, folder: Path, lacking: str) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    if lacking == "voices":
        (copied / "spk_dict.pt").unlink()
    else:
        for file in copied.glob("*.safetensors"):
            kept = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("talker.")}
            save_file(kept, file, {"format": "pt"})
    voice = Voice()
    loaded = Qwen25Omni(copied, "omni", EngineModelOptions(SMALL_KV, weights="fp32", threads=1), synthesizer=voice)
    assert loaded.talker is None
    assert loaded.profile.voices == voice.profile.voices
    loaded.close()


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_when_weights_are_rounded_then_it_speaks(folder: Path, weights: str) -> None:
    loaded = Qwen25Omni(folder, "omni", EngineModelOptions(SMALL_KV, weights=weights, threads=1))
    assert loaded.talker
    loaded.talker.sampling = replace(TALKER_SAMPLING, max_tokens=CODES)

    async def run() -> Made:
        stream = await loaded.open()
        try:
            return await answer(loaded, stream, PROMPTS["both"])
        finally:
            stream.close()

    made = asyncio.run(run())
    loaded.close()
    assert len(made.audio) == len(made.codes) * tiny.CODE_SAMPLES > 0
