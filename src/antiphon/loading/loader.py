"""Loads the models of a process, each once: its files from the store, its adapter from the adapters' table."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
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

# Called after each step of a model: the lane's name, the priority, the seconds it waited, the seconds it took.
ObserveLaneStep = Callable[[str, int, float, float], None]
# Adapters whose models are stepped by an engine; those of the others work in a lane.
ENGINE_ADAPTERS = ("causal_lm", "minicpmo", "vlm", "qwen3_asr", "qwen3_omni", "qwen3_tts")


def store_of(settings: ModelSettings) -> Store:
    """The store that the settings describe. Nothing is read or created before the first model is asked for."""
    local = Path(settings.models_from).expanduser() if settings.models_from else None
    return Store(Path(settings.home), local=local, offline=settings.offline)


def num_workers(settings: ModelSettings) -> int:
    """The number of worker threads of a model: as set, otherwise one for each core that this process may use."""
    return settings.workers or max(1, len(os.sched_getaffinity(0)))


def prepare(settings: Settings, store: Store, model: Model | LocalModel) -> Path:
    """The folder that a model is loaded from, complete and verified.

    What an adapter has to make of the files first, such as converted weights, is made on the first call, which may take
    minutes, and kept under the store's home. Raises StoreError for files that are missing or damaged.
    """
    source = model.path if isinstance(model, LocalModel) else store.require(model)
    if model.adapter not in PREPARERS:
        return source
    name = model.id
    if isinstance(model, LocalModel):
        name += "-" + hashlib.sha256(str(model.path).encode()).hexdigest()[:8]
    make = _imported(PREPARERS[model.adapter])
    device, weights = placement(settings, model.role)
    folder: Path = make(source, store.home, name, weights, device)
    return folder


def load(
    settings: Settings, store: Store, observe: ObserveLaneStep | None = None, roles: Collection[ModelRole] = ALL_ROLES
) -> LoadedModels:
    """Load the models of these roles. Blocks for seconds to minutes, so callers on an event loop run it in a thread.

    `observe` is called in the models' own threads after each step. The caller closes the result. Raises SettingsError
    for a name of no model, StoreError for a missing file, ModelError for a model that does not load.
    """
    by_role: dict[str, Any] = {}
    names, lanes = list[str](), list[Lane[Any, Any]]()
    selected = selected_models(settings, roles)
    for model in selected:
        if model.role in by_role:
            # One more voice of the synthesizer that is loaded.
            continue
        loaded = _load_model(settings, store, model, selected, observe)
        if model.role == "partner":
            if model.adapter in RESPONDING_PARTNERS:
                by_role.setdefault("language", loaded.thinker)
            else:
                loaded = NativeConversationModel(loaded)
        by_role[model.role] = loaded
        if model.role not in ("vad", "turn"):
            names.append(model.id)
        if model.adapter not in ENGINE_ADAPTERS:
            lanes.append(loaded.lane)
    if watcher := by_role.get("watcher"):
        watcher.synthesizer, watcher.transcriber = by_role.get("synthesizer"), by_role.get("transcriber")
    reader = None
    if "language" in by_role:
        reader = _image_reader(settings, observe)
        lanes.append(reader.lane)
    return _assembled(by_role, reader, names, lanes, eager_frames=settings.engine.watcher_prefill == "eager")


def _assembled(
    by_role: Mapping[str, Any],
    reader: RapidOcr | None,
    names: Sequence[str],
    lanes: Sequence[Lane[Any, Any]],
    *,
    eager_frames: bool,
) -> LoadedModels:
    return LoadedModels(
        transcriber=by_role.get("transcriber"),
        vad=by_role.get("vad"),
        turn_detector=by_role.get("turn"),
        language_model=by_role.get("language"),
        synthesizer=by_role.get("synthesizer"),
        image_reader=reader,
        partner=by_role.get("partner"),
        watcher=by_role.get("watcher"),
        names=tuple(names),
        lanes=tuple(lanes),
        eager_frames=eager_frames,
    )


def _image_reader(settings: Settings, observe: ObserveLaneStep | None) -> RapidOcr:
    """A library with its models inside: nothing of it is loaded before the first image."""
    return RapidOcr(max_queue=settings.models.max_queue, observe=_observe_lane(observe, "reader"))


def _load_model(
    settings: Settings,
    store: Store,
    model: Model | LocalModel,
    selected: Collection[Model | LocalModel],
    observe: ObserveLaneStep | None,
) -> Any:
    """One model, made by its adapter. Of `selected`, the models of its role are further voices of it."""
    make = _imported(_adapter(model.id, model.adapter))
    if model.adapter in ENGINE_ADAPTERS:
        options = _engine_options(settings, model.role, model.adapter)
        options["observe"] = _observe_engine(observe, model.role)
    else:
        options = _lane_options(settings, model.role)
        options["observe"] = _observe_lane(observe, model.role)
    if model.adapter == "hibari":
        others = (m for m in selected if m.role == model.role and m is not model)
        options["more"] = {m.id: prepare(settings, store, m) for m in others}
    return make(prepare(settings, store, model), model.id, **options)


def _lane_options(settings: Settings, role: ModelRole) -> dict[str, Any]:
    models = settings.models
    match role:
        case "transcriber":
            return {
                # CTranslate2 names the kind of device here and its number elsewhere.
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


def _engine_options(settings: Settings, role: ModelRole, adapter: str) -> dict[str, Any]:
    engine, (device, weights) = settings.engine, placement(settings, role)
    more = {"prefill": engine.watcher_prefill} if role == "watcher" else {}
    if adapter == "qwen3_omni":
        more["talker_device"] = placement(settings, "talker", role)[0]
    kv = EngineSettings(
        kv_bytes=engine.kv_mb << 20,
        host_bytes=engine.kv_host_mb << 20,
        disk_bytes=engine.kv_disk_mb << 20,
        # Half a minute of audio, and a text that is spoken, have a bounded length of their own.
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


def _observe_lane(observe: ObserveLaneStep | None, lane: str) -> Callable[[int, float, float], None] | None:
    if observe is None:
        return None
    return lambda priority, waited_s, took_s: observe(lane, priority, waited_s, took_s)


def _observe_engine(observe: ObserveLaneStep | None, lane: str) -> Callable[[int, int, float], None] | None:
    """An engine's steps are reported as a lane's steps without priority and waiting."""
    if observe is None:
        return None
    return lambda num_rows, num_sessions, took_s: observe(lane, 0, 0.0, took_s)


def _adapter(model_id: str, adapter: str) -> str:
    if adapter not in ADAPTERS:
        raise StoreError(f"{model_id}: there is no adapter named {adapter}")
    return ADAPTERS[adapter]


def _imported(name: str) -> Callable[..., Any]:
    """What `module:attribute` names; the module is imported only now, because it may import torch."""
    module, attribute = name.split(":")
    return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
