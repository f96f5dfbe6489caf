"""HiFT, the vocoder of token2wav: turns mel frames (80 bands, 50 a second) into audio at 24 kHz.

It is the network of Li et al. 2023 (HiFTNet, arXiv 2309.09493): a predictor of the fundamental frequency (F0), a source
of harmonics and noise, and a generator of short-time spectra. There are two kinds, each with its own weights:

- `CausalHift` (CosyVoice 3; a checkpoint with `config.yaml`). Each layer keeps the end of its input, so the audio does
  not depend on how a stream is cut into windows. The audio lags eight frames behind the mel frames.
- `WindowHift` (CosyVoice 2; a checkpoint without that file). It sees both sides of a frame. Each window begins with the
  last eight frames of the window before, and the audio of both is cross-faded there.

Parameter names are those of the released checkpoints, without their weight norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import pi, prod

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn.functional import leaky_relu, pad

from antiphon.adapters.minicpmo.token2wav.hift_layers import (
    FFT_SAMPLES,
    HOP_SAMPLES,
    SAMPLE_RATE_HZ,
    Conv,
    HiftConfig,
    Past,
    RepeatUpsample,
    ResBlock,
    SourceDownsample,
    SpectraConfig,
    Upsample,
    conv,
)
from antiphon.errors import ModelError

# The samples of a mel frame.
FRAME_SAMPLES = 480
# The number of mel frames that the audio lags behind its input. A stream begins when it has more frames than that.
DELAY_FRAMES = 8
# The number of hops in a window of a short-time spectrum.
_OVERLAP = FFT_SAMPLES // HOP_SAMPLES
# Frames after its own that the causal predictor of F0 sees.
_F0_AHEAD = 3
# The released code draws the noise of the source without a seed. Here it is a table of this length, drawn from this
# seed, which repeats. All streams read the same table from its start.
NOISE_S, NOISE_SEED = 60, 20_240


class F0Predictor(nn.Module):
    """Predicts the fundamental frequency of each mel frame in Hz."""

    def __init__(self, config: HiftConfig, *, causal: bool) -> None:
        super().__init__()
        width = config.f0_predictor.cond_channels
        # The first causal layer sees the next frames, which its caller appends.
        bands = config.in_channels
        first = Conv(bands, width, _F0_AHEAD + 1) if causal else conv(bands, width, 3, causal=False)
        layers = [first, *(conv(width, width, 3, causal=causal) for _ in range(4))]
        self.condnet = nn.ModuleList(part for layer in layers for part in (layer, nn.ELU()))
        self.classifier = nn.Linear(width, 1)

    def forward(self, mel: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        """Return F0 of n streams, [n, frames]. The causal predictor returns three frames less than `mel` has."""
        x = mel
        for number, layer in enumerate(self.condnet):
            x = layer(x, past) if number and isinstance(layer, Conv) else layer(x)
        f0: torch.Tensor = self.classifier(x.transpose(1, 2)).squeeze(-1).abs()
        return f0


class Source(nn.Module):
    """The sound that the generator shapes: the harmonics of F0 in voiced frames, and noise.

    `noise`, [frames, 480]: the table of noise, already weighted by `l_linear`.
    """

    noise: torch.Tensor

    def __init__(self, config: HiftConfig) -> None:
        super().__init__()
        self._config = config
        self.l_linear = nn.Linear(config.nb_harmonics + 1, 1)
        self.register_buffer("noise", torch.zeros(1, FRAME_SAMPLES), persistent=False)

    def set_noise(self, table: torch.Tensor) -> None:
        """Set the table of noise for each harmonic, [frames * 480, harmonics], after the weights are loaded."""
        weights = self.l_linear.weight[0]
        self.noise = (table.to(weights) @ weights).view(-1, FRAME_SAMPLES)

    def increments(self, f0: torch.Tensor) -> torch.Tensor:
        """Return how many cycles each harmonic advances in a sample, modulo 1: [n, frames, harmonics]."""
        harmonics = torch.arange(1, self._config.nb_harmonics + 2, device=f0.device, dtype=f0.dtype)
        return (f0[:, :, None] * harmonics / self._config.sampling_rate).remainder(1)

    def mix(self, sines: torch.Tensor, f0: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
        """Return the sound of n streams, [n, frames * 480].

        `sines`: each harmonic's sine in each frame or sample, [n, frames, 1 or 480, harmonics]. `f0`: [n, frames].
        `begin`, int64 [n]: the positions of the first frames in their streams.
        """
        config, count = self._config, f0.shape[1]
        voiced = (f0 > config.nsf_voiced_threshold)[..., None]
        tone: torch.Tensor = self.l_linear(torch.where(voiced[..., None], sines * config.nsf_alpha, 0.0)).squeeze(-1)
        places = (begin[:, None] + torch.arange(count, device=f0.device)).remainder(len(self.noise))
        noise = self.noise.index_select(0, places.flatten()).view(len(f0), count, -1)
        noise = torch.where(voiced, noise * config.nsf_sigma, noise * (config.nsf_alpha / 3))
        return (tone + noise).tanh().flatten(1)


class Hift(nn.Module):
    """The common parts of both kinds: the generator, and the transforms to and from short-time spectra."""

    _to_spectra: torch.Tensor
    _to_sound: torch.Tensor
    _edges: torch.Tensor

    def __init__(self, config: HiftConfig, *, causal: bool) -> None:
        """Raises ModelError for sizes that token2wav cannot have."""
        super().__init__()
        hop = config.rate * HOP_SAMPLES
        if (config.sampling_rate, hop, config.istft_params) != (SAMPLE_RATE_HZ, FRAME_SAMPLES, SpectraConfig()):
            raise ModelError("the vocoder does not make 480 samples at 24 kHz of a mel frame")
        if causal and config.conv_pre_look_right != DELAY_FRAMES - _F0_AHEAD - 1:
            raise ModelError("the vocoder's delay is not eight mel frames")
        self.config = config
        self.m_source = Source(config)
        self.f0_predictor = F0Predictor(config, causal=causal)
        base = config.base_channels
        # The first causal convolution sees the next frames, which its caller appends.
        self.conv_pre = (
            Conv(config.in_channels, base, config.conv_pre_look_right + 1)
            if causal
            else conv(config.in_channels, base, 7, causal=False)
        )
        self.ups, self.source_downs = nn.ModuleList(), nn.ModuleList()
        self.source_resblocks, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for i, (factor, kernel) in enumerate(zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True)):
            width, out = base // 2**i, base // 2 ** (i + 1)
            self.ups.append(
                RepeatUpsample(width, out, kernel, factor)
                if causal
                else Upsample(width, out, kernel, factor, padding=(kernel - factor) // 2)
            )
            self.source_downs.append(SourceDownsample(out, prod(config.upsample_rates[i + 1 :]), causal=causal))
            size = config.source_resblock_kernel_sizes[i], config.source_resblock_dilation_sizes[i]
            self.source_resblocks.append(ResBlock(out, *size, causal=causal))
            for sizes in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True):
                self.resblocks.append(ResBlock(out, *sizes, causal=causal))
        self.conv_post = conv(out, FFT_SAMPLES + 2, 7, causal=causal)
        self._register_transforms()

    def _register_transforms(self) -> None:
        """Register the matrices of the transforms, in float64."""
        window = torch.hann_window(FFT_SAMPLES, dtype=torch.float64).float().double()
        spectra = torch.fft.rfft(torch.diag(window))
        bins = torch.eye(FFT_SAMPLES // 2 + 1, dtype=torch.float64)
        sound = torch.cat((torch.fft.irfft(bins), torch.fft.irfft(1j * bins)))
        # Windows overlap by three quarters, so the sum of their squares is the same in all hops but the first and last.
        squares = window.square().view(_OVERLAP, HOP_SAMPLES)
        total = squares.sum(0).repeat(_OVERLAP)
        self.register_buffer("_to_spectra", torch.cat((spectra.real, spectra.imag), 1), persistent=False)
        self.register_buffer("_to_sound", sound * window / total, persistent=False)
        edges = torch.stack((squares.sum(0) / squares[:-1].sum(0), squares.sum(0) / squares[1:].sum(0)))
        self.register_buffer("_edges", edges, persistent=False)

    def _spectra(self, sound: torch.Tensor) -> torch.Tensor:
        """Return the spectra of whole windows of sound [n, samples]: real and imaginary parts, [n, 18, spectra]."""
        return (sound.unfold(1, FFT_SAMPLES, HOP_SAMPLES) @ self._to_spectra).transpose(1, 2)

    def _hops(self, spectra: torch.Tensor, *, begins: bool, ends: bool) -> torch.Tensor:
        """Return the sound of K spectra [n, 18, K] hop by hop, [n, K + 3, 4], beginning with the first window.

        The first two and the last two hops are outside the sound. `begins`, `ends`: no other spectra come before or
        after these.
        """
        windows = (spectra.transpose(1, 2) @ self._to_sound).view(len(spectra), -1, _OVERLAP, HOP_SAMPLES)
        parts = [pad(windows[:, :, i], (0, 0, i, _OVERLAP - 1 - i)) for i in range(_OVERLAP)]
        hops = sum(parts[1:], parts[0])
        if begins:
            hops[:, 2] *= self._edges[0]
        if ends:
            hops[:, -_OVERLAP + 1] *= self._edges[1]
        return hops

    def _shape(self, x: torch.Tensor, source: torch.Tensor, past: Past | None) -> torch.Tensor:
        """Return the spectra of the audio, [n, 18, spectra], from conv_pre's output and the spectra of the source."""
        config, last = self.config, len(self.ups) - 1
        kinds = len(config.resblock_kernel_sizes)
        for i, up in enumerate(self.ups):
            x = up(leaky_relu(x, config.lrelu_slope), past)
            if i == last and (past is None or past.before is None):
                x = torch.cat((x[..., 1:2], x), 2)
            x = x + self.source_resblocks[i](self.source_downs[i](source, past), past)
            blocks = [block(x, past) for block in self.resblocks[i * kinds : (i + 1) * kinds]]
            x = sum(blocks[1:], blocks[0]) / kinds
        x = self.conv_post(leaky_relu(x), past)
        magnitude, phase = x.chunk(2, 1)
        magnitude, phase = magnitude.exp().clamp(max=1e2), phase.sin()
        return torch.cat((magnitude * phase.cos(), magnitude * phase.sin()), 1)

    def _audio(self, hops: torch.Tensor) -> torch.Tensor:
        return hops.flatten(1).clamp(-self.config.audio_limit, self.config.audio_limit)


class CausalHift(Hift):
    """The vocoder of CosyVoice 3. Predicts F0 in float64, and counts its cycles in float64."""

    def __init__(self, config: HiftConfig) -> None:
        super().__init__(config, causal=True)

    def forward(self, mel: torch.Tensor, past: Past, exact: Past, frames: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Return the audio of the next frames of n streams, [n, samples], which lags DELAY_FRAMES behind them.

        Args:
            mel: The frames, [n, 80, frames]. Streams that begin have more than DELAY_FRAMES, except with `last`.
            past: The state of the generator.
            exact: The state in float64: of the predictor of F0, and the phases of the harmonics.
            frames: The number of frames of each stream so far, int64 [n].
            last: These frames end the streams: the rest of the audio is returned too, and no state is kept.
        """
        ahead, starts = self.config.conv_pre_look_right, past.before is None
        delay = _F0_AHEAD + ahead
        mel = mel if starts else torch.cat((past.read(mel.shape[1], delay), mel), 2)
        past.keep(mel[..., max(0, mel.shape[2] - delay) :])
        # F0 runs `ahead` frames ahead of the generator.
        known = mel if starts else mel[..., ahead:]
        f0 = self.f0_predictor(pad(known, (0, _F0_AHEAD)).double() if last else known.double(), exact).to(mel.dtype)
        begin = frames if starts else frames - _F0_AHEAD
        source = self._source_spectra(self._sound(f0, begin, exact), past, last=last)
        x = self.conv_pre(pad(mel, (0, ahead)) if last else mel[..., :-_F0_AHEAD])
        spectra = self._shape(x, source, past)
        rate = self.config.rate
        if not starts:
            spectra = torch.cat((past.read(FFT_SAMPLES + 2, rate + 2), spectra), 2)
        past.keep(spectra[..., -rate - 2 :])
        end = spectra.shape[2] + 1
        hops = self._hops(spectra, begins=starts, ends=last)
        return self._audio(hops[:, 2 if starts else 3 : end if last else end - rate])

    def _sound(self, f0: torch.Tensor, begin: torch.Tensor, exact: Past) -> torch.Tensor:
        """Return the source, [n, samples]. A harmonic's phase is the same in all samples of a frame."""
        source = self.m_source
        cycles = source.increments(f0).double().cumsum(1) * FRAME_SAMPLES
        if exact.before is not None:
            cycles = cycles + exact.read(1, cycles.shape[2])
        cycles = cycles.remainder(1)
        exact.keep(cycles[:, -1:])
        return source.mix((cycles * (2 * pi)).sin().to(f0.dtype)[:, :, None], f0, begin)

    def _source_spectra(self, sound: torch.Tensor, past: Past, *, last: bool) -> torch.Tensor:
        """Return the spectra of the source that the generator has frames for. Spectrum k is centred on sample 4 k."""
        # The generator is this number of samples behind the source.
        behind = self.config.conv_pre_look_right * FRAME_SAMPLES
        half, kept = FFT_SAMPLES // 2, behind + FFT_SAMPLES // 2 - HOP_SAMPLES
        if past.before is None:
            sound = torch.cat((sound[:, 1 : half + 1].flip(1), sound), 1)
        else:
            sound = torch.cat((past.read(1, kept)[:, 0], sound), 1)
        past.keep(sound[:, -kept:])
        after = sound[:, -half - 1 : -1].flip(1)
        return self._spectra(torch.cat((sound, after), 1) if last else sound[:, : half - behind])


class WindowHift(Hift):
    """The vocoder of CosyVoice 2, whose windows overlap by DELAY_FRAMES."""

    _fade: torch.Tensor

    def __init__(self, config: HiftConfig) -> None:
        super().__init__(config, causal=False)
        fade = torch.from_numpy(np.hamming(2 * DELAY_FRAMES * FRAME_SAMPLES)).view(2, -1)
        self.register_buffer("_fade", fade, persistent=False)

    def forward(self, mel: torch.Tensor, past: Past, exact: Past, frames: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Return the audio of the next frames, as CausalHift does. `exact` is not used, and stays empty."""
        starts, overlap = past.before is None, DELAY_FRAMES * FRAME_SAMPLES
        mel = mel if starts else torch.cat((past.read(mel.shape[1], DELAY_FRAMES), mel), 2)
        sound = self._sound(self.f0_predictor(mel), frames if starts else frames - DELAY_FRAMES)
        if not starts:
            sound = torch.cat((past.read(1, overlap)[:, 0], sound[:, overlap:]), 1)
        half = FFT_SAMPLES // 2
        edges = sound[:, 1 : half + 1].flip(1), sound, sound[:, -half - 1 : -1].flip(1)
        spectra = self._shape(self.conv_pre(mel), self._spectra(torch.cat(edges, 1)), None)
        audio = self._audio(self._hops(spectra, begins=True, ends=True)[:, 2:-2])
        if not starts:
            faded = audio[:, :overlap] * self._fade[0] + past.read(1, overlap)[:, 0] * self._fade[1]
            audio = torch.cat((faded, audio[:, overlap:]), 1)
        for kept, length in ((mel, DELAY_FRAMES), (sound, overlap), (audio, overlap)):
            past.keep(kept[..., max(0, kept.shape[-1] - length) :])
        exact.keep(audio[:, :0].double())
        # Faded audio may be louder than the limit of a window.
        return (audio if last else audio[:, :-overlap]).clamp(-1, 1)

    def _sound(self, f0: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
        """Return the source, [n, samples]. The phase of a sample is interpolated between the centres of frames."""
        source = self.m_source
        steps = source.increments(f0) * FRAME_SAMPLES
        cycles = steps.double().cumsum(1).remainder(1).to(f0.dtype)
        # A sample's distance to the centre of its frame. Beyond the first and last centre, the phase stays.
        distance = (torch.arange(FRAME_SAMPLES, device=f0.device, dtype=f0.dtype) + 0.5) / FRAME_SAMPLES - 0.5
        before, after = pad(steps[:, 1:], (0, 0, 1, 0))[:, :, None], pad(steps[:, 1:], (0, 0, 0, 1))[:, :, None]
        moved = distance[:, None] * torch.where(distance[:, None] < 0, before, after)
        return source.mix(((cycles[:, :, None] + moved) * (2 * pi)).sin(), f0, begin)


def noise_table(*, causal: bool, harmonics: int) -> torch.Tensor:
    """Return the source's table of noise, float32 [samples, harmonics]: uniform in [0, 1) if causal, else normal."""
    random = torch.Generator().manual_seed(NOISE_SEED)
    size = (NOISE_S * SAMPLE_RATE_HZ, harmonics)
    return torch.rand(size, generator=random) if causal else torch.randn(size, generator=random)


_NORMED = ".parametrizations.weight.original"


def without_weight_norm(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a released file under this module's names: weight norm is applied, in float64."""
    plain = {name.removeprefix("generator."): weight for name, weight in weights.items()}
    for name in list(plain):
        for norm, direction in ((".weight_g", ".weight_v"), (f"{_NORMED}0", f"{_NORMED}1")):
            if name.endswith(norm):
                layer = name.removesuffix(norm)
                v, g = plain.pop(layer + direction).double(), plain.pop(name).double()
                plain[f"{layer}.weight"] = v * (g / v.flatten(1).norm(dim=1).view(g.shape))
    return plain


def load_hift(
    weights: Mapping[str, torch.Tensor],
    fields: object,
    device: torch.device,
    *,
    causal: bool,
    dtype: torch.dtype = torch.float32,
) -> CausalHift | WindowHift:
    """Return the vocoder of a checkpoint on a device.

    Args:
        weights: The state dict of hift.pt.
        fields: The mapping `hift` in config.yaml; {} if there is no such file.
        device: The device to compute on.
        causal: Whether the checkpoint has a config.yaml.
        dtype: The type to compute in. The predictor of a CausalHift's F0 computes in float64.

    Raises ModelError if the weights or sizes are not those of such a vocoder.
    """
    try:
        config = msgspec.convert(fields, HiftConfig)
        hift = (CausalHift(config) if causal else WindowHift(config)).to(dtype)
        if causal:
            hift.f0_predictor.double()
        hift.load_state_dict(without_weight_norm(weights))
    except (KeyError, ValueError, RuntimeError, msgspec.ValidationError) as error:
        raise ModelError(f"the vocoder does not load: {error}") from error
    hift.requires_grad_(False)
    hift.m_source.set_noise(noise_table(causal=causal, harmonics=config.nb_harmonics + 1))
    return hift.eval().to(device)
