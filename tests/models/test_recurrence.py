"""The scan: equal to a loop, exact in float32, harmless at the edges, cheap; tied dropout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.recurrence import CHUNK_LENGTH, TiedDropout, scan
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
def test_equals_a_loop_with_gradients(length: int, reverse: bool) -> None:
    assert CHUNK_LENGTH == 32  # else choose lengths around its powers
    u_2NBL = numbers(2, 5, 2, length).requires_grad_()
    decay_N = decays([0.9999, 0.99, 0.7, 1e-3, 1.0], [0.01, 3.0, -1.0, 2.0, 6.2]).requires_grad_()
    weight_2NBL = numbers(2, 5, 2, length, seed=1)
    ours, naive = (f(u_2NBL, decay_N, reverse=reverse) for f in (scan, loop))
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, naive, rtol=1e-11, atol=1e-11)
    for a, b in zip(
        torch.autograd.grad((ours * weight_2NBL).sum(), [u_2NBL, decay_N]),
        torch.autograd.grad((naive * weight_2NBL).sum(), [u_2NBL, decay_N]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
def test_gradients_are_numerical_ones(reverse: bool) -> None:
    u_2NBL = numbers(2, 2, 2, 37).requires_grad_()
    decay_N = decays([0.95, 0.5], [0.3, 2.0]).requires_grad_()
    assert torch.autograd.gradcheck(lambda u, d: scan(u, d, reverse=reverse), [u_2NBL, decay_N])


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
def test_float32_is_as_exact_as_a_loop(reverse: bool) -> None:
    """States that remember ten thousand steps: errors of output and gradient against float64."""
    length = 6000
    u_2NBL, weight_2NBL = (numbers(2, 4, 1, length, seed=seed) for seed in (0, 1))
    decay_N = decays([0.9999, 0.9999, 0.999, 0.5], [0.0, 1.0, 3.1, 2.0])

    def run(function, dtype: torch.dtype) -> list[Tensor]:
        u, d = u_2NBL.to(dtype, copy=True).requires_grad_(), decay_N.clone().requires_grad_()
        h_2NBL = function(u, d, reverse=reverse)
        (h_2NBL * weight_2NBL.to(dtype)).sum().backward()
        return [h_2NBL.detach(), u.grad, torch.view_as_real(d.grad)]

    exact = run(loop, torch.float64)
    for ours, looped, value in zip(
        run(scan, torch.float32), run(loop, torch.float32), exact, strict=True
    ):
        error, allowed = ((x - value).abs().max() / value.abs().max() for x in (ours, looped))
        assert error < 1e-5 and error <= 1.5 * allowed, (error, allowed)


def test_decays_of_nothing_and_of_everything() -> None:
    u_2NBL = numbers(2, 4, 2, 300).requires_grad_()
    decay_N = torch.tensor([0, 1e-200, 1e-30j, 1], dtype=torch.complex128).requires_grad_()
    for dtype in (torch.float64, torch.float32):
        h_2NBL = scan(u_2NBL.to(dtype), decay_N)
        assert torch.equal(h_2NBL[:, :3], u_2NBL[:, :3].to(dtype))
        torch.testing.assert_close(
            h_2NBL[:, 3], u_2NBL[:, 3].cumsum(dim=-1).to(dtype), rtol=1e-5, atol=1e-5
        )
        for gradient in torch.autograd.grad(h_2NBL.sum(), [u_2NBL, decay_N]):
            assert torch.view_as_real(gradient.to(torch.complex128)).isfinite().all()


def test_low_precision_is_computed_and_given_in_float32() -> None:
    u_2NBL, decay_N = numbers(2, 3, 2, 100), decays([0.9, 0.5, 0.99], [0.1, 1.0, 2.0])
    for dtype in (torch.bfloat16, torch.float16):
        rounded_2NBL = u_2NBL.to(dtype)
        h_2NBL = scan(rounded_2NBL, decay_N)
        assert h_2NBL.dtype == torch.float32
        assert torch.equal(h_2NBL, scan(rounded_2NBL.float(), decay_N))
    u_2NBL = u_2NBL.float().requires_grad_()
    plain_2NBL = scan(u_2NBL, decay_N)
    (plain,) = torch.autograd.grad(plain_2NBL.square().sum(), u_2NBL)
    with torch.autocast("cpu", torch.bfloat16):
        cast_2NBL = scan(u_2NBL, decay_N)
        (cast,) = torch.autograd.grad(cast_2NBL.square().sum(), u_2NBL)
    assert torch.equal(cast_2NBL, plain_2NBL) and torch.equal(cast, plain)


def test_keeps_one_copy_of_the_states() -> None:
    for length in (1024, 1000):
        u_2NBL = torch.randn(2, 8, 4, length, requires_grad=True)
        decay_N = decays([0.9] * 8, [0.5] * 8).requires_grad_()
        with count_saved_bytes() as saved:
            scan(u_2NBL * 1.0, decay_N)
        assert saved[0] <= u_2NBL.nbytes + 1024


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
    for length in (1024, 32768):
        u_2NBL = torch.randn(2, 1, 1, length, requires_grad=True)
        with CountCalls() as calls:
            scan(u_2NBL, decays([0.9], [0.5])).sum().backward()
        counts.append(calls.count)
    assert counts[1] <= 1.6 * counts[0] < 400  # three levels of chunks after two


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
