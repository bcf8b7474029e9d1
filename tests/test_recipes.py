"""Recipes: each has the sizes of its source, and trains every model.

That they compose for every model and task is in tests/test_cli.py.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from lra.build import make_task
from lra.cli import CONFIGS, compose_config, typed
from lra.job import run_job
from lra.plan import Reference
from lra.results.papers import TASKS
from lra.values import check, fill, load_target
from models.classifier import Classifier
from models.encoder import make_encoder
from models.shape import Shape
from tests.models.test_models import MODELS

RECIPES = sorted(path.stem for path in (CONFIGS / "recipe").glob("*.yaml"))
NEWER = ("s4", "s5", "mega")
PIXELS = ("image", "pathfinder", "pathx")
SOFTMAX = {"_target_": "models.softmax.SoftmaxAttention", "causal": False}


@pytest.mark.parametrize("folder", ["knobs", "task_knobs"])
def test_what_a_recipe_says_of_a_model_is_for_a_recipe_and_model_that_there_are(
    folder: str,
) -> None:
    for path in (CONFIGS / folder).rglob("*.yaml"):
        recipe, model, *task = path.relative_to(CONFIGS / folder).with_suffix("").parts
        assert recipe in RECIPES and model in MODELS and set(task) <= set(TASKS), path
        assert len(task) == (folder == "task_knobs"), path


# Parameters that the authors' code has in these settings, counted from it.
COUNTS = [
    # recipe, model, task, ids, longest row, further words, parameters
    ("s4", "s4d", "listops", 18, 2048, [], 815_162),
    ("s4", "s4d", "text", 135, 4096, [], 843_570),
    ("s4", "s4d", "retrieval", 98, 4000, [], 1_096_498),
    ("s4", "s4d", "image", 257, 1024, [], 3_564_298),
    ("s4", "s4d", "pathfinder", 257, 1024, [], 1_190_402),
    ("s4", "s4d", "pathx", 257, 16_384, [], 1_190_402),
    # A map of one-hot rows has a bias, which is one row more of a table.
    ("s5", "s5", "listops", 21, 2048, [], 188_490),
    ("s5", "s5", "text", 136, 4096, [], 1_321_154),
    ("s5", "s5", "retrieval", 99, 4000, [], 772_098),
    ("s5", "s5", "image", 257, 1024, [], 5_133_706),
    ("s5", "s5", "pathfinder", 257, 1024, [], 1_113_602),
    ("s5", "s5", "pathx", 257, 16_384, [], 694_018),
    ("mega", "mega", "listops", 20, 2002, [], 602_258),
    ("mega", "mega", "listops", 20, 2002, ["model.chunk_size=128"], 579_770),
    ("mega", "mega", "text", 261, 4002, [], 990_612),
    ("mega", "mega", "text", 261, 4002, ["model.chunk_size=128"], 959_620),
    ("mega", "mega", "retrieval", 261, 4002, [], 1_485_214),
    ("mega", "mega", "retrieval", 261, 4002, ["model.chunk_size=128"], 1_438_726),
    ("mega", "mega", "image", 257, 1024, [], 2_839_096),
    ("mega", "mega", "image", 257, 1024, ["model.chunk_size=128"], 2_824_760),
    ("mega", "mega", "pathfinder", 257, 1024, [], 1_386_874),
    ("mega", "mega", "pathfinder", 257, 1024, ["model.chunk_size=128"], 1_376_122),
    ("mega", "mega", "pathx", 257, 16_384, [], 381_948),
    ("mega", "mega", "pathx", 257, 16_384, ["model.chunk_size=4096"], 283_644),
    # minimal-LRU's default sizes, and those of the LRU paper for Image.
    ("s4", "lru", "listops", 21, 2048,
     ["shape.num_layers=4", "shape.d_model=256", "model.state_size=128"], 1_063_178),
    ("s4", "lru", "image", 257, 1024,
     ["shape.num_layers=6", "shape.d_model=512", "model.state_size=384"], 7_892_746),
]  # fmt: skip


@pytest.mark.parametrize(
    "recipe, model, task, ids, length, words, expected",
    COUNTS,
    ids=[f"{model}-{task}-{'-'.join(words) or 'published'}" for _, model, task, _, _, words, _
         in COUNTS],
)  # fmt: skip
def test_sizes_are_those_of_the_source(
    recipe: str, model: str, task: str, ids: int, length: int, words: list[str], expected: int
) -> None:
    config = typed(compose_config([f"recipe={recipe}", f"model={model}", f"task={task}", *words]))
    made = make_task(config)
    shape = fill(Shape, config.shape, "shape", vocab_size=ids, max_length=length)
    knobs = {key: value for key, value in config.model.items() if key != "_target_"}
    target = load_target(config.model["_target_"], "model")
    with torch.device("meta"):
        encoder = make_encoder(target, shape, **check(target, knobs, "model", ["shape"]))
        found = Classifier(encoder, shape, made.num_classes, made.num_sequences)
    assert sum(parameter.numel() for parameter in found.parameters()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("recipe, model", list(product(NEWER, MODELS)))
def test_a_few_steps_of_every_task(recipe: str, model: str, tmp_path: Path) -> None:
    """Real steps, validation, test and a record, with one layer of the recipe's own sizes."""
    for task in set(TASKS) - {"pathx"}:
        words = [
            f"recipe={recipe}", f"model={model}", f"task={task}", "task.source=synthetic",
            "task.num_train=8", "task.num_val=4", "task.num_test=4", "shape.num_layers=1",
            "train.num_steps=3", "train.batch_size=4", "train.warmup_steps=1", "train.eval_every=3",
            *(f"paths.{name}={tmp_path / name}" for name in ("cache", "outputs", "results")),
        ]  # fmt: skip
        if task in ("listops", "text", "retrieval"):
            words.append("task.max_length=96")
        record = run_job(typed(compose_config(words)), words, Reference(None, SOFTMAX))
        assert record.status in ("completed", "at_chance") and len(record.curve) == 1
        assert record.protocol.options.get("input") == ("real" if task in PIXELS else None)
        names = {group["name"] for group in record.groups}
        has_slow_state = recipe != "mega" and model in ("s4d", "lru", "s5")
        assert ("state" in names) == has_slow_state
