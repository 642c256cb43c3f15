"""What must a store do, and what must a merge do?"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.conformance.case import Case
from polyattn.conformance.harness.rotation import RotationHarness
from polyattn.conformance.harness.services import MergeHarness, StoreHarness
from polyattn.runtime.backend import MergeBackend
from polyattn.runtime.cache.kv_cache import quantize
from polyattn.spec.kinds import LAYOUTS
from polyattn.workload.compare import lse_error, row_errors
from polyattn.workload.pages import unchanged

STATES = 1e-5
"""How far a merged state may be off. Totals are float32, for parts of any dtype."""


def store(case: Case, harness: StoreHarness) -> None:
    """Each stored token lies in its slot, bit for bit. Nothing else changes; -1 skips."""
    layout = next((form for form in LAYOUTS if case.label.endswith(form)), None)
    group, backend = harness.store(case.spec, layout)
    harness.check(backend, harness.tokens(group, case.batch))


def store_plans(case: Case, harness: StoreHarness) -> None:
    """Plans are alive together, and layers with other scales and caches share one."""
    group, backend = harness.store(case.spec)
    steps = [harness.tokens(group, case.batch) for _ in range(2)]
    plans = [backend.plan(step.slots) for step in steps]
    for index in (1, 0, 1):
        layers = [steps[index], harness.tokens(group, case.batch, like=steps[index])]
        for number, new in enumerate(layers, 1):
            harness.check(backend, new, plans[index], f"plan {index + 1}, layer {number}: ")


def store_rotated(case: Case, harness: RotationHarness) -> None:
    """Queries and keys rotate as the float64 formulas say, after the bias; inputs don't change."""
    group, backend = harness.store(case.spec)
    biased = "bias" in case.label
    for keep in (False, True):
        step = harness.rotated(group, case.batch, biased)
        harness.check_rotated(backend, case.spec, step, keep)


def store_rotated_plans(case: Case, harness: RotationHarness) -> None:
    """Steps at other positions are alive together; layers of one step share its rotation."""
    group, backend = harness.store(case.spec)
    steps = [harness.rotated(group, case.batch, False) for _ in range(2)]
    plans = [backend.plan(step.slots) for step in steps]
    for index in (1, 0, 1):
        layers = [steps[index], harness.rotated(group, case.batch, False, like=steps[index])]
        for number, step in enumerate(layers, 1):
            label = f"plan {index + 1}, layer {number}: "
            harness.check_rotated(backend, case.spec, step, False, plans[index], label)


def store_ties(case: Case, harness: StoreHarness) -> None:
    """A value halfway between two numbers rounds to the even one, as in torch."""
    group, backend = harness.store(case.spec)
    new = harness.tokens(group, case.batch)
    new.params.k_scale = new.params.v_scale = 0.5
    halves = torch.arange(new.key.shape[0] * new.key.shape[1], device=new.key.device) % 48 - 24
    ties = (halves.to(new.key.dtype) + 0.5).view(*new.key.shape[:2], 1) * 0.5
    if new.cache.key.dtype != torch.int8:  # between two 8-bit floats of 3 or 2 bits of mantissa
        ties = (1.0 + (halves.to(new.key.dtype).view_as(ties) % 8 + 0.5) / 8) * 0.5
    new.key.copy_(ties.expand_as(new.key))
    new.value.copy_(ties.expand_as(new.value))
    held = new.slots >= 0
    backend.run(backend.plan(new.slots), new.key, new.value, new.cache, new.params)
    at = new.slots[held] // new.cache.block_size, new.slots[held] % new.cache.block_size
    for stored, fresh in ((new.cache.key, new.key), (new.cache.value, new.value)):
        wanted = quantize(fresh[held], stored.dtype, 0.5).float()
        assert torch.equal(stored[at].float(), wanted), (
            f"{harness.backend} rounds halves another way"
        )


def merge(case: Case, harness: MergeHarness) -> None:
    """A part joins a total in place. -inf on either side, or on both, means that no key was visible.

    The total is float32, or of the layer's dtype.
    """
    for rounded in (False, True):
        _merged(case, harness, harness.merge(case.spec), 2, rounded)


def merge_many(case: Case, harness: MergeHarness) -> None:
    """Ten parts, one after another, are the state over all keys."""
    _merged(case, harness, harness.merge(case.spec), 10)


def _merged(
    case: Case, harness: MergeHarness, backend: MergeBackend, count: int, rounded: bool = False
) -> None:
    for _ in range(3):
        parts = harness.states(case.spec, count)
        precise = torch.float64 if case.spec.dtype == "float64" else torch.float32
        dtype = parts[0][0].dtype if rounded else precise
        total, total_lse = parts[0][0].to(dtype, copy=True), parts[0][1].to(precise, copy=True)
        for out, lse in parts[1:]:
            before, given_lse = out.clone(), lse.to(precise, copy=True)
            lse_before = given_lse.clone()
            backend.run(total, total_lse, before, given_lse)
            unchanged("the part's output", before, out)
            unchanged("the part's LSE", given_lse, lse_before)
        expected, expected_lse = over_all(parts)
        limit = STATES * (1.0 if precise is torch.float32 else 0.1)
        limit += torch.finfo(dtype).eps / 2 if rounded else 0.0
        error = merge_error(total.to(precise), expected, expected_lse, count - 1)
        lse_off = lse_error(total_lse, expected_lse)
        assert error <= limit, f"{harness.backend}: merged output is off by {error:.3g}"
        assert lse_off <= 1e-4, f"{harness.backend}: merged LSE is off by {lse_off:.3g}"


def merge_error(total: Tensor, expected: Tensor, expected_lse: Tensor, merges: int) -> float:
    """Return the largest relative error of a row, less what rounding the LSEs explains.

    An LSE of 90 has a spacing of 7.6e-6 in float32. Each merge rounds it by half a spacing, and a
    weight `sigmoid(a - b)` changes by at most a quarter of that, between parts of opposite signs.
    """
    largest = expected_lse.masked_fill(expected_lse == -torch.inf, 0.0).abs()
    rounding = merges * torch.finfo(total.dtype).eps * largest / 4
    return float((row_errors(total, expected) - rounding).max()) if expected.numel() else 0.0


def over_all(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The definition in float64: outputs weighted by the sum of each part's softmax."""
    outs = torch.stack([out.cpu().double() for out, _ in parts])
    lses = torch.stack([lse.cpu().double() for _, lse in parts])
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))
    return (outs * weights[..., None]).sum(0), lse
