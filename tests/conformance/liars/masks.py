"""Lies about what a query sees, what its logits are, and what the LSE says."""

from __future__ import annotations

from typing import Any

import torch
from liars.plain import Plain, window
from liars.told import OtherSpec, Told, lies
from polyattn.families.attention.alibi import alibi_slopes
from polyattn.kernel import Batch, LayerParams, LayerSpec
from torch import Tensor


class Numeric(Told):
    by = ("numeric",)


def wider(spec: LayerSpec, by: int) -> dict[str, Any]:
    width = spec.sliding_window
    return {} if width is None else {"sliding_window": max(1, width + by)}


OTHER = {
    "IgnoresTheWindow": lambda spec: {"sliding_window": None, "sink_tokens": 0},
    "WindowOneWider": lambda spec: wider(spec, 1),
    "WindowOneNarrower": lambda spec: wider(spec, -1),
    "IgnoresCausal": lambda spec: {"causal": False},
    "IgnoresChunks": lambda spec: {"chunk_size": None},
    "ForgetsSinkTokens": lambda spec: {"sink_tokens": 0},
    "OneSinkTokenMore": lambda spec: {"sink_tokens": spec.sink_tokens and spec.sink_tokens + 1},
    "IgnoresSoftCap": lambda spec: {"logit_soft_cap": None},
}
"""Whose spec is another."""
SCALES = {
    "IgnoresScale": lambda self: float(self.spec.head_size**-0.5),
    "ScalesByTheValue": lambda self: float(
        self.spec.scale / self.spec.head_size**-0.5 * self.spec.v_head_size**-0.5
    ),
}


def unscaled(self: Any, query: Tensor, keys: Tensor) -> Tensor:
    return torch.einsum("qhd,khd->hqk", query.double(), self.grouped(keys.double()))


LOGITS = {
    "CapsUnscaledLogits": lambda self, query, keys, params: self.biased(
        self.capped(unscaled(self, query, keys)) * self.scale(), params
    ),
    # ALiBi is added before the soft cap.
    "CapsTheBias": lambda self, query, keys, params: self.capped(
        self.biased(unscaled(self, query, keys) * self.scale(), params)
    ),
}
BIASES = {
    "IgnoresAlibi": lambda self, scores, params: scores,
    # Softmax doesn't tell the difference; the LSE does.
    "BiasByTheKeyAlone": lambda self, scores, params: (
        scores + self.slopes(params).double()[:, None, None] * torch.arange(scores.shape[2])
        if self.spec.alibi
        else scores
    ),
    "BiasForTheDefaultScale": lambda self, scores, params: (
        scores + (Plain.biased(self, scores, params) - scores) * times_default(self)
    ),
}


def times_default(self: Any) -> float:
    """The layer's scale, as a multiple of the default."""
    return float(self.spec.scale * self.spec.head_size**0.5)


LSES = {
    "LseInBits": lambda self, lse: lse / torch.log(torch.tensor(2.0)),
    "LseForTheDefaultScale": lambda self, lse: lse / times_default(self),
}
SLOPES = {
    "PapersSlopesAlways": lambda self, params: alibi_slopes(self.spec.num_heads),
    "BiasFartherIsBetter": lambda self, params: -params.alibi_slopes,
}


def no_maximum(self: Any, scores: Tensor, lse: Tensor) -> Tensor:
    """Exponentials in float32 of the logits as they are."""
    powers = torch.exp(scores.float())
    return (powers / powers.sum(-1, keepdim=True)).nan_to_num(0.0).double()


WEIGHTS = {
    "NoMaximum": no_maximum,
    # A query before the first key has a softmax over nothing.
    "BlindRowsAreNan": lambda self, scores, lse: torch.softmax(scores, dim=-1),
}
globals().update(lies(
    __name__,
    (OtherSpec, "fields", OTHER, "numeric"), (Numeric, "scale", SCALES), (Numeric, "logits", LOGITS),
    (Numeric, "biased", BIASES), (Numeric, "slopes", SLOPES), (Numeric, "weights", WEIGHTS),
    # What the spec says of causality holds for every call, also for one over context alone.
    (Plain, "spec_of", {"MaskOverContext": lambda self, batch: self.spec}, "context"),
))  # fmt: skip


class WindowOneSided(Numeric):
    """A window without a causal mask bounds the left alone."""

    def visible(self, queries: int, keys: int) -> Tensor:
        if self.spec.causal or self.spec.sliding_window is None:
            return super().visible(queries, keys)
        return -self.distance(queries, keys) < window(self.spec)


class CausalFromTheTop(Numeric):
    """The mask is aligned to the top left, as if there were no context."""

    def visible(self, queries: int, keys: int) -> Tensor:
        if not self.spec.causal or queries == 1:
            return super().visible(queries, keys)
        return torch.arange(keys) <= torch.arange(queries)[:, None]


class AlwaysCausal(Numeric):
    def visible(self, queries: int, keys: int) -> Tensor:
        return super().visible(queries, keys) & (self.distance(queries, keys) <= 0)


class ChunksFromTheQuery(Numeric):
    """Chunks are counted from the first query, not from the sequence's beginning."""

    def visible(self, queries: int, keys: int) -> Tensor:
        size = self.spec.chunk_size
        if size is None:
            return super().visible(queries, keys)
        at = torch.arange(keys - queries, keys)
        first = (at // size * size)[:, None] + (keys - queries) % size
        return (self.distance(queries, keys) <= 0) & (torch.arange(keys) >= first - size)


def without_sinks(params: LayerParams) -> LayerParams:
    return LayerParams(None, params.alibi_slopes, params.k_scale, params.v_scale)


class IgnoresSinks(Numeric):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, params: LayerParams) -> Any:
        return super().attend(query, keys, values, without_sinks(params))


class SinksOutsideTheLse(Numeric):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, params: LayerParams) -> Any:
        out, _ = super().attend(query, keys, values, params)
        return out, super().attend(query, keys, values, without_sinks(params))[1]


NOTHING = {
    "LseOfZeroForNothing": lambda self, out, lse: (Plain.nothing(self, out, lse), lse_is(lse, 0.0)),
    "LseWithoutSign": lambda self, out, lse: (
        Plain.nothing(self, out, lse),
        lse_is(lse, torch.inf),
    ),
    # Rows without a key are left as they were.
    "NothingIsNothingWritten": lambda self, out, lse: None,
}


def lse_is(lse: Tensor | None, number: float) -> None:
    if lse is not None:
        lse.fill_(number)


def longer_padding(self: Plain, batch: Batch, index: int) -> int:
    """Padding rows have one query; those of more see the first keys of whatever their table names."""
    count = batch.query_lens[index]
    return batch.lens[index] or (count if count > 1 else 0)


globals().update(lies(
    __name__,
    (Numeric, "nothing", NOTHING), (Numeric, "length", {"PaddingOfOneQuery": longer_padding}),
    (Numeric, "stored_lse", LSES),
    (Numeric, "before", {"LseNeverWritten": lambda self, plan, frame: frame.but(
        lse=None if frame.lse is None else torch.empty_like(frame.lse))}),
))  # fmt: skip
