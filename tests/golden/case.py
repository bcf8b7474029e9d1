"""Golden files: numbers of the authors' own code, and how a model of this project is held to them.

A file holds parameters, inputs, outputs, fixed cotangents and gradients (keys `param/`, `in/`,
`out/`, `cot/`, `grad_param/`, `grad_in/`) and a JSON `meta` that names the unit and its switches.

An adapter is a function `adapter(case) -> Result` that runs the project's model on `case.inputs`
with the weights `case.params`. All of these are leaf tensors that record gradients. The adapter
never copies them into the model: it writes a dict {name in our model: expression in case.params}
(a concatenation, a slice, a gain plus one) and runs the model with `call`, so autograd carries the
gradients of any such mapping back to the file's own names, where `compare` checks them.

    def my_attention(case: Case) -> Result:
        model = case.build(lambda: MyAttention(Shape(...), knob=case.config["knob"]))
        params = {"qkv.weight": torch.cat([case.params["query.weight"], ...]), ...}
        y_BLD = call(model, params, case.inputs["x"], case.inputs["mask"] != 0)
        return Result({"output": y_BLD})

    UNITS = {"MyAttention": my_attention}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)

# Largest max|ours - file| / max(1, max|file|) that passes, for outputs and for gradients.
TOLERANCES = {torch.float64: (1e-9, 1e-9), torch.float32: (1e-5, 1e-4)}


@dataclass(frozen=True)
class Case:
    """One file, its real numbers cast to `dtype`; parameters and real inputs record gradients."""

    path: Path
    dtype: torch.dtype
    family: str
    unit: str
    config: dict[str, Any]
    without_gradient: list[str]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    inputs: dict[str, Tensor]
    arrays: dict[str, np.ndarray]  # everything in the file, by its full key

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype) -> Case:
        """Read a file.

        Raises:
            ValueError: the file is no npz archive or has no readable `meta`.
        """
        try:
            with np.load(path) as archive:
                arrays = {key: archive[key] for key in archive.files}
            meta = json.loads(str(arrays["meta"]))
            family, unit, config = meta["family"], meta["unit"], meta["config"]
        except (OSError, KeyError, ValueError, BadZipFile) as error:
            raise ValueError(
                f"{path}: expected an npz file whose 'meta' holds family, unit, config"
            ) from error

        def tensors(prefix: str, *, leaf: bool) -> dict[str, Tensor]:
            found = {}
            for key, array in arrays.items():
                if key.startswith(prefix):
                    tensor = torch.from_numpy(array)
                    if tensor.is_floating_point():
                        tensor = tensor.to(dtype, copy=True).requires_grad_(leaf)
                    found[key.removeprefix(prefix)] = tensor
            return found

        return cls(
            path=path,
            dtype=dtype,
            family=family,
            unit=unit,
            config=config,
            without_gradient=meta.get("without_gradient", []),
            params=tensors("param/", leaf=True),
            buffers=tensors("buffer/", leaf=False),
            inputs=tensors("in/", leaf=True),
            arrays=arrays,
        )

    @contextmanager
    def default_dtype(self) -> Iterator[None]:
        """Parameters and tables made inside have the case's dtype."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def build(self, make: Callable[[], Model]) -> Model:
        """Make a model in the case's dtype and in evaluation mode."""
        with self.default_dtype():
            return make().eval()


@dataclass(frozen=True)
class Result:
    """What an adapter computed: tensors under the names that `out/` and `mid/` have in the file."""

    outputs: dict[str, Tensor]
    intermediates: dict[str, Tensor] = field(default_factory=dict)


Adapter = Callable[[Case], Result]


@dataclass(frozen=True)
class Difference:
    """Largest difference of one tensor, plain and divided by max(1, max|file|)."""

    name: str
    absolute: float
    relative: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.relative <= self.tolerance  # False for NaN


class _Method(nn.Module):
    """Lets `functional_call` reach a method other than `forward`."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module = module
        self.method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, self.method)(*args, **kwargs)


def call(
    module: nn.Module, params: dict[str, Tensor], *args: Any, method: str = "forward", **kwargs: Any
) -> Any:
    """Run `module` with `params` in place of its own parameters (all of them) and named buffers.

    Raises:
        ValueError: `params` lacks a parameter of the module, has an unknown one, or one of another
            shape.
    """
    own = dict(module.named_parameters())
    known = own | dict(module.named_buffers())
    missing, unknown = own.keys() - params.keys(), params.keys() - known.keys()
    if missing or unknown:
        raise ValueError(f"parameters without a value: {missing}; values without a home: {unknown}")
    for name, value in params.items():
        if value.shape != known[name].shape:
            raise ValueError(f"{name}: {tuple(value.shape)}, expected {tuple(known[name].shape)}")
    wrapped = {f"module.{name}": value for name, value in params.items()}
    return torch.func.functional_call(_Method(module, method), wrapped, args, kwargs)


def linear(case: Case, ours: str, *theirs: str) -> dict[str, Tensor]:
    """{ours.weight, ours.bias} from one linear map of the file, or from several stacked ones."""
    mapped = {}
    for part in ("weight", "bias"):
        if f"{theirs[0]}.{part}" in case.params:
            mapped[f"{ours}.{part}"] = torch.cat([case.params[f"{name}.{part}"] for name in theirs])
    return mapped


def norm(case: Case, ours: str, theirs: str) -> dict[str, Tensor]:
    """A layer norm; files of code that multiplies by 1 + weight say so in their config."""
    offset = case.config.get("layernorm_gain_offset", 0.0)
    return {
        f"{ours}.weight": case.params[f"{theirs}.weight"] + offset,
        f"{ours}.bias": case.params[f"{theirs}.bias"],
    }


def compare(case: Case, adapter: Adapter) -> list[Difference]:
    """Run an adapter and measure outputs, intermediates and all gradients against the file.

    Raises:
        ValueError: an output is missing or has another shape than in the file.
    """
    output_tolerance, gradient_tolerance = TOLERANCES[case.dtype]
    result = adapter(case)
    differences = []

    def measure(key: str, ours: Tensor, tolerance: float) -> None:
        theirs = case.arrays[key]
        if tuple(ours.shape) != theirs.shape:
            raise ValueError(f"{case.path.name}: {key} is {theirs.shape}, ours {tuple(ours.shape)}")
        gap = np.abs(ours.detach().double().numpy() - theirs)
        absolute = float(gap.max(initial=0.0))
        relative = absolute / max(1.0, float(np.abs(theirs).max(initial=0.0)))
        differences.append(Difference(key, absolute, relative, tolerance))

    for key in case.arrays:
        if key.startswith("out/") and key.removeprefix("out/") not in result.outputs:
            raise ValueError(f"{case.path.name}: the adapter of {case.unit} gives no {key}")
    for name, value in result.outputs.items():
        measure(f"out/{name}", value, output_tolerance)
    for name, value in result.intermediates.items():
        measure(f"mid/{name}", value, output_tolerance)

    cotangents = [key for key in case.arrays if key.startswith("cot/")]
    if not cotangents:  # a file of initial values
        return differences
    scalar = torch.zeros((), dtype=case.dtype)
    for key in cotangents:
        cotangent = torch.from_numpy(case.arrays[key]).to(case.dtype)
        scalar = scalar + (result.outputs[key.removeprefix("cot/")] * cotangent).sum()
    scalar.backward()
    for kind, leaves in (("param", case.params), ("in", case.inputs)):
        for name, leaf in leaves.items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            if f"grad_{kind}/{name}" in case.arrays:
                measure(f"grad_{kind}/{name}", gradient, gradient_tolerance)
            elif f"{kind}/{name}" in case.without_gradient:
                largest = float(gradient.abs().max())
                differences.append(Difference(f"grad_{kind}/{name}", largest, largest, 0.0))
    return differences
