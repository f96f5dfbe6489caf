"""A native model on other servers: another antiphon with a scripted native model, and scripted servers that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import AwayStep, ListenStep, NativeOptions, NativeStep, SpeakStep, Unit
from antiphon.errors import ModelError, RemoteError
from antiphon.pipelines.native_conversation import NativeConversationModel
from antiphon.remote.address import CONVERSATION_MODEL, parse_address
from antiphon.remote.conversation import native
from antiphon.remote.conversation.native import VOICE_HZ, RemoteNativeModel, RemoteNativeStream
from antiphon.settings import RemoteSettings
from tests.remote.scripted_sockets import Script, Server, scripted_sockets, tell
from tests.remote.synthesizer.scripted_voice import SAMPLES, TONE, base64
from tests.server.scripted import Echo, scripted_models, serving
from tests.traces.models import Native, said

LIMIT_S, LINE = 30, "One moment."
SILENCE = Unit(np.zeros(SAMPLE_RATE_HZ, np.float32))
Use = Callable[[RemoteNativeStream], Awaitable[Any]]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the URL of another antiphon with a native model."""
    models = replace(scripted_models(Echo()), conversation_model=NativeConversationModel(Native()), names=("native",))
    with serving(models=models) as (found, _, _):
        yield found


async def say(text: str) -> Pcm:
    assert text == LINE
    return np.full(VOICE_HZ, 0.5, np.float32)


async def at(urls: Sequence[str], use: Use, *, has_fallback: bool = False) -> Any:
    address = parse_address(f"{','.join(urls)}#native", "--native", schemes=CONVERSATION_MODEL)
    model = await asyncio.to_thread(RemoteNativeModel, address, "", RemoteSettings(), LINE, say)
    model.has_fallback = has_fallback
    stream = await model.open(NativeOptions("Be brief.", recall=lambda: "user: Hello.\nassistant: Good"))
    try:
        return await use(stream)
    finally:
        stream.close()
        assert model.num_open == 0


def run(main: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, LIMIT_S))


def scripted(
    *servers: tuple[Script, ...],
    use: Callable[[RemoteNativeStream, Sequence[Server]], Awaitable[Any]],
    status: int | None = None,
    has_fallback: bool = False,
) -> Any:
    """Run `use` with a stream at servers that follow scripts, one for each unit."""

    async def main() -> Any:
        async with AsyncExitStack() as stack:
            found = [
                await stack.enter_async_context(scripted_sockets("input_audio_buffer.append", *scripts))
                for scripts in servers
            ]
            for server in found:
                server.greeting, server.status = {"type": "session.created", "session": {}}, status
            urls = [f"{server.url}/duplex" for server in found]
            return await at(urls, lambda stream: use(stream, found), has_fallback=has_fallback)

    return run(main())


async def units(stream: RemoteNativeStream, pcm: Pcm, count: int) -> list[NativeStep]:
    """Feed audio in units, then silence, and return the steps."""
    found = list[NativeStep]()
    for number in range(count):
        part = pcm[number * SAMPLE_RATE_HZ : (number + 1) * SAMPLE_RATE_HZ]
        await stream.append(Unit(np.concatenate((part, np.zeros(SAMPLE_RATE_HZ - len(part), np.float32)))))
        found.append(await stream.step())
    return found


def test_a_question_is_answered_by_the_model_of_another_antiphon(url: str) -> None:
    async def use(stream: RemoteNativeStream) -> None:
        steps = await units(stream, said("what is the time", 0.5), 4)
        while not any(isinstance(step, SpeakStep) and step.end_of_turn for step in steps):
            steps += await units(stream, np.zeros(0, np.float32), 1)
        spoken = [step for step in steps if isinstance(step, SpeakStep)]
        assert "".join(step.text for step in spoken).strip()
        assert sum(len(step.pcm) for step in spoken) > VOICE_HZ / 10

    run(at([f"{url}/v1"], use))


async def listens(socket: ServerConnection) -> None:
    await tell(socket, "response.listen", response={"status": "listening"})


def speaks(*words: str, response: str = "resp_1", ends: bool = False) -> Script:
    async def script(socket: ServerConnection) -> None:
        for word in words:
            await tell(socket, "response.output_audio_transcript.delta", response_id=response, delta=word)
            await tell(
                socket, "response.output_audio.delta", response_id=response, delta=base64(SAMPLES), sample_rate_hz=24000
            )
        if ends:
            await tell(socket, "response.done", response={"id": response, "status": "completed"})

    return script


async def dies(socket: ServerConnection) -> None:
    socket.transport.abort()


def test_each_step_has_what_the_server_said_since_the_last_one() -> None:
    async def use(stream: RemoteNativeStream, servers: Sequence[Server]) -> None:
        steps = await units(stream, np.zeros(0, np.float32), 4)
        assert isinstance(steps[0], ListenStep)
        texts = [(step.text, step.end_of_turn) for step in steps if isinstance(step, SpeakStep)]
        assert texts == [("Good ", False), ("morning.", True)]
        assert isinstance(steps[3], ListenStep)
        assert isinstance(steps[1], SpeakStep)
        np.testing.assert_allclose(steps[1].pcm, TONE, atol=1e-4)
        (opened,) = [m for m in servers[0].messages if m["type"] == "session.update"]
        assert opened["session"]["instructions"].startswith("Be brief.")
        assert servers[0].messages[1]["sample_rate_hz"] == SAMPLE_RATE_HZ

    scripted((listens, speaks("Good "), speaks("morning.", ends=True), listens), use=use)


def test_after_an_interruption_nothing_of_that_answer_is_used() -> None:
    async def use(stream: RemoteNativeStream, servers: Sequence[Server]) -> None:
        await units(stream, np.zeros(0, np.float32), 1)
        stream.interrupt()
        steps = await units(stream, np.zeros(0, np.float32), 2)
        assert isinstance(steps[0], ListenStep)
        assert isinstance(steps[1], SpeakStep)
        assert steps[1].text == "Yes?"
        assert "barge_in" in [message["type"] for message in servers[0].messages]

    async def late(socket: ServerConnection) -> None:
        await speaks("morning.", ends=True)(socket)
        await listens(socket)

    scripted((speaks("Good "), late, speaks("Yes?", response="resp_2")), use=use)


def test_a_model_that_has_to_speak_is_asked_to() -> None:
    async def use(stream: RemoteNativeStream, servers: Sequence[Server]) -> None:
        await stream.append(replace(SILENCE, text="Hello.", frames=(b"\x89PNG",)))
        await stream.step(must_speak=True)
        kinds = [message["type"] for message in servers[0].messages]
        assert kinds[1:] == ["conversation.item.create", "input_audio_buffer.append", "response.create"]
        assert servers[0].messages[2]["video_frames"]

    scripted((listens,), use=use)


def test_when_a_server_dies_then_it_is_said_and_another_one_goes_on() -> None:
    async def use(stream: RemoteNativeStream, servers: Sequence[Server]) -> None:
        steps = await units(stream, np.zeros(0, np.float32), 2)
        assert isinstance(steps[0], SpeakStep)
        assert isinstance(steps[1], SpeakStep)
        assert steps[1].text.strip() == LINE
        assert steps[1].end_of_turn
        assert len(steps[1].pcm) == VOICE_HZ
        servers[0].scripts = (dies,)
        while not servers[1].messages:
            servers[0].status = 500
            await units(stream, np.zeros(0, np.float32), 1)
            await asyncio.sleep(0.01)
        assert servers[1].messages[0]["session"]["instructions"].endswith("user: Hello.\nassistant: Good")
        steps = await units(stream, np.zeros(0, np.float32), 2)
        assert any(isinstance(step, SpeakStep) and step.text == "Here." for step in steps)

    scripted((speaks("Good "), dies), (speaks("Here."),), use=use)


def test_when_no_server_is_left_then_the_model_listens_and_the_session_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "RETRY_S", 0.05)

    async def use(stream: RemoteNativeStream, servers: Sequence[Server]) -> None:
        servers[0].status = 500
        assert all(isinstance(step, ListenStep) for step in await units(stream, np.zeros(0, np.float32), 3))
        await asyncio.sleep(0.2)
        assert all(isinstance(step, ListenStep) for step in await units(stream, np.zeros(0, np.float32), 3))

    scripted((dies,), use=use)


def test_with_a_fallback_the_steps_say_that_no_server_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "RETRY_S", 0.01)

    async def use(stream: RemoteNativeStream, servers: Sequence[Server]) -> None:
        # The conversation begins without a server.
        assert await units(stream, np.zeros(0, np.float32), 2) == [AwayStep(), AwayStep()]
        servers[0].status = None
        while (await units(stream, np.zeros(0, np.float32), 1)) == [AwayStep()]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        steps = await units(stream, np.zeros(0, np.float32), 1)
        assert isinstance(steps[0], SpeakStep)
        servers[0].status = 500
        steps = await units(stream, np.zeros(0, np.float32), 2)
        assert isinstance(steps[0], SpeakStep)
        assert steps[0].text.strip() == LINE
        assert steps[1] == AwayStep()

    scripted((listens, speaks("Good "), dies), use=use, status=500, has_fallback=True)


def test_a_server_of_another_kind_or_without_the_model_is_refused(url: str) -> None:
    async def use(stream: RemoteNativeStream, servers: Sequence[Server]) -> None:
        for greeting, kind in (
            ({"type": "error", "error": {"message": "no such model"}}, ModelError),
            ({"type": "info"}, RemoteError),
        ):
            servers[0].greeting = greeting
            with pytest.raises(kind):
                await stream.connect()

    scripted((listens,), use=use)
