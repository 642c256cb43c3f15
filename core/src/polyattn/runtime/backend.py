"""What does a kernel implement? Two methods, `plan` and `run`; one class for each shape of call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from polyattn.device import Device
from polyattn.runtime.program import Frame, IndexFrame, LayerParams, Plan, RecurrentFrame, StorePlan
from polyattn.runtime.rotation import NewTokens, Rotation, prepared
from polyattn.runtime.step.block_tables import each_token
from polyattn.runtime.step.chosen_pages import places_of
from polyattn.runtime.workspaces import Workspaces
from polyattn.selection.cache_format import CacheFormat
from polyattn.spec.decompose import over_context
from polyattn.spec.kinds import Invariance
from polyattn.spec.layer import LayerSpec

Addressed = Callable[..., None]
"""Takes (query, key, value, params, out, lse): `AttentionBackend.addressed`."""
AddressedChoice = Callable[..., bool]
"""Takes a choice behind these: `AttentionBackend.addressed_choice`."""
AddressedIndex = Callable[..., None]
"""Takes (query, keys, weights, out): `IndexBackend.addressed`."""

if TYPE_CHECKING:
    from torch import Tensor

    from polyattn.runtime.cache.kv_cache import KVCache
    from polyattn.runtime.reads import Reads
    from polyattn.runtime.step.batch import Batch
    from polyattn.runtime.step.chosen_pages import ChosenPages

    Prepared = tuple[Tensor, Tensor | None, Tensor | None]
    """Query, key and value as attention takes them; None for what lies in the cache alone."""


class PackedStrides(NamedTuple):
    """Strides in memory of tensors (tokens, heads, size), in elements.

    Two of each tensor: from token to token, and from head to head.

    Attributes:
        query: of the queries.
        key: of the keys.
        value: of the values.
        keys: tokens of keys and values.

    Examples:
        >>> PackedStrides(query=(256, 64), key=(128, 64), value=(128, 64), keys=40).query[0]
        256

    """

    query: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]
    keys: int


class PageStrides(NamedTuple):
    """Strides of a query and of a cache's pages (pages, page size, heads, size) in memory, in elements.

    Attributes:
        query: from token to token and head to head.
        key: from page to page, token to token and head to head.
        value: as `key`.

    Examples:
        >>> PageStrides(query=(256, 64), key=(2048, 128, 64), value=(2048, 128, 64)).key[0]
        2048

    """

    query: tuple[int, int]
    key: tuple[int, int, int]
    value: tuple[int, int, int]


class Loaded:
    """What a backend is once it is chosen: for one spec, over one cache format, on a device.

    Args:
        spec: the layer.
        cache: the cache's format in the blocks that this backend walks; None for a layer without one.
        device: where it runs.

    """

    name: ClassVar[str] = ""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device) -> None:
        self.spec, self.cache, self.device = spec, cache, device


class Backend(Loaded):
    """A kernel for one spec over one cache format. It holds compiled code and workspaces.

    It remembers no step: a step's data are in its plan, and any number of plans are alive at once. Its
    calls run one after another on one stream. `workspaces` is the group's, whose backends share it; the
    group sets it after the constructor, which takes no workspace.

    """

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device) -> None:
        super().__init__(spec, cache, device)
        self.workspaces = Workspaces()

    reads_tensors: ClassVar[bool] = True
    """Whether `plan` with `reuse` reads the batch's tensors. If not, a replay plans before it copies
    them, and copies the lengths and the plan's numbers together."""

    def prepare(self, phases: tuple[str, ...]) -> None:
        """Compile the kernels of the phases, so that no step waits for a compiler.

        Called before the first plan, once for all phases that the backend was chosen for, and again for
        another spec or cache format. A candidate's call may run in a thread beside the steps of other
        backends, so it runs no kernel over `workspaces`.

        Args:
            phases: `"prefill"`, `"decode"` or a service's name.

        """

    def plan(self, batch: Batch, reuse: Any = None) -> Plan:
        """Return the plan of one step, from metadata only. A block table has at least one column.

        Args:
            batch: the sequences.
            reuse: an earlier plan of this backend that a captured graph reads: that one's buffers must
                hold the step, by `batch.upload`. What is returned runs the step, too, and may be
                `reuse`. A plan that reads the batch's own tensors alone can ignore it.

        """
        return Plan(batch)

    def reads(self, plan: Plan, batch: Batch) -> Reads | None:
        """Return what `run` has its kernels read for a plan, for checks; None if the backend can't tell.

        The result is read from the plan's buffers as the kernels read them, not from the planner.

        Args:
            plan: the return value of `plan`.
            batch: the step that the plan's buffers hold: its own, or one that was planned with `reuse`.

        """
        return None


class AttentionBackend(Backend, ABC):
    """Attention over a paged cache or over keys of the call; for MLA, the absorbed decode over latents.

    Tensors and masks are as in `docs/contracts.md`. `run` writes `out`; unused cache never reaches an
    output. A backend need not handle what its `Capabilities` don't claim: such a layer never gets here.

    Examples:
        >>> class MyAttention(AttentionBackend):
        ...     def run(self, plan: Plan, frame: Frame) -> None:
        ...         frame.out.zero_()  # a kernel's launch, over plan.batch

    """

    plans_by_lengths: ClassVar[bool] = False
    """Whether `plan` reads no block table, only `run` does. The layers of a sparse step then share a plan
    where their rows are as long, whatever pages they choose."""

    def spec_of(self, batch: Batch) -> LayerSpec:
        """Return the spec that one call computes: the layer's, or without its causal mask over context.

        One object therefore serves both parts of a divided step, and keeps its workspaces.

        Args:
            batch: the step, or the part of it that the call computes.

        """
        return self.spec if batch.causal else over_context(self.spec)

    @abstractmethod
    def run(self, plan: Any, frame: Frame) -> None:
        """Attend for the plan's sequences.

        Args:
            plan: the return value of `plan`.
            frame: one layer's tensors; writes `frame.out` and, if it isn't None, `frame.lse`. With
                the spec's `qkv_dtype` the query is in e4m3, or in the layer's dtype if it had to be
                rotated first.

        """

    def page(self, chosen: ChosenPages) -> bool:
        """Write the block table and the lengths of a sparse layer's choice. Never waits for the device.

        Args:
            chosen: the choice, and where its pages go.

        Returns:
            False where the backend has no kernel for that: torch's operators do it, in 36 launches.

        """
        return False

    def addressed(self, plan: Plan, strides: PackedStrides) -> Addressed | None:
        """Return `run` for tensors of any shape, for a layer without a cache; None if it needs views.

        A kernel that takes addresses and strides spares its caller the views (tokens, heads, size), which
        cost the host as much as a tiny kernel.

        Args:
            plan: the return value of `plan`.
            strides: the tensors', in elements.

        Returns:
            A function of (query, key, value, params, out, lse), `out` and `lse` contiguous; or None.

        """
        return None

    def addressed_pages(self, plan: Plan, strides: PageStrides) -> Addressed | None:
        """Return `addressed` for a plan by bounds over a cache; None if the kernel needs views.

        Args:
            plan: the return value of `plan`.
            strides: the query's and the pages', in elements.

        Returns:
            A function as in `addressed`; keys and values are pages, the parameters have no scales.

        """
        return None

    def addressed_choice(
        self, plan: Plan, strides: PageStrides, chosen: ChosenPages
    ) -> AddressedChoice | None:
        """Return `page` and `addressed_pages` as one call; None if the backend hasn't it.

        Args:
            plan: the return value of `plan`, of the choice's rows.
            strides: the query's and the pages', in elements.
            chosen: the choice, and where its pages go: all calls bring choices of its shape, contiguous.

        Returns:
            A function of (query, key, value, params, out, lse, choice). It returns False where a row has
            another length than in the plan, and then `out` may hold anything.

        """
        return None


class SparseBackend(Backend, ABC):
    """Attention to chosen rows of a latent cache: kind `"sparse_mla"`.

    Examples:
        >>> class MySparse(SparseBackend):
        ...     def run(self, plan: Plan, frame: Frame) -> None:
        ...         frame.out.zero_()  # a kernel's launch, over frame.choice

    """

    def place(
        self, spec: LayerSpec, choice: Tensor, batch: Batch, block_size: int, first: int
    ) -> Tensor:
        """Return the cache rows that a choice names, int32 (tokens, rows), -1 for none.

        Never waits for the device. The default uses torch's operators, in a dozen launches.

        Args:
            spec: the layer whose choice it is.
            choice: int32 (tokens, 1, K), of the batch's tokens from `first` on.
            batch: the step.
            block_size: entries of a block of the batch's table.
            first: a token.

        """
        return places_of(spec, choice, batch, block_size, slice(first, first + len(choice)))

    @abstractmethod
    def run(self, plan: Any, frame: Frame) -> None:
        """Attend each token to the cache rows `frame.choice` alone.

        Args:
            plan: the return value of `plan`.
            frame: `choice` int32 (num_tokens, topk): block times block size plus offset, -1 for none;
                `query` (num_tokens, num_heads, latent size), `out` (num_tokens, num_heads, latent rank).

        """


class RecurrentBackend(Backend, ABC):
    """A recurrence over a state for each sequence.

    A sequence whose length exceeds its query continues from its slot's state; others start from zero,
    whatever the slot holds. `run` leaves each sequence's new state in its slot, and neither reads nor
    writes other slots. A sequence without query tokens changes nothing, and neither does a padding row
    (slot -1), whose output may be anything.

    Examples:
        >>> class MyRecurrence(RecurrentBackend):
        ...     def run(self, plan: Plan, frame: RecurrentFrame) -> None:
        ...         frame.out.zero_()  # a kernel's launch, which also writes frame.states

    """

    @abstractmethod
    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        """Run the plan's sequences. Writes `frame.out` and their slots of `frame.states`.

        Args:
            plan: the return value of `plan`.
            frame: one layer's inputs, parameters, states and output.

        """


class IndexBackend(Backend, ABC):
    """Chooses each token's keys by scores over a paged cache of index keys: phase `"index"`.

    `spec.indexer` says how. A plan's batch has the table of the index keys' blocks. `run` never waits for
    the device, whose lengths may be shorter than the host's (`Batch.lens_are_bounds`). `spec`
    is the layer that attends to the choice; `cache` is None, for the keys come with each call.

    Examples:
        >>> class MyIndexer(IndexBackend):
        ...     def run(self, plan: Plan, frame: IndexFrame) -> None:
        ...         frame.out.fill_(-1)  # a kernel's launches, over plan.batch.block_table

    """

    alone_from: ClassVar[Invariance] = Invariance.STEPS
    """The level of `batch_invariant` from which each token is planned as a decode of its own."""
    last_call: Any = None
    """What `Indexer` remembers of the last call. The layers of a group share the backend, and so this."""

    def __getstate__(self) -> dict[str, Any]:
        # It holds addresses, which a copy must not share.
        return self.__dict__ | {"last_call": None}

    @property
    def multiplies_e4m3(self) -> bool:
        """Whether e4m3 queries arrive as e4m3, and not converted to the layer's dtype."""
        return False

    def plan(self, batch: Batch, reuse: Any = None) -> Plan:
        """Return the plan of one step; at a level that asks for it, of decodes alone.

        Args:
            batch: the sequences.
            reuse: ignored: what runs reads the batch's own tensors.

        """
        if batch.all_decode or self.spec.batch_invariant < self.alone_from:
            return Plan(batch)
        return Plan(each_token(batch))

    def addressed(self, plan: Plan, frame: IndexFrame) -> AddressedIndex | None:
        """Return a function that does `run`'s work for other tensors of a frame's forms, or None.

        Args:
            plan: the return value of `plan`; its batch's tensors stay where they are.
            frame: a call's tensors, without `within`. Others have their shapes, strides, dtypes and
                device.

        Returns:
            A function of (query, keys, weights, out), of the frame's meaning.

        """
        return None

    @abstractmethod
    def run(self, plan: Any, frame: IndexFrame) -> None:
        """Choose each token's keys; of equal scores the smaller id wins.

        Args:
            plan: the return value of `plan`.
            frame: the call's tensors; `out` is written.

        """


class StoreBackend(Loaded, ABC):
    """Writes a step's keys and values to their slots of the cache, quantised if the cache is.

    Examples:
        >>> class MyStore(StoreBackend):
        ...     def run(self, plan, key, value, cache, params) -> None:
        ...         cache.key.view(-1, *key.shape[1:])[plan.slots] = key  # slots of -1 aside

    """

    def plan(self, slots: Tensor) -> StorePlan:
        """Return the plan that stores a step's tokens.

        Args:
            slots: int64 (num_tokens,): each token's slot in the cache; -1 skips it.

        """
        return StorePlan(slots)

    @abstractmethod
    def run(
        self, plan: StorePlan, key: Tensor, value: Tensor, cache: KVCache, params: LayerParams
    ) -> None:
        """Write keys and values to their slots. Never waits for the device.

        Args:
            plan: the return value of `plan`.
            key: (num_tokens, num_kv_heads, head size).
            value: (num_tokens, num_kv_heads, value head size).
            cache: the cache that is written.
            params: the layer's scales.

        """

    def run_rotated(
        self,
        plan: StorePlan,
        rotation: Rotation | None,
        new: NewTokens,
        cache: KVCache,
        params: LayerParams,
        keep: bool,
    ) -> Prepared:
        """Add the bias, norm, rotate, and write the keys and values. Never waits for the device.

        The default uses core's torch operators, then `run`. A store that does it in one launch claims
        `rotates`, and the `norms` that it applies.

        Args:
            plan: the return value of `plan`.
            rotation: the tokens' angles; None: nothing is rotated.
            new: query, key, value, their biases and norms; they stay as they are.
            cache: the cache that is written.
            params: the layer's scales.
            keep: whether the attention takes keys and values beside the cache.

        Returns:
            The query (num_tokens, num_heads, size) in its dtype; with `keep` keys and values too, else
            each may be None.

        """
        assert new.key is not None and new.value is not None
        dtype = new.query.dtype
        query, key, value = (x.to(dtype) for x in prepared(new, rotation) if x is not None)
        self.run(plan, key, value, cache, params)
        return query, key, value


class MergeBackend(Loaded, ABC):
    """Combines attention states in place: the one operator behind every decomposition.

    Examples:
        >>> class MyMerge(MergeBackend):
        ...     def run(self, total, total_lse, part, part_lse) -> None:
        ...         lse = torch.logaddexp(total_lse, part_lse)  # rows that saw no key aside
        ...         total.mul_((total_lse - lse).exp()[..., None])
        ...         total.add_(part * (part_lse - lse).exp()[..., None])
        ...         total_lse.copy_(lse)

    """

    @abstractmethod
    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Merge a part into the total, in place.

        Args:
            total: (num_tokens, num_heads, size), float32, so that many parts round once. In the layer's
                dtype where this is the only merge: computed in float32 then, too.
            total_lse: float32 (num_tokens, num_heads); -inf where no key was seen.
            part: the part's output, in the layer's dtype.
            part_lse: its LSE.

        """
