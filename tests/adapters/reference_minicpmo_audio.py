"""MiniCPM-o's audio stream as the released code computes it, one stream at a time: the reference of the tests.

Each unit transforms all held audio again. Keys and values are one tensor for each layer, which grows by `torch.cat`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import gelu, scaled_dot_product_attention

from antiphon.adapters.minicpmo.audio_encoder import AudioEncoder
from antiphon.adapters.minicpmo.log_mel import (
    FORGET_SAMPLES,
    HOP_SAMPLES,
    LEAD_SAMPLES,
    MARGIN_FRAMES,
    MAX_SAMPLES,
    MIN_SCALED_SAMPLES,
    RANGE_DECADES,
    UNIT_SAMPLES,
    WINDOW_SAMPLES,
)
from antiphon.audio import Pcm


class ReferenceLogMel:
    """Whisper's log-mel spectrogram of one stream: 100 new frames a second, plus MARGIN_FRAMES on either side."""

    def __init__(self, filters: torch.Tensor) -> None:
        """`filters`: float32 [80, 201], the mel filter bank."""
        self._filters = filters
        self._window = torch.hann_window(WINDOW_SAMPLES, dtype=filters.dtype)
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
            torch.from_numpy(pcm).to(self._filters),
            WINDOW_SAMPLES,
            HOP_SAMPLES,
            window=self._window,
            return_complex=True,
        )
        power = spectrum[:, :-1].abs() ** 2
        log = (self._filters @ power).clamp(min=1e-10).log10()
        if scaled:
            log = log.maximum(log.max() - RANGE_DECADES)
        return (log + 4.0) / 4.0


class ReferenceAudioStream:
    """One stream over the weights of `encoder`. `kv`: keys and values of each layer, [1, heads, positions, width]."""

    def __init__(self, encoder: AudioEncoder) -> None:
        self._encoder, self._mel = encoder, ReferenceLogMel(encoder.filters)
        self.kv: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.inference_mode()
    def feed(self, pcm: Pcm) -> torch.Tensor:
        """Encode the next second, float32 [16000], into its embeddings, [10, width]."""
        apm, frames = self._encoder.apm, self._mel.feed(pcm)
        num_positions = self.kv[0][0].shape[2] if self.kv else 0
        first = not num_positions and frames.shape[1] < UNIT_SAMPLES // HOP_SAMPLES + 2 * MARGIN_FRAMES
        if num_positions + (frames.shape[1] + 1) // 2 >= apm.embed_positions.num_embeddings:
            self.kv = []
        x = gelu(apm.conv1(frames[None].to(apm.conv1.weight.dtype)))
        inner = gelu(apm.conv2(x))[0].T[0 if first else MARGIN_FRAMES // 2 : -(MARGIN_FRAMES // 2)]
        project = self._encoder.audio_projection_layer
        embedded = project["linear2"](torch.relu(project["linear1"](self._encoded(inner))))
        return embedded.unflatten(0, (10, 5)).mean(1)

    def _encoded(self, x: torch.Tensor) -> torch.Tensor:
        apm, past = self._encoder.apm, self.kv
        start = past[0][0].shape[2] if past else 0
        x = (x + apm.embed_positions.weight[start : start + len(x)])[None]
        self.kv = []
        for i, layer in enumerate(apm.layers):
            own = layer.self_attn
            before = layer.self_attn_layer_norm(x)
            query, keys, values = (
                p(before).unflatten(-1, (own.num_heads, -1)).transpose(1, 2)
                for p in (own.q_proj, own.k_proj, own.v_proj)
            )
            if past:
                keys, values = torch.cat([past[i][0], keys], 2), torch.cat([past[i][1], values], 2)
            self.kv.append((keys, values))
            found = scaled_dot_product_attention(query, keys, values)
            x = x + own.out_proj(found.transpose(1, 2).flatten(2))
            x = x + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(x))))
        states: torch.Tensor = apm.layer_norm(x)[0]
        return states
