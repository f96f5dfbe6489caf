"""The text model of a model that takes more than text, as the engine's runner steps it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class TextDecoder(nn.Module):
    """A text model and its head, as the runner steps them. `features`: how many layers are given features of pictures, behind each row's embedding
    (DeepStack, arXiv:2406.04334). `tap`: after how many layers the rows are kept for who wants to know (engine/sequence.py, Sink); 0: after none.
    """

    def __init__(self, text: Any, head: Any, features: int = 0, tap: int = 0) -> None:
        super().__init__()
        self.text, self.head = text, head
        self.config = text.config
        self._features = features
        self._width = int(text.config.hidden_size)
        self.taps, self.tapped = bool(tap), None
        if tap:
            text.layers[tap - 1].register_forward_hook(self._tap)

    @property
    def input_width(self) -> int:
        """Numbers in a row that goes in."""
        return self._width * (1 + self._features)

    def _tap(self, _: Any, given: Any, made: Any) -> None:
        self.tapped = (made[0] if isinstance(made, tuple) else made)[0]

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
