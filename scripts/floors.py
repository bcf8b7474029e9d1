"""What rules reach that no sequence model should stay below, on whole val and test.

python scripts/floors.py task=listops

Counted on train: the commonest label of all, and of the first token, the last, the length. Fitted
on train: linear classifiers of bags of tokens, of n-grams, of pixels and of how alike a pair is,
and the nearest class mean. Classifiers come with pip install -e '.[floors]'. For ListOps also what
following the outer levels of an expression gives, one level more each time.

Takes every key of the config; writes <paths.results>/floors/<task>.json, which tables and figures
show.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lra.build import make_task  # noqa: E402
from lra.cli import compose_config, run_program, typed  # noqa: E402
from lra.console import percent  # noqa: E402
from lra.files import check_writable  # noqa: E402
from lra.results import floors, rules  # noqa: E402
from lra.script import Parser  # noqa: E402
from lra.tasks.cache import prepare  # noqa: E402


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("settings", nargs="+", metavar="key=value", help="task=NAME, any other key")
    config = typed(compose_config(parser.parse_args().settings))
    task = make_task(config)
    check_writable(floors.floors_path(config.paths.results, task.name).parent, "paths.results")
    if message := rules.unavailable():
        print(message, file=sys.stderr)
    found = rules.measure(task, prepare(task, config.paths.cache))
    path = floors.save(found, config.paths.results)
    for floor in (*found.floors, *found.ladder):
        val, test = (percent(100 * score.accuracy) for score in (floor.val, floor.test))
        print(f"{task.name}, {floor.description}: val {val} %, test {test} %")
    print(f"written to {path}")


if __name__ == "__main__":
    run_program(main)
