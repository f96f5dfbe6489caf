"""The input rows of Qwen3-TTS's talker before its first frame: the speaker, the language, and the text.

A row is the sum of the embeddings of a text token and of a code, or of all codes of a frame. The order of the rows is
that of the published package (qwen-tts 0.1.1). It differs between the model's voices and voices cloned from a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from antiphon.adapters.qwen3_tts.checkpoint import END, Qwen3TtsParts
from antiphon.adapters.qwen3_tts.voice_cloning import ClonedVoice

# Language names in checkpoints -> ISO 639-1.
LANGUAGE_CODES: Mapping[str, str] = {
    "chinese": "zh",
    "english": "en",
    "german": "de",
    "italian": "it",
    "portuguese": "pt",
    "spanish": "es",
    "japanese": "ja",
    "korean": "ko",
    "french": "fr",
    "russian": "ru",
}


@dataclass(frozen=True, slots=True)
class TalkerPrompt:
    """How to speak one text.

    `voice`: one of the checkpoint's voices. `language`: ISO 639-1; None: the talker decides. `instructions`: how to
    speak; ignored unless the checkpoint follows instructions. `sample`: the voice to clone instead of `voice`. `whole`:
    the talker reads all of the text before its first frame; otherwise it reads one token with each frame.
    """

    voice: str
    language: str | None = None
    instructions: str = ""
    sample: ClonedVoice | None = None
    whole: bool = True


class PromptRows:
    """Builds the talker's rows from a checkpoint's parts. It runs the model, so call it in the model's thread."""

    def __init__(self, parts: Qwen3TtsParts) -> None:
        self._parts = parts
        self._names = {LANGUAGE_CODES[n]: n for n in parts.languages if n in LANGUAGE_CODES}

    @torch.inference_mode()
    def text_rows(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the talker's input rows of text tokens: [n, width], in the talker's width and dtype."""
        parts = self._parts
        table = parts.text_embedding
        out: torch.Tensor = parts.text_projection(table(torch.tensor(list(ids), device=table.weight.device)))
        return out

    @torch.inference_mode()
    def build(
        self, ids: Sequence[int], prompt: TalkerPrompt, *, live: bool = False
    ) -> tuple[torch.Tensor, list[int] | None]:
        """Return the rows [n, width] before the first frame, and the remaining text tokens for the frames.

        `ids`: the text's tokens, at least one. `live`: more tokens follow later, so neither result has the text's end
        token. The remaining tokens are None if the rows already include that token.
        """
        before = self._before_text(prompt)
        if prompt.sample is not None and prompt.sample.codes:
            rows, left = self._after_sample(ids, prompt.sample, whole=prompt.whole, live=live)
        else:
            rows, left = self._after_voice(ids, whole=prompt.whole)
        return torch.cat([*before, *rows]), left

    def _before_text(self, prompt: TalkerPrompt) -> list[torch.Tensor]:
        """Return the rows of the instructions, the language and the voice."""
        parts, special, words = self._parts, self._parts.special_ids, self._parts.vocabulary
        language = self._language(prompt)
        if language is None:
            codes = self._code_rows(special.no_think, special.think_bos, special.think_eos)
        else:
            codes = self._code_rows(special.think, special.think_bos, parts.languages[language], special.think_eos)
        if prompt.sample is not None:
            codes = torch.cat((codes, prompt.sample.speaker[None].to(codes)))
        elif prompt.voice in parts.speakers:
            codes = torch.cat((codes, self._code_rows(parts.speakers[prompt.voice])))
        codes = torch.cat((codes, self._code_rows(special.pad)))
        text = self.text_rows([special.text_pad] * (len(codes) - 1) + [special.text_bos])
        rows = [self.text_rows(words.control("<|im_start|>assistant\n")), text + codes]
        if prompt.instructions and parts.follows_instructions:
            instructions = [
                *words.control("<|im_start|>user\n"),
                *words.plain(prompt.instructions),
                *words.control(f"{END}\n"),
            ]
            rows.insert(0, self.text_rows(instructions))
        return rows

    def _after_voice(self, ids: Sequence[int], *, whole: bool) -> tuple[list[torch.Tensor], list[int] | None]:
        """Return the rows of the text for a voice of the checkpoint, or for a cloned voice without codes."""
        special = self._parts.special_ids
        bos = self._code_rows(special.bos)
        if whole:
            text = self.text_rows([*ids, special.text_eos]) + self._code_rows(special.pad)
            return [text, self.text_rows([special.text_pad]) + bos], None
        return [self.text_rows(ids[:1]) + bos], list(ids[1:])

    def _after_sample(
        self, ids: Sequence[int], sample: ClonedVoice, *, whole: bool, live: bool
    ) -> tuple[list[torch.Tensor], list[int] | None]:
        """Return the rows of the sample's text and the text to speak, summed with the frames of the sample.

        Text tokens beyond these frames are returned as the remaining ones.
        """
        special = self._parts.special_ids
        frames = torch.cat((self._code_rows(special.bos), self._frame_rows(sample.codes)))
        text = [*sample.text, *ids, *([] if live else [special.text_eos])]
        if whole:
            before = self.text_rows(text) + self._code_rows(special.pad)
            return [before, frames + self.text_rows([special.text_pad])], None
        beside = text[: len(frames)] + [special.text_pad] * (len(frames) - len(text))
        # The end token is among the remaining tokens, or arrives later, or is in the rows.
        left = text[len(frames) :] or ([] if live else None)
        return [self.text_rows(beside) + frames], left

    def _code_rows(self, *codes: int) -> torch.Tensor:
        """Return the rows [n, width] of codes of the first codebook."""
        like = self._parts.text_embedding.weight
        out: torch.Tensor = self._parts.decoder.get_input_embeddings()(torch.tensor(codes, device=like.device))
        return out.to(like.dtype)

    def _frame_rows(self, frames: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the rows [n, width] of whole frames: each is the sum of the embeddings of its codes."""
        first, *others = zip(*frames, strict=True)
        rows = self._code_rows(*first)
        for table, codes in zip(self._parts.code_predictor.codec_embedding, others, strict=True):
            rows = rows + table(torch.tensor(codes, device=rows.device))
        return rows

    def _language(self, prompt: TalkerPrompt) -> str | None:
        """Return the name of the language to speak; None: the talker decides. A voice may speak a Chinese dialect."""
        name = self._names.get(prompt.language or "")
        if name in (None, "chinese") and (dialect := self._parts.dialects.get(prompt.voice)):
            return dialect
        return name
