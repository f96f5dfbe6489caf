"""The steps before a command's own work: check the settings, choose a profile, fetch and prepare the models.

All checks run before anything is fetched, measured, converted or loaded.
"""

from __future__ import annotations

import logging
import shlex
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from antiphon.admission.certificate import read
from antiphon.errors import SettingsError, StoreError
from antiphon.extras import missing_packages, require_extra
from antiphon.loading.inspection import check, named_release
from antiphon.loading.loader import prepare, store_of
from antiphon.loading.placement import engine_servers, placement
from antiphon.loading.profile_choice import choose_profile
from antiphon.loading.selection import (
    ALL_ROLES,
    TRANSCRIPTION_ROLES,
    LocalModel,
    is_elsewhere,
    local_models,
    selected_models,
    spec_of,
)
from antiphon.roles import ModelRole, shown_role
from antiphon.settings import Settings, options
from antiphon.store import MODELS, Model, Store
from antiphon.store.registry import released_model
from antiphon.store.sessions import open_store

log = logging.getLogger("antiphon.cli.main")
# The settings that determine which model files are needed and where they are stored.
PULLED_BY = (
    *("profile", "home", "models_from", "transcriber", "partials", "speaker_model"),
    *("language_model", "conversation_model", "video_model", "engine", "synthesizer", "voices"),
)


def prepare_to_serve(settings: Settings, *, fetches: bool) -> Settings:
    """Check the settings, choose the profile and get the models. Returns the settings with the profile. Blocks.

    `fetches` false: nothing is fetched, and a missing file is an error. Raises SettingsError, StoreError.
    """
    check_home(settings, create=fetches)
    if settings.server.record:
        check_writable(settings.server.record, "--record")
    check_certificate(settings)
    check_models(settings)
    check_state(settings)
    settings = with_profile(settings, fetches=fetches)
    if fetches:
        fetch(settings)
    else:
        require(settings)
    return settings


def fetch_checked(settings: Settings, roles: Collection[ModelRole] = ALL_ROLES, *, chooses: bool = False) -> Settings:
    """Check the settings, and fetch and prepare the models of these roles. Blocks.

    Returns the settings; with `chooses`, a profile is chosen first. Raises SettingsError, StoreError.
    """
    check_home(settings, create=True)
    check_models(settings, roles)
    if chooses:
        settings = with_profile(settings)
    fetch(settings, roles)
    return settings


def check_home(settings: Settings, *, create: bool) -> None:
    """Check the folder of the models. `create`: make it if it is missing. Raises StoreError if it is unusable."""
    store_of(settings.models).check_home(create=create and not settings.models.offline)


def with_profile(settings: Settings, *, fetches: bool = True) -> Settings:
    """Choose the profile, log it with the reason, and return the settings with it. Raises StoreError."""
    offline = settings.models.offline or not fetches
    choice = choose_profile(replace(settings, models=replace(settings.models, offline=offline)))
    log.info("profile %s: %s", choice.profile, choice.reason)
    return choice.applied(settings)


# --- checks -----------------------------------------------------------------------------------------------------------


def check_models(settings: Settings, roles: Collection[ModelRole] = ALL_ROLES) -> None:
    """Check the names of models and the devices. Raises SettingsError as `check_names` does, or if this machine lacks a
    device.
    """
    check_names(settings, roles)
    _check_devices(settings, roles)
    check_folders(settings, roles)


def check_names(settings: Settings, roles: Collection[ModelRole] = ALL_ROLES) -> None:
    """Check that each named model exists, and that each folder may be a checkpoint. Does not read the checkpoints.

    Raises SettingsError.
    """
    if (folder := settings.models.models_from) and not Path(folder).expanduser().is_dir():
        raise SettingsError(f"--models-from {folder}: there is no such folder")
    if "transcriber" in roles:
        _check_transcriber(settings.models.transcriber)
    if "language" in roles:
        _check_language_model(settings.engine.language_model)
    selected_models(settings, roles)


def check_folders(settings: Settings, roles: Collection[ModelRole] = ALL_ROLES) -> None:
    """Check the user's folders of models by their JSON files and headers, and log what is unusual in them.

    Raises StoreError, which says why a folder does not load, and SettingsError.
    """
    for model in local_models(settings, roles):
        # The weights of a model on engine servers are not here. Detectors are ONNX graphs, which their adapters check.
        is_elsewhere = model.role == "language" and engine_servers(settings)
        if isinstance(model, LocalModel) and not is_elsewhere and model.role not in ("turn", "backchannel"):
            for note in check(model.path, model.role, pickled=settings.models.pickled_weights):
                log.warning("%s: %s", model.path, note)


def check_writable(folder: str, flag: str) -> None:
    """Create the folder if it does not exist, and check that a file can be written to it. Raises StoreError."""
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b".")
    except OSError as error:
        raise StoreError(f"{flag} {folder}: {error.strerror}; the folder must be writable") from None


def check_certificate(settings: Settings) -> None:
    """Check that the certificate of the settings can be read. Raises SettingsError."""
    if file := settings.server.certificate:
        read(Path(file).expanduser())


def check_state(settings: Settings) -> None:
    """Check that the session store can be opened. Raises StoreError, SettingsError."""
    resume = settings.resume
    if not resume.state:
        return
    try:
        open_store(resume.state, resume.state_hours * 3600, resume.host_ttl_s).close()
    except StoreError as error:
        raise StoreError(f"--state: {error}") from None


def _check_transcriber(name: str) -> None:
    if name and name not in MODELS and not is_elsewhere(name) and not Path(name).expanduser().exists():
        known = ", ".join(m.id for m in MODELS.values() if m.role == "transcriber")
        raise SettingsError(f"--transcriber: there is no transcriber {name}, and no such folder; there are {known}")


def _check_language_model(name: str) -> None:
    path = Path(name).expanduser()
    if not name or name == "none" or name in MODELS or not path.exists():
        return
    if path.is_dir() and not any((path / file).is_file() for file in ("config.json", "model.gguf")):
        raise SettingsError(f"--language-model {name}: no checkpoint's folder (it has no config.json, no model.gguf)")
    if path.is_file() and path.suffix != ".gguf":
        raise SettingsError(f"--language-model {name}: neither a checkpoint's folder nor a .gguf file")


def _check_devices(settings: Settings, roles: Collection[ModelRole]) -> None:
    places = placement(settings)
    # Whisper runs on CTranslate2, which may see a GPU that this PyTorch is not built for.
    by_ear = set(roles) <= set(TRANSCRIPTION_ROLES)
    _check_device(places.device, f"--device {places.device}", "--device cpu", with_ctranslate2=by_ear)
    for role, (device, _) in places.placed.items():
        asked, instead = f"--placement {role}={device}", f"--placement {role}=cpu"
        _check_device(device, asked, instead, with_ctranslate2=role == "transcriber")


def _check_device(device: str, asked: str, instead: str, *, with_ctranslate2: bool) -> None:
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return
    there = max(num_torch_devices(), _num_ctranslate2_devices() if with_ctranslate2 else 0)
    if int(number or 0) < there:
        return
    if there:
        names = ", ".join(f"cuda:{k}" for k in range(there))
        raise SettingsError(f"{asked}: this machine has no such device, but {names}: use one of them, or {instead}")
    pytorch = "PyTorch, which is not installed," if missing_packages("talk") else f"PyTorch {version('torch')}"
    raise SettingsError(f"{asked}: this machine has no CUDA device that {pytorch} finds, only its CPU: use {instead}")


@cache
def num_torch_devices() -> int:
    """Return the number of CUDA devices that PyTorch finds; 0 if it is not installed."""
    # Imported by name, as in the loader, and only if a GPU is requested: the import takes two seconds.
    return 0 if missing_packages("talk") else int(import_module("torch").cuda.device_count())


@cache
def _num_ctranslate2_devices() -> int:
    return int(import_module("ctranslate2").get_cuda_device_count())


# --- the models' files ------------------------------------------------------------------------------------------------


def pull_command(settings: Settings) -> str:
    """Return the command that fetches the models of these settings, with only the options that matter for it."""
    words, defaults = ["antiphon", "pull"], Settings()
    for option in options():
        if option.name not in PULLED_BY:
            continue
        value, default = (getattr(getattr(tree, option.section), option.name) for tree in (settings, defaults))
        if value != default:
            for one in value if isinstance(value, tuple) else (value,):
                words += [option.flag, str(one)]
    return shlex.join(words)


def store_for(settings: Settings) -> Store:
    """Return the store of the settings. Its errors name the command that fetches missing files."""
    store = store_of(settings.models)
    store.pull_command = pull_command(settings)
    return store


def require(settings: Settings) -> None:
    """Check that all model files exist and are intact, without fetching any.

    Raises StoreError, which names the file and the fix, and SettingsError as `check_extras` does.
    """
    store = store_for(settings)
    check_extras(settings)
    for model in local_models(settings):
        if not isinstance(model, LocalModel):
            store.require(model)


def check_extras(settings: Settings, roles: Collection[ModelRole] = ALL_ROLES) -> None:
    """Check that the packages for the models of these roles are installed. Raises SettingsError if one is not."""
    for model in local_models(settings, roles):
        require_extra(spec_of(model).extra, f"{shown_role(model.role)} model {model.id}")


def registered(name: str) -> Model:
    """Return the registry's model of this name. Raises SettingsError, which suggests the closest name."""
    if name not in MODELS and (release := named_release(name)):
        return released_model(release)
    if name not in MODELS:
        close = [known for known in MODELS if known.startswith(name)] or get_close_matches(name, list(MODELS), 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise SettingsError(f"there is no model {name}{meant} (antiphon pull --list shows all)")
    return MODELS[name]


def fetch(settings: Settings, roles: Collection[ModelRole] = ALL_ROLES) -> None:
    """Fetch the missing files of the models of these roles, and prepare the models for loading.

    Raises StoreError, and SettingsError as `check_extras` does.
    """
    check_extras(settings, roles)
    fetch_models(settings, local_models(settings, roles))


def fetch_models(settings: Settings, wanted: Collection[Model | LocalModel]) -> None:
    """Fetch the missing files of these models, and prepare the models for loading. Raises StoreError."""
    store = store_for(settings)
    missing = [m for m in wanted if not isinstance(m, LocalModel) and store.missing(m)]
    if missing:
        _download(store, missing)
    for model in wanted:
        prepare(settings, store, model)


def _download(store: Store, missing: Sequence[Model]) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def show(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=None)
            bars.update(tasks[label], completed=done, total=total or None)

        for model in missing:
            store.pull(model, show)
            if origin := store.origin(model):
                bars.console.print(
                    f"{model.id}: from {origin}, verified", soft_wrap=True, markup=False, highlight=False
                )
    store.tidy()
