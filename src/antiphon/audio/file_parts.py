"""Splits an audio file into its recordings, and explains why a file contains no audio.

Recordings that were appended to each other are read one after the other. Bytes before a recording, and bytes that break
the chain of an MP4's boxes, are skipped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO, cast

import numpy as np

# The header of each kind of file: a literal to search for, its offset in the header, and a pattern of the header.
_HEADS = {
    "wav": (b"WAVE", 8, re.compile(rb"(RIFF|RIFX|RF64|BW64).{4}WAVE", re.DOTALL)),
    "mp4": (b"ftyp", 4, re.compile(rb"\0\0.{2}ftyp[ -~]{4}", re.DOTALL)),
    "flac": (b"fLaC", 0, re.compile(rb"fLaC[\0\x80]\0\0\x22", re.DOTALL)),
    "ogg": (b"OggS\0", 0, re.compile(rb"OggS\0[\x02\x06]", re.DOTALL)),
    "matroska": (b"\x1aE\xdf\xa3", 0, re.compile(rb"\x1aE\xdf\xa3.{1,80}?(webm|matroska)", re.DOTALL)),
    "tagged": (b"ID3", 0, re.compile(rb"ID3[\2-\4][\0-\x0f][\0-\xf0][\0-\x7f]{4}", re.DOTALL)),
}
_HEAD_BYTES = 100
# Boxes other than `ftyp` that a file of the MP4 family may begin with.
_BOXES = (b"moov", b"mdat", b"wide", b"free", b"skip", b"styp", b"moof", b"pnot", b"sidx")
_MOVIE_BOX = re.compile(rb".{4}(moof.{4}mfhd|moov.{4}[a-z0-9]{4})", re.DOTALL)
# The first bytes of a recorder's later pieces, in Ogg, in WebM (a cluster, or a block of track 1) and in MP4.
_LATER_PART = re.compile(
    rb"OggS\0[\0\1\4\5]|\x1fC\xb6u|.{4}(moof|styp|sidx)|"
    rb"\xa3([\x80-\xff]|[\x40-\x7f].|[\x20-\x3f]..|\x01.{7})\x81",
    re.DOTALL,
)
_PAGES = re.compile(rb"OggS\0[\0\1\4\5]|\x1fC\xb6u")
_FLAC_FRAME, MIN_FRAMES = re.compile(rb"\xff[\xf8\xf9][\x10-\xfe][\0-\xae]", re.DOTALL), 4
# A frame of MPEG audio or of AAC (ADTS).
_FRAME = re.compile(rb"\xff[\xe0-\xff]")
# Limit of recordings in one file. Bytes after them are read as part of the last one.
MAX_PARTS = 1000
# Limits of the number of boxes and of matches. A file could consist only of headers.
MAX_BOXES, MAX_HITS = 1 << 19, 1 << 19
# The offset of a range of bytes (None: a range of zeros), and its length.
Range = tuple[int | None, int]
# The number of bytes in which the first header of a file is searched for.
MAX_JUNK_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
UNREADABLE = "this is no sound file that can be read"
# Adjacent values of PCM samples differ by less than this share of their mean deviation.
_PCM_STEP, MIN_PCM_SAMPLES = 0.5, 100


class FilePart:
    """A file that consists of ranges of another file and of zeros."""

    def __init__(self, file: BinaryIO, ranges: list[Range]) -> None:
        self._file, self._ranges, self._at = file, ranges, 0
        self._size = sum(length for _, length in ranges)

    def read(self, size: int = -1) -> bytes:
        size = max(0, self._size - self._at if size < 0 else size)
        found, begin = [], 0
        for start, length in self._ranges:
            skipped = self._at - begin
            if 0 <= skipped < length and size:
                count = min(size, length - skipped)
                if start is None:
                    data = bytes(count)
                else:
                    self._file.seek(start + skipped)
                    data = self._file.read(count)
                found.append(data)
                self._at += len(data)
                size -= len(data)
            begin += length
        return b"".join(found)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at


def size_of(file: BinaryIO | FilePart) -> int:
    """Return the length of a file in bytes, and rewind it."""
    size = file.seek(0, 2)
    file.seek(0)
    return size


def view_of(file: BinaryIO) -> BinaryIO:
    """Return the same file with a position of its own, so that it can be decoded several times at once.

    Only one of the views may be read at a time, because they share the position of `file` meanwhile.
    """
    return cast(BinaryIO, FilePart(file, [(0, size_of(file))]))


def is_rifx(file: str | BinaryIO | FilePart) -> bool:
    """Return whether a seekable file is a big-endian WAV file (RIFX), and rewind it."""
    if isinstance(file, str) or not hasattr(file, "seek"):
        return False
    file.seek(0)
    head = file.read(4)
    file.seek(0)
    return head == b"RIFX"


def parts(file: BinaryIO) -> list[BinaryIO | FilePart]:
    """Return the recordings in a seekable file, in order: at least one. If it has only one, returns the file itself."""
    size, head = size_of(file), file.read(_HEAD_BYTES)
    kind, starts = kind_of(head), [0]
    if kind == "tagged":
        starts[0], head = _behind_tags(file, 0, head)
        if (tagged := kind_of(head)) not in (None, "tagged"):
            kind = tagged
        else:
            starts[0] = 0
    if kind is None:
        found = [(start, k) for k in _HEADS for start in _heads(file, k, 0, min(size, MAX_JUNK_BYTES), 1)]
        if found:
            starts[0], kind = min(found)
        else:
            starts[0] = _flac_frames(file)
    if kind:
        starts += _heads(file, kind, starts[0] + 1, size, MAX_PARTS)
    made: list[BinaryIO | FilePart] = []
    for start, end in zip(starts, [*starts[1:], size], strict=True):
        ranges: list[Range] = _mended(file, start, end) if kind == "mp4" else [(start, end - start)]
        made.append(file if ranges == [(0, size)] else FilePart(file, ranges))
    file.seek(0)
    return made


def kind_of(head: bytes) -> str | None:
    """Return the kind of a file by its first bytes; None: recordings cannot be found in files of this kind."""
    for kind, (_, _, pattern) in _HEADS.items():
        if pattern.match(head):
            return kind
    if head[4:8] in _BOXES:
        return "mp4"
    return "tagged" if _FRAME.match(head) else None


def _heads(file: BinaryIO, kind: str, start: int, end: int, most: int) -> list[int]:
    """Return up to `most` offsets at which files of a kind begin in a range of bytes."""
    literal, offset, pattern = _HEADS[kind]
    found, passed = list[int](), start
    for at in _finds(file, literal, start, end):
        begin = at - offset
        if begin < passed:
            continue
        file.seek(begin)
        head = file.read(_HEAD_BYTES)
        if not pattern.match(head):
            continue
        if kind == "tagged":
            # A match within a tag is not the start of another tag.
            passed, head = _behind_tags(file, begin, head)
            if not _FRAME.match(head):
                continue
        if kind == "ogg":
            # The streams of one recording begin directly after each other.
            is_same, passed = begin == passed, begin + 27 + head[26] + sum(head[27 : 27 + head[26]])
            if is_same:
                continue
        found.append(begin)
        if len(found) == most:
            break
    return found


def _finds(file: BinaryIO, literal: bytes, start: int, end: int) -> Iterator[int]:
    """Yield each offset of `literal` in a range. The caller may seek in the file between two results."""
    overlap = len(literal) - 1
    hits = 0
    while start < end and hits < MAX_HITS:
        file.seek(start)
        chunk = file.read(min(_CHUNK_BYTES, end - start) + overlap)
        at = chunk.find(literal)
        while at >= 0 and start + at < end:
            yield start + at
            hits += 1
            at = chunk.find(literal, at + 1)
        start += max(1, len(chunk) - overlap)


def _behind_tags(file: BinaryIO, start: int, head: bytes) -> tuple[int, bytes]:
    """Return the offset of the data after the ID3v2 tags at `start`, and its first bytes."""
    while _HEADS["tagged"][2].match(head):
        a, b, c, d = head[6:10]
        start += 10 + (a << 21 | b << 14 | c << 7 | d) + (10 if head[5] & 0x10 else 0)
        file.seek(start)
        head = file.read(_HEAD_BYTES)
    return start, head


def _mended(file: BinaryIO, start: int, end: int) -> list[Range]:
    """Return ranges of an MP4 file that form an unbroken chain of boxes.

    Where the chain breaks, it continues with the next fragment or the index, and the bytes in between are skipped. If
    that fragment begins before the end of the last box, zeros replace the missing bytes of the box, so that the offsets
    of earlier samples stay valid.
    """
    ranges, kept, last, at = list[Range](), start, start, start
    for _ in range(MAX_BOXES):
        file.seek(at)
        head = file.read(16)
        length = int.from_bytes(head[:4])
        if length == 1:
            length = int.from_bytes(head[8:])
        is_box = length >= 8 and head[4:8].isalnum()
        if is_box and at + length <= end:
            last, at = at, at + length
            if at + 8 > end:
                break
            continue
        if len(ranges) > MAX_PARTS or (length == 0 and head[4:8] == b"mdat"):
            break
        if is_box:
            last, at = at, at + length
        following = _box(file, last + 8, end)
        if following is None:
            break
        ranges.append((kept, min(at, following) - kept))
        if following < at:
            ranges.append((None, at - following))
        kept = last = at = following
    return [*ranges, (kept, end - kept)]


def _box(file: BinaryIO, start: int, end: int) -> int | None:
    """Return the offset of the next fragment or index of an MP4; None if it has no more."""
    for at in _finds(file, b"moo", start, end):
        file.seek(at - 4)
        if _MOVIE_BOX.match(file.read(16)):
            return at - 4
    return None


def why_silent(file: BinaryIO) -> str:
    """Return a message for the client about what is wrong with a file in which no decoder finds audio."""
    size, head = size_of(file), file.read(1 << 16)
    if not size:
        return "the file is empty"
    if not head.strip(b"\0"):
        return "the file begins with zeros where the head of a sound file should be"
    if text := _text_of(head):
        return f"the file is {text}, not sound"
    if _LATER_PART.match(head) or (kind_of(head) is None and _has_later_parts(file, head, size)):
        return "this is a later part of a recording: its head is missing. Send the recording from its first byte"
    if kind_of(head) == "mp4" and _box(file, 0, size) is None:
        return "the MP4 or M4A file has no index (moov): the recording was not finished, or its end is missing"
    if head[:4] in (b"RIFF", b"RIFX") and head[12:16] == b"fmt " and head[24:28] == bytes(4):
        return "the WAV file's header says 0 samples a second"
    if kind_of(head) is None and _is_pcm(head):
        return "the file looks like raw PCM samples without a header: send them as a WAV file"
    return UNREADABLE


def _has_later_parts(file: BinaryIO, head: bytes, size: int) -> bool:
    """Return whether a file without a header contains pages, clusters, fragments or the index of a recording."""
    return bool(_PAGES.search(head)) or _box(file, 0, size) is not None


def _flac_frames(file: BinaryIO) -> int:
    """Return the offset of the first frame of a FLAC file without a header; 0 for any other file."""
    file.seek(0)
    data = file.read(MAX_JUNK_BYTES)
    # All frames of a file begin with the same bytes.
    frames = Counter(_FLAC_FRAME.findall(data)).most_common(1)
    return data.index(frames[0][0]) if frames and frames[0][1] >= MIN_FRAMES else 0


def _text_of(head: bytes) -> str:
    """Return the kind of text that the bytes contain; "" if they are not text."""
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:
            return ""
        text = head[: error.start].decode()
    if any(c < " " and c not in "\t\n\r\f\x1b" for c in text):
        return ""
    start = text.lstrip("\ufeff \t\r\n")[:200].lower()
    if start.startswith(("<!doctype html", "<html")):
        return "a page of HTML"
    if start.startswith(("{", "[")):
        return "JSON"
    return "XML" if start.startswith("<?xml") else "text"


def _is_pcm(head: bytes) -> bool:
    """Return whether the bytes, read as 16-bit samples, change as slowly as audio does."""
    for data in (head, head[1:]):
        samples = np.frombuffer(data[: len(data) // 2 * 2], "<i2").astype(np.float64)
        samples = samples[samples.nonzero()[0][:1].sum() :]
        if len(samples) < MIN_PCM_SAMPLES:
            return False
        if np.abs(np.diff(samples)).mean() < _PCM_STEP * np.abs(samples - samples.mean()).mean():
            return True
    return False
