"""All settings, by section: a field for each, with its default and its help."""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon.settings.option import HOST, KEY, ORIGIN, option
from antiphon.settings.protocols import SipSettings, TelephoneSettings, TlsSettings, WyomingSettings
from antiphon.settings.remote import RemoteSettings, ToolSettings


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The section `[server]`: addresses, API keys, the number of sessions and their lifetime."""

    host: str = option("127.0.0.1", "Address to listen on.", form=HOST)
    port: int = option(8000, "Port to listen on; 0 lets the system choose.", low=0, high=65535)
    api_keys: tuple[str, ...] = option(
        (),
        "Accepted API key; repeat for several keys. An empty key stops the start. Prefer the variable, because other "
        "users of the machine can read flags in the list of processes.",
        flag="api-key",
        no_blanks=True,
        form=KEY,
    )
    metrics_key: str = option(
        "",
        "Key that `/metrics` requires as a bearer token; without one it is open. The key is valid for nothing else. "
        "Prefer the variable, as for API keys.",
        no_blanks=True,
        form=KEY,
    )
    allow_anonymous: bool = option(False, "Listen on addresses other than loopback even without an API key.")
    sessions_per_key: int = option(64, "Most live sessions of one API key (or of all keyless clients together).", low=1)
    max_sessions: int = option(256, "Most live sessions of the server.", low=1)
    certificate: str = option(
        "", "File that `antiphon certify` wrote on this machine. Sessions are admitted up to the numbers in it."
    )
    headroom: bool = option(
        True, "Refuse new sessions while the server has no headroom, or is full by its certificate."
    )
    burst_sessions: int = option(
        0,
        "Most sessions that may begin within five seconds without a certificate. 0: 8 with models on a CPU, 64 with "
        "models on a GPU.",
        low=0,
    )
    otel_endpoint: str = option(
        "", "Receiver of traces of turns, by OTLP over HTTP (`http://HOST:4318`); needs the extra `[otel]`."
    )
    otel_objective_s: float = option(
        1.5, "Every turn whose answer is heard later than this many seconds is traced.", low=0
    )
    otel_sample: float = option(0.01, "Share of the other turns that is traced.", low=0, high=1)
    cors_origins: tuple[str, ...] = option(
        (),
        "Origin whose pages may use the server, in addition to its own page, or `*`; repeat for several.",
        flag="cors-origin",
        form=ORIGIN,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Name by which clients reach the server, in addition to its addresses, `localhost` and `--host`, or `*`; "
        "repeat for several. Requests to other names are refused on loopback and if no API key is set.",
        flag="allowed-host",
    )
    ice_servers: tuple[str, ...] = option(
        (),
        "STUN or TURN server for WebRTC (`stun:HOST:PORT`). Not needed for clients that can reach this host directly.",
        flag="ice-server",
    )
    record: str = option("", "Folder for recordings of `/v1/realtime`. Each session gets its own subfolder.")
    record_mb: int = option(
        0, "Total size of the recordings, in MiB, above which the oldest are deleted; 0 deletes none.", low=0
    )
    record_hours: float = option(
        0.0, "Age of a recording, in hours, after which it is deleted; 0 deletes none.", low=0.0
    )
    record_redact: str = option(
        "off",
        "What recordings leave out of the spoken and written text: `mask`: numbers and e-mail addresses; `drop`: all "
        "text. With either, audio is recorded as silence.",
        choices=("off", "mask", "drop"),
    )
    record_consent: bool = option(
        False, "Record only sessions whose URL has `record=1`, which states that the user has consented."
    )
    torch_profiler_dir: str = option(
        "",
        "Folder for the traces of `/start_profile` and `/stop_profile`, which are disabled without it. With it, any "
        "client with an API key can slow the server down.",
    )
    body_timeout_s: float = option(
        30.0, "Seconds in which a request's body has to arrive, plus one for each 4 KiB of it.", low=0.1
    )
    head_timeout_s: float = option(
        10.0, "Seconds in which the head of a request has to arrive; slower connections are closed.", low=0.1
    )
    connections_per_address: int = option(
        0,
        "Most connections from one address; 0: half of the server's limit. `--trusted-proxies` may hold all "
        "connections; each client behind a proxy may then have that many requests and WebSockets under way.",
        low=0,
    )
    trusted_proxies: str = option(
        "",
        "Addresses and networks of the proxies, doors and other hosts in front of this server, comma separated, as in "
        "`127.0.0.1,10.0.0.0/8`. The client's address is taken from their `X-Forwarded-For`. The header is ignored "
        "from any other address.",
    )
    drain_s: float = option(20.0, "Seconds that live sessions and requests get to finish after SIGTERM.", low=0)
    stall_s: float = option(
        120.0, "Seconds that one step of a model may take before the model is declared lost; 0: no limit.", low=0
    )
    exit_on_model_loss: bool = option(
        False, "When a model is lost, drain and exit with status 1, so that a supervisor restarts the server."
    )
    session_s: float = option(3600.0, "Seconds after which a session expires; 0: never.", low=0)
    strict_models: bool = option(
        False, "Answer model_not_found to a client's default model name instead of serving it with the loaded model."
    )
    log_level: str = option("info", "Log level.", choices=("debug", "info", "warning", "error"))
    log_format: str = option(
        "text",
        "Format of log lines: `json` writes an object on each line, for a log collector.",
        choices=("text", "json"),
    )


@dataclass(frozen=True, slots=True)
class ResumeSettings:
    """The section `[resume]`: how long a session waits for its client, and what the server keeps meanwhile."""

    grace_s: float = option(30.0, "Seconds that a resumable session waits for its client to resume it.", low=0)
    journal_mb: int = option(8, "Sent frames that a session keeps for a resuming client, in MiB.", low=1)
    journal_s: int = option(60, "Seconds for which a session keeps sent frames.", low=1)
    state: str = option(
        "",
        "Store of resumable conversations, so that they survive a restart of the server: a folder, or the URL of a "
        "server that several hosts share, `redis://`, `rediss://` or `postgresql://` (extras `[redis]`, "
        "`[postgres]`). Set the variable for a URL with a password, because other users of the machine can read flags.",
    )
    state_hours: float = option(24.0, "Hours after which a conversation in the store is deleted.", low=0)
    store_captions: bool = option(True, "Also store transcription sessions, with the words of unfinished turns.")
    store_speech: bool = option(
        False,
        "Also store the sound of the turn under way, once a second. If this server dies, the next one has it, even if "
        "the client cannot send it again.",
    )
    store_frames: int = option(
        0,
        "Newest frames of each video stream that are stored too, at most 512 KiB, for a host that continues it.",
        low=0,
    )
    host_name: str = option(
        "",
        "Name of this server among those that share `--state`; by default the machine's name. Each start adds an "
        "incarnation to it.",
    )
    host_ttl_s: float = option(
        5.0,
        "Seconds without a heartbeat after which a server that shares `--state` counts as dead, and others may take "
        "over its sessions. A server sends three heartbeats in that time.",
        low=0.5,
    )


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The section `[cluster]`: the role of this process in a cluster of servers."""

    role: str = option(
        "host",
        "Role of the process: a `host` has models and sessions; a `door` has neither, and forwards clients to hosts, "
        "so that sessions outlive a host.",
        choices=("host", "door"),
    )
    advertise: str = option(
        "",
        "For a host that shares `--state`: the base URL at which the others reach it, `http://HOST:PORT`; by default "
        "that of `--host`, if it is a single address.",
    )
    hosts: tuple[str, ...] = option(
        (),
        "For a door: a host behind it (`http://HOST:PORT`); repeat for several. With `--state` a door finds the hosts "
        "that advertise an address in that store by itself.",
        flag="behind",
    )
    internal_key: str = option(
        "",
        "Key for a host's paths under `/internal/`, for its operators: to drain it, to list the hosts of its store, "
        "and to declare one dead. Without a key these paths do not exist.",
        secret=True,
        form=KEY,
    )


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The section `[memory]`: how much memory clients may make the server hold, without the models and their KV."""

    session_memory_mb: int = option(
        256, "Memory of one session: its conversation, its queues, and its sent frames, in MiB.", low=1
    )
    key_memory_mb: int = option(
        1024,
        "Memory of all sessions, requests and client secrets of one API key (or of all keyless clients together), "
        "in MiB.",
        low=1,
    )
    total_memory_mb: int = option(
        4096, "Memory of all clients together, in MiB. An equal share is always left to each key.", low=1
    )


@dataclass(frozen=True, slots=True)
class AudioSettings:
    """The section `[audio]`: how much a client may send at once, and what happens if the server falls behind."""

    max_frame_bytes: int = option(20 << 20, "Largest WebSocket frame accepted, in bytes.", low=1024)
    max_append_bytes: int = option(15 << 20, "Most audio in one append, in bytes.", low=1024)
    max_file_bytes: int = option(200 << 20, "Largest file that the REST endpoints accept, in bytes.", low=1024)
    max_file_s: float = option(4 * 3600.0, "Longest sound file that they accept, in seconds of audio.", low=1)
    max_backlog_s: float = option(
        30.0, "Backlog of a session's received audio, in seconds, at which its overflow policy applies.", low=1
    )
    max_audio_s: float = option(300.0, "Largest `max_audio_s` that a transcription may request, in seconds.", low=5)
    max_prefix_tokens: int = option(1024, "Largest `max_prefix_tokens` that it may request.", low=1)
    realtime_max_tokens: int = option(4096, "Largest `realtime_max_tokens` that it may request.", low=1)
    overflow: str = option(
        "block",
        "Policy for a full backlog: `block` stops reading the socket (a file is slowed, nothing is lost), "
        "`close` ends the session with an error (for callers that must stay live).",
        choices=("block", "close"),
    )
    max_events_per_s: int = option(
        500, "Most client events without audio a second, averaged over two seconds. Beyond it, the session ends.", low=1
    )


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


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """The section `[video]`: how video answers are sent, and the timeouts of video streams."""

    async_chunk: str = option(
        "on",
        "Send video answers as they are made (`on`), or as one piece of text and one of audio (`off`).",
        choices=("on", "off"),
        variable="VLLM_VIDEO_ASYNC_CHUNK",
        flag="video-async-chunk",
    )
    audio_delta_mode: str = option(
        "fast",
        "Accepted for compatibility; both values have the same effect.",
        choices=("fast", "slow"),
        variable="VLLM_VIDEO_AUDIO_DELTA_MODE",
        flag="video-audio-delta-mode",
    )
    video_config_timeout_s: float = option(
        10.0, "Seconds in which a video session has to send its session.config.", low=0.1
    )
    video_idle_timeout_s: float = option(60.0, "Seconds without a message after which a video session ends.", low=0.1)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, by section. Read once, when the process starts; they never change."""

    # Addresses, API keys, the number of sessions and their lifetime.
    server: ServerSettings = field(default_factory=ServerSettings)
    # The certificate for https and wss.
    tls: TlsSettings = field(default_factory=TlsSettings)
    # Resuming sessions, and the store that they are kept in.
    resume: ResumeSettings = field(default_factory=ResumeSettings)
    # The role of this process in a cluster of servers.
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    # Limits of the memory that clients' data takes.
    memory: MemorySettings = field(default_factory=MemorySettings)
    # Limits of audio input, and the overflow policy.
    audio: AudioSettings = field(default_factory=AudioSettings)
    # The models to load, and their device.
    models: ModelSettings = field(default_factory=ModelSettings)
    # The language model, the conversation model, the video model, and their KV.
    engine: EngineOptions = field(default_factory=EngineOptions)
    # A language model on another server.
    remote: RemoteSettings = field(default_factory=RemoteSettings)
    # The synthesizer and its voices.
    speech: SpeechSettings = field(default_factory=SpeechSettings)
    # Video answers and video streams.
    video: VideoSettings = field(default_factory=VideoSettings)
    # The Wyoming protocol, for Home Assistant.
    wyoming: WyomingSettings = field(default_factory=WyomingSettings)
    # Functions that the server itself carries out.
    tools: ToolSettings = field(default_factory=ToolSettings)
    telephone: TelephoneSettings = field(default_factory=TelephoneSettings)  # Telephone calls, and those of carriers.
    sip: SipSettings = field(default_factory=SipSettings)  # Telephone calls over SIP.
