"""A prepared folder is loaded only if it is unchanged. Otherwise it is prepared again, with a log message."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from antiphon.adapters.causal_lm import checkpoint, digests
from antiphon.engine.local import packed
from antiphon.engine.local.weights import load_int8_model

NAMES = {"config.json", "generation_config.json", "int8.safetensors", "packed.bin", "packed.json", "source"}


class Prepared:
    """A tiny checkpoint, prepared in its own home folder.

    `converted`, `packed`: the number of conversions and of packings.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
        config.num_attention_heads = config.num_key_value_heads = 2
        self.source, self.home = folder / "source", folder / "home"
        LlamaForCausalLM(config).save_pretrained(self.source)
        self.converted = self.packed = 0
        monkeypatch.setattr(checkpoint, "in_own_process", self.call)
        self.folder = self.prepare()
        assert (self.converted, self.packed) == (1, 0)

    def call(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function in this process, because a new process would have to import torch."""
        if call is checkpoint.write_packed:
            self.packed += 1
        else:
            self.converted += 1
        call(*arguments)

    def prepare(self) -> Path:
        return checkpoint.prepare(self.source, self.home, "tiny", "int8")

    def content(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir() if path.name != digests.RECORD}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as monkeypatch:
        Prepared(folder, monkeypatch)
    return folder


@pytest.fixture
def prepared(once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """Return a copy of a prepared folder. `copy2` preserves modification times."""
    found = Prepared.__new__(Prepared)
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    found.source, found.home, found.folder = (
        tmp_path / "source",
        tmp_path / "home",
        tmp_path / "home/prepared/tiny-int8",
    )
    found.converted = found.packed = 0
    monkeypatch.setattr(checkpoint, "in_own_process", found.call)
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def flip(path: Path) -> None:
    """Change one bit in the middle, and restore the modification time."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_what_is_as_it_was_prepared_is_neither_prepared_nor_hashed_again(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert set(prepared.content()) == NAMES
    hashed: list[str] = []
    real = digests.sha256_of

    def hash_and_note(path: Path) -> str:
        hashed.append(path.name)
        return real(path)

    monkeypatch.setattr(digests, "sha256_of", hash_and_note)
    prepared.prepare()
    # After the copy, all inode change times differ.
    assert set(hashed) == NAMES
    hashed.clear()
    prepared.prepare()
    assert not hashed
    os.utime(prepared.folder / "config.json")
    prepared.prepare()
    assert hashed == ["config.json"]
    assert (prepared.converted, prepared.packed, warnings(caplog)) == (0, 0, [])


@pytest.mark.parametrize("name", sorted(NAMES))
def test_one_changed_bit_is_found_whatever_the_time_of_modification_says(
    prepared: Prepared, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    prepared.prepare()
    before = prepared.content()
    flip(prepared.folder / name)
    prepared.prepare()
    # The packed weights are rebuilt from the other files, without a conversion.
    assert (prepared.converted, prepared.packed) == ((0, 1) if name.startswith("packed") else (1, 0))
    assert prepared.content() == before
    assert digests.changed_files(prepared.folder) == []
    load_int8_model(prepared.folder)
    if name != "source":
        (said,) = warnings(caplog)
        assert said.endswith(f"preparing again: {name}")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    """Replace a file by a link to a file with the same bytes, which another program may change later."""
    moved = path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(moved)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced(path: Path) -> None:
    """Replace a file by another one of the same size, by moving it."""
    other = path.parent.parent / "other"
    other.write_bytes(bytes(path.stat().st_size))
    stat = path.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("name", ["int8.safetensors", "packed.bin", "config.json"])
@pytest.mark.parametrize("damage", [cut, pipe, link, folder, replaced, Path.unlink], ids=lambda call: call.__name__)
def test_a_file_that_is_another_thing_is_prepared_again(
    prepared: Prepared, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    before = prepared.content()
    damage(prepared.folder / name)
    prepared.prepare()
    assert prepared.content() == before
    (said,) = warnings(caplog)
    assert said.endswith(f"preparing again: {name}")


@pytest.mark.parametrize("extra", ["model.safetensors", "added_tokens.json", "modeling_tiny.py", ".hidden", "a\nb"])
def test_a_file_that_was_not_prepared_does_not_stay(prepared: Prepared, extra: str) -> None:
    (prepared.folder / extra).write_text("{}")
    prepared.prepare()
    assert prepared.converted == 1
    assert set(prepared.content()) == NAMES


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"{",
        b"[]",
        b'{"config.json": 1}',
        b'{"config.json": [1, 2, 3, 4]}',
        b'{"config.json": [1, 2, "3", "4"]}',
        b"{}",
        b'{"../../source/config.json": [1, 2, 3, "4"]}',
        b"[" * 100_000,
        b"\xff\xfe",
        None,
    ],
)
def test_a_record_that_cannot_be_read_vouches_for_nothing(
    prepared: Prepared, record: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = prepared.folder / digests.RECORD
    path.unlink() if record is None else path.write_bytes(record)
    prepared.prepare()
    assert (prepared.converted, len(warnings(caplog))) == (1, 1)
    assert digests.changed_files(prepared.folder) == []


def test_what_was_prepared_before_there_were_digests_is_prepared_again(prepared: Prepared) -> None:
    stamp = prepared.folder / "source"
    stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {"format": 1}))
    (prepared.folder / digests.RECORD).unlink()
    prepared.prepare()
    assert prepared.converted == 1


def test_packing_that_was_cut_off_is_done_again_without_converting(prepared: Prepared) -> None:
    before = prepared.content()
    (prepared.folder / "packed.json").unlink()
    # This pipe has no reader.
    os.mkfifo(prepared.folder / "packed.bin.part")
    prepared.prepare()
    assert (prepared.converted, prepared.packed) == (0, 1)
    assert prepared.content() == before


def test_weights_that_were_packed_for_another_machine_are_packed_anew(prepared: Prepared) -> None:
    before, index = prepared.content(), prepared.folder / packed.INDEX_FILE
    index.write_text(json.dumps(json.loads(index.read_text()) | {"key": "another machine's"}))
    digests.write_digests(prepared.folder)
    assert not packed.fits_machine(prepared.folder)
    prepared.prepare()
    assert (prepared.converted, prepared.packed) == (0, 1)
    assert prepared.content() == before


def test_a_folder_that_cannot_be_written_to_is_compared_all_the_same(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(digests, "write_record", refused)
    assert digests.changed_files(prepared.folder) == []
    flip(prepared.folder / "config.json")
    assert digests.changed_files(prepared.folder) == ["config.json"]
