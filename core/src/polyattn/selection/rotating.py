"""Who rotates? The store where it claims so, else core: a selection for a layer with a `rope`."""

from __future__ import annotations

from dataclasses import replace

from polyattn.registry.capabilities import rotates
from polyattn.selection.selection import Selection
from polyattn.spec.layer import LayerSpec
from polyattn.spec.rope import RopeSpec


def prepared_for(found: Selection, spec: LayerSpec) -> Selection:
    """Return the selection for `spec`, which was found without its rotary embedding and transforms."""
    notes = []
    if spec.rope is not None and found.spec.rope is None:
        notes.append(f"{_form(spec.rope)}, where a layer has rotate=True: {_who(found, spec.rope)}")
    if spec.variant != found.spec.variant:
        notes.append(f"variant {spec.variant}: core's torch operators, before and after attention")
    decision = found.decision
    return replace(found, decision=replace(decision, spec=spec, notes=(*decision.notes, *notes)))


def noted(found: Selection) -> Selection:
    """Return the selection with what core does of a layer's rows beside its backends."""
    prefill = found.backend("prefill")
    if not found.spec.dense_context or prefill is None:
        return found
    note = f"dense context: {prefill.name} computes whole prompts without the window, in their own call"
    return replace(found, decision=replace(found.decision, notes=(*found.decision.notes, note)))


def _form(rope: RopeSpec) -> str:
    if not rope.rotary_size:
        return "query temperature"
    scaling = "" if rope.scaling == "none" else f", {rope.scaling}"
    return f"rotary embedding ({rope.pairing} pairs, {rope.rotary_size} elements{scaling})"


def _who(found: Selection, rope: RopeSpec) -> str:
    store = found.backend("store")
    if store is None:
        return "core's torch operators, before attention, since nothing is stored"
    if rotates(store.capabilities, rope):
        return f"in the call in which {store.name} stores"
    claimed = ", ".join(sorted(store.capabilities.rotates)) or "nothing"
    return f"core's torch operators, before {store.name}, which rotates {claimed}"
