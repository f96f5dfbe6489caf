"""Loads the models of a process, each once: its files from the store, its class from its adapter's spec."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict, cast

from antiphon.adapters import SPECS
from antiphon.adapters.spec import EngineModelOptions, LaneModelOptions
from antiphon.contracts import (
    ConversationModel,
    ImageReader,
    LanguageModel,
    SpeakerModel,
    Synthesizer,
    SynthesizerProfile,
    Transcriber,
    TurnDetector,
    VideoModel,
    VoiceActivityDetector,
)
from antiphon.engine.api import GRAPHS, Capabilities, DecodeShaping, EngineSettings, KvLayout
from antiphon.engine.grammar_trial import TRIALS, GrammarLimits
from antiphon.engine.lane import Lane
from antiphon.engine.local import CAPABILITIES
from antiphon.errors import ModelError
from antiphon.extras import missing_packages
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.placement import engine_servers, placement
from antiphon.loading.selection import (
    ALL_ROLES,
    LocalModel,
    RemoteModel,
    selected_models,
    spec_of,
)
from antiphon.loading.servers import pools_of, remote_model, voice_with_fallback, with_fallback
from antiphon.loading.turn_models import turn_blend
from antiphon.pipelines.by_language import SeveralVoices, VoiceByLanguage
from antiphon.pipelines.native_conversation import NativeConversationModel
from antiphon.pipelines.reading import ReadingVoice
from antiphon.pipelines.turn_blend import CheckedBackchannel, DetectorFailures, TurnBlend
from antiphon.remote.engine import CAPABILITIES as SERVER_CAPABILITIES
from antiphon.remote.pool import Pool
from antiphon.roles import ModelRole, role_named, shown_role
from antiphon.settings import ModelSettings, Settings
from antiphon.store import Model, Store

log = logging.getLogger(__name__)

# Called after each step with the lane's name, the priority, and the seconds that it waited and took.
ObserveLaneStep = Callable[[str, int, float, float], None]
# The limits of a step: pending rows if a session generates, pending rows if none does, and sessions that sample a
# token. A GPU computes a thousand rows in the time of one (docs/gpu.md); it is limited by the host's kernel launches.
CPU_STEPS = {"prefill_rows": 64, "prefill_only_rows": 256, "decode_rows": 64}
GPU_STEPS = {"prefill_rows": 2048, "prefill_only_rows": 2048, "decode_rows": 256}
# The capabilities of each engine, by its name.
ENGINES: dict[str, Capabilities] = {
    "local": CAPABILITIES,
    "vllm": SERVER_CAPABILITIES,
    "sglang": SERVER_CAPABILITIES,
}


class ModelsByRole(TypedDict, total=False):
    """The models loaded so far, by role.

    The image reader and the fallback voice are loaded last, because no other model uses them.
    """

    # Transcribes speech.
    transcriber: Transcriber
    # Detects speech.
    vad: VoiceActivityDetector
    # Judges whether a turn has ended.
    turn: TurnBlend
    # Judges the sound of speech over a response.
    backchannel: CheckedBackchannel
    # Compares voices.
    speaker: SpeakerModel
    # Writes the text of answers.
    language: LanguageModel
    # Speaks text.
    synthesizer: Synthesizer
    # Answers in conversations by itself.
    conversation_model: ConversationModel
    # Answers questions about video frames.
    video_model: VideoModel
    # Reads the text on images.
    image_reader: ImageReader
    # Speaks languages that the synthesizer does not.
    fallback: Synthesizer


def store_of(settings: ModelSettings) -> Store:
    """The store that the settings describe. Nothing is read or created before the first model is requested."""
    local = Path(settings.models_from).expanduser() if settings.models_from else None
    return Store(Path(settings.home), local=local, offline=settings.offline)


def num_workers(settings: ModelSettings) -> int:
    """The number of worker threads of a model: the setting, or one for each available core."""
    return settings.workers or max(1, len(os.sched_getaffinity(0)))


def prepare(settings: Settings, store: Store, model: Model | LocalModel) -> Path:
    """The folder that a model is loaded from, complete and verified.

    If the adapter has to convert files first, such as the weights, the first call converts them, which may take
    minutes. The result is kept in the store's home. Raises StoreError if files are missing or damaged.
    """
    spec = spec_of(model)
    source = model.path if isinstance(model, LocalModel) else store.require(model)
    # A model that runs on a server has no weights here.
    if not spec.prepare or (model.role == "language" and engine_servers(settings)):
        return source
    name = model.id
    if isinstance(model, LocalModel):
        name += "-" + hashlib.sha256(str(model.path).encode()).hexdigest()[:8]
    device, weights = placement(settings).of(model.role)
    folder: Path = _imported(spec.prepare)(source, store.home, name, weights, device)
    return folder


def load(
    settings: Settings,
    store: Store,
    observe: ObserveLaneStep | None = None,
    roles: Collection[ModelRole] = ALL_ROLES,
    *,
    engine: str = "local",
) -> LoadedModels:
    """Load the models of these roles. Blocks for seconds to minutes, so callers on an event loop run it in a thread.

    `observe` is called in the models' own threads after each step. `engine`: the name in ENGINES of the engine for all
    models that need one, except a language model on servers (`--engine`). The caller closes the result.

    Raises SettingsError for an unknown model name, StoreError for a missing file, ModelError for a model that does not
    load. Also raises ModelError, before any model is loaded, for a model that the engine cannot run.
    """
    everything = selected_models(settings, roles)
    selected = [m for m in everything if not isinstance(m, RemoteModel)]
    servers = engine_servers(settings)
    TRIALS.limits = GrammarLimits(settings.engine.grammar_s, settings.engine.grammar_mb)
    for model in selected:
        _check_engine(model, servers.kind if servers and model.role == "language" else engine)
    by_role: ModelsByRole = {}
    names, lanes = list[str](), list[Lane[Any, Any]]()
    detectors, failures = dict[str, TurnDetector](), DetectorFailures()
    pools, remote_voice = list[Pool[Any]](), None
    for remote in everything:
        if isinstance(remote, RemoteModel):
            loaded = remote_model(settings, remote)
            pools += pools_of(loaded)
            names.append(remote.id)
            if remote.role == "synthesizer":
                loaded = remote_voice = ReadingVoice(loaded)
                if any(m.role == "synthesizer" for m in selected):
                    # Its fallback is loaded first.
                    continue
            by_role[remote.role] = loaded
    voices_by = set[str]()
    # Models that use others are loaded last.
    for model in sorted(selected, key=lambda m: bool(spec_of(m).uses)):
        if model.role in by_role and (model.role != "synthesizer" or model.adapter in voices_by):
            # An additional voice of the loaded synthesizer, or the transcriber's model for partials.
            continue
        spec = spec_of(model)
        loaded = _load_model(settings, store, model, selected, by_role, observe)
        if spec.language_model:
            by_role.setdefault("language", getattr(loaded, spec.language_model))
        if spec.runs_on == "lane":
            lanes.append(loaded.lane)
        pools += pools_of(loaded)
        if model.role == "turn":
            detectors[model.id] = loaded
            continue
        if model.role == "backchannel":
            loaded = CheckedBackchannel(loaded, failures)
        if model.role == "synthesizer":
            voices_by.add(model.adapter)
            if first := by_role.get("synthesizer"):
                # Metrics tell lanes apart by their names.
                loaded.lane.name += f" {model.adapter}"
                by_role["synthesizer"] = SeveralVoices([first, ReadingVoice(loaded)])
                continue
            loaded = ReadingVoice(loaded)
        by_role[model.role] = NativeConversationModel(loaded) if spec.native else loaded
        if model.role not in ("vad", "backchannel", "speaker"):
            names.append(model.id)
    if blend := turn_blend(settings, detectors, failures) if "turn" in roles else None:
        by_role["turn"] = blend
    if remote_voice and (voice := by_role.get("synthesizer")):
        by_role["synthesizer"] = voice_with_fallback(remote_voice, voice)
    if partner := by_role.get("conversation_model"):
        by_role["conversation_model"] = with_fallback(
            settings, partner, by_role.get("language"), by_role.get("synthesizer")
        )
    if "synthesizer" in by_role:
        by_role["synthesizer"], fallback_lane = _with_fallback(settings, by_role["synthesizer"], observe)
        lanes += [fallback_lane] if fallback_lane else []
    reader = None
    if "language" in by_role:
        reader = _load_reader(settings, observe)
        lanes += [reader.lane] if reader else []
    if "turn" in by_role:
        pools += [pool for part in by_role["turn"].parts for pool in pools_of(part.detector)]
    return replace(_assembled(by_role, reader, names, lanes, settings, failures), pools=tuple(pools))


def _check_engine(model: Model | LocalModel, engine: str) -> None:
    """Raise ModelError if the model's adapter requires a capability that the engine lacks."""
    spec = spec_of(model)
    missing = spec.requires & ~ENGINES[engine]
    if spec.runs_on == "engine" and missing:
        lacks = ", ".join(str(one.name).lower().replace("_", " ") for one in missing)
        raise ModelError(f"{model.id} cannot run on the engine {engine!r}, which lacks: {lacks}")


def _assembled(
    by_role: ModelsByRole,
    reader: ImageReader | None,
    names: Sequence[str],
    lanes: Sequence[Lane[Any, Any]],
    settings: Settings,
    failures: DetectorFailures,
) -> LoadedModels:
    return LoadedModels(
        transcriber=by_role.get("transcriber"),
        vad=by_role.get("vad"),
        turn_detector=by_role.get("turn"),
        language_model=by_role.get("language"),
        synthesizer=by_role.get("synthesizer"),
        image_reader=reader,
        conversation_model=by_role.get("conversation_model"),
        video_model=by_role.get("video_model"),
        names=tuple(names),
        lanes=tuple(lanes),
        eager_frames=settings.engine.video_prefill == "eager",
        speaker_model=by_role.get("speaker"),
        backchannel_detector=by_role.get("backchannel"),
        detector_failures=failures,
        failure_line=settings.speech.failure_line,
    )


def _load_model(
    settings: Settings,
    store: Store,
    model: Model | LocalModel,
    selected: Collection[Model | LocalModel],
    by_role: ModelsByRole,
    observe: ObserveLaneStep | None,
) -> Any:
    """Load one model by its adapter's class.

    `selected`: all models to load; others of the same role and adapter are additional voices of it. `by_role`: the
    models loaded so far.
    """
    spec = spec_of(model)
    used = {name: by_role.get(role_named(name)) for name in spec.uses}
    further: dict[str, dict[str, Path] | Path] = {}
    others = [m for m in selected if (m.role, m.adapter) == (model.role, model.adapter) and m is not model]
    if spec.takes_voices:
        further["voices"] = {m.id: prepare(settings, store, m) for m in others}
    if spec.takes_partials and others:
        further["partials"] = prepare(settings, store, others[0])
    folder = prepare(settings, store, model)
    options = (_engine_options if spec.runs_on == "engine" else _lane_options)(settings, model.role, observe)
    return _imported(spec.model)(folder, model.id, options, **used, **further)


def _load_reader(settings: Settings, observe: ObserveLaneStep | None) -> Any:
    """The image reader. No setting names it: there is only one. Its weights are in a library, which may be missing."""
    spec = next(s for s in SPECS.values() if s.role == "image_reader")
    if missing_packages(spec.extra):
        return None
    return _imported(spec.model)(_lane_options(settings, "image_reader", observe))


def fallback_profile(settings: Settings) -> SynthesizerProfile:
    """The profile of the fallback voice, even if a setting turns it off. Raises ModelError if it is not installed."""
    voice = _imported(next(s for s in SPECS.values() if s.role == "fallback").model)(
        _lane_options(settings, "fallback", None)
    )
    voice.lane.close()
    return cast(SynthesizerProfile, voice.profile)


def _with_fallback(
    settings: Settings, main: Synthesizer, observe: ObserveLaneStep | None
) -> tuple[Synthesizer, Lane[Any, Any] | None]:
    """The synthesizer, with a fallback voice for languages that it does not speak, and the fallback's lane.

    The lane is None without a fallback voice.
    """
    how, profile = settings.speech.fallback_voice, main.profile
    spec = next((s for s in SPECS.values() if s.role == "fallback"), None)
    if spec is None or profile.streams_text or not profile.languages:
        return main, None
    if how == "off":
        # If each voice speaks all languages, none has to be found.
        has_one_choice = all(profile.languages_of(name) == profile.languages for name in profile.voices)
        return (main if has_one_choice else VoiceByLanguage(main, None)), None
    try:
        fallback = _imported(spec.model)(_lane_options(settings, "fallback", observe))
    except ModelError:
        # With `auto` it is used only if it is installed. Any other value requires it.
        if how != "auto":
            raise
        # Without a fallback voice, VoiceByLanguage refuses languages that the synthesizer does not speak.
        return VoiceByLanguage(main, None), None
    more = ", ".join(code for code in fallback.profile.languages if code not in main.profile.languages)
    log.debug("%s is the fallback voice, for %s", fallback.profile.id, more)
    return VoiceByLanguage(main, ReadingVoice(fallback)), fallback.lane


def _lane_options(settings: Settings, role: ModelRole, observe: ObserveLaneStep | None) -> LaneModelOptions:
    models = settings.models
    return LaneModelOptions(
        device=placement(settings).of(role)[0],
        compute_type=models.compute_type,
        workers=num_workers(models),
        max_queue=models.max_queue,
        observe=_observe_lane(observe, shown_role(role)),
    )


def _engine_options(settings: Settings, role: ModelRole, observe: ObserveLaneStep | None) -> EngineModelOptions:
    engine, places = settings.engine, placement(settings)
    device, weights = places.of(role)
    steps = CPU_STEPS if device == "cpu" else GPU_STEPS
    kv = EngineSettings(
        kv_bytes=engine.kv_mb << 20,
        host_bytes=engine.kv_host_mb << 20,
        disk_bytes=engine.kv_disk_mb << 20,
        # The inputs of these models (half a minute of audio, a text to speak) have length limits of their own.
        context_rows=0 if role in ("transcriber", "synthesizer") else engine.context_tokens,
        reserve_rows=engine.reserve_tokens,
        prefill_rows=engine.prefill_tokens or steps["prefill_rows"],
        prefill_only_rows=engine.prefill_only_tokens or steps["prefill_only_rows"],
        decode_rows=engine.decode_sessions or steps["decode_rows"],
        park_after_s=engine.park_after_s,
        # The settings have checked the value.
        kv_layout=cast(KvLayout, engine.kv_layout),
        decode_shapes=cast(DecodeShaping, engine.decode_shapes),
        graphs=frozenset(GRAPHS) - frozenset(engine.no_graphs),
        step_ahead=engine.step_ahead,
    )
    return EngineModelOptions(
        settings=kv,
        device=device,
        weights=weights,
        threads=engine.engine_threads,
        observe=_observe_engine(observe, shown_role(role)),
        talker_device=places.of("talker", like=role)[0],
        prefill=engine.video_prefill,
        gather_s=None if engine.gather_ms < 0 else engine.gather_ms / 1000,
        flow_steps=engine.flow_steps,
        servers=engine_servers(settings) if role == "language" else None,
    )


def _observe_lane(observe: ObserveLaneStep | None, lane: str) -> Callable[[int, float, float], None] | None:
    if observe is None:
        return None
    return lambda priority, waited_s, took_s: observe(lane, priority, waited_s, took_s)


def _observe_engine(observe: ObserveLaneStep | None, lane: str) -> Callable[[int, int, float], None] | None:
    """Report an engine's steps as a lane's steps, without priority and waiting time."""
    if observe is None:
        return None
    return lambda num_rows, num_sessions, took_s: observe(lane, 0, 0.0, took_s)


def _imported(name: str) -> Callable[..., Any]:
    """Import and return the attribute `module:attribute`. Imports late, because the module may import torch."""
    module, attribute = name.split(":")
    return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
