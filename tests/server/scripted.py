"""A server in a thread of this process, with scripted models: its sockets are real, and its audio is known exactly."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import uvicorn

from antiphon.contracts import (
    ConversationProfile,
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    VoiceOptions,
)
from antiphon.contracts.speaker import SpeakerModel
from antiphon.engine.lane import Lane
from antiphon.errors import ModelError
from antiphon.events.tools import Tool
from antiphon.events.words import Word
from antiphon.loading.loaded import LoadedModels
from antiphon.server.app import build
from antiphon.server.drain import drain
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.server.telephone.audiosocket import open_audiosocket
from antiphon.server.wyoming.listening import open_wyoming
from antiphon.settings import Settings
from tests.scripted import ScriptedDetector, ScriptedTranscriber

RATE_HZ = 24_000
WORD_S = 0.3


class Echo:
    """A conversation model that repeats the last message, one word and its audio at a time, each after `pace_s`.

    The message "fail" makes it raise ModelError, and "crash" an exception that no contract allows.
    """

    native = None

    def __init__(self, pace_s: float = 0.0) -> None:
        self.pace_s = pace_s
        self.profile = ConversationProfile("echo", RATE_HZ, ("one",))
        self.asked: list[tuple[str, ...]] = []

    async def open(self, owner: object = None) -> Echo:
        return self

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        return

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        self.asked.append(tuple(m.text for m in messages))
        if messages[-1].text == "fail":
            raise ModelError("it failed")
        if messages[-1].text == "crash":
            raise RuntimeError("it crashed")
        at_s = 0.0
        # Unlike the audio of a scripted user, so that the echo guard does not confuse the two.
        noise = np.random.default_rng(0).normal(0.0, 0.05, int(WORD_S * RATE_HZ)).astype(np.float32)
        for word in messages[-1].text.split():
            yield TextDelta(f" {word}" if at_s else word)
            await anyio.sleep(self.pace_s)
            if voice:
                yield ResponseAudio(noise, (Word(word, at_s, at_s + WORD_S, 1.0),))
            at_s += WORD_S
        yield ReplyDone("stop", len(messages), 0, 1)

    def close(self) -> None:
        return


class Calling(Echo):
    """A model that calls the function that the last message names: "call NAME ARGUMENTS". It repeats other messages.

    `offered` has the names of the functions that it was offered last.
    """

    def __init__(self, pace_s: float = 0.0) -> None:
        super().__init__(pace_s)
        self.offered: list[str] = []

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        self.offered = [tool.name for tool in options.tools]
        if messages[-1].text.startswith("call "):
            _, name, arguments = messages[-1].text.split(" ", 2)
            yield ToolCallStarted("call_1", name)
            yield ToolCallDelta(arguments)
            yield ReplyDone("stop", len(messages), 0, 1)
            return
        async for chunk in super().respond(messages, options, voice):
            yield chunk


def scripted_models(echo: Echo, transcriber: ScriptedTranscriber | None = None) -> LoadedModels:
    """Return scripted models for a server, with `echo` as the conversation model."""
    return LoadedModels(
        transcriber=transcriber or ScriptedTranscriber(),
        vad=ScriptedDetector(),
        turn_detector=None,
        language_model=None,
        synthesizer=None,
        image_reader=None,
        conversation_model=echo,
        video_model=None,
        names=("scripted",),
        lanes=(),
    )


@contextmanager
def serving(
    settings: Settings | None = None,
    transcriber: ScriptedTranscriber | None = None,
    lanes: tuple[Lane[Any, Any], ...] = (),
    speaker_model: SpeakerModel | None = None,
    partner: Echo | None = None,
    models: LoadedModels | None = None,
) -> Iterator[tuple[str, ServerState, Echo]]:
    """Yield a running server's ws:// URL, its state and its conversation model; drain the server afterwards.

    `models` replaces the models that the other arguments make.
    """
    echo = partner or Echo()
    models = models or replace(scripted_models(echo, transcriber), lanes=lanes, speaker_model=speaker_model)
    state = ServerState(settings or Settings(), Metrics(), models)
    open_wyoming(state)
    open_audiosocket(state)
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(build(state), log_config=None, access_log=False, ws="websockets-sansio", lifespan="off",
                            ws_max_size=64 << 20, ws_per_message_deflate=False)  # fmt: skip
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]

    loops: list[asyncio.AbstractEventLoop] = []
    listens = threading.Event()

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        async with anyio.create_task_group() as state.group:
            if state.tool_servers:
                state.group.start_soon(state.tool_servers.run)
            await state.group.start(state.listeners.serve)
            listens.set()
            await server.serve(sockets=[sock])
            state.group.cancel_scope.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    listens.wait(20)
    try:
        yield f"ws://127.0.0.1:{sock.getsockname()[1]}", state, echo
    finally:
        asyncio.run_coroutine_threadsafe(drain(state, 10), loops[0]).result(15)
        server.should_exit = True
        thread.join(20)
        sock.close()
        state.listeners.close()


def with_resume(**values: Any) -> Settings:
    """Return settings with other limits for resuming."""
    settings = Settings()
    return replace(settings, resume=replace(settings.resume, **values))
