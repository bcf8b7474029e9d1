"""Sinkhorn attention: naive versions, the sorting itself, padding in blocks, noise, options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import sinkhorn
from models.shape import Shape
from models.sinkhorn import SinkhornAttention
from models.softmax import SoftmaxAttention
from tests.references.sinkhorn import sinkhorn_attention

SMALL = Shape(vocab_size=9, max_length=64, d_model=12, num_heads=2)


def mixer(shape: Shape = SMALL, **knobs: Any) -> SinkhornAttention:
    """Large maps, so that attention is far from uniform and every option shows."""
    torch.manual_seed(0)
    model = SinkhornAttention(shape, **{"block_size": 4} | knobs).double().eval()
    with torch.no_grad():
        model.qkv.weight.mul_(3)
    return model


def batch(*lengths: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    length = max(lengths) if length is None else length
    x_BLD = torch.randn(len(lengths), length, 12, dtype=torch.float64)
    mask_BL = torch.arange(length) < torch.tensor(lengths)[:, None]
    return x_BLD.masked_fill(~mask_BL[..., None], 1e3), mask_BL


def blocks(model: SinkhornAttention, x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, H, N, S, K] of a length that blocks divide."""
    q, k, v = model.qkv(x_BLD).unflatten(2, (3, model.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k, v = (x.unflatten(2, (-1, model.block_size)) for x in (q, k, v))
    return q, k, v


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "blocks_of_one": {"block_size": 1},
    "blocks_of_five": {"block_size": 5},
    "no_balancing": {"num_iterations": 0},
    "one_round": {"num_iterations": 1},
    "cold": {"temperature": 0.3},
    "arena": {"variant": "arena"},
    "arena_blocks_of_five": {"variant": "arena", "block_size": 5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_naive_version_with_gradients(name: str) -> None:
    is_arena = OPTIONS[name].get("variant") == "arena"
    model = mixer(replace(SMALL, attention_bias=not is_arena, head_dim=5), **OPTIONS[name])
    x_BLD, mask_BL = batch(18, 9, 4, 1)
    if is_arena:  # which reads padding as it is
        x_BLD = x_BLD.clamp(-2, 2)
    x_BLD.requires_grad_()
    weight_BLD = torch.randn_like(x_BLD) * mask_BL[..., None]
    ours_BLD, naive_BLD = model(x_BLD, mask_BL), sinkhorn_attention(model, x_BLD, mask_BL)
    torch.testing.assert_close(ours_BLD[mask_BL], naive_BLD[mask_BL], rtol=1e-9, atol=1e-10)
    if is_arena:  # whose gradients, through rows without a key too, are those of its golden files
        return
    leaves = [x_BLD, *model.parameters()]
    for ours, naive in zip(
        torch.autograd.grad((ours_BLD * weight_BLD).sum(), leaves),
        torch.autograd.grad((naive_BLD * weight_BLD).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, naive, rtol=1e-8, atol=1e-9)
        assert ours.any()


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "default"])
def test_every_option_changes_the_output(name: str) -> None:
    x_BLD, mask_BL = batch(20, 9)
    x_BLD = x_BLD.clamp(-2, 2)
    one, other = mixer(), mixer(**OPTIONS[name])
    assert (one(x_BLD, mask_BL) - other(x_BLD, mask_BL))[mask_BL].abs().max() > 1e-3


def test_up_to_one_block_it_is_softmax_attention() -> None:
    model = mixer(block_size=16)
    softmax = SoftmaxAttention(SMALL).double().eval()
    softmax.load_state_dict(model.state_dict())
    rows = batch(16, 9, 1, length=40)
    expected_BLD = softmax(*rows)
    torch.testing.assert_close(model(*rows)[rows[1]], expected_BLD[rows[1]])


def test_rows_and_columns_of_the_order_sum_to_one_among_real_blocks() -> None:
    model = mixer(num_iterations=200)
    x_BLD, mask_BL = batch(24, 13, 0)
    q, k, _ = blocks(model, x_BLD)
    mask_BNS = mask_BL.unflatten(1, (-1, 4))
    zero = ~mask_BNS[:, None, ..., None]
    order_BHNN = model.order(q.masked_fill(zero, 0), k.masked_fill(zero, 0), mask_BNS)
    one = torch.ones(3, 2, 6, dtype=torch.float64)
    torch.testing.assert_close(order_BHNN.sum(dim=-1), one, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(order_BHNN.sum(dim=-2), one, rtol=1e-9, atol=1e-9)
    # The second row has four real blocks; the others are sorted to themselves.
    assert not order_BHNN[1, :, :4, 4:].any() and not order_BHNN[1, :, 4:, :4].any()
    eye_NN = torch.eye(6, dtype=torch.float64)
    assert torch.equal(order_BHNN[1, :, 4:, 4:], eye_NN[:2, :2].expand(2, 2, 2))
    assert torch.equal(order_BHNN[2], eye_NN.expand(2, 6, 6))


def test_blocks_are_really_sorted() -> None:
    """Queries of block u look like keys of block p(u): those keys and values come to it."""
    model = mixer(temperature=0.1)
    permutation = torch.tensor([2, 0, 3, 1])
    torch.manual_seed(2)
    means_NK = 6 * torch.eye(4, 6, dtype=torch.float64)
    k = means_NK[:, None] + 0.1 * torch.randn(1, 2, 4, 4, 6, dtype=torch.float64)
    q = means_NK[permutation][:, None] + 0.1 * torch.randn(1, 2, 4, 4, 6, dtype=torch.float64)
    v = torch.randn(1, 2, 4, 4, 6, dtype=torch.float64)
    mask_BNS = torch.ones(1, 4, 4, dtype=torch.bool)
    order_HNN = model.order(q, k, mask_BNS)[0]
    torch.testing.assert_close(order_HNN, F.one_hot(permutation).double().expand(2, 4, 4))
    y = model.attend_sorted(torch.stack([q, k, v]), mask_BNS)
    keys = torch.cat([k[:, :, permutation], k], dim=-2)
    values = torch.cat([v[:, :, permutation], v], dim=-2)
    torch.testing.assert_close(y, F.scaled_dot_product_attention(q, keys, values))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_neither_padding_nor_neighbours_change_a_row(dtype: torch.dtype) -> None:
    model = mixer().to(dtype)
    lengths = [21, 20, 10, 5, 1]
    x_BLD, mask_BL = batch(*lengths)
    x_BLD = x_BLD.to(dtype)
    together_BLD = model(x_BLD, mask_BL)
    for row, length in enumerate(lengths):
        for padding in (0, 1, 30):
            alone_1LD = F.pad(x_BLD[row : row + 1, :length], (0, 0, 0, padding), value=5.0)
            mask_1L = (torch.arange(length + padding) < length)[None]
            alone_LD = model(alone_1LD, mask_1L)[0, :length]
            torch.testing.assert_close(alone_LD, together_BLD[row, :length])


def test_examples_may_be_worked_on_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixer(replace(SMALL, attention_dropout=0.3))
    x_BLD, mask_BL = batch(20, 9, 20, 1, 0)
    x_BLD.requires_grad_()
    results = []
    for fast in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(sinkhorn, "has_fast_path", lambda x, fast=fast: fast)
            y_BLD = model(x_BLD, mask_BL)
            results.append([y_BLD, *torch.autograd.grad(y_BLD.sum(), [x_BLD, *model.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    # The second pass drops what the first one did: then the result, which is linear in the values,
    # changes by what its gradient says, and the number of threads does not matter.
    model.train()
    ys, num_before = [], torch.get_num_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        torch.manual_seed(3)
        y_BLD = model(x_BLD, mask_BL)
        (gradient,) = torch.autograd.grad(y_BLD[:3].sum(), model.qkv.weight)
        ys += [y_BLD.detach(), gradient]
    torch.set_num_threads(num_before)
    assert torch.equal(ys[0], ys[2]) and torch.equal(ys[1], ys[3])
    with torch.no_grad():
        model.qkv.weight[24:].mul_(2)
        torch.manual_seed(3)
        change = model(x_BLD, mask_BL)[:3].sum() - ys[0][:3].sum()
    torch.testing.assert_close(change, (gradient * model.qkv.weight)[24:].sum() / 2)


@pytest.mark.parametrize("variant", ["sorted", "arena"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_inputs_stay_finite_with_their_gradients(dtype: torch.dtype, variant: Any) -> None:
    model = mixer(replace(SMALL, d_model=96, num_heads=2), variant=variant).to(dtype)
    torch.manual_seed(1)
    x_BLD = (8 * torch.randn(3, 20, 96)).to(dtype).requires_grad_()
    mask_BL = torch.arange(20) < torch.tensor([18, 2, 0])[:, None]
    y_BLD = model(x_BLD, mask_BL)
    y_BLD.float().mean().backward()
    assert y_BLD.dtype == dtype and y_BLD.isfinite().all() and x_BLD.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("temperature", [0.75, 0.13, 0.03])
def test_scores_that_are_all_next_to_nothing_give_no_nan(temperature: float) -> None:
    """Without a round of balancing the powers of 1e-6 are 0 in float32, and so is their sum."""
    model = mixer(num_iterations=0, temperature=temperature)
    with torch.no_grad():
        model.qkv.weight.div_(3)
    x_BLD, mask_BL = batch(18, 9, 4, 1)
    weight_BLD = torch.randn_like(x_BLD) * mask_BL[..., None]
    results = []
    for dtype, attend in ((torch.float64, sinkhorn_attention), (torch.float32, None)):
        model.to(dtype)
        x = x_BLD.to(dtype).requires_grad_()
        y_BLD = model(x, mask_BL) if attend is None else attend(model, x, mask_BL)
        gradients = torch.autograd.grad((y_BLD * weight_BLD).sum(), [x, *model.parameters()])
        results.append([y_BLD[mask_BL], gradients[0][mask_BL], *gradients[1:]])
    for naive, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), naive, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("variant", ["sorted", "arena"])
def test_dropout_acts_on_weights_in_training_only(variant: Any) -> None:
    model = mixer(replace(SMALL, attention_dropout=0.5), variant=variant)
    rows = batch(20)
    assert torch.equal(model(*rows), model(*rows))
    assert not torch.equal(model.train()(*rows), model(*rows))


@pytest.mark.parametrize("seed", range(8))
def test_unbalanced_noise_over_a_low_temperature_stays_finite(seed: int) -> None:
    model = mixer(gumbel_noise=True, num_iterations=0, temperature=0.05).float().train()
    torch.manual_seed(seed)
    x_BLD = torch.randn(2, 64, SMALL.d_model).requires_grad_()
    y_BLD = model(x_BLD, torch.ones(2, 64, dtype=torch.bool))
    y_BLD.square().mean().backward()
    assert x_BLD.grad is not None and y_BLD.isfinite().all() and x_BLD.grad.isfinite().all()


def test_noise_of_the_sort_is_gumbel_and_only_in_training() -> None:
    shape = replace(SMALL, attention_dropout=0.0)
    model, plain = mixer(shape, gumbel_noise=True, num_iterations=0, temperature=1.0), mixer(shape)
    rows = batch(20)
    assert torch.equal(model(*rows), mixer(shape, num_iterations=0, temperature=1.0)(*rows))
    assert torch.equal(plain.train()(*rows), plain.eval()(*rows))
    model.train()
    assert not torch.equal(model(*rows), model(*rows))
    q, k, _ = blocks(model, rows[0])
    mask_BNS = rows[1].unflatten(1, (-1, 4))
    with torch.no_grad():
        noise = torch.stack([model.order(q, k, mask_BNS).log() for _ in range(2000)])
        noise = noise - model.eval().order(q, k, mask_BNS).log()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(1.6449, abs=0.03)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"block_size": 0}, "model.block_size=0: expected at least 1"),
        ({"num_iterations": -1}, "model.num_iterations=-1: expected at least 0"),
        ({"temperature": 0.0}, "model.temperature=0.0: expected more than 0"),
        ({"temperature": 1e-60}, "model.temperature=1e-60: expected more than 0, from 1.2e-38"),
        ({"variant": "arena", "num_iterations": 3}, "num_iterations=3 .*: act only with .*=sorted"),
        ({"variant": "arena", "temperature": 0.5}, "temperature=0.5 .*: act only with .*=sorted"),
        ({"variant": "arena", "gumbel_noise": True}, "gumbel_noise=True: act only with .*=sorted"),
        ({"variant": "lra"}, "model.variant='lra': expected one of sorted, arena"),
        ({"causal": True}, "model.causal=true: not offered"),
    ],
)
def test_refuses(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SinkhornAttention(SMALL, **knobs)


def test_the_gradient_with_noise_is_that_of_the_noise_that_was_drawn() -> None:
    shape = replace(SMALL, dropout=0.0, attention_dropout=0.0)
    model = mixer(shape, gumbel_noise=True).train()
    x_BLD, mask_BL = batch(16, 16)
    direction = torch.randn_like(x_BLD)

    def loss(step: float) -> Tensor:
        torch.manual_seed(3)
        return (model(x_BLD + step * direction, mask_BL) ** 2).sum()

    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(step), step)  # type: ignore[arg-type]
    difference = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert slope.item() == pytest.approx(difference.item(), rel=1e-6)
