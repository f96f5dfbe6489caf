"""Compares each backend with a model of owners and fences: it has to do what the model predicts.

The hosts take any actions in any order. It follows that the writes of two owners never both succeed, that a claim has
one winner, and that an old fence never writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from antiphon.errors import SupersededError
from antiphon.store.sessions import ClaimRefusal, Hold, Host, SessionStore, StoredSession, TailChunk
from tests.store.sessions.backends import BackendKit, row

WAIT_S = 20
NAMES = ("a/1", "b/1", "b/2")
HOSTS = st.sampled_from(NAMES)
NUMBERS = itertools.count()
# A part of each row, which a backend need not write again.
UNCHANGED = " ".join(map(str, range(100)))


@dataclass
class Modelled:
    """What the backend should contain: the row, or None for a forgotten session, and its tail."""

    row: StoredSession | None
    fence: int
    tail: dict[int, bytes]


@pytest.fixture(scope="module")
def stores(backend: BackendKit) -> Iterator[dict[str, SessionStore]]:
    """Open a separate store for each host."""
    opened = {name: backend.open() for name in NAMES}
    yield opened
    for store in opened.values():
        store.close()


@pytest.mark.slow
def test_whatever_hosts_do_a_session_has_one_owner(stores: dict[str, SessionStore]) -> None:
    class Hosts(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.id = f"model-{next(NUMBERS)}"
            self.texts = itertools.count()
            self.alive = set(NAMES)
            self.model: Modelled | None = None
            # All holds that hosts have ever had. A host may use any of its old holds again at any time.
            self.holds = [Hold(self.id, name, 1) for name in NAMES]
            for name in NAMES:
                stores[name].renew(Host(name))

        def owns(self, hold: Hold) -> bool:
            """Return whether a write with this hold should succeed."""
            if self.model is None:
                return True
            return self.model.row is not None and self.model.row.hold == hold

        def write(self, hold: Hold, turn_kept: bool) -> bool:
            written = row(self.id, f"{UNCHANGED}{next(self.texts)}", hold.owner, hold.fence)
            failure = stores[hold.owner].put(written, turn_kept=turn_kept).exception(WAIT_S)
            assert isinstance(failure, SupersededError | None)
            if failure is None:
                tail = {} if turn_kept or self.model is None else self.model.tail
                self.model = Modelled(written, hold.fence, tail)
            return failure is None

        @rule(data=st.data(), turn_kept=st.booleans())
        def put(self, data: st.DataObject, turn_kept: bool) -> None:
            hold = data.draw(st.sampled_from(self.holds))
            expected = self.owns(hold)
            assert self.write(hold, turn_kept) == expected

        @rule(data=st.data(), at_ms=st.integers(0, 5))
        def append(self, data: st.DataObject, at_ms: int) -> None:
            hold = data.draw(st.sampled_from(self.holds))
            expected = self.owns(hold)
            chunk = TailChunk(at_ms, str(next(self.texts)).encode())
            failure = stores[hold.owner].append_tail(hold, chunk).exception(WAIT_S)
            assert (failure is None) == expected
            if self.model and expected:
                self.model.tail.setdefault(at_ms, chunk.data)

        @rule(data=st.data())
        def release(self, data: st.DataObject) -> None:
            hold = data.draw(st.sampled_from(self.holds))
            was = self.model.row if self.model else None
            # A release may be repeated, because the host may not know that it succeeded.
            released = was is not None and was.owner == "" and was.fence == hold.fence
            expected = self.owns(hold) or released
            assert (stores[hold.owner].release(hold).exception(WAIT_S) is None) == expected
            if self.model and was and expected:
                self.model.row = replace(was, owner="", restores=0)

        @rule(data=st.data())
        def forget(self, data: st.DataObject) -> None:
            hold = data.draw(st.sampled_from(self.holds))
            gone = self.model is not None and self.model.row is None and self.model.fence == hold.fence
            expected = self.owns(hold) or gone
            assert (stores[hold.owner].forget(hold).exception(WAIT_S) is None) == expected
            if self.model and expected:
                self.model = Modelled(None, hold.fence, {})

        @rule(name=HOSTS, seen=st.integers(0, 3))
        def claim(self, name: str, seen: int) -> None:
            """Claim with the current fence, or with an older one."""
            was = self.model.row if self.model else None
            fence = max(0, was.fence - seen) if was else seen
            found = stores[name].claim(self.id, name, fence)
            if was is None:
                assert found is ClaimRefusal.UNKNOWN
            elif fence != was.fence:
                assert found is ClaimRefusal.SUPERSEDED
            elif was.owner in self.alive - {name}:
                assert found is ClaimRefusal.OWNER_ALIVE
            else:
                assert found == replace(was, owner=name, fence=fence + 1, restores=was.restores + 1)
                assert self.model
                self.model.row, self.model.fence = found, fence + 1
                self.holds.append(found.hold)

        @rule(name=HOSTS, by=HOSTS)
        def die(self, name: str, by: str) -> None:
            stores[by].unregister(name)
            self.alive.discard(name)

        @rule(name=HOSTS)
        def live(self, name: str) -> None:
            stores[name].renew(Host(name))
            self.alive.add(name)

        @precondition(lambda self: self.model is not None)
        @invariant()
        def all_hosts_see_the_model(self) -> None:
            assert self.model
            for store in stores.values():
                assert store.get(self.id) == self.model.row
            tail = {chunk.at_ms: chunk.data for chunk in stores["a/1"].tail(self.id)}
            assert tail == self.model.tail
            assert {h.name for h in stores["a/1"].hosts()} & set(NAMES) == self.alive

    run_state_machine_as_test(
        Hosts, settings=settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
    )
