"""Self-pretraining in tables: its first phase in words, and the run from scratch beside it.

The compute-tied control of a run with self-pretraining is of the same task, model and settings, and
trains on as many examples in all, every one of them for the classes. Its steps of warm-up and
between evaluations may be others.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence

from lra.config import NO_IDENTITY, config_hash
from lra.results.records import Record
from lra.results.statistics import mean_std

NOT_TOLD = re.compile(r"pretrain\.(?!(objective|mask_rate|num_steps|batch_size)=)")
OF_BYTES = ("text", "retrieval")  # tasks whose tokens are bytes


def steps_in_all(record: Record) -> int:
    """Training steps on as many examples as all phases of a run have; the last one counts whole."""
    train, first = record.config["train"], record.pretraining
    before = first.num_steps * first.batch_size / train["batch_size"] if first else 0
    return int(train["num_steps"]) + math.ceil(before)


def tied_setting(record: Record) -> str:
    """Hash of what a run with self-pretraining and its control have in common."""
    config = {k: v for k, v in record.config.items() if k != "pretrain"}
    free = ("warmup_steps", "eval_every")
    train = {k: v for k, v in config["train"].items() if k not in free}
    return config_hash(config | {"train": train | {"num_steps": steps_in_all(record)}})


def control_command(runs: Sequence[Record]) -> str:
    """What to type for the control of runs with self-pretraining that differ in their seed only."""
    first, seeds = runs[0], ",".join(str(run.seed) for run in runs)
    # Of what is no part of a run's identity, the paths say which data and which records.
    left_out = {"pretrain", "pretrain_task", "pretrain_recipe", *NO_IDENTITY} - {"paths"}
    words = {}
    for word in first.overrides:
        key = word.partition("=")[0].lstrip("+~")
        if key.partition(".")[0] not in left_out and key != "train.num_steps":
            words[key] = word
    named = {k: f"{k}={v}" for k, v in (("model", first.model), ("task", first.task))}
    words = named | words | {"train.num_steps": f"train.num_steps={steps_in_all(first)}"}
    several = ["-m"] * (len(runs) > 1)
    seed = [f"seed={seeds}"] * (seeds != "0")
    return shlex.join(["python", "run.py", *several, *words.values(), *seed])


def phase_text(runs: Sequence[Record]) -> str:
    """The first phase of runs of one setting, and how well tokens of validation were told.

    What the command line changed in it stands there, too, since nothing else tells settings apart.
    """
    blocks = [run.pretraining for run in runs if run.pretraining]
    first = blocks[0]
    loss, accuracy = (mean_std([getattr(b.val, name) for b in blocks])[0]
                      for name in ("loss", "accuracy"))  # fmt: skip
    rate = "" if first.mask_rate is None else f" {100 * first.mask_rate:g} %"
    told = f"val loss {loss:.3f}"
    if first.objective == "next" and runs[0].task in OF_BYTES:
        told = f"{loss / math.log(2):.2f} bits a byte"
    changed = sorted(w[len("pretrain.") :] for w in runs[0].overrides if NOT_TOLD.match(w))
    return (
        f"{first.objective}{rate}, {first.num_steps:,} steps of {first.batch_size}"
        f"{''.join(f', {word}' for word in changed)}: {told}, accuracy {100 * accuracy:.1f} %"
    )
