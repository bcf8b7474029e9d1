"""Dropout on a CPU: rate, independence, gradients, random state; attention that drops weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import dropout as dropout_module
from models.dropout import Dropout, draw_kept, keep_probability
from models.encoder import Encoder
from models.layers import attend
from models.shape import Shape
from models.softmax import SoftmaxAttention
from tests.models.test_models import count_saved_bytes, largest_difference


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Threads as they were."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def is_within(count: float, expected: float, variance: float) -> bool:
    """Fewer than five standard deviations apart."""
    return abs(count - expected) < 5 * math.sqrt(variance)


# Which elements are kept.


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1e-4, 1 - 1e-9])
def test_rate_is_the_one_asked_for(p: float) -> None:
    torch.manual_seed(0)
    size = 4_000_000
    kept = draw_kept((2000, size // 2000), p)
    assert set(kept.unique().tolist()) <= {0, 1}
    q = keep_probability(p)
    assert abs(q - (1 - p)) <= 1 / 65536
    assert is_within(float(kept.sum()), size * q, size * q * (1 - q))


def test_extreme_rates_keep_all_and_hardly_anything() -> None:
    torch.manual_seed(0)
    assert keep_probability(1e-9) == 1.0
    assert draw_kept((100_000,), 1e-9).all()
    assert keep_probability(1 - 1e-9) == 1 / 65536
    assert draw_kept((100_000,), 1 - 1e-9).sum() < 20


def test_elements_are_independent_of_their_neighbours() -> None:
    torch.manual_seed(0)
    p, q = 0.3, keep_probability(0.3)
    first, second = (draw_kept((1000, 1001), p).double() - q for _ in range(2))
    variance = first.numel() * (q * (1 - q)) ** 2
    pairs = [
        first.flatten()[:-step] * first.flatten()[step:] for step in (*range(1, 17), 1001, 2002)
    ]
    pairs.append((first * second).flatten())  # one draw and the next
    for products in pairs:
        assert is_within(float(products.sum()), 0.0, variance)
    # As many kept in each row and column as independent elements would have: no row stands out.
    for sums in (first.sum(dim=1), first.sum(dim=0)):
        ratio = float(sums.square().mean()) / (1000 * q * (1 - q))
        assert ratio == pytest.approx(1, abs=5 * math.sqrt(2 / 1000))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7])
def test_any_number_of_elements(size: int) -> None:
    assert draw_kept((size,), 0.5).shape == (size,)
    assert Dropout(0.5)(torch.ones(2, size)).shape == (2, size)


# The module.


def test_mean_is_unbiased_and_values_are_zero_or_scaled() -> None:
    torch.manual_seed(0)
    size = 1_000_000
    for p in (0.1, 0.77):
        y = Dropout(p)(torch.ones(size, dtype=torch.float64))
        q = keep_probability(p)
        assert y.unique().tolist() == pytest.approx([0.0, 1 / q], rel=1e-12)
        assert is_within(float(y.sum()), size, size * (1 - q) / q)


def test_gradient_passes_where_elements_were_kept() -> None:
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    for layout in (lambda x: x, lambda x: x.T, lambda x: x[:, ::2], lambda x: x.expand(3, 7, 5)):

        def run(x: Tensor, layout: Callable[[Tensor], Tensor] = layout) -> Tensor:
            torch.manual_seed(3)
            return Dropout(0.4)(layout(x))

        assert torch.autograd.gradcheck(run, (x,))
    y = run(x)
    assert 0 < int((y == 0).sum()) < y.numel()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.full((1000,), 3.0, dtype=dtype, requires_grad=True)
    y = Dropout(0.25)(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert y.dtype == gradient.dtype == dtype
    assert y.detach().unique().tolist() == pytest.approx([0.0, 4.0], rel=1e-2)
    assert torch.equal(gradient != 0, y != 0)


@pytest.mark.parametrize("module", [Dropout(0.0), Dropout(0.5).eval()], ids=["p=0", "eval"])
def test_nothing_to_drop_is_the_input_itself_and_draws_nothing(module: Dropout) -> None:
    state = torch.get_rng_state()
    x = torch.randn(5)
    torch.set_rng_state(state)
    assert module(x) is x
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0, math.nan])
def test_impossible_rates_are_refused(p: float) -> None:
    with pytest.raises(ValueError, match="expected 0 <= p < 1"):
        Dropout(p)


def test_only_the_mask_is_kept_for_the_gradient() -> None:
    x = torch.randn(1000, requires_grad=True)
    with count_saved_bytes() as saved:
        Dropout(0.5)(x)
    assert saved[0] == 1000


# Random state, for the module and for attention.


def drop_elements() -> list[Tensor]:
    x = torch.ones(300, 300, requires_grad=True)
    y = Dropout(0.5)(x)
    return [y, *torch.autograd.grad(y.sum(), x)]


def drop_weights() -> list[Tensor]:
    # Integers, so that no order of addition changes the result.
    q = torch.zeros(2, 2, 600, 4, requires_grad=True)
    v = torch.arange(9600.0).reshape(2, 2, 600, 4).remainder(7).requires_grad_()
    y = attend(q, q, v, None, dropout=0.5) * 600
    (gradient,) = torch.autograd.grad(y.sum(), v)
    return [y, gradient]


@pytest.mark.parametrize("run", [drop_elements, drop_weights])
def test_the_seed_decides_and_a_restored_state_repeats(run: Callable[[], list[Tensor]]) -> None:
    torch.manual_seed(1)
    first = run()
    state = torch.get_rng_state()
    second = run()
    torch.set_rng_state(state)
    again = run()
    torch.manual_seed(1)
    from_seed = run()
    for a, b, c, d in zip(first, second, again, from_seed, strict=True):
        assert not torch.equal(a, b)
        assert torch.equal(b, c) and torch.equal(a, d)


@pytest.mark.parametrize("run", [drop_elements, drop_weights])
def test_the_number_of_threads_changes_nothing(run: Callable[[], list[Tensor]]) -> None:
    results = []
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        torch.manual_seed(1)
        results.append([*run(), torch.get_rng_state()])
    for others in results[1:]:
        for a, b in zip(results[0], others, strict=True):
            assert torch.allclose(a.double(), b.double(), rtol=1e-6, atol=0)


def test_work_side_by_side_shares_threads_and_gives_them_back() -> None:
    torch.set_num_threads(4)
    seen: list[tuple[int, bool]] = []

    def look(i: int) -> None:
        seen.append((torch.get_num_threads(), torch.is_grad_enabled()))

    for count, share in ((2, 2), (8, 1), (1, 4)):
        seen.clear()
        dropout_module.side_by_side(look, count)
        assert seen == [(share, False)] * count and torch.get_num_threads() == 4

    def fail(i: int) -> None:
        raise MemoryError(f"example {i}")

    with pytest.raises(MemoryError, match="example 0"):
        dropout_module.side_by_side(fail, 3)
    assert torch.get_num_threads() == 4


def test_the_gradient_draws_nothing() -> None:
    q = torch.randn(1, 2, 50, 4, requires_grad=True)
    y = attend(q, q, q, None, dropout=0.5).sum()
    state = torch.get_rng_state()
    y.backward()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_code_has_no_break(compiled: bool) -> None:
    def run(x: Tensor) -> Tensor:
        return attend(drop(x), x, x, None, dropout=0.5)

    drop = Dropout(0.5)
    x = torch.randn(1, 2, 20, 4)
    y = (torch.compile(run, backend="eager", fullgraph=True) if compiled else run)(x)
    assert y.shape == x.shape and not torch.equal(y, run(x))


# Attention that drops weights, against the formula with the same weights dropped.


def inputs(num_queries: int, num_keys: int, *, batch_size: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    lengths = (num_queries, num_keys, num_keys)
    return [  # of a width whose root is no constant that one might find in the code
        torch.randn(batch_size, 2, n, 6, dtype=torch.float64, requires_grad=True) for n in lengths
    ]


def formula(q: Tensor, k: Tensor, v: Tensor, readable: Tensor, kept: Tensor, p: float) -> Tensor:
    """`readable` and `kept` [B, H, L, N]."""
    score = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~readable, -torch.inf)
    return score.softmax(dim=-1) * kept / keep_probability(p) @ v


HOLES = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]])
MASKS = {
    "none": None,
    "full": torch.ones(3, 8, dtype=torch.bool),
    "padding": torch.arange(8) < torch.tensor([[8], [5], [1]]),
    "holes": HOLES.bool(),
    "empty": torch.arange(8) < torch.tensor([[8], [0], [3]]),
}


@pytest.mark.parametrize("block_size", [1, 40, 2**19], ids=["row", "few_rows", "all_rows"])
@pytest.mark.parametrize(
    ("mask", "causal"), [*((mask, False) for mask in MASKS), ("none", True)], ids=str
)
def test_equals_the_formula_with_gradients(
    mask: str, causal: bool, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, mask_BN = 0.4, MASKS[mask]
    num_queries = 8 if causal else 6
    q, k, v = inputs(num_queries, 8)
    drawn: list[Tensor] = []

    def remember(*args: object) -> Tensor:
        drawn.append(draw_kept(*args).clone())
        return drawn[-1]

    monkeypatch.setattr(dropout_module, "BLOCK_SIZE", block_size)
    monkeypatch.setattr(dropout_module, "draw_kept", remember)
    y_BHLK = attend(q, k, v, mask_BN, dropout=p, causal=causal)
    num_blocks = len(drawn)
    weight = torch.randn_like(y_BHLK)
    ours = [y_BHLK, *torch.autograd.grad((y_BHLK * weight).sum(), (q, k, v))]
    assert len(drawn) == 2 * num_blocks
    for once, again in zip(drawn[:num_blocks], drawn[num_blocks:], strict=True):
        assert torch.equal(once, again)

    readable_BN = torch.ones(3, 8, dtype=torch.bool) if mask_BN is None else mask_BN.clone()
    readable_BN[~readable_BN.any(dim=1)] = True
    readable = readable_BN[:, None, None].expand(3, 2, num_queries, 8)
    if causal:
        readable = readable & torch.ones(8, 8, dtype=torch.bool).tril()
    # Blocks come example by example, each with its first keys only; the others weigh nothing.
    rows: list[list[Tensor]] = [[] for _ in range(3)]
    blocks = iter(drawn[:num_blocks])
    for row in rows:
        while sum(block.shape[1] for block in row) < num_queries:
            block = next(blocks)
            row.append(F.pad(block, (0, 8 - block.shape[2])))
    kept = torch.stack([torch.cat(row, dim=1) for row in rows])
    assert next(blocks, None) is None and kept.shape == readable.shape
    assert 0.5 < float(torch.cat([x.flatten() for x in drawn]).double().mean()) < 0.7

    y_BHLK = formula(q, k, v, readable, kept, p)
    theirs = [y_BHLK, *torch.autograd.grad((y_BHLK * weight).sum(), (q, k, v))]
    for a, b in zip(ours, theirs, strict=True):
        assert largest_difference(a, b) < 1e-12


def test_padded_queries_are_left_out() -> None:
    mask_BN = MASKS["padding"]
    q, k, v = inputs(8, 8)
    y_BHLK = attend(q, k, v, mask_BN, query_mask_BL=mask_BN, dropout=0.01)
    y_BHLK.sum().backward()
    for b, n in enumerate((8, 5, 1)):
        assert y_BHLK[b, :, :n].any() and not y_BHLK[b, :, n:].any()
        for x in (q, k, v):
            assert not x.grad[b, :, n:].any()


def test_dropped_attention_is_right_on_average() -> None:
    q, k, v = (x.detach() for x in inputs(5, 8))
    draws = torch.stack([attend(q, k, v, MASKS["padding"], dropout=0.3) for _ in range(3000)])
    exact = attend(q, k, v, MASKS["padding"])
    error = (draws.mean(dim=0) - exact) / (draws.std(dim=0) / math.sqrt(3000))
    assert float(error.abs().max()) < 5
    assert float(error.std()) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_in_every_precision(dtype: torch.dtype) -> None:
    exact = [x.detach().requires_grad_() for x in inputs(64, 64)]
    rounded = [x.detach().to(dtype).requires_grad_() for x in exact]
    results = []
    for q, k, v in (exact, rounded):
        torch.manual_seed(5)
        y_BHLK = attend(q, k, v, None, dropout=0.3)
        results.append([y_BHLK, *torch.autograd.grad(y_BHLK.sum(), (q, k, v))])
    for a, b in zip(*results, strict=True):
        assert b.dtype == dtype
        assert largest_difference(b.double(), a) < (1e-5 if dtype == torch.float32 else 0.03)


def test_autocast_leaves_scores_in_float32() -> None:
    q, k, v = (x.detach().float().requires_grad_() for x in inputs(64, 64))
    results = []
    for enabled in (False, True):
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y_BHLK = attend(q, k, v, None, dropout=0.3)
            results.append([y_BHLK, *torch.autograd.grad(y_BHLK.sum(), (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_memory_for_the_gradient_grows_linearly(causal: bool) -> None:
    saved_bytes = []
    for length in (128, 256):
        q = torch.randn(2, 2, length, 8, requires_grad=True)
        with count_saved_bytes() as saved:
            attend(q * 1, q * 1, q * 1, None, dropout=0.1, causal=causal)
        saved_bytes.append(saved[0])
    assert saved_bytes[0] > 0
    assert saved_bytes[1] <= 2 * saved_bytes[0]


def test_long_rows_are_worked_off_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def remember(shape: torch.Size, *args: object) -> Tensor:
        sizes.append(math.prod(shape))
        return draw_kept(shape, *args)

    monkeypatch.setattr(dropout_module, "draw_kept", remember)
    q = torch.randn(1, 2, 3000, 4, requires_grad=True)
    attend(q, q, q, None, dropout=0.1).sum().backward()
    assert sum(sizes) == 2 * 2 * 3000**2
    assert max(sizes) <= dropout_module.BLOCK_SIZE


# Where models drop.


def test_no_model_part_uses_the_slow_dropout() -> None:
    shape = Shape(vocab_size=5, max_length=8, dropout=0.1, attention_dropout=0.1)
    encoder = Encoder(shape, lambda: SoftmaxAttention(shape))
    assert not any(isinstance(part, nn.Dropout) for part in encoder.modules())
    assert sum(isinstance(part, Dropout) for part in encoder.modules()) == 1 + 3 * shape.num_layers
