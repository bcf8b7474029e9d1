"""Typed configuration: what is refused, and what the message says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

import pytest

from lra.cli import CONFIGS, GROUPS, compose_config
from lra.config import (
    LATER,
    SYNONYMS,
    HardwareConfig,
    TrainConfig,
    config_hash,
    convert,
    fill,
    flatten,
    nearest_key,
)

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
    with pytest.raises(ValueError, match="hardware.device='gpu': not a choice.*cuda"):
        fill(HardwareConfig, {"device": "gpu"}, "hardware")


@dataclass
class Sample:
    size: int
    mode: Literal["a", "b"] = "a"
    inner: HardwareConfig | None = None


def test_nested_classes_and_context() -> None:
    sample = fill(Sample, {"inner": {"num_workers": 3}}, size=2)
    assert sample.inner is not None and sample.inner.num_workers == 3 and sample.size == 2
    with pytest.raises(ValueError, match="size=4: unknown key"):
        fill(Sample, {"size": 4}, size=2)
    with pytest.raises(ValueError, match="size is missing"):
        fill(Sample, {})


def test_values_of_mappings_are_checked_too() -> None:
    assert convert({"a": 1, "b": None}, dict[str, int | float | None], "x") == {"a": 1, "b": None}
    assert type(convert({"a": 1}, dict[str, int | float], "x")["a"]) is int
    with pytest.raises(ValueError, match=r"x\.b='2': expected a number$"):
        convert({"a": 1, "b": "2"}, dict[str, float], "x")
    with pytest.raises(ValueError, match=r"x\.a\[1\]='2': expected an integer$"):
        convert({"a": [1, "2"]}, dict[str, list[int]] | None, "x")


def test_what_is_wrong_within_an_optional_part_is_named_by_itself() -> None:
    with pytest.raises(ValueError, match=r"^inner\.num_worker=1: unknown key; did you mean"):
        fill(Sample, {"inner": {"num_worker": 1}}, size=2)
    with pytest.raises(ValueError, match="^inner=3: expected HardwareConfig or null"):
        fill(Sample, {"inner": 3}, size=2)


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


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": [3]}) == {"a.b": 1, "a.c.d": 2, "e": [3]}


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("lr", "train.lr"),  # the last part of a key
        ("model.num_heads", "shape.num_heads"),  # it before letters in common, num_packed_heads
        ("shape.layers", "shape.num_layers"),
        ("train.step", "train.num_steps"),
        ("learning_rate", "train.lr"),  # initials
        ("dropout_rate", "shape.dropout"),
        ("trian.batch_sise", "train.batch_size"),
        ("batch", "train.batch_size"),  # fewer words more than micro_batch_size
        ("epochs", "train.num_steps"),
        ("colour", None),
    ],
)
def test_the_nearest_key_of_all_sections(typed: str, meant: str | None) -> None:
    known = ["train.num_steps", "train.batch_size", "train.lr", "model.num_packed_heads",
             "shape.num_heads", "shape.tie_layers", "shape.num_layers", "shape.attention_dropout",
             "shape.dropout", "hardware.micro_batch_size", "seed"]  # fmt: skip
    assert nearest_key(typed, known) == meant
    assert nearest_key("trian.lrr", known, 2) is None  # letters alone are not enough there


def test_other_names_stand_for_keys_and_choices_that_there_are() -> None:
    choices = {path.stem for path in CONFIGS.glob("*/*.yaml")}
    keys = {key.rpartition(".")[2] for key in flatten(compose_config([]))}
    precisions = set(get_args(get_type_hints(HardwareConfig)["precision"]))
    assert {*SYNONYMS.values()} <= choices | keys | precisions | set(GROUPS)
