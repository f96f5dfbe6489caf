"""The loaded models of one process: each once, from the store, by the adapters' table."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from antiphon.adapters import ADAPTERS
from antiphon.adapters.base import SpeechDetector, Transcriber
from antiphon.errors import StoreError
from antiphon.lanes import Lane
from antiphon.settings import ModelSettings
from antiphon.store import Model, Store
from antiphon.store.registry import profile

# lane name, priority, seconds waited, seconds of the step
ObserveStep = Callable[[str, int, float, float], None]


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """What sessions share. `lanes` is for measuring only."""

    transcriber: Transcriber
    detector: SpeechDetector
    names: tuple[str, ...]
    lanes: tuple[Lane[Any, Any], ...]

    def close(self) -> None:
        """Stop the workers; running steps finish."""
        for lane in self.lanes:
            lane.close()


def store_of(settings: ModelSettings) -> Store:
    """The store the settings describe."""
    local = Path(settings.models_from).expanduser() if settings.models_from else None
    return Store(Path(settings.home), local=local, offline=settings.offline)


def num_workers(settings: ModelSettings) -> int:
    """Worker threads a model gets: as set, or one a core this process may use."""
    return settings.workers or max(1, len(os.sched_getaffinity(0)))


def load(settings: ModelSettings, store: Store, observe: ObserveStep | None = None) -> LoadedModels:
    """Load the profile's models. Raises StoreError for a file that is not there, ModelError for one that does not load."""

    def watch(lane: str) -> Callable[[int, float, float], None] | None:
        return None if observe is None else lambda priority, waited, took: observe(lane, priority, waited, took)

    by_role: dict[str, tuple[Model, Any]] = {}
    for model in profile(settings.profile):
        adapter = _adapter(model)
        if model.role == "transcriber":
            options: dict[str, Any] = {
                "device": settings.device,
                "compute_type": settings.compute_type,
                "workers": num_workers(settings),
                "max_queue": settings.max_queue,
            }
        else:
            options = {"max_queue": max(1024, settings.max_queue)}
        by_role[model.role] = (model, adapter(store.require(model), model.id, observe=watch(model.role), **options))
    transcriber, detector = by_role["transcriber"], by_role["vad"]
    return LoadedModels(
        transcriber[1], detector[1], (transcriber[0].id,), tuple(instance.lane for _, instance in by_role.values())
    )


def _adapter(model: Model) -> Callable[..., Any]:
    try:
        module, name = ADAPTERS[model.adapter].split(":")
    except KeyError:
        raise StoreError(f"{model.id}: there is no adapter named {model.adapter}") from None
    return getattr(import_module(module), name)  # type: ignore[no-any-return]
