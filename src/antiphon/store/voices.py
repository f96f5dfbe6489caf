"""Stores uploaded voices, remembered speakers and notes, each in a folder. They belong to the API key that sent them.

    <home>/voices/<id>/               voice.json: the fields of StoredVoice; sample: the uploaded file
    <home>/voices/key-<id>/<id>/      the same, for one API key; the voices above are those of clients without a key
    <home>/speakers/[key-<id>/]<id>/  speaker.json: the fields of StoredSpeaker
    <home>/notes/[key-<id>/]<id>/     note.json: the fields of StoredNote

Folder names are digests of the name and of the key, so no name can escape its folder, and no key is written to disk.
Names are case-insensitive. Only the server's user can read the folders (mode 0700).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from antiphon.errors import StoreError

# Prefix of the folder with an API key's entries. No digest begins with it.
_OF_KEY = "key-"
_PRIVATE = 0o700


@dataclass(frozen=True, slots=True)
class StoredVoice:
    """One uploaded voice. The field names are those of voice.json."""

    # The voice's name, as the client wrote it.
    name: str
    # The speaker's consent, as the client gave it; never empty.
    consent: str
    # The time of the upload, in seconds since 1970.
    created_at: int
    # The words of the sample; "" if they are unknown.
    ref_text: str
    # The client's description of the voice; may be "".
    description: str
    # The MIME type of the sample.
    mime_type: str
    # The size of the sample, in bytes; 0 for a voice that is an embedding.
    size: int
    # The voice as a model's own vector; empty for a sample.
    embedding: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredSpeaker:
    """One remembered speaker. The field names are those of speaker.json. The sound itself is not stored."""

    # The speaker's name, as the client wrote it.
    name: str
    # The speaker's consent, as the client gave it; never empty.
    consent: str
    # The time at which the speaker was remembered, in seconds since 1970.
    created_at: int
    # The id of the speaker encoder that made `vector`.
    encoder: str
    # The vector of the speaker's voice.
    vector: tuple[float, ...]
    # The seconds of speech from which it was made.
    speech_s: float


@dataclass(frozen=True, slots=True)
class StoredNote:
    """What a model has remembered for its users. The field names are those of note.json."""

    # What the note is about, as the model wrote it.
    name: str
    # The note.
    text: str
    # The time at which it was written, in seconds since 1970.
    created_at: int


Kept = TypeVar("Kept", StoredVoice, StoredSpeaker, StoredNote)


class _KeyStore(Generic[Kept]):
    """The entries of one API key in a folder of the home. The entries of other keys are invisible.

    `key`: the API key; "" for all clients without a key, which share their entries. `what`: what an entry is called.
    An entry older than `max_age_s` does not exist any more, and is deleted when any key's entries are listed or added
    to. 0: entries have no age limit. Several processes may share a home: an entry appears only when it is complete, and
    each call reads the disk.
    """

    def __init__(
        self, root: Path, key: str, max_entries: int, kind: type[Kept], what: str, max_age_s: float = 0.0
    ) -> None:
        self._root, self._max_age_s = root, max_age_s
        self.folder = root / f"{_OF_KEY}{_digest(key)}" if key else root
        self._max_entries, self._what = max_entries, what
        self._kind: type[Kept] = kind

    def list(self) -> list[Kept]:
        """Return all entries, sorted by name, ignoring case, after deleting those that are too old. Skips folders that
        cannot be read.
        """
        self.delete_old()
        kept = [self._read(folder) for folder in _entries(self.folder)]
        return sorted((entry for entry in kept if entry), key=lambda entry: entry.name.lower())

    def get(self, name: str) -> Kept | None:
        """Return the entry with that name, ignoring case; None if it does not exist, or if it is too old."""
        found = self._read(self._folder_of(name))
        return None if found and self._is_old(found) else found

    def delete(self, name: str) -> bool:
        """Delete an entry with all its files. Returns whether an entry of that name existed."""
        folder = self._folder_of(name)
        existed = (folder / f"{self._what}.json").is_file()
        shutil.rmtree(folder, ignore_errors=True)
        return existed

    def _add(self, entry: Kept, sample: bytes | None) -> None:
        """Store an entry; replace an entry with the same name. Raises StoreError if the key already has its maximum,
        or if the entry cannot be written.
        """
        self.delete_old()
        target = self._folder_of(entry.name)
        if not target.exists() and sum(1 for _ in _entries(self.folder)) >= self._max_entries:
            raise StoreError(f"the limit of {self._max_entries} {self._what}s is reached: delete some")
        unfinished = self.folder
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._root.chmod(_PRIVATE)
            self.folder.mkdir(mode=_PRIVATE, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
            (unfinished / f"{self._what}.json").write_bytes(msgspec.json.encode(entry))
            if sample is not None:
                (unfinished / "sample").write_bytes(sample)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(unfinished, target)
        except OSError as error:
            if unfinished != self.folder:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise StoreError(f"the {self._what} cannot be stored: {error}") from error

    def delete_old(self) -> None:
        """Delete the entries of all keys that are older than `max_age_s`."""
        roots = (self._root, *self._root.glob(f"{_OF_KEY}*")) if self._max_age_s else ()
        for folder in [entry for root in roots for entry in _entries(root)]:
            found = self._read(folder)
            if found and self._is_old(found):
                shutil.rmtree(folder, ignore_errors=True)

    def _is_old(self, entry: Kept) -> bool:
        return bool(self._max_age_s) and entry.created_at < time.time() - self._max_age_s

    def _folder_of(self, name: str) -> Path:
        return self.folder / _digest(name.casefold())

    def _read(self, folder: Path) -> Kept | None:
        try:
            found: Kept = msgspec.json.decode((folder / f"{self._what}.json").read_bytes(), type=self._kind)
            return found
        except (OSError, msgspec.MsgspecError):
            return None


class VoiceStore(_KeyStore[StoredVoice]):
    """The voices that one API key has uploaded. `max_voices`: maximum number of the key's voices."""

    def __init__(self, home: Path, key: str, max_voices: int) -> None:
        super().__init__(home / "voices", key, max_voices, StoredVoice, "voice")

    def sample(self, name: str) -> Path | None:
        """Return the path of a voice's uploaded sample; None if the voice is an embedding or does not exist."""
        path = self._folder_of(name) / "sample"
        return path if path.is_file() else None

    def add(self, voice: StoredVoice, sample: bytes | None) -> None:
        """Store a voice; replace a voice with the same name. Raises StoreError if the key already has `max_voices`, or
        if the voice cannot be written.
        """
        self._add(voice, sample)


class SpeakerStore(_KeyStore[StoredSpeaker]):
    """The speakers that one API key has remembered. `max_speakers`: maximum number of the key's speakers. For
    `max_age_s` see _KeyStore.
    """

    def __init__(self, home: Path, key: str, max_speakers: int, max_age_s: float) -> None:
        super().__init__(home / "speakers", key, max_speakers, StoredSpeaker, "speaker", max_age_s)

    def add(self, speaker: StoredSpeaker) -> None:
        """Remember a speaker; replace a speaker with the same name. Raises StoreError if the key already has
        `max_speakers`, or if the speaker cannot be written.
        """
        self._add(speaker, None)


class NoteStore(_KeyStore[StoredNote]):
    """The notes of one API key. `max_notes`: maximum number of the key's notes. For `max_age_s` see _KeyStore."""

    def __init__(self, home: Path, key: str, max_notes: int, max_age_s: float) -> None:
        super().__init__(home / "notes", key, max_notes, StoredNote, "note", max_age_s)

    def add(self, note: StoredNote) -> None:
        """Write a note; replace a note about the same thing. Raises StoreError if the key already has `max_notes`, or
        if the note cannot be written.
        """
        self._add(note, None)


def _entries(folder: Path) -> Iterator[Path]:
    """Yield the folders of one key's complete entries. The name of an incomplete one begins with a dot."""
    if folder.is_dir():
        yield from (path for path in folder.iterdir() if not path.name.startswith((".", _OF_KEY)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
