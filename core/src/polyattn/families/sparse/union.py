"""How do several caches share one softmax? Each stream's state is merged with the others' by its LSE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyattn.errors import BatchError, SpecError, shown
from polyattn.families.sparse.layer import SparseAttention
from polyattn.runtime.backend import MergeBackend
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.group import StepPlan
from polyattn.runtime.merge import with_sinks
from polyattn.runtime.parameters import Weight
from polyattn.runtime.step.batch import Batch


@dataclass(frozen=True)
class Stream:
    """What one of several layers reads in a call: the arguments of `SparseAttention.forward`.

    Attributes:
        cache: the layer's cache.
        plan: the step, with the table of the cache's own blocks.
        choice: as `SparseAttention.forward` takes it.
        key: likewise.
        value: likewise.

    Examples:
        >>> cache = LayerGroup(LayerSpec(num_heads=2, head_size=64)).allocate_cache(1)
        >>> Stream(cache, Batch.from_lens([1], [1])).choice is None
        True

    """

    cache: KVCache
    plan: StepPlan | Batch
    choice: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None


class UnionAttention:
    """One softmax over the keys of several layers, such as a window and compressed entries.

    A key that is in two streams counts twice.

    Args:
        layers: each with `needs_lse=True`, without its own sinks, and with equal heads and values.
        sinks: (num_heads,), logits in the denominator, once for all streams.

    Raises:
        SpecError: the layers can't share a softmax.

    Examples:
        >>> window = LayerSpec(
        ...     kind="sparse", num_heads=4, num_kv_heads=1, head_size=64, dtype="float32",
        ...     needs_lse=True, sparse=SparseSpec(budget=128),
        ... )
        >>> entries = window.replace(sparse=SparseSpec(budget=8, tokens_per_entry=4))
        >>> both = UnionAttention([SparseAttention(window), SparseAttention(entries)])
        >>> len(both.layers)
        2

    """

    def __init__(self, layers: Sequence[SparseAttention], sinks: Tensor | None = None):
        first = layers[0].spec if layers else None
        for layer in layers:
            assert first is not None
            for name, wanted in (
                ("needs_lse", True),
                ("learned_sinks", False),
                ("num_heads", first.num_heads),
                ("v_head_size", first.v_head_size),
                ("dtype", first.dtype),
            ):
                if (value := getattr(layer.spec, name)) != wanted:
                    raise SpecError(
                        f"{name}={value!r}: a stream of one softmax has {wanted!r}; select for "
                        f"spec.replace({name}={wanted!r})"
                        + ", and pass the sinks to UnionAttention"
                        * (name == "learned_sinks")
                    )
        if first is None:
            raise SpecError("layers is empty: a softmax needs a stream at least")
        self.layers, group = tuple(layers), layers[0].group
        self.sinks = Weight.per_head("sinks", sinks, first, sinks is not None, group.torch_device)
        self._merge = group.backend("merge", MergeBackend)

    def __call__(self, query: Tensor, streams: Sequence[Stream]) -> tuple[Tensor, Tensor]:
        """Attend to all streams' keys, and store the new ones.

        Args:
            query: (num_tokens, num_heads, head_size).
            streams: one for each layer.

        Returns:
            The output (num_tokens, num_heads, v_head_size), and the LSE without the sinks, float32
            (num_tokens, num_heads). A token without keys has output 0 and LSE -inf.

        Raises:
            BatchError, CacheError: as each layer's `forward`; earlier streams' keys are stored then.
            BatchError: the streams' batches have other tokens; nothing has changed.
            SpecError: there are more streams than layers, or fewer.

        """
        if len(streams) != len(self.layers):
            raise SpecError(
                f"{len(streams)} streams were given; there are {len(self.layers)} layers"
            )
        batches = [s.plan.batch if isinstance(s.plan, StepPlan) else s.plan for s in streams]
        for index, batch in enumerate(batches):
            if isinstance(batch, Batch) and batch.starts != batches[0].starts:
                raise BatchError(
                    f"streams[{index}] has query tokens at {shown(batch.starts)}, streams[0] at "
                    f"{shown(batches[0].starts)}; all streams are of the same tokens of each sequence"
                )
        total: Tensor | None = None
        total_lse: Tensor | None = None
        for layer, stream in zip(self.layers, streams, strict=True):
            out, lse = layer(
                query, stream.key, stream.value, stream.cache, stream.plan, choice=stream.choice
            )
            if total is None or total_lse is None:
                wide = torch.promote_types(out.dtype, torch.float32)
                total, total_lse = out.to(wide), lse.to(wide)
            else:
                self._merge.run(total, total_lse, out, lse.to(total_lse.dtype))
        assert total is not None and total_lse is not None
        if self.sinks is not None:
            total, _ = with_sinks(total, total_lse, self.sinks.current())
        return total.to(query.dtype), total_lse
