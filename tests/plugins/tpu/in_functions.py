"""Runs the kit through JAX's own door: `-p in_functions --polyattn-device cpu`.

A layer's `run` is replaced by the pure functions alone: planned by `plan`, jitted, the cache donated.
Attention is a program of its own, the same that torchax's door compiles: what one door's kit has left
in JAX's compilation cache, the other's needn't compile. Selection, batches and judging are the kit's.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import polyattn_tpu as pt
from ferry import array_of
from polyattn.conformance.harness import base
from polyattn.families.attention import workload as attention
from polyattn.families.attention.layer import Attention
from polyattn.families.attention.transforms import Transforms
from polyattn.families.mla import workload as mla
from polyattn.families.mla.layer import LatentAttention
from polyattn.families.recurrent import workload as recurrent
from polyattn.families.recurrent.layer import Recurrent
from polyattn.families.recurrent.targets import token_by_token, whole_sequences
from polyattn.kernel import Frame, turned
from polyattn.runtime.backend import AttentionBackend
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.decompositions import Part
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.chosen_pages import places_of
from polyattn.spec.decompose import absorbed
from polyattn_tpu.backends import buckets, rows_of
from polyattn_tpu.bridge import to_torch
from torch import Tensor

SHORT = 4
"""Tokens up to which a row is attended to in the absorbed form; longer ones are expanded."""


class FunctionsGroup(LayerGroup):
    """A group whose plans are pytrees: each lives as long as the kit's plan that it belongs to."""

    def plan(self, batch: Batch, reuse: Any = None) -> Any:
        step = super().plan(batch, reuse)
        size = None if self.cache_format is None else self.cache_format.block_size
        vars(step)["pytree"] = pt.plan(batch, self.spec, block_size=size, buckets=buckets())
        return step

    def pytree(self, step: Any) -> Any:
        return vars(step)["pytree"]

    def backend(self, phase: str, base: Any, spec: Any = None, cache: Any = None) -> Any:
        if base is AttentionBackend:
            return FunctionsPart(self.spec, cache, self.device)
        return super().backend(phase, base, spec, cache)


class FunctionsPart(AttentionBackend):
    """A call over a part of the keys: the functions are told of the part's spec."""

    def run(self, plan, frame: Frame) -> None:
        spec = self.spec_of(plan.batch)
        size = None if self.cache is None else self.cache.block_size
        made = pt.plan(plan.batch, spec, block_size=size, buckets=buckets())
        formats = rows_of(self.cache)
        query = turned_query(frame.query, formats)
        rows, options = attention_inputs(
            made, query, frame.key, frame.value, frame.params, frame.lse
        )
        options |= functions(spec, plan.batch, frame.params)
        if frame.cache is None:
            found = attend_given(made, spec, *rows, **options)
        else:
            held = cache_of(frame.cache)
            found = attend(made, spec, rows[0], held, rows=formats, **options)
        give(*found, frame.out, frame.lse, formats)


def cache_of(cache: KVCache) -> pt.Cache:
    """Return a host's cache as JAX's door has it."""
    stored = [cache.key] if cache.value_in_key else [cache.key, cache.value]
    wide = []
    for tensor in stored:
        array = np.asarray(array_of(tensor.transpose(1, 2)))
        missing = -array.shape[3] % 128
        wide.append(jax.device_put(np.pad(array, ((0, 0), (0, 0), (0, 0), (0, missing)))))
    return pt.Cache(*wide)


def bring(made: pt.Cache, cache: KVCache) -> None:
    """Write what the cache holds now back to the host's."""
    for array, tensor in zip(made, (cache.key, cache.value), strict=True):
        if array is not None:
            found = to_torch(array, tensor).transpose(1, 2)
            assert not found[..., tensor.shape[3] :].float().any(), "written past a row"
            tensor.copy_(found[..., : tensor.shape[3]])


def arrays(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else array_of(tensor) for tensor in tensors]


def attention_inputs(  # type: ignore[no-untyped-def]
    plan, query, key, value, params, lse
) -> tuple[list[Any], dict[str, Any]]:
    """Return the query, padded, the keys and values, and `attend`'s options."""
    q, k, v, sinks, slopes = arrays(query, key, value, params.sinks, params.alibi_slopes)
    scales = pt.Scales(params.k_scale, params.v_scale)
    options = {"sinks": sinks, "alibi_slopes": slopes, "scales": scales, "lse": lse is not None}
    return [pt.pad(plan, q), k, v], options


def functions(spec: Any, batch: Batch, params: Any) -> dict[str, Any]:
    """Return a layer's functions of scores and what they read, as `attend` takes them."""
    found = pt.functions_of(spec)
    if found is None:
        return {}
    given = {**batch.inputs, **params.inputs}
    return {
        "functions": found,
        "inputs": found.given({name: array_of(tensor) for name, tensor in given.items()}),
    }


def turned_query(query: Tensor, formats: Any) -> Tensor:
    """Return the query as the cache's format turns its keys."""
    if formats is None or formats[0].format.turn is None:
        return query
    return turned(query, formats[0].format).to(query.dtype)


def give(found: Any, logs: Any, out: Tensor, lse: Tensor | None, formats: Any = None) -> None:
    """Write what was computed to `out`, turned back where a format turns values, and `lse`."""
    out.copy_(to_torch(found, out)[: len(out)])
    if formats is not None and formats[1].format.turn is not None:
        out.copy_(turned(out, formats[1].format, back=True))
    if lse is not None:
        lse.copy_(to_torch(logs, lse)[: len(lse)])


static = ("spec", "functions", "lse", "interpret", "rows")
attend = jax.jit(pt.attend, static_argnames=static)
attend_bounded = jax.jit(pt.attend_bounded, static_argnames=static)
attend_given = jax.jit(pt.attend_given, static_argnames=static)
store = jax.jit(pt.store, static_argnames="rows", donate_argnames="cache")


class FunctionsAttention(Attention):
    """`store` and `attend`, or `attend_given`."""

    def run(self, step, inputs, cache, out, lse=None) -> None:  # type: ignore[no-untyped-def]
        if Transforms.of(self.spec) is not None:  # they are torch's, of the other door
            super().run(step, inputs, cache, out, lse)
            return
        (query, key, value), plan, params = inputs, self.group.pytree(step), self.params
        if not len(query):
            return
        formats = rows_of(self.group.cache_format)
        query = turned_query(query, formats)
        rows, options = attention_inputs(plan, query, key, value, params, lse)
        options |= functions(self.spec, step.batch, params)
        if cache is None:
            found = attend_given(plan, self.spec, *rows, **options)
        else:
            made, scales = cache_of(cache), options["scales"]
            if key is not None and step.batch.slot_mapping is not None:
                given = [pt.pad(plan, array) for array in rows[1:]]
                made = store(plan, *given, made, scales, rows=formats)
            if self.spec.length_bounds:
                held = arrays(step.batch.seq_lens, step.batch.block_table)
                query = rows[0][: len(query)]
                found = attend_bounded(plan, self.spec, query, made, *held, rows=formats, **options)
            else:
                found = attend(plan, self.spec, rows[0], made, rows=formats, **options)
            bring(made, cache)
        give(*found, out, lse, formats)


@functools.partial(
    jax.jit, static_argnames=("spec", "lse", "form", "rows"), donate_argnames="cache"
)  # fmt: skip
def over_latents(plan, dense, spec, query, entry, cache, weights, scales, chosen, lse, form, rows):  # type: ignore[no-untyped-def]
    cache = pt.store(plan, entry, None, cache, scales, rows=rows)
    options = {"scales": scales, "lse": lse}
    if form == "absorbed by the caller":
        found = pt.attend(plan, absorbed(spec), query, cache, rows=rows, **options)
    elif form == "absorbed":
        found = pt.attend_latent(plan, spec, query, cache, *weights, rows=rows, **options)
    elif form == "expanded":
        found = pt.attend_expanded(*dense, spec, query, cache, *weights, **options)
    else:
        if weights is not None:
            nope = weights[0].shape[1]
            inner = jnp.einsum("thn,hnr->thr", query[..., :nope], weights[0]).astype(query.dtype)
            query = jnp.concatenate([inner, query[..., nope:]], axis=-1)
        out, logs = pt.attend_rows(query, chosen, cache, spec.scale, spec.latent.rank, scales.key)
        if weights is not None:
            out = jnp.einsum("thr,hrv->thv", out, weights[1]).astype(query.dtype)
        found = (out, logs)
    return cache, found


class FunctionsLatent(LatentAttention):
    """`store`, and one of the forms of MLA for the whole step."""

    def run(self, step, inputs, cache, out, lse=None) -> None:  # type: ignore[no-untyped-def]
        query, latent, rope_key, choice = inputs
        if not len(query):
            return
        plan, batch, spec = self.group.pytree(step), step.batch, self.spec
        q, rows, ropes = arrays(query, latent, rope_key)
        entry = pt.pad(plan, np.concatenate([rows, ropes], axis=1)[:, None])
        weights = None if self.weights is None else tuple(arrays(*self.weights))
        form, dense, chosen = "absorbed", None, None
        if choice is not None:
            form, own = "chosen", places_of(spec, choice, batch, cache.block_size).numpy()
            chosen = np.full((plan.num_tokens, own.shape[1]), -1, np.int32)
            chosen[: len(own)] = own
        elif weights is None:
            form = "absorbed by the caller"
        elif batch.max_query_len > SHORT:
            form = "expanded"
            dense = pt.plan_expanded(pt.Step.from_batch(batch), spec, cache.block_size, buckets())
        scales = pt.Scales(self.params.k_scale, self.params.k_scale)
        made, found = over_latents(
            plan, dense, spec, pt.pad(plan, q), entry, cache_of(cache), weights, scales, chosen,
            lse is not None, form, rows_of(self.group.cache_format),
        )  # fmt: skip
        bring(made, cache)
        give(*found, out, lse)


recur = jax.jit(pt.recur, static_argnames="spec", donate_argnames="states")


class FunctionsRecurrent(Recurrent):
    """`recur`; where states end elsewhere, on copies that its caller makes, as a layer does."""

    def run(self, step, inputs, states, out, lse=None) -> None:  # type: ignore[no-untyped-def]
        if not len(out):
            return
        batch = step.batch
        if batch.state_targets is None:
            out.copy_(self._recur(self.group.pytree(step), inputs, states, out))
            return
        if batch.state_targets.dim() == 1:
            copy, inner = whole_sequences(batch)
            moves = [(copy, Part(inner, slice(None)))]
        else:
            moves = list(token_by_token(batch))
        for copy, part in moves:
            copy.run(states.data)
            plan = pt.plan(part.batch, self.spec, block_size=None, buckets=buckets())
            given = [tensor[part.rows] for tensor in inputs]
            out[part.rows] = self._recur(plan, given, states, out[part.rows])

    def _recur(self, plan, inputs, states, like) -> Tensor:  # type: ignore[no-untyped-def]
        rows = {
            name: pt.pad(plan, array_of(tensor))
            for name, tensor in zip(self.form.inputs, inputs, strict=True)
        }
        weights = {name: array_of(tensor) for name, tensor in self.params.items()}
        found, after = recur(plan, self.spec, rows, weights, array_of(states.data))
        states.data.copy_(to_torch(after, states.data))
        return to_torch(found, like)[: len(like)]


def pytest_configure() -> None:
    """Let workloads build these layers."""
    base.LayerGroup = FunctionsGroup  # type: ignore[misc]
    attention.Attention = FunctionsAttention  # type: ignore[misc]
    mla.LatentAttention = FunctionsLatent  # type: ignore[misc]
    recurrent.Recurrent = FunctionsRecurrent  # type: ignore[misc]
