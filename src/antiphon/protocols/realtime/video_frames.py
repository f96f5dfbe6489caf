"""The images that full-duplex clients send along with their audio."""

from __future__ import annotations

from antiphon.errors import RemoteProtocolError
from antiphon.events.data_uri import decode_base64, split_data_uri

# In one append.
MAX_VIDEO_FRAMES = 2


def video_frames(value: object) -> tuple[bytes, ...]:
    """The images in a `video_frames`: at most two, in base64 or `data:` URIs. They stay encoded.

    Raises RemoteProtocolError (`invalid_video_frames`) for more, and for what does not begin as JPEG or PNG does.
    """
    if not isinstance(value, list) or len(value) > MAX_VIDEO_FRAMES:
        raise RemoteProtocolError(
            "invalid_video_frames", f"At most {MAX_VIDEO_FRAMES} images in base64.", "video_frames"
        )
    return tuple(_image(text) for text in value)


def _image(text: object) -> bytes:
    data = b""
    if isinstance(text, str):
        try:
            header, body = split_data_uri(text)
            data = decode_base64(body) if not header or header.endswith(";base64") else b""
        except ValueError:
            data = b""
    if not data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")):
        raise RemoteProtocolError("invalid_video_frames", "A frame is a JPEG or PNG image in base64.", "video_frames")
    return data
