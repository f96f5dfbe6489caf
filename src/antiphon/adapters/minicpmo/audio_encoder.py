"""Audio to embeddings, second by second: the Whisper encoder of MiniCPM-o, with a KV cache.

The state of a stream is its AudioEncoderState. All streams share the encoder's weights.
"""

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

# The hop and the window length of the mel frames.
HOP_SAMPLES, WINDOW_SAMPLES = 160, 400
# The length of one unit of audio.
UNIT_SAMPLES = SAMPLE_RATE_HZ
# The silence that a stream begins with (35 ms). It delays the frames, so that the audio of the MARGIN_FRAMES after a
# unit has already arrived.
LEAD_SAMPLES = int(0.035 * SAMPLE_RATE_HZ)
# Frames on either side of a unit that the convolutions see. The encoder has one position for two frames.
MARGIN_FRAMES = 2
# If a stream holds at least MIN_SCALED_SAMPLES samples, its log-mel spectrogram is scaled by the loudest held frame.
# When it holds MAX_SAMPLES, the oldest FORGET_SAMPLES are dropped.
MIN_SCALED_SAMPLES = 5 * SAMPLE_RATE_HZ
MAX_SAMPLES, FORGET_SAMPLES = 30 * SAMPLE_RATE_HZ, 10 * SAMPLE_RATE_HZ
# Dynamic range in decades of power below the loudest frame. Softer values are raised to its lower end.
RANGE_DECADES = 8.0

# Keys and values of each layer: [1, heads, positions, width of a head].
KeysValues = list[tuple[torch.Tensor, torch.Tensor]]


class LogMel:
    """Whisper's log-mel spectrogram of one stream: 100 new frames a second, plus MARGIN_FRAMES on either side."""

    def __init__(self, filters: torch.Tensor) -> None:
        """`filters`: float32 [80, 201], the mel filter bank."""
        self._filters = filters
        self._window = torch.hann_window(WINDOW_SAMPLES)
        self._pending = np.zeros(LEAD_SAMPLES, np.float32)
        self._heard = np.zeros(0, np.float32)
        # The number of frames returned so far, and the index of the first frame that `_heard` still holds.
        self._num_returned = self._first_held = 0

    def feed(self, pcm: Pcm) -> torch.Tensor:
        """Take the next unit, float32 [16000], and return its frames.

        The frames are float32 [80, 102] for the first unit and [80, 104] for later ones, including two frames of each
        adjacent unit. They lag 35 ms behind the audio. Up to 30 s of audio are held and transformed again in each call,
        because the loudest frame scales all others.
        """
        self._pending = np.concatenate([self._pending, pcm])
        first_unit = not self._num_returned
        whole = (UNIT_SAMPLES + LEAD_SAMPLES) // HOP_SAMPLES * HOP_SAMPLES if first_unit else UNIT_SAMPLES
        self._heard = np.concatenate([self._heard, self._pending[:whole]])
        self._pending = self._pending[whole:]
        if len(self._heard) >= MAX_SAMPLES:
            self._heard = self._heard[FORGET_SAMPLES:]
            self._first_held += FORGET_SAMPLES // HOP_SAMPLES
        frames = self.frames(self._heard, scaled=len(self._heard) >= MIN_SCALED_SAMPLES)
        first, self._num_returned = self._num_returned, self._num_returned + UNIT_SAMPLES // HOP_SAMPLES
        start = max(0, first - MARGIN_FRAMES - self._first_held)
        return frames[:, start : self._num_returned + MARGIN_FRAMES - self._first_held]

    def frames(self, pcm: Pcm, *, scaled: bool = True) -> torch.Tensor:
        """Return the frames of separate audio: float32 [80, num_samples / 160]. Does not use the stream's state.

        `scaled`: raise values of more than 80 dB below the loudest frame to that level, as Whisper does.
        """
        spectrum = torch.stft(
            torch.from_numpy(pcm), WINDOW_SAMPLES, HOP_SAMPLES, window=self._window, return_complex=True
        )
        power = spectrum[:, :-1].abs() ** 2
        log = (self._filters @ power).clamp(min=1e-10).log10()
        if scaled:
            log = log.maximum(log.max() - RANGE_DECADES)
        return (log + 4.0) / 4.0


@dataclass(slots=True)
class AudioEncoderState:
    """The state of one stream: the recent samples for the log-mel spectrogram, and the encoder's keys and values.

    `kv` grows by 50 positions a second. It is cleared when the encoder runs out of positions.
    """

    mel: LogMel
    kv: KeysValues = field(default_factory=list)

    @property
    def num_positions(self) -> int:
        """The number of positions (20 ms each) in `kv`, which is also the first position of the next unit."""
        return self.kv[0][0].shape[2] if self.kv else 0


class AudioEncoder(nn.Module):
    """The encoder, its projection to the decoder's width, and the pooling: 10 embeddings a second.

    Parameters have their names in the checkpoint. The methods run in the model's thread, under `inference_mode`, on the
    device and in the dtype of the parameters.
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
        self._pool_step = pool
        self._chunk_positions = int(chunk_s * 50)
        extractor: Any = WhisperFeatureExtractor
        filters = extractor(feature_size=config.num_mel_bins).mel_filters
        self._filters = torch.from_numpy(np.ascontiguousarray(filters.T)).float()

    def open(self) -> AudioEncoderState:
        """Return the state of a new stream, which begins with 35 ms of silence. It need not be closed."""
        return AudioEncoderState(LogMel(self._filters))

    @torch.inference_mode()
    def feed(self, state: AudioEncoderState, pcm: Pcm) -> torch.Tensor:
        """Encode a stream's next second, float32 [16000], into its embeddings, [10, width], and advance the state.

        Each position attends to all earlier ones in the state. When the encoder runs out of positions, the state is
        cleared and positions start from zero again.
        """
        frames = state.mel.feed(pcm)
        first = not state.num_positions and frames.shape[1] < UNIT_SAMPLES // HOP_SAMPLES + 2 * MARGIN_FRAMES
        if state.num_positions + (frames.shape[1] + 1) // 2 >= self.apm.embed_positions.num_embeddings:
            state.kv = []
        inner = self._convolved(frames)[0 if first else MARGIN_FRAMES // 2 : -(MARGIN_FRAMES // 2)]
        states, state.kv = self._encoded(inner, state.kv, None)
        return self._embedded(states, frames.shape[1])

    @torch.inference_mode()
    def encode_clip(self, pcm: Pcm) -> torch.Tensor:
        """Return the embeddings, [n, width], of separate audio, float32 [num_samples]. Ignores audio after 30 s.

        A position attends to its own chunk and earlier ones, as the released code does for reference voices.
        """
        padded = np.zeros(MAX_SAMPLES, np.float32)
        padded[: len(pcm)] = pcm[:MAX_SAMPLES]
        num_frames = -(-min(len(pcm), MAX_SAMPLES) // HOP_SAMPLES)
        frames = LogMel(self._filters).frames(padded)[:, :num_frames]
        inner = self._convolved(frames)
        chunk = torch.arange(len(inner), device=inner.device) // self._chunk_positions
        mask = chunk[None, :] <= chunk[:, None]
        return self._embedded(self._encoded(inner, [], mask)[0], num_frames)

    def _convolved(self, frames: torch.Tensor) -> torch.Tensor:
        """Apply the convolutions: [80, frames] to [positions, width]."""
        like = self.apm.conv1.weight
        x = gelu(self.apm.conv1(frames[None].to(like.device, like.dtype)))
        return gelu(self.apm.conv2(x))[0].T

    def _encoded(self, x: torch.Tensor, past: KeysValues, mask: torch.Tensor | None) -> tuple[torch.Tensor, KeysValues]:
        """Encode positions [n, width] that follow `past`.

        Each attends to all old and new ones, or to those that `mask` allows.
        """
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
