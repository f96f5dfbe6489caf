"""Stands in until the reader of voices is merged."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from antiphon.audio import Pcm


class Voice(NamedTuple):
    """A voice."""

    codes: torch.Tensor
    embedding: torch.Tensor
    mel: torch.Tensor


class VoiceReader:
    """Reads voices."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Load."""

    def read(self, pcm: Pcm) -> Voice:
        """Read."""
        count = max(1, len(pcm) // 640)
        drawn = torch.Generator().manual_seed(int(1000 * abs(float(pcm.sum()))) if len(pcm) else 0)
        return Voice(
            torch.randint(98, (count,), generator=drawn),
            torch.randn(192, generator=drawn),
            torch.randn(2 * count, 80, generator=drawn),
        )
