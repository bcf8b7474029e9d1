"""The device of a run: choice, precision, threads, synchronisation, memory."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lra.config import HardwareConfig
from lra.tasks.batches import Batch
from lra.training import distributed

DEFAULT_THREADS = torch.get_num_threads()  # so that no job of a sweep inherits another's choice


class Hardware:
    """A checked device with its settings; jobs side by side take devices in turn by their number.

    A process that only starts others takes none (`is_used`): even an idle one would hold some of
    its memory. What then remains to be checked is up to those others.

    Raises:
        ValueError: the device is not there, or cannot compute in the precision asked for.
    """

    def __init__(
        self, config: HardwareConfig, job_number: int = 0, *, is_used: bool = True
    ) -> None:
        self.config = config
        self.stretches: list[dict[str, Any]] = []  # of the run's steps; see `begin`
        has_cuda = torch.cuda.is_available()
        if config.device == "cuda" and not has_cuda:
            raise ValueError(
                "hardware.device=cuda: this machine has no usable CUDA device; use hardware=cpu"
            )
        kind = config.device if config.device != "auto" else "cuda" if has_cuda else "cpu"
        self.device = torch.device(kind)
        if kind == "cuda":
            count = torch.cuda.device_count()
            needed, index = config.num_devices, job_number
            if distributed.is_worker():
                index = distributed.local_rank()
                # A cluster may show each process its own device alone.
                needed = 1 if count == 1 else index + 1
            if needed > count:
                raise ValueError(
                    f"hardware.num_devices={config.num_devices}: this machine has {count} CUDA "
                    f"devices for at least {needed} processes"
                )
            self.device = torch.device("cuda", index % count)
            if not is_used:
                return
            torch.cuda.set_device(self.device)
        if kind == "cpu" and config.precision in ("fp16", "tf32"):
            raise ValueError(
                f"hardware.precision={config.precision}: not on a CPU; use float32 or bf16"
            )
        asks_for_bf16 = kind == "cuda" and config.precision == "bf16"
        if asks_for_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ValueError(
                f"hardware.precision=bf16: {torch.cuda.get_device_name()} has no bfloat16; "
                "use fp16 or float32"
            )
        asks_for_tf32 = kind == "cuda" and config.precision == "tf32"
        if asks_for_tf32 and torch.cuda.get_device_capability()[0] < 8:
            raise ValueError(
                f"hardware.precision=tf32: {torch.cuda.get_device_name()} has no TF32; use float32 "
                "or fp16"
            )
        torch.set_num_threads(config.num_threads or DEFAULT_THREADS)
        if kind == "cpu":
            keep_freed_memory()
        if kind == "cuda":
            torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
            torch.backends.cudnn.allow_tf32 = config.precision == "tf32"
        self.forget_peak_memory()

    @property
    def name(self) -> str:
        """What the device calls itself."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name()
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Lower precision for a forward pass, where asked for."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.precision)
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def parallel(self, model: nn.Module) -> nn.Module:
        """The model with gradients averaged over the processes, if there are several."""
        if distributed.world_size() == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        uses_all = getattr(getattr(model, "encoder", None), "uses_all", True)
        parallel = nn.parallel.DistributedDataParallel(
            model, device_ids=devices, find_unused_parameters=not uses_all
        )
        # Buffers begin alike, and what changes some, batch norm, has the same sums everywhere.
        parallel.broadcast_buffers = False
        return parallel

    def exchange(self, model: object, wanted: bool) -> contextlib.AbstractContextManager[object]:
        """For a backward pass: add gradients up over the processes, or, for all but the last part
        of a batch, leave them where they are."""
        parallel = getattr(model, "_orig_mod", model)  # of a compiled one
        if not isinstance(parallel, nn.parallel.DistributedDataParallel):
            return contextlib.nullcontext()
        return distributed.telling() if wanted else parallel.no_sync()

    def pin(self, batch: Batch) -> Batch:
        """The batch where the device can fetch it while the host goes on; in any thread."""
        if self.device.type != "cuda":
            return batch
        torch.cuda.set_device(self.device)  # a thread starts with the first one
        return batch.pin_memory()

    def synchronize(self) -> None:
        """Wait until the device has done all work, so that a clock may be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def forget_peak_memory(self) -> None:
        """Count the peak anew, for a job or a phase of its own."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def forget_failed_attempt(self) -> None:
        """Give libraries beside PyTorch what memory it holds free, and count the peak anew."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.forget_peak_memory()

    def peak_memory_bytes(self) -> int | None:
        """Most memory that tensors took on the device; None where it is not counted (CPU)."""
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None

    def begin(self, step: int, micro_batch_size: int, software: Mapping[str, Any]) -> str:
        """Note how steps from `step` on are computed, if otherwise than those before.

        A run may be stopped here and resumed there; `stretches` tells which of its steps were
        computed how, in their order. None of the differences is part of a run's identity, and each
        changes its numbers: by rounding at least, and by other dropout where the batch is split
        otherwise.

        Args:
            software: versions that steps depend on too, by name.

        Returns:
            What has changed, in words; empty if nothing has.
        """
        now = self.describe(micro_batch_size) | dict(software)
        # How batches are built changes nothing, and threads nothing on a CUDA device.
        for key in ("stretches", "num_workers", *["num_threads"] * (self.device.type == "cuda")):
            now.pop(key, None)
        while self.stretches and self.stretches[-1]["from_step"] >= step:
            self.stretches.pop()  # no step was made in it
        if not self.stretches and step > 1:
            self.stretches.append({"from_step": 1})  # made by a version that did not keep this
        before = self.stretches[-1] if self.stretches else {}
        changed = [key for key, value in now.items() if before.get(key, value) != value]
        if changed or before.keys() <= {"from_step"}:
            self.stretches.append({"from_step": step, **now})
        return ", ".join(f"{key} {before[key]} before, now {now[key]}" for key in changed)

    def describe(self, micro_batch_size: int | None) -> dict[str, Any]:
        """The record's `hardware` block: how the last steps were computed, or all of them.

        If not all were computed alike, `stretches` has the settings from each `from_step` on.
        """
        several = {"stretches": self.stretches} if len(self.stretches) > 1 else {}
        return {
            "device": self.device.type,
            "name": self.name,
            "precision": self.config.precision,
            "num_devices": distributed.world_size(),
            "num_threads": torch.get_num_threads(),
            "num_workers": self.config.num_workers,
            "micro_batch_size": micro_batch_size,
            "compile": self.config.compile,
            **several,
        }


def keep_freed_memory() -> None:
    """Let the C library keep what tensors free for the next ones; nothing where it is not glibc.

    By default it gives blocks of 32 MiB and more back to the system at once, and the system clears
    each page anew when the next step asks for it: 40 % of a step at 32 rows of 4,096 tokens.
    """
    mmap_max, trim_threshold = -4, -1  # of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
