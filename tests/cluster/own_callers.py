"""Callers of other kinds than `callers.py`: our client's conversation, in full duplex, and WebRTC calls at a door."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from antiphon.client import Client, ResponseEnds, ServerError
from antiphon.client.events import AudioToPlay, ConversationEvent, ResponseBegins, ResponseWords
from tests.cluster.callers import TURN_S
from tests.cluster.processes import Host
from tests.server.routes.test_calls import call
from tests.server.scripted import RATE_HZ, WORD_S

# Seconds; longer than any call here.
SILENCE = np.zeros(300 * 16_000, np.float32)
STOPPED = "output_audio_buffer.stopped"
SESSION = {"audio": {"input": {"turn_detection": {"type": "server_vad", "silence_duration_ms": 300}}}}


class OwnCaller:
    """A caller that uses our client, in full duplex. The client resumes its session by itself."""

    phase = "in full duplex"

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)
        self._num_turns = 0
        self._ended = set[str]()
        self._events = deque[ConversationEvent](maxlen=20)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        async with Client(self._url) as client, client.conversation() as self._conversation:
            yield

    async def turn(self) -> None:
        """Write, and listen to the answer. An answer that was cancelled with its host comes again.

        A client that does not listen gets further and further ahead of the playback that its host assumes. A drain then
        cuts the last answer, and no host completes it. Raises AssertionError for a second answer to an earlier turn.
        """
        self._num_turns += 1
        words = f"t{self._num_turns} one two three"
        await self._conversation.send_text(words)
        try:
            async with asyncio.timeout(TURN_S):
                await self._until_answered(words)
        except TimeoutError:
            raise AssertionError(f"{words!r} was not answered; it was reported {list(self._events)}") from None

    async def _until_answered(self, words: str) -> None:
        num_bytes = dict[str, int]()
        async for event in self._conversation:
            if not isinstance(event, AudioToPlay | ResponseWords):
                self._events.append(event)
            match event:
                case ServerError():
                    raise AssertionError(event)
                case ResponseBegins(response_id):
                    assert response_id not in num_bytes
                    num_bytes[response_id] = 0
                case AudioToPlay(response_id, pcm=pcm):
                    num_bytes[response_id] += len(pcm)
                case ResponseEnds(response_id, status, text):
                    assert response_id not in self._ended, event
                    self._ended.add(response_id)
                    if status == "completed":
                        assert text == words
                        audio_s = len(words.split()) * WORD_S
                        assert num_bytes[response_id] == 2 * round(audio_s * RATE_HZ)
                        await asyncio.sleep(audio_s)
                        return
                    assert status == "cancelled", event

    def check(self) -> None:
        """Do nothing: each turn has checked its answer."""


class RtcCaller:
    """A WebRTC call at a door. The door's hosts may end, and the call stays."""

    phase = "in a call"

    def __init__(self, door: Host) -> None:
        self._door = door
        self._said: list[str] = []

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        async with call(self._door, SILENCE, SESSION) as self._caller:  # type: ignore[arg-type]
            yield

    async def turn(self) -> None:
        """Write, and wait until the answer was played."""
        words = f"t{len(self._said)} one two"
        self._said.append(words)
        content = [{"type": "input_text", "text": words}]
        self._caller.say("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        self._caller.say("response.create")
        while (await self._caller.until("response.done"))["response"]["status"] != "completed":
            pass
        # If the host is replaced meanwhile, the answer may be played to its end before the next host completes it.
        if [kind for kind in self._caller.kinds if kind.startswith("output_audio_buffer")][-1:] != [STOPPED]:
            await self._caller.until(STOPPED)

    def check(self) -> None:
        """Raise AssertionError unless each turn was answered once, in order."""
        assert "error" not in self._caller.kinds
        done = [event["response"] for event in self._caller.seen if event["type"] == "response.done"]
        spoken = [each["output"][0]["content"][0]["transcript"] for each in done if each["status"] == "completed"]
        assert spoken == self._said
