"""Where a model on another server is: `URL#MODEL`, and the key that the server asks for."""

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
    """A model of a server that speaks OpenAI's API.

    - `base_url`: what the paths of the API follow, without a slash at its end, as in `http://127.0.0.1:11434/v1`.
    - `model`: the model's name there.
    - `api`: which of the two endpoints for answers is used.
    """

    base_url: str
    model: str
    api: Api = "chat_completions"

    @property
    def url(self) -> str:
        """The URL that requests for answers are sent to."""
        return self.base_url + (_RESPONSES if self.api == "responses" else _CHAT)


def is_address(name: str) -> bool:
    """Return whether a setting names a server and not a model of this machine."""
    return name.startswith(("http://", "https://"))


def parse_address(text: str, flag: str) -> ServerAddress:
    """Read `URL#MODEL`. A URL that ends in /responses means that API; /chat/completions at its end may be left out.

    Raises SettingsError, which begins with `flag`, for what is no such address, and for one with a name, a password or
    a query: keys are given otherwise (`read_key`), because other users of the machine can read flags.
    """
    url, _, model = text.partition("#")
    try:
        parts = urlsplit(url)
        host = parts.hostname
        # An impossible port raises.
        _ = parts.port
    except ValueError:
        host = None
    if not host or not is_address(text):
        raise SettingsError(f"{flag}: expected URL#MODEL, as in http://127.0.0.1:11434/v1#qwen3:4b")
    if not model.strip():
        raise SettingsError(f"{flag} {url}: name the model behind a #, as in {url}#MODEL")
    if parts.username or parts.password or parts.query:
        raise SettingsError(f"{flag}: no name, password or query in the URL; a key goes into ANTIPHON_REMOTE_KEY")
    base, api = url.rstrip("/"), "chat_completions"
    if base.endswith(_RESPONSES):
        base, api = base.removesuffix(_RESPONSES), "responses"
    return ServerAddress(base.removesuffix(_CHAT), model.strip(), api)  # type: ignore[arg-type]


def read_key(settings: RemoteSettings) -> str:
    """The key for the server: that of the settings, else the text of the file they name, else "".

    Raises SettingsError for a file that cannot be read or is empty.
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
