"""The text model of a multimodal model, in the form that the engine's runner requires.

The runner expects a causal language model of `transformers`. This module builds one from a text model and its head. It
adds two things that multimodal models need: features of pictures in the first layers, and a layer whose output is kept.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from msgspec import UNSET, UnsetType
from torch import nn


class QwenTextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The text model of a Qwen3 model in a released config.json. Absent fields have the defaults of `transformers`."""

    # Number of tokens in the embedding table.
    vocab_size: int | UnsetType = UNSET
    # The width of the rows between layers.
    hidden_size: int | UnsetType = UNSET
    # The width inside the feed-forward part.
    intermediate_size: int | UnsetType = UNSET
    # The number of decoder layers.
    num_hidden_layers: int | UnsetType = UNSET
    # The number of query heads of a layer.
    num_attention_heads: int | UnsetType = UNSET
    # The number of key heads of a layer.
    num_key_value_heads: int | UnsetType = UNSET
    # The width of an attention head.
    head_dim: int | UnsetType = UNSET
    # The name of the feed-forward part's activation.
    hidden_act: str | UnsetType = UNSET
    # The number of positions that the model supports.
    max_position_embeddings: int | UnsetType = UNSET
    # The epsilon of the RMS norms.
    rms_norm_eps: float | UnsetType = UNSET
    # Whether the attention's projections have biases.
    attention_bias: bool | UnsetType = UNSET
    # The base of the rotary positions.
    rope_theta: float | UnsetType = UNSET

    # Returns keyword arguments of a configuration class of `transformers`, whose values have any type.
    def keywords(self, default_theta: float, *, tied: bool) -> dict[str, Any]:
        """Return the fields as keyword arguments of a configuration class of `transformers`.

        `default_theta`: used if config.json lacks `rope_theta`. `tied`: the output head is the embedding table.
        """
        named = {name: getattr(self, name) for name in QwenTextConfig.__struct_fields__ if name != "rope_theta"}
        theta = default_theta if self.rope_theta is UNSET else self.rope_theta
        # The three coordinates of its rotary positions are always equal, so one is enough.
        return {name: value for name, value in named.items() if value is not UNSET} | {
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "tie_word_embeddings": tied,
        }


# How `transformers` computes mixtures of experts (`experts_implementation`): one product for all experts of a layer.
# The host does not read from the device which experts have rows, so a pass can be a CUDA graph.
EXPERTS = "grouped_mm"
# The value of `tap` for the last hidden states.
LAST = -1


class TextDecoder(nn.Module):
    """A text model and its head, with the methods of a causal language model that the engine's Runner calls.

    `features`: the number of layers, from the first on, that get features of pictures (DeepStack, arXiv:2406.04334). An
    input row then is the embedding followed by one row of features for each of these layers. `tap`: the number of
    layers after which rows are kept in `tapped`, for their sinks. 0: no rows are kept. LAST: rows are kept after the
    last layer and its norm, like `Sampling.hidden`. `has_tap`: whether rows are kept. `tapped`: float [rows, width] of
    the last pass.
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
        """The length of an input row: the decoder's width, plus one more width for each layer with features."""
        return self._width * (1 + self._features)

    def _tap(self, _: Any, inputs: Any, output: Any) -> None:
        self.tapped = (output[0] if isinstance(output, tuple) else output)[0]

    def get_input_embeddings(self) -> Any:
        """Return the module that maps token ids, int [n], to input rows, with zeros in place of features."""
        table = self.text.get_input_embeddings()
        return _PaddedEmbedding(table, self._width * self._features) if self._features else table

    def get_output_embeddings(self) -> Any:
        """Return the head, which maps the last hidden states to logits. Its input is what `Sampling.hidden` returns."""
        return self.head

    def set_attn_implementation(self, name: str) -> None:
        """Set the attention implementation of the text model. The encoders keep theirs."""
        self.text.set_attn_implementation(name)

    def forward(self, inputs_embeds: Any, logits_to_keep: Any, **more: Any) -> Any:
        """Compute logits like a causal language model of `transformers`.

        `inputs_embeds`: float [1, rows, input_width]. `logits_to_keep`: int [n], the rows whose logits are wanted.
        `more`: passed to the text model. Returns an object with `logits` [1, n, vocabulary].
        """
        if self._features:
            inputs_embeds, *deep = inputs_embeds.split(self._width, -1)
            # The text model adds the features to `hidden[visual_pos_masks, :]`. The index 0 is the whole batch. A mask
            # would make the host read from the device how many rows it selects.
            more["visual_pos_masks"] = torch.zeros(1, dtype=torch.int64, device=inputs_embeds.device)
            more["deepstack_visual_embeds"] = [rows[0] for rows in deep]
        hidden = self.text(inputs_embeds=inputs_embeds, **more).last_hidden_state
        if self._taps_last:
            self.tapped = hidden[0]
        return SimpleNamespace(logits=self.head(hidden[:, logits_to_keep]))


class _PaddedEmbedding(nn.Module):
    """An embedding table that pads its rows with zeros where rows of pictures have features."""

    def __init__(self, table: Any, padding: int) -> None:
        super().__init__()
        self._table, self._padding = table, padding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return float [n, width + padding] for token ids, int [n]."""
        return nn.functional.pad(self._table(ids), (0, self._padding))
