"""Where models run: `--placement` over `--device` and `--weights`."""

from __future__ import annotations

import pytest

from antiphon.errors import SettingsError
from antiphon.loading.placement import PLACEABLE_ROLES, Placement, placement
from antiphon.loading.selection import selected_models
from antiphon.roles import OTHER_NAMES
from antiphon.settings import EngineOptions, ModelSettings, Settings


def placed(text: str) -> Placement:
    return placement(Settings(models=ModelSettings(placement=text)))


def test_when_a_role_is_placed_then_its_model_runs_there_and_the_others_on_the_device() -> None:
    places = placed("conversation_model=cuda:0, transcriber=cuda:1,synthesizer=cpu/int8")
    assert places.of("conversation_model") == ("cuda:0", "auto")
    assert places.of("transcriber") == ("cuda:1", "auto")
    assert places.of("synthesizer") == ("cpu", "int8")
    assert places.of("language") == ("cpu", "auto")
    settings = Settings(
        models=ModelSettings(device="cuda", placement="video_model=cpu"), engine=EngineOptions(weights="bf16")
    )
    assert placement(settings).of("video_model") == ("cpu", "bf16")
    assert placement(settings).of("language") == ("cuda", "bf16")


def test_a_role_may_be_placed_by_its_other_name() -> None:
    for other, role in OTHER_NAMES.items():
        if role in PLACEABLE_ROLES:
            assert placed(f"{other}=cuda:1/bf16").of(role) == placed(f"{role}=cuda:1/bf16").of(role)
            assert placed(f"{other}=cuda:1").of(role) == ("cuda:1", "auto")


def test_when_a_talker_is_not_placed_then_it_runs_where_its_partner_does() -> None:
    assert placed("conversation_model=cuda:1/bf16").of("talker", like="conversation_model") == ("cuda:1", "bf16")
    assert placed("conversation_model=cuda:1/bf16,talker=cpu").of("talker", like="conversation_model") == (
        "cpu",
        "bf16",
    )
    assert placed("").of("talker", like="conversation_model") == ("cpu", "auto")


def test_when_a_role_is_placed_twice_then_the_last_device_and_the_last_weights_count() -> None:
    assert placed("language=cpu/int8,language=cuda").of("language") == ("cuda", "int8")


@pytest.mark.parametrize(
    "wrong",
    [
        "vad=cpu",
        "conversation_model",
        "conversation_model=tpu",
        "conversation_model=cuda:x",
        "conversation_model=cpu/int3",
        "=cpu",
        "talker=cpu/bf16",
    ],
)
def test_when_a_placement_is_wrong_then_selecting_models_names_it(wrong: str) -> None:
    with pytest.raises(SettingsError, match="--placement"):
        selected_models(Settings(models=ModelSettings(placement=wrong)))
