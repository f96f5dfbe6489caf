"""A real process of `antiphon serve` with scripted models. It starts in a second, and its words are known.

    python -m tests.cluster.scripted_host [flags of antiphon serve]

Environment variables: ANTIPHON_TEST_PACE_S is the time that the model takes for each word, which is 0.3 s of audio.
ANTIPHON_TEST_VIDEO is the name of the video model.
ANTIPHON_TEST_FINAL_S is the time that the transcriber takes for each window. ANTIPHON_TEST_SKEW_S is the time by which
the wall clock is ahead. ANTIPHON_TEST_TRANSCRIBER is a transcriber on other servers (`URL#MODEL`), used instead, and
ANTIPHON_TEST_PARTNER a conversation model on other servers. ANTIPHON_TEST_VOICES are the voices of a `ScriptedVoice`,
separated by commas; without them, there is no synthesizer. With ANTIPHON_TEST_NATIVE, the conversation model is a
native one, with `endless` one that does not stop by itself. When the process would answer DEADLY, it exits at once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import anyio

from antiphon.cli import preparation
from antiphon.cli.main import main
from antiphon.contracts import Message, NativeOptions, ResponseChunk, Unit
from antiphon.loading.loaded import LoadedModels
from antiphon.pipelines.native_conversation import NativeConversationModel
from antiphon.remote.address import CONVERSATION_MODEL, TRANSCRIBER, parse_address
from antiphon.remote.conversation.model import RemoteConversationModel
from antiphon.remote.transcriber.transcriber import RemoteTranscriber
from antiphon.server import run
from antiphon.settings import RemoteSettings
from tests.cluster.scripted_partners import EchoNative, Seer
from tests.cluster.scripted_voice import ScriptedVoice
from tests.forking import leave
from tests.scripted import ScriptedTranscriber
from tests.server.scripted import Calling, scripted_models
from tests.traces.models import Native, NativeTalk

DEADLY = "the words that end it"


class Mortal(Calling):
    """Repeats the user's words, or calls the function that they name, but exits the process when they are DEADLY."""

    async def respond(self, messages: Sequence[Message], *options: Any) -> AsyncGenerator[ResponseChunk, None]:
        if messages[-1].text == DEADLY:
            os._exit(1)
        async for chunk in super().respond(messages, *options):
            yield chunk


class _EndlessTalk(NativeTalk):
    async def append(self, unit: Unit) -> None:
        await super().append(unit)
        self.saying += ["again"] * (100 if self.saying else 0)


class Endless(Native):
    """A native model that goes on speaking until it is interrupted."""

    async def open(self, options: NativeOptions) -> NativeTalk:
        return _EndlessTalk(options, speaks=True)


def _after(seconds: float) -> anyio.Event:
    event = anyio.Event()
    asyncio.get_running_loop().call_later(seconds, event.set)
    return event


def skewed(ahead_s: float) -> None:
    """Set the wall clock ahead, for all code that reads it from now on."""
    now_s = time.time
    time.time = lambda: now_s() + ahead_s


if __name__ == "__main__":
    skewed(float(os.environ.get("ANTIPHON_TEST_SKEW_S", "0")))
    pace_s = float(os.environ.get("ANTIPHON_TEST_PACE_S", "0"))
    echo, transcriber = Mortal(pace_s), ScriptedTranscriber()
    if final_s := float(os.environ.get("ANTIPHON_TEST_FINAL_S", "0")):
        transcriber.gate = lambda _: _after(final_s)

    def load(*_: object) -> LoadedModels:
        """Return the scripted models, perhaps with a transcriber on other servers. Called in a thread."""
        seer = Seer(pace_s, os.environ.get("ANTIPHON_TEST_VIDEO", "seer"))
        models = replace(scripted_models(echo, transcriber), video_model=seer)
        if voices := os.environ.get("ANTIPHON_TEST_VOICES", ""):
            models = replace(models, synthesizer=ScriptedVoice(echo.pace_s, tuple(voices.split(","))))
        if kind := os.environ.get("ANTIPHON_TEST_NATIVE"):
            native = NativeConversationModel(Endless() if kind == "endless" else EchoNative())
            models = replace(models, conversation_model=native, names=("native",))
        if named := os.environ.get("ANTIPHON_TEST_TRANSCRIBER", ""):
            address = parse_address(named, "--transcriber", schemes=TRANSCRIBER)
            ears = RemoteTranscriber(address, "", RemoteSettings())
            models = replace(models, transcriber=ears, pools=(ears.pool,))
        if named := os.environ.get("ANTIPHON_TEST_PARTNER", ""):
            address = parse_address(named, "--conversation-model", schemes=CONVERSATION_MODEL)
            partner = RemoteConversationModel(address, "", RemoteSettings())
            models = replace(models, conversation_model=partner, pools=(*models.pools, partner.pool))
        return models

    run.load = load  # type: ignore[assignment]
    # Model files are not checked, so they need not exist.
    preparation.require = lambda *_: None
    leave(main(["serve", "--no-pull", "--profile", "light", *sys.argv[1:]]))
