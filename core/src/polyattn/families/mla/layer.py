"""What does an engine hold for MLA? `LatentAttention`: prefill expanded, decode absorbed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyattn.errors import BatchError, SpecError
from polyattn.families.attention.rotation import check_rotate
from polyattn.families.mla.absorption import Weights
from polyattn.families.mla.planning import LatentStep
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache
from polyattn.runtime.group import LayerGroup, StepPlan
from polyattn.runtime.inputs import check_slots, check_tensors, own_precision
from polyattn.runtime.layer import ChoosingLayer, Output
from polyattn.runtime.parameters import Weight, check_shape, positive
from polyattn.runtime.program import LayerParams
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.store import put_rows
from polyattn.selection.selection import Selection
from polyattn.spec.layer import LayerSpec


class LatentAttention(ChoosingLayer):
    """One MLA layer on the selected backends (DeepSeek-V2, 2024). Forward only: it refuses gradients.

    Args:
        group: as `Attention` takes it.
        w_uk: (num_heads, nope size, rank), the key's half of the up-projection (`kv_b_proj`), in the
            layer's dtype, referenced as `Attention` references its sinks. Without both halves the
            caller absorbs and projects; `forward` says how.
        w_uv: (num_heads, rank, v_head_size), the value's half.
        k_scale: a quantised cache holds `latent / scale`.
        rotate: required if the spec has a `rope`. True: this layer rotates the rope parts of queries
            and keys; False: the caller did.
        checks: check block tables and slots on the device at each step; None: the setting `checks`.
        own_keys: as `Attention` takes it.

    Raises:
        SpecError: an argument doesn't fit the spec.
        SelectionError, PluginError: as `LayerGroup`.

    Examples:
        >>> latent = LatentSpec(rank=32, rope_head_size=16)
        >>> spec = LayerSpec(
        ...     kind="mla", num_heads=2, head_size=48, v_head_size=32, latent=latent, dtype="float32"
        ... )
        >>> layer = LatentAttention(spec, torch.randn(2, 32, 32), torch.randn(2, 32, 32))
        >>> layer.group.spec.latent.size
        48

    """

    family = "mla"
    brings = "latent", "rope_key"

    def __init__(
        self,
        group: LayerGroup | Selection | LayerSpec,
        w_uk: Tensor | None = None,
        w_uv: Tensor | None = None,
        *,
        k_scale: float = 1.0,
        rotate: bool | None = None,
        checks: bool | None = None,
        own_keys: bool = True,
    ):
        super().__init__(group, checks, own_keys)
        spec = self.spec
        scale = positive("k_scale", k_scale, spec.stored_dtype != spec.dtype)
        self._params = LayerParams(k_scale=scale, v_scale=scale, rotate=check_rotate(spec, rotate))
        self._dtype = STORAGE_DTYPES[spec.dtype]
        self.w_uk: Weight | None
        self.w_uv: Weight | None
        self.w_uk, self.w_uv = self._checked_weights(w_uk, w_uv)

    def _checked_weights(
        self, w_uk: Tensor | None, w_uv: Tensor | None
    ) -> tuple[Weight, Weight] | tuple[None, None]:
        if w_uk is None and w_uv is None:
            return None, None
        spec = self.spec
        assert spec.latent is not None
        shapes = {
            "w_uk": (spec.num_heads, spec.head_size - spec.latent.rope_head_size, spec.latent.rank),
            "w_uv": (spec.num_heads, spec.latent.rank, spec.v_head_size),
        }
        weights = []
        for (name, shape), tensor in zip(shapes.items(), (w_uk, w_uv), strict=True):
            if tensor is None:
                raise SpecError(f"{name} is missing; w_uk and w_uv come together, or neither")
            check_shape(name, tensor, shape)
            if tensor.dtype is not self._dtype:
                raise SpecError(
                    f"{name} is of {tensor.dtype}; it must be of {self._dtype}, the layer's"
                )
            weights.append(Weight(name, tensor, self.group.torch_device, self._dtype))
        return weights[0], weights[1]

    @property
    def params(self) -> LayerParams:
        """What differs between layers of one group: the weights as they are now, the scale."""
        self._params.weights = self.weights
        return self._params

    @property
    def weights(self) -> Weights | None:
        """W_UK and W_UV as they are now; None where the caller absorbs."""
        if self.w_uk is None or self.w_uv is None:
            return None
        return self.w_uk.current(), self.w_uv.current()

    def forward(
        self,
        query: Tensor,
        latent: Tensor | None,
        rope_key: Tensor | None,
        cache: KVCache,
        plan: StepPlan | Batch | None = None,
        *,
        choice: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Output:
        """Store the step's latents in `cache` and attend.

        A layer without weights takes the absorbed query, (num_tokens, num_heads, rank + rope size),
        returns (num_tokens, num_heads, rank), and serves the rows that decode takes.

        Args:
            query: (num_tokens, num_heads, head_size), the part without positions first.
            latent: (num_tokens, rank), after its norm; None: the cache holds it already.
            rope_key: (num_tokens, rope size), rotated as the query's rope part is; with `rotate=True`
                neither is.
            cache: the layer's cache.
            plan: as `Attention.forward` takes it.
            choice: of a sparse layer, as `SparseAttention` takes it: int32 (num_tokens, 1, K).
            out: (num_tokens, num_heads, v_head_size), written and returned.

        Returns:
            The output (num_tokens, num_heads, v_head_size). If the spec has `needs_lse`, also the LSE,
            float32 (num_tokens, num_heads), natural logarithm.

        Raises:
            BatchError: a tensor doesn't fit the plan; nothing has changed.
            CacheError: the cache doesn't fit the layer; nothing has changed.

        """
        return self._called("query", (query, latent, rope_key, choice), cache, plan, out)

    if TYPE_CHECKING:
        __call__ = forward

    def output_shape(self, tokens: int) -> tuple[int, ...]:
        assert self.spec.latent is not None
        size = self.spec.latent.rank if self.w_uk is None else self.spec.v_head_size
        return tokens, self.spec.num_heads, size

    def store(self, latent: Tensor, rope_key: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Store latents and rope keys without attending.

        Args:
            latent: (tokens, rank), any number of tokens.
            rope_key: (tokens, rope size).
            cache: the layer's cache.
            slot_mapping: int64 (tokens,), where each goes; -1 skips.

        Raises:
            BatchError: a tensor doesn't fit the plan; nothing has changed.
            CacheError: the cache doesn't fit the layer; nothing has changed.

        """
        self.refuse_keys(latent)
        if self._params.rotate:
            raise BatchError(
                "store() writes rope keys as they are, and this layer rotates; pass them to forward, or "
                "build a layer with rotate=False"
            )
        part, device = self.spec.latent, self.group.torch_device
        assert part is not None
        check_slots(slot_mapping, device)
        tokens = slot_mapping.shape[0]
        check_tensors(
            device,
            latent=(latent, (tokens, part.rank), self._dtype),
            rope_key=(rope_key, (tokens, part.rope_head_size), self._dtype),
        )
        put_rows(self.group, *self._stored(latent, rope_key), cache, slot_mapping, self._params)

    def _shapes(self, step: LatentStep) -> tuple[tuple[int, ...], ...]:
        spec, part, tokens = self.spec, self.spec.latent, step.batch.num_tokens
        assert part is not None
        if self.w_uk is None and step.expands:
            raise BatchError(
                f"rows of {step.batch.max_query_len} tokens are expanded, which needs w_uk and w_uv; "
                "pass them to LatentAttention, or pass shorter rows"
            )
        width = part.size if self.w_uk is None else spec.head_size
        return (tokens, spec.num_heads, width), (tokens, part.rank), (tokens, part.rope_head_size)

    def _stored(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        # Autocast refuses to join other halves than its own.
        with own_precision(self.group.device_type):
            entry = torch.cat([key, value], dim=1)[:, None]
        assert self.spec.latent is not None
        return entry, entry[..., : self.spec.latent.rank]
