"""The suite through a plugin of strangers: tests of layers and plans, every call by LOOPBACK_ATTN.

`python -m pytest` of the files below with `EXAMPLE_LOOPBACK=1`; the example plugin hands each call on to
TORCH_SDPA and knows of polyattn the two doors alone.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forks import python

TESTS = Path(__file__).parent
FILES = ("families/test_layers.py", "runtime/test_bad_input.py", "runtime/test_shared_prefix.py")
LAYER = """
import polyattn, torch
from polyattn.families.attention import reference
from polyattn_example.loopback import LoopbackAttention

spec = polyattn.LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")
layer = polyattn.Attention(spec)
cache = layer.group.allocate_cache(8)
table = torch.arange(8, dtype=torch.int32).view(2, 4)
batch = polyattn.Batch.from_lens([3, 1], [20, 9], table, cache.block_size)
cache.key.normal_(), cache.value.normal_()
query, key, value = torch.randn(4, 4, 16), torch.randn(4, 2, 16), torch.randn(4, 2, 16)
found = layer(query, key, value, cache, batch)
expected, _ = reference.forward(spec, query, None, None, cache, batch)
assert (found - expected).abs().max() < 1e-5
print(layer.group.selection.decision.prefill, layer.group.selection.decision.decode)
print(LoopbackAttention.runs)
"""


def through_the_loopback(*arguments: str) -> str:
    ran = python(*arguments, cwd=TESTS, seconds=550, EXAMPLE_LOOPBACK="1")
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    return ran.stdout


def test_a_layer_runs_through_it() -> None:
    names, runs = through_the_loopback("-c", LAYER).splitlines()
    assert names == "LOOPBACK_ATTN LOOPBACK_ATTN"
    assert int(runs) == 2


@pytest.mark.slow
def test_the_layers_suite_runs_through_it() -> None:
    said = through_the_loopback("-m", "pytest", "-q", "-n", "0", *FILES)
    passed = re.search(r"(\d+) passed", said)
    assert passed and int(passed[1]) >= 60, said[-2000:]


@pytest.mark.slow
def test_random_layers_run_through_it() -> None:
    said = through_the_loopback(
        "-m", "pytest", "-q", "-n", "0", "-k", "LOOPBACK_ATTN", "families/test_attention.py"
    )
    assert re.search(r"[1-9]\d* passed", said), said[-2000:]
