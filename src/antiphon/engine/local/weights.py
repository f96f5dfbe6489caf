"""Loads a checkpoint's decoder with weights in the type that suits the machine: int8 on CPUs that multiply it fastest.

int8: weights are rounded per output, and activations per row at run time (W8A8, arXiv:2208.07339 without its outlier
split). Sums of products are exact in int32, so a row's result does not depend on the other rows. A CPU without VNNI
first adds pairs of products in 16 bits. Its weights have 7 bits, so that these sums always fit (`packed.py`).

Measured for the 0.5B default model on two cores, all matrix products of a step except the head's: with AVX512-VNNI and
AMX, 33 ms for 1 to 16 rows and 46 ms for 64; bfloat16 takes 64, 68 and 88. With AVX2 alone, 62, 162 and 319 ms for 1,
16 and 64 rows; float32 takes 99, 297 and 588. Rounding changes the distribution of the next token by a KL divergence of
0.011 nats, or 0.020 with 7 bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from antiphon.engine.checkpoint_files import LoadingProgress
from antiphon.engine.local import packed
from antiphon.engine.local.runner import Runner
from antiphon.engine.threads import load_in_own_thread
from antiphon.errors import ModelError

log = logging.getLogger(__name__)

INT8_FILE = "int8.safetensors"
# The suffix of an int8 weight's companion tensor: its scale for each output.
SCALE_SUFFIX = ".scale"
# The zero point of activations, which are unsigned. Without AMX, signed activations have no fast kernel (1,000 ms
# instead of 1.2 for one product of the 0.5B model). The results are bit-identical.
ZERO_POINT = 128
# Projections with the same input are computed as one product.
FUSED_LAYERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def best_weights(device: str) -> str:
    """Return the type of weights whose products are fastest on a device: int8, bf16 or fp32."""
    if device != "cpu":
        return "bf16"
    return "int8" if torch.cpu._is_avx2_supported() else "fp32"


def weights_for(device: str, weights: str, *, mixture: bool = False) -> tuple[str, torch.dtype]:
    """Return the type of weights (int8, bf16 or fp32) for a device, and the torch type of all other tensors.

    `weights`: the requested type, or `auto`. `mixture`: whether the model is a mixture of experts, which is not
    quantized: `auto` then means bf16. Raises ModelError if the device is missing or does not support the type.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise ModelError("no CUDA device found: set --device cpu")
    kind = best_weights(device) if weights == "auto" else weights
    if kind == "int8" and device != "cpu":
        raise ModelError("int8 weights are for the CPU: set --weights bf16")
    if kind == "int8" and mixture:
        if weights == "int8":
            raise ModelError("int8 weights are not for mixtures of experts: set --weights bf16")
        kind = "bf16"
    return kind, torch.float32 if kind == "fp32" else torch.bfloat16


def load_whole(kind: Any, folder: Path, **options: Any) -> Any:
    """Load a checkpoint with `kind.from_pretrained` from local files, and return the model in eval mode.

    `transformers` maps the files: on the CPU, weights that keep their dtype are not copied. It reads pickled weights if
    there are no others, and runs no code in them. It gives a tensor that the files lack random values, and only logs
    it. Here it is an error. `options`: further arguments of `from_pretrained`. Raises ValueError for a missing tensor
    or one of another shape, and the errors of `from_pretrained`.
    """
    with LoadingProgress.of(folder):
        model, found = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True, **options)
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"it lacks {', '.join(missing[:3])}{f' and {len(missing) - 3} more' if missing[3:] else ''}")
    if wrong := sorted(str(name) for name, *_ in found["mismatched_keys"]):
        raise ValueError(f"{', '.join(wrong[:3])} have other shapes than config.json describes")
    return model.eval()


def load_model(folder: Path, *, device: str = "cpu", weights: str = "auto", threads: int = 0) -> Runner:
    """Load the decoder of a checkpoint folder, ready to step. Blocks while a temporary thread loads the weights.

    `weights`: as in `weights_for`. `threads`: threads of the CPU; 0: one for each available core. Raises OSError,
    ValueError or RuntimeError if the checkpoint does not load, ModelError if the device is missing.
    """
    return load_in_own_thread(lambda: _load(folder, device, weights), device=device, threads=threads)


def _load(folder: Path, device: str, weights: str) -> Runner:
    kind, dtype = weights_for(device, weights)
    if kind == "int8":
        return Runner(load_int8_model(folder), kv_dtype=torch.bfloat16)
    model = load_whole(AutoModelForCausalLM, folder, dtype=dtype)
    model = model.to(device).eval()
    return Runner(model, torch.device(device), dtype, dtype)


def write_int8(model: Any, folder: Path) -> None:
    """Write a model's weights as INT8_FILE into a folder that already holds its configuration.

    `model`: of `transformers`, in any float type. Linear layers whose sizes are multiples of 16 become int8 with a
    scale; all other tensors are written in bfloat16. Raises OSError.
    """
    tensors: dict[str, torch.Tensor] = {}
    linear = {name for name, module in model.named_modules() if _packable(module)}
    for name, tensor in model.state_dict().items():
        if name.removesuffix(".weight") in linear and name.endswith(".weight"):
            tensors[name], tensors[name.removesuffix(".weight") + SCALE_SUFFIX] = quantize(tensor)
        else:
            tensors[name] = tensor.to(torch.bfloat16).clone()
    save_file(tensors, folder / INT8_FILE)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a float weight [out, in] to int8 with a scale for each output, float32 [out]; weight = int8 * scale.

    The largest weight of an output becomes 127 or -127.
    """
    scale = weight.float().abs().amax(1).div(127).clamp(min=1e-12)
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


def _packable(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0


def load_int8_model(folder: Path) -> Any:
    """Load a checkpoint with int8 linear layers. Embeddings keep the file's type; all else is float32.

    Maps the folder's packed weights if they fit this machine. Otherwise packs the weights of INT8_FILE. Without that
    file, quantizes the checkpoint's own weights on every load. Raises OSError, ValueError.
    """
    path = folder / INT8_FILE
    if not path.is_file():
        model: Any = load_whole(AutoModelForCausalLM, folder, dtype=torch.float32)
        model.eval()
        _replace_linear(model)
        return model
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    # The files are mapped, not read, so only the used rows of the embedding table are loaded into memory.
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        scales = {n.removesuffix(SCALE_SUFFIX): file.get_tensor(n) for n in names if n.endswith(SCALE_SUFFIX)}
        ready = packed.read(folder)
        if set(scales) != {name for group in ready for name in group}:
            ready = dict(_packed_groups(file))
        plain_names = {n for n in names if not n.endswith(SCALE_SUFFIX) and n.removesuffix(".weight") not in scales}
        plain = {n: file.get_tensor(n) for n in plain_names}
    for group, weight in ready.items():
        biases = [plain.get(n + ".bias") for n in group]
        _set_int8_layers(model, group, weight, [scales[n] for n in group], biases)
    _set_parameters(model, plain)
    missing = [n for n, p in model.named_parameters() if p.is_meta]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing[:3])}")
    return model


def _set_parameters(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Set the model's remaining parameters, in float32. Its embedding table keeps its type."""
    table = model.get_input_embeddings()
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in dict(module.named_parameters(recurse=False)):
            wide = tensor if module is table else tensor.float()
            setattr(module, leaf, nn.Parameter(wide, requires_grad=False))


def quantize_linear_layers(module: nn.Module) -> None:
    """Replace a loaded module's linear layers by int8 ones, in place, and convert its other parameters to float32.

    Linear layers whose sizes are not multiples of 16 are not replaced. Embedding tables, and parameters that share
    their weights, keep their type. The module must be on the CPU.
    """
    _replace_linear(module)
    tables = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if id(parameter) not in tables:
                setattr(part, name, nn.Parameter(parameter.detach().float(), requires_grad=False))


def write_packed(folder: Path) -> None:
    """Write the weights of a folder's INT8_FILE to the same folder, in the layout that this machine's products use.

    `packed.py` describes the files. Raises OSError.
    """
    with safe_open(folder / INT8_FILE, framework="pt") as file:
        packed.write(folder, _packed_groups(file))


def _packed_groups(file: Any) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    scales = [name for name in file.keys() if name.endswith(SCALE_SUFFIX)]  # noqa: SIM118
    for group in _groups({name.removesuffix(SCALE_SUFFIX) for name in scales}):
        yield tuple(group), packed.pack(torch.cat([file.get_tensor(n + ".weight") for n in group]))


def _replace_linear(model: nn.Module) -> None:
    """Quantize the model's linear layers, pack them, and replace them by int8 layers."""
    weights = {name: quantize(module.weight) for name, module in model.named_modules() if _packable(module)}
    for group in _groups(set(weights)):
        biases = [model.get_submodule(n).bias for n in group]
        weight = packed.pack(torch.cat([weights[n][0] for n in group]))
        _set_int8_layers(model, group, weight, [weights[n][1] for n in group], biases)


def _set_int8_layers(
    model: nn.Module, group: Sequence[str], weight: torch.Tensor, scales: list[torch.Tensor], biases: Sequence[Any]
) -> None:
    """Replace the layers that `group` names by int8 layers, which share one packed product."""
    wide = [None if b is None else b.detach().float() for b in biases]
    product = Int8Product(weight, scales, wide)
    for i, name in enumerate(group):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, Int8Linear(product, i))


def _groups(names: set[str]) -> Iterator[list[str]]:
    """Group the names of linear layers by their input. Empties `names`."""
    for name in sorted(names):
        if name not in names:
            continue
        owner, _, leaf = name.rpartition(".")
        group = next((g for g in FUSED_LAYERS if leaf in g), (leaf,))
        together = [f"{owner}.{n}".lstrip(".") for n in group]
        found = together if all(n in names for n in together) else [name]
        names.difference_update(found)
        yield found


class Int8Product:
    """One int8 product: the outputs of several layers with the same input, side by side.

    `weight`: packed [in, out]. `scales`, of the weights before packing, and `biases`: of each layer, float32 [its
    outputs]. `sizes`: outputs of each layer. `width`: inputs. Not thread-safe: the model's thread calls the layers in
    their order.
    """

    def __init__(self, weight: torch.Tensor, scales: list[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
        self.sizes = [len(scale) for scale in scales]
        self.width = weight.shape[0]
        self._weight = weight
        self._scale = torch.cat(scales) * packed.weight_divisor()
        self._bias: torch.Tensor | None = None
        if any(b is not None for b in biases):
            self._bias = torch.cat(
                [torch.zeros(size) if b is None else b for size, b in zip(self.sizes, biases, strict=True)]
            )
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor] = []

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return layer `index`'s outputs [..., out] for x, float32 [..., in].

        The first layer computes all layers of the product. The others return their parts when they are called with the
        same `x`; the last one drops the result.
        """
        if self._input is not x:
            whole = self.times(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], sum(self.sizes))
            self._outputs = list(torch.split(whole, self.sizes, -1)) if len(self.sizes) > 1 else [whole]
            self._input = x
        out = self._outputs[index]
        if index == len(self.sizes) - 1:
            self._input, self._outputs = None, []
        return out

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all layers side by side, float32 [rows, sum(sizes)], for x, float32 [rows, in]."""
        if not len(x):
            return x.new_zeros(0, sum(self.sizes))
        scale = x.abs().amax(1, keepdim=True).div_(127.0).clamp_(min=1e-12)
        whole: torch.Tensor = torch.round(x / scale).add_(ZERO_POINT).to(torch.uint8)
        out = packed.product(whole, ZERO_POINT, self._weight, self._scale).mul_(scale)
        return out if self._bias is None else out.add_(self._bias)


class Int8Linear(nn.Module):
    """Linear layer number `index` of an int8 product, in place of an `nn.Linear`. Its inputs and outputs are float32.

    It has no weight of its own, so it cannot be saved to a checkpoint.
    """

    def __init__(self, product: Int8Product, index: int) -> None:
        super().__init__()
        self.product, self.index = product, index
        self.out_features = product.sizes[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 [..., out] for x, float32 [..., in]. Layers of one product must be called in their order."""
        return self.product.part(x, self.index)


# The benchmark's matrices. They have the size of a model with a few billion parameters, and do not fit into any cache.
WIDTH, NUM_MATRICES = 2048, 24
TRIALS = 7


def seconds_a_billion(threads: int = 0) -> float:
    """Return the seconds that the CPU takes to multiply a row by a billion weights.

    The weights have the type that `--weights auto` selects. Returns the best of several trials, because other work on
    the machine can only slow a trial down. `threads`: as in `load_model`. Blocks for about a second.
    """
    return load_in_own_thread(_measure, device="cpu", threads=threads)


@torch.inference_mode()
def _measure() -> float:
    kind, dtype = weights_for("cpu", "auto")
    row = torch.randn(1, WIDTH, dtype=torch.float32 if kind == "int8" else dtype)
    if kind == "int8":
        drawn = torch.randint(-128, 128, (WIDTH, WIDTH), dtype=torch.int8)
        scale = torch.ones(WIDTH)
        products = [Int8Product(packed.pack(drawn), [scale], [None]) for _ in range(NUM_MATRICES)]
        steps = [partial(product.times, row) for product in products]
    else:
        matrices = [torch.randn(WIDTH, WIDTH, dtype=dtype) for _ in range(NUM_MATRICES)]
        steps = [partial(torch.nn.functional.linear, row, matrix) for matrix in matrices]
    best = float("inf")
    for _ in range(TRIALS):
        begun = time.perf_counter()
        for step in steps:
            step()
        best = min(best, time.perf_counter() - begun)
    return best / (NUM_MATRICES * WIDTH**2) * 1e9
