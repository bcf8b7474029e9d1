"""What a sweep will take, said before its first job: a line for each setting, and the whole."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lra import runs
from lra.console import aligned, duration, first_line, print_line
from lra.plan import Plan
from lra.pretraining import WEIGHTS, folder_name, identity_of
from lra.results import records
from lra.speed.cells import in_own_process
from lra.speed.forecast import Forecast, batches_of
from lra.sweep import makespan
from lra.tasks.cache import Dataset, prepare
from lra.tasks.workers import available_memory
from lra.training import checkpoint

# Keys of `train` and `pretrain` that decide how long a run takes.
LASTING = ("num_steps", "batch_size", "eval_every", "length_bucketing", "pad_to_max", "objective")
MAX_LINES = 20
KILLED = "its process was ended, for want of memory or after a minute"


@dataclass(frozen=True)
class Setting:
    """Jobs that take the same: they differ in their seed, a rate or the like."""

    name: str
    numbers: list[int]  # of the jobs, from 0
    num_finished: int
    forecast: Forecast | str  # or why there is none; empty if it is not needed

    @property
    def cells(self) -> tuple[str, ...]:
        """Its line of the plan."""
        finished = f" ({self.num_finished} finished)" if self.num_finished else ""
        jobs = f"{len(self.numbers)}{finished}"
        if not isinstance(self.forecast, Forecast):
            return self.name, jobs, "not estimated" if self.forecast else "-", ""
        memory = f"{self.forecast.memory_bytes / 2**30:.1f} GiB"
        first = self.forecast.pretrain_seconds
        about = f"about {duration(first + self.forecast.seconds)}"
        return self.name, jobs, about + (f", phase 1 {duration(first)}" if first else ""), memory


def settings_of(
    jobs: Sequence[Sequence[str]], plans: Mapping[int, Plan], left: Mapping[int, float]
) -> list[Setting]:
    """The jobs that have a plan by what they take, without forecasts.

    `left` is how much of each job is still to be done, by number.
    """
    alike: dict[str, list[int]] = {}
    for number, plan in plans.items():
        parts: dict[str, Any] = {key: plan.plain[key] for key in ("task", "model", "shape")}
        parts["hardware"] = plan.plain["hardware"]
        for phase in ("train", "pretrain"):
            keys = plan.plain.get(phase, {})
            parts[phase] = {key: keys[key] for key in LASTING if key in keys}
        alike.setdefault(json.dumps(parts, sort_keys=True), []).append(number)
    shared = set.intersection(*(set(jobs[number]) for number in plans)) if plans else set()
    found = []
    for numbers in alike.values():
        first, common = plans[numbers[0]], set.intersection(*(set(jobs[n]) for n in numbers))
        own = [word for word in jobs[numbers[0]] if word in common - shared
               and not word.startswith(("model=", "task="))]  # fmt: skip
        name = " ".join([first.model, first.task.name, *own])
        found.append(Setting(name, numbers, sum(not left[n] for n in numbers), ""))
    return found


def share_left(plan: Plan) -> float:
    """How much of a run is still to be done, of its steps: 0 if it is finished, 1 if all is.

    Self-pretraining is not part of it; see `first_phases`.
    """
    own = runs.own_record(plan.run_dir, plan.first_record)
    with contextlib.suppress(ValueError):  # a record that the run will replace, or refuse
        if own is not None and records.load(own).result is not None:
            return 0.0
    return steps_left(plan.run_dir, plan.config.train.num_steps)


def steps_left(folder: Path, num_steps: int) -> float:
    """Share of the steps that the newest checkpoint of a folder leaves to do."""
    newest = checkpoint.checkpoints(folder / "checkpoints")[:1]
    done = checkpoint.step_of(newest[0]) if newest else 0
    return max(0.0, 1 - done / num_steps)


def first_phases(plans: Mapping[int, Plan]) -> dict[int, float]:
    """How much of its self-pretraining each job still has to do, by number.

    Jobs that share a first phase have it done by the first of them. Data have to be there: which
    they are is in the name of the phase's folder.
    """
    prepared: dict[str, Dataset] = {}
    shares: dict[int, float] = {}
    folders: set[Path] = set()
    for number, plan in sorted(plans.items()):
        shares[number], pretrain = 0.0, plan.config.pretrain
        if pretrain.objective == "none" or (plan.run_dir / WEIGHTS).exists():
            continue
        key = json.dumps([plan.plain["task"], str(plan.config.paths)], sort_keys=True)
        if key not in prepared:
            prepared[key] = prepare(plan.task, plan.config.paths.cache)
        folder = plan.config.paths.outputs / folder_name(plan, identity_of(plan, prepared[key]))
        if folder not in folders and not (folder / "result.json").exists():
            shares[number] = steps_left(folder, pretrain.num_steps)
        folders.add(folder)
    return shares


def forecasts(
    configs: Mapping[str, Mapping[str, Any]], at_a_time: int
) -> dict[str, Forecast | str]:
    """The mean of what processes side by side measure for each config, or why there is none."""
    answer = in_own_process({"configs": configs, "at_a_time": at_a_time})
    found: dict[str, Forecast | str] = {}
    for name in configs:
        ended = [answer.get(f"{name} {number}", {"error": KILLED}) for number in range(at_a_time)]
        errors = [str(one["error"]) for one in ended if "error" in one]
        found[name] = errors[0] if errors else Forecast(
            sum(one["seconds"] for one in ended) / at_a_time,
            max(one["memory_bytes"] for one in ended),
            sum(one["pretrain_seconds"] for one in ended) / at_a_time,
        )  # fmt: skip
    return found


def plan_sweep(
    jobs: Sequence[Sequence[str]],
    plans: Mapping[int, Plan],
    *,
    at_a_time: int,
    num_threads: int | None,
) -> tuple[list[Setting], list[float | None]]:
    """Time a few steps of each setting of a sweep.

    Args:
        jobs: the words of each.
        plans: by number, those of jobs that train: not refused, nor the run of an earlier job.
        at_a_time: jobs that run side by side.
        num_threads: of a job that says nothing else; None: as PyTorch chooses.

    Returns:
        The settings, and the seconds that each job still takes; None where that is not known.

    Raises:
        Exception: the process that measures has failed as a whole.
    """
    left = {number: share_left(plan) for number, plan in plans.items()}
    settings = settings_of(jobs, plans, left)
    at_a_time = max(1, min(at_a_time, sum(share > 0 for share in left.values())))
    configs: dict[str, Mapping[str, Any]] = {}
    found: dict[str, Forecast | str] = {}
    for i, setting in enumerate(settings):
        if setting.num_finished < len(setting.numbers):
            plan = plans[setting.numbers[0]]
            hardware = plan.plain["hardware"]
            threads = hardware["num_threads"] or num_threads
            configs[str(i)] = plan.plain | {"hardware": hardware | {"num_threads": threads}}
            try:
                # Prepares data, as the job would, and says so; if all are of one length, then only
                # where the folder of the first phase is named after them.
                batches_of(plan.task, plan.config)
                if plan.config.pretrain.objective != "none":
                    prepare(plan.task, plan.config.paths.cache)
            except (ValueError, OSError) as error:
                found[str(i)] = first_line(error)
                del configs[str(i)]
    if configs:
        print_line("plan: timing a few steps (sweep.plan=false leaves it out)")
        found |= forecasts(configs, at_a_time)
    settings = [replace(s, forecast=found.get(str(i), "")) for i, s in enumerate(settings)]
    known = {n: s.forecast for s in settings if isinstance(s.forecast, Forecast) for n in s.numbers}
    first = first_phases({n: plans[n] for n in known if left[n]})
    seconds: list[float | None] = [0.0] * len(jobs)
    for number, share in left.items():
        if one := known.get(number):
            seconds[number] = share * one.seconds + first.get(number, 0.0) * one.pretrain_seconds
        elif share:
            seconds[number] = None
    return settings, seconds


def memory_needed(settings: Sequence[Setting], at_a_time: int) -> int:
    """Bytes for those jobs that need most, of as many as run side by side."""
    each = [
        setting.forecast.memory_bytes
        for setting in settings if isinstance(setting.forecast, Forecast)
        for _ in range(len(setting.numbers) - setting.num_finished)
    ]  # fmt: skip
    return sum(sorted(each, reverse=True)[:at_a_time])


def fitting(settings: Sequence[Setting], at_a_time: int) -> int:
    """How many of at most `at_a_time` jobs the free memory has room for side by side; at least one.

    Whichever of them meet.
    """
    free = available_memory()
    while at_a_time > 1 and memory_needed(settings, at_a_time) > free:
        at_a_time -= 1
    return at_a_time


def plan_text(
    settings: Sequence[Setting], seconds: Sequence[float | None], at_a_time: int, head: str
) -> str:
    """One line a setting; how many jobs (`head` says so) take how long together; warnings."""
    rows = [("setting", "jobs", "time each", "memory each"), *(s.cells for s in settings)]
    lines = aligned(rows[: MAX_LINES + 1])
    if len(rows) > MAX_LINES + 1:
        lines.append(f"and {len(rows) - MAX_LINES - 1} settings more")
    reasons = [s.forecast for s in settings if isinstance(s.forecast, str) and s.forecast]
    lines += [f"not estimated: {why}" for why in dict.fromkeys(reasons)]
    made = [s.forecast for s in settings if isinstance(s.forecast, Forecast)]
    if any(forecast.pretrain_seconds for forecast in made):
        beside = "; jobs beside the one that does it wait for it" * (at_a_time > 1)
        lines.append(
            f"phase 1 is in the sum once for jobs that share it, and not where it is done{beside}"
        )
    about = f"about {duration(makespan(seconds, at_a_time))}"
    if None in seconds:
        about = f"{about} and what is not estimated" if made else "no estimate"
    lines.append(f"{head}: {about if any(s != 0 for s in seconds) else 'all finished'}")
    needed = memory_needed(settings, at_a_time)
    if needed > (free := available_memory()):
        lines.append(
            f"warning: {at_a_time} jobs at a time may need {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free"
        )
    return "\n".join(lines)
