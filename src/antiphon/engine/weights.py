"""A checkpoint's decoder with weights in the type that suits the machine: int8 where a CPU multiplies those best, else its own.

int8: weights rounded per output, activations per row as they come (W8A8, arXiv:2208.07339 without its outlier split); products
are summed exactly in int32, so what one row gives does not depend on the rows beside it. Measured for the 0.5B default model on
two cores (AVX512-VNNI and AMX), all matrix products of a step: 36 ms for 1 to 4 rows, 41 ms for 16, 64 ms for 64; bfloat16 takes
64, 68 and 88.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from antiphon.engine.runner import Runner
from antiphon.errors import ModelError

log = logging.getLogger(__name__)

INT8_FILE = "int8.safetensors"
SCALE = ".scale"
KINDS = ("auto", "int8", "bf16", "fp32")
# Fewer rows than this go a slower way through oneDNN: 104 ms for one, 30 for four.
MIN_ROWS = 4
# Activations are unsigned, around this: without AMX, signed ones have no fast kernel (1,000 ms instead of 1.2 for one product of
# the 0.5B model); the results are the same to the bit.
ZERO = 128
# Projections of one input are one product.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def best_kind(device: str) -> str:
    """The type of weights that suits the device."""
    if device != "cpu":
        return "bf16"
    capability = torch.backends.cpu.get_cpu_capability()
    if torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported():
        return "int8"
    return "bf16" if capability.startswith("AVX512") and torch.cpu._is_avx512_bf16_supported() else "fp32"


def load_model(folder: Path, *, device: str = "cpu", weights: str = "auto", threads: int = 0) -> Runner:
    """The decoder of a checkpoint folder, ready to step. `threads` 0: one a core this process may use.

    Raises OSError, ValueError, RuntimeError for a checkpoint that does not load, ModelError for a device that is not there.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("no CUDA device is to be found: set --device cpu")
    if device == "cpu":
        torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0))))
    kind = best_kind(device) if weights == "auto" else weights
    if kind == "int8":
        return Runner(_int8_model(folder), kv_dtype=torch.bfloat16)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    model = model.to(device).eval()
    return Runner(model, torch.device(device), dtype, dtype)


def write_int8(model: Any, folder: Path) -> None:
    """Write `model`'s weights (any float type) as INT8_FILE into a folder that holds its configuration."""
    tensors: dict[str, torch.Tensor] = {}
    linear = {name for name, module in model.named_modules() if _packable(module)}
    for name, tensor in model.state_dict().items():
        if name.removesuffix(".weight") in linear and name.endswith(".weight"):
            tensors[name], tensors[name.removesuffix(".weight") + SCALE] = quantized(tensor)
        else:
            tensors[name] = tensor.to(torch.bfloat16).clone()
    save_file(tensors, folder / INT8_FILE)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [out, in] and float32 [out]: weight = int8 * scale."""
    scale = weight.float().abs().amax(1).div(127).clamp(min=1e-12)
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


def _packable(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0


def _int8_model(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    path = folder / INT8_FILE
    if not path.is_file():
        # A checkpoint that was not prepared: rounded here, each time.
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        model.eval()
        _pack(model, {n: quantized(m.weight) for n, m in model.named_modules() if _packable(m)})
        return model
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    # The file is mapped, not read: of the embeddings only the rows that are used come into memory.
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        packed = {
            n.removesuffix(SCALE): (file.get_tensor(n.removesuffix(SCALE) + ".weight"), file.get_tensor(n))
            for n in names
            if n.endswith(SCALE)
        }
        plain = {
            n: file.get_tensor(n) for n in names if not n.endswith(SCALE) and n.removesuffix(".weight") not in packed
        }
    _pack(model, packed, plain)
    table = model.get_input_embeddings()
    for name, tensor in plain.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in module._parameters:
            wide = tensor if module is table else tensor.float()
            module._parameters[leaf] = nn.Parameter(wide, requires_grad=False)
    missing = [n for n, p in model.named_parameters() if p.is_meta]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing[:3])}")
    return model


def _pack(
    model: nn.Module,
    weights: dict[str, tuple[torch.Tensor, torch.Tensor]],
    plain: dict[str, torch.Tensor] | None = None,
) -> None:
    """Put int8 products in the place of the linear layers in `weights`."""

    def bias(name: str) -> torch.Tensor | None:
        if plain is not None:
            found = plain.get(name + ".bias")
            return None if found is None else found.float()
        kept = model.get_submodule(name).bias
        return None if kept is None else kept.detach().float()  # type: ignore[operator]

    for names in _groups(set(weights)):
        ready = _Product([(*weights.pop(n), bias(n)) for n in names])
        for i, name in enumerate(names):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, Int8Linear(ready, i))


def _groups(names: set[str]) -> Iterator[list[str]]:
    for name in sorted(names):
        if name not in names:
            continue
        owner, _, leaf = name.rpartition(".")
        group = next((g for g in GROUPS if leaf in g), (leaf,))
        together = [f"{owner}.{n}".lstrip(".") for n in group]
        found = together if all(n in names for n in together) else [name]
        names.difference_update(found)
        yield found


class _Product:
    """One int8 product: the outputs of several layers that share their input, side by side."""

    def __init__(self, parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> None:
        self.sizes = [len(scale) for _, scale, _ in parts]
        self.width = parts[0][0].shape[1]
        weight = torch.cat([w for w, _, _ in parts]) if len(parts) > 1 else parts[0][0]
        self._weight = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
        self._scale = torch.cat([s for _, s, _ in parts])
        self._zero = torch.zeros(1, dtype=torch.int64)
        self._bias: torch.Tensor | None = None
        if any(b is not None for _, _, b in parts):
            self._bias = torch.cat([torch.zeros(len(s)) if b is None else b for _, s, b in parts])
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor] = []

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """The outputs of layer `index`. The others of the group ask for theirs with the same `x` next."""
        if self._input is not x:
            whole = self._times(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], sum(self.sizes))
            self._outputs = list(torch.split(whole, self.sizes, -1)) if len(self.sizes) > 1 else [whole]
            self._input = x
        out = self._outputs[index]
        if index == len(self.sizes) - 1:
            self._input, self._outputs = None, []
        return out

    def _times(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        if not rows:
            return x.new_zeros(0, sum(self.sizes))
        scale = x.abs().amax(1, keepdim=True).div_(127.0).clamp_(min=1e-12)
        whole: torch.Tensor = torch.round(x / scale).add_(ZERO).to(torch.uint8)
        if rows < MIN_ROWS:
            whole = nn.functional.pad(whole, (0, 0, 0, MIN_ROWS - rows))
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            whole, 1.0, ZERO, self._weight, self._scale, self._zero, None, 1.0, 0, torch.float32, "none", [], ""
        )[:rows].mul_(scale)
        return out if self._bias is None else out.add_(self._bias)


class Int8Linear(nn.Module):
    """One layer's share of a product. Takes and gives float32."""

    def __init__(self, product: _Product, index: int) -> None:
        super().__init__()
        self._product, self._index = product, index
        self.out_features = product.sizes[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x float32 [..., in] to [..., out]."""
        return self._product.part(x, self._index)
