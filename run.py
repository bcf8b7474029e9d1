"""Train, evaluate and record one entry: python run.py model=luna task=listops"""

from __future__ import annotations

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lra.cli import CONFIGS, EXIT_USAGE, compose_config, run_program, typed

exit_codes: list[int] = []  # of the jobs that ran in this process


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def main(cfg: DictConfig) -> None:
    """One job. Its failure is recorded and does not stop the other jobs of a sweep."""
    from lra.job import EXIT_CODES, Reference, run_job

    try:
        config = typed(cfg)
        choices = HydraConfig.get().runtime.choices
        published = [f"{group}={choices[group]}" for group in ("task", "model", "recipe")]
        baseline = OmegaConf.to_container(OmegaConf.load(CONFIGS / "model" / "softmax.yaml"))
        reference = Reference(typed(compose_config(published)), baseline)
        record = run_job(config, list(HydraConfig.get().overrides.task), reference)
        exit_codes.append(EXIT_CODES[record.status])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        exit_codes.append(EXIT_USAGE)


if __name__ == "__main__":
    run_program(main, lambda: max(exit_codes, default=0))
