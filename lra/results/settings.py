"""How settings of one model are told apart in tables: by what records say was set or differs."""

from __future__ import annotations

import functools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from lra import CONFIGS
from lra.config import LATER, NO_IDENTITY, NO_NUMBERS
from lra.results.records import Record
from lra.values import flatten


def all_settings(record: Record) -> dict[str, Any]:
    """The config of a record by dotted key; keys younger than it have what it was made with."""
    return flatten(LATER) | {"pretrain.objective": "none"} | flatten(record.config)


def variants(cells: Sequence[tuple[Record, ...]]) -> list[str]:
    """Name each cell of one model, recipe and pretraining by the keys in which it stands out.

    Those are keys set on the command line, keys that differ between settings of one task, and keys
    of the model that differ at all; what a recipe itself varies by task, sizes, budgets and knobs
    of the model, is not.
    Cells that may share a row get the same name; two cells of one task never do.
    """
    later = flatten(LATER)  # absent from older records, which are of the same setting
    given = [
        {k: v for k, v in set.intersection(*(set(overrides(r).items()) for r in c))
         if k.partition(".")[0] != "pretrain"}  # the same for all, and told elsewhere
        for c in cells
    ]  # fmt: skip
    flats = []
    for runs, chosen in zip(cells, given, strict=True):
        flat = flatten({k: v for k, v in runs[0].config.items() if k not in NO_IDENTITY})
        flat["data"] = str(runs[0].data.get("fingerprint", ""))[:8]
        flat |= {k: v for k, v in chosen.items() if k == "experiment"}
        flats.append({k: json.dumps(v, sort_keys=True) for k, v in flat.items()
                      if k not in later or v != later[k]})  # fmt: skip
    by_task: dict[str, list[int]] = defaultdict(list)
    for i, runs in enumerate(cells):
        by_task[runs[0].task].append(i)

    def differing(indices: Iterable[int]) -> set[str]:
        keys = {k for i in indices for k in flats[i]}
        return {k for k in keys if len({flats[i].get(k) for i in indices}) > 1}

    keys = {k for chosen in given for k in chosen}
    knobs = {k for k in differing(range(len(cells))) if k.startswith("model.")}
    knobs -= _by_task(CONFIGS / "task_knobs" / cells[0][0].recipe / cells[0][0].model)
    keys |= knobs
    for indices in by_task.values():
        keys |= differing(indices) - {"data"}
    if max(Counter((c[0].task, c[0].config_hash) for c in cells).values()) > 1:
        keys.add("data")
    usual = {  # what the recipe gives for a task: the value where the command line did not set it
        (task, k): {flats[i].get(k) for i in indices if k not in given[i]}
        for task, indices in by_task.items()
        for k in keys
    }
    rows: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, runs in enumerate(cells):
        own = [
            (k, flats[i].get(k))
            for k in sorted(keys)
            if k in knobs or usual[runs[0].task, k] != {flats[i].get(k)}
        ]
        rows[tuple(own)].append(i)
    names = [""] * len(cells)
    for indices in rows.values():
        shared = [(k, flats[indices[0]].get(k)) for k in sorted(keys - differing(indices))]
        texts = [_short(k, keys) + "=" + v.strip('"') for k, v in shared if v is not None]
        for i in indices:
            names[i] = ", ".join(texts) or ("as the recipe" if keys else "")
    return names


@functools.cache
def _by_task(folder: Path) -> frozenset[str]:
    """Keys that a recipe gives a value of its own for some task, from a folder of configs."""
    files = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in folder.glob("*.yaml"))
    return frozenset(k for values in files for k in flatten(values or {}))


def overrides(record: Record) -> dict[str, str]:
    """What the command line set: config keys, first weights, pretraining and experiment, no other
    choices."""
    given, flat = {}, flatten(record.config)
    for text in record.overrides:
        name, _, value = text.partition("=")
        name = name.lstrip("+~")
        if name in ("experiment", "pretrain", "init_from") and value not in ("", "null", "none"):
            given[name] = value
        elif "." in name and name.split(".")[0] not in NO_IDENTITY:
            given |= {k: "" for k in flat if k == name or k.startswith(f"{name}.")}
    return {k: v for k, v in given.items() if k.removeprefix("train.") not in NO_NUMBERS}


def setting_text(record: Record, *, short: bool = False) -> str:
    """What the command line changed in the recipe and the model, as a table names a variant.

    Empty for a run as published. Where data lie is no part of it; `short` leaves out where the run
    of `init_from` lies, too.
    """
    flat, given = flatten(record.config), overrides(record)
    # Another yaml of the same class, which has other values.
    word = next((w for w in record.overrides if w.startswith("model=")), "")
    if word.partition("=")[2] not in ("", record.model):
        given = {"model": word.partition("=")[2]} | given
    shown = {k: v or flat[k] for k, v in given.items()
             if k not in ("task.source", "task.path", "task.strict")}  # fmt: skip
    if short and "init_from" in shown:  # a run's folder, or a file in its checkpoints/
        shown["init_from"] = Path(shown["init_from"].partition("/checkpoints/")[0]).name
    return ", ".join(f"{_short(k, shown)}={_word(v)}" for k, v in shown.items())


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _short(key: str, keys: Iterable[str]) -> str:
    if key.startswith("pretrain."):  # whose keys are called as those of the other phase
        return key
    last = key.split(".", 1)[-1]
    return last if sum(k.split(".", 1)[-1] == last for k in keys) == 1 else key
