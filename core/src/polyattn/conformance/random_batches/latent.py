"""Random batches through an MLA backend, dense or sparse."""

from __future__ import annotations

import torch

from polyattn.checking.tolerance import tolerance_of
from polyattn.conformance.harness.mla import LatentHarness
from polyattn.conformance.random_batches.attention import compare
from polyattn.conformance.random_batches.compose import Composition, Requests, draw_lengths
from polyattn.conformance.random_batches.pages import Pages
from polyattn.conformance.random_batches.tally import Job
from polyattn.families.mla import reference
from polyattn.families.mla.inputs import chosen_positions
from polyattn.families.mla.layer import LatentAttention
from polyattn.families.mla.planning import LatentStep
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, quantize


def latent_round(layer: LatentAttention, harness: LatentHarness, job: Job) -> None:
    """Run `job.count` batches of one MLA layer and compare all of them with the reference."""
    spec, form, part = layer.spec, layer.group.cache_format, layer.spec.latent
    assert form is not None and part is not None and layer.weights is not None
    lengths = draw_lengths(job.dice, form.block_size)
    requests, dtype = Requests.of(lengths), STORAGE_DTYPES[spec.dtype]
    queries = int(requests.queries.sum())
    pool_query = harness.random(queries, spec.num_heads, spec.head_size, dtype=dtype)
    pool_entry = harness.random(int(requests.lens.sum()), 1, part.size, dtype=dtype)
    pool_topk = None
    if part.topk:
        pool_topk = chosen_positions(
            requests.lens.tolist(), requests.queries.tolist(), part.topk, harness.generator
        ).to(harness.torch_device)
    expected = (
        torch.zeros(queries, spec.num_heads, spec.v_head_size, dtype=torch.float64),
        torch.full((queries, spec.num_heads), -torch.inf, dtype=torch.float64),
    )
    stored = STORAGE_DTYPES[spec.stored_dtype]
    read = quantize(pool_entry, stored, layer.params.k_scale).double()[:, 0]
    if stored.itemsize == 1:
        read = read * layer.params.k_scale
    row = token = 0
    for query, length in lengths:
        mine, tokens = slice(row, row + query), slice(token, token + length)
        if query and length:
            chosen = None if pool_topk is None else pool_topk[mine]
            found = reference.attend(
                spec, pool_query[mine], read[tokens].cpu(), layer.weights, chosen
            )
            expected[0][mine], expected[1][mine] = found
        row, token = mine.stop, tokens.stop

    made = Composition(requests, job.count, job.dice)
    at, of = (torch.from_numpy(x).to(harness.torch_device) for x in (made.row_of, made.token_of))
    given, entry = pool_query[at], pool_entry[of]
    made.spoil([(given, made.row_starts), (entry, made.token_starts)])
    scales = (layer.params.k_scale, layer.params.v_scale)
    pages = Pages.of(made, form, entry, entry[..., : part.rank], scales)
    out = given.new_full((len(at), spec.num_heads, spec.v_head_size), torch.nan)
    lse = out.new_full(out.shape[:2], torch.nan, dtype=torch.float32) if spec.needs_lse else None
    new = pages.key[:, 0]
    latent, rope = new[:, : part.rank].contiguous(), new[:, part.rank :].contiguous()
    topk = None if pool_topk is None else pool_topk[at]
    for rows, batch in pages.batches(made):
        step = layer.group.plan(batch)
        assert isinstance(step, LatentStep)
        layer.run(
            step, given[rows], latent[rows], rope[rows], pages.cache,
            None if topk is None else topk[rows], out[rows], None if lse is None else lse[rows],
        )  # fmt: skip
    what = f"{harness.backend}, {spec}, seed {harness.seed}"
    pages.check(what, job.tally)
    compare(made, job.tally, what, tolerance_of(spec), (out, lse), expected)
