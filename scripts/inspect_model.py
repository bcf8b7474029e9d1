"""What a model costs: parameters by part, operations by length and of a whole run, hours by card,
activations, shapes on the way.

python scripts/inspect_model.py model=luna task=listops
python scripts/inspect_model.py model=luna recipe=lra model.tie_kv=true --lengths=1000,4000
python scripts/inspect_model.py model=all              # a line each: parameters, operations, hours

Takes every key of the config, needs no data and writes nothing.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lra  # noqa: E402, F401  # first: it says what to do where packages are missing

# isort: split
from omegaconf import OmegaConf  # noqa: E402

from lra.build import make_model, make_task, num_params  # noqa: E402
from lra.cli import CONFIGS, all_models, compose_config, run_program, typed  # noqa: E402
from lra.config import RunConfig  # noqa: E402
from lra.console import reach_text  # noqa: E402
from lra.plan import Reference, compare, make_plan  # noqa: E402
from lra.script import Parser  # noqa: E402
from lra.tasks.task import Task  # noqa: E402

if TYPE_CHECKING:
    from models.classifier import Classifier

BASELINE = "softmax"
LENGTHS = (1024, 2048, 4096, 8192, 16384)


def lengths_from(text: str) -> list[int]:
    """Lengths in tokens from `1024,2048`.

    Raises:
        ValueError: not a list of numbers of at least 1.
    """
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise ValueError(f"--lengths={text}: expected tokens with commas between, as 1024,2048")
    return lengths


def report(overrides: list[str], lengths: list[int]) -> str:
    """Everything about the model that `overrides` choose.

    Raises:
        ValueError: an unknown key, a wrong type or a value out of range.
    """
    config = typed(compose_config(overrides))
    choices = [o for o in overrides if o.partition("=")[0] in ("task", "model", "recipe")]
    softmax = OmegaConf.to_container(OmegaConf.load(CONFIGS / "model" / "softmax.yaml"))
    plan = make_plan(config, Reference(typed(compose_config(choices)), softmax))
    task = plan.task

    import torch

    from lra.speed import cost
    from lra.speed.flops import COUNTED
    from lra.training.hardware import Hardware

    hardware = Hardware(config.hardware)
    ours = make_model(config, task)  # a newcomer's constructor may compute with its tensors
    with torch.device("meta"):
        baseline = make_model(config, task, softmax)
    why_not, baseline_params = compare(plan, num_params(ours))
    make = partial(model_for, config, task)

    name, params = plan.model, num_params(ours)
    percent = f"{100 * params / baseline_params - 100:+.1f} %"
    rule = "within the 10 % rule" if 10 * params <= 11 * baseline_params else "over the 10 % rule"
    shapes = [
        (stage, ", ".join(map(str, outputs)))
        for stage, outputs in cost.stage_shapes(make(LENGTHS[0]), LENGTHS[0])
    ]
    width = max(len(stage) for stage, _ in shapes)
    found = cost.costs(make, [*lengths, task.max_length], hardware)
    examples = "one sequence" if task.num_sequences == 1 else f"{task.num_sequences} sequences"
    lines = [
        f"{name} on {task.name}, recipe {config.recipe}",
        "",
        *cost.parameter_table(
            name, cost.parameters_by_part(ours), cost.parameters_by_part(baseline)
        ),
        f"{percent} against softmax: {rule}",
        f"not apples to apples: {'; '.join(why_not)}" if why_not else "apples to apples",
        f"reach in positions: {reach_text(ours.encoder.reach or []) or 'all, or not known'}",
        "",
        f"cost of {examples} ({hardware.device.type}, {config.hardware.precision})",
        f"FLOPs: {COUNTED}, in a forward pass; training takes about three times as many",
        "activations: what training keeps for the backward pass, parameters left out",
        *cost.cost_table(found, lengths, task.num_sequences),
        *cost.run_cost(found, config.train, task.max_length, task.num_sequences),
        *cost.run_hours(found, config.train, task.max_length, task.official_sizes.get("val")),
        "",
        f"shapes of {examples}, {LENGTHS[0]:,} tokens each",
        *(f"{stage.ljust(width)}  {text}" for stage, text in shapes),
    ]
    return "\n".join(lines)


def overview(words: list[str], lengths: list[int]) -> str:
    """A line for each model: parameters against softmax in every recipe, operations, hours.

    Raises:
        ValueError: as `report`.
    """
    import torch

    from lra.speed import cost
    from lra.training.hardware import Hardware

    words = [word for word in words if word != "model=all"]
    recipes = sorted(path.stem for path in (CONFIGS / "recipe").glob("*.yaml"))
    anywhere = [word for word in words if not word.startswith("recipe=")]

    refused = []

    def count(model: str, recipe: str) -> int | None:
        config = typed(compose_config([*anywhere, f"model={model}", f"recipe={recipe}"]))
        task = make_task(config)
        try:
            with torch.device("meta"):
                return num_params(make_model(config, task))
        except ValueError as error:
            refused.append(f"model={model} recipe={recipe}: {error}")
            return None

    baseline = {recipe: count(BASELINE, recipe) for recipe in recipes}
    parameters = [
        ("parameters", *recipes),
        (BASELINE, *(f"{n:,}" if n else "-" for n in baseline.values())),
    ]
    operations = [("FLOPs a token", *(f"{length:,}" for length in lengths))]
    hours: list[tuple[str, ...]] = [("hours", *cost.CARDS)]
    task = make_task(typed(compose_config(words)))
    num_val = task.official_sizes.get("val")
    for model in all_models():
        if model != BASELINE:
            counts = {recipe: count(model, recipe) for recipe in recipes}
            parameters.append((model, *(over(counts[r], baseline[r]) for r in recipes)))
        config = typed(compose_config([*words, f"model={model}"]))
        if any(text.startswith(f"model={model} recipe={config.recipe}:") for text in refused):
            continue
        wanted = [*lengths, task.max_length]
        found = cost.costs(partial(model_for, config, task), wanted, Hardware(config.hardware))
        flops = {n: c.flops / (n * task.num_sequences) for n, c in found.by_length.items()}
        operations.append((model, *(f"{flops[n]:,.0f}" if n in flops else "-" for n in lengths)))
        longest = found.by_length.get(task.max_length)
        by_card = cost.hours_by_card(longest, config.train, num_val)
        hours.append((model, *(by_card.get(card, "-") for card in cost.CARDS)))
    return "\n".join([
        f"parameters on {task.name}, of all but softmax over it, by recipe; * more than 10 %",
        *cost.columns(parameters),
        "",
        f"operations of a forward pass by length, {task.name}, recipe {config.recipe}",
        *cost.columns(operations),
        "",
        f"hours of a run ({cost.whole_run(num_val)}) if all inputs have {task.max_length:,} "
        f"tokens, {cost.ESTIMATE}; -: not counted at this length",
        *cost.columns(hours),
        *["", "refused, so left out"][: 2 * bool(refused)],
        *refused,
    ])  # fmt: skip


def over(params: int | None, baseline: int | None) -> str:
    """How far above softmax, with a mark for what breaks the 10 % rule; - where one is refused."""
    if not params or not baseline:
        return "- "
    return f"{100 * params / baseline - 100:+.1f} %{'*' if 10 * params > 11 * baseline else ' '}"


def model_for(config: RunConfig, task: Task, max_length: int) -> Classifier:
    """The model with another longest input than the task's."""
    other = copy.copy(task)
    other.max_length = max_length
    return make_model(config, other)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="as for run.py, or model=all"
    )
    parser.add_argument(
        "--lengths", default=",".join(map(str, LENGTHS)), help="in tokens (default: %(default)s)"
    )
    arguments = parser.parse_intermixed_args()
    show = overview if "model=all" in arguments.settings else report
    run_program(lambda: print(show(arguments.settings, lengths_from(arguments.lengths))))


if __name__ == "__main__":
    main()
