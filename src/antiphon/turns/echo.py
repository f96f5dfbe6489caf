"""Distinguishes speech from the server's own audio that returns through the client's microphone. Pure. Time is counted
in samples.

Audio that the server sends is placed on the microphone's clock at the moment of sending. The delay of its echo, and the
echo's level in each band, are learned from the audio itself: the levels of both are correlated over delays up to
MAX_DELAY_S. A frame that is no louder than the expected echo is not speech. Nothing is subtracted, so speech over the
echo stays audible. The microphone's clock continues while the client sends nothing (`MicrophoneClock`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

Levels = npt.NDArray[np.float32]

# The microphone's audio is judged in frames of 32 ms. Levels are computed every 8 ms.
FRAME_SAMPLES, HOP_SAMPLES = 512, 128
# Maximum delay, in seconds, between sending audio and receiving its echo.
MAX_DELAY_S = 1.2
MAX_DELAY_HOPS = int(MAX_DELAY_S * SAMPLE_RATE_HZ / HOP_SAMPLES)
# The number of recent frames that are compared with the reference, and the minimum number of them with audio.
COMPARED_FRAMES, MIN_COMPARED_FRAMES = 32, 10
# Maximum number of frames that are held until it is known whether they are an echo.
MAX_HELD_FRAMES = 2 * MIN_COMPARED_FRAMES
# Minimum correlation of an echo's levels with the reference. A room's echo has 0.9 and more. Another speaker's voice
# has up to 0.75 at the delay with the highest correlation.
ECHO_CORRELATION = 0.83
# The minimum after the microphone was still for longer than an echo takes. Until then, the minimum rises linearly to
# it. At the delay with the highest correlation, another speaker reached ECHO_CORRELATION in one of nine sentences said
# during an answer, but LATE_ECHO_CORRELATION in none of 180.
LATE_ECHO_CORRELATION = 0.9
# Minimum correlation at which audio may be an echo, so that it is worth waiting for more audio.
POSSIBLE_ECHO_CORRELATION = 0.6
# A frame is another speaker's if at least MIN_LOUDER_BANDS bands are louder than the echo by MARGIN_DB.
MARGIN_DB, MIN_LOUDER_BANDS = 6.0, 3
# The reference is silent below this level. All levels in this module are those of one band, in decibels relative to
# full scale.
FLOOR_DB = -75.0
# If samples stay below RESIDUAL_PEAK (-52 dB) for COMPARED_FRAMES while the reference has audio, they are the residual
# of a client's own echo canceller, which a detector that amplifies quiet audio takes for speech. Even a quiet voice
# reaches -42 dB.
RESIDUAL_PEAK = 0.0025
# A microphone's constant offset is in every frame. Its estimate is the mean of a frame that is nearest to 0 among the
# last OFFSET_FRAMES (4 s). It is unknown before MIN_OFFSET_FRAMES (1 s) have arrived.
MIN_OFFSET_FRAMES, OFFSET_FRAMES = 32, 125
# A room's echo fades by FADE_DB_PER_HOP in each hop and is gone after TAIL_HOPS. If a client's clock differs, the echo
# may arrive up to EARLY_HOPS too early.
FADE_DB_PER_HOP, TAIL_HOPS, EARLY_HOPS = 1.0, 36, 9
# A frame counts as speech if MIN_SPEECH_VOTES of the last SPEECH_VOTE_FRAMES frames were another speaker's. The delay
# is determined every DELAY_SEARCH_FRAMES frames and, while it is unknown, at each frame that may be speech: a search
# takes half a millisecond of the event loop.
SPEECH_VOTE_FRAMES, MIN_SPEECH_VOTES, DELAY_SEARCH_FRAMES = 4, 3, 4
# A frame with a speech probability below MIN_SPEECH_PROBABILITY is silence. After MAX_QUIET_FRAMES silent frames while
# the reference has audio, which is longer than any delay, no echo is expected any more.
MIN_SPEECH_PROBABILITY, MAX_QUIET_FRAMES = 0.3, 48
# The echo is missing from a frame if most bands in which it is due are MISSING_DB below its level. The detected echo is
# dropped when MAX_MISSING_FRAMES more frames miss it than have it. The client then uses headphones, or cancels echoes
# itself.
MISSING_DB, MAX_MISSING_FRAMES = 12.0, 31
# Seconds for which audio may still be heard after the client was asked to stop playing it.
CUT_TAIL_S = 0.3
# The weight of the newest estimate in the echo's gain. A band's estimated noise floor rises by NOISE_RISE_DB with each
# frame, and falls at once to the level of a quieter frame.
GAIN_UPDATE_SHARE, NOISE_RISE_DB = 0.2, 0.1
BAND_EDGES_HZ = np.geomspace(150, 7000, 13)


# If no audio arrives for longer than MUTED_SAMPLES, none was recorded, because the client has muted itself. Stalls of a
# network are mostly shorter. After a longer stall, the clock is right again when the delayed audio has arrived.
MUTED_SAMPLES = int(0.6 * SAMPLE_RATE_HZ)
# Samples per call by which the clock follows a microphone that is slightly slower than the server's clock.
DRIFT_SAMPLES = 1


class MicrophoneClock:
    """Counts the samples of a microphone, including those that a muted client did not send.

    The server's audio continues to play while the client is muted. A clock that counted only received samples would
    still expect the echo of that audio after the client unmutes.
    """

    def __init__(self) -> None:
        # The smallest lag of audio behind the clock so far, in samples; None before the first call.
        self._least_lag: int | None = None
        self._skipped = 0

    def now(self, now_s: float, num_received: int) -> int:
        """Return the microphone's sample at `now_s`, in monotonic seconds, when `num_received` samples have arrived.

        It equals `num_received` for a file, or for a client that sends everything it records. It may go back, by the
        amount that a stalled network delivers late.
        """
        lag = int(now_s * SAMPLE_RATE_HZ) - num_received
        if self._least_lag is None or lag < self._least_lag:
            self._least_lag = lag
        late = lag - self._least_lag - self._skipped
        if late < 0 or late > MUTED_SAMPLES:
            # The clock never lags behind the received audio: audio that was late has arrived by now.
            self._skipped += late
        elif late:
            self._least_lag += DRIFT_SAMPLES
        return num_received + self._skipped


class EchoGuard:
    """Sets the speech probability of a frame to 0 if the frame is an echo of the server's audio. For one session.

    `add_reference` gets the audio that is sent, and `judge` the audio of the microphone. All positions are samples at
    16 kHz on the microphone's clock. Levels older than any echo are dropped, so memory does not grow with the session.
    `delay_hops` is the delay of the echo in hops of 8 ms, or None while it is unknown. If the newest frames show that
    frames held as an echo are speech, `held_since` is the first sample of the held frames, else None.
    """

    def __init__(self) -> None:
        bins = np.fft.rfftfreq(FRAME_SAMPLES, 1 / SAMPLE_RATE_HZ)
        # The first bin of each band, and the bin after the last.
        edges = np.searchsorted(bins, BAND_EDGES_HZ)
        self._first_bins, self._end_bin, self._num_bins = edges[:-1], edges[-1], np.diff(edges).astype(np.float32)
        self._window = np.hanning(FRAME_SAMPLES).astype(np.float32)
        # The reference: its levels by hop, the first at hop `_start` of the microphone's clock.
        self._levels: Levels = np.full((0, len(self._first_bins)), FLOOR_DB, np.float32)
        self._start = 0
        # The end of the reference that does not fill a hop yet, and the sample at which the reference ends.
        self._rest: Pcm = np.zeros(0, np.float32)
        self._reference_end = 0
        # The microphone's last frames: (hop of the first sample, levels).
        self._microphone: list[tuple[int, Levels]] = []
        # The largest sample of each of these frames, without its offset.
        self._peaks: list[float] = []
        # The means of the last OFFSET_FRAMES frames.
        self._means: list[float] = []
        self.delay_hops: int | None = None
        self._gain: Levels = np.zeros(len(self._first_bins), np.float32)
        self._noise: Levels = np.zeros(len(self._first_bins), np.float32)
        # The number of frames held while the delay of a possible echo is unknown, and the first sample of those that
        # are still undecided.
        self._undecided_frames = 0
        self._undecided_since: int | None = None
        self.held_since: int | None = None
        # The number of silent frames while the reference has audio.
        self._quiet_frames = 0
        # The number of frames that miss the echo, minus those that have it.
        self._missing_frames = 0
        # The number of frames during which the reference had audio.
        self._num_frames = 0
        # For each of the last frames, whether it was another speaker's.
        self._speech_votes: list[bool] = []

    def add_reference(self, pcm: Pcm, at: int) -> None:
        """Record audio that was sent to the client at the microphone's sample `at`: float32 [num_samples], mono, 16
        kHz. Audio that is sent faster than real time queues at the client, so it is placed after the audio sent before
        it.
        """
        at = max(at, self._reference_end)
        self._reference_end = at + len(pcm)
        hop = at // HOP_SAMPLES
        end = self._start + len(self._levels)
        if not len(self._levels) or hop > end + 1:
            self._rest = np.zeros(0, np.float32)
            quiet = np.full((max(0, hop - end), len(self._first_bins)), FLOOR_DB, np.float32)
            if not len(self._levels):
                self._start = hop
            else:
                self._levels = np.concatenate((self._levels, quiet))
        sound = np.concatenate((self._rest, pcm))
        count = max(0, (len(sound) - FRAME_SAMPLES) // HOP_SAMPLES + 1)
        if count:
            frames = np.lib.stride_tricks.sliding_window_view(sound, FRAME_SAMPLES)[::HOP_SAMPLES][:count]
            self._levels = np.concatenate((self._levels, self._band_levels(frames)))
        self._rest = sound[count * HOP_SAMPLES :]

    def cut_reference(self, at: int) -> None:
        """Record that the client stopped playing at sample `at`. Audio not played by then never will be, and the next
        audio will play at once. A tail of CUT_TAIL_S is kept, for audio that is still audible in the room.
        """
        keep = max(0, (at + int(CUT_TAIL_S * SAMPLE_RATE_HZ)) // HOP_SAMPLES - self._start)
        self._levels = self._levels[:keep]
        self._rest, self._reference_end = self._rest[:0], at

    def judge(self, frames: Pcm, probabilities: list[float], at: int) -> list[float]:
        """Return the frames' speech probabilities, with 0 for each frame that is an echo.

        `frames` are float32 [num_frames, 512], mono, 16 kHz, and begin at sample `at`. `probabilities` has one value
        for each frame, from the voice activity detector. The first audio that returns counts as an echo until there is
        enough of it to decide: for up to a third of a second, or two thirds if it resembles an echo. For a client with
        headphones this delays speech once.
        """
        self._forget(at)
        self.held_since = None
        out, all_levels, means = list[float](), self._band_levels(frames), frames.mean(axis=1).tolist()
        for k, (frame, probability) in enumerate(zip(frames, probabilities, strict=True)):
            hop, levels = (at + k * FRAME_SAMPLES) // HOP_SAMPLES, all_levels[k]
            self._noise = np.minimum(self._noise + NOISE_RISE_DB, levels)
            self._microphone = [*self._microphone[1 - COMPARED_FRAMES :], (hop, levels)]
            self._means = [*self._means[1 - OFFSET_FRAMES :], means[k]]
            offset = min(self._means, key=abs) if len(self._means) >= MIN_OFFSET_FRAMES else 0.0
            peak = float(np.abs(frame - offset).max())
            self._peaks = [*self._peaks[1 - COMPARED_FRAMES :], peak]
            if not len(self._levels):
                out.append(probability)
                continue
            if self._is_sounding(hop) and max(self._peaks) < RESIDUAL_PEAK:
                probability = 0.0
            out.append(0.0 if self._is_echo(hop, probability) else probability)
        return out

    def _is_sounding(self, hop: int) -> bool:
        """Whether the reference has audio whose echo may be due at this hop."""
        return bool(self._reference(np.arange(hop - MAX_DELAY_HOPS, hop + 1)).max() > FLOOR_DB + 10)

    def _is_echo(self, hop: int, probability: float) -> bool:
        if not self._is_sounding(hop):
            self._undecided_frames = 0
            self._release(hop, probability)
            return False
        self._num_frames += 1
        score = 0.0
        is_asked = self.delay_hops is None and probability >= MIN_SPEECH_PROBABILITY
        if is_asked or self._num_frames % DELAY_SEARCH_FRAMES == 0:
            score, delay = self._best()
            if score >= self._needed_correlation():
                self._learn(delay, fresh=self.delay_hops is None)
                self.delay_hops = delay
                self._undecided_since = None
        if self.delay_hops is not None and not self._is_refuted(hop, self.delay_hops):
            is_speech = not self._explained(hop, self.delay_hops)
            self._speech_votes = [*self._speech_votes[1 - SPEECH_VOTE_FRAMES :], is_speech]
            return sum(self._speech_votes) < MIN_SPEECH_VOTES
        if probability < MIN_SPEECH_PROBABILITY and self._is_still():
            self._quiet_frames += 1
        if probability < MIN_SPEECH_PROBABILITY or self._quiet_frames > MAX_QUIET_FRAMES:
            return False
        # Whether the first audio that returns is an echo is decided after one or two thirds of a second.
        self._undecided_frames += 1
        if self._undecided_frames < (MAX_HELD_FRAMES if score >= POSSIBLE_ECHO_CORRELATION else MIN_COMPARED_FRAMES):
            if self._undecided_since is None:
                self._undecided_since = hop * HOP_SAMPLES
            return True
        self._release(hop, probability)
        return False

    def _is_still(self) -> bool:
        """Whether the newest frame is no louder than the microphone's noise."""
        louder = self._microphone[-1][1] > np.maximum(self._noise, FLOOR_DB) + MARGIN_DB
        return int(louder.sum()) < MIN_LOUDER_BANDS

    def _needed_correlation(self) -> float:
        """Return the minimum correlation of an echo, which rises with the time for which a due echo is missing."""
        if self.delay_hops is not None:
            return ECHO_CORRELATION
        quiet = min(1.0, self._quiet_frames / MAX_QUIET_FRAMES)
        return ECHO_CORRELATION + quiet * (LATE_ECHO_CORRELATION - ECHO_CORRELATION)

    def _release(self, hop: int, probability: float) -> None:
        """Record that this frame is not an echo. If it is speech, the frames held just before it are speech too."""
        if self._undecided_since is not None and probability >= MIN_SPEECH_PROBABILITY:
            self.held_since = max(self._undecided_since, hop * HOP_SAMPLES - MAX_HELD_FRAMES * FRAME_SAMPLES)
        self._undecided_since = None

    def _best(self) -> tuple[float, int]:
        """Return the highest correlation, over all delays, of the microphone's levels with the reference's levels, and
        the delay at which it occurs.
        """
        hops = np.array([h for h, _ in self._microphone])
        levels = np.stack([v for _, v in self._microphone])
        if len(hops) < MIN_COMPARED_FRAMES:
            return 0.0, 0
        # The part of the reference that is compared, in float64, since the sums below are of differences. A row of
        # silence at its end stands for all hops outside. Frames for which the reference is silent do not count.
        first, end = (
            int(np.clip(hop - self._start, 0, len(self._levels)))
            for hop in (hops.min() - MAX_DELAY_HOPS + 1, hops.max() + 1)
        )
        past = np.full((end - first + 1, len(self._first_bins)), FLOOR_DB)
        past[:-1] = self._levels[first:end]
        loud = (past.max(axis=1) > FLOOR_DB + 10).astype(np.float64)
        at = hops - self._start - first - np.arange(MAX_DELAY_HOPS)[:, None]
        at = np.where((at >= 0) & (at < end - first), at, end - first)
        weight = loud[at]
        count = weight.sum(axis=1)
        enough = count >= MIN_COMPARED_FRAMES
        if not enough.any():
            return 0.0, 0
        past *= loud[:, None]
        count = np.maximum(count, 1)
        # For all delays at once: sums over the frames of the levels, of their squares and of their products.
        reference, microphone = past[at], levels.astype(np.float64)
        reference_sum, microphone_sum = reference.sum(axis=1), weight @ microphone
        products = reference.reshape(len(at), -1) @ microphone.ravel()
        squares = (past**2).sum(axis=1)[at].sum(axis=1), weight @ (microphone**2).sum(axis=1)
        means = [
            (a * b).sum(axis=1) / count
            for a, b in (
                (reference_sum, microphone_sum),
                (reference_sum, reference_sum),
                (microphone_sum, microphone_sum),
            )
        ]
        norm = np.sqrt(np.maximum((squares[0] - means[1]) * (squares[1] - means[2]), 0.0)) + 1e-6
        scores = np.where(enough, (products - means[0]) / norm, 0.0)
        best = int(scores.argmax())
        return float(scores[best]), best

    def _learn(self, delay: int, *, fresh: bool) -> None:
        """Update the echo's gain in each band in which both the reference and the microphone are loud enough."""
        past = self._reference(np.array([h for h, _ in self._microphone]) - delay)
        levels = np.stack([v for _, v in self._microphone])
        for band in range(len(self._first_bins)):
            both = (past[:, band] > FLOOR_DB + 10) & (levels[:, band] > FLOOR_DB + 3)
            if both.sum() >= 3:
                gain = np.median(levels[both, band] - past[both, band])
                self._gain[band] = (
                    gain if fresh else (1 - GAIN_UPDATE_SHARE) * self._gain[band] + GAIN_UPDATE_SHARE * gain
                )

    def _explained(self, hop: int, delay: int) -> bool:
        """Whether the newest frame is no louder than the echo that is due, including the echo's tail in the room."""
        age = np.arange(TAIL_HOPS, -EARLY_HOPS - 1, -1)
        fading = (np.maximum(age, 0) * FADE_DB_PER_HOP).astype(np.float32)[:, None]
        due = (self._reference(hop - delay - age) + self._gain - fading).max(axis=0)
        newest = self._microphone[-1][1]
        louder = newest > np.maximum(np.maximum(due, self._noise + MARGIN_DB), FLOOR_DB + MARGIN_DB) + MARGIN_DB
        return int(louder.sum()) < MIN_LOUDER_BANDS

    def _is_refuted(self, hop: int, delay: int) -> bool:
        """Count whether the newest frame has the echo that is due. Forgets the echo if too many frames miss it."""
        # A frame counts only if the reference is loud throughout, so that a slightly wrong delay does not matter.
        due = self._reference(hop - delay + np.arange(-EARLY_HOPS, EARLY_HOPS + 1)).min(axis=0) + self._gain
        bands = due > np.maximum(self._noise + MARGIN_DB, FLOOR_DB) + MISSING_DB
        if bands.sum() >= MIN_LOUDER_BANDS:
            missing = np.mean(self._microphone[-1][1][bands] < due[bands] - MISSING_DB) > 0.5
            self._missing_frames = max(0, self._missing_frames + (1 if missing else -1))
        if self._missing_frames < MAX_MISSING_FRAMES:
            return False
        self.delay_hops, self._missing_frames, self._quiet_frames = None, 0, MAX_QUIET_FRAMES + 1
        self._speech_votes.clear()
        return True

    def _reference(self, hops: npt.NDArray[np.int64]) -> Levels:
        """Return the reference's levels at these hops. Outside the reference, the level is silence."""
        at = hops - self._start
        inside = (at >= 0) & (at < len(self._levels))
        found: Levels = np.where(
            inside[..., None], self._levels[np.clip(at, 0, len(self._levels) - 1)], np.float32(FLOOR_DB)
        )
        return found

    def _band_levels(self, frames: Pcm) -> Levels:
        """Return the levels of frames, float32 [n, 512], in bands: decibels, [n, bands]."""
        power = np.abs(np.fft.rfft(frames * self._window, axis=1)) ** 2 / FRAME_SAMPLES
        # One call for all bands: this runs for each frame of each session.
        bands = np.add.reduceat(power[:, : self._end_bin], self._first_bins, axis=1) / self._num_bins
        levels: Levels = np.maximum(10 * np.log10(bands + 1e-12), FLOOR_DB).astype(np.float32)
        return levels

    def _forget(self, at: int) -> None:
        """Drop levels of the reference that are too old to return as an echo."""
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
