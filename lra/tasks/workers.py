"""Processes that share the work of preparing data; what they yield does not depend on how many."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

Result = TypeVar("Result")


def map_in_order(
    function: Callable[..., Result], jobs: Iterable[tuple[Any, ...]], num_workers: int
) -> Iterator[Result]:
    """`function(*job)` of each job, in order; takes few jobs at a time, so they may be endless.

    Raises:
        OSError: a process was ended from outside.
    """
    if num_workers <= 1:
        yield from itertools.starmap(function, jobs)
        return
    with ProcessPoolExecutor(num_workers, initializer=_follow_parent) as pool:
        running: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                running.append(pool.submit(function, *job))
                if len(running) > 2 * num_workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool:
            raise OSError(
                f"one of {num_workers} worker processes was ended from outside, perhaps for want "
                "of memory; try fewer"
            ) from None
        finally:
            for future in running:
                future.cancel()


def _follow_parent() -> None:
    """Leave interrupts to the parent, and end when it is killed instead of waiting for jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Asked of the system, since not every launcher of jobs tells `multiprocessing` the parent.
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
