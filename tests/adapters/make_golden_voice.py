"""Makes golden/minicpmo_voice.npz with the published code.

`PYTHONPATH=.:SITE python tests/adapters/make_golden_voice.py NEWEST`. NEWEST is the folder that contains the module
`stepaudio2` of the package minicpmo-utils 1.0.7, unpacked. SITE is a folder into which librosa, s3tokenizer and
torchaudio were installed (`pip install --target`); torchaudio's compiled part is not needed. The script needs torch
beside them. It uses none of antiphon.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torchaudio

from tests.adapters import tiny_voice as tiny
from tests.adapters.make_golden_hift import UNUSED, published

# Loaded for real, where the vocoder needs none of them.
REAL = ("librosa", "s3tokenizer", "torchaudio")


def main() -> None:
    """Write the file."""
    kept = tuple(name for name in UNUSED if not name.startswith(REAL))
    token2wav = published(sys.argv[1], "stepaudio2.token2wav", kept)
    found: dict[str, Any] = {}

    def quantize(mel: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found["log_mel"] = mel[0].numpy()
        return torch.zeros(1, -(-int(lengths) // 4)), lengths

    def run(_: None, inputs: dict[str, Any]) -> list[Any]:
        found["banks"] = inputs["input"][0]
        return [np.zeros((1, 192), np.float32)]

    own = SimpleNamespace(
        audio_tokenizer=SimpleNamespace(quantize=quantize),
        spk_model=SimpleNamespace(run=run, get_inputs=lambda: [SimpleNamespace(name="input")]),
        flow=SimpleNamespace(up_rate=2),
    )
    torchaudio.load = lambda *_, **__: (torch.from_numpy(tiny.sound())[None], 16_000)
    torch.Tensor.cuda = lambda self: self
    tensor = torch.tensor
    torch.tensor = lambda *args, device=None, **rest: tensor(*args, **rest)
    found["mel"] = token2wav.Token2wav._prepare_prompt(own, "voice.wav")[3][0].numpy()
    found["mel_24khz"] = token2wav.mel_spectrogram(torch.from_numpy(tiny.sound())[None])[0].T.numpy()
    np.savez_compressed(tiny.GOLDEN, **found)


if __name__ == "__main__":
    main()
