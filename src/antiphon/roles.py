"""The roles that a model can have in the server, each of which stands for a contract of `contracts/`.

| role | contract |
|---|---|
| `transcriber` | `Transcriber` |
| `vad` | `VoiceActivityDetector` |
| `turn` | `TurnDetector` |
| `speaker` | `SpeakerModel` |
| `language` | `LanguageModel` |
| `synthesizer` | `Synthesizer` |
| `partner` | `ConversationModel`, or `NativeModel` where it takes turns by itself |
| `watcher` | `VideoModel` |
| `reader` | `ImageReader` |
| `fallback` | `Synthesizer`, for languages that the other one does not speak |
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, cast, get_args

ModelRole = Literal[
    "transcriber", "vad", "turn", "speaker", "language", "synthesizer", "partner", "watcher", "reader", "fallback"
]
# Other names of roles, as specs and `--placement` may say them.
OTHER_NAMES: Mapping[str, ModelRole] = MappingProxyType(
    {"conversation_model": "partner", "video_model": "watcher", "image_reader": "reader"}
)


def role_named(name: str) -> ModelRole:
    """Return the role with this name, or this other name. Raises ValueError where there is none."""
    role = OTHER_NAMES.get(name, name)
    if role not in get_args(ModelRole):
        raise ValueError(f"there is no role {name!r}")
    return cast(ModelRole, role)


def shown_role(role: ModelRole) -> str:
    """Return what metrics, /ready and logs call a role."""
    return role
