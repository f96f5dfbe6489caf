"""The roles that a model can have in the server, each of which stands for a contract of `contracts/`.

| role | contract |
|---|---|
| `transcriber` | `Transcriber` |
| `vad` | `VoiceActivityDetector` |
| `turn` | `TurnDetector` |
| `speaker` | `SpeakerModel` |
| `language` | `LanguageModel` |
| `synthesizer` | `Synthesizer` |
| `conversation_model` | `ConversationModel`, or `NativeModel` where it takes turns by itself |
| `video_model` | `VideoModel` |
| `image_reader` | `ImageReader` |
| `fallback` | `Synthesizer`, for languages that the other one does not speak |
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, cast, get_args

ModelRole = Literal[
    "transcriber",
    "vad",
    "turn",
    "speaker",
    "language",
    "synthesizer",
    "conversation_model",
    "video_model",
    "image_reader",
    "fallback",
]
# Other names of roles, as specs and `--placement` may say them; metrics, /ready and logs do.
OTHER_NAMES: Mapping[str, ModelRole] = MappingProxyType(
    {"partner": "conversation_model", "watcher": "video_model", "reader": "image_reader"}
)


def role_named(name: str) -> ModelRole:
    """Return the role with this name, or this other name. Raises ValueError where there is none."""
    role = OTHER_NAMES.get(name, name)
    if role not in get_args(ModelRole):
        raise ValueError(f"there is no role {name!r}")
    return cast(ModelRole, role)


def shown_role(role: ModelRole) -> str:
    """Return what metrics, /ready and logs call a role."""
    return next((name for name, other in OTHER_NAMES.items() if other == role), role)
