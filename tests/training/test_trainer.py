"""Training on a toy task: exact, deterministic, resumable, honest about failures."""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lra.cli import CONFIGS, compose_config, typed
from lra.config import HardwareConfig
from lra.tasks.batches import Batch, TokenArrays
from lra.tasks.cache import Dataset
from lra.training import checkpoint, distributed
from lra.training.evaluate import evaluate
from lra.training.gradient import is_out_of_memory
from lra.training.hardware import Hardware
from lra.training.progress import Progress
from lra.training.stopping import Interrupted
from lra.training.trainer import Diverged, Refused, cut_metrics, resume
from models.norm import BatchNorm
from tests import programs
from tests.toy import SIZES, ToyModel, run, toy_data

ROOT = Path(__file__).resolve().parents[2]
CPU = HardwareConfig(device="cpu", num_threads=1)


def losses(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"]) for r in rows if r["split"] == "train"]


def metrics(folder: Path) -> str:
    return (folder / "metrics.jsonl").read_text()


def weights(folder: Path) -> dict[str, Tensor]:
    return checkpoint.read(checkpoint.checkpoints(folder / "checkpoints")[0])["model"]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_the_model_overfits_eight_examples(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [(rng.integers(0, 10, 5).astype(np.uint8).tobytes(), i % 2) for i in range(8)]
    data = toy_data(tmp_path, rows={s: rows for s in SIZES})
    result = run(
        tmp_path / "run",
        data,
        num_steps=300,
        eval_every=300,
        model=lambda: ToyModel(dropout=0.0),
        lr=0.05,
    )
    assert result.test.accuracy == 1.0 and result.test.num_examples == 8


def test_same_seed_same_losses_to_the_last_bit(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    for name in ("a", "b"):
        run(tmp_path / name, data)
    run(tmp_path / "other", data, seed=1)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert losses(tmp_path / "a") != losses(tmp_path / "other")
    assert [step for step, _ in losses(tmp_path / "a")] == list(range(1, 21))


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_nothing(tmp_path: Path, workers: int) -> None:
    data = toy_data(tmp_path)
    run(tmp_path / "none", data)
    run(
        tmp_path / "some",
        data,
        hardware=HardwareConfig(device="cpu", num_threads=1, num_workers=workers),
    )
    assert losses(tmp_path / "none") == losses(tmp_path / "some")


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_micro_batches_give_the_same_training(tmp_path: Path, micro: int) -> None:
    data = toy_data(tmp_path)
    run(tmp_path / "whole", data, model=lambda: ToyModel(dropout=0.0).double())
    run(
        tmp_path / "parts",
        data,
        model=lambda: ToyModel(dropout=0.0).double(),
        hardware=HardwareConfig(device="cpu", num_threads=1, micro_batch_size=micro),
    )
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert [x for _, x in parts] == pytest.approx([x for _, x in whole], rel=1e-6)


def test_how_often_is_evaluated_changes_no_training_loss(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    run(tmp_path / "often", data, eval_every=1)
    run(tmp_path / "once", data, eval_every=20)
    assert losses(tmp_path / "often") == losses(tmp_path / "once")


class StopsAt(ToyModel):
    """Sends a signal to its own process in training step `at`."""

    def __init__(self, at: int, number: int) -> None:
        super().__init__()
        self.at, self.number, self.steps = at, number, 0

    def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor) -> Tensor:
        self.steps += self.training
        if self.training and self.steps == self.at:
            os.kill(os.getpid(), self.number)
        return super().forward(tokens_BSL, lengths_BS)


# 40 examples in batches of 8: an epoch ends at steps 5, 10, 15; evaluations at 4, 8, 12, 16, 20.
@pytest.mark.parametrize("at", [1, 4, 5, 7, 12, 19])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_next_start_ends_as_if_never_stopped(
    tmp_path: Path, at: int, number: int
) -> None:
    data = toy_data(tmp_path)
    whole = run(tmp_path / "whole", data)
    with pytest.raises(Interrupted, match=f"at step {at}"):
        run(tmp_path / "cut", data, model=lambda: StopsAt(at, number))
    resumed = run(tmp_path / "cut", data)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    assert resumed.state.curve == whole.state.curve
    assert (resumed.step, resumed.test.accuracy) == (whole.step, whole.test.accuracy)


def test_what_is_computed_otherwise_after_a_stop_is_said_and_kept_by_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, bf16 = toy_data(tmp_path), HardwareConfig(device="cpu", num_threads=1, precision="bf16")
    for at, hardware in (3, None), (6, None), (1, bf16):  # of this session's steps
        with pytest.raises(Interrupted):
            run(tmp_path, data, model=lambda n=at: StopsAt(n, signal.SIGTERM), hardware=hardware)
        said = "computed otherwise" in capsys.readouterr().out
        assert said == (hardware is bf16)
    result = run(tmp_path, data)  # step 10 was the only one in bfloat16
    assert (
        "from step 11 on the run is computed otherwise (precision bf16 before, now float32)"
        in capsys.readouterr().out
    )
    found = [(s["from_step"], s["precision"]) for s in result.state.stretches]
    assert found == [(1, "float32"), (10, "bf16"), (11, "float32")]
    assert result.state.stretches[0]["micro_batch_size"] == 8

    # A start that ended before its first step has computed nothing.
    folder = tmp_path / "checkpoints"
    saved = checkpoint.read(checkpoint.checkpoints(folder)[0])
    saved["state"]["step"] = saved["state"]["evaluated_step"] = 10
    assert len(saved["state"]["stretches"]) == 3
    hardware = Hardware(bf16)
    hardware.stretches = saved["state"]["stretches"]
    assert hardware.begin(11, 8, {}) == "" and len(hardware.stretches) == 2


def test_a_state_that_does_not_say_how_it_was_computed_is_no_obstacle(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    with pytest.raises(Interrupted):
        run(tmp_path, data, model=lambda: StopsAt(7, signal.SIGTERM))
    (path, *_) = checkpoint.checkpoints(tmp_path / "checkpoints")
    saved = checkpoint.read(path)
    del saved["state"]["stretches"]
    checkpoint.write(path, saved)
    first, second = run(tmp_path, data).state.stretches
    assert first == {"from_step": 1} and second["from_step"] == 8
    assert second["precision"] == "float32"


@pytest.mark.parametrize("at", [0, 4, 7])
def test_a_signal_ends_the_wait_for_a_batch_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    data = toy_data(tmp_path)
    run(tmp_path / "whole", data)
    built, answer = 0, threading.Event()

    def hangs(split: TokenArrays, *arguments: Any) -> Batch:
        nonlocal built
        if threading.current_thread() is not threading.main_thread():
            built += 1
            if built > at:
                threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM]).start()
                answer.wait(20)
        return batch(split, *arguments)

    batch = TokenArrays.batch
    with monkeypatch.context() as patch:
        patch.setattr(TokenArrays, "batch", hangs)
        threaded = replace(CPU, num_workers=1)
        started = time.monotonic()
        with pytest.raises(Interrupted, match=f"stopped by SIGTERM at step {at}$"):
            run(tmp_path / "cut", data, hardware=threaded)
        assert time.monotonic() - started < 10
        answer.set()
    run(tmp_path / "cut", data)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


class Killed(Exception):
    pass


class DiesAt(StopsAt):
    """Raises in training step `at`, so that nothing is saved, as a SIGKILL would leave it."""

    def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor) -> Tensor:
        if self.training and self.steps + 1 == self.at:
            raise Killed
        return super().forward(tokens_BSL, lengths_BS)


@pytest.mark.parametrize("at", [2, 4, 11, 20])
def test_a_killed_run_repeats_only_what_was_not_saved(tmp_path: Path, at: int) -> None:
    data = toy_data(tmp_path)
    run(tmp_path / "whole", data)
    with pytest.raises(Killed):
        run(tmp_path / "cut", data, model=lambda: DiesAt(at, 0))
    made: list[StopsAt] = []
    run(tmp_path / "cut", data, model=lambda: made.append(StopsAt(-1, 0)) or made[0])
    assert made[0].steps == 20 - (at - 1) // 3 * 3  # checkpoint_every=3
    # Rows beyond the checkpoint are cut and written again: each step is there once.
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert [step for step, _ in losses(tmp_path / "cut")] == list(range(1, 21))
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


class Draws(StopsAt):
    """Its loss depends on all generators that a model could draw from."""

    def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor) -> Tensor:
        logits_BC = super().forward(tokens_BSL, lengths_BS)
        if self.training:
            return logits_BC * (1 + random.random() + np.random.random() + torch.rand(()))
        return logits_BC


def test_every_generator_goes_on_where_it_stood(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    checkpoint.seed_everything(5)
    run(tmp_path / "whole", data, model=lambda: Draws(-1, 0))
    checkpoint.seed_everything(5)
    with pytest.raises(Interrupted):
        run(tmp_path / "cut", data, model=lambda: Draws(7, signal.SIGTERM))
    checkpoint.seed_everything(6)  # another process starts from other states
    run(tmp_path / "cut", data, model=lambda: Draws(-1, 0))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


SAVES = """
import os, pathlib, signal, sys, time, torch
from lra.training import checkpoint
folder, state = pathlib.Path(sys.argv[1]), {"model": {"w": torch.zeros(300_000)}}
step = left_over = 0
for attempt in range(40):
    child = os.fork()
    if child == 0:  # writes one checkpoint after the other until it is killed
        while True:
            step += 1
            checkpoint.save(folder, step, state | {"step": step})
    while attempt == 0 and not checkpoint.checkpoints(folder):
        time.sleep(0.001)
    time.sleep(0.002 + attempt / 2000)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left_over += len(list(folder.glob(".*.tmp")))
    found, warnings = checkpoint.load_latest(folder)
    assert found and not warnings and found["step"] >= step, (found, warnings, step)
    checkpoint.drop_beyond(folder, found["step"])
    assert not list(folder.glob(".*.tmp"))
    step = found["step"]
print(step, left_over)
"""


def test_killed_while_saving_again_and_again_a_run_stays_resumable(tmp_path: Path) -> None:
    done = programs.call("-c", SAVES, tmp_path)
    assert done.returncode == 0, done.stderr
    saved, left_over = map(int, done.stdout.split())
    assert saved > 1 and left_over > 0  # so there were kills within a write, after others


def whole_and_cut(tmp_path: Path) -> Dataset:
    """The same run twice, in `whole` to its end and in `cut` dead at step 14."""
    data = toy_data(tmp_path)
    run(tmp_path / "whole", data)
    with pytest.raises(Killed):
        run(tmp_path / "cut", data, model=lambda: DiesAt(14, 0))
    return data


def test_a_cut_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = whole_and_cut(tmp_path)
    newest, previous = checkpoint.checkpoints(tmp_path / "cut" / "checkpoints")
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    (newest.parent / ".step-00000015.pt.abc.tmp").write_bytes(b"left over")
    run(tmp_path / "cut", data)
    out = capsys.readouterr().out
    assert f"{newest}: not a readable checkpoint" in out and "resuming at step 9" in out
    assert not list(newest.parent.glob(".*.tmp"))
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


def test_what_a_stopped_run_left_of_later_steps_takes_no_place_of_what_follows(
    tmp_path: Path,
) -> None:
    """Weights that were the best to the stopped run only, and states that nobody can read."""
    data = whole_and_cut(tmp_path)
    folder = tmp_path / "cut" / "checkpoints"
    (step,) = (checkpoint.step_of(path) for path in checkpoint.checkpoints(folder)[:1])
    for name in (f"best-{step + 1:08d}.pt", f"step-{400:08d}.pt", f"step-{500:08d}.pt"):
        (folder / name).write_bytes(b"of a run that went on otherwise")
    run(tmp_path / "cut", data)
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    names = [
        {p.name for p in (tmp_path / name / "checkpoints").iterdir()} for name in ("cut", "whole")
    ]
    assert names[0] == names[1]


def test_best_weights_that_a_kept_state_names_stay(tmp_path: Path) -> None:
    """A state that is saved before the evaluation of its own step names an older best."""

    def state(step: int, best_step: int) -> None:
        checkpoint.save(tmp_path, step, {"model": {}, "state": {"best_step": best_step}})

    for step, best_step in ((20, 0), (40, 20), (60, 20)):
        state(step, best_step)
        checkpoint.write(checkpoint.best_path(tmp_path, step), {"model": {}})  # every one is better
    names = {path.name for path in tmp_path.iterdir()}
    assert {"step-00000040.pt", "step-00000060.pt", "best-00000020.pt"} <= names
    state(80, 60)
    assert "best-00000020.pt" not in {path.name for path in tmp_path.iterdir()}


def test_a_look_at_a_running_run_leaves_its_half_written_file_alone(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"model": {}})
    (half := tmp_path / ".step-00000002.pt.abc.tmp").write_bytes(b"half")
    assert checkpoint.load_latest(tmp_path)[0] and half.exists()


def test_a_turned_bit_makes_a_damaged_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"model": {"weight": torch.ones(1000)}})
    (path,) = checkpoint.checkpoints(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.ones(9).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert torch.load(path, weights_only=True)["model"]["weight"][0] != 1  # torch does not mind
    with pytest.raises(ValueError, match=r"step-00000001.pt: not a readable checkpoint .damaged"):
        checkpoint.read(path)


def test_a_disk_that_does_not_answer_is_no_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = whole_and_cut(tmp_path)
    before = sorted((tmp_path / "cut" / "checkpoints").iterdir())

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", fail)
        with pytest.raises(Refused, match=r"step-00000012\.pt: cannot be read now \(Input/output"):
            run(tmp_path / "cut", data)
    assert sorted((tmp_path / "cut" / "checkpoints").iterdir()) == before
    run(tmp_path / "cut", data)
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


def test_a_state_from_before_fp16_can_be_gone_on_from(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    with pytest.raises(Interrupted):
        run(tmp_path, data, time_limit=1e-9)
    model = ToyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    folder = tmp_path / "checkpoints"
    identity = checkpoint.read(checkpoint.checkpoints(folder)[0])["identity"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "load_state_dict", lambda _: None)
        resume(folder, model, optimizer, scaler, identity, Progress(quiet=True), needs_best=True)
    assert scaler.get_scale() == torch.amp.GradScaler("cpu").get_scale()


def test_the_random_state_of_a_gpu_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert checkpoint.random_states()["cuda"] == []  # of a run on the CPU beside it
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: "own")
    monkeypatch.setattr(torch.cuda, "set_rng_state", given.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    states = checkpoint.random_states()
    assert states["cuda"] == ["own"]
    for saved in (["own"], ["of 0", "of 1", "of 2"], ["of 0"]):  # those of all devices: older files
        checkpoint.restore_random_states(states | {"cuda": saved})
    assert given == ["own", "of 1", "of 0"]


def test_another_number_of_processes_goes_on_from_random_numbers_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = toy_data(tmp_path)
    with pytest.raises(Interrupted):
        run(tmp_path, data, time_limit=1e-9)
    folder, draws, found = tmp_path / "checkpoints", [], []
    saved = checkpoint.read(checkpoint.checkpoints(folder)[0])
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "from_main", lambda value: found.append(value) or found[0])
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        checkpoint.seed_everything(0)
        model = ToyModel()
        optimizer = torch.optim.AdamW(model.parameters())
        monkeypatch.setattr(optimizer, "load_state_dict", lambda _: None)
        draws.append(torch.get_rng_state())
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        seen = folder if rank == 0 else tmp_path / "not there yet"  # a disk that lags behind
        state = resume(seen, model, optimizer, scaler, saved["identity"], Progress(quiet=True),
                       needs_best=True)  # fmt: skip
        assert state.step == saved["state"]["step"] > 0
        draws.append(torch.get_rng_state())
    before, first, _, second = draws
    assert not torch.equal(first, second) and not torch.equal(before, first)


def test_an_evaluation_after_the_state_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"split": "train", "step": 8}, {"split": "val", "step": 4}, {"split": "val", "step": 8},
            {"split": "train", "step": 9}]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"split": "tr')
    cut_metrics(path, 8, evaluated_step=4)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:2]


def test_without_a_usable_checkpoint_the_new_start_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = whole_and_cut(tmp_path)
    for path in (tmp_path / "cut" / "checkpoints").glob("best-*.pt"):
        path.write_bytes(b"cut")
    run(tmp_path / "cut", data)
    out = capsys.readouterr().out
    assert "step-00000009.pt is passed over" in out and "starts anew at step 0" in out
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


def test_two_states_and_the_needed_best_weights_are_kept(tmp_path: Path) -> None:
    run(tmp_path / "run", toy_data(tmp_path))
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert [n for n in names if n.startswith("step")] == ["step-00000018.pt", "step-00000020.pt"]
    assert 1 <= len([n for n in names if n.startswith("best")]) <= 2


def test_another_setting_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    run(tmp_path / "run", data)
    with pytest.raises(ValueError, match=r"holds a run with another seed \(0, now 1\)"):
        run(tmp_path / "run", data, seed=1)
    other = toy_data(tmp_path, max_length=5)
    with pytest.raises(ValueError, match="holds a run with another data"):
        run(tmp_path / "run", other)


def test_a_finished_run_takes_no_further_step(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    first = run(tmp_path / "run", data)
    made: list[StopsAt] = []
    again = run(tmp_path / "run", data, model=lambda: made.append(StopsAt(-1, 0)) or made[0])
    assert made[0].steps == 0
    assert again.test.accuracy == first.test.accuracy and again.state == first.state


class Scripted(nn.Module):
    """Its evaluations are right as often as the script says, whatever was learnt."""

    def __init__(self, val: dict[int, float], test: dict[int, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.val, self.test = val, test

    def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor) -> Tensor:
        if self.training:
            self.step += 1
            return torch.stack([self.weight, -self.weight], -1).expand(len(tokens_BSL), 2)
        # Rows carry their index in the first token, val and test differ in the second.
        script = self.val if int(tokens_BSL[0, 0, 1]) == 1 else self.test
        share = script[int(self.step)]
        right = (tokens_BSL[:, 0, 0] - 1) < share * 10
        return torch.stack([right, ~right], -1).float()


def scripted_rows() -> dict[str, list[tuple[bytes, int]]]:
    return {
        "train": [(bytes([i, 0]), 0) for i in range(10)],
        "val": [(bytes([i, 0]), 0) for i in range(10)],
        "test": [(bytes([i, 1]), 0) for i in range(10)],
    }


VAL = {4: 0.3, 8: 0.9, 12: 0.9, 16: 0.5, 20: 0.4}
TEST = {4: 0.1, 8: 0.6, 12: 0.2, 16: 0.3, 20: 1.0}


@pytest.mark.parametrize("selection, step", [("best_val", 8), ("last", 20)])
def test_the_reported_test_number_is_that_of_the_chosen_step(
    tmp_path: Path, selection: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = toy_data(tmp_path, rows=scripted_rows())
    reads: list[Any] = []
    monkeypatch.setattr(
        "lra.training.trainer.evaluate",
        lambda m, split, *a, **k: (reads.append(split), evaluate(m, split, *a, **k))[1],
    )
    result = run(tmp_path / "run", data, model=lambda: Scripted(VAL, TEST), selection=selection)
    assert result.step == step  # the first of two equally good steps, or the last
    assert result.val_accuracy == pytest.approx(VAL[step])
    assert result.test.accuracy == pytest.approx(TEST[step])
    assert sum(split is data.test for split in reads) == 1


@pytest.mark.parametrize(
    "val", [{4: 0.9, 8: 0.3, 12: 0.3, 16: 0.3, 20: 0.3}, dict.fromkeys(VAL, 0.0)],
    ids=["best at once", "never right"],
)  # fmt: skip
def test_the_first_evaluation_counts_like_any_other(tmp_path: Path, val: dict[int, float]) -> None:
    data = toy_data(tmp_path, rows=scripted_rows())
    result = run(tmp_path / "run", data, model=lambda: Scripted(val, TEST))
    assert result.step == result.state.best_step == 4
    assert result.val_accuracy == val[4] and result.test.accuracy == pytest.approx(TEST[4])


def test_clipping_limits_the_norm_of_all_gradients_together(tmp_path: Path) -> None:
    data = toy_data(tmp_path)

    def moved(name: str, clip_norm: float | None) -> float:
        models: list[ToyModel] = []
        starts: list[Tensor] = []

        def make() -> ToyModel:
            models.append(ToyModel())
            starts.append(nn.utils.parameters_to_vector(models[0].parameters()).detach().clone())
            return models[0]

        # With eps=1 a small gradient g moves a weight by lr * g / (|g| + 1) in the first step.
        run(tmp_path / name, data, model=make, num_steps=1, warmup_steps=0, lr=1.0, eps=1.0,
            schedule="constant", clip_norm=clip_norm)  # fmt: skip
        end = nn.utils.parameters_to_vector(models[0].parameters()).detach()
        return float((end - starts[0]).norm())

    assert moved("free", None) > 0.1
    assert moved("wide", 100.0) == moved("free again", None)
    assert moved("clipped", 0.01) == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("batch_size", [1, 7, 32, 64])
def test_every_example_is_evaluated_once(tmp_path: Path, batch_size: int) -> None:
    data = toy_data(tmp_path, sizes={"train": 8, "val": 33, "test": 8})
    torch.manual_seed(0)
    model = ToyModel()
    metrics = evaluate(model, data.val, Hardware(CPU), batch_size=batch_size)
    exact = evaluate(model, data.val, Hardware(CPU), batch_size=33)
    assert metrics.num_examples == 33 and metrics.accuracy == exact.accuracy
    assert np.array_equal(metrics.correct_N, exact.correct_N)
    assert metrics.accuracy == metrics.correct_N.mean()
    assert metrics.loss == pytest.approx(exact.loss, rel=1e-6)


def test_evaluation_leaves_mode_random_state_and_gradients_alone(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    model = ToyModel().train()
    before = torch.get_rng_state()
    first = evaluate(model, data.val, Hardware(CPU), batch_size=8)
    assert model.training and torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    again = evaluate(model, data.val, Hardware(CPU), batch_size=8)
    assert (first.accuracy, first.loss) == (again.accuracy, again.loss)


class Watches(ToyModel):
    """Keeps what it is asked in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[list[int]]] = [[]]

    def train(self, mode: bool = True) -> Watches:
        if mode and self.seen[-1]:
            self.seen.append([])
        return super().train(mode)

    def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor) -> Tensor:
        if not self.training:
            self.seen[-1] += tokens_BSL[:, 0].tolist()
        return super().forward(tokens_BSL, lengths_BS)


def test_every_evaluation_asks_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    data, model = toy_data(tmp_path, sizes={"train": 40, "val": 19, "test": 20}), Watches()
    run(tmp_path / "run", data, model=lambda: model)
    *evaluations, test, rest = model.seen
    assert len(evaluations) == 5 and len(test) == 20 and rest == []
    assert len(evaluations[0]) == 19 and all(rows == evaluations[0] for rows in evaluations)


class GoesWrong(ToyModel):
    """Meets an infinite weight in training step 3."""

    steps = 0

    def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor) -> Tensor:
        self.steps += self.training
        logits_BC = super().forward(tokens_BSL, lengths_BS)
        return logits_BC * float("inf") if self.steps == 3 else logits_BC


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="step 3: the loss is nan"):
        run(tmp_path / "run", toy_data(tmp_path), model=GoesWrong, log_every=10)


class BreaksLast(ToyModel):
    """Has weights that are no numbers after the last of 20 steps, whose own loss is finite."""

    steps = 0

    def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor) -> Tensor:
        self.steps += self.training
        logits_BC = super().forward(tokens_BSL, lengths_BS)
        return logits_BC if self.steps < 20 or self.training else logits_BC * float("nan")


@pytest.mark.parametrize("selection", ["best_val", "last"])
def test_an_evaluation_that_is_not_finite_ends_the_run_too(tmp_path: Path, selection: str) -> None:
    with pytest.raises(Diverged, match="step 20: the validation loss is nan; lower train.lr"):
        run(tmp_path / "run", toy_data(tmp_path), model=BreaksLast, selection=selection)


def test_a_test_loss_that_is_not_finite_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = toy_data(tmp_path)

    def broken(model: nn.Module, split: Any, *args: Any, **options: Any) -> Any:
        metrics = evaluate(model, split, *args, **options)
        return replace(metrics, loss=float("inf")) if split is data.test else metrics

    monkeypatch.setattr("lra.training.trainer.evaluate", broken)
    with pytest.raises(Diverged, match="the test loss is inf"):
        run(tmp_path / "run", data)


class RunsOutBehindBatchNorm(ToyModel):
    """Has memory for three rows, but not before its norm has seen the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = BatchNorm(1, eps=1e-5, momentum=0.1)

    def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor) -> Tensor:
        x_B11 = lengths_BS.to(torch.get_default_dtype())[:, :1, None]
        shift_B1 = self.norm(x_B11, torch.ones(len(x_B11), 1, dtype=torch.bool))[:, 0]
        if self.training and len(tokens_BSL) > 3:
            raise torch.OutOfMemoryError("injected")
        return super().forward(tokens_BSL, lengths_BS) + shift_B1


def test_a_step_without_memory_leaves_no_trace_in_batch_statistics(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    halved = run(tmp_path / "halved", data, model=RunsOutBehindBatchNorm)
    assert halved.micro_batch_size == 2
    hardware = HardwareConfig(device="cpu", num_threads=1, micro_batch_size=2)
    run(tmp_path / "small", data, model=RunsOutBehindBatchNorm, hardware=hardware)
    assert same(weights(tmp_path / "halved"), weights(tmp_path / "small"))


class RunsOut(ToyModel):
    """Has memory for three rows."""

    def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor) -> Tensor:
        if self.training and len(tokens_BSL) > 3:
            torch.rand(5)  # draws from the generator, as dropout does before memory runs out
            raise torch.OutOfMemoryError("injected")
        return super().forward(tokens_BSL, lengths_BS)


def test_out_of_memory_halves_the_micro_batch_and_repeats_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = toy_data(tmp_path)
    result = run(tmp_path / "run", data, model=RunsOut)
    assert result.micro_batch_size == 2
    assert [s["micro_batch_size"] for s in result.state.stretches] == [2]
    assert "out of memory; micro-batch is now 4" in capsys.readouterr().out
    run(
        tmp_path / "two",
        data,
        hardware=HardwareConfig(device="cpu", num_threads=1, micro_batch_size=2),
    )
    assert losses(tmp_path / "run") == losses(tmp_path / "two")


class NeverFits(ToyModel):
    def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("injected")


def test_memory_that_does_not_hold_one_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path / "run", toy_data(tmp_path), model=NeverFits)
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("shape"))
    for text in (
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED when calling",
        "cuFFT error: CUFFT_ALLOC_FAILED",
    ):
        assert is_out_of_memory(RuntimeError(text))


def test_a_full_disk_keeps_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder, 1, {"model": {}, "step": 1})

    def full(state: object, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(folder, 2, {"model": {}, "step": 2})
    monkeypatch.undo()
    assert [p.name for p in folder.iterdir()] == ["step-00000001.pt"]
    state, warnings = checkpoint.load_latest(folder)
    assert state is not None and state["step"] == 1 and not warnings


def test_a_checkpoint_with_code_in_it_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "ran"),))

    path = tmp_path / "step-00000001.pt"
    torch.save({"model": Evil()}, path)
    with pytest.raises(ValueError, match="not a readable checkpoint") as error:
        checkpoint.read(path)
    assert "never loaded" in str(error.value) and "weights_only" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_bytes_at_random_are_no_checkpoint(tmp_path: Path) -> None:
    """Some of these are instructions for the reader that fail in ways of their own."""
    rng = np.random.default_rng(0)
    path = tmp_path / "step-00000001.pt"
    for _ in range(200):
        path.write_bytes(rng.bytes(300))
        with pytest.raises(ValueError, match="not a readable checkpoint"):
            checkpoint.read(path)
    with pytest.raises(ValueError, match="No such file"):
        checkpoint.read(tmp_path / "none.pt")


def test_speed_leaves_the_first_steps_out(tmp_path: Path) -> None:
    class Slow(StopsAt):
        def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor) -> Tensor:
            if self.training and self.steps < 3:
                time.sleep(0.5)
            return super().forward(tokens_BSL, lengths_BS)

    state = run(tmp_path / "run", toy_data(tmp_path), model=lambda: Slow(-1, 0)).state
    assert state.timed_steps == 15 and state.timed_examples == 15 * 8
    assert state.train_time_s < 1.5  # what the three slow ones take


def test_the_largest_rate_really_used_is_kept(tmp_path: Path) -> None:
    assert run(tmp_path / "run", toy_data(tmp_path)).state.max_lr == pytest.approx(0.02)
    state = run(
        tmp_path / "short",
        toy_data(tmp_path),
        schedule="rsqrt",
        warmup_steps=80,
        allow_unreached_peak=True,
    ).state
    assert state.max_lr == pytest.approx(0.02 * 19 / 80 / 80**0.5)


@pytest.mark.parametrize("precision", get_args(get_type_hints(HardwareConfig)["precision"]))
def test_every_precision_runs_on_a_cpu_or_is_refused_by_name(
    tmp_path: Path, precision: Any
) -> None:
    hardware = HardwareConfig(device="cpu", precision=precision, num_threads=1)
    if precision in ("float32", "bf16"):
        run(tmp_path / "run", toy_data(tmp_path), hardware=hardware)
    else:
        with pytest.raises(ValueError, match=f"hardware.precision={precision}: not on a CPU"):
            run(tmp_path / "run", toy_data(tmp_path), hardware=hardware)


def test_float32_is_the_default_precision_everywhere() -> None:
    names = [p.stem for p in (CONFIGS / "hardware").glob("*.yaml")]
    choices = [[f"hardware={name}"] for name in names if name != "slurm"] + [[]]
    assert {typed(compose_config(choice)).hardware.precision for choice in choices} == {"float32"}
    assert HardwareConfig().precision == "float32"


FEW_FILES = """
import pathlib, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from lra.config import HardwareConfig
from tests.toy import run, toy_data
folder = pathlib.Path(sys.argv[1])
data = toy_data(folder, sizes={"train": 2000, "val": 20, "test": 20})
hardware = HardwareConfig(device="cpu", num_threads=1, num_workers=4)
result = run(folder / "run", data, hardware=hardware, num_steps=500, eval_every=500,
             checkpoint_every=None, log_every=100)
print(result.state.step, len(data.train))
"""


def test_few_open_files_suffice_for_two_epochs_with_workers(tmp_path: Path) -> None:
    done = programs.call("-c", FEW_FILES, tmp_path, cwd=ROOT)
    assert done.stdout.split()[-2:] == ["500", "2000"], done.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_large_tensors_reuse_memory_that_was_freed() -> None:
    code = """
import resource, torch
from lra.config import HardwareConfig
from lra.training.hardware import Hardware
Hardware(HardwareConfig(device="cpu", num_threads=1))
faults = []
for _ in range(21):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*faults)
"""
    done = programs.call("-c", code)
    first, *later = map(int, done.stdout.split())
    # Where the heap begins differs from start to start, so the first few may still be new.
    assert sorted(later)[len(later) // 2] < first / 10


def test_a_state_whose_best_weights_are_damaged_is_passed_over(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    whole = run(tmp_path / "whole", data)
    folder = tmp_path / "cut"
    with pytest.raises(Interrupted):
        run(folder, data, time_limit=1e-9)
    run(folder, data)  # ended; now as if it had been cut with a damaged file of the best weights
    saved = checkpoint.best_path(folder / "checkpoints", whole.step)
    saved.write_bytes(saved.read_bytes()[:100])
    state, warnings = checkpoint.load_latest(folder / "checkpoints", needs_best=True)
    assert state is None or state["state"]["best_step"] != whole.step
    assert any(saved.name in warning for warning in warnings)
    again = run(folder, data)
    assert again.test.accuracy == whole.test.accuracy and again.step == whole.step
    assert checkpoint.read(saved)
