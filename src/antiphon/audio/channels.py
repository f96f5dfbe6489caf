"""Mixes the channels of a recording to mono, without cancellation and without loss of level."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from antiphon.audio import Pcm

if TYPE_CHECKING:
    from av import AudioFrame

# New gains are chosen for each block, and fade in over it.
BLOCK_S = 0.05
# Time constant of the measured powers. If it were as long as a syllable, the gains would adapt too slowly for the first
# word on a channel.
SMOOTHING_S = 0.1
# The edges of the bands of speech. The outer bands, which contain hum and the bass of the LFE channel, are weighted 30
# dB lower.
BAND_EDGES_HZ = (0, 200, 600, 1200, 2400, 4000, float("inf"))
WEIGHTS = (1e-3, 1.0, 1.0, 1.0, 1.0, 1e-3)
# Two channels cancel if the power of their sum is below this share of their summed powers, in any band.
MIN_SHARE = 0.5
# Channels more than 50 dB below the loudest one are not mixed. Bands more than 30 dB below the others are ignored.
MIN_CHANNEL, MIN_BAND = 1e-5, 1e-3
# Limit of mixed channels; the loudest are used.
MAX_MIXED = 8
# Another channel takes the lead if its power is this multiple of the leader's power: 6 dB.
LEAD = 4.0


class ChannelMixer:
    """Mixes one stream of several channels to mono, in pieces of any length, without delay.

    The loudest channel leads. Another channel is added if it cancels in no band of speech, with its sign inverted if
    necessary. A channel that cancels with either sign is left out. The mix has the power of the loudest channel. If all
    channels are equal, or only one has sound, the mix equals that channel.
    """

    def __init__(self, rate_hz: int, num_channels: int) -> None:
        self._rate_hz = rate_hz
        # The smoothed products of each pair of channels: [bands, channels, channels].
        self._powers = np.zeros((len(WEIGHTS), num_channels, num_channels))
        self._signs = np.zeros(num_channels)
        self._gains = np.zeros(num_channels)
        self._lead = -1

    def feed(self, channels: Pcm) -> Pcm:
        """Return the mix, float32 [num_samples], of `channels`, float32 [channels, num_samples]."""
        if (channels[1:] == channels[0]).all():
            first: Pcm = channels[0]
            return first
        num_blocks = max(1, round(channels.shape[1] / (BLOCK_S * self._rate_hz)))
        return np.concatenate([self._mix(block) for block in np.array_split(channels, num_blocks, axis=1)])

    def _mix(self, block: Pcm) -> Pcm:
        self._measure(block)
        before = self._gains if self._gains.any() else None
        self._gains = self._choose()
        gains = self._gains[:, None]
        if before is not None:
            fade = np.linspace(0.0, 1.0, block.shape[1], dtype=np.float32)
            gains = before[:, None] * (1 - fade) + gains * fade
        mixed: Pcm = (gains * block).sum(axis=0, dtype=np.float32)
        return mixed

    def _measure(self, block: Pcm) -> None:
        num_samples = block.shape[1]
        spectrum = np.fft.rfft(block.astype(np.float64))
        edges = np.ceil(np.minimum(BAND_EDGES_HZ, self._rate_hz) * num_samples / self._rate_hz).astype(int)
        old = np.exp(-num_samples / self._rate_hz / SMOOTHING_S)
        self._powers *= old
        for band, (low, high) in enumerate(pairwise(edges)):
            part = spectrum[:, low:high]
            self._powers[band] += (1 - old) * WEIGHTS[band] / num_samples * (part @ part.conj().T).real

    def _choose(self) -> NDArray[np.float64]:
        """Return the gain of each channel for the measured powers."""
        levels = np.diagonal(self._powers, axis1=1, axis2=2).sum(axis=0)
        loudest = int(levels.argmax())
        if levels[loudest] <= 0:
            # Silence: keep the gains, or use the first channel.
            return self._gains if self._gains.any() else np.eye(len(levels))[0]
        if self._lead < 0 or levels[loudest] > LEAD * levels[self._lead]:
            self._lead = loudest
        signs = np.zeros(len(levels))
        signs[self._lead] = self._signs[self._lead] or 1.0
        for channel in np.argsort(-levels)[:MAX_MIXED]:
            if channel != self._lead and levels[channel] > MIN_CHANNEL * levels[loudest]:
                self._add(int(channel), signs)
        self._signs = signs
        mixed = float((self._powers @ signs @ signs).sum())
        gains: NDArray[np.float64] = signs * np.sqrt(levels[loudest] / mixed)
        return gains

    def _add(self, channel: int, signs: NDArray[np.float64]) -> None:
        """Set the sign of a channel, unless it cancels with the channels that already have one."""
        apart = self._powers @ signs @ signs + self._powers[:, channel, channel]
        heard = apart > MIN_BAND * apart.sum()
        usual = self._signs[channel] or 1.0
        for sign in (usual, -usual):
            signs[channel] = sign
            mixed = self._powers @ signs @ signs
            if (mixed[heard] >= MIN_SHARE * apart[heard]).all():
                return
        signs[channel] = 0.0


def channels_of(frame: AudioFrame) -> Pcm:
    """Return the samples of a frame, float32 [channels, num_samples] in [-1, 1]."""
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, frame.layout.nb_channels).T
    if samples.dtype.kind == "f":
        return np.nan_to_num(samples.astype(np.float32, "C"), posinf=0.0, neginf=0.0)
    if samples.dtype == np.uint8:
        return ((samples.astype(np.float32, "C") - 128) / 128).astype(np.float32)
    return (samples.astype(np.float64, "C") / 2.0 ** (8 * samples.itemsize - 1)).astype(np.float32)
