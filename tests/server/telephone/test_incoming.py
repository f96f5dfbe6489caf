"""Incoming calls that an application decides about, with OpenAI's own client as the application."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from bench import carrier
from websockets.typing import Subprotocol

from antiphon.audio.pcm import to_pcm16
from antiphon.server.state import ServerState
from tests.scripted import speech
from tests.server.scripted import serving
from tests.server.telephone.peers import KEY, LIMIT_S, Site, end, settings, site, stream

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
EXAMPLE = Path(__file__).parents[3] / "examples" / "telephone" / "incoming.py"
Running = tuple[str, ServerState, Site, openai.OpenAI]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with site() as application:
        chosen = settings(
            telephone_webhook=f"{application.url}/calls",
            telephone_webhook_secret=SECRET,
            telephone_ring_s=6,
            telephone_dial="*",
        )
        with serving(chosen) as (ws, state, _):
            url = ws.replace("ws", "http", 1) + "/v1"
            client = openai.OpenAI(base_url=url, api_key=KEY, webhook_secret=SECRET, max_retries=0, timeout=LIMIT_S)
            yield ws, state, application, client


async def offered(running: Running) -> str:
    """Return the id of the next call that the application is asked about."""
    _, _, application, client = running
    received = await application.request(len(application.got))
    event = client.webhooks.unwrap(received.body, received.headers)
    assert event.type == "realtime.call.incoming"
    headers = {header.name: header.value for header in event.data.sip_headers}
    assert headers == {"Call-ID": "CA1", "order": "17"}
    return event.data.call_id


def test_openais_client_accepts_a_call_controls_it_and_hangs_up(running: Running) -> None:
    ws, state, _, client = running

    async def main() -> None:
        asked = asyncio.create_task(offered(running))
        async with stream(ws) as socket:
            await socket.send(carrier.start(order="17"))
            id = await asked
            with pytest.raises(openai.NotFoundError, match="nobody"):
                await asyncio.to_thread(
                    client.realtime.calls.accept, id, type="realtime", audio={"output": {"voice": "nobody"}}
                )
            await asyncio.to_thread(client.realtime.calls.accept, id, type="realtime", instructions="Sell flowers.")
            (live,) = state.sessions.calls.values()
            assert "Sell flowers." in str(bytes(live.wire.opening.session))  # type: ignore[attr-defined]

            def control() -> str:
                # The call has begun when `accept` returns.
                with client.realtime.connect(call_id=id) as connection:
                    connection.session.update(session={"type": "realtime", "instructions": "Sell more."})
                    for event in connection:
                        if event.type == "session.updated":
                            return str(event.session.instructions)  # type: ignore[union-attr]
                return ""

            controlled = asyncio.create_task(asyncio.to_thread(control))
            await socket.send(carrier.media(b"\xff" * 160))
            assert await controlled == "Sell more."
            with pytest.raises(openai.BadRequestError, match="cannot be transferred"):
                await asyncio.to_thread(client.realtime.calls.refer, id, target_uri="tel:+49301")
            with pytest.raises(openai.NotFoundError):
                await asyncio.to_thread(client.realtime.calls.accept, id, type="realtime")
            await asyncio.to_thread(client.realtime.calls.hangup, id)
            assert await end(socket) == (1000, "hung_up")

    asyncio.run(main())


def test_openais_client_rejects_a_call(running: Running) -> None:
    ws, state, _, client = running

    async def main() -> None:
        for decide in (
            lambda id: client.realtime.calls.reject(id, status_code=486),
            lambda id: client.realtime.calls.hangup(id),
        ):
            asked = asyncio.create_task(offered(running))
            async with stream(ws) as socket:
                await socket.send(carrier.start(order="17"))
                id = await asked
                with pytest.raises(openai.BadRequestError):
                    await asyncio.to_thread(client.realtime.calls.reject, id, status_code=7)
                await asyncio.to_thread(decide, id)
                assert await end(socket) == (1000, "rejected")
            with pytest.raises(openai.NotFoundError):
                await asyncio.to_thread(client.realtime.calls.reject, id)

    asyncio.run(main())
    assert not state.sessions.calls


def test_a_caller_who_gives_up_ends_the_offer_and_another_key_does_not_see_it(running: Running) -> None:
    ws, _, _, client = running

    async def main() -> None:
        asked = asyncio.create_task(offered(running))
        async with stream(ws) as socket:
            await socket.send(carrier.start(order="17"))
            id = await asked
            other = client.with_options(api_key="key-2")
            with pytest.raises(openai.AuthenticationError):
                await asyncio.to_thread(other.realtime.calls.accept, id, type="realtime")
            await socket.send(carrier.stop())
            await end(socket)
        with pytest.raises(openai.NotFoundError):
            await asyncio.to_thread(client.realtime.calls.accept, id, type="realtime")

    asyncio.run(main())


def test_a_call_with_a_client_secret_is_not_asked_about(running: Running) -> None:
    ws, state, application, _ = running
    url = ws.replace("ws", "http", 1)
    wanted = {"session": {"type": "realtime", "instructions": "Be kind."}}
    made = httpx.post(f"{url}/v1/realtime/client_secrets", json=wanted, headers={"Authorization": f"Bearer {KEY}"})
    count = len(application.got)

    async def main() -> None:
        async with stream(ws, f"/v1/telephone/media/{made.json()['value']}") as socket:
            await socket.send(carrier.start())
            while not state.sessions.calls:  # noqa: ASYNC110 (it is of the server's event loop)
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert len(application.got) == count


def test_an_application_that_fails_is_asked_again_and_one_that_never_decides_rejects() -> None:
    answers = iter([500, 200])

    async def main(ws: str) -> None:
        async with stream(ws) as socket:
            await socket.send(carrier.start())
            # What the caller says meanwhile is not kept.
            for number in range(20):
                await socket.send(carrier.media(b"\x00" * 160, number))
            assert await end(socket) == (1000, "rejected")

    with (
        site(lambda _: (next(answers), b"")) as application,
        serving(settings(telephone_webhook=application.url, telephone_ring_s=1.2)) as (ws, _, _),
    ):
        asyncio.run(main(ws))
    first, second = (json.loads(request.body) for request in application.got)
    assert (first["id"], first["data"]) == (second["id"], second["data"])
    # Without a secret, nothing is signed.
    assert "webhook-signature" not in application.got[0].headers


def test_the_example_rejects_a_blocked_number_and_follows_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    chosen = settings(telephone_webhook=f"http://127.0.0.1:{port}/calls", telephone_webhook_secret=SECRET)
    with serving(chosen) as (ws, state, _):
        url = ws.replace("ws", "http", 1) + "/v1"
        flags = ("--url", url, "--key", KEY, "--port", str(port), "--block", "+4930666")
        command = [sys.executable, "-u", str(EXAMPLE), *flags]
        environment = os.environ | {"OPENAI_WEBHOOK_SECRET": SECRET}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, text=True, env=environment, **pipes) as example:
            limit = threading.Timer(2 * LIMIT_S, example.kill)
            limit.start()
            try:
                assert "waits" in line_with(example, "waits")
                assert asyncio.run(rejected(ws, "+4930666"))
                assert asyncio.run(followed(ws, state, example, "+4930111")).endswith("model: w1 w2\n")
            finally:
                limit.cancel()
                example.kill()


def line_with(example: subprocess.Popen[str], text: str) -> str:
    """Return the next line of a program that has this text; "" if the program ends before."""
    assert example.stdout
    return next((line for line in example.stdout if text in line), "")


async def rejected(ws: str, number: str) -> bool:
    """Call with this number over a switch. Return whether the call was rejected."""
    async with stream(ws, subprotocols=[Subprotocol("audio.jambonz.org")]) as phone:
        await phone.send(json.dumps({"callSid": "c1", "from": number, "sampleRate": 16000}))
        return await end(phone) == (1000, "rejected")


async def followed(ws: str, state: ServerState, example: subprocess.Popen[str], number: str) -> str:
    """Call with this number, and speak when the example follows the call. Return the line with the answer."""
    async with stream(ws, subprotocols=[Subprotocol("audio.jambonz.org")]) as phone:
        await phone.send(json.dumps({"callSid": "c1", "from": number, "sampleRate": 16000}))
        while not state.sessions.legs:  # noqa: ASYNC110 (it is of the server's event loop)
            await asyncio.sleep(0.01)
        # The first audio lets the session begin.
        await phone.send(bytes(640))
        await asyncio.to_thread(line_with, example, "begun")
        data = to_pcm16(speech(1, 2, 31))
        for at in range(0, len(data), 640):
            await phone.send(data[at : at + 640])
        return await asyncio.to_thread(line_with, example, "model:")
