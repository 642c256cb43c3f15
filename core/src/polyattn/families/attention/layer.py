"""What does an engine hold? `Attention`, one layer; layers of one selection share a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyattn.api import Selection, select_for_layer
from polyattn.errors import BatchError, SpecError
from polyattn.families.attention.alibi import alibi_slopes as default_slopes
from polyattn.runtime.backend import LayerParams
from polyattn.runtime.batch import Batch
from polyattn.runtime.group import Runtime
from polyattn.runtime.kv_cache import STORAGE_DTYPES, KVCache
from polyattn.settings import current
from polyattn.spec.layer import LayerSpec

_UNSEEN = object()


class Attention(nn.Module):
    """One attention layer on the selected backends.

    Built from a `Selection` it shares that selection's plan with the other layers built from it;
    built from a `LayerSpec` it selects for itself, and verifies its backends on an accelerator.

    - `sinks` (num_heads,): learned sink logits, where the spec has them.
    - `alibi_slopes` (num_heads,): default: the paper's.
    - `k_scale`, `v_scale`: a quantised cache holds `value / scale`.
    - `checks`: check block tables and slots on the device each step (default: setting `checks`).

    Raises `SpecError`, and what `select` raises.
    """

    def __init__(
        self,
        selection: Selection | LayerSpec,
        *,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        checks: bool | None = None,
    ):
        super().__init__()
        if isinstance(selection, LayerSpec):
            selection = select_for_layer(selection)
        self.selection = selection
        runtime = selection.runtime
        if not isinstance(runtime, Runtime):
            other = "Recurrent" if selection.spec.kind.is_recurrent else "LatentAttention"
            raise SpecError(f"{selection.spec} is no layer for Attention; use {other}")
        self.runtime = runtime
        self.runtime.checks |= current().checks if checks is None else checks
        spec = selection.spec
        self.params = LayerParams(
            _per_head(spec, "sinks", sinks, spec.learned_sinks, selection),
            _per_head(
                spec,
                "alibi_slopes",
                default_slopes(spec.num_heads)
                if spec.alibi and alibi_slopes is None
                else alibi_slopes,
                spec.alibi,
                selection,
            ),
            _scale("k_scale", k_scale),
            _scale("v_scale", v_scale),
        )
        self._planned: Batch | None = None
        self._expected: tuple[torch.Size, ...] = ()
        # Not None, so that the first call looks at what it was given.
        self._known_cache: KVCache | object | None = _UNSEEN
        self._dtype = STORAGE_DTYPES[spec.dtype]
        self._needs_lse = spec.needs_lse
        self._handle: int | None = None

    def plan(self, batch: Batch) -> None:
        """Prepare one step for all layers of this selection; `forward` does it when it wasn't."""
        self.runtime.plan(batch)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None = None,
        batch: Batch | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Store the step's keys and values in `cache` and attend.

        `query` (num_tokens, num_heads, head_size); `key`, `value` (num_tokens, num_kv_heads, size),
        or None when the cache holds them already (cross-attention). `batch` may be left out when
        it is the one that was planned. Returns the output (num_tokens, num_heads, v_head_size),
        written to `out` where given, and where the spec says `needs_lse` also the LSE
        (num_tokens, num_heads), float32. Raises `BatchError`; nothing was changed then.
        """
        if torch.compiler.is_compiling():
            from polyattn.runtime.torch_compile import call

            return call(self, query, key, value, cache, out)
        runtime = self.runtime
        if batch is not None and batch is not runtime.batch:
            runtime.plan(batch)
        planned = runtime.batch
        if planned is None:
            raise BatchError("no batch: pass batch=, or call plan(batch) first")
        if planned is not self._planned:  # shapes are made once a step, not once a call
            self._expect(planned)
        dtype, shapes = self._dtype, self._expected
        if query.shape != shapes[0] or query.dtype is not dtype:
            raise _bad_input("query", query, shapes[0], dtype)
        if key is not None and value is not None:
            if key.shape != shapes[1] or key.dtype is not dtype:
                raise _bad_input("key", key, shapes[1], dtype)
            if value.shape != shapes[2] or value.dtype is not dtype:
                raise _bad_input("value", value, shapes[2], dtype)
        elif key is not None or value is not None or cache is None:
            self._check_given(key, value, cache)
        if out is None:
            out = query.new_empty(shapes[3])
        elif out.shape != shapes[3] or out.dtype is not dtype or out.device != query.device:
            raise _bad_input("out", out, shapes[3], dtype, query.device)
        if cache is not self._known_cache:
            self._check_cache(query, cache)
            self._known_cache = cache
        lse = None
        if self._needs_lse:
            lse = query.new_empty(shapes[3][:2], dtype=torch.float32)
        runtime.forward(query, key, value, cache, self.params, out, lse)
        return out if lse is None else (out, lse)

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Store keys and values without attending: the encoder's, for cross-attention.

        `key`, `value` (any number of tokens, num_kv_heads, size); `slot_mapping` int64, one each.
        """
        tokens, spec = slot_mapping.shape[0], self.selection.spec
        for name, tensor, size in (
            ("key", key, spec.head_size),
            ("value", value, spec.v_head_size),
        ):
            shape = (tokens, spec.num_kv_heads, size)
            if tensor.shape != shape or tensor.dtype is not self._dtype:
                raise _bad_input(name, tensor, shape, self._dtype)
        self.runtime.decode.write_kv(key, value, cache, slot_mapping, self.params)

    def _expect(self, batch: Batch) -> None:
        spec, tokens = self.selection.spec, batch.num_tokens
        self._expected = (
            torch.Size((tokens, spec.num_heads, spec.head_size)),
            torch.Size((tokens, spec.num_kv_heads, spec.head_size)),
            torch.Size((tokens, spec.num_kv_heads, spec.v_head_size)),
            torch.Size((tokens, spec.num_heads, spec.v_head_size)),
        )
        self._planned = batch

    def _check_given(self, key: Tensor | None, value: Tensor | None, cache: KVCache | None) -> None:
        if (key is None) != (value is None):
            raise BatchError("key and value come together, or both are None")
        if cache is None and not self.selection.spec.role.has_cache:
            raise BatchError(f"{self.selection.spec} keeps no cache; pass key and value")

    def _check_cache(self, query: Tensor, cache: KVCache | None) -> None:
        spec = self.selection.spec
        if cache is None:
            if spec.role.has_cache:
                raise BatchError(f"{spec} attends over a cache; pass cache=")
            return
        if not spec.role.has_cache:
            raise BatchError(f"{spec} keeps no cache; pass cache=None")
        for name, tensor, size in (
            ("cache.key", cache.key, spec.head_size),
            ("cache.value", cache.value, spec.v_head_size),
        ):
            shape = (self.runtime.block_size, spec.num_kv_heads, size)
            if tensor.shape[1:] != shape:
                raise _bad_input(name, tensor, ("num_blocks", *shape))
        both = spec.num_kv_heads > 1 and cache.block_size > 1  # else there is but one order
        if both and cache.layout != self.selection.decision.layout:
            raise BatchError(
                f"the cache's layout is {cache.layout}, the selection's "
                f"{self.selection.decision.layout}; allocate it with selection.cache_spec(n)"
            )
        if cache.key.device != query.device:
            raise BatchError(
                f"query is on {query.device}, the cache on {cache.key.device}; move one"
            )

    def extra_repr(self) -> str:
        """Describe the layer in `print(model)`."""
        return f"{self.selection.spec}; {self.selection.decision.summary()}"


def _per_head(
    spec: LayerSpec, name: str, values: Tensor | None, wanted: bool, selection: Selection
) -> Tensor | None:
    if (values is not None) != wanted:
        raise SpecError(
            f"{name} {'is missing' if wanted else 'was given'}: the spec "
            f"{'asks for it' if wanted else 'does not ask for it'} ({spec})"
        )
    if values is None:
        return None
    if values.shape != (spec.num_heads,):
        raise SpecError(f"{name} has shape {tuple(values.shape)}; it must be ({spec.num_heads},)")
    return values.detach().to(selection.device.torch_device, torch.float32).contiguous()


def _scale(name: str, value: float) -> float:
    if not (isinstance(value, (int, float)) and 0 < value < float("inf")):
        raise SpecError(f"{name}={value!r} must be a positive number")
    return float(value)


def _bad_input(
    name: str,
    tensor: Tensor,
    shape: tuple[Any, ...],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> BatchError:
    wanted = f"({', '.join(map(str, shape))})" + (f" of {dtype}" if dtype else "")
    found = f"{tuple(tensor.shape)} of {tensor.dtype}"
    if device is not None:
        wanted, found = f"{wanted} on {device}", f"{found} on {tensor.device}"
    return BatchError(f"{name} is {found}; it must be {wanted}")
