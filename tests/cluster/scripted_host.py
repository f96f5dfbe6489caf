"""A real process of `antiphon serve` with scripted models. It starts in a second, and its words are known.

    python -m tests.cluster.scripted_host [flags of antiphon serve]

Environment variables: ANTIPHON_TEST_PACE_S is the time that the model takes for each word, which is 0.3 s of audio.
With ANTIPHON_TEST_NATIVE, the conversation model is a native one; ANTIPHON_TEST_VIDEO is the name of the video model.
ANTIPHON_TEST_FINAL_S is the time that the transcriber takes for each window. ANTIPHON_TEST_SKEW_S is the time by which
the wall clock is ahead. ANTIPHON_TEST_TRANSCRIBER is a transcriber on other servers (`URL#MODEL`), used instead. When
the process would answer DEADLY, it exits at once.
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
from antiphon.contracts import Message, ResponseChunk
from antiphon.loading.loaded import LoadedModels
from antiphon.pipelines.native_conversation import NativeConversationModel
from antiphon.remote.address import TRANSCRIBER, parse_address
from antiphon.remote.transcriber.transcriber import RemoteTranscriber
from antiphon.server import run
from antiphon.settings import RemoteSettings
from tests.cluster.scripted_partners import EchoNative, Seer
from tests.scripted import ScriptedTranscriber
from tests.server.scripted import Echo, scripted_models

DEADLY = "the words that end it"


class Mortal(Echo):
    """Repeats the user's words, but exits the process when they are DEADLY."""

    async def respond(self, messages: Sequence[Message], *options: Any) -> AsyncGenerator[ResponseChunk, None]:
        if messages[-1].text == DEADLY:
            os._exit(1)
        async for chunk in super().respond(messages, *options):
            yield chunk


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
        partner = NativeConversationModel(EchoNative()) if os.environ.get("ANTIPHON_TEST_NATIVE") else echo
        models = replace(scripted_models(echo, transcriber), conversation_model=partner, video_model=seer)
        if not (named := os.environ.get("ANTIPHON_TEST_TRANSCRIBER", "")):
            return models
        address = parse_address(named, "--transcriber", schemes=TRANSCRIBER)
        elsewhere = RemoteTranscriber(address, "", RemoteSettings())
        return replace(models, transcriber=elsewhere, pools=(elsewhere.pool,))

    run.load = load  # type: ignore[assignment]
    # Model files are not checked, so they need not exist.
    preparation.require = lambda *_: None
    sys.exit(main(["serve", "--no-pull", "--profile", "light", *sys.argv[1:]]))
