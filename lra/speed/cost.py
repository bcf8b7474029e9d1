"""What a model costs: parameters by part, operations and activations by length, shapes on the way.

Costs are counted in real runs at a few short lengths; a polynomial through them gives the longer
ones, and a run that is longer than those it goes through checks it.

Shapes: S sequences for each example, L length of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from lra.speed.flops import counting_flops

if TYPE_CHECKING:
    from lra.config import TrainConfig
    from lra.training.hardware import Hardware
    from models.classifier import Classifier

FITTED = (512, 768, 1024)  # long enough to use all landmarks or memory slots of usual settings
CHECKED = 2048
SCALES = (1, 2, 4)  # of both, tried in turn
TOLERANCE = 0.01  # of the check
QUICK_FLOPS, QUICK_BYTES = 2e11, 4e9  # of one example, which a laptop runs in seconds
CHEAP_FLOPS = 2e10  # likewise; attention of so many forms weights of a GB at most
# Float32 peaks by the makers' data sheets, in FLOP/s; recipes train in float32.
CARDS = {"A100": 19.5e12, "H100 SXM": 67e12, "RTX 4090": 82.6e12, "RTX 3060": 12.7e12}
UTILISATION = (0.4, 0.1)  # of the peak, at best and at worst; assumed, as are the next
STEP_S = (0.005, 0.02)  # that launching a step's kernels takes, however small the model
ESTIMATE = (
    f"an estimate for one card at {100 * UTILISATION[1]:.0f} to {100 * UTILISATION[0]:.0f} % of "
    f"its float32 peak and {1000 * STEP_S[0]:.0f} to {1000 * STEP_S[1]:.0f} ms a step at least"
)
_TITLES = {"ffn": "feed-forward", "norm": "final norm", "attention_pool": "pooling"}


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
        part = "norms" if "norm" in keys[2] else _TITLES.get(keys[2], keys[2])
        return f"{_layer(int(keys[1]), tied)} {part}"
    return _TITLES.get(keys[0], keys[0])


def _layer(index: int, tied: bool) -> str:
    return "every layer" if tied else f"layer {index + 1}"


@dataclass(frozen=True)
class Cost:
    """Of one example: S sequences of the same length."""

    flops: int  # of the forward pass
    activation_bytes: int  # that training keeps for the backward pass


def count(model: Classifier, length: int, hardware: Hardware) -> Cost:
    """Run one example of `length` tokens a sequence and count.

    Operations are those of `counting_flops`; attention is computed without fused kernels for it,
    since these hide their products. Activations are all tensors that autograd keeps in training,
    parameters and tables left out, with the kernels and the precision that `hardware` trains with;
    what some of our functions keep on their own (4 % of Reformer's, 1 % of patterns') is not seen.
    """
    rows = _rows(model, length, hardware.device)
    model.eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counting_flops() as counter:
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
    return Cost(counter.get_total_flops(), sum(x.untyped_storage().nbytes() for x in kept.values()))


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

    def growth(self, length: int) -> str:
        """Linear or quadratic up to `length`, in words."""
        if abs(self.quadratic) * length**2 <= TOLERANCE * abs(self(length)):
            return "linear in L"
        turn = max(0, math.ceil(self.linear / self.quadratic))
        return f"quadratic in L; the square outweighs the linear part from {turn:,} on"


@dataclass(frozen=True)
class Costs:
    """By length: counted as far as that takes seconds, beyond it by formulas, where they hold."""

    by_length: dict[int, Cost]
    counted: frozenset[int]  # which of these lengths were
    flops: Polynomial
    activations: Polynomial
    checked_at: int
    checked: Cost

    @property
    def deviations(self) -> tuple[float, float]:
        """How far the formulas are from what was counted at `checked_at`, as fractions."""
        return (
            self.flops(self.checked_at) / max(1, self.checked.flops) - 1,
            self.activations(self.checked_at) / max(1, self.checked.activation_bytes) - 1,
        )

    @property
    def hold(self) -> bool:
        """Whether the formulas agree with the check."""
        return max(map(abs, self.deviations)) <= TOLERANCE


def costs(make: Callable[[int], Classifier], lengths: Iterable[int], hardware: Hardware) -> Costs:
    """Costs at `lengths` of the models that `make` builds, each for the length as longest input.

    Where the formulas do not hold, as for a model with more landmarks than the shortest length has
    tokens, longer ones are tried. Beyond these, lengths are counted as far as that is cheap, and
    taken from the formulas from there on; without formulas as far as a run surely takes seconds,
    and left out from there on. So they are where the longest count shows that formulas fail.
    """
    lengths, counted = set(lengths), dict[int, Cost]()
    for scale in SCALES:
        fitted, checked_at = [n * scale for n in FITTED], CHECKED * scale
        short = (n for n in lengths if n <= checked_at)
        counted = {n: counted.get(n) or count(make(n).to(hardware.device), n, hardware)
                   for n in sorted({*fitted, checked_at, *short})}  # fmt: skip
        flops = Polynomial.through({n: counted[n].flops for n in fitted})
        activations = Polynomial.through({n: counted[n].activation_bytes for n in fitted})
        found = Costs({}, frozenset(), flops, activations, checked_at, counted[checked_at])
        if found.hold:
            break
    by_length = {}
    for n in sorted(lengths):
        # A model made for longer inputs may work otherwise, also where the formulas hold.
        is_cheap = not found.hold or flops(n) <= CHEAP_FLOPS
        if n not in counted and is_cheap and is_quick(n, max(counted), counted[max(counted)]):
            counted[n] = count(make(n).to(hardware.device), n, hardware)
        if n in counted or found.hold:
            by_length[n] = counted.get(n) or Cost(flops(n), activations(n))
    longest = max(counted)
    tried = replace(found, checked_at=longest, checked=counted[longest])
    if found.hold and not tried.hold:  # such as L log L, which looks like a square for a while
        found, by_length = tried, {n: cost for n, cost in by_length.items() if n in counted}
    return replace(found, by_length=by_length, counted=frozenset(counted))


def is_quick(length: int, known: int, cost: Cost) -> bool:
    """Whether a run of `length` takes seconds, even if costs grow as the square from `known` on."""
    growth = (length / known) ** 2
    return growth * cost.flops <= QUICK_FLOPS and growth * cost.activation_bytes <= QUICK_BYTES


def stage_shapes(model: Classifier, length: int) -> list[tuple[str, list[list[int]]]]:
    """Shapes of what each stage returns for one example, in the order in which they ran."""
    seen: list[tuple[str, list[list[int]]]] = []

    def note(stage: str, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        seen.append((stage, [list(x.shape) for x in outputs if isinstance(x, Tensor)]))

    stages: dict[str, nn.Module] = {"embedding": model.encoder.embedding}
    for i, block in enumerate(model.encoder.blocks):
        layer = _layer(i, model.encoder.shape.tie_layers)
        for key, part in block.named_children():
            if key in ("mixer", "ffn"):
                stages[f"{layer} {_TITLES.get(key, key)}"] = part
        stages[layer] = block
    stages["encoder"] = model.encoder
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, s=stage: note(s, output))
        for stage, module in stages.items()
    ]
    hooks.append(model.head.register_forward_pre_hook(lambda _, inputs: note("pooled", inputs)))
    rows = _rows(model, length, next(model.parameters()).device)
    note("token ids", rows[0])
    try:
        with torch.no_grad():
            logits_BC = model.eval()(*rows)
    finally:
        for hook in hooks:
            hook.remove()
    note("head", logits_BC)
    return seen


def parameter_table(name: str, ours: Mapping[str, int], baseline: Mapping[str, int]) -> list[str]:
    """A model's parameters beside those of softmax, part by part."""
    parts = [*ours, *(part for part in baseline if part not in ours)]
    sides = (ours, baseline)
    rows = [(part, *(f"{side.get(part, 0):,}" for side in sides)) for part in parts]
    rows.append(("total", *(f"{sum(side.values()):,}" for side in sides)))
    return columns([("parameters", name, "softmax"), *rows])


def cost_table(found: Costs, lengths: Iterable[int], num_sequences: int) -> list[str]:
    """Costs at those of `lengths` that were found, each token's share and how they were found."""
    rows: list[tuple[str, ...]] = [("length", "FLOPs", "a token", "activations", "a token", "from")]
    for length in sorted(found.by_length.keys() & set(lengths)):
        cost, tokens = found.by_length[length], length * num_sequences
        rows.append((
            f"{length:,}", f"{cost.flops:,}", f"{cost.flops / tokens:,.0f}",
            f"{cost.activation_bytes / 2**20:,.1f} MiB", f"{cost.activation_bytes / tokens:,.0f} B",
            "a run" if length in found.counted else "formula",
        ))  # fmt: skip
    if not found.hold:
        left_out = f"; beyond {max(found.by_length):,} tokens they are left out"
        return [
            *columns(rows),
            "the costs follow no polynomial of degree two in the length"
            + (left_out if set(lengths) - found.by_length.keys() else ""),
        ]
    off_flops, off_activations = found.deviations
    longest = max(found.checked_at, *found.by_length)
    return [
        *columns(rows),
        f"FLOPs = {found.flops}: {found.flops.growth(longest)}",
        f"activation bytes = {found.activations}: {found.activations.growth(longest)}",
        f"formulas against a run of {found.checked_at:,} tokens: {100 * off_flops:+.2f} % of "
        f"{found.checked.flops:,} FLOPs, {100 * off_activations:+.2f} % of "
        f"{found.checked.activation_bytes:,} bytes",
    ]


def run_cost(found: Costs, train: TrainConfig, max_length: int, num_sequences: int) -> list[str]:
    """Operations of a whole run whose every input is as long as it may be.

    No line if the costs at that length are not known. A training step is three forward passes: one,
    and two for the gradients of both factors.
    """
    cost = found.by_length.get(max_length)
    if cost is None:
        return []
    training = 3 * train.num_steps * train.batch_size * cost.flops
    num_evaluations = -(-train.num_steps // train.eval_every)
    evaluations = f"{num_evaluations:,} evaluation{'s' if num_evaluations > 1 else ''}"
    pair = f"{num_sequences} x " if num_sequences > 1 else ""
    return [
        f"a run, if all inputs have {pair}{max_length:,} tokens: {_flops(training)} in training "
        f"({train.num_steps:,} steps of {train.batch_size}); {evaluations}: "
        f"{_flops(1000 * num_evaluations * cost.flops)} for each 1,000 validation examples"
    ]


def run_hours(found: Costs, train: TrainConfig, max_length: int, num_val: int | None) -> list[str]:
    """Hours of a whole run by card, from best to worst, estimated from its operations.

    `num_val` validation examples are evaluated each time; left out if it is None.
    """
    ranges = hours_by_card(found.by_length.get(max_length), train, num_val)
    text = ", ".join(f"{card} {hours}" for card, hours in ranges.items())
    return [f"hours of it ({whole_run(num_val)}), {ESTIMATE}: {text}"] if ranges else []


def whole_run(num_val: int | None) -> str:
    """What hours are of."""
    return "training" if num_val is None else f"training, and {num_val:,} validation examples each"


def hours_by_card(cost: Cost | None, train: TrainConfig, num_val: int | None) -> dict[str, str]:
    """Best and worst hours of a run whose every input costs that much; {} if that is not known."""
    if cost is None:
        return {}
    num_evaluations = -(-train.num_steps // train.eval_every)
    passes = 3 * train.num_steps * train.batch_size + num_evaluations * (num_val or 0)
    found = {}
    for card, peak in CARDS.items():
        best, worst = (
            max(passes * cost.flops / (peak * share), train.num_steps * step_s) / 3600
            for share, step_s in zip(UTILISATION, STEP_S, strict=True)
        )
        found[card] = f"{_hours(best)} to {_hours(worst)}"
    return found


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.1f}" if hours >= 0.1 else f"{hours:.2f}"


def _flops(count: int) -> str:
    value, unit = (count / 1e15, "PFLOP") if count >= 1e14 else (count / 1e12, "TFLOP")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Aligned text: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return lines
