"""CAM++: its graph computes what the published layers compute, and its input is Kaldi's log mel spectrum."""

from __future__ import annotations

import asyncio
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional

from antiphon.adapters.campplus.encoder import SIZE, CamPlusPlusEncoder, mel_frames, windows_of
from antiphon.adapters.campplus.network import BLOCKS, MAX_FRAMES, network
from antiphon.adapters.spec import LaneModelOptions
from antiphon.errors import ModelError
from antiphon.modeling.sound.voice_weights import Weights, read_weights

# Channels of the bands, of the first layer over time, of each new layer, and inside of a layer.
BANDS, FIRST, GROWTH, INNER = 4, 16, 4, 8


def small_weights(size: int = 6) -> Weights:
    """Return random weights with the published names, for fewer channels."""
    chance = np.random.default_rng(0)
    found: Weights = {}

    def conv(name: str, *shape: int, bias: bool = False) -> None:
        found[f"{name}.weight"] = (chance.normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        if bias:
            found[f"{name}.bias"] = chance.normal(size=shape[0]).astype(np.float32)

    def norm(name: str, channels: int, *, affine: bool = True) -> None:
        found[f"{name}.running_mean"] = chance.normal(0, 0.1, channels).astype(np.float32)
        found[f"{name}.running_var"] = chance.uniform(0.5, 1.5, channels).astype(np.float32)
        if affine:
            found[f"{name}.weight"] = chance.uniform(0.5, 1.5, channels).astype(np.float32)
            found[f"{name}.bias"] = chance.normal(0, 0.1, channels).astype(np.float32)

    conv("head.conv1", BANDS, 1, 3, 3), norm("head.bn1", BANDS)
    for layer in (1, 2):
        for block in (0, 1):
            for part in (1, 2):
                conv(f"head.layer{layer}.{block}.conv{part}", BANDS, BANDS, 3, 3)
                norm(f"head.layer{layer}.{block}.bn{part}", BANDS)
        conv(f"head.layer{layer}.0.shortcut.0", BANDS, BANDS, 1, 1), norm(f"head.layer{layer}.0.shortcut.1", BANDS)
    conv("head.conv2", BANDS, BANDS, 3, 3), norm("head.bn2", BANDS)
    conv("xvector.tdnn.linear", FIRST, 10 * BANDS, 5), norm("xvector.tdnn.nonlinear.batchnorm", FIRST)
    channels = FIRST
    for block, (num_layers, _) in enumerate(BLOCKS, 1):
        for layer in range(1, num_layers + 1):
            name = f"xvector.block{block}.tdnnd{layer}"
            norm(f"{name}.nonlinear1.batchnorm", channels), conv(f"{name}.linear1", INNER, channels, 1)
            norm(f"{name}.nonlinear2.batchnorm", INNER), conv(f"{name}.cam_layer.linear_local", GROWTH, INNER, 3)
            conv(f"{name}.cam_layer.linear1", INNER // 2, INNER, 1, bias=True)
            conv(f"{name}.cam_layer.linear2", GROWTH, INNER // 2, 1, bias=True)
            channels += GROWTH
        norm(f"xvector.transit{block}.nonlinear.batchnorm", channels)
        conv(f"xvector.transit{block}.linear", channels // 2, channels, 1)
        channels //= 2
    norm("xvector.out_nonlinear.batchnorm", channels), conv("xvector.dense.linear", size, 2 * channels, 1)
    norm("xvector.dense.nonlinear.batchnorm", size, affine=False)
    return found


class Published:
    """The layers as 3D-Speaker composes them, in PyTorch."""

    def __init__(self, weights: Weights) -> None:
        self.weights = {name: torch.from_numpy(value) for name, value in weights.items()}

    def norm(self, x: torch.Tensor, name: str, *, relu: bool = True) -> torch.Tensor:
        mean, variance = (self.weights[f"{name}.running_{part}"] for part in ("mean", "var"))
        weight, bias = self.weights.get(f"{name}.weight"), self.weights.get(f"{name}.bias")
        x = functional.batch_norm(x, mean, variance, weight, bias)
        return functional.relu(x) if relu else x

    def flat(self, x: torch.Tensor, name: str, stride: int = 1, dilation: int = 1) -> torch.Tensor:
        kernel = self.weights[f"{name}.weight"]
        pad = (kernel.shape[-1] - 1) // 2 * dilation
        return functional.conv1d(x, kernel, self.weights.get(f"{name}.bias"), stride, pad, dilation)

    def square(self, x: torch.Tensor, name: str, stride: int = 1) -> torch.Tensor:
        kernel = self.weights[f"{name}.weight"]
        return functional.conv2d(x, kernel, None, (stride, 1), kernel.shape[-1] // 2)

    def residual(self, x: torch.Tensor, name: str, stride: int) -> torch.Tensor:
        y = self.norm(self.square(x, f"{name}.conv1", stride), f"{name}.bn1")
        y = self.norm(self.square(y, f"{name}.conv2"), f"{name}.bn2", relu=False)
        if stride > 1:
            x = self.norm(self.square(x, f"{name}.shortcut.0", stride), f"{name}.shortcut.1", relu=False)
        return functional.relu(x + y)

    def masked(self, x: torch.Tensor, name: str, dilation: int) -> torch.Tensor:
        x = self.flat(self.norm(x, f"{name}.nonlinear1.batchnorm"), f"{name}.linear1")
        x = self.norm(x, f"{name}.nonlinear2.batchnorm")
        pooled = functional.avg_pool1d(x, 100, 100, ceil_mode=True)
        pooled = pooled.repeat_interleave(100, -1)[..., : x.shape[-1]]
        context = functional.relu(self.flat(x.mean(-1, keepdim=True) + pooled, f"{name}.cam_layer.linear1"))
        mask = torch.sigmoid(self.flat(context, f"{name}.cam_layer.linear2"))
        return self.flat(x, f"{name}.cam_layer.linear_local", dilation=dilation) * mask

    def __call__(self, frames: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.square(frames.permute(0, 2, 1)[:, None], "head.conv1"), "head.bn1")
        for layer in (1, 2):
            x = self.residual(self.residual(x, f"head.layer{layer}.0", 2), f"head.layer{layer}.1", 1)
        x = self.norm(self.square(x, "head.conv2", 2), "head.bn2").flatten(1, 2)
        x = self.norm(self.flat(x, "xvector.tdnn.linear", 2), "xvector.tdnn.nonlinear.batchnorm")
        for block, (num_layers, dilation) in enumerate(BLOCKS, 1):
            for layer in range(1, num_layers + 1):
                x = torch.cat((x, self.masked(x, f"xvector.block{block}.tdnnd{layer}", dilation)), 1)
            x = self.norm(x, f"xvector.transit{block}.nonlinear.batchnorm")
            x = self.flat(x, f"xvector.transit{block}.linear")
        x = self.norm(x, "xvector.out_nonlinear.batchnorm")
        x = torch.cat((x.mean(-1), x.std(-1)), -1)[..., None]
        x = self.norm(self.flat(x, "xvector.dense.linear"), "xvector.dense.nonlinear.batchnorm", relu=False)
        return x[..., 0]


@pytest.mark.parametrize("num_frames", [50, 161, MAX_FRAMES])
def test_the_graph_computes_what_the_published_layers_compute(num_frames: int) -> None:
    weights = small_weights()
    frames = np.random.default_rng(1).normal(size=(2, num_frames, 80)).astype(np.float32)
    model = onnxruntime.InferenceSession(network(weights), providers=["CPUExecutionProvider"])
    (found,) = model.run(None, {"frames": frames})
    assert np.abs(found - Published(weights)(torch.from_numpy(frames)).numpy()).max() < 1e-4


def test_frames_are_kaldis() -> None:
    """The band of a tone is the one of Kaldi's scale, and a constant is removed."""
    seconds = np.arange(1600) / 16_000
    frames = mel_frames(np.asarray(0.1 * np.sin(2 * np.pi * 1000 * seconds) + 0.5, np.float32))
    assert frames.shape == (8, 80)
    mel = 1127 * np.log1p(np.array([20.0, 1000.0, 8000.0]) / 700)
    band = (mel[1] - mel[0]) / (mel[2] - mel[0]) * 81 - 1
    assert set(np.abs(frames.argmax(axis=1) - band) < 1) == {True}
    silence = mel_frames(np.full(400, 0.5, np.float32))
    assert np.allclose(silence, np.log(np.finfo(np.float32).eps))


def test_windows_cover_the_speech_and_are_never_longer_than_the_network_takes() -> None:
    assert windows_of(60) == windows_of(MAX_FRAMES) == [0]
    for num_frames in (201, 399, 998):
        starts = windows_of(num_frames)
        assert (starts[0], starts[-1]) == (0, num_frames - MAX_FRAMES)
        assert max(np.diff(starts)) <= MAX_FRAMES


def saved(path: Path, weights: Weights) -> Path:
    """Write a checkpoint in PyTorch's format."""
    torch.save(OrderedDict((name, torch.from_numpy(value)) for name, value in weights.items()), path)
    return path


def test_a_checkpoint_is_read_without_running_code(tmp_path: Path) -> None:
    weights = small_weights()
    found = read_weights(saved(tmp_path / "campplus.pt", weights))
    assert found.keys() == weights.keys()
    assert all(np.array_equal(found[name], value) for name, value in weights.items())
    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        archive.writestr("evil/data.pkl", pickle.dumps(print))
    with pytest.raises(ValueError, match="not allowed"):
        read_weights(tmp_path / "evil.pt")


@pytest.mark.parametrize("num_samples", [0, 1, 400, 9600, 32_001, 90_000])
def test_a_vector_has_the_length_one_however_short_the_speech(tmp_path: Path, num_samples: int) -> None:
    saved(tmp_path / "campplus.pt", small_weights(SIZE))
    encoder = CamPlusPlusEncoder(tmp_path, "campplus", LaneModelOptions())
    speech = np.random.default_rng(1).normal(0, 0.1, num_samples).astype(np.float32)
    vector = asyncio.run(encoder.embed(speech))
    encoder.close()
    assert vector.shape == (encoder.profile.size,)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_another_checkpoint_does_not_load(tmp_path: Path) -> None:
    saved(tmp_path / "campplus.pt", {"weight": np.zeros(3, np.float32)})
    with pytest.raises(ModelError, match="does not load"):
        CamPlusPlusEncoder(tmp_path, "campplus", LaneModelOptions())
