"""A checkpoint's tensors by name, and modules that are filled with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn


def plain(config: dict[str, Any], *but: str) -> dict[str, Any]:
    """A part's own facts: what names its class, or is another part's, is ours to know."""
    out = {"model_type", "architectures", "auto_map", "torch_dtype", "transformers_version", "version", *but}
    return {k: v for k, v in config.items() if k not in out and not k.startswith("_")}


class Tensors:
    """A checkpoint's tensors by name, in one file or several."""

    def __init__(self, folder: Path, files: ExitStack, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._where: dict[str, Any] = {}
        for path in _files(folder):
            file = files.enter_context(safe_open(path, framework="pt"))
            self._where |= dict.fromkeys(file.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._where:
            raise ValueError(f"it lacks {name}")
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        return tensor.to(self.device, self.dtype)


def _files(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"].values()
        yield from (folder / name for name in dict.fromkeys(names))
    else:
        yield folder / "model.safetensors"


def fill(
    module: nn.Module, tensors: Tensors, prefixes: dict[str, str], made: dict[str, torch.Tensor] | None = None
) -> None:
    """Give a module its parameters, and the buffers that are of a checkpoint; `prefixes`: of its own names, the first that fits, to the checkpoint's."""
    made = made or {}
    for name in list(module.state_dict()):
        own = next(p for p in prefixes if name.startswith(p))
        tensor = made[name] if name in made else tensors[prefixes[own] + name.removeprefix(own)]
        owner, _, leaf = name.rpartition(".")
        at = module.get_submodule(owner)
        given = at._parameters if leaf in at._parameters else at._buffers
        shape = given[leaf].shape  # type: ignore[union-attr]
        if tensor.shape != shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, not {list(shape)}")
        if leaf in at._parameters:
            at._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            at._buffers[leaf] = tensor
    module.to(tensors.device).eval()
