"""Images and audio in a message, as OpenAI's APIs spell them: whole files in base64. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import to_pcm16
from antiphon.audio.wav import wav_header
from antiphon.contracts import AudioPart, ImagePart, MessagePart

# The first bytes of each kind of image that antiphon accepts.
_KINDS = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"), (b"BM", "bmp"))


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message's content, in the form of either API."""

    type: str
    text: str | UnsetType = UNSET
    image_url: str | dict[str, str] | UnsetType = UNSET
    detail: str | UnsetType = UNSET
    input_audio: dict[str, str] | UnsetType = UNSET
    uuid: str | UnsetType = UNSET


def content_part(part: MessagePart, api: Literal["chat_completions", "responses"], salt: str = "") -> ContentPart:
    """One part of a message's content in the form of the named API. Encoding a picture takes milliseconds.

    `salt`: where given, images and audio get a `uuid`, by which vLLM finds what its encoder made of them before. It is
    made of the salt and the bytes, so that the same picture of another owner is another one.
    """
    responses = api == "responses"
    if isinstance(part, str):
        return ContentPart(type="input_text" if responses else "text", text=part)
    if isinstance(part, ImagePart):
        data = part.image.data
        kind = next((name for magic, name in _KINDS if data.startswith(magic)), "tiff")
        url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        if responses:
            return ContentPart(type="input_image", image_url=url, detail="auto")
        return ContentPart(type="image_url", image_url={"url": url}, uuid=_uuid(salt, data))
    # A model whose profile has no video window is given no VideoParts.
    assert isinstance(part, AudioPart)
    pcm = to_pcm16(part.pcm)
    sound = base64.b64encode(wav_header(SAMPLE_RATE_HZ, len(pcm)) + pcm).decode()
    return ContentPart(type="input_audio", input_audio={"data": sound, "format": "wav"}, uuid=_uuid(salt, pcm))


def _uuid(salt: str, data: bytes) -> str | UnsetType:
    return hmac.new(salt.encode(), data, hashlib.sha256).hexdigest() if salt else UNSET
