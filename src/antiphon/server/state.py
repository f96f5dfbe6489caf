"""What all requests share: settings, loaded models, metrics, who is connected, and whether the server drains."""

from __future__ import annotations

import hmac
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc

from antiphon.errors import Refused
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import store_of
from antiphon.protocols.model_names import ModelNames
from antiphon.server.metrics import Metrics
from antiphon.settings import Settings
from antiphon.store.sessions import SessionStore
from antiphon.store.voices import VoiceStore

log = logging.getLogger(__name__)
MAX_SECRETS = 10_000


@dataclass(eq=False, slots=True)
class LiveEntry:
    """One live session, as the drain and a hang-up see it. `key`: its caller's. `backlog_s`: audio it was sent and has not taken. `finish`: stop reading, flush finals, close."""

    key: str
    backlog_s: Callable[[], float]
    finish: Callable[[], None]
    id: str = ""


@dataclass(frozen=True, slots=True)
class ClientSecret:
    """A short-lived key: who made it, until when it holds (monotonic seconds), and the session it opens."""

    caller: str
    until_s: float
    session: Mapping[str, Any]


@dataclass(slots=True)
class ServerState:
    """Made before the socket opens; `models` arrives when they are loaded."""

    settings: Settings
    metrics: Metrics
    models: LoadedModels | None = None
    started_s: int = 0
    live: set[LiveEntry] = field(default_factory=set)
    draining: bool = False
    # Sessions that were let in since the start.
    num_admitted: int = 0
    _empty: anyio.Event = field(default_factory=anyio.Event)
    _by_key: Counter[str] = field(default_factory=Counter)
    _mentioned: set[str] = field(default_factory=set)
    _secrets: dict[str, ClientSecret] = field(default_factory=dict)
    # What lives longer than the request that began it; set by whoever runs the server.
    group: anyio.abc.TaskGroup | None = None
    # Conversations that outlive the server; None where none are kept.
    kept: SessionStore | None = None
    # Sessions that can be resumed, by their id.
    resumable: dict[str, Any] = field(default_factory=dict)
    # Those that ended because what nobody took was too much.
    forgone: dict[str, None] = field(default_factory=dict)
    # Those that are being taken up from what is kept.
    restoring: set[str] = field(default_factory=set)

    @property
    def voices(self) -> VoiceStore:
        """The uploaded voices."""
        return VoiceStore(store_of(self.settings.models).home)

    @property
    def names(self) -> ModelNames:
        """Names a client may use."""
        assert self.models is not None
        return ModelNames((self.models.required_transcriber.profile.id,), strict=self.settings.server.strict_models)

    @property
    def conversation_models(self) -> ModelNames | None:
        """Names a client may use for whoever answers in a conversation; None where nobody does."""
        partner = self.models.conversation_model if self.models else None
        if partner is None:
            return None
        unit_ms = round(partner.native.profile.unit_s * 1000) if partner.native else 0
        return ModelNames((partner.profile.id,), strict=self.settings.server.strict_models, unit_ms=unit_ms)

    def loaded(self) -> LoadedModels:
        """The models. Raises Refused while they load or the server drains."""
        if self.draining:
            raise Refused("the server is shutting down", 5.0)
        if self.models is None:
            raise Refused("the models are still loading", 5.0)
        return self.models

    def forgo(self, session_id: str) -> None:
        """Remember that this session cannot be resumed any more. Bound: MAX_SECRETS, the oldest go."""
        self.forgone[session_id] = None
        while len(self.forgone) > MAX_SECRETS:
            del self.forgone[next(iter(self.forgone))]

    def keep_secret(self, value: str, secret: ClientSecret) -> None:
        """Let a short-lived key open sessions until it expires. Bound: MAX_SECRETS, the oldest go."""
        now_s = time.monotonic()
        self._secrets = {k: s for k, s in self._secrets.items() if s.until_s > now_s}
        while len(self._secrets) >= MAX_SECRETS:
            del self._secrets[next(iter(self._secrets))]
        self._secrets[value] = secret

    def secret(self, key: str | None) -> ClientSecret | None:
        """What a short-lived key stands for; None for one that expired, or for any other key."""
        found = self._secrets.get(key or "")
        return found if found and found.until_s > time.monotonic() else None

    def caller(self, key: str | None, *, short: bool = False) -> str | None:
        """The caller that an API key stands for: the key itself if it is one of ours, "" where none is asked for, else None.

        `short`: a short-lived key will do, and stands for the key it was made with.
        """
        if short and (secret := self.secret(key)):
            return secret.caller
        keys = self.settings.server.api_keys
        if not keys:
            return ""
        given = (key or "").encode()
        return next((k for k in keys if hmac.compare_digest(k.encode(), given)), None)

    @contextmanager
    def admit(self, caller: str) -> Iterator[None]:
        """Hold a place for one session of `caller` while the block runs. Raises Refused where the server, or the key, is full."""
        server = self.settings.server
        if self._by_key.total() >= server.max_sessions:
            raise Refused(f"the server holds {server.max_sessions} sessions", 10.0)
        if self._by_key[caller] >= server.sessions_per_key:
            raise Refused(f"this key holds {server.sessions_per_key} sessions", 10.0)
        self._by_key[caller] += 1
        self.num_admitted += 1
        try:
            yield
        finally:
            self._by_key[caller] -= 1
            if not self._by_key[caller]:
                del self._by_key[caller]

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run what outlives its request. `work` must not raise."""
        assert self.group
        self.group.start_soon(work)

    def leave(self, live: LiveEntry) -> None:
        """A session is over."""
        self.live.discard(live)
        if not self.live:
            self._empty.set()
            self._empty = anyio.Event()

    async def emptied(self) -> None:
        """Wait until no session is live."""
        while self.live:
            await self._empty.wait()

    @property
    def num_sessions(self) -> int:
        """Places taken."""
        return self._by_key.total()

    def backlog_s(self) -> float:
        """Seconds of audio waiting in the session that is furthest behind."""
        return max((s.backlog_s() for s in self.live), default=0.0)

    def log_alias(self, name: str, model: str = "") -> None:
        """Say once what serves a client's default name for a model or voice."""
        name = name[:80]
        if name not in self._mentioned and len(self._mentioned) < 1000:
            self._mentioned.add(name)
            log.info("%r is not here: served by %s", name, model or self.names.loaded[0])
