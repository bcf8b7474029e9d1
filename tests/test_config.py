"""Typed configuration: what is refused, and what the message says."""

from __future__ import annotations

import pytest

from lra.config import LATER, HardwareConfig, TrainConfig, config_hash
from lra.values import fill

TRAIN = {"num_steps": 10, "batch_size": 4, "lr": 1e-3, "warmup_steps": 2, "eval_every": 5}


def refused(changes: dict, *expected: str) -> None:
    with pytest.raises(ValueError) as error:
        fill(TrainConfig, TRAIN | changes, "train")
    for text in expected:
        assert text in str(error.value)


def test_good_values_pass_and_integers_serve_as_numbers() -> None:
    config = fill(TrainConfig, TRAIN | {"lr": 1, "betas": [0.5, 0.9]}, "train")
    assert config.lr == 1.0 and type(config.lr) is float
    assert config.betas == (0.5, 0.9)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"step": 5}, ("train.step=5", "unknown key", "did you mean 'num_steps'")),
        ({"num_steps": 0}, ("train.num_steps=0", "at least 1")),
        ({"num_steps": "abc"}, ("train.num_steps='abc'", "an integer")),
        ({"num_steps": 5.5}, ("train.num_steps=5.5", "an integer")),
        ({"num_steps": True}, ("train.num_steps=True", "an integer")),
        ({"num_steps": "???"}, ("train.num_steps is missing",)),
        ({"lr": float("nan")}, ("train.lr=nan", "above 0")),
        ({"lr": -1}, ("train.lr=-1.0", "above 0")),
        ({"lr": "fast"}, ("train.lr='fast'", "a number")),
        (
            {"schedule": "one_cycel"},
            ("train.schedule='one_cycel'", "did you mean 'one_cycle'", "cosine"),
        ),
        ({"length_bucketing": "yes"}, ("train.length_bucketing='yes'", "true or false")),
        ({"length_bucketing": 1}, ("train.length_bucketing=1", "true or false")),
        ({"betas": [0.9]}, ("train.betas=[0.9]", "a list of 2")),
        ({"betas": [0.9, 1.0]}, ("train.betas=[0.9, 1.0]", "< 1")),
        ({"weight_decay": -0.1}, ("train.weight_decay=-0.1",)),
        ({"warmup_steps": -1}, ("train.warmup_steps=-1",)),
        ({"eps": 1e-60}, ("train.eps=1e-60", "float32", "1.2e-38")),
        ({"clip_norm": 0}, ("train.clip_norm=0.0", "above 0")),
        ({"eval_every": None}, ("train.eval_every=null", "an integer")),
    ],
)
def test_bad_values_are_refused_by_key(changes: dict, expected: tuple[str, ...]) -> None:
    refused(changes, *expected)


def test_a_warmup_that_outlasts_training_is_refused_with_the_share_it_would_reach() -> None:
    long = {"num_steps": 5000, "warmup_steps": 8000}
    refused(long, "train.warmup_steps=8000", "5000", "62.5 %", "allow_unreached_peak")
    assert (
        fill(TrainConfig, TRAIN | long | {"allow_unreached_peak": True}, "train").num_steps == 5000
    )


def test_hardware_ranges() -> None:
    with pytest.raises(ValueError, match="hardware.micro_batch_size=0: expected at least 1"):
        fill(HardwareConfig, {"micro_batch_size": 0}, "hardware")
    with pytest.raises(ValueError, match="hardware.device='gpu': not a choice.*mean 'cuda'"):
        fill(HardwareConfig, {"device": "gpu"}, "hardware")


def test_hash_ignores_seed_place_and_machine_but_nothing_else() -> None:
    config = {
        "seed": 0,
        "paths": {"data": "a"},
        "hardware": {},
        "logger": {},
        "train": dict(TRAIN),
        "model": {},
    }
    other = config | {"seed": 1, "paths": {"data": "b"}, "hardware": {"device": "cuda"}}
    assert config_hash(config) == config_hash(other)
    assert config_hash(config) == config_hash(config | {"train": TRAIN | {"log_every": 3}})
    assert config_hash(config) != config_hash(config | {"train": TRAIN | {"lr": 2e-3}})
    assert config_hash(config) != config_hash(config | {"model": {"knob": 1}})


def test_keys_that_came_later_enter_the_hash_with_another_value_only() -> None:
    config = {"shape": {"d_model": 8}, "train": dict(TRAIN), "model": {}}
    before = config_hash(config)
    for name in ("norm_kind", "input", "head_activation"):  # whose records are older than they are
        assert f"shape.{name}" in LATER
    for key, value in LATER.items():
        section, _, name = key.partition(".")
        changed = config | {section: config[section] | {name: value}}
        assert config_hash(changed) == before, key
        changed[section][name] = "other"
        assert config_hash(changed) != before, key
