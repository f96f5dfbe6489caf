"""The address of a model on other servers, `URL[,URL]#MODEL`, and the key that the servers require."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from antiphon.errors import SettingsError

# The schemes of URLs: of a language model's servers, of a conversation model's, of a transcriber's, and of a voice's.
HTTP = ("http", "https")
CONVERSATION_MODEL = (*HTTP, "ws", "wss")
TRANSCRIBER = SYNTHESIZER = (*CONVERSATION_MODEL, "tcp")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A model on one or several servers, which all serve it under the same name.

    - `urls`: the URLs as given, without a slash at the end, each once.
    - `model`: the model's name at the servers.
    """

    urls: tuple[str, ...]
    model: str


def is_address(name: str) -> bool:
    """Return whether a setting names a server instead of a model on this machine."""
    return _SCHEME.match(name) is not None


def parse_address(
    text: str, flag: str, *, schemes: Collection[str] = HTTP, variable: str = "ANTIPHON_REMOTE_KEY"
) -> ServerAddress:
    """Parse `URL#MODEL` or `URL,URL#MODEL`.

    `schemes`: those that the URLs may have. `variable`: the environment variable of the servers' key. Raises
    SettingsError, which begins with `flag`, if the address is invalid, or contains a user name, a password or a query.
    Keys are configured in another way (`read_key`), because other users of the machine can read flags.
    """
    given, _, model = text.partition("#")
    urls = tuple(dict.fromkeys(url.strip().rstrip("/") for url in given.split(",") if url.strip()))
    for url in urls or ("",):
        _check(url, flag, schemes, variable)
    if not model.strip():
        raise SettingsError(f"{flag} {given}: add the model's name after a #, as in {given}#MODEL")
    return ServerAddress(urls, model.strip())


def _check(url: str, flag: str, schemes: Collection[str], variable: str) -> None:
    try:
        parts = urlsplit(url)
        host, scheme = parts.hostname, parts.scheme
        # An invalid port raises ValueError.
        _ = parts.port
    except ValueError:
        parts, host, scheme = urlsplit(""), None, ""
    if parts.username or parts.password or parts.query:
        raise SettingsError(f"{flag}: no name, password or query in the URL; a key goes into {variable}")
    known = ", ".join(f"{scheme}://" for scheme in schemes)
    if not is_address(url):
        raise SettingsError(f"{flag}: {url or 'the URL'} has no scheme; expected one of {known} and URL#MODEL")
    if scheme not in schemes or not host:
        raise SettingsError(f"{flag}: {url} is no address of a server; expected one of {known} with a host")


def split_api(url: str, paths: Sequence[str]) -> tuple[str, str]:
    """Split a URL into the base of an API and the path at its end, if it is one of `paths`; otherwise "" is the path.

    The first matching path counts, so a path goes before those that it ends with.
    """
    path = next((path for path in paths if url.endswith(path)), "")
    return url.removesuffix(path), path


def read_key(key: str, key_file: str, flag: str) -> str:
    """Return the key for a model's servers: `key`, else the content of the file, else "".

    `flag`: the flag of the file, for errors. Raises SettingsError if the file cannot be read or is empty.
    """
    if key or not key_file:
        return key
    file = Path(key_file).expanduser()
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{flag} {file}: {error}") from None
    if not key:
        raise SettingsError(f"{flag} {file}: it is empty")
    return key
