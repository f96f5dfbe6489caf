"""The settings of models: which are loaded, what computes them, and which voices speak."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.settings.option import KEY, option

# Types of weights; `auto` selects the one that suits the device.
WEIGHTS = ("auto", "int8", "bf16", "fp32")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The section `[models]`: which models are loaded, from where, on which device, with how many workers."""

    profile: str = option(
        "auto",
        "Set of models to load. `auto`: the largest that fits this machine's memory and, as measured, answers in time. "
        "`hub`: with a language model that is only available from the hub, untested here.",
        choices=("auto", "default", "large", "light", "hub"),
    )
    transcriber: str = option(
        "",
        "Transcriber: a name from `antiphon pull --list`, the folder of a checkpoint (Qwen3-ASR), or a model on other "
        "servers, `URL[,URL]#MODEL`.",
    )
    partials: str = option(
        "",
        "A cheaper model of the transcriber's kind that decodes partials, such as `whisper-tiny.en`: a name from "
        "`antiphon pull --list`. Used for sessions whose language is set to one that it supports.",
    )
    speaker_model: str = option(
        "",
        "Speaker encoder: `resemblyzer`, or `campplus`, which labels better. Without one, all voices are the user's.",
    )
    turn_detector: str = option(
        "",
        "Turn detectors for `semantic_vad`, comma separated: names from `antiphon pull --list`, folders with a "
        "config.json, or URLs. `NAME*2` gives one a weight. `none`: only the words and the silence decide.",
    )
    turn_detector_key: str = option("", "Key for turn detectors that are URLs (bearer token).", secret=True, form=KEY)
    backchannel_detector: str = option(
        "", "Backchannel detector, which decides speech over an answer before its words: a folder with a config.json."
    )
    home: str = option("~/.cache/antiphon", "Folder for downloaded and converted models.")
    models_from: str = option("", "A local folder that is searched first for model files.")
    pickled_weights: bool = option(
        False, "Read pickled weights (`pytorch_model.bin`) of folders without safetensors. No code in them is run."
    )
    offline: bool = option(False, "Never use the network, only local files.")
    device: str = option("cpu", "Device that models run on.", choices=("cpu", "cuda"))
    placement: str = option(
        "",
        "Device and weights of individual models, instead of `--device` and `--weights`: `ROLE=DEVICE[/WEIGHTS]`, "
        "comma separated, as in `conversation_model=cuda:0,transcriber=cuda:1,synthesizer=cpu/int8`. The role "
        "`talker` is the talker of a conversation model that has a separate one.",
    )
    compute_type: str = option("int8", "Numeric type of the Whisper weights, by its name in CTranslate2.")
    workers: int = option(0, "Parallel model workers, one thread each; 0: one for each core.", low=0)
    max_queue: int = option(256, "Most jobs that may wait for one model; further ones are refused.", low=1)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The section `[engine]`: the language model, the conversation model, the video model, and their KV."""

    language_model: str = option(
        "",
        "Language model: a name from `antiphon pull --list`, a checkpoint's folder, a .gguf file, `URL#MODEL` for a "
        "model on another server with OpenAI's API, as in `http://127.0.0.1:11434/v1#qwen3:4b`, or `none`.",
    )
    engine: str = option(
        "local",
        "What computes the language model: `local`, this process; `vllm:URL[,URL]` or `sglang:URL[,URL]`, servers of "
        "that kind, which serve the model in the folder of `--language-model` (that folder needs no weights).",
    )
    conversation_model: str = option(
        "",
        "Conversation model, instead of the language model and the voice: the folder of a Qwen3-Omni or Qwen2.5-Omni "
        "checkpoint, which hears, sees, writes and speaks, or of a MiniCPM-o 4.5 checkpoint, which takes turns by "
        "itself; or `URL#MODEL` of servers with the OpenAI Realtime API.",
        also="partner",
    )
    native: str = option(
        "",
        "Native model on other servers, which takes turns by itself, instead of a conversation model: `URL#MODEL` of "
        "full duplex (`ws://HOST/v1/duplex`).",
    )
    video_model: str = option(
        "",
        "Vision-language model that answers questions about video, instead of the language model: the folder of a "
        "SmolVLM, Qwen2.5-VL or Qwen3-VL checkpoint.",
        also="watcher",
    )
    video_prefill: str = option(
        "eager",
        "When the `--video-model` computes the KV of frames: as they arrive, or when a question is asked.",
        choices=("eager", "query"),
        also="watcher_prefill",
    )
    weights: str = option(
        "auto",
        "Type of the language model's weights; `auto` selects the type that the device multiplies fastest.",
        choices=WEIGHTS,
    )
    engine_threads: int = option(0, "Threads of a language model's step; 0: one for each core.", low=0)
    kv_mb: int = option(2048, "Memory for the KV of live conversations, in MB.", low=1)
    kv_host_mb: int = option(1024, "Host memory for the KV of parked conversations, in MB.", low=0)
    kv_disk_mb: int = option(8192, "Disk space for the KV of parked conversations, in MB.", low=0)
    context_tokens: int = option(0, "Most tokens of a conversation in its KV; 0: the model's own limit.", low=0)
    reserve_tokens: int = option(512, "Tokens of KV that are reserved for a conversation when it begins.", low=64)
    prefill_tokens: int = option(
        0,
        "Most prompt tokens in one step while other sessions generate; limits how much a long prompt delays them. 0: "
        "64 on a CPU, 2048 on a GPU.",
        low=0,
    )
    prefill_only_tokens: int = option(
        0, "Most prompt tokens in one step while no session generates. 0: 256 on a CPU, 2048 on a GPU.", low=0
    )
    decode_sessions: int = option(
        0, "Most conversations that sample a token in one step. 0: 64 on a CPU, 256 on a GPU.", low=0
    )
    gather_ms: int = option(
        -1,
        "Time for which a partial transcript, or a unit of a native conversation, may wait for those of other "
        "sessions, so that they share passes of the model, in ms. A session that is alone never waits. -1: 40 for "
        "partials and 50 for units on a GPU, 0 on a CPU.",
        low=-1,
    )
    flow_steps: int = option(10, "Steps from noise to sound of MiniCPM-o's voice; fewer are faster.", low=1, high=50)
    grammar_s: float = option(
        2.0,
        "Processor time for compiling the JSON schemas of one message or request, in seconds. They are compiled in a "
        "separate process.",
        low=0.01,
    )
    grammar_mb: int = option(512, "Memory for compiling them, in MB.", low=16)
    park_after_s: float = option(120.0, "Idle seconds after which a conversation's KV is parked.", low=0)
    kv_layout: str = option(
        "auto",
        "Layout of the KV in memory: `session` keeps each conversation's KV in its own tensor, which is copied when it "
        "grows; `paged` keeps that of all conversations in one pool of pages and allocates `--kv-mb` at the start. "
        "`auto`: `paged` on a GPU, or if decode steps are padded.",
        choices=("auto", "session", "paged"),
    )
    decode_shapes: str = option(
        "auto",
        "Sizes of steps: `exact` computes only the rows that are due, `bucketed` pads them to a few sizes, and "
        "`captured` also replays each size as a CUDA graph. The last two need a paged KV. `auto`: `captured` on a GPU, "
        "`exact` on a CPU.",
        choices=("auto", "exact", "bucketed", "captured"),
    )
    no_graphs: tuple[str, ...] = option(
        (),
        "Part of models that a GPU does not replay as CUDA graphs, so that the host launches each kernel: the steps "
        "of a decoder (`decode`), the `codes` of a frame of speech, the `vocoder`, the `encoder` of audio; repeat for "
        "several. A part is launched this way by itself if it cannot be captured, or if its replay gives other "
        "numbers.",
        choices=("decode", "codes", "vocoder", "encoder"),
        flag="no-graph",
    )
    step_ahead: bool = option(
        False,
        "Launch a step before the tokens of the step before it are read, so that a GPU does not wait for the host "
        "between two steps. Also gives each model's thread a CUDA stream of its own, so that models do not wait for "
        "each other. Rows whose token the host decides, such as those with a grammar, still wait.",
    )


@dataclass(frozen=True, slots=True)
class SpeechSettings:
    """The section `[speech]`: the synthesizer, its voices, and the timeouts of speech streams."""

    synthesizer: str = option(
        "",
        "Speech synthesizers, separated by commas: names from `antiphon pull --list` and folders (Qwen3-TTS, Piper's "
        "voices). The first has the default voice. Or `URL#MODEL` of a server that speaks, or `none`.",
    )
    voices: tuple[str, ...] = option(
        (),
        "Voice to load in addition to the default one (`emma`, `fenrir`, `fable`, `kore`, `all`); repeat for several. "
        "Of a server: the voices to use, the default first.",
        flag="voice",
    )
    voices_per_key: int = option(
        100,
        "Most uploaded voices of one API key (or of all keyless clients together), of at most 10 MB each.",
        low=0,
    )
    speakers_per_key: int = option(0, "Most speakers that one API key may have remembered; 0: none.", low=0)
    speaker_days: int = option(365, "Days after which remembered speakers are deleted; 0: never.", low=0)
    fetch_from: tuple[str, ...] = option(
        (),
        "Host from which a `ref_audio` URL may be fetched: `cdn.example.com`, `*.example.com`, or `*` for all; repeat "
        "for several. Private addresses are refused unless one is given explicitly, as in `10.0.0.7:9000`.",
        flag="fetch-from",
    )
    fallback_voice: str = option(
        "auto",
        "Rule-based voice for languages that the synthesizer does not speak, eSpeak NG: if it is installed (`auto`), "
        "always (`espeak-ng`), or never (`off`).",
        choices=("auto", "espeak-ng", "off"),
    )
    failure_line: str = option(
        "", "Text that is spoken if the language model fails in an answer; none by default. The response still fails."
    )
    config_timeout_s: float = option(10.0, "Seconds in which a speech stream has to send its session.config.", low=0.1)
    idle_timeout_s: float = option(30.0, "Seconds of silence on both sides after which a speech stream ends.", low=0.1)
