"""Where the language model is computed: in this process, or on servers that `--engine` names."""

from __future__ import annotations

from typing import get_args
from urllib.parse import urlsplit

from antiphon.engine.vllm import EngineServers, ServerKind
from antiphon.errors import SettingsError
from antiphon.remote.address import read_key
from antiphon.settings import Settings


def engine_servers(settings: Settings) -> EngineServers | None:
    """The servers that `--engine` names; None for `local`.

    Raises SettingsError for what is neither, for a URL with a name, a password, a query or a path, and where the key's
    file cannot be read.
    """
    name = settings.engine.engine
    if name == "local":
        return None
    kind, _, text = name.partition(":")
    urls = tuple(url.strip().rstrip("/") for url in text.split(",") if url.strip())
    if kind not in get_args(ServerKind) or not urls:
        raise SettingsError(f"--engine {kind}: expected local, vllm:URL[,URL] or sglang:URL[,URL]")
    for url in urls:
        _check(kind, url)
    remote = settings.remote
    return EngineServers(
        kind,  # type: ignore[arg-type]
        urls,
        read_key(remote),
        remote.remote_first_token_s,
        remote.remote_token_s,
    )


def _check(kind: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname
        # An impossible port raises.
        _ = parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https") or parts.path:
        raise SettingsError(f"--engine {kind}: expected a server's root, as in {kind}:http://127.0.0.1:8000")
    if parts.username or parts.password or parts.query:
        raise SettingsError("--engine: no name, password or query in a URL; a key goes into ANTIPHON_REMOTE_KEY")
