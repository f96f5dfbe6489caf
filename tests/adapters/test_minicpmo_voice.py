"""Reading a reference voice for MiniCPM-o's token2wav.

The golden features are those of the package minicpmo-utils 1.0.7 with s3tokenizer, torchaudio and librosa
(`make_golden_voice.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, save_model

from antiphon.adapters.minicpmo.token2wav.voice import (
    MAX_REFERENCE_S,
    SPEAKER,
    TOKENIZER,
    VoiceReader,
    filter_banks,
    mel_frames,
)
from antiphon.errors import ModelError
from tests.adapters import tiny_voice as tiny


def _save(path: Path, nodes: list[Any], inputs: list[Any], output: Any, constants: dict[str, Any]) -> None:
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, [output], held)
    save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def write_networks(folder: Path) -> None:
    """Write networks whose outputs are simple functions of all their inputs.

    A code is the mean of its four mel frames in thousandths, plus their number. The speaker's vector is the mean of the
    squares of each band, and zeros.
    """
    node, info = helper.make_node, helper.make_tensor_value_info
    _save(
        folder / TOKENIZER,
        [
            node("ReduceMean", ["feats"], ["bands"], axes=[1], keepdims=1),
            node("AveragePool", ["bands"], ["codes"], kernel_shape=[4], strides=[4], ceil_mode=1),
            node("Squeeze", ["codes", "band"], ["flat"]),
            node("Mul", ["flat", "thousand"], ["scaled"]),
            node("Cast", ["scaled"], ["whole"], to=TensorProto.INT32),
            node("Add", ["whole", "feats_length"], ["indices"]),
        ],
        [info("feats", TensorProto.FLOAT, [1, 128, "t"]), info("feats_length", TensorProto.INT32, [1])],
        info("indices", TensorProto.INT32, [1, "k"]),
        {"band": np.array([1]), "thousand": np.array(1000, np.float32)},
    )
    _save(
        folder / SPEAKER,
        [
            node("Mul", ["input", "input"], ["squares"]),
            node("ReduceMean", ["squares"], ["bands"], axes=[1], keepdims=0),
            node("Pad", ["bands", "widths"], ["output"]),
        ],
        [info("input", TensorProto.FLOAT, [1, "t", 80])],
        info("output", TensorProto.FLOAT, [1, 192]),
        {"widths": np.array([0, 0, 0, 112])},
    )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> VoiceReader:
    """Return a reader with tiny networks."""
    folder = tmp_path_factory.mktemp("voice")
    write_networks(folder)
    return VoiceReader(folder)


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    """Return the features of `tiny.sound` by the published code."""
    return dict(np.load(tiny.GOLDEN))


def test_features_equal_the_published_ones(reader: VoiceReader, golden: dict[str, Any]) -> None:
    log_mel = reader.log_mel.clip(tiny.sound())
    np.testing.assert_allclose(log_mel, golden["log_mel"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(filter_banks(tiny.sound()), golden["banks"], rtol=0, atol=2e-3)
    np.testing.assert_allclose(mel_frames(tiny.sound()), golden["mel_24khz"], rtol=0, atol=2e-4)


def test_a_voice_has_codes_a_vector_and_two_frames_a_code(reader: VoiceReader, golden: dict[str, Any]) -> None:
    voice = reader.read(tiny.sound())
    log_mel, banks = golden["log_mel"], golden["banks"]
    frames = log_mel.shape[1]
    means = [log_mel[:, i : i + 4].mean() for i in range(0, frames, 4)]
    assert voice.codes.dtype == torch.long
    np.testing.assert_allclose(voice.codes, np.trunc(np.array(means) * 1000) + frames, rtol=0, atol=1)
    np.testing.assert_allclose(voice.embedding[:80], (banks**2).mean(0), rtol=1e-3)
    assert voice.embedding.shape == (192,)
    assert voice.mel.dtype == voice.embedding.dtype == torch.float32
    # Another library resamples the sound, so its edges and its softest bands differ.
    assert voice.mel.shape == golden["mel"].shape == (2 * len(voice.codes), 80)
    assert np.abs(voice.mel.numpy() - golden["mel"])[2:-2].mean() < 0.03
    torch.testing.assert_close(voice.mel[-1], voice.mel[len(tiny.sound()) * 3 // 2 // 480 - 1], rtol=0, atol=0)


@pytest.mark.parametrize("seconds", [0.2, MAX_REFERENCE_S, 300.0])
def test_voices_of_any_length_are_read(reader: VoiceReader, seconds: float) -> None:
    voice = reader.read(tiny.sound(int(seconds * 16_000)))
    assert len(voice.codes) == round(25 * min(seconds, MAX_REFERENCE_S))
    assert len(voice.mel) == 2 * len(voice.codes)
    assert voice.mel.isfinite().all()
    assert voice.embedding.isfinite().all()


def test_silence_and_clipped_audio_are_voices(reader: VoiceReader) -> None:
    silence = reader.read(np.zeros(16_000, np.float32))
    assert silence.mel.flatten().tolist() == pytest.approx([np.log(1e-5)] * silence.mel.numel())
    assert silence.embedding.isfinite().all()
    loud, clipped = reader.read(30 * tiny.sound()), reader.read(np.clip(30 * tiny.sound(), -1, 1))
    torch.testing.assert_close(loud.mel, clipped.mel, rtol=0, atol=0)
    torch.testing.assert_close(loud.codes, clipped.codes, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("pcm", "reason"),
    [
        (np.zeros(0, np.float32), "0 samples"),
        (np.zeros(3199, np.float32), "3199 samples"),
        (np.full(16_000, np.nan, np.float32), "not finite"),
        (np.append(np.zeros(16_000, np.float32), np.float32(np.inf)), "not finite"),
    ],
)
def test_audio_that_is_no_voice_is_refused_before_it_is_computed(
    reader: VoiceReader, monkeypatch: pytest.MonkeyPatch, pcm: Any, reason: str
) -> None:
    monkeypatch.setattr(reader, "log_mel", None)
    with pytest.raises(ModelError, match=reason):
        reader.read(pcm)


def test_a_missing_broken_or_exchanged_network_is_named(tmp_path: Path) -> None:
    write_networks(tmp_path)
    for name in (SPEAKER, TOKENIZER):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ModelError, match=name):
            VoiceReader(tmp_path)
        (tmp_path / name).write_bytes(whole)
    (tmp_path / TOKENIZER).write_bytes((tmp_path / SPEAKER).read_bytes())
    with pytest.raises(ModelError, match=f"{TOKENIZER} has 1 inputs"):
        VoiceReader(tmp_path)
    (tmp_path / TOKENIZER).unlink()
    with pytest.raises(ModelError, match=TOKENIZER):
        VoiceReader(tmp_path)
