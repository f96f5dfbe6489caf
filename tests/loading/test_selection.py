"""Which models the settings name, and which adapter loads each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli.preparation import check_names
from antiphon.errors import SettingsError, StoreError
from antiphon.loading.selection import LocalModel, RemoteModel, named_detectors, selected_models, spec_of
from antiphon.settings import EngineOptions, ModelSettings, RemoteSettings, Settings, SpeechSettings


def test_when_settings_name_folders_then_their_models_are_selected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    own = str(tmp_path)
    settings = Settings(
        models=ModelSettings(transcriber=own),
        engine=EngineOptions(conversation_model=own, video_model=own),
        speech=SpeechSettings(synthesizer=own),
    )
    found = {m.role: m.adapter for m in selected_models(settings) if isinstance(m, LocalModel)}
    assert found == {
        "transcriber": "qwen3_asr",
        "synthesizer": "qwen3_tts",
        "conversation_model": "minicpmo",
        "video_model": "vlm",
    }
    assert [
        m.id
        for m in selected_models(Settings(models=ModelSettings(transcriber="whisper-tiny.en")))
        if m.role == "transcriber"
    ] == ["whisper-tiny.en"]
    for wrong in (ModelSettings(transcriber="nobody"), ModelSettings(transcriber="hibari-heart")):
        with pytest.raises(SettingsError, match="--transcriber"):
            selected_models(Settings(models=wrong))
    with pytest.raises(SettingsError, match="--voice"):
        selected_models(Settings(speech=SpeechSettings(synthesizer=own, voices=("emma",))))


@pytest.mark.parametrize(
    ("role", "model_type", "adapter"),
    [
        ("conversation_model", "qwen3_omni_moe", "qwen3_omni"),
        ("conversation_model", "qwen2_5_omni", "qwen2_5_omni"),
        ("conversation_model", "minicpmo", "minicpmo"),
        ("video_model", "qwen3_vl", "vlm"),
        ("language", "qwen2", "causal_lm"),
    ],
)
def test_when_a_folder_has_a_config_then_its_type_says_which_adapter_loads_it(
    tmp_path: Path, role: str, model_type: str, adapter: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    flag = "language_model" if role == "language" else role
    settings = Settings(engine=EngineOptions(**{flag: str(tmp_path)}))
    (found,) = (m for m in selected_models(settings) if isinstance(m, LocalModel))
    assert (found.role, found.adapter) == (role, adapter)


@pytest.mark.parametrize("config", ["{}", "[]", "no JSON", '{"model_type": ["a", "list"]}', '{"model_type": "new"}'])
def test_when_a_config_names_no_known_type_then_the_first_adapter_of_the_role_is_taken(
    tmp_path: Path, config: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    settings = Settings(engine=EngineOptions(conversation_model=str(tmp_path)))
    (found,) = (m for m in selected_models(settings) if isinstance(m, LocalModel))
    assert found.adapter == "minicpmo"


@pytest.mark.parametrize(("conversation_model", "stays"), [("qwen3_omni_moe", False), ("minicpmo", True)])
def test_when_a_partner_can_be_the_language_model_then_the_profiles_is_left_out(
    tmp_path: Path, conversation_model: str, stays: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": conversation_model}))
    models = selected_models(Settings(engine=EngineOptions(conversation_model=str(tmp_path))))
    assert ("language" in {m.role for m in models}) is stays


def test_when_voices_are_named_then_they_are_those_of_the_synthesizers_adapter() -> None:
    found = selected_models(Settings(speech=SpeechSettings(voices=("emma", "kore"))), ("synthesizer",))
    assert [m.id for m in found] == ["hibari-heart", "hibari-emma", "hibari-kore"]
    with pytest.raises(SettingsError, match="--voice: there is no synthesizer hibari-nobody"):
        selected_models(Settings(speech=SpeechSettings(voices=("nobody",))))


def test_when_a_model_for_partials_is_named_then_it_is_of_the_transcribers_kind(tmp_path: Path) -> None:
    found = selected_models(Settings(models=ModelSettings(partials="whisper-tiny.en")), ("transcriber",))
    assert [m.id for m in found] == ["whisper-base", "whisper-tiny.en"]
    with pytest.raises(SettingsError, match="--partials: there is no transcriber silero-vad-v6"):
        selected_models(Settings(models=ModelSettings(partials="silero-vad-v6")))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_asr"}))
    other = ModelSettings(transcriber=str(tmp_path), partials="whisper-tiny.en")
    with pytest.raises(SettingsError, match="it cannot decode for"):
        selected_models(Settings(models=other))


def test_when_an_adapter_is_not_in_the_table_then_the_error_names_it_and_the_model() -> None:
    with pytest.raises(StoreError, match="mine: there is no adapter named other"):
        spec_of(LocalModel("mine", Path("/"), "language", "other"))


def test_when_a_speaker_model_is_named_then_it_is_selected_and_else_none_is() -> None:
    def speakers(name: str) -> list[str]:
        found = selected_models(Settings(models=ModelSettings(speaker_model=name)))
        return [m.id for m in found if m.role == "speaker"]

    assert speakers("") == []
    assert speakers("resemblyzer") == ["resemblyzer"]
    for wrong in ("nobody", "silero-vad-v6"):
        with pytest.raises(SettingsError, match=r"--speaker-model: there is no speaker .*resemblyzer"):
            speakers(wrong)


def test_turn_detectors_are_names_folders_and_urls_with_weights(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps({"model_type": "turn-1-mini"}))

    def chosen(text: str) -> list[tuple[str, str]]:
        settings = Settings(models=ModelSettings(turn_detector=text))
        found = [m for m in selected_models(settings, ("turn",)) if not isinstance(m, RemoteModel)]
        return [(m.id, m.adapter) for m in found]

    assert chosen("") == [("smart-turn-v3.2", "smart_turn")]
    assert chosen("none") == chosen("http://127.0.0.1:9/judge") == []
    assert chosen(f"smart-turn-v3.2, {tmp_path / 'own'}*2, https://host:1/judge") == [
        ("smart-turn-v3.2", "smart_turn"),
        ("own", "turn_stream"),
    ]
    found = named_detectors(f"{tmp_path / 'own'}*2.5,https://name:secret@host:1/judge")
    assert [(one.id, one.weight) for one in found] == [("own", 2.5), ("host:1", 1.0)]
    for wrong in ("nobody", "hibari-heart", "smart-turn-v3.2*0", "smart-turn-v3.2*x", "*2", "http://h/a,http://h/b"):
        with pytest.raises(SettingsError, match="--turn-detector"):
            chosen(wrong)


@pytest.mark.parametrize("fallback", [False, True])
def test_models_on_other_servers_replace_those_of_the_profile_or_are_followed_by_them(fallback: bool) -> None:
    settings = Settings(
        speech=SpeechSettings(synthesizer="http://box:8880/v1#kokoro", voices=("af_heart",)),
        engine=EngineOptions(conversation_model="ws://box:8000/v1/realtime#qwen3-omni"),
        remote=RemoteSettings(fallback=fallback),
    )
    found = [(m.role, isinstance(m, RemoteModel)) for m in selected_models(settings)]
    assert found.count(("synthesizer", True)) == 1
    assert found.count(("conversation_model", True)) == 1
    assert (("synthesizer", False) in found, ("language", False) in found) == (fallback, fallback)


@pytest.mark.parametrize("name", ["ftp://box/v1#kokoro", "file:///etc/passwd#kokoro", "http://box:8880/v1"])
def test_an_address_of_another_scheme_or_without_a_model_is_refused(name: str) -> None:
    for settings in (
        Settings(speech=SpeechSettings(synthesizer=name)),
        Settings(engine=EngineOptions(conversation_model=name)),
    ):
        with pytest.raises(SettingsError):
            selected_models(settings)


def test_a_transcriber_may_be_on_other_servers() -> None:
    def chosen(text: str, **models: str) -> list[RemoteModel]:
        settings = Settings(models=ModelSettings(transcriber=text, **models))
        check_names(settings, ("transcriber", "vad"))
        found = selected_models(settings, ("transcriber", "vad"))
        # Speech is detected here.
        assert [m.role for m in found if not isinstance(m, RemoteModel)] == ["vad"]
        return [m for m in found if isinstance(m, RemoteModel)]

    (one,) = chosen("http://a/v1,tcp://b:10300#whisper/large")
    assert (one.id, one.role, one.address.urls) == ("whisper/large", "transcriber", ("http://a/v1", "tcp://b:10300"))
    for wrong, why in {
        "localhost:8000/v1#m": "localhost:8000/v1 has no scheme",
        "file:///etc/passwd#m": "is no address of a server",
        "http://a/v1": "add the model's name after a #",
        "https://me:hidden@a/v1#m": "a key goes into ANTIPHON_TRANSCRIBER_KEY",
    }.items():
        with pytest.raises(SettingsError, match=f"--transcriber.*{why}") as error:
            chosen(wrong)
        assert "hidden" not in str(error.value)
    with pytest.raises(SettingsError, match=r"--partials .* the transcriber is on another server"):
        chosen("http://a/v1#m", partials="whisper-tiny.en")


def voices(folder: Path) -> str:
    """Make a folder that looks like one of Piper's voices, and return its path."""
    folder.mkdir()
    (folder / "de_DE-eva-low.onnx").touch()
    return str(folder)


def synthesizers(text: str, **speech: Any) -> list[tuple[str, str]]:
    found = selected_models(Settings(speech=SpeechSettings(synthesizer=text, **speech)), ("synthesizer",))
    return [(m.id, m.adapter) for m in found if not isinstance(m, RemoteModel)]


def test_a_folder_of_voices_is_recognized_by_its_files_and_several_are_taken_together(tmp_path: Path) -> None:
    home, more = voices(tmp_path / "home"), voices(tmp_path / "more")
    assert synthesizers(home) == [("home", "piper")]
    assert synthesizers(f"hibari-heart, {home},{more}") == [
        ("hibari-heart", "hibari"),
        ("home", "piper"),
        ("more", "piper"),
    ]
    assert synthesizers(home, voices=("emma",))[-1] == ("hibari-emma", "hibari")
    comma = voices(tmp_path / "a, b")
    assert synthesizers(comma) == [("a, b", "piper")]


def test_synthesizers_that_cannot_be_taken_together_are_refused_by_name(tmp_path: Path) -> None:
    home = voices(tmp_path / "home")
    (tmp_path / "tts").mkdir()
    (tmp_path / "tts" / "config.json").write_text(json.dumps({"model_type": "qwen3_tts"}))
    (tmp_path / "other").mkdir()
    for text, says in {
        f"{home},none": "none cannot be one of several",
        f"{home},http://box:8880/v1#kokoro": "http://box:8880/v1#kokoro cannot be one of several",
        f"{home},{tmp_path / 'tts'}": "tts cannot be one of several",
        f"{home},{voices(tmp_path / 'other' / 'home')}": "two of them have the name home",
        f"{home},nobody": "there is no synthesizer nobody",
    }.items():
        with pytest.raises(SettingsError, match=f"--synthesizer.*{re.escape(says)}"):
            synthesizers(text)
