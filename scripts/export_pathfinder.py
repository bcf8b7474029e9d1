"""Write generated Pathfinder pictures in the layout of the benchmark's release.

    python scripts/export_pathfinder.py OUT task.num_train=800 task.num_val=100 task.num_test=100
    python scripts/export_pathfinder.py OUT task=pathx --truth OUT/truth.tsv

Any key of the config can be given; the task is pathfinder unless another is named. OUT then has
pathfinder<resolution>/<level>/ with imgs and metadata. `--truth` writes a table with the places of
the markers and of both ends of both target contours of each picture.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lra.build import make_task  # noqa: E402
from lra.cli import compose_config, run_program, typed  # noqa: E402
from lra.script import Parser  # noqa: E402
from lra.tasks.pathfinder import Pathfinder, export  # noqa: E402
from lra.tasks.workers import available_cores  # noqa: E402


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="OUT")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="e.g. task=pathx")
    parser.add_argument("--truth", type=Path, metavar="FILE", help="a table (TSV) to write")
    parser.add_argument(
        "--batch", type=int, default=1000, help="pictures of a batch (default: 1000)"
    )
    parser.add_argument(
        "--workers", type=int, default=available_cores(), help="processes (default: one per core)"
    )
    arguments = parser.parse_intermixed_args()
    overrides = ["task=pathfinder", "task.source=generated", *arguments.settings]
    task = make_task(typed(compose_config(overrides)))
    if not isinstance(task, Pathfinder):
        raise ValueError(f"task={task.name}: expected pathfinder or pathx")
    level = export(
        task,
        arguments.folder,
        truth=arguments.truth,
        pictures_per_batch=arguments.batch,
        num_workers=arguments.workers,
    )
    print(f"{sum(task.sizes.values()):,} pictures in {level}")


if __name__ == "__main__":
    run_program(main)
