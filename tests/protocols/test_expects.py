"""The extension `expects` of turn detection."""

from __future__ import annotations

import msgspec
import pytest

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.realtime.turn_fields import TurnDetection, TurnDetectionFields, check_turn_detection


def checked(given: dict[str, object], before: TurnDetection | None = None) -> TurnDetection:
    shown = check_turn_detection(msgspec.convert(given, TurnDetectionFields), before, "turn_detection")
    assert shown
    return shown


@pytest.mark.parametrize("expects", ["digits", "yes_no", "open"])
def test_it_holds_until_it_is_set_again(expects: str) -> None:
    shown = checked({"type": "semantic_vad", "expects": expects})
    assert shown.config().expects == expects
    later = checked({"eagerness": "low"}, shown)
    assert (later.config().expects, later.config().eagerness) == (expects, "low")
    assert checked({"expects": None}, later).config().expects is None


def test_a_client_that_has_not_set_it_does_not_see_it() -> None:
    assert "expects" not in msgspec.to_builtins(checked({"type": "semantic_vad"}))


def test_another_value_or_another_type_of_turn_detection_is_refused() -> None:
    with pytest.raises(RemoteProtocolError) as wrong:
        checked({"type": "semantic_vad", "expects": "date"})
    assert (wrong.value.code, wrong.value.param) == ("invalid_value", "turn_detection.expects")
    with pytest.raises(RemoteProtocolError) as other:
        checked({"type": "server_vad", "expects": "digits"})
    assert other.value.param == "turn_detection.expects"
    switched = checked({"type": "server_vad"}, checked({"type": "semantic_vad", "expects": "digits"}))
    assert switched.config().expects is None
