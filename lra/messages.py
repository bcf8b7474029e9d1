"""What a person reads of a run: what it is about to do, and how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lra import runs
from lra.build import make_task
from lra.console import duration, percent, reach_text
from lra.plan import Meaning, Plan, changes
from lra.pretraining import describe
from lra.results.control import control_command, phase_text
from lra.results.records import Record

if TYPE_CHECKING:
    from lra.tasks.cache import Dataset
    from lra.training.hardware import Hardware


def header(plan: Plan, meaning: Meaning, data: Dataset, hardware: Hardware, record: Path) -> str:
    """What runs, on what, how far from its recipe, and where it leaves its files."""
    config, train, task = plan.config, plan.config.train, plan.task
    params, baseline = meaning.num_params, meaning.baseline_params
    counts = " / ".join(f"{count:,}" for count in data.num_examples.values())
    num_before = config.pretrain.num_examples
    epochs = (num_before + train.num_steps * train.batch_size) / len(data.train)
    ratio = 100 * params / baseline - 100
    rule = "within the 10 % rule" if 10 * params <= 11 * baseline else "over the 10 % rule"
    changed = changes(plan, ("model.",), "default")
    changed += changes(plan, ("shape.", "train.", "task."), "recipe")
    changed += [f"init_from={config.init_from}"] if config.init_from else []
    left_aside = _data_left_aside(plan) if meaning.protocol.data == "synthetic" else ""
    lines = [
        f"run      {plan.run_dir.name}",
        f"task     {task.name}: {task.describe_source()} [{meaning.protocol.data}]",
        f"data     {counts} train / val / test examples of at most {task.max_length:,} tokens"
        + left_aside,
        *(f"remark   {remark}" for remark in data.meta.get("remarks", [])),
        f"model    {plan.model}, {params:,} parameters, {ratio:+.1f} % against softmax ({rule})",
        *([f"reach    {reach_text(meaning.reach)}, in positions"] if meaning.reach else []),
        f"recipe   {config.recipe}"
        + (f", changed: {'; '.join(changed)}" if changed else ", nothing changed"),
        f"device   {hardware.name} ({hardware.device.type}, {config.hardware.precision})",
        f"budget   {train.num_steps:,} steps x {train.batch_size} examples ({epochs:.2f} epochs, "
        f"{meaning.protocol.budget}{', both phases counted' * (num_before > 0)})",
        *([f"before   {describe(plan)}"] if config.pretrain.objective != "none" else []),
        f"output   {plan.run_dir}, record to {record}",
    ]
    size = config.hardware.micro_batch_size
    if plan.plain["shape"]["norm_kind"] == "batch" and size and size < train.batch_size:
        lines.append(
            f"warning: hardware.micro_batch_size={size}: batch norm takes its statistics of each "
            "part of a batch alone, so the result is not that of the whole batch"
        )
    return "\n".join(lines)


def _data_left_aside(plan: Plan) -> str:
    """Which real data a run on synthetic ones does not use; empty if there are none."""
    config, published = plan.config, plan.reference.config
    if published is None:
        return ""
    usual = published.task.get("source")
    try:
        task = make_task(dataclasses.replace(config, task=config.task | {"source": usual}))
        task.memo_dir = config.paths.cache
        if task.kind != "files" or not task.source_files():
            return ""
    except ValueError:  # nothing found
        return ""
    return (
        f",\n         made up for a quick look; not used: {task.describe_source()} "
        f"(task.source={usual})"
    )


def introduction(
    run_dir: Path, others: list[tuple[Path, Record]], warnings: list[str], fingerprint: str
) -> list[str]:
    """Which records of this very run are here that were not made in its folder."""
    said = [f"warning: {warning}" for warning in warnings]
    if others:
        said.append(
            f"note     this very run is recorded already, but not from {run_dir}: that came with\n"
            "         the repository, or its folder is gone; it stays, and this run makes its own"
        )
    said += [f"         {runs.introduce(path, record, fingerprint)}" for path, record in others]
    return said


def evaluation_share(record: Record) -> str:
    """Share of evaluations in them and the timed steps, earlier starts of the run included."""
    in_training, in_evaluation = (record.speed.get(f"{k}_time_s") for k in ("train", "eval"))
    if not in_training or not in_evaluation:
        return ""
    share = in_evaluation / (in_training + in_evaluation)
    return f", evaluation share {100 * share:.0f} %"


def conclusion(record: Record, path: Path, others: list[tuple[Path, Record]]) -> Iterator[str]:
    """How the run ended, in a table with what is published, and how it compares with `others`."""
    from lra.results.published import load_published
    from lra.results.task_table import task_table

    if record.result is None:
        resumes = "; the same command goes on" if record.status == "interrupted" else ""
        yield f"{record.status}: {record.message}{resumes}"
    else:
        test = record.result.test
        yield (
            f"{record.status}: test accuracy {percent(100 * test.accuracy)} % on "
            f"{test.num_examples:,} examples, step {record.result.step} "
            f"({record.protocol.selection}); {duration(record.speed['wall_time_s'] or 0)} in all"
            + evaluation_share(record)
        )
        yield task_table([record], load_published(), record.task, record.run_id)
        if record.pretraining:
            yield (
                f"phase 1  {phase_text([record])}; the arena forbids it, so tables show the run\n"
                "         apart, beside one from scratch on as many examples in all:\n"
                f"         {control_command([record])}"
            )
        for other_path, other in others:
            yield f"against  {other_path}: {runs.likeness(record, other)}"
    yield f"record   {path}"
