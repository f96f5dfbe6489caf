"""What is known of a connection before its first frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Opening:
    """What the upgrade request said: `?model=`, `?dialect=`, `?intent=`, and whether it asked for the beta names.

    `session`: the session that it is made with, by its short-lived key or its call, as a `session.update` would give it.
    `duplex`: the dialect of duplex_connection.py. `plays`: the server plays the answers' sound itself.
    """

    model: str = ""
    dialect: str = ""
    intent: str = ""
    beta: bool = False
    session: Mapping[str, Any] | None = None
    plays: bool = False
    duplex: bool = False
