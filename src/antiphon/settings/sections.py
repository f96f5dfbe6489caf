"""All settings, by section: a field for each, with its default and its help.

The sections of models, of other programs' protocols and of other servers are in modules of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon.settings.models import EngineOptions, ModelSettings, SpeechSettings
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
    # Telephone calls that a carrier or a switch brings.
    telephone: TelephoneSettings = field(default_factory=TelephoneSettings)
    # Telephone calls over SIP.
    sip: SipSettings = field(default_factory=SipSettings)
