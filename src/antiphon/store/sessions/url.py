"""The URL of a store's server. Its password never appears in messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from antiphon.errors import SettingsError

REDIS_SCHEMES = ("redis", "rediss", "valkey", "valkeys")
POSTGRES_SCHEMES = ("postgresql", "postgres")
SCHEMES = REDIS_SCHEMES + POSTGRES_SCHEMES
# Replaces a password in messages.
HIDDEN = "***"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A URL with one of SCHEMES. `text`: the whole URL, with secrets.

    Raises SettingsError for an invalid URL, without quoting it.
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
                f"--state: this is not a URL of {', '.join(f'{s}://' for s in SCHEMES)}, or its port is not a number. "
                "Characters such as / and @ in a password are written as %2F and %40"
            )

    @property
    def is_redis(self) -> bool:
        """True if the server is Redis or Valkey, and not Postgres."""
        return self._parts.scheme in REDIS_SCHEMES

    @property
    def of_client(self) -> str:
        """The URL for client libraries, which accept only the scheme names of Redis, not those of Valkey."""
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
        """Return a client library's message without the URL's secrets: the password, and the values of options."""
        parts = self._parts
        secrets = {parts.password or "", unquote(parts.password or ""), parts.query}
        if "@" in parts.netloc:
            # Without a user and password, the address is not secret, and the message needs it.
            secrets |= {self.text, parts.netloc}
        secrets |= {value for _, value in parse_qsl(parts.query) if len(value) > 3}
        for secret in sorted(secrets - {"", parts.hostname}, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return text

    @property
    def _parts(self) -> SplitResult:
        return urlsplit(self.text)


def is_store_url(state: str) -> bool:
    """Return True if the setting `--state` names a server, and not a folder."""
    return "://" in state
