"""API keys, the client secrets that are made with them, and the callers that they identify."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from antiphon.errors import Refused
from antiphon.protocols.opening import NULL
from antiphon.server.memory import MemoryAccount, MemoryLedger

# Maximum number of client secrets of one key, and the bytes of memory that each takes in addition to its session.
MAX_SECRETS, SECRET_BYTES = 10_000, 1024


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as far as the request shows it.

    `key` is an API key, or the API key that the client secret was made with; "" if the server requires no key.
    `granted` is the session that the client secret opens, as JSON; None for an API key, which may open anything.
    `address` is the address of the client, or of the proxy in front of it.
    """

    key: str = ""
    granted: msgspec.Raw | None = None
    address: str = field(default="", compare=False)

    @property
    def client(self) -> str:
        """The address and the key. The server recognizes a returning client by them."""
        return f"{self.address} {self.key}"

    @property
    def label(self) -> str:
        """A short hash of the key, which identifies the caller in logs without revealing the key; "-" without a key."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:12] if self.key else "-"

    @property
    def session(self) -> msgspec.Raw:
        """The client secret's session, for an Opening; JSON null for an API key."""
        return NULL if self.granted is None else self.granted


@dataclass(frozen=True, slots=True)
class ClientSecret:
    """A short-lived key: the API key it was made with, its expiry in monotonic seconds, and its session as JSON."""

    key: str
    until_s: float
    session: msgspec.Raw


class Credentials:
    """The keys that a server accepts. Without `api_keys`, the server requires no key."""

    def __init__(self, api_keys: Sequence[str], memory: MemoryLedger) -> None:
        self._api_keys, self._memory = api_keys, memory
        self._secrets: dict[str, tuple[ClientSecret, MemoryAccount]] = {}
        # For each API key, the expiry of the client secrets made with it, oldest first.
        self._secrets_of: dict[str, dict[str, float]] = {}

    def add(self, value: str, secret: ClientSecret) -> None:
        """Let the short-lived key `value` open sessions until it expires.

        An API key has at most MAX_SECRETS; the oldest are dropped. Raises Refused if the key has no memory left.
        """
        now_s = time.monotonic()
        own = self._secrets_of.setdefault(secret.key, {})
        for expired in [k for k, until_s in own.items() if until_s <= now_s]:
            self._drop(expired)
        account = self._memory.open(secret.key)
        size = SECRET_BYTES + len(bytes(secret.session))
        try:
            account.check(size)
        except Refused:
            account.close()
            raise
        account.hold(size)
        while len(own) >= MAX_SECRETS:
            self._drop(next(iter(own)))
        self._secrets[value], own[value] = (secret, account), secret.until_s

    def _drop(self, value: str) -> None:
        secret, account = self._secrets.pop(value)
        del self._secrets_of[secret.key][value]
        account.close()

    def secret(self, key: str | None) -> ClientSecret | None:
        """Return the client secret of a short-lived key; None for an expired key, and for any other kind of key."""
        found, _ = self._secrets.get(key or "", (None, None))
        return found if found and found.until_s > time.monotonic() else None

    def caller(self, key: str | None, *, short: bool = False) -> Caller | None:
        """Return the caller of an API key; None if the key is missing or unknown.

        With `short`, a short-lived key is accepted too. Without it, a client secret is refused even if the server
        requires no key. Keys are compared in constant time.
        """
        if secret := self.secret(key):
            return Caller(secret.key, secret.session) if short else None
        if not self._api_keys:
            return Caller()
        given = (key or "").encode()
        return next((Caller(k) for k in self._api_keys if hmac.compare_digest(k.encode(), given)), None)


class PassedKeys(Credentials):
    """The keys of a door's clients. The door passes them to its hosts, which know whether they are valid."""

    def caller(self, key: str | None, *, short: bool = False) -> Caller:
        """Return the caller of any key."""
        return Caller(key or "")
