"""The roles that a model can have in the server. Each role stands for a contract of `contracts/`.

| role | contract |
|---|---|
| `transcriber` | `Transcriber` |
| `vad` | `VoiceActivityDetector` |
| `turn` | `TurnDetector` |
| `backchannel` | `BackchannelDetector` |
| `speaker` | `SpeakerModel` |
| `language` | `LanguageModel` |
| `synthesizer` | `Synthesizer` |
| `conversation_model` | `ConversationModel`, or `NativeModel` if it takes turns by itself |
| `video_model` | `VideoModel` |
| `image_reader` | `ImageReader` |
| `fallback` | `Synthesizer`, for languages that the `synthesizer` does not speak |
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, cast, get_args

ModelRole = Literal[
    "transcriber",
    "vad",
    "turn",
    "backchannel",
    "speaker",
    "language",
    "synthesizer",
    "conversation_model",
    "video_model",
    "image_reader",
    "fallback",
]
# Aliases of roles. Specs and `--placement` accept them; metrics, /ready and logs print them.
OTHER_NAMES: Mapping[str, ModelRole] = MappingProxyType(
    {"partner": "conversation_model", "watcher": "video_model", "reader": "image_reader"}
)


def role_named(name: str) -> ModelRole:
    """Return the role with this name or alias. Raises ValueError if there is none."""
    role = OTHER_NAMES.get(name, name)
    if role not in get_args(ModelRole):
        raise ValueError(f"there is no role {name!r}")
    return cast(ModelRole, role)


def shown_role(role: ModelRole) -> str:
    """Return the name of a role in metrics, /ready and logs: its alias, if it has one."""
    return next((name for name, other in OTHER_NAMES.items() if other == role), role)
