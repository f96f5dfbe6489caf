"""The functions of a call are carried out by the server, and applications see them as calls of a tool server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from bench import carrier
from websockets.asyncio.client import ClientConnection, connect

from antiphon.server.state import ServerState
from tests.server.scripted import Calling, serving
from tests.server.telephone.peers import KEY, ask, end, hold, settings, stream, until

Running = tuple[str, ServerState, Calling]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    model = Calling()
    with serving(settings(), partner=model) as (ws, state, _):
        yield ws, state, model


async def begun(socket: ClientConnection, state: ServerState) -> str:
    """Begin a call, and return its id."""
    await socket.send(carrier.start())
    await socket.send(carrier.media(b"\xff" * 160))
    while not state.sessions.legs:  # noqa: ASYNC110 (it is of the server's event loop)
        await asyncio.sleep(0.01)
    (id,) = state.sessions.legs
    return id


def test_the_model_hangs_up_and_the_application_sees_the_call_of_the_function(running: Running) -> None:
    ws, state, model = running

    async def main() -> None:
        async with stream(ws) as socket:
            id = await begun(socket, state)
            headers = {"Authorization": f"Bearer {KEY}"}
            async with connect(f"{ws}/v1/realtime?call_id={id}", additional_headers=headers) as app:
                caller = asyncio.create_task(hold(socket))
                await ask(app, 'call send_digits {"digits": "1x"}')
                item = (await until(app, "response.output_item.done"))["item"]
                assert (item["type"], item["server_label"], item["name"]) == ("mcp_call", "telephone", "send_digits")
                # The response to the result of the call, which the scripted model repeats.
                assert "'digits'" in (await until(app, "response.output_audio_transcript.done"))["transcript"]
                assert model.offered == ["hang_up", "send_digits"]
                # A function of the application with this name is its own.
                own = [{"type": "function", "name": "hang_up", "parameters": {"type": "object", "properties": {}}}]
                await app.send(json.dumps({"type": "session.update", "session": {"type": "realtime", "tools": own}}))
                await ask(app, "call hang_up {}")
                done = await until(app, "response.function_call_arguments.done")
                assert done["name"] == "hang_up"
                assert set(model.offered) == {"hang_up", "telephone__hang_up", "send_digits"}
                await app.send('{"type": "session.update", "session": {"type": "realtime", "tools": []}}')
                await ask(app, "call hang_up {}")
                await caller
                assert (socket.close_code, socket.close_reason) == (1000, "hang_up")
                await end(app)
                assert app.close_reason == "hang_up"

    asyncio.run(main())
    assert not state.sessions.calls
    assert not state.sessions.legs
    assert (
        'antiphon_telephone_calls_ended_total{carrier="twilio",reason="hang_up"} 1.0' in state.metrics.text().decode()
    )
