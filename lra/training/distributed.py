"""Several processes, one run: starting them, and the few exchanges that training needs.

In a single process the exchanges do nothing, so the trainer need not ask how many there are.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lra.console import first_line, print_line
from lra.files import write_atomically
from lra.script import terminate
from lra.training.stopping import STUCK_EARLY_S, end_if_stuck

JOIN_LIMIT = timedelta(minutes=10)  # to start on every machine, from a slow shared disk perhaps
NAME_POLL_S = 1.0
EXCHANGE_LIMIT = timedelta(minutes=30)  # longest wait for another process of the run
TELL_AFTER_S = 30.0  # of waiting for another process
GRACE_S = 60  # for the other processes to write a record after one has failed
ACCOUNT_S = 2  # for the process that failed first to leave its traceback
LAUNCHED = "LRA_LAUNCHED"  # set in processes that `launch` started


def rank() -> int:
    """Number of this process; 0 writes files and talks."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes of this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this process writes files and talks."""
    return rank() == 0


def all_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over all processes, in place; to be read at once, so it waits for the device."""
    if dist.is_initialized():
        with telling():
            dist.all_reduce(tensor)
        if tensor.is_cuda:  # where the exchange was only put behind the steps that are under way
            with telling(f"rank {rank()}: waiting for its device, or the other processes"):
                torch.cuda.synchronize(tensor.device)
    return tensor


def any_of(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set in any process; all processes must ask together."""
    if not dist.is_initialized():
        return flag
    return bool(all_sum(torch.tensor(int(flag), device=device)).item())


def gather(value: Any) -> list[Any]:
    """The values of all processes, by rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    with telling():
        dist.all_gather_object(values, value)
    return values


def from_main(value: Any) -> Any:
    """The main process's value, everywhere."""
    if not dist.is_initialized():
        return value
    values = [value]
    with telling():
        dist.broadcast_object_list(values)
    return values[0]


def adopt_slurm() -> None:
    """Translate Slurm's variables into torch.distributed's, if srun started this as one of several.

    The script of a job of several tasks, and a shell in it, are told of these tasks as well, but
    run once: only a step's variables say that there are others to meet.
    """
    env = os.environ
    if "RANK" in env:
        return
    num_tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    if num_tasks < 2 or "SLURM_PROCID" not in env:
        if int(env.get("SLURM_NTASKS", "1")) > 1:
            _say_once(
                f"note: Slurm's job has {env['SLURM_NTASKS']} tasks, but srun did not start this "
                "process, so it runs alone; to use all: srun python run.py ..."
            )
        return
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], str(num_tasks)
    env["LOCAL_RANK"] = env.get("SLURM_LOCALID", "0")
    env.setdefault("MASTER_ADDR", first_node(nodes))
    # The same for all tasks of a step, and different for most steps that share a node.
    job, step = int(env.get("SLURM_JOB_ID", "0")), int(env.get("SLURM_STEP_ID", "0"))
    env.setdefault("MASTER_PORT", str(20_000 + (job + 101 * step) % 20_000))


def first_node(nodes: str) -> str:
    """The first host of Slurm's notation: node[07-09,12],gpu1 -> node07.

    Written out here since containers often lack `scontrol`, which expands the rest.
    """
    outside = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", outside[0] if outside else "")


@functools.cache  # jobs of a sweep share a process
def _say_once(text: str) -> None:
    print_line(text, sys.stderr)


def is_worker() -> bool:
    """Whether this program, torchrun or Slurm started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_rank() -> int:
    """Number of this process on its machine; picks the device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def give_back_to_queue() -> None:
    """Let a job scheduler's own handler of SIGUSR2, its warning, put the job back in its queue.

    That may end this process, so all that the run leaves behind has to be written before.
    """
    handler = signal.getsignal(signal.SIGUSR2)
    if callable(handler) and handler is not terminate:
        os.kill(os.getpid(), signal.SIGUSR2)


def join(device_type: str) -> None:
    """Meet the other processes, if there are any; once per process.

    Raises:
        OSError: they were not all there within JOIN_LIMIT.
    """
    if not is_worker() or dist.is_initialized():
        return
    env = os.environ
    where = f"{env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"
    awaited = f"waiting for {env['WORLD_SIZE']} processes to meet at {where}"
    watch_no_more = end_if_stuck(STUCK_EARLY_S)
    if env.get("RANK") == "0":
        print_line(f"{awaited}, at most {JOIN_LIMIT.seconds // 60} minutes", sys.stderr)
    backend = "nccl" if device_type == "cuda" else "gloo"
    try:
        with telling(f"rank {env.get('RANK')}: {awaited}"):
            _await_name(str(env.get("MASTER_ADDR")), time.monotonic() + JOIN_LIMIT.total_seconds())
            store, number, count = next(dist.rendezvous("env://", timeout=JOIN_LIMIT))
            dist.init_process_group(
                backend, store=store, rank=number, world_size=count, timeout=EXCHANGE_LIMIT
            )
    except (RuntimeError, ValueError, socket.gaierror) as error:
        watch_no_more()
        raise OSError(
            f"{awaited}: they did not ({first_line(error)}); start all of them with srun or "
            "torchrun, or unset RANK and WORLD_SIZE to run this one alone"
        ) from None


def _await_name(host: str, deadline: float) -> None:
    """Wait until a machine's name is known, for which the library behind the meeting has no limit.

    Raises:
        socket.gaierror: it still is not at `deadline`, by the monotonic clock.
    """
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror:
            if time.monotonic() > deadline:
                raise
        time.sleep(NAME_POLL_S)


@contextlib.contextmanager
def telling(text: str | None = None) -> Iterator[None]:
    """Say what is waited for, if the block takes long."""
    text = text or f"rank {rank()}: waiting for the other processes of this run"
    timer = threading.Timer(TELL_AFTER_S, print_line, [text, sys.stderr])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def launch(function: Callable[..., None], num_processes: int, *arguments: Any) -> str:
    """Run `function(*arguments)` in processes of this machine and wait for all.

    When one fails, the others are stopped. Signals to this process are for all of them.

    Returns:
        The names of such signals; empty if there were none.

    Raises:
        RuntimeError: a process failed; carries its rank and traceback.
    """
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.start_processes(
        _worker, (function, num_processes, port, arguments), num_processes, join=False,
        start_method="spawn",
    )  # fmt: skip
    assert context is not None
    forwarded = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        forwarded.append(signal.SIGHUP)
    received: set[int] = set()

    def names() -> str:
        return ", ".join(signal.Signals(s).name for s in sorted(received))

    def forward(number: int, _frame: object) -> None:
        received.add(number)
        for process in context.processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, number)

    before = {s: signal.signal(s, forward) for s in forwarded}
    try:
        while not context.join(grace_period=GRACE_S):
            pass
    except mp.ProcessRaisedException as error:
        raise RuntimeError(str(error).strip()) from None
    except mp.ProcessExitedException as error:
        if received:
            return names()
        raise RuntimeError(f"process of rank {error.error_index} ended: {error}") from None
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    if signal.SIGUSR2 in received:
        give_back_to_queue()
    return names()


def _worker(
    local: int, function: Callable[..., None], world: int, port: int, arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(local), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), LAUNCHED: "1",
    }  # fmt: skip
    try:
        function(*arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def first_failure(run_dir: Path, message: str, trace: str) -> tuple[str, str]:
    """Message and traceback of the process that failed first.

    The others fail right after it, when they find it gone; so each leaves its account in a file of
    the run's folder, and the main process looks for the earliest.
    """
    path = run_dir / f"traceback-rank{rank()}.txt"
    if not path.exists():
        write_atomically(path, f"rank {rank()}: {message}\n{trace}")
    if is_main():
        time.sleep(ACCOUNT_S)
    first = min(run_dir.glob("traceback-rank*.txt"), key=lambda p: p.stat().st_mtime_ns)
    account, _, trace = first.read_text(encoding="utf-8").partition("\n")
    return account, trace
