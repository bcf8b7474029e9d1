"""The scan: equal to a loop, exact in float32, harmless at the edges, cheap; tied dropout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.dropout import TiedDropout
from models.lru import LRUEncoder
from models.recurrence import CHUNK_LENGTH, run_system, scan
from models.s5 import S5Encoder
from models.shape import Shape
from tests.models.test_models import count_saved_bytes


def numbers(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def decays(radii: list[float], phases: list[float]) -> Tensor:
    return torch.polar(torch.tensor(radii).double(), torch.tensor(phases).double())


def loop(u_2NBL: Tensor, decay_N: Tensor, *, reverse: bool = False) -> Tensor:
    """The recurrence as it is written, in complex numbers of u's precision."""
    u_LNB = torch.complex(u_2NBL[0], u_2NBL[1]).movedim(2, 0)
    decay_N1 = decay_N.to(u_LNB.dtype)[:, None]
    h_NB, found = torch.zeros_like(u_LNB[0]), []
    for u_NB in u_LNB.flip(0) if reverse else u_LNB:
        h_NB = decay_N1 * h_NB + u_NB
        found.append(h_NB)
    h_NBL = torch.stack(found[::-1] if reverse else found, dim=2)
    return torch.stack([h_NBL.real, h_NBL.imag])


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 100, 1023, 1024, 1025, 2100])
def test_scan_equals_a_loop(length: int, reverse: bool) -> None:
    assert CHUNK_LENGTH == 32  # else choose lengths around its powers
    u_2NBL = numbers(2, 5, 2, length)
    decay_N = decays([0.9999, 0.99, 0.7, 1e-3, 1.0], [0.01, 3.0, -1.0, 2.0, 6.2])
    expected_2NBL = loop(u_2NBL, decay_N, reverse=reverse)
    torch.testing.assert_close(scan(u_2NBL, decay_N, reverse=reverse), expected_2NBL)
    # Into memory whose rows do not touch.
    out_2NBL = numbers(2, 5, 2 * length + 3)[..., : 2 * length].unflatten(2, (2, length))
    scan(u_2NBL, decay_N, reverse=reverse, out=out_2NBL)
    torch.testing.assert_close(out_2NBL, expected_2NBL, rtol=1e-11, atol=1e-11)


def system(length: int, *, bidirectional: bool = False, batch_size: int = 2) -> list[Tensor]:
    """Numbers for `run_system`: 3 states, 4 features."""
    tensors = [
        numbers(batch_size, length, 4),
        torch.arange(length) < torch.tensor([length, max(1, length // 2)])[:batch_size, None],
        decays([0.999, 0.7, 1e-3], [0.01, 3.0, -1.0]),
        numbers(6, 4, seed=1),
        numbers(12 if bidirectional else 6, 4, seed=2),
        numbers(4, seed=3),
    ]
    return [x.requires_grad_(x.dtype != torch.bool) for x in tensors]


def system_as_written(
    x_BLD: Tensor,
    mask_BL: Tensor,
    decay_N: Tensor,
    input_PD: Tensor,
    output_QD: Tensor,
    skip_D: Tensor,
) -> Tensor:
    """Of masked x: input map, one loop for each direction, output map, skip."""
    x_BLD = x_BLD * mask_BL[..., None]
    u_2NBL = torch.einsum("pd,bld->pbl", input_PD, x_BLD).unflatten(0, (2, -1))
    y_BLD = skip_D * x_BLD
    for map_PD, reverse in zip(output_QD.split(len(input_PD)), (False, True), strict=False):
        h_PBL = loop(u_2NBL, decay_N, reverse=reverse).flatten(0, 1)
        y_BLD = y_BLD + torch.einsum("pbl,pd->bld", h_PBL, map_PD)
    return y_BLD


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 1024, 1100])
def test_system_is_what_its_formula_says_with_gradients(length: int, bidirectional: bool) -> None:
    tensors = system(length, bidirectional=bidirectional)
    leaves = [x for x in tensors if x.requires_grad]
    ours, naive = run_system(*tensors), system_as_written(*tensors)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, naive, rtol=1e-11, atol=1e-11)
    weight_BLD = numbers(*ours.shape, seed=4)
    for a, b in zip(
        torch.autograd.grad((ours * weight_BLD).sum(), leaves),
        torch.autograd.grad((naive * weight_BLD).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradients_are_numerical_ones(bidirectional: bool) -> None:
    tensors = system(34, bidirectional=bidirectional, batch_size=1)
    assert torch.autograd.gradcheck(run_system, tensors, fast_mode=True)


def test_float32_is_as_exact_as_a_loop() -> None:
    """States that remember thousands of steps: errors of output and gradient against float64."""
    tensors = system(4000, bidirectional=True, batch_size=1)
    with torch.no_grad():
        tensors[2].copy_(decays([0.9999, 0.9999, 0.999], [0.0, 1.0, 3.1]))
    weight_BLD = numbers(1, 4000, 4, seed=4)

    def run(function, dtype: torch.dtype) -> list[Tensor]:
        cast = [x.detach().to(dtype) if x.is_floating_point() else x.detach() for x in tensors]
        leaves = [x.requires_grad_() for x in cast if x.dtype != torch.bool]
        y_BLD = function(*cast)
        gradients = torch.autograd.grad((y_BLD * weight_BLD.to(dtype)).sum(), leaves)
        return [y_BLD.detach(), *gradients]

    for ours, looped, exact in zip(
        run(run_system, torch.float32),
        run(system_as_written, torch.float32),
        run(system_as_written, torch.float64),
        strict=True,
    ):
        error, allowed = ((x - exact).abs().max() / exact.abs().max() for x in (ours, looped))
        assert error < 1e-5 and error <= 1.5 * allowed, (error, allowed)


def test_decays_of_nothing_and_of_everything() -> None:
    u_2NBL = numbers(2, 4, 2, 300)
    decay_N = torch.tensor([0, 1e-200, 1e-30j, 1], dtype=torch.complex128)
    for dtype in (torch.float64, torch.float32):
        h_2NBL = scan(u_2NBL.to(dtype), decay_N)
        assert torch.equal(h_2NBL[:, :3], u_2NBL[:, :3].to(dtype))
        torch.testing.assert_close(
            h_2NBL[:, 3], u_2NBL[:, 3].cumsum(dim=-1).to(dtype), rtol=1e-5, atol=1e-5
        )
    tensors = system(100)
    with torch.no_grad():
        tensors[2].copy_(decay_N[[0, 1, 3]])
    run_system(*tensors).sum().backward()
    assert all(x.grad.abs().isfinite().all() and x.grad.any() for x in tensors if x.requires_grad)


def test_autocast_changes_nothing() -> None:
    tensors = [x.detach().float() if x.is_floating_point() else x.detach() for x in system(40)]
    tensors[0].requires_grad_()
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y_BLD = run_system(*tensors)
            results.append((y_BLD, *torch.autograd.grad(y_BLD.sum(), tensors[0])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("length", [1024, 1000])
def test_keeps_one_copy_of_x_and_of_the_states(length: int) -> None:
    tensors = system(length)
    with count_saved_bytes() as saved:
        run_system(tensors[0] * 1.0, *tensors[1:])
    assert saved[0] <= 8 * 2 * 1024 * (4 + 6) + 2 * 1024 + 2048  # x, states, mask, small ones


class CountCalls(TorchDispatchMode):
    """How many operations run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


def test_number_of_operations_hardly_grows_with_length() -> None:
    counts = []
    for length in (1024, 16384):
        with CountCalls() as calls:
            run_system(*system(length)).sum().backward()
        counts.append(calls.count)
    assert counts[1] <= 1.6 * counts[0] < 500  # three levels of chunks after two


def test_compiled_code_gives_the_same() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *tensors: run_system(*tensors) * 2, backend="aot_eager")
    for length in (40, 7):
        tensors = system(length, bidirectional=True)
        leaves = [x for x in tensors if x.requires_grad]
        ours, expected = compiled(*tensors), run_system(*tensors) * 2
        gradients = (
            torch.autograd.grad(y_BLD.square().sum(), leaves) for y_BLD in (ours, expected)
        )
        assert torch.equal(ours, expected)
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_tied_dropout_drops_a_feature_at_all_positions_or_at_none() -> None:
    torch.manual_seed(0)
    dropout = TiedDropout(0.4)
    x_BLD = torch.rand(20, 7, 50) + 1
    y_BLD = dropout(x_BLD)
    kept_BLD = y_BLD != 0
    assert torch.equal(kept_BLD, kept_BLD[:, :1].expand_as(kept_BLD))
    assert 0.55 < kept_BLD.float().mean() < 0.65
    assert not torch.equal(kept_BLD[0], kept_BLD[1])
    torch.testing.assert_close(y_BLD[kept_BLD], (x_BLD / 0.6)[kept_BLD], rtol=1e-4, atol=0)
    assert dropout.eval()(x_BLD) is x_BLD


@pytest.mark.parametrize(
    ("target", "knobs"),
    [
        (LRUEncoder, {}),
        *((S5Encoder, {"gate": gate}) for gate in ("full_glu", "half_glu1", "half_glu2", "gelu")),
    ],
)
def test_attention_bias_is_of_the_maps_of_the_gate(target: Any, knobs: dict[str, Any]) -> None:
    shape = Shape(vocab_size=9, max_length=20, d_model=8, num_layers=2, dropout=0.0)
    torch.manual_seed(0)
    with_bias = target(shape, **knobs)
    without = target(replace(shape, attention_bias=False), **knobs)
    expected = {f"blocks.{i}.mixer.out.bias" for i in range(2)} if knobs != {"gate": "gelu"} else {}
    missing, extra = without.load_state_dict(with_bias.state_dict(), strict=False)
    assert not missing and set(extra) == set(expected)
    rows = torch.randint(1, 9, (2, 20)), torch.ones(2, 20, dtype=torch.bool)
    assert torch.equal(without(*rows), with_bias(*rows)) == (not expected)
    with torch.no_grad():
        for key in expected:
            with_bias.get_parameter(key).zero_()
    torch.testing.assert_close(without(*rows), with_bias(*rows))
