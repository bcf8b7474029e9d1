"""What a run is and will mean, before it computes anything: identity, protocol, comparability."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lra.build import make_model, make_task, model_name, num_params, resolved
from lra.config import NO_NUMBERS, RunConfig, config_hash
from lra.results import records
from lra.results.records import Protocol, Record
from lra.values import flatten

if TYPE_CHECKING:
    from lra.tasks.task import Task
    from models.classifier import Classifier

# Where data lie says nothing about what a number means.
NOT_COMPARED = ("task.source", "task.path", "task.strict", *(f"train.{k}" for k in NO_NUMBERS))


@dataclass(frozen=True)
class Reference:
    """What a run is compared with: the recipe as published, and the softmax model."""

    config: RunConfig | None
    baseline_model: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """A run that is allowed by its config: who it is, and where its files go."""

    config: RunConfig
    reference: Reference
    plain: dict[str, Any]  # the config with all defaults, as it is hashed and recorded
    task: Task
    model: str
    config_hash: str

    @property
    def run_id(self) -> str:
        """The name of the run's folder and of its first record."""
        seed, digest = self.config.seed, self.config_hash[:8]
        return f"{self.task.name}-{self.model}-seed{seed}-{digest}"

    @property
    def run_dir(self) -> Path:
        """Where the run keeps what it needs to go on."""
        return self.config.paths.outputs / self.run_id

    @property
    def first_record(self) -> Path:
        """Where the first record of this run has its place."""
        return records.record_path(
            self.config.paths.results, self.task.name, self.model, self.run_id
        )


@dataclass(frozen=True)
class Meaning:
    """What a run's number will mean."""

    protocol: Protocol
    num_params: int
    baseline_params: int  # of the softmax model
    why_not: list[str]  # reasons why the run is not comparable
    reach: list[int]  # positions to either side that each layer reads at most; empty: it may all


def make_plan(config: RunConfig, reference: Reference) -> Plan:
    """Settle what a run is.

    Raises:
        ValueError: an unknown key, a wrong type or a value out of range.
    """
    plain = resolved(config)
    task = make_task(config)
    return Plan(config, reference, plain, task, model_name(config.model), config_hash(plain))


def meaning_of(plan: Plan, model: Classifier, num_examples: Mapping[str, int]) -> Meaning:
    """What the number will mean of this model on data of these sizes."""
    params = num_params(model)
    why_not, baseline = compare(plan, params)
    protocol = protocol_of(plan, num_examples)
    return Meaning(protocol, params, baseline, why_not, model.encoder.reach or [])


def compare(plan: Plan, params: int) -> tuple[list[str], int]:
    """LRA's rule: the recipe's own sizes and settings, at most 10 % more parameters than softmax.

    Returns:
        Reasons why a run is not comparable (none if it is), and the softmax model's parameters.
    """
    import torch

    # On the meta device it would draw no numbers, but import PyTorch's compiler, for a second.
    with torch.random.fork_rng(devices=[]):
        baseline = num_params(make_model(plan.config, plan.task, plan.reference.baseline_model))
    why_not = changes(plan, ("shape.", "train.", "task."), "recipe")
    if plan.plain["shape"]["positions"] == "rotary_2d":
        why_not.append("rows and columns of pixels, outside the benchmark's rules")
    if plan.config.init_from:
        why_not.append(f"init_from={plan.config.init_from}")
    if plan.config.pretrain.objective != "none":
        why_not.append(f"pretrain={plan.config.pretrain.objective}: the arena allows none")
    if 10 * params > 11 * baseline:
        why_not.append(
            f"{params:,} parameters, {100 * params / baseline - 100:+.1f} % over softmax"
        )
    return why_not, baseline


def changes(plan: Plan, sections: tuple[str, ...], source: str) -> list[str]:
    """Keys of some sections that differ from the choices as published, with both values."""
    if plan.reference.config is None:
        return []
    theirs, ours = flatten(resolved(plan.reference.config)), flatten(plan.plain)
    return [
        f"{key}={ours.get(key)} ({source}: {theirs.get(key)})"
        for key in sorted(ours.keys() | theirs.keys())
        if key.startswith(sections) and key not in NOT_COMPARED and ours.get(key) != theirs.get(key)
    ]


def protocol_of(plan: Plan, num_examples: Mapping[str, int]) -> Protocol:
    """How the number will be made, with `num_examples` by split.

    The budget is of both phases: a run with self-pretraining is of full budget if it sees at least
    as many training examples in all as the recipe gives a run without.
    """
    task, train, published = plan.task, plan.config.train, plan.reference.config
    full = published.train.num_steps * published.train.batch_size if published else 0
    seen = plan.config.pretrain.num_examples + train.num_steps * train.batch_size
    extra = task.protocol
    if plan.plain["shape"]["input"] == "real":
        extra["input"] = "real"
    if plan.plain["shape"]["positions"] == "rotary_2d":
        extra["positions"] = "rotary_2d"
    return Protocol(
        data=task.data_kind(num_examples),
        budget="reduced" if seen < full else "full",
        validation=extra.pop("validation"),
        selection=train.selection,
        max_length=task.max_length,
        difficulty=extra.pop("difficulty"),
        options=extra,
    )


def finished(
    plan: Plan,
    own: Path | None,
    fingerprint: str,
    hardware: Mapping[str, Any],
    say: Callable[[str], None],
) -> Path | None:
    """The record made in the run's folder, if it is of a run that came to its end.

    Args:
        own: that record, of whatever run; None if there is none.
        fingerprint: of the data as they are now.
        hardware: what the record's block of that name would be now.

    Raises:
        ValueError: it is of a newer program, or of a run on other data.
    """
    if own is None:
        return None
    try:
        record = records.load(own)
    except records.Newer as error:
        raise ValueError(f"{error}; update it or choose another paths.results") from None
    except ValueError as error:
        say(f"warning: {error}; the run goes on and will replace it")
        return None
    if record.status not in ("completed", "at_chance"):
        return None
    if record.data["fingerprint"] != fingerprint:
        raise ValueError(
            f"{own}: this run is finished, on other data (fingerprint "
            f"{record.data['fingerprint'][:12]}, now {fingerprint[:12]}); move {plan.run_dir} away "
            "or choose another paths.outputs"
        )
    say(
        f"{record.run_id} is finished ({record.status}); nothing to do. Record: {own}\n"
        f"To train it once more, move {plan.run_dir} away first"
    )
    if otherwise := computed_otherwise(record, hardware):
        say(
            f"warning: it was not computed as asked for now ({otherwise}); to have that as well, "
            "choose another paths.outputs"
        )
    return own


def computed_otherwise(record: Record, hardware: Mapping[str, Any]) -> str:
    """Which choices of hardware that numbers depend on a record was not made with; in words."""
    steps = record.hardware.get("stretches", [record.hardware])
    found = {
        key: list(dict.fromkeys(str(s[key]) for s in steps if key in s))
        for key in ("precision", "device", "num_devices", "compile")
    }
    return ", ".join(
        f"{key} {' then '.join(values)}, now {hardware[key]}"
        for key, values in found.items()
        if values and values != [str(hardware[key])]
    )
