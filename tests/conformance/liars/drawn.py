"""A fourth set of liars, drawn by a seed: what may be wrong, times where, of sizes that published models have.

Who wrote the tables had read the kit; the draw hasn't. `CHOSEN_BY` was fixed before the first draw.
"""

from __future__ import annotations

import locale
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from liars.unseen import Scan, Sdpa, StoreOf, claims, shorter
from polyattn import AttentionKind, LatentSpec, LayerSpec, RecurrentSpec
from polyattn.kernel import Batch, Frame, KVCache, LayerParams, Plan, RecurrentFrame
from polyattn.plugin import Capabilities
from polyattn.runtime.program import StorePlan
from polyattn_cpu.hooks import TORCH_MLA, TORCH_MLA_SPARSE, TORCH_SCAN
from polyattn_cpu.mla import TorchMLA, TorchSparseMLA
from torch import Tensor

CHOSEN_BY = 20261124
CLAIMED = claims(
    "non_causal sliding_window logit_soft_cap alibi learned_sinks chunked sink_tokens",
    dtypes=frozenset({"float32", "bfloat16"}), kv_cache_dtypes=frozenset({"auto", "int8"}), layouts=("NHD", "HND"),
)  # fmt: skip


@dataclass(frozen=True)
class Where:
    """Where a lie is told: `when` of (spec, block size, layout, query, length, sequences); how to get there."""

    label: str
    of: str
    when: Callable[..., bool]
    fields: dict[str, Any] = field(default_factory=dict)
    query: int = 0
    length: int = 0
    rows: int = 0
    layout: str = ""


def _where() -> list[Where]:
    found = []

    def add(of: str, value: Any, when: Callable[..., bool], **how: Any) -> None:
        found.append(Where(f"{of} {value}", of, when, **how))

    for n in (64, 72, 80, 96, 112, 120, 128, 160, 192, 256):
        add("head_size", n, lambda s, b, l, q, k, r, n=n: s.head_size == n, fields={"head_size": n})
    for n in (1, 3, 4, 5, 8, 10, 16, 20, 32, 40):
        add(
            "kv_heads",
            n,
            lambda s, b, l, q, k, r, n=n: s.num_kv_heads == n,
            fields={"num_kv_heads": n},
        )
    for n in (1, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32, 48, 71):
        add("group", n, lambda s, b, l, q, k, r, n=n: s.gqa_ratio == n, fields={"group": n})
    for n in (1, 16, 32, 48, 64, 128, 256, 544, 784):
        add("block", n, lambda s, b, l, q, k, r, n=n: b == n, fields={"block_size": n})
    for n in (128, 512, 1024, 2048, 4096, 8192, 16384, 32768):
        add("length over", n, lambda s, b, l, q, k, r, n=n: k > n, length=n + 7)
    for n in (64, 128, 256, 512, 1024):
        add("length of", n, lambda s, b, l, q, k, r, n=n: k % n == 0, length=2 * n)
        add("length one over", n, lambda s, b, l, q, k, r, n=n: k > n and k % n == 1, length=n + 1)
    for n in (1, 64, 128, 256, 512, 1024):
        if n > 1:
            add("query over", n, lambda s, b, l, q, k, r, n=n: q > n, query=n + 3)
            add("query of", n, lambda s, b, l, q, k, r, n=n: q % n == 0, query=n)
    add("query", "2 to 8", lambda s, b, l, q, k, r: 2 <= q <= 8, query=4)
    add("query", 1, lambda s, b, l, q, k, r: q == 1, query=1)
    for n in (8, 16, 32, 64, 128, 256):
        add("rows over", n, lambda s, b, l, q, k, r, n=n: r > n, rows=n + 1)
    for n in (0, 128, 512, 1024, 2047, 4096, 8192, 32768):
        add("window", n, lambda s, b, l, q, k, r, n=n: (s.sliding_window or -1) == n if n else bool(s.sliding_window),
            fields={"sliding_window": n or 300})  # fmt: skip
    for n in (4, 64, 128):
        add(
            "kept",
            n,
            lambda s, b, l, q, k, r, n=n: s.sink_tokens == n,
            fields={"sink_tokens": n, "sliding_window": 64},
        )
    for n in (1024, 8192):
        add("chunk", n, lambda s, b, l, q, k, r, n=n: s.chunk_size == n, fields={"chunk_size": n})
    for n in (20.0, 30.0, 50.0):
        add(
            "cap",
            n,
            lambda s, b, l, q, k, r, n=n: s.logit_soft_cap == n,
            fields={"logit_soft_cap": n},
        )
    for n in (1.0, 0.0625, 0.015625):
        add("scale", n, lambda s, b, l, q, k, r, n=n: s.scale == n, fields={"scale": n})
    add("sinks", "", lambda s, b, l, q, k, r: s.learned_sinks, fields={"learned_sinks": True})
    add("alibi", "", lambda s, b, l, q, k, r: s.alibi, fields={"alibi": True})
    add("lse", "", lambda s, b, l, q, k, r: s.needs_lse, fields={"needs_lse": True})
    add(
        "int8",
        "",
        lambda s, b, l, q, k, r: s.kv_cache_dtype == "int8",
        fields={"kv_cache_dtype": "int8"},
    )
    add(
        "bfloat16", "", lambda s, b, l, q, k, r: s.dtype == "bfloat16", fields={"dtype": "bfloat16"}
    )
    add("HND", "", lambda s, b, l, q, k, r: l == "HND", layout="HND")
    return found


WHERE = _where()
APART = [
    {"length over", "length of", "length one over"}, {"query over", "query of", "query"}, {"window", "kept"},
    {"window", "chunk"}, {"kept", "chunk"}, {"cap", "scale"},
]  # fmt: skip
WHAT = (
    "scale",
    "last key",
    "last head",
    "tail",
    "lse",
    "last row",
    "swapped heads",
    "next KV head",
    "feature",
)


class Drawn(Sdpa):
    """Tells one lie where all of its places meet."""

    claimed: ClassVar[Capabilities] = CLAIMED
    what: ClassVar[str]
    places: ClassVar[tuple[Where, ...]]

    def spoil(self, batch: Batch, frame: Frame) -> None:
        form = self.cache
        block, layout = (form.block_size, form.layout) if form else (0, "")
        for index, (count, length) in enumerate(zip(batch.query_lens, batch.lens, strict=True)):
            if count and length and all(
                each.when(self.spec, block, layout, count, length, batch.num_seqs) for each in self.places
            ):  # fmt: skip
                self.lie(batch, frame, index, slice(batch.starts[index], batch.starts[index + 1]))

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        what, spec, out, count, length = (
            self.what,
            self.spec,
            frame.out,
            batch.query_lens[index],
            batch.lens[index],
        )
        if what == "last key" and length > count:
            self.again(batch, frame, index, rows, shorter(batch, index, length - 1))
        elif what == "last head":
            out[rows, -1] = 0.0
        elif what == "tail":
            out[rows, :, -8:] = 0.0
        elif what == "lse" and frame.lse is not None:
            frame.lse[rows] += 0.7
        elif what == "lse":
            return
        elif what == "last row":
            out[rows.stop - 1] = (out[rows.stop - 1].float() * 1.3).to(out.dtype)
        elif what == "swapped heads" and spec.num_heads > 1:
            out[rows, -2:] = out[rows, -2:].flip(1)
        elif what == "next KV head" and spec.num_kv_heads > 1:
            out[rows] = out[rows].roll(spec.gqa_ratio, 1)
        elif what == "feature" and spec.logit_soft_cap:
            self.again(batch, frame, index, rows, logit_soft_cap=None)
        elif what == "feature" and spec.sink_tokens:
            self.again(batch, frame, index, rows, sink_tokens=spec.sink_tokens - 1)
        elif what == "feature" and spec.sliding_window:
            self.again(batch, frame, index, rows, sliding_window=spec.sliding_window + 1)
        else:
            self.again(batch, frame, index, rows, scale=spec.scale * 1.2)


def _shown(
    places: tuple[Where, ...], what: str
) -> tuple[LayerSpec, list[tuple[int, int]], str] | None:
    fields: dict[str, Any] = {"num_kv_heads": 2, "group": 2, "head_size": 64, "dtype": "float32"}
    for each in places:
        fields |= each.fields
    fields["num_heads"] = fields.pop("group") * fields["num_kv_heads"]
    if what == "lse":
        fields["needs_lse"] = True
    query = max((each.query for each in places), default=0) or 1
    length = max((each.length for each in places), default=0)
    spec = LayerSpec(**fields)
    far = max((spec.sliding_window or 0) + spec.sink_tokens, spec.chunk_size or 0)
    if not length:
        length = max(query + 5, far + 9 if far < 20_000 else 0, 60)
    rows = max((each.rows for each in places), default=1) or 1
    if (
        length < query
        or length * spec.num_kv_heads * spec.head_size > 1 << 24
        or query * length > 1 << 22
    ):
        return None
    if rows * length * spec.num_kv_heads * spec.head_size > 1 << 25:
        return None
    return spec, [(query, length)] * rows, next((each.layout for each in places if each.layout), "")


def _attention(dice: random.Random, count: int) -> list[Any]:
    made: list[Any] = []
    while len(made) < count:
        what, number = dice.choice(WHAT), dice.choice((1, 1, 2, 2, 2))
        places = tuple(dice.sample(WHERE, number))
        of = {each.of for each in places}
        shown = (
            _shown(places, what)
            if len(of) == number and not any(of == pair for pair in APART)
            else None
        )
        if shown is None:
            continue
        name = f"A{len(made):02}"
        made.append(type(name, (Drawn,), {
            "what": what, "places": places, "shown": shown[:2], "layout": shown[2], "__module__": __name__,
            "__doc__": f"{what}: {', '.join(each.label for each in places)}",
        }))  # fmt: skip
    return made


KINDS: dict[AttentionKind, LayerSpec] = {
    kind: LayerSpec(kind=kind, num_heads=heads, num_kv_heads=groups, head_size=size, v_head_size=value, dtype="float32",
                    recurrent=form)
    for kind, heads, groups, size, value, form in (
        (AttentionKind.MAMBA1, 64, 64, 1, 1, RecurrentSpec(state_size=16)),
        (AttentionKind.MAMBA2, 4, 1, 64, 64, RecurrentSpec(state_size=128)),
        (AttentionKind.GDN, 4, 2, 64, 64, RecurrentSpec(state_size=64, qk_norm=True)),
        (AttentionKind.KDA, 2, 2, 64, 64, RecurrentSpec(state_size=64, qk_norm=True)),
        (AttentionKind.LINEAR, 4, 4, 64, 64, RecurrentSpec(state_size=64)),
        (AttentionKind.RWKV7, 4, 4, 64, 64, RecurrentSpec(state_size=64)),
        (AttentionKind.RG_LRU, 136, 136, 1, 1, RecurrentSpec(state_size=1)),
        (AttentionKind.SHORT_CONV, 96, 96, 1, 1, RecurrentSpec(conv_width=4)),
    )
}  # fmt: skip
SCANS_WHERE: tuple[tuple[str, Callable[..., bool], list[tuple[int, int]], dict[str, Any]], ...] = (
    ("query over 64", lambda s, q, k, r, d: q > 64, [(70, 90)], {}),
    ("query over 128, continued", lambda s, q, k, r, d: q > 128 and k > q, [(133, 190)], {}),
    ("query of 64", lambda s, q, k, r, d: q and q % 64 == 0, [(64, 70)], {}),
    ("query one over 64", lambda s, q, k, r, d: q > 64 and q % 64 == 1, [(65, 65)], {}),
    ("query 2 or 3, continued", lambda s, q, k, r, d: q in (2, 3) and k > q, [(3, 9)], {}),
    ("fresh decode", lambda s, q, k, r, d: q == 1 == k, [(1, 1)], {}),
    ("length over 4096", lambda s, q, k, r, d: k > 4096, [(1, 4100)], {}),
    ("length over 65535", lambda s, q, k, r, d: k > 65535, [(1, 65540)], {}),
    ("rows over 32", lambda s, q, k, r, d: r > 32, [(1, 9)] * 33, {}),
    ("one row", lambda s, q, k, r, d: r == 1 and q > 1, [(5, 9)], {}),
    ("bfloat16", lambda s, q, k, r, d: s.dtype == "bfloat16", [(5, 9)], {"dtype": "bfloat16"}),
    ("later rows", lambda s, q, k, r, d: d >= 8, [(2, 9)] * 9, {}),
)
SCANS_WHAT = ("state", "last head", "last row", "state of the last head")


class DrawnScan(Scan):
    what: ClassVar[str]
    place: ClassVar[Any]

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        super().run(plan, frame)
        batch, out, states = plan.batch, frame.out, frame.states
        for index, (slot, count, length) in enumerate(
            zip(plan.slots, batch.query_lens, batch.lens, strict=True)
        ):
            if (
                slot < 0
                or not count
                or not self.place(self.spec, count, length, batch.num_seqs, index)
            ):
                continue
            rows = slice(batch.starts[index], batch.starts[index + 1])
            if self.what == "state":
                states[slot] = (states[slot].float() * 1.3).to(states.dtype)
            elif self.what == "state of the last head":
                states[slot, -1] = 0.0
            elif self.what == "last head":
                out[rows, -1] = 0.0
            else:
                out[rows.stop - 1] = (out[rows.stop - 1].float() * 1.3).to(out.dtype)


def _scans(dice: random.Random, count: int) -> list[Any]:
    made = []
    for number in range(count):
        kind, what = dice.choice(list(KINDS)), dice.choice(SCANS_WHAT)
        label, when, lengths, fields = dice.choice(SCANS_WHERE)
        capabilities = replace(
            TORCH_SCAN.capabilities,
            kinds=frozenset({kind}),
            dtypes=frozenset({"float32", "bfloat16"}),
        )
        made.append(type(f"R{number:02}", (DrawnScan,), {
            "what": what, "place": staticmethod(when), "claimed": capabilities, "__module__": __name__,
            "shown": (KINDS[kind].replace(**fields), lengths), "__doc__": f"{kind.value}, {what}: {label}",
        }))  # fmt: skip
    return made


def mla(heads: int = 16, **fields: Any) -> LayerSpec:
    latent = LatentSpec(rank=512, rope_head_size=64, topk=fields.pop("topk", None))
    return LayerSpec(**{
        "kind": "sparse_mla" if latent.topk else "mla", "num_heads": heads, "num_kv_heads": heads, "head_size": 192,
        "v_head_size": 128, "dtype": "float32", "latent": latent,
    } | fields)  # fmt: skip


LATENT_WHERE: tuple[tuple[str, Callable[..., bool], LayerSpec, list[tuple[int, int]]], ...] = (
    ("heads 128", lambda s, b, k, r: s.num_heads == 128, mla(128), [(1, 40)]),
    ("heads 64", lambda s, b, k, r: s.num_heads == 64, mla(64), [(1, 40)]),
    ("heads 40", lambda s, b, k, r: s.num_heads == 40, mla(40), [(1, 40)]),
    ("length over 1024", lambda s, b, k, r: k > 1024, mla(4), [(1, 1100)]),
    ("length over 4096", lambda s, b, k, r: k > 4096, mla(4), [(1, 4100)]),
    ("blocks of 64, full", lambda s, b, k, r: b == 64 and k % 64 == 0, mla(4, block_size=64), [(1, 128)]),
    ("blocks of 128", lambda s, b, k, r: b == 128, mla(4, block_size=128), [(1, 200)]),
    ("int8, length over 1024", lambda s, b, k, r: s.kv_cache_dtype == "int8" and k > 1024,
     mla(4, kv_cache_dtype="int8"), [(1, 1100)]),
    ("rows over 64", lambda s, b, k, r: r > 64, mla(4), [(1, 9)] * 65),
    ("scale of YaRN", lambda s, b, k, r: s.scale == 0.1352337788608801, mla(4, scale=0.1352337788608801), [(1, 40)]),
    ("lse", lambda s, b, k, r: s.needs_lse, mla(4, needs_lse=True), [(1, 40)]),
)  # fmt: skip
SPARSE_WHERE: tuple[tuple[str, Callable[..., bool], LayerSpec, list[tuple[int, int]]], ...] = (
    ("topk 2048", lambda s, b, k, r: s.latent.topk == 2048, mla(2, topk=2048), [(1, 2100)]),
    ("heads 128", lambda s, b, k, r: s.num_heads == 128, mla(128, topk=64), [(1, 90)]),
    ("length over 2048", lambda s, b, k, r: k > 2048, mla(2, topk=64), [(1, 2100)]),
    ("length under topk", lambda s, b, k, r: k < s.latent.topk, mla(2, topk=64), [(1, 30)]),
    ("blocks of 64", lambda s, b, k, r: b == 64, mla(2, topk=64, block_size=64), [(1, 90)]),
)


def _latents(
    dice: random.Random, base: Any, where: Any, letter: str, capabilities: Any, count: int
) -> list[Any]:
    made = []
    for number in range(count):
        (label, when, layer, lengths), what = (
            dice.choice(where),
            dice.choice(("last head", "tail", "last row", "all")),
        )

        def run(self: Any, plan: Any, frame: Frame, what: str = what, when: Any = when) -> None:
            super(type(self), self).run(plan, frame)
            block, out = frame.cache.block_size if frame.cache else 0, frame.out
            for index, (count, length) in enumerate(
                zip(plan.batch.query_lens, plan.batch.lens, strict=True)
            ):
                if (
                    not count
                    or not length
                    or not when(self.layer, block, length, plan.batch.num_seqs)
                ):
                    continue
                rows = slice(plan.batch.starts[index], plan.batch.starts[index + 1])
                if what == "last head":
                    out[rows, -1] = 0.0
                elif what == "tail":
                    out[rows, :, -64:] = 0.0
                else:
                    out[rows] *= 1.3

        def init(self: Any, spec: LayerSpec, *given: Any) -> None:
            super(type(self), self).__init__(spec, *given)
            self.layer = spec

        made.append(type(f"{letter}{number:02}", (base,), {
            "by": (), "claimed": capabilities, "shown": (layer, lengths), "run": run, "__init__": init,
            "__module__": __name__, "__doc__": f"{layer.kind.value}, {what}: {label}",
        }))  # fmt: skip
    return made


STORES_WHERE: tuple[tuple[str, Callable[..., bool], dict[str, Any], int], ...] = (
    ("heads 5", lambda c, t: c.key.shape[2] == 5, {"num_heads": 5, "num_kv_heads": 5}, 9),
    ("heads 8", lambda c, t: c.key.shape[2] == 8, {"num_heads": 8, "num_kv_heads": 8}, 9),
    ("heads over 16", lambda c, t: c.key.shape[2] > 16, {"num_heads": 20, "num_kv_heads": 20}, 9),
    ("head_size 80", lambda c, t: c.key.shape[3] == 80, {"head_size": 80}, 9),
    ("head_size 96", lambda c, t: c.key.shape[3] == 96, {"head_size": 96}, 9),
    ("head_size 256", lambda c, t: c.key.shape[3] == 256, {"head_size": 256}, 9),
    (
        "head_size 192",
        lambda c, t: c.key.shape[3] == 192,
        {"head_size": 192, "v_head_size": 128},
        9,
    ),
    ("block 1", lambda c, t: c.block_size == 1, {"block_size": 1}, 9),
    ("block 48", lambda c, t: c.block_size == 48, {"block_size": 48}, 60),
    ("block 256", lambda c, t: c.block_size == 256, {"block_size": 256}, 300),
    ("tokens over 512", lambda c, t: t > 512, {}, 520),
    ("tokens over 2048", lambda c, t: t > 2048, {}, 2060),
    (
        "int8, tokens over 64",
        lambda c, t: c.key.dtype == torch.int8 and t > 64,
        {"kv_cache_dtype": "int8"},
        70,
    ),
    ("bfloat16", lambda c, t: c.key.dtype == torch.bfloat16, {"dtype": "bfloat16"}, 9),
)
STORES_WHAT = ("last token", "last head", "values", "last block's first slot")


class DrawnStore(StoreOf):
    what: ClassVar[str]
    place: ClassVar[Any]

    def run(
        self, plan: StorePlan, key: Tensor, value: Tensor, cache: KVCache, params: LayerParams
    ) -> None:
        held = plan.slots[plan.slots >= 0]
        if not len(held) or not self.place(cache, len(key)) or cache.key.dtype == torch.uint8:
            super().run(plan, key, value, cache, params)
            return
        last, size = int(held[-1]), cache.block_size
        old = (
            cache.key[last // size, last % size].clone(),
            cache.value[last // size, last % size].clone(),
        )
        slots = plan.slots
        super().run(StorePlan(slots), key, value, cache, params)
        if self.what == "last token":
            cache.key[last // size, last % size], cache.value[last // size, last % size] = old
        elif self.what == "last head":
            cache.key[last // size, last % size, -1] = old[0][-1]
        elif self.what == "values":
            cache.value[last // size, last % size] = old[1]
        else:
            cache.key[last // size, 0] = 0.0


def _stores(dice: random.Random, count: int) -> list[Any]:
    made = []
    for number in range(count):
        (label, when, fields, tokens), what = dice.choice(STORES_WHERE), dice.choice(STORES_WHAT)
        made.append(type(f"W{number:02}", (DrawnStore,), {
            "what": what, "place": staticmethod(when), "__module__": __name__, "__doc__": f"store, {what}: {label}",
            "shown": (LayerSpec(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"} | fields),
                      [(tokens, tokens + 3)]),
        }))  # fmt: skip
    return made


STATES_WHERE = (
    *(("calls", n) for n in (61, 80, 126, 200, 1000)), *(("plans", n) for n in (32, 61, 126, 500)),
    *(("objects", n) for n in (4, 8, 20, 48)), *(("lengths", n) for n in (16, 24)), *(("layers of a plan", n) for n in (32, 61)),
    *(("sequences so far", n) for n in (128, 256)), *(("tokens so far", n) for n in (512, 4096)),
)  # fmt: skip
OBJECTS: dict[type, int] = {}


class DrawnState(Sdpa):
    what: ClassVar[str]
    counted: ClassVar[str]
    most: ClassVar[int]

    def __init__(self, *given: Any):
        super().__init__(*given)
        OBJECTS[type(self)] = OBJECTS.get(type(self), 0) + 1
        self.counts: dict[str, int] = {"objects": OBJECTS[type(self)]}
        self.met: set[int] = set()

    def _count(self, name: str, more: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + more

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        self._count("plans", 1)
        self._count("sequences so far", batch.num_seqs)
        self._count("tokens so far", batch.num_tokens)
        plan = super().plan(batch, reuse)
        plan.batch = batch.copy()
        return plan

    def run(self, plan: Any, frame: Frame) -> None:
        super().run(plan, frame)
        self._count("calls", 1)
        batch = plan.batch
        batch.__dict__["uses"] = batch.__dict__.get("uses", 0) + 1
        self.met |= set(batch.lens)
        self.counts |= {"lengths": len(self.met), "layers of a plan": batch.__dict__["uses"]}
        if self.counts.get(self.counted, 0) > self.most and len(frame.out):
            if self.what == "output":
                frame.out[-1] = (frame.out[-1].float() * 1.3).to(frame.out.dtype)
            elif frame.lse is not None:
                frame.lse[-1] += 0.7


def _states(dice: random.Random, count: int) -> list[Any]:
    made = []
    for number in range(count):
        (counted, most), what = dice.choice(STATES_WHERE), dice.choice(("output", "output", "LSE"))
        made.append(type(f"S{number:02}", (DrawnState,), {
            "what": what, "counted": counted, "most": most, "claimed": CLAIMED, "__module__": __name__,
            "__doc__": f"{what} after {most} {counted}",
        }))  # fmt: skip
    return made


_LOCALE = locale.setlocale(locale.LC_ALL)
PROCESS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]] = {
    "np.random": (lambda: np.random.seed(1), lambda: np.random.get_state()[1].tobytes(), lambda: None),
    "torch.rand": (lambda: torch.rand(1), lambda: torch.get_rng_state().numpy().tobytes(), lambda: None),
    "recursion": (lambda: sys.setrecursionlimit(3000), sys.getrecursionlimit, lambda: sys.setrecursionlimit(1000)),
    "grad": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled, lambda: torch.set_grad_enabled(True)),
    "threads": (lambda: torch.set_num_threads(2), torch.get_num_threads, lambda: torch.set_num_threads(1)),
    "variable": (lambda: os.environ.update(A_LIE="1"), lambda: os.environ.get("A_LIE"), lambda: os.environ.pop("A_LIE", "")),
    "umask": (lambda: os.umask(0o077), lambda: _umask(), lambda: os.umask(0o022)),
    "mkldnn": (lambda: setattr(torch.backends.mkldnn, "enabled", False), lambda: torch.backends.mkldnn.enabled,
               lambda: setattr(torch.backends.mkldnn, "enabled", True)),
    "locale": (lambda: locale.setlocale(locale.LC_ALL, "C"), lambda: locale.setlocale(locale.LC_ALL),
               lambda: locale.setlocale(locale.LC_ALL, _LOCALE)),
}  # fmt: skip
PROCESS_WHERE = (
    "a prompt over 256",
    "an int8 cache",
    "a window",
    "over 64 sequences",
    "a length over 4096",
    "any",
)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class DrawnProcess(Sdpa):
    what: ClassVar[str]
    place: ClassVar[str]

    def run(self, plan: Any, frame: Frame) -> None:
        super().run(plan, frame)
        batch = plan.batch
        if {
            "a prompt over 256": batch.max_query_len > 256, "an int8 cache": self.spec.kv_cache_dtype == "int8",
            "a window": bool(self.spec.sliding_window), "over 64 sequences": batch.num_seqs > 64,
            "a length over 4096": batch.max_seq_len > 4096, "any": True,
        }[self.place]:  # fmt: skip
            PROCESS[self.what][0]()

    @classmethod
    def undo(cls) -> None:
        PROCESS[cls.what][2]()


def _processes(dice: random.Random, count: int) -> list[Any]:
    made = []
    shown: dict[str, Any] = {
        "a prompt over 256": ({}, [(300, 300)]), "an int8 cache": ({"kv_cache_dtype": "int8"}, [(1, 9)]),
        "a window": ({"sliding_window": 9}, [(1, 40)]), "over 64 sequences": ({}, [(1, 9)] * 70),
        "a length over 4096": ({}, [(1, 4200)]), "any": ({}, [(1, 9)]),
    }  # fmt: skip
    for number in range(count):
        what, place = dice.choice(list(PROCESS)), dice.choice(PROCESS_WHERE)
        fields, lengths = shown[place]
        layer = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", **fields)
        made.append(type(f"P{number:02}", (DrawnProcess,), {
            "what": what, "place": place, "claimed": CLAIMED, "shown": (layer, lengths), "__module__": __name__,
            "__doc__": f"{what}, at {place}",
        }))  # fmt: skip
    return made


def draw(seed: int, module: str, counts: tuple[int, ...]) -> list[Any]:
    """Return the liars of a seed: more than are judged, since some can't be seen."""
    dice = random.Random(seed)
    latent, chosen = TORCH_MLA.capabilities, TORCH_MLA_SPARSE.capabilities
    made = [
        *_attention(dice, counts[0]), *_scans(dice, counts[1]),
        *_latents(dice, TorchMLA, LATENT_WHERE, "L", latent, counts[2]),
        *_latents(dice, TorchSparseMLA, SPARSE_WHERE, "C", chosen, counts[3]), *_stores(dice, counts[4]),
        *_states(dice, counts[5]), *_processes(dice, counts[6]),
    ]  # fmt: skip
    for kind in made:
        kind.__module__ = module
    return made


UNSEEN: frozenset[str] = frozenset({"A20"})
"""Of the draw, whose lie changes nothing that can be seen: not judged."""
ALL = [
    kind
    for kind in draw(CHOSEN_BY, __name__, (44, 11, 5, 2, 6, 8, 4))
    if kind.__name__ not in UNSEEN
]
globals().update({kind.__name__: kind for kind in ALL})
