"""Local, Longformer, BigBird and Sparse Transformer attention: options, dropout, two code paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models import patterns
from models.bigbird import BigBirdAttention, draw_blocks
from models.local import LocalAttention
from models.longformer import LongformerAttention
from models.shape import Shape
from models.sparse import SparseAttention
from tests.references.patterns import (
    bigbird_attention,
    local_attention,
    longformer_attention,
    sparse_attention,
)

SMALL = Shape(vocab_size=9, max_length=40, d_model=12, num_heads=2, attention_dropout=0.0)
CLS = replace(SMALL, max_length=39, pooling="cls")

Naive = Callable[[Any, Tensor, Tensor], Tensor]
CASES: dict[str, tuple[type[nn.Module], Naive, Shape, dict[str, Any]]] = {
    "window": (LocalAttention, local_attention, SMALL, {"window": 8}),
    "window_of_two": (LocalAttention, local_attention, SMALL, {"window": 2}),
    "window_of_all": (LocalAttention, local_attention, SMALL, {"window": 100}),
    "window_causal": (LocalAttention, local_attention, SMALL, {"window": 9, "causal": True}),
    "window_alone": (LocalAttention, local_attention, SMALL, {"window": 2, "causal": True}),
    "blocks": (LocalAttention, local_attention, SMALL, {"pattern": "blocks", "block_size": 6}),
    "blocks_causal": (
        LocalAttention, local_attention, SMALL,
        {"pattern": "blocks", "block_size": 6, "causal": True},
    ),
    "longformer": (LongformerAttention, longformer_attention, SMALL, {"window": 6}),
    "longformer_many": (
        LongformerAttention, longformer_attention, SMALL, {"window": 5, "num_global": 13},
    ),
    "longformer_causal": (
        LongformerAttention, longformer_attention, SMALL,
        {"window": 5, "num_global": 7, "causal": True},
    ),
    "longformer_no_bias": (
        LongformerAttention, longformer_attention, replace(SMALL, attention_bias=False),
        {"window": 6},
    ),
    "bigbird": (BigBirdAttention, bigbird_attention, SMALL, {"block_size": 3, "num_random": 2}),
    "bigbird_longer": (
        BigBirdAttention, bigbird_attention, replace(SMALL, max_length=60),
        {"block_size": 4, "num_random": 2},
    ),
    "bigbird_span": (
        BigBirdAttention, bigbird_attention, SMALL,
        {"block_size": 2, "num_random": 3, "random_span": 14},
    ),
    "bigbird_none": (
        BigBirdAttention, bigbird_attention, SMALL, {"block_size": 5, "num_random": 0},
    ),
    "bigbird_full": (
        BigBirdAttention, bigbird_attention, SMALL, {"block_size": 6, "num_random": 1},
    ),
    "fixed": (SparseAttention, sparse_attention, SMALL, {"block_size": 6, "num_summary": 2}),
    "fixed_cls": (SparseAttention, sparse_attention, CLS, {"block_size": 6, "num_summary": 1}),
    "strided": (
        SparseAttention, sparse_attention, SMALL,
        {"pattern": "strided", "block_size": 6, "num_summary": 1},
    ),
    "strided_cls": (
        SparseAttention, sparse_attention, CLS,
        {"pattern": "strided", "block_size": 7, "num_summary": 1},
    ),
    "strided_first": (
        SparseAttention, sparse_attention, replace(SMALL, pooling="first"),
        {"pattern": "strided", "block_size": 7, "num_summary": 1},
    ),
}  # fmt: skip


def make(name: str, **changes: Any) -> Any:
    kind, _, shape, knobs = CASES[name]
    torch.manual_seed(0)
    mixer = kind(replace(shape, **changes), **knobs).double()
    with torch.no_grad():  # far from even weights
        for parameter in mixer.parameters():
            parameter.mul_(3)
    return mixer


def batch(*lengths: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    length = max(lengths) if length is None else length
    x_BLD = torch.randn(len(lengths), length, SMALL.d_model, dtype=torch.float64)
    return x_BLD.requires_grad_(), torch.arange(length) < torch.tensor(lengths)[:, None]


def gradients(mixer: nn.Module, x_BLD: Tensor, y_BLD: Tensor, mask_BL: Tensor) -> list[Tensor]:
    """Of a random sum over real rows."""
    torch.manual_seed(2)
    loss = (torch.randn_like(y_BLD) * y_BLD)[mask_BL].sum()
    return list(torch.autograd.grad(loss, [x_BLD, *mixer.parameters()]))


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


WAYS: dict[str, dict[str, Any]] = {  # parts of a head, weights kept or formed again; other devices
    "kept": {"CHUNK_SIZE": 200},
    "again": {"CHUNK_SIZE": 200, "KEPT_WIDTH": 0},
    "plain": {"has_fast_path": lambda _: False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_naive_version_with_gradients(name: str, way: str) -> None:
    mixer = make(name)
    x_BLD, mask_BL = batch(40, 33, 9, 1)
    mask_BL[1, [2, 11, 12]] = False  # holes
    with mock.patch.multiple(patterns, **WAYS[way]):
        y_BLD = mixer(x_BLD, mask_BL)
        ours = [y_BLD[mask_BL], *gradients(mixer, x_BLD, y_BLD, mask_BL)]
    y_BLD = CASES[name][1](mixer, x_BLD, mask_BL)
    assert_same(ours, [y_BLD[mask_BL], *gradients(mixer, x_BLD, y_BLD, mask_BL)])


@pytest.mark.parametrize("name", CASES)
def test_any_length_gives_the_same_rows(name: str) -> None:
    mixer = make(name)
    x_BLD, mask_BL = batch(40, 40)
    for length in (1, 2, 5, 6, 7, 13):
        shorter_BL = mask_BL & (torch.arange(40) < length)
        y_BLD = mixer(x_BLD, shorter_BL)[:, :length]
        torch.testing.assert_close(
            mixer(x_BLD[:1, :length], mask_BL[:1, :length]), y_BLD[:1], rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("width", [0, 256], ids=["again", "kept"])
@pytest.mark.parametrize("name", CASES)
def test_dropout_keeps_the_mean_and_has_the_gradient_of_what_it_kept(name: str, width: int) -> None:
    mixer = make(name, attention_dropout=0.25)
    x_BLD, mask_BL = batch(20, 11)

    def run(x_BLD: Tensor) -> Tensor:
        torch.manual_seed(3)
        return mixer.train()(x_BLD, mask_BL)[mask_BL]

    # A seed for each example.
    with mock.patch.multiple(patterns, CHUNK_SIZE=1, KEPT_WIDTH=width):
        assert torch.equal(run(x_BLD), run(x_BLD))
        assert not torch.equal(run(x_BLD), mixer.eval()(x_BLD, mask_BL)[mask_BL])
        direction = torch.randn_like(x_BLD)
        weight = torch.randn_like(run(x_BLD))
        (gradient,) = torch.autograd.grad((run(x_BLD) * weight).sum(), x_BLD)
        step = 1e-6 * direction
        slope = ((run(x_BLD + step) - run(x_BLD - step)) * weight).sum() / 2e-6
        torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        mean = torch.stack([mixer.train()(x_BLD, mask_BL)[mask_BL] for _ in range(150)]).mean(dim=0)
        exact = mixer.eval()(x_BLD, mask_BL)[mask_BL]
    assert float((mean - exact).abs().mean() / exact.abs().mean()) < 0.12


def test_a_part_of_the_attention_weights_is_dropped() -> None:
    """With equal weights and values of one, a result says how many are kept."""
    mixer = make("blocks", attention_dropout=0.25).train()
    q = torch.zeros(64, 2, 36, 6)
    y_BHLK = mixer.attend(q, q, torch.ones_like(q), torch.ones(64, 36, dtype=torch.bool))
    kept = y_BHLK[..., 0] * 6 * 0.75  # number of kept weights out of 6
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-4)
    assert float(kept.mean() / 6) == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n][0] is LocalAttention])
def test_reach_is_the_largest_distance_that_a_layer_joins(name: str) -> None:
    mixer = make(name)
    x_BLD, mask_BL = batch(40)
    y_BLD = mixer(x_BLD, mask_BL)
    distances = []
    for i in range(40):
        (gradient_BLD,) = torch.autograd.grad(y_BLD[0, i].sum(), x_BLD, retain_graph=True)
        read = gradient_BLD[0].abs().amax(dim=1).nonzero()[:, 0]
        distances += (read - i).abs().tolist()
    assert max(distances) == min(mixer.reach, 39)
    assert LocalAttention(SMALL, pattern="strided", block_size=6).reach is None


def test_strided_blocks_do_not_depend_on_the_length_of_the_batch() -> None:
    torch.manual_seed(0)
    mixer = LocalAttention(SMALL, pattern="strided", block_size=6).double()
    x_BLD, mask_BL = batch(17, 30)
    x_BLD = (x_BLD * mask_BL[..., None]).detach()  # it reads padding
    y_BLD = mixer(x_BLD, mask_BL)
    torch.testing.assert_close(mixer(x_BLD[:1, :17], mask_BL[:1, :17]), y_BLD[:1, :17])
    # Seven blocks of every seventh position.
    full_BL = torch.ones(1, 40, dtype=torch.bool)
    z_BLD = batch(40)[0]
    (gradient_BLD,) = torch.autograd.grad(mixer(z_BLD, full_BL)[0, 9].sum(), z_BLD)
    read = gradient_BLD[0].abs().amax(dim=1).nonzero()[:, 0]
    assert read.tolist() == [2, 9, 16, 23, 30, 37]


def test_longformer_without_global_tokens_is_the_window() -> None:
    torch.manual_seed(0)
    ours = LongformerAttention(SMALL, window=6, num_global=0).double()
    local = LocalAttention(SMALL, window=6).double()
    local.load_state_dict(ours.state_dict())
    x_BLD, mask_BL = batch(40, 7)
    assert torch.equal(ours(x_BLD, mask_BL), local(x_BLD, mask_BL))


def test_random_blocks_come_from_the_seed_and_are_part_of_the_state() -> None:
    def table(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return BigBirdAttention(SMALL, block_size=2, num_random=3).state_dict()["random_HGr"]

    assert torch.equal(table(0), table(0)) and not torch.equal(table(0), table(1))
    assert table(0).shape == (2, 18, 3)
    assert not torch.equal(table(0)[0], table(0)[1])


def test_random_blocks_are_others_and_each_equally_likely() -> None:
    torch.manual_seed(0)
    table_HGr = draw_blocks(3000, num_blocks=10, last=9, num_random=2)
    assert table_HGr.shape == (3000, 8, 2)
    for i in range(1, 9):
        blocks, counts = table_HGr[:, i - 1].unique(return_counts=True)
        assert blocks.tolist() == [j for j in range(1, 9) if abs(i - j) > 1]
        assert (counts / 6000 - 1 / len(blocks)).abs().max() < 0.03
        assert (table_HGr[:, i - 1, 0] != table_HGr[:, i - 1, 1]).all()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("pattern", ["fixed", "strided"])
def test_a_pattern_depends_on_no_value_of_a_tensor(pattern: str, pooling: str) -> None:
    """A GPU would have to be waited for; tensors without values cannot be asked for one."""
    shape = replace(CLS, pooling=pooling)
    model = SparseAttention(shape, block_size=4, num_summary=2, pattern=pattern)
    front = 3 if model.opens_first else 0
    with FakeTensorMode():
        model.pieces(torch.ones(2, 13, dtype=torch.bool), 4, front)


def test_filled_rows_are_keys_of_the_last_block() -> None:
    """With zeros as keys and values they take weight from the others and add nothing."""
    shape = replace(SMALL, attention_bias=False, num_heads=1)
    mixer = BigBirdAttention(shape, block_size=2, num_random=0, filled_keys=True).double()
    with torch.no_grad():
        mixer.qkv.weight[:24] = 0  # even weights
    x_BLD, mask_BL = batch(40)
    y_LD = mixer(x_BLD, mask_BL)[0]
    v_LD = x_BLD[0] @ mixer.qkv.weight[24:].T
    read = [0, 1, *range(18, 24)]  # and the two rows behind the input
    torch.testing.assert_close(y_LD[20], mixer.out(v_LD[read].sum(dim=0) / 10))


REFUSED = [
    (LocalAttention, {"pattern": "near"}, "model.pattern='near': .*window, blocks, strided"),
    (LocalAttention, {"window": 1}, "model.window=1: expected at least 2"),
    (LocalAttention, {"window": 32, "pattern": "blocks"}, "window=32: acts only .*pattern=window"),
    (LocalAttention, {"block_size": 1}, "model.block_size=1: expected at least 2"),
    (LocalAttention, {"pattern": "strided", "causal": True}, "model.causal=true .*pattern=strided"),
    (LongformerAttention, {"window": 1}, "model.window=1: expected at least 2"),
    (LongformerAttention, {"num_global": -1}, "model.num_global=-1: expected at least 0"),
    (BigBirdAttention, {"block_size": 0}, "model.block_size=0: expected at least 1"),
    (BigBirdAttention, {"num_random": -1}, "model.num_random=-1: expected at least 0"),
    (BigBirdAttention, {"random_span": 0}, "model.random_span=0: expected at least 1 or null"),
    (BigBirdAttention, {"block_size": 2, "random_span": 8}, "model.num_random=3: only 0 blocks"),
    (BigBirdAttention, {"block_size": 64, "filled_keys": True}, "model.num_random=3: only 0"),
    (BigBirdAttention, {"causal": True}, "model.causal=true: BigBird"),
    (SparseAttention, {"pattern": "random"}, "model.pattern='random': .*fixed, strided"),
    (SparseAttention, {"block_size": 1}, "model.block_size=1: expected at least 2"),
    (SparseAttention, {"num_summary": 0}, "model.num_summary=0: expected at least 1"),
    (SparseAttention, {"num_summary": 64}, "model.num_summary=64: .*model.block_size=64"),
]


@pytest.mark.parametrize("kind, knobs, message", REFUSED)
def test_values_out_of_range_are_refused(kind: Any, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(SMALL, **knobs)
