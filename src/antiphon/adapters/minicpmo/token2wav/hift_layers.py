"""The layers of HiFT, token2wav's vocoder, and what they keep of each stream."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import cast

import msgspec
import torch
from torch import nn
from torch.nn.functional import interpolate, pad

SAMPLE_RATE_HZ = 24_000
# The window and the hop of the short-time spectra.
FFT_SAMPLES, HOP_SAMPLES = 16, 4


class F0Config(msgspec.Struct, frozen=True):
    """The sizes of the predictor of F0, by their names in config.yaml. `cond_channels`: the width of its layers."""

    cond_channels: int = 512


class SpectraConfig(msgspec.Struct, frozen=True):
    """The window (`n_fft`) and the hop (`hop_len`) of the short-time spectra, in samples."""

    n_fft: int = FFT_SAMPLES
    hop_len: int = HOP_SAMPLES


class HiftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a vocoder, by their names in config.yaml (under `hift`). The defaults are those of CosyVoice 2."""

    # The number of mel bands.
    in_channels: int = 80
    # The channels before the first upsampling. Each upsampling halves them.
    base_channels: int = 512
    # The number of harmonics of the source above F0.
    nb_harmonics: int = 8
    # The sample rate of the audio.
    sampling_rate: int = SAMPLE_RATE_HZ
    # The amplitude of a harmonic.
    nsf_alpha: float = 0.1
    # The amplitude of the noise in voiced frames.
    nsf_sigma: float = 0.003
    # The lowest F0 of a voiced frame, in Hz.
    nsf_voiced_threshold: float = 10.0
    # The factors of upsampling, which lead from mel frames to short-time spectra.
    upsample_rates: tuple[int, ...] = (8, 5, 3)
    # The kernels of the upsampling.
    upsample_kernel_sizes: tuple[int, ...] = (16, 11, 7)
    # The short-time spectra.
    istft_params: SpectraConfig = SpectraConfig()
    # The kernels of the residual blocks after an upsampling, whose results are averaged.
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    # The dilations within each of these blocks.
    resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5),) * 3
    # The kernel of the source's residual block at each upsampling.
    source_resblock_kernel_sizes: tuple[int, ...] = (7, 7, 11)
    # The dilations within each of these blocks.
    source_resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5),) * 3
    # The negative slope of the activations before an upsampling.
    lrelu_slope: float = 0.1
    # The limit of a sample's magnitude.
    audio_limit: float = 0.99
    # Mel frames after its own that the first causal convolution sees.
    conv_pre_look_right: int = 4
    # The predictor of F0.
    f0_predictor: F0Config = F0Config()

    @property
    def rate(self) -> int:
        """The number of short-time spectra in a mel frame."""
        return prod(self.upsample_rates)


class Past:
    """What the layers kept of the streams of one call. The layers read it in a fixed order, and keep as much as that.

    `before`, float [streams, size]: what they kept in the call before; None: the streams begin with this call.
    """

    def __init__(self, before: torch.Tensor | None) -> None:
        self.before, self._at = before, 0
        self._kept: list[torch.Tensor] = []

    def read(self, channels: int, length: int) -> torch.Tensor:
        """Return the next part, float [streams, channels, length]. Only for streams that have a past."""
        before = cast(torch.Tensor, self.before)
        self._at += channels * length
        return before[:, self._at - channels * length : self._at].view(-1, channels, length)

    def keep(self, end: torch.Tensor) -> None:
        """Keep a part, float [streams, channels, length]."""
        self._kept.append(end.flatten(1))

    def extend(self, x: torch.Tensor, length: int, padding: int | None = None) -> torch.Tensor:
        """Return x [streams, channels, frames] after its past of `length` frames, and keep the end of both.

        A stream that begins has a past of `padding` zeros; None: as many as `length`.
        """
        if self.before is None:
            x = pad(x, (length if padding is None else padding, 0))
        else:
            x = torch.cat((self.read(x.shape[1], length), x), 2)
        self.keep(x[..., x.shape[2] - length :])
        return x

    def after(self) -> torch.Tensor:
        """Return what was kept, float [streams, size]."""
        return torch.cat(self._kept, 1)


class Conv(nn.Conv1d):
    """A convolution. With a past, it sees only the past. Without one, it is padded as its constructor says."""

    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        """Return [streams, channels, frames]."""
        reach = (self.kernel_size[0] - 1) * self.dilation[0]
        return super().forward(past.extend(x, reach) if past is not None and reach else x)


def conv(width: int, out: int, kernel: int, *, dilation: int = 1, causal: bool) -> Conv:
    """Return a convolution with as many frames before as after its own, or with no frames after it."""
    return Conv(width, out, kernel, dilation=dilation, padding=0 if causal else (kernel - 1) * dilation // 2)


class RepeatUpsample(Conv):
    """Repeats each frame, and then sees only the past."""

    def __init__(self, width: int, out: int, kernel: int, factor: int) -> None:
        super().__init__(width, out, kernel)
        self._factor = factor

    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        """Return [streams, out, factor * frames]."""
        return super().forward(interpolate(x, scale_factor=float(self._factor)), past)


class Upsample(nn.ConvTranspose1d):
    """A transposed convolution that sees both sides."""

    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:  # type: ignore[override]
        """Return [streams, out, factor * frames]."""
        return super().forward(x)


class SourceDownsample(nn.Conv1d):
    """Reduces the source's spectra to the rate of an upsampling. Causal: the last spectrum that it sees is its own."""

    def __init__(self, out: int, factor: int, *, causal: bool) -> None:
        width = FFT_SAMPLES + 2
        if factor == 1:
            super().__init__(width, out, 1)
        else:
            super().__init__(width, out, 2 * factor, factor, padding=0 if causal else factor // 2)

    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        """Return [streams, out, spectra / factor]."""
        factor = self.stride[0]
        return super().forward(past.extend(x, factor, factor - 1) if past is not None and factor > 1 else x)


class SineSquare(nn.Module):
    """The activation x + sin²(alpha x) / alpha, with an alpha for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [streams, width, frames]."""
        alpha = self.alpha[:, None]
        return x + (x * alpha).sin().square() / (alpha + 1e-9)


class ResBlock(nn.Module):
    """Pairs of convolutions with residual connections. The first of each pair is dilated."""

    def __init__(self, width: int, kernel: int, dilations: Sequence[int], *, causal: bool) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(conv(width, width, kernel, dilation=d, causal=causal) for d in dilations)
        self.convs2 = nn.ModuleList(conv(width, width, kernel, causal=causal) for _ in dilations)
        self.activations1 = nn.ModuleList(SineSquare(width) for _ in dilations)
        self.activations2 = nn.ModuleList(SineSquare(width) for _ in dilations)

    def forward(self, x: torch.Tensor, past: Past | None) -> torch.Tensor:
        """Return [streams, width, frames]."""
        pairs = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for activation1, conv1, activation2, conv2 in pairs:
            x = x + conv2(activation2(conv1(activation1(x), past)), past)
        return x
