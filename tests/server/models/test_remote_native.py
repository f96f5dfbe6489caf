"""A native model on a second antiphon that is killed: what is lost is said, the conversation goes on without it, and it
returns when its server is back.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.loading.servers import with_fallback
from antiphon.pipelines.native_conversation import NativeConversationModel
from antiphon.remote.address import CONVERSATION_MODEL, parse_address
from antiphon.remote.conversation.native import RemoteNativeModel
from antiphon.settings import RemoteSettings, Settings, SpeechSettings
from tests.cluster.processes import SCRIPTED, Host
from tests.scripted import speech
from tests.server.clients import b64
from tests.server.models.test_remote_voices import LINE, TEXT, Says
from tests.server.scripted import Echo, scripted_models, serving
from tests.sessions.speech.scripted import Scripted

pytestmark = pytest.mark.server
LIMIT_S = 120
# Seconds after which the user asks again. An answer and its playback take less.
AGAIN_S = 6.0
SETTINGS = replace(Settings(), remote=RemoteSettings(fallback=True), speech=SpeechSettings(failure_line=LINE))


@pytest.fixture
def back(tmp_path: Path) -> Iterator[Host]:
    """Yield a second antiphon, a process with a native model."""
    host = Host("back", SCRIPTED, (), tmp_path, {"ANTIPHON_TEST_NATIVE": "endless"})
    host.start()
    host.wait()
    yield host
    if host.popen:
        host.kill()


class Client:
    """A client of full duplex that streams audio in real time, silence when it has nothing to say."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._to_say = socket, np.zeros(0, np.float32)
        # The answers, and the texts of the user's turns.
        self.answers, self.heard, self.num_audio = list[str](), list[str](), 0

    def say(self, first: int, count: int) -> None:
        self._to_say = np.concatenate((self._to_say, speech(first, count)))

    async def speak(self) -> None:
        """Send audio in pieces of a fifth of a second, until cancelled."""
        size, since_s, number = SAMPLE_RATE_HZ // 5, time.monotonic(), 0
        while True:
            part, self._to_say = self._to_say[:size], self._to_say[size:]
            pcm = np.concatenate((part, np.zeros(size - len(part), np.float32)))
            await self._socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": b64(pcm)}))
            number += 1
            await asyncio.sleep(max(0.0, since_s + number / 5 - time.monotonic()))

    async def read(self) -> None:
        """Read events, until cancelled."""
        async for frame in self._socket:
            self.take(json.loads(frame))

    def take(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "response.created":
                self.answers.append("")
            case "response.output_audio_transcript.delta":
                self.answers[-1] += event["delta"]
            case "response.output_audio.delta":
                self.num_audio += 1
            case "conversation.item.input_audio_transcription.completed":
                self.heard.append(event["transcript"])
            case "error":
                raise AssertionError(event)

    async def until(self, done: Any) -> None:
        while not done():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.heavy
def test_when_the_server_is_killed_in_an_answer_then_it_is_said_and_the_cascade_answers_until_it_is_back(
    back: Host,
) -> None:
    language, voice = Says(), Scripted()
    address = parse_address(f"{back.ws}/v1/duplex#native", "--native", schemes=CONVERSATION_MODEL)
    remote = NativeConversationModel(RemoteNativeModel(address, "", SETTINGS.remote, LINE))
    model = with_fallback(SETTINGS, remote, language, voice)

    async def main(url: str) -> None:
        async with asyncio.timeout(LIMIT_S), connect(f"{url}/v1/duplex") as socket, asyncio.TaskGroup() as group:
            client = Client(socket)
            await socket.send(json.dumps({"type": "session.update", "session": {"instructions": "Be brief."}}))
            tasks = [group.create_task(client.speak()), group.create_task(client.read())]
            client.say(20, 3)
            await client.until(lambda: "I heard" in "".join(client.answers))
            back.kill()
            await client.until(lambda: client.answers[-1].endswith(LINE))
            client.say(30, 2)
            await client.until(lambda: client.answers[-1].strip() == TEXT and len(client.answers) == 2)
            # What was heard of the native model's answer is in the history.
            *_, question, heard, newest = language.asked[-1]
            assert (question, newest) == ("w20 w21 w22", "w30 w31")
            assert heard
            assert f"{client.answers[0]} ".startswith(f"{heard} ")
            back.start()
            await asyncio.to_thread(back.wait)
            # The native model returns in a pause. Until then, the cascade answers.
            while "I heard" not in client.answers[-1]:
                client.say(40, 2)
                with suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN_S):
                        await client.until(lambda: "I heard" in client.answers[-1])
            assert client.heard[-1] == "w40 w41"
            for task in tasks:
                task.cancel()

    with serving(models=replace(scripted_models(Echo()), conversation_model=model)) as (url, _, _):
        asyncio.run(main(url))
