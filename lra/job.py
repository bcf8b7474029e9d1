"""One run from config to record: check all, prepare data, train, write and show the record."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lra import runs
from lra.build import make_model, make_task, model_name, num_params, resolved
from lra.config import NO_NUMBERS, LoggerConfig, RunConfig, config_hash, flatten
from lra.console import duration, percent
from lra.files import check_writable, is_refused, refusal, storing, write_atomically
from lra.tasks.task import Dataset, Task, prepare
from lra.training.progress import Progress
from lra.training.weights import selected_weights

if TYPE_CHECKING:
    from lra.results.records import Protocol, Record, Status
    from lra.training.hardware import Hardware
    from lra.training.trainer import Result

EXIT_CODES = {
    "completed": 0, "at_chance": 0, "failed": 1, "diverged": 3, "out_of_memory": 4,
    "interrupted": 75,
}  # fmt: skip
# Where data lie says nothing about what a number means.
NOT_COMPARED = ("task.source", "task.path", "task.strict", *(f"train.{k}" for k in NO_NUMBERS))


@dataclass(frozen=True)
class Reference:
    """What a run is compared with: the recipe as published, and the softmax model."""

    config: RunConfig | None
    baseline_model: Mapping[str, Any]


def run_job(
    config: RunConfig, overrides: list[str], reference: Reference, job_number: int = 0
) -> Record:
    """Run one entry to its record. Runs that fail write a record too, with what is known.

    Raises:
        ValueError: something in the config, the data or the run's folder is not as it must be;
            raised before any training, and no record is written.
        Unwritable: the disk was full or turned read-only meanwhile; what was written is whole.
    """
    started_at, started = runs.now(), time.monotonic()

    # Everything that can be refused is refused before data are touched.
    plain = resolved(config)
    task = make_task(config)
    from lra.results import records
    from lra.training import distributed
    from lra.training.checkpoint import seed_everything
    from lra.training.hardware import Hardware
    from lra.training.logger import check_installed, make_logger

    check_installed(config.logger)

    distributed.adopt_slurm()
    hardware = Hardware(config.hardware, job_number)
    seed_everything(config.seed)
    model = make_model(config, task)
    model.encoder.checkpoint_layers = config.hardware.activation_checkpointing
    if config.init_from:
        model.load_state_dict(selected_weights(Path(config.init_from), model))
    name, model_hash = model_name(config.model), config_hash(plain)
    run_id = f"{task.name}-{name}-seed{config.seed}-{model_hash[:8]}"
    run_dir = config.paths.outputs / run_id
    first = records.record_path(config.paths.results, task.name, name, run_id)
    if config.hardware.num_devices > 1 and not distributed.is_worker():
        return _run_in_processes(config, overrides, reference, run_dir, first)
    distributed.join(hardware.device.type)

    from lra.training.evaluate import is_at_chance
    from lra.training.stopping import Interrupted
    from lra.training.trainer import Diverged, Refused, is_out_of_memory, train

    is_main = distributed.is_main()
    progress = Progress(quiet=not is_main)
    data = prepare(task, config.paths.cache)
    if is_main:
        check_writable(config.paths.outputs, "paths.outputs")
    with runs.locked(run_dir) if is_main else contextlib.nullcontext(), storing("paths.outputs"):
        own = runs.own_record(run_dir, first)
        if finished := distributed.from_main(_finished(own, run_dir, data, progress)):
            return records.load(finished)
        why_not, baseline_params = compare(config, plain, reference, task, num_params(model))
        protocol = protocol_of(config, plain, reference, task, data)
        if is_main:
            # Better now than after the training.
            check_writable(first.parent, "paths.results")
            path, recorded = (
                (own, records.started(own)) if own else (records.free_path(first), None)
            )
            progress.log = run_dir / "run.log"
            write_atomically(run_dir / "config.yaml", _yaml(plain))
            runs.write_status(run_dir, "running", started_at, path.name, recorded)
            for stale in run_dir.glob("traceback*.txt"):
                stale.unlink()
            _describe(
                progress, config, plain, reference, task, data, name, num_params(model),
                baseline_params, protocol, hardware, run_dir, path,
            )  # fmt: skip
            others, warnings = runs.others(first, own)
            _introduce(progress, others, warnings, data, run_dir)

        status: Status = "completed"
        message, result, cause = "", None, None
        with make_logger(
            config.logger if is_main else LoggerConfig(),
            run_id=run_id,
            run_dir=run_dir,
            plain_config=plain,
            say=progress.say,
        ) as logger:
            try:
                result = train(
                    model, data, config.train, hardware, seed=config.seed, run_dir=run_dir,
                    identity={"config_hash": model_hash, "seed": config.seed,
                              "data": data.fingerprint, "vocabulary": task.vocabulary_hash()},
                    progress=progress, log=logger.log,
                )  # fmt: skip
            except Diverged as error:
                status, message = "diverged", str(error)
            except Interrupted as error:
                status, message, cause = "interrupted", str(error), error.cause
            except Refused:
                raise
            except Exception as error:
                status = "out_of_memory" if is_out_of_memory(error) else "failed"
                message = f"{type(error).__name__}: {error}".splitlines()[0]
                trace = traceback.format_exc()
                if is_refused(error):
                    message = trace = refusal(error, "paths.outputs")
                    progress.log = None  # it lies on the same disk
                if distributed.world_size() > 1:
                    message, trace = distributed.first_failure(run_dir, message, trace)
                if not is_main:
                    raise
                if trace != message:
                    write_atomically(run_dir / "traceback.txt", trace)
                    progress.say(trace)
            if result is not None and is_at_chance(
                result.state.best_accuracy, data.meta["splits"]["val"]["label_histogram"]
            ):
                status, message = "at_chance", "validation accuracy never left chance"

            record = records.Record(
                schema_version=records.SCHEMA_VERSION,
                run_id=run_id,
                status=status,
                task=task.name,
                model=name,
                recipe=config.recipe,
                seed=config.seed,
                config=plain,
                config_hash=model_hash,
                overrides=overrides,
                protocol=protocol,
                data=_data_block(data),
                num_params=num_params(model),
                baseline_params=baseline_params,
                apples_to_apples=not why_not,
                why_not=why_not,
                result=_result_block(result, len(data.val)),
                curve=result.state.curve if result else _curve_so_far(run_dir),
                speed=_speed_block(result, time.monotonic() - started),
                peak_memory_bytes=hardware.peak_memory_bytes(),
                hardware=hardware.describe(
                    result.micro_batch_size if result else config.hardware.micro_batch_size
                ),
                environment=records.environment(),
                started_at=started_at,
                finished_at=runs.now(),
                message=message,
            )
            if is_main:
                with storing("paths.results"):
                    if own:
                        write_atomically(own, record.to_json())
                    else:
                        path = records.save_beside(record, config.paths.results)
                runs.write_status(run_dir, status, started_at, path.name, started_at)
                logger.finish(json.loads(record.to_json()), EXIT_CODES[status])
                _conclude(progress, record, path, others)
    if cause == "SIGUSR2":
        distributed.give_back_to_queue()
    return record


def _run_in_processes(
    config: RunConfig, overrides: list[str], reference: Reference, run_dir: Path, first: Path
) -> Record:
    """Run the job in `hardware.num_devices` processes of this machine and return its record."""
    import tempfile

    from lra.results import records
    from lra.training import distributed

    def own() -> tuple[Path | None, int]:
        path = runs.own_record(run_dir, first)
        return path, path.stat().st_mtime_ns if path else 0

    before = own()
    with tempfile.TemporaryDirectory() as folder:
        refusal = Path(folder) / "refused"
        try:
            distributed.launch(
                _job_process, config.hardware.num_devices, config, overrides, reference, refusal
            )
        except RuntimeError:
            if refusal.exists():
                raise ValueError(refusal.read_text()) from None
            if own() == before:
                raise  # ended without a record, e.g. killed
    path, _ = own()
    if path is None:
        raise RuntimeError(f"{run_dir}: the run ended without a record")
    return records.load(path)


def _job_process(
    config: RunConfig, overrides: list[str], reference: Reference, refusal: Path
) -> None:
    try:
        run_job(config, overrides, reference)
    except (ValueError, OSError) as error:
        write_atomically(refusal, str(error))
        raise


def compare(
    config: RunConfig, plain: dict[str, Any], reference: Reference, task: Task, params: int
) -> tuple[list[str], int]:
    """LRA's rule: the recipe's own sizes and settings, at most 10 % more parameters than softmax.

    Returns:
        Reasons why a run is not comparable (none if it is), and the softmax model's parameters.
    """
    import torch

    with torch.device("meta"):
        baseline = num_params(make_model(config, task, reference.baseline_model))
    why_not = changes(plain, reference, ("shape.", "train.", "task."), "recipe")
    if config.init_from:
        why_not.append(f"init_from={config.init_from}")
    if 10 * params > 11 * baseline:
        why_not.append(
            f"{params:,} parameters, {100 * params / baseline - 100:+.1f} % over softmax"
        )
    return why_not, baseline


def changes(
    plain: dict[str, Any], reference: Reference, sections: tuple[str, ...], source: str
) -> list[str]:
    """Keys of some sections that differ from the choices as published, with both values."""
    if reference.config is None:
        return []
    theirs, ours = flatten(resolved(reference.config)), flatten(plain)
    return [
        f"{key}={ours.get(key)} ({source}: {theirs.get(key)})"
        for key in sorted(ours.keys() | theirs.keys())
        if key.startswith(sections) and key not in NOT_COMPARED and ours.get(key) != theirs.get(key)
    ]


def protocol_of(
    config: RunConfig, plain: dict[str, Any], reference: Reference, task: Task, data: Dataset
) -> Protocol:
    """What the run's number will mean."""
    from lra.results.records import Protocol

    counts = {split: len(getattr(data, split)) for split in ("train", "val", "test")}
    kind: Any = task.kind
    if kind != "synthetic" and (
        task.deviations() or (task.official_sizes and counts != task.official_sizes)
    ):
        kind = "partial"
    full = (
        reference.config.train.num_steps * reference.config.train.batch_size
        if reference.config
        else 0
    )
    extra = task.protocol
    return Protocol(
        data=kind,
        budget="reduced" if config.train.num_steps * config.train.batch_size < full else "full",
        validation=extra.pop("validation"),
        selection=config.train.selection,
        max_length=task.max_length,
        difficulty=extra.pop("difficulty"),
        options=extra,
    )


def _finished(own: Path | None, run_dir: Path, data: Dataset, progress: Progress) -> Path | None:
    """The record made in the run's folder, if it is of a run that came to its end."""
    from lra.results import records

    if own is None:
        return None
    try:
        record = records.load(own)
    except records.Newer as error:
        raise ValueError(f"{error}; update it or choose another paths.results") from None
    except ValueError as error:
        progress.say(f"warning: {error}; the run goes on and will replace it")
        return None
    if record.status not in ("completed", "at_chance"):
        return None
    if record.data["fingerprint"] != data.fingerprint:
        raise ValueError(
            f"{own}: this run is finished, on other data (fingerprint "
            f"{record.data['fingerprint'][:12]}, now {data.fingerprint[:12]}); move {run_dir} away "
            "or choose another paths.outputs"
        )
    progress.say(
        f"{record.run_id} is finished ({record.status}); nothing to do. Record: {own}\n"
        f"To train it once more, move {run_dir} away first"
    )
    return own


def _introduce(
    progress: Progress,
    others: list[tuple[Path, Record]],
    warnings: list[str],
    data: Dataset,
    run_dir: Path,
) -> None:
    """Say which records of this very run are here that were not made in its folder."""
    for warning in warnings:
        progress.say(f"warning: {warning}")
    if others:
        progress.say(
            f"note     this very run is recorded already, but not from {run_dir}: that came with\n"
            "         the repository, or its folder is gone; it stays, and this run makes its own"
        )
    for path, record in others:
        progress.say(f"         {runs.introduce(path, record, data.fingerprint)}")


def _describe(
    progress: Progress,
    config: RunConfig,
    plain: dict[str, Any],
    reference: Reference,
    task: Task,
    data: Dataset,
    name: str,
    params: int,
    baseline_params: int,
    protocol: Protocol,
    hardware: Hardware,
    run_dir: Path,
    record: Path,
) -> None:
    train = config.train
    counts = " / ".join(f"{len(getattr(data, split)):,}" for split in ("train", "val", "test"))
    epochs = train.num_steps * train.batch_size / len(data.train)
    ratio = 100 * params / baseline_params - 100
    rule = "within the 10 % rule" if 10 * params <= 11 * baseline_params else "over the 10 % rule"
    changed = changes(plain, reference, ("model.",), "default")
    changed += changes(plain, reference, ("shape.", "train.", "task."), "recipe")
    changed += [f"init_from={config.init_from}"] if config.init_from else []
    left_aside = _data_left_aside(config, reference) if protocol.data == "synthetic" else ""
    lines = [
        f"run      {run_dir.name}",
        f"task     {task.name}: {task.describe_source()} [{protocol.data}]",
        f"data     {counts} train / val / test examples of at most {task.max_length:,} tokens"
        + left_aside,
        *(f"remark   {remark}" for remark in data.meta.get("remarks", [])),
        f"model    {name}, {params:,} parameters, {ratio:+.1f} % against softmax ({rule})",
        f"recipe   {config.recipe}"
        + (f", changed: {'; '.join(changed)}" if changed else ", nothing changed"),
        f"device   {hardware.name} ({hardware.device.type}, {config.hardware.precision})",
        f"budget   {train.num_steps:,} steps x {train.batch_size} examples ({epochs:.2f} epochs, "
        f"{protocol.budget})",
        f"output   {run_dir}, record to {record}",
    ]
    progress.say("\n".join(lines))


def _data_left_aside(config: RunConfig, reference: Reference) -> str:
    """Which real data a run on synthetic ones does not use; empty if there are none."""
    if reference.config is None:
        return ""
    usual = reference.config.task.get("source")
    try:
        task = make_task(dataclasses.replace(config, task=config.task | {"source": usual}))
        if task.kind != "files" or not task.source_files():
            return ""
    except ValueError:  # nothing found
        return ""
    return (
        f",\n         made up for a quick look; not used: {task.describe_source()} "
        f"(task.source={usual})"
    )


def _conclude(
    progress: Progress, record: Record, path: Path, others: list[tuple[Path, Record]]
) -> None:
    from lra.results.leaderboard import load_published, task_table

    if record.result is None:
        progress.say(f"{record.status}: {record.message}")
    else:
        test = record.result.test
        progress.say(
            f"{record.status}: test accuracy {percent(100 * test.accuracy)} % on "
            f"{test.num_examples:,} examples, step {record.result.step} "
            f"({record.protocol.selection}); {duration(record.speed['wall_time_s'] or 0)} in all"
        )
        progress.say(task_table([record], load_published(), record.task, record.run_id))
        for other_path, other in others:
            progress.say(f"against  {other_path}: {runs.likeness(record, other)}")
    progress.say(f"record   {path}")


def _result_block(result: Result | None, num_val: int) -> Any:
    from lra.results.records import RunResult, SplitResult, pack_correct

    if result is None:
        return None
    test = result.test
    return RunResult(
        step=result.step,
        val=SplitResult(result.val_accuracy, result.val_loss, num_val),
        test=SplitResult(test.accuracy, test.loss, test.num_examples, pack_correct(test.correct_N)),
    )


def _speed_block(result: Result | None, wall_time_s: float) -> dict[str, float | None]:
    state = result.state if result else None
    seconds = state.train_time_s if state and state.timed_steps else None

    def rate(count: int) -> float | None:
        return count / seconds if seconds else None

    return {
        "steps_per_s": rate(state.timed_steps if state else 0),
        "examples_per_s": rate(state.timed_examples if state else 0),
        "tokens_per_s": rate(state.timed_tokens if state else 0),
        "train_time_s": seconds,
        "wall_time_s": wall_time_s,
        "max_lr": state.max_lr if state else None,
    }


def _data_block(data: Dataset) -> dict[str, Any]:
    splits = data.meta["splits"]
    return {
        "source": data.meta["source"],
        "fingerprint": data.fingerprint,
        "num_examples": {split: len(getattr(data, split)) for split in splits},
        "truncated": {split: splits[split]["truncated"] for split in splits},
        "skipped": {split: len(splits[split]["skipped"]) for split in splits},
    }


def _curve_so_far(run_dir: Path) -> list[dict[str, Any]]:
    path, curve = run_dir / "metrics.jsonl", []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
                if row.pop("split") == "val":
                    curve.append(row)
    return curve


def _yaml(plain: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(plain, sort_keys=False)
