"""Which models the settings name, and where each runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.errors import SettingsError
from antiphon.loading.selection import LocalModel, placement, selected_models
from antiphon.settings import EngineOptions, ModelSettings, Settings, SpeechSettings


def placed(text: str, role: str) -> tuple[str, str]:
    return placement(Settings(models=ModelSettings(placement=text)), role)  # type: ignore[arg-type]


def test_when_a_role_is_placed_then_its_model_runs_there_and_the_others_on_the_device() -> None:
    text = "partner=cuda:0, transcriber=cuda:1,synthesizer=cpu/int8"
    assert placed(text, "partner") == ("cuda:0", "auto")
    assert placed(text, "transcriber") == ("cuda:1", "auto")
    assert placed(text, "synthesizer") == ("cpu", "int8")
    assert placed(text, "language") == ("cpu", "auto")
    settings = Settings(
        models=ModelSettings(device="cuda", placement="watcher=cpu"), engine=EngineOptions(weights="bf16")
    )
    assert placement(settings, "watcher") == ("cpu", "bf16")
    assert placement(settings, "language") == ("cuda", "bf16")


@pytest.mark.parametrize("wrong", ["vad=cpu", "partner", "partner=tpu", "partner=cuda:x", "partner=cpu/int3", "=cpu"])
def test_when_a_placement_is_wrong_then_selecting_models_names_it(wrong: str) -> None:
    with pytest.raises(SettingsError, match="--placement"):
        selected_models(Settings(models=ModelSettings(placement=wrong)))


def test_when_settings_name_folders_then_their_models_are_selected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    own = str(tmp_path)
    settings = Settings(
        models=ModelSettings(transcriber=own),
        engine=EngineOptions(partner=own, watcher=own),
        speech=SpeechSettings(synthesizer=own),
    )
    found = {m.role: m.adapter for m in selected_models(settings) if isinstance(m, LocalModel)}
    assert found == {
        "transcriber": "qwen3_asr",
        "synthesizer": "qwen3_tts",
        "partner": "minicpmo",
        "watcher": "vlm",
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
