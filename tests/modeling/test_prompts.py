"""Conversations as rows: the messages that are dropped if the context is full, and the positions of media rows."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from antiphon.contracts import AudioPart, Message, ReplyOptions
from antiphon.errors import RemoteProtocolError
from antiphon.events.tools import Tool
from antiphon.modeling.prompts import PromptRenderer

SYSTEM = Message("system", "Be brief.")
PLACEHOLDER, OPENING = 1000, 9


def encode(messages: Sequence[Message], tools: Sequence[Tool], *, answer: bool) -> list[int]:
    """Return ten tokens that identify each message, then the opening of the reply."""
    ids = [token for m in messages for token in [len(m.text)] * (10 - len(m.parts)) + [PLACEHOLDER] * len(m.parts)]
    return ids + [OPENING] * answer


def turns(count: int) -> list[Message]:
    return [Message("user" if i % 2 == 0 else "assistant", "x" * (20 + i)) for i in range(count)]


def lengths(ids: Sequence[Any]) -> list[int]:
    """Return the lengths of the messages' texts, given a conversation's tokens."""
    return list(dict.fromkeys(ids))


def test_a_conversation_that_fits_is_rendered_whole_with_its_head() -> None:
    prompts = PromptRenderer(encode, None, 100)
    messages = [SYSTEM, *turns(3)]
    ids, head, dropped = prompts.fitting(messages, (), ReplyOptions(truncation=0.5), {})
    assert (lengths(ids), head, dropped) == ([9, 20, 21, 22], 10, 0)
    assert ids[-1] == OPENING


def test_without_a_system_turn_or_a_user_there_is_no_head() -> None:
    prompts = PromptRenderer(encode, None, 100)
    assert prompts.rendered(turns(1), (), {}, answer=False) == ([20] * 10, 0)
    assert prompts.rendered([SYSTEM], (), {}, answer=False) == ([9] * 10, 0)


def test_when_a_conversation_has_outgrown_the_context_then_it_is_cut_to_a_share_at_a_users_turn() -> None:
    prompts = PromptRenderer(encode, None, 60)
    ids, _, dropped = prompts.fitting([SYSTEM, *turns(7)], (), ReplyOptions(truncation=0.6), {})
    assert (lengths(ids), dropped) == ([9, 26], 6)
    ids, _, dropped = prompts.fitting([SYSTEM, *turns(7)], (), ReplyOptions(truncation=0.8), {})
    assert (lengths(ids), dropped) == ([9, 24, 25, 26], 4)


def test_the_reply_counts_towards_the_context() -> None:
    prompts = PromptRenderer(encode, None, 60)
    messages = [SYSTEM, *turns(3)]
    assert prompts.fitting(messages, (), ReplyOptions(truncation=0.5, max_tokens=19), {})[2] == 0
    assert prompts.fitting(messages, (), ReplyOptions(truncation=0.5, max_tokens=20), {})[2] == 2


def test_where_nothing_may_be_dropped_a_longer_conversation_is_refused_and_auto_leaves_it_to_the_engine() -> None:
    prompts = PromptRenderer(encode, None, 60)
    messages = [SYSTEM, *turns(7)]
    with pytest.raises(RemoteProtocolError, match="has 81 tokens; the model takes 60") as caught:
        prompts.fitting(messages, (), ReplyOptions(truncation="disabled"), {})
    assert caught.value.code == "context_length_exceeded"
    assert prompts.fitting(messages, (), ReplyOptions(truncation="auto"), {})[2] == 0


def test_what_was_dropped_stays_away_while_the_conversation_begins_alike() -> None:
    prompts = PromptRenderer(encode, None, 60)
    messages = [SYSTEM, *turns(7)]
    prompts.drop(messages, 4)
    assert list(prompts.kept(messages)) == [SYSTEM, *messages[5:]]
    ids, _, dropped = prompts.fitting(messages, (), ReplyOptions(truncation=0.8), {})
    assert (lengths(ids), dropped) == ([9, 24, 25, 26], 4)
    other = [SYSTEM, *turns(8)[1:]]
    assert list(prompts.kept(other)) == other
    # A conversation that is no longer than its dropped part counts as a different one.
    assert list(prompts.kept(messages[:5])) == messages[:5]
    prompts.drop(messages, 0)
    assert list(prompts.kept(messages)) == messages


def test_when_the_text_is_too_long_to_be_rendered_then_its_older_half_goes() -> None:
    prompts = PromptRenderer(encode, None, 10)
    messages = [SYSTEM, *turns(11)]
    ids, _, dropped = prompts.fitting(messages, (), ReplyOptions(truncation="auto"), {})
    # 160 characters may be rendered. Half of them stay.
    assert (lengths(ids), dropped) == ([9, 30], 10)


def test_text_that_can_be_rendered_is_not_cut_and_where_nothing_may_be_dropped_longer_text_is_refused() -> None:
    prompts = PromptRenderer(encode, None, 10)
    # 136 of 160 characters, including 16 for each message.
    assert prompts.fitting([SYSTEM, *turns(3)], (), ReplyOptions(truncation="auto"), {})[2] == 0
    with pytest.raises(RemoteProtocolError, match="more than 160 characters"):
        prompts.fitting([SYSTEM, *turns(11)], (), ReplyOptions(truncation="disabled"), {})


def test_a_text_alone_that_is_too_long_is_refused() -> None:
    prompts = PromptRenderer(encode, None, 10)
    with pytest.raises(RemoteProtocolError, match="more than 160 characters; the model takes 10 tokens"):
        prompts.fitting([Message("user", "x" * 161)], (), ReplyOptions(truncation="auto"), {})


def test_rows_of_media_stand_for_their_placeholders() -> None:
    encoder: Any = SimpleNamespace(placeholder_ids=frozenset((PLACEHOLDER,)))
    clips = [AudioPart(np.zeros(i, np.float32)) for i in (1, 2)]
    message = Message("user", "ab", parts=tuple(clips))
    ids, _ = PromptRenderer(encode, encoder, 100).rendered(
        [message],
        (),
        {clips[0]: [("a", 2)], clips[1]: [("b", 1), ("c", 1)]},
        answer=False,  # type: ignore[list-item]
    )
    assert ids == [2] * 8 + [("a", 0), ("a", 1), ("b", 0), ("c", 0)]
    # For a model that neither hears nor sees, the tokens stay unchanged.
    assert PromptRenderer(encode, None, 100).rendered([message], (), {}, answer=False)[0] == [2] * 8 + [1000] * 2
