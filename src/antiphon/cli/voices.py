"""`antiphon voices`: the voices there are, which of them are here, and how each one sounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from antiphon.cli.start.models import store_for
from antiphon.errors import ModelError, SettingsError
from antiphon.loading.loader import fallback_profile
from antiphon.loading.selection import ALL_VOICES
from antiphon.settings import Settings
from antiphon.store import MODELS, Model

# What a voice says of itself.
SAMPLE = "Hello, I am {name}. The weather will be mild tomorrow, with some rain late in the evening."


def lines(settings: Settings) -> list[str]:
    """A line for each voice: its name, what it is like, and whether it is here."""
    store = store_for(settings)
    out = []
    for name, model in _voices().items():
        state = f"missing: antiphon voices --add {name}" if store.missing(model) else "here"
        out.append(f"{name:12} {model.summary:36} {state}")
    try:
        profile = fallback_profile(settings)
    except ModelError as error:
        return [*out, f"no fallback voice: {error}"]
    languages = ", ".join(code for code in profile.languages if code != "en")
    return [*out, f"{profile.id:12} {'by rules, a fallback for':36} here", f"{'':12} {languages}"]


def wanted(settings: Settings, names: Sequence[str]) -> Settings:
    """The settings with these voices of the registry, or `all` of them. Raises SettingsError for a name of none."""
    known = _voices()
    for name in names:
        if name not in known and name != ALL_VOICES:
            raise SettingsError(f"there is no voice {name}; there are {', '.join(known)}, and {ALL_VOICES}")
    default = next(iter(known))
    further = (ALL_VOICES,) if ALL_VOICES in names else tuple(name for name in names if name != default)
    return replace(settings, speech=replace(settings.speech, voices=further))


def _voices() -> dict[str, Model]:
    """The registry's voices, by the names that they have as voices."""
    return {m.id.removeprefix(f"{m.adapter}-"): m for m in MODELS.values() if m.role == "synthesizer"}
