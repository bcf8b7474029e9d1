"""Can two models be told apart? Compares test accuracy example by example over common seeds.

    python scripts/compare.py luna softmax task=listops
    python scripts/compare.py luna:projection_length=128 luna:projection_length=16 task=listops

A model may name keys of the config to choose among its settings; recipe=NAME chooses the recipe.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lra.config import flatten, nearest  # noqa: E402
from lra.leaderboard import (  # noqa: E402
    LEFT_OUT,
    TASKS,
    Cell,
    drop_duplicates,
    task_title,
    variants,
    why_left_out,
)
from lra.records import Record, load_all, unpack_correct  # noqa: E402
from lra.script import run_script  # noqa: E402
from lra.statistics import Comparison, compare  # noqa: E402


def choose(records: list[Record], text: str) -> dict[int, Record]:
    """Finished runs, by seed, of the one setting that `model:key=value,...` names.

    Raises:
        ValueError: no such run, or several settings; names them.
    """
    model, _, keys = text.partition(":")
    wanted = dict(pair.partition("=")[::2] for pair in keys.split(",") if pair)
    own = [r for r in records if r.model == model and r.result]
    if not own:
        known = nearest(model, sorted({r.model for r in records if r.result}))
        raise ValueError(f"{text}: no finished run of this task; {known}")
    for key, value in wanted.items():
        own = [r for r in own if any(f".{k}".endswith(f".{key}") and _same(v, value)
                                     for k, v in flatten(r.config).items())]  # fmt: skip
    if not own:
        raise ValueError(f"{text}: none of the model's runs has {keys}")
    # Runs that count are meant, unless there are none.
    counting = [r for r in own if why_left_out(r) is None] or own
    settings: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in drop_duplicates(counting)[0]:
        fingerprint = str(record.data.get("fingerprint"))
        settings[record.recipe, record.config_hash, fingerprint].append(record)
    if len(settings) > 1:
        cells = [tuple(runs) for runs in settings.values()]
        names = [f"recipe={c[0].recipe} {v}" for c, v in zip(cells, variants(cells), strict=True)]
        raise ValueError(f"{text}: {len(cells)} settings; choose one by recipe=NAME or by "
                         f"{model}:key=value: " + "; ".join(names))  # fmt: skip
    return {r.seed: r for r in next(iter(settings.values()))}


def _same(value: object, text: str) -> bool:
    return text in (str(value), str(value).lower()) or (value is None and text == "null")


def paired(a: dict[int, Record], b: dict[int, Record]) -> tuple[Comparison, list[int]]:
    """Comparison over the common seeds.

    Raises:
        ValueError: no common seed, other data, or records without per-example results.
    """
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        raise ValueError(f"no common seed: {sorted(a)} and {sorted(b)}")
    runs = [[model[seed] for seed in seeds] for model in (a, b)]
    fingerprints = {str(r.data.get("fingerprint")) for side in runs for r in side}
    if len(fingerprints) > 1:
        raise ValueError(f"the runs used different data: fingerprints {sorted(fingerprints)}")
    sides = [np.stack([_correct(r) for r in side]) for side in runs]
    return compare(*sides), seeds


def _correct(record: Record) -> np.ndarray:
    assert record.result
    test = record.result.test
    if test.correct is None:
        raise ValueError(f"{record.run_id}: its record does not say which examples were right")
    return unpack_correct(test.correct, test.num_examples)


def report(names: tuple[str, str], sides: list[dict[int, Record]]) -> str:
    """The comparison in words."""
    result, seeds = paired(*sides)
    cells = [Cell(tuple(side[seed] for seed in seeds)) for side in sides]
    first = cells[0].runs[0]
    assert first.result
    lines = [
        f"{task_title(first.task)}, test accuracy in percent, "
        f"{first.result.test.num_examples:,} examples, seeds {', '.join(map(str, seeds))}"
    ]
    width = max(map(len, names))
    for name, cell in zip(names, cells, strict=True):
        lines.append(f"  {name.ljust(width)}  {cell}  recipe {cell.runs[0].recipe}")
    lines.append(f"difference              {100 * result.difference:+.2f} points")
    lines.append(f"95 % over test examples {_interval(result.over_examples)}")
    if result.over_seeds:
        lines.append(f"95 % over seeds         {_interval(result.over_seeds)}")
        per_seed = ", ".join(f"{100 * d:+.2f}" for d in result.per_seed)
        lines.append(f"difference by seed      {per_seed}")
    else:
        lines.append("only one common seed: nothing is known about other seeds")
    lines.append("The difference stands out from the noise." if result.clear
                 else "The difference cannot be told from noise.")  # fmt: skip
    notes = {(n, why_left_out(r)) for n, c in zip(names, cells, strict=True) for r in c.runs}
    lines += [f"note: {n}: {LEFT_OUT[why].lower()}" for n, why in sorted(notes, key=str) if why]
    return "\n".join(lines)


def _interval(ends: tuple[float, float]) -> str:
    return f"{100 * ends[0]:+.2f} to {100 * ends[1]:+.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR",
                        help="where runs/ lies (default: results)")  # fmt: skip
    parser.add_argument("words", nargs="+", metavar="WORD",
                        help="two models, task=NAME, recipe=NAME")  # fmt: skip
    arguments = parser.parse_intermixed_args()
    words = arguments.words
    names = [w for w in words if "=" not in w.partition(":")[0]]
    options = dict(w.partition("=")[::2] for w in words if w not in names)
    if len(names) != 2 or not {"task"} <= options.keys() <= {"task", "recipe"}:
        raise ValueError(f"expected two models and task=NAME, got: {' '.join(words)}")
    records, warnings = load_all(arguments.results)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    known = {*TASKS, *(r.task for r in records)}
    if options["task"] not in known:
        raise ValueError(f"task={options['task']}: {nearest(options['task'], sorted(known))}")
    fitting = [r for r in records if r.task == options["task"]
               and options.get("recipe") in (None, r.recipe)]  # fmt: skip
    print(report((names[0], names[1]), [choose(fitting, name) for name in names]))
    return 0


if __name__ == "__main__":
    run_script(main)
