"""Finds the files that a file of sound is made of, and says what is wrong with one that holds no sound.

Recordings that were appended to each other are read one after the other; what lies before a recording, or breaks the
chain of an MP4's boxes, is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

# The first bytes of each kind of file: a literal that is searched for, where it stands, and what all of it looks like.
_HEADS = {
    "wav": (b"WAVE", 8, re.compile(rb"(RIFF|RIFX|RF64|BW64).{4}WAVE", re.DOTALL)),
    "mp4": (b"ftyp", 4, re.compile(rb"\0\0.{2}ftyp[ -~]{4}", re.DOTALL)),
    "flac": (b"fLaC", 0, re.compile(rb"fLaC[\0\x80]\0\0\x22", re.DOTALL)),
    "ogg": (b"OggS\0", 0, re.compile(rb"OggS\0[\x02\x06]", re.DOTALL)),
    "matroska": (b"\x1aE\xdf\xa3", 0, re.compile(rb"\x1aE\xdf\xa3.{1,80}?(webm|matroska)", re.DOTALL)),
    "tagged": (b"ID3", 0, re.compile(rb"ID3[\2-\4][\0-\x0f][\0-\xf0][\0-\x7f]{4}", re.DOTALL)),
}
_HEAD_BYTES = 100
# A box that a file of the MP4 family may begin with, besides `ftyp`.
_BOXES = (b"moov", b"mdat", b"wide", b"free", b"skip", b"styp", b"moof", b"pnot", b"sidx")
_MOVIE_BOX = re.compile(rb".{4}(moof.{4}mfhd|moov.{4}[a-z0-9]{4})", re.DOTALL)
# What a recorder's pieces begin with after the first: of Ogg, of WebM (a cluster, or a block of track 1), and of MP4.
_LATER_PART = re.compile(
    rb"OggS\0[\0\1\4\5]|\x1fC\xb6u|.{4}(moof|styp|sidx)|"
    rb"\xa3([\x80-\xff]|[\x40-\x7f].|[\x20-\x3f]..|\x01.{7})\x81",
    re.DOTALL,
)
_PAGES = re.compile(rb"OggS\0[\0\1\4\5]|\x1fC\xb6u")
_FLAC_FRAME, MIN_FRAMES = re.compile(rb"\xff[\xf8\xf9][\x10-\xfe][\0-\xae]", re.DOTALL), 4
# A frame of MPEG audio or of AAC (ADTS).
_FRAME = re.compile(rb"\xff[\xe0-\xff]")
# Recordings in one file: what is behind them is read with the last.
MAX_PARTS = 1000
# What is looked at in a file that has nothing but beginnings.
MAX_BOXES, MAX_HITS = 1 << 19, 1 << 19
# Where a range begins, None for zeros, and how long it is.
Range = tuple[int | None, int]
# How far into a file its first head is searched for.
MAX_JUNK_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
UNREADABLE = "this is no sound file that can be read"
# Values beside each other in samples differ by less than this share of what random values would.
_PCM_STEP, MIN_PCM_SAMPLES = 0.5, 100


class FilePart:
    """A file that is made of ranges of another file, and of zeros."""

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

    def tell(self) -> int:
        return self._at


def size_of(file: BinaryIO | FilePart) -> int:
    """The length of a file in bytes. Leaves it at its start."""
    size = file.seek(0, 2)
    file.seek(0)
    return size


def is_rifx(file: str | BinaryIO | FilePart) -> bool:
    """Whether a file that can seek is a WAV file of big-endian numbers. Leaves it at its start."""
    if isinstance(file, str) or not hasattr(file, "seek"):
        return False
    file.seek(0)
    head = file.read(4)
    file.seek(0)
    return head == b"RIFX"


def parts(file: BinaryIO) -> list[BinaryIO | FilePart]:
    """The recordings in a file that can seek, in their order: at least one, and the file itself where it is one."""
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
    """The kind of a file by its first bytes, of those in which a second recording can be found."""
    for kind, (_, _, pattern) in _HEADS.items():
        if pattern.match(head):
            return kind
    if head[4:8] in _BOXES:
        return "mp4"
    return "tagged" if _FRAME.match(head) else None


def _heads(file: BinaryIO, kind: str, start: int, end: int, most: int) -> list[int]:
    """Where files of a kind begin in a range of bytes: `most` at most."""
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
            # What looks like a tag inside of one is none.
            passed, head = _behind_tags(file, begin, head)
            if not _FRAME.match(head):
                continue
        if kind == "ogg":
            # The streams of one recording begin right behind each other.
            is_same, passed = begin == passed, begin + 27 + head[26] + sum(head[27 : 27 + head[26]])
            if is_same:
                continue
        found.append(begin)
        if len(found) == most:
            break
    return found


def _finds(file: BinaryIO, literal: bytes, start: int, end: int) -> Iterator[int]:
    """Every place of some bytes in a range. The file may be moved meanwhile."""
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
    """Where what follows the ID3v2 tags at a place begins, and its first bytes."""
    while _HEADS["tagged"][2].match(head):
        a, b, c, d = head[6:10]
        start += 10 + (a << 21 | b << 14 | c << 7 | d) + (10 if head[5] & 0x10 else 0)
        file.seek(start)
        head = file.read(_HEAD_BYTES)
    return start, head


def _mended(file: BinaryIO, start: int, end: int) -> list[Range]:
    """The ranges of an MP4 of which the chain of boxes leads from one to the next.

    Where it breaks, it goes on with the next fragment or with the index, and what is between is left out. Where these
    come earlier than the boxes say, zeros stand for the bytes that are missing: samples before them keep their places.
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
    """Where the next fragment or index of an MP4 begins."""
    for at in _finds(file, b"moo", start, end):
        file.seek(at - 4)
        if _MOVIE_BOX.match(file.read(16)):
            return at - 4
    return None


def why_silent(file: BinaryIO) -> str:
    """What is wrong with a file in which no decoder finds sound, for the client that sent it."""
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
    """Whether there are pages, clusters, frames or the index of a recording in a file that does not begin as one."""
    return bool(_PAGES.search(head)) or _box(file, 0, size) is not None


def _flac_frames(file: BinaryIO) -> int:
    """Where the first frame of a FLAC file is whose head is missing; 0 for another file."""
    file.seek(0)
    data = file.read(MAX_JUNK_BYTES)
    # They begin alike.
    frames = Counter(_FLAC_FRAME.findall(data)).most_common(1)
    return data.index(frames[0][0]) if frames and frames[0][1] >= MIN_FRAMES else 0


def _text_of(head: bytes) -> str:
    """What kind of text the bytes are; empty for what is no text."""
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
    """Whether 16-bit samples that are read from the bytes change slowly, as sound does."""
    for data in (head, head[1:]):
        samples = np.frombuffer(data[: len(data) // 2 * 2], "<i2").astype(np.float64)
        samples = samples[samples.nonzero()[0][:1].sum() :]
        if len(samples) < MIN_PCM_SAMPLES:
            return False
        if np.abs(np.diff(samples)).mean() < _PCM_STEP * np.abs(samples - samples.mean()).mean():
            return True
    return False
