"""Which class runs sparse attention? `SparseAttention`: each call brings its choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from polyattn.errors import BatchError
from polyattn.families.attention.rotation import check_rotate
from polyattn.families.sparse.planning import SparseStep
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache
from polyattn.runtime.group import LayerGroup, StepPlan
from polyattn.runtime.layer import ChoosingLayer, Output
from polyattn.runtime.parameters import Weight, positive
from polyattn.runtime.program import LayerParams
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.store import store_rows
from polyattn.selection.selection import Selection
from polyattn.spec.layer import LayerSpec


class SparseAttention(ChoosingLayer):
    """One attention layer whose tokens attend to chosen keys alone. Forward only.

    Args:
        group: of a spec of kind `"sparse"`, as `Attention` takes it.
        sinks: (num_heads,), as `Attention` takes it.
        k_scale: as `Attention` takes it.
        v_scale: as `Attention` takes it.
        rotate: as `Attention` takes it.
        checks: as `Attention` takes it; the ids are checked too, which waits for the device.
        own_keys: as `Attention` takes it.

    Raises:
        SpecError: the spec isn't of this kind, or an argument doesn't fit it.
        SelectionError, PluginError: as `LayerGroup`.

    Examples:
        >>> blocks = SparseSpec(budget=3, granularity=16, scope="kv_head")
        >>> spec = LayerSpec(
        ...     kind="sparse", num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", block_size=16,
        ...     sparse=blocks,
        ... )
        >>> layer = SparseAttention(spec)
        >>> cache = layer.group.allocate_cache(num_blocks=2)
        >>> batch = Batch.from_lens([20], [20], torch.tensor([[1, 0]]).int(), 16)
        >>> choice = torch.zeros(20, 2, 3, dtype=torch.int32)  # the first block, for each KV head
        >>> key, value = torch.randn(2, 20, 2, 64)
        >>> layer(torch.randn(20, 4, 64), key, value, cache, batch, choice=choice).shape
        torch.Size([20, 4, 64])

    """

    family = "sparse"

    def __init__(
        self,
        group: LayerGroup | Selection | LayerSpec,
        *,
        sinks: Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        rotate: bool | None = None,
        checks: bool | None = None,
        own_keys: bool = True,
    ):
        super().__init__(group, checks, own_keys)
        spec = self.spec
        self.sinks = Weight.per_head(
            "sinks", sinks, spec, spec.learned_sinks, self.group.torch_device
        )
        quantised = spec.stored_dtype != spec.dtype
        self._params = LayerParams(
            k_scale=positive("k_scale", k_scale, quantised),
            v_scale=positive("v_scale", v_scale, quantised),
            rotate=check_rotate(spec, rotate),
        )
        self._dtype = STORAGE_DTYPES[spec.dtype]

    @property
    def params(self) -> LayerParams:
        """What differs between layers of one group: the sinks as they are now, the scales."""
        if self.sinks is not None:
            self._params.sinks = self.sinks.current()
        return self._params

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache,
        plan: StepPlan | Batch | None = None,
        *,
        choice: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Output:
        """Store the step's keys and values in `cache` and attend to the chosen ones.

        Args:
            query: (num_tokens, num_heads, head_size).
            key: (num_tokens, num_kv_heads, head_size); None: the cache holds the keys already.
            value: as `key`, with the values' size; None with `value_in_key`.
            cache: the layer's cache.
            plan: as `Attention.forward` takes it.
            choice: int32 (num_tokens, scope, K), K at most the budget: ids as `SparseSpec` defines
                them, -1 for none. An id of what the token doesn't see counts as none; one that occurs
                twice counts twice, or, of an incomplete group, once. None: the newest groups that the
                token sees, of a spec with `newest`, or where they are all.
            out: (num_tokens, num_heads, v_head_size), written and returned.

        Returns:
            The output (num_tokens, num_heads, v_head_size). If the spec has `needs_lse`, also the LSE,
            float32 (num_tokens, num_heads). A token without keys has output 0 and LSE -inf.

        Raises:
            BatchError: a tensor doesn't fit the plan; nothing has changed.
            CacheError: the cache doesn't fit the layer; nothing has changed.

        """
        # Of what an earlier call of the step has checked, nothing changes from layer to layer.
        if (
            not is_dynamo_compiling()
            and plan.__class__ is SparseStep
            and plan.group is self.group
            and cache is self._known_cache
            and not (self.checks or self._params.rotate)
            and self.sinks is None
            and (key is None or self.own_keys)
        ):
            again = plan.again(self._params, query, key, value, cache, choice, out)
            if again is not None:
                return again
        return self._called("query", (query, key, value, choice), cache, plan, out)

    if TYPE_CHECKING:
        __call__ = forward

    def output_shape(self, tokens: int) -> tuple[int, ...]:
        return tokens, self.spec.num_heads, self.spec.v_head_size

    def run(
        self,
        step: SparseStep,
        inputs: Sequence[Tensor | None],
        cache: KVCache,
        out: Tensor,
        lse: Tensor | None = None,
        fresh: bool = False,
    ) -> Tensor:
        query, key, value, choice = inputs
        sparse = self.spec.sparse
        assert sparse is not None
        if sparse.value_in_key and key is not None and value is None:
            value = key[..., : self.spec.v_head_size]
        if key is not None and sparse.tokens_per_entry > 1:
            raise BatchError(
                f"an entry of this cache stands for {sparse.tokens_per_entry} tokens, and key has "
                "one row a token; pass None, and store entries by store()"
            )
        out = super().run(step, (query, key, value, choice), cache, out, lse, fresh)
        if sparse.turns_back and self._params.rotate:
            assert step.before.rotation is not None
            out.copy_(step.before.rotation.inverse().applied(out))
        return out

    def store(
        self, key: Tensor, value: Tensor | None, cache: KVCache, slot_mapping: Tensor
    ) -> None:
        """Store keys and values, or entries, without attending.

        Args:
            key: (rows, num_kv_heads, head_size), any number of rows; entries of several tokens are
                rotated already.
            value: as `key`, with the values' size; None with `value_in_key`.
            cache: the layer's cache.
            slot_mapping: int64 (rows,), where each goes; -1 skips.

        Raises:
            BatchError: a tensor doesn't fit the plan; nothing has changed.
            CacheError: the cache doesn't fit the layer; nothing has changed.

        """
        assert self.spec.sparse is not None
        self.refuse_keys(key)
        if self._params.rotate and self.spec.sparse.tokens_per_entry == 1:
            raise BatchError(
                "store() writes keys as they are, and this layer rotates; pass them to forward, or build "
                "a layer with rotate=False"
            )
        if value is None and self.spec.sparse.value_in_key:
            value = key[..., : self.spec.v_head_size]
        store_rows(self.group, key, value, cache, slot_mapping, self._params, self._dtype)

    def _shapes(self, step: SparseStep) -> tuple[tuple[int, ...], ...]:
        spec, tokens = self.spec, step.batch.num_tokens
        keys = tokens, spec.num_kv_heads
        query = tokens, spec.num_heads, spec.head_size
        return query, (*keys, spec.head_size), (*keys, spec.v_head_size)
