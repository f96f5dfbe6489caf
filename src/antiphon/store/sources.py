"""The sources of downloads: an HTTP or file URL read from an offset, a file on the hub, a wheel of the package index.

Knows nothing of models or caches. All functions block, and raise StoreError that names the requested resource.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import httpx
from huggingface_hub import constants, hf_hub_url

from antiphon.errors import StoreError
from antiphon.store.registry import Hub

CHUNK_BYTES = 1 << 18
# Timeout of the hub, in seconds. It is short, since a machine without access to the hub tries the wheels next.
HUB_TIMEOUT_S = 4.0
STALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ResourceReader:
    """An open resource: its total size in bytes (0: unknown), and its chunks from the requested offset on."""

    total_bytes: int
    chunks: Iterator[bytes]


# Opens a URL from a byte offset on: `open_url`, or a test's replacement of it.
Open = Callable[[str, int], AbstractContextManager[ResourceReader]]


def hub_url(hub: Hub, sha256: str) -> str | None:
    """Return the file's URL if the hub may have exactly these bytes, or None if it has others.

    Large files have their sha256 as ETag, so this downloads nothing. A small file has none, and its bytes are checked
    after the download. `sha256` "": any bytes. Raises StoreError if the hub does not answer
    within HUB_TIMEOUT_S, or answers with an error.
    """
    url = hf_hub_url(hub.repo, hub.path, revision=hub.revision)
    host = urlsplit(url).hostname
    try:
        answer = httpx.head(url, verify=_tls(), timeout=HUB_TIMEOUT_S)
    except (httpx.HTTPError, OSError) as error:
        raise StoreError(f"the hub {host} cannot be reached: {error or type(error).__name__}") from None
    if answer.status_code >= 400:
        raise StoreError(f"the hub {host} answers {answer.status_code} for {hub.repo}/{hub.path}")
    # The header of the redirect to a large file's storage
    # (huggingface_hub, constants.HUGGINGFACE_HEADER_X_LINKED_ETAG).
    digest = answer.headers.get("x-linked-etag", "").strip('"')
    return url if not digest or not sha256 or digest == sha256 else None


def hub_snapshot(repository: str) -> Path | None:
    """Return the newest snapshot of a repository in the hub's cache on this machine; None if there is none."""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        kept = sorted((folder / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime)
        return kept[-1] if kept else None
    return snapshot if snapshot.is_dir() else None


def wheel_url(package: str, version: str) -> tuple[str, str]:
    """Return the URL and sha256 of a pure wheel, as pip resolves it with its own configuration (index, mirrors, proxy).

    Runs pip in a subprocess. Raises StoreError with pip's last line if there is no such wheel.
    """
    want = f"{package}=={version}"
    command = [sys.executable, "-m", "pip", "-q", "install", "--dry-run", "--no-deps", "--ignore-installed"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--report", "-", want]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise StoreError(f"the package index has no {want}: {reason}")
    info = json.loads(done.stdout)["install"][0]["download_info"]
    return str(info["url"]), str(info["archive_info"]["hashes"]["sha256"])


@contextmanager
def open_url(url: str, offset: int) -> Iterator[ResourceReader]:
    """Read `url` from byte `offset` on. If the server ignores the range, skip the bytes before the offset.

    Raises StoreError if the connection fails or stalls, also while the chunks are read.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = Path(url2pathname(parts.path))
        with path.open("rb") as file:
            file.seek(offset)
            yield ResourceReader(path.stat().st_size, iter(lambda: file.read(CHUNK_BYTES), b""))
        return
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    timeout = httpx.Timeout(STALL_TIMEOUT_S, connect=20.0)
    try:
        with httpx.stream("GET", url, headers=headers, verify=_tls(), follow_redirects=True, timeout=timeout) as answer:
            answer.raise_for_status()
            resumed = answer.status_code == httpx.codes.PARTIAL_CONTENT
            total = int(answer.headers.get("content-length", 0)) + (offset if resumed else 0)
            yield ResourceReader(total, _skipping(answer.iter_raw(CHUNK_BYTES), 0 if resumed else offset))
    except httpx.HTTPError as error:
        raise StoreError(f"{parts.path.rsplit('/', 1)[-1]}: {error or type(error).__name__}") from error


def _skipping(chunks: Iterator[bytes], skip: int) -> Iterator[bytes]:
    for chunk in chunks:
        rest, skip = chunk[skip:], max(0, skip - len(chunk))
        if rest:
            yield rest


def _tls() -> ssl.SSLContext:
    """Return a context with the system's certificates, and with pip's own bundle (PIP_CERT) if one is set."""
    context = ssl.create_default_context()
    extra = os.environ.get("PIP_CERT")
    if extra and Path(extra).is_file():
        context.load_verify_locations(extra)
    return context
