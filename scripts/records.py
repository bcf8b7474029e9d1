"""Look at, check and collect run records.

python scripts/records.py list [task=listops] [model=luna] [status=completed]
python scripts/records.py show RUN
python scripts/records.py command RUN
python scripts/records.py diff RUN RUN
python scripts/records.py validate [FILE ...]
python scripts/records.py merge DIR

RUN is a run id, its beginning, or a file; RUN_ID.2 is the second record of a run that was trained
twice. `command` prints what to type for the same run once more, after a check that the configs of
today give its setting. `merge` adds the records of another results folder, under the next free
number if another training of the same run is here; it refuses everything if one of them is damaged
or differs from the record of that very training that is here. With `--results DIR` in front:
another folder than results/.
"""

from __future__ import annotations

import json
import shlex
import sys
import typing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lra import CONFIGS  # noqa: E402
from lra.config import NO_IDENTITY, config_hash  # noqa: E402
from lra.console import aligned, percent  # noqa: E402
from lra.files import write_atomically  # noqa: E402
from lra.results.leaderboard import finished  # noqa: E402
from lra.results.published import task_title  # noqa: E402
from lra.results.records import (  # noqa: E402
    Record,
    Status,
    free_path,
    load,
    load_all,
    number_of,
    problems,
    record_path,
    siblings,
    started,
)
from lra.results.settings import all_settings, setting_text  # noqa: E402
from lra.results.statistics import wilson  # noqa: E402
from lra.script import Parser, run_script  # noqa: E402
from lra.values import flatten, nearest  # noqa: E402

COMMANDS = ("list", "show", "command", "diff", "validate", "merge")


def list_records(results: Path, filters: list[str]) -> str:
    """One line a record, oldest first."""
    wanted = dict(text.partition("=")[::2] for text in filters)
    fields = ("task", "model", "recipe", "status", "seed")
    if not wanted.keys() <= set(fields):
        raise ValueError(f"{' '.join(filters)}: expected key=value with key in {', '.join(fields)}")
    records, warnings = load_all(results)
    for key, value in wanted.items():
        known = {str(getattr(r, key)) for r in records}
        if key in ("task", "model", "recipe"):
            known |= {path.stem for path in (CONFIGS / key).glob("*.yaml")}
        elif key == "status":
            known |= set(typing.get_args(Status))
        if key != "seed" and value not in known:
            raise ValueError(f"{key}={value}: {nearest(value, sorted(known))}")
    lines = []
    for r in sorted(records, key=lambda r: (finished(r), r.name)):
        if all(str(getattr(r, key)) == value for key, value in wanted.items()):
            test = percent(100 * r.result.test.accuracy) if r.result else ""
            lines.append((r.name, r.recipe, r.status, f"{r.protocol.data}, {r.protocol.budget}",
                          test.rjust(6), r.finished_at, setting_text(r)))  # fmt: skip
    place = (results / "runs").absolute()
    missing = "" if place.is_dir() else ", which is not there; --results DIR looks elsewhere"
    return "\n".join([*aligned(lines), f"{len(lines)} records in {place}{missing}", *warnings])


def find(results: Path, text: str) -> Path:
    """The record that `text` names.

    Raises:
        ValueError: there is none, or several.
    """
    if Path(text).is_file():
        return Path(text)
    paths = sorted((results / "runs").glob("*/*/*.json"))
    found = [p for p in paths if p.stem == text] or [p for p in paths if p.stem.startswith(text)]
    if len(found) != 1:
        names = (
            ", ".join(p.stem for p in found[:5])
            or f"none among {len(paths)} in {results.absolute()}"
        )
        raise ValueError(f"{text}: expected one record, found {names}")
    return found[0]


def show(path: Path) -> str:
    """A record for people: its result, then the rest without the packed test results."""
    record = load(path)
    if record.result:
        test = record.result.test
        low, high = (100 * end for end in wilson(test.accuracy, test.num_examples))
        result = (
            f"test accuracy {percent(100 * test.accuracy)} % on {test.num_examples:,} examples "
            f"(95 % interval {low:.1f} to {high:.1f}), {record.status.replace('_', ' ')}"
        )
    else:
        result = f"no result, {record.status.replace('_', ' ')}: {record.message or 'no message'}"
    told = [
        result,
        f"{record.model} on {task_title(record.task)}, recipe {record.recipe}, seed {record.seed}, "
        f"changed: {setting_text(record) or 'nothing'}",
        f"data {record.protocol.data}, budget {record.protocol.budget}, finished "
        f"{record.finished_at}",
        str(path),
    ]
    first = path.with_name(f"{record.run_id}.json")
    told += [f"also of this run: {other}" for other in siblings(first) if other.name != path.name]
    values = json.loads(record.to_json())
    curve = values.pop("curve")
    values.get("pretraining", {}).pop("curve", None)
    for split in (values["result"] or {}).values():
        if isinstance(split, dict):
            split.pop("correct", None)
    rows = [f"{key}: {value}" for key, value in flatten(values).items()]
    step = max(1, len(curve) // 10)
    rows += [f"curve: {point}" for point in [*curve[::step], *curve[-1:]]]
    return "\n".join([*told, "", *rows])


def command(record: Record) -> str:
    """The command that makes the run once more, to the same numbers on the same machine.

    Raises:
        ValueError: with the configs that are here it would make another run.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from lra.build import resolved
    from lra.cli import compose_config, explain, typed

    try:
        config = resolved(typed(compose_config(record.overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{record.run_id}: {explain(error, record.overrides)}") from None
    if config_hash(config) != record.config_hash:
        here, then = flatten(config), flatten(record.config)
        changed = [
            f"{key} is {here.get(key)}, was {then.get(key)}"
            for key in sorted(here.keys() | then.keys())
            if here.get(key) != then.get(key) and key.partition(".")[0] not in NO_IDENTITY
        ]
        raise ValueError(f"{record.run_id}: the configs have changed since: {'; '.join(changed)}")
    words = list(record.overrides)
    threads = record.hardware.get("num_threads")
    is_set = any(word.lstrip("+").startswith("hardware.num_threads=") for word in words)
    if record.hardware.get("device") == "cpu" and threads and not is_set:
        words.append(f"hardware.num_threads={threads}")  # chosen by the machine or the sweep
    return shlex.join(["python", "run.py", *words])


def diff(a: Record, b: Record) -> str:
    """Where two records differ, except in what every two runs differ in."""
    sides = [json.loads(r.to_json()) | {"config": all_settings(r)} for r in (a, b)]
    for values in sides:
        for key in ("run_id", "curve", "speed", "started_at", "finished_at", "config_hash"):
            values.pop(key)
        for split in (values["result"] or {}).values():
            if isinstance(split, dict):
                split.pop("correct", None)
    left, right = (flatten(values) for values in sides)
    keys = sorted(k for k in left.keys() | right.keys() if left.get(k) != right.get(k))
    lines = [f"{k}: {left.get(k)} -> {right.get(k)}" for k in keys]
    return "\n".join(lines) or "no difference"


def validate(paths: list[Path]) -> list[str]:
    """Complaints about files that are no record or do not fit together."""
    found = []
    for path in paths:
        try:
            found += [f"{path}: {problem}" for problem in problems(load(path), path)]
        except (ValueError, OSError) as error:
            found.append(str(error))
    return found


def merge(results: Path, other: Path) -> str:
    """Add the records of another results folder (or of its runs/).

    Raises:
        ValueError: a file is damaged, or the record of a training is here with other content; then
            nothing is written.
    """
    runs = other if other.name == "runs" else other / "runs"
    paths = sorted(runs.glob("*/*/*.json"))
    if not paths:
        raise ValueError(f"{runs}: no records")
    complaints, new, same = validate(paths), [], 0
    for path in paths if not complaints else []:
        record = load(path)
        first = record_path(results, record.task, record.model, record.run_id)
        here = siblings(first)
        if any(other.read_bytes() == path.read_bytes() for other in here):
            same += 1
        elif twins := [other for other in here if started(other) == record.started_at]:
            complaints.append(f"{path}: differs from {twins[0]}")
        else:
            new.append((path, first))
    if complaints:
        raise ValueError("nothing merged:\n" + "\n".join(complaints))
    renamed = []
    for path, first in sorted(new, key=lambda pair: number_of(pair[0], pair[1].stem) or 1):
        target = first.with_name(path.name)
        if target.exists():
            target = free_path(first)
            renamed.append(f"{path} is {target} here, beside other trainings of this run")
        write_atomically(target, path.read_text(encoding="utf-8"))
    return "\n".join([*renamed, f"{len(new)} records added, {same} were here already"])


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    results, words = args.results, args.words
    needed = {"show": 1, "command": 1, "diff": 2, "merge": 1}.get(args.command)
    if needed is not None and len(words) != needed:
        parser.error(f"{args.command}: expected {needed} argument(s), got {len(words)}")
    if args.command == "list":
        print(list_records(results, words))
    elif args.command == "show":
        print(show(find(results, words[0])))
    elif args.command == "command":
        print(command(load(find(results, words[0]))))
    elif args.command == "diff":
        print(diff(*(load(find(results, w)) for w in words)))
    elif args.command == "merge":
        print(merge(results, Path(words[0])))
    else:
        paths = [Path(w) for w in words] or sorted((results / "runs").glob("*/*/*.json"))
        complaints = validate(paths)
        print("\n".join([*complaints, f"{len(paths)} files, {len(complaints)} complaints"]))
        return 1 if complaints else 0
    return 0


if __name__ == "__main__":
    run_script(main)
