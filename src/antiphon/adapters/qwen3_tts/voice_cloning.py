"""Clones a voice from a sample: encodes the speaker as a vector (ECAPA-TDNN, arXiv:2005.07143), the speech as codes.

The codes are those of Mimi (arXiv:2410.00037). Parameters have their names in the checkpoint, under `speaker_encoder.`.
Audio is float32, mono, 24 kHz. The synthesizer decodes the client's files, and caches voices.
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

# The sample rate, and the window and hop of the speaker encoder's spectrogram.
RATE_HZ, WINDOW_SAMPLES, HOP_SAMPLES = 24_000, 1024, 256


@dataclass(frozen=True, slots=True)
class ClonedVoice:
    """A voice to speak with.

    `speaker`: the vector [width of the talker]. `text`: the tokens of the sample's text. `codes`: the sample's frames,
    one code for each codebook. If the text of the sample is unknown, `text` and `codes` are empty, and the voice is
    cloned from the vector alone.
    """

    speaker: torch.Tensor
    text: tuple[int, ...] = ()
    codes: tuple[tuple[int, ...], ...] = ()


class DelayBlock(nn.Module):
    """A dilated convolution over the frames, and an activation (TDNN). The output has as many frames as the input."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(
            in_channels, out_channels, kernel, dilation=dilation, padding="same", padding_mode="reflect"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [1, out_channels, frames] for x [1, in_channels, frames]. Frames are mirrored beyond the ends."""
        return torch.relu(self.conv(x))


class Res2NetBlock(nn.Module):
    """Splits the channels into `scale` parts, and convolves each part together with the output of the previous part."""

    def __init__(self, width: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            DelayBlock(width // scale, width // scale, kernel, dilation) for _ in range(scale - 1)
        )
        self._scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [1, width, frames] for x of the same shape. The first part of the channels is returned unchanged."""
        first, second, *rest = x.chunk(self._scale, 1)
        out = [first, self.blocks[0](second)]
        for part, block in zip(rest, list(self.blocks)[1:], strict=True):
            out.append(block(part + out[-1]))
        return torch.cat(out, 1)


class SqueezeExcitation(nn.Module):
    """Weights each channel by the means of all channels over the frames, through a bottleneck of `inner_width`."""

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
        """Return [1, out_channels, frames] for x [1, in_channels, frames]. Checkpoints have equal widths."""
        out: torch.Tensor = self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))
        return out + x


class AttentivePooling(nn.Module):
    """Mean and standard deviation over the frames, weighted by attention for each channel separately."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.tdnn, self.conv = DelayBlock(3 * width, inner_width, 1), nn.Conv1d(inner_width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [1, 2 * width, 1] for x [1, width, frames]: the means of the channels, then their deviations."""
        even = torch.full_like(x[:, :1], 1 / x.shape[2])
        around = [part[..., None].expand_as(x) for part in _moments(x, even)]
        weights = torch.softmax(self.conv(torch.tanh(self.tdnn(torch.cat((x, *around), 1)))), 2)
        return torch.cat(_moments(x, weights), 1)[..., None]


def _moments(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = (weights * x).sum(2)
    return mean, (weights * (x - mean[..., None]).square()).sum(2).clamp(1e-12).sqrt()


class SpeakerEncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The `speaker_encoder_config` of config.json: the sizes of the speaker encoder.

    Released files have only `enc_dim` and the sample rate. The defaults are those of the published package.
    """

    # Bins of the mel spectrogram.
    mel_dim: int = 128
    # Width of the speaker's vector.
    enc_dim: int
    # Channels of each block.
    enc_channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    # Kernel size of each block.
    enc_kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    # Dilation of each block.
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    # Inner width of the attentive pooling.
    enc_attention_channels: int = 128
    # The number of parts that a Res2Net block splits its channels into.
    enc_res2net_scale: int = 8
    # Bottleneck width of squeeze and excitation.
    enc_se_channels: int = 128


class SpeakerEncoder(nn.Module):
    """Encodes a sample as the speaker's vector, which replaces the code of a named voice in the talker's input."""

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
    """Return a sample's frames, the first `count` codes of each. The last frame is padded with silence.

    `encoder`: a MimiModel. `pcm`: float32 [num_samples], 24 kHz. `frame_samples`: samples in a frame. Called in the
    model's thread.
    """
    audio = torch.from_numpy(pcm)[None, None].to(encoder.device, encoder.dtype)
    codes: Sequence[Sequence[int]] = encoder.encode(audio).audio_codes[0, :count].T.tolist()
    # The encoder pads the audio to more than a whole frame, so drop its extra frames.
    return tuple(tuple(frame) for frame in codes[: -(-len(pcm) // frame_samples)])
