"""Where models run: on a device of this machine, or on servers that `--engine` names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import get_args
from urllib.parse import urlsplit

from antiphon.errors import SettingsError
from antiphon.remote.address import read_key
from antiphon.remote.engine import EngineServers, ServerKind
from antiphon.roles import OTHER_NAMES, ModelRole
from antiphon.settings import WEIGHTS, Settings

# Roles whose models can be placed separately. A talker is a part of a conversation model.
PLACEABLE_ROLES = ("transcriber", "language", "synthesizer", "conversation_model", "video_model", "talker")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where models run: `--device` and `--weights`, with the exceptions in `--placement`.

    `device`, `weights`: the default for all roles. `placed`: the roles with exceptions, each with its device and type
    of weights; "" means the default.
    """

    device: str
    weights: str
    placed: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def of(self, role: str, like: str = "") -> tuple[str, str]:
        """Return a role's device ("cpu", "cuda:1") and type of weights ("auto", "int8").

        `like`: the role whose device and weights apply if this role has no exception itself; "": the default applies.
        """
        device, weights = self.of(like) if like else (self.device, self.weights)
        own_device, own_weights = self.placed.get(role, ("", ""))
        return own_device or device, own_weights or weights


@cache
def placement(settings: Settings) -> Placement:
    """Return the placement in the settings, parsed once for each value of the settings.

    Raises SettingsError if `--placement` does not parse or names a role that cannot be placed.
    """
    placed: dict[str, tuple[str, str]] = {}
    for given in filter(None, (part.strip() for part in settings.models.placement.split(","))):
        name, _, where = given.partition("=")
        role = OTHER_NAMES.get(name, name)
        device, _, weights = where.partition("/")
        if role == "talker" and weights:
            raise SettingsError(f"--placement {given}: a talker has its conversation model's weights")
        if (
            role not in PLACEABLE_ROLES
            or not re.fullmatch(r"cpu|cuda(:\d+)?", device)
            or (weights and weights not in WEIGHTS)
        ):
            expected = (
                f"ROLE=DEVICE[/WEIGHTS], of {', '.join(PLACEABLE_ROLES)}; cpu, cuda, cuda:1; {', '.join(WEIGHTS)}"
            )
            raise SettingsError(f"--placement {given}: expected {expected}")
        placed[role] = (device, weights or placed.get(role, ("", ""))[1])
    return Placement(settings.models.device, settings.engine.weights, placed)


def engine_servers(settings: Settings) -> EngineServers | None:
    """The servers that `--engine` names; None for `local`.

    Raises SettingsError if it is neither, if a URL has a name, a password, a query or a path, or if the key's file
    cannot be read.
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
        remote_key(settings, "language"),
        remote.remote_first_token_s,
        remote.remote_token_s,
    )


def remote_key(settings: Settings, role: ModelRole) -> str:
    """Return the key of the servers of a role; "" for none. Servers of one role never get the key of another role.

    Raises SettingsError if the key's file cannot be read.
    """
    remote = settings.remote
    match role:
        case "transcriber":
            return read_key(remote.transcriber_key, remote.transcriber_key_file, "--transcriber-key-file")
        case "synthesizer":
            return read_key(remote.synthesizer_key, remote.synthesizer_key_file, "--synthesizer-key-file")
        case _:
            return read_key(remote.remote_key, remote.remote_key_file, "--remote-key-file")


def _check(kind: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname
        # An invalid port raises ValueError.
        _ = parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https") or parts.path:
        raise SettingsError(f"--engine {kind}: expected a server's root, as in {kind}:http://127.0.0.1:8000")
    if parts.username or parts.password or parts.query:
        raise SettingsError("--engine: no name, password or query in a URL; a key goes into ANTIPHON_REMOTE_KEY")
