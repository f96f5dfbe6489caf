"""Places of sessions and requests: which caller gets a place, the kind of the place, and when it is free again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import anyio
import pytest

from antiphon.errors import Refused
from antiphon.server.admission import Admission, current_place
from antiphon.server.credentials import Caller
from antiphon.server.memory import MIB, MemoryLedger
from antiphon.settings import Settings, load

ALICE, BOB, CAROL = Caller("alice"), Caller("bob"), Caller("carol")


def of(**settings: str) -> tuple[Admission, MemoryLedger]:
    loaded: Settings = load(settings)
    memory = MemoryLedger(loaded.memory)
    return Admission(loaded, memory), memory


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_place_is_held_while_its_session_runs() -> None:
    admission, _ = of()
    assert current_place() is None
    with admission.admit(ALICE, "captions"):
        place = current_place()
        assert place is not None
        assert (admission.num_sessions, admission.num_under_way, dict(admission.by_kind)) == (1, 1, {"captions": 1})
        # The session's first message shows another kind.
        place.becomes("duplex")
        assert dict(admission.by_kind) == {"duplex": 1}
    assert current_place() is None
    assert (admission.num_sessions, dict(admission.by_kind), admission.num_admitted) == (0, {}, 1)


def test_a_key_and_all_keys_have_their_most_places(stack: ExitStack) -> None:
    admission, _ = of(max_sessions="3", sessions_per_key="2")
    for caller in (ALICE, ALICE):
        stack.enter_context(admission.admit(caller, "speech"))
    with pytest.raises(Refused, match="this key holds 2 sessions") as own, admission.admit(ALICE, "speech"):
        pass
    assert own.value.by_own_limit
    stack.enter_context(admission.admit(BOB, "speech"))
    with pytest.raises(Refused, match="the server holds 3 sessions") as all_taken, admission.admit(CAROL, "speech"):
        pass
    assert not all_taken.value.by_own_limit
    assert admission.num_admitted == 3


def test_a_connection_that_has_said_nothing_has_a_place_apart(stack: ExitStack) -> None:
    admission, _ = of(max_sessions="1", sessions_per_key="1")
    stack.enter_context(admission.admit(ALICE, "duplex"))
    stack.enter_context(admission.await_first_event(ALICE))
    assert (admission.num_sessions, admission.num_under_way) == (2, 1)
    first = "connections without a first event"
    with pytest.raises(Refused, match=f"the server holds 1 {first}"), admission.await_first_event(BOB):
        pass


def test_a_server_that_drains_admits_nothing() -> None:
    admission, _ = of()
    admission.refuse_if_draining()
    admission.draining = True
    with pytest.raises(Refused, match="shutting down"), admission.admit(ALICE, "captions"):
        pass
    assert admission.num_sessions == 0


def test_a_key_that_holds_all_its_memory_is_refused() -> None:
    admission, memory = of(key_memory_mb="1", session_memory_mb="1")
    held = memory.open("alice")
    held.hold(MIB + 1)
    with pytest.raises(Refused, match="one key may hold"), admission.admit(ALICE, "captions"):
        pass
    with admission.admit(BOB, "captions"):
        assert admission.num_sessions == 1


def test_headroom_is_asked_once_it_is_watched(stack: ExitStack) -> None:
    admission, _ = of(burst_sessions="1")
    stack.enter_context(admission.admit(ALICE, "captions"))
    admission.asks_headroom = True
    # The first session did not count as young, since it was admitted without asking headroom.
    stack.enter_context(admission.admit(BOB, "captions"))
    with pytest.raises(Refused, match="just begun"), admission.admit(CAROL, "captions"):
        pass
    with pytest.raises(Refused, match="just begun"):
        admission.refuse_early(CAROL, "captions")
    # A session from another host is admitted.
    stack.enter_context(admission.admit(CAROL, "captions", resumes=True))
    admission.asks_headroom = False
    admission.refuse_early(CAROL, "captions")


def test_a_client_that_left_comes_back_in_its_place(stack: ExitStack) -> None:
    admission, _ = of(burst_sessions="1")
    admission.asks_headroom = True
    with admission.admit(ALICE, "captions"):
        pass
    stack.enter_context(admission.admit(BOB, "captions"))
    admission.refuse_early(ALICE, "captions")
    with pytest.raises(Refused):
        admission.refuse_early(CAROL, "captions")
    stack.enter_context(admission.admit(ALICE, "captions"))


def test_a_drain_waits_for_places_and_not_for_connections_without_a_first_event() -> None:
    async def main() -> None:
        admission, _ = of()
        await admission.all_left()
        places = ExitStack()
        places.enter_context(admission.admit(ALICE, "captions"))
        seen: list[str] = []

        async def wait() -> None:
            await admission.all_left()
            seen.append("left")

        with admission.await_first_event(BOB):
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                assert seen == []
                places.close()
                await anyio.wait_all_tasks_blocked()
                assert seen == ["left"]
                group.cancel_scope.cancel()

    anyio.run(main)


def test_the_load_is_not_known_without_a_certificate() -> None:
    assert of()[0].load() is None
