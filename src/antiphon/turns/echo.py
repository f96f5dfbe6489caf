"""What the server just said, as it comes back through the client's microphone: told apart from somebody speaking. Pure; time counts samples.

The sound that was sent lies on the microphone's clock from the moment it was sent; where its echo lies after that, and how loud it is in
each band, is learned from the sound itself: by the correlation of the two level patterns, over delays up to MAX_DELAY_S. A frame
that is no louder than its echo would be is no speech. Nothing is subtracted: somebody who speaks over the echo is heard.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

Levels = npt.NDArray[np.float32]

FRAME_SAMPLES, HOP_SAMPLES = 512, 128
MAX_DELAY_S = 1.2
MAX_DELAY_HOPS = int(MAX_DELAY_S * SAMPLE_RATE_HZ / HOP_SAMPLES)
# Frames that are compared (of 32 ms), and the fewest of them with sound that say anything.
COMPARED_FRAMES, MIN_COMPARED_FRAMES = 24, 10
# Correlation of the levels from which it is an echo: of a room's it is 0.9 and more, of another's speech at the best of all delays
# up to 0.75.
ECHO_CORRELATION = 0.83
# From which it may be one, and is worth waiting to know.
POSSIBLE_ECHO_CORRELATION = 0.6
# So many bands that are louder than the echo by this are somebody else. Decibels.
MARGIN_DB, MIN_LOUDER_BANDS = 6.0, 3
# The reference is silence below this, and an echo that weak is no speech to any detector. Decibels full scale, a band.
FLOOR_DB = -75.0
# A room's echo fades by this each hop, and is gone after TAIL of them; a client's clock may be EARLY by so many.
FADE_DB_PER_HOP, TAIL_HOPS, EARLY_HOPS = 1.0, 36, 9
# Of the last VOTERS frames so many must be somebody else's. The delay is looked for each so many frames.
SPEECH_VOTE_FRAMES, MIN_SPEECH_VOTES, DELAY_SEARCH_FRAMES = 4, 3, 4
# A frame of so little probability is no speech; after so many while the reference sounds, longer than any delay, nothing comes back.
MIN_PROBABILITY, MAX_QUIET_FRAMES = 0.3, 48
# What was sent and is not to be played may sound for so long yet.
CUT_TAIL_S = 0.3
# How much of what is learned of the gain is new. The floor of noise in a band rises by this each frame where nothing is lower, decibels.
GAIN_UPDATE_SHARE, NOISE_RISE_DB = 0.2, 0.1
BAND_EDGES_HZ = np.geomspace(150, 7000, 13)


class EchoGuard:
    """`played` what is sent, `judge` what is heard."""

    def __init__(self) -> None:
        bins = np.fft.rfftfreq(FRAME_SAMPLES, 1 / SAMPLE_RATE_HZ)
        self._bands = [np.flatnonzero((bins >= a) & (bins < b)) for a, b in itertools.pairwise(BAND_EDGES_HZ)]
        self._window = np.hanning(FRAME_SAMPLES).astype(np.float32)
        # The reference: levels by hop, the first at hop `_start` of the microphone's clock.
        self._levels: Levels = np.full((0, len(self._bands)), FLOOR_DB, np.float32)
        self._start = 0
        self._rest: Pcm = np.zeros(0, np.float32)
        self._ends = 0
        # The microphone's last frames: (hop of its first sample, levels).
        self._heard: list[tuple[int, Levels]] = []
        self._now = 0
        self.delay_hops: int | None = None
        self._gain: Levels = np.zeros(len(self._bands), np.float32)
        self._noise: Levels = np.zeros(len(self._bands), np.float32)
        # Frames of sound that were held back because it was not known yet what they are.
        self._undecided = 0
        # Frames in which the reference sounded and nothing was heard: so many, and there is no echo to wait for.
        self._quiet = 0
        self._frames = 0
        # Which of the last frames were somebody else's.
        self._own: list[bool] = []

    def add_reference(self, pcm: Pcm, at: int) -> None:
        """Sound was sent when the microphone had given `at` samples; it sounds behind what was sent before. pcm: float32, 16 kHz."""
        at = max(at, self._ends)
        self._ends = at + len(pcm)
        hop = at // HOP_SAMPLES
        end = self._start + len(self._levels)
        if not len(self._levels) or hop > end + 1:
            self._rest = np.zeros(0, np.float32)
            quiet = np.full((max(0, hop - end), len(self._bands)), FLOOR_DB, np.float32)
            if not len(self._levels):
                self._start = hop
            else:
                self._levels = np.concatenate((self._levels, quiet))
        sound = np.concatenate((self._rest, pcm))
        count = max(0, (len(sound) - FRAME_SAMPLES) // HOP_SAMPLES + 1)
        if count:
            frames = np.lib.stride_tricks.sliding_window_view(sound, FRAME_SAMPLES)[::HOP_SAMPLES][:count]
            self._levels = np.concatenate((self._levels, self._of(frames)))
        self._rest = sound[count * HOP_SAMPLES :]

    def cut_reference(self, at: int) -> None:
        """What was sent and not played by sample `at` never will be: what is sent next sounds at once."""
        keep = max(0, (at + int(CUT_TAIL_S * SAMPLE_RATE_HZ)) // HOP_SAMPLES - self._start)
        self._levels = self._levels[:keep]
        self._rest, self._ends = self._rest[:0], at

    def judge(self, frames: Pcm, probabilities: list[float], at: int) -> list[float]:
        """The probabilities of the microphone's frames, float32 [n, 512], the first at sample `at`; of an echo: 0."""
        self._forget(at)
        out = []
        for k, (frame, probability) in enumerate(zip(frames, probabilities, strict=True)):
            hop = (at + k * FRAME_SAMPLES) // HOP_SAMPLES
            levels = self._of(frame[None])[0]
            self._noise = np.minimum(self._noise + NOISE_RISE_DB, levels)
            self._heard = [*self._heard[1 - COMPARED_FRAMES :], (hop, levels)]
            if not len(self._levels):
                out.append(probability)
                continue
            out.append(0.0 if self._is_echo(hop, probability) else probability)
        return out

    def _is_echo(self, hop: int, probability: float) -> bool:
        sounding = self._reference(np.arange(hop - MAX_DELAY_HOPS, hop + 1)).max() > FLOOR_DB + 10
        if not sounding:
            self._undecided = 0
            return False
        self._frames += 1
        score = 0.0
        if self.delay_hops is None or self._frames % DELAY_SEARCH_FRAMES == 0:
            score, delay = self._best()
            if score >= ECHO_CORRELATION:
                self._learn(delay, fresh=self.delay_hops is None)
                self.delay_hops = delay
        if self.delay_hops is not None:
            self._own = [*self._own[1 - SPEECH_VOTE_FRAMES :], not self._explained(hop, self.delay_hops)]
            return sum(self._own) < MIN_SPEECH_VOTES
        if probability < MIN_PROBABILITY:
            self._quiet += 1
        if probability < MIN_PROBABILITY or self._quiet > MAX_QUIET_FRAMES:
            return False
        # The first sound that ever came back: a third of a second, or two, says what it is.
        self._undecided += 1
        return self._undecided < (
            2 * MIN_COMPARED_FRAMES if score >= POSSIBLE_ECHO_CORRELATION else MIN_COMPARED_FRAMES
        )

    def _best(self) -> tuple[float, int]:
        """How alike the microphone and the reference are, at the delay where they are most."""
        hops = np.array([h for h, _ in self._heard])
        levels = np.stack([v for _, v in self._heard])
        if len(hops) < MIN_COMPARED_FRAMES:
            return 0.0, 0
        past = self._reference(hops[None, :] - np.arange(MAX_DELAY_HOPS)[:, None])
        loud = past.max(axis=2) > FLOOR_DB + 10
        enough = loud.sum(axis=1) >= MIN_COMPARED_FRAMES
        if not enough.any():
            return 0.0, 0
        weight = loud[:, :, None].astype(np.float32)
        count = np.maximum(weight.sum(axis=1, keepdims=True), 1)
        mine = (levels[None] - (levels[None] * weight).sum(axis=1, keepdims=True) / count) * weight
        theirs = (past - (past * weight).sum(axis=1, keepdims=True) / count) * weight
        norm = np.sqrt((mine**2).sum(axis=(1, 2)) * (theirs**2).sum(axis=(1, 2))) + 1e-6
        scores = np.where(enough, (mine * theirs).sum(axis=(1, 2)) / norm, 0.0)
        best = int(scores.argmax())
        return float(scores[best]), best

    def _learn(self, delay: int, *, fresh: bool) -> None:
        """The echo's gain in each band, where both are loud enough to say."""
        past = self._reference(np.array([h for h, _ in self._heard]) - delay)
        levels = np.stack([v for _, v in self._heard])
        for band in range(len(self._bands)):
            both = (past[:, band] > FLOOR_DB + 10) & (levels[:, band] > FLOOR_DB + 3)
            if both.sum() >= 3:
                gain = np.median(levels[both, band] - past[both, band])
                self._gain[band] = (
                    gain if fresh else (1 - GAIN_UPDATE_SHARE) * self._gain[band] + GAIN_UPDATE_SHARE * gain
                )

    def _explained(self, hop: int, delay: int) -> bool:
        """The newest frame is no louder than the echo that is due, a room's tail included."""
        age = np.arange(TAIL_HOPS, -EARLY_HOPS - 1, -1)
        fading = (np.maximum(age, 0) * FADE_DB_PER_HOP).astype(np.float32)[:, None]
        due = (self._reference(hop - delay - age) + self._gain - fading).max(axis=0)
        mine = self._heard[-1][1]
        louder = mine > np.maximum(np.maximum(due, self._noise + MARGIN_DB), FLOOR_DB + MARGIN_DB) + MARGIN_DB
        return int(louder.sum()) < MIN_LOUDER_BANDS

    def _reference(self, hops: npt.NDArray[np.int64]) -> Levels:
        """Its levels at these hops, silence where there is none."""
        at = hops - self._start
        inside = (at >= 0) & (at < len(self._levels))
        found: Levels = np.where(
            inside[..., None], self._levels[np.clip(at, 0, len(self._levels) - 1)], np.float32(FLOOR_DB)
        )
        return found

    def _of(self, frames: Pcm) -> Levels:
        """Levels of frames, float32 [n, 512], in bands, decibels, [n, bands]."""
        power = np.abs(np.fft.rfft(frames * self._window, axis=1)) ** 2 / FRAME_SAMPLES
        bands = np.stack([power[:, b].mean(axis=1) for b in self._bands], axis=1)
        levels: Levels = np.maximum(10 * np.log10(bands + 1e-12), FLOOR_DB).astype(np.float32)
        return levels

    def _forget(self, at: int) -> None:
        """Drop what no echo can be of any more."""
        drop = (
            at // HOP_SAMPLES
            - MAX_DELAY_HOPS
            - COMPARED_FRAMES * FRAME_SAMPLES // HOP_SAMPLES
            - TAIL_HOPS
            - self._start
        )
        if drop >= len(self._levels):
            self._levels = self._levels[:0]
        elif drop > 500:
            self._levels, self._start = self._levels[drop:].copy(), self._start + drop
