"""Images and audio in the items that a client creates.

If the conversation model takes only text, the text on images is read and audio is transcribed. A model that accepts
media gets the images and the audio themselves.
"""

from __future__ import annotations

from antiphon.contracts import FileOptions, ImagePart, ImageReader, Transcriber, TranscriptSegment, one_slab
from antiphon.errors import MediaError, RemoteProtocolError
from antiphon.events.conversation import CommandRejected, ContentPart, Item, ItemAdded, ItemDone
from antiphon.events.data_uri import decode_image_uri
from antiphon.sessions.conversation.context import EmitConversation
from antiphon.sessions.conversation.history import ConversationHistory
from antiphon.sessions.conversation.responses.generation import FAILURES
from antiphon.shares.threads import IMAGE_THREADS, in_thread
from antiphon.vision.images import EncodedImage

# The maximum total length, in characters, of the data URIs of a conversation's images.
MAX_IMAGE_CHARS = 64 << 20


class ItemMediaResolver:
    """Converts the media of a conversation's items to a form that its model takes.

    - `reader`, `transcriber`: read images and transcribe audio for a conversation model that takes only text. Without a
      reader, images are left out of such a model's messages.
    - `emit`: awaited with a `CommandRejected` if media cannot be decoded. The session continues.
    - `accepts_media`: whether the conversation model accepts images and audio.
    """

    def __init__(
        self,
        history: ConversationHistory,
        reader: ImageReader | None,
        transcriber: Transcriber,
        emit: EmitConversation,
        *,
        accepts_media: bool,
    ) -> None:
        self._history, self._reader, self._transcriber = history, reader, transcriber
        self._emit, self._accepts_media = emit, accepts_media
        # Ids of the items whose media are not resolved yet. A response that needs such an item waits.
        self.unresolved: set[str] = set()

    def check_size(self, new: Item) -> None:
        """Raise RemoteProtocolError if the data URIs of the conversation's images, with those of the item `new`, would
        exceed 64 Mi characters. `new` is not in the conversation yet. Changes nothing.
        """
        if not any(p.image for p in new.parts):
            return
        num_chars = sum(len(p.image) for i in (*self._history.items, new) for p in i.parts)
        if num_chars > MAX_IMAGE_CHARS:
            raise RemoteProtocolError(
                "image_limit_exceeded",
                f"A conversation's images may have at most {MAX_IMAGE_CHARS >> 20} MiB.",
                "item.content",
            )

    async def add(self, item: Item, after: str | None) -> None:
        """Add a client's item to the conversation and report it. Raises the errors of `ConversationHistory.add`."""
        previous = self._history.add(item, after)
        await self._emit(ItemAdded(item.snapshot(), previous))
        await self._emit(ItemDone(item.snapshot(), previous))

    def begin(self, item: Item) -> bool:
        """Return whether the caller has to call `resolve` for an item. Until that has finished, the item's id is in
        `unresolved`. For a model that takes only text, audio that arrived with a transcript is dropped at once.
        """
        has_unresolved = any(self._is_unresolved(p) for p in item.parts)
        if has_unresolved:
            self.unresolved.add(item.id)
        for part in item.parts:
            if part.kind == "input_audio" and part.text and not self._accepts_media:
                part.media = None
        return has_unresolved

    def _is_unresolved(self, part: ContentPart) -> bool:
        if part.text:
            return False
        if part.kind == "input_image":
            return part.media is None and (self._accepts_media or self._reader is not None)
        return part.kind == "input_audio" and part.media is not None and not self._accepts_media

    async def resolve(self, item: Item, event_id: str | None, language: str | None) -> None:
        """Resolve an item's images and audio. Returns after all are resolved. Media that cannot be decoded cause a
        CommandRejected, not an exception.

        `language` is the language of the audio, None if unknown. `event_id` is the client's id of the command, which a
        rejection repeats.
        """
        for part in item.parts:
            if not self._is_unresolved(part):
                continue
            try:
                if part.kind == "input_image":
                    await self._read_image(part)
                else:
                    await self._transcribe(part, language)
            except (MediaError, *FAILURES) as error:
                is_audio = part.kind == "input_audio"
                part.text = "[Sound that could not be heard.]" if is_audio else ConversationHistory.describe_image(None)
                code = "invalid_audio" if is_audio else "invalid_image"
                await self._emit(CommandRejected(code, str(error), "item.content", event_id))
        self.unresolved.discard(item.id)

    async def _read_image(self, part: ContentPart) -> None:
        try:
            image = EncodedImage(decode_image_uri(part.image))
        except ValueError as error:
            raise MediaError(str(error)) from None
        if self._accepts_media:
            # This decodes the file, which fails if it is not an image. Only the file is kept, not the pixels, because
            # an item may stay unanswered until the session ends.
            await in_thread(image.overview, places=IMAGE_THREADS)
            image.release()
            part.media = ImagePart(image)
        elif self._reader:
            part.text = ConversationHistory.describe_image(await self._reader.read(image))

    async def _transcribe(self, part: ContentPart, language: str | None) -> None:
        audio, part.media = part.media, None
        segments = self._transcriber.transcribe(one_slab(audio.pcm), FileOptions(language))
        text = "".join([s.text async for s in segments if isinstance(s, TranscriptSegment)]).strip()
        # Without a text the item would be missing from the model's messages.
        part.text = text or "[Sound without words.]"
