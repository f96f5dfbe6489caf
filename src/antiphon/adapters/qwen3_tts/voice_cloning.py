"""A voice from a sample of it: the speaker as a vector (ECAPA-TDNN, arXiv:2005.07143), the speech as codes.

The codes are Mimi's (arXiv:2410.00037). Parameter names are the checkpoint's, under `speaker_encoder.`; audio is
float32, mono, 24 kHz. Decoding a client's file, and keeping voices, is done by the synthesizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad
from transformers.audio_utils import mel_filter_bank

from antiphon.audio import Pcm

# The rate of samples, and the window and the step of the speaker encoder's spectrogram, in samples.
RATE_HZ, WINDOW_SAMPLES, HOP_SAMPLES = 24_000, 1024, 256


@dataclass(frozen=True, slots=True)
class ClonedVoice:
    """A voice to speak with.

    `speaker`: the vector [width of the talker]. `text`, `codes`: the tokens of what the sample says, and its frames,
    one code for each codebook; both empty where the text is not known, and the voice is cloned from the vector alone.
    """

    speaker: torch.Tensor
    text: tuple[int, ...] = ()
    codes: tuple[tuple[int, ...], ...] = ()


class DelayBlock(nn.Module):
    """A dilated convolution over the frames and its activation (TDNN). It keeps the number of frames."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(
            in_channels, out_channels, kernel, dilation=dilation, padding="same", padding_mode="reflect"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [1, out_channels, frames] of x [1, in_channels, frames]; frames beyond the ends are mirrored."""
        return torch.relu(self.conv(x))


class Res2NetBlock(nn.Module):
    """Splits the channels into `scale` parts and convolves each together with the output of the one before it."""

    def __init__(self, width: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            DelayBlock(width // scale, width // scale, kernel, dilation) for _ in range(scale - 1)
        )
        self._scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same shape as x, [1, width, frames]; the first part of the channels is passed on as it is."""
        first, second, *rest = x.chunk(self._scale, 1)
        out = [first, self.blocks[0](second)]
        for part, block in zip(rest, list(self.blocks)[1:], strict=True):
            out.append(block(part + out[-1]))
        return torch.cat(out, 1)


class SqueezeExcitation(nn.Module):
    """Weighs each channel by the mean of all channels over the frames, through a bottleneck of `inner_width`."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(width, inner_width, 1), nn.Conv1d(inner_width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, [1, width, frames], with each channel multiplied by its weight in [0, 1]."""
        return x * torch.sigmoid(self.conv2(torch.relu(self.conv1(x.mean(2, keepdim=True)))))


class SpeakerEncoderBlock(nn.Module):
    """One SE-Res2Net block of ECAPA-TDNN with its residual connection."""

    def __init__(
        self, in_channels: int, out_channels: int, scale: int, inner_width: int, kernel: int, dilation: int
    ) -> None:
        super().__init__()
        self.tdnn1, self.tdnn2 = DelayBlock(in_channels, out_channels, 1), DelayBlock(out_channels, out_channels, 1)
        self.res2net_block = Res2NetBlock(out_channels, scale, kernel, dilation)
        self.se_block = SqueezeExcitation(out_channels, inner_width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [1, out_channels, frames] of x [1, in_channels, frames]; the two widths are equal in checkpoints."""
        out: torch.Tensor = self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))
        return out + x


class AttentivePooling(nn.Module):
    """Mean and standard deviation over the frames, weighed by attention for each channel by itself."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.tdnn, self.conv = DelayBlock(3 * width, inner_width, 1), nn.Conv1d(inner_width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [1, 2 * width, 1] of x [1, width, frames]: the means of the channels, then their deviations."""
        even = torch.full_like(x[:, :1], 1 / x.shape[2])
        around = [part[..., None].expand_as(x) for part in _moments(x, even)]
        weights = torch.softmax(self.conv(torch.tanh(self.tdnn(torch.cat((x, *around), 1)))), 2)
        return torch.cat(_moments(x, weights), 1)[..., None]


def _moments(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = (weights * x).sum(2)
    return mean, (weights * (x - mean[..., None]).square()).sum(2).clamp(1e-12).sqrt()


class SpeakerEncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of the speaker's encoder, by their names in the `speaker_encoder_config` of config.json.

    `enc_channels`, `enc_kernel_sizes`, `enc_dilations`: for each of its blocks. `enc_dim`: of the speaker's vector.
    """

    mel_dim: int
    enc_dim: int
    enc_channels: tuple[int, ...]
    enc_kernel_sizes: tuple[int, ...]
    enc_dilations: tuple[int, ...]
    enc_attention_channels: int
    enc_res2net_scale: int
    enc_se_channels: int


class SpeakerEncoder(nn.Module):
    """From a sample to the speaker's vector, which the talker takes in the place of a voice of its own."""

    def __init__(self, config: SpeakerEncoderConfig) -> None:
        super().__init__()
        widths, kernels, dilations = config.enc_channels, config.enc_kernel_sizes, config.enc_dilations
        blocks = [
            SpeakerEncoderBlock(
                widths[i - 1],
                widths[i],
                config.enc_res2net_scale,
                config.enc_se_channels,
                kernels[i],
                dilations[i],
            )
            for i in range(1, len(widths) - 1)
        ]
        self.blocks = nn.ModuleList([DelayBlock(config.mel_dim, widths[0], kernels[0], dilations[0]), *blocks])
        self.mfa = DelayBlock(widths[-1], widths[-1], kernels[-1], dilations[-1])
        self.asp = AttentivePooling(widths[-1], config.enc_attention_channels)
        self.fc = nn.Conv1d(2 * widths[-1], config.enc_dim, 1)
        mels = mel_filter_bank(
            WINDOW_SAMPLES // 2 + 1, config.mel_dim, 0.0, RATE_HZ / 2, RATE_HZ, norm="slaney", mel_scale="slaney"
        )
        self._mels = torch.from_numpy(np.asarray(mels, np.float32)).T

    @torch.inference_mode()
    def forward(self, pcm: Pcm) -> torch.Tensor:
        """Return the speaker's vector [width] for pcm, float32 [num_samples], 24 kHz. Called in the model's thread."""
        like = self.fc.weight
        x, made = self._spectrum(pcm).to(like.device, like.dtype), list[torch.Tensor]()
        for block in self.blocks:
            x = block(x)
            made.append(x)
        out: torch.Tensor = self.fc(self.asp(self.mfa(torch.cat(made[1:], 1))))[0, :, 0]
        return out

    def _spectrum(self, pcm: Pcm) -> torch.Tensor:
        margin = (WINDOW_SAMPLES - HOP_SAMPLES) // 2
        audio = pad(torch.from_numpy(pcm)[None], (margin, margin), mode="reflect")
        window = torch.hann_window(WINDOW_SAMPLES)
        found = torch.stft(audio, WINDOW_SAMPLES, HOP_SAMPLES, window=window, center=False, return_complex=True)
        size = torch.sqrt(torch.view_as_real(found).square().sum(-1) + 1e-9)
        return torch.log((self._mels @ size).clamp(1e-5))


@torch.inference_mode()
def codes_of(encoder: Any, pcm: Pcm, count: int, frame_samples: int) -> tuple[tuple[int, ...], ...]:
    """Return a sample's frames, the first `count` codes of each; the last frame may be filled up with silence.

    `encoder`: a MimiModel. pcm: float32 [num_samples], 24 kHz. `frame_samples`: samples in a frame. Called in the
    engine's thread.
    """
    audio = torch.from_numpy(pcm)[None, None].to(encoder.device, encoder.dtype)
    codes: Sequence[Sequence[int]] = encoder.encode(audio).audio_codes[0, :count].T.tolist()
    # The encoder pads the audio further than to a whole frame.
    return tuple(tuple(frame) for frame in codes[: -(-len(pcm) // frame_samples)])
