"""CAM++, trained by 3D-Speaker on 200,000 speakers of Chinese and English: computes a vector for a stretch of speech.

The input is Kaldi's log mel spectrum without its mean over time, so neither the level nor the line's frequency response
matters much. `turns/` interprets the vectors.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from antiphon.adapters.campplus.network import MAX_FRAMES, NUM_BANDS, network
from antiphon.adapters.spec import LaneModelOptions
from antiphon.adapters.voice_encoder import VoiceEncoder
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts.speaker import SpeakerProfile, VoiceClustering, VoiceThreshold
from antiphon.modeling.sound.voice_weights import read_weights

SIZE, LEAST_S = 192, 0.6
WINDOW, HOP, FFT = 400, 160, 512
PREEMPHASIS, LOWEST_HZ = 0.97, 20.0
# Kaldi's window: a Hann window to the power of 0.85.
POVEY = ((0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / (WINDOW - 1))) ** 0.85).astype(np.float32)
# Windows have MAX_FRAMES, or as many as the speech has if it is shorter, but at least LEAST_FRAMES.
LEAST_FRAMES = 50

# The direction in which the mean vectors of 17 voices change most between quiet, noise and a telephone's band, with one
# signed byte per number (`antiphon bench speakers --fit`). It is removed, since it makes all voices similar over a
# telephone.
LINE = np.frombuffer(
    bytes.fromhex(
        "550cc22d4812f3cc1e1c46d7f5022bcefcdfe6dfa3d7f0b5060b1d1ef79a0ce51d1201d3793db104dfd73512fded52f2"
        "effaf7d60c1a0ab5cefcfe262eece90a15e73128e503ecfdd5e235d70bf544f638ba0fea212181ea532e3bee17eb19c3"
        "edf0f90b1b2a0214d017f5db5602ea0eeb120b1ccafde7063232f62f163ce830efe10ee4fae300e51d571e1e05fdfdb8"
        "0622be0127de2749142e31120c151320c2f0f0950def0be100c1d8400ae812fbffc3210a07f935b319d326fed7dbf1f7"
    ),
    np.int8,
).astype(np.float32)
LINE /= np.linalg.norm(LINE)
# The thresholds for similarities of voices, of pairs of turns in dialogues of the half `fit`: 2 % of the turns of one
# voice are below `other`, and 3 % of those of two voices reach `same`.
THRESHOLDS = (
    VoiceThreshold(0.5, 0.03, 0.27),
    VoiceThreshold(0.7, 0.05, 0.3),
    VoiceThreshold(1.0, 0.1, 0.36),
    VoiceThreshold(1.4, 0.35, 0.38),
)
# How voices are distinguished. The limits were chosen on dialogues of the half `fit` (`antiphon bench speakers`).
CLUSTERING = VoiceClustering(
    window_s=1.6,
    hop_s=0.8,
    same_windows=0.42,
    same_voices=0.7,
    same_as_known=0.45,
    least_voice_s=4.0,
    same_turns=0.45,
    least_turn_s=1.0,
    random_s=0.6,
    channel_directions=np.zeros((0, SIZE), np.float32),
)


def _filters() -> npt.NDArray[np.float32]:
    """Return Kaldi's filters, triangles on the mel scale: float32 [num_bins, NUM_BANDS]."""

    def mel(hz: npt.NDArray[np.float64] | float) -> npt.NDArray[np.float64]:
        return np.asarray(1127 * np.log1p(np.asarray(hz) / 700))

    edges = np.linspace(mel(LOWEST_HZ), mel(SAMPLE_RATE_HZ / 2), NUM_BANDS + 2)
    bins = mel(np.arange(FFT // 2 + 1) * SAMPLE_RATE_HZ / FFT)[:, None]
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    return np.maximum(0, np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre))).astype(np.float32)


FILTERS = _filters()


def mel_frames(pcm: Pcm) -> npt.NDArray[np.float32]:
    """Return the log energies of mel bands, float32 [num_frames, NUM_BANDS], of audio with at least WINDOW samples."""
    frames = np.lib.stride_tricks.sliding_window_view(pcm, WINDOW)[::HOP]
    frames = frames - frames.mean(axis=1, keepdims=True)
    emphasized = frames - PREEMPHASIS * np.concatenate((frames[:, :1], frames[:, :-1]), axis=1)
    power = np.abs(np.fft.rfft(emphasized * POVEY, FFT, axis=1)).astype(np.float32) ** 2
    return np.asarray(np.log(np.maximum(power @ FILTERS, np.finfo(np.float32).eps)), np.float32)


def windows_of(num_frames: int) -> list[int]:
    """Return the first frame of each window over `num_frames`: as few as possible, with equal distances."""
    num_windows = -(-num_frames // MAX_FRAMES)
    return [int(start) for start in np.linspace(0, max(0, num_frames - MAX_FRAMES), max(1, num_windows))]


class CamPlusPlusEncoder(VoiceEncoder):
    """CAM++, as a SpeakerModel. Its vectors are float32 [192]."""

    def __init__(self, folder: Path, model_id: str, options: LaneModelOptions) -> None:
        """Load `campplus.pt` from the folder. Raises ModelError if it does not load."""
        profile = SpeakerProfile(model_id, SIZE, LEAST_S, THRESHOLDS, clustering=CLUSTERING)
        super().__init__(lambda: network(read_weights(folder / "campplus.pt")), profile, options)

    def encode(self, pcm: Pcm) -> Pcm:
        """Return the mean of the windows' vectors without LINE, float32 [192], of length 1.

        Runs in the caller's thread.
        """
        least = WINDOW + (LEAST_FRAMES - 1) * HOP
        if len(pcm) < least:
            # Repeat short speech, because the network would treat padding with silence as part of the voice.
            pcm = np.resize(pcm, least) if len(pcm) else np.zeros(least, np.float32)
        frames = mel_frames(pcm)
        windows = np.stack([frames[start : start + MAX_FRAMES] for start in windows_of(len(frames))])
        vectors = self.vectors(windows - windows.mean(axis=1, keepdims=True))
        mean = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).mean(axis=0)
        mean -= (mean @ LINE) * LINE
        return np.asarray(mean / np.linalg.norm(mean), np.float32)
