"""Chooses a profile for this machine if the settings do not name one (`--profile auto`)."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from antiphon.adapters import SPECS
from antiphon.extras import install_command, missing_packages
from antiphon.loading.loader import store_of
from antiphon.loading.machine import free_gb
from antiphon.loading.recommendation import MEMORY_GB, SIZES, estimated, recommended
from antiphon.roles import ModelRole
from antiphon.settings import Settings
from antiphon.store.registry import PROFILES

log = logging.getLogger(__name__)

AUTO = "auto"
# The file with this machine's measured speed, in the models' folder.
SPEED_FILE = "machine-speed.json"


@dataclass(frozen=True, slots=True)
class ProfileChoice:
    """A profile, and the reason for the choice, in words that follow the profile's name in a sentence.

    `without`: roles whose models are left out, because the packages they need are not installed.
    """

    profile: str
    reason: str
    without: Collection[ModelRole] = ()

    def applied(self, settings: Settings) -> Settings:
        """Return the settings with this profile, and without the models that are left out."""
        engine, speech = settings.engine, settings.speech
        if "language" in self.without:
            engine = replace(engine, language_model="none")
        if "synthesizer" in self.without:
            speech = replace(speech, synthesizer="none")
        return replace(settings, models=replace(settings.models, profile=self.profile), engine=engine, speech=speech)


def choose_profile(settings: Settings, measure: Callable[[], float] | None = None) -> ProfileChoice:
    """The profile to load: the one in the settings, or the largest that answers in time on this machine.

    The machine is measured once, for about a second, and the result is kept in the models' folder. In offline mode,
    only profiles whose files are available are considered. `measure`: replaces the measurement, for tests; returns the
    seconds to multiply a row by a billion weights.
    """
    if settings.models.profile != AUTO:
        return ProfileChoice(settings.models.profile, "set by --profile")
    engine = settings.engine
    if without := _beyond_what_is_installed(settings):
        left_out = " and ".join(without)
        return ProfileChoice("default", f"without {left_out} model: {install_command('talk')} adds it", without)
    if engine.language_model or engine.conversation_model:
        return ProfileChoice("default", "with the model that the settings name")
    among = _available(settings)
    if settings.models.device != "cpu":
        return ProfileChoice("large" if "large" in among else "default", f"for --device {settings.models.device}")
    speed, memory_gb = estimated(_seconds_a_billion(settings, measure), "default"), free_gb()
    if memory_gb >= MEMORY_GB["default"] and "default" in among:
        # Other work may have slowed the measurement, and `light` hears English only. So it is chosen only for lack of
        # memory.
        among = among - {"light"}
    name, why = recommended("default", speed, memory_gb, among)
    return ProfileChoice(name, why)


def _beyond_what_is_installed(settings: Settings) -> tuple[ModelRole, ...]:
    """The roles for which the settings name no model, and the profiles name models whose packages are missing."""
    named: dict[ModelRole, str] = {
        "language": settings.engine.language_model or settings.engine.conversation_model,
        "synthesizer": settings.speech.synthesizer,
    }
    by_role = {model.role: model for model in PROFILES["default"]}
    return tuple(r for r, name in named.items() if not name and missing_packages(SPECS[by_role[r].adapter].extra))


def _available(settings: Settings) -> set[str]:
    """The profiles that can be loaded: in offline mode only profiles whose files are available, otherwise all."""
    if not settings.models.offline:
        return set(SIZES)
    store = store_of(settings.models)
    return {name for name in SIZES if not any(store.missing(model) for model in PROFILES[name])} or {"default"}


def _seconds_a_billion(settings: Settings, measure: Callable[[], float] | None) -> float:
    """The seconds that this machine takes to multiply a row by a billion weights, measured now or earlier."""
    from antiphon.engine.local.packed import machine_key
    from antiphon.engine.local.weights import seconds_a_billion

    threads = settings.engine.engine_threads
    key = f"{machine_key()} {threads or len(os.sched_getaffinity(0))}"
    file = Path(settings.models.home).expanduser() / SPEED_FILE
    if measure:
        return measure()
    try:
        kept = json.loads(file.read_text())
        if kept["key"] == key:
            return float(kept["seconds_a_billion"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = seconds_a_billion(threads)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"key": key, "seconds_a_billion": found}))
    except OSError as error:
        log.info("the machine's speed is not kept: %s", error)
    return found
