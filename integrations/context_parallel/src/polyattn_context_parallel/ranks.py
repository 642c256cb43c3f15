"""Which ranks exchange data, and for how long? `ContextParallel`: the ranks that share sequences.

Everything that moves goes through `torch.distributed`, over a process group of its own. So no other
traffic of the model's comes between, and nothing waits for a rank longer than `timeout`.
"""

from __future__ import annotations

import atexit
import hashlib
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from polyattn import PolyattnError
from polyattn.errors import SpecError, describe, plain, shown
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

NOTE_BYTES = 480
"""What a rank says of itself where ranks compare notes: 32 bytes of digest come before it."""


WATCH = 1.25
"""A collective that the host doesn't wait for may take this many times the timeout."""

LETTING_GO = 0.05
"""Seconds that an ending process leaves to gloo's threads. They let go of a collective's tensors after it
has returned. If the interpreter is gone by then, the process aborts (torch 2.13,
pytorch/pytorch#179291)."""

# The later name, where torch has it (2.13); the earlier one warns there.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@cache
def _end_later() -> None:
    """Have this process wait at its end, once."""
    atexit.register(time.sleep, LETTING_GO)


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as bytes, uint8: what collectives take, whatever they are."""
    return tensor.contiguous().view(torch.uint8).flatten()


class ParallelError(PolyattnError):
    """Ranks disagree, or one died or didn't answer. Every rank raises it."""


class ContextParallel:
    """The ranks that share the sequences' keys: one dimension of a `DeviceMesh`.

    - `mesh`: one-dimensional, as `mesh["context"]` of a larger one is; along its other dimensions
      ranks are independent, as those of tensor parallelism are.
    - `timeout`: seconds after which a rank that doesn't answer is an error on all others.
    - `checks`: compare the step at each plan, so that ranks that disagree raise before it runs. That is
      one small all-gather a step, which waits for the device.

    Every rank of the mesh builds one at the same time. After an error between or within collectives, a
    rank doesn't know how far the others are. So this object then refuses every call. Raises
    `SpecError`, `ParallelError`.
    """

    def __init__(self, mesh: DeviceMesh, *, timeout: float = 60.0, checks: bool = True):
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise SpecError(
                f"mesh={shown(mesh)} must be a DeviceMesh of one dimension, as mesh['context'] of a "
                "larger one is"
            )
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise SpecError(f"timeout={timeout!r} must be a positive number of seconds")
        self.mesh, self.timeout, self.checks = mesh, float(timeout), checks
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.device_type: str = mesh.device_type
        self.broken: str | None = None
        self._notes = 0
        if self.device_type == "cpu":
            _end_later()
        self._ranks: list[int] = mesh.mesh.flatten().tolist()
        # NCCL's watchdog would end the process; the waits on the host here time out before it.
        limit = self.timeout * (1.0 if self.device_type == "cpu" else WATCH)
        try:
            self._group: Any = dist.new_group(
                self._ranks, timeout=timedelta(seconds=limit), use_local_synchronization=True
            )
        except Exception as error:
            raise ParallelError(
                f"ranks {self._ranks} can't be joined: {describe(error)}"
            ) from error

    @property
    def device(self) -> torch.device:
        """Where collectives take their tensors from."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.accelerator.current_device_index())

    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        """Fill `received` uint8 (size, bytes) with every rank's `sent` (bytes,)."""
        self._do(lambda: _gather(received.view(-1), sent, group=self._group))

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Fill row r of `received` (size, bytes) with the row of `sent` that rank r has for this one."""
        self._do(lambda: dist.all_to_all_single(received, sent, group=self._group))

    def broadcast(self, tensor: Tensor) -> None:
        """Fill `tensor` with the first rank's."""
        self._do(lambda: dist.broadcast(tensor, self._ranks[0], group=self._group))

    def pass_on(self, received: Tensor, sent: Tensor) -> Callable[[], None]:
        """Send to the next rank of the ring and receive from the one before.

        Returns a function that waits until `received` is complete and `sent` may be overwritten.
        """
        after = self._ranks[(self.rank + 1) % self.size]
        before = self._ranks[(self.rank - 1) % self.size]
        operations = [
            dist.P2POp(dist.isend, sent, after, self._group),
            dist.P2POp(dist.irecv, received, before, self._group),
        ]
        works: list[Any] = []
        self._do(lambda: works.extend(dist.batch_isend_irecv(operations)))
        return lambda: self._do(lambda: [work.wait() for work in works])

    def gathered(self, own: Tensor) -> Tensor:
        """Return (size, ...): every rank's tensor, all of one shape and dtype."""
        received = own.new_empty(self.size, *own.shape)
        if own.numel():
            self.all_gather(received.view(torch.uint8).view(self.size, -1), raw_bytes(own))
        return received

    def exchanged(self, sent: Tensor) -> Tensor:
        """Return (size, ...): this rank's row of each rank's `sent` (size, ...)."""
        received = torch.empty_like(sent)
        if sent.numel():
            self.all_to_all(
                *(tensor.view(torch.uint8).view(self.size, -1) for tensor in (received, sent))
            )
        return received

    def longest(self, seconds: float) -> float:
        """Return the largest of the ranks' numbers, the same on all of them."""
        longest = torch.tensor([seconds], dtype=torch.float32, device=self.device)
        self._do(lambda: dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._group))
        return float(longest)

    def numbers(self, own: list[int]) -> list[list[int]]:
        """Return every rank's list of as many integers."""
        sent = torch.tensor(own, dtype=torch.int64, device=self.device)
        received = sent.new_empty(self.size, len(own))
        self._do(lambda: _gather(received.view(-1), sent, group=self._group))
        return list(received.tolist())

    def agree(self, what: str, note: str, error: Exception | None = None) -> None:
        """Compare notes with the other ranks: all go on, or all raise.

        `note` says what this rank is about to do, `error` why it can't. Raises `error` on the rank
        that has one, `ParallelError` on the others, or where notes differ.
        """
        self.check()
        # Otherwise a rank that skipped a step would pass for one at this step.
        self._notes += 1
        note = f"note {self._notes}: {note}"
        said = plain(describe(error), NOTE_BYTES) if error is not None else note
        digest = hashlib.sha256(f"{error is None} {note if error is None else said}".encode())
        text = said.encode()[:NOTE_BYTES].ljust(NOTE_BYTES)
        mark = b"!" if error is not None else b" "
        sent = torch.tensor(list(digest.digest() + mark + text), dtype=torch.uint8, device="cpu")
        sent = sent.to(self.device)
        received = sent.new_empty(self.size, len(sent))
        self._do(
            lambda: self._wait(_gather(received.view(-1), sent, group=self._group, async_op=True))
        )
        rows = [bytes(row) for row in received.tolist()]
        if error is not None:
            raise error
        said_by = [row[33:].decode(errors="replace").strip() for row in rows]
        for rank, row in enumerate(rows):
            if row[32:33] == b"!":
                raise ParallelError(f"rank {rank} can't take part in {what}: {said_by[rank]}")
        if len({row[:32] for row in rows}) > 1:
            each = "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(said_by))
            raise ParallelError(
                f"the ranks disagree on {what}; pass the same to every rank. {each}"
            )

    def check(self) -> None:
        """Raise `ParallelError` if an earlier error has left the ranks at different places."""
        if self.broken is not None:
            raise ParallelError(
                "an earlier error has left the ranks at different places; build a new ContextParallel "
                f"on all of them. It was: {self.broken}"
            )

    def break_off(self, error: BaseException) -> None:
        """Record that this rank left a step unfinished, while others may wait for it."""
        self.broken = self.broken or describe(error)

    def _do(self, collective: Callable[[], Any]) -> None:
        self.check()
        try:
            collective()
        except ParallelError:
            raise
        except Exception as error:
            self.break_off(error)
            raise ParallelError(
                f"rank {self.rank} of {self.size}: another rank died, failed or did not answer within "
                f"{self.timeout:g} s: {describe(error)}"
            ) from error

    def _wait(self, work: Any) -> None:
        """Wait on the host, at most for the timeout; backends' own waits may be longer."""
        if self.device_type == "cpu":
            work.wait()
            return
        until = time.monotonic() + self.timeout
        while not work.is_completed():
            if time.monotonic() > until:
                raise TimeoutError("no answer")
        work.wait()

    def __repr__(self) -> str:
        return f"<ContextParallel: rank {self.rank} of {self.size} on {self.device_type}>"
