"""A cache in which keys have equal shares."""

from __future__ import annotations

from antiphon.shares.fair_cache import FairCache


def test_when_a_key_fills_the_cache_then_it_drives_out_its_own_entries_alone() -> None:
    cache = FairCache[str, int](4)
    cache.put("b", "x", 1)
    for number in range(10):
        cache.put("a", f"{number}", number)
    assert (cache.get("b", "x"), cache.get("a", "x"), len(cache)) == (1, None, 4)
    assert [number for number in range(10) if cache.get("a", f"{number}") is not None] == [7, 8, 9]


def test_when_an_entry_is_used_or_put_again_then_it_is_the_newest() -> None:
    cache = FairCache[str, int](2)
    cache.put("a", "old", 1)
    cache.put("a", "new", 2)
    assert cache.get("a", "old") == 1
    cache.put("a", "third", 3)
    assert (cache.get("a", "new"), cache.get("a", "old")) == (None, 1)
    cache.put("a", "third", 4)
    assert (cache.get("a", "third"), len(cache)) == (4, 2)
