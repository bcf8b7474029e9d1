"""Train, evaluate and record one entry: python run.py model=luna task=listops"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

from lra.script import EXIT_USAGE  # lra comes first: it says what to do where packages are missing

# isort: split
import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lra.cli import (
    CONFIGS,
    check_dashes,
    compose_config,
    exit_codes,
    explain,
    job_settings,
    print_summary,
    run_program,
    told,
    typed,
)
from lra.files import Unwritable
from lra.sweep import Outcome, first_line, has_failed, note, position


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def main(cfg: DictConfig) -> None:
    """One job. Its failure is recorded and does not stop the other jobs of a sweep."""
    settings = job_settings()
    if settings.sweep_dir is not None:
        in_turn = settings.in_sweep_process
        print(position(settings.sweep_dir, settings.number, in_turn=in_turn), flush=True)
    try:
        outcome = run(cfg, settings.number, settings.sweep_dir)
    except (ValueError, OSError) as error:
        message = explain(error, list(HydraConfig.get().overrides.task))
        if message not in told:
            print(f"error: {message}", file=sys.stderr, flush=True)
        status = "busy" if type(error).__name__ == "Busy" else "refused"
        outcome = Outcome(settings.number, status, EXIT_USAGE, message=message.partition("\n")[0])
    except Unwritable as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        outcome = Outcome(settings.number, "failed", 1, message=first_line(error))
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(settings.number, "failed", 1, message=first_line(error))
    exit_codes.append(outcome.exit_code)
    if settings.sweep_dir is not None:
        note(settings.sweep_dir, outcome)
        if outcome.status == "interrupted" and settings.in_sweep_process:
            # The signal was meant for the whole sweep, whose end Hydra does not announce then.
            print_summary(settings.sweep_dir)
            sys.exit(outcome.exit_code)


def run(cfg: DictConfig, number: int, sweep_dir: Path | None) -> Outcome:
    """Check the config, then run, or evaluate a checkpoint."""
    config = typed(cfg)
    if config.sweep.fail_fast and sweep_dir is not None and has_failed(sweep_dir):
        return Outcome(number, "skipped", 0, message="an earlier job failed (sweep.fail_fast)")
    if config.hardware.slurm is not None and sweep_dir is None:
        raise ValueError(
            "hardware=slurm submits jobs, which takes -m: python run.py -m hardware=slurm"
        )
    from lra.job import EXIT_CODES, run_job
    from lra.plan import Reference
    from lra.results.leaderboard import setting_text
    from lra.runs import now
    from lra.trained import evaluate_checkpoint

    overrides = list(HydraConfig.get().overrides.task)
    if config.checkpoint is not None:
        evaluate_checkpoint(config, overrides)
        return Outcome(number, "evaluated", 0, message=config.checkpoint)
    choices = HydraConfig.get().runtime.choices
    published = [f"{group}={choices[group]}" for group in ("task", "model", "recipe")]
    baseline = OmegaConf.to_container(OmegaConf.load(CONFIGS / "model" / "softmax.yaml"))
    reference = Reference(typed(compose_config(published)), baseline)
    started_at, started = now(), time.monotonic()
    record = run_job(config, overrides, reference, number)
    accuracy = record.result.test.accuracy if record.result else None
    trained_s = time.monotonic() - started if record.started_at >= started_at else None
    return Outcome(
        number, record.status, EXIT_CODES[record.status], record.run_id, accuracy, record.message,
        setting_text(record), trained_s,
    )  # fmt: skip


if __name__ == "__main__":
    check_dashes(sys.argv[1:])
    run_program(main)
