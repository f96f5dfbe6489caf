"""How the loader builds models from specs: what each class receives, and which pairs of model and engine it refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.adapters.spec import EngineModelOptions, LaneModelOptions, Spec
from antiphon.contracts import SynthesizerProfile
from antiphon.engine.api import Capabilities
from antiphon.errors import ModelError
from antiphon.loading import loader, selection
from antiphon.loading.loader import ENGINES, load, store_of
from antiphon.pipelines.native_conversation import NativeConversationModel
from antiphon.roles import OTHER_NAMES
from antiphon.settings import EngineOptions, ModelSettings, Settings, SpeechSettings
from antiphon.store import Model

HERE = __name__


@dataclass
class Made:
    """A model that records its constructor's arguments."""

    folder: Path
    model_id: str
    options: Any
    synthesizer: Any = None
    transcriber: Any = None
    voices: Any = None
    partials: Any = None
    lane: Any = field(default_factory=object)
    brain: Any = field(default_factory=object)
    profile: Any = field(
        default_factory=lambda: SimpleNamespace(id="native", sample_rate_hz=24_000, voices=(), unit_s=1.0)
    )


class MadeWith:
    """A model that records the models it was given."""

    def __init__(self, folder: Path, model_id: str, options: Any, **given: Any) -> None:
        self.given = given


class MadeVoice:
    """A synthesizer with a voice for itself and for each further folder. Its language is its name."""

    def __init__(self, folder: Path, model_id: str, options: Any, *, voices: dict[str, Path]) -> None:
        self.lane = SimpleNamespace(name="synthesizer")
        self.profile = SynthesizerProfile(model_id, 24_000, (model_id, *voices), (model_id,), (0.5, 2.0), True)


class MadeReader:
    def __init__(self, options: LaneModelOptions) -> None:
        self.options, self.lane = options, object()


LANE = Spec("synthesizer", f"{HERE}:Made", "lane")
READER = Spec("image_reader", f"{HERE}:MadeReader", "lane")
ENGINE = Spec("conversation_model", f"{HERE}:Made", "engine", model_types=("made",))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"model_type": "made"}))
    return tmp_path / "mine"


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Spec]:
    """An empty table in place of the adapters' own. No files are fetched or looked for."""
    table: dict[str, Spec] = {"image_reader": READER}
    monkeypatch.setattr(selection, "SPECS", table)
    monkeypatch.setattr(loader, "SPECS", table)

    def fetched(settings: Settings, store: Any, model: Any) -> Path:
        return Path("/store") / model.id if isinstance(model, Model) else model.path

    monkeypatch.setattr(loader, "prepare", fetched)
    return table


def made(settings: Settings, *roles: Any, observe: Any = None) -> Any:
    return load(settings, store_of(settings.models), observe, roles)


def test_when_a_model_uses_others_then_they_are_loaded_before_and_given_to_it(
    specs: dict[str, Spec], folder: Path
) -> None:
    specs["eyes"] = replace(ENGINE, role="video_model", uses=("synthesizer", "transcriber"))
    specs["hibari"] = LANE
    # The profile has the transcriber before the synthesizer.
    specs["whisper"] = replace(LANE, role="transcriber", uses=("synthesizer",))
    settings = Settings(engine=EngineOptions(video_model=str(folder)))
    models = made(settings, "video_model", "synthesizer", "transcriber")
    assert models.transcriber.synthesizer is models.synthesizer
    assert models.video_model.folder == folder
    assert models.video_model.synthesizer is models.synthesizer
    assert models.synthesizer.voice.synthesizer is None
    assert made(settings, "video_model", "synthesizer").video_model.transcriber is None


def test_an_adapter_may_name_roles_by_their_other_names(specs: dict[str, Spec], folder: Path) -> None:
    own = {role: other for other, role in OTHER_NAMES.items()}["conversation_model"]
    specs["talks"] = replace(ENGINE, role=own)
    specs["eyes"] = replace(ENGINE, model=f"{HERE}:MadeWith", role="video_model", uses=(own,))
    models = made(
        Settings(engine=EngineOptions(conversation_model=str(folder), video_model=str(folder))),
        "conversation_model",
        "video_model",
    )
    assert models.conversation_model.folder == folder
    # The class gets the model under the name in its spec.
    assert models.video_model.given == {own: models.conversation_model}


def test_when_voices_are_named_then_the_adapter_gets_the_folders_of_the_further_ones(specs: dict[str, Spec]) -> None:
    specs["hibari"] = replace(LANE, takes_voices=True)
    models = made(Settings(speech=SpeechSettings(voices=("emma", "kore"))), "synthesizer")
    assert models.synthesizer.voice.folder == Path("/store/hibari-heart")
    assert models.synthesizer.voice.voices == {
        "hibari-emma": Path("/store/hibari-emma"),
        "hibari-kore": Path("/store/hibari-kore"),
    }
    assert models.lanes == (models.synthesizer.voice.lane,)


def test_when_synthesizers_of_two_adapters_are_named_then_they_are_one_with_the_voices_of_both(
    specs: dict[str, Spec], tmp_path: Path
) -> None:
    specs["hibari"] = replace(LANE, model=f"{HERE}:MadeVoice", takes_voices=True)
    specs["own"] = replace(specs["hibari"], files="*.graph")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.graph").touch()
    named = f"hibari-heart,{tmp_path / 'one'},{tmp_path / 'two'}"
    models = made(Settings(speech=SpeechSettings(synthesizer=named, voices=("emma",))), "synthesizer")
    assert models.synthesizer.profile.voices == ("hibari-heart", "hibari-emma", "one", "two")
    assert models.synthesizer.profile.languages == ("hibari-heart", "one")
    assert models.synthesizer.profile.id == "hibari-heart"
    assert models.names == ("hibari-heart",)
    # Metrics tell the lanes apart.
    assert [lane.name for lane in models.lanes] == ["synthesizer", "synthesizer own"]


def test_when_a_model_for_partials_is_named_then_it_is_given_to_the_transcriber_and_is_no_model_of_its_own(
    specs: dict[str, Spec],
) -> None:
    specs["whisper"] = replace(LANE, role="transcriber", takes_partials=True)
    models = made(Settings(models=ModelSettings(partials="whisper-tiny.en")), "transcriber")
    assert (models.transcriber.model_id, models.transcriber.partials) == (
        "whisper-base",
        Path("/store/whisper-tiny.en"),
    )
    assert (models.names, models.lanes) == (("whisper-base",), (models.transcriber.lane,))
    assert made(Settings(), "transcriber").transcriber.partials is None


def test_when_a_conversation_model_has_a_language_model_then_it_stands_in_for_one(
    specs: dict[str, Spec], folder: Path
) -> None:
    specs["talks"] = replace(ENGINE, language_model="brain")
    models = made(Settings(engine=EngineOptions(conversation_model=str(folder))), "conversation_model", "language")
    assert models.language_model is models.conversation_model.brain
    # The text on images is read to a language model that cannot see.
    assert isinstance(models.image_reader, MadeReader)
    assert models.lanes == (models.image_reader.lane,)


def test_when_a_conversation_model_is_native_then_it_is_wrapped_as_one(specs: dict[str, Spec], folder: Path) -> None:
    specs["talks"] = replace(ENGINE, native=True)
    models = made(Settings(engine=EngineOptions(conversation_model=str(folder))), "conversation_model")
    assert isinstance(models.conversation_model, NativeConversationModel)
    assert models.language_model is None
    assert models.image_reader is None


def test_when_a_model_runs_on_an_engine_then_its_options_are_those_of_the_settings(
    specs: dict[str, Spec], folder: Path
) -> None:
    specs["talks"] = ENGINE
    seen: list[Any] = []
    settings = Settings(
        models=ModelSettings(placement="conversation_model=cuda:1/bf16,talker=cpu"),
        engine=EngineOptions(
            conversation_model=str(folder), kv_mb=3, context_tokens=400, engine_threads=5, video_prefill="query"
        ),
    )
    options = made(settings, "conversation_model", observe=lambda *step: seen.append(step)).conversation_model.options
    assert isinstance(options, EngineModelOptions)
    assert (options.device, options.weights, options.talker_device) == ("cuda:1", "bf16", "cpu")
    assert (options.threads, options.prefill) == (5, "query")
    assert (options.settings.kv_bytes, options.settings.context_rows) == (3 << 20, 400)
    options.observe(7, 2, 0.5)
    assert seen == [("partner", 0, 0.0, 0.5)]


def test_when_a_model_runs_in_a_lane_then_its_options_are_those_of_the_settings(specs: dict[str, Spec]) -> None:
    specs["whisper"] = replace(LANE, role="transcriber")
    seen: list[Any] = []
    settings = Settings(
        models=ModelSettings(placement="transcriber=cuda:1", compute_type="float16", workers=3, max_queue=9)
    )
    options = made(settings, "transcriber", observe=lambda *step: seen.append(step)).transcriber.options
    assert isinstance(options, LaneModelOptions)
    assert (options.device, options.compute_type) == ("cuda:1", "float16")
    assert (options.workers, options.max_queue) == (3, 9)
    options.observe(1, 0.25, 0.5)
    assert seen == [("transcriber", 1, 0.25, 0.5)]


def test_when_an_engine_lacks_what_an_adapter_needs_then_the_pair_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, specs: dict[str, Spec], folder: Path
) -> None:
    missing = Capabilities.EVICT | Capabilities.HIDDEN_STATES
    monkeypatch.setitem(ENGINES, "lesser", ~missing)
    # The synthesizer is first in the order of loading; its class does not exist.
    specs["hibari"] = replace(LANE, model="nowhere:Nothing")
    specs["talks"] = replace(ENGINE, requires=missing | Capabilities.CHOOSER)
    settings = Settings(engine=EngineOptions(conversation_model=str(folder)))
    with pytest.raises(
        ModelError, match=r"^mine cannot run on the engine 'lesser', which lacks: evict, hidden states$"
    ):
        load(settings, store_of(settings.models), roles=("synthesizer", "conversation_model"), engine="lesser")
    specs["talks"] = replace(ENGINE, requires=Capabilities.CHOOSER)
    assert load(settings, store_of(settings.models), roles=("conversation_model",), engine="lesser").conversation_model


def test_the_local_engine_runs_every_adapter() -> None:
    assert [name for name, spec in loader.SPECS.items() if spec.requires & ~ENGINES["local"]] == []
