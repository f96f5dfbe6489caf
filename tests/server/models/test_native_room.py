"""A native model without room for another conversation: clients are refused before the upgrade."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import InvalidStatus

from antiphon.adapters.spec import EngineModelOptions
from antiphon.admission.headroom import Headroom
from antiphon.engine.api import EngineSettings
from antiphon.server.state import ServerState
from tests.adapters import marked_minicpmo, tiny_minicpmo
from tests.admission.test_headroom import certificate
from tests.server.live.test_resume import dial
from tests.server.models.test_native_sound import Caller
from tests.server.scripted import serving

# Room for two conversations in each engine.
KV_BYTES, ROOM = 9_000_000, 2


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ServerState]]:
    options = EngineModelOptions(EngineSettings(kv_bytes=KV_BYTES), weights="fp32", threads=1)
    models = marked_minicpmo.served(tiny_minicpmo.write(tmp_path_factory.mktemp("minicpmo")), options)
    with serving(models=models) as (url, state, _):
        yield url, state
    models.close()


async def knock(url: str) -> ClientConnection | int:
    """Return the socket if it was admitted, or the status that refused it."""
    try:
        return await dial(url)
    except InvalidStatus as refused:
        return refused.response.status_code if int(refused.response.headers["Retry-After"]) > 0 else 0


def test_when_the_kv_has_no_room_then_a_burst_is_refused_before_the_upgrade(small: tuple[str, ServerState]) -> None:
    url, state = small

    async def main() -> None:
        assert state.native is not None
        assert state.native.load().room == ROOM
        # These sessions open their conversations only when they are configured.
        found = await asyncio.gather(*(knock(f"{url}/v1/realtime?model=default") for _ in range(3 * ROOM)))
        inside = [one for one in found if isinstance(one, ClientConnection)]
        assert len(inside) == ROOM
        assert [one for one in found if not isinstance(one, ClientConnection)] == [503] * 2 * ROOM
        assert state.admission.by_kind == {"native": ROOM}
        await asyncio.gather(*(socket.close() for socket in inside))
        while state.admission.num_sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_certificates_number_of_native_sessions_is_admitted(small: tuple[str, ServerState]) -> None:
    url, state = small
    admission = state.admission

    async def main() -> None:
        # A conversation in the dialect of full duplex is of the same kind.
        first = Caller(0)
        await first.open(url)
        assert admission.by_kind == {"native": 1}
        assert await knock(f"{url}/v1/realtime?model=default") == 503
        await first.socket.send(json.dumps({"type": "session.end"}))
        await first.socket.close()
        while admission.num_sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    before = admission.headroom
    admission.headroom, admission.asks_headroom = Headroom(certificate(native=1), 256), True
    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        admission.headroom, admission.asks_headroom = before, False


def test_a_session_tells_its_units_in_its_last_line(
    small: tuple[str, ServerState], caplog: pytest.LogCaptureFixture
) -> None:
    url, _ = small

    async def main() -> None:
        caller = Caller(1)
        await caller.open(url)
        # A unit that comes twice is ahead of its time.
        for _ in range(3):
            await caller.say(0)
        await caller.hear(3)
        await caller.socket.send(json.dumps({"type": "session.end"}))
        await caller.socket.close()
        while not lines():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def lines() -> list[logging.LogRecord]:
        return [r for r in caplog.records if getattr(r, "event", "") == "session ended"]

    with caplog.at_level(logging.INFO, "antiphon.server.live.session"):
        asyncio.run(asyncio.wait_for(main(), 60))
    fields = lines()[0].fields  # type: ignore[attr-defined]
    assert fields["units"] >= 3
    assert fields["early_units"] >= 1
    assert fields["unit_ms"] > 0


def test_when_conversations_fill_the_kv_then_a_full_duplex_client_is_refused_before_the_upgrade(
    small: tuple[str, ServerState],
) -> None:
    url, state = small

    async def main() -> None:
        callers = [Caller(number) for number in range(ROOM)]
        for caller in callers:
            await caller.open(url)
            await caller.say(0)
        await asyncio.gather(*(caller.hear(1) for caller in callers))
        assert state.native is not None
        assert (state.native.load().conversations, state.native.load().room) == (ROOM, 0)
        assert [await knock(f"{url}{path}") for path in ("/v1/duplex", "/v1/realtime?model=x")] == [503, 503]
        # Captions take no KV of the model.
        captions = await dial(f"{url}/v1/realtime?intent=transcription")
        await captions.close()
        # A client that comes back takes its own place.
        await callers[0].come_back(url)
        for caller in callers:
            await caller.say(1)
            await caller.hear(2)
            await caller.socket.close()

    asyncio.run(asyncio.wait_for(main(), 60))
