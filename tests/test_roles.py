"""Each role has a name for the program, a name for users, and aliases that are accepted."""

from __future__ import annotations

from typing import get_args

import pytest

from antiphon.adapters.spec import Spec
from antiphon.roles import OTHER_NAMES, ModelRole, role_named, shown_role


def test_metrics_and_logs_call_roles_as_they_always_did() -> None:
    names = ["transcriber", "vad", "turn", "backchannel", "speaker", "language", "synthesizer"]
    assert [shown_role(role) for role in get_args(ModelRole)] == [*names, "partner", "watcher", "reader", "fallback"]


@pytest.mark.parametrize("names", [("partner", "conversation_model"), ("watcher", "video_model")])
def test_both_names_of_a_role_are_the_same_role(names: tuple[str, str]) -> None:
    assert len({role_named(name) for name in names}) == 1


def test_a_spec_may_say_its_role_by_another_name() -> None:
    assert OTHER_NAMES
    for other, role in OTHER_NAMES.items():
        assert (role_named(role), role_named(other)) == (role, role)
        assert Spec(other, "module:Class", "lane").role == role  # type: ignore[arg-type]


def test_what_is_no_role_is_refused() -> None:
    for name in ("", "interlocutor", "shown"):
        with pytest.raises(ValueError, match=f"there is no role '{name}'"):
            Spec(name, "module:Class", "lane")  # type: ignore[arg-type]
