"""A full-duplex connection without a socket, and what tests do with it."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import numpy as np

from antiphon.events.conversation import (
    ConfigureConversation,
)
from antiphon.protocols.duplex.connection import DuplexConnection
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.opening import Opening


def connection(**options: Any) -> DuplexConnection:
    count = iter(range(10**6))
    wire = DuplexConnection(
        Opening(model=options.pop("model", ""), duplex=True),
        ModelNames(("whisper-base",)),
        ModelNames(("qwen",)),
        ("heart",),
        new_id=lambda prefix: f"{prefix}{next(count)}",
        expires_at=1,
        max_append_bytes=1 << 20,
        language_check=lambda code: code in ("en", "de"),
        log_alias=lambda *_: None,
        resume_token="token",
        autostart=options.pop("autostart", False),
    )
    wire.open()
    return wire


def frames_of(wire: DuplexConnection) -> list[dict[str, Any]]:
    return [json.loads(f.encode()) for f in wire.frames()]


def receive_event(wire: DuplexConnection, type: str, **fields: Any) -> None:
    wire.receive(json.dumps({"type": type} | fields))


def opened(**session: Any) -> DuplexConnection:
    wire = connection()
    receive_event(wire, "session.update", session=session)
    wire.commands()
    (created,) = frames_of(wire)
    assert created["type"] == "session.created", created
    return wire


def commands_of(wire: DuplexConnection, type: str, **fields: Any) -> list[Any]:
    receive_event(wire, type, **fields)
    out = wire.commands()
    assert not [f for f in frames_of(wire) if f["type"] == "error"]
    return out


def error_of(wire: DuplexConnection, type: str, **fields: Any) -> dict[str, Any]:
    receive_event(wire, type, **fields)
    assert not [i for i in wire.commands() if not isinstance(i, ConfigureConversation)]
    (frame,) = [f for f in frames_of(wire) if f["type"] == "error"]
    return frame["error"]  # type: ignore[no-any-return]


def silence(samples: int = 160, audio_format: str = "<i2") -> str:
    return b64encode(np.zeros(samples, audio_format).tobytes()).decode()
