"""The memory for a model's encoded sound and images, of which each key has an equal share."""

from __future__ import annotations

import pytest
import torch

from antiphon.errors import Refused
from antiphon.modeling.media_rows import AudioWindow, HeldMedia, MediaBudget, MediaRows
from antiphon.shares.places import current_owner

LIMIT = 1000


def held_by(key: str, budget: MediaBudget, num_bytes: int) -> HeldMedia:
    token = current_owner.set(key)
    media = HeldMedia(budget)
    current_owner.reset(token)
    media.put(AudioWindow(key, 0, b""), MediaRows(torch.zeros(num_bytes, dtype=torch.uint8)))
    return media


def test_when_a_key_holds_all_of_the_budget_then_others_have_their_parts_still() -> None:
    budget = MediaBudget()
    greedy, modest = held_by("a", budget, LIMIT), held_by("b", budget, 100)
    with pytest.raises(Refused):
        greedy.make_room(LIMIT, greedy.rows)
    modest.make_room(LIMIT, modest.rows)
    modest.put(AudioWindow("b", 1, b""), MediaRows(torch.zeros(400, dtype=torch.uint8)))
    with pytest.raises(Refused, match="conversations hold 0 of 0 MB"):
        modest.make_room(LIMIT, modest.rows)
    # A new key gets its share, too.
    held_by("c", budget, 0).make_room(LIMIT, ())
    modest.make_room(0, ())
    # Unused parts are dropped to make room.
    greedy.make_room(LIMIT, ())
    assert (greedy.rows, budget.num_bytes) == ({}, 500)
    modest.close()
    assert budget.num_bytes == 0
