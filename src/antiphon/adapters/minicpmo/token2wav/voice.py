"""Reads a reference voice for token2wav: its codes, its speaker's vector and its mel frames.

Codes are those of the released S3 tokenizer (25 a second), and the vector is that of the released CAM++ network. Both
run in onnxruntime on the CPU, because a voice is read once and then cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
from torch.nn.functional import pad
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from antiphon.adapters.minicpmo.log_mel import LogMel
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import Resampler
from antiphon.errors import ModelError

# Longer voices are cut to this length. The flow keeps keys and values of all its passes for each frame of a voice, over
# a megabyte a frame. The tokenizer would take up to 30 s.
MAX_REFERENCE_S = 10.0
# Shorter voices are refused: the flow sees three codes ahead.
MIN_REFERENCE_S = 0.2
# Mel frames for a code.
CODE_FRAMES = 2
# The files of the tokenizer and of the speaker's network.
TOKENIZER, SPEAKER = "speech_tokenizer_v2_25hz.onnx", "campplus.onnx"
# The threads of the tokenizer, which takes about a second for ten seconds of audio on one.
TOKENIZER_THREADS = 4

_MEL_RATE_HZ, _MEL_WINDOW, _MEL_HOP, _MEL_BANDS = 24_000, 1920, 480, 80
_CODE_BANDS = 128
# Kaldi's filter banks for a speaker's vector: the window, the hop and the transform's length in samples, and the bands.
_BANK_WINDOW, _BANK_HOP, _BANK_FFT, _BANK_BANDS = 400, 160, 512, 80
_BANK_FLOOR = float(np.finfo(np.float32).eps)


@dataclass(frozen=True, eq=False)
class PromptVoice:
    """A reference voice, on the CPU.

    `codes`: int64 [k]. `embedding`: the speaker's vector, float32 [192]. `mel`: log-mel frames of 20 ms, float32
    [2 k, 80].
    """

    codes: torch.Tensor
    embedding: torch.Tensor
    mel: torch.Tensor


def checked(pcm: Pcm) -> Pcm:
    """Return the part of a voice that is read, in [-1, 1]. Raises ModelError for audio that is no voice."""
    if len(pcm) < MIN_REFERENCE_S * SAMPLE_RATE_HZ:
        raise ModelError(
            f"the reference voice has {len(pcm)} samples of audio, and needs {MIN_REFERENCE_S} s at {SAMPLE_RATE_HZ} Hz"
        )
    pcm = pcm[: int(MAX_REFERENCE_S * SAMPLE_RATE_HZ)]
    if not np.isfinite(pcm).all():
        raise ModelError("the reference voice has samples that are not finite")
    return np.clip(pcm, -1, 1)


def filter_banks(pcm: Pcm) -> npt.NDArray[np.float32]:
    """Return Kaldi's log filter banks, float32 [frames, 80], of audio at 16 kHz, less their mean over time."""
    found = spectrogram(
        pcm,
        window_function(_BANK_WINDOW, "povey", periodic=False),
        frame_length=_BANK_WINDOW,
        hop_length=_BANK_HOP,
        fft_length=_BANK_FFT,
        power=2.0,
        center=False,
        preemphasis=0.97,
        mel_filters=_BANK_FILTERS,
        log_mel="log",
        mel_floor=_BANK_FLOOR,
        remove_dc_offset=True,
    ).T
    return np.asarray(found - found.mean(0), np.float32)


def mel_frames(pcm: Pcm) -> torch.Tensor:
    """Return log-mel frames, float32 [frames, 80], of audio at 24 kHz: one for every 480 samples."""
    sound = torch.from_numpy(pcm)[None]
    margin = (_MEL_WINDOW - _MEL_HOP) // 2
    spectrum = torch.stft(
        pad(sound, (margin, margin), mode="reflect"),
        _MEL_WINDOW,
        _MEL_HOP,
        window=torch.hann_window(_MEL_WINDOW),
        center=False,
        return_complex=True,
    )[0]
    size = (torch.view_as_real(spectrum).square().sum(-1) + 1e-9).sqrt()
    return (_MEL_FILTERS @ size).clamp(min=1e-5).log().T


def _slaney(bins: int, bands: int, rate_hz: int) -> torch.Tensor:
    """Return Slaney's filters up to 8 kHz, float32 [bands, bins]."""
    filters = mel_filter_bank(bins, bands, 0.0, 8000.0, rate_hz, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(np.asarray(filters.T, np.float32))


_BANK_FILTERS = mel_filter_bank(
    _BANK_FFT // 2 + 1,
    _BANK_BANDS,
    20.0,
    SAMPLE_RATE_HZ / 2,
    SAMPLE_RATE_HZ,
    mel_scale="kaldi",
    triangularize_in_mel_space=True,
)
_MEL_FILTERS = _slaney(_MEL_WINDOW // 2 + 1, _MEL_BANDS, _MEL_RATE_HZ)


class VoiceReader:
    """Reads voices with the networks of a checkpoint. Threads may share it.

    `log_mel`: the transform of the tokenizer's input.
    """

    def __init__(self, folder: Path) -> None:
        """Load both networks from `assets/token2wav`. Takes seconds. Raises ModelError if one does not load."""
        self._tokenizer = _network(folder / TOKENIZER, TOKENIZER_THREADS, 2)
        self._speaker = _network(folder / SPEAKER, 1, 1)
        self.log_mel = LogMel(_slaney(201, _CODE_BANDS, SAMPLE_RATE_HZ), torch.device("cpu"))

    def read(self, pcm: Pcm) -> PromptVoice:
        """Return the voice of reference audio, float32 [num_samples], 16 kHz. Takes up to seconds.

        Audio after MAX_REFERENCE_S is not read. Raises ModelError if the audio is shorter than MIN_REFERENCE_S or has
        samples that are not finite, before anything is computed, or if a network fails.
        """
        pcm = checked(pcm)
        log_mel = self.log_mel.clip(pcm)[None].numpy()
        codes = _run(self._tokenizer, log_mel, np.array([log_mel.shape[2]], np.int32)).reshape(-1)
        embedding = _run(self._speaker, filter_banks(pcm)[None]).reshape(-1)
        resampler = Resampler(SAMPLE_RATE_HZ, _MEL_RATE_HZ)
        mel = mel_frames(np.concatenate((resampler.feed(pcm), resampler.flush())))
        # The last frame is repeated until each code has its frames.
        places = torch.arange(CODE_FRAMES * len(codes)).clamp(max=len(mel) - 1)
        return PromptVoice(torch.from_numpy(codes.astype(np.int64)), torch.from_numpy(np.array(embedding)), mel[places])


def _network(path: Path, threads: int, num_inputs: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    try:
        network = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        # The errors that onnxruntime raises for a bad file have no common base class.
        raise ModelError(f"{path} does not load: {error}") from error
    if len(network.get_inputs()) != num_inputs:
        raise ModelError(f"{path} has {len(network.get_inputs())} inputs instead of {num_inputs}")
    return network


def _run(network: onnxruntime.InferenceSession, *inputs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the first output of a network, whose inputs are given in their order. Raises ModelError."""
    names: Sequence[Any] = network.get_inputs()
    try:
        output: npt.NDArray[Any] = network.run(None, {n.name: x for n, x in zip(names, inputs, strict=True)})[0]
    except Exception as error:
        # As above.
        raise ModelError(f"the reference voice cannot be read: {error}") from error
    return output
