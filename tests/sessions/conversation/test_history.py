"""A conversation's items, and how much of each answer was heard."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.contracts import Message
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ContentPart, Item
from antiphon.events.tools import ToolCall
from antiphon.events.words import Word
from antiphon.sessions.conversation.history import ROOT, ConversationHistory, cut_to


def user(item_id: str, text: str) -> Item:
    return Item(item_id, "message", "user", parts=[ContentPart("input_text", text)])


def spoken(item_id: str, text: str, word_s: float = 0.5) -> Item:
    words = [Word(w, k * word_s, (k + 1) * word_s, 1.0) for k, w in enumerate(text.split())]
    part = ContentPart("output_audio", text, audio_s=word_s * len(words) + 0.2, words=words)
    return Item(item_id, "message", "assistant", parts=[part])


def ids(conversation: ConversationHistory) -> list[str]:
    return [i.id for i in conversation.items]


def code(call: object, *arguments: object) -> str:
    with pytest.raises(RemoteProtocolError) as raised:
        call(*arguments)  # type: ignore[operator]
    return raised.value.code


def test_items_are_inserted_behind_the_item_that_is_named() -> None:
    conversation = ConversationHistory()
    assert conversation.add(user("a", "A")) is None
    assert conversation.add(user("b", "B")) == "a"
    assert conversation.add(user("c", "C"), ROOT) is None
    assert conversation.add(user("d", "D"), "a") == "a"
    assert ids(conversation) == ["c", "a", "d", "b"]
    conversation.delete("a")
    assert ids(conversation) == ["c", "d", "b"]
    assert conversation.before("b") == "d"
    assert conversation.items[-1].id == "b"


def test_when_a_change_is_impossible_then_the_error_has_its_code() -> None:
    conversation = ConversationHistory()
    conversation.add(user("a", "A"))
    assert code(conversation.add, user("a", "again")) == "item_create_duplicate_item_id"
    assert code(conversation.add, user("b", "B"), "nobody") == "item_create_invalid_item_id"
    assert code(conversation.get, "x") == "item_retrieve_invalid_item_id"
    assert code(conversation.delete, "x") == "item_delete_invalid_item_id"
    assert code(conversation.truncate, "x", 0, 0) == "item_truncate_invalid_item_id"
    assert code(conversation.truncate, "a", 0, 0) == "invalid_value"
    conversation.add(spoken("s", "one two"))
    assert code(conversation.truncate, "s", 1, 0) == "invalid_value"


def test_when_a_result_comes_before_its_call_then_the_model_gets_it_behind() -> None:
    conversation = ConversationHistory()
    for item in (
        Item("r1", "function_call_output", call_id="call_1", output="sunny"),
        Item("r3", "function_call_output", call_id="call_3", output="whose?"),
        user("a", "The weather?"),
        Item("c2", "function_call", "assistant", call_id="call_2", name="time", arguments="{}"),
        Item("c1", "function_call", "assistant", call_id="call_1", name="weather", arguments="{}"),
        Item("r2", "function_call_output", call_id="call_2", output="noon"),
    ):
        conversation.add(item)
    found = [(m.role, m.text, m.name, [c.id for c in m.tool_calls]) for m in conversation.messages()]
    assert found == [
        # A result without a call is left out of the messages.
        ("user", "The weather?", "", []),
        ("assistant", "", "", ["call_2", "call_1"]),
        ("tool", "sunny", "weather", []),
        ("tool", "noon", "time", []),
    ]


def test_when_a_response_has_items_of_its_own_then_results_have_the_names_of_its_calls_and_of_the_historys() -> None:
    conversation = ConversationHistory()
    conversation.add(Item("c1", "function_call", "assistant", call_id="call_1", name="weather", arguments="{}"))
    own = [
        Item("c2", "function_call", "assistant", call_id="call_2", name="time", arguments="{}"),
        *(Item(f"r{i}", "function_call_output", call_id=f"call_{i}", output=f"{i}") for i in (1, 2, 3)),
    ]
    found = [(m.text, m.name) for m in conversation.messages(also=own) if m.role == "tool"]
    assert found == [("1", "weather"), ("2", "time")]


def test_the_model_gets_what_was_said_and_heard() -> None:
    conversation = ConversationHistory()
    conversation.add(user("a", "What is the weather?"))
    conversation.add(
        Item("c", "function_call", "assistant", call_id="call_1", name="weather", arguments='{"in":"Rome"}')
    )
    conversation.add(Item("r", "function_call_output", call_id="call_1", output="sunny"))
    conversation.add(spoken("s", "It is sunny in Rome today."))
    conversation.add(Item("u", parts=[ContentPart("input_audio")]))
    assert conversation.truncate("s", 0, 1500) == 1500
    assert conversation.messages("Be brief.") == (
        Message("system", "Be brief."),
        Message("user", "What is the weather?"),
        Message("assistant", "", (ToolCall("call_1", "weather", '{"in":"Rome"}'),)),
        Message("tool", "sunny", tool_call_id="call_1", name="weather"),
        Message("assistant", "It is sunny"),
    )
    assert conversation.messages(also=[user("x", "Hi")]) == (Message("user", "Hi"),)


@given(st.lists(st.text("ab,.!", min_size=1, max_size=5), min_size=1, max_size=12), st.integers(0, 8000))
def test_when_audio_is_truncated_then_the_words_heard_in_full_are_kept(words: list[str], end_ms: int) -> None:
    conversation = ConversationHistory()
    conversation.add(spoken("s", "  ".join(words)))
    kept_ms = conversation.truncate("s", 0, end_ms)
    part = conversation.get("s").parts[0]
    heard = [w for k, w in enumerate(words) if (k + 1) * 0.5 <= min(end_ms / 1000, len(words) * 0.5 + 0.2) + 1e-6]
    assert part.text.split() == heard == [w.text for w in part.words]
    assert kept_ms == min(end_ms, round((len(words) * 0.5 + 0.2) * 1000))
    # Truncating again at a later place restores nothing.
    conversation.truncate("s", 0, 10**6)
    assert part.text.split() == heard


def test_when_text_is_cut_then_its_spelling_is_kept() -> None:
    text = "Well, — it is\nsunny!  Really."
    words = text.split()
    for count in range(len(words) + 1):
        cut = cut_to(text, words, count)
        assert text.startswith(cut)
        assert cut.split() == words[:count]
    assert cut_to("other text", ["no", "such", "words"], 2) == "no such"


def test_when_there_are_many_calls_and_results_then_each_item_is_looked_at_a_few_times() -> None:
    looked_at = 0

    class Kind(str):
        def __eq__(self, other: object) -> bool:
            nonlocal looked_at
            looked_at += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    count = 500
    conversation = ConversationHistory()
    calls = [Item(f"c{i}", "function_call", call_id=f"{i}", name=f"f{i}", arguments="{}") for i in range(count)]
    results = [Item(f"r{i}", "function_call_output", call_id=f"{i}", output="ok") for i in range(count)]
    for item in (*calls, *results):
        item.kind = Kind(item.kind)  # type: ignore[assignment]
    conversation.restore([*calls, *results])
    message, *answers = conversation.messages()
    assert message.tool_calls == tuple(ToolCall(f"{i}", f"f{i}", "{}") for i in range(count))
    assert [a.name for a in answers] == [f"f{i}" for i in range(count)]
    assert looked_at < 10 * 2 * count
