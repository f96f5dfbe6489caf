"""Qwen2.5-Omni's own voice, of tiny random weights: codes and audio equal those of the published generate()."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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

SMALL_KV = EngineSettings(kv_bytes=64 << 20)
# As many codes as a reply has here, whose talker of random weights does not end by itself.
CODES = 40
SEED = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("omni"), speaks=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Qwen25Omni]:
    loaded = Qwen25Omni(folder, "omni", EngineModelOptions(SMALL_KV, weights="fp32"))
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
    """Give the published talker the mask that generate() of transformers 5.23 drops where it is all ones.

    Its forward() adds the codes that open a reply, and finds the positions of media, only where it has one.
    """
    if given.get("attention_mask") is None:
        rows = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
        past = given["past_key_values"].get_seq_length()
        given["attention_mask"] = torch.ones(1, past + rows.shape[1], dtype=torch.long)
    return args, given


class Published:
    """The published model, which is given the whole conversation for each reply."""

    def __init__(self, folder: Path) -> None:
        kind: Any = Qwen2_5OmniForConditionalGeneration
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.talker.register_forward_pre_hook(with_mask, with_kwargs=True)
        self.thinker = Whole(folder)

    def generate(self, messages: list[Message], stop: int | None, speaker: str = "Chelsie") -> Made:
        ids, given = self.thinker.inputs(messages)
        # generate() hands what has no prefix to the talker too, which does not take pictures.
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
    """The response of the model under test, with the codes that its audio was made of."""
    assert model.talker
    streams = list[WavStream]()
    pcm = list[np.ndarray]()
    made = stream._talker or await model.talker.open()
    stream._talker = made
    wav = made.wav
    made.wav = lambda *given: streams.append(wav(*given)) or streams[-1]
    async with aclosing(stream.respond(messages, OPTIONS, VoiceOptions(speaker, seed=SEED))) as parts:
        async for part in parts:
            if isinstance(part, ResponseAudio):
                pcm.append(part.pcm)
    made.wav = wav
    prompt = max(i for i, row in enumerate(stream.chat.rows) if row == tiny.ID["<|im_start|>"]) + 3
    text = [row for row in stream.chat.rows[prompt:] if isinstance(row, int)]
    return Made(text, list(streams[0]._codes), torch.from_numpy(np.concatenate(pcm)))


def test_the_voices_are_the_checkpoints(model: Qwen25Omni) -> None:
    assert model.profile.voices == ("chelsie", "ethan")


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
