"""What does a kernel implement? The backend classes, and what differs between layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyattn.device import Device
from polyattn.spec.layer import LayerSpec

if TYPE_CHECKING:
    from torch import Tensor

    from polyattn.runtime.batch import Batch
    from polyattn.runtime.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class LayerParams:
    """What differs between layers of one spec.

    `sinks` (num_heads,) float32: learned sink logits. `alibi_slopes` (num_heads,) float32.
    `k_scale`, `v_scale`: a quantised cache holds `value / scale`.
    """

    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


class AttentionBackend:
    """One instance serves every layer that shares a selection.

    The engine plans once a step; layers then run in any number. Contracts: tensors and masks as
    in `docs/contracts.md`; `out` is written; unused cache never reaches an output; nothing that
    `Capabilities` doesn't claim has to be handled, because such a layer never gets here. What each
    claimed phase needs is `forward_PHASE`; a sparse layer's phases both need `forward_sparse`.
    """

    name: ClassVar[str] = ""

    def __init__(self, spec: LayerSpec, device: Device) -> None:
        self.spec = spec
        self.device = device

    def plan(self, batch: Batch) -> None:
        """Prepare one step from metadata only. A captured graph must stay valid across plans."""
        self.batch = batch

    def forward_prefill(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend for sequences of any query length.

        `query`, `out` (num_tokens, num_heads, head size); `key`, `value` (num_tokens,
        num_kv_heads, head size) are the step's new tokens, already written to `cache`; where
        there is no cache (encoders) they are all there is. `lse` (num_tokens, num_heads)
        float32, natural logarithm, is written where given.
        """
        raise NotImplementedError(f"{type(self).__name__} claims no phase 'prefill'")

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend for sequences of one query token each, over the cache alone."""
        raise NotImplementedError(f"{type(self).__name__} claims no phase 'decode'")

    def forward_mixed(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Serve a batch of both phases in one launch; only where `"mixed"` is claimed."""
        raise NotImplementedError(f"{type(self).__name__} claims no phase 'mixed'")

    def forward_sparse(
        self,
        query: Tensor,
        cache: KVCache,
        slots: Tensor,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend each token to the cache rows `slots` alone; only for kind `"sparse_mla"`.

        `query` (num_tokens, num_heads, latent size), `slots` int32 (num_tokens, topk): block times
        block size plus offset, -1 for none; `out` (num_tokens, num_heads, latent rank).
        """
        raise NotImplementedError(f"{type(self).__name__} claims no kind 'sparse_mla'")

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        cache: KVCache,
        slot_mapping: Tensor,
        params: LayerParams,
    ) -> None:
        """Store the step's keys and values; slot -1 skips."""
        cache.write(key, value, slot_mapping, params.k_scale, params.v_scale)


class RecurrentBackend(ABC):
    """One instance serves every layer that shares a selection; plans once a step, as above.

    `inputs` and `params` are by the names of the layer's form (`polyattn.spec.recurrence`), parameters
    float32; `states` is the whole `StateCache.data`. A sequence continues from its slot's state
    where its length exceeds its query, else it starts from zero, whatever the slot holds. Each
    sequence's slot is left with its new state; other slots aren't read or written. A sequence
    without query tokens changes nothing; a padding row (slot -1) neither, and its output is free.
    """

    name: ClassVar[str] = ""

    def __init__(self, spec: LayerSpec, device: Device) -> None:
        self.spec = spec
        self.device = device

    def plan(self, batch: Batch) -> None:
        """Prepare one step from metadata only. A captured graph must stay valid across plans."""
        self.batch = batch

    @abstractmethod
    def forward_prefill(
        self,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        states: Tensor,
        out: Tensor,
    ) -> None:
        """Run sequences of any query length."""

    @abstractmethod
    def forward_decode(
        self,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        states: Tensor,
        out: Tensor,
    ) -> None:
        """Run sequences of one token each."""
