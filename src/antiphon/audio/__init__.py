"""Audio as arrays: PCM, resampling, G.711, containers and encoders. No sockets and no models.

Inside the server, audio is mono float32 in [-1, 1] at `SAMPLE_RATE_HZ`. The protocols convert other rates and codecs.
If a codec keeps state between chunks, each stream needs its own codec object.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

SAMPLE_RATE_HZ = 16_000

Pcm = npt.NDArray[np.float32]
SpeechFormat = Literal["wav", "pcm", "flac", "mp3", "opus", "aac"]
