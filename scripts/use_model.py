"""Ask a trained model about inputs of your own, or about examples of its test split.

python scripts/use_model.py outputs/RUN_ID
python scripts/use_model.py outputs/RUN_ID "[MAX 4 3 [MIN 2 3 ] 1 0 ]"
python scripts/use_model.py outputs/RUN_ID "one document" "the other"    # where the task has pairs

The same from Python: lra.load("outputs/RUN_ID").predict(...); there pictures can be given too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lra  # noqa: E402
from lra.script import run_script  # noqa: E402
from lra.tasks.cache import prepare, stratified  # noqa: E402

SHOWN = 60  # characters of an input


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="the folder of a run, as outputs/RUN_ID")
    parser.add_argument("inputs", nargs="*", help="what the task is about; default: test examples")
    parser.add_argument(
        "--examples",
        type=int,
        default=10,
        help="of test, each class by its share (default: %(default)s)",
    )
    arguments = parser.parse_args()

    run = lra.load(arguments.run)
    task, count = run.task, run.task.num_sequences
    if arguments.inputs:
        if len(arguments.inputs) % count:
            raise ValueError(f"{len(arguments.inputs)} inputs: task '{task.name}' takes {count}")
        groups = [tuple(arguments.inputs[i : i + count])
                  for i in range(0, len(arguments.inputs), count)]  # fmt: skip
        answers = run.predict([group if count > 1 else group[0] for group in groups])
        for group, answer in zip(groups, answers, strict=True):
            print(f"{answer}  <-  {' | '.join(part[:SHOWN] for part in group)}")
        return
    test = prepare(task, run.config.paths.cache).test
    rows = stratified(test.labels, arguments.examples).tolist()
    # Raw values, as the cache has them, are inputs as well.
    examples = [tuple(test.sequence(i, s) for s in range(count)) for i in rows]
    answers = run.predict([example if count > 1 else example[0] for example in examples])
    right = 0
    for i, example, answer in zip(rows, examples, answers, strict=True):
        label = int(test.labels[i])
        name = task.class_names[label] if task.class_names else label
        right += answer == name
        shown = " | ".join(" ".join(task.decode(part[: 4 * SHOWN]).split())[:SHOWN]
                           for part in example)  # fmt: skip
        print(f"{answer}{'' if answer == name else f' (it is {name})'}  <-  {shown}")
    print(f"{right} of {len(rows)} right")


if __name__ == "__main__":
    run_script(main)
