"""What a model costs: parameters by part, operations and activations by length, shapes on the way.

Costs are counted in real runs at a few short lengths; a polynomial through them gives the longer
ones, and a run that is longer than those it goes through checks it.

Shapes: S sequences for each example, L length of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from lra.hardware import Hardware
    from models.classifier import Classifier

FITTED = (512, 768, 1024)  # long enough to use all landmarks or memory slots of usual settings
CHECKED = 2048
TOLERANCE = 0.01  # of the check


def parameters_by_part(model: Classifier) -> dict[str, int]:
    """Parameters of the embedding, the positions, each layer's parts, the head and what else is.

    A tensor that several modules use counts once, where it is used first.
    """
    parts = {"embedding": 0, "positions": 0}
    for name, parameter in model.named_parameters():
        part = _part(name, model.encoder.shape.tie_layers)
        parts[part] = parts.get(part, 0) + parameter.numel()
    return parts


def _part(name: str, tied: bool) -> str:
    keys = name.removeprefix("encoder.").split(".")
    if keys[0] == "embedding":
        return "positions" if keys[1] == "positions" else "embedding"
    if keys[0] == "blocks":
        part = "norms" if "norm" in keys[2] else {"ffn": "feed-forward"}.get(keys[2], keys[2])
        return f"{_layer(int(keys[1]), tied)} {part}"
    return {"norm": "final norm", "attention_pool": "pooling"}.get(keys[0], keys[0])


def _layer(index: int, tied: bool) -> str:
    return "every layer" if tied else f"layer {index + 1}"


@dataclass(frozen=True)
class Cost:
    """Of one example: S sequences of the same length."""

    flops: int  # of the forward pass
    activation_bytes: int  # that training keeps for the backward pass


def count(model: Classifier, length: int, hardware: Hardware) -> Cost:
    """Run one example of `length` tokens a sequence and count.

    Operations are those of matrix products, a multiplication and an addition each; attention is
    computed without fused kernels for it, since these hide their products. Activations are all
    tensors that autograd keeps in training, parameters and tables left out, with the kernels and
    the precision that `hardware` trains with.
    """
    rows = _rows(model, length, hardware.device)
    model.eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*rows)

    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}  # keeps tensors alive, so that no address comes twice

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    model.train()
    with hardware.autocast(), saved_tensors_hooks(keep, lambda x: x):
        model(*rows)
    return Cost(
        counter.get_total_flops(), sum(x.untyped_storage().nbytes() for x in kept.values())
    )


def _rows(model: Classifier, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens_BSL = torch.ones(1, model.num_sequences, length, dtype=torch.int64, device=device)
    return tokens_BSL, torch.full((1, model.num_sequences), length, device=device)


@dataclass(frozen=True)
class Polynomial:
    """constant + linear L + quadratic L²."""

    constant: Fraction
    linear: Fraction
    quadratic: Fraction

    @classmethod
    def through(cls, points: Mapping[int, int]) -> Polynomial:
        """The one that has the values of `points` at their three lengths."""
        (x, y), (x2, y2), (x3, y3) = points.items()
        slope, slope2 = Fraction(y2 - y, x2 - x), Fraction(y3 - y2, x3 - x2)
        quadratic = (slope2 - slope) / (x3 - x)
        linear = slope - quadratic * (x + x2)
        return cls(y - linear * x - quadratic * x * x, linear, quadratic)

    def __call__(self, length: int) -> int:
        return round(self.constant + self.linear * length + self.quadratic * length * length)

    def __str__(self) -> str:
        terms = ((self.constant, ""), (self.linear, " L"), (self.quadratic, " L²"))
        text = " + ".join(
            (f"{v.numerator:,}" if v.denominator == 1 else f"{float(v):,.2f}") + unit
            for v, unit in terms
            if v
        )
        return text.replace("+ -", "- ") or "0"

    def parameter_table(name: str, ours: Mapping[str, int], baseline: Mapping[str, int]) -> list[str]:
    """A model's parameters beside those of softmax, part by part."""
    parts = [*ours, *(part for part in baseline if part not in ours)]
    sides = (ours, baseline)
    rows = [(part, *(f"{side.get(part, 0):,}" for side in sides)) for part in parts]
    rows.append(("total", *(f"{sum(side.values()):,}" for side in sides)))
    return _columns([("parameters", name, "softmax"), *rows])


def cost_table(found: Costs, num_sequences: int) -> list[str]:
    """Costs by length, each token's share and how they were found."""
    rows = [("length", "FLOPs", "a token", "activations", "a token", "from")]
    for length, cost in found.by_length.items():
        tokens = length * num_sequences
        rows.append((
            f"{length:,}", f"{cost.flops:,}", f"{cost.flops / tokens:,.0f}",
            f"{cost.activation_bytes / 2**20:,.1f} MiB", f"{cost.activation_bytes / tokens:,.0f} B",
            "a run" if length <= CHECKED else "formula",
        ))  # fmt: skip
    longest = max(CHECKED, *found.by_length)
    off_flops, off_activations = found.deviations
    lines = _columns(rows)
    lines += [
        f"FLOPs = {found.flops}: {found.flops.growth(longest)}",
        f"activation bytes = {found.activations}: {found.activations.growth(longest)}",
        f"formulas against a run of {CHECKED:,} tokens: FLOPs {100 * off_flops:+.2f} % of "
        f"{found.checked.flops:,}, activations {100 * off_activations:+.2f} % of "
        f"{found.checked.activation_bytes:,} bytes",
    ]
    if max(abs(off_flops), abs(off_activations)) > TOLERANCE:
        lines.append(
            f"warning: the cost is no such formula from {FITTED[0]:,} to {CHECKED:,} tokens, so "
            "rows from the formula are not to be relied on"
        )
    return lines


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Aligned text: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    return lines
