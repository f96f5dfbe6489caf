"""The state of one server: settings, models, metrics, sessions, admission and credentials."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio.abc

from antiphon.admission.certificate import Kind
from antiphon.contracts import NativeModel
from antiphon.engine.profiling import Profiler
from antiphon.errors import Refused
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import store_of
from antiphon.protocols.model_names import ModelNames
from antiphon.remote.mcp.servers import McpServers
from antiphon.server.admission import Admission
from antiphon.server.credentials import Caller, Credentials
from antiphon.server.fetch import Fetcher
from antiphon.server.listeners import Listeners
from antiphon.server.live.enrolled_voices import EnrolledVoices
from antiphon.server.live.known_speakers import KnownSpeakers
from antiphon.server.live.own_tools import OwnTools
from antiphon.server.mcp import open_mcp
from antiphon.server.memory import MemoryLedger
from antiphon.server.metrics import Metrics, TurnReports
from antiphon.server.registry import SessionRegistry, host_name
from antiphon.server.telephone.switchboard import Switchboard
from antiphon.settings import Settings
from antiphon.store.voices import NoteStore, SpeakerStore, VoiceStore

log = logging.getLogger(__name__)
# Maximum number of default model names that are logged (once each), and the maximum length of a logged name.
MAX_LOGGED_ALIASES = 1000
MAX_ALIAS_CHARS = 80
# The names of query parameters that are logged.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")


@dataclass(slots=True)
class ServerState:
    """The state of one server, made before the socket opens.

    It belongs to the event loop that serves. No method may be called from another thread.
    """

    # The settings that the server was started with.
    settings: Settings
    # The metrics that /metrics reports.
    metrics: Metrics
    # None until the models are loaded and warm.
    models: LoadedModels | None = None
    # When the server was started, in Unix seconds.
    started_s: int = 0
    # Makes the server drain and end, as SIGTERM does. Set by `run`.
    stop: Callable[[], None] = lambda: None
    # Runs tasks that outlive the request that started them. Set by `run`.
    group: anyio.abc.TaskGroup | None = None
    # The vectors of uploaded voices, with which sessions recognize their users.
    enrolled_voices: EnrolledVoices = field(default_factory=EnrolledVoices)
    # The vectors of remembered speakers, with which sessions label their turns.
    known_speakers: KnownSpeakers = field(default_factory=KnownSpeakers)
    # The memory that the server holds for its clients, by key.
    memory: MemoryLedger = field(init=False)
    # The sessions, calls and requests under way.
    sessions: SessionRegistry = field(init=False)
    # Decides which sessions and requests are admitted.
    admission: Admission = field(init=False)
    # The ports of protocols that are not HTTP.
    listeners: Listeners = field(init=False)
    # The API keys and client secrets that the server accepts.
    credentials: Credentials = field(init=False)
    # Carry out functions of conversations; None without `--mcp` and `--mcp-from-clients`.
    tool_servers: McpServers | None = field(init=False)
    # What the telephone keeps between requests.
    switchboard: Switchboard = field(init=False)
    # Fetches audio that clients name by URL.
    fetcher: Fetcher = field(init=False)
    # None without `--torch-profiler-dir`.
    profiler: Profiler | None = field(init=False)
    # Reports the turns that have ended.
    turns: TurnReports = field(init=False)
    _logged_aliases: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        settings = self.settings
        self.memory = MemoryLedger(settings.memory)
        self.metrics.watch_memory(self.memory)
        self.sessions = SessionRegistry(host_name(settings.resume.host_name))
        self.listeners = Listeners(settings, self.metrics)
        self.credentials = Credentials(settings.server.api_keys, self.memory)
        self.tool_servers = open_mcp(settings)
        if self.tool_servers:
            self.metrics.watch_tool_servers(self.tool_servers)
        self.switchboard = Switchboard(settings.telephone, self.spawn)
        self.fetcher = Fetcher(settings.speech.fetch_from)
        folder = settings.server.torch_profiler_dir
        self.profiler = Profiler(Path(folder).expanduser()) if folder else None
        self.turns = TurnReports(settings.server, self.metrics)
        self.admission = Admission(settings, self.memory, lambda: self.native.load() if self.native else None)
        self.metrics.watch_headroom(self.admission.headroom, self.admission.by_kind)

    def uploaded_voices(self, caller: Caller) -> VoiceStore:
        """Return the store of the voices that the caller's key has uploaded, which is next to the models.

        The store's methods read and write files: call them in a thread.
        """
        return VoiceStore(store_of(self.settings.models).home, caller.key, self.settings.speech.voices_per_key)

    def remembered_speakers(self, caller: Caller) -> SpeakerStore:
        """Return the store of the speakers that the caller's key has remembered, next to `uploaded_voices`.

        The store's methods read and write files: call them in a thread.
        """
        speech = self.settings.speech
        home, max_age_s = store_of(self.settings.models).home, speech.speaker_days * 86400.0
        return SpeakerStore(home, caller.key, speech.speakers_per_key, max_age_s)

    def own_tools(self, caller: Caller) -> OwnTools | None:
        """Return antiphon's own functions for a conversation of the caller; None without `--tool`."""
        tools, home = self.settings.tools, store_of(self.settings.models).home
        notes = NoteStore(home, caller.key, tools.notes_per_key, tools.note_days * 86400.0)
        return OwnTools(tools.own, notes) if tools.own else None

    @property
    def transcriber_names(self) -> ModelNames:
        """The names that a client may use for the transcriber. Needs the models to be loaded."""
        assert self.models is not None
        return ModelNames((self.models.required_transcriber.profile.id,), strict=self.settings.server.strict_models)

    @property
    def conversation_names(self) -> ModelNames | None:
        """The names that a client may use for the conversation model; None if none is loaded."""
        model = self.models.for_conversations if self.models else None
        if model is None:
            return None
        unit_ms = round(model.native.profile.unit_s * 1000) if model.native else 0
        strict, hears = self.settings.server.strict_models, model.profile.accepts_media
        return ModelNames((model.profile.id,), strict=strict, unit_ms=unit_ms, hears=hears)

    def kind_of(self, kind: Kind) -> Kind:
        """Return the kind of a session by the loaded models: all conversations of a native model are `native`."""
        return "native" if self.native and kind in ("conversation", "duplex") else kind

    @property
    def native(self) -> NativeModel | None:
        """The native model that speaks in conversations; None if another model does, and while the models load."""
        model = self.models.for_conversations if self.models else None
        return model.native if model else None

    def loaded(self) -> LoadedModels:
        """Return the models. Raises Refused while they load."""
        if self.models is None:
            raise Refused("the models are still loading", 5.0)
        return self.models

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task that outlives its request. `work` must not raise: an exception would end the server."""
        assert self.group
        self.group.start_soon(work)

    def log_ignored(self, names: Collection[str], path: str) -> None:
        """Log once per name that the server ignores these parameters of a vendor's path or dialect."""
        for name in names:
            if _NAME.fullmatch(name):
                self._log_once(f"{path} {name}", "%s: the parameter %r is ignored", path, name)

    def log_alias(self, name: str, model: str = "") -> None:
        """Log once per `name`, a client's default model name, that `model` (default: the transcriber) serves it.

        Logs at most MAX_LOGGED_ALIASES names.
        """
        name = name[:MAX_ALIAS_CHARS]
        self._log_once(name, "%r is not loaded: served by %s", name, model or self.transcriber_names.loaded[0])

    def _log_once(self, subject: str, line: str, *args: str) -> None:
        if subject not in self._logged_aliases and len(self._logged_aliases) < MAX_LOGGED_ALIASES:
            self._logged_aliases.add(subject)
            log.info(line, *args)
