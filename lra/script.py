"""How a program starts and ends: a message and a code for wrong input, quietly if nobody reads."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from lra.console import print_line

EXIT_USAGE, EXIT_INTERRUPTED, EXIT_UNREAD = 2, 75, 141  # the last is 128 + SIGPIPE, as of a shell

exit_codes: list[int] = []  # of what a program has done so far, such as the jobs of a sweep


class Parser(argparse.ArgumentParser):
    """For scripts that take settings as key=value: shows the docstring, and knows a usual slip."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        """Leave with usage and message; an unknown option is perhaps a setting."""
        if message.startswith("unrecognized arguments: -"):
            message += " (a setting has no dashes: key=value)"
        super().error(message)


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Leave with what `main` returns; a user's error is one line on stderr, and code 2."""
    open_streams()
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        unread()
    except (ValueError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        print_line("interrupted", sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code)


def open_streams() -> None:
    """Let what is printed end no program: to a closed stream it goes nowhere, escaped if need be.

    Python has None for a stream that is closed (`>&-`), and another file could be opened under its
    number. What the encoding lacks, such as a file's name that is not UTF-8, is escaped.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # under that number, the lowest free
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):  # standard error is so from the start
        sys.stdout.reconfigure(errors="backslashreplace")


def unread() -> NoReturn:
    """Leave because standard output leads to a process that has ended, such as `head`."""
    # What is still buffered would raise once more when Python ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(EXIT_UNREAD)


def terminate(number: int, _frame: object) -> NoReturn:
    """Leave because of a signal that nothing else handles; nothing needs to be saved then."""
    print_line(f"stopped by {signal.Signals(number).name}", sys.stderr)
    sys.exit(EXIT_INTERRUPTED)


def fail(message: str) -> NoReturn:
    """Print an error and leave with the code for wrong input."""
    print_line(f"error: {message}", sys.stderr)
    sys.exit(EXIT_USAGE)


def check_packages() -> None:
    """Leave, with what to do, if this Python is too old or lacks what every program needs."""
    here = Path(__file__).resolve().parent.parent
    missing = [n for n in ("hydra", "numpy", "torch") if importlib.util.find_spec(n) is None]
    if sys.version_info >= (3, 11) and not missing:
        return
    python = here / ".venv" / "bin" / "python"
    remedy = (
        f"use {python}" if python.exists() else f"`make setup` in {here} makes one that has all"
    )
    why = f"has no {' and no '.join(missing)}" if missing else "is older than 3.11"
    fail(f"this Python ({sys.executable}, {sys.version.split()[0]}) {why}; {remedy}")
