"""The loaded models of one process: each once, from the store, by the adapters' table."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import Any

from antiphon.adapters import ADAPTERS, PREPARERS
from antiphon.adapters.rapid_ocr.reader import RapidOcr
from antiphon.engine.api import EngineSettings
from antiphon.engine.lane import Lane
from antiphon.errors import StoreError
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.selection import ALL_ROLES, RESPONDING_PARTNERS, LocalModel, placement, selected_models
from antiphon.pipelines.native_partner import NativeConversationModel
from antiphon.settings import ModelSettings, Settings
from antiphon.store import Model, Store
from antiphon.store.registry import ModelRole

# lane name, priority, seconds waited, seconds of the step
ObserveLaneStep = Callable[[str, int, float, float], None]
# Whose work is an engine's, not a lane's.
ENGINE_ADAPTERS = ("causal_lm", "minicpmo", "vlm", "qwen3_asr", "qwen3_omni", "qwen3_tts")


def store_of(settings: ModelSettings) -> Store:
    """The store the settings describe."""
    local = Path(settings.models_from).expanduser() if settings.models_from else None
    return Store(Path(settings.home), local=local, offline=settings.offline)


def num_workers(settings: ModelSettings) -> int:
    """Worker threads a model gets: as set, or one a core this process may use."""
    return settings.workers or max(1, len(os.sched_getaffinity(0)))


def prepare(settings: Settings, store: Store, model: Model | LocalModel) -> Path:
    """The folder a model is loaded from. What has to be made of its files is made on the first call. Raises StoreError."""
    source = model.path if isinstance(model, LocalModel) else store.require(model)
    if model.adapter not in PREPARERS:
        return source
    name = model.id
    if isinstance(model, LocalModel):
        name += "-" + hashlib.sha256(str(model.path).encode()).hexdigest()[:8]
    make = _named(PREPARERS[model.adapter])
    device, weights = placement(settings, model.role)
    folder: Path = make(source, store.home, name, weights, device)
    return folder


def load(
    settings: Settings, store: Store, observe: ObserveLaneStep | None = None, roles: Collection[ModelRole] = ALL_ROLES
) -> LoadedModels:
    """Load the models of these roles. Raises StoreError for a file that is not there, ModelError for one that does not load."""

    def watch(lane: str) -> Callable[[int, float, float], None] | None:
        return None if observe is None else lambda priority, waited, took: observe(lane, priority, waited, took)

    by_role: dict[str, Any] = {}
    names: list[str] = []
    lanes: list[Lane[Any, Any]] = []
    wanted = selected_models(settings, roles)
    for model in wanted:
        if model.role in by_role:
            # Another voice of the synthesizer that is there.
            continue
        make = _named(_adapter(model.id, model.adapter))
        stepped = model.adapter in ENGINE_ADAPTERS
        options = _stepped_options(settings, model.role, model.adapter) if stepped else _options(settings, model.role)
        options["observe"] = _engine_steps(observe, model.role) if stepped else watch(model.role)
        if model.adapter == "hibari":
            options["more"] = {
                m.id: prepare(settings, store, m) for m in wanted if m.role == model.role and m is not model
            }
        made = make(prepare(settings, store, model), model.id, **options)
        if model.role == "partner":
            if model.adapter in RESPONDING_PARTNERS:
                by_role.setdefault("language", made.thinker)
            else:
                made = NativeConversationModel(made)
        by_role[model.role] = made
        if model.role not in ("vad", "turn"):
            names.append(model.id)
        if not stepped:
            lanes.append(by_role[model.role].lane)
    if seeing := by_role.get("watcher"):
        seeing.synthesizer, seeing.transcriber = by_role.get("synthesizer"), by_role.get("transcriber")
    reader = None
    if "language" in by_role:
        # A library with its models inside: nothing of it is loaded before the first image.
        reader = RapidOcr(max_queue=settings.models.max_queue, observe=watch("reader"))
        lanes.append(reader.lane)
    return LoadedModels(
        by_role.get("transcriber"),
        by_role.get("vad"),
        by_role.get("turn"),
        by_role.get("language"),
        by_role.get("synthesizer"),
        reader,
        by_role.get("partner"),
        by_role.get("watcher"),
        tuple(names),
        tuple(lanes),
        settings.engine.watcher_prefill == "eager",
    )


def _options(settings: Settings, role: ModelRole) -> dict[str, Any]:
    models = settings.models
    match role:
        case "transcriber":
            return {
                # CTranslate2 tells devices of a kind apart by another name.
                "device": placement(settings, role)[0].partition(":")[0],
                "compute_type": models.compute_type,
                "workers": num_workers(models),
                "max_queue": models.max_queue,
            }
        case "turn":
            return {"max_queue": models.max_queue}
        case "synthesizer":
            return {"workers": num_workers(models), "max_queue": max(1024, models.max_queue)}
        case "vad":
            return {"max_queue": max(1024, models.max_queue)}
        case _:
            return {}


def _stepped_options(settings: Settings, role: ModelRole, adapter: str) -> dict[str, Any]:
    engine, (device, weights) = settings.engine, placement(settings, role)
    more = {"prefill": engine.watcher_prefill} if role == "watcher" else {}
    if adapter == "qwen3_omni":
        more["speaking"] = placement(settings, "talker", role)[0]
    kv = EngineSettings(
        kv_bytes=engine.kv_mb << 20,
        host_bytes=engine.kv_host_mb << 20,
        disk_bytes=engine.kv_disk_mb << 20,
        # The sound of half a minute, and a text that is spoken, are as long as they are.
        context_rows=0 if role in ("transcriber", "synthesizer") else engine.context_tokens,
        reserve_rows=engine.reserve_tokens,
        prefill_rows=engine.prefill_tokens,
        park_after_s=engine.park_after_s,
    )
    return more | {
        "settings": kv,
        "device": device,
        "weights": weights,
        "threads": engine.engine_threads,
    }


def _engine_steps(observe: ObserveLaneStep | None, lane: str) -> Callable[[int, int, float], None] | None:
    return None if observe is None else lambda rows, sessions, took: observe(lane, 0, 0.0, took)


def _adapter(model_id: str, adapter: str) -> str:
    if adapter not in ADAPTERS:
        raise StoreError(f"{model_id}: there is no adapter named {adapter}")
    return ADAPTERS[adapter]


def _named(name: str) -> Callable[..., Any]:
    module, attribute = name.split(":")
    return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
