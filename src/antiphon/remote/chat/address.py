"""The address of a model on another server, `URL#MODEL`, and the key that the server requires."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from antiphon.errors import SettingsError
from antiphon.settings import RemoteSettings

Api = Literal["chat_completions", "responses"]
_CHAT, _RESPONSES = "/chat/completions", "/responses"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A model on a server that offers OpenAI's API.

    - `base_url`: the URL before the paths of the API, without a slash at its end, such as `http://127.0.0.1:11434/v1`.
    - `model`: the model's name at the server.
    - `api`: which of the two endpoints is used.
    """

    base_url: str
    model: str
    api: Api = "chat_completions"

    @property
    def url(self) -> str:
        """The URL that requests for answers are sent to."""
        return self.base_url + (_RESPONSES if self.api == "responses" else _CHAT)


def is_address(name: str) -> bool:
    """Return whether a setting names a server instead of a model on this machine."""
    return name.startswith(("http://", "https://"))


def parse_address(text: str, flag: str) -> ServerAddress:
    """Parse `URL#MODEL`. A URL that ends in /responses selects that API; /chat/completions at its end is optional.

    Raises SettingsError, which begins with `flag`, if the address is invalid, or contains a user name, a password or a
    query. Keys are configured in another way (`read_key`), because other users of the machine can read flags.
    """
    url, _, model = text.partition("#")
    try:
        parts = urlsplit(url)
        host = parts.hostname
        # An invalid port raises ValueError.
        _ = parts.port
    except ValueError:
        host = None
    if not host or not is_address(text):
        raise SettingsError(f"{flag}: expected URL#MODEL, as in http://127.0.0.1:11434/v1#qwen3:4b")
    if not model.strip():
        raise SettingsError(f"{flag} {url}: add the model's name after a #, as in {url}#MODEL")
    if parts.username or parts.password or parts.query:
        raise SettingsError(f"{flag}: no name, password or query in the URL; a key goes into ANTIPHON_REMOTE_KEY")
    base, api = url.rstrip("/"), "chat_completions"
    if base.endswith(_RESPONSES):
        base, api = base.removesuffix(_RESPONSES), "responses"
    return ServerAddress(base.removesuffix(_CHAT), model.strip(), api)  # type: ignore[arg-type]


def read_key(settings: RemoteSettings) -> str:
    """Return the key for the server: that of the settings, else the content of the key file, else "".

    Raises SettingsError if the file cannot be read or is empty.
    """
    if settings.remote_key or not settings.remote_key_file:
        return settings.remote_key
    file = Path(settings.remote_key_file).expanduser()
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--remote-key-file {file}: {error}") from None
    if not key:
        raise SettingsError(f"--remote-key-file {file}: it is empty")
    return key
