"""Tiny vocoders of MiniCPM-o's token2wav, their mel frames and their windows, for the tests and the golden audio.

The random seed of each weight is the checksum of its name. The published code read the same numbers when the golden
audio was made (`make_golden_hift.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

GOLDEN = Path(__file__).parent / "golden" / "minicpmo_hift.npz"
# The fields of `hift` in config.yaml.
FIELDS: dict[str, Any] = {
    "in_channels": 80,
    "base_channels": 16,
    "nb_harmonics": 8,
    "sampling_rate": 24000,
    "nsf_alpha": 0.1,
    "nsf_sigma": 0.003,
    "nsf_voiced_threshold": 10,
    "upsample_rates": [8, 5, 3],
    "upsample_kernel_sizes": [16, 11, 7],
    "istft_params": {"n_fft": 16, "hop_len": 4},
    "resblock_kernel_sizes": [3, 7, 11],
    "resblock_dilation_sizes": [[1, 3, 5]] * 3,
    "source_resblock_kernel_sizes": [7, 7, 11],
    "source_resblock_dilation_sizes": [[1, 3, 5]] * 3,
    "lrelu_slope": 0.1,
    "audio_limit": 0.99,
}
CAUSAL_FIELDS = FIELDS | {"conv_pre_look_right": 4}
F0_WIDTH = 12
# The windows of each stream in mel frames. The last one ends the stream.
STREAMS: tuple[tuple[int, ...], ...] = (
    (10, 50, 50, 0),
    (50, 50, 6),
    (50, 18, 50, 2, 50),
    (12, 30),
    (9, 50, 50, 50, 1),
    (7,),
    (16, 2, 2, 4),
    (4, 4, 4, 20, 3),
    (5, 2),
    (8, 0),
)
# Golden audio has every such sample, because the files must stay small. The number is prime to the frame's length.
STEP = 31
NOISE_FRAMES = 120
# Added to the logarithms of all magnitudes, so that both limits are reached. With it, this stream is vocoded again.
LOUD, LOUD_STREAM = 5.5, 3


def weight(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return the weight of a name in the released state dict, in float32."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    normal, even = random.standard_normal(shape), random.uniform(0.6, 1.1, shape)
    if name.endswith(("original0", "alpha")):
        value = even
    elif name.endswith("bias"):
        value = 0.1 * normal
    elif name == "f0_predictor.classifier.weight":
        value = 100 * normal
    elif name.startswith("source_downs"):
        value = normal / np.sqrt(np.prod(shape[1:]))
    else:
        value = normal
    # Soft audio, which the limit does not clip.
    if name == "conv_post.bias":
        value[:9] -= 2
    elif name.startswith("conv_post") and name.endswith("original0"):
        value = 0.4 * value
    return torch.from_numpy(np.asarray(value, np.float32))


def weights(names: Iterable[tuple[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """Return a state dict with the weights of these names and shapes."""
    return {name: weight(name, shape) for name, shape in names}


def mel(stream: int) -> torch.Tensor:
    """Return all frames of a stream, float32 [80, frames]."""
    random = np.random.RandomState(stream)
    return torch.from_numpy(random.standard_normal((80, sum(STREAMS[stream]))).astype(np.float32))


def is_overlapping(stream: int) -> bool:
    """Return whether the older package can vocode a stream: its windows have codes, and the first one is not short."""
    windows = STREAMS[stream]
    return windows[-1] > 0 and (len(windows) == 1 or windows[0] > 8)


def noise(*, causal: bool) -> torch.Tensor:
    """Return a table of noise, float64 [samples, harmonics]."""
    random = np.random.RandomState(99)
    size = (NOISE_FRAMES * 480, FIELDS["nb_harmonics"] + 1)
    return torch.from_numpy(random.uniform(size=size) if causal else random.standard_normal(size))
