"""Processes that share the work of preparing data never keep their parent waiting for ever."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lra.tasks import workers

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_jobs_that_take_long(number: int) -> None:
    def terminate(*_: object) -> None:
        raise KeyboardInterrupt

    for wish in (signal.SIGINT, signal.SIGTERM):  # a shell's background has the first ignored
        signal.signal(wish, terminate)
    others = set(multiprocessing.active_children())
    results = workers.map_in_order(time.sleep, [(0,), *[(60,)] * 5], 2)
    next(results)
    started = time.monotonic()
    threading.Timer(0.2, os.kill, [os.getpid(), number]).start()
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert time.monotonic() - started < 10
    assert set(multiprocessing.active_children()) <= others


def test_what_a_whole_group_is_warned_of_is_the_parents_matter() -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    jobs = [(number,) for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)]
    assert set(workers.map_in_order(signal.getsignal, jobs, 2)) == {signal.SIG_IGN}


def test_a_job_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "JOB_LIMIT_S", 0.3)
    others = set(multiprocessing.active_children())
    started = time.monotonic()
    with pytest.raises(OSError, match="a worker process has not done its job within"):
        list(workers.map_in_order(time.sleep, [(60,)] * 3, 2))
    assert time.monotonic() - started < 10
    assert set(multiprocessing.active_children()) <= others


def _expire() -> None:
    raise TimeoutError("of the job itself")


def test_an_error_of_a_job_is_told_as_it_is() -> None:
    with pytest.raises(TimeoutError, match="of the job itself"):
        list(workers.map_in_order(_expire, [()] * 3, 2))


def test_jobs_that_nobody_has_begun_do_not_disturb_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[object] = []  # in the pool's own thread
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(workers, "_follow_parent", functools.partial(time.sleep, 60))

    def jobs() -> Iterator[tuple[float]]:
        yield from [(0.0,)] * 4
        time.sleep(0.2)  # until the pool has as many at hand as it takes
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(workers.map_in_order(time.sleep, jobs(), 2))
    assert not raised


SPAWNED = """
import multiprocessing, pathlib, pickle, sys
from multiprocessing import reduction
from lra.tasks.cache import prepare
from lra.tasks import pathfinder
from lra.tasks.listops import ListOps

largest = 0
class Pickler(reduction.ForkingPickler):
    @classmethod
    def dumps(cls, obj, protocol=None):
        global largest
        sent = super().dumps(obj, protocol)
        largest = max(largest, len(sent))
        return sent

if __name__ == "__main__":
    reduction.ForkingPickler = Pickler
    import multiprocessing.queues
    multiprocessing.queues._ForkingPickler = Pickler
    multiprocessing.set_start_method(sys.argv[1])
    pathfinder.PICTURES_PER_JOB = 8
    for number in (1, 2):
        for task in (
            ListOps(data_dir=pathlib.Path("x"), num_train=400, num_val=20, num_test=20),
            pathfinder.Pathfinder(data_dir=pathlib.Path("x"), num_train=40, num_val=8, num_test=8),
        ):
            cache = pathlib.Path(sys.argv[2], str(number))
            print(prepare(task, cache, num_workers=number).meta["splits"]["train"]["sha256"])
    print(largest, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_inherit_nothing_get_little_and_do_the_same(
    tmp_path: Path, method: str
) -> None:
    (tmp_path / "program.py").write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, "program.py", method, str(tmp_path)], cwd=tmp_path, text=True,
        capture_output=True, timeout=200, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == lines[2:] and len(set(lines)) == 2
    assert 0 < int(done.stderr.splitlines()[-1]) < 10_000  # bytes of one job
