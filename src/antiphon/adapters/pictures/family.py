"""What one family of models that see pictures must say of itself: how it looks, and how frames and questions are put to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer, GenerationConfig

from antiphon.adapters.chat_template import plain_tokenizer
from antiphon.engine.sequence import Position
from antiphon.images import Pixels


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as the decoder sees it: `rows` [n, width]; `positions` of each, where they do not follow one another."""

    rows: torch.Tensor
    positions: tuple[Position, ...] | None = None


Part = Sequence[int] | Picture


class Vocabulary:
    """A checkpoint's tokens. `end`: the control token that ends a turn."""

    def __init__(self, folder: Path, end: str) -> None:
        """Raises OSError, ValueError."""
        made: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.tokenizer: Tokenizer = made.backend_tokenizer
        self._plain = plain_tokenizer(self.tokenizer)
        ends = {self.tokenizer.token_to_id(end), made.eos_token_id, *_ends(folder)}
        self.stop = frozenset(int(i) for i in ends if isinstance(i, int))

    def plain(self, text: str) -> list[int]:
        """Tokens of a text, none of them a control token."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def control(self, text: str) -> list[int]:
        """Tokens of a text that may name control tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def _ends(folder: Path) -> list[int]:
    try:
        found = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:
        return []
    return found if isinstance(found, list) else [] if found is None else [found]


class Family(Protocol):
    """One loaded model. `whole`: the decoder for the engine, and where in it the text model is."""

    vocabulary: Vocabulary
    decoder: Any
    # Of a row's place: 1, or 3 where it is (time, height, width). Of a row: numbers in it, 0 where it is the decoder's own width.
    position_axes: int
    input_width: int

    def prepare(self, pixels: Pixels) -> Any:
        """A picture scaled and cut as the encoder wants it. Not in the engine's thread, and no work of torch."""
        ...

    def look(self, prepared: Any) -> Picture:
        """The picture's rows. In the engine's thread."""
        ...

    def opening(self, instructions: str) -> list[Part]:
        """The system's turn."""
        ...

    def turn(self) -> list[Part]:
        """Begins a turn of whoever asks."""
        ...

    def frame(self, picture: Picture, at_s: float) -> list[Part]:
        """A frame inside a turn."""
        ...

    def question(self, text: str) -> list[Part]:
        """The question, the end of its turn, and the beginning of the answer's."""
        ...

    def end(self) -> list[Part]:
        """Ends a turn that did not end by itself."""
        ...


class Decoder(nn.Module):
    """A text model and its head, as the runner steps them. `features`: how many layers are given features of pictures, behind each row's embedding
    (DeepStack, arXiv:2406.04334).
    """

    def __init__(self, text: Any, head: Any, features: int = 0) -> None:
        super().__init__()
        self.text, self.head = text, head
        self.config = text.config
        self._features = features
        self._width = int(text.config.hidden_size)

    @property
    def input_width(self) -> int:
        """Numbers in a row that goes in."""
        return self._width * (1 + self._features)

    def get_input_embeddings(self) -> Any:
        """Tokens to rows."""
        table = self.text.get_input_embeddings()
        return _Widened(table, self._width * self._features) if self._features else table

    def get_output_embeddings(self) -> Any:
        """The head."""
        return self.head

    def set_attn_implementation(self, name: str) -> None:
        """Of the text model alone: the vision tower keeps its own."""
        self.text.set_attn_implementation(name)

    def forward(self, inputs_embeds: Any, logits_to_keep: Any, **more: Any) -> Any:
        """As a causal language model of `transformers`."""
        if self._features:
            inputs_embeds, *deep = inputs_embeds.split(self._width, -1)
            more["visual_pos_masks"] = torch.ones(
                inputs_embeds.shape[:2], dtype=torch.bool, device=inputs_embeds.device
            )
            more["deepstack_visual_embeds"] = [rows[0] for rows in deep]
        hidden = self.text(inputs_embeds=inputs_embeds, **more).last_hidden_state
        return SimpleNamespace(logits=self.head(hidden[:, logits_to_keep]))


class _Widened(nn.Module):
    """A table of embeddings whose rows have no features of pictures."""

    def __init__(self, table: Any, more: int) -> None:
        super().__init__()
        self._table, self._more = table, more

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int [n] to float [n, width]."""
        return nn.functional.pad(self._table(ids), (0, self._more))
