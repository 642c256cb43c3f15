"""What does a kernel implement? Two methods, `plan` and `run`; one class for each shape of call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from polyattn.device import Device
from polyattn.runtime.program import Frame, IndexFrame, LayerParams, Plan, RecurrentFrame, StorePlan
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
    """Strides in memory of tensors (tokens, heads, size), in elements.

    Two of each tensor: from token to token, and from head to head.

    Attributes:
        query: of the queries.
        key: of the keys.
        value: of the values.
        keys: tokens of keys and values.

    Examples:
        >>> Lie(query=(256, 64), key=(128, 64), value=(128, 64), keys=40).query[0]
        256

    """

    query: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]
    keys: int


class PagesLie(NamedTuple):
    """Strides of a query and of a cache's pages (pages, page size, heads, size) in memory, in elements.

    Attributes:
        query: from token to token and head to head.
        key: from page to page, token to token and head to head.
        value: alike.

    Examples:
        >>> PagesLie(query=(256, 64), key=(2048, 128, 64), value=(2048, 128, 64)).key[0]
        2048

    """

    query: tuple[int, int]
    key: tuple[int, int, int]
    value: tuple[int, int, int]


class Backend:
    """A kernel for one spec over one cache format. It holds compiled code and workspaces.

    It remembers no step: a step's data are in its plan, and any number of plans are alive at once. Its
    calls run one after another on one stream. `workspaces` is the group's, whose backends share it; the
    group sets it after the constructor, which takes no workspace.

    Args:
        spec: the layer.
        cache: the cache's format in the blocks that this backend walks; None for a layer without one.
        device: where it runs.

    Raises:
        Nothing: a selected backend can serve the spec.

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
    """Attention over a paged cache or over keys of the call; for MLA, the absorbed decode over latents.

    Tensors and masks are as in `docs/contracts.md`. `run` writes `out`; unused cache never reaches an
    output. A backend need not handle what its `Capabilities` don't claim: such a layer never gets here.

    Args:
        spec: the layer.
        cache: the cache's format in the blocks that this backend walks; None for a layer without one.
        device: where it runs.

    Raises:
        Nothing: a selected backend can serve the spec.

    Examples:
        >>> class MyAttention(AttentionBackend):
        ...     def run(self, plan: Plan, frame: Frame) -> None:
        ...         frame.out.zero_()  # a kernel's launch, over plan.batch

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
    """Attention to chosen rows of a latent cache: kind `"sparse_mla"`.

    Args:
        spec: the layer.
        cache: the cache's format in the blocks that this backend walks; None for a layer without one.
        device: where it runs.

    Raises:
        Nothing: a selected backend can serve the spec.

    Examples:
        >>> class MySparse(SparseBackend):
        ...     def run(self, plan: Plan, frame: Frame) -> None:
        ...         frame.out.zero_()  # a kernel's launch, over frame.choice

    """

    @abstractmethod
    def run(self, plan: Any, frame: Frame) -> None:
        """Attend each token to the cache rows `frame.choice` alone.

        `choice` int32 (num_tokens, topk): block times block size plus offset, -1 for none; `query`
        (num_tokens, num_heads, latent size), `out` (num_tokens, num_heads, latent rank).
        """


class RecurrentBackend(Backend, ABC):
    """A recurrence over a state for each sequence.

    A sequence whose length exceeds its query continues from its slot's state; others start from zero,
    whatever the slot holds. `run` leaves each sequence's new state in its slot, and neither reads nor
    writes other slots. A sequence without query tokens changes nothing, and neither does a padding row
    (slot -1), whose output may be anything.

    Args:
        spec: the layer.
        cache: the cache's format in the blocks that this backend walks; None for a layer without one.
        device: where it runs.

    Raises:
        Nothing: a selected backend can serve the spec.

    Examples:
        >>> class MyRecurrence(RecurrentBackend):
        ...     def run(self, plan: Plan, frame: RecurrentFrame) -> None:
        ...         frame.out.zero_()  # a kernel's launch, which also writes frame.states

    """

    @abstractmethod
    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        """Run the plan's sequences. Writes `frame.out` and their slots of `frame.states`."""


class IndexBackend(Backend, ABC):
    """Chooses each token's keys by scores over a paged cache of index keys: phase `"index"`.

    `spec.indexer` says how. A plan's batch has the table of the index keys' blocks. `run` never waits for
    the device, whose lengths may be shorter than the host's (`Batch.lens_are_bounds`).

    Args:
        spec: the layer that attends to the choice.
        cache: None: the keys come with each call.
        device: where it runs.

    Raises:
        Nothing: a selected backend can serve the spec.

    Examples:
        >>> class MyIndexer(IndexBackend):
        ...     def run(self, plan: Plan, frame: IndexFrame) -> None:
        ...         frame.out.fill_(-1)  # a kernel's launches, over plan.batch.block_table

    """

    @abstractmethod
    def run(self, plan: Any, frame: IndexFrame) -> None:
        """Write each token's ids to `frame.out`; of equal scores the smaller id wins."""


class StoreBackend(ABC):
    """Writes a step's keys and values to their slots of the cache, quantised if the cache is.

    Args:
        spec: the layer.
        cache: the cache's format in the blocks that this backend walks; None for a layer without one.
        device: where it runs.

    Raises:
        Nothing: a selected backend can serve the spec.

    Examples:
        >>> class MyStore(StoreBackend):
        ...     def run(self, plan, key, value, cache, params) -> None:
        ...         cache.key.view(-1, *key.shape[1:])[plan.slots] = key  # slots of -1 aside

    """

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
    """Combines attention states in place: the one operator behind every decomposition.

    Args:
        spec: the layer.
        cache: the cache's format in the blocks that this backend walks; None for a layer without one.
        device: where it runs.

    Raises:
        Nothing: a selected backend can serve the spec.

    Examples:
        >>> class MyMerge(MergeBackend):
        ...     def run(self, total, total_lse, part, part_lse) -> None:
        ...         lse = torch.logaddexp(total_lse, part_lse)  # rows that saw no key aside
        ...         total.mul_((total_lse - lse).exp()[..., None])
        ...         total.add_(part * (part_lse - lse).exp()[..., None])
        ...         total_lse.copy_(lse)

    """

    name: ClassVar[str] = ""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device) -> None:
        self.spec, self.device = spec, device

    @abstractmethod
    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Merge a part into the total: outputs (num_tokens, num_heads, size), LSEs float32.

        `total` is float32, so that many parts round once. LSE -inf says that no key was seen.
        """
