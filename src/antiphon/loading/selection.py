"""Which models the settings name, and where each runs."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from antiphon.errors import SettingsError
from antiphon.settings import WEIGHTS, Settings
from antiphon.store import MODELS, Model
from antiphon.store.registry import ModelRole, profile

TRANSCRIPTION_ROLES: tuple[ModelRole, ...] = ("transcriber", "vad")
LANGUAGE_ROLES: tuple[ModelRole, ...] = ("language",)
SPEECH_ROLES: tuple[ModelRole, ...] = ("synthesizer",)
TURN_ROLES: tuple[ModelRole, ...] = ("turn",)
PARTNER_ROLES: tuple[ModelRole, ...] = ("partner",)
VIDEO_ROLES: tuple[ModelRole, ...] = ("watcher",)
ALL_ROLES = TRANSCRIPTION_ROLES + TURN_ROLES + LANGUAGE_ROLES + SPEECH_ROLES + PARTNER_ROLES + VIDEO_ROLES
# Roles whose models can be put on a device of their own.
PLACEABLE_ROLES = ("transcriber", "language", "synthesizer", "partner", "watcher", "talker")
# Partners that are asked for answers, and write, hear and see besides; the others take turns by themselves.
RESPONDING_PARTNERS = ("qwen3_omni",)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model of the user's own: a checkpoint's folder or a .gguf file."""

    id: str
    path: Path
    role: ModelRole = "language"
    adapter: str = "causal_lm"


def selected_models(settings: Settings, roles: Collection[ModelRole] = ALL_ROLES) -> tuple[Model | LocalModel, ...]:
    """The models of these roles that the settings name. Raises SettingsError for a name that is none of its role."""
    placement(settings, "language")
    found: list[Model | LocalModel] = [m for m in profile(settings.models.profile) if m.role in roles]
    language, synthesizer = settings.engine.language_model, settings.speech.synthesizer
    if language and "language" in roles:
        found = [m for m in found if m.role != "language"] + ([] if language == "none" else [_language(language)])
    if "synthesizer" in roles:
        if synthesizer:
            others = [m for m in found if m.role != "synthesizer"]
            found = others + ([] if synthesizer == "none" else [_synthesizer(synthesizer, "--synthesizer")])
        if settings.speech.voices and any(isinstance(m, LocalModel) and m.role == "synthesizer" for m in found):
            raise SettingsError(f"--voice: {synthesizer} has its own voices")
        if synthesizer != "none":
            found += [_synthesizer(f"hibari-{voice}", "--voice") for voice in settings.speech.voices]
    if settings.models.transcriber and "transcriber" in roles:
        found = [m for m in found if m.role != "transcriber"] + [_transcriber(settings.models.transcriber)]
    if settings.engine.partner and "partner" in roles:
        partner = _partner(settings.engine.partner)
        if partner.adapter in RESPONDING_PARTNERS and not language:
            # It writes by itself.
            found = [m for m in found if m.role != "language"]
        found.append(partner)
    if settings.engine.watcher and "watcher" in roles:
        found.append(_own("watcher", settings.engine.watcher, "vlm"))
    return tuple(dict.fromkeys(found))


def _own(role: ModelRole, name: str, adapter: str) -> LocalModel:
    path = Path(name).expanduser().resolve()
    if not (path / "config.json").is_file():
        raise SettingsError(f"--{role} {name}: no checkpoint's folder (it has no config.json)")
    return LocalModel(path.name, path, role, adapter)


def _partner(name: str) -> LocalModel:
    found = _own("partner", name, "minicpmo")
    try:
        kind = json.loads((found.path / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        # Whoever loads it says so.
        return found
    return replace(found, adapter="qwen3_omni") if kind == "qwen3_omni_moe" else found


def _transcriber(name: str) -> Model | LocalModel:
    if name not in MODELS:
        return _own("transcriber", name, "qwen3_asr")
    if MODELS[name].role != "transcriber":
        raise SettingsError(f"--transcriber {name}: that is a {MODELS[name].role}")
    return MODELS[name]


def _synthesizer(name: str, flag: str) -> Model | LocalModel:
    if flag == "--synthesizer" and (Path(name).expanduser() / "config.json").is_file():
        return _own("synthesizer", name, "qwen3_tts")
    if name not in MODELS or MODELS[name].role != "synthesizer":
        known = ", ".join(m.id for m in MODELS.values() if m.role == "synthesizer")
        raise SettingsError(f"{flag}: there is no synthesizer {name}; there are {known}")
    return MODELS[name]


def _language(name: str) -> Model | LocalModel:
    if name in MODELS:
        if MODELS[name].role != "language":
            raise SettingsError(f"--language-model {name}: that is a {MODELS[name].role}")
        return MODELS[name]
    path = Path(name).expanduser().resolve()
    if not path.exists():
        raise SettingsError(
            f"--language-model {name}: no model of that name (antiphon pull --list), no such folder or file"
        )
    return LocalModel(path.stem if path.is_file() else path.name, path)


def placement(settings: Settings, role: str, like: str = "") -> tuple[str, str]:
    """Where the model of a role runs, and as which weights; one that is not placed runs where that of `like` does. Raises SettingsError."""
    found = placement(settings, like) if like else (settings.models.device, settings.engine.weights)
    for given in filter(None, (part.strip() for part in settings.models.placement.split(","))):
        name, _, where = given.partition("=")
        device, _, weights = where.partition("/")
        if name == "talker" and weights:
            raise SettingsError(f"--placement {given}: a talker has its partner's weights")
        if (
            name not in PLACEABLE_ROLES
            or not re.fullmatch(r"cpu|cuda(:\d+)?", device)
            or (weights and weights not in WEIGHTS)
        ):
            expected = (
                f"ROLE=DEVICE[/WEIGHTS], of {', '.join(PLACEABLE_ROLES)}; cpu, cuda, cuda:1; {', '.join(WEIGHTS)}"
            )
            raise SettingsError(f"--placement {given}: expected {expected}")
        if name == role:
            found = (device, weights or found[1])
    return found
