"""Sound as arrays: PCM, resampling, G.711, containers. Stateful and pure; no sockets, no models.

Inside antiphon sound is mono float32 in [-1, 1] at SAMPLE_RATE_HZ; wire rates and codecs end at the protocol.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

SAMPLE_RATE_HZ = 16_000

Pcm = npt.NDArray[np.float32]
SpeechFormat = Literal["wav", "pcm", "flac", "mp3", "opus", "aac"]
