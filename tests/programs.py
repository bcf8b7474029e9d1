"""Programs of the project in processes of their own, without the seconds that imports take.

A server imports once what they use and forks for every start. The fork is a process like any other,
with its own folder, environment, arguments, signals and exit code, that has only not imported
anything itself; what a test says about imports or the interpreter's start needs `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import os
import pkgutil
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# What is imported late, at the first step, table or figure.
HEAVY = ("torch._dynamo", "torch.distributed", "torch.optim", "torch.utils.data", "numpy.random",
         "hydra.main", "hydra.core.utils", "matplotlib.figure", "PIL.Image")  # fmt: skip

processor_times: list[float] = []  # of the programs that have ended, in seconds


class Program:
    """A started program; offers what tests use of `subprocess.Popen`."""

    def __init__(self, root: Path, words: list[str], stdout: int | None, **settings: Any) -> None:
        self.args = words
        self.returncode: int | None = None
        self._out, self._err = (tempfile.TemporaryFile("w+") for _ in range(2))
        out = self._out.fileno() if stdout is None else stdout
        self._status, given = os.pipe()
        request = {"words": words} | settings
        with open(os.devnull, "rb") as nothing:
            files = [nothing.fileno(), out, self._err.fileno(), given]
            socket.send_fds(_server(root), [json.dumps(request).encode()], files)
        os.close(given)
        self.pid = int(self._read())

    def _read(self) -> bytes:
        """The next line about the process: its number; its exit code and processor time."""
        line = b""
        while not line.endswith(b"\n"):
            if not (part := os.read(self._status, 1)):
                raise RuntimeError("the server of tests/programs.py has ended")
            line += part
        return line

    def poll(self) -> int | None:
        """The exit code, as `subprocess` gives it; None while the process runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            code, seconds = self._read().split()
            self.returncode = int(code)
            processor_times.append(float(seconds))
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; `subprocess.TimeoutExpired`, and SIGKILL, after `timeout` seconds."""
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            self.kill()
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; standard output and standard error."""
        self.wait(timeout)
        found = []
        for file in (self._out, self._err):
            file.seek(0)
            found.append(file.read())
            file.close()
        return found[0], found[1]

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(
    *words: str | Path,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    new_session: bool = False,
    fork: bool = False,
    root: Path = ROOT,
    stdout: int | None = None,
) -> Program:
    """Start a program of a checkout, such as ("run.py", "model=luna") or ("-c", code), in `cwd`.

    `env` is added to the environment of the tests. With `fork` the processes that it spawns are
    forks as well, which tests nothing of how they come to their arguments and imports. `stdout` is
    an open file's number; otherwise `communicate` gives what is written there.
    """
    first, *others = map(str, words)
    full = [first if first == "-c" else str(root / first), *others]
    return Program(
        root, full, stdout, cwd=str(cwd or Path.cwd()), env=dict(os.environ) | (env or {}),
        new_session=new_session, fork=fork,
    )  # fmt: skip


def call(
    *words: str | Path,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 300,
    fork: bool = False,
    root: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; see `start`."""
    program = start(*words, cwd=cwd, env=env, fork=fork, root=root)
    out, err = program.communicate(timeout)
    assert program.returncode is not None
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)


@functools.cache
def _server(root: Path) -> socket.socket:
    """The way to the server of a checkout, which ends with this process."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(root / "tests/programs.py"), str(there.fileno())]
    # As run.py has it, which sets this before it imports torch.
    env = dict(os.environ) | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(root)}
    process = subprocess.Popen(command, cwd=root, env=env, pass_fds=[there.fileno()])
    there.close()
    atexit.register(process.wait)
    atexit.register(here.close)
    return here


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request; returns only in such a fork, with the request and its open files."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, files, *_ = socket.recv_fds(connection, 1 << 20, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
        while _has_children() and os.waitpid(-1, os.WNOHANG)[0]:
            pass
    # A parent for the program, who waits for it and tells how it ended.
    connection.close()
    *files, status = files
    pid = os.fork()
    if pid == 0:
        os.close(status)
        return json.loads(message), files
    for file in files:
        os.close(file)
    os.write(status, b"%d\n" % pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    os.write(status, b"%d %f\n" % (code, used.ru_utime + used.ru_stime))
    os._exit(0)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def become(request: dict[str, Any], files: list[int], path: list[str]) -> None:
    """Run the program as the interpreter would, in this process."""
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout = open(0), open(1, "w")
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGPIPE else signal.SIG_DFL)
    import numpy as np

    random.seed()  # otherwise all programs would draw the same "random" numbers
    np.random.seed()
    if request["fork"]:
        contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
        contexts["spawn"] = contexts["fork"]
    script, *arguments = request["words"]
    module = types.ModuleType("__main__")
    if script == "-c":
        source, *arguments = arguments
        folder = ""
    else:
        source = Path(script).read_text(encoding="utf-8")
        folder = str(Path(script).parent)
        module.__file__ = script
    sys.modules["__main__"] = module
    sys.argv = [script, *arguments]
    added = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = [folder, *added, *path]
    code: Any = None
    try:
        exec(compile(source, script, "exec"), module.__dict__)
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    # What the interpreter does at its end, but for taking down all that the server imported, which
    # takes longer than most programs run.
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    sys.path.remove(str(ROOT / "tests"))  # which has a package `models` of its own
    own_path = [p for p in sys.path if p != str(ROOT)]
    for name in HEAVY:
        with contextlib.suppress(ImportError):  # some come with extras
            importlib.import_module(name)
    for package in ("models", "lra"):
        path = importlib.import_module(package).__path__
        for info in pkgutil.walk_packages(path, f"{package}."):
            importlib.import_module(info.name)
    gc.freeze()  # collections in the forks leave alone what they share
    become(*serve(socket.socket(fileno=int(sys.argv[1]))), own_path)
