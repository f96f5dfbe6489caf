"""What all requests share: settings, loaded models, metrics, live sessions, short-lived keys, and whether it drains."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.abc
import msgspec

from antiphon.capacity import certificate as certificates
from antiphon.capacity.certificate import Kind
from antiphon.capacity.headroom import MOST_YOUNG, MOST_YOUNG_GPU, Headroom
from antiphon.engine.profiling import Profiler
from antiphon.errors import Refused
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import store_of
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.opening import NULL
from antiphon.protocols.resume.control import ResumeRequest
from antiphon.server.fetch import Fetcher
from antiphon.server.live.enrolled_voices import EnrolledVoices
from antiphon.server.live.moving.alive_hosts import AliveHosts
from antiphon.server.memory import MemoryAccount, MemoryLedger
from antiphon.server.metrics import Metrics
from antiphon.server.process.turn_reports import TurnReports
from antiphon.settings import Settings
from antiphon.shares.fair_cache import FairCache
from antiphon.signals import Signal
from antiphon.store.sessions import SessionStore
from antiphon.store.voices import VoiceStore
from antiphon.transports.attachment import AttachedSession

log = logging.getLogger(__name__)
# Client secrets of one key, and the memory that each takes beside its session.
MAX_SECRETS, SECRET_BYTES = 10_000, 1024
# Ids of sessions that overflowed, and default names that were logged.
MAX_OVERFLOWED, MAX_LOGGED_ALIASES = 10_000, 1000
MAX_ALIAS_CHARS = 80


class LiveCall(AttachedSession, Protocol):
    """A live session over WebRTC, which its caller's key may hang up."""

    @property
    def caller(self) -> Caller:
        """What opened it."""
        ...

    def hang_up(self) -> None:
        """Have it finish what was heard, and close. Returns at once."""
        ...


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request shows of who sent it.

    `key`: an API key, or the one that a client secret was made with; "" where the server asks for none. `granted`: the
    session that the client secret opens, as JSON; None for an API key, which may open anything. `address`: where the
    connection comes from: the client's, or that of the proxy in front.
    """

    key: str = ""
    granted: msgspec.Raw | None = None
    address: str = field(default="", compare=False)

    @property
    def client(self) -> str:
        """The address and the key: who comes back, as well as a server can tell."""
        return f"{self.address} {self.key}"

    @property
    def label(self) -> str:
        """A short hash of the key, to tell callers apart in logs; "-" without a key. It does not show the key."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:12] if self.key else "-"

    @property
    def session(self) -> msgspec.Raw:
        """The session of the client secret, for an Opening; null for an API key."""
        return NULL if self.granted is None else self.granted


@dataclass(slots=True)
class Place:
    """The place that one session or request holds, and what it is for."""

    kind: Kind
    _held: Counter[Kind]

    def becomes(self, kind: Kind) -> None:
        """Say that it is for something else than its upgrade told: nobody is refused for it."""
        self.release()
        self.kind = kind
        self._held[kind] += 1

    def release(self) -> None:
        """Count it no more. For the owner, once."""
        self._held[self.kind] -= 1
        if not self._held[self.kind]:
            del self._held[self.kind]


_current_place: ContextVar[Place] = ContextVar("place")


def current_place() -> Place | None:
    """Return the place that this task's session or request holds; None outside of any."""
    return _current_place.get(None)


@dataclass(frozen=True, slots=True)
class ClientSecret:
    """A short-lived key: the API key that it was made with, its expiry in monotonic seconds, and the session that it
    opens, as JSON.
    """

    key: str
    until_s: float
    session: msgspec.Raw


@dataclass(slots=True)
class ServerState:
    """One server's state. Made before the socket opens; `models` is set when they are loaded.

    It belongs to the event loop that serves, and no method may be called from another thread.
    """

    settings: Settings
    metrics: Metrics
    models: LoadedModels | None = None
    # When the server was started, in Unix seconds.
    started_s: int = 0
    live: set[AttachedSession] = field(default_factory=set)
    # Those of them that can be resumed, by their id.
    resumable: dict[str, AttachedSession] = field(default_factory=dict)
    # What cancels each HTTP request that is under way.
    requests: set[anyio.CancelScope] = field(default_factory=set)
    # Calls that are connected, by their id.
    calls: dict[str, LiveCall] = field(default_factory=dict)
    # Set once, on the first signal to stop: no session is admitted any more.
    draining: bool = False
    # Sessions admitted since the start.
    num_admitted: int = 0
    # Has the server drain and end, as SIGTERM does; set by whatever runs the server.
    stop: Callable[[], None] = lambda: None
    # Runs what lives longer than the request that began it; set by whatever runs the server.
    group: anyio.abc.TaskGroup | None = None
    # Conversations that outlive the server; None where `--state` is not given.
    session_store: SessionStore | None = None
    # The base URL at which the other hosts of that store reach this one; "" where they cannot.
    address: str = ""
    # The full name of this server among the hosts of that store; each start is another one.
    host_name: str = field(init=False)
    # Of each key, the ids of its sessions that ended because too much waited for a client that was away.
    overflowed: FairCache[str, bool] = field(default_factory=lambda: FairCache(MAX_OVERFLOWED))
    # Requests that restore a session from the store, by its id, so that no second connection does; each has shown the
    # session's key and token.
    restoring: dict[str, ResumeRequest] = field(default_factory=dict)
    # What the store last said of other hosts.
    alive_hosts: AliveHosts = field(default_factory=AliveHosts)
    # Of users who are told from others by an uploaded voice.
    enrolled_voices: EnrolledVoices = field(default_factory=EnrolledVoices)
    _left: Signal = field(default_factory=Signal)
    # Places that are taken, by key: of sessions and requests, and of WebSockets that have yet to say what they are for.
    _by_key: Counter[str] = field(default_factory=Counter)
    _awaiting: Counter[str] = field(default_factory=Counter)
    # The same places as `_by_key`, by what they are for.
    _by_kind: Counter[Kind] = field(default_factory=Counter)
    _logged_aliases: set[str] = field(default_factory=set)
    _secrets: dict[str, tuple[ClientSecret, MemoryAccount]] = field(default_factory=dict)
    # Of each API key, the client secrets that were made with it, oldest first, and their expiry in monotonic seconds.
    _secrets_of: dict[str, dict[str, float]] = field(default_factory=dict)
    # What clients make the server hold, by key.
    memory: MemoryLedger = field(init=False)
    # Of audio that clients name by URL.
    fetcher: Fetcher = field(init=False)
    # None where `--torch-profiler-dir` is not given.
    profiler: Profiler | None = field(init=False)
    # What is told of turns that are over.
    turns: TurnReports = field(init=False)
    # Whether one more session fits. It is asked once whatever runs the server watches its signals.
    headroom: Headroom = field(init=False)
    asks_headroom: bool = False

    def __post_init__(self) -> None:
        self.host_name = f"{self.settings.resume.host_name or socket.gethostname()}/{secrets.token_hex(4)}"
        self.memory = MemoryLedger(self.settings.memory)
        self.metrics.watch_memory(self.memory)
        self.fetcher = Fetcher(self.settings.speech.fetch_from)
        folder = self.settings.server.torch_profiler_dir
        self.profiler = Profiler(Path(folder).expanduser()) if folder else None
        server = self.settings.server
        self.turns = TurnReports(server, self.metrics)
        certificate = certificates.read(Path(server.certificate).expanduser()) if server.certificate else None
        by_device = MOST_YOUNG if self.settings.models.device == "cpu" else MOST_YOUNG_GPU
        self.headroom = Headroom(certificate, server.max_sessions, burst=server.burst_sessions or by_device)
        self.metrics.watch_headroom(self.headroom, lambda: self._by_kind)

    def uploaded_voices(self, caller: Caller) -> VoiceStore:
        """Return the voices that the caller's key has uploaded, which are kept beside the models.

        Its methods read and write files: call them in a thread.
        """
        return VoiceStore(store_of(self.settings.models).home, caller.key, self.settings.speech.voices_per_key)

    @property
    def transcriber_names(self) -> ModelNames:
        """The names that a client may use for the transcriber. Needs the models to be loaded."""
        assert self.models is not None
        return ModelNames((self.models.required_transcriber.profile.id,), strict=self.settings.server.strict_models)

    @property
    def conversation_names(self) -> ModelNames | None:
        """The names that a client may use for the conversation model; None where none is loaded."""
        model = self.models.conversation_model if self.models else None
        if model is None:
            return None
        unit_ms = round(model.native.profile.unit_s * 1000) if model.native else 0
        strict, hears = self.settings.server.strict_models, model.profile.accepts_media
        return ModelNames((model.profile.id,), strict=strict, unit_ms=unit_ms, hears=hears)

    def loaded(self) -> LoadedModels:
        """Return the models. Raises Refused while they load, and when the server drains."""
        if self.draining:
            raise Refused("the server is shutting down", 5.0)
        if self.models is None:
            raise Refused("the models are still loading", 5.0)
        return self.models

    # --- callers and their keys ---------------------------------------------------------------------------------------

    def add_secret(self, value: str, secret: ClientSecret) -> None:
        """Let the short-lived key `value` open sessions until it expires.

        An API key has at most MAX_SECRETS of them; the oldest go first. Raises Refused where it has no memory left.
        """
        now_s = time.monotonic()
        own = self._secrets_of.setdefault(secret.key, {})
        for expired in [k for k, until_s in own.items() if until_s <= now_s]:
            self._drop_secret(expired)
        account = self.memory.open(secret.key)
        size = SECRET_BYTES + len(bytes(secret.session))
        try:
            account.check(size)
        except Refused:
            account.close()
            raise
        account.hold(size)
        while len(own) >= MAX_SECRETS:
            self._drop_secret(next(iter(own)))
        self._secrets[value], own[value] = (secret, account), secret.until_s

    def _drop_secret(self, value: str) -> None:
        secret, account = self._secrets.pop(value)
        del self._secrets_of[secret.key][value]
        account.close()

    def secret(self, key: str | None) -> ClientSecret | None:
        """Return what a short-lived key stands for; None for one that has expired, and for any other key."""
        found, _ = self._secrets.get(key or "", (None, None))
        return found if found and found.until_s > time.monotonic() else None

    def caller(self, key: str | None, *, short: bool = False) -> Caller | None:
        """Return the caller that an API key stands for; None for a key that is missing or unknown.

        With `short`, a short-lived key is accepted too. A client secret is nothing else than that: without `short` it
        stands for nobody, even where the server asks for no key. Keys are compared in constant time.
        """
        if secret := self.secret(key):
            return Caller(secret.key, secret.session) if short else None
        keys = self.settings.server.api_keys
        if not keys:
            return Caller()
        given = (key or "").encode()
        return next((Caller(k) for k in keys if hmac.compare_digest(k.encode(), given)), None)

    # --- sessions -----------------------------------------------------------------------------------------------------

    @contextmanager
    def admit(self, caller: Caller, kind: Kind, *, resumes: bool = False) -> Iterator[None]:
        """Hold a place for one session of the caller's API key while the block runs; `current_place` returns it there.

        `resumes`: it is a session that another host had, and is taken in even while headroom is short. Raises Refused
        where the server, or this caller, has no place left (`--max-sessions`, `--sessions-per-key`, headroom) or holds
        all the memory that it may, and when the server drains. Waits for nothing: a burst is admitted one by one.
        """
        if self.draining:
            raise Refused("the server is shutting down", 5.0)
        with self.memory.opened(caller.key) as account:
            account.check(0)
        with self._place(self._by_key, caller, "sessions"):
            now_s, client = time.monotonic(), caller.client
            if self.asks_headroom:
                self.headroom.admit(kind, self._by_kind, now_s, resumes=resumes, client=client)
            self.num_admitted += 1
            self._by_kind[kind] += 1
            place = Place(kind, self._by_kind)
            token = _current_place.set(place)
            try:
                yield
            finally:
                place.release()
                self.headroom.left(now_s, time.monotonic(), kind, client)
                with suppress(ValueError):
                    # Left in another task than the one that came: a call outlives its request.
                    _current_place.reset(token)

    def refuse_early(self, caller: Caller, kind: Kind) -> None:
        """Raise Refused where a client could only begin a session now, and would find no place for one.

        For clients that say after the upgrade whether they resume a session: while there is one to resume, all pass.
        """
        if self.asks_headroom and not self.resumable and self.session_store is None:
            self.headroom.check(kind, self._by_kind, time.monotonic(), client=caller.client)

    @contextmanager
    def await_first_event(self, caller: Caller) -> Iterator[None]:
        """Hold a place for one WebSocket that has yet to say what it is for, while the block runs.

        There are as many of these as places of sessions, and they are counted apart from them: a client has to be able
        to resume its session where no new one finds a place. Raises Refused as `admit` does.
        """
        with self._place(self._awaiting, caller, "connections without a first event"):
            yield

    @contextmanager
    def _place(self, held: Counter[str], caller: Caller, what: str) -> Iterator[None]:
        server = self.settings.server
        if held.total() >= server.max_sessions:
            raise Refused(f"the server holds {server.max_sessions} {what}", self.headroom.next_end_s(time.monotonic()))
        if held[caller.key] >= server.sessions_per_key:
            retry_s = self.headroom.next_end_s(time.monotonic())
            raise Refused(f"this key holds {server.sessions_per_key} {what}", retry_s, by_own_limit=True)
        held[caller.key] += 1
        try:
            yield
        finally:
            held[caller.key] -= 1
            if not held[caller.key]:
                del held[caller.key]
            self._left.notify()

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run what outlives its request. `work` must not raise: an exception would end the server."""
        assert self.group
        self.group.start_soon(work)

    def enter(self, session: AttachedSession) -> None:
        """Add a session that begins to the live ones, and let clients resume it if it has a token."""
        self.live.add(session)
        if session.attachment.token:
            self.resumable[session.id] = session

    def leave(self, session: AttachedSession) -> None:
        """Take a session that has ended off the live ones. Does nothing for one that is not there."""
        self.live.discard(session)
        if self.resumable.get(session.id) is session:
            del self.resumable[session.id]
        self._left.notify()

    async def all_left(self) -> None:
        """Wait until no session is live and no request holds a place. Returns at once where that is so."""
        while self.live or self._by_key:
            await self._left.wait()

    @property
    def num_sessions(self) -> int:
        """Places taken: live sessions, REST requests that hold a place, and handshakes."""
        return self.num_under_way + self._awaiting.total()

    @property
    def num_under_way(self) -> int:
        """Places taken by what a drain waits for: sessions, and REST requests that hold a place."""
        return self._by_key.total()

    def backlog_s(self) -> float:
        """Return the seconds of audio that wait in the session that is furthest behind; 0 where none is live."""
        return max((s.backlog_s for s in self.live), default=0.0)

    def load(self) -> float | None:
        """Return what part of the machine the places that are taken fill; None without a certificate."""
        return self.headroom.load(self._by_kind)

    def log_alias(self, name: str, model: str = "") -> None:
        """Log, once per name, that a client's default name is served by `model` (default: the transcriber).

        Bound: MAX_LOGGED_ALIASES names, then no further ones are logged.
        """
        name = name[:MAX_ALIAS_CHARS]
        if name not in self._logged_aliases and len(self._logged_aliases) < MAX_LOGGED_ALIASES:
            self._logged_aliases.add(name)
            log.info("%r is not here: served by %s", name, model or self.transcriber_names.loaded[0])
