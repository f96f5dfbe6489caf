"""Reads a checkpoint's configuration and its tensors by name, and fills modules with the tensors.

Used for models that antiphon itself builds from their configuration, instead of `transformers`. This module reads
safetensors files, and does not depend on the architecture of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import nn
from transformers import GenerationConfig

from antiphon.contracts import ReplyOptions
from antiphon.engine.checkpoint_files import WHOLE, LoadingProgress, mapped_tensors

Config = TypeVar("Config")
Value = TypeVar("Value")


class CheckpointType(msgspec.Struct, frozen=True):
    """The model type in config.json. It is read first, because the other fields depend on it."""

    model_type: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The sampling defaults in the generation_config.json of a checkpoint.

    The fields are those of Sampling. They are used for options that a request does not set.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float

    @classmethod
    def read(cls, folder: Path) -> SamplingDefaults:
        """Return the defaults of a checkpoint's folder: greedy sampling unless the file sets other values."""
        try:
            config = GenerationConfig.from_pretrained(folder)
        except OSError:
            config = GenerationConfig()  # type: ignore[no-untyped-call]
        return cls(
            temperature=_or(config.temperature, 1.0) if config.do_sample else 0.0,
            top_p=_or(config.top_p, 1.0),
            top_k=int(_or(config.top_k, 0)),
            min_p=_or(config.min_p, 0.0),
            repetition_penalty=_or(config.repetition_penalty, 1.0),
        )

    def unless(self, options: ReplyOptions) -> SamplingDefaults:
        """Return the options of a reply, with these defaults for the options that it does not set."""
        return SamplingDefaults(
            temperature=_or(options.temperature, self.temperature),
            top_p=_or(options.top_p, self.top_p),
            top_k=int(_or(options.top_k, self.top_k)),
            min_p=_or(options.min_p, self.min_p),
            repetition_penalty=_or(options.repetition_penalty, self.repetition_penalty),
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def read_config(path: Path, kind: type[Config]) -> Config:
    """Decode a JSON file of a checkpoint, such as config.json, as `kind`, a msgspec.Struct.

    Ignores fields that `kind` lacks. Raises OSError if the file cannot be read. Raises ValueError if a field is missing
    or has a wrong type; the message names the file and the field.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def own_config(config: Mapping[str, Value], *exclude: str) -> dict[str, Value]:
    """Return the fields of a configuration that describe its own part of a model.

    Leaves out keys that name the configuration's class or file, keys that begin with an underscore, and the keys
    `exclude`, which describe other parts.
    """
    left_out = {"model_type", "architectures", "auto_map", "torch_dtype", "transformers_version", "version", *exclude}
    return {k: v for k, v in config.items() if k not in left_out and not k.startswith("_")}


class Tensors:
    """A checkpoint's tensors by name, from its mapped safetensors files. A tensor is read when it is accessed.

    `files`: an exit stack that ends the report of progress. Each tensor is copied to `device` and converted to `dtype`;
    one that is on the CPU and keeps its dtype is not copied. Reading a missing tensor raises ValueError. Raises OSError
    if the folder has no such file.
    """

    def __init__(self, folder: Path, files: ExitStack, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._mapped = mapped_tensors(folder)
        if not self._mapped:
            raise FileNotFoundError(f"{folder} has no {WHOLE}")
        self._progress = files.enter_context(LoadingProgress.of(folder))

    def __contains__(self, name: str) -> bool:
        return name in self._mapped

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._mapped:
            raise ValueError(f"it lacks {name}")
        tensor = self._mapped[name].to(self.device, self.dtype)
        self._progress.advance(self._mapped[name].nbytes)
        return tensor


def fill(
    module: nn.Module, tensors: Tensors, prefixes: dict[str, str], made: dict[str, torch.Tensor] | None = None
) -> None:
    """Set a module's parameters and persistent buffers from a checkpoint, in place, and put it in eval mode.

    `prefixes`: maps prefixes of the module's names to prefixes in the checkpoint; the first match applies. `made`:
    tensors by the module's names, which override those of the checkpoint. The module may be on the meta device. Raises
    ValueError if a tensor is missing or has a wrong shape.
    """
    made = made or {}
    for name in list(module.state_dict()):
        prefix = next(p for p in prefixes if name.startswith(p))
        tensor = made[name] if name in made else tensors[prefixes[prefix] + name.removeprefix(prefix)]
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        shape = getattr(owner, leaf).shape
        if tensor.shape != shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, not {list(shape)}")
        is_parameter = isinstance(getattr(owner, leaf), nn.Parameter)
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
    module.to(tensors.device).eval()
