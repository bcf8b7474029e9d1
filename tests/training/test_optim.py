"""Each schedule as a function of the step, against its source's own arithmetic."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from lra.config import GroupConfig, GroupsConfig, TrainConfig
from lra.training.adam import AdamW
from lra.training.optim import (
    describe_groups,
    learning_rate,
    make_optimizer,
    parameter_groups,
    set_rates,
)
from models.classifier import Classifier
from models.encoder import Encoder
from models.shape import Shape


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


@pytest.mark.parametrize("warmup", [0, 10, 49])
def test_cosine_to_zero_equals_that_of_transformers(warmup: int) -> None:
    from transformers.optimization import get_cosine_schedule_with_warmup

    cfg = config("cosine_to_zero", warmup_steps=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=cfg.lr)
    theirs = get_cosine_schedule_with_warmup(optimizer, warmup, cfg.num_steps)
    for step in range(1, cfg.num_steps + 1):
        assert learning_rate(step, cfg) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-15)
        optimizer.step()
        theirs.step()


def test_cosine_early_counts_the_warmup_and_ends_as_much_before_the_end() -> None:
    cfg = config("cosine_early")
    assert learning_rate(5, cfg) == pytest.approx(0.005)
    assert learning_rate(21, cfg) == pytest.approx(0.005)  # half of 40 steps
    assert [learning_rate(s, cfg) for s in range(41, 51)] == pytest.approx([0.0] * 10)
    assert learning_rate(1, config("cosine_early", warmup_steps=0)) == pytest.approx(0.01)


def test_linear_rises_as_a_power_and_falls_to_zero() -> None:
    cfg = config("linear", warmup_power=2.0)
    assert learning_rate(1, cfg) == pytest.approx(1e-7)
    assert learning_rate(6, cfg) == pytest.approx(1e-7 + (0.01 - 1e-7) * 0.25)
    assert learning_rate(6, config("linear")) == pytest.approx(1e-7 + (0.01 - 1e-7) * 0.5)
    assert learning_rate(11, cfg) == pytest.approx(0.01)
    assert learning_rate(31, cfg) == pytest.approx(0.005)
    assert learning_rate(50, cfg) == pytest.approx(0.01 / 40)
    assert learning_rate(1, config("linear", warmup_steps=0)) == pytest.approx(0.01)


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


class Slow(torch.nn.Module):
    """A mixer with a parameter of a rate of its own."""

    GROUPS = {"log_step": "step"}

    def __init__(self) -> None:
        super().__init__()
        self.log_step = torch.nn.Parameter(torch.zeros(3))
        self.map = torch.nn.Linear(2, 2)

    def forward(self, x_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
        return x_BLD


def slow_model() -> Classifier:
    shape = Shape(vocab_size=5, max_length=9, d_model=4, d_ff=8, num_layers=1)
    return Classifier(Encoder(shape, Slow), shape, 3)


def test_every_parameter_is_in_one_group() -> None:
    model = slow_model()
    groups = parameter_groups(model)
    found = [id(parameter) for group in groups.values() for parameter in group]
    assert sorted(found) == sorted(map(id, model.parameters()))
    assert groups["step"] == [model.encoder.blocks[0].mixer.log_step]
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[p].removeprefix("encoder.") for p in groups["norm"]} == {
        "blocks.0.norm1.weight", "blocks.0.norm1.bias", "blocks.0.norm2.weight",
        "blocks.0.norm2.bias", "blocks.0.mixer.map.bias", "blocks.0.ffn.up.bias",
        "blocks.0.ffn.down.bias", "norm.weight", "norm.bias",
    }  # fmt: skip


def test_groups_have_rates_and_decays_of_their_own() -> None:
    model = slow_model()
    own = GroupsConfig(step=GroupConfig(lr=0.001, weight_decay=0.0), norm=GroupConfig(None, 0.0))
    cfg = config("cosine_to_zero", weight_decay=0.3, groups=own)
    optimizer = make_optimizer(model, cfg)
    for step in (1, 6, 11, 30):
        rate = set_rates(optimizer, step, cfg)
        rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
        assert rates["general"] == rates["norm"] == rate == learning_rate(step, cfg)
        assert rates["step"] == pytest.approx(rate / 10)
    decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {"general": 0.3, "step": 0.0, "norm": 0.0}
    described = {group["name"]: group for group in describe_groups(model, cfg)}
    assert described["step"] == {
        "name": "step", "num_params": 3, "peak_lr": 0.001, "weight_decay": 0.0,
    }  # fmt: skip
    total = sum(parameter.numel() for parameter in model.parameters())
    assert sum(group["num_params"] for group in described.values()) == total
    assert describe_groups(model, config("constant")) == []
    # A model without such parameters has no such group.
    assert {g["name"] for g in describe_groups(torch.nn.Linear(2, 2), cfg)} == set()


def test_updates_are_those_of_pytorch_and_go_on_from_its_states() -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3, "fused": True}
    optimizers = AdamW([ours], **settings), torch.optim.AdamW([theirs], **settings)
    for step in range(6):
        gradient = torch.randn(5)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
            optimizer.zero_grad()
            assert parameter.grad is None
        assert torch.equal(ours, theirs)
        if step == 3:
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    ours_saved, saved = (optimizer.state_dict() for optimizer in optimizers)
    assert ours_saved["param_groups"] == saved["param_groups"]
    assert all(torch.equal(ours_saved["state"][0][k], v) for k, v in saved["state"][0].items())


def test_an_optimiser_saved_before_there_were_groups_goes_on() -> None:
    model, cfg = slow_model(), config("constant")
    saved = make_optimizer(model, cfg).state_dict()
    for group in saved["param_groups"]:
        del group["name"]
    optimizer = make_optimizer(model, cfg)
    optimizer.load_state_dict(saved)
    assert set_rates(optimizer, 5, cfg) == optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
