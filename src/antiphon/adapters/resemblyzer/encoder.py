"""Resemblyzer's voice encoder: computes a unit vector for a stretch of speech. Vectors of one voice are similar.

The network is that of Wan et al. 2018 (Generalized end-to-end loss for speaker verification, arXiv 1710.10467). It has
three LSTM layers of 256 units over mel bands, and projects the last output to a unit vector of 256 non-negative
numbers. It reads windows of 1.6 s that overlap by half, and averages their vectors. `turns/` interprets the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

from antiphon.adapters.spec import LaneModelOptions
from antiphon.adapters.voice_encoder import VoiceEncoder
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts.speaker import SpeakerProfile, VoiceClustering, VoiceThreshold
from antiphon.modeling.sound.voice_weights import Weights, read_weights

WINDOW, HOP, NUM_BANDS = 400, 160, 40
# Slaney's mel scale: bands of 200/3 Hz up to 1 kHz, and above it 27 bands for each factor of 6.4.
LINEAR_HZ, BREAK_HZ, LOG_STEP = 200 / 3, 1000.0, np.log(6.4) / 27


def _to_hz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    break_mel = BREAK_HZ / LINEAR_HZ
    return np.where(mels < break_mel, LINEAR_HZ * mels, BREAK_HZ * np.exp(LOG_STEP * (mels - break_mel)))


def _filters() -> npt.NDArray[np.float32]:
    """Return the triangular filters of the bands, each of area 1: float32 [num_bins, NUM_BANDS]."""
    top_hz = SAMPLE_RATE_HZ / 2
    top_mel = BREAK_HZ / LINEAR_HZ + np.log(top_hz / BREAK_HZ) / LOG_STEP
    edges = _to_hz(np.linspace(0, top_mel, NUM_BANDS + 2))
    bins = np.linspace(0, top_hz, WINDOW // 2 + 1)[:, None]
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    triangles = np.maximum(0, np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)))
    return (triangles * 2 / (high - low)).astype(np.float32)


FILTERS = _filters()
# A periodic Hann window, as for a spectrogram.
HANN = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)


def mel_frames(pcm: Pcm) -> npt.NDArray[np.float32]:
    """Return the band energies, float32 [num_frames, NUM_BANDS], of mono audio at 16 kHz.

    Frames are centred on every HOP-th sample, the first one on sample 0. The audio is padded with silence. The energies
    are linear, not logarithmic.
    """
    padded = np.pad(pcm, WINDOW // 2)
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    spectrum = np.abs(np.fft.rfft(windows * HANN, axis=1)) ** 2
    return np.asarray(spectrum.astype(np.float32) @ FILTERS, np.float32)


NUM_LAYERS, SIZE = 3, 256
# Windows have WINDOW_FRAMES and begin every STEP_FRAMES (1.3 a second). The last window is skipped if less than
# MIN_COVERAGE of it is audio.
WINDOW_FRAMES, STEP_FRAMES, MIN_COVERAGE = 160, 77, 0.75
# Minimum seconds of speech. With less, a vector is almost meaningless.
LEAST_S = 0.6
# The thresholds for similarities of voices, measured with `python -m bench.turn_taking.speakers`.
THRESHOLDS = (
    VoiceThreshold(0.5, 0.022, 0.282),
    VoiceThreshold(0.7, 0.111, 0.295),
    VoiceThreshold(1.0, 0.251, 0.346),
    VoiceThreshold(1.4, 0.366, 0.366),
)
# The thresholds for an enrolled voice, whose similarity is that of its most similar take. They were measured with
# `python -m bench.turn_taking.enrolled`.
ENROLLED = (
    VoiceThreshold(0.55, 0.14, 0.341),
    VoiceThreshold(0.87, 0.305, 0.348),
    VoiceThreshold(1.55, 0.368, 0.368),
    VoiceThreshold(2.53, 0.4, 0.408),
)
# The common part of all voices: the mean vector of the 124 voices of the first measurement, in quiet and in noise, with
# one byte per number. After subtracting it, the vectors of two voices are about orthogonal.
MEAN = np.frombuffer(
    bytes.fromhex(
        "59365c002f2d30524257ae9f63232e42a85f1e217383090001a110310a058c7a2a2547a86d133a29052c7b64523d2c3d"
        "693b00741700132f451a603a250e4e625b0dc2920d151d580e982c2a004550ac1d11e07e1c1a107d0fbb7d0c12092800"
        "330004031704a194716e2a4c17f6025e19ce58004e322a519587956172dc7dc284044a065b8e92686a1b854a0924b938"
        "6b3cbd04da6482ad042b2df20e1e856a8a0484576e9e646ec597080c3445066768995d29b32226584600148f16204e47"
        "18a2004686d280aa7883393100222b7f2d371813d48206410068be06863309003e8e656700062a072800077f7e98d1a9"
        "b37b36ff3e7bba19a05013906b073205"
    ),
    np.uint8,
) * np.float32(0.10974 / 255)
# The four directions in which the mean vectors of 17 voices change most between quiet, noise and a telephone's band,
# with one signed byte per number (`antiphon bench speakers --fit`).
CHANNEL_DIRECTIONS = np.linalg.qr(
    np.frombuffer(
        bytes.fromhex(
            "f9e21400f3f0f0d90eea18d1f809f8d3f916f0fcf731040000cb01fb01f72b1913ea0a23e5f70ef9fe0009f930f50def"
            "00e50070ec00ede720f82ef2fc5f02de36f5fef5f9fdfde8e92004eb004e7f0be7fffaf3eff1f75ef9e2defcfdfcef00"
            "0300fe06f9f719fdf00b0b16f9cf0002ebd9020033e634dfe528f1fb24ea46f0e900f6021d09e209fef12917fef4a103"
            "50eb190004f90ed1fd0e06edfa0b0550d3003134f9180cfef2ef0d0df422f502ee10ea2bd9fbf8431300fe24f2ed031e"
            "f4000021e6dfc8fccdf4fc1200ffe5ceecf1f6fe01ee0002000901f8d8e8fd00efbee10200fd01feef0004f9d4d7eb57"
            "2e06f5d9fe22d501d4dcfe03ea00ee0009c5210001000df708fdf3fe393de4e92606330109f6fe0000b80400fdf32508"
            "f30c26090cfffb051200fff91ff7fefaf4d500ffe300df1929072629061613ebe2ffe7d6e10701f72045f71400d61c1d"
            "640f1ce60ef50afce33f1cf0f0fef400f300f7fbf6e9d10cddd1f60901fdffdc0df41200211b20ebf80508fcecefea27"
            "fb00fa010026ce0ceacdaa0efae737fde50ce30018ee21bdfdd6e820fe0dd30c02000cd3dffbd4feb005ede9060a0f11"
            "ee18ea1fe1fdfbe4d9001112e6cd2e09042500e116f11a023de400cc00e2eddbf914fa02df0600e200ef14f30ee4fe00"
            "f32625e300f9f3f6eb00fef2f4f607ee06d7e97f1432ce012fffdffbddfdf2fdf5e8b60008fe1f18e8e128b9f329142b"
            "4033f001e236fa000035fad500ee1d17120af0efce040101fdf932e90be603101ed40081fe00eef83cf797ed072d014c"
            "13090811f0faf9090f23e41c00ed5215e2fbf6d4f7f502d4000e17f8000920000200fb08f1f636c1e5130b00f5c3ff28"
            "eeea1700f905c8250bd8df0add0e61f11d000cffd3d213d4d4fa1c21fe1324190e204200fce134c8111604dafd1c1adf"
            "2a00b10d1d172ae4e70627f00c2306d710fded1fbfeceaf5070008c319ffeafb09470020fd00c9f5eae614dc00f00afb"
            "22fff8ffc90b00f600101ffd1d09ff000306e27600feb5fa1b00f81ee4d2cbd6e117fe5504feedfb0c240422f3000ffd"
            "0cdaf900060dd604191f26d63acbf63011f5250815310100003305f101e813d625f209fef0fdf0170705010aeb0dfa12"
            "ecf90028cf001001341aefeef8bb09fb26002fd2f4fcffe1d60df6040021d2e6d51500082d1bfff0eeeaf2f7f1061500"
            "0a00fcf700e61f121c1510cd04daff1040ea1d0012eced28bb1ed2e514d18110dc001e05e8c5f9ea0cf41836faf7e315"
            "0d14f900fae5d606fd10e5edfbf60dd82b000957c4f84c20ff17f1f616dbdf2b04e2ecf200fd062e0700e836f8dc14f7"
            "00ef000dd6fa0bfb23f2e6e20008e4cd172fef0608e100370032f8d1e4f30400071cfe1b00eb03fe1000050e2d050923"
            "f7d5f76911ff20031621cff1e901fdfe"
        ),
        np.int8,
    )
    .reshape(4, SIZE)
    .T.astype(np.float64)
)[0].T.astype(np.float32)
# How voices are distinguished. The limits were chosen on the same voices (`antiphon bench speakers`).
CLUSTERING = VoiceClustering(
    window_s=1.6,
    hop_s=0.4,
    same_windows=0.28,
    same_voices=0.55,
    same_as_known=0.4,
    least_voice_s=4.0,
    same_turns=0.5,
    least_turn_s=1.0,
    random_s=1.0,
    channel_directions=CHANNEL_DIRECTIONS,
)
# The RMS level that softer speech is amplified to.
TARGET_RMS = 10 ** (-30 / 20)


def windows_of(num_samples: int) -> list[int]:
    """Return the first frame of each window over `num_samples` of audio: at least one window."""
    num_frames = num_samples // HOP + 1
    starts = list(range(0, max(1, num_frames - WINDOW_FRAMES + STEP_FRAMES + 1), STEP_FRAMES))
    covered = (num_samples - starts[-1] * HOP) / (WINDOW_FRAMES * HOP)
    return starts[:-1] if covered < MIN_COVERAGE and len(starts) > 1 else starts


def network(weights: Weights) -> bytes:
    """Return the network as an ONNX graph, from mel frames [WINDOW_FRAMES, num_windows, bands] to vectors."""
    nodes, constants = [], []

    def constant(name: str, value: npt.NDArray[np.float32]) -> str:
        constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def gates(name: str) -> npt.NDArray[np.float32]:
        """Reorder gates from PyTorch's order (in, forget, cell, out) to that of ONNX (in, out, forget, cell)."""
        entry, forget, cell, out = np.split(weights[name], 4)
        return np.concatenate((entry, out, forget, cell))

    below = "frames"
    for layer in range(NUM_LAYERS):
        inputs = [
            below,
            constant(f"input{layer}", gates(f"lstm.weight_ih_l{layer}")[None]),
            constant(f"state{layer}", gates(f"lstm.weight_hh_l{layer}")[None]),
            constant(
                f"bias{layer}",
                np.concatenate((gates(f"lstm.bias_ih_l{layer}"), gates(f"lstm.bias_hh_l{layer}")))[None],
            ),
        ]
        nodes.append(helper.make_node("LSTM", inputs, [f"all{layer}", f"last{layer}"], hidden_size=SIZE))
        nodes.append(helper.make_node("Squeeze", [f"all{layer}", "direction"], [f"outputs{layer}"]))
        below = f"outputs{layer}"
    constants.append(numpy_helper.from_array(np.array([1]), "direction"))
    constants.append(numpy_helper.from_array(np.array([0]), "layer"))
    nodes += [
        helper.make_node("Squeeze", [f"last{NUM_LAYERS - 1}", "layer"], ["last"]),
        helper.make_node(
            "Gemm",
            ["last", constant("weight", weights["linear.weight"].T), constant("bias", weights["linear.bias"])],
            ["projected"],
        ),
        helper.make_node("Relu", ["projected"], ["positive"]),
        helper.make_node("LpNormalization", ["positive"], ["vectors"], axis=1, p=2),
    ]
    graph = helper.make_graph(
        nodes,
        "voice encoder",
        [helper.make_tensor_value_info("frames", TensorProto.FLOAT, ["num_frames", "num_windows", NUM_BANDS])],
        [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["num_windows", SIZE])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


class ResemblyzerEncoder(VoiceEncoder):
    """Resemblyzer's encoder, as a SpeakerModel. Its vectors are float32 [256]."""

    def __init__(self, folder: Path, model_id: str, options: LaneModelOptions) -> None:
        """Load `pretrained.pt` from the folder. Raises ModelError if it does not load."""
        profile = SpeakerProfile(model_id, SIZE, LEAST_S, THRESHOLDS, ENROLLED, CLUSTERING)
        super().__init__(lambda: network(read_weights(folder / "pretrained.pt", "model_state")), profile, options)

    def encode(self, pcm: Pcm) -> Pcm:
        """Return the network's output: a unit vector, float32 [256], without negative numbers.

        Runs in the caller's thread.
        """
        rms = float(np.sqrt(np.mean(pcm**2))) if len(pcm) else 0.0
        frames = mel_frames(pcm * max(1.0, TARGET_RMS / rms) if rms else pcm)
        if len(frames) < WINDOW_FRAMES:
            # Repeat short speech, because the network would treat padding with silence as part of the voice.
            frames = np.resize(frames[:-1] if len(frames) > 1 else frames, (WINDOW_FRAMES, NUM_BANDS))
        starts = windows_of(len(pcm))
        frames = np.pad(frames, ((0, max(0, starts[-1] + WINDOW_FRAMES - len(frames))), (0, 0)))
        windows = np.stack([frames[start : start + WINDOW_FRAMES] for start in starts], axis=1)
        mean = self.vectors(windows).mean(0)
        return np.asarray(mean / np.linalg.norm(mean), np.float32)

    def _work(self, jobs: Sequence[Pcm]) -> list[Pcm]:
        vectors = np.stack([self.encode(pcm) for pcm in jobs]) - MEAN
        return list(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
