"""What does a kernel implement? Two methods, `plan` and `run`; one class for each shape of call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from polyattn.device import Device
from polyattn.runtime.program import Frame, LayerParams, Plan, RecurrentFrame, StorePlan
from polyattn.runtime.rotation import NewTokens, Rotation, prepared
from polyattn.runtime.workspaces import Workspaces
from polyattn.selection.cache_format import CacheFormat
from polyattn.spec.decompose import over_context
from polyattn.spec.layer import LayerSpec

Addressed = Callable[..., None]
"""Takes (query, key, value, params, out, lse): `AttentionBackend.addressed`."""

if TYPE_CHECKING:
    from torch import Tensor

    from polyattn.runtime.cache.kv_cache import KVCache
    from polyattn.runtime.reads import Reads
    from polyattn.runtime.step.batch import Batch

    Prepared = tuple[Tensor, Tensor | None, Tensor | None]
    """Query, key and value as attention takes them; None for what lies in the cache alone."""


class Lie(NamedTuple):
    """How tensors of (tokens, heads, size) lie in memory: strides from token to token, head to head.

    `keys`: how many tokens keys and values have.
    """

    query: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]
    keys: int


class PagesLie(NamedTuple):
    """The same of a cache: keys and values (pages, page size, heads, size), all three strides of each."""

    query: tuple[int, int]
    key: tuple[int, int, int]
    value: tuple[int, int, int]


class Backend:
    """A kernel for one spec over one cache format. It holds compiled code and workspaces.

    It remembers no step: what a step needs is in its plan, and any number of plans are alive at once.
    What a backend runs, it runs on one stream, one call after another. `workspaces` is the group's,
    whose backends share it; the group sets it after the constructor, which takes nothing of it.
    `cache` is the cache's format in the blocks that this backend walks in, None where there is none.
    """

    name: ClassVar[str] = ""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device) -> None:
        self.spec, self.cache, self.device = spec, cache, device
        self.workspaces = Workspaces()

    def prepare(self, phases: tuple[str, ...]) -> None:
        """Compile what `phases` will run, so that no step has to wait for a compiler.

        Called before the first plan of any, once for all phases that the backend was chosen for, and
        again for what another spec or cache format brings later. A candidate's may run in a thread
        beside the steps of other backends, so it runs no kernel over `workspaces`.
        """

    def plan(self, batch: Batch, reuse: Any = None) -> Plan:
        """Prepare one step from metadata only. A block table has a column at least.

        `reuse` is an earlier plan of this backend that a captured graph reads: what is returned must
        hold the new step in that one's buffers. A plan that reads nothing but the batch's own tensors
        needs no care, since the graph's caller keeps those in place.
        """
        return Plan(batch)


class AttentionBackend(Backend, ABC):
    """Attention over a paged cache or given keys; for MLA, the absorbed decode over latents.

    Contracts: tensors and masks as in `docs/contracts.md`; `out` is written; unused cache never
    reaches an output; nothing that `Capabilities` doesn't claim has to be handled, because such a
    layer never gets here.
    """

    def spec_of(self, batch: Batch) -> LayerSpec:
        """Return what one call computes: the layer's spec, over context alone without its causal mask.

        So one object serves both parts of a step that is taken apart, its workspaces with it.
        """
        return self.spec if batch.causal else over_context(self.spec)

    @abstractmethod
    def run(self, plan: Any, frame: Frame) -> None:
        """Attend for the plan's sequences.

        Of a spec with `qkv_dtype` the query comes in e4m3, or in the layer's dtype where it had to be
        rotated before.
        """

    def reads(self, plan: Plan, batch: Batch) -> Reads | None:
        """Return what `run` has its kernels read of a plan, for who checks it; None: it isn't told.

        `batch`: the step that the plan's buffers hold: its own, or one that was planned with `reuse`.
        What is returned is read off these buffers as the kernels do it, not as it was planned.
        """
        return None

    def addressed(self, plan: Plan, lie: Lie) -> Addressed | None:
        """Return `run` for tensors as they are, of a layer without a cache; None: they must be viewed.

        A kernel that goes by addresses and strides alone spares its caller the views (tokens, heads,
        size), which cost the host as much as a tiny kernel. What is returned takes (query, key, value,
        params, out, lse), tensors of any shape whose elements lie as `lie` says; `out` and `lse` are
        contiguous.
        """
        return None

    def addressed_pages(self, plan: Plan, lie: PagesLie) -> Addressed | None:
        """Return `addressed` of a plan by bounds over a cache; None: tensors must be viewed.

        What is returned takes keys and values as pages, which `lie` describes; the parameters that come
        with them have no scales.
        """
        return None


class SparseBackend(Backend, ABC):
    """Attention to chosen rows of a latent cache: kind `"sparse_mla"`."""

    @abstractmethod
    def run(self, plan: Any, frame: Frame) -> None:
        """Attend each token to the cache rows `frame.choice` alone.

        `choice` int32 (num_tokens, topk): block times block size plus offset, -1 for none; `query`
        (num_tokens, num_heads, latent size), `out` (num_tokens, num_heads, latent rank).
        """


class RecurrentBackend(Backend, ABC):
    """A recurrence over a state for each sequence.

    A sequence continues from its slot's state where its length exceeds its query, else it starts from
    zero, whatever the slot holds. Each sequence's slot is left with its new state; other slots aren't
    read or written. A sequence without query tokens changes nothing; a padding row (slot -1) neither,
    and its output is free.
    """

    @abstractmethod
    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        """Run the plan's sequences. Writes `frame.out` and their slots of `frame.states`."""


class StoreBackend(ABC):
    """Writes the step's keys and values to their slots of the cache, quantised where it is."""

    name: ClassVar[str] = ""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device) -> None:
        self.spec, self.cache, self.device = spec, cache, device

    def plan(self, slots: Tensor) -> StorePlan:
        """Prepare to store tokens at `slots`, int64 (num_tokens,); -1 skips."""
        return StorePlan(slots)

    @abstractmethod
    def run(
        self, plan: StorePlan, key: Tensor, value: Tensor, cache: KVCache, params: LayerParams
    ) -> None:
        """Write `key` and `value` (num_tokens, num_kv_heads, size). Never waits for the device."""

    def run_rotated(
        self,
        plan: StorePlan,
        rotation: Rotation | None,
        new: NewTokens,
        cache: KVCache,
        params: LayerParams,
        keep: bool,
    ) -> Prepared:
        """Add the bias, rotate, and write the keys and values of `new`, whose tensors stay as they are.

        Returns the query, (num_tokens, num_heads, size) in its dtype, and where `keep` says so the keys
        and values alike, for an attention that takes them beside the cache; else None may stand for
        them. `rotation` None: only the bias is added. Never waits for the device. Here: core's torch
        operators, then `run`. A store that does it itself, in one launch, claims `rotates`.
        """
        assert new.key is not None and new.value is not None
        dtype = new.query.dtype
        query, key, value = (x.to(dtype) for x in prepared(new, rotation) if x is not None)
        self.run(plan, key, value, cache, params)
        return query, key, value


class MergeBackend(ABC):
    """Combines attention states in place: the one operator behind every decomposition."""

    name: ClassVar[str] = ""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device) -> None:
        self.spec, self.device = spec, device

    @abstractmethod
    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Merge a part into the total: outputs (num_tokens, num_heads, size), LSEs float32.

        `total` is float32, so that many parts round once. LSE -inf says that no key was seen.
        """
