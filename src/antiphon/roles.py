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

from typing import Literal

ModelRole = Literal[
    "transcriber", "vad", "turn", "speaker", "language", "synthesizer", "partner", "watcher", "reader", "fallback"
]
