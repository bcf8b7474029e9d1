"""Several processes on a CPU (gloo): the same numbers as one, one folder, one record."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lra import job, runs
from lra.cli import compose_config, typed
from lra.config import HardwareConfig
from lra.files import Unwritable
from lra.plan import Reference, make_plan
from lra.results import records
from lra.tasks.batches import Batch
from lra.training import distributed
from lra.training.gradient import num_micro_batches
from tests import programs
from tests.made_up import make_record
from tests.test_cli import ROOT, TINY, call, read_record, timeless
from tests.test_job import config as toy_config

TWO = ["hardware.num_devices=2", "hardware.num_threads=1"]
# Without dropout, which draws other numbers in each process.
PLAIN = [
    *TINY,
    "shape.dropout=0.0",
    "shape.attention_dropout=0.0",
    "train.num_steps=20",  # more than an epoch
    "train.eval_every=10",
]


def losses(folder: Path) -> list[float]:
    (path,) = folder.glob("outputs/*/metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in rows if r["split"] == "train"] == list(range(1, 21))
    return [r["loss"] for r in rows if r["split"] == "train"]


@pytest.mark.parametrize("kind", ["layer", "batch"])
def test_two_processes_equal_one(tmp_path: Path, kind: str) -> None:
    ways = {"one": [], "two": TWO, "micro": [*TWO, "hardware.micro_batch_size=1"]}
    if kind == "batch":  # whose statistics processes share, but micro-batches cannot
        del ways["micro"]
    for name, extra in ways.items():
        (tmp_path / name).mkdir()
        words = [*PLAIN, f"shape.norm_kind={kind}", *extra]
        code, _, err = call(tmp_path / name, *words, fork=True)
        assert code == 0, err
    one, record = losses(tmp_path / "one"), read_record(tmp_path / "one")
    for name in list(ways)[1:]:
        assert losses(tmp_path / name) == pytest.approx(one, rel=1e-5)
        other = read_record(tmp_path / name)
        assert other.result and record.result
        assert other.result.val.num_examples == other.result.test.num_examples == 32
        assert other.result.test.accuracy == record.result.test.accuracy
        assert other.result.test.loss == pytest.approx(record.result.test.loss, rel=1e-5)
        assert other.hardware["num_devices"] == 2 and other.run_id == record.run_id
        assert len(list((tmp_path / name / "outputs").glob("listops-*"))) == 1


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shares_that_differ_by_a_row_have_as_many_parts(
    monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: world)
    for num_examples in range(world, 40):
        for size in range(1, 12):
            num_parts = num_micro_batches(num_examples, size)
            for rank in range(world):
                rows = np.arange(num_examples)[rank::world]
                share = Batch(torch.tensor(rows), torch.tensor(rows), torch.tensor(rows))
                parts = [part.labels_B.tolist() for part in share.split(num_parts)]
                assert sum(parts, []) == rows.tolist() and len(parts) == num_parts
                most = 2 if size == 1 and world > 1 else size
                assert all(1 <= len(part) <= most for part in parts)
                if world == 1:
                    assert num_parts == -(-num_examples // size)


def test_batch_norm_in_parts_of_uneven_shares_goes_on(tmp_path: Path) -> None:
    words = [*PLAIN, "shape.norm_kind=batch", "train.batch_size=3"]
    ways = {"one": [], "two": [*TWO, "hardware.micro_batch_size=1"]}  # of two rows and of one
    for name, extra in ways.items():
        (tmp_path / name).mkdir()
        code, _, err = call(tmp_path / name, *words, *extra, fork=True)
        assert code == 0, err
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_an_interrupted_run_of_two_processes_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    assert call(tmp_path / "whole", *TINY, *TWO, fork=True)[0] == 0
    (made,) = (tmp_path / "whole").glob("outputs/results/runs/*/*/*.json")
    # As if it had come with the repository: no process takes it for this folder's own.
    came = tmp_path / "cut" / made.relative_to(tmp_path / "whole")
    came.parent.mkdir(parents=True)
    came.write_text(json.dumps(json.loads(made.read_text()) | {"started_at": "2020-01-02"}))
    code, out, err = call(tmp_path / "cut", *TINY, *TWO, "train.time_limit=1e-9", fork=True)
    assert code == 75, err
    own = came.with_name(f"{made.stem}.2.json")
    assert records.load(own).status == "interrupted"
    code, out, err = call(tmp_path / "cut", *TINY, *TWO, fork=True)
    assert code == 0 and "resuming at step 1" in out, err
    assert f"{came.name}: the same in each of the 32 test examples" in out
    assert sorted(came.parent.iterdir()) == [own, came]
    whole, cut = timeless(read_record(tmp_path / "whole")), timeless(records.load(own))
    for values in (whole, cut):
        values["config"]["train"].pop("time_limit")  # type: ignore[index]
    assert whole == cut


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_first_process_stops_all_with_their_state(
    tmp_path: Path, number: signal.Signals
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    long = ["train.num_steps=4000", "train.eval_every=4000"]
    fork = number == signal.SIGHUP  # once with everything as it is outside of tests
    process = programs.start("run.py", *TINY, *TWO, *long, cwd=tmp_path, fork=fork)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(tmp_path.glob("outputs/*/metrics.jsonl")):
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    record = read_record(tmp_path)
    assert record.status == "interrupted" and number.name in record.message
    assert list(tmp_path.glob("outputs/*/checkpoints/step-*.pt"))


FAILING = """
import torch
from models.softmax import SoftmaxAttention

class Fails(SoftmaxAttention):
    def forward(self, x_BLD, mask_BL):
        if self.training and torch.distributed.get_rank() == 1:
            raise RuntimeError("injected in the second process")
        return super().forward(x_BLD, mask_BL)
"""


def test_an_error_in_one_process_ends_all_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    process = programs.call(
        "run.py", *TINY, *TWO, "model=softmax", "model._target_=failing.Fails", cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, fork=True,
    )  # fmt: skip
    assert process.returncode == 1, process.stderr
    record = read_record(tmp_path, "failing")
    assert record.status == "failed" and "injected in the second process" in record.message
    assert "rank 1" in record.message
    (trace,) = tmp_path.glob("outputs/*/traceback.txt")
    assert "injected in the second process" in trace.read_text()


@pytest.mark.parametrize("status", ["failed", "completed"])
def test_a_main_process_that_fails_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """Its record is written, and its own end is what stops processes that wait for it."""
    monkeypatch.setattr(job, "run_job", lambda *_: make_record(status=status))
    arguments: Any = (None, [], None, tmp_path / "refused")
    failing = pytest.raises(SystemExit) if status == "failed" else contextlib.nullcontext()
    with failing as caught:
        job._job_process(*arguments)
    assert caught is None or caught.value.code == 1


@pytest.mark.parametrize("kind", [runs.Busy, Unwritable, ValueError])
def test_what_stops_a_process_stops_the_run_as_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fails(*_: object) -> None:
        raise kind("why")

    def launch(function: Callable[..., None], _: int, *arguments: Any) -> None:
        with pytest.raises(kind):
            function(*arguments)
        raise RuntimeError("a process failed")

    monkeypatch.setattr(job, "run_job", fails)
    monkeypatch.setattr(distributed, "launch", launch)
    with pytest.raises(kind, match="^why$") as caught:
        job.run_in_processes(make_plan(toy_config(tmp_path), Reference(None, {})), [])
    assert caught.type is kind


def test_a_run_of_two_processes_that_another_holds_is_no_failure_of_a_sweep(
    tmp_path: Path,
) -> None:
    places = [f"paths.{name}={tmp_path}/{name}" for name in ("outputs", "results")]
    plan = make_plan(typed(compose_config([*TINY, *places])), Reference(None, {}))
    with runs.locked(plan.run_dir):
        code, out, err = call(tmp_path, "-m", *TINY, *TWO, *places, fork=True)
    assert code == 0 and out.strip().endswith("1 job: 1 busy"), err
    assert err.endswith(f"\nerror: {plan.run_dir}: another process is working on this very run\n")


def test_bad_input_is_one_message_also_from_processes(tmp_path: Path) -> None:
    code, _, err = call(tmp_path, *TINY, *TWO, "task.strict=true", "task.max_length=20", fork=True)
    assert code == 2 and err.count("error: ") == 1 and "task.max_length=20" in err


def test_each_device_has_a_part_of_every_batch(tmp_path: Path) -> None:
    code, _, err = call(tmp_path, *TINY, *TWO, "train.batch_size=1", fork=True)
    assert code == 2 and "train.batch_size=1 on 2 devices: expected at least an example" in err


def test_a_compiled_model_exchanges_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    from lra.training.hardware import Hardware

    class Parallel:
        def no_sync(self) -> str:
            return "left where they are"

    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Parallel)
    hardware = Hardware(HardwareConfig(device="cpu", num_threads=1))
    for model in (Parallel(), SimpleNamespace(_orig_mod=Parallel())):
        assert hardware.exchange(model, wanted=False) == "left where they are"


def test_torchrun_starts_it_as_well(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         str(ROOT / "run.py"), *TINY],
        cwd=tmp_path, capture_output=True, text=True, timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert read_record(tmp_path).hardware["num_devices"] == 2
    assert process.stdout.count("val accuracy") == 2  # two evaluations, told once


RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RENDEZVOUS:
        monkeypatch.setenv(name, "")  # so that it is taken away again
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_rendezvous")
def test_slurm_variables_become_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "SLURM_NTASKS": "8",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node[07-08]",
        "SLURM_JOB_NODELIST": "node[05-08]",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "123456",
        "PATH": "",  # no scontrol
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    distributed.adopt_slurm()
    assert {name: os.environ[name] for name in RENDEZVOUS} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "node07",
        "MASTER_PORT": "23456",
    }


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("gpu-a,gpu-b", "gpu-a"),
        ("node[7-8]", "node7"),
        ("node[007,012-019],login", "node007"),
        ("rack[2-3]n[04,06]", "rack2n04"),
        ("n[1,3]-ib,x", "n1-ib"),
        ("", ""),
    ],
)
def test_the_first_node_of_slurms_notation(nodes: str, first: str) -> None:
    assert distributed.first_node(nodes) == first


@pytest.mark.usefixtures("no_rendezvous")
@pytest.mark.parametrize("step", [None, "1"])
def test_a_job_of_several_tasks_without_srun_runs_alone_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: str | None
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")  # which the script of a job has as well
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    if step:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", step)
    distributed._say_once.cache_clear()
    for _ in range(2):
        distributed.adopt_slurm()
        assert not distributed.is_worker() and "RANK" not in os.environ
    err = capsys.readouterr().err
    assert err.count("runs alone") == 1 and "4 tasks" in err and "srun python run.py" in err


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def rendezvous(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port()}  # fmt: skip


@pytest.mark.usefixtures("no_rendezvous")
@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_do_not_come_are_an_error_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    for name, value in rendezvous(rank).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "JOIN_LIMIT", timedelta(seconds=1))
    monkeypatch.setattr(distributed, "TELL_AFTER_S", 0.3)
    with pytest.raises(OSError, match=r"waiting for 2 processes to meet at .*: they did not \("):
        distributed.join("cpu")
    assert "waiting for 2 processes to meet" in capsys.readouterr().err
    assert signal.set_wakeup_fd(-1) == -1  # nothing watches on


def test_a_machine_that_nobody_knows_is_waited_for_no_longer_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def unknown(host: str, *_: object) -> None:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    for name, value in (rendezvous(1) | {"MASTER_ADDR": "node.invalid"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "JOIN_LIMIT", timedelta(seconds=0.2))
    monkeypatch.setattr(distributed, "NAME_POLL_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(OSError, match=r"to meet at node.invalid:.*: they did not \(.*not known"):
        distributed.join("cpu")
    assert len(asked) > 2 and set(asked) == {"node.invalid"}


def test_a_signal_ends_the_waiting_for_others() -> None:
    code = (
        "import signal, sys\n"
        "from lra.training import distributed\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('in Python'))\n"
        "distributed.join('cpu')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True,
        env=os.environ | rendezvous(0),
    )  # fmt: skip
    assert process.stderr is not None
    assert "waiting for 2 processes to meet" in process.stderr.readline()
    time.sleep(0.3)  # until it waits
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 75 and "stopped by SIGTERM" in err


def test_a_long_exchange_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distributed, "TELL_AFTER_S", 0.05)
    with distributed.telling():
        time.sleep(0.3)
    assert capfd.readouterr().err == "rank 0: waiting for the other processes of this run\n"
    monkeypatch.setattr(distributed, "TELL_AFTER_S", 0.2)
    with distributed.telling():
        pass
    time.sleep(0.3)
    assert capfd.readouterr().err == ""


def test_a_long_wait_for_a_device_is_told_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With nccl the exchange itself comes back at once."""
    monkeypatch.setattr(distributed, "TELL_AFTER_S", 0.05)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for name in ("get_rank", "all_reduce"):
        monkeypatch.setattr(torch.distributed, name, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: time.sleep(0.3))
    far: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    assert distributed.all_sum(far) is far
    assert capfd.readouterr().err == "rank 0: waiting for its device, or the other processes\n"


@pytest.mark.slow
def test_a_signal_before_the_training_ends_processes_with_its_code() -> None:
    code = (
        "import threading, os, signal, time\n"
        "from lra.training import distributed\n"
        "if __name__ == '__main__':\n"
        "    threading.Timer(8, os.kill, [os.getpid(), signal.SIGTERM]).start()\n"
        "    distributed.launch(time.sleep, 2, 100)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 75 and "stopped by SIGTERM" in done.stderr, done.stderr


def test_jobs_side_by_side_take_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from lra.training.hardware import Hardware

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("set_device", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    got = [Hardware(HardwareConfig(device="cuda"), job).device.index for job in range(4)]
    assert got == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="hardware.num_devices=3: this machine has 2"):
        Hardware(HardwareConfig(device="cuda", num_devices=3))


def test_who_starts_processes_takes_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its context there would hold hundreds of MB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("set_device", "current_device", "_lazy_init", "reset_peak_memory_stats",
                 "is_bf16_supported", "get_device_capability"):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: pytest.fail("touched"))
    started: list[int] = []
    monkeypatch.setattr(job, "run_in_processes", lambda plan, _: started.append(1))
    two = {"device": "cuda", "precision": "bf16", "num_devices": 2}
    job.run_job(toy_config(tmp_path, hardware=two), [], Reference(None, {}))
    assert started == [1]


def test_processes_that_a_cluster_shows_one_device_each_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from lra.training.hardware import Hardware

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("set_device", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    config = HardwareConfig(device="cuda", num_devices=4)
    for variable, value in {"WORLD_SIZE": "4", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(variable, value)
    for count, index in ((1, 0), (3, 2), (4, 2)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert Hardware(config).device.index == index
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # the third would share one
    with pytest.raises(ValueError, match="this machine has 2 CUDA devices for at least 3"):
        Hardware(config)


@pytest.mark.parametrize("words", [[], ["model.pool_memory=true"]])
def test_parameters_that_the_result_does_not_depend_on_do_not_stop_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    import torch

    from lra.build import make_model, make_task
    from lra.training.hardware import Hardware

    config = typed(compose_config(["model=luna", *PLAIN, "shape.norm_kind=batch", *words]))
    torch.distributed.init_process_group(
        "gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1
    )
    monkeypatch.setattr(  # one at each step more, though all processes have the same
        torch.nn.parallel.DistributedDataParallel, "_sync_buffers", lambda _: pytest.fail("sent")
    )
    try:
        monkeypatch.setattr(distributed, "world_size", lambda: 2)  # as far as the wrapping goes
        model = Hardware(config.hardware).parallel(make_model(config, make_task(config)))
        for _ in range(3):
            tokens_BSL = torch.randint(1, 5, (3, 1, 20))
            model(tokens_BSL, torch.full((3, 1), 20)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert [*model.buffers()]
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert bool(unused) == bool(words)


def test_bfloat16_that_a_gpu_only_emulates_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from lra.training.hardware import Hardware

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("set_device", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old one")
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    with pytest.raises(ValueError, match="hardware.precision=bf16: an old one has no bfloat16"):
        Hardware(HardwareConfig(device="cuda", precision="bf16"))


def test_tf32_is_refused_where_a_gpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from lra.training.hardware import Hardware

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old one")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(ValueError, match="hardware.precision=tf32: an old one has no TF32"):
        Hardware(HardwareConfig(device="cuda", precision="tf32"))


def test_alone_the_exchanges_do_nothing() -> None:
    import torch

    assert distributed.rank() == 0 and distributed.world_size() == 1 and distributed.is_main()
    assert distributed.gather("x") == ["x"] and distributed.from_main(3) == 3
    assert distributed.any_of(True, torch.device("cpu"))
    assert isinstance(records.SCHEMA_VERSION, int)
