"""Processes that share the work of preparing data; what they yield does not depend on how many."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

JOB_LIMIT_S = 3600.0  # no job takes more than minutes, unless it reads from a disk that hangs


def available_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that processes may still take here, under a limit of their group too.

    A terabyte where the system does not say. `root` holds proc/ and sys/.
    """
    found = 2**40
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found = int(next(x for x in lines if x.startswith("MemAvailable:")).split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        group = root / "sys/fs/cgroup"
        limit, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        found = min(found, max(0, int(limit) - int(used)))
    return found


def map_in_order(
    function: Callable[..., Result], jobs: Iterable[tuple[Any, ...]], num_workers: int
) -> Iterator[Result]:
    """`function(*job)` of each job, in order; takes few jobs at a time, so they may be endless.

    Raises:
        OSError: a process was ended from outside, or a job took longer than JOB_LIMIT_S.
    """
    if num_workers <= 1:
        yield from itertools.starmap(function, jobs)
        return
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(num_workers, initializer=_follow_parent) as pool:
        running: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                running.append(pool.submit(function, *job))
                if len(running) > 2 * num_workers:
                    yield _result(running.popleft())
            while running:
                yield _result(running.popleft())
        except BrokenProcessPool:
            raise OSError(
                f"one of {num_workers} worker processes was ended from outside, perhaps for want "
                "of memory; try fewer"
            ) from None
        except GeneratorExit:  # the caller has enough
            for future in running:
                future.cancel()
            raise
        except BaseException:  # a signal, say: nobody wants what they are at
            # A pool that breaks ends its jobs itself, and stumbles over one that is cancelled.
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            raise


def _result(future: Future[Result]) -> Result:
    try:
        return future.result(timeout=JOB_LIMIT_S)
    except TimeoutError:
        if future.done():  # it ended just now, or the error is its own
            return future.result()
        raise OSError(
            f"a worker process has not done its job within {JOB_LIMIT_S / 60:g} minutes; does the "
            "disk answer that it reads from? The same command goes on"
        ) from None


def _follow_parent() -> None:
    """Leave signals to a whole group to the parent; end when it is killed, not wait for jobs."""
    signal.set_wakeup_fd(-1)  # the parent's, where processes are forked
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Asked of the system, since not every launcher of jobs tells `multiprocessing` the parent.
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
