"""Audio to embeddings: the Whisper encoder of MiniCPM-o, its projection and its pooling.

The encoder computes positions of any number of streams. `audio_batch.py` has the streams and their keys and values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from antiphon.adapters.minicpmo.log_mel import HOP_SAMPLES, MARGIN_FRAMES, MAX_SAMPLES, LogMel
from antiphon.audio import Pcm
from antiphon.engine.local.attention import Scoring, StepAttention

# A row sees all rows of its unit, also later ones.
WHOLE_UNITS = Scoring(whole=True)


class AudioEncoder(nn.Module):
    """The encoder, its projection to the decoder's width, and the pooling: 10 embeddings a second.

    Parameters have their names in the checkpoint. The methods run in the model's thread, under `inference_mode`, on the
    device and in the dtype of the parameters. `filters`: the mel filter bank, float32 [80, 201].
    """

    def __init__(self, config: WhisperConfig, width: int, pool: int, chunk_s: float) -> None:
        """`width`: the decoder's width. `pool`: positions per embedding.

        `chunk_s`: length of an attention chunk in a clip.
        """
        super().__init__()
        self.apm: Any = WhisperEncoder(config)
        self.audio_projection_layer: Any = nn.ModuleDict(
            {"linear1": nn.Linear(config.d_model, width), "linear2": nn.Linear(width, width)}
        )
        self._pool = nn.AvgPool1d(pool, stride=pool)
        self._chunk_positions = int(chunk_s * 50)
        extractor: Any = WhisperFeatureExtractor
        filters = extractor(feature_size=config.num_mel_bins).mel_filters
        self.filters = torch.from_numpy(np.ascontiguousarray(filters.T)).float()

    @torch.inference_mode()
    def encode_clip(self, pcm: Pcm) -> torch.Tensor:
        """Return the embeddings, [n, width], of separate audio, float32 [num_samples]. Ignores audio after 30 s.

        A position attends to its own chunk and earlier ones, as the released code does for reference voices.
        """
        padded = np.zeros(MAX_SAMPLES, np.float32)
        padded[: len(pcm)] = pcm[:MAX_SAMPLES]
        num_frames = -(-min(len(pcm), MAX_SAMPLES) // HOP_SAMPLES)
        frames = LogMel(self.filters, self.apm.conv1.weight.device).clip(padded)[None, :, :num_frames]
        x = self._convolved(frames, None)
        places = torch.arange(x.shape[1], device=x.device)
        chunk = places // self._chunk_positions
        return self._embedded(x, places[None], _ClipAttention(chunk[None, :] <= chunk[:, None]))[0]

    def units(
        self, frames: torch.Tensor, is_first: torch.Tensor, places: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Return the embeddings of a unit of each of n streams, [n, 10, width].

        Args:
            frames: Each unit's frames with their margins, float [n, 80, 104].
            is_first: Whether the stream has no margin before the unit, bool [n]. The convolutions then see zeros there.
            places: The numbers of the positions in their streams, int64 [n, 50].
            attention: Stores the keys and values of the positions, and decides which others they see. It gets the
                positions of the n streams one after another.
        """
        start = torch.arange(frames.shape[2], device=frames.device) < MARGIN_FRAMES
        x = self._convolved(frames, is_first[:, None, None] & start)
        return self._embedded(x[:, MARGIN_FRAMES // 2 : -(MARGIN_FRAMES // 2)], places, attention)

    def _convolved(self, frames: torch.Tensor, missing: torch.Tensor | None) -> torch.Tensor:
        """[n, 80, frames] to [n, positions, width]. `missing`, bool [n, 1, frames]: frames before the audio."""
        x = gelu(self.apm.conv1(frames.to(self.apm.conv1.weight.dtype)))
        if missing is not None:
            x = x.masked_fill(missing, 0.0)
        return gelu(self.apm.conv2(x)).transpose(1, 2)

    def _embedded(self, x: torch.Tensor, places: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        """Encode, project and pool positions [n, count, width of the encoder]: to [n, count / pool, width]."""
        x = x + self.apm.embed_positions.weight[places]
        for i, layer in enumerate(self.apm.layers):
            own = layer.self_attn
            before = layer.self_attn_layer_norm(x)
            query, keys, values = (
                p(before).view(-1, own.num_heads, own.head_dim) for p in (own.q_proj, own.k_proj, own.v_proj)
            )
            x = x + own.out_proj(attention.attend(i, query, keys, values, WHOLE_UNITS).reshape(x.shape))
            x = x + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(x))))
        project = self.audio_projection_layer
        x = project["linear2"](torch.relu(project["linear1"](self.apm.layer_norm(x))))
        pooled: torch.Tensor = self._pool(x.transpose(1, 2)).transpose(1, 2)
        return pooled


class _ClipAttention:
    """The attention of a clip: each position sees those that `mask`, bool [positions, positions], allows."""

    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        q, k, v = (each.transpose(0, 1)[None] for each in (query, keys, values))
        return scaled_dot_product_attention(q, k, v, attn_mask=self._mask)[0].transpose(0, 1)
