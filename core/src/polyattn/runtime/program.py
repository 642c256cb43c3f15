"""What is a step made of? Ops, which run one after another over a frame of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor

from polyattn.runtime.cache.kv_cache import KVCache, raw
from polyattn.runtime.cache.scales import write_output
from polyattn.runtime.step.batch import Batch

Rows = slice | Tensor | None
"""Which of the step's tokens a call is for: all (None), neighbours (a slice), or these (int64)."""


@dataclass(slots=True)
class LayerParams:
    """What differs between layers of one spec.

    A scale is a number, or, if the spec's `scales` are tensors, float32 (num_kv_heads,) on the device,
    of stride 0 with `"tensor"` and 1 with `"head"`.

    Attributes:
        sinks: float32 (num_heads,), learned sink logits.
        alibi_slopes: float32 (num_heads,).
        k_scale: a quantised cache holds `key / scale`.
        v_scale: a quantised cache holds `value / scale`.
        qkv_bias: as `NewTokens.bias`.
        q_norm: as `Norms.query`, where queries come unnormed.
        k_norm: as `Norms.key`, where keys come unnormed.
        rotate: whether queries and keys come unrotated.
        q_scale: a quantised query is `query / scale`.
        out_scale: a quantised output is `output / scale`.
        inputs: of the variant, those that the layer brings, by name.
        weights: the halves of an MLA layer's up-projection, W_UK and W_UV.

    Examples:
        >>> LayerParams(k_scale=0.02, v_scale=0.02).sinks is None
        True

    """

    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    k_scale: Any = 1.0
    v_scale: Any = 1.0
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    rotate: bool = False
    q_scale: Any = 1.0
    out_scale: Any = 1.0
    inputs: dict[str, Tensor] = field(default_factory=dict)
    weights: tuple[Tensor, Tensor] | None = None


@dataclass(slots=True, eq=False)
class Frame:
    """A call's tensors as one value, which a step's ops read and write and a backend's `run` takes.

    A backend writes the elements of `out` and `lse` and sets no field, because other calls of the step
    read the same frame. `but` returns a changed copy. A library that takes no output makes one, which
    `set_out` turns into the frame's.

    Attributes:
        query: (num_tokens, num_heads, head size).
        key: (num_tokens, num_kv_heads, head size), the new tokens', or None: `cache` holds them
            already. Without a cache it has all keys, where `batch.key_starts` says.
        value: as `key`, with the values' size.
        cache: the layer's cache, or None.
        params: what differs between layers of one spec.
        out: (num_tokens, num_heads, V head size), written.
        lse: float32 (num_tokens, num_heads), natural logarithm, written; None: the call needs no LSE.
        choice: int32, the keys that each token attends to, -1 for none, for kernels that take a choice.
            It may be computed on the device.
        fresh: whether nobody else holds `out` yet. A copy's and a part's is somebody's: the frame's.

    Examples:
        >>> query = torch.zeros(3, 4, 64)
        >>> frame = Frame(query, None, None, None, LayerParams(), torch.empty_like(query), None)
        >>> frame.part(slice(0, 1)).out.shape
        torch.Size([1, 4, 64])

    """

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    cache: KVCache | None
    params: LayerParams
    out: Tensor
    lse: Tensor | None
    choice: Tensor | None = None
    fresh: bool = False

    def set_out(self, result: Tensor) -> None:
        """Make a tensor the output: in place of a `fresh` one if it is like it, else by a copy.

        If it is the output already, nothing happens.

        Args:
            result: of `out`'s shape. Nothing else reads or writes its memory, now or later. For an
                `out` of 8 bits it is wider, and is quantised.

        Examples:
            >>> rows = torch.zeros(1, 2, 4)
            >>> frame = Frame(rows, None, None, None, LayerParams(), rows.clone(), None, fresh=True)
            >>> frame.set_out(rows)
            >>> frame.out is rows
            True

        """
        if not _take_over(self, result):
            write_output(self.out, result, self.params.out_scale)

    def but(self, **changes: Any) -> Frame:
        """Return a copy with these fields changed.

        Args:
            changes: fields by name.

        """
        other = Frame(*_values(self))  # a fifth of what copy.copy takes
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    def part(self, rows: slice | Tensor) -> Frame:
        """Return the frame of some tokens; keys that aren't cached stay whole.

        Args:
            rows: a slice gives views; indices, int64, give copies.

        """
        key, value = self.key, self.value
        if self.cache is not None:
            key, value = rows_of(key, rows), rows_of(value, rows)
        out, lse = space(self.out, rows), self.lse
        if lse is not None:
            lse = space(lse, rows)
        query, choice = rows_of(self.query, rows), rows_of(self.choice, rows)
        assert query is not None
        return Frame(query, key, value, self.cache, self.params, out, lse, choice)

    def put(self, rows: Tensor, part: Frame) -> None:
        """Write a part's results to their places.

        Args:
            rows: int64, the part's tokens.
            part: the frame that `part(rows)` returned, after its call.

        """
        put_rows(self.out, rows, part.out)
        if self.lse is not None and part.lse is not None:
            put_rows(self.lse, rows, part.lse)


_values = attrgetter(*(f.name for f in fields(Frame) if f.name != "fresh"))


@dataclass(slots=True, eq=False)
class IndexFrame:
    """An indexer's tensors of a call as one value.

    Attributes:
        query: (num_tokens, index heads, index size).
        keys: the whole cache of index keys, as `IndexerSpec.cache_dtype` says.
        weights: (num_tokens, index heads), or None.
        within: int32 (num_tokens, choices or 1, n), or None.
        out: int32 (num_tokens, choices, K), written: ascending ids, -1 behind them.

    Examples:
        >>> query, keys = torch.zeros(3, 4, 64), torch.zeros(8, 16, 64)
        >>> frame = IndexFrame(query, keys, torch.ones(3, 4), None, torch.empty(3, 1, 5).int())
        >>> frame.out.shape[2]
        5

    """

    query: Tensor
    keys: Tensor
    weights: Tensor | None
    within: Tensor | None
    out: Tensor


@dataclass(slots=True, eq=False)
class RecurrentFrame:
    """A recurrence's tensors of a call as one value.

    Attributes:
        inputs: by the names in `polyattn.spec.recurrence`, (num_tokens, ...).
        params: by the names there, float32.
        states: the whole `StateCache.data`, (num_slots, ...), written.
        out: (num_tokens, ...), written.
        fresh: as `Frame.fresh`.

    Examples:
        >>> x = torch.zeros(3, 8)
        >>> frame = RecurrentFrame({"x": x}, {}, torch.zeros(2, 8, 3), torch.empty_like(x))
        >>> frame.part(slice(0, 1)).inputs["x"].shape
        torch.Size([1, 8])

    """

    inputs: Mapping[str, Tensor]
    params: Mapping[str, Tensor]
    states: Tensor
    out: Tensor
    fresh: bool = False
    cache: ClassVar[None] = None

    def set_out(self, result: Tensor) -> None:
        """Make a tensor the output, as `Frame.set_out`.

        Args:
            result: of `out`'s shape. Nothing else reads or writes its memory, now or later.

        """
        if not _take_over(self, result):
            self.out.copy_(result)

    def but(self, **changes: Any) -> RecurrentFrame:
        """Return a copy with these fields changed.

        Args:
            changes: fields by name.

        """
        same = {name: getattr(self, name) for name in self.__slots__}
        return RecurrentFrame(**same | {"fresh": False} | changes)

    def part(self, rows: slice | Tensor) -> RecurrentFrame:
        """Return the frame of some tokens.

        Args:
            rows: a slice gives views; indices, int64, give copies.

        """
        inputs = {name: tensor[rows] for name, tensor in self.inputs.items()}
        return RecurrentFrame(inputs, self.params, self.states, space(self.out, rows))

    def put(self, rows: Tensor, part: RecurrentFrame) -> None:
        """Write a part's results to their places.

        Args:
            rows: int64, the part's tokens.
            part: the frame that `part(rows)` returned, after its call.

        """
        put_rows(self.out, rows, part.out)


def _take_over(frame: Frame | RecurrentFrame, result: Tensor) -> bool:
    """Make a tensor the output in place of a fresh one that it is like. Return whether it is the output.

    It is like one of the same shape and dtype if it has no gaps.
    """
    out = frame.out
    alike = result.shape == out.shape and result.dtype is out.dtype
    if frame.fresh and alike and result.is_contiguous():
        frame.out = result
    return frame.out is result


def rows_of(tensor: Tensor | None, rows: slice | Tensor) -> Tensor | None:
    """Return a call's rows of a tensor: a view of neighbours, else a copy (8-bit floats too)."""
    if tensor is None or isinstance(rows, slice) or tensor.dtype.itemsize > 1:
        return None if tensor is None else tensor[rows]
    return raw(tensor)[rows].view(tensor.dtype)


def by_request(counts: Sequence[int] | None, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the tensors' rows of each request that has any, by their numbers; None: all at once."""
    if counts is None:
        return [tensors]
    parts = (tensor.split(list(counts)) for tensor in tensors)
    return [each for each in zip(*parts, strict=True) if len(each[0])]


def space(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """Return where a call writes its rows of a tensor: in place, or to a buffer for `put_rows`."""
    if isinstance(rows, slice):
        return tensor[rows]
    return tensor.new_empty(len(rows), *tensor.shape[1:])


def put_rows(tensor: Tensor, rows: Tensor, part: Tensor) -> None:
    """Write rows that were computed apart to their places."""
    raw(tensor).index_copy_(0, rows, raw(part))


class Op(ABC):
    """One instruction of a step, over some of its tokens. It runs for any frames and remembers none.

    Attributes:
        rows: the tokens that it is of; None for all.
        inner: the ops, or plans, that this one runs.
        calls: the backends' parts of the step that it runs.

    Examples:
        >>> class Twice(Op):
        ...     def run(self, frame):
        ...         frame.out.mul_(2)
        >>> Twice().calls
        ()

    """

    rows: Rows = None
    inner: Sequence[Any] = ()
    """The ops, or plans, that this one runs."""

    @property
    def calls(self) -> tuple[Call, ...]:
        """The backends' parts of the step that this runs, for people."""
        return tuple(call for inner in self.inner for call in inner.calls)

    @abstractmethod
    def run(self, frame: Any) -> None:
        """Read and write the tensors of the frame, which is of `rows` alone.

        An op over all rows may set the frame's fields: later ops read those.

        Args:
            frame: a call's tensors.

        """


class Plan:
    """What one backend needs for one step; a backend derives its own.

    Attributes:
        batch: the call's sequences.

    Examples:
        >>> Plan(Batch.from_lens([1], [5])).detail
        ''

    """

    __slots__ = ("batch",)

    def __init__(self, batch: Batch):
        self.batch = batch

    @property
    def detail(self) -> str:
        """A note for `StepPlan.explain` beside the backend's name; "" for none."""
        return ""


@dataclass(slots=True)
class StorePlan:
    """Where a step's keys and values go.

    Attributes:
        slots: int64 (num_tokens,); -1 skips.

    Examples:
        >>> StorePlan(torch.tensor([5, -1])).slots.tolist()
        [5, -1]

    """

    slots: Tensor


class Call(Op):
    """One backend's part of a step: which tokens, in which blocks, and its own plan."""

    @property
    def calls(self) -> tuple[Call, ...]:
        return (self,)

    def __init__(
        self,
        phase: str,
        name: str,
        backend: Any,
        plan: Any,
        rows: Rows,
        block_size: int | None = None,
        saved_bytes: int = 0,
    ):
        self.phase, self.name, self.backend = phase, name, backend
        self.plan, self.rows = plan, rows
        # Of the blocks that it walks, where they are smaller than the cache's.
        self.block_size = block_size
        # Of the cache, by reading once what rows share.
        self.saved_bytes = saved_bytes
        if block_size is None:  # as below, a frame of Python less at each layer's call
            self.run = partial(backend.run, plan)  # type: ignore[method-assign]

    def run(self, frame: Any) -> None:
        """Run the backend, over the cache in the blocks that it walks."""
        if self.block_size is not None:
            frame = frame.but(cache=self.view(frame.cache))
        self.backend.run(self.plan, frame)

    def view(self, cache: KVCache | None) -> KVCache | None:
        """Return a layer's cache in the blocks that the backend walks."""
        if cache is None or self.block_size is None:
            return cache
        return cache.in_blocks_of(self.block_size)[0]

    def __repr__(self) -> str:
        return f"<Call: {self.phase} by {self.name}, {self.plan.batch!r}>"
