"""How far does a reader walk? Functions and files that three calls cross: `python tests/walks.py`.

Exits with 1 where one crosses more than its bar; `-v` lists what they cross.

Counted is what runs in the sources of polyattn and its plugins: functions of these files, each once,
without comprehensions and class bodies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, select
from polyattn.api import _remembered

ROOT = Path(__file__).resolve().parent.parent
SOURCES = tuple(str(ROOT / part) for part in ("core/src", "plugins"))


@dataclass
class Walk:
    """What a call crossed: functions in the order in which they ran first, and moves between files."""

    functions: list[tuple[str, str]]
    moves: int

    @property
    def files(self) -> list[str]:
        """The files that the functions are in, in the order in which they were reached."""
        return list(dict.fromkeys(file for file, _ in self.functions))

    def __str__(self) -> str:
        return f"{len(self.functions)} functions in {len(self.files)} files, {self.moves} moves"


def walk(call: Callable[[], Any]) -> Walk:
    """Run a call and return what it crossed."""
    crossed: dict[tuple[str, str], None] = {}
    files: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SOURCES):
            return
        if code.co_name.startswith("<") and code.co_name != "<lambda>":
            return
        file = code.co_filename[len(str(ROOT)) + 1 :]
        crossed[file, code.co_qualname] = None
        if not files or files[-1] != file:
            files.append(file)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = call()  # what frees it is no part of the walk
    finally:
        sys.setprofile(before)
    del result
    return Walk(list(crossed), len(files) - 1)


SPEC = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype="float32")


def selecting() -> Walk:
    """Select for a layer that nobody asked for before, on plugins that are known."""
    device = select(SPEC).device
    select(SPEC, device)
    _remembered.clear()
    return walk(lambda: select(SPEC, device))


def decode(group: LayerGroup) -> Batch:
    """Return a plain decode of four sequences."""
    return Batch.from_lens([1] * 4, [5, 20, 33, 64], torch.arange(16).reshape(4, 4).int(), 16)


def planning() -> Walk:
    """Plan a plain decode in a group that planned one before."""
    group = LayerGroup(select(SPEC))
    group.finish_builds()
    group.plan(decode(group))
    batch = decode(group)
    return walk(lambda: group.plan(batch))


def calling() -> Walk:
    """Call a layer over a planned decode, as a step's second layer does."""
    layer = Attention(select(SPEC))
    layer.group.finish_builds()
    cache, batch = layer.group.allocate_cache(16), decode(layer.group)
    plan, query = layer.plan(batch), torch.randn(4, 8, 64)
    key = torch.randn(4, 2, 64)
    layer(query, key, key, cache, plan)
    return walk(lambda: layer(query, key, key, cache, plan))


WALKS = {
    "select on a miss": (selecting, 101, 15), "plan a decode": (planning, 25, 10),
    "call a layer": (calling, 11, 8),
}  # fmt: skip
"""Each with its bars: functions and files at most."""

if __name__ == "__main__":
    far = False
    for name, (take, functions, files) in WALKS.items():
        crossed = take()
        print(f"{name}: {crossed} (bars: {functions} in {files})")
        far |= len(crossed.functions) > functions or len(crossed.files) > files
        if sys.argv[1:] == ["-v"]:
            for file, function in crossed.functions:
                print(f"    {file.split('polyattn', 1)[-1]}: {function}")
    sys.exit(far)
