"""scripts/keys.py: every key of every choice has its meaning there, and is found by its names."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest

from lra.cli import CONFIGS, GROUPS, compose_config, unknown_key
from lra.values import flatten
from scripts.keys import all_keys, class_comments, select, show

CHOICES = [
    f"{group}={path.stem}" for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))
]


@pytest.fixture(autouse=True, scope="module")
def read_once() -> Iterator[None]:
    """The comments of a class, which are the same for every choice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scripts.keys.class_comments", functools.cache(class_comments))
        yield


@pytest.mark.parametrize("choice", CHOICES)
def test_every_key_has_a_meaning_and_the_default_of_the_choice(choice: str) -> None:
    found = {key.name: key for key in all_keys([choice])}
    composed = flatten(compose_config([choice]))
    composed = {k: v for k, v in composed.items() if not k.endswith("_target_") and k != "recipe"}
    assert found.keys() == {*composed, *GROUPS}
    for name, key in found.items():
        assert len(key.meaning) > 5 and key.kind, name
        assert name in GROUPS or key.default == composed[name], name
    group, _, chosen = choice.partition("=")
    assert found[group].default == chosen and f"{chosen}: " in found[group].meaning


def test_words_choose_keys() -> None:
    keys = all_keys([])
    groups = ["state", "input", "output", "step", "norm"]
    rates = ["train.lr", *(f"train.groups.{group}.lr" for group in groups)]
    assert [k.name for k in select(keys, ["lr"])] == rates
    assert [k.name for k in select(keys, ["train.lr", "seed"])] == ["train.lr", "seed"]
    assert {k.name.partition(".")[0] for k in select(keys, ["shape"])} == {"shape"}
    assert select(keys, []) == keys
    with pytest.raises(ValueError, match="shape.layers: .*did you mean 'shape.num_layers'"):
        select(keys, ["shape.layers"])


def test_what_is_shown() -> None:
    (key,) = select(all_keys(["recipe=lra"]), ["train.schedule"])
    first, *rest = show([key]).splitlines()
    assert first == "train.schedule=rsqrt" and "lra/training/optim.py" in rest[0]
    assert "(constant | one_cycle | inverse_sqrt | rsqrt | cosine |" in " ".join(rest)


def test_a_comment_serves_the_keys_that_go_on_with_its_stem() -> None:
    keys = {key.name: key.meaning for key in all_keys(["task=text"])}
    stems = [keys[f"task.limit_{split}"] for split in ("train", "val", "test")]
    assert stems == ["use a class-balanced part of a split only"] * 3
    others = [m for a, b in itertools.combinations(keys, 2) if (m := keys[a]) == keys[b]]
    groups = {keys["train.groups.norm.lr"], keys["train.groups.norm.weight_decay"]}
    assert {keys["task.num_train"], *stems, keys["hardware.device"]} | groups >= set(others)


def test_a_key_of_another_choice_says_which_has_it() -> None:
    with pytest.raises(ValueError, match="pretrain.mask_rate: .*; pretrain=masked or next has it"):
        select(all_keys([]), ["pretrain.mask_rate"])
    found = unknown_key("task.difficulty", "task.difficulty=easy", [])
    assert (
        found == "task.difficulty=easy: not a key of this choice; task=pathfinder or pathx has it"
    )
    assert "has it" not in unknown_key("task.train", "task.train=5", [])
    found = unknown_key("pretrain.num_steps", "pretrain.num_steps=5", [])
    assert found == (
        "pretrain.num_steps=5: not a key of this choice; pretrain=masked or next has it"
    )
