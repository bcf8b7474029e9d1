"""A signal reaches a process that waits inside a library, where Python's handlers do not run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
import hashlib, os, signal, threading, time
from lra.training.stopping import Interrupted, end_if_stuck, stop_on_signals
def in_a_library():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
def later(seconds):
    threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGTERM]).start()
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_a_training_that_nothing_comes_back_to_is_ended_after_a_while() -> None:
    done = python("""
import lra.training.stopping
lra.training.stopping.STUCK_S = 0.4
with stop_on_signals():
    later(0.1)
    in_a_library()
""")
    assert done.returncode == 75
    assert "stopped by SIGTERM without saving" in done.stderr and "line" in done.stderr


def test_a_training_that_goes_on_is_left_to_stop_by_itself() -> None:
    done = python("""
import lra.training.stopping
lra.training.stopping.STUCK_S = 0.4
with stop_on_signals() as stop:
    later(0.1)
    for _ in range(12):  # each step is shorter than the limit, all of them are not
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
        time.sleep(0.1)
    print(stop.requested)
""")
    assert (done.returncode, done.stdout) == (0, "SIGTERM\n"), done.stderr


def test_a_signal_after_the_time_limit_is_the_first() -> None:
    done = python("""
import lra.training.stopping
lra.training.stopping.PATIENCE_S = 0
with stop_on_signals() as stop:
    stop.request("train.time_limit=1 s")
    stop.check(60)  # not as if it were long ago
    os.kill(os.getpid(), signal.SIGTERM)  # while the state is saved
    print(stop.requested)
""")
    assert (done.returncode, done.stdout) == (0, "train.time_limit=1 s\n"), done.stderr


def test_a_time_limit_leaves_signals_as_they_were_for_the_next_job() -> None:
    done = python("""
before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
with stop_on_signals() as stop:
    stop.request("train.time_limit=1 s")
print(before == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])
with stop_on_signals():
    os.kill(os.getpid(), signal.SIGTERM)
print({signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)} == {signal.SIG_IGN})
""")
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr


def test_after_the_training_nothing_is_watched() -> None:
    done = python("""
with stop_on_signals():
    pass
time.sleep(0.2)
print(signal.set_wakeup_fd(-1), [t.name for t in threading.enumerate() if t.name == "signals"])
""")
    assert done.stdout == "-1 []\n", done.stderr


def test_of_a_signal_that_comes_twice_the_second_does_not_disturb_the_record() -> None:
    done = python("""
import lra.training.stopping
for patience_s in (60, 0):
    lra.training.stopping.PATIENCE_S = patience_s
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        print(stop.requested, "ignored")
    except KeyboardInterrupt:
        print("meant anew")
    signal.signal(signal.SIGINT, signal.default_int_handler)
""")
    assert done.stdout == "SIGINT ignored\nmeant anew\n", done.stderr
