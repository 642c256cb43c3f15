"""What would a layer's steps launch on a chip that isn't here? Recorded of real ones, and compiled.

A group takes this machine's CPU for the chip. Its layer runs a step of a `Workload`; each launch is
written down instead, with its tensors. `Launch.compiled` hands it to Triton, as a launch would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from chips import h200
from machine_code import code_of, read_unwritten
from polyattn import Batch, Device, LayerGroup, LayerSpec, SharedRun, select
from polyattn.kernel import current_settings
from polyattn.workload.base import workload
from polyattn_triton import launch, planning
from polyattn_triton.compiling.warm_up import blank_frame, blank_inputs
from polyattn_triton.configs import PrefixConfig
from polyattn_triton.functions.pointwise import Generated
from polyattn_triton.variants import MANY_ON_ONE, WAYS, prefix_tiles
from triton.backends.compiler import GPUTarget

Lengths = list[tuple[int, int]]
CPU = torch.device("cpu")
SMS = 132
"""An H200's multiprocessors."""
CHIPS: list[str] = []
"""What was compiled for; Triton keeps kernels by a device's number, which is a chip's place here."""
CODES: dict[bytes, str] = {}
"""Machine code for Hopper, and whose it is, that is yet to be looked at (`look`)."""


def device_of(arch: str) -> Device:
    """Return a chip by its architecture, in this machine's CPU."""
    platform, fp8 = ("cuda", "ocp") if arch.startswith("sm_") else ("rocm", "fnuz")
    return Device(platform, arch, fp8="ocp" if arch == "gfx950" else fp8, torch_device="cpu")


class Launch(NamedTuple):
    """A launch that did not happen."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.fn.__name__)

    @property
    def named(self) -> dict[str, Any]:
        """What the kernel is given, by its parameters' names."""
        return dict(zip(self.kernel.arg_names, self.arguments, strict=True))

    @property
    def constants(self) -> tuple[Any, ...]:
        """What the kernel is compiled with."""
        return self.arguments[-len(self.kernel.constexprs) :]

    def but(self, **changes: Any) -> Launch:
        """Return the same launch with other values of some parameters."""
        return self._replace(arguments=tuple((self.named | changes).values()))

    def handed(self) -> Any:
        """Hand it to Triton to be compiled; returns Triton's kernel."""
        return self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)

    def compiled(self, arch: str) -> Any:
        """Compile it down to machine code. Raises what Triton raises when the chip can't do it."""
        with compiling_for(arch):
            kernel = self.handed()
        if arch == "sm_90":  # whose instructions `machine_code` knows
            CODES[code_of(kernel.asm["cubin"])] = self.name
        return kernel


@contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """Have Triton find a chip of this architecture."""
    if arch not in CHIPS:
        CHIPS.append(arch)
    nvidia = arch.startswith("sm_")
    target = GPUTarget("cuda", int(arch[3:]), 32) if nvidia else GPUTarget("hip", arch, 64)
    driver: Any = SimpleNamespace(
        get_current_device=lambda: CHIPS.index(arch), get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )  # fmt: skip
    with patch.object(triton.runtime.driver, "_active", driver):
        yield


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Write launches down instead."""
    launches: list[Launch] = []

    def record(
        self: Any, grid: Any, tensors: Any, floats: Any, free: Any, kept: Any = launch.NONE
    ) -> None:
        arguments = (*tensors, *kept.tensors, *floats, *self.ints, *free, *self.constants)
        launches.append(Launch(self.kernel, arguments, self.options, grid))

    with patch.object(launch.Site, "__call__", record):
        yield launches


@cache
def group_of(
    spec: LayerSpec, arch: str, backend: str, layout: str | None = None, portable: bool = False
) -> LayerGroup:
    """Return a layer's group on a chip. `portable`: without the kernels that are Hopper's own."""
    settings = replace(current_settings(), layout=layout)
    with patch.object(launch, "facts", h200(SMS)), ExitStack() as stack:
        for name in ("hopper_prefill", "packed_config") if portable else ():
            stack.enter_context(patch.object(planning, name, lambda *_: None))
        chosen = select(spec, device_of(arch), backend=backend, settings=settings, verify=False)
        return LayerGroup(chosen)


def launches(
    spec: LayerSpec, arch: str, lengths: Lengths, backend: str = "TRITON_ATTN", **step: Any
) -> list[Launch]:
    """Return what a layer's step launches, its store first. `step`: how the workload is drawn."""
    group = group_of(spec, arch, backend)
    with patch.object(launch, "facts", h200(SMS)), recorded() as log:
        workload(group, lengths, step=step).run()
    return log


FRESH, CHUNKS = [(512, 512)] * 128, [(512, 1024)] * 128
ALONE, CHUNK, LONG, UNEVEN = FRESH[:1], CHUNKS[:1], [(1, 1 << 17)], [(1, 16), (1, 8192)]
STEPS: dict[str, tuple[str, Lengths]] = {
    "decode": ("decode_kernel", [(1, 16)] * 1056),
    "split": ("decode_kernel", [(1, 1000)]),
    "many": ("decode_kernel", LONG),
    "listed": ("decode_kernel", UNEVEN),
    "few": ("decode_kernel", [(4, 900)]),
    "prefill": ("prefill_kernel", FRESH),
    "pieces": ("prefill_kernel", ALONE),
    "paged": ("prefill_kernel", CHUNKS),
    "paged pieces": ("prefill_kernel", CHUNK),
    "merge": ("merge_kernel", CHUNK),
    "merge listed": ("merge_kernel", UNEVEN),
    "merge many": ("merge_kernel", LONG),
}
"""TRITON_ATTN's phases, with the kernel of each and a step that launches it: `variants.WAYS`, prefill
over pages, and the merges."""
SHARED = {
    "prefix low": ("prefix_kernel", [(1, 900)] * 4),
    "prefix high": ("prefix_kernel", [(1, 900)] * 4),
    "prefix several": ("prefix_kernel", [(3, 900)] * 4),
    "prefix merge": ("merge_parts_kernel", [(1, 900)] * 4),
}
"""Shared prefixes: decodes in the lowest and the highest tiles, rows of several tokens, the merge."""
LISTED = {"paged listed": STEPS["paged"], "paged pieces listed": STEPS["paged pieces"],
          "list": ("list_kernel", CHUNKS)}  # fmt: skip
"""And where masks are asked which key tiles there are, which the last does."""
OWN = {"decode_kernel": "packed_kernel", "prefill_kernel": "prefill_hopper_kernel"}
"""Hopper's own kernels, by those that any chip has."""


def launch_of(
    spec: LayerSpec, arch: str, phase: str, *, own: bool = False, layout: str | None = None,
    kernel: str = "", tile: PrefixConfig | None = None,
) -> Launch:  # fmt: skip
    """Return TRITON_ATTN's launch of a phase; all blocks of its step's sequences are one.

    `own`: by Hopper's own kernels. `kernel`: another one of the step's. `tile`: of a shared prefix.
    Raises LookupError where the step is planned in another way.
    """
    if phase == "write":
        return launches(spec, arch, [(1, 16)])[0]
    name, lengths = (STEPS | SHARED | LISTED)[phase]
    if (
        lengths == UNEVEN and not own
    ):  # a window makes those even, so take one more than fit at once
        lengths = [(1, 8192)] * (MANY_ON_ONE * SMS // spec.num_kv_heads + 1)
    group = group_of(spec, arch, "TRITON_ATTN", layout, not own)
    backend, form = group.planner.chooser.chosen["prefill"].backend, group.cache_format  # type: ignore[attr-defined]
    backend.all_seen = 0  # a window stays, however short the step
    frame = blank_frame(spec, form, CPU)
    inputs = blank_inputs(spec, len(lengths), CPU)
    frame.params.inputs = {} if phase in LISTED else inputs
    queries, lens = (list(numbers) for numbers in zip(*lengths, strict=True))
    starts, table, shared = [0, *accumulate(queries)], None, None
    if form is not None:
        table = torch.zeros(len(lens), -(-max(lens) // form.block_size), dtype=torch.int32)
    if phase in SHARED:
        shared = ((SharedRun(tuple(range(len(lens))), 0, 8),),)
    batch = Batch(
        starts, lens, table, inputs=inputs if phase in LISTED else {}, shared_prefix=shared
    )
    with patch.object(launch, "facts", h200(SMS)), recorded() as log:
        if phase in SHARED:
            backend.plan(batch)
            if backend.prefixes is None:
                raise LookupError(f"{spec} on {arch}: no tile holds a group")
            tiles = prefix_tiles(spec, arch)
            backend.prefixes.configs = (tile or tiles[0 if phase == "prefix low" else -1],)
        if spec.batch_invariant or phase in SHARED:
            plan = backend.plan(batch)
        else:
            whole = phase in ("prefill", "paged", "paged listed")
            plan = backend.plan_rows(batch, cut=not whole)
            way = "prefill" if whole else phase.removeprefix("merge ")
            if way in WAYS and plan.way != way:
                raise LookupError(
                    f"{spec} on {arch}: this step is planned {plan.way!r}, not {way!r}"
                )
        backend.run(plan, frame)
    wanted = kernel or (OWN.get(name, name) if own else name)
    for one in log:
        if one.name == wanted:
            return one
    raise LookupError(f"{spec} on {arch}: {phase!r} launches no {wanted}")


def phases_of(spec: LayerSpec, arch: str) -> dict[str, Launch]:
    """Return all that `TRITON_ATTN` launches for this layer on `arch`: phases, and "write", its store."""
    alone = spec.chunk_size or spec.sink_tokens or spec.rope or spec.variant or spec.mask
    phases = [*STEPS, *({} if alone else SHARED), "write"]
    if Generated.of_mask(spec) is not None:
        phases += LISTED
    phase_launches = {}
    for phase in phases:
        with suppress(LookupError):  # a way that this layer's steps aren't planned
            phase_launches[phase] = launch_of(spec, arch, phase)
    return phase_launches


def compile_phase(spec: LayerSpec, arch: str, phase: str, **how: Any) -> Any:
    """Compile one of TRITON_ATTN's phases down to machine code: `launch_of`."""
    return launch_of(spec, arch, phase, **how).compiled(arch)


def look() -> None:
    """Assert that no kernel that was compiled since the last look reads what nothing wrote."""
    unwritten = read_unwritten([(name, code) for code, name in CODES.items()])
    CODES.clear()
    assert not unwritten
