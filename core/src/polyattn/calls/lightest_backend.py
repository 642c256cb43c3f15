"""Which backend runs a step that ends before its call returns? One that takes tensors by address.

An accelerator's call returns while its kernel runs. If the kernel takes a few microseconds, a caller
waits only for the host, and a library's call takes several times as long as a launch.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyattn.calls.memo import group_of
from polyattn.runtime.group import LayerGroup
from polyattn.spec.layer import LayerSpec

OPERATIONS = 1e9
"""Multiplications and additions of a short step: about 5 us of an H200's, and 10 of an A100's."""
KEYS = 512
"""Of its longest sequence, which one program may have to itself."""


def is_short(spec: LayerSpec, query_lens: Sequence[int], key_lens: Sequence[int]) -> bool:
    """Return whether a step's kernel ends sooner than a library's call returns."""
    if max(key_lens, default=0) > KEYS:
        return False
    pairs = sum(q * k for q, k in zip(query_lens, key_lens, strict=True))
    return 2 * pairs * spec.num_heads * (spec.head_size + spec.v_head_size) <= OPERATIONS


def server_of(group: LayerGroup, query_lens: Sequence[int], key_lens: Sequence[int]) -> LayerGroup:
    """Return the group that serves a step of keys passed whole: this one, or a short step's.

    A named backend stays. So does a CPU's, because its calls return when they are done, and that of a
    layer whose bits must not depend on the batch.
    """
    if (
        group.device_type == "cpu"
        or group.spec.batch_invariant
        or not is_short(group.spec, query_lens, key_lens)
    ):
        return group
    return group_of(_lightest, group)


def _lightest(group: LayerGroup) -> LayerGroup:
    """Return a group of the best candidate that runs by address; this group if no candidate does."""
    for info in dict(group.selection.candidates).get("prefill", ()):
        if info.capabilities.by_address:
            chosen = group.selection.backend("prefill")
            if info == chosen:
                return group
            alone = group.selection.alone(info.name)
            return LayerGroup(alone, workspaces=group.workspaces)
    return group
