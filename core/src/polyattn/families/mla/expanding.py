"""Which backend attends to the keys and values that a step makes of its own tokens' latents?"""

from __future__ import annotations

from collections.abc import Sequence

from polyattn.families.attention.planning import Candidate
from polyattn.runtime.backend import AttentionBackend
from polyattn.runtime.group import LayerGroup
from polyattn.selection.prediction import Predictor
from polyattn.spec.decompose import expanded, expanded_context

PARTS = {True: "prefill", False: "chunked"}
"""The kind of model that times a step's own tokens, under a causal mask, and what comes before them."""


class ExpandedChooser:
    """Chooses by measured times among backends that are loaded before the first step.

    Without a time of the selection's own it stays. `usual`: the selection's own.
    """

    def __init__(self, group: LayerGroup):
        spec, selection = expanded(group.spec), group.selection
        info = selection.backend("prefill")
        assert info is not None
        self.group = group
        self.usual = Candidate(info, group.backend("prefill", AttentionBackend, spec=spec))
        self.candidates = {info.name: self.usual}
        known = {m.backend for m in selection.timings if m.kind in PARTS.values()}
        models = [m for m in selection.timings if m.backend in known]
        # Which one is the fastest depends on the other requests.
        among = dict(selection.candidates)["prefill"] if info.name in known else ()
        for other in () if group.spec.batch_invariant else among:
            if other.name in known and other.name not in self.candidates:
                loaded = group.candidate("prefill", other, AttentionBackend, True, spec)
                if loaded is not None:
                    self.candidates[other.name] = Candidate(other, loaded)
        specs = {True: spec, False: expanded_context(group.spec)}
        self.predictors = {causal: Predictor(of, models) for causal, of in specs.items()}

    def fastest(self, queries: Sequence[int], lens: Sequence[int], causal: bool) -> Candidate:
        """Return what attends to a part of each sequence's keys: its own, or some before them."""
        ready = self.group.builds.ready
        names = [name for name, some in self.candidates.items() if ready(some.backend)]
        kind, predictor = PARTS[causal], self.predictors[causal]
        among = predictor.among(kind, names)
        if len(among) < 2 or self.usual.info.name not in [weighed.name for weighed in among]:
            return self.usual
        some = [(q, n) for q, n in zip(queries, lens, strict=True) if q and n]
        shape = predictor.shape(kind, *zip(*some, strict=True))
        return self.candidates[predictor.fastest(among, shape)]
