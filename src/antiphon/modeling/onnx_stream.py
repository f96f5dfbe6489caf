"""Runs ONNX graphs that take audio in chunks and keep their state in inputs and outputs. Shared by adapters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import onnxruntime

from antiphon.errors import ModelError

Array = npt.NDArray[np.float32]
Config = TypeVar("Config", bound=msgspec.Struct)

# How graphs name the output that is the next value of a state input. The first form that exists counts.
NEXT_NAMES = ("new_{}", "next_{}", "{}_out", "{}_new", "{}_next")


def read_config(folder: Path, model_id: str, kind: type[Config]) -> Config:
    """Return the folder's config.json as an object of `kind`. Raises ModelError if it is none."""
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{model_id}: config.json: {error}") from None


def graph_file(folder: Path, model_id: str, named: str = "") -> Path:
    """Return the folder's graph: the file `named`, or its only .onnx file. Raises ModelError if it is not clear."""
    files = [folder / named] if named else sorted(folder.rglob("*.onnx"))
    if len(files) != 1 or not files[0].is_file():
        raise ModelError(f"{model_id}: name the .onnx file in config.json as `file`; found {len(files)} in the folder")
    return files[0]


class OnnxStream:
    """One loaded graph. It computes on one core and has no state of its own.

    `state` has the zeros with which a stream begins, by the names of the inputs. `free` are the other inputs.
    """

    def __init__(self, file: Path, model_id: str, states: Mapping[str, str] | None = None) -> None:
        """Load the graph.

        Args:
            file: The .onnx file.
            model_id: The model's name in errors.
            states: By the name of each state input, the output that is its next value. None: by NEXT_NAMES.

        Raises:
            ModelError: The file does not load, a state is missing, or its shape is not fixed.
        """
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            self._graph = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            # The errors that onnxruntime raises for a bad file have no common base class.
            raise ModelError(f"{model_id} does not load: {error}") from error
        self.id = model_id
        self.outputs = frozenset(o.name for o in self._graph.get_outputs())
        inputs = {i.name: i for i in self._graph.get_inputs()}
        self._next = dict(states) if states is not None else self._paired(inputs)
        if missing := [n for pair in self._next.items() for n in pair if n not in self.outputs | inputs.keys()]:
            raise ModelError(f"{model_id}: the graph has no {', '.join(missing)}")
        self.free = tuple(n for n in inputs if n not in self._next)
        self._shapes = {name: tuple(found.shape) for name, found in inputs.items()}
        self.state: dict[str, Array] = {}
        for name in self._next:
            shape = inputs[name].shape
            if not all(isinstance(size, int) for size in shape):
                raise ModelError(f"{model_id}: the shape of the state {name} is not fixed: {shape}")
            self.state[name] = np.zeros(shape, np.float32)

    def shape_of(self, name: str) -> tuple[int | str | None, ...]:
        """Return the shape of an input. A size that is not fixed is a name or None."""
        return self._shapes[name]

    def _paired(self, inputs: Collection[str]) -> dict[str, str]:
        """Return the output of each state input, by NEXT_NAMES. Also reads `x_in` as the input of `x_out`."""
        pairs = {}
        for name in inputs:
            forms = [form.format(name) for form in NEXT_NAMES]
            forms += [name.removesuffix("_in") + "_out"] if name.endswith("_in") else []
            if found := next((form for form in forms if form in self.outputs), None):
                pairs[name] = found
        return pairs

    def step(self, given: Mapping[str, Array], state: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the outputs of one step by name, and the state after it. `given`: the `free` inputs.

        Raises ModelError if the graph fails or a value is not finite.
        """
        names = sorted(self.outputs)
        try:
            values = dict(zip(names, self._graph.run(names, {**given, **state}), strict=True))
        except Exception as error:
            # onnxruntime raises errors without a common base class.
            raise ModelError(f"{self.id} failed: {error}") from error
        if not all(np.isfinite(value).all() for value in values.values()):
            raise ModelError(f"{self.id} computed a value that is not a number")
        return values, {name: values[output] for name, output in self._next.items()}
