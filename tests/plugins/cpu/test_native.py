"""Do the native CPU kernels keep every contract, in every instruction set that this machine has?"""

from __future__ import annotations

import copy
import multiprocessing
import os
import re
import threading
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from polyattn import Batch, LayerSpec, resolve_device, select
from polyattn.conformance.checks.table import run_case
from polyattn.conformance.derive import derive
from polyattn.errors import SelectionError
from polyattn.families.attention import reference
from polyattn.kernel import STORAGE_DTYPES, BatchError, Frame, KVCache, LayerParams, quantize
from polyattn.registry.discovery import discover, refresh
from polyattn.spec.kinds import Role
from polyattn.spec.row_format import is_rows
from polyattn.tools.cli import doctoring
from polyattn.workload.compare import lse_error, output_error
from polyattn.workload.tolerance import tolerance_of
from polyattn_cpu import hooks
from polyattn_cpu.native import attention, build, library, store
from sampled import DRAWN

ROOT = Path(__file__).parents[3]
needs_library = pytest.mark.skipif(
    library.why_not() is not None, reason=f"native kernels: {library.why_not()}"
)
ISAS = library.isas() if library.why_not() is None else ("none",)
UNUSED_BLOCK = 2**30  # a table entry that no kernel may follow

SHAPES = {  # heads, KV heads, head size, V head size
    "gqa": (8, 2, 128, 128), "mha": (4, 4, 64, 64), "mqa": (71, 1, 64, 64), "odd group": (6, 2, 80, 80),
    "wide key": (4, 1, 192, 128), "narrow": (3, 1, 40, 24), "tiny": (2, 2, 7, 5),
    "ten rows": (20, 2, 72, 40), "fifteen rows": (15, 1, 96, 112),
}  # fmt: skip
BATCHES = {  # query lengths, sequence lengths
    "decode": ([1] * 5, [130, 1, 600, 37, 0]),
    "mixed": ([1, 3, 40, 1, 200], [90, 70, 40, 1500, 330]),
    "short rows": ([2, 2, 2], [2, 64, 1100]),
    "prefill": ([150, 17], [150, 1200]),
}
STORED = ["float32/auto", "bfloat16/auto", "float16/auto", "bfloat16/fp8_e4m3", "float16/fp8_e5m2",
          "bfloat16/int8", "float32/int8"]  # fmt: skip


class Step:
    """One step with its cache: what no sequence owns is NaN, and so is what follows its last token."""

    def __init__(self, spec, queries, lens, block_size=16, layout="NHD", seed=0):
        self.spec, self.queries, self.lens, self.block_size = spec, queries, lens, block_size
        random = torch.Generator().manual_seed(seed)
        needed = [-(-n // block_size) for n in lens]
        blocks = sum(needed) + 3
        free = torch.randperm(blocks, generator=random).tolist()
        self.table = torch.full((len(lens), max(needed) + 2), UNUSED_BLOCK, dtype=torch.int32)
        caches = []
        for size in (spec.head_size, spec.v_head_size):
            cache = torch.full((blocks, block_size, spec.num_kv_heads, size), torch.nan)
            if layout == "HND":
                cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
            caches.append(cache)
        for seq, length in enumerate(lens):
            for at in range(needed[seq]):
                block = free.pop()
                self.table[seq, at] = block
                count = min(block_size, length - at * block_size)
                for cache in caches:
                    cache[block, :count] = torch.randn(cache[block, :count].shape, generator=random)
        stored = STORAGE_DTYPES[spec.stored_dtype]
        quantised = stored.itemsize == 1
        self.params = LayerParams(
            sinks=torch.randn(spec.num_heads, generator=random) if spec.learned_sinks else None,
            alibi_slopes=torch.rand(spec.num_heads, generator=random) * 0.2 if spec.alibi else None,
            k_scale=0.03 if quantised else 1.0,
            v_scale=0.04 if quantised else 1.0,
        )
        if stored == torch.int8:  # it has no NaN; the unused rest is at least wrong
            caches = [torch.nan_to_num(cache, nan=3.0) for cache in caches]
        scales = (self.params.k_scale, self.params.v_scale)
        self.key, self.value = (
            quantize(c, stored, s) if quantised else c.to(stored)
            for c, s in zip(caches, scales, strict=True)
        )
        shape = (sum(queries), spec.num_heads, spec.head_size)
        self.query = torch.randn(shape, generator=random).to(STORAGE_DTYPES[spec.dtype])

    def run(self, threads=2, only=None):
        """Return output and LSE; the row after the last stays as it was, or this fails."""
        queries, lens, table, query = self.queries, self.lens, self.table, self.query
        if only is not None:
            starts = [0, *accumulate(queries)]
            query = query[starts[only] : starts[only + 1]]
            row = slice(only, only + 1)
            queries, lens, table = queries[row], lens[row], table[row]
        plan = attention.StepPlan(
            attention.layer_bytes(self.spec), [0, *accumulate(queries)], lens, self.block_size,
            threads=threads,
        )  # fmt: skip
        rows = len(query)
        out = torch.full(
            (rows + 1, self.spec.num_heads, self.spec.v_head_size), 7.0, dtype=query.dtype
        )
        lse = torch.full((rows + 1, self.spec.num_heads), 7.0)
        attend = attention.bound(plan, table)
        cache = KVCache(self.key, self.value)
        attend(Frame(query, None, None, cache, self.params, out[:-1], lse[:-1]))
        assert bool((out[-1] == 7).all()) and bool((lse[-1] == 7).all())
        return out[:-1], lse[:-1]

    @cached_property
    def wanted(self):
        """The float64 reference's output and LSE, whatever instruction set runs."""
        cache = KVCache(self.key, self.value)
        batch = Batch.from_lens(
            self.queries, self.lens, self.table.clamp(max=self.key.shape[0] - 1), self.block_size
        )
        return reference.forward(self.spec, self.query, None, None, cache, batch, self.params)

    def check(self):
        want, want_lse = self.wanted
        out, lse = self.run()
        tolerance = tolerance_of(self.spec)
        assert output_error(out, want) <= tolerance.output
        assert lse_error(lse, want_lse) <= tolerance.lse

    def check_each(self, monkeypatch):
        """Check every instruction set, beside one reference."""
        for isa in ISAS:
            use(isa, monkeypatch)
            try:
                self.check()
            except AssertionError as error:
                raise AssertionError(f"{isa}: {error}") from error


def make_spec(shape="gqa", stored="bfloat16/auto", **features):
    heads, kv_heads, size, v_size = SHAPES[shape]
    dtype, cache = stored.split("/")
    return LayerSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_size=size, v_head_size=v_size, dtype=dtype,
        kv_cache_dtype=cache, **features,
    )  # fmt: skip


def use(isa, monkeypatch):
    """Have an instruction set run."""
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    monkeypatch.setenv("POLYATTN_CPU_PAIRS", "1")  # its own products, wherever float32 is faster


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    use(request.param, monkeypatch)
    return request.param


KIT = {"NATIVE_ATTN": ("numeric", "isolation"), "NATIVE_STORE": ("store", "store_ties")}


@needs_library
@pytest.mark.parametrize("backend", KIT)
def test_cases_of_the_kit_pass(isa, backend):
    """Each feature of a decoder, over pages and whole keys, requests of NaN, and stored bits."""
    device = resolve_device("cpu")
    for case in derive(discover().backend(backend), device):
        checked = case.check in KIT[backend] and not is_rows(case.spec.kv_cache_dtype)
        if checked and case.spec.role is Role.DECODER and not DRAWN.fullmatch(case.label):
            run_case(case, backend, device, 1)


@needs_library
def test_a_slot_outside_the_cache_is_refused(isa):
    rows, stored = torch.zeros(2, 3, 20), torch.zeros(40, 10, 3, 20)
    with pytest.raises(BatchError, match=r"slot_mapping\[1\]=400"):
        store.store([store.Part(rows, stored, 0.03)], torch.tensor([7, 400]))


@needs_library
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stored", STORED)
def test_every_shape_and_storage_agrees_with_float64(monkeypatch, shape, stored):
    spec = make_spec(shape, stored)
    Step(spec, *BATCHES["mixed"], layout="HND", block_size=5).check_each(monkeypatch)
    Step(spec, *BATCHES["decode"], block_size=8).check_each(monkeypatch)


@needs_library
@pytest.mark.parametrize(("heads", "dtype"), [(2, "bfloat16"), (2, "float32"), (16, "bfloat16")])
def test_latent_cache_is_key_and_value(isa, heads, dtype):
    spec = LayerSpec(num_heads=heads, num_kv_heads=1, head_size=576, v_head_size=512, dtype=dtype)
    step = Step(spec, [1, 1, 3], [70, 1300, 200], block_size=64)
    step.value = step.key[..., :512]
    step.check()


@needs_library
@pytest.mark.parametrize("shape", ["gqa", "mqa", "mha"])
def test_threads_and_neighbours_change_no_bit(isa, shape):
    step = Step(make_spec(shape), [1, 5, 40, 1], [2100, 900, 700, 33])
    out, lse = step.run(threads=1)
    for threads in (2, 5):
        again, again_lse = step.run(threads=threads)
        assert torch.equal(out, again) and torch.equal(lse, again_lse)
    starts = [0, *accumulate(step.queries)]
    for seq in range(4):
        alone, alone_lse = step.run(only=seq)
        rows = slice(starts[seq], starts[seq + 1])
        assert torch.equal(out[rows], alone) and torch.equal(lse[rows], alone_lse)


@needs_library
@pytest.mark.parametrize(
    "features", [{}, {"sliding_window": 2300, "sink_tokens": 70, "alibi": True}]
)
@pytest.mark.parametrize("stored", ["bfloat16/auto", "bfloat16/fp8_e4m3"])
def test_pieces_that_one_thread_attends_to_change_no_bit(isa, stored, features):
    """By amx a step of many long sequences has an item for each; one alone has an item for each piece."""
    lens = [1024, 1152, 1153, 2176, 2200, 2560, 1100, 4500]
    step = Step(make_spec("fifteen rows", stored, **features), [1] * 8, lens)
    step.check()
    out, lse = step.run(threads=1)
    for seq in range(8):
        alone, alone_lse = step.run(only=seq)
        assert torch.equal(out[seq : seq + 1], alone) and torch.equal(lse[seq : seq + 1], alone_lse)


@needs_library
@pytest.mark.parametrize("stored", ["float32/auto", "bfloat16/auto"])
def test_of_logits_beyond_float32_s_integers_the_largest_wins(isa, stored):
    step = Step(make_spec(stored=stored), [1, 4, 30], [200, 90, 300])
    step.query, step.key = step.query * 1e6, step.key * 1e6
    out, _ = step.run()
    assert output_error(out, step.wanted[0]) <= tolerance_of(step.spec).output


@needs_library
def test_a_block_outside_the_cache_is_refused(isa):
    for queries in ([1, 1], [1, 40]):
        step = Step(make_spec(), queries, [40, 100])
        step.table[1, 2] = step.key.shape[0]
        with pytest.raises(BatchError, match="block_table points outside"):
            step.run()
        step.table[1, 2] = -1
        with pytest.raises(BatchError, match="block_table points outside"):
            step.run()


@needs_library
@pytest.mark.parametrize(
    ("variable", "value"), [(library.ISA_VARIABLE, "avx1024"), (library.PAIRS_VARIABLE, "yes")]
)
def test_a_wrong_setting_is_never_passed_over_in_silence(monkeypatch, caplog, variable, value):
    monkeypatch.setenv(variable, value)
    wanted = "must be 0 or 1" if value == "yes" else f".*{', '.join(library.isas())}; name one"
    says = f"{variable}='{value}': {wanted}"
    refresh()
    try:
        with pytest.raises(SelectionError, match=says):
            select(make_spec(), backend="NATIVE_ATTN")
        left_out = select(make_spec())  # others serve it, and it is told
        report = doctoring.examine()
        assert any(re.search(says, row["state"]) for row in report["backends"])
        assert any(re.search(says, problem) for problem in report["problems"])
        told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        (note,) = (note for note in left_out.decision.notes if re.search(says, note))
        assert note.startswith("without NATIVE_ATTN, NATIVE_STORE: ") and note in told
    finally:
        refresh()


@needs_library
def test_doctor_and_explain_say_which_instruction_set_runs(isa):
    refresh()
    try:
        selection = select(make_spec())
        state = {row["name"]: row["state"] for row in doctoring.examine()["backends"]}
    finally:
        refresh()
    named = ("NATIVE_ATTN", "NATIVE_MLA")
    proof = {n: discover().backend(n).proof_on(selection.device, isa).value for n in named}
    said = f"NATIVE_ATTN for decode, by {isa} (priority 100, {proof['NATIVE_ATTN']}"
    assert said in selection.explain()
    assert state["NATIVE_MLA"] == f"ready: {isa}, {proof['NATIVE_MLA']}"


def test_every_instruction_set_has_its_proof():
    assert set(hooks.PROOF_OF_RUNS) == {isa for machine in build.ISAS.values() for isa in machine}


@needs_library
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("stored", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_all_256_bytes_count_as_keys(isa, stored, heads):
    """A query that is one at one element sees that element: its LSE is the logit of a single key."""
    spec = LayerSpec(
        num_heads=heads, num_kv_heads=1, head_size=72, dtype="float32", kv_cache_dtype=stored
    )
    step = Step(spec, [1] * 72, [1] * 72)
    step.query.copy_(torch.eye(72).unsqueeze(1).expand(72, heads, 72))
    key, factor = step.key.view(torch.uint8), step.params.k_scale * spec.scale
    for start in range(0, 256, 72):
        part = torch.arange(start, min(start + 72, 256), dtype=torch.uint8)
        numbers = part.view(STORAGE_DTYPES[spec.stored_dtype]).float()
        finite = numbers.isfinite()
        key.zero_()
        key[..., : len(part)] = part.where(finite, 0)
        _, lse = step.run()
        want = (numbers * factor).where(finite, 0)[:, None].expand(-1, heads)
        torch.testing.assert_close(lse[: len(part)], want, rtol=2e-6, atol=1e-9)
        for byte, number in zip(part[numbers.isnan()], numbers[numbers.isnan()], strict=True):
            assert number.isnan()
            for place in (0, 33, 70):
                key.zero_()
                key[..., place] = byte
                assert bool(step.run()[1].isnan().all())


@needs_library
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc/self/statm")
def test_partial_results_use_memory_again():
    """Steps that need ever more room, then the last of them often: no memory is lost on the way."""
    steps = [Step(make_spec(), [1] * 4, [n] * 4) for n in (600, 1500, 3000, 5000)]
    for made in steps * 2:
        made.run()
    held = [0, 0]
    for at in range(2):
        for _ in range(150 * at):
            steps[-1].run()
        held[at] = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    assert held[1] - held[0] < 16 << 20


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_threads_of_its_own():
    step = Step(make_spec(), [1] * 4, [2000] * 4)
    for threads in (3, torch.get_num_threads()):  # the pool's, torch's
        want, _ = step.run(threads=threads)
        child = os.fork()
        if child == 0:
            out, _ = step.run(threads=threads)
            os._exit(0 if torch.equal(out, want) else 1)
        assert os.waitpid(child, 0)[1] == 0


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_children_forked_amid_calls_can_call():
    step, over = Step(make_spec(), [1] * 4, [2000] * 4), threading.Event()
    want, _ = step.run(threads=3)

    def call_on():
        while not over.is_set():
            step.run(threads=3)

    caller = threading.Thread(target=call_on)
    caller.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                out, _ = step.run(threads=3)
                os._exit(0 if torch.equal(out, want) else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        over.set()
        caller.join()


def spawned_output():
    return Step(make_spec(), [1] * 4, [2000] * 4).run(threads=3)[0].float().numpy()


@needs_library
def test_a_spawned_child_has_the_same_answer():
    want = spawned_output()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert (pool.submit(spawned_output).result(timeout=300) == want).all()


@needs_library
@pytest.mark.parametrize(("shape", "tokens"), [("gqa", 700), ("mqa", 160), ("mha", 700)])
@pytest.mark.parametrize(("stored", "features"), [
    ("bfloat16/auto", {}), ("float32/auto", {}), ("bfloat16/int8", {}),
    ("bfloat16/auto", {"sliding_window": 37}), ("float32/auto", {"chunk_size": 29}),
])  # fmt: skip
def test_rows_that_come_with_others_have_the_bits_that_they_have_alone(
    isa, shape, tokens, stored, features
):
    """At `batch_invariant="steps"`: a prompt's last rows, as many as there are at once."""
    spec = make_spec(shape, stored, **features).replace(batch_invariant="steps")
    step = Step(spec, [tokens, 3], [1500, 600])
    out, lse = step.run(threads=1)
    assert torch.equal(out, step.run(threads=2)[0])
    for rows in (1, 2, 9, 130):
        fewer = copy.copy(step)
        fewer.query, fewer.queries = step.query[tokens - rows :], [rows, 3]
        for found, whole in zip(fewer.run(threads=2), (out, lse), strict=True):
            assert torch.equal(found, whole[tokens - rows :])


@pytest.mark.parametrize("fields", [{}, {"dtype": "float32"}, {"sliding_window": 9}])
def test_the_first_level_costs_nothing(fields):
    """What the library is told of the layer is what it is told without a level: the same kernels run."""
    from polyattn_cpu.native.attention import layer_bytes

    spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, **fields)
    assert layer_bytes(spec.replace(batch_invariant="batch")) == layer_bytes(spec)
    assert layer_bytes(spec.replace(batch_invariant="steps")) != layer_bytes(spec)
