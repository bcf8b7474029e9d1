"""Linear Transformer: its options against the naive version, causal forms, small and long rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.kernels import CHUNK_LENGTH, causal_sums, with_count
from models.linear import LinearAttention
from models.shape import Shape
from tests.models.test_models import largest_difference
from tests.references.linear import linear_attention

SHAPE = Shape(vocab_size=9, max_length=200, d_model=12, num_heads=3)


def build(shape: Shape = SHAPE, **knobs: Any) -> LinearAttention:
    torch.manual_seed(0)
    return LinearAttention(shape, **knobs).double()


def rows(*lengths: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x_BLD = torch.randn(len(lengths), max(lengths), 12, generator=generator).double()
    return x_BLD.requires_grad_(), torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, head_dim=5, attention_bias=False)])
def test_equals_the_naive_version_with_gradients(
    shape: Shape, normalize: bool, causal: bool
) -> None:
    mixer = build(shape, normalize=normalize, causal=causal)
    x_BLD, mask_BL = rows(66, 9, 1)
    results = []
    for y_BLD in (mixer(x_BLD, mask_BL), linear_attention(mixer, x_BLD, mask_BL)):
        y_ND = y_BLD[mask_BL]
        weight_ND = torch.randn(y_ND.shape, generator=torch.Generator().manual_seed(2)).double()
        leaves = [x_BLD, *mixer.parameters()]
        results.append([y_ND, *torch.autograd.grad((y_ND * weight_ND).sum(), leaves)])
    for ours, naive in zip(*results, strict=True):
        assert largest_difference(ours, naive) < 1e-10


def test_without_normalizer_the_divisor_is_the_root_of_the_longest_length() -> None:
    x_BLD, mask_BL = rows(30)
    short = build(replace(SHAPE, max_length=50), normalize=False)(x_BLD, mask_BL)
    long = build(replace(SHAPE, max_length=200), normalize=False)(x_BLD, mask_BL)
    bias_D = build().out.bias
    torch.testing.assert_close(short - bias_D, 2 * (long - bias_D), rtol=1e-12, atol=1e-12)


def test_a_row_of_padding_mixes_to_zero() -> None:
    x_BLD, mask_BL = rows(9, 5)
    mask_BL[1] = False
    for causal in (False, True):
        mixer = build(causal=causal)
        assert torch.equal(mixer(x_BLD, mask_BL)[1], mixer.out.bias.expand(9, 12))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    "length", [1, CHUNK_LENGTH - 1, CHUNK_LENGTH, CHUNK_LENGTH + 1, 2 * CHUNK_LENGTH + 5]
)
def test_parallel_and_step_by_step_forms_agree(length: int, normalize: bool) -> None:
    mixer = build(normalize=normalize, causal=True)
    x_BLD, mask_BL = rows(length, length)
    state, steps = mixer.start(2), []
    for x_B1D in x_BLD.split(1, dim=1):
        y_B1D, state = mixer.step(x_B1D, state)
        steps.append(y_B1D)
    assert largest_difference(torch.cat(steps, dim=1), mixer(x_BLD, mask_BL)) < 1e-10
    assert state.sum_BHKJ.shape == (2, 3, 4, 5)


def test_a_step_in_half_precision_sums_in_float32() -> None:
    mixer = LinearAttention(SHAPE, causal=True).bfloat16()
    y_B1D, state = mixer.step(torch.ones(2, 1, 12, dtype=torch.bfloat16), mixer.start(2))
    assert y_B1D.dtype == torch.bfloat16 and state.sum_BHKJ.dtype == torch.float32


def test_sums_over_positions_are_their_definition() -> None:
    torch.manual_seed(0)
    x, y, z = (torch.randn(2, 1, 70, n, dtype=torch.float64) for n in (3, 3, 4))
    outer = torch.einsum("bhli,bhlj->bhlij", y, z).cumsum(dim=2)
    expected = torch.einsum("bhli,bhlij->bhlj", x, outer)
    assert largest_difference(causal_sums(x, y, z), expected) < 1e-12
    mask_BL = torch.arange(70) < torch.tensor([[70], [9]])
    counted = with_count(z, mask_BL)
    assert torch.equal(counted[..., 4], mask_BL[:, None].double())
    assert torch.equal(counted[..., :4], z * mask_BL[:, None, :, None])
