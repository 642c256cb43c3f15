"""Which backend attends to the keys and values that a step makes of its own tokens' latents?"""

from __future__ import annotations

from collections.abc import Sequence

from polyattn.families.attention.planning import Candidate
from polyattn.runtime.backend import AttentionBackend
from polyattn.runtime.group import LayerGroup
from polyattn.selection.prediction import Predictor
from polyattn.spec.decompose import expanded


class ExpandedChooser:
    """Chooses by measured times among backends that are loaded before the first step.

    Without a time of the selection's own it stays, and for what comes before a step's tokens.
    `usual`: the selection's own.
    """

    def __init__(self, group: LayerGroup):
        spec, selection = expanded(group.spec), group.selection
        info = selection.backend("prefill")
        assert info is not None
        self.group = group
        self.usual = Candidate(info, group.backend("prefill", AttentionBackend, spec=spec))
        self.candidates = {info.name: self.usual}
        models = [model for model in selection.timings if model.kind == "prefill"]
        known = {model.backend for model in models}
        # Which one is the fastest depends on the other requests.
        among = dict(selection.candidates)["prefill"] if info.name in known else ()
        for other in () if group.spec.batch_invariant else among:
            if other.name in known and other.name not in self.candidates:
                loaded = group.candidate("prefill", other, AttentionBackend, True, spec)
                if loaded is not None:
                    self.candidates[other.name] = Candidate(other, loaded)
        self.predictor = Predictor(spec, models)

    def fastest(self, queries: Sequence[int]) -> Candidate:
        """Return what runs prompts of so many tokens, each of which sees its own."""
        ready = self.group.builds.ready
        names = [name for name, some in self.candidates.items() if ready(some.backend)]
        if len(names) < 2:
            return self.usual
        shape = self.predictor.shape("prefill", queries, queries)
        return self.candidates[
            self.predictor.fastest(self.predictor.among("prefill", names), shape)
        ]
