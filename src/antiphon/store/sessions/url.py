"""The URL of a store's server, whose password is shown to nobody."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from antiphon.errors import SettingsError

REDIS_SCHEMES = ("redis", "rediss", "valkey", "valkeys")
POSTGRES_SCHEMES = ("postgresql", "postgres")
SCHEMES = REDIS_SCHEMES + POSTGRES_SCHEMES
# What a password is replaced by.
HIDDEN = "***"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A URL with one of SCHEMES. `text`: all of it, for a client library. Raises SettingsError, which does not repeat
    it, for what is no URL.
    """

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.text)
            is_whole = parts.scheme in SCHEMES and parts.port != 0
        except ValueError:
            is_whole = False
        if not is_whole:
            raise SettingsError(
                f"--state: this is no URL of {', '.join(f'{s}://' for s in SCHEMES)}, or its port is no number. "
                "Characters such as / and @ in a password are written as %2F and %40"
            )

    @property
    def is_redis(self) -> bool:
        """Whether it is of Redis or Valkey, rather than of Postgres."""
        return self._parts.scheme in REDIS_SCHEMES

    @property
    def of_client(self) -> str:
        """The URL as client libraries take it, which know Valkey by Redis's name."""
        scheme = self._parts.scheme
        return self._parts._replace(scheme=scheme.replace("valkeys", "rediss").replace("valkey", "redis")).geturl()

    @property
    def shown(self) -> str:
        """The URL without user, password and options, for logs and errors."""
        parts = self._parts
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{host}{port}{parts.path}"

    def hidden(self, text: str) -> str:
        """Return a client library's message without the URL's secrets: its password, and the values of its options."""
        parts = self._parts
        secrets = {parts.password or "", unquote(parts.password or ""), parts.query}
        if "@" in parts.netloc:
            # Without a user's part, the address is no secret, and the message needs it.
            secrets |= {self.text, parts.netloc}
        secrets |= {value for _, value in parse_qsl(parts.query) if len(value) > 3}
        for secret in sorted(secrets - {"", parts.hostname}, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return text

    @property
    def _parts(self) -> SplitResult:
        return urlsplit(self.text)


def is_store_url(state: str) -> bool:
    """Whether the setting `--state` names a server, rather than a folder."""
    return "://" in state
