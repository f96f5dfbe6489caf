"""The published thinker of Qwen2.5-Omni as a reference, which is given the whole conversation for each answer."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniThinkerForConditionalGeneration, WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import _get_feat_extract_output_lengths
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from antiphon.contracts import AudioPart, ImagePart, Message, MessagePart
from antiphon.modeling.omni.checkpoint import tokenizer
from tests.adapters.published_qwen3_omni import TOKENS


class Whole:
    """The published model and its processor's parts. `marks`: the tokens around each kind of media, and their own."""

    def __init__(self, folder: Path) -> None:
        config: Any = Qwen2_5OmniConfig.from_pretrained(folder)
        kind: Any = Qwen2_5OmniThinkerForConditionalGeneration
        self.model = kind.from_pretrained(folder, config=config.thinker_config, dtype=torch.float32).eval()
        self.tokenizer = tokenizer(folder)
        self.extract: Any = WhisperFeatureExtractor.from_pretrained(folder)
        self.process: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def inputs(self, messages: Sequence[Message]) -> tuple[torch.Tensor, dict[str, Any]]:
        """The model's inputs, as its processor writes them: a token for each row of audio and images."""
        media = [p for m in messages for p in m.parts if not isinstance(p, str)]
        sounds, images = ([p for p in media if isinstance(p, kind)] for kind in (AudioPart, ImagePart))
        out: dict[str, Any] = {}
        rows: dict[MessagePart, int] = {}
        if sounds:
            made = self.extract(
                [s.pcm for s in sounds],
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
        parts = [
            [p if isinstance(p, str) else self.placeholders(p, rows) for p in m.parts or (m.text,)] for m in messages
        ]
        turns = [{"role": m.role, "content": "".join(p)} for m, p in zip(messages, parts, strict=True)]
        written = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return torch.tensor([self.tokenizer.backend_tokenizer.encode(written, add_special_tokens=False).ids]), out

    def placeholders(self, part: MessagePart, rows: dict[MessagePart, int]) -> str:
        if isinstance(part, AudioPart):
            return "<|audio_bos|>" + "<|AUDIO|>" * rows[part] + "<|audio_eos|>"
        return "<|vision_bos|>" + "<|IMAGE|>" * rows[part] + "<|vision_eos|>"

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens that the model writes, TOKENS of them."""
        ids, given = self.inputs(messages)
        with torch.no_grad():
            return self.model.generate(  # type: ignore[no-any-return]
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, eos_token_id=None, **given
            )[0, ids.shape[1] :].tolist()
