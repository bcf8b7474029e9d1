"""Build a task's cache, check it, and print what is in it.

    python scripts/prepare_data.py task=listops
    python scripts/prepare_data.py task=all verify=full report=report.json
    python scripts/prepare_data.py task=image --show 16

Any key of the config can be given, e.g. task.source=synthetic or paths.data=/data. `verify=full`
decodes the source again and compares it with the cache, value by value. The exit code is 0 only if
every split of every task is whole; a task that fails leaves the others to go on.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lra  # noqa: E402, F401  # first: it says what to do where packages are missing

# isort: split
import numpy as np  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402
from yaml import YAMLError  # noqa: E402

from lra.build import make_task  # noqa: E402
from lra.cli import (  # noqa: E402
    CONFIGS,
    compose_config,
    explain,
    run_program,
    typed,
)
from lra.files import NotWritten, check_writable, replacing, write_atomically  # noqa: E402
from lra.script import EXIT_USAGE, Parser, exit_codes  # noqa: E402
from lra.sweep import named  # noqa: E402
from lra.tasks.batches import ARRAYS  # noqa: E402
from lra.tasks.cache import Dataset, prepare, verify  # noqa: E402
from lra.tasks.task import SPLITS, Task  # noqa: E402
from lra.tasks.workers import available_cores  # noqa: E402
from lra.values import nearest  # noqa: E402

if TYPE_CHECKING:
    from PIL.Image import Image

TASKS = sorted(path.stem for path in (CONFIGS / "task").glob("*.yaml"))


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="task=NAME|all, verify=full, report=FILE"
    )
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="show N examples as a person can read them"
    )
    parser.add_argument(
        "--workers", type=int, default=available_cores(), help="processes (default: one per core)"
    )
    arguments = parser.parse_intermixed_args()
    if arguments.show < 0:
        parser.error(f"--show {arguments.show}: expected 0 or more")
    own = {"task": "", "verify": "checksums", "report": ""}
    overrides = []
    for setting in arguments.settings:
        name, _, value = setting.partition("=")
        if name in own:
            own[name] = value
        else:
            overrides.append(setting)
    if own["verify"] not in ("checksums", "full"):
        parser.error(f"verify={own['verify']}: expected checksums or full")
    if own["task"] not in [*TASKS, "all"]:
        parser.error(f"task={own['task']}: not a choice; {nearest(own['task'], [*TASKS, 'all'])}")

    if own["report"]:
        check_report(Path(own["report"]))
    reports, failed = {}, 0
    for name in TASKS if own["task"] == "all" else [own["task"]]:
        chosen = [f"task={name}", *overrides]
        try:
            config = typed(compose_config(chosen))
            task = make_task(config)
            if own["verify"] == "full":
                check_whole(task)
            started = time.monotonic()
            dataset = prepare(task, config.paths.cache, num_workers=arguments.workers)
            opened = time.monotonic() - started
            verify(dataset)
            if own["verify"] == "full":
                compare_with_source(task, dataset)
            reports[name] = report(task, dataset, opened)
            show_report(reports[name])
            if arguments.show:
                show_examples(task, dataset, arguments.show)
        except BrokenPipeError:
            raise
        except (ValueError, OSError, HydraException, OmegaConfBaseException, YAMLError) as error:
            message = explain(error, chosen)
            print(f"error: {name}: {message}", file=sys.stderr)
            reports[name] = reports.get(name, {}) | {"error": message}
            failed = EXIT_USAGE
        except Exception as error:  # of the task's code; the others go on, as jobs of a sweep do
            print(f"{name}: {traceback.format_exc().rstrip()}", file=sys.stderr)
            reports[name] = reports.get(name, {}) | {"error": named(error)}
            failed = max(failed, 1)
    if own["report"]:
        write_atomically(Path(own["report"]), json.dumps(reports, indent=1) + "\n")
    return failed


def check_report(path: Path) -> None:
    """See that the report can be written, before hours are spent on what is in it.

    Raises:
        ValueError: there is something else of that name, such as a folder.
        OSError: its folder cannot be written to.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"report={path}: not a file; expected the name of a file to write")
    check_writable(path.parent, "report")


def check_whole(task: Task) -> None:
    """Refuse what cannot be compared with the source.

    Raises:
        ValueError: a limit is set; names it.
    """
    for split in SPLITS:
        limit = getattr(task, f"limit_{split}")
        if limit is not None:
            raise ValueError(
                f"task.limit_{split}={limit}: verify=full needs whole splits, expected null"
            )


def report(task: Task, dataset: Dataset, seconds: float) -> dict[str, Any]:
    """Facts about each split; the same for every build of the same data, apart from seconds."""
    splits = {}
    for split in SPLITS:
        arrays = getattr(dataset, split)
        splits[split] = dataset.meta["splits"][split] | {
            "used_examples": len(arrays),
            "bytes": sum((dataset.folder / split / f"{a}.npy").stat().st_size for a in ARRAYS),
        }
    return {
        "task": task.name,
        "source": dataset.meta["source"],
        "kind": dataset.meta["kind"],
        "folder": str(dataset.folder),
        "fingerprint": dataset.fingerprint,
        "max_length": dataset.meta["max_length"],
        "remarks": dataset.meta.get("remarks", []),
        "build_seconds": dataset.meta["seconds"],
        "seconds": round(seconds, 3),
        "splits": splits,
    }


def show_report(facts: dict[str, Any]) -> None:
    """Print a report for a person."""
    print(f"{facts['task']}: {facts['source']} [{facts['kind']}]")
    print(
        f"  cache        {facts['folder']}, built in {facts['build_seconds']} s, "
        f"ready in {facts['seconds']} s"
    )
    print(f"  fingerprint  {facts['fingerprint']}")
    for remark in facts["remarks"]:
        print(f"  remark       {remark}")
    for split, values in facts["splits"].items():
        lengths = values["length_percentiles"]
        count, used = values["num_examples"], values["used_examples"]
        part = "" if used == count else f"{used:,} of "
        print(
            f"  {split:<6}{f'{part}{count:,}':>9} examples  "
            f"length {lengths['0']} / {lengths['50']} / {lengths['100']} (min / median / max)  "
            f"cut {values['truncated']}  empty {values.get('empty', 0)}  "
            f"skipped {len(values['skipped'])}  "
            f"{values['bytes'] / 2**20:,.1f} MiB"
        )
        print(f"        labels {values['label_histogram']}")
        for name in values["skipped"][:10]:
            print(f"        skipped: {name}")


def compare_with_source(task: Task, dataset: Dataset) -> None:
    """Decode the source again and compare every example with the cache.

    Raises:
        ValueError: an example differs, or there are more or fewer.
    """
    for split in SPLITS:
        arrays = getattr(dataset, split)
        count = dataset.meta["splits"][split]["num_examples"]
        index = -1
        for index, (sequences, label) in enumerate(task.examples(split)):
            cut = [np.frombuffer(s, np.uint8) if isinstance(s, bytes) else s for s in sequences]
            same = index < count and arrays.labels[index] == label and all(
                np.array_equal(arrays.sequence(index, i), values[: task.max_length])
                for i, values in enumerate(cut)
            )  # fmt: skip
            if not same:
                raise ValueError(
                    f"{dataset.folder / split}: example {index} differs from "
                    f"{task.describe_source()}; if the task's code has changed, raise the version "
                    "in its settings"
                )
        if index + 1 != count:
            raise ValueError(
                f"{dataset.folder / split}: {count} examples, the source has {index + 1}"
            )


def save_picture(picture: Image, path: Path) -> None:
    with replacing(path) as file:
        picture.save(file, "PNG")


def show_examples(task: Task, dataset: Dataset, count: int) -> None:
    """Print the first training examples as text, or draw them into one PNG.

    It lies in the cache, or in the current folder where the cache cannot be written.
    """
    rows = range(min(count, len(dataset.train)))
    if task.picture_size is None:
        for i in rows:
            for s in range(task.num_sequences):
                text = task.decode(dataset.train.sequence(i, s))
                print(f"train {i} label {dataset.train.labels[i]}: {text}")
        return
    from PIL.Image import Resampling, fromarray

    height, width = task.picture_size
    columns = int(np.ceil(np.sqrt(len(rows))))
    sheet = np.full((-(-len(rows) // columns) * (height + 2), columns * (width + 2)), 96, np.uint8)
    for i in rows:
        top, left = i // columns * (height + 2), i % columns * (width + 2)
        picture = np.zeros(height * width, np.uint8)
        values = dataset.train.sequence(i)
        picture[: len(values)] = values
        sheet[top : top + height, left : left + width] = picture.reshape(height, width)
    enlarged = fromarray(sheet).resize([4 * s for s in sheet.shape[::-1]], Resampling.NEAREST)
    path = dataset.folder / "train.png"
    try:
        save_picture(enlarged, path)
    except NotWritten:  # the cache is perhaps a group's, and only read here
        path = Path(f"{task.name}-train.png")
        save_picture(enlarged, path)
    print(f"labels {dataset.train.labels[: len(rows)].tolist()}, row by row in {path}")


if __name__ == "__main__":
    run_program(lambda: exit_codes.append(main()))
