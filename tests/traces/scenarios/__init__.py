"""What clients do, dialect by dialect: each sends frames, reads frames and asserts a little of what they mean."""

from importlib import import_module

# The modules of this folder, in the order in which they are played.
_NAMES = (
    "conversation",
    "transcription",
    "duplex",
    "native",
    "at_once",
    "resume",
    "shutdown",
    "speech",
    "video",
    "bridges",
    "gemini",
    "openai_live",
    "telephone",
    "rest",
    "deepgram",
    "vendors",
)
ALL = tuple(import_module(f"tests.traces.scenarios.{name}") for name in _NAMES)
