"""Norms: each equals its formula, and batch statistics are those of the real tokens alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.encoder import Block, Encoder
from models.norm import BatchNorm, make_norm
from models.shape import Shape
from models.softmax import SoftmaxAttention
from tests.models.test_models import MODELS, SMALL, batch, build, largest_difference

SHAPE = Shape(vocab_size=9, max_length=20, d_model=6, num_heads=2)


def some_tokens() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    mask_BL = torch.arange(7) < torch.tensor([[7], [3], [1]])
    return 3 + 2 * torch.randn(3, 7, 6, dtype=torch.float64), mask_BL


@pytest.mark.parametrize("kind", ["scale", "rms"])
def test_norms_of_a_row_equal_their_formulas(kind: Any) -> None:
    x_BLD, mask_BL = some_tokens()
    norm = make_norm(replace(SHAPE, norm_kind=kind), eps=0.1).double()
    (gain,) = norm.parameters()
    with torch.no_grad():
        gain += torch.randn_like(gain)
    expected_BLD = gain * x_BLD / (x_BLD.square().mean(dim=-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(norm(x_BLD, mask_BL), expected_BLD)


def test_batch_norm_is_pytorchs_over_the_real_tokens_alone() -> None:
    x_BLD, mask_BL = some_tokens()
    ours = BatchNorm(6, 1e-5, 0.3).double()
    theirs = nn.BatchNorm1d(6, momentum=0.3).double()
    with torch.no_grad():
        for parameter in (ours.weight, ours.bias):
            parameter += torch.randn_like(parameter)
        theirs.weight.copy_(ours.weight)
        theirs.bias.copy_(ours.bias)
    for factor in (1.0, 0.5):
        y_BLD = ours(factor * x_BLD, mask_BL)
        torch.testing.assert_close(y_BLD[mask_BL], theirs(factor * x_BLD[mask_BL]))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    # What stands at padding is seen by nobody.
    spoilt_BLD = torch.where(mask_BL[..., None], 0.5 * x_BLD, 1e6)
    torch.testing.assert_close(ours(spoilt_BLD, mask_BL)[mask_BL], y_BLD[mask_BL])
    ours.eval(), theirs.eval()
    theirs.running_mean.copy_(ours.running_mean)
    theirs.running_var.copy_(ours.running_var)
    torch.testing.assert_close(ours(x_BLD, mask_BL)[mask_BL], theirs(x_BLD[mask_BL]))


def test_a_batch_of_padding_leaves_running_statistics_alone() -> None:
    x_BLD, mask_BL = some_tokens()
    norm = BatchNorm(6, 1e-5, 0.1).double()
    norm(x_BLD, mask_BL)
    before = norm.running_mean.clone(), norm.running_var.clone()
    y_BLD = norm(x_BLD, torch.zeros_like(mask_BL))
    assert torch.equal(norm.running_mean, before[0]) and torch.equal(norm.running_var, before[1])
    torch.testing.assert_close(y_BLD, (x_BLD - before[0]) / (before[1] + 1e-5).sqrt())


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("name", MODELS)
def test_with_batch_norm_padding_counts_nowhere_and_neighbours_in_training_only(
    name: str, norm: Any
) -> None:
    model = build(name, replace(SMALL, norm_kind="batch", norm=norm, dropout=0.0)).train()
    tokens_BSL, lengths_BS = batch(40, 7, 20)
    short_BC, long_BC = model(tokens_BSL, lengths_BS), model(*batch(40, 7, 20, length=48))
    assert largest_difference(short_BC, long_BC) < 1e-9
    alone_BC = model(tokens_BSL[:1], lengths_BS[:1])
    assert largest_difference(alone_BC, short_BC[:1]) > 1e-6
    model.eval()
    for b, n in enumerate((40, 7, 20)):
        alone_BC = model(tokens_BSL[b : b + 1, :, :n], lengths_BS[b : b + 1])
        together_BC = model(tokens_BSL, lengths_BS)[b : b + 1]
        assert largest_difference(alone_BC, together_BC) < 1e-9
    lengths_BS[1] = 0
    assert model(tokens_BSL, lengths_BS).isfinite().all()


def test_layers_computed_twice_move_running_statistics_once() -> None:
    shape = replace(SHAPE, norm_kind="batch", dropout=0.0, attention_dropout=0.0)
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        encoder = Encoder(shape, lambda: SoftmaxAttention(shape)).train()
        encoder.checkpoint_layers = again
        mask_BL = torch.arange(7) < torch.tensor([[7], [3]])
        encoder(torch.ones(2, 7, dtype=torch.int64), mask_BL).sum().backward()
        found.append([buffer.clone() for buffer in encoder.buffers()])
        block = encoder.blocks[0]
        assert isinstance(block, Block) and isinstance(block.norm1, BatchNorm)
    assert all(torch.equal(once, twice) for once, twice in zip(*found, strict=True))
    assert any(buffer.any() for buffer in found[0])
