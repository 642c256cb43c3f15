"""Does a type checker see what an engine's and a kernel's author call?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import polyattn
import torch
from polyattn import Attention, Batch, LayerSpec, Recurrent, RecurrentSpec
from polyattn.kernel import backend

spec = LayerSpec(num_heads=4, head_size=64, dtype=torch.float32, graph_capture="uniform")
LayerSpec(num_heads=4, head_size=64, kind="mla", role="encoder", batch_invariant=True)
reveal_type(spec.kind)  # AttentionKind
reveal_type(spec.dtype)  # str
LayerSpec(num_heads=4, head_size=64, kind=3)  # error
layer = Attention(spec, rotate=True)
cache, x = layer.group.allocate_cache(2), torch.zeros(3, 4, 64)
batch = Batch.from_lens([3], [3], torch.zeros(1, 2, dtype=torch.int32), cache.block_size)
out = layer(x, x, x, cache, layer.group.plan(batch))
out.flatten(1)
layer(x, x, x, cache, plans=batch)  # error
reveal_type(layer.group.plan(batch))  # StepPlan
reveal_type(polyattn.select(spec).decision.prefill)  # str
reveal_type(polyattn.attention(x, x, x))  # Tensor
reveal_type(polyattn.attention(x, x, x, return_lse=True))  # tuple
conv = Recurrent(
    LayerSpec(kind="short_conv", num_heads=8, head_size=1, recurrent=RecurrentSpec(conv_width=4)),
    weight=x,
)
reveal_type(conv(x, states=conv.group.allocate_states(1), plan=batch))  # Tensor


@backend("MINE", platforms="cpu", dtypes="float32", head_sizes=(64,), features=("causal",))
def mine(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    return query


polyattn.register(mine)
"""


@pytest.mark.slow
def test_a_program_passes_mypy_strict(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path, path]
    output = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout
    says: dict[int, str] = {}
    for line, text in re.findall(r"program.py:(\d+): (.*)", output):
        says.setdefault(int(line), text)  # notes follow an error
    expected = {
        number: comment
        for number, line in enumerate(PROGRAM.splitlines(), 1)
        if (comment := line.partition("  # ")[2])
    }
    assert says.keys() == expected.keys(), output
    for number, comment in expected.items():
        text = says[number]
        assert text.startswith("error: ") if comment == "error" else comment in text, text
