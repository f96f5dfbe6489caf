"""The published Qwen3-Omni as a reference, and conversations to compare with it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Qwen3OmniMoeForConditionalGeneration, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    Qwen3OmniMoeProcessor,
    _get_feat_extract_output_lengths,
)

from antiphon.adapters.qwen3_omni.model import Qwen3Omni
from antiphon.contracts import (
    AudioPart,
    ImagePart,
    Message,
    MessagePart,
    ReplyOptions,
    ResponseAudio,
    VideoPart,
    VoiceOptions,
)
from antiphon.modeling.omni.conversation import OmniStream, tokenizer
from antiphon.vision.images import EncodedImage
from tests.adapters.published_video import PublishedVideo, joined
from tests.adapters.tiny_qwen3_omni import FRAME_SAMPLES, ID

TOKENS, FRAMES = 14, 24
OPTIONS = ReplyOptions(max_tokens=TOKENS, temperature=0.0)


def clip(seconds: float, number: int = 0) -> AudioPart:
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
    """A response: the tokens of its text, its frames of codes, and its audio, float32 [num_samples]."""

    text: list[int]
    frames: list[list[int]]
    audio: torch.Tensor


class Whole:
    """The published model. It gets the whole conversation for each response."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.config
        # The model reads this field of its talker's configuration, but does not set it.
        config.talker_config.audio_config = config.thinker_config.audio_config
        self.tokenizer = tokenizer(folder)
        self.extract = WhisperFeatureExtractor.from_pretrained(folder)
        self.process = Qwen2VLImageProcessorPil.from_pretrained(folder)
        names = {"audio_token": "<|audio_pad|>", "video_token": "<|video_pad|>"}
        names |= {"audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
        self.video = PublishedVideo(Qwen3OmniMoeProcessor, names, 13.0, self.process)

    def inputs(self, messages: Sequence[Message]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the model's inputs in the format of its processor: one token for each row of audio and images."""
        media = [p for m in messages for p in m.parts if not isinstance(p, str)]
        sounds = [p for p in media if isinstance(p, AudioPart) or (isinstance(p, VideoPart) and p.sound)]
        images = [p for p in media if isinstance(p, ImagePart)]
        out: dict[str, Any] = {}
        rows: dict[MessagePart, int] = {}
        if sounds:
            # Each clip separately: in a batch with a longer clip, the extractor would return features for the padding.
            features = [self.features(s.pcm if isinstance(s, AudioPart) else joined(s)) for s in sounds]
            most = max(h.shape[1] for h in features)
            mask = torch.tensor([[1] * h.shape[1] + [0] * (most - h.shape[1]) for h in features])
            filled = torch.stack([torch.nn.functional.pad(h, (0, most - h.shape[1])) for h in features])
            out |= {"input_features": filled, "feature_attention_mask": mask}
            lengths = _get_feat_extract_output_lengths(mask.sum(-1))
            rows |= dict(zip(sounds, lengths.tolist(), strict=True))
        if images:
            opened = [Image.open(io.BytesIO(i.image.data)).convert("RGB") for i in images]
            out |= dict(self.process(opened, return_tensors="pt"))
            rows |= dict(zip(images, (out["image_grid_thw"].prod(-1) // 4).tolist(), strict=True))
        videos: dict[MessagePart, str] = {}
        for video in (p for p in media if isinstance(p, VideoPart)):
            videos[video], given = self.video.inputs(video, rows.get(video, 0))
            out |= {
                k: torch.cat((out[k], v)) if k in out and k != "use_audio_in_video" else v for k, v in given.items()
            }
        parts = [
            [p if isinstance(p, str) else self.placeholders(p, rows, videos) for p in m.parts or (m.text,)]
            for m in messages
        ]
        turns = [{"role": m.role, "content": "".join(p)} for m, p in zip(messages, parts, strict=True)]
        written = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return torch.tensor([self.tokenizer.backend_tokenizer.encode(written, add_special_tokens=False).ids]), out

    def features(self, pcm: np.ndarray) -> torch.Tensor:
        made = self.extract(pcm, sampling_rate=16_000, padding=True, truncation=False, return_tensors="pt")
        return torch.as_tensor(made["input_features"][0])

    def placeholders(self, part: MessagePart, rows: dict[MessagePart, int], videos: dict[MessagePart, str]) -> str:
        if isinstance(part, VideoPart):
            return "<|vision_start|>" + videos[part] + "<|vision_end|>"
        if isinstance(part, AudioPart):
            return "<|audio_start|>" + "<|audio_pad|>" * rows[part] + "<|audio_end|>"
        return "<|vision_start|>" + "<|image_pad|>" * rows[part] + "<|vision_end|>"

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Return TOKENS tokens that the model writes."""
        ids, given = self.inputs(messages)
        with torch.no_grad():
            return self.model.thinker.generate(  # type: ignore[no-any-return]
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, eos_token_id=None, **given
            )[0, ids.shape[1] :].tolist()

    def stop(self, messages: Sequence[Message]) -> int:
        """Return a token that ends the response after a few tokens.

        A model with random weights never ends a response itself.
        """
        said = self.ids(messages)
        return next(t for i, t in enumerate(said) if i >= 4 and t not in said[:i])

    def generate(self, messages: Sequence[Message], stop: int, speaker: str = "ethan") -> Made:
        ids, given = self.inputs(messages)
        codes: list[torch.Tensor] = []
        if given.get("use_audio_in_video"):
            # generate() does not pass this to its talker, which would then use other positions for sound and frames.
            given["talker_use_audio_in_video"] = True
        decode = self.model.code2wav.chunked_decode
        self.model.code2wav.chunked_decode = lambda c, **more: codes.append(c) or decode(c, **more)
        with warnings.catch_warnings():
            # The model passes settings to its talker about which its own generate() warns.
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


async def answer(
    model: Qwen3Omni, stream: OmniStream, messages: Sequence[Message], stop: int, speaker: str = "ethan"
) -> Made:
    """Return the response of the model under test, with the same number of frames as the published model."""
    text, frames, pcm = list[int](), list[list[int]](), list[np.ndarray]()
    model.thinker.stop_tokens = frozenset((stop,))
    assert model.talker
    vocoder = model.talker.parts.vocoder
    vocode = vocoder.forward
    vocoder.forward = lambda held, past: frames.extend(held[0]) or vocode(held, past)  # type: ignore[method-assign]
    async with aclosing(stream.respond(messages, OPTIONS, VoiceOptions(speaker))) as parts:
        async for part in parts:
            if isinstance(part, ResponseAudio):
                pcm.append(part.pcm)
                if sum(map(len, pcm)) > FRAMES * FRAME_SAMPLES:
                    break
    vocoder.forward = vocode  # type: ignore[method-assign]
    prompt = len(whole_prompt(stream))
    text = [row for row in stream.chat.rows[prompt:] if isinstance(row, int)]
    return Made(text, frames, torch.from_numpy(np.concatenate(pcm)))


def whole_prompt(stream: OmniStream) -> list[Any]:
    """Return the rows up to the last response."""
    rows = stream.chat.rows
    return rows[: max(i for i, row in enumerate(rows) if row == ID["<|im_start|>"]) + 3]


def assert_equal(made: Made, expected: Made) -> None:
    assert made.text == expected.text
    if made.frames:
        assert made.frames[: len(expected.frames)] == expected.frames
    assert 0.01 < expected.audio.abs().max() < 1
    assert len(expected.audio) > 20 * FRAME_SAMPLES
    torch.testing.assert_close(made.audio[: len(expected.audio)], expected.audio, atol=1e-4, rtol=0)


def folder_of(whole: Whole) -> Path:
    return Path(whole.model.config.name_or_path)


PROMPTS = {
    "text": [Message("system", "Be brief."), Message("user", "Hello there.")],
    "sound": [Message("user", "(sound)", parts=(clip(0.7),))],
    "longer than a window of the encoder": [Message("user", "(sound)", parts=(clip(9.1, 1), "What was that?"))],
    "image": [Message("system", "Look."), Message("user", "(image)", parts=("What is ", image(), "?"))],
    "both": [Message("user", "", parts=(image(1), clip(1.7, 2), image(2), clip(2.2, 3)))],
    "turns": [
        Message("system", "Be brief."),
        Message("user", "(sound)", parts=(clip(1.1, 4),)),
        Message("assistant", "I see."),
        Message("user", "(image)", parts=("And ", image(3), "?")),
    ],
}
