"""Makes golden/minicpmo_hift.npz with the published code.

`PYTHONPATH=. python tests/adapters/make_golden_hift.py NEWEST OLDER`. NEWEST and OLDER are the folders that contain the
module `stepaudio2` of the packages minicpmo-utils 1.0.7 and stepaudio2-minicpmo 0.1.1, unpacked. The script needs torch
and scipy. It uses none of antiphon.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.adapters import tiny_hift as tiny


class AnyModule(ModuleType):
    """Takes the place of a module that the vocoder does not use, or of something in it."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyModule(name)


UNUSED = (
    "hyperpyyaml",
    "librosa",
    "librosa.filters",
    "onnxruntime",
    "s3tokenizer",
    "torchaudio",
    "torchaudio.compliance",
    "torchaudio.compliance.kaldi",
    *(f"stepaudio2.cosyvoice2.flow.{name}" for name in ("decoder_dit", "flow", "flow_matching")),
    "stepaudio2.cosyvoice2.transformer.upsample_encoder_v2",
)


def published(folder: str, module: str, unused: Sequence[str] = UNUSED) -> Any:
    """Import a module of the package in a folder, in place of that of another folder, without unused modules."""
    for name in [n for n in sys.modules if n.split(".")[0] == "stepaudio2"]:
        del sys.modules[name]
    # Its own __init__ imports the language model.
    package = ModuleType("stepaudio2")
    package.__path__ = [f"{folder}/stepaudio2"]
    sys.modules["stepaudio2"] = package
    sys.modules.update({name: AnyModule(name) for name in unused})
    __import__(module)
    return sys.modules[module]


def loaded(model: torch.nn.Module) -> tuple[Any, list[tuple[str, list[int]]]]:
    """Load the tiny weights, and return the model in float64 with the names of its weights."""
    names = [(name, list(value.shape)) for name, value in model.state_dict().items()]
    model.load_state_dict(tiny.weights(names), strict=True)
    model.double().eval()
    model.stft_window = model.stft_window.double()
    return model, names


def windows(stream: int) -> list[tuple[torch.Tensor, bool]]:
    """Return a stream's windows [1, 80, frames], each with True if it is the last."""
    parts = tiny.mel(stream)[None].split(list(tiny.STREAMS[stream]), 2)
    return [(part, i == len(parts) - 1) for i, part in enumerate(parts)]


def causal(folder: str) -> tuple[dict[str, Any], list[tuple[str, list[int]]]]:
    """Return the audio of each stream by the newest package, with its numbers of samples."""
    token2wav = published(folder, "stepaudio2.token2wav")
    predictor = token2wav.CausalConvRNNF0Predictor(cond_channels=tiny.F0_WIDTH)
    model, names = loaded(token2wav.CausalHiFTGenerator(**tiny.CAUSAL_FIELDS, f0_predictor=predictor))
    table = tiny.noise(causal=True)[None]
    model.m_source.l_sin_gen.sine_waves = table
    made: dict[str, Any] = {}
    for stream in (*range(len(tiny.STREAMS)), tiny.LOUD_STREAM):
        name = f"causal{stream}"
        if name in made:
            name = "causal_loud"
            model.conv_post.bias.data[:9] += tiny.LOUD
        vocoder = token2wav.BoundedVocoder(model)
        vocoder.cache["first_chunk"] = torch.ones(1, dtype=torch.long)
        own = SimpleNamespace(hift_cache_dict=vocoder.cache, bounded_vocoder=vocoder, source_cache_len=8 * 480)
        made[name] = [token2wav.Token2wav._stream_vocode(own, part.double(), last)[0] for part, last in windows(stream)]
    return made, names


def overlapping(folder: str) -> tuple[dict[str, Any], list[tuple[str, list[int]]]]:
    """Return the audio of each stream by the older package."""
    token2wav = published(folder, "stepaudio2.token2wav")
    hifigan = sys.modules["stepaudio2.flashcosyvoice.modules.hifigan"]
    predictor = hifigan.ConvRNNF0Predictor(cond_channels=tiny.F0_WIDTH)
    model, names = loaded(token2wav.HiFTGenerator(**tiny.FIELDS, f0_predictor=predictor))
    table = tiny.noise(causal=False)[None]
    made: dict[str, Any] = {}
    layers = sys.modules["stepaudio2.flashcosyvoice.modules.hifigan_components.layers"]
    begin = 0

    def noise(like: torch.Tensor) -> torch.Tensor:
        # The branch of noise, with one channel, is not used.
        places = (torch.arange(like.shape[1]) + begin * 480) % table.shape[1]
        return table[:, places, : like.shape[2]]

    layers.torch = Torch(randn_like=noise)
    token2wav.torch = Torch(tensor=lambda *args, device=None, **rest: torch.tensor(*args, **rest))
    for stream in (*filter(tiny.is_overlapping, range(len(tiny.STREAMS))), tiny.LOUD_STREAM):
        name = f"overlapping{stream}"
        if name in made:
            name = "overlapping_loud"
            model.conv_post.bias.data[:9] += tiny.LOUD
        own = SimpleNamespace(
            cache=(None, None, None, torch.zeros(1, 4, 80), None),
            stream_cache={k: torch.zeros(1, 1, 1, 1, 1, 1) for k in ("estimator_att_cache", "conformer_att_cache")},
            hift=model,
            float16=False,
            n_timesteps=10,
            mel_cache_len=8,
            source_cache_len=8 * 480,
            speech_window=torch.from_numpy(np.hamming(2 * 8 * 480)),
            hift_cache_dict={
                "mel": torch.zeros(1, 80, 0, dtype=torch.float64),
                "source": torch.zeros(1, 1, 0, dtype=torch.float64),
                "speech": torch.zeros(1, 0, dtype=torch.float64),
            },
        )
        made[name], begin = [], 0
        for part, last in windows(stream):
            made_frames = part.double(), own.stream_cache
            own.flow = SimpleNamespace(inference_chunk=lambda made=made_frames, **_: made)
            audio = token2wav.Token2wav.stream(own, [0], "voice", last_chunk=last, return_waveform=True)
            made[name].append(torch.from_numpy(audio)[0])
            begin += part.shape[2] if begin else part.shape[2] - 8
    return made, names


class Torch:
    """The module torch with other functions."""

    def __init__(self, **functions: Any) -> None:
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def main() -> None:
    """Write the file."""
    newest, older = sys.argv[1:]
    made, names = causal(newest)
    with torch.inference_mode():
        more, other_names = overlapping(older)
    arrays = {}
    for name, parts in (made | more).items():
        arrays[name] = torch.cat(parts)[:: tiny.STEP].numpy()
        arrays[f"{name}_samples"] = np.array([len(p) for p in parts])
    arrays["names"] = np.array(json.dumps({"causal": names, "overlapping": other_names}))
    np.savez_compressed(tiny.GOLDEN, **arrays)


if __name__ == "__main__":
    main()
