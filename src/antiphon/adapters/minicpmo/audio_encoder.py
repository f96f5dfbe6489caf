"""Sound to embeddings, second by second: the Whisper encoder of MiniCPM-o with its keys and values kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

HOP, WINDOW = 160, 400
# One unit of sound, and what is heard of the next before a unit is complete (35 ms, whole frames of it).
UNIT_SAMPLES = SAMPLE_RATE_HZ
LEAD_SAMPLES = int(0.035 * SAMPLE_RATE_HZ)
# Frames either side of a unit that its convolutions see; of the encoder's positions, half as many.
BESIDE = 2
# Log-mel is scaled by the loudest frame of the last seconds, once there are enough of them; older sound is forgotten.
SCALED_FROM = 5 * SAMPLE_RATE_HZ
TOO_LONG, FORGOTTEN = 30 * SAMPLE_RATE_HZ, 10 * SAMPLE_RATE_HZ
RANGE = 8.0


class LogMel:
    """Log-mel as Whisper's, of one stream: 100 new frames a second with two of each neighbour's."""

    def __init__(self, filters: torch.Tensor) -> None:
        self._filters = filters
        self._window = torch.hann_window(WINDOW)
        self._sound = np.zeros(LEAD_SAMPLES, np.float32)
        self._heard = np.zeros(0, np.float32)
        # Frames given, and the first that is still in what was heard.
        self._given = self._base = 0

    def take(self, pcm: Pcm) -> torch.Tensor:
        """One unit: float32 [16000] to frames [80, 102], or [80, 104] after the first."""
        self._sound = np.concatenate([self._sound, pcm])
        whole = (UNIT_SAMPLES + LEAD_SAMPLES) // HOP * HOP if not self._given else UNIT_SAMPLES
        self._heard = np.concatenate([self._heard, self._sound[:whole]])
        self._sound = self._sound[whole:]
        if len(self._heard) >= TOO_LONG:
            self._heard = self._heard[FORGOTTEN:]
            self._base += FORGOTTEN // HOP
        frames = self.whole(self._heard, scaled=len(self._heard) >= SCALED_FROM)
        first, self._given = self._given, self._given + UNIT_SAMPLES // HOP
        return frames[:, max(0, first - BESIDE - self._base) : self._given + BESIDE - self._base]

    def whole(self, pcm: Pcm, *, scaled: bool = True) -> torch.Tensor:
        """Frames [80, num_samples / 160]. `scaled`: nothing is further below the loudest than 80 dB."""
        spectrum = torch.stft(torch.from_numpy(pcm), WINDOW, HOP, window=self._window, return_complex=True)
        power = spectrum[:, :-1].abs() ** 2
        log = (self._filters @ power).clamp(min=1e-10).log10()
        if scaled:
            log = log.maximum(log.max() - RANGE)
        return (log + 4.0) / 4.0


@dataclass(slots=True)
class AudioEncoderState:
    """One stream's state: its sound, and the encoder's keys and values [1, heads, positions, width] of each layer."""

    mel: LogMel
    past: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Positions kept."""
        return self.past[0][0].shape[2] if self.past else 0


class AudioEncoder(nn.Module):
    """The encoder, its projection to the decoder's width, and the pooling: 10 embeddings a second. Parameter names are the checkpoint's."""

    def __init__(self, config: WhisperConfig, width: int, pool: int, chunk_s: float) -> None:
        super().__init__()
        self.apm: Any = WhisperEncoder(config)
        self.audio_projection_layer: Any = nn.ModuleDict(
            {"linear1": nn.Linear(config.d_model, width), "linear2": nn.Linear(width, width)}
        )
        self._pool = nn.AvgPool1d(pool, stride=pool)
        self._pool_step = pool
        self._chunk = int(chunk_s * 50)
        extractor: Any = WhisperFeatureExtractor
        filters = extractor(feature_size=config.num_mel_bins).mel_filters
        self._filters = torch.from_numpy(np.ascontiguousarray(filters.T)).float()

    def open(self) -> AudioEncoderState:
        """A new stream."""
        return AudioEncoderState(LogMel(self._filters))

    @torch.inference_mode()
    def take(self, heard: AudioEncoderState, pcm: Pcm) -> torch.Tensor:
        """The embeddings [10, width] of the stream's next second, float32 [16000]."""
        frames = heard.mel.take(pcm)
        first = not heard.length and frames.shape[1] < UNIT_SAMPLES // HOP + 2 * BESIDE
        if heard.length + (frames.shape[1] + 1) // 2 >= self.apm.embed_positions.num_embeddings:
            # It has no more positions: it begins anew.
            heard.past = []
        seen = self._convolved(frames)[0 if first else BESIDE // 2 : -(BESIDE // 2)]
        states, heard.past = self._encoded(seen, heard.past, None)
        return self._embedded(states, frames.shape[1])

    @torch.inference_mode()
    def whole(self, pcm: Pcm) -> torch.Tensor:
        """The embeddings of a sample of at most 30 s, by itself. float32 [num_samples] to [n, width]."""
        padded = np.zeros(TOO_LONG, np.float32)
        padded[: len(pcm)] = pcm[:TOO_LONG]
        num_frames = -(-min(len(pcm), TOO_LONG) // HOP)
        frames = LogMel(self._filters).whole(padded)[:, :num_frames]
        states = self._convolved(frames)
        at = torch.arange(len(states), device=states.device) // self._chunk
        mask = at[None, :] <= at[:, None]
        return self._embedded(self._encoded(states, [], mask)[0], num_frames)

    def _convolved(self, frames: torch.Tensor) -> torch.Tensor:
        """[80, frames] to [positions, width]."""
        like = self.apm.conv1.weight
        x = gelu(self.apm.conv1(frames[None].to(like.device, like.dtype)))
        return gelu(self.apm.conv2(x))[0].T

    def _encoded(
        self, x: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """[positions, width] after `past`: every position sees all, or what `mask` says."""
        start = past[0][0].shape[2] if past else 0
        x = (x + self.apm.embed_positions.weight[start : start + len(x)])[None]
        kept = []
        for i, layer in enumerate(self.apm.layers):
            own = layer.self_attn
            before = layer.self_attn_layer_norm(x)
            query, keys, values = (
                p(before).unflatten(-1, (own.num_heads, -1)).transpose(1, 2)
                for p in (own.q_proj, own.k_proj, own.v_proj)
            )
            if past:
                keys, values = torch.cat([past[i][0], keys], 2), torch.cat([past[i][1], values], 2)
            kept.append((keys, values))
            found = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            x = x + own.out_proj(found.transpose(1, 2).flatten(2))
            x = x + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(x))))
        states: torch.Tensor = self.apm.layer_norm(x)[0]
        return states, kept

    def _embedded(self, states: torch.Tensor, num_frames: int) -> torch.Tensor:
        project = self.audio_projection_layer
        x = project["linear2"](torch.relu(project["linear1"](states)))
        count = ((num_frames - 1) // 2 + 1 - self._pool_step) // self._pool_step + 1
        pooled: torch.Tensor = self._pool(x.T[None])[0].T[:count]
        return pooled
