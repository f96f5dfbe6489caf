"""All settings, by section: a field for each, with its default and its help."""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon.settings.option import HOST, KEY, ORIGIN, option


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The section `[server]`: addresses, API keys, and how many sessions live for how long."""

    host: str = option("127.0.0.1", "Address to listen on.", form=HOST)
    port: int = option(8000, "Port to listen on; 0 lets the system choose.", low=0, high=65535)
    api_keys: tuple[str, ...] = option(
        (),
        "Accepted API key; give it several times for several keys. An empty one stops the start. Better set the "
        "variable: other users of the machine can read flags in the list of processes.",
        flag="api-key",
        no_blanks=True,
        form=KEY,
    )
    metrics_key: str = option(
        "",
        "Key that `/metrics` asks for, as a bearer token; without one it is open. It opens nothing else. Better set "
        "the variable, as for API keys.",
        no_blanks=True,
        form=KEY,
    )
    allow_anonymous: bool = option(False, "Listen beyond loopback although no API key is set.")
    sessions_per_key: int = option(64, "Live sessions one API key (or all keyless clients together) may hold.", low=1)
    max_sessions: int = option(256, "Live sessions the server holds at once.", low=1)
    certificate: str = option(
        "", "File that `antiphon certify` wrote on this machine: sessions are admitted as it says they are held."
    )
    headroom: bool = option(
        True, "Refuse new sessions while the server sees that it has no headroom, or is full by its certificate."
    )
    burst_sessions: int = option(
        0,
        "Sessions that may begin within five seconds where there is no certificate. 0: 8 with models on a CPU, 64 with "
        "models on a GPU.",
        low=0,
    )
    otel_endpoint: str = option(
        "", "Where traces of turns are sent, by OTLP over HTTP (`http://HOST:4318`); needs the extra `[otel]`."
    )
    otel_objective_s: float = option(1.5, "Turns whose answer is heard later than this are all traced.", low=0)
    otel_sample: float = option(0.01, "Part of the other turns that is traced.", low=0, high=1)
    cors_origins: tuple[str, ...] = option(
        (),
        "Origin whose pages may use the server, beside its own page, or `*`; several times for several.",
        flag="cors-origin",
        form=ORIGIN,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Name by which clients reach the server, or `*`, beside its addresses, `localhost` and `--host`; several times "
        "for several. Requests to other names are refused on loopback and where no API key is set.",
        flag="allowed-host",
    )
    ice_servers: tuple[str, ...] = option(
        (),
        "STUN or TURN server for WebRTC (`stun:HOST:PORT`); none for clients that reach this host.",
        flag="ice-server",
    )
    record: str = option("", "Folder in which each session of `/v1/realtime` is recorded, in a folder of its own.")
    record_mb: int = option(
        0, "What the recordings may take before the oldest are deleted, in MiB; 0 deletes nothing.", low=0
    )
    record_hours: float = option(
        0.0, "How old a recording may be before it is deleted, in hours; 0 deletes nothing.", low=0.0
    )
    record_redact: str = option(
        "off",
        "What recordings leave out of what is said: `mask`: numbers and e-mail addresses; `drop`: every text. With "
        "either, audio is recorded as silence.",
        choices=("off", "mask", "drop"),
    )
    record_consent: bool = option(
        False, "Record only the sessions whose client says `record=1` in the URL, as somebody has agreed to it."
    )
    torch_profiler_dir: str = option(
        "",
        "Folder for the traces of `/start_profile` and `/stop_profile`, which are off without it. Whoever has an API "
        "key may then slow the server down.",
    )
    body_timeout_s: float = option(
        30.0, "Seconds in which a request's body has to arrive, and one more for each 4 KiB of it.", low=0.1
    )
    head_timeout_s: float = option(
        10.0, "Seconds in which the head of a request has to arrive; a connection that is slower is closed.", low=0.1
    )
    connections_per_address: int = option(
        0,
        "Connections that one address may hold; 0 for half of those that the server holds. `--trusted-proxies` may "
        "hold all; each client behind one may have as many requests and WebSockets under way.",
        low=0,
    )
    trusted_proxies: str = option(
        "",
        "Addresses and networks of the proxies, doors and other hosts before this server, comma separated, as in "
        "`127.0.0.1,10.0.0.0/8`: what they say in `X-Forwarded-For` is the client's address. Others are not believed.",
    )
    drain_s: float = option(20.0, "Seconds that live sessions and requests get to finish after SIGTERM.", low=0)
    stall_s: float = option(
        120.0, "Seconds that one step of a model may take before the model is declared lost; 0 for any time.", low=0
    )
    exit_on_model_loss: bool = option(False, "Drain and exit with status 1 once a model is lost, for a supervisor.")
    session_s: float = option(3600.0, "Seconds after which a session expires; 0 for never.", low=0)
    strict_models: bool = option(False, "Answer model_not_found for a client's default model name instead of serving.")
    log_level: str = option("info", "Log level.", choices=("debug", "info", "warning", "error"))
    log_format: str = option(
        "text", "Form of log lines: `json` is one object a line, for a collector of logs.", choices=("text", "json")
    )


@dataclass(frozen=True, slots=True)
class ResumeSettings:
    """The section `[resume]`: how long a session waits for its client, and what is kept of it meanwhile."""

    grace_s: float = option(30.0, "Seconds a session that can be resumed waits for its client to resume it.", low=0)
    journal_mb: int = option(8, "Sent frames that a session keeps for a client that resumes, in MiB.", low=1)
    journal_s: int = option(60, "Seconds for which it keeps them.", low=1)
    state: str = option(
        "",
        "Where conversations that can be resumed are kept, so that they survive a restart of the server: a folder, or "
        "the URL of a server that several hosts share, `redis://`, `rediss://` or `postgresql://` "
        "(extras `[redis]`, `[postgres]`). Set the variable for a URL with a password: other users of the "
        "machine can read flags.",
    )
    state_hours: float = option(24.0, "Hours after which a conversation there is deleted.", low=0)
    store_speech: bool = option(
        False,
        "Also store there, each second, the sound of the turn under way: if this server dies, the next one has it, "
        "even from a client that cannot send it again.",
    )
    host_name: str = option(
        "",
        "Name of this server among those that share `--state`, the machine's own by default. Each start adds an "
        "incarnation to it.",
    )
    host_ttl_s: float = option(
        5.0,
        "Seconds after which a server that shares `--state` and was not heard of is dead, so that others may take up "
        "its sessions. It is heard of three times in that time.",
        low=0.5,
    )


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The section `[cluster]`: what this process is among others."""

    role: str = option(
        "host",
        "What the process is: a `host` has models and sessions; a `door` has none, and carries clients to hosts, so "
        "that their sessions outlive one.",
        choices=("host", "door"),
    )
    advertise: str = option(
        "",
        "Of a host that shares `--state`, the base URL at which the others reach it, `http://HOST:PORT`; by default "
        "that of `--host`, if it is one address.",
    )
    hosts: tuple[str, ...] = option(
        (),
        "Of a door, a host behind it (`http://HOST:PORT`); several times for several. With `--state` a door finds its "
        "hosts by itself, those that advertise an address in that store.",
        flag="behind",
    )
    internal_key: str = option(
        "",
        "Opens a host's paths under `/internal/`, for those who run it: to drain it, to list the hosts of its store, "
        "and to say that one is dead. Without it there are no such paths.",
        secret=True,
        form=KEY,
    )


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The section `[memory]`: how many bytes clients may make the server hold, beside the models and their KV."""

    session_memory_mb: int = option(
        256, "Memory that one session may hold: its conversation, what waits in it, and sent frames, in MiB.", low=1
    )
    key_memory_mb: int = option(
        1024,
        "Memory that the sessions, requests and client secrets of one API key (or all keyless clients) may hold, "
        "in MiB.",
        low=1,
    )
    total_memory_mb: int = option(
        4096, "Memory that all of them may hold, in MiB. A key is always left its equal part.", low=1
    )


@dataclass(frozen=True, slots=True)
class AudioSettings:
    """The section `[audio]`: how much a client may send at once, and what happens where the server is behind."""

    max_frame_bytes: int = option(20 << 20, "Largest WebSocket frame accepted, in bytes.", low=1024)
    max_append_bytes: int = option(15 << 20, "Most audio one append may carry, in bytes.", low=1024)
    max_file_bytes: int = option(200 << 20, "Largest file accepted by the REST endpoints, in bytes.", low=1024)
    max_file_s: float = option(4 * 3600.0, "Longest sound file accepted by them, in seconds of audio.", low=1)
    max_backlog_s: float = option(
        30.0, "Seconds of received audio a session may be behind before its overflow policy acts.", low=1
    )
    max_audio_s: float = option(300.0, "Most seconds a transcription's `max_audio_s` may ask for.", low=5)
    max_prefix_tokens: int = option(1024, "Most tokens its `max_prefix_tokens` may ask for.", low=1)
    realtime_max_tokens: int = option(4096, "Most tokens its `realtime_max_tokens` may ask for.", low=1)
    overflow: str = option(
        "block",
        "What a full backlog does: `block` stops reading the socket (a file is slowed, nothing is lost), "
        "`close` ends the session with an error (for callers that must stay live).",
        choices=("block", "close"),
    )
    max_events_per_s: int = option(
        500, "Most client events a second without audio, averaged over two seconds; with more the session ends.", low=1
    )


# Types of weights; `auto` is what suits the device.
WEIGHTS = ("auto", "int8", "bf16", "fp32")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The section `[models]`: which models are loaded, from where, on which device, with how many workers."""

    profile: str = option(
        "auto",
        "Set of models to load. `auto`: the largest that answers in time on this machine, which is measured, and fits "
        "its memory. `hub`: with a language model that only the hub has, untried here.",
        choices=("auto", "default", "large", "light", "hub"),
    )
    transcriber: str = option(
        "", "Transcriber: a name from `antiphon pull --list`, or the folder of a checkpoint (Qwen3-ASR)."
    )
    partials: str = option(
        "",
        "A cheaper model of the transcriber's kind that decodes partials, such as `whisper-tiny.en`: a name from "
        "`antiphon pull --list`. It is used for sessions whose language is set to one that it knows.",
    )
    speaker_model: str = option(
        "",
        "Speaker encoder, by which a conversation tells its user's voice from others: `resemblyzer`. Without one, all "
        "voices are the user's.",
    )
    home: str = option("~/.cache/antiphon", "Where models are kept.")
    models_from: str = option("", "A local folder that is searched for model files first.")
    offline: bool = option(False, "Never touch the network; use what is there.")
    device: str = option("cpu", "Where models run.", choices=("cpu", "cuda"))
    placement: str = option(
        "",
        "Device and weights of single models, in place of `--device` and `--weights`: `ROLE=DEVICE[/WEIGHTS]`, "
        "comma separated, as in `conversation_model=cuda:0,transcriber=cuda:1,synthesizer=cpu/int8`. The role "
        "`talker` is that of a conversation model with a separate one.",
    )
    compute_type: str = option("int8", "Numeric type of the Whisper weights, as CTranslate2 names it.")
    workers: int = option(0, "Parallel model workers, one thread each; 0 means one for each core.", low=0)
    max_queue: int = option(256, "Jobs that may wait for one model before new ones are refused.", low=1)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The section `[engine]`: the language model, the conversation model and the video model, and the memory of their
    KV.
    """

    language_model: str = option(
        "",
        "Language model: a name from `antiphon pull --list`, a checkpoint's folder, a .gguf file, `URL#MODEL` for a "
        "model of another server with OpenAI's API, as in `http://127.0.0.1:11434/v1#qwen3:4b`, or `none`.",
    )
    engine: str = option(
        "local",
        "What computes the language model: `local`, this process; `vllm:URL[,URL]` or `sglang:URL[,URL]`, servers of "
        "that kind, which serve the model that is in the folder of `--language-model` (no weights are needed there).",
    )
    conversation_model: str = option(
        "",
        "Conversation model used in place of the language model and the voice: the folder of a Qwen3-Omni checkpoint, "
        "or a Qwen2.5-Omni checkpoint, which hears, sees, writes and speaks, or of a MiniCPM-o 4.5 checkpoint, which "
        "takes turns by itself.",
        also="partner",
    )
    video_model: str = option(
        "",
        "Vision-language model that answers questions about video, in place of the language model: the folder of a "
        "SmolVLM, Qwen2.5-VL or Qwen3-VL checkpoint.",
        also="watcher",
    )
    video_prefill: str = option(
        "eager",
        "When the `--video-model` takes frames into its KV: as they come, or when a question is asked.",
        choices=("eager", "query"),
        also="watcher_prefill",
    )
    weights: str = option(
        "auto",
        "Type of the language model's weights; `auto` takes what the device multiplies fastest.",
        choices=WEIGHTS,
    )
    engine_threads: int = option(0, "Threads of a language model's step; 0 means one for each core.", low=0)
    kv_mb: int = option(2048, "Memory for the KV of live conversations, in MB.", low=1)
    kv_host_mb: int = option(1024, "Host memory for the KV of parked conversations, in MB.", low=0)
    kv_disk_mb: int = option(8192, "Disk for the KV of parked conversations, in MB.", low=0)
    context_tokens: int = option(0, "Most tokens a conversation keeps in its KV; 0 means the model's own limit.", low=0)
    reserve_tokens: int = option(512, "Tokens of KV that are reserved for a conversation when it begins.", low=64)
    prefill_tokens: int = option(
        0,
        "Most prompt tokens in one step while other sessions generate; bounds how much a long prompt delays them. 0: "
        "64 on a CPU, 512 on a GPU.",
        low=0,
    )
    prefill_only_tokens: int = option(
        0, "Most prompt tokens in one step while no session generates. 0: 256 on a CPU, 4096 on a GPU.", low=0
    )
    decode_sessions: int = option(
        0, "Most conversations that get a token in one step. 0: 64 on a CPU, 256 on a GPU.", low=0
    )
    grammar_s: float = option(
        2.0,
        "Processor time that compiling the JSON schemas of one message or request may take, in seconds, in a process "
        "of its own.",
        low=0.01,
    )
    grammar_mb: int = option(512, "Memory that compiling them may take, in MB.", low=16)
    park_after_s: float = option(120.0, "Idle seconds after which a conversation's KV is parked.", low=0)
    kv_layout: str = option(
        "auto",
        "How the KV lies in memory: `session` keeps a conversation's in a tensor that grows by being copied, `paged` "
        "all conversations' in one pool of pages, which takes `--kv-mb` from the start. `auto`: `paged` on a GPU, or "
        "where decode steps are padded.",
        choices=("auto", "session", "paged"),
    )
    decode_shapes: str = option(
        "auto",
        "Sizes of decode steps: `exact` computes just the rows there are, `bucketed` pads them to a few sizes, and "
        "`captured` also replays each size as a CUDA graph. The last two need a paged KV. `auto`: `captured` on a GPU, "
        "`exact` on a CPU.",
        choices=("auto", "exact", "bucketed", "captured"),
    )
    no_graphs: tuple[str, ...] = option(
        (),
        "Part of models that a GPU does not replay as CUDA graphs, so that the host launches each kernel: `decode` "
        "steps, the `codes` of a frame of speech, the `vocoder`; several times for several. A part that cannot be "
        "captured, or whose replay gives other numbers, is launched so by itself.",
        choices=("decode", "codes", "vocoder"),
        flag="no-graph",
    )


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """The section `[remote]`: a language model on another server (`--language-model URL#MODEL`, `--engine`)."""

    remote_key: str = option("", "The server's API key, sent to it as a bearer token.", secret=True, form=KEY)
    remote_key_file: str = option("", "File with that key, where the variable is not set.")
    remote_first_token_s: float = option(
        10.0,
        "Seconds in which the first word of an answer has to come. After half of it the question is asked a second "
        "time, and whichever answer begins first is taken.",
        low=0.1,
    )
    remote_token_s: float = option(
        10.0, "Seconds in which each further word has to come, before the answer counts as failed.", low=0.1
    )
    remote_media: bool = option(
        False, "The model hears and sees: it is given audio and images in place of the text made of them."
    )
    remote_preemptive: int = option(
        0,
        "Answers that a conversation may begin in a minute while the user may still go on; each is a request more that "
        "may be for nothing.",
        low=0,
    )


@dataclass(frozen=True, slots=True)
class SpeechSettings:
    """The section `[speech]`: the synthesizer, its voices, and the timeouts of speech streams."""

    synthesizer: str = option(
        "", "Speech synthesizer: a name from `antiphon pull --list`, a checkpoint's folder (Qwen3-TTS), or `none`."
    )
    voices: tuple[str, ...] = option(
        (),
        "Voice to load beside the default one (`emma`, `fenrir`, `fable`, `kore`, `all`); several times for several.",
        flag="voice",
    )
    voices_per_key: int = option(
        100,
        "Uploaded voices one API key (or all keyless clients together) may have, of at most 10 MB each.",
        low=0,
    )
    fetch_from: tuple[str, ...] = option(
        (),
        "Host from which a `ref_audio` that is a URL is fetched: `cdn.example.com`, `*.example.com`, or `*` for all; "
        "several times for several. Private addresses are refused unless one is given itself, as `10.0.0.7:9000`.",
        flag="fetch-from",
    )
    fallback_voice: str = option(
        "auto",
        "Voice for texts in languages that the synthesizer does not speak: eSpeak NG, by rules, where it is installed "
        "(`auto`), in any case, or not at all.",
        choices=("auto", "espeak-ng", "off"),
    )
    failure_line: str = option(
        "", "What is said where the language model fails in an answer; nothing by default. The response still fails."
    )
    config_timeout_s: float = option(10.0, "Seconds a speech stream may take to send its session.config.", low=0.1)
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
        "Accepted for compatibility; both values do the same.",
        choices=("fast", "slow"),
        variable="VLLM_VIDEO_AUDIO_DELTA_MODE",
        flag="video-audio-delta-mode",
    )
    video_config_timeout_s: float = option(
        10.0, "Seconds a video session may take to send its session.config.", low=0.1
    )
    video_idle_timeout_s: float = option(60.0, "Seconds without a message after which a video session ends.", low=0.1)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, by section. They are read once, when the process starts, and never change."""

    server: ServerSettings = field(default_factory=ServerSettings)
    resume: ResumeSettings = field(default_factory=ResumeSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    audio: AudioSettings = field(default_factory=AudioSettings)
    models: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineOptions = field(default_factory=EngineOptions)
    remote: RemoteSettings = field(default_factory=RemoteSettings)
    speech: SpeechSettings = field(default_factory=SpeechSettings)
    video: VideoSettings = field(default_factory=VideoSettings)
