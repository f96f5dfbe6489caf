"""Uploaded voices: samples and what their speakers agreed to, in one folder.

<home>/voices/<id>/     voice.json: name, consent, when, what of · sample: the file as it came

The folder's name is a digest of the voice's, so no name can lead out of it; names are compared without regard to case.
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

MAX_VOICES = 1000


@dataclass(frozen=True, slots=True)
class StoredVoice:
    """One uploaded voice. `created_at`: seconds since 1970. `size` in bytes; 0 for one that is an embedding."""

    name: str
    consent: str
    created_at: int
    ref_text: str
    description: str
    mime_type: str
    size: int
    embedding: tuple[float, ...] = ()


class VoiceStore:
    """The voices under a home. Several processes may share it; what one writes the others see."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "voices"

    def list(self) -> list[StoredVoice]:
        """All voices by name."""
        found = [self._read(place / "voice.json") for place in self._places()]
        return sorted((v for v in found if v), key=lambda v: v.name.lower())

    def get(self, name: str) -> StoredVoice | None:
        """The voice of that name."""
        return self._read(self._place(name) / "voice.json")

    def sample(self, name: str) -> Path | None:
        """The file a voice was uploaded with."""
        path = self._place(name) / "sample"
        return path if path.is_file() else None

    def add(self, voice: StoredVoice, sample: bytes | None) -> None:
        """Store a voice, in the place of one with its name. Raises StoreError when there are MAX_VOICES."""
        place = self._place(voice.name)
        if not place.exists() and len(self._places()) >= MAX_VOICES:
            raise StoreError(f"there are {MAX_VOICES} voices: delete some")
        half = self._folder
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            half = Path(tempfile.mkdtemp(prefix=".new-", dir=self._folder))
            (half / "voice.json").write_text(json.dumps(asdict(voice)), encoding="utf-8")
            if sample is not None:
                (half / "sample").write_bytes(sample)
            shutil.rmtree(place, ignore_errors=True)
            os.replace(half, place)
        except OSError as error:
            if half != self._folder:
                shutil.rmtree(half, ignore_errors=True)
            raise StoreError(f"the voice cannot be stored: {error}") from error

    def delete(self, name: str) -> bool:
        """Whether there was such a voice; it is gone, sample and all."""
        place = self._place(name)
        there = (place / "voice.json").is_file()
        shutil.rmtree(place, ignore_errors=True)
        return there

    def _places(self) -> Sequence[Path]:
        """The folders of whole voices: one that is being written begins with a dot."""
        if not self._folder.is_dir():
            return []
        return [p for p in self._folder.iterdir() if not p.name.startswith(".")]

    def _place(self, name: str) -> Path:
        return self._folder / hashlib.sha256(name.casefold().encode()).hexdigest()[:32]

    @staticmethod
    def _read(path: Path) -> StoredVoice | None:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            embedding: Sequence[float] = fields.pop("embedding")
            return StoredVoice(**fields, embedding=tuple(embedding))
        except (OSError, ValueError, TypeError, KeyError):
            return None
