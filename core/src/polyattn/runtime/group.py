"""What shares kernels, plans and workspaces? `LayerGroup`: the loaded backends of one selection.

A step's plan is a program, which each of the group's layers runs: `StepPlan`.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from polyattn.api import select_for_layer
from polyattn.errors import BatchError, CacheError, PluginError, SpecError, describe, shown
from polyattn.registry.info import BackendInfo, load_object
from polyattn.registry.variants import kernel_spec, variant_of
from polyattn.runtime.backend import Backend, StoreBackend
from polyattn.runtime.blame import blame
from polyattn.runtime.builds import Builds
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.cache.state_cache import StateCache, StateCacheSpec
from polyattn.runtime.functions.coupling import check_coupling
from polyattn.runtime.functions.pointwise import check_step_mask
from polyattn.runtime.graphs.step_buffers import StepSize
from polyattn.runtime.inputs import check_is_real, same_device
from polyattn.runtime.plan_checks import PlanChecks
from polyattn.runtime.program import Call, Op
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.batch_checks import blocks_of_table, check_bounds
from polyattn.runtime.step.uploads import outgoing
from polyattn.runtime.workspaces import Workspaces
from polyattn.selection.cache_format import CacheFormat
from polyattn.selection.running import record_decision
from polyattn.selection.selection import Selection
from polyattn.settings import current_settings
from polyattn.spec.decompose import windowed
from polyattn.spec.kinds import AttentionKind
from polyattn.spec.layer import LayerSpec

BackendT = TypeVar("BackendT")
log = logging.getLogger("polyattn")


UNKNOWN = 1 << 32
NOWHERE_ELSE = nullcontext()
_numbers = itertools.count(1)
_plans: dict[int, weakref.ref[StepPlan]] = {}
"""By their handles' numbers. A plan that goes takes its place along, by C code alone."""


class StepPlanner(ABC):
    """How a family plans a step: `polyattn.families.FAMILY.planning:Planner(group)`."""

    @abstractmethod
    def check(self, batch: Batch) -> None:
        """Check that a step has what the layers need, eager or replayed. Raises `BatchError`."""

    @abstractmethod
    def plan(self, batch: Batch) -> StepPlan:
        """Return the calls and merges of a step that `check` accepts. Raises `BatchError`."""

    @abstractmethod
    def refill(self, step: Any, batch: Batch) -> None:
        """Write a step that `check` accepts into what an earlier plan's launches read.

        Its calls stay as they are. Raises `BatchError` where the step is of another kind.
        """

    def check_cache(self, cache: KVCache) -> None:
        """Check that the kernels can name all places of a cache. Raises `CacheError`."""
        return

    def reads_tensors(self, step: Any) -> bool:
        """Whether `refill` reads the batch's tensors, which must hold the step then."""
        return True

    def note(self, step: StepPlan, call: Call) -> str:
        """Return the details of a call in `StepPlan.explain`, after its line."""
        return ""

    @property
    def padding_rows(self) -> bool:
        """Whether all backends that may run a step take padding rows of several query tokens."""
        return False

    def own(self, batch: Batch) -> Batch:
        """Return a captured step, whose groups share one batch, as this group's layers have it."""
        return batch

    def size_problem(self, size: StepSize) -> str | None:
        """Why the group's backends can't capture a step of this size, None where they can."""
        return None

    def replay_problem(self, batch: Batch) -> str | None:
        """Why a captured graph can't run a step that it has room for, None where it can."""
        return None


class StepPlan:
    """A step of one group: planned once, run by each of its layers. Any number may be alive at once.

    Attributes:
        group: whose step it is.
        batch: the step's sequences.
        ops: what it runs, in order.
        handle: int64 () on the CPU: the number by which a compiled graph finds the plan. It is a
            tensor, so another step doesn't recompile the graph.

    Examples:
        >>> group = LayerGroup(LayerSpec(num_heads=4, head_size=64, dtype="float32", cached=False))
        >>> group.plan(Batch.from_lens([5, 1], [5, 40])).batch.num_tokens
        6

    """

    def __init__(self, group: LayerGroup, batch: Batch, ops: Iterable[Op]):
        self.group, self.batch, self.ops = group, batch, tuple(ops)
        # Looked up once a step: a layer's call pays for each attribute.
        self._program = [(op.rows, op.run) for op in self.ops]
        # The cache must have as many blocks; a table that only the device has isn't read.
        on_host = group.device_type == "cpu" and batch.block_table is not None
        # A captured step's plan is refilled with other steps than its batch says.
        refilled = group.spec.graph_capture or group.spec.length_bounds
        self._num_blocks = UNKNOWN if on_host and not refilled else 0
        number = next(_numbers)
        _plans[number] = weakref.ref(self, partial(_plans.pop, number))
        self.handle = torch.from_numpy(np.array(number))  # a quarter of what torch.tensor takes

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """The backends' parts, in the order in which they run."""
        return tuple(call for op in self.ops for call in op.calls)

    def run(self, frame: Any) -> None:
        """Run the step for a layer.

        Args:
            frame: the layer's tensors, checked already. The entries of a block table on the host are read
                once a step.

        Raises:
            BatchError: the table names a block that the cache lacks.

        """
        cache = frame.cache
        if cache is not None and self._num_blocks > cache.num_blocks:
            self._num_blocks = blocks_of_table(self.group.spec, self.batch, cache)
        try:
            for rows, run in self._program:
                if rows is None:
                    run(frame)
                    continue
                part = frame.part(rows)
                run(part)
                if isinstance(rows, Tensor):
                    frame.put(rows, part)
        except Exception as error:
            blame(error, self)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the value: kernels' plans have memory of their own, and a handle is one's."""
        return _planned, (self.group, self.batch)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {'; '.join(self.explain().splitlines())}>"

    def explain(self) -> str:
        """Return which backend runs which of the step's sequences, a line each.

        For decodes it says which shared prefixes are read once, or why none is.
        """
        lines = []
        for call in self.calls:
            batch, detail = call.plan.batch, call.plan.detail
            lines.append(
                f"{call.phase}: {batch.num_seqs} sequences, {batch.num_tokens} query tokens, up to "
                f"{batch.max_seq_len} keys: {call.name}{f' ({detail})' if detail else ''}"
                f"{self.group.planner.note(self, call)}"
            )
        return "\n".join(lines)


def _planned(group: LayerGroup, batch: Batch) -> StepPlan:
    return group.plan(batch)


def plan_of(handle: Tensor) -> StepPlan | None:
    """Return the plan behind a handle, None where it is gone."""
    known = _plans.get(int(handle))
    return None if known is None else known()


class LayerGroup:
    """The loaded backends of one selection, which layers that compute the same share.

    It remembers no step: `plan(batch)` returns a value, and any number of plans are alive at once.
    Layers of one group run one after another, on one stream; use another group on another stream.

    The selection's own backends are built (compiled) before the constructor returns. Candidates that
    may be faster for some steps are built in a thread, and serve steps that are planned afterwards. A
    spec with `graph_capture`, `deterministic` or `batch_invariant` waits for all of them at its first
    plan.

    Args:
        selection: what `select` returned, or a `LayerSpec` to select for on this machine.
        cache_format: `cache.format` of an engine's own cache; default: the selection's. It agrees with
            the selection in all but how blocks lie in memory.
        workspaces: another group's, if both run one after another on one stream; default: its own.

    Raises:
        PluginError: a backend can't be loaded.
        CacheError: the format isn't the selection's.
        SpecError, SelectionError: as `select`.

    Examples:
        >>> group = LayerGroup(LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32"))
        >>> group.allocate_cache(num_blocks=8).num_blocks
        8

    """

    def __init__(
        self,
        selection: Selection | LayerSpec,
        *,
        cache_format: CacheFormat | None = None,
        workspaces: Workspaces | None = None,
    ) -> None:
        if isinstance(selection, LayerSpec):
            selection = select_for_layer(selection)
        if not isinstance(selection, Selection):
            raise SpecError(
                f"LayerGroup takes a Selection or a LayerSpec, not {type(selection).__name__}; "
                "of select_layers, pass the selection of each item"
            )
        self.selection = selection
        self.spec, self.device = selection.spec, selection.device
        if (variant := variant_of(self.spec)) is not None:
            check_coupling(variant, self.spec)
        self.cache_format = selection.cache_format
        if cache_format is not None:
            self.check_format(cache_format, spacing=False)
            self.cache_format = cache_format
        if not isinstance(workspaces, Workspaces | None):
            raise SpecError(f"workspaces={shown(workspaces)} must be another group's .workspaces")
        self.workspaces = workspaces or Workspaces()
        self._loaded: dict[Any, Any] = {}
        self._prepared: set[Any] = set()
        self.builds = Builds(str(self.spec))
        # Where kernels must not change from one step to the next, the first waits for all.
        spec = self.spec
        self._waits = bool(spec.graph_capture or spec.deterministic or spec.batch_invariant)
        # With POLYATTN_CHECKS=1 plans are checked key by key, in a share of the time that they take.
        self.plan_checks = PlanChecks() if current_settings().checks else None
        family = self.spec.kind.family
        planner = load_object(f"polyattn.families.{family}.planning:Planner")
        self.planner: StepPlanner = planner(self)
        self.builds.start(self.torch_device)
        self.device_type = self.torch_device.type
        record_decision(selection.decision)

    @cached_property
    def torch_device(self) -> torch.device:
        """The device of the group, and of all of its layers' tensors."""
        return torch.device(str(self.device.torch_device))

    @cached_property
    def store(self) -> StoreBackend:
        """The loaded backend that writes new keys and values to the layers' cache."""
        return self.backend("store", StoreBackend, cache=self.cache_format)

    def plan(self, batch: Batch, reuse: StepPlan | None = None) -> StepPlan:
        """Prepare one step for every layer of the group.

        Args:
            batch: the step's sequences.
            reuse: the plan that a captured graph reads, which then holds this step.

        Returns:
            The plan, a value that any of the group's layers runs; `reuse`, if there is one.

        Raises:
            BatchError: the batch doesn't fit the group's layers.

        """
        self.check(batch)
        if reuse is not None:
            if not isinstance(reuse, StepPlan) or reuse.group is not self:
                raise BatchError(
                    "reuse= is a plan of another group; pass the plan that was captured"
                )
            read = reuse.batch
            if (batch.num_seqs, batch.num_tokens) != (read.num_seqs, read.num_tokens):
                raise BatchError(f"{batch} can't go where {read} was captured; pad it to that")
            with on_the_host():
                self.planner.refill(reuse, batch)
            return reuse
        if self._waits:
            self.finish_builds()
        began = 0.0 if self.plan_checks is None else time.perf_counter()
        outgoing.plans += 1
        try:
            if torch._C._len_torch_function_stack():
                with on_the_host():
                    step = self.planner.plan(batch)
            else:  # as nearly always, without a context
                step = self.planner.plan(batch)
        finally:
            outgoing.plans -= 1
            if outgoing.uploads:
                outgoing.send()
        if batch.staging is not None:
            batch.staging.send()
        if self.plan_checks is not None:
            self.plan_checks(step, time.perf_counter() - began)
        return step

    def check(self, batch: Batch) -> None:
        """Check that a step fits the group's layers; `plan` does so, and a graph before it replays.

        Args:
            batch: the step's sequences.

        Raises:
            BatchError: the batch doesn't fit.

        """
        if not isinstance(batch, Batch):
            raise BatchError(f"batch={shown(batch)} must be a Batch; Batch.from_lens makes one")
        device = self.torch_device
        # Such as FakeTensorMode, in which a plan's tensors would be fake.
        if torch._C._len_torch_dispatch_stack():
            check_is_real("batch", batch.seq_lens)
        if batch.device != device and not same_device(batch.device, device):
            raise BatchError(
                f"the batch is on {batch.device}, the group on {device}; create its "
                f"tensors there, or pass device= to a batch without tensors"
            )
        if not batch.causal:
            raise BatchError(
                "the batch comes from over_context() and is part of a step; plan the whole batch, "
                "and set causal in the spec"
            )
        if batch.first_positions is not None and self.spec.cached:
            raise BatchError(
                "first_positions are for keys that are passed whole; a cache's first key has "
                "position 0, so leave them out"
            )
        if self.spec.cached and "key_starts" in vars(batch) and not batch.keys_packed:
            raise BatchError(
                "key_starts are for keys that are passed whole; the block table says where cached ones "
                "are, so leave them out"
            )
        if batch.lens_are_bounds:
            check_bounds(self.spec, batch)
        if batch.mask is not None or self.spec.mask is not None:
            check_step_mask(self.spec, batch)
        self.planner.check(batch)

    def finish_builds(self) -> None:
        """Wait until all candidates are built, so that the kernels of a step no longer change."""
        self.builds.finish()
        self._waits = False

    def plan_for(self, plan: StepPlan | Batch | None) -> StepPlan:
        """Return a layer's plan, or the one that its batch has with this group.

        Args:
            plan: the plan or the batch that the layer's caller passed.

        Raises:
            BatchError: it is neither, or another group's plan.

        """
        if isinstance(plan, Batch):
            step_plan = plan.plans.get(self)
            if step_plan is None:
                # Plan a copy: a plan of the batch itself would be a reference cycle, which keeps
                # buffers on the device until the garbage collector runs.
                step = plan.copy()
                step_plan = plan.plans[self] = self.plan(step)
                plan.host_block_table = step.host_block_table  # read back once for all
            return step_plan
        if not isinstance(plan, StepPlan):
            raise BatchError(
                f"plan={plan!r} must be a plan of this layer's group, or a Batch: layer(query, "
                "key, value, cache, plan), of latents (query, latent, rope_key, cache, plan), of a "
                "recurrence (*inputs, states=, plan=)"
            )
        if plan.group is not self:
            raise BatchError(
                f"the plan is of a group for {plan.group.spec}; this layer's group plans for itself: "
                "layer.group.plan(batch)"
            )
        return plan

    def backend(
        self,
        phase: str,
        base: type[BackendT],
        spec: LayerSpec | None = None,
        cache: CacheFormat | None = None,
    ) -> BackendT:
        """Return the loaded backend for a phase: one object for each backend, spec and cache format.

        Args:
            phase: `"prefill"`, `"decode"` or a service's name.
            base: the class that it must be of.
            spec: None: the layer's.
            cache: the form of the cache that it walks.

        Raises:
            PluginError: it can't be loaded.

        """
        info = self.selection.backend(phase)
        assert info is not None, f"{self.spec} has no phase {phase}"
        return self.load(phase, info, base, spec, cache)

    def load(
        self,
        phase: str,
        info: BackendInfo,
        base: type[BackendT],
        spec: LayerSpec | None = None,
        cache: CacheFormat | None = None,
        later: bool = False,
    ) -> BackendT:
        """Return a backend, loaded once for each spec and cache format.

        The backend sees no transforms, and no rotary embedding that runs before it (a store gets that in
        its call).

        Args:
            phase: `"prefill"`, `"decode"` or a service's name.
            info: the backend.
            base: the class that it must be of.
            spec: None: the layer's.
            cache: the form of the cache that it walks.
            later: whether it may be built in the background; no step runs it before `builds.ready`.

        Raises:
            PluginError: it can't be loaded.

        """
        spec = windowed(kernel_spec(spec or self.spec))
        key = (info.name, spec, cache)
        backend: BackendT | None = self._loaded.get(key)
        if backend is None:
            backend = self._loaded[key] = load_backend(info, spec, cache, self.device, base)
            if isinstance(backend, Backend):
                backend.workspaces = self.workspaces
        if (key, phase) not in self._prepared:
            self._prepared.add((key, phase))
            if isinstance(backend, Backend):
                self.builds.add(info.name, backend, phase, later)
        return backend

    def candidate(
        self,
        phase: str,
        info: BackendInfo,
        base: type[BackendT],
        later: bool = False,
        spec: LayerSpec | None = None,
    ) -> BackendT | None:
        """Return a backend that competes for steps; None, with a warning, if it can't be loaded.

        Args:
            phase: `"prefill"` or `"decode"`.
            info: the backend.
            base: the class that it must be of.
            later: whether it may be built in the background.
            spec: without a cache; None: the layer's, over its own.

        """
        cache = self.kernel_format(info) if spec is None else None
        try:
            return self.load(phase, info, base, spec, cache, later)
        except PluginError as error:
            log.warning("%s does not compete for %s: %s", info.name, spec or self.spec, error)
            return None

    def kernel_format(self, info: BackendInfo | None) -> CacheFormat | None:
        """Return the cache's form as a backend's kernel walks it; None if there is no cache.

        Args:
            info: the backend.

        """
        if self.cache_format is None or info is None:
            return None
        sizes = dict(self.selection.decision.kernel_block_sizes)
        return self.cache_format.in_blocks_of(sizes.get(info.name, self.cache_format.block_size))

    @cached_property
    def _orders(self) -> tuple[str, ...]:
        """Layouts of which any serves a sparse layer, whose kernels get views of pages."""
        infos = [self.selection.backend(phase) for phase in ("decode", "store")]
        return tuple(
            name
            for name in ("NHD", "HND")
            if self.spec.kind is AttentionKind.SPARSE
            and all(info is not None and name in info.capabilities.layouts for info in infos)
        )

    def allocate_cache(self, num_blocks: int) -> KVCache:
        """Return an uninitialised cache of one layer on the group's device.

        Args:
            num_blocks: blocks of the cache, each of `cache_format.block_size` tokens.

        Raises:
            CacheError: the layers keep no cache, the number isn't positive, or the device has too
                little memory for so many.

        """
        if self.cache_format is None:
            remedy = "allocate_states(n)" if self.spec.kind.is_recurrent else "pass cache=None"
            raise CacheError(f"{self.spec} keeps no keys and values; {remedy}")
        form = self.cache_format
        if form.apart > 2 * form.block_size and not self._splits_blocks:
            form = replace(form, apart=0)  # of a pool of several layers one layer's part is enough
        return KVCache.allocate(form, num_blocks, self.torch_device)

    @cached_property
    def _splits_blocks(self) -> bool:
        """Whether a kernel walks smaller blocks, whose numbers follow from how the cache's lie."""
        form, walked = self.cache_format, dict(self.selection.decision.kernel_block_sizes)
        return form is not None and any(size != form.block_size for size in walked.values())

    def allocate_states(self, num_slots: int) -> StateCache:
        """Return the uninitialised states of one recurrent layer on the group's device.

        Args:
            num_slots: states, most often one for each sequence.

        Raises:
            CacheError: the layers keep no state, the number isn't positive, or the device has too
                little memory for so many.

        """
        return StateCacheSpec.for_layer(self.spec, num_slots).allocate(self.torch_device)

    def check_cache(self, cache: Any) -> None:
        """Check a cache's form and device.

        Args:
            cache: the object that the caller passed as a cache.

        Raises:
            BatchError: it isn't a cache, or is on another device.
            CacheError: it has another form, or more places than the kernels can name.

        """
        if not isinstance(cache, KVCache):
            raise BatchError(f"cache is a {type(cache).__name__}; it must be a KVCache(key, value)")
        self.check_format(cache.format)
        if not same_device(cache.key.device, self.torch_device):
            raise BatchError(
                f"the cache is on {cache.key.device}, the layer on {self.torch_device}; allocate it "
                "with group.allocate_cache(n)"
            )
        self.planner.check_cache(cache)

    def check_format(self, format: CacheFormat, spacing: bool = True) -> None:
        """Check that a cache has the form that the backends were chosen for.

        Args:
            format: the cache's form.
            spacing: whether blocks must also lie as far apart, if a kernel walks smaller ones.

        Raises:
            CacheError: it has another form, or the layer keeps no cache.

        """
        wanted = self.cache_format
        if wanted is None:
            raise CacheError(f"{self.spec} keeps no cache; pass cache=None")
        if not isinstance(format, CacheFormat):
            raise CacheError(
                f"cache_format={shown(format)} must be a CacheFormat: a cache's .format"
            )
        one_order = wanted.num_kv_heads == 1 or wanted.block_size == 1
        orders = self._orders if wanted.layout in self._orders else ()
        for name in ("block_size", "num_kv_heads", "head_size", "v_head_size", "dtype", "layout"):
            theirs, ours = getattr(format, name), getattr(wanted, name)
            if theirs != ours and not (name == "layout" and (one_order or theirs in orders)):
                remedy = {
                    "block_size": f"select(spec.replace(block_size={theirs}))",
                    "layout": f"select(spec, settings=Settings(layout={theirs!r}))",
                }.get(name)
                raise CacheError(
                    f"the cache's {name} is {theirs}, the selection's {ours}; allocate it with "
                    f"group.allocate_cache(n){f', or use {remedy}' if remedy else ''}"
                )
        if spacing and format.apart != wanted.apart and self._splits_blocks:
            raise CacheError(
                f"this cache's blocks lie {format.block_stride} tokens apart, the group's "
                f"{wanted.block_stride}, and a kernel walks smaller blocks; use "
                "LayerGroup(selection, cache_format=cache.format)"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGroup:
        """A copied model's layers share kernels with the original's: neither remembers a step."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the value; the process that reads it loads kernels again."""
        return _unpickled, (self.selection, self.cache_format)

    def __repr__(self) -> str:
        return f"<LayerGroup: {self.spec}; {self.selection.decision.summary()}>"


def _unpickled(selection: Selection, cache_format: CacheFormat | None) -> LayerGroup:
    return LayerGroup(selection, cache_format=cache_format)


def on_the_host() -> AbstractContextManager[Any]:
    """Return a context that makes new tensors on the host, under any default device."""
    # `torch.set_default_device` and `with torch.device` put a mode on this stack.
    return torch.device("cpu") if torch._C._len_torch_function_stack() else NOWHERE_ELSE


def load_backend(
    info: BackendInfo, spec: LayerSpec, cache: CacheFormat | None, device: Any, base: type[BackendT]
) -> BackendT:
    """Import and build a backend. Raises `PluginError`."""
    if not device.is_real:
        raise PluginError(
            f"{device} is a profile to reason about; select on this machine's device to run"
        )
    try:
        cls = load_object(info.path)
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise PluginError(
                f"backend {info.name}: {info.path} is no {base.__name__}; keep the class, or what the "
                "decorator returns, under this name"
            )
        build: Any = cls
        with on_the_host():
            return build(spec, cache, device)  # type: ignore[no-any-return]
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"backend {info.name} can't be loaded from {info.path}: {describe(error)}; until its plugin "
            "is fixed, POLYATTN_BACKEND or backend= may name another"
        ) from error
