"""A sound and tiny networks for the tests of token2wav's voices, with the inputs and outputs of the released ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

GOLDEN = Path(__file__).parent / "golden" / "minicpmo_voice.npz"
# A length that no hop divides.
SAMPLES = 11_777


def sound(samples: int = SAMPLES) -> npt.NDArray[np.float32]:
    """Return tones in soft noise whose loudness changes, float32 [samples]."""
    random = np.random.RandomState(7)
    at = np.arange(samples) / 16_000
    tones = sum(np.sin(2 * np.pi * f * at + f) for f in (131.0, 262.0, 393.0, 1870.0))
    return (0.1 * tones * np.sin(2 * np.pi * 1.3 * at) ** 2 + random.normal(0, 0.003, samples)).astype(np.float32)
