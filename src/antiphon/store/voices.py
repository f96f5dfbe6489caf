"""Uploaded voices: samples and their speakers' consent, in one folder for each. They belong to who uploaded them.

    <home>/voices/<id>/             voice.json: the fields of StoredVoice; sample: the file as it was uploaded
    <home>/voices/key-<id>/<id>/    the same, of one API key; those above are of clients without one

The folders' names are digests of the voice's name and of the key, so no name can lead out of them, and no key is
written. Names are compared without regard to case. Only the server's user can read the folders (mode 0700).
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

# How the folder of an API key's voices begins. No digest does.
_OF_KEY = "key-"
_PRIVATE = 0o700


@dataclass(frozen=True, slots=True)
class StoredVoice:
    """One uploaded voice. It is stored by these field names.

    - `consent`: what the client named as the speaker's consent; never empty.
    - `created_at`: seconds since 1970.
    - `ref_text`: what the sample says; empty where it is not known.
    - `size`: of the sample in bytes; 0 for a voice that is an embedding.
    - `embedding`: the voice as a model's own vector; empty for a sample.
    """

    name: str
    consent: str
    created_at: int
    ref_text: str
    description: str
    mime_type: str
    size: int
    embedding: tuple[float, ...] = ()


class VoiceStore:
    """The voices under a home that one API key has uploaded; those of all others are as if they were not there.

    `key`: the API key, or "" for clients without one, who share theirs. `max_voices`: how many it may have. Several
    processes may share a home: a voice is complete as soon as it is seen, and each call reads the disk anew.
    """

    def __init__(self, home: Path, key: str, max_voices: int) -> None:
        self._root = home / "voices"
        self.folder = self._root / f"{_OF_KEY}{_digest(key)}" if key else self._root
        self._max_voices = max_voices

    def list(self) -> list[StoredVoice]:
        """All voices, sorted by name without regard to case. A folder that cannot be read is left out."""
        voices = [self._read(folder / "voice.json") for folder in self._voice_folders()]
        return sorted((v for v in voices if v), key=lambda v: v.name.lower())

    def get(self, name: str) -> StoredVoice | None:
        """The voice of that name, in any case; None where there is none."""
        return self._read(self._voice_folder(name) / "voice.json")

    def sample(self, name: str) -> Path | None:
        """The path of the file that a voice was uploaded with; None for an embedding and where there
        is no such voice.
        """
        path = self._voice_folder(name) / "sample"
        return path if path.is_file() else None

    def add(self, voice: StoredVoice, sample: bytes | None) -> None:
        """Store a voice, in the place of one with the same name. Raises StoreError when there are `max_voices`, or
        where it cannot be written.
        """
        target = self._voice_folder(voice.name)
        if not target.exists() and len(self._voice_folders()) >= self._max_voices:
            raise StoreError(f"{self._max_voices} voices are uploaded, and no more may be: delete some")
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
        """Delete a voice with its sample. Returns whether there was one of that name."""
        folder = self._voice_folder(name)
        existed = (folder / "voice.json").is_file()
        shutil.rmtree(folder, ignore_errors=True)
        return existed

    def _voice_folders(self) -> Sequence[Path]:
        """The folders of this key's complete voices; the name of one that is being written begins with a dot."""
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
