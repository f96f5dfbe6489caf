"""One frozen tree of settings: defaults < TOML file < environment < flags. No other module reads any of these sources.

`sections.py` has the tree of sections. Each field states its default and its help once. The flag (`--max-backlog-s`),
the variable (`ANTIPHON_MAX_BACKLOG_S`), the TOML key (`[audio] max_backlog_s`) and docs/settings.md are derived from
it. An unknown name or an invalid value stops the start with an error that names the key.
"""

from antiphon.settings.models import WEIGHTS, EngineOptions, ModelSettings, SpeechSettings
from antiphon.settings.protocols import SipSettings, TelephoneSettings, TlsSettings, WyomingSettings
from antiphon.settings.remote import RemoteSettings, ToolSettings
from antiphon.settings.sections import (
    AudioSettings,
    MemorySettings,
    ResumeSettings,
    ServerSettings,
    Settings,
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
    "SipSettings",
    "SpeechSettings",
    "TelephoneSettings",
    "TlsSettings",
    "ToolSettings",
    "VideoSettings",
    "WyomingSettings",
    "environment_of",
    "load",
    "markdown",
    "options",
]
