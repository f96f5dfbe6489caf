"""Finds out which channels of a recording to transcribe by themselves, if each person has a channel.

Silent channels are left out, and so are copies: channels with the sound of an earlier channel, at any level, inverted,
or delayed as in a microphone array. `ChannelPicker` removes crosstalk, so that no word is heard on two channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.audio import Pcm

# Levels are measured in blocks of this length.
BLOCK_S = 0.05
# The level of a channel's speech is that of its tenth loudest block, so that clicks do not count.
LOUD_BLOCKS = 10
# A channel is silent if its speech is softer than -65 dB, or 50 dB softer than that of the loudest channel.
MIN_POWER, MIN_CHANNEL = 10**-6.5, 1e-5
# Two channels have the same sound if the levels of their blocks, in dB, correlate by at least this.
SAME_LEVELS = 0.9
# A block has speech on a channel if its level is at most 25 dB below that of the channel's speech.
MIN_SPEECH = 10**-2.5
# Channels belong to different persons if, in half of the blocks with speech, the loudest one is at least 12 dB louder
# than the second, relative to the levels of their speech.
APART = 10**1.2
# After another channel's speech, a channel stays silent for this number of blocks, unless speech begins on it. It is
# faded in within FADE_S then.
HOLD_BLOCKS, FADE_S = 6, 0.005
# Blocks that are kept of a recording: 28 hours. The rest of a longer one is not measured.
MAX_BLOCKS = 1 << 21


@dataclass(frozen=True, slots=True)
class ChannelFacts:
    """What is known about the channels of a recording.

    - `loud`: for each channel, the power of its speech. 0 for a channel without any sound.
    - `same_as`: for each channel, the earlier channel with the same sound. None for a sound of its own.
    - `apart`: whether the channels with sounds of their own belong to different persons.
    """

    loud: tuple[float, ...]
    same_as: tuple[int | None, ...]
    apart: bool

    @property
    def silent(self) -> tuple[bool, ...]:
        """For each channel, whether it has no speech that could be heard."""
        least = max(MIN_POWER, MIN_CHANNEL * max(self.loud))
        return tuple(power < least for power in self.loud)

    @property
    def own(self) -> tuple[int, ...]:
        """The channels with sounds of their own. The first channel if all of them are silent."""
        silent = self.silent
        return tuple(c for c, same in enumerate(self.same_as) if same is None and not silent[c]) or (0,)


class ChannelSurvey:
    """Measures the channels of one recording, in pieces of any length. Their number and rate may change."""

    def __init__(self) -> None:
        self._rest, self._rate_hz = np.zeros((0, 0), np.float32), 0
        self._levels: list[NDArray[np.float32]] = []

    def feed(self, channels: Pcm, rate_hz: int) -> None:
        """Add a piece, float32 [channels, num_samples]."""
        if len(channels) != len(self._rest) or rate_hz != self._rate_hz:
            self._rest, self._rate_hz = channels[:, :0], rate_hz
        held = np.concatenate((self._rest, channels), axis=1)
        size = max(1, round(BLOCK_S * rate_hz))
        count = held.shape[1] // size
        self._rest = held[:, count * size :]
        if count == 0 or len(self._levels) >= MAX_BLOCKS:
            return
        blocks = held[:, : count * size].reshape(len(held), count, size)
        self._levels += list(blocks.var(axis=2).T)

    def facts(self) -> ChannelFacts:
        """Return what was found. A recording without a whole block counts as one silent channel."""
        if not self._levels:
            return ChannelFacts((0.0,), (None,), apart=False)
        num_channels = max(len(levels) for levels in self._levels)
        powers = np.stack([np.pad(levels, (0, num_channels - len(levels))) for levels in self._levels])
        loud = np.sort(powers, axis=0)[-min(LOUD_BLOCKS, len(powers))]
        found = ChannelFacts(tuple(map(float, loud)), (None,) * num_channels, apart=False)
        own = [channel for channel in range(num_channels) if not found.silent[channel]]
        same_as = list[int | None](found.same_as)
        for channel in own:
            earlier = (other for other in own if other < channel and same_as[other] is None)
            same_as[channel] = next(
                (o for o in earlier if _are_same(powers[:, [o, channel]] / loud[[o, channel]])), None
            )
        own = [channel for channel in own if same_as[channel] is None]
        return ChannelFacts(found.loud, tuple(same_as), _are_apart(powers[:, own] / np.maximum(loud[own], 1e-12)))


def _are_same(powers: NDArray[np.float32]) -> bool:
    """Return whether two channels have the same sound. `powers`: [num_blocks, 2], relative to the channels' speech."""
    levels = 10 * np.log10(np.maximum(powers, MIN_SPEECH))
    if levels.std(axis=0).min() == 0:
        # A constant level is that of a tone.
        return bool(np.allclose(levels[:, 0], levels[:, 1], atol=1.0))
    return bool(np.corrcoef(levels.T)[0, 1] >= SAME_LEVELS)


def _are_apart(powers: NDArray[np.float32]) -> bool:
    """Return whether channels belong to different persons. `powers` are relative to the channels' speech."""
    spoken = powers[powers.max(axis=1, initial=0.0) >= MIN_SPEECH]
    if powers.shape[1] < 2 or not len(spoken):
        return False
    second, first = np.sort(spoken, axis=1)[:, -2:].T
    return bool(np.median(first / np.maximum(second, 1e-12)) >= APART)


class ChannelPicker:
    """Takes one channel out of a stream of several, without the crosstalk of the others, in pieces of any length.

    While another channel has speech and this one has none, this channel is silent.
    """

    def __init__(self, rate_hz: int, channel: int, loud: tuple[float, ...]) -> None:
        self._rate_hz, self._channel = rate_hz, channel
        self._loud = np.maximum(np.array(loud, np.float64), MIN_POWER)
        self._gain, self._held = 1.0, 0

    def feed(self, channels: Pcm) -> Pcm:
        """Return float32 [num_samples] of `channels`, float32 [channels, num_samples]. Silence if it has no such
        channel.
        """
        if self._channel >= len(channels):
            return np.zeros(channels.shape[1], np.float32)
        num_blocks = max(1, round(channels.shape[1] / (BLOCK_S * self._rate_hz)))
        return np.concatenate([self._pick(block) for block in np.array_split(channels, num_blocks, axis=1)])

    def _pick(self, block: Pcm) -> Pcm:
        count = min(len(block), len(self._loud))
        spoken = block[:count].var(axis=1) >= MIN_SPEECH * self._loud[:count]
        if spoken.any():
            self._held = 0 if spoken[self._channel] else HOLD_BLOCKS
        else:
            self._held = max(0, self._held - 1)
        own: Pcm = block[self._channel]
        gain = 0.0 if self._held else 1.0
        if gain > self._gain:
            steps = np.arange(len(own), dtype=np.float32) / max(1.0, FADE_S * self._rate_hz)
            own = own * np.minimum(steps, 1)
        elif gain < self._gain:
            own = own * np.linspace(1, 0, len(own), dtype=np.float32)
        elif not gain:
            own = np.zeros_like(own)
        self._gain = gain
        return own
