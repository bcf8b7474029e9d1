"""The only module that knows Hydra: composed configs in, typed configs and clear messages out."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lra.config import RunConfig, fill, flatten, nearest
from lra.files import check_writable
from lra.script import EXIT_INTERRUPTED, fail, unread
from lra.sweep import Outcome, first_line, note_size, outcomes, summary
from lra.task import available_cores

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
GROUPS = ("task", "model", "recipe", "hardware", "logger", "experiment")
exit_codes: list[int] = []  # of the jobs that ended
sweep_dirs: list[Path] = []  # of the sweep that this process launched
sweep_sizes: list[int] = []  # its number of jobs


def typed(cfg: DictConfig) -> RunConfig:
    """A composed config as plain values, checked.

    Raises:
        ValueError: an unknown key, a wrong type or a value out of range; names the key.
    """
    if HydraConfig.initialized():
        job = HydraConfig.get()
        for override in job.overrides.hydra:
            if complaint := unknown_hydra_key(job, override):
                raise ValueError(complaint)
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    config = fill(RunConfig, values)
    if config.hardware.num_threads is None and (threads := threads_per_job()):
        config = replace(config, hardware=replace(config.hardware, num_threads=threads))
    return config


def compose_config(overrides: list[str]) -> DictConfig:
    """Compose from `configs/`, inside a running Hydra program or outside one."""
    if GlobalHydra.instance().is_initialized():
        return compose("config", overrides=overrides)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", overrides=overrides)


def explain(error: Exception, overrides: list[str]) -> str:
    """One message for what Hydra refused: the key, what is allowed and the nearest known name."""
    several = next((o for o in overrides if re.match(r"(experiment|task|recipe)=\[", o)), None)
    if several:
        return f"{several}: a list, expected one choice; -m with commas runs one after the other"
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        quoted = value.replace("'", "\\'")
        return (
            f"{error.override}: cannot be read as it stands; a value with brackets or other signs "
            f"wants two pairs of quotes: \"{key}='{quoted}'\""
        )
    if "hydra/launcher" in str(error):
        extra = "parallel" if "joblib" in str(error) else "slurm"
        return f"{str(error).splitlines()[0]}; pip install 'lra-harness[{extra}]' brings it"
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={choice}: not a choice; {nearest(choice, error.options)}"
    match = re.search(r"Could not override '([^']+)'", str(error))
    if match:
        key = match[1].lstrip("+~")
        choices = [o for o in overrides if re.fullmatch(rf"({'|'.join(GROUPS)})=\w+", o)]
        given = next((o for o in overrides if o.lstrip("+~").startswith(f"{key}=")), key)
        if key.startswith("hydra."):
            return unknown_hydra_key(OmegaConf.structured(HydraConf), given) or (
                f"{given}: unknown key"
            )
        section, _, name = key.rpartition(".")
        known = list(flatten(_plain(compose_config(choices))))
        inside = [k.removeprefix(f"{section}.") for k in known if k.startswith(f"{section}.")]
        if name in inside:
            return f"{given}: not a key of every choice in this sweep"
        top = sorted({k.split(".")[0] for k in known} | set(GROUPS))
        return f"{given}: unknown key; {nearest(name, inside or top)}"
    return str(error)


def unknown_hydra_key(hydra_config: Any, override: str) -> str | None:
    """What is wrong with the key of `[+]hydra.a.b=value`, if a class that Hydra types lacks it.

    Hydra itself lets a key in that stands behind a plus sign, although nothing reads it.
    """
    node = hydra_config
    for name in override.lstrip("+~").partition("=")[0].split(".")[1:]:
        kind: Any = OmegaConf.get_type(node) if OmegaConf.is_config(node) else None
        if not dataclasses.is_dataclass(kind):
            return None  # of free form, such as the environment of a job
        known = [field.name for field in dataclasses.fields(kind)]
        if name not in known:
            return f"{override}: unknown key; {nearest(name, known)}"
        node = OmegaConf.select(node, name, throw_on_resolution_failure=False)
    return None


def _plain(cfg: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    return plain


@dataclass(frozen=True)
class JobSettings:
    """Where a job stands in its sweep; number 0 and no folder outside one."""

    number: int
    sweep_dir: Path | None
    in_sweep_process: bool  # one job after the other, in the process that the user started


def job_settings() -> JobSettings:
    """The running job's place."""
    job = HydraConfig.get()
    if job.job.chdir:
        os.chdir(job.runtime.cwd)  # relative paths are taken from there, wherever Hydra went
    if job.mode != RunMode.MULTIRUN:
        return JobSettings(0, None, False)
    basic = str(job.launcher._target_).endswith("BasicLauncher")
    return JobSettings(int(job.job.num), Path(job.sweep.dir), basic)


def threads_per_job() -> int | None:
    """Threads for one of several jobs that run side by side; None if they do not."""
    launcher: Any = HydraConfig.get().launcher if HydraConfig.initialized() else {}
    if not str(launcher.get("_target_", "")).endswith("JoblibLauncher"):
        return None
    cores = available_cores()
    jobs = int(launcher.n_jobs)
    return max(1, cores // (jobs if jobs > 0 else cores))


class SweepSummary(Callback):
    """Hydra calls this around the jobs of a sweep, whatever launches them."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Check all jobs before the first starts; remember where they leave their outcomes."""
        sweep_dirs.append(Path(config.hydra.sweep.dir))
        try:
            check_writable(sweep_dirs[-1], "paths.outputs")
        except OSError as error:
            fail(str(error))  # Hydra would only warn of an error in a callback
        sweep_sizes.append(check_jobs(list(config.hydra.overrides.task)))
        note_size(sweep_dirs[-1], sweep_sizes[-1])

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print how each job ended and keep the worst exit code."""
        found = print_summary(Path(config.hydra.sweep.dir))
        exit_codes.extend(o.exit_code for o in found if o.status != "busy")


def print_summary(sweep_dir: Path) -> list[Outcome]:
    """Print how the jobs of a sweep ended so far, and return it."""
    found = outcomes(sweep_dir)
    print(summary(found, max(len(found), *sweep_sizes, 0)), flush=True)
    return found


def check_jobs(overrides: list[str]) -> int:
    """Say which jobs of a sweep will be refused, before the first has run; return their number."""
    from lra.build import make_model, make_task

    choices = []
    for override in OverridesParser.create().parse_overrides(overrides):
        is_discrete = override.is_sweep_override() and override.is_discrete_sweep()
        values = override.sweep_string_iterator() if is_discrete else ()
        choices.append(
            [f"{override.get_key_element()}={value}" for value in values]
            or [str(override.input_line)]
        )
    jobs = [list(words) for words in itertools.product(*choices)]
    for number, words in enumerate(jobs):
        try:
            config = typed(compose_config(words))
            make_model(config, make_task(config))
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            print(
                f"warning: job {number + 1} ({' '.join(words)}) will be refused: "
                f"{explain(error, words)}",
                file=sys.stderr,
            )
    return len(jobs)


def run_program(main: Callable[[], Any]) -> None:
    """Run a Hydra program; report user errors as one message and leave with a code of its own."""
    # Let errors out of Hydra, which would print its own advice; they are worded here.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    os.environ.setdefault("LRA_SWEEP_ID", str(os.getpid()))
    # Threads that wait by spinning slow each other many times over when a core is shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _terminate)
    overrides = [a for a in sys.argv[1:] if not a.startswith("-")]
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        unread()
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error, overrides))
    except (ValueError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if type(error).__module__.startswith("yaml."):
            fail(" ".join(str(error).split()))
        if "srun" in str(error):
            fail(f"hardware=slurm: {first_line(error)}; start it where Slurm's commands are")
        if not sweep_dirs:
            raise
        # Jobs catch their own errors, so this is a launcher's whose job was killed.
        for sweep_dir in sweep_dirs:
            print_summary(sweep_dir)
        print(
            f"error: a job ended without an outcome, killed from outside perhaps or for want of "
            f"memory ({type(error).__name__}: {first_line(error)}); the same command goes on with "
            "what is missing",
            file=sys.stderr,
        )
        sys.exit(1)
    sys.exit(max(exit_codes, default=0))


def _terminate(number: int, _frame: object) -> None:
    with contextlib.suppress(OSError):
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr)
    sys.exit(EXIT_INTERRUPTED)
