"""Captured steps that verify drafts on a hybrid model, and who pads how, on one GPU.

    python benchmarks/h200_moves.py [--out FILE.json] [--only moves,kit] [--seconds 60]

- `moves`: an attention layer, a gated delta rule whose states go to a slot for each token, and a short
  convolution with room for drafts, in one graph for rows of 4 tokens, up to 64; each replay of rows drawn
  at random, beside the same step run eagerly as it is padded: bits of outputs, how far states are,
  allocations. Beside the step as it is, whose keys attention may cut at other places: how far outputs
  are. Device times of a replay with its copies, of its graph alone, of the eager step planned before;
  host times of a replay, and of an eager step with its plan.
- `kit`: captured cases of TRITON_SCAN and TRITON_TOKEN_SCAN (rows of one token and of three, states to
  each token's slot, to each sequence's), padding rows and captures of TRITON_ATTN, e4m3 caches and drawn
  steps of FLASH_ATTN_V3, whose queries its own kernels round.

Without a GPU the sections say that they need one.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from h200_fp8 import within
from h200_serving import DEVICE, Row, _kit, guarded, main
from polyattn import (
    Attention,
    Batch,
    LayerGroup,
    LayerSpec,
    Recurrent,
    StepGraphs,
    StepSize,
    select,
)
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params
from polyattn.spec.layer import RecurrentSpec
from polyattn.workload.compare import output_error

ROWS, EACH, BLOCK, LONGEST = 64, 4, 16, 2048
DTYPE = "bfloat16"
KITS = {
    "TRITON_SCAN": "recurrent_graph or drafts",
    "TRITON_TOKEN_SCAN": "recurrent_graph",
    "TRITON_ATTN": "padded or (graph and not mixed)",
    "FLASH_ATTN_V3": "search or (fp8_e4m3 and not pair)",
}


class Hybrid:
    """Three layers of one step, with caches and states of `ROWS` sequences."""

    def __init__(self) -> None:
        common = {"dtype": DTYPE, "graph_capture": "uniform"}
        attention = LayerSpec(
            num_heads=16, num_kv_heads=2, head_size=128, block_size=BLOCK, **common
        )
        delta = LayerSpec(
            kind="gdn", num_heads=16, num_kv_heads=8, head_size=128,
            recurrent=RecurrentSpec(state_size=128, qk_norm=True), **common,
        )  # fmt: skip
        ring = LayerSpec(
            kind="short_conv", num_heads=4096, head_size=1,
            recurrent=RecurrentSpec(conv_width=4, draft_tokens=EACH, activation="silu"), **common,
        )  # fmt: skip
        self.dice = torch.Generator().manual_seed(0)
        self.specs = (attention, delta, ring)
        names = ("TRITON_ATTN", "TRITON_SCAN", "TRITON_SCAN")
        pairs = zip(self.specs, names, strict=True)
        self.groups = [LayerGroup(select(spec, DEVICE, backend=name)) for spec, name in pairs]
        self.attention = Attention(self.groups[0])
        self.delta, self.ring = (
            Recurrent(group, **recurrent_params(group.spec, self.dice)) for group in self.groups[1:]
        )
        columns = LONGEST // BLOCK
        self.cache = self.groups[0].allocate_cache(ROWS * columns)
        for held in (self.cache.key, self.cache.value):
            held.copy_(torch.randn(held.shape, generator=self.dice))
        self.table = torch.arange(ROWS * columns, dtype=torch.int32, device=DEVICE).view(ROWS, -1)
        slots = (ROWS * (EACH + 1), ROWS)
        self.states = [g.allocate_states(n) for g, n in zip(self.groups[1:], slots, strict=True)]
        for states in self.states:
            states.data.copy_(torch.randn(states.data.shape, generator=self.dice))

    def step(self, plans: Any, query: Any, key: Any, value: Any, **more: Any) -> list[Any]:
        """Run the layers, each on inputs of its own."""
        first, rest = self.groups[0], [more[name] for name in sorted(more)]
        return [
            self.attention(query, key, value, self.cache, plans[first]),
            self.delta(*rest[:5], states=self.states[0], plan=plans[self.groups[1]]),
            self.ring(rest[5], states=self.states[1], plan=plans[self.groups[2]]),
        ]

    def planned(self, batch: Batch) -> dict[LayerGroup, Any]:
        """Return each group's plan of a step."""
        return {group: group.plan(group.planner.own(batch)) for group in self.groups}

    def eagerly(self, batch: Batch, inputs: Any, states: list[torch.Tensor]) -> list[Any]:
        """Run a step without a graph, its states as they were."""
        for held, was in zip(self.states, states, strict=True):
            held.data.copy_(was)
        return self.step(self.planned(batch), **inputs)

    def inputs(self, tokens: int) -> dict[str, Any]:
        """Return random inputs of so many tokens."""
        spec, found = self.specs[0], {}
        for name, heads in (("query", spec.num_heads), ("key", 2), ("value", 2)):
            drawn = torch.randn(tokens, heads, 128, generator=self.dice)
            found[name] = drawn.to(self.cache.key)
        rest = [
            x for spec in self.specs[1:] for x in recurrent_inputs(spec, tokens, self.dice, DEVICE)
        ]
        return found | {f"x{i}": x for i, x in enumerate(rest)}

    def drawn(self) -> Batch:
        """Return a step: some rows of `EACH` tokens, their states' slots and targets in any order."""
        count = int(torch.randint(1, ROWS + 1, (), generator=self.dice))
        lens = torch.randint(EACH, LONGEST + 1, (count,), generator=self.dice).tolist()
        free = torch.randperm(ROWS * EACH, generator=self.dice)[: count * EACH] + ROWS
        slots = torch.randperm(ROWS, generator=self.dice)[:count].to(DEVICE)
        rows = torch.randperm(ROWS, generator=self.dice)[:count].to(DEVICE)
        return Batch.from_lens(
            [EACH] * count, lens, self.table[rows], BLOCK, state_slots=slots,
            state_targets=free.view(count, EACH).to(DEVICE), device=DEVICE,
        )  # fmt: skip


def moves_section(seconds: float) -> list[Row]:
    return [guarded("captured drafts of a hybrid", lambda: moves(seconds))]


def moves(seconds: float, most: int = 200) -> Row:
    """Capture, replay and compare; what a step writes is put back before it is run eagerly."""
    model = Hybrid()
    graphs = StepGraphs(
        model.groups, model.step, [StepSize(ROWS, EACH, state_targets=True)], LONGEST
    )
    graphs.capture(model.inputs(1))
    (graph,) = graphs.graphs
    different, allocated, states_off, replays = [0, 0, 0], 0, 0.0, 0
    padded, unpadded, end = 0, [0.0] * 3, time.monotonic() + seconds
    times: Row = {}
    while replays < most and time.monotonic() < end:
        batch = model.drawn()
        inputs, before = model.inputs(batch.num_tokens), [s.data.clone() for s in model.states]
        made = _allocations()
        found = graphs.replay(batch, inputs)
        allocated += _allocations() - made
        found, after = [x.clone() for x in found], [s.data.clone() for s in model.states]
        alone = model.eagerly(batch, inputs, before)
        eager = model.eagerly(graph.buffers.fill(batch), graph.inputs, before)
        for i, (a, b, c) in enumerate(zip(found, eager, alone, strict=True)):
            different[i] += not torch.equal(a, b[: batch.num_tokens])
            unpadded[i] = max(unpadded[i], output_error(c, a))
        off = [(s.data - was).abs().max() for s, was in zip(model.states, after, strict=True)]
        states_off = max(states_off, *map(float, off))
        padded += ROWS - batch.num_seqs
        replays += 1
        if not times and batch.num_seqs > ROWS // 2:
            times = timed(model, graphs, batch, inputs)
    return {
        "replays": replays, "padding rows": padded, "different (attention, delta, ring)": different,
        "states off": states_off, "allocations": allocated, **times,
        "unpadded step off by": unpadded, "padding length": graph.buffers.padding_len,
    }  # fmt: skip


def timed(model: Hybrid, graphs: StepGraphs, batch: Batch, inputs: Any) -> Row:
    """Time one step, replayed and eager."""
    from timing import host_us, kernel_us

    plans = model.planned(batch)
    return {
        "replay us": kernel_us(lambda: graphs.replay(batch, inputs)),
        "graph alone us": kernel_us(graphs.graphs[0].graph.replay),
        "eager, planned before, us": kernel_us(lambda: model.step(plans, **inputs)),
        "replay's host us": host_us(lambda: graphs.replay(batch, inputs), 30, 5),
        "eager's host us": host_us(lambda: model.step(model.planned(batch), **inputs), 30, 5),
    }


def _allocations() -> int:
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))


def kit_section(seconds: float) -> list[Row]:
    return within(
        seconds,
        [
            (f"kit {name}", lambda n=name, which=which: _kit(n, which, seconds))
            for name, which in KITS.items()
        ],
    )


if __name__ == "__main__":
    main(__doc__, {"moves": moves_section, "kit": kit_section})
