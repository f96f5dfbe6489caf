"""Renders a conversation as rows, and leaves out messages if it exceeds the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from antiphon.contracts import Message, ReplyOptions, VideoPart
from antiphon.errors import RemoteProtocolError
from antiphon.events.tools import Tool
from antiphon.modeling.chat_template import MAX_CHARS_PER_TOKEN, text_size
from antiphon.modeling.media_rows import ChatRow, MediaEncoder, MediaSizes, common_prefix


class PromptRenderer:
    """Renders one conversation. Messages that truncation has dropped stay dropped.

    `encode`: maps messages and tools to tokens; with `answer`, also returns the tokens that open the reply. `encoder`:
    the media encoder of a model that hears or sees; otherwise None. `context_tokens`: the model's context length.
    """

    def __init__(self, encode: Callable[..., list[int]], encoder: MediaEncoder | None, context_tokens: int) -> None:
        self._encode, self._encoder, self._context_tokens = encode, encoder, context_tokens
        self._max_chars = MAX_CHARS_PER_TOKEN * context_tokens
        # The number of messages after the system message that truncation dropped, and the first of these messages. The
        # number applies only to a conversation with the same first message.
        self._dropped: tuple[int, Message | None] = (0, None)
        # The system message and the tools of the last prompt, and the tokens of a conversation with only these.
        self._head: tuple[Message, Sequence[Tool], list[int]] | None = None

    def kept(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages without those that truncation dropped before."""
        system, rest = _split_system(messages)
        return (*system, *rest[self._num_dropped(rest) :])

    def drop(self, messages: Sequence[Message], count: int) -> None:
        """Record that truncation dropped the first `count` messages after the system message."""
        _, rest = _split_system(messages)
        self._dropped = (count, rest[0]) if count else (0, None)

    def _num_dropped(self, rest: Sequence[Message]) -> int:
        count, first = self._dropped
        return count if count < len(rest) and rest[0] == first else 0

    def fitting(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: ReplyOptions, sizes: MediaSizes
    ) -> tuple[list[ChatRow], int, int]:
        """Same as `rendered`, but applies the truncation policy if the conversation exceeds the context.

        Also returns the number of dropped messages, for `drop`. Raises RemoteProtocolError if the policy forbids
        truncation, or if the last message alone is too long to be rendered.
        """
        policy, limit = options.truncation, self._context_tokens
        system, rest = _split_system(messages)
        dropped = 0
        if policy != "disabled":
            dropped = self._without_excess_text(system, rest, tools, self._num_dropped(rest))
        ids, head = self.rendered((*system, *rest[dropped:]), tools, sizes, answer=True)
        if policy == "auto" or len(ids) + (options.max_tokens or 0) <= limit:
            return ids, head, dropped
        if policy == "disabled":
            raise RemoteProtocolError(
                "context_length_exceeded",
                f"The conversation has {len(ids)} tokens; the model takes {limit}.",
                "truncation",
            )
        while len(ids) > policy * limit and dropped + 1 < len(rest):
            dropped += 1
            while dropped + 1 < len(rest) and rest[dropped].role != "user":
                dropped += 1
            ids, head = self.rendered((*system, *rest[dropped:]), tools, sizes, answer=True)
        return ids, head, dropped

    def _without_excess_text(
        self, system: Sequence[Message], rest: Sequence[Message], tools: Sequence[Tool], dropped: int
    ) -> int:
        """Return the number of messages of `rest` to drop, at least `dropped`, so that the others may be rendered.

        If more than `dropped` messages must be dropped, drops messages until at most half of the permitted text
        remains. Otherwise each turn would drop another message, and all rows would be computed again. The last message
        is never dropped.
        """
        num_chars = text_size((*system, *rest[dropped:]), tools)
        if num_chars <= self._max_chars:
            return dropped
        while dropped + 1 < len(rest) and (num_chars > self._max_chars // 2 or rest[dropped].role != "user"):
            num_chars -= text_size(rest[dropped : dropped + 1])
            dropped += 1
        return dropped

    def rendered(
        self, messages: Sequence[Message], tools: Sequence[Tool], sizes: MediaSizes, *, answer: bool
    ) -> tuple[list[ChatRow], int]:
        """Return the conversation's rows, and the number of rows of the system turn, which are never cut.

        Raises RemoteProtocolError (`context_length_exceeded`) if the text is too long to be rendered.
        """
        if text_size(messages, tools) > self._max_chars:
            raise RemoteProtocolError(
                "context_length_exceeded",
                f"The conversation has more than {self._max_chars} characters; the model takes "
                f"{self._context_tokens} tokens.",
                "messages",
            )
        ids = self._rows_of(messages, self._encode(messages, tools, answer=answer), sizes)
        if not messages or messages[0].role != "system" or not any(m.role == "user" for m in messages):
            return ids, 0
        if self._head is None or self._head[:2] != (messages[0], tools):
            probe = self._encode([messages[0], Message("user", "\u2026")], tools, answer=False)
            self._head = (messages[0], tools, probe)
        return ids, common_prefix(ids, self._head[2])

    def _rows_of(self, messages: Sequence[Message], ids: Sequence[int], sizes: MediaSizes) -> list[ChatRow]:
        """The tokens, with placeholders replaced by the rows of audio clips and images."""
        if self._encoder is None:
            return list(ids)
        parts, out = (p for m in messages for p in m.parts if not isinstance(p, str)), list[ChatRow]()
        for token in ids:
            part = next(parts, None) if token in self._encoder.placeholder_ids else None
            if isinstance(part, VideoPart):
                video = {p: sum(size for _, size in pieces) for p, pieces in sizes.items()}
                out += self._encoder.video_rows(part, video)
            else:
                out += [(piece, i) for piece, size in sizes[part] for i in range(size)] if part else [token]
        return out


def _split_system(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """The system message, which truncation never drops, and the rest."""
    count = int(bool(messages) and messages[0].role == "system")
    return messages[:count], messages[count:]
