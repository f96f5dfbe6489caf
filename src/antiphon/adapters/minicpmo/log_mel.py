"""Whisper's log-mel spectrogram as MiniCPM-o computes it: of a clip, and of many streams unit by unit.

A stream's frames are those of the audio that the released code holds: up to 30 s. The released code transforms all of
it in each unit. Here a unit transforms only its new frames, and a stream keeps the maximum of each unit.
"""

from __future__ import annotations

import numpy as np
import torch

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

# The hop and the window length of the mel frames.
HOP_SAMPLES, WINDOW_SAMPLES = 160, 400
# The length of one unit of audio, in samples and in frames.
UNIT_SAMPLES = SAMPLE_RATE_HZ
UNIT_FRAMES = UNIT_SAMPLES // HOP_SAMPLES
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

# The samples of a stream that wait for the next unit, because they do not fill a hop of the first unit.
_PENDING_SAMPLES = (LEAD_SAMPLES + UNIT_SAMPLES) % HOP_SAMPLES
_FIRST_SAMPLES = LEAD_SAMPLES + UNIT_SAMPLES - _PENDING_SAMPLES
# The first unit, counted from 0, whose frames are scaled, and the first one that drops audio.
_FIRST_SCALED = -((_FIRST_SAMPLES - MIN_SCALED_SAMPLES) // UNIT_SAMPLES)
_FIRST_DROPPING = -((_FIRST_SAMPLES - MAX_SAMPLES) // UNIT_SAMPLES)
_DROPPED_UNITS = FORGET_SAMPLES // UNIT_SAMPLES
# torch.stft mirrors the audio at its ends. At the start that concerns the frames whose window begins before the audio,
# at the end one frame.
_MIRRORED_START = WINDOW_SAMPLES // 2
_MIRRORED_END = WINDOW_SAMPLES // 2 - HOP_SAMPLES
_START_FRAMES = 2
_START_SAMPLES = (_START_FRAMES - 1) * HOP_SAMPLES + WINDOW_SAMPLES - _MIRRORED_START
# The audio before a unit that its first new frame sees.
_TAIL_SAMPLES = WINDOW_SAMPLES - _MIRRORED_END
# The samples of a stream that its next unit needs.
_KEPT_SAMPLES = _TAIL_SAMPLES + _PENDING_SAMPLES
# In the input of a unit, the audio that begins at a start is followed by the audio of the new frames, on a whole hop.
_NEW_AT = -(-(_START_SAMPLES + _MIRRORED_START) // HOP_SAMPLES) * HOP_SAMPLES
INPUT_SAMPLES = _NEW_AT + _TAIL_SAMPLES + UNIT_SAMPLES + _MIRRORED_END
# Units for which a stream keeps the maxima: those that it holds, and the one before them.
_KEPT_UNITS = _FIRST_DROPPING + 1
# Frames that the next unit returns again.
_KEPT_FRAMES = 2 * MARGIN_FRAMES


def first_sound() -> Pcm:
    """Return the audio that a stream begins with: silence, float32 [560]."""
    return np.zeros(LEAD_SAMPLES, np.float32)


def unit_sound(before: Pcm, pcm: Pcm) -> tuple[Pcm, Pcm]:
    """Return the input of a unit for `LogMel.unit`, float32 [INPUT_SAMPLES], and the audio to keep for the next one.

    `before`: what the unit before kept, or `first_sound`. `pcm`: the unit's audio, float32 [16000].
    """
    heard = np.concatenate([before, pcm])
    end = len(heard) - _PENDING_SAMPLES
    # If the audio before this place is dropped later, the first frames of the rest are computed as if it began here.
    # The first unit does begin here.
    start = end - (_FIRST_SAMPLES - UNIT_SAMPLES) if len(before) != LEAD_SAMPLES else 0
    begun = heard[start : start + _START_SAMPLES]
    new = heard[end - UNIT_SAMPLES - _TAIL_SAMPLES : end]
    sound = np.zeros(INPUT_SAMPLES, np.float32)
    sound[:_MIRRORED_START] = begun[_MIRRORED_START:0:-1]
    sound[_MIRRORED_START : _MIRRORED_START + len(begun)] = begun
    sound[_NEW_AT : _NEW_AT + len(new)] = new
    sound[_NEW_AT + len(new) :] = new[-2 : -2 - _MIRRORED_END : -1]
    return sound, heard[-_KEPT_SAMPLES:]


class LogMel:
    """The transform of audio to log-mel frames, on one device. Has no state: `unit` takes and returns it.

    `memory_size`: the length of a stream's state. A new stream's state is zeros.
    """

    def __init__(self, filters: torch.Tensor, device: torch.device) -> None:
        """`filters`: float [80, 201], the mel filter bank, in the type to compute in."""
        self.filters = filters.to(device)
        self._window = torch.hann_window(WINDOW_SAMPLES, dtype=filters.dtype, device=device)
        self._num_kept = len(filters) * _KEPT_FRAMES
        self.memory_size = self._num_kept + 2 * _KEPT_UNITS

    def clip(self, pcm: Pcm) -> torch.Tensor:
        """Return the frames of separate audio, float32 [num_samples]: float [80, num_samples / 160].

        Values of more than 80 dB below the loudest frame are raised to that level, as Whisper does.
        """
        sound = torch.from_numpy(pcm).to(self.filters)
        log = self._log(torch.nn.functional.pad(sound[None], (_MIRRORED_START,) * 2, "reflect"))[0, :, :-1]
        return (log.maximum(log.max() - RANGE_DECADES) + 4.0) / 4.0

    def unit(self, sound: torch.Tensor, memory: torch.Tensor, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the frames of the next unit of n streams, float [n, 80, 104], and the new states.

        The frames include two of each adjacent unit, and lag 35 ms behind the audio. The first two frames of a stream's
        first unit are 0. A stream's loudest held frame is the floor of all its frames, so the state has the maxima.

        Args:
            sound: The inputs made by `unit_sound`, float [n, INPUT_SAMPLES].
            memory: The states of the streams after their last unit, float [n, memory_size].
            units: The number of units before this one, int64 [n].
        """
        count = len(sound)
        log = self._log(sound)
        begun, new, edge = log[..., :_START_FRAMES], log[..., _NEW_AT // HOP_SAMPLES : -1], log[..., -1]
        kept = memory[:, : self._num_kept].view(count, -1, _KEPT_FRAMES)
        # For each unit the maximum of its frames, and of the frames as if the audio began with them.
        newest = torch.stack((new.amax((1, 2)), begun.amax((1, 2))), 1)[..., None]
        maxima = torch.cat((memory[:, self._num_kept :].view(count, 2, -1)[..., 1:], newest), 2)

        dropped = (units - _FIRST_DROPPING).div(_DROPPED_UNITS, rounding_mode="floor").add(1).clamp(min=0)
        oldest = (dropped * _DROPPED_UNITS)[:, None]
        number = units[:, None] + torch.arange(1 - _KEPT_UNITS, 1, device=units.device)
        held = torch.stack((number >= oldest, number == (oldest - 1).clamp(min=0)), 1)
        loudest = maxima.masked_fill(~held, -torch.inf).amax((1, 2)).maximum(edge.amax(1))
        floor = (loudest - RANGE_DECADES).masked_fill(units < _FIRST_SCALED, -torch.inf)

        is_first = (units == 0)[:, None, None]
        before = torch.where(is_first, torch.nn.functional.pad(begun, (_KEPT_FRAMES - _START_FRAMES, 0)), kept)
        frames = (torch.cat((before, new), 2).maximum(floor[:, None, None]) + 4.0) / 4.0
        missing = torch.arange(frames.shape[2], device=units.device) < MARGIN_FRAMES
        frames = frames.masked_fill(is_first & missing, 0.0)
        return frames, torch.cat((new[..., -_KEPT_FRAMES:].flatten(1), maxima.flatten(1)), 1)

    def _log(self, sound: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of the mel bands, before any floor: [n, samples] to [n, 80, frames]."""
        spectrum = torch.stft(
            sound, WINDOW_SAMPLES, HOP_SAMPLES, window=self._window, center=False, return_complex=True
        )
        return (self.filters @ spectrum.abs() ** 2).clamp(min=1e-10).log10()
