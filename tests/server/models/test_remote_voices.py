"""Voices and conversation models on other servers, in a real server's conversations: faults end no session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal

from antiphon.audio.wav import wav_header
from antiphon.contracts import (
    ConversationModel,
    LanguageLoad,
    LanguageProfile,
    Message,
    Reply,
    ReplyDone,
    ReplyOptions,
    Synthesizer,
    TextDelta,
)
from antiphon.events.tools import Tool
from antiphon.pipelines.cascade import Cascade
from antiphon.pipelines.fallback import ConversationWithFallback
from antiphon.pipelines.reading import ReadingVoice
from antiphon.remote.address import CONVERSATION_MODEL, parse_address
from antiphon.remote.conversation.model import RemoteConversationModel
from antiphon.remote.synthesizer.synthesizer import RemoteSynthesizer
from antiphon.settings import RemoteSettings
from tests.remote.chat.scripted_server import Script, ScriptedServer, fails, hangs, scripted_server
from tests.remote.synthesizer.scripted_voice import RATE_HZ, SAMPLES, speaks, wav
from tests.remote.synthesizer.test_synthesizer import AFTER, BEFORE
from tests.server.conversations import ConversationClient, talk
from tests.server.scripted import Echo, scripted_models, serving
from tests.sessions.speech.scripted import Scripted

TEXT = "Here I am. What is next?"
LINE = "One moment."


class Says:
    """A language model that always says the same."""

    def __init__(self) -> None:
        self.profile = LanguageProfile("says", 4096)
        self.asked: list[tuple[str, ...]] = []

    async def open(self, owner: object = None) -> Says:
        return self

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        return

    async def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        self.asked.append(tuple(m.text for m in messages))
        for word in TEXT.split(" "):
            yield TextDelta(word + " ")
            await asyncio.sleep(0)
        yield ReplyDone("stop", 1, 0, 1)

    def load(self) -> LanguageLoad:
        return LanguageLoad(0, 0, 0, 0, 0, 0)

    def close(self, *, keep: bool = False) -> None:
        return


@contextmanager
def front(synthesizer: Synthesizer | None = None, partner: ConversationModel | None = None) -> Iterator[Any]:
    """Yield a server with these models, with the attribute `ws` of a process."""
    models = replace(
        scripted_models(Echo()), conversation_model=partner, language_model=Says(), synthesizer=synthesizer
    )
    with serving(models=models) as (url, _, _):
        yield SimpleNamespace(ws=url)


@pytest.fixture(scope="module")
def backend() -> Iterator[ScriptedServer]:
    """Yield a scripted voice's server in its own thread. A test sets its `scripts`."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(scripted_server(hangs)) as server:
        yield server


@pytest.fixture(scope="module")
def server(backend: ScriptedServer) -> Iterator[Any]:
    address = parse_address(f"{backend.url}#clever", "--synthesizer")
    remote = RemoteSettings(remote_answer_s=0.6, remote_token_s=0.3)
    with front(ReadingVoice(RemoteSynthesizer(address, "", (), remote))) as found:
        yield found


async def response(wire: ConversationClient, text: str = "Hello?") -> dict[str, Any]:
    await wire.text(text)
    await wire.say("response.create")
    done: dict[str, Any] = (await wire.until("response.done"))["response"]
    return done


FAULTS: dict[str, Script] = {
    **{name: script for name, (script, _) in BEFORE.items()},
    **{name: script for name, (script, _) in AFTER.items()},
    "has no room for long": fails(429, retry_after="2.5"),
    "knows no such model": fails(404, "no such model"),
    "does not take the key": fails(401),
}
KEPT = ("closes", "hangs", "fails", "a page", "a wrong rate", "stops", "half a WAV", "never ends",
        "has no room for long", "knows no such model", "does not take the key")  # fmt: skip


@pytest.mark.parametrize("fault", KEPT)
def test_a_fault_of_a_voice_leaves_the_text_and_the_next_answer_is_spoken(
    server: Any, backend: ScriptedServer, fault: str
) -> None:
    async def main() -> None:
        backend.begin([FAULTS[fault]])
        async with talk(server) as wire:
            done = await response(wire)
            assert done["status"] == "failed"
            assert done["output"][0]["content"][0]["transcript"].strip() == TEXT
            backend.begin([wav])
            while True:
                # The server may be left alone for a while.
                if (await response(wire))["status"] == "completed":
                    break
                await asyncio.sleep(0.1)
            assert len(wire.spoken(wire.seen[-1]["response"]["id"])) == 2 * len(SAMPLES)

    asyncio.run(main())


def test_a_voice_that_dies_within_a_sentence_goes_on_with_the_next_words(server: Any, backend: ScriptedServer) -> None:
    """The voice dies once, in the first sentence, after about two of its words."""

    async def main() -> None:
        half_second = np.resize(np.frombuffer(SAMPLES, "<i2"), RATE_HZ // 2).tobytes()
        cut = speaks("audio/wav", wav_header(RATE_HZ), half_second, complete=False)
        backend.begin([cut, wav])
        async with talk(server) as wire:
            assert (await response(wire))["status"] == "completed"
            asked = [request.body["input"] for request in backend.asked]
            assert asked[0] == "Here I am."
            assert "am." in asked[1:]

    asyncio.run(main())


def test_an_interrupted_answer_is_kept_as_it_was_heard(server: Any, backend: ScriptedServer) -> None:
    tone = np.resize(np.frombuffer(SAMPLES, "<i2"), RATE_HZ).tobytes()

    async def main() -> None:
        backend.begin([speaks("audio/wav", wav_header(RATE_HZ), tone)])
        async with talk(server) as wire:
            item = (await response(wire))["output"][0]["id"]
            await wire.say("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=720)
            await wire.until("conversation.item.truncated")
            await wire.say("conversation.item.retrieve", item_id=item)
            kept = (await wire.until("conversation.item.retrieved"))["item"]["content"][0]["transcript"]
            # "Here I am." takes a second.
            assert kept == "Here I"

    asyncio.run(main())


def test_a_conversation_goes_on_with_the_cascade_when_its_server_dies() -> None:
    remote = RemoteSettings(remote_first_token_s=2.0, remote_token_s=0.5)

    def parsed(url: str) -> RemoteConversationModel:
        return RemoteConversationModel(
            parse_address(f"{url}/v1#echo", "--conversation-model", schemes=CONVERSATION_MODEL), "", remote
        )

    async def talks(found: Any, status: str, said: str, text: str) -> None:
        async with talk(found) as wire:
            done = await response(wire, text)
            assert done["status"] == status
            assert done["output"][0]["content"][0]["transcript"].strip() == said
            assert len(wire.spoken()) > 0

    language, voice = Says(), Scripted()
    with serving(partner=Echo()) as (url, _, _):
        model = ConversationWithFallback(parsed(url), Cascade(language, voice, LINE), LINE)
        with front(partner=model) as found:
            asyncio.run(talks(found, "completed", "one two", "one two"))
            assert not language.asked
    with front(partner=model) as found:
        asyncio.run(talks(found, "completed", TEXT, "one two"))
        assert language.asked[-1][-1] == "one two"
