"""Converts a language model's checkpoint, and caches the result next to the models.

GGUF files are dequantized, and weights are rounded to the dtype that the machine multiplies fastest. The result is
stored in <home>/prepared/<name>-<type>/: configuration, tokenizer, weights, a file `source` that identifies the source
files, and the digests of all of them. If the source or a file of the result changes, the conversion runs again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from antiphon.adapters.causal_lm.digests import changed_files, write_digests
from antiphon.engine.local import packed
from antiphon.engine.local.weights import best_weights, load_whole, write_int8, write_packed
from antiphon.errors import StoreError

log = logging.getLogger(__name__)

# Version of the prepared folder's format. Raising it invalidates every prepared folder.
FORMAT = 2
# Files that are derived from other files of the folder, and can be rebuilt without a conversion. A file whose name ends
# in `.part` is incomplete.
PACKED = {name + end for name in (packed.DATA_FILE, packed.INDEX_FILE) for end in ("", ".part")}
STAMP = "source"
# The files that are copied in addition to the weights.
SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def prepare(source: Path, home: Path, name: str, weights: str = "auto", device: str = "cpu") -> Path:
    """Return the folder to load `source` from. Converts `source` first unless an up-to-date result exists.

    `source`: a .gguf file, or a checkpoint's folder. `home`: the parent folder of `prepared/`. The result's folder is
    named after `name` and the dtype of the weights. A checkpoint's folder that needs no rounding to int8 is returned
    unchanged.

    A conversion takes up to a minute, and memory for the weights in float32. It runs in a separate process, and this
    function waits for it. A file lock makes concurrent calls from several processes safe. Raises StoreError if the
    source is not a checkpoint or cannot be converted; an incomplete folder is removed.
    """
    kind = best_weights(device) if weights == "auto" else weights
    gguf = source if source.suffix == ".gguf" else source / "model.gguf"
    if not gguf.is_file():
        if not (source / "config.json").is_file():
            raise StoreError(f"{source}: neither a checkpoint's folder (it has no config.json) nor a .gguf file")
        if kind != "int8":
            return source
    origin = gguf if gguf.is_file() else source
    target = home / "prepared" / f"{name}-{kind}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _prepare_locked(origin, target, name, kind)
    return target


def _prepare_locked(origin: Path, target: Path, name: str, kind: str) -> None:
    made_from = json.dumps({"format": FORMAT, "files": _files(origin)})
    if _is_made_from(target, made_from):
        changed = changed_files(target)
        if changed:
            log.warning("%s: files have changed since it was prepared; preparing again: %s", target, ", ".join(changed))
        if PACKED.issuperset(changed):
            if kind == "int8" and (changed or not packed.fits_machine(target)):
                log.info("preparing %s for this processor (only once)", name)
                for path in (target / file for file in changed):
                    # The path may also be a folder or a pipe.
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
                in_own_process(write_packed, target)
                write_digests(target)
            return
    log.info("preparing %s as %s (only once; takes up to a minute)", name, kind)
    half = target.with_name(target.name + ".part")
    for old in (half, target):
        shutil.rmtree(old, ignore_errors=True)
    half.mkdir()
    try:
        in_own_process(_write, origin, half, kind)
        (half / STAMP).write_text(made_from)
        write_digests(half)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        shutil.rmtree(half, ignore_errors=True)
        raise StoreError(f"{origin} cannot be prepared: {error}") from error
    half.rename(target)


def _is_made_from(target: Path, made_from: str) -> bool:
    try:
        return (target / STAMP).read_text() == made_from
    except (OSError, ValueError):
        return False


def in_own_process(call: Callable[..., None], *args: Any) -> None:
    """Call a function in a temporary process, because this process would not free the memory of a conversion."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        with without_bars():
            result = process.submit(call, *args)
        result.result()


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable progress bars in processes that are started within this context, because they would garble the log.

    `transformers` has a switch for its own bars, but it shows a plain tqdm bar while it dequantizes a GGUF file.
    """
    before = os.environ.get("TQDM_DISABLE")
    os.environ["TQDM_DISABLE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TQDM_DISABLE"]
        else:
            os.environ["TQDM_DISABLE"] = before


def _files(path: Path) -> list[list[str | int]]:
    """Return a checkpoint's files, each with its size in bytes and its modification time in ns."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.is_file()]


def _write(source: Path, target: Path, kind: str) -> None:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any
    if source.is_dir():
        for pattern in SIDE_FILES:
            for file in source.glob(pattern):
                if not file.name.endswith("index.json"):
                    shutil.copyfile(file, target / file.name)
        model = load_whole(AutoModelForCausalLM, source, dtype="auto")
    else:
        model = _unpacked(source, target)
    if kind == "int8":
        write_int8(model, target)
        del model
        write_packed(target)
    else:
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        model.to(dtype).save_pretrained(target)


def _unpacked(gguf: Path, target: Path) -> Any:
    """Load a GGUF file in float32, and save its tokenizer and configuration in `target`."""
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True).save_pretrained(target)
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        local_files_only=True,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The dequantized model is saved as an unquantized one.
    model.config.quantization_config = None
    model.config.save_pretrained(target)
    model.generation_config.save_pretrained(target)
    return model
