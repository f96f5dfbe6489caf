"""The history of a conversation: its items in order. Each response is cut to the part that was heard.

Pure: no clocks, no tasks, no wire. An item is a message, a function call or a call's result. A user's spoken message
has the transcript of its audio. An assistant's spoken message has the spoken text, with the time of each word in its
audio. Truncating it cuts both text and audio to the last word that was heard, and `messages` passes only that part to
the language model.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from antiphon.contracts import Message, MessagePart
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import Item
from antiphon.events.size import num_bytes
from antiphon.events.tools import DATA_MARK, ToolCall

ROOT = "root"
# Number of the newest items whose size is measured again for each `num_bytes`. Older items no longer grow.
NUM_GROWING = 8
# What a model reads in place of a result that is not known yet.
RESULT_TO_COME = "The result is not known yet. It will follow."
APPROVAL_TO_COME = "The user has not approved this call yet. The result will follow."
# The text that replaces an image that a model has seen, after the session has dropped the image.
IMAGE_GONE = "[An image that was shown earlier.]"


class ConversationHistory:
    """The items of one conversation, in order and by id. Not thread-safe.

    If no item has the id that is passed to a method, the method raises RemoteProtocolError, with the code and the
    parameter to send to the client. A failed call leaves the history unchanged.
    """

    def __init__(self) -> None:
        self._items: list[Item] = []
        # Bytes of each item, by its id, when it was last measured, and the sum of all.
        self._sizes: dict[str, int] = {}
        self._num_bytes = 0
        # Whether the items are those of an earlier session, perhaps with later ones.
        self.is_restored = False

    @property
    def num_bytes(self) -> int:
        """Memory of the items in bytes. Media that were dropped from older items still count until `measure_all` is
        called.
        """
        for item in self._items[-NUM_GROWING:]:
            self._measure(item)
        return self._num_bytes

    def measure_all(self) -> None:
        """Measure every item again. Call it after media were dropped from items."""
        for item in self._items:
            self._measure(item)

    @property
    def items(self) -> Sequence[Item]:
        """The items, oldest first. This is the history's own list, which changes with the history, as do items in
        progress. Copy it before awaiting anything.
        """
        return self._items

    def add(self, item: Item, after: str | None = None) -> str | None:
        """Insert an item after the item with the id `after`. None means the end, "root" the front.

        Returns the id of the preceding item, or None if there is none. A call's result may precede its call. Raises
        RemoteProtocolError if the item's id is taken, or if `after` is unknown.
        """
        if item.id in self._sizes:
            raise RemoteProtocolError(
                "item_create_duplicate_item_id", f"An item with the id '{item.id}' already exists.", "item.id"
            )
        if after is None:
            at = len(self._items)
        elif after == ROOT:
            at = 0
        else:
            at = self._find(after, "item_create_invalid_item_id", "previous_item_id") + 1
        self._items.insert(at, item)
        self._measure(item)
        return self._items[at - 1].id if at else None

    def restore(self, items: Sequence[Item]) -> None:
        """Replace all items with the items of an earlier session, oldest first, without checking them. Copies the list,
        not the items.
        """
        self._items, self.is_restored = list(items), True
        self._sizes, self._num_bytes = {}, 0
        self.measure_all()

    def get(self, item_id: str) -> Item:
        """Return the item itself, not a copy, so changes to it change the history. Raises RemoteProtocolError if the id
        is unknown.
        """
        return self._items[self._find(item_id, "item_retrieve_invalid_item_id", "item_id")]

    def newest_user_item(self) -> str | None:
        """Return the id of the newest item of the user, or None without one."""
        return next((item.id for item in reversed(self._items) if item.role == "user"), None)

    def before(self, item_id: str) -> str | None:
        """Return the id of the item before this one, or None for the first item. Raises RemoteProtocolError if the id
        is unknown.
        """
        at = self._find(item_id, "item_retrieve_invalid_item_id", "item_id")
        return self._items[at - 1].id if at else None

    def delete(self, item_id: str) -> None:
        """Remove an item. A call's result stays when its call is deleted. Raises RemoteProtocolError if the id is
        unknown.
        """
        del self._items[self._find(item_id, "item_delete_invalid_item_id", "item_id")]
        self._num_bytes -= self._sizes.pop(item_id)

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int, *, from_whole: bool = False) -> int:
        """Cut an assistant's audio and its text to the words that had ended by `audio_end_ms`.

        Returns the milliseconds of audio that are left: `audio_end_ms`, or the audio's length if that is less. With
        `from_whole`, the part is cut as it was before any truncation. More of it may then be left than before
        the call, if a later acknowledgement reports that more was heard. Raises RemoteProtocolError if the item or the
        content part is missing, or if it is not an assistant's audio.
        """
        item = self._items[self._find(item_id, "item_truncate_invalid_item_id", "item_id")]
        if item.kind != "message" or item.role != "assistant":
            raise RemoteProtocolError(
                "invalid_value", "Only assistant messages with sound can be truncated.", "item_id"
            )
        if not 0 <= content_index < len(item.parts) or item.parts[content_index].kind != "output_audio":
            raise RemoteProtocolError(
                "invalid_value", f"The item has no sound at content_index {content_index}.", "content_index"
            )
        part = item.parts[content_index]
        part.whole = text, words, audio_s = part.whole or (part.text, tuple(part.words), part.audio_s)
        end_s = min(audio_end_ms / 1000, audio_s if from_whole else part.audio_s)
        heard = [w for w in words if w.end_s <= end_s + 1e-6]
        part.text = cut_to(text, [w.text for w in words], len(heard))
        part.words = heard
        part.audio_s = end_s
        return round(end_s * 1000)

    def messages(self, instructions: str = "", also: Sequence[Item] | None = None) -> tuple[Message, ...]:
        """Return the conversation as messages for a model. They contain only the parts that were said and heard.

        `instructions` become a system message at the front. With `also`, its items are used instead of the history's,
        but names of functions are still looked up in the history. Messages without text and media are left out, and so
        are results without a call. Retracted items are left out too. An item that continues the item before it becomes
        part of that item's message. Calls that follow an assistant's message become part of that message. A
        result that precedes its call is moved after the call.

        A call that a tool server carries out has its result in the same item. It gets DATA_MARK. If the conversation
        went on before the result came, the call has RESULT_TO_COME as its result, and is repeated with its result where
        that came. A request for an approval is such a call, with APPROVAL_TO_COME until it is answered.
        """
        out = [Message("system", instructions)] if instructions else []
        # The calls of each message in `out`, and the name of each call. They are in maps because a client may send
        # thousands of calls.
        calls: defaultdict[int, list[ToolCall]] = defaultdict(list)
        named = itertools.chain(also or (), self._items)
        names = {i.call_id: i.name for i in reversed([*named]) if i.kind == "function_call"}
        # The item whose message is the last of `out`.
        newest = ""
        for item in _with_server_results(_results_behind_calls(self._items if also is None else also)):
            match item.kind:
                case "message" if item.speaker == "other" or item.retracted:
                    # A person near the microphone said this, but not to the model, or a response began too early.
                    continue
                case "message":
                    parts: tuple[MessagePart, ...] = ()
                    if any(p.media for p in item.parts):
                        parts = tuple(p.media or p.text for p in item.parts if p.media or p.text)
                    if item.text.strip() or parts:
                        message = Message(item.role, item.text.strip(), parts=parts)
                        if item.continues and item.continues == newest:
                            out[-1] = out[-1].joined(message)
                        else:
                            out.append(message)
                        newest = item.id
                case "function_call":
                    if not (out and out[-1].role == "assistant"):
                        out.append(Message("assistant", ""))
                    newest = item.id
                    calls[len(out) - 1].append(ToolCall(item.call_id, item.name, item.arguments))
                case "function_call_output" if name := item.name or names.get(item.call_id, ""):
                    newest = item.id
                    out.append(Message("tool", item.output, tool_call_id=item.call_id, name=name))
        return tuple(replace(m, tool_calls=tuple(calls[i])) if i in calls else m for i, m in enumerate(out))

    @staticmethod
    def describe_image(lines: Sequence[str] | None) -> str:
        """Return a text that describes an image to a model that cannot see it. `lines` is the text found in the image.
        It is empty if the image has no text, and None if the image could not be read.
        """
        if lines is None:
            return "[An image that could not be read.]"
        if not lines:
            return "[An image. There is no text on it; what else it shows is not known.]"
        return "[An image. The text on it:\n" + "\n".join(lines) + "\nWhat else it shows is not known.]"

    def _measure(self, item: Item) -> None:
        size = num_bytes(item)
        self._num_bytes += size - self._sizes.get(item.id, 0)
        self._sizes[item.id] = size

    def _find(self, item_id: str, code: str, param: str) -> int:
        for at, item in enumerate(self._items):
            if item.id == item_id:
                return at
        raise RemoteProtocolError(code, f"There is no item with the id '{item_id}'.", param)


def _results_behind_calls(items: Sequence[Item]) -> list[Item]:
    """Return the items with each result that precedes its call moved after the call."""
    waiting: defaultdict[str, list[Item]] = defaultdict(list)
    to_come = Counter(i.call_id for i in items if i.kind == "function_call")
    if not any(i.kind == "function_call_output" for i in items):
        return list(items)
    out: list[Item] = []
    for item in items:
        if item.kind == "function_call_output" and to_come[item.call_id]:
            waiting[item.call_id].append(item)
            continue
        out.append(item)
        if item.kind == "function_call":
            to_come[item.call_id] -= 1
            out += waiting.pop(item.call_id, ())
    return out


def _with_server_results(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, and for each call that a tool server carries out an item with its result, after all calls of the
    same response. A call whose result came later is repeated there. A call that was cut off is left out.
    """
    results: list[Item] = []
    late = defaultdict[str, list[Item]](list)
    for item in items:
        if item.kind != "function_call":
            yield from results
            results = []
        if not item.server:
            yield item
        elif item.status != "incomplete":
            yield item
            is_known = item.status == "completed" and not item.result_after
            to_come = APPROVAL_TO_COME if item.needs_approval else RESULT_TO_COME
            results.append(_result(item, item.call_id, DATA_MARK + item.output if is_known else to_come))
            if item.result_after:
                late[item.result_after].append(item)
        for call in late.pop(item.id, ()):
            yield from results
            results = []
            yield from _again(call)
    yield from results
    # The items after which these results came were deleted.
    for call in itertools.chain.from_iterable(late.values()):
        yield from _again(call)


def _again(call: Item) -> Iterator[Item]:
    """Yield a call once more, and its result."""
    call_id = f"{call.call_id}_2"
    yield replace(call, call_id=call_id)
    yield _result(call, call_id, DATA_MARK + call.output)


def _result(call: Item, call_id: str, output: str) -> Item:
    return Item(call.id, "function_call_output", call_id=call_id, name=call.name, output=output)


def cut_to(text: str, words: Sequence[str], count: int) -> str:
    """Return the beginning of `text` up to the end of its `count`-th word, with its spaces and punctuation.

    `words` are the words of `text` in order. If a word is not found in `text`, for example because a synthesizer
    normalizes its input, the first `count` words are returned, joined with spaces.
    """
    at = 0
    for word in words[:count]:
        found = text.find(word, at)
        if found < 0:
            return " ".join(words[:count])
        at = found + len(word)
    return text[:at]
