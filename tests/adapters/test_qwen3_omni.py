"""Qwen3-Omni of tiny random weights: text, codes and sound of conversations that keep their KV equal what `transformers` generates from the whole."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen3OmniMoeForConditionalGeneration, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

from antiphon.adapters.qwen3_omni import Qwen3Omni
from antiphon.adapters.qwen3_omni.checkpoint import tokenizer
from antiphon.adapters.qwen3_omni.partner import OmniStream, _SpokenTokens
from antiphon.adapters.qwen3_omni.talker import MANNER
from antiphon.contracts import (
    AudioPart,
    ImagePart,
    MediaPart,
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    TextDelta,
    VoiceOptions,
)
from antiphon.engine.api import EngineSettings
from antiphon.errors import ModelError, RemoteProtocolError
from antiphon.modeling.chat import MAX_SPARE_PARTS
from antiphon.modeling.codec_talker import FirstCodeChooser
from antiphon.vision.images import EncodedImage
from tests.adapters import tiny_qwen3_omni as tiny
from tests.adapters.tiny_qwen3_omni import FRAME_SAMPLES, ID

TOKENS, FRAMES = 14, 24
OPTIONS = ReplyOptions(max_tokens=TOKENS, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Qwen3Omni]:
    loaded = Qwen3Omni(folder, "omni", settings=EngineSettings(kv_bytes=64 << 20), weights="fp32")
    assert loaded.voice
    greedy = loaded.voice.manner
    loaded.voice.manner = replace(
        greedy, first=replace(greedy.first, temperature=0.0), rest=replace(greedy.rest, temperature=0.0)
    )
    yield loaded
    loaded.close()


def sound(seconds: float, number: int = 0) -> AudioPart:
    rng = np.random.default_rng(number)
    at = np.arange(int(seconds * 16_000)) / 16_000
    tones = sum(np.sin(2 * np.pi * f * at) for f in rng.uniform(100, 3000, 4))
    return AudioPart((0.1 * tones * (1 + np.sin(2 * np.pi * 2 * at))).astype(np.float32))


def image(number: int = 0) -> ImagePart:
    file = io.BytesIO()
    rng = np.random.default_rng(number)
    Image.fromarray(rng.integers(0, 255, (48, 80, 3)).astype(np.uint8)).save(file, "PNG")
    return ImagePart(EncodedImage(file.getvalue()))


@dataclass
class Made:
    text: list[int]
    frames: list[list[int]]
    sound: torch.Tensor


class Whole:
    """The published model, given everything at each answer."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.config
        # It asks its talker for this, and forgets to give it.
        config.talker_config.audio_config = config.thinker_config.audio_config
        self.tokenizer = tokenizer(folder)
        self.extract = WhisperFeatureExtractor.from_pretrained(folder)
        self.look = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def given(self, messages: Sequence[Message]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Its inputs, as its processor writes them: a token for each row of what is heard and seen."""
        media = [p for m in messages for p in m.parts if not isinstance(p, str)]
        sounds, images = ([p for p in media if isinstance(p, kind)] for kind in (AudioPart, ImagePart))
        out: dict[str, Any] = {}
        rows: dict[MediaPart, int] = {}
        if sounds:
            # Each by itself: beside a longer one its extractor hears the silence that it is filled up with.
            heard = [self.features(s.pcm) for s in sounds]
            most = max(h.shape[1] for h in heard)
            mask = torch.tensor([[1] * h.shape[1] + [0] * (most - h.shape[1]) for h in heard])
            filled = torch.stack([torch.nn.functional.pad(h, (0, most - h.shape[1])) for h in heard])
            out |= {"input_features": filled, "feature_attention_mask": mask}
            lengths = _get_feat_extract_output_lengths(mask.sum(-1))
            rows |= dict(zip(sounds, lengths.tolist(), strict=True))
        if images:
            opened = [Image.open(io.BytesIO(i.image.data)).convert("RGB") for i in images]
            out |= dict(self.look(opened, return_tensors="pt"))
            rows |= dict(zip(images, (out["image_grid_thw"].prod(-1) // 4).tolist(), strict=True))
        parts = [[p if isinstance(p, str) else self.place(p, rows[p]) for p in m.parts or (m.text,)] for m in messages]
        turns = [{"role": m.role, "content": "".join(p)} for m, p in zip(messages, parts, strict=True)]
        written = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return torch.tensor([self.tokenizer.backend_tokenizer.encode(written, add_special_tokens=False).ids]), out

    def features(self, pcm: np.ndarray) -> torch.Tensor:
        made = self.extract(pcm, sampling_rate=16_000, padding=True, truncation=False, return_tensors="pt")
        return torch.as_tensor(made["input_features"][0])

    def place(self, part: MediaPart, rows: int) -> str:
        if isinstance(part, AudioPart):
            return "<|audio_start|>" + "<|audio_pad|>" * rows + "<|audio_end|>"
        return "<|vision_start|>" + "<|image_pad|>" * rows + "<|vision_end|>"

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """What it writes."""
        ids, given = self.given(messages)
        with torch.no_grad():
            return self.model.thinker.generate(  # type: ignore[no-any-return]
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, eos_token_id=None, **given
            )[0, ids.shape[1] :].tolist()

    def stop(self, messages: Sequence[Message]) -> int:
        """A token that ends the answer to these after a few others: one of random weights has no end of its own."""
        said = self.ids(messages)
        return next(t for i, t in enumerate(said) if i >= 4 and t not in said[:i])

    def generate(self, messages: Sequence[Message], stop: int, speaker: str = "ethan") -> Made:
        ids, given = self.given(messages)
        codes: list[torch.Tensor] = []
        decode = self.model.code2wav.chunked_decode
        self.model.code2wav.chunked_decode = lambda c, **more: codes.append(c) or decode(c, **more)
        with warnings.catch_warnings():
            # It has its talker choose with settings that its own generate() then warns of.
            warnings.simplefilter("ignore", UserWarning)
            text, wav = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                speaker=speaker,
                thinker_max_new_tokens=TOKENS,
                thinker_eos_token_id=stop,
                talker_max_new_tokens=FRAMES,
                talker_do_sample=False,
                **given,
            )
        del self.model.code2wav.chunked_decode
        return Made(text[0, ids.shape[1] :].tolist(), codes[0][0].T.tolist(), wav[0, 0])


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    return Whole(folder)


async def answer(
    model: Qwen3Omni, talk: OmniStream, messages: Sequence[Message], stop: int, speaker: str = "ethan"
) -> Made:
    """What it writes and says, for as many frames as the published code is asked for."""
    text, frames, pcm = list[int](), list[list[int]](), list[np.ndarray]()
    model.thinker.stop_tokens = frozenset((stop,))
    assert model.voice
    vocoder = model.voice.talker.vocoder
    vocode = vocoder.forward
    vocoder.forward = lambda held, past: frames.extend(held) or vocode(held, past)  # type: ignore[method-assign]
    async with aclosing(talk.respond(messages, OPTIONS, VoiceOptions(speaker))) as parts:
        async for part in parts:
            if isinstance(part, ResponseAudio):
                pcm.append(part.pcm)
                if sum(map(len, pcm)) > FRAMES * FRAME_SAMPLES:
                    break
    vocoder.forward = vocode  # type: ignore[method-assign]
    prompt = len(whole_prompt(talk))
    text = [row for row in talk._chat.rows[prompt:] if isinstance(row, int)]
    return Made(text, frames, torch.from_numpy(np.concatenate(pcm)))


def whole_prompt(talk: OmniStream) -> list[Any]:
    """The rows up to the answer that was made last."""
    rows = talk._chat.rows
    return rows[: max(i for i, row in enumerate(rows) if row == ID["<|im_start|>"]) + 3]


def equal(made: Made, expected: Made) -> None:
    assert made.text == expected.text
    if made.frames:
        assert made.frames[: len(expected.frames)] == expected.frames
    assert 0.01 < expected.sound.abs().max() < 1
    assert len(expected.sound) > 20 * FRAME_SAMPLES
    torch.testing.assert_close(made.sound[: len(expected.sound)], expected.sound, atol=1e-4, rtol=0)


def folder_of(whole: Whole) -> Path:
    return Path(whole.model.config.name_or_path)


PROMPTS = {
    "text": [Message("system", "Be brief."), Message("user", "Hello there.")],
    "sound": [Message("user", "(sound)", parts=(sound(0.7),))],
    "longer than a window of the encoder": [Message("user", "(sound)", parts=(sound(9.1, 1), "What was that?"))],
    "image": [Message("system", "Look."), Message("user", "(image)", parts=("What is ", image(), "?"))],
    "both": [Message("user", "", parts=(image(1), sound(1.7, 2), image(2), sound(2.2, 3)))],
    "turns": [
        Message("system", "Be brief."),
        Message("user", "(sound)", parts=(sound(1.1, 4),)),
        Message("assistant", "I see."),
        Message("user", "(image)", parts=("And ", image(3), "?")),
    ],
}


@pytest.mark.parametrize("name", PROMPTS)
def test_text_and_sound_are_those_of_the_published_model(model: Qwen3Omni, whole: Whole, name: str) -> None:
    async def run() -> Made:
        talk = await model.open()
        try:
            return await answer(model, talk, PROMPTS[name], stop)
        finally:
            talk.close()

    stop = whole.stop(PROMPTS[name])
    equal(asyncio.run(run()), whole.generate(PROMPTS[name], stop))


def test_a_conversation_goes_on_from_its_kv(model: Qwen3Omni, whole: Whole) -> None:
    """Its second answer computes what is new, with both decoders; what was said is what was heard of it."""
    first = [Message("system", "Be brief."), Message("user", "(sound)", parts=(sound(1.2, 5),))]
    second = Message("user", "(sound)", parts=(sound(1.4, 6), "And now?"))

    async def run(said: str) -> tuple[Made, int, int]:
        talk = await model.open()
        try:
            await answer(model, talk, first, whole.stop(first))
            thinker, talker = model.thinker.engine.runner.stats, model.voice.engine.runner.stats  # type: ignore[union-attr]
            before = thinker.rows, talker.rows
            messages = [*first, Message("assistant", said), second]
            made = await answer(model, talk, messages, whole.stop(messages))
            return made, thinker.rows - before[0], talker.rows - before[1]
        finally:
            talk.close()

    said = "Not what it said."
    messages = [*first, Message("assistant", said), second]
    made, thought, spoken = asyncio.run(run(said))
    equal(made, whole.generate(messages, whole.stop(messages)))
    ids, _ = whole.given(messages)
    known, _ = whole.given(first)
    assert thought < ids.shape[1] - known.shape[1] + TOKENS + 4
    # The user's first turn is not computed again; each frame is a row.
    users, _ = whole.given([second])
    assert spoken < users.shape[1] + 9 + 2 * (FRAMES + 12)


def test_conversations_side_by_side_and_broken_off_leave_each_other_alone(model: Qwen3Omni, whole: Whole) -> None:
    names = ("text", "sound", "image", "turns")
    stops = {name: whole.stop(PROMPTS[name]) for name in names}
    expected = {name: whole.generate(PROMPTS[name], stops[name]) for name in names}

    async def broken_off(name: str, after: int) -> None:
        talk = await model.open()
        count = 0
        async with aclosing(talk.respond(PROMPTS[name], OPTIONS, VoiceOptions("chelsie"))) as parts:
            async for _ in parts:
                count += 1
                if count == after:
                    break
        talk.close()

    async def run(name: str) -> Made:
        async with asyncio.TaskGroup() as group:
            for i, other in enumerate(names):
                group.create_task(broken_off(other, 3 + 2 * i))
            talk = await model.open()
            made = await answer(model, talk, PROMPTS[name], stops[name])
            talk.close()
        # Those that are recorded are everybody's.
        return replace(made, frames=[])

    for name in names:
        equal(asyncio.run(run(name)), expected[name])
    assert model.voice
    for engine in (model.thinker.engine, model.voice.engine):
        assert asyncio.run(engine.state()).sessions == 0


def test_voices_differ_and_a_seed_repeats(model: Qwen3Omni, whole: Whole) -> None:
    stop = whole.stop(PROMPTS["text"])
    other = whole.generate(PROMPTS["text"], stop, "chelsie")

    async def run(speaker: str) -> Made:
        talk = await model.open()
        try:
            return await answer(model, talk, PROMPTS["text"], stop, speaker)
        finally:
            talk.close()

    chelsie = asyncio.run(run("chelsie"))
    equal(chelsie, other)
    assert not torch.equal(asyncio.run(run("ethan")).sound[:300], chelsie.sound[:300])


def test_an_answer_in_text_is_not_spoken(model: Qwen3Omni) -> None:
    async def run() -> list[Any]:
        talk = await model.open()
        try:
            async with aclosing(talk.respond(PROMPTS["sound"], OPTIONS, None)) as parts:
                return [p async for p in parts]
        finally:
            talk.close()

    out = asyncio.run(run())
    assert not [p for p in out if isinstance(p, ResponseAudio)]
    assert [p for p in out if isinstance(p, TextDelta)]
    assert isinstance(out[-1], ReplyDone)


def test_words_have_places_and_the_end_comes_last(model: Qwen3Omni, whole: Whole) -> None:
    async def run() -> list[Any]:
        talk = await model.open()
        assert model.voice
        model.thinker.stop_tokens = frozenset((whole.stop(PROMPTS["text"]),))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.voice, "manner", replace(model.voice.manner, max_frames=12))
            async with aclosing(talk.respond(PROMPTS["text"], OPTIONS, VoiceOptions("ethan"))) as parts:
                out = [p async for p in parts]
        talk.close()
        return out

    out = asyncio.run(run())
    assert isinstance(out[-1], ReplyDone)
    words = [w for p in out if isinstance(p, ResponseAudio) for w in p.words]
    text = "".join(p.text for p in out if isinstance(p, TextDelta))
    assert [w.text for w in words] == text.split()
    # Twelve frames, of which the first lacks what no two frames made.
    lost = 12 * FRAME_SAMPLES - sum(len(p.pcm) for p in out if isinstance(p, ResponseAudio))
    assert 0 < lost < FRAME_SAMPLES


def test_a_call_is_not_spoken(model: Qwen3Omni) -> None:
    async def spoken(rows: list[int], tokens: Sequence[int]) -> list[int]:
        chat = SimpleNamespace(rows=list(rows))
        said = _SpokenTokens(chat, frozenset((1,)), model.opening)  # type: ignore[arg-type]
        for token in tokens:
            chat.rows.append(token)
            said.tell(token)
        said.end()
        assert await said.prompt() == rows
        return [t async for t in said.tokens()]

    opening = ID["<tool_call>"]
    assert model.opening == opening
    assert asyncio.run(spoken([9, 9, 9, 9, 9], [5, 6, opening, 7, 1])) == [5, 6]
    assert asyncio.run(spoken([9, 9, 9, 9, 9], [5, 1, 7])) == [5]
    # An answer that has to be a call begins with one.
    assert asyncio.run(spoken([9, 9, 9, opening, 9], [5, 6, 1])) == []


def test_what_left_the_conversation_is_not_held(model: Qwen3Omni) -> None:
    async def run() -> None:
        talk = await model.open()
        for name in ("both", "image"):
            async with aclosing(talk.respond(PROMPTS[name], OPTIONS, None)) as parts:
                async for _ in parts:
                    pass
        # Some are held for when they come back.
        assert list(talk._chat.media_rows)[-1] == PROMPTS["image"][1].parts[1]
        for number in range(12):
            many = [Message("user", "", parts=(image(number), "?"))]
            async with aclosing(talk.respond(many, OPTIONS, None)) as parts:
                async for _ in parts:
                    pass
        assert len(talk._chat.media_rows) == MAX_SPARE_PARTS + 1
        talk.close()

    asyncio.run(run())


def test_its_sound_may_end_at_once() -> None:
    logits = torch.zeros(1100)
    logits[50] = 9
    assert FirstCodeChooser(MANNER.first, 50, 1100, MANNER.min_frames)(logits) == 50


def test_in_the_machines_own_type_it_answers_and_speaks(folder: Path) -> None:
    with pytest.raises(ModelError, match="mixtures"):
        Qwen3Omni(folder, "omni", weights="int8")
    loaded = Qwen3Omni(folder, "omni", settings=EngineSettings(kv_bytes=64 << 20))

    async def run() -> list[Any]:
        talk = await loaded.open()
        out = []
        async with aclosing(talk.respond(PROMPTS["both"], OPTIONS, VoiceOptions("ethan", seed=1))) as parts:
            async for part in parts:
                out.append(part)
                if isinstance(part, ResponseAudio):
                    break
        talk.close()
        return out

    out = asyncio.run(run())
    loaded.close()
    assert [p for p in out if isinstance(p, TextDelta)]
    assert len(out[-1].pcm)


def test_without_a_talker_it_hears_and_writes(folder: Path, tmp_path: Path, whole: Whole) -> None:
    shutil.copytree(folder, tmp_path / "thinker")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "thinker" / "config.json").write_text(json.dumps(config | {"enable_audio_output": False}))
    loaded = Qwen3Omni(tmp_path / "thinker", "omni", settings=EngineSettings(kv_bytes=64 << 20), weights="fp32")
    loaded.thinker.stop_tokens = frozenset()

    async def run() -> list[int]:
        talk = await loaded.open()
        async with aclosing(talk.respond(PROMPTS["both"], OPTIONS, VoiceOptions("ethan"))) as parts:
            assert not [p async for p in parts if isinstance(p, ResponseAudio)]
        rows = [row for row in talk._chat.rows[-TOKENS:] if isinstance(row, int)]
        talk.close()
        return rows

    assert loaded.profile.voices == ()
    assert asyncio.run(run()) == whole.ids(PROMPTS["both"])
    loaded.close()


def test_what_was_never_computed_is_silence_to_the_talker(model: Qwen3Omni, whole: Whole) -> None:
    """More than the context holds: the oldest rows leave before they are computed, and the answer is spoken all the same."""
    long = [Message("user", "", parts=(*(image(i) for i in range(130)), "What was that?"))]

    async def run() -> list[Any]:
        small = Qwen3Omni(
            folder_of(whole), "omni", settings=EngineSettings(kv_bytes=64 << 20, context_rows=512), weights="fp32"
        )
        small.thinker.stop_tokens = frozenset()
        talk = await small.open()
        out = []
        async with aclosing(talk.respond(long, OPTIONS, VoiceOptions("ethan", seed=3))) as parts:
            async for part in parts:
                out.append(part)
                if isinstance(part, ResponseAudio):
                    break
        assert [s for s in talk._chat.media_rows.values() if s.hidden is None]
        talk.close()
        small.close()
        return out

    assert isinstance(asyncio.run(run())[-1], ResponseAudio)


def test_a_part_is_taken_in_once_whoever_asks(model: Qwen3Omni) -> None:
    taken: list[MediaPart] = []

    class Counted:
        def __init__(self, senses: Any) -> None:
            self.placeholder_ids, self.has_tap, self._senses = senses.placeholder_ids, senses.has_tap, senses

        async def encode(self, part: MediaPart) -> Any:
            taken.append(part)
            return await self._senses.encode(part)

    # More than the context holds: what a truncation took is not taken in again.
    parts = [image(i) for i in range(120)]
    messages = [Message("user", "", parts=(p, str(i))) for i, p in enumerate(parts)]

    async def run() -> None:
        talk = await model.open()
        ahead = [asyncio.create_task(talk.prefill(messages[:i])) for i in range(1, 7)]
        await asyncio.sleep(0)
        ahead[2].cancel()
        options = replace(OPTIONS, truncation=0.2)
        for _ in range(3):
            async with aclosing(talk.respond(messages, options, None)) as answers:
                async for _ in answers:
                    pass
        await asyncio.gather(*ahead, return_exceptions=True)
        talk.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.thinker, "media_encoder", Counted(model.thinker.media_encoder))
        asyncio.run(run())
    assert sorted(map(parts.index, taken)) == list(range(120))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match="does not load"):
        Qwen3Omni(tmp_path, "omni")
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "chat_template.json").unlink()
    with pytest.raises(ModelError, match="chat template"):
        Qwen3Omni(tmp_path / "copy", "omni", weights="fp32")
    shutil.copytree(folder, tmp_path / "blind")
    (tmp_path / "blind" / "preprocessor_config.json").unlink()
    running = threading.active_count()
    with pytest.raises(ModelError, match="preprocessor_config"):
        Qwen3Omni(tmp_path / "blind", "omni", weights="fp32")
    # Its engine was stopped.
    assert threading.active_count() <= running


def test_what_is_no_image_fails_the_answer_not_the_model(model: Qwen3Omni, whole: Whole) -> None:
    async def run() -> Made:
        talk = await model.open()
        broken = [Message("user", "", parts=(ImagePart(EncodedImage(b"no image")), "What is it?"))]
        with pytest.raises(RemoteProtocolError, match="image"):
            await answer(model, talk, broken, stop)
        made = await answer(model, talk, PROMPTS["text"], stop)
        talk.close()
        return made

    stop = whole.stop(PROMPTS["text"])
    equal(asyncio.run(run()), whole.generate(PROMPTS["text"], stop))
