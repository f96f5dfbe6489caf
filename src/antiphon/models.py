"""The loaded models of one process: each once, from the store, by the adapters' table."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from antiphon.adapters import ADAPTERS, PREPARERS
from antiphon.adapters.rapid_ocr.reader import RapidOcr
from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import (
    LanguageModel,
    Message,
    Partner,
    Reader,
    ReplyOptions,
    SoundPart,
    Speaking,
    SpeechDetector,
    Synthesizer,
    Transcriber,
    TurnJudge,
    Urgency,
    VoiceOptions,
    Watcher,
    Window,
)
from antiphon.engine.api import EngineSettings
from antiphon.engine.lane import Lane
from antiphon.errors import SettingsError, StoreError
from antiphon.pipelines.cascade import Cascade
from antiphon.pipelines.native_partner import SelfTurning
from antiphon.pipelines.observer import Observer
from antiphon.pipelines.video_partner import PartnerWatcher
from antiphon.settings import WEIGHTS, ModelSettings, Settings
from antiphon.store import MODELS, Model, Store
from antiphon.store.registry import Role, profile

# lane name, priority, seconds waited, seconds of the step
ObserveStep = Callable[[str, int, float, float], None]
HEARING: tuple[Role, ...] = ("transcriber", "vad")
TALKING: tuple[Role, ...] = ("language",)
SPEAKING: tuple[Role, ...] = ("synthesizer",)
JUDGING: tuple[Role, ...] = ("turn",)
CONVERSING: tuple[Role, ...] = ("partner",)
SEEING: tuple[Role, ...] = ("watcher",)
EVERYTHING = HEARING + JUDGING + TALKING + SPEAKING + CONVERSING + SEEING
# Roles whose models can be put on a device of their own.
PLACED = ("transcriber", "language", "synthesizer", "partner", "watcher", "talker")
# Whose work is an engine's, not a lane's.
STEPPED = ("causal_lm", "minicpmo", "vlm", "qwen3_asr", "qwen3_omni", "qwen3_tts")
# Partners that are asked for answers, and write, hear and see besides; the others take turns by themselves.
ASKED = ("qwen3_omni",)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model of the user's own: a checkpoint's folder or a .gguf file."""

    id: str
    path: Path
    role: Role = "language"
    adapter: str = "causal_lm"


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """What sessions share: None for a role that was not asked for. `lanes` is for measuring only."""

    hears: Transcriber | None
    watches: SpeechDetector | None
    judges: TurnJudge | None
    language: LanguageModel | None
    speaks: Synthesizer | None
    reads: Reader | None
    converses: Partner | None
    sees: Watcher | None
    names: tuple[str, ...]
    lanes: tuple[Lane[Any, Any], ...]
    # A partner that sees takes frames in as they come.
    looks_ahead: bool = True

    @property
    def transcriber(self) -> Transcriber:
        """Raises LookupError where none was asked for."""
        if self.hears is None:
            raise LookupError("no transcriber is loaded")
        return self.hears

    @property
    def detector(self) -> SpeechDetector:
        """Raises LookupError where none was asked for."""
        if self.watches is None:
            raise LookupError("no speech detector is loaded")
        return self.watches

    @property
    def synthesizer(self) -> Synthesizer:
        """Raises LookupError where none was asked for."""
        if self.speaks is None:
            raise LookupError("no synthesizer is loaded")
        return self.speaks

    @property
    def partner(self) -> Partner | None:
        """Whoever answers in a conversation; None without a language model, or a model that converses by itself."""
        if self.converses:
            return self.converses
        return Cascade(self.language, self.speaks) if self.language else None

    @property
    def watcher(self) -> Watcher | None:
        """Whoever answers questions about what is seen; None without a language model, or a model that sees."""
        if self.sees:
            return self.sees
        if self.converses and self.converses.profile.takes_media:
            return PartnerWatcher(self.converses, eager=self.looks_ahead)
        if self.language is None or self.reads is None:
            return None
        return Observer(Cascade(self.language, self.speaks), self.reads, self.hears, self.speaks)

    async def warm(self) -> None:
        """One small step of each, side by side: the first is slow (pages come in, kernels are chosen), and no user should wait for it.

        Raises ModelError for a model that fails at it.
        """
        async with anyio.create_task_group() as group:
            if self.hears:
                group.start_soon(_warm_ears, self.hears)
            if self.judges:
                group.start_soon(self.judges.complete, np.zeros(SAMPLE_RATE_HZ, np.float32))
            if self.language:
                group.start_soon(_warm_language, self.language)
            if self.speaks:
                group.start_soon(_warm_voice, self.speaks)
            if self.converses and self.converses.profile.takes_media:
                group.start_soon(_warm_partner, self.converses)

    def close(self) -> None:
        """Stop the workers; running steps finish."""
        for lane in self.lanes:
            lane.close()
        # Those that work in an engine are not in a lane.
        for model in (self.language, self.converses, self.sees, self.hears, self.speaks):
            if close := getattr(model, "close", None):
                close()


async def _warm_language(language: LanguageModel) -> None:
    dialogue = await language.open()
    try:
        async for _ in dialogue.reply(
            [Message("user", "Good morning! How are you today?")], ReplyOptions(max_tokens=3)
        ):
            pass
    finally:
        dialogue.close()


async def _warm_ears(transcriber: Transcriber) -> None:
    hearing = transcriber.open()
    try:
        await hearing.decode(Window(np.zeros(SAMPLE_RATE_HZ, np.float32), final=True, max_tokens=1))
    finally:
        hearing.close()


async def _warm_partner(partner: Partner) -> None:
    talk, voices = await partner.open(), partner.profile.voices
    asked = Message("user", "", parts=(SoundPart(np.zeros(SAMPLE_RATE_HZ, np.float32)), "Good morning!"))
    voice = VoiceOptions(voices[0]) if voices else None
    try:
        async with aclosing(talk.respond([asked], ReplyOptions(max_tokens=3), voice)) as answers:
            async for answer in answers:
                if isinstance(answer, Speaking):
                    return
    finally:
        talk.close()


async def _warm_voice(voice: Synthesizer) -> None:
    async for _ in voice.speak("Good morning.", VoiceOptions(voice.profile.voices[0]), lambda: Urgency.BULK):
        pass


def store_of(settings: ModelSettings) -> Store:
    """The store the settings describe."""
    local = Path(settings.models_from).expanduser() if settings.models_from else None
    return Store(Path(settings.home), local=local, offline=settings.offline)


def num_workers(settings: ModelSettings) -> int:
    """Worker threads a model gets: as set, or one a core this process may use."""
    return settings.workers or max(1, len(os.sched_getaffinity(0)))


def chosen(settings: Settings, roles: Collection[Role] = EVERYTHING) -> tuple[Model | LocalModel, ...]:
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
        if partner.adapter in ASKED and not language:
            # It writes by itself.
            found = [m for m in found if m.role != "language"]
        found.append(partner)
    if settings.engine.watcher and "watcher" in roles:
        found.append(_own("watcher", settings.engine.watcher, "vlm"))
    return tuple(dict.fromkeys(found))


def _own(role: Role, name: str, adapter: str) -> LocalModel:
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
    settings: Settings, store: Store, observe: ObserveStep | None = None, roles: Collection[Role] = EVERYTHING
) -> LoadedModels:
    """Load the models of these roles. Raises StoreError for a file that is not there, ModelError for one that does not load."""

    def watch(lane: str) -> Callable[[int, float, float], None] | None:
        return None if observe is None else lambda priority, waited, took: observe(lane, priority, waited, took)

    by_role: dict[str, Any] = {}
    names: list[str] = []
    lanes: list[Lane[Any, Any]] = []
    wanted = chosen(settings, roles)
    for model in wanted:
        if model.role in by_role:
            # Another voice of the synthesizer that is there.
            continue
        make = _named(_adapter(model.id, model.adapter))
        stepped = model.adapter in STEPPED
        options = _stepped_options(settings, model.role, model.adapter) if stepped else _options(settings, model.role)
        options["observe"] = _engine_steps(observe, model.role) if stepped else watch(model.role)
        if model.adapter == "hibari":
            options["more"] = {
                m.id: prepare(settings, store, m) for m in wanted if m.role == model.role and m is not model
            }
        made = make(prepare(settings, store, model), model.id, **options)
        if model.role == "partner":
            if model.adapter in ASKED:
                by_role.setdefault("language", made.thinker)
            else:
                made = SelfTurning(made)
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


def placement(settings: Settings, role: str, like: str = "") -> tuple[str, str]:
    """Where the model of a role runs, and as which weights; one that is not placed runs where that of `like` does. Raises SettingsError."""
    found = placement(settings, like) if like else (settings.models.device, settings.engine.weights)
    for given in filter(None, (part.strip() for part in settings.models.placement.split(","))):
        name, _, where = given.partition("=")
        device, _, weights = where.partition("/")
        if name == "talker" and weights:
            raise SettingsError(f"--placement {given}: a talker has its partner's weights")
        if name not in PLACED or not re.fullmatch(r"cpu|cuda(:\d+)?", device) or (weights and weights not in WEIGHTS):
            expected = f"ROLE=DEVICE[/WEIGHTS], of {', '.join(PLACED)}; cpu, cuda, cuda:1; {', '.join(WEIGHTS)}"
            raise SettingsError(f"--placement {given}: expected {expected}")
        if name == role:
            found = (device, weights or found[1])
    return found


def _options(settings: Settings, role: Role) -> dict[str, Any]:
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


def _stepped_options(settings: Settings, role: Role, adapter: str) -> dict[str, Any]:
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


def _engine_steps(observe: ObserveStep | None, lane: str) -> Callable[[int, int, float], None] | None:
    return None if observe is None else lambda rows, sessions, took: observe(lane, 0, 0.0, took)


def _adapter(model_id: str, adapter: str) -> str:
    if adapter not in ADAPTERS:
        raise StoreError(f"{model_id}: there is no adapter named {adapter}")
    return ADAPTERS[adapter]


def _named(name: str) -> Callable[..., Any]:
    module, attribute = name.split(":")
    return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
