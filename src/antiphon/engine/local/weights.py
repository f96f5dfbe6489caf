"""A checkpoint's decoder with weights in the type that suits the machine: int8 where a CPU multiplies those best, else its own.

int8: weights rounded per output, activations per row as they come (W8A8, arXiv:2208.07339 without its outlier split); products
are summed exactly in int32, so what one row gives does not depend on the rows beside it. Measured for the 0.5B default model on
two cores (AVX512-VNNI and AMX), all matrix products of a step but the head's: 33 ms for 1 to 16 rows, 46 ms for 64; bfloat16
takes 64, 68 and 88.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from antiphon.engine.local import packed
from antiphon.engine.local.runner import Runner
from antiphon.engine.threads import load_in_own_thread
from antiphon.errors import ModelError

log = logging.getLogger(__name__)

INT8_FILE = "int8.safetensors"
SCALE = ".scale"
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


def placed(device: str, weights: str, *, mixture: bool = False) -> tuple[str, torch.dtype]:
    """The type of weights asked for on a device, and what a part that is not rounded is kept in. `mixture`: of experts, which are not rounded.

    Raises ModelError for a device that is not there, or a type that is not for it.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise ModelError("no CUDA device is to be found: set --device cpu")
    kind = best_kind(device) if weights == "auto" else weights
    if kind == "int8" and device != "cpu":
        raise ModelError("int8 weights are for the CPU: set --weights bf16")
    if kind == "int8" and mixture:
        if weights == "int8":
            raise ModelError("int8 weights are not for mixtures of experts: set --weights bf16")
        kind = "bf16"
    return kind, torch.float32 if kind == "fp32" else torch.bfloat16


def load_model(folder: Path, *, device: str = "cpu", weights: str = "auto", threads: int = 0) -> Runner:
    """The decoder of a checkpoint folder, ready to step. `threads` 0: one a core this process may use.

    The weights are loaded in a thread of their own (engine/threads.py), which is waited for.

    Raises OSError, ValueError, RuntimeError for a checkpoint that does not load, ModelError for a device that is not there.
    """
    return load_in_own_thread(lambda: _load(folder, device, weights), device=device, threads=threads)


def _load(folder: Path, device: str, weights: str) -> Runner:
    kind, dtype = placed(device, weights)
    if kind == "int8":
        return Runner(_int8_model(folder), kv_dtype=torch.bfloat16)
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
        _replace(model, {n: quantized(m.weight) for n, m in model.named_modules() if _packable(m)})
        return model
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    # The files are mapped, not read: of the embeddings only the rows that are used come into memory.
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        scales = {n.removesuffix(SCALE): file.get_tensor(n) for n in names if n.endswith(SCALE)}
        ready = packed.read(folder)
        if set(scales) != {name for group in ready for name in group}:
            ready = dict(_packed_groups(file))
        plain = {
            n: file.get_tensor(n) for n in names if not n.endswith(SCALE) and n.removesuffix(".weight") not in scales
        }
    for group, weight in ready.items():
        _put(model, group, weight, [scales[n] for n in group], [plain.get(n + ".bias") for n in group])
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


def round_linear(module: nn.Module) -> None:
    """int8 products in the place of a loaded module's linear layers, in place. All else becomes float32, but for its tables of embeddings."""
    _replace(module, {n: quantized(m.weight) for n, m in module.named_modules() if _packable(m)})
    tables = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in tables:
                part._parameters[name] = nn.Parameter(parameter.detach().float(), requires_grad=False)


def write_packed(folder: Path) -> None:
    """Beside INT8_FILE, its weights as this machine multiplies them (engine/packed.py). Raises OSError."""
    with safe_open(folder / INT8_FILE, framework="pt") as file:
        packed.write(folder, _packed_groups(file))


def _packed_groups(file: Any) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    for group in _groups({n.removesuffix(SCALE) for n in file.keys() if n.endswith(SCALE)}):  # noqa: SIM118
        yield tuple(group), packed.pack(torch.cat([file.get_tensor(n + ".weight") for n in group]))


def _replace(model: nn.Module, weights: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Put int8 products in the place of the linear layers in `weights`: name -> (int8 [out, in], scale [out])."""
    for group in _groups(set(weights)):
        biases = [model.get_submodule(n).bias for n in group]
        weight = packed.pack(torch.cat([weights[n][0] for n in group]))
        _put(model, group, weight, [weights[n][1] for n in group], biases)


def _put(
    model: nn.Module, group: Sequence[str], weight: torch.Tensor, scales: list[torch.Tensor], biases: Sequence[Any]
) -> None:
    wide = [None if b is None else b.detach().float() for b in biases]
    product = _Product(weight, scales, wide)
    for i, name in enumerate(group):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, Int8Linear(product, i))


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
    """One int8 product: the outputs of several layers that share their input, side by side. `weight`: packed [in, out]."""

    def __init__(self, weight: torch.Tensor, scales: list[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
        self.sizes = [len(scale) for scale in scales]
        self.width = weight.shape[0]
        self._weight = weight
        self._scale = torch.cat(scales)
        self._zero = torch.zeros(1, dtype=torch.int64)
        self._bias: torch.Tensor | None = None
        if any(b is not None for b in biases):
            self._bias = torch.cat(
                [torch.zeros(size) if b is None else b for size, b in zip(self.sizes, biases, strict=True)]
            )
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
        if not len(x):
            return x.new_zeros(0, sum(self.sizes))
        scale = x.abs().amax(1, keepdim=True).div_(127.0).clamp_(min=1e-12)
        whole: torch.Tensor = torch.round(x / scale).add_(ZERO).to(torch.uint8)
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            whole, 1.0, ZERO, self._weight, self._scale, self._zero, None, 1.0, 0, torch.float32, "none", [], ""
        ).mul_(scale)
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
