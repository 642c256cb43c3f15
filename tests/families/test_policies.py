"""examples/sparse_policies.py beside each paper's formula in float64, a token and a head at a time."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path
from typing import Any

import polyattn
import pytest
import torch
from interpreting import interpreted
from polyattn import Batch, LayerSpec, SparseAttention, SparseSpec
from polyattn.workload.base import workload
from torch import Tensor

POLICIES = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples/sparse_policies.py"))
BACKENDS = ("VANILLA", "TORCH_SDPA", "NATIVE_ATTN", "EXAMPLE_ATTN")
HEADS, KV_HEADS, SIZE, BLOCK = 8, 2, 32, 16
# (new tokens, tokens): prompts, chunks and decodes that end at, before and after blocks' ends.
STEPS = ([(1, 200), (1, 16), (1, 17), (1, 1)], [(50, 50), (3, 65), (17, 48), (1, 96)])


def layer(backend: str, **fields: object) -> SparseAttention:
    spec = LayerSpec(
        kind="sparse", num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype="float32",
        block_size=BLOCK, sparse=SparseSpec(**fields),  # type: ignore[arg-type]
    )  # fmt: skip
    return SparseAttention(polyattn.LayerGroup(polyattn.select(spec, "cpu", backend=backend)))


class Step:
    """A step whose cache holds everything; `keys[s]`, `values[s]` (tokens, kv_heads, size)."""

    def __init__(self, lengths: list[tuple[int, int]], made: SparseAttention):
        work: Any = workload(made, lengths)
        self.query, self.key, self.value = work.query, work.key, work.value
        self.cache, self.batch = work.held, work.batch
        lens = [length for _, length in lengths]
        self.keys, self.values = work.keys.split(lens), work.values.split(lens)
        self.tokens = [
            (row, length - queries + new)
            for row, (queries, length) in enumerate(lengths)
            for new in range(queries)
        ]

    def attended(self, token: int, head: int, seen: list[int]) -> Tensor:
        """Attention of one token and head to some places, in float64."""
        row, _ = self.tokens[token]
        of = head // (HEADS // KV_HEADS)
        keys, values = self.keys[row][seen, of].double(), self.values[row][seen, of].double()
        return (self.query[token, head].double() @ keys.T * SIZE**-0.5).softmax(0) @ values


def ids_of(blocks: list[int], position: int) -> list[int]:
    return [at for b in blocks for at in range(b * BLOCK, min(b * BLOCK + BLOCK, position + 1))]


def best(scores: dict[int, float], count: int) -> list[int]:
    return sorted(sorted(scores, key=lambda i: (-scores[i], i))[:count])


def check(step: Step, out: Tensor, seen: dict[tuple[int, int], list[int]]) -> None:
    for (token, head), places in seen.items():
        wanted = step.attended(token, head, places)
        assert (out[token, head] - wanted).abs().max() < 2e-6, (token, head)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", STEPS, ids=["decode", "prefill"])
def test_streaming_llm(lengths: list[tuple[int, int]], backend: str) -> None:
    made = layer(backend, budget=4 + 20)
    step = Step(lengths, made)
    choice = POLICIES["streaming_llm"](step.batch, 4, 20)
    out = made(step.query, step.key, step.value, step.cache, step.batch, choice=choice)
    seen = {
        (token, head): [i for i in range(at + 1) if i < 4 or at - i < 20]
        for token, (_, at) in enumerate(step.tokens)
        for head in range(HEADS)
    }
    check(step, out, seen)


@pytest.mark.parametrize("backend", BACKENDS)
def test_quest(backend: str) -> None:
    made = layer(backend, budget=3, granularity=BLOCK, scope="head")
    step = Step(STEPS[0], made)
    choice = POLICIES["quest"](step.query, step.cache, step.batch, 3)
    out = made(step.query, step.key, step.value, step.cache, step.batch, choice=choice)
    seen = {}
    for token, (row, at) in enumerate(step.tokens):
        for head in range(HEADS):
            scores, q = {}, step.query[token, head].double()
            for block in range(at // BLOCK + 1):
                keys = step.keys[row][ids_of([block], at), head // 4].double()
                low, high = keys.amin(0), keys.amax(0)
                scores[block] = float(
                    sum(max(x * a, x * b) for x, a, b in zip(q, low, high, strict=True))
                )
            seen[token, head] = ids_of(best(scores, 3), at)
    check(step, out, seen)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", STEPS, ids=["decode", "prefill"])
def test_moba(lengths: list[tuple[int, int]], backend: str) -> None:
    made = layer(backend, budget=3, granularity=BLOCK, scope="head")
    step = Step(lengths, made)
    choice = POLICIES["moba"](step.query, step.cache, step.batch, 3)
    out = made(step.query, step.key, step.value, step.cache, step.batch, choice=choice)
    seen = {}
    for token, (row, at) in enumerate(step.tokens):
        for head in range(HEADS):
            scores = {at // BLOCK: float("inf")}
            for block in range(at // BLOCK):
                mean = step.keys[row][ids_of([block], at), head // 4].double().mean(0)
                scores[block] = float(step.query[token, head].double() @ mean)
            seen[token, head] = ids_of(best(scores, 3), at)
    check(step, out, seen)


@pytest.mark.parametrize("backend", BACKENDS)
def test_snapkv(backend: str) -> None:
    """Chosen by a prompt's last queries; the next token attends to them."""
    made, window, budget = layer(backend, budget=24, scope="kv_head"), 8, 24
    prompt = Step([(window, 100), (window, 33), (window, 20)], made)
    kept = POLICIES["snapkv"](prompt.query, prompt.cache, prompt.batch, budget, window, 5)
    out = made(
        prompt.query, None, None, prompt.cache, prompt.batch,
        choice=kept.repeat_interleave(window, 0),
    )  # fmt: skip
    seen = {}
    for row, keys in enumerate(prompt.keys):
        length = len(keys)
        for of in range(KV_HEADS):
            votes = torch.zeros(length - window, dtype=torch.float64)
            for new in range(window):
                at, token = length - window + new, row * window + new
                q = prompt.query[token, of * 4 : of * 4 + 4].double()
                votes += (
                    (q @ keys[: at + 1, of].double().T * SIZE**-0.5)
                    .softmax(1)[:, : len(votes)]
                    .mean(0)
                )
            pooled = {i: float(votes[max(i - 2, 0) : i + 3].max()) for i in range(len(votes))}
            # Neighbours share a maximum, in float32 to its last bits.
            chosen = kept[row, of, : budget - window].tolist()
            wanted = best(pooled, budget - window)
            assert sorted(pooled[i] for i in chosen if i >= 0) == pytest.approx(
                sorted(pooled[i] for i in wanted), abs=1e-6
            )
            assert chosen.count(-1) == budget - window - len(wanted)
            token = row * window + window - 1
            places = [i for i in kept[row, of].tolist() if i >= 0]
            assert places[-window:] == list(range(length - window, length))
            seen |= {(token, head): places for head in range(of * 4, of * 4 + 4)}
    check(prompt, out, seen)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", STEPS, ids=["decode", "prefill"])
def test_nsa(lengths: list[tuple[int, int]], backend: str) -> None:
    coarse = layer(backend, budget=16, tokens_per_entry=BLOCK)
    fine = layer(backend, budget=5, granularity=BLOCK, scope="kv_head")
    near = layer(backend, budget=20)
    step = Step(lengths, fine)
    means = [[x.unfold(0, BLOCK, BLOCK).mean(-1) if len(x) >= BLOCK else x[:0] for x in rows]
             for rows in (step.keys, step.values)]  # fmt: skip
    entries = coarse.group.allocate_cache(len(lengths))
    table = torch.arange(len(lengths)).view(-1, 1)
    for row, (key, value) in enumerate(zip(*means, strict=True)):
        entries.key[row, : len(key)], entries.value[row, : len(value)] = key, value
    of_entries = Batch.from_lens(*map(list, zip(*lengths, strict=True)))
    of_entries.block_table = table.int()
    gates = torch.rand(3, len(step.query), HEADS)
    out = POLICIES["nsa"](
        (coarse, fine, near), step.query, step.key, step.value, gates, (step.cache, entries),
        (step.batch, of_entries), 5, 20,
    )  # fmt: skip
    for token, (row, at) in enumerate(step.tokens):
        done, own = (at + 1) // BLOCK, at // BLOCK
        for of in range(KV_HEADS):
            q = step.query[token, of * 4 : of * 4 + 4].double()
            mean_key, mean_value = (x[row][:done, of].double() for x in means)
            weights = (q @ mean_key.T * SIZE**-0.5).softmax(1)
            outer = weights @ mean_value
            scores = {block: float(weights[:, block].sum()) for block in range(done)}
            scores |= {block: float("inf") for block in (0, own, own - 1) if block >= 0}
            blocks = best(scores, 5)
            for index in range(4):
                head = of * 4 + index
                wanted = gates[0, token, head] * outer[index]
                wanted += gates[1, token, head] * step.attended(token, head, ids_of(blocks, at))
                places = list(range(max(0, at - 19), at + 1))
                wanted += gates[2, token, head] * step.attended(token, head, places)
                assert (out[token, head] - wanted).abs().max() < 5e-6, (token, head)


def hashed(query: Tensor, step: Step, planes: Tensor, budget: int) -> Tensor:
    """Keys whose signs on random planes are most like a query head's: a policy of nobody's."""
    choice = torch.full((len(query), HEADS, budget), -1, dtype=torch.int32)
    for token, (row, at) in enumerate(step.tokens):
        keys = (step.keys[row][: at + 1].repeat_interleave(HEADS // KV_HEADS, 1) @ planes) > 0
        alike = (keys == ((query[token] @ planes) > 0)).sum(-1).T.clone()
        alike[:, at] = planes.shape[1] + 1
        best_ids = alike.sort(dim=1, descending=True, stable=True).indices[:, :budget]
        choice[token, :, : best_ids.shape[1]] = best_ids.int()
    return choice


def serve_hashed(backend: str, steps: tuple[list[tuple[int, int]], ...] = STEPS) -> None:
    for lengths in steps:
        made = layer(backend, budget=11, scope="head")
        step = Step(lengths, made)
        planes = torch.randn(SIZE, 9, generator=torch.Generator().manual_seed(7))
        choice = hashed(step.query, step, planes, 11)
        out = made(step.query, step.key, step.value, step.cache, step.batch, choice=choice)
        heads = {
            (token, head): [i for i in choice[token, head].tolist() if i >= 0]
            for token in range(len(step.tokens))
            for head in range(HEADS)
        }
        check(step, out, heads)


@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_an_unseen_policy(backend: str) -> None:
    serve_hashed(backend)


@pytest.mark.slow
def test_an_unseen_policy_of_an_interpreted_kernel() -> None:
    pytest.importorskip("triton")
    interpreted(__file__)


def test_policies_have_at_most_thirty_lines() -> None:
    for name in ("streaming_llm", "quest", "moba", "snapkv", "nsa"):
        assert len(inspect.getsource(POLICIES[name]).splitlines()) <= 30, name


if __name__ == "__main__":
    serve_hashed("TRITON_ATTN", ([(1, 200), (3, 17)],))
