"""Each schedule as a function of the step, against its source's own arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from lra.config import TrainConfig
from lra.training.optim import learning_rate, make_optimizer


def config(schedule: str, **changes: object) -> TrainConfig:
    values = dict(
        num_steps=50, batch_size=1, lr=0.01, warmup_steps=10, eval_every=1, schedule=schedule
    )
    return TrainConfig(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("warmup", [2, 10, 25, 49])
def test_one_cycle_equals_pytorch(warmup: int) -> None:
    cfg = config("one_cycle", warmup_steps=warmup)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=cfg.lr, pct_start=warmup / cfg.num_steps, anneal_strategy="linear",
        total_steps=cfg.num_steps,
    )  # fmt: skip
    for step in range(1, cfg.num_steps + 1):
        assert learning_rate(step, cfg) == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-9, abs=1e-15
        )
        optimizer.step()
        if step < cfg.num_steps:
            theirs.step()


def test_inverse_sqrt_rises_linearly_and_falls_as_one_over_root() -> None:
    cfg = config("inverse_sqrt")
    assert learning_rate(1, cfg) == pytest.approx(1e-7)
    assert learning_rate(6, cfg) == pytest.approx(1e-7 + (0.01 - 1e-7) * 0.5)
    assert learning_rate(11, cfg) == pytest.approx(0.01)
    assert learning_rate(41, cfg) == pytest.approx(0.01 * math.sqrt(10 / 40))


def test_rsqrt_peaks_at_lr_over_root_of_warmup() -> None:
    cfg = config("rsqrt", lr=0.05)
    assert learning_rate(1, cfg) == 0
    assert learning_rate(6, cfg) == pytest.approx(0.05 * 0.5 / math.sqrt(10))
    assert max(learning_rate(s, cfg) for s in range(1, 51)) == pytest.approx(0.05 / math.sqrt(10))
    assert learning_rate(50, cfg) == pytest.approx(0.05 / math.sqrt(49))
    # LRA's ListOps: 1.58e-3 at step 1,000.
    assert learning_rate(
        1001, config("rsqrt", lr=0.05, warmup_steps=1000, num_steps=5000)
    ) == pytest.approx(1.58e-3, rel=2e-3)


def test_cosine_counts_from_the_end_of_the_warmup() -> None:
    cfg = config("cosine")
    assert learning_rate(1, cfg) == 0
    assert learning_rate(11, cfg) == pytest.approx(0.01)
    assert learning_rate(36, cfg) == pytest.approx(0.005)  # half of num_steps later


def test_constant() -> None:
    assert learning_rate(5, config("constant")) == pytest.approx(0.005)
    assert learning_rate(50, config("constant", warmup_steps=0)) == 0.01


def test_optimizer_takes_its_settings() -> None:
    model = torch.nn.Linear(2, 2)
    group = make_optimizer(
        model, config("constant", betas=(0.5, 0.6), eps=1e-5, weight_decay=0.3)
    ).param_groups[0]
    assert group["betas"] == (0.5, 0.6) and group["eps"] == 1e-5 and group["weight_decay"] == 0.3
    assert len(group["params"]) == 2
