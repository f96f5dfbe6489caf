"""A conversation: its items in order, and what of each answer was heard. Pure: no clocks, no tasks, no wire.

An item is a message, a call of a function or what the call gave. A user's spoken message holds the transcript of its sound; an
assistant's spoken message the text that was spoken, with the place of each word in its sound. Truncating one cuts both
to the last word that was heard, and `messages` gives the language model just that.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.contracts import Message, MessagePart
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import Item
from antiphon.events.tools import ToolCall

ROOT = "root"
# What an image is to a partner that has seen it, once it is no more.
IMAGE_GONE = "[An image that was shown earlier.]"


class ConversationHistory:
    """Items in order, by id. Every method raises RemoteProtocolError with the code the client is told."""

    def __init__(self) -> None:
        self._items: list[Item] = []

    @property
    def items(self) -> Sequence[Item]:
        return self._items

    def add(self, item: Item, after: str | None = None) -> str | None:
        """Put an item at the end, at the front (`root`) or behind another; returns the id before it."""
        if any(i.id == item.id for i in self._items):
            raise RemoteProtocolError(
                "item_create_duplicate_item_id", f"An item with the id '{item.id}' already exists.", "item.id"
            )
        if after is None:
            at = len(self._items)
        elif after == ROOT:
            at = 0
        else:
            at = self._find(after, "item_create_invalid_item_id", "previous_item_id") + 1
        if item.kind == "function_call_output" and not self._calls(item.call_id):
            raise RemoteProtocolError(
                "item_create_invalid_call_id",
                f"There is no function call with the call_id '{item.call_id}'.",
                "item.call_id",
            )
        self._items.insert(at, item)
        return self._items[at - 1].id if at else None

    def restore(self, items: Sequence[Item]) -> None:
        """Be a conversation of before; it is empty so far."""
        self._items = list(items)

    def get(self, item_id: str) -> Item:
        return self._items[self._find(item_id, "item_retrieve_invalid_item_id", "item_id")]

    def before(self, item_id: str) -> str | None:
        """The id of the item before this one."""
        at = self._find(item_id, "item_retrieve_invalid_item_id", "item_id")
        return self._items[at - 1].id if at else None

    def delete(self, item_id: str) -> None:
        del self._items[self._find(item_id, "item_delete_invalid_item_id", "item_id")]

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int, *, again: bool = False) -> int:
        """Cut a spoken answer to what was heard by `audio_end_ms`; returns that time, no later than the sound's end.

        `again`: of what it was before it was truncated; it is known better now how much was heard.
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
        if not (again and part.whole):
            part.whole = (part.text, tuple(part.words), part.audio_s)
        text, words, audio_s = part.whole
        end_s = min(audio_end_ms / 1000, audio_s)
        heard = [w for w in words if w.end_s <= end_s + 1e-6]
        part.text = cut_to(text, [w.text for w in words], len(heard))
        part.words = heard
        part.audio_s = end_s
        return round(end_s * 1000)

    def messages(self, instructions: str = "", also: Sequence[Item] | None = None) -> tuple[Message, ...]:
        """The conversation as the language model gets it: what was said and heard, nothing else. `also`: instead of its items."""
        out = [Message("system", instructions)] if instructions else []
        for item in self._items if also is None else also:
            match item.kind:
                case "message":
                    parts: tuple[MessagePart, ...] = ()
                    if any(p.media for p in item.parts):
                        parts = tuple(p.media or p.text for p in item.parts if p.media or p.text)
                    if item.text.strip() or parts:
                        out.append(Message(item.role, item.text.strip(), parts=parts))
                case "function_call":
                    call = ToolCall(item.call_id, item.name, item.arguments)
                    if out and out[-1].role == "assistant":
                        last = out.pop()
                        out.append(Message("assistant", last.text, (*last.tool_calls, call)))
                    else:
                        out.append(Message("assistant", "", (call,)))
                case "function_call_output":
                    name = next(
                        (i.name for i in self._items if i.kind == "function_call" and i.call_id == item.call_id), ""
                    )
                    out.append(Message("tool", item.output, tool_call_id=item.call_id, name=name))
        return tuple(out)

    @staticmethod
    def image_said(lines: Sequence[str] | None) -> str:
        """An image as a language model that cannot see is told of it: its text; None: it could not be read."""
        if lines is None:
            return "[An image that could not be read.]"
        if not lines:
            return "[An image. There is no text on it; what else it shows is not known.]"
        return "[An image. The text on it:\n" + "\n".join(lines) + "\nWhat else it shows is not known.]"

    def _calls(self, call_id: str) -> bool:
        return any(i.kind == "function_call" and i.call_id == call_id for i in self._items)

    def _find(self, item_id: str, code: str, param: str) -> int:
        for at, item in enumerate(self._items):
            if item.id == item_id:
                return at
        raise RemoteProtocolError(code, f"There is no item with the id '{item_id}'.", param)


def cut_to(text: str, words: Sequence[str], count: int) -> str:
    """The head of `text` up to its `count`-th word of `words`, as it is spelled there."""
    at = 0
    for word in words[:count]:
        found = text.find(word, at)
        if found < 0:
            return " ".join(words[:count])
        at = found + len(word)
    return text[:at]
