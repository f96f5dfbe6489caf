"""A voice from a sample of it: who speaks as one vector (ECAPA-TDNN, arXiv:2005.07143), and what was said as codes (Mimi, arXiv:2410.00037).

Module names are the checkpoint's (`speaker_encoder.`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad
from transformers.audio_utils import mel_filter_bank

from antiphon.audio import Pcm

# Of the sample: 24 kHz.
RATE_HZ, FFT, HOP = 24_000, 1024, 256


@dataclass(frozen=True, slots=True)
class ClonedVoice:
    """A voice to speak with. `speaker` [width]. `text` and `codes` ([frames] of one a codebook): what it says, where that is known."""

    speaker: torch.Tensor
    text: tuple[int, ...] = ()
    codes: tuple[tuple[int, ...], ...] = ()


class DelayBlock(nn.Module):
    """A dilated convolution and its activation."""

    def __init__(self, inside: int, out: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inside, out, kernel, dilation=dilation, padding="same", padding_mode="reflect")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, inside, frames] to [1, out, frames]."""
        return torch.relu(self.conv(x))


class Res2NetBlock(nn.Module):
    """Parts of the channels, each given what the one before made."""

    def __init__(self, width: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            DelayBlock(width // scale, width // scale, kernel, dilation) for _ in range(scale - 1)
        )
        self._scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, width, frames], the same out."""
        first, second, *rest = x.chunk(self._scale, 1)
        out = [first, self.blocks[0](second)]
        for part, block in zip(rest, list(self.blocks)[1:], strict=True):
            out.append(block(part + out[-1]))
        return torch.cat(out, 1)


class SqueezeExcitation(nn.Module):
    """Channels weighed by what all frames say of them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(width, inner, 1), nn.Conv1d(inner, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, width, frames], the same out."""
        return x * torch.sigmoid(self.conv2(torch.relu(self.conv1(x.mean(2, keepdim=True)))))


class SpeakerEncoderBlock(nn.Module):
    """One of the encoder's."""

    def __init__(self, inside: int, out: int, scale: int, squeezed: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.tdnn1, self.tdnn2 = DelayBlock(inside, out, 1), DelayBlock(out, out, 1)
        self.res2net_block, self.se_block = Res2NetBlock(out, scale, kernel, dilation), SqueezeExcitation(out, squeezed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, inside, frames] to [1, out, frames]."""
        out: torch.Tensor = self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))
        return out + x


class AttentivePooling(nn.Module):
    """Mean and deviation over the frames, each weighed."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.tdnn, self.conv = DelayBlock(3 * width, inner, 1), nn.Conv1d(inner, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, width, frames] to [1, 2 * width, 1]."""
        even = torch.full_like(x[:, :1], 1 / x.shape[2])
        around = [part[..., None].expand_as(x) for part in _moments(x, even)]
        weights = torch.softmax(self.conv(torch.tanh(self.tdnn(torch.cat((x, *around), 1)))), 2)
        return torch.cat(_moments(x, weights), 1)[..., None]


def _moments(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = (weights * x).sum(2)
    return mean, (weights * (x - mean[..., None]).square()).sum(2).clamp(1e-12).sqrt()


class SpeakerEncoder(nn.Module):
    """`config`: speaker_encoder_config of config.json."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        widths, kernels, dilations = (config[f"enc_{n}"] for n in ("channels", "kernel_sizes", "dilations"))
        inner = [
            SpeakerEncoderBlock(
                widths[i - 1],
                widths[i],
                config["enc_res2net_scale"],
                config["enc_se_channels"],
                kernels[i],
                dilations[i],
            )
            for i in range(1, len(widths) - 1)
        ]
        self.blocks = nn.ModuleList([DelayBlock(config["mel_dim"], widths[0], kernels[0], dilations[0]), *inner])
        self.mfa = DelayBlock(widths[-1], widths[-1], kernels[-1], dilations[-1])
        self.asp = AttentivePooling(widths[-1], config["enc_attention_channels"])
        self.fc = nn.Conv1d(2 * widths[-1], config["enc_dim"], 1)
        mels = mel_filter_bank(
            FFT // 2 + 1, config["mel_dim"], 0.0, RATE_HZ / 2, RATE_HZ, norm="slaney", mel_scale="slaney"
        )
        self._mels = torch.from_numpy(np.asarray(mels, np.float32)).T

    @torch.inference_mode()
    def forward(self, pcm: Pcm) -> torch.Tensor:
        """Who speaks: [width]. pcm: float32 [num_samples], 24 kHz."""
        like = self.fc.weight
        x, made = self._spectrum(pcm).to(like.device, like.dtype), list[torch.Tensor]()
        for block in self.blocks:
            x = block(x)
            made.append(x)
        out: torch.Tensor = self.fc(self.asp(self.mfa(torch.cat(made[1:], 1))))[0, :, 0]
        return out

    def _spectrum(self, pcm: Pcm) -> torch.Tensor:
        beside = (FFT - HOP) // 2
        sound = pad(torch.from_numpy(pcm)[None], (beside, beside), mode="reflect")
        found = torch.stft(sound, FFT, HOP, window=torch.hann_window(FFT), center=False, return_complex=True)
        size = torch.sqrt(torch.view_as_real(found).square().sum(-1) + 1e-9)
        return torch.log((self._mels @ size).clamp(1e-5))


@torch.inference_mode()
def codes_of(encoder: Any, pcm: Pcm, count: int, frame_samples: int) -> tuple[tuple[int, ...], ...]:
    """What a sample says, frame by frame. `encoder`: a MimiModel. pcm: float32 [num_samples], 24 kHz."""
    sound = torch.from_numpy(pcm)[None, None].to(encoder.device, encoder.dtype)
    codes: Sequence[Sequence[int]] = encoder.encode(sound).audio_codes[0, :count].T.tolist()
    # Part of a frame is one of its own.
    return tuple(tuple(frame) for frame in codes[: -(-len(pcm) // frame_samples)])
