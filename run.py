"""Train, evaluate and record one entry: python run.py model=luna task=listops"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from pathlib import Path

# lra comes first: it says what to do where packages are missing.
from lra.script import EXIT_INTERRUPTED, EXIT_USAGE, exit_codes, run_script

# isort: split
if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv[1:]):
    from lra.help import help_text

    run_script(lambda: print(help_text()))

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lra.cli import (
    CONFIGS,
    check_dashes,
    compose_config,
    explain,
    run_program,
    settings_first,
    typed,
)
from lra.console import first_line, print_line
from lra.files import Unwritable
from lra.multirun import JobSettings, job_settings, launcher_words, told
from lra.sweep import (
    Outcome,
    has_failed,
    named,
    note,
    objective,
    position,
    print_summary,
    same_as,
    stopped_by,
)

ROOT = Path(__file__).resolve().parent


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def main(cfg: DictConfig) -> float | None:
    """One job. Its failure is recorded and does not stop the other jobs of a sweep."""
    check_copies()
    settings = job_settings()
    with settings.signals():
        outcome = attempt(cfg, settings)
    if settings.launch is None:
        exit_codes.append(outcome.exit_code)
    else:  # whose end reads the codes of all jobs, wherever they ran
        note(settings.launch, outcome)
        if outcome.ends_sweep and settings.in_sweep_process:
            # Hydra does not announce the end of the sweep then.
            print_summary(settings.launch)
            sys.exit(outcome.exit_code)
    return objective(outcome)


def attempt(cfg: DictConfig, settings: JobSettings) -> Outcome:
    """Run a job unless its sweep was stopped; what goes wrong is said and becomes its outcome."""
    if settings.launch is not None:
        if name := stopped_by(settings.launch):
            why = f"the sweep: stopped by {name}"
            return Outcome(settings.number, "skipped", EXIT_INTERRUPTED, message=why)
        text = position(settings.launch, settings.number, at_a_time=settings.at_a_time)
        print_line(text)
    try:
        return run(cfg, settings.number, settings.launch)
    except (ValueError, OSError) as error:
        message = explain(error, list(HydraConfig.get().overrides.task))
        if message not in told:
            print_line(f"error: {message}", sys.stderr)
        from lra.runs import Busy

        status = "busy" if isinstance(error, Busy) else "refused"
        return Outcome(settings.number, status, EXIT_USAGE, message=message.partition("\n")[0])
    except Unwritable as error:
        print_line(f"error: {error}", sys.stderr)
        return Outcome(settings.number, "failed", 1, message=first_line(error))
    except Exception as error:
        from lra.job import EXIT_CODES
        from lra.training.gradient import is_out_of_memory

        if is_out_of_memory(error):  # before the training, which leaves a record of it
            status, message = "out_of_memory", named(error)
            if message not in told:
                print_line(f"error: {message}", sys.stderr)
            return Outcome(settings.number, status, EXIT_CODES[status], message=message)
        print_line(traceback.format_exc().rstrip(), sys.stderr)
        return Outcome(settings.number, "failed", 1, message=first_line(error))
    except KeyboardInterrupt:  # before the training, which catches signals itself
        if not settings.is_beside_others:
            raise
        return Outcome(
            settings.number, "interrupted", EXIT_INTERRUPTED, message="nothing was saved"
        )


def check_copies() -> None:
    """Refuse code of another place, such as an older copy that a job found in site-packages.

    Launchers hand this file itself to their jobs, but what it imports is looked up anew there.
    """
    for name in ("lra", "models"):
        found = Path(importlib.import_module(name).__path__[0]).resolve()
        if found != ROOT / name:
            raise ValueError(
                f"{name} is imported from {found}, but this is the run.py of {ROOT}: another copy, "
                f"with numbers of its own; install that folder with pip install -e {ROOT}, and "
                "start from a folder without a copy"
            )


def run(cfg: DictConfig, number: int, launch: Path | None) -> Outcome:
    """Check the config, then run, or evaluate a checkpoint."""
    config = typed(cfg)
    if config.sweep.fail_fast and launch is not None and has_failed(launch):
        return Outcome(number, "skipped", 0, message="an earlier job failed (sweep.fail_fast)")
    if config.hardware.slurm is not None and launch is None:
        raise ValueError(
            "hardware=slurm submits jobs, which takes -m: python run.py -m hardware=slurm"
        )
    from lra.job import EXIT_CODES, run_job
    from lra.plan import Reference, make_plan
    from lra.results.settings import setting_text
    from lra.runs import now
    from lra.trained import evaluate_checkpoint

    overrides = list(HydraConfig.get().overrides.task)
    if config.checkpoint is not None:
        status = evaluate_checkpoint(config, overrides)
        name = "evaluated" if status == "completed" else status
        return Outcome(number, name, EXIT_CODES[status], message=config.checkpoint)
    if launch is not None:
        run_id = make_plan(config, Reference(None, {})).run_id
        if (earlier := same_as(launch, number, run_id)) is not None:
            message = f"the same run as job {earlier + 1}"
            return Outcome(number, "skipped", 0, run_id, message=message)
    choices = HydraConfig.get().runtime.choices
    published = [f"{group}={choices[group]}" for group in ("task", "model", "recipe")]
    baseline = OmegaConf.to_container(OmegaConf.load(CONFIGS / "model" / "softmax.yaml"))
    reference = Reference(typed(compose_config(published)), baseline)
    started_at, started = now(), time.monotonic()
    record = run_job(config, overrides, reference, number)
    test = record.result.test.accuracy if record.result else None
    val = record.result.val.accuracy if record.result else None
    trained_s = time.monotonic() - started if record.started_at >= started_at else None
    return Outcome(
        number, record.status, EXIT_CODES[record.status], record.run_id, test, record.message,
        val, setting_text(record), trained_s,
        ends_sweep=record.status == "interrupted" and not record.timed_out,
    )  # fmt: skip


if __name__ == "__main__":
    check_dashes(sys.argv[1:])
    sys.argv[1:] = settings_first(sys.argv[1:] + launcher_words(sys.argv[1:]))
    run_program(main)
