"""What the CPU itself does, with one thread and with all of a run: what its models live on.

Each figure is the median of several calls, in float32:

    large_product_gflops    billions of operations a second of a product of 1,024 x 1,024 matrices;
                            an operation is a multiplication or an addition
    small_products_gflops   the same of 512 products of 16 x 32 by 32 x 48 matrices, as a sequence
                            cut into pieces has them
    medium_products_gflops  the same of 64 products of 64 x 64 matrices
    copy_gb_per_s           10^9 bytes a second, read and written, of 256 MiB, which no cache holds
    softmax_ns              nanoseconds an element, in 8,192 rows of 64
    draw_ns                 nanoseconds an element of 16 random bits, as our dropout draws
                            them, 2^19 at a time
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lra.speed.benchmarks import Limits

LEAST_CALLS = 3


def machine_limits(*, time_s: float) -> list[Limits]:
    """The CPU's rates with one thread and, if PyTorch has more, with all; `time_s` for each."""
    num_threads = torch.get_num_threads()
    try:
        return [limits_of(threads, time_s) for threads in sorted({1, num_threads})]
    finally:
        torch.set_num_threads(num_threads)


def limits_of(num_threads: int, time_s: float) -> Limits:
    """The rates with so many threads, which PyTorch keeps."""
    torch.set_num_threads(num_threads)
    source = torch.ones(2**26)
    target, logits = torch.empty_like(source), torch.randn(8192, 64)
    words = torch.empty(2**17, dtype=torch.int64)  # of four elements each

    def product_gflops(count: int, *size: int) -> float:
        rows, inner, columns = size
        a, b = torch.randn(count, rows, inner), torch.randn(count, inner, columns)
        return 2e-9 * count * rows * inner * columns / median_s(lambda: torch.bmm(a, b), time_s)

    return Limits(
        threads=num_threads,
        large_product_gflops=product_gflops(1, 1024, 1024, 1024),
        small_products_gflops=product_gflops(512, 16, 32, 48),
        medium_products_gflops=product_gflops(64, 64, 64, 64),
        copy_gb_per_s=2e-9 * source.nbytes / median_s(lambda: target.copy_(source), time_s),
        softmax_ns=1e9 * median_s(lambda: logits.softmax(dim=1), time_s) / logits.numel(),
        draw_ns=1e9 * median_s(lambda: words.random_(-(2**63), None), time_s) / 2**19,
    )


def median_s(run: Callable[[], object], time_s: float) -> float:
    """Seconds of a call: the median over `time_s`, and over three calls at least, after one."""
    run()
    times: list[float] = []
    while len(times) < LEAST_CALLS or sum(times) < time_s:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def l2_bytes() -> int | None:
    """Size of a core's second cache; None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return 1024 * int(text.removesuffix("K"))
    return None
