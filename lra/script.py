"""How a script ends: a message and a code for wrong input, quietly when nobody reads on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

EXIT_USAGE, EXIT_INTERRUPTED, EXIT_UNREAD = 2, 75, 141  # the last is 128 + SIGPIPE, as of a shell


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Leave with what `main` returns; a user's error is one line on stderr, and code 2."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        unread()
    except (ValueError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code)


def unread() -> NoReturn:
    """Leave because standard output leads to a process that has ended, such as `head`."""
    # What is still buffered would raise once more when Python ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(EXIT_UNREAD)


def fail(message: str) -> NoReturn:
    """Print an error and leave with the code for wrong input."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(EXIT_USAGE)
