"""Checkpoints made ready to load: GGUF unpacked, weights rounded to the type the machine is best at, once, beside the models.

<home>/prepared/<name>-<type>/       configuration, tokenizer and weights; `source` says what they were made from
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from antiphon.engine.local import packed
from antiphon.engine.local.weights import best_kind, write_int8, write_packed
from antiphon.errors import StoreError

log = logging.getLogger(__name__)

FORMAT = 1
# What a folder needs besides its weights.
BESIDES = ("*.json", "*.jinja", "*.model", "*.txt")


def prepare(source: Path, home: Path, name: str, weights: str = "auto", device: str = "cpu") -> Path:
    """The folder that `source` (a .gguf file, or a checkpoint's folder) is loaded from; made first where it is not there.

    Takes up to a minute and the memory of the weights in float32. Safe for several processes. Raises StoreError.
    """
    kind = best_kind(device) if weights == "auto" else weights
    gguf = source if source.suffix == ".gguf" else source / "model.gguf"
    if not gguf.is_file():
        if not (source / "config.json").is_file():
            raise StoreError(f"{source}: neither a checkpoint's folder (it has no config.json) nor a .gguf file")
        if kind != "int8":
            return source
    made_from = {"format": FORMAT} | _identity(gguf if gguf.is_file() else source)
    target = home / "prepared" / f"{name}-{kind}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = target / "source"
        if stamp.is_file() and json.loads(stamp.read_text()) == made_from:
            if kind == "int8" and not packed.fresh(target):
                _apart(write_packed, target)
            return target
        log.info("preparing %s as %s: once, up to a minute", name, kind)
        half = target.with_name(target.name + ".part")
        for old in (half, target):
            shutil.rmtree(old, ignore_errors=True)
        half.mkdir()
        try:
            _apart(_write, gguf if gguf.is_file() else source, half, kind)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            shutil.rmtree(half, ignore_errors=True)
            raise StoreError(f"{source} cannot be made ready: {error}") from error
        (half / "source").write_text(json.dumps(made_from))
        half.rename(target)
    return target


def _apart(call: Callable[..., None], *args: Any) -> None:
    """In a process of its own: what it takes of memory would stay with this one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        apart.submit(call, *args).result()


def _identity(path: Path) -> dict[str, Any]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {"files": [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.is_file()]}


def _write(source: Path, target: Path, kind: str) -> None:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if source.is_dir():
        for pattern in BESIDES:
            for file in source.glob(pattern):
                if not file.name.endswith("index.json"):
                    shutil.copyfile(file, target / file.name)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
    else:
        where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
        AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(target)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **where
        )
        # What was unpacked is a plain model.
        model.config.quantization_config = None
        model.config.save_pretrained(target)
        model.generation_config.save_pretrained(target)
    if kind == "int8":
        write_int8(model, target)
        del model
        write_packed(target)
    else:
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        model.to(dtype).save_pretrained(target)
