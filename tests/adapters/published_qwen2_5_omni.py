"""The published thinker of Qwen2.5-Omni as a reference. It gets the whole conversation for each answer."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniThinkerForConditionalGeneration, WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import (
    Qwen2_5OmniProcessor,
    _get_feat_extract_output_lengths,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from antiphon.contracts import AudioPart, ImagePart, Message, MessagePart, VideoPart
from antiphon.modeling.omni.conversation import tokenizer
from tests.adapters.published_qwen3_omni import TOKENS
from tests.adapters.published_video import PublishedVideo, joined


class Whole:
    """The published model and the parts of its processor.

    `marks`: the tokens around each kind of media, and its placeholder.
    """

    def __init__(self, folder: Path) -> None:
        config: Any = Qwen2_5OmniConfig.from_pretrained(folder)
        kind: Any = Qwen2_5OmniThinkerForConditionalGeneration
        self.model = kind.from_pretrained(folder, config=config.thinker_config, dtype=torch.float32).eval()
        self.tokenizer = tokenizer(folder)
        self.extract: Any = WhisperFeatureExtractor.from_pretrained(folder)
        self.process: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)
        names = {"audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>"}
        names |= {"audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
        self.video = PublishedVideo(Qwen2_5OmniProcessor, names, 25, self.process)

    def inputs(self, messages: Sequence[Message]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the model's inputs in the format of its processor: one token for each row of audio and images."""
        media = [p for m in messages for p in m.parts if not isinstance(p, str)]
        sounds = [p for p in media if isinstance(p, AudioPart) or (isinstance(p, VideoPart) and p.sound)]
        images = [p for p in media if isinstance(p, ImagePart)]
        out: dict[str, Any] = {}
        rows: dict[MessagePart, int] = {}
        if sounds:
            made = self.extract(
                [s.pcm if isinstance(s, AudioPart) else joined(s) for s in sounds],
                sampling_rate=16_000,
                padding="max_length",
                return_attention_mask=True,
                return_tensors="pt",
            )
            mask = made["attention_mask"]
            out |= {"input_features": made["input_features"], "feature_attention_mask": mask}
            lengths = _get_feat_extract_output_lengths(mask.sum(-1))
            rows |= dict(zip(sounds, lengths.tolist(), strict=True))
        if images:
            opened = [Image.open(io.BytesIO(i.image.data)).convert("RGB") for i in images]
            out |= dict(self.process(opened, return_tensors="pt"))
            rows |= dict(zip(images, (out["image_grid_thw"].prod(-1) // 4).tolist(), strict=True))
        written_videos: dict[MessagePart, str] = {}
        for video in (p for p in media if isinstance(p, VideoPart)):
            written_videos[video], given = self.video.inputs(video, rows.get(video, 0))
            out |= {
                k: torch.cat((out[k], v)) if k in out and k != "use_audio_in_video" else v for k, v in given.items()
            }
        parts = [
            [p if isinstance(p, str) else self.placeholders(p, rows, written_videos) for p in m.parts or (m.text,)]
            for m in messages
        ]
        turns = [{"role": m.role, "content": "".join(p)} for m, p in zip(messages, parts, strict=True)]
        written = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return torch.tensor([self.tokenizer.backend_tokenizer.encode(written, add_special_tokens=False).ids]), out

    def placeholders(self, part: MessagePart, rows: dict[MessagePart, int], videos: dict[MessagePart, str]) -> str:
        if isinstance(part, VideoPart):
            return "<|vision_bos|>" + videos[part] + "<|vision_eos|>"
        if isinstance(part, AudioPart):
            return "<|audio_bos|>" + "<|AUDIO|>" * rows[part] + "<|audio_eos|>"
        return "<|vision_bos|>" + "<|IMAGE|>" * rows[part] + "<|vision_eos|>"

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Return TOKENS tokens that the model writes."""
        ids, given = self.inputs(messages)
        with torch.no_grad():
            return self.model.generate(  # type: ignore[no-any-return]
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, eos_token_id=None, **given
            )[0, ids.shape[1] :].tolist()

    def positions(self, ids: torch.Tensor, given: dict[str, Any]) -> list[tuple[int, ...]]:
        """Return the positions of a conversation's rows on the three axes."""
        mask = given.get("feature_attention_mask")
        found, _ = self.model.get_rope_index(
            ids,
            given.get("image_grid_thw"),
            given.get("video_grid_thw"),
            torch.ones_like(ids),
            given.get("use_audio_in_video", False),
            None if mask is None else mask.sum(-1),
            given.get("video_second_per_grid"),
        )
        return [tuple(int(p) for p in row) for row in found[:, 0].T.tolist()]
