"""Images in a conversation's items: read for a partner that cannot see, handed to one that can."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio.abc
import anyio.to_thread

from antiphon.adapters.base import ImagePart, Reader
from antiphon.answering import FAILURES, Emit
from antiphon.conversation import Conversation
from antiphon.errors import MediaError, RemoteProtocolError
from antiphon.images import decode, from_data_uri
from antiphon.talk_events import Item, Part, Rejected

# Characters of data URIs that one conversation may hold.
MAX_IMAGES = 64 << 20
# An image is looked at this large, to tell whether it is one.
MAX_SIDE = 2048


class Looking:
    """`reader`: who reads for a partner that does not see (`sees`). `done`: awaited once an item's images are known."""

    def __init__(
        self,
        conversation: Conversation,
        reader: Reader | None,
        emit: Emit,
        done: Callable[[], Awaitable[None]],
        *,
        sees: bool,
    ) -> None:
        self._conversation, self._reader, self._emit, self._done, self._sees = conversation, reader, emit, done, sees
        # Items with images that nobody has looked at yet.
        self.unread: set[str] = set()

    def bound(self, new: Item) -> None:
        """Raises RemoteProtocolError where the images are too many."""
        shown = sum(len(p.image) for i in (*self._conversation.items, new) for p in i.parts)
        if shown > MAX_IMAGES:
            raise RemoteProtocolError(
                "image_limit_exceeded", f"A conversation's images may have {MAX_IMAGES >> 20} MiB.", "item.content"
            )

    def look_at(self, item: Item, event_id: str | None, group: anyio.abc.TaskGroup) -> None:
        """Have its images looked at; an answer that is asked for waits for it."""
        if (self._reader or self._sees) and any(_unknown(p) for p in item.parts):
            self.unread.add(item.id)
            group.start_soon(self._look, item, event_id)

    async def _look(self, item: Item, event_id: str | None) -> None:
        for part in item.parts:
            if part.kind == "input_image":
                try:
                    await self._take(part, from_data_uri(part.image))
                except (MediaError, *FAILURES) as error:
                    part.text = Conversation.image_said(None)
                    await self._emit(Rejected("invalid_image", str(error), "item.content", event_id))
        self.unread.discard(item.id)
        await self._done()

    async def _take(self, part: Part, image: bytes) -> None:
        if self._sees:
            await anyio.to_thread.run_sync(decode, image, MAX_SIDE)
            part.media = ImagePart(image)
        elif self._reader:
            part.text = Conversation.image_said(await self._reader.read(image))


def _unknown(part: Part) -> bool:
    return part.kind == "input_image" and not part.text and part.media is None
