"""Decides which models the settings name, and which adapter loads each."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from antiphon.adapters import SPECS
from antiphon.adapters.spec import Spec
from antiphon.errors import SettingsError, StoreError
from antiphon.loading.placement import engine_servers, placement
from antiphon.remote.address import (
    CONVERSATION_MODEL,
    SYNTHESIZER,
    TRANSCRIBER,
    ServerAddress,
    is_address,
    parse_address,
)
from antiphon.roles import ModelRole
from antiphon.settings import Settings
from antiphon.store import MODELS, Model
from antiphon.store.registry import profile

TRANSCRIPTION_ROLES: tuple[ModelRole, ...] = ("transcriber", "vad")
LANGUAGE_ROLES: tuple[ModelRole, ...] = ("language",)
SPEECH_ROLES: tuple[ModelRole, ...] = ("synthesizer",)
TURN_ROLES: tuple[ModelRole, ...] = ("turn", "backchannel")
SPEAKER_ROLES: tuple[ModelRole, ...] = ("speaker",)
CONVERSATION_ROLES: tuple[ModelRole, ...] = ("conversation_model",)
VIDEO_ROLES: tuple[ModelRole, ...] = ("video_model",)
ALL_ROLES = (
    TRANSCRIPTION_ROLES + TURN_ROLES + SPEAKER_ROLES + LANGUAGE_ROLES + SPEECH_ROLES + CONVERSATION_ROLES + VIDEO_ROLES
)
# The value of `--voice` that stands for every voice in the registry.
ALL_VOICES = "all"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model of the user's own: the folder of a checkpoint, or a .gguf file. Its files are not verified.

    `id`: the name of the folder or file, which clients use. `adapter`: determined by the folder's config.json.
    """

    id: str
    path: Path
    role: ModelRole
    adapter: str


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model on another server. It has no files to fetch and no adapter.

    - `id`: the model's name on that server, which clients may also use.
    - `is_native`: whether it is a conversation model that takes turns by itself.
    """

    id: str
    address: ServerAddress
    role: ModelRole
    is_native: bool = False


Selected = Model | LocalModel | RemoteModel


def spec_of(model: Model | LocalModel) -> Spec:
    """Return the spec of the adapter that loads a model. Raises StoreError if the adapter is unknown."""
    if model.adapter not in SPECS:
        raise StoreError(f"{model.id}: there is no adapter named {model.adapter}")
    return SPECS[model.adapter]


def local_models(settings: Settings, roles: Collection[ModelRole] = ALL_ROLES) -> tuple[Model | LocalModel, ...]:
    """The models of these roles that this process runs, and whose files it needs; see `selected_models`."""
    return tuple(m for m in selected_models(settings, roles) if not isinstance(m, RemoteModel))


def selected_models(settings: Settings, roles: Collection[ModelRole] = ALL_ROLES) -> tuple[Selected, ...]:
    """The models of these roles that the settings name, each once, in the order of loading.

    A named model replaces the profile's model of the same role; "none" removes it. Raises SettingsError if a name is
    not a model of its role, or if the placement is invalid.
    """
    # An invalid placement is refused at once, whichever models are loaded.
    placement(settings)
    models: list[Selected] = [m for m in profile(settings.models.profile) if m.role in roles]
    language = settings.engine.language_model
    if engine_servers(settings) and "language" in roles and not (Path(language).expanduser() / "config.json").is_file():
        raise SettingsError(
            f"--engine {settings.engine.engine} needs --language-model FOLDER: the checkpoint's configuration and "
            "tokenizer, without its weights"
        )
    if language and "language" in roles:
        models = _without(models, "language")
        if language != "none":
            models.append(_language_model(language))
    if "synthesizer" in roles:
        models = _with_synthesizers(models, settings)
    if settings.models.transcriber and "transcriber" in roles:
        models = [*_without(models, "transcriber"), _transcriber(settings.models.transcriber)]
    if settings.models.partials and "transcriber" in roles:
        transcriber = next(m for m in models if m.role == "transcriber")
        if isinstance(transcriber, RemoteModel):
            raise SettingsError(f"--partials {settings.models.partials}: the transcriber is on another server")
        models.append(_partials(settings.models.partials, transcriber))
    if settings.models.turn_detector and "turn" in roles:
        models = [*_without(models, "turn"), *_turn_detectors(settings.models.turn_detector)]
    if settings.models.backchannel_detector and "backchannel" in roles:
        models.append(_checkpoint("backchannel", settings.models.backchannel_detector))
    if settings.models.speaker_model and "speaker" in roles:
        models.append(_registered("speaker", settings.models.speaker_model, "--speaker-model"))
    if (settings.engine.conversation_model or settings.engine.native) and "conversation_model" in roles:
        conversation_model = _conversation_model(settings.engine.conversation_model, settings.engine.native)
        if not isinstance(conversation_model, LocalModel) or spec_of(conversation_model).language_model:
            # The conversation model also serves as the language model, or stands in its place.
            keeps = language or (isinstance(conversation_model, RemoteModel) and settings.remote.fallback)
            models = models if keeps else _without(models, "language")
        models.append(conversation_model)
    if settings.engine.video_model and "video_model" in roles:
        models.append(_checkpoint("video_model", settings.engine.video_model))
    return tuple(dict.fromkeys(models))


@dataclass(frozen=True, slots=True)
class NamedDetector:
    """One entry of `--turn-detector`: a name, a folder or a URL, and its weight."""

    name: str
    weight: float

    @property
    def is_remote(self) -> bool:
        """Whether the detector runs on another server."""
        return self.name.startswith(("http://", "https://", "ws://", "wss://"))

    @property
    def id(self) -> str:
        """The detector's name in the log and the metrics: without the path of a folder or of a URL."""
        if self.is_remote:
            return urlsplit(self.name).netloc.rpartition("@")[2]
        return self.name if self.name in MODELS else Path(self.name).expanduser().resolve().name


def named_detectors(text: str) -> list[NamedDetector]:
    """Return the entries of `--turn-detector`; none for "none". Raises SettingsError if an entry or weight is bad."""
    found = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = entry.rpartition("*") if "*" in entry else (entry, "", "1")
        if not re.fullmatch(r"\d+(\.\d+)?", weight) or float(weight) == 0 or not name:
            raise SettingsError(f"--turn-detector {entry}: expected NAME or NAME*WEIGHT, with a weight above 0")
        found.append(NamedDetector(name, float(weight)))
    if len({one.id for one in found}) < len(found):
        raise SettingsError(f"--turn-detector {text}: two of the detectors have the same name")
    return [] if text.strip() == "none" else found


def _turn_detectors(text: str) -> list[Model | LocalModel]:
    """The turn detectors that this process runs."""
    local = [one.name for one in named_detectors(text) if not one.is_remote]
    return [
        _registered("turn", name, "--turn-detector")
        if name in MODELS or not Path(name).expanduser().exists()
        else _checkpoint("turn", name)
        for name in local
    ]


def _without(models: list[Selected], role: ModelRole) -> list[Selected]:
    return [m for m in models if m.role != role]


def _with_synthesizers(models: list[Selected], settings: Settings) -> list[Selected]:
    """The models with the synthesizers and the additional voices that the settings name."""
    named, voices = settings.speech.synthesizer, settings.speech.voices
    if named:
        if not (is_address(named) and settings.remote.fallback):
            models = _without(models, "synthesizer")
        if named != "none":
            models += _synthesizers(named)
    if not voices or named == "none" or is_address(named):
        return models
    speaker = next(m for m in models if m.role == "synthesizer" and not isinstance(m, RemoteModel))
    if not spec_of(speaker).takes_voices:
        raise SettingsError(f"--voice: {named or speaker.id} has its own voices")
    if ALL_VOICES in voices:
        return models + [m for m in MODELS.values() if m.role == "synthesizer" and m.adapter == speaker.adapter]
    return models + [_registered_voice(voice, speaker.adapter) for voice in voices]


def _registered_voice(name: str, adapter: str) -> Model:
    """The registry's voice of a name, of any adapter. Raises SettingsError, in the terms of `adapter`, without one."""
    found = (m for m in MODELS.values() if m.role == "synthesizer" and m.id == f"{m.adapter}-{name}")
    return next(found, None) or _registered("synthesizer", f"{adapter}-{name}", "--voice")


def _transcriber(name: str) -> Selected:
    if name not in MODELS and is_elsewhere(name):
        address = parse_address(name, "--transcriber", schemes=TRANSCRIBER, variable="ANTIPHON_TRANSCRIBER_KEY")
        return RemoteModel(address.model, address, "transcriber")
    if name not in MODELS:
        return _checkpoint("transcriber", name)
    if MODELS[name].role != "transcriber":
        raise SettingsError(f"--transcriber {name}: that is a {MODELS[name].role}")
    return MODELS[name]


def is_elsewhere(name: str) -> bool:
    """Return whether a name is meant as that of a model on another server, even if its URL has no scheme."""
    return is_address(name) or ("#" in name and not Path(name).expanduser().exists())


def _partials(name: str, transcriber: Model | LocalModel) -> Model:
    """The model that decodes a transcriber's partials. Both run in one lane, so they must have the same adapter."""
    model = _registered("transcriber", name, "--partials")
    if model.adapter != transcriber.adapter or not spec_of(model).takes_partials:
        raise SettingsError(f"--partials {name}: it cannot decode for {transcriber.id}, which is of another kind")
    return model


def _named_synthesizers(text: str) -> list[str]:
    """Return the entries of `--synthesizer`: one URL, or names and folders separated by commas.

    Raises SettingsError for a URL among others.
    """
    if is_address(text) or Path(text).expanduser().is_dir():
        return [text]
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) > 1 and (unfit := [name for name in names if is_address(name) or name == "none"]):
        raise SettingsError(f"--synthesizer {text}: {unfit[0]} cannot be one of several")
    return names


def _synthesizers(text: str) -> list[Selected]:
    """The synthesizers that `--synthesizer` names. Raises SettingsError if they cannot be loaded together."""
    found = [_synthesizer(name) for name in _named_synthesizers(text)]
    for model in found if found[1:] else ():
        if not isinstance(model, RemoteModel) and spec_of(model).runs_on != "lane":
            raise SettingsError(f"--synthesizer {text}: {model.id} cannot be one of several")
        if sum(other.id == model.id for other in found) > 1:
            raise SettingsError(f"--synthesizer {text}: two of them have the name {model.id}")
    return found


def _synthesizer(name: str) -> Selected:
    if is_address(name):
        address = parse_address(name, "--synthesizer", schemes=SYNTHESIZER, variable="ANTIPHON_SYNTHESIZER_KEY")
        return RemoteModel(address.model, address, "synthesizer")
    path = Path(name).expanduser().resolve()
    if name not in MODELS and path.is_dir():
        if adapter := adapter_of_files(path):
            return LocalModel(path.name, path, "synthesizer", adapter)
        return _checkpoint("synthesizer", name)
    return _registered("synthesizer", name, "--synthesizer")


def _registered(role: ModelRole, name: str, flag: str) -> Model:
    """The registry's model of this name. Raises SettingsError, with the known names, if the role has no such model."""
    if name not in MODELS or MODELS[name].role != role:
        known = ", ".join(m.id for m in MODELS.values() if m.role == role)
        raise SettingsError(f"{flag}: there is no {role} {name}; there are {known}")
    return MODELS[name]


def _language_model(name: str) -> Selected:
    if name not in MODELS and is_elsewhere(name):
        address = parse_address(name, "--language-model")
        return RemoteModel(address.model, address, "language")
    if name in MODELS:
        if MODELS[name].role != "language":
            raise SettingsError(f"--language-model {name}: that is a {MODELS[name].role}")
        return MODELS[name]
    path = Path(name).expanduser().resolve()
    if not path.exists():
        raise SettingsError(
            f"--language-model {name}: no model of that name (antiphon pull --list), no such folder or file"
        )
    return LocalModel(path.stem if path.is_file() else path.name, path, "language", _adapter("language", path))


def _conversation_model(name: str, native: str) -> LocalModel | RemoteModel:
    """The conversation model of a folder or of other servers, or the native model of other servers."""
    if native:
        if name:
            raise SettingsError("--native: there is a --conversation-model already")
        address = parse_address(native, "--native", schemes=CONVERSATION_MODEL)
        return RemoteModel(address.model, address, "conversation_model", is_native=True)
    if not is_address(name):
        return _checkpoint("conversation_model", name)
    address = parse_address(name, "--conversation-model", schemes=CONVERSATION_MODEL)
    return RemoteModel(address.model, address, "conversation_model")


_FLAG_ENDS = {"language": "-model", "turn": "-detector", "backchannel": "-detector"}


def flag_of(role: str) -> str:
    """Return the flag that names a model of a role."""
    return f"--{role.replace('_', '-')}{_FLAG_ENDS.get(role, '')}"


def _checkpoint(role: ModelRole, name: str) -> LocalModel:
    """The checkpoint in a user's folder. Raises SettingsError if the folder has no config.json."""
    path = Path(name).expanduser().resolve()
    if not (path / "config.json").is_file():
        raise SettingsError(f"{flag_of(role)} {name}: no checkpoint's folder (it has no config.json)")
    return LocalModel(path.name, path, role, _adapter(role, path))


def adapter_of_files(folder: Path) -> str:
    """Return the adapter that recognizes a folder without config.json by its files (`Spec.files`); "" for none."""
    if (folder / "config.json").is_file() or not folder.is_dir():
        return ""
    return next((name for name, spec in SPECS.items() if spec.files and any(folder.glob(spec.files))), "")


def _adapter(role: ModelRole, path: Path) -> str:
    """The adapter whose spec names the checkpoint's type, or else the role's first adapter in the table."""
    types = {name: s.model_types for name, s in SPECS.items() if s.role == role and s.model_types is not None}
    model_type = _model_type(path)
    return next((name for name, own in types.items() if model_type in own), next(iter(types)))


def _model_type(path: Path) -> Any:
    """The `model_type` in a folder's config.json; None if it is missing, which the adapter's error then reports."""
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
