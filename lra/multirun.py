"""What a sweep needs of Hydra: its jobs, checked and timed before the first; who runs them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, read_write
from omegaconf.errors import OmegaConfBaseException

from lra import CONFIGS
from lra.cli import NO_NAME, compose_config, explain, jobs_at_a_time, threads_per_job, typed
from lra.console import first_line, print_line
from lra.files import check_writable, is_refused, refusal
from lra.script import fail
from lra.sweep import end_sweep, launches, named, note_jobs, note_stop, sweep_sizes
from lra.tasks.workers import available_cores, available_memory
from lra.training.stopping import PATIENCE_S, discard_output

if TYPE_CHECKING:
    from lra.plan import Plan

# Bytes that each job is taken to need, before a plan knows more: 2 GiB are usual for a small model
# on ListOps.
MEMORY_OF_A_JOB = 2**31
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # for a whole sweep
told: set[str] = set()  # why jobs of the sweep will be refused, as said before the first


@dataclass(frozen=True)
class JobSettings:
    """Where a job stands in its sweep; number 0 and no folder outside one."""

    number: int
    launch: Path | None  # the folder of outcomes of this start of the sweep
    in_sweep_process: bool  # one job after the other, in the process that the user started
    at_a_time: int | None  # jobs; None where that is a cluster's matter

    @property
    def is_beside_others(self) -> bool:
        """Whether the job has a process that another started, on this machine."""
        is_here = self.at_a_time is not None
        return self.launch is not None and is_here and not self.in_sweep_process

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, a signal to a process that one of several jobs has for itself is the job's.

        Outside, until the next job, it does nothing: the launcher would take the end of its process
        for a crash and kill the others with it.

        Raises:
            KeyboardInterrupt: on the first signal that the job does not catch itself.
        """
        ours = [
            s for s in SIGNALS if self.is_beside_others and signal.getsignal(s) != signal.SIG_IGN
        ]

        def ignore(*_: object) -> None:
            for s in ours:
                signal.signal(s, lambda *_: None)

        def interrupt(*_: object) -> None:
            ignore()  # of a terminal's signal the sweep's own process sends another
            raise KeyboardInterrupt

        for s in ours:
            signal.signal(s, interrupt)
        try:
            yield
        finally:
            ignore()


def job_settings() -> JobSettings:
    """The running job's place."""
    job = HydraConfig.get()
    if job.job.chdir:
        os.chdir(job.runtime.cwd)  # relative paths are taken from there, wherever Hydra went
    if job.mode != RunMode.MULTIRUN:
        return JobSettings(0, None, False, 1)
    at_a_time = 1 if is_alone(job) else jobs_at_a_time(job)
    # Joblib starts no process for one at a time.
    return JobSettings(int(job.job.num), launch_folder(job), at_a_time == 1, at_a_time)


def launch_folder(hydra: Any) -> Path:
    """Where the jobs of this start of a sweep leave their outcomes; one sweep.dir may see many."""
    return Path(hydra.sweep.dir) / f"launch-{hydra.callbacks.summary.launch}"


def launcher_words(words: list[str]) -> list[str]:
    """What `sweep.parallel` of a command stands for: a launcher, and how many jobs at a time.

    Small models gain more from a core for each job than from all cores for one at a time, so
    `auto` is as many as there are jobs, cores, and memory for, on a CPU.
    """
    pairs = [word.lstrip("+").partition("=") for word in reversed(words)]
    # Hydra takes quotes, and a plus sign before a key or a number.
    asked = next((value.strip("+'\" ") for key, _, value in pairs if key == "sweep.parallel"), "")
    if not {"-m", "--multirun"} & set(words) or asked in ("", "null"):
        return []
    overrides = [word for word in words if not word.startswith("-")]
    if other := next((o for o in overrides if re.match("hydra[/.]launcher|hardware=slurm", o)), ""):
        fail(f"sweep.parallel={asked}: {other} says already how jobs are started")
    if asked == "1":
        return []
    if asked == "auto":
        if other := next((o for o in overrides if re.match("hardware=.*gpu", o)), ""):
            fail(
                f"sweep.parallel=auto: counts cores, not what {other} needs; say how many at a time"
            )
        count = min(available_cores(), max(1, available_memory() // MEMORY_OF_A_JOB))
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            with contextlib.suppress(HydraException):  # said when the sweep itself reads it
                (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides(overrides), None)
                count = max(1, min(count, len(jobs)))
    elif asked.isdecimal() and int(asked) > 0:
        count = int(asked)
    else:
        return []  # refused with the config
    return ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={count}"]


def head_of(hydra: Any, num_jobs: int) -> str:
    """How many jobs there are, and how they are started on this machine."""
    count, threads = jobs_at_a_time(hydra), threads_per_job(hydra)
    if count is None or threads is None:
        return f"{num_jobs} job{'s' * (num_jobs != 1)}, one after the other"
    return (
        f"{num_jobs} jobs, {count} at a time with {threads} thread{'s' * (threads > 1)} "
        "each, unless they say otherwise"
    )


def show_plan(
    jobs: list[list[str]], plans: dict[int, Plan], hydra: Any, *, may_lower: bool
) -> list[float | None]:
    """Print what the jobs of a sweep will take; the seconds of each, or none if that fails.

    Args:
        hydra: says how many jobs run at a time.
        may_lower: set fewer there if memory has no room for as many.
    """
    from lra.estimate import fitting, plan_sweep, plan_text

    while True:
        head, count = head_of(hydra, len(jobs)), jobs_at_a_time(hydra) or 1
        try:
            settings, seconds = plan_sweep(
                jobs, plans, at_a_time=count, num_threads=threads_per_job(hydra)
            )
            told.update(s.forecast for s in settings if isinstance(s.forecast, str))
        except Exception as error:  # no sweep ends for want of a plan
            print_line(f"{head}: no estimate ({first_line(error)})")
            return []
        fit = fitting(settings, count) if may_lower else count
        if fit == count:
            print_line(plan_text(settings, seconds, count, head))
            return seconds
        print_line(f"sweep.parallel=auto: memory for {fit} job{'s' * (fit > 1)} at a time")
        set_jobs_at_a_time(hydra, fit)


def set_jobs_at_a_time(hydra: Any, count: int) -> None:
    """Change how many jobs joblib runs side by side, for itself and as its jobs will read it."""
    with read_write(hydra):
        hydra.launcher.n_jobs = count
        hydra.overrides.hydra = [
            word for word in hydra.overrides.hydra if not word.startswith("hydra.launcher.n_jobs=")
        ] + [f"hydra.launcher.n_jobs={count}"]


def stop_jobs_with_sweep(launch: Path) -> None:
    """From now on a signal to this process is for each of its jobs, which run side by side.

    Its launcher would kill them. So each saves the step it is at, those to come are skipped, and
    the sweep ends with its summary. A signal after PATIENCE_S does what it would have done before.
    """
    before = {s: signal.getsignal(s) for s in SIGNALS}
    first: list[float] = []  # when it came

    def pass_on(number: int, _frame: object) -> None:
        if first and time.monotonic() - first[0] > PATIENCE_S:
            signal.signal(number, before[signal.Signals(number)])
            os.kill(os.getpid(), number)
        elif not first:
            first.append(time.monotonic())
            if number == signal.SIGHUP:
                discard_output()
            name = signal.Signals(number).name
            try:
                note_stop(launch, name)
            except OSError as error:  # a full disk keeps no job from saving
                print_line(
                    f"warning: {error}; jobs to come will start in spite of {name}", sys.stderr
                )
            for process in multiprocessing.active_children():
                with contextlib.suppress(OSError):  # ended meanwhile
                    if process.pid is not None:
                        os.kill(process.pid, number)

    for s, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup: a closed terminal is no reason to stop
            signal.signal(s, pass_on)


class SweepSummary(Callback):
    """Hydra calls this around the jobs of a sweep, whatever launches them."""

    def __init__(self, launch: str) -> None:
        self.launch = launch  # jobs find it in their config, see `launch_folder`

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Check all jobs before the first starts; remember where they leave their outcomes.

        Of an error in here Hydra would only warn, and start the jobs without what they need.
        """
        try:
            self.prepare(config)
        except OSError as error:
            key = outputs_key(config.hydra)
            fail(refusal(error, key) if is_refused(error) else str(error))
        except Exception as error:
            fail(f"the sweep did not start: {named(error)}")

    def prepare(self, config: DictConfig) -> None:
        """What happens before the first job."""
        hydra = config.hydra
        overrides = list(hydra.overrides.task)
        jobs: list[list[str]] = []
        plans: dict[int, Plan] = {}
        repeated: dict[int, tuple[int, str]] = {}
        if is_basic(hydra):
            try:
                jobs = sweep_jobs(hydra)
            except HydraException as error:
                fail(explain(error, overrides))
            plans, repeated = check_jobs(jobs, overrides)
        else:
            check_search(hydra)
        launches.append(launch_folder(hydra))
        check_writable(launches[-1], outputs_key(hydra))
        sweep_sizes.append(len(jobs))
        count = jobs_at_a_time(hydra)
        if config.sweep.parallel not in (None, 1) and count is None:
            fail(
                f"sweep.parallel={config.sweep.parallel}: acts on the command line alone, as one "
                "value; give it there"
            )
        seconds: list[float | None] = []
        if plans and config.sweep.plan and (count or is_alone(hydra)):
            is_auto = count is not None and config.sweep.parallel == "auto"
            seconds = show_plan(jobs, plans, hydra, may_lower=is_auto)
        elif count and jobs:
            print_line(head_of(hydra, len(jobs)))
        note_jobs(launches[-1], len(jobs), repeated, seconds)
        if (jobs_at_a_time(hydra) or 1) > 1:
            stop_jobs_with_sweep(launches[-1])

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print how each job ended and keep the worst exit code."""
        end_sweep(launch_folder(config.hydra))
        found = Path(config.hydra.sweep.dir) / "optimization_results.yaml"
        if not is_basic(config.hydra) and found.exists():
            print_line(f"{found}\n{found.read_text().rstrip()}")


def outputs_key(hydra: Any) -> str:
    """The key that chose where this sweep writes."""
    is_given = any(
        word.lstrip("+").startswith("hydra.sweep.dir=") for word in hydra.overrides.hydra
    )
    return "hydra.sweep.dir" if is_given else "paths.outputs"


def is_basic(hydra: Any) -> bool:
    """Whether Hydra's own sweeper makes the jobs: all there are, known before the first."""
    return str(hydra.sweeper._target_).endswith(".BasicSweeper")


def is_alone(hydra: Any) -> bool:
    """Whether jobs run one after the other, in the process that the user started."""
    return str(hydra.launcher._target_).endswith("BasicLauncher")


def sweep_words(hydra: Any) -> list[Override]:
    """What the command line and `hydra.sweeper.params` give to a sweeper.

    Raises:
        HydraException: a word cannot be read.
    """
    params = hydra.sweeper.get("params") or {}
    words = [f"{key}={value}" for key, value in params.items()]
    # With the loader, which knows the choices of each group, `glob` can be read.
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    return parser.parse_overrides([*words, *hydra.overrides.task])


def sweep_jobs(hydra: Any) -> list[list[str]]:
    """The words of every job, as Hydra's own sweeper will make them.

    Raises:
        HydraException: a word cannot be read, or only an optimising sweeper can choose from it.
    """
    state = random.getstate()
    overrides = sweep_words(hydra)
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    random.setstate(state)  # so that the sweeper will shuffle in the same way
    if not jobs:
        empty = next(o for o in overrides if o.is_sweep_override() and not [*o.sweep_iterator()])
        fail(f"{empty.input_line}: no value in it, so the sweep has no jobs")
    return jobs


def check_jobs(
    jobs: list[list[str]], overrides: list[str]
) -> tuple[dict[int, Plan], dict[int, tuple[int, str]]]:
    """Say which jobs of a sweep will be refused, or are the same run, before the first has run.

    Returns:
        By number, the plans of jobs that train; of jobs that would be the run of an earlier one,
        that one's number and the run's id.
    """
    plans: dict[int, Plan] = {}
    refused: dict[str, list[int]] = {}
    first: dict[Path, int] = {}  # by the run's folder
    repeated: dict[int, tuple[int, str]] = {}
    for number, words in enumerate(jobs):
        plan, message = check_job(words, overrides)
        if plan is None:
            refused.setdefault(message, []).append(number + 1)
        elif plan.config.checkpoint is None:
            earlier = first.setdefault(plan.run_dir, number)
            if earlier == number:
                plans[number] = plan
            else:
                repeated[number] = earlier, plan.run_id
    hopeless = sum(map(len, refused.values())) == len(jobs)
    for message, numbers in refused.items():
        told.add(message)
        if len(refused) == 1 and hopeless:
            fail(message if len(jobs) == 1 else f"all {len(jobs)} jobs: {message}")
        which = f"job {numbers[0]} ({' '.join(jobs[numbers[0] - 1])})"
        if len(numbers) > 1:
            which = f"{len(numbers)} of {len(jobs)} jobs ({', '.join(map(str, numbers))})"
        print_line(f"warning: {which} will be refused: {message}", sys.stderr)
    if hopeless:
        fail("no job of this sweep could run, see above")
    for earlier, name in dict.fromkeys(repeated.values()):
        numbers = [number for number, same in repeated.items() if same == (earlier, name)]
        ours, theirs = (
            " ".join(word for word in jobs[one] if word not in jobs[other])
            for one, other in ((numbers[0], earlier), (earlier, numbers[0]))
        )
        which = f"job {numbers[0] + 1} ({ours}) is"
        if len(numbers) > 1:
            which = f"{len(numbers)} jobs ({', '.join(str(n + 1) for n in numbers)}) are"
        tail = "; how it is computed is no part of a run, so both need paths.outputs of their own"
        print_line(
            f"note: {which} skipped: the same run as job {earlier + 1} ({theirs}), {name}"
            + (tail if "hardware" in ours else ""),
            sys.stderr,
        )
    return plans, repeated


def check_job(words: list[str], overrides: list[str]) -> tuple[Plan | None, str]:
    """What a job will run, or why it will be refused."""
    from lra.build import make_model, make_predictor
    from lra.plan import Reference, make_plan

    try:
        plan = make_plan(typed(compose_config(words)), Reference(None, {}))
        model = make_model(plan.config, plan.task)
        if plan.config.pretrain.objective != "none":
            make_predictor(plan.config, model)
        return plan, ""
    except HydraException as error:  # Hydra itself would end the sweep with it
        fail(explain(error, overrides))
    except (OmegaConfBaseException, ValueError) as error:
        if NO_NAME in str(error):  # so would it with this
            fail(explain(error, words))
        return None, explain(error, words)
    except Exception as error:  # a model that cannot be built, which is no matter of other jobs
        return None, named(error)


def check_search(hydra: Any) -> None:
    """Check what can be known of the jobs that an optimising sweeper will choose."""
    direction = str(hydra.sweeper.get("direction", "maximize")).rpartition(".")[2]
    if direction != "maximize":
        fail(
            f"hydra.sweeper.direction={direction}: a job's worth is the validation accuracy of "
            "its selected step; expected maximize"
        )
    first: dict[str, str] = {}  # the words of a job, by key
    last: dict[str, str] = {}
    fixed: set[str] = set()
    try:
        overrides = sweep_words(hydra)
    except HydraException as error:  # such as params in a syntax of the sweeper's own
        print_line(f"note: no job was checked beforehand ({first_line(error)})", sys.stderr)
        return
    for override in overrides:
        key, value = override.get_key_element(), override.value()
        if isinstance(value, IntervalSweep):
            values = [str(value.start), str(value.end)]
        elif override.is_sweep_override():
            values = list(override.sweep_string_iterator()) or ["null"]
        else:
            values = [override.get_value_element_as_str()]
            fixed.add(f"{key}={values[0]}")
        first[key], last[key] = f"{key}={values[0]}", f"{key}={values[-1]}"
    print_line(
        "note: which jobs there will be is the sweeper's choice, so only the first and the last "
        "value of each range are checked beforehand; every job is checked before it trains",
        sys.stderr,
    )
    for words in (list(first.values()), list(last.values())):
        if message := check_job(words, list(hydra.overrides.task))[1]:
            chosen = " ".join(word for word in words if word not in fixed)
            print_line(f"warning: a job with {chosen} will be refused: {message}", sys.stderr)
