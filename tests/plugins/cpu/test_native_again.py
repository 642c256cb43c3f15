"""A step's later calls check less than its first one. Do they still see all that changed?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from polyattn import Batch, LayerGroup, LayerSpec, SparseAttention, SparseSpec, select
from polyattn.errors import BatchError, PolyattnError
from polyattn.families.sparse.planning import Piece
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn_cpu.native import library
from torch import Tensor
from torch.autograd import forward_ad

pytestmark = pytest.mark.skipif(
    library.why_not() is not None, reason=f"native kernels: {library.why_not()}"
)
BLOCK, LENGTH = 16, 640
FORMS = {
    "blocks": SparseSpec(budget=6, granularity=16, scope="kv_head"),
    "groups": SparseSpec(budget=30, granularity=4),
    "two pages": SparseSpec(budget=4, granularity=32, scope="head"),
    "tokens": SparseSpec(budget=40),
    "places": SparseSpec(budget=20, physical=True),
    "entries": SparseSpec(budget=12, tokens_per_entry=4),
    "pieces": SparseSpec(budget=40, granularity=16, scope="kv_head"),
}
"""The last one's rows are items of several threads."""


class Step:
    """Some layers' caches, a step of decodes, and what attention to chosen keys is, in float64."""

    def __init__(self, sparse: SparseSpec, tokens: int = 3, seed: int = 0):
        self.dice = torch.Generator().manual_seed(seed)
        self.spec = LayerSpec(
            kind="sparse",
            num_heads=4,
            num_kv_heads=2,
            head_size=32,
            dtype="float32",
            block_size=BLOCK,
            sparse=sparse,
        )
        self.group = LayerGroup(select(self.spec, "cpu", backend="NATIVE_ATTN"))
        self.part, self.tokens = sparse, tokens
        form, blocks = self.group.allocate_cache(1).format, tokens * LENGTH // BLOCK
        other = replace(form, layout={"NHD": "HND", "HND": "NHD"}[form.layout])
        # The last one's blocks lie twice as far apart, and its pages have the same strides.
        apart = torch.empty(blocks, 2, BLOCK, 2, 32)
        if form.layout == "HND":
            apart = apart.transpose(2, 3).contiguous()
        self.caches = [KVCache.allocate(each, blocks) for each in (form, form, other)]
        self.caches.append(KVCache.packed(apart, form.layout))
        for cache in self.caches:
            cache.key.copy_(self.normal(*cache.key.shape))
            cache.value.copy_(self.normal(*cache.value.shape))
        self.layers = [SparseAttention(self.group, checks=False) for _ in self.caches]
        self.table = torch.randperm(blocks, generator=self.dice).int().view(tokens, -1)
        self.lens = torch.tensor([LENGTH - 5 - 7 * i for i in range(tokens)])
        batch = Batch.from_lens([1] * tokens, self.lens.tolist()).with_block_table(self.table)
        self.plan: Any = self.group.plan(batch)
        self.query = self.normal(tokens, 4, 32)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.dice)

    def random(self, most: int) -> int:
        return int(torch.randint(most, (), generator=self.dice))

    def choice(self, width: int = 0, none: bool = False, ascends: bool = False) -> Tensor:
        """Return a choice of distinct ids, some of which their tokens don't see, and -1."""
        part, scopes = self.part, self.part.choices(4, 2)
        there = LENGTH // part.tokens_per_entry // part.granularity
        if part.physical:
            there = self.caches[0].num_blocks * BLOCK
        keep = width or part.budget
        ids = torch.rand(self.tokens, scopes, there, generator=self.dice).argsort(-1)[..., :keep]
        if none:
            ids[torch.rand(ids.shape, generator=self.dice) < 0.3] = -1
        return (ids.sort(-1).values if ascends else ids).int()

    def drawn(self, held: Tensor) -> Tensor:
        """Return a choice of some kind; `held` is one that may change in place."""
        which = self.random(7)
        if which == 0:
            return self.choice(none=True)
        if which == 1:
            return self.choice(ascends=True)
        if which == 2:
            return self.choice(1 + self.random(self.part.budget))
        if which == 3:
            return self.choice().transpose(1, 2).contiguous().transpose(1, 2)
        if which == 4:
            return torch.full_like(held, -1)
        return held if which == 5 else held.copy_(self.choice(none=True))

    def expected(self, query: Tensor, cache: KVCache, choice: Tensor) -> Tensor:
        part, out = self.part, torch.zeros(self.tokens, 4, 32, dtype=torch.float64)
        each, m = choice.shape[1], part.tokens_per_entry
        for token in range(self.tokens):
            visible = int(self.lens[token]) // m
            for head in range(4):
                ids = choice[token, {1: 0, 2: head // 2, 4: head}[each]].long()
                ids = ids[ids >= 0]
                if not part.physical:
                    ids = (
                        ids[:, None] * part.granularity + torch.arange(part.granularity)
                    ).flatten()
                    ids = ids[ids < visible]
                    ids = self.table[token, ids // BLOCK].long() * BLOCK + ids % BLOCK
                if len(ids):
                    key, value = (
                        stored[ids // BLOCK, ids % BLOCK, head // 2].double()
                        for stored in (cache.key, cache.value)
                    )
                    logits = key @ query[token, head].double() * self.spec.scale
                    out[token, head] = logits.softmax(0) @ value
        return out

    def check(self, which: int, query: Tensor, choice: Tensor, **more: Any) -> Tensor:
        out = self.layers[which](
            query, None, None, self.caches[which], self.plan, choice=choice, **more
        )
        error = (out.double() - self.expected(query, self.caches[which], choice)).abs().max()
        assert error < 1e-5, (which, float(error))
        return out  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FORMS)
def test_any_calls_one_after_another(name: str) -> None:
    """Layers, caches, choices, lengths and tables change between calls of one step, in place too."""
    for tokens in (1, 3):
        step = Step(FORMS[name], tokens)
        held = step.choice()
        for _ in range(60):
            what = step.random(10)
            query = step.query
            if what == 0:
                query = step.normal(tokens, 4, 100)[..., 60:92]
            elif what == 1:
                query = query.transpose(0, 1).contiguous().transpose(0, 1)
            elif what == 2:  # in place: neither the plan nor a tensor is another object
                step.lens.sub_(1 + step.random(9))
                step.plan.batch.seq_lens.copy_(step.lens)
            elif what == 3:
                step.table.copy_(
                    step.table[:, torch.randperm(step.table.shape[1], generator=step.dice)]
                )
            elif what == 4:
                step.query.copy_(step.normal(tokens, 4, 32))
            choice = step.drawn(held)
            more = {"out": step.normal(tokens, 4, 32)} if step.random(2) else {}
            step.check(step.random(4), query, choice, **more)


def test_a_later_call_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third one on: the first one plans, the second one finds that nothing else is needed."""
    step, calls = Step(FORMS["blocks"]), 0
    own = Piece.attended

    def counted(piece: Piece, frame: Any) -> Any:
        nonlocal calls
        calls += 1
        return own(piece, frame)

    monkeypatch.setattr(Piece, "attended", counted)
    choice = step.choice()
    for i in range(6):
        step.check(i % 2, step.query, choice)
    # A layer's first call checks its cache.
    assert calls == 2
    step.check(0, step.query, step.choice(1))  # of another length, which means another plan
    assert calls == 3


def test_a_later_call_stores_what_it_brings() -> None:
    step = Step(FORMS["blocks"])
    table, last = step.table, step.lens - 1
    plan = step.group.plan(Batch.from_lens([1] * step.tokens, step.lens.tolist(), table, BLOCK))
    ids = last[:, None, None] // 16 - torch.tensor([2, 1, 0])
    choice = ids.int().expand(-1, 2, -1).contiguous()
    for i in range(5):
        key, value = step.normal(2, step.tokens, 2, 32)
        cache = step.caches[i % 2]
        out = step.layers[i % 2](step.query, key, value, cache, plan, choice=choice)
        at = table[torch.arange(step.tokens), last // BLOCK].long(), last % BLOCK
        assert cache.key[at].equal(key) and cache.value[at].equal(value)
        assert (out.double() - step.expected(step.query, cache, choice)).abs().max() < 1e-5


def _grown(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor])


BAD: dict[str, Callable[[Step], dict[str, Any]]] = {
    "query's shape": lambda s: {"query": _grown(s.query)},
    "query's dtype": lambda s: {"query": s.query.bfloat16()},
    "query's device": lambda s: {"query": s.query.to("meta")},
    "query's gradient": lambda s: {"query": s.query.clone().requires_grad_()},
    "query's class": lambda s: {"query": s.query.numpy()},
    "choice's dtype": lambda s: {"choice": s.choice().long()},
    "choice's shape": lambda s: {"choice": s.choice()[:, :1]},
    "choice's width": lambda s: {"choice": _grown(s.choice().transpose(0, 2)).transpose(0, 2)},
    "choice's device": lambda s: {"choice": s.choice().to("meta")},
    "key without value": lambda s: {"key": s.normal(3, 2, 32)},
    "key's shape": lambda s: {"key": s.normal(3, 4, 32), "value": s.normal(3, 2, 32)},
    "key's gradient": lambda s: {
        "key": s.normal(3, 2, 32).requires_grad_(),
        "value": s.normal(3, 2, 32),
    },
    "out's shape": lambda s: {"out": s.normal(3, 4, 16)},
    "out's dtype": lambda s: {"out": s.normal(3, 4, 32).double()},
    "out's strides": lambda s: {"out": s.normal(3, 1, 32).expand(3, 4, 32)},
    "a cache with fewer blocks": lambda s: {"cache": s.group.allocate_cache(2)},
    "a cache of another form": lambda s: {
        "cache": KVCache(torch.zeros(120, 8, 2, 32), torch.zeros(120, 8, 2, 32))
    },
    "another group's plan": lambda s: {"plan": Step(FORMS["blocks"]).plan},
}


@pytest.mark.parametrize("name", BAD)
def test_a_later_call_refuses_what_the_first_one_does(name: str) -> None:
    said = []
    for earlier in (0, 3):
        step = Step(FORMS["blocks"])
        for _ in range(earlier):
            step.check(0, step.query, step.choice())
        before = {"query": step.query, "key": None, "value": None, "cache": step.caches[0]}
        call = before | {"plan": step.plan, "choice": step.choice()} | BAD[name](step)
        with pytest.raises(PolyattnError) as refused:
            step.layers[0](**call)
        said.append((type(refused.value), str(refused.value)))
        step.check(0, step.query, step.choice())
    assert said[0] == said[1]


def test_a_later_call_refuses_a_tangent() -> None:
    step = Step(FORMS["blocks"])
    for _ in range(3):
        step.check(0, step.query, step.choice())
    with forward_ad.dual_level(), pytest.raises(BatchError, match="tangent"):
        dual = forward_ad.make_dual(step.query, torch.ones_like(step.query))
        step.layers[0](dual, None, None, step.caches[0], step.plan, choice=step.choice())


def test_a_block_outside_the_cache_is_refused_by_a_later_call() -> None:
    step = Step(FORMS["blocks"])
    for _ in range(3):
        step.check(0, step.query, step.choice())
    step.table.fill_(step.caches[0].num_blocks)  # in place, after the step's look at its table
    with pytest.raises(BatchError, match="outside the cache"):
        step.check(0, step.query, step.choice())


@pytest.mark.parametrize("level", ["layer", "every module"])
def test_hooks_run_at_each_call(level: str) -> None:
    step, seen = Step(FORMS["blocks"]), []
    layer = step.layers[0]

    def before(module: Any, args: Any) -> None:
        seen.append(module)

    def after(module: Any, args: Any, out: Tensor) -> Tensor:
        return out + 1

    modules = torch.nn.modules.module
    if level == "layer":
        handles = [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    else:
        register = modules.register_module_forward_pre_hook, modules.register_module_forward_hook
        handles = [add(hook) for add, hook in zip(register, (before, after), strict=True)]
    choice = step.choice()
    try:
        hooked = [
            layer(step.query, None, None, step.caches[0], step.plan, choice=choice)
            for _ in range(4)
        ]
    finally:
        for handle in handles:
            handle.remove()
    plain = step.check(0, step.query, choice)
    assert seen == [layer] * 4
    assert all(each.equal(plain + 1) for each in hooked)
