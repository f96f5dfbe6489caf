"""Stores uploaded voices, each in a folder with its sample and the speaker's consent. A voice belongs to its uploader.

    <home>/voices/<id>/             voice.json: the fields of StoredVoice; sample: the uploaded file
    <home>/voices/key-<id>/<id>/    the same, for one API key; the voices above are those of clients without a key

Folder names are digests of the voice's name and of the key, so no name can escape its folder, and no key is written to
disk. Names are case-insensitive. Only the server's user can read the folders (mode 0700).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from antiphon.errors import StoreError

# Prefix of the folder with an API key's voices. No digest begins with it.
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


class VoiceStore:
    """The voices that one API key has uploaded. The voices of other keys are invisible.

    `key`: the API key; "" for all clients without a key, which share their voices. `max_voices`: maximum number of the
    key's voices. Several processes may share a home: a voice appears only when it is complete, and each call reads the
    disk.
    """

    def __init__(self, home: Path, key: str, max_voices: int) -> None:
        self._root = home / "voices"
        self.folder = self._root / f"{_OF_KEY}{_digest(key)}" if key else self._root
        self._max_voices = max_voices

    def list(self) -> list[StoredVoice]:
        """Return all voices, sorted by name, ignoring case. Skips folders that cannot be read."""
        voices = [self._read(folder / "voice.json") for folder in self._voice_folders()]
        return sorted((v for v in voices if v), key=lambda v: v.name.lower())

    def get(self, name: str) -> StoredVoice | None:
        """Return the voice with that name, ignoring case; None if it does not exist."""
        return self._read(self._voice_folder(name) / "voice.json")

    def sample(self, name: str) -> Path | None:
        """Return the path of a voice's uploaded sample; None if the voice is an embedding or does not exist."""
        path = self._voice_folder(name) / "sample"
        return path if path.is_file() else None

    def add(self, voice: StoredVoice, sample: bytes | None) -> None:
        """Store a voice; replace a voice with the same name. Raises StoreError if the key already has `max_voices`, or
        if the voice cannot be written.
        """
        target = self._voice_folder(voice.name)
        if not target.exists() and len(self._voice_folders()) >= self._max_voices:
            raise StoreError(f"the limit of {self._max_voices} uploaded voices is reached: delete some")
        unfinished = self.folder
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._root.chmod(_PRIVATE)
            self.folder.mkdir(mode=_PRIVATE, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
            (unfinished / "voice.json").write_text(json.dumps(asdict(voice)), encoding="utf-8")
            if sample is not None:
                (unfinished / "sample").write_bytes(sample)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(unfinished, target)
        except OSError as error:
            if unfinished != self.folder:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise StoreError(f"the voice cannot be stored: {error}") from error

    def delete(self, name: str) -> bool:
        """Delete a voice with its sample. Returns whether a voice of that name existed."""
        folder = self._voice_folder(name)
        existed = (folder / "voice.json").is_file()
        shutil.rmtree(folder, ignore_errors=True)
        return existed

    def _voice_folders(self) -> Sequence[Path]:
        """Return the folders of this key's complete voices. The name of an incomplete one begins with a dot."""
        if not self.folder.is_dir():
            return []
        return [p for p in self.folder.iterdir() if not p.name.startswith((".", _OF_KEY))]

    def _voice_folder(self, name: str) -> Path:
        return self.folder / _digest(name.casefold())

    @staticmethod
    def _read(path: Path) -> StoredVoice | None:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            embedding: Sequence[float] = fields.pop("embedding")
            return StoredVoice(**fields, embedding=tuple(embedding))
        except (OSError, ValueError, TypeError, KeyError):
            return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
