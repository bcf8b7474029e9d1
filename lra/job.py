"""One run from config to record: check all, prepare data, train, write and show the record."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lra import messages, runs
from lra.build import make_model, make_predictor
from lra.config import LoggerConfig, RunConfig
from lra.console import print_line
from lra.files import Unwritable, check_writable, is_refused, refusal, storing, write_atomically
from lra.plan import Meaning, Plan, Reference, finished, make_plan, meaning_of
from lra.pretraining import block_of, pretrained
from lra.results import records
from lra.results.blocks import curve_block, curve_so_far, data_block, result_block, speed_block
from lra.results.records import Record, Status
from lra.tasks.cache import Dataset, prepare
from lra.training import checkpoint, distributed
from lra.training.evaluate import is_at_chance
from lra.training.gradient import is_out_of_memory
from lra.training.hardware import Hardware
from lra.training.logger import check_installed, make_logger
from lra.training.optim import describe_groups
from lra.training.progress import Progress
from lra.training.stopping import Interrupted
from lra.training.trainer import Diverged, Refused, Result, train
from lra.training.weights import ancestry, selected_weights
from models.classifier import Classifier

EXIT_CODES = {
    "completed": 0, "at_chance": 0, "failed": 1, "diverged": 3, "out_of_memory": 4,
    "interrupted": 75,
}  # fmt: skip
# What a process that cannot start may mean, but for wrong input.
REFUSALS = {kind.__name__: kind for kind in (runs.Busy, Unwritable)}


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
    plan = make_plan(config, reference)
    check_installed(config.logger)
    distributed.adopt_slurm()
    starts_others = config.hardware.num_devices > 1 and not distributed.is_worker()
    hardware = Hardware(config.hardware, job_number, is_used=not starts_others)
    check_batches(config, config.hardware.num_devices)
    model = first_weights(plan)
    if config.pretrain.objective != "none":
        make_predictor(config, first_weights(plan))  # says whether it goes with the model
    if starts_others:
        return run_in_processes(plan, overrides)
    distributed.join(hardware.device.type)
    check_batches(config, distributed.world_size())

    is_main = distributed.is_main()
    run_dir, progress = plan.run_dir, Progress(quiet=not is_main)
    if is_main:  # better now than after hours
        check_writable(config.paths.outputs, "paths.outputs")
        check_writable(config.paths.results, "paths.results")
    data = prepare(plan.task, config.paths.cache)
    if len(data.train) < distributed.world_size():
        raise ValueError(
            f"task {plan.task.name}: {len(data.train)} training examples for "
            f"{distributed.world_size()} devices; expected at least one for each"
        )
    with runs.locked(run_dir) if is_main else contextlib.nullcontext(), storing("paths.outputs"):
        own = runs.own_record(run_dir, plan.first_record)
        done = finished(plan, own, data.fingerprint, hardware.describe(None), progress.say)
        if done := distributed.from_main(done):
            return records.load(done)
        environment, before_s = records.environment(), runs.wall_time_s(run_dir)
        meaning = meaning_of(plan, model, data.num_examples)
        if is_main:
            check_writable(plan.first_record.parent, "paths.results")
            path = own or records.free_path(plan.first_record)
            progress.log = run_dir / "run.log"
            write_atomically(run_dir / "config.yaml", yaml.safe_dump(plan.plain, sort_keys=False))
            recorded = records.started(own) if own else None
            runs.write_status(run_dir, "running", started_at, path.name, recorded, before_s)
            for stale in run_dir.glob("traceback*.txt"):
                stale.unlink()
            progress.say(messages.header(plan, meaning, data, hardware, path))
            others, warnings = runs.others(plan.first_record, own)
            for text in messages.introduction(run_dir, others, warnings, data.fingerprint):
                progress.say(text)

        with make_logger(
            config.logger if is_main else LoggerConfig(),
            run_id=plan.run_id,
            run_dir=run_dir,
            plain_config=plan.plain,
            say=progress.say,
        ) as logger:
            ending = attempt(
                plan, model, data, hardware, environment, progress, logger.log, started=started
            )
            record = record_of(
                plan, overrides, meaning, data, hardware, environment, ending,
                groups=describe_groups(model, config.train), started_at=started_at,
                wall_time_s=before_s + time.monotonic() - started,
            )  # fmt: skip
            if is_main:
                with storing("paths.results"):
                    if own:
                        write_atomically(own, record.to_json())
                    else:
                        path = records.save_beside(record, config.paths.results)
                so_far_s = before_s + time.monotonic() - started
                runs.write_status(
                    run_dir, record.status, started_at, path.name, started_at, so_far_s
                )
                logger.finish(json.loads(record.to_json()), EXIT_CODES[record.status])
                for text in messages.conclusion(record, path, others):
                    progress.say(text)
    if ending.cause == "SIGUSR2":
        distributed.give_back_to_queue()
    return record


def check_batches(config: RunConfig, num_devices: int) -> None:
    """See that each device has a part of every batch.

    Raises:
        ValueError: a batch is smaller than that.
    """
    sizes = {"train": config.train.batch_size}
    if config.pretrain.objective != "none":
        sizes["pretrain"] = config.pretrain.batch_size
    for name, size in sizes.items():
        if size < num_devices:
            raise ValueError(
                f"{name}.batch_size={size} on {num_devices} devices: expected at least an example "
                "for each"
            )


def first_weights(plan: Plan) -> Classifier:
    """The model as training begins: its seed's weights, or those of `init_from`.

    Raises:
        ValueError: the config does not fit the model, or the weights do not, or they have learned
            from examples that are to be validated or tested on.
    """
    config = plan.config
    checkpoint.seed_everything(config.seed)
    model = make_model(config, plan.task)
    model.encoder.checkpoint_layers = config.hardware.activation_checkpointing
    if config.init_from:
        try:
            source, vocabulary = Path(config.init_from), plan.task.vocabulary_hash()
            if not source.exists() and has_state(plan):
                return model  # which goes on from what the run has left itself
            model.load_state_dict(selected_weights(source, model, vocabulary))
            for earlier in ancestry(source):
                if shared := plan.task.overlaps(earlier.get("task", {})):
                    raise ValueError(shared)
        except ValueError as error:
            raise ValueError(f"init_from={config.init_from}: {error}") from None
    return model


def has_state(plan: Plan) -> bool:
    """Whether the run's folder has a state to go on from."""
    needs_best = plan.config.train.selection != "last"
    folder = plan.run_dir / "checkpoints"
    return checkpoint.load_latest(folder, needs_best=needs_best)[0] is not None


@dataclass(frozen=True)
class Ending:
    """How a training came out."""

    status: Status
    message: str = ""
    result: Result | None = None
    cause: str | None = None  # of an interruption


def attempt(
    plan: Plan,
    model: Classifier,
    data: Dataset,
    hardware: Hardware,
    environment: Mapping[str, Any],
    progress: Progress,
    log: Callable[[list[dict[str, Any]]], None],
    *,
    started: float,
) -> Ending:
    """Train, after pretraining if there is any; whatever stops it becomes a status.

    What is no status of its own leaves a traceback in the run's folder.

    Raises:
        Refused: the folder holds another run.
        Exception: in all processes but the main one, what stopped them.
    """
    config, run_dir = plan.config, plan.run_dir
    identity = {"config_hash": plan.config_hash, "seed": config.seed,
                "data": data.fingerprint, "vocabulary": plan.task.vocabulary_hash()}  # fmt: skip
    software = {key: environment[key] for key in ("torch", "git_commit", "git_dirty")}
    try:
        if config.pretrain.objective != "none":
            model = pretrained(plan, data, hardware, progress, lambda: first_weights(plan),
                               software=software, started=started)  # fmt: skip
        result = train(
            model, data, config.train, hardware, seed=config.seed, run_dir=run_dir,
            identity=identity, progress=progress, log=log, software=software, started=started,
        )  # fmt: skip
    except Diverged as error:
        return Ending("diverged", str(error))
    except Interrupted as error:
        return Ending("interrupted", str(error), cause=error.cause)
    except Refused:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        trace = traceback.format_exc()
        if is_refused(error):
            message = trace = refusal(error, "paths.outputs")
            progress.log = None  # it lies on the same disk
        if distributed.world_size() > 1:
            message, trace = distributed.first_failure(run_dir, message, trace)
        if not distributed.is_main():
            raise
        if trace != message:
            write_atomically(run_dir / "traceback.txt", trace)
            progress.say(trace)
        return Ending("out_of_memory" if is_out_of_memory(error) else "failed", message)
    labels = data.meta["splits"]["val"]["label_histogram"]
    if is_at_chance(result.state.best_accuracy, labels):
        return Ending("at_chance", "validation accuracy never left chance", result)
    return Ending("completed", result=result)


def record_of(
    plan: Plan,
    overrides: list[str],
    meaning: Meaning,
    data: Dataset,
    hardware: Hardware,
    environment: dict[str, Any],
    ending: Ending,
    *,
    groups: list[dict[str, Any]],
    started_at: str,
    wall_time_s: float,
) -> Record:
    """The record of a run that has ended."""
    config, result = plan.config, None
    speed = speed_block(wall_time_s=wall_time_s)
    micro_batch_size = config.hardware.micro_batch_size
    if (came := ending.result) is not None:
        assert came.test is not None
        state, test = came.state, came.test
        result = result_block(
            came.step, val_accuracy=came.val_accuracy, val_loss=came.val_loss,
            num_val=data.num_examples["val"], test_accuracy=test.accuracy, test_loss=test.loss,
            test_correct_N=test.correct_N,
        )  # fmt: skip
        speed = speed_block(
            wall_time_s=wall_time_s, train_time_s=state.train_time_s,
            eval_time_s=state.eval_time_s, steps=state.timed_steps,
            examples=state.timed_examples, tokens=state.timed_tokens, max_lr=state.max_lr,
        )  # fmt: skip
        curve = curve_block(state.curve)
        micro_batch_size = came.micro_batch_size
    else:
        curve = curve_so_far(plan.run_dir / "metrics.jsonl")
    return Record(
        schema_version=records.SCHEMA_VERSION,
        run_id=plan.run_id,
        status=ending.status,
        task=plan.task.name,
        model=plan.model,
        recipe=config.recipe,
        seed=config.seed,
        config=plan.plain,
        config_hash=plan.config_hash,
        overrides=overrides,
        protocol=meaning.protocol,
        data=data_block(
            data.meta["source"], data.fingerprint, data.num_examples, data.meta["splits"]
        ),
        num_params=meaning.num_params,
        baseline_params=meaning.baseline_params,
        apples_to_apples=not meaning.why_not,
        why_not=meaning.why_not,
        result=result,
        curve=curve,
        speed=speed,
        peak_memory_bytes=hardware.peak_memory_bytes(),
        hardware=hardware.describe(micro_batch_size),
        environment=environment,
        started_at=started_at,
        finished_at=runs.now(),
        message=ending.message,
        groups=groups,
        reach=meaning.reach,
        pretraining=block_of(plan.run_dir),
    )


def run_in_processes(plan: Plan, overrides: list[str]) -> Record:
    """Run the job in `hardware.num_devices` processes of this machine and return its record."""

    def own() -> tuple[Path | None, int]:
        path = runs.own_record(plan.run_dir, plan.first_record)
        return path, path.stat().st_mtime_ns if path else 0

    before = own()
    with tempfile.TemporaryDirectory() as folder:
        refused = Path(folder) / "refused"
        try:
            signals = distributed.launch(
                _job_process, plan.config.hardware.num_devices, plan.config, overrides,
                plan.reference, refused,
            )  # fmt: skip
            if signals and own() == before:  # before the training, or without a way to save
                print_line(f"stopped by {signals}", sys.stderr)
                sys.exit(EXIT_CODES["interrupted"])
        except RuntimeError:
            if refused.exists():
                name, message = json.loads(refused.read_text(encoding="utf-8"))
                raise REFUSALS.get(name, ValueError)(message) from None
            if own() == before:
                raise  # ended without a record, e.g. killed
    path, _ = own()
    if path is None:
        raise RuntimeError(f"{plan.run_dir}: the run ended without a record")
    return records.load(path)


def _job_process(
    config: RunConfig, overrides: list[str], reference: Reference, refused: Path
) -> None:
    try:
        record = run_job(config, overrides, reference)
    except (ValueError, OSError, Unwritable) as error:
        write_atomically(refused, json.dumps([type(error).__name__, str(error)]))
        raise
    if distributed.is_main() and record.status in ("failed", "out_of_memory"):
        sys.exit(EXIT_CODES[record.status])  # or the others might wait for this one
