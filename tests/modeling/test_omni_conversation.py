"""Responses of a scripted thinker and talker: the spoken tokens, the rows that are kept, and the closed sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.contracts import (
    AudioPart,
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    SoundTrack,
    TextDelta,
    VoiceOptions,
)
from antiphon.engine.api import EngineSettings
from antiphon.errors import EngineError
from antiphon.modeling.media_rows import MediaRows, Run
from antiphon.modeling.omni.conversation import RATE_HZ, OmniStream, SpokenTokens, TalkerRows, share_kv
from antiphon.modeling.omni.hidden_rows import HiddenRows

STOP, CALL = 1, 2
MESSAGES = [Message("user", "Hi.")]
VOICE = VoiceOptions("ada")


class Thread:
    async def call_model(self, call: Any) -> Any:
        return call()


class Session:
    """A session that records its calls. `lost`: rows before this index have left the context."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.rollbacks: list[int] = []
        self.positions: list[Any] = []
        self.lost = 0

    def rollback(self, position: int) -> None:
        self.rollbacks.append(position)
        if 0 < position < self.lost:
            raise EngineError("gone")
        del self.rows[position:]

    def append_embeddings(self, rows: torch.Tensor, positions: Any = None) -> None:
        self.rows += rows.flatten().tolist()
        self.positions.append(positions)


def made(run: Run, start: int) -> torch.Tensor:
    """Return tokens unchanged, and a row of media as 100 + its index in the clip + 1000 * the rows before the run."""
    if run.part is None:
        return torch.tensor(run.ids)[:, None]
    return torch.arange(run.start, run.stop)[:, None] + 100 + 1000 * start


def held_after(session: Session, *wanted: list[Any], media: Mapping[Any, MediaRows] | None = None) -> TalkerRows:
    rows = TalkerRows(session, Thread())  # type: ignore[arg-type]

    async def run() -> None:
        for one in wanted:
            await rows.hold(one, media or {}, made)

    asyncio.run(run())
    return rows


def test_a_session_computes_only_the_rows_that_are_new() -> None:
    session = Session()
    held_after(session, [5, 6, 7], [5, 6, 8, 9])
    assert session.rows == [5, 6, 8, 9]
    assert session.rollbacks == [0, 2]


def test_rows_of_media_are_made_with_their_place() -> None:
    session: Any = Session()
    clip: Any = "clip"
    media: Any = {clip: MediaRows(torch.zeros(3, 1))}
    held_after(session, [5, (clip, 0), (clip, 1)], [5, (clip, 0), (clip, 1), (clip, 2), 6], media=media)
    assert session.rows == [5, 1100, 1101, 3102, 6]


def test_when_the_thinker_computes_media_again_then_their_rows_are_made_again() -> None:
    session: Any = Session()
    one, other = "one", "other"
    media: Any = {clip: MediaRows(torch.zeros(1, 1)) for clip in (one, other)}
    for clip in media.values():
        clip.sink(0)(0, torch.ones(1, 1))
    wanted: Any = [5, (one, 0), 6, (other, 0), 7]
    rows = held_after(session, wanted, media=media)
    media[other].sink(0)(0, torch.ones(1, 1))
    asyncio.run(rows.hold([*wanted, 8], media, made))
    asyncio.run(rows.hold(wanted, media, made))
    assert session.rows == [5, 1100, 6, 3100, 7]
    assert session.rollbacks == [0, 3, 5]


def test_a_step_that_is_under_way_does_not_write_into_the_states_of_rows_that_are_computed_again() -> None:
    media = MediaRows(torch.zeros(2, 1))
    late = media.sink(0)
    now, rest = media.sink(0), media.sink(1)
    late(0, torch.full((2, 3), 9.0))
    now(0, torch.ones(1, 3))
    rest(0, torch.full((1, 3), 2.0))
    assert media.hidden is not None
    assert media.hidden.tolist() == [[1.0] * 3, [2.0] * 3]


def test_when_held_rows_left_the_context_then_all_are_computed_again() -> None:
    session = Session()
    session.lost = 3
    held_after(session, [5, 6, 7, 8], [5, 6, 9])
    assert session.rows == [5, 6, 9]
    assert session.rollbacks == [0, 2, 0]


def test_when_rows_fail_then_those_before_stay_held() -> None:
    session: Any = Session()
    clip: Any = "clip"
    media: Any = {clip: MediaRows(torch.zeros(1, 1))}
    rows = TalkerRows(session, Thread())  # type: ignore[arg-type]

    def fail(run: Run, start: int) -> torch.Tensor:
        if run.part is not None:
            raise ValueError("no")
        return made(run, start)

    async def run() -> None:
        with pytest.raises(ValueError, match="no"):
            await rows.hold([5, 6, (clip, 0)], media, fail)
        await rows.hold([5, 6, (clip, 0)], media, made)

    asyncio.run(run())
    assert session.rollbacks == [0, 2]
    assert session.rows == [5, 6, 2100]


def spoken_by(chat: Any, *tokens: int) -> SpokenTokens:
    spoken = SpokenTokens(chat, frozenset((STOP,)), CALL)
    for token in tokens:
        chat.rows.append(token)
        spoken.feed(token)
        if chat.hidden:
            chat.hidden.add(torch.tensor([float(token)]))
    spoken.end()
    return spoken


def hidden_chat(*prompt: int) -> Any:
    hidden = HiddenRows(lambda ids: ids, torch.device("cpu"))
    for row in prompt:
        hidden.add(torch.tensor([float(row)]))
    return SimpleNamespace(rows=list(prompt), hidden=hidden)


async def listed(items: Any) -> list[Any]:
    return [item async for item in items]


def test_a_token_comes_with_its_state_once_the_next_one_is_there() -> None:
    spoken = spoken_by(hidden_chat(7, 8), 20, 21, 22)
    rows = asyncio.run(listed(spoken.rows(torch.zeros(1))))
    # The state of the last token is unknown.
    assert [(token, state.tolist()) for token, state in rows] == [(20, [20.0]), (21, [21.0])]
    assert len(spoken.prompt_states) == 2
    assert asyncio.run(spoken.prompt()) == [7, 8]


def test_behind_the_end_and_behind_a_call_nothing_is_spoken() -> None:
    rows = asyncio.run(listed(spoken_by(hidden_chat(7), 20, 21, STOP).rows(torch.zeros(1))))
    assert [token for token, _ in rows] == [20, 21]
    chat = SimpleNamespace(rows=[7], hidden=None)
    assert asyncio.run(listed(spoken_by(chat, 20, CALL, 21).tokens())) == [20]


class Chat:
    """A chat that writes two words, and reports its tokens."""

    media_rows: Mapping[Any, Any] = {}
    hidden: Any = None

    def __init__(self) -> None:
        self.rows: list[int] = [7]
        self.on_token: Any = None
        self.kept: list[bool] = []
        self.session = self

    async def prefill(self, messages: Sequence[Message], tools: Any) -> None:
        pass

    async def settle(self, *, include_newest: bool) -> None:
        assert include_newest

    async def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Any, None]:
        for token, text in ((20, "Hello "), (21, "there.")):
            self.rows.append(token)
            if self.on_token:
                self.on_token(token)
            yield TextDelta(text)
        yield ReplyDone("stop", 1, 0, 2)

    def close(self, *, keep: bool = False) -> None:
        self.kept.append(keep)


class Talker:
    """A talker, as a model and as its side of a conversation. It speaks half a second for each token."""

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.spoke: list[tuple[list[int], str, int | None]] = []
        self.prefilled: list[Any] = []
        self.go = asyncio.Event()
        self.go.set()

    async def prefill(self, prompt: Any, hidden: Any, media: Any) -> None:
        await self.go.wait()
        self.prefilled.append(prompt)

    async def open(self) -> Talker:
        self.opened += 1
        return self

    async def speak(self, spoken: SpokenTokens, media: Any, voice: str, seed: int | None) -> AsyncGenerator[Any, None]:
        assert await spoken.prompt() == [7]
        tokens = []
        async for token in spoken.tokens():
            tokens.append(token)
            yield np.zeros(RATE_HZ // 2, np.float32)
        self.spoke.append((tokens, voice, seed))

    def close(self) -> None:
        self.closed += 1


def stream_of(talker: Talker | None) -> OmniStream:
    thinker = SimpleNamespace(stop_tokens=frozenset((STOP,)))
    model: Any = SimpleNamespace(thinker=thinker, talker=talker, call_opening=CALL)
    return OmniStream(model, Chat())  # type: ignore[arg-type]


async def respond(stream: OmniStream, options: ReplyOptions, voice: VoiceOptions | None) -> list[Any]:
    async with aclosing(stream.respond(MESSAGES, options, voice)) as chunks:
        return [chunk async for chunk in chunks]


def test_text_and_audio_come_side_by_side_and_the_words_have_times() -> None:
    talker = Talker()
    stream = stream_of(talker)
    chunks = asyncio.run(respond(stream, ReplyOptions(seed=3), VOICE))
    assert "".join(c.text for c in chunks if isinstance(c, TextDelta)) == "Hello there."
    audio = [c for c in chunks if isinstance(c, ResponseAudio)]
    assert sum(len(c.pcm) for c in audio) == RATE_HZ
    assert [w.text for c in audio for w in c.words] == ["Hello", "there."]
    assert isinstance(chunks[-1], ReplyDone)
    assert talker.spoke == [([20, 21], "ada", 3)]
    assert stream.chat.on_token is None


def test_a_voices_own_seed_comes_first_and_the_talker_is_opened_once() -> None:
    talker = Talker()
    stream = stream_of(talker)

    async def run() -> None:
        for _ in range(2):
            stream.chat.rows[1:] = []
            await respond(stream, ReplyOptions(seed=3), VoiceOptions("ada", seed=0))

    asyncio.run(run())
    assert (talker.opened, [seed for _, _, seed in talker.spoke]) == (1, [0, 0])
    stream.close()
    assert talker.closed == 1


@pytest.mark.parametrize(("talker", "voice"), [(Talker(), None), (None, VOICE)], ids=["no voice", "no talker"])
def test_where_nothing_is_to_be_spoken_there_is_text_alone(talker: Talker | None, voice: VoiceOptions | None) -> None:
    stream = stream_of(talker)
    chunks = asyncio.run(respond(stream, ReplyOptions(), voice))
    assert [type(c) for c in chunks] == [TextDelta, TextDelta, ReplyDone]
    assert not talker or not talker.opened
    stream.close()


GROWING = [Message("user", "", parts=(AudioPart(np.zeros(9, np.float32), SoundTrack(), grows=True),))]


def test_the_talker_takes_in_audio_that_grows_unless_responses_are_text_alone() -> None:
    talker = Talker()
    stream = stream_of(talker)

    async def run() -> None:
        await stream.prefill(MESSAGES)
        assert not talker.opened
        await stream.prefill(GROWING)
        assert (talker.opened, talker.prefilled) == (1, [[7]])
        await respond(stream, ReplyOptions(), None)
        await stream.prefill(GROWING)
        assert len(talker.prefilled) == 1
        stream.chat.rows[1:] = []
        await respond(stream, ReplyOptions(), VOICE)
        await stream.prefill(GROWING)
        assert (talker.opened, len(talker.prefilled)) == (1, 2)

    asyncio.run(run())


def test_the_newest_request_has_the_talker() -> None:
    talker = Talker()
    stream = stream_of(talker)

    async def run() -> None:
        talker.go.clear()
        first, second = (asyncio.create_task(stream.prefill(GROWING)) for _ in range(2))
        for _ in range(5):
            await asyncio.sleep(0)
        response = asyncio.create_task(respond(stream, ReplyOptions(), VOICE))
        third = asyncio.create_task(stream.prefill(GROWING))
        for _ in range(5):
            await asyncio.sleep(0)
        # It speaks after the prefill that had begun.
        assert not talker.spoke
        talker.go.set()
        await asyncio.gather(first, second, third)
        await response
        assert talker.spoke

    asyncio.run(run())
    assert talker.opened == 1


def test_kv_is_kept_where_another_conversation_can_have_it() -> None:
    stream = stream_of(None)
    stream.close()
    stream.chat.hidden = hidden_chat(7).hidden
    stream.close()
    assert stream.chat.kept == [True, False]  # type: ignore[attr-defined]


def test_when_the_thinker_fails_then_the_talker_waits_no_longer() -> None:
    stream = stream_of(Talker())

    async def fail(messages: Any, options: Any) -> AsyncGenerator[Any, None]:
        raise EngineError("the engine failed")
        yield

    stream.chat.reply = fail  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the engine failed"):
        asyncio.run(respond(stream, ReplyOptions(), VOICE))
    assert stream.chat.on_token is None


def test_the_thinker_has_three_quarters_of_the_kv() -> None:
    thinker, talker = share_kv(EngineSettings(kv_bytes=4001, context_rows=9))
    assert (thinker.kv_bytes, thinker.context_rows) == (3000, 9)
    assert (talker.kv_bytes, talker.context_rows) == (1000, 0)
