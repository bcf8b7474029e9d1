"""Can two models be told apart? Compares test accuracy example by example over common seeds.

    python scripts/compare.py luna softmax task=listops
    python scripts/compare.py luna:projection_length=128 luna:projection_length=16 task=listops
    python scripts/compare.py luna --control task=listops

A model may name keys of the config to choose among its settings; recipe=NAME chooses the recipe.
Of several settings the recipe's own is taken, as the configs give it today. Runs of full budget on
the benchmark's data are meant unless the two models only share another kind, such as reduced ones.
Runs with self-pretraining are those of MODEL:pretrain=masked (or next). --control takes one model
and sets each of its settings with self-pretraining against its compute-tied control: the same from
scratch, on as many training examples as both phases have.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lra  # noqa: E402, F401  # first: it says what to do where packages are missing

# isort: split
import numpy as np  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

from lra.build import model_name, resolved  # noqa: E402
from lra.cli import CONFIGS, compose_config, typed  # noqa: E402
from lra.config import config_hash  # noqa: E402
from lra.results.control import control_command, phase_text  # noqa: E402
from lra.results.leaderboard import (  # noqa: E402
    LEFT_OUT,
    MARKS,
    Cell,
    beside_controls,
    drop_duplicates,
    make_rows,
    why_left_out,
)
from lra.results.published import TASKS, task_title  # noqa: E402
from lra.results.records import Record, load_all, unpack_correct  # noqa: E402
from lra.results.settings import all_settings, variants  # noqa: E402
from lra.results.statistics import Comparison, compare  # noqa: E402
from lra.script import Parser, run_script  # noqa: E402
from lra.values import nearest, nearest_key  # noqa: E402

Runs = tuple[Record, ...]
PRETRAIN = "pretrain.objective"  # `pretrain` for short, as on run.py's command line
SECTIONS = ("model.", "shape.", "train.", "task.", "pretrain.")
# Kinds of finished runs, the best first: None is what the leaderboard's main table takes.
KINDS = (None, "reduced", "partial", "synthetic")
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))


@dataclass(frozen=True)
class Side:
    """One model of the comparison: the runs taken, by seed, and what else there was."""

    runs: dict[int, Record]
    why: str  # these runs
    left_out: Counter[str]  # reasons


def fitting(records: list[Record], text: str, *, scratch: bool = True) -> list[Record]:
    """Runs that `model:key=value,...` names, unfinished ones too.

    Args:
        scratch: leave out runs with self-pretraining unless a key is of it.

    Raises:
        ValueError: no finished run among them.
    """
    model, _, keys = text.partition(":")
    wanted = dict(pair.partition("=")[::2] for pair in keys.split(",") if pair)
    wanted = {PRETRAIN if k == "pretrain" else k: v for k, v in wanted.items()}
    if scratch and not any(k.startswith("pretrain.") for k in wanted):
        wanted = {PRETRAIN: "none"} | wanted
    own = [r for r in records if r.model == model]
    if not any(r.result for r in own):
        known = nearest(model, sorted({r.model for r in records if r.result}))
        raise ValueError(f"{text}: no finished run of this task and recipe; {known}")
    for key, value in wanted.items():
        flats = [all_settings(record) for record in own]
        known = {k for flat in flats for k in flat}
        full = _full_key(key, known)
        if len(full) > 1:
            raise ValueError(f"{text}: {key} may be {' or '.join(full)}; name one")
        if not full:
            near = nearest_key(key, {k for k in known if k.startswith(SECTIONS)})
            raise ValueError(
                f"{text}: unknown key {key}" + (f"; did you mean '{near}'?" * bool(near))
            )
        values = {str(flat[full[0]]) for flat in flats if full[0] in flat}
        own = [r for r, flat in zip(own, flats, strict=True)
               if full[0] in flat and _same(flat[full[0]], value)]  # fmt: skip
        if not any(r.result for r in own):
            raise ValueError(
                f"{text}: none of the model's finished runs has {key}={value}; "
                f"known: {', '.join(sorted(values))}"
            )
    return own


def _full_key(key: str, known: set[str]) -> list[str]:
    """The keys that a short one stands for, in full: those of the fewest sections.

    Those of self-pretraining have to be named as such.
    """
    found = [k for k in known if f".{k}".endswith(f".{key}")]
    found = [k for k in found if not k.startswith("pretrain.")] or found
    fewest = min((k.count(".") for k in found), default=0)
    return sorted(k for k in found if k.count(".") == fewest)


def _same(value: object, text: str) -> bool:
    return text in (str(value), str(value).lower()) or (value is None and text == "null")


def choose(own: list[Record], text: str, kind: str | None) -> Side:
    """The runs of one kind and of one setting: the recipe's own if there are several.

    Raises:
        ValueError: several settings, none of them or several the recipe's own; names them.
    """
    left_out = Counter(
        _kind_text(why_left_out(r)) for r in own if not r.result or why_left_out(r) != kind
    )
    of_kind = [r for r in own if r.result and why_left_out(r) == kind]
    kept, duplicates = drop_duplicates(of_kind)
    left_out.update({LEFT_OUT["duplicate"].lower(): len(duplicates)} if duplicates else {})
    settings: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in kept:
        fingerprint = str(record.data.get("fingerprint"))
        settings[record.recipe, record.config_hash, fingerprint].append(record)
    cells: list[Runs] = [tuple(runs) for runs in settings.values()]
    names = [f"recipe={c[0].recipe} {v}".strip()
             for c, v in zip(cells, variants(cells), strict=True)]  # fmt: skip
    taken, why = 0, "the only setting"
    if len(cells) > 1:
        own_settings = [i for i, cell in enumerate(cells) if _is_recipes_own(cell[0])]
        if len(own_settings) != 1:
            model = text.partition(":")[0]
            raise ValueError(
                f"{text}: {len(cells)} settings of {_kind_text(kind)}; choose one by recipe=NAME "
                f"or by {model}:key=value: " + "; ".join(names)
            )
        taken, why = own_settings[0], f"the recipe's own setting ({names[own_settings[0]]})"
    for i, (cell, name) in enumerate(zip(cells, names, strict=True)):
        if i != taken:
            left_out[f"another setting ({name})"] += len(cell)
    return Side({r.seed: r for r in cells[taken]}, f"{_kind_text(kind)}, {why}", left_out)


def _is_recipes_own(record: Record) -> bool:
    """Whether the configs of today give this setting with no key set."""
    try:
        words = [f"task={record.task}", f"model={record.model}", f"recipe={record.recipe}"]
        return config_hash(resolved(typed(compose_config(words)))) == record.config_hash
    except (HydraException, OmegaConfBaseException, ValueError):  # of a name that is not here
        return False


def _kind_text(kind: str | None) -> str:
    return LEFT_OUT[kind].lower() if kind else "full budget"


def common_kinds(sides: list[list[Record]]) -> list[str | None]:
    """The kind to take from each side: the best that both have, else each side's best."""
    have = [{why_left_out(r) for r in own if r.result} for own in sides]
    shared = [kind for kind in KINDS if all(kind in kinds for kinds in have)]
    return [next(k for k in shared or KINDS if k in kinds) for kinds in have]


def paired(a: dict[int, Record], b: dict[int, Record]) -> tuple[Comparison, list[int]]:
    """Comparison over the common seeds.

    Raises:
        ValueError: no common seed, the same runs, other data, or records without per-example
            results.
    """
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        raise ValueError(f"no common seed: {sorted(a)} and {sorted(b)}")
    runs = [[model[seed] for seed in seeds] for model in (a, b)]
    if runs[0] == runs[1]:
        raise ValueError("both sides are the same runs; MODEL:key=value tells settings apart")
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


def report(names: list[str], sides: list[Side]) -> str:
    """The comparison in words."""
    result, seeds = paired(*(side.runs for side in sides))
    cells = [Cell(tuple(side.runs[seed] for seed in seeds)) for side in sides]
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
    if len(seeds) == 1:
        lines.append("only one common seed: nothing is known about other seeds")
    elif len(seeds) == 2:
        lines.append("only two common seeds: they tell next to nothing about others; three do more")
    lines.append("The difference stands out from the noise." if result.clear
                 else "The difference cannot be told from noise.")  # fmt: skip
    for name, side, cell in zip(names, sides, cells, strict=True):
        lines.append(f"taken     {name}: {', '.join(r.name for r in cell.runs)}; {side.why}")
        reasons = [f"{reason}: {count}" for reason, count in sorted(side.left_out.items())]
        if alone := sorted(side.runs.keys() - set(seeds)):
            reasons.append(f"no such seed of the other model: {', '.join(map(str, alone))}")
        if reasons:
            lines.append(f"left out  {name}: {'; '.join(reasons)}")
    notes = {(n, why_left_out(r)) for n, c in zip(names, cells, strict=True) for r in c.runs}
    lines += [f"note: {n}: {LEFT_OUT[why].lower()}" for n, why in sorted(notes, key=str) if why]
    return "\n".join(lines)


def against_controls(records: list[Record], text: str) -> str:
    """Each setting with self-pretraining that `text` names against its control, in words.

    Raises:
        ValueError: there is none.
    """
    named = fitting(records, text, scratch=False)
    model = text.partition(":")[0]
    kept, _ = drop_duplicates(r for r in records if r.model == model and r.result)
    rows = make_rows(kept)
    pairs = [p for p in beside_controls((row for row in rows if row.pretrained), rows)
             if p.cell.runs[0] in named]  # fmt: skip
    if not pairs:
        raise ValueError(f"{text}: no finished run with self-pretraining of this task and recipe")
    told = []
    for pair in pairs:
        name = f"{model} {pair.row.variant}".strip()
        cells = [cell for cell in (pair.cell, pair.control_cell) if cell]
        sides = [Side({r.seed: r for r in cell.runs}, _kind_text(why_left_out(cell.runs[0])),
                      Counter()) for cell in cells]  # fmt: skip
        told.append(f"self-pretraining: {phase_text(pair.cell.runs)}")
        if pair.control:
            try:
                told.append(report([name, f"{model} from scratch, the control"], sides))
            except ValueError as error:
                told.append(f"{name} cannot be compared with its control: {error}")
        else:
            command = control_command(pair.cell.runs)
            told.append(f"no control of {name} is on record: {command}")
    return "\n".join(told)


def _interval(ends: tuple[float, float]) -> str:
    return f"{100 * ends[0]:+.2f} to {100 * ends[1]:+.2f}"


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR",
                        help="where runs/ lies (default: results)")  # fmt: skip
    parser.add_argument("--control", action="store_true",
                        help="runs with self-pretraining against their controls")  # fmt: skip
    parser.add_argument("words", nargs="+", metavar="WORD",
                        help="two models, task=NAME, recipe=NAME")  # fmt: skip
    arguments = parser.parse_intermixed_args()
    words, num_models = arguments.words, 1 if arguments.control else 2
    records, warnings = load_all(arguments.results)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    names = [w for w in words if "=" not in w.partition(":")[0]]
    options = dict(w.partition("=")[::2] for w in words if w not in names)
    # Each word first, so that a slip in one is told before what is missing.
    models = sorted({*MODELS, *(r.model for r in records)})
    for i, name in enumerate(names):
        model, colon, keys = name.partition(":")
        if model not in models:
            raise ValueError(f"{name}: not a model; {nearest(model, models)}")
        if model in MODELS:  # another name of one, perhaps
            names[i] = f"{model_name(compose_config([f'model={model}']).model)}{colon}{keys}"
    known = {
        "task": {*(p.stem for p in (CONFIGS / "task").glob("*.yaml")), *TASKS,
                 *(r.task for r in records)},
        "recipe": {*(p.stem for p in (CONFIGS / "recipe").glob("*.yaml")),
                   *(r.recipe for r in records)},
    }  # fmt: skip
    for key, value in options.items():
        if key in known and value not in known[key]:
            raise ValueError(f"{key}={value}: {nearest(value, sorted(known[key]))}")
    if len(names) != num_models or not {"task"} <= options.keys() <= known.keys():
        models_wanted = "one model" if arguments.control else "two models"
        raise ValueError(f"expected {models_wanted} and task=NAME, got: {' '.join(words)}")
    if not records:
        raise ValueError(f"{(arguments.results / 'runs').absolute()}: no records; "
                         "--results DIR looks in another folder")  # fmt: skip
    of_task = [r for r in records if r.task == options["task"]
               and options.get("recipe") in (None, r.recipe)]  # fmt: skip
    if arguments.control:
        print(against_controls(of_task, names[0]))
        return 0
    own = [fitting(of_task, name) for name in names]
    kinds = common_kinds(own)
    sides = [choose(*args) for args in zip(own, names, kinds, strict=True)]
    print(report(names, sides))
    for name, side in zip(names, sides, strict=True):
        if any(run.pretraining for run in side.runs.values()):
            print(f"note: {name}: {MARKS['s']}")
    if kinds[0] != kinds[1]:
        print("note: the two models have no kind of run in common, so this is no fair match")
    elif kinds[0] is not None:
        print("note: it is the best kind of run that both models have")
    return 0


if __name__ == "__main__":
    run_script(main)
