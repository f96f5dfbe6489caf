"""The text model of a model that takes more than text, as the engine's runner steps it.

The runner expects a causal language model of `transformers`; here one is put together from a text model and its head,
with the two things that such models need besides: features of pictures, and a layer whose output is kept.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from msgspec import UNSET, UnsetType
from torch import nn


class QwenTextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A text model of Qwen3's kind in a released config.json. A field that is absent there is `transformers`' default.

    `rope_theta`: the base of the rotary positions.
    """

    vocab_size: int | UnsetType = UNSET
    hidden_size: int | UnsetType = UNSET
    intermediate_size: int | UnsetType = UNSET
    num_hidden_layers: int | UnsetType = UNSET
    num_attention_heads: int | UnsetType = UNSET
    num_key_value_heads: int | UnsetType = UNSET
    head_dim: int | UnsetType = UNSET
    hidden_act: str | UnsetType = UNSET
    max_position_embeddings: int | UnsetType = UNSET
    rms_norm_eps: float | UnsetType = UNSET
    attention_bias: bool | UnsetType = UNSET
    rope_theta: float | UnsetType = UNSET

    # Keyword arguments of a configuration class of `transformers`, which takes a value of any type.
    def keywords(self, default_theta: float, *, tied: bool) -> dict[str, Any]:
        """Return the fields as a configuration class of `transformers` takes them.

        `default_theta`: for a config.json without `rope_theta`. `tied`: the output head is the table of embeddings.
        """
        named = {name: getattr(self, name) for name in QwenTextConfig.__struct_fields__ if name != "rope_theta"}
        theta = default_theta if self.rope_theta is UNSET else self.rope_theta
        # The three coordinates of its rotary positions are always equal: one is enough.
        return {name: value for name, value in named.items() if value is not UNSET} | {
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "tie_word_embeddings": tied,
        }


# The `tap` of the last hidden states.
LAST = -1


class TextDecoder(nn.Module):
    """A text model and its head, with the methods that the engine's Runner calls of a causal language model.

    `features`: how many of the first layers are given features of pictures (DeepStack, arXiv:2406.04334); an input row
    is then the embedding followed by so many rows of features.
    `tap`: after how many layers the rows are kept in `tapped`, for the sinks they were given with; 0: they are not;
    LAST: behind the last layer and its norm, as `Sampling.hidden` has them.
    `has_tap`: whether they are. `tapped`: float [rows, width] of the last pass.
    """

    def __init__(self, text: Any, head: Any, features: int = 0, tap: int = 0) -> None:
        super().__init__()
        self.text, self.head = text, head
        self.config = text.config
        self._features = features
        self._width = int(text.config.hidden_size)
        self.has_tap, self.tapped = bool(tap), None
        self._taps_last = tap == LAST
        if tap > 0:
            text.layers[tap - 1].register_forward_hook(self._tap)

    @property
    def input_width(self) -> int:
        """How many numbers an input row has: the decoder's width, and as much again for each layer with features."""
        return self._width * (1 + self._features)

    def _tap(self, _: Any, inputs: Any, output: Any) -> None:
        self.tapped = (output[0] if isinstance(output, tuple) else output)[0]

    def get_input_embeddings(self) -> Any:
        """Return the module that turns token ids, int [n], into input rows; without features, those are zeros."""
        table = self.text.get_input_embeddings()
        return _PaddedEmbedding(table, self._width * self._features) if self._features else table

    def get_output_embeddings(self) -> Any:
        """Return the head, from the last hidden states to logits; its input is what `Sampling.hidden` asks for."""
        return self.head

    def set_attn_implementation(self, name: str) -> None:
        """Set the attention of the text model alone: encoders beside it keep their own."""
        self.text.set_attn_implementation(name)

    def forward(self, inputs_embeds: Any, logits_to_keep: Any, **more: Any) -> Any:
        """Compute logits as a causal language model of `transformers` does.

        `inputs_embeds`: float [1, rows, input_width]. `logits_to_keep`: int [n], the rows whose logits are wanted.
        Returns an object with `logits` [1, n, vocabulary]. `more` goes to the text model.
        """
        if self._features:
            inputs_embeds, *deep = inputs_embeds.split(self._width, -1)
            more["visual_pos_masks"] = torch.ones(
                inputs_embeds.shape[:2], dtype=torch.bool, device=inputs_embeds.device
            )
            more["deepstack_visual_embeds"] = [rows[0] for rows in deep]
        hidden = self.text(inputs_embeds=inputs_embeds, **more).last_hidden_state
        if self._taps_last:
            self.tapped = hidden[0]
        return SimpleNamespace(logits=self.head(hidden[:, logits_to_keep]))


class _PaddedEmbedding(nn.Module):
    """A table of embeddings whose rows end in zeros where features of pictures would be."""

    def __init__(self, table: Any, padding: int) -> None:
        super().__init__()
        self._table, self._padding = table, padding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return float [n, width + padding] of token ids, int [n]."""
        return nn.functional.pad(self._table(ids), (0, self._padding))
