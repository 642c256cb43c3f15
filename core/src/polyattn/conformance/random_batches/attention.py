"""Random batches through an attention backend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyattn.checking.tolerance import Tolerance, tolerance_of
from polyattn.conformance.harness.attention import AttentionHarness
from polyattn.conformance.random_batches.compose import (
    Composition,
    Requests,
    draw_lengths,
    worst_by_batch,
    worst_lse_by_batch,
)
from polyattn.conformance.random_batches.functions import Brought
from polyattn.conformance.random_batches.pages import Pages
from polyattn.conformance.random_batches.tally import Job, Tally
from polyattn.families.attention import reference
from polyattn.families.attention.layer import Attention
from polyattn.families.attention.planning import AttentionStep
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, quantize
from polyattn.runtime.cache.scales import output_dtype
from polyattn.runtime.step.batch import Batch
from polyattn.spec.kinds import Role


@dataclass
class Pool:
    """Requests one after another, and what each must give: float64, from the reference."""

    requests: Requests
    brought: Brought
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor


def attention_round(layer: Attention, harness: AttentionHarness, job: Job) -> None:
    """Run `job.count` batches of one layer and compare all of them with the reference."""
    spec, form = layer.spec, layer.group.cache_format
    pool = _pool(layer, harness, job.dice)
    made = Composition(pool.requests, job.count, job.dice)
    rows, tokens = (
        torch.from_numpy(of).to(harness.torch_device) for of in (made.row_of, made.token_of)
    )
    query, key, value = pool.query[rows], pool.key[tokens], pool.value[tokens]
    made.spoil([(query, made.row_starts), (key, made.token_starts), (value, made.token_starts)])
    shape = (len(rows), spec.num_heads, spec.v_head_size)
    out = torch.full(shape, torch.nan, device=query.device).to(output_dtype(spec))
    lse = out.new_full(out.shape[:2], torch.nan, dtype=torch.float32) if spec.needs_lse else None
    what = f"{harness.backend}, {spec}, seed {harness.seed}"
    if form is None:
        _run_given(layer, harness, made, pool.brought, (query, key, value, out, lse))
    else:
        ran = _run_cached(layer, made, pool.brought, (query, key, value, out, lse))
        ran.check(what, job.tally)
    real = reference.exact(out, layer.params.out_scale, torch.float64)
    compare(made, job.tally, what, tolerance_of(spec), (real, lse), (pool.output, pool.lse))


def compare(
    made: Composition,
    tally: Tally,
    what: str,
    limit: Tolerance,
    found: tuple[Tensor, Tensor | None],
    expected: tuple[Tensor, Tensor],
) -> None:
    """Count the errors of all rows that are of no spoilt request; `expected` is the pool's."""
    out, lse = (None if t is None else t.cpu() for t in found)
    assert out is not None
    sound = made.sound_rows()
    at, batch = torch.from_numpy(made.row_of)[sound], made.batch_of_rows()[sound.numpy()]
    errors = worst_by_batch(out[sound], expected[0][at], batch, made.count)
    tally.add(what, errors, limit.output, made)
    if lse is not None:
        errors = worst_lse_by_batch(lse[sound], expected[1][at], batch, made.count)
        tally.add(f"LSE of {what}", errors, limit.lse, made, again=True)


def _pool(layer: Attention, harness: AttentionHarness, dice: np.random.Generator) -> Pool:
    spec, form, params = layer.spec, layer.group.cache_format, layer.params
    lengths = draw_lengths(dice, form.block_size if form else 16)
    if form is None and spec.role not in (Role.DECODER, Role.CROSS):
        lengths = [(query, query) for query, _ in lengths]  # the keys are the queries' own
    elif form is None:
        lengths = [(query, int(dice.integers(40))) for query, _ in lengths]
    requests, dtype = Requests.of(lengths), STORAGE_DTYPES[spec.dtype]
    brought = Brought.of(spec, harness, requests, dice)
    given = brought.read()
    tokens, queries = int(requests.lens.sum()), int(requests.queries.sum())
    query = harness.random(queries, spec.num_heads, spec.head_size, dtype=dtype)
    key = harness.random(tokens, spec.num_kv_heads, spec.head_size, dtype=dtype)
    value = harness.random(tokens, spec.num_kv_heads, spec.v_head_size, dtype=dtype)
    query = harness.given(layer, query, "q_scale")
    key, value = harness.given(layer, key, "k_scale"), harness.given(layer, value, "v_scale")
    stored = STORAGE_DTYPES[spec.stored_dtype] if spec.cached else key.dtype
    read = [
        reference.exact(quantize(tensor, stored, scale), scale, torch.float64)
        for tensor, scale in ((key, params.k_scale), (value, params.v_scale))
    ]
    asked = reference.exact(query, params.q_scale, torch.float64)
    output = torch.zeros(queries, spec.num_heads, spec.v_head_size, dtype=torch.float64)
    lse = torch.full((queries, spec.num_heads), -torch.inf, dtype=torch.float64)
    row = token = 0
    for number, (count, length) in enumerate(lengths):
        if count and length:
            mine = slice(row, row + count)
            output[mine], lse[mine] = reference.attend(
                spec, asked[mine], read[0][token : token + length],
                read[1][token : token + length], params, inputs=given, seq=number,
            )  # fmt: skip
        row, token = row + count, token + length
    return Pool(requests, brought, query, key, value, output, lse)


Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Query, key, value, output and LSE of all batches."""


def _run_cached(layer: Attention, made: Composition, brought: Brought, given: Tensors) -> Pages:
    """Run the batches over one cache: the context is there before, new tokens are stored."""
    query, key, value, out, lse = given
    form, cross = layer.group.cache_format, layer.spec.role is Role.CROSS
    assert form is not None
    pages = Pages.of(made, form, key, value, (layer.params.k_scale, layer.params.v_scale), cross)
    for rows, batch in pages.batches(made, brought):
        step = layer.group.plan(batch)
        assert isinstance(step, AttentionStep)
        new = (None, None) if cross else (pages.key[rows], pages.value[rows])
        part = None if lse is None else lse[rows]
        layer.run(step, query[rows], new[0], new[1], pages.cache, out[rows], part)
    return pages


def _run_given(
    layer: Attention,
    harness: AttentionHarness,
    made: Composition,
    brought: Brought,
    given: Tensors,
) -> None:
    """Run the batches over keys that are given whole, NaN between the sequences."""
    query, key, value, out, lse = given
    for index in range(made.count):
        seqs, rows = made.batch(index)
        lens = made.lens[seqs].tolist()
        gaps, key_starts, total = harness.integers(0, 3, len(lens)), [], 0
        for gap, length in zip(gaps, lens, strict=True):
            key_starts.append(total + gap)
            total += gap + length
        tokens = slice(made.token_starts[seqs.start], made.token_starts[seqs.stop])
        spread = []
        for tensor in (key[tokens], value[tokens]):
            wide, at = tensor.new_full((total + 1, *tensor.shape[1:]), torch.nan), 0
            for start, length in zip(key_starts, lens, strict=True):
                wide[start : start + length] = tensor[at : at + length]
                at += length
            spread.append(wide)
        starts = (made.row_starts[seqs.start : seqs.stop + 1] - rows.start).tolist()
        step = brought.step(made.request[seqs])
        batch = Batch(starts, lens, key_starts=key_starts, device=harness.torch_device, **step)
        plan = layer.group.plan(batch)
        assert isinstance(plan, AttentionStep)
        part = None if lse is None else lse[rows]
        layer.run(plan, query[rows], spread[0], spread[1], None, out[rows], part)
