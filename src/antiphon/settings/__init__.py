"""One frozen tree of settings: defaults < TOML file < environment < flags. The only reader of any of them.

Each field states its default and its help once (`sections.py`); the flag (`--max-backlog-s`), the variable
(`ANTIPHON_MAX_BACKLOG_S`), the TOML key (`[audio] max_backlog_s`) and docs/settings.md follow from it.
A name or value that is not known fails at start and names the key.
"""

from antiphon.settings.sections import (
    WEIGHTS,
    AudioSettings,
    EngineOptions,
    MemorySettings,
    ModelSettings,
    RemoteSettings,
    ResumeSettings,
    ServerSettings,
    Settings,
    SpeechSettings,
    VideoSettings,
)
from antiphon.settings.sources import Option, environment_of, load, markdown, options

__all__ = [
    "WEIGHTS",
    "AudioSettings",
    "EngineOptions",
    "MemorySettings",
    "ModelSettings",
    "Option",
    "RemoteSettings",
    "ResumeSettings",
    "ServerSettings",
    "Settings",
    "SpeechSettings",
    "VideoSettings",
    "environment_of",
    "load",
    "markdown",
    "options",
]
