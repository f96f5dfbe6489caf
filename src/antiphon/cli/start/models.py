"""The files of the models that a command needs: fetched, verified and prepared, with what is done shown."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from antiphon.errors import SettingsError
from antiphon.extras import require_extra
from antiphon.loading.loader import prepare, store_of
from antiphon.loading.selection import ALL_ROLES, LocalModel, local_models, spec_of
from antiphon.roles import ModelRole
from antiphon.settings import Settings, options
from antiphon.store import MODELS, Model, Store

# The settings that decide which files are wanted, and where they are kept.
PULLED_BY = (
    *("profile", "home", "models_from", "transcriber", "partials", "speaker_model"),
    *("language_model", "partner", "watcher", "engine", "synthesizer", "voices"),
)


def pull_command(settings: Settings) -> str:
    """The command line that fetches the models of these settings, with the options that matter and no others."""
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
    """The store of the settings, whose errors tell the command that mends them."""
    store = store_of(settings.models)
    store.pull_command = pull_command(settings)
    return store


def require(settings: Settings) -> None:
    """Raise StoreError, which names the file and the fix, for a file that is missing or damaged. Fetches nothing.

    Raises SettingsError as `check_extras`.
    """
    store = store_for(settings)
    check_extras(settings)
    for model in local_models(settings):
        if not isinstance(model, LocalModel):
            store.require(model)


def check_extras(settings: Settings, roles: Collection[ModelRole] = ALL_ROLES) -> None:
    """Raise SettingsError where a model of these roles needs packages that are not installed."""
    for model in local_models(settings, roles):
        require_extra(spec_of(model).extra, f"{model.role} model {model.id}")


def registered(name: str) -> Model:
    """The model of this name in the registry. Raises SettingsError, with the name that may be meant."""
    if name not in MODELS:
        close = [known for known in MODELS if known.startswith(name)] or get_close_matches(name, list(MODELS), 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise SettingsError(f"there is no model {name}{meant} (antiphon pull --list has them all)")
    return MODELS[name]


def fetch(settings: Settings, roles: Collection[ModelRole] = ALL_ROLES) -> None:
    """Fetch what is missing of the models of these roles, and prepare them for loading. Raises StoreError, and
    SettingsError as `check_extras`.
    """
    check_extras(settings, roles)
    fetch_models(settings, local_models(settings, roles))


def fetch_models(settings: Settings, wanted: Collection[Model | LocalModel]) -> None:
    """Fetch what is missing of these models, and prepare them for loading. Raises StoreError."""
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
