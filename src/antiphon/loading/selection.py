"""Decides which models the settings name, and on which device each runs."""

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
# Adapters of partners that are asked for responses, and can also stand in for the language model. The other partners
# are native models, which take turns by themselves.
RESPONDING_PARTNERS = ("qwen3_omni",)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model of the user's own: the folder of a checkpoint, or a .gguf file. Its files are not verified. `id` is the
    name of the folder or file, which clients then use; `adapter` is found by the folder's config.json.
    """

    id: str
    path: Path
    role: ModelRole = "language"
    adapter: str = "causal_lm"


def selected_models(settings: Settings, roles: Collection[ModelRole] = ALL_ROLES) -> tuple[Model | LocalModel, ...]:
    """The models of these roles that the settings name, in the order in which they are loaded, each once.

    What is named replaces the profile's model of the same role, "none" removes it. Raises SettingsError for a name that
    is no model of its role, and for a placement that cannot be.
    """
    # A placement that cannot be is refused at once, whatever is loaded.
    placement(settings, "language")
    models: list[Model | LocalModel] = [m for m in profile(settings.models.profile) if m.role in roles]
    language = settings.engine.language_model
    if language and "language" in roles:
        models = _without(models, "language")
        if language != "none":
            models.append(_language_model(language))
    if "synthesizer" in roles:
        models = _with_synthesizers(models, settings)
    if settings.models.transcriber and "transcriber" in roles:
        models = [*_without(models, "transcriber"), _transcriber(settings.models.transcriber)]
    if settings.engine.partner and "partner" in roles:
        partner = _partner(settings.engine.partner)
        if partner.adapter in RESPONDING_PARTNERS and not language:
            # The partner is the language model too.
            models = _without(models, "language")
        models.append(partner)
    if settings.engine.watcher and "watcher" in roles:
        models.append(_local_checkpoint("watcher", settings.engine.watcher, "vlm"))
    return tuple(dict.fromkeys(models))


def _without(models: list[Model | LocalModel], role: ModelRole) -> list[Model | LocalModel]:
    return [m for m in models if m.role != role]


def _with_synthesizers(models: list[Model | LocalModel], settings: Settings) -> list[Model | LocalModel]:
    """The models with the synthesizer and the further voices that the settings name."""
    synthesizer, voices = settings.speech.synthesizer, settings.speech.voices
    if synthesizer:
        models = _without(models, "synthesizer")
        if synthesizer != "none":
            models.append(_synthesizer(synthesizer, "--synthesizer"))
    if voices and any(isinstance(m, LocalModel) and m.role == "synthesizer" for m in models):
        raise SettingsError(f"--voice: {synthesizer} has its own voices")
    if synthesizer == "none":
        return models
    return models + [_synthesizer(f"hibari-{voice}", "--voice") for voice in voices]


def _local_checkpoint(role: ModelRole, name: str, adapter: str) -> LocalModel:
    path = Path(name).expanduser().resolve()
    if not (path / "config.json").is_file():
        raise SettingsError(f"--{role} {name}: no checkpoint's folder (it has no config.json)")
    return LocalModel(path.name, path, role, adapter)


def _partner(name: str) -> LocalModel:
    found = _local_checkpoint("partner", name, "minicpmo")
    try:
        kind = json.loads((found.path / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        # The adapter will say what is wrong with it.
        return found
    return replace(found, adapter="qwen3_omni") if kind == "qwen3_omni_moe" else found


def _transcriber(name: str) -> Model | LocalModel:
    if name not in MODELS:
        return _local_checkpoint("transcriber", name, "qwen3_asr")
    if MODELS[name].role != "transcriber":
        raise SettingsError(f"--transcriber {name}: that is a {MODELS[name].role}")
    return MODELS[name]


def _synthesizer(name: str, flag: str) -> Model | LocalModel:
    if flag == "--synthesizer" and (Path(name).expanduser() / "config.json").is_file():
        return _local_checkpoint("synthesizer", name, "qwen3_tts")
    if name not in MODELS or MODELS[name].role != "synthesizer":
        known = ", ".join(m.id for m in MODELS.values() if m.role == "synthesizer")
        raise SettingsError(f"{flag}: there is no synthesizer {name}; there are {known}")
    return MODELS[name]


def _language_model(name: str) -> Model | LocalModel:
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
    """The device on which the model of a role runs ("cpu", "cuda:1"), and the type of its weights ("auto", "int8").

    A role that is not placed runs where the role `like` does, or where `--device` and `--weights` say. Raises
    SettingsError where the setting does not parse or names a role that cannot be placed.
    """
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
