"""What self-pretraining asks: which tokens, how often, and that nothing but seed, epoch and example
decides it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lra.config import HardwareConfig, TrainConfig
from lra.tasks.batches import TokenArrays
from lra.tasks.hidden import NOTHING, HiddenBatch, HiddenTokens, Objective
from lra.training import distributed
from lra.training.hardware import Hardware
from lra.training.trainer import load_batches

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MASK_ID = 11  # behind the padding, 0, and ten values


def arrays(lengths_NS: Any, seed: int = 0) -> TokenArrays:
    rng = np.random.default_rng(seed)
    rows = [[rng.integers(0, 10, n).astype(np.uint8) for n in row] for row in lengths_NS]
    made = TokenArrays.of(rows, len(rows[0]), 4096)
    made.folder = Path("memory")
    return made


def hidden(
    examples: TokenArrays, *, rate: float = 0.3, objective: Objective = "masked", **changes: int
) -> HiddenTokens:
    numbers = {"mask_id": MASK_ID, "seed": 5, "part": 0} | changes
    return HiddenTokens(examples, objective, mask_rate=rate, **numbers)


def hidden_grid(tokens: HiddenTokens, epochs: int, length: int) -> np.ndarray:
    """Whether each place is hidden [epochs, N, S, length], of rows that are `length` long."""
    found = np.zeros((epochs, *tokens.lengths_NS.shape, length), bool)
    for epoch, n, s in np.ndindex(found.shape[:3]):
        found[epoch, n, s, tokens.hidden(n, s, epoch)] = True
    return found


def bound(rate: float, count: int, z: float = 4.0) -> float:
    """How far a share of `count` draws may be from the rate: `z` standard deviations."""
    return z * (rate * (1 - rate) / count) ** 0.5


def same(a: HiddenBatch, b: HiddenBatch) -> bool:
    """Whether two batches ask the same, however far they are padded."""
    return all(
        torch.equal(*(t[..., : min(x.shape[-1], y.shape[-1])] for t in (x, y)))
        for x, y in zip((*a.inputs, a.labels_B), (*b.inputs, b.labels_B), strict=True)
    )


RATES = {
    path.stem: yaml.safe_load(path.read_text())["mask_rate"]
    for path in sorted((CONFIGS / "pretrain_task/masked").glob("*.yaml"))
}


def test_every_task_has_a_rate() -> None:
    assert set(RATES) == {path.stem for path in (CONFIGS / "task").glob("*.yaml")}


@pytest.mark.parametrize("rate", sorted({*RATES.values()}))
def test_tokens_are_hidden_at_the_rate_independently_of_all_others(rate: float) -> None:
    tokens = hidden(arrays([[200, 200]] * 60), rate=rate)
    is_hidden = hidden_grid(tokens, 4, 200)  # [epoch, example, sequence, place]
    assert abs(is_hidden.mean() - rate) < bound(rate, is_hidden.size)
    for axis in range(4):  # as often in each epoch, example, sequence and at each place
        others = tuple(a for a in range(4) if a != axis)
        count = is_hidden.size // is_hidden.shape[axis]
        assert np.abs(is_hidden.mean(axis=others) - rate).max() < bound(rate, count, z=4.5)
        # And neighbours along it are hidden together as often as if one knew nothing of the other.
        along = np.moveaxis(is_hidden, axis, 0)
        together = along[1:] & along[:-1]
        assert abs(together.mean() - rate**2) < bound(rate**2, together.size)


@pytest.mark.parametrize("objective", ["masked", "next"])
def test_what_is_asked_are_the_real_tokens_as_they_were(objective: Objective) -> None:
    lengths_NS = [[30, 3], [0, 64], [1, 2], [65, 17]]
    examples = arrays(lengths_NS)
    before = examples.tokens.copy()
    tokens = hidden(examples, rate=0.5, objective=objective)
    for epoch in range(5):
        batch = tokens.batch(np.arange(4), epoch=epoch)
        plain = examples.batch(np.arange(4))
        assert batch.labels_B.shape == batch.places_BSM.shape
        assert torch.equal(batch.lengths_BS, plain.lengths_BS)
        asked = 0
        for n, s in np.ndindex(4, 2):
            values = examples.sequence(n, s)
            is_asked_M = batch.labels_B[n, s] != NOTHING
            places = batch.places_BSM[n, s, is_asked_M].numpy()
            labels = batch.labels_B[n, s, is_asked_M].numpy()
            asked += len(places)
            row_L, plain_L = batch.tokens_BSL[n, s].numpy(), plain.tokens_BSL[n, s].numpy()
            assert (row_L[len(values) :] == 0).all()  # padding as it was
            assert not is_asked_M[len(places) :].any() and (batch.places_BSM[n, s] >= 0).all()
            if objective == "masked":
                assert np.array_equal(places, tokens.hidden(n, s, epoch))
                assert np.array_equal(labels, values[places])
                assert (row_L[places] == MASK_ID).all()
                others = np.setdiff1d(np.arange(len(values)), places)
                assert np.array_equal(row_L[others], plain_L[others])
                assert (row_L == MASK_ID).sum() == len(places)
            else:
                assert np.array_equal(places, np.arange(max(0, len(values) - 1)))
                assert np.array_equal(labels, values[1:])
                assert np.array_equal(row_L, plain_L)
        assert asked == batch.num_answers == tokens.num_answers(np.arange(4), epoch) > 0
    assert np.array_equal(examples.tokens, before)


@pytest.mark.parametrize("objective", ["masked", "next"])
def test_rows_of_which_nothing_can_be_asked(objective: Objective) -> None:
    tokens = hidden(arrays([[0], [1]]), objective=objective, rate=1e-6)
    for rows in ([0], [1], [0, 1]):
        batch = tokens.batch(np.array(rows))
        assert batch.num_answers == tokens.num_answers(np.array(rows)) == 0
        assert batch.labels_B.shape == (len(rows), 1, 1) and (batch.labels_B == NOTHING).all()
        assert (batch.tokens_BSL != MASK_ID).all() and (batch.places_BSM == 0).all()


def test_each_epoch_split_and_seed_has_draws_of_its_own() -> None:
    examples = arrays([[300]] * 2)
    draws = {
        (seed, part, epoch, n): tuple(hidden(examples, seed=seed, part=part).hidden(n, 0, epoch))
        for seed in (5, 6) for part in (0, 1) for epoch in (0, 1) for n in (0, 1)
    }  # fmt: skip
    assert len(set(draws.values())) == len(draws)
    again = hidden(examples, seed=6, part=1)  # evaluations, which know of no epoch
    assert tuple(again.hidden(1, 0, 0)) == draws[6, 1, 0, 1]
    assert same(again.batch(np.arange(2)), again.batch(np.arange(2)))
    assert hidden(examples, seed=2**32 - 1).num_answers(np.arange(2)) > 0


@pytest.mark.parametrize("objective", ["masked", "next"])
def test_company_padding_and_micro_batches_change_no_question(objective: Objective) -> None:
    tokens = hidden(arrays([[30, 200], [9, 8], [70, 0], [64, 65]]), objective=objective)
    whole = tokens.batch(np.array([3, 0, 2, 1]), epoch=7)
    for i, n in enumerate((3, 0, 2, 1)):
        alone = tokens.batch(np.array([n]), pad_to=300, epoch=7)
        (part,) = (p for j, p in enumerate(whole.split(4)) if j == i)
        assert isinstance(part, HiddenBatch) and same(part, alone)
    assert sum(p.num_answers for p in whole.split(3)) == whole.num_answers
    assert [len(p) for p in whole.split(3)] == [1, 1, 2]


def collected(
    tokens: HiddenTokens, first_step: int = 1, num_workers: int = 0
) -> list[tuple[HiddenBatch, int, int, int]]:
    cfg = TrainConfig(num_steps=12, batch_size=8, lr=1.0, warmup_steps=0, eval_every=4)
    hardware = Hardware(HardwareConfig(device="cpu", num_threads=1, num_workers=num_workers))
    return list(
        load_batches(tokens, cfg, hardware, seed=1, first_step=first_step, pad_to=None)  # type: ignore[arg-type]
    )


def same_lists(
    a: list[tuple[HiddenBatch, int, int, int]], b: list[tuple[HiddenBatch, int, int, int]]
) -> bool:
    return len(a) == len(b) and all(
        same(x, y) and counts == others for (x, *counts), (y, *others) in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("objective", ["masked", "next"])
def test_workers_a_new_start_and_more_processes_change_no_question(
    objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths_NS = np.random.default_rng(3).integers(0, 60, (40, 2))
    tokens = hidden(arrays(lengths_NS.tolist()), objective=objective)
    whole = collected(tokens)  # five batches an epoch
    assert same_lists(whole, collected(tokens, num_workers=2))
    assert same_lists(whole[6:], collected(tokens, first_step=7))
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    parts = []
    for rank in range(3):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        parts.append(collected(tokens))
    for step, (batch, *counts) in enumerate(whole):
        for rank in range(3):
            part, *own = parts[rank][step]
            assert own == counts  # of the whole batch, by which every process divides
            rows = list(batch.split(len(batch)))[rank::3]
            assert all(same(a, b) for a, b in zip(part.split(len(part)), rows, strict=True))
        assert counts[0] == batch.num_answers == sum(p[step][0].num_answers for p in parts)


def test_a_batch_that_asks_nothing_is_divided_by_one() -> None:
    assert {num_answers for _, num_answers, *_ in collected(hidden(arrays([[0]] * 8)))} == {1}


def test_draws_are_those_of_before() -> None:
    """A phase that goes on with a later version has to hide the same; these are of the first."""
    tokens = hidden(arrays([[40, 20]]), rate=0.15)
    found = [tokens.hidden(0, s, epoch).tolist() for epoch in (0, 1) for s in (0, 1)]
    assert found == [[0, 14, 19, 34], [2], [0, 1, 6, 23, 31, 35, 39], [0, 3, 10, 13, 17]]
