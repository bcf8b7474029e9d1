"""The gradient of a batch, in as many micro-batches as memory asks for: the same in any number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lra.tasks.batches import Batch
from lra.training import checkpoint, distributed
from lra.training.evaluate import loss_and_hits
from lra.training.hardware import Hardware


def accumulate(
    forward: Callable[..., torch.Tensor],
    batch: Batch,
    num_answers: int,
    hardware: Hardware,
    scaler: torch.amp.GradScaler,
    *,
    num_parts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the gradient of this process's part of a batch; return its share of the loss, and hits.

    `num_answers` is how many the whole batch asks for, over which the loss is a mean; the part is
    computed in `num_parts` micro-batches.
    """
    loss = torch.zeros((), device=hardware.device)
    hits = torch.zeros((), device=hardware.device, dtype=torch.int64)
    for i, micro in enumerate(batch.split(num_parts)):
        with hardware.exchange(forward, i == num_parts - 1):
            with hardware.autocast():
                logits = forward(*micro.inputs)
            losses_B, hits_B = loss_and_hits(logits, micro.labels_B)
            # Sum over rows, then divide by the whole batch: any split gives the same gradient.
            micro_loss = losses_B.sum() / num_answers
            # Gradients are averaged over the processes, and a sum is wanted.
            scaler.scale(micro_loss * distributed.world_size()).backward()
        loss += micro_loss.detach()
        hits += hits_B.sum()
    return loss, hits


def accumulate_as_fits(
    forward: Callable[..., torch.Tensor],
    batch: Batch,
    num_answers: int,
    hardware: Hardware,
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    *,
    num_examples: int,
    micro_batch_size: int,
    statistics: Sequence[torch.Tensor],
    say: Callable[[str], None],
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """`accumulate`, once more in parts of half the size whenever memory does not suffice.

    Args:
        num_examples: of the whole batch, in all processes.
        statistics: what a forward pass in training changes, as batch norm does.

    Returns:
        Loss, hits, and the size of the parts that fitted.
    """
    random_states = checkpoint.random_states()
    before = [x.clone() for x in statistics]
    while True:
        try:
            loss, hits = accumulate(
                forward, batch, num_answers, hardware, scaler,
                num_parts=num_micro_batches(num_examples, micro_batch_size),
            )  # fmt: skip
            return loss, hits, micro_batch_size
        except (RuntimeError, MemoryError) as error:
            # Several processes cannot repeat a step that one of them did not finish.
            is_alone = distributed.world_size() == 1
            if not is_out_of_memory(error) or micro_batch_size == 1 or not is_alone:
                raise
        micro_batch_size = -(-micro_batch_size // 2)
        say(f"out of memory; micro-batch is now {micro_batch_size}")
        optimizer.zero_grad(set_to_none=True)
        hardware.forget_failed_attempt()
        checkpoint.restore_random_states(random_states)
        for now, then in zip(statistics, before, strict=True):
            now.copy_(then)


def num_micro_batches(num_examples: int, micro_batch_size: int) -> int:
    """In how many parts each process computes its share of a batch of `num_examples`.

    As many in all of them, also where shares differ by a row: batch norm exchanges statistics in
    each part. So with parts of one row some may have two.
    """
    world = distributed.world_size()
    largest_share = -(-num_examples // world)
    return min(-(-largest_share // micro_batch_size), num_examples // world)


# What PyTorch's allocator on a CPU says, and what a GPU's driver and libraries say beside it.
NO_MEMORY = ("DefaultCPUAllocator", "CUDA error: out of memory", "_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device."""
    is_own = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_own or any(text in str(error) for text in NO_MEMORY)
