"""A full-duplex connection without a socket, and helper functions for its tests."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import numpy as np

from antiphon.events.conversation import (
    ConfigureConversation,
)
from antiphon.protocols.connection import Context
from antiphon.protocols.duplex.connection import DuplexConnection
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.opening import Opening
from tests.protocols.gathered import Gathered


def connection(**options: Any) -> Gathered:
    count = iter(range(10**6))
    context = Context(
        models=ModelNames(("whisper-base",)),
        conversation_models=ModelNames(("qwen",)),
        voices=("heart",),
        new_id=lambda prefix: f"{prefix}{next(count)}",
        steady_s=lambda: 0.0,
        now_s=lambda: 1.0,
        max_append_bytes=1 << 20,
        knows_language=("en", "de").__contains__,
        resume_token="token",
        autostart=options.pop("autostart", False),
    )
    opening = Opening(model=options.pop("model", ""), beta=options.pop("beta", False), duplex=True)
    wire = Gathered(DuplexConnection(opening, context))
    wire.open()
    return wire


def frames_of(wire: Gathered) -> list[dict[str, Any]]:
    return [json.loads(f.encode()) for f in wire.frames()]


def receive_event(wire: Gathered, type: str, **fields: Any) -> None:
    wire.receive(json.dumps({"type": type} | fields))


def opened(*, beta: bool = False, **session: Any) -> Gathered:
    wire = connection(beta=beta)
    receive_event(wire, "session.update", session=session)
    wire.commands()
    (created,) = frames_of(wire)
    assert created["type"] == "session.created", created
    return wire


def commands_of(wire: Gathered, type: str, **fields: Any) -> list[Any]:
    receive_event(wire, type, **fields)
    out = wire.commands()
    assert not [f for f in frames_of(wire) if f["type"] == "error"]
    return out


def error_of(wire: Gathered, type: str, **fields: Any) -> dict[str, Any]:
    receive_event(wire, type, **fields)
    assert not [i for i in wire.commands() if not isinstance(i, ConfigureConversation)]
    (frame,) = [f for f in frames_of(wire) if f["type"] == "error"]
    return frame["error"]  # type: ignore[no-any-return]


def silence(samples: int = 160, audio_format: str = "<i2") -> str:
    return b64encode(np.zeros(samples, audio_format).tobytes()).decode()
