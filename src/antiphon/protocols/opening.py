"""What is known of a connection before its first frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Opening:
    """What the upgrade request, the client secret or the call asked for, as docs/wire/index.md describes it.

    Recordings and the state of sessions that outlive a restart store the fields by these names.
    """

    # The query parameters `model`, `dialect` and `intent`, unchecked; empty where they are missing.
    model: str = ""
    dialect: str = ""
    intent: str = ""
    # OpenAI's beta event names, which the header `OpenAI-Beta: realtime=v1` asks for.
    beta: bool = False
    # The session that a client secret or a call was made with, shaped like the `session` of a `session.update`.
    session: Mapping[str, Any] | None = None
    # The server plays the audio of responses itself, on a WebRTC track: it is in no event.
    plays: bool = False
    # The client speaks the full-duplex dialect (protocols/duplex).
    duplex: bool = False
    # The path of the URL, and its query parameter `mode`, unchecked: some dialects are chosen by them.
    path: str = ""
    mode: str = ""
