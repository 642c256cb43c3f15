"""Lies about what a query sees, what its logits are, and what the LSE says."""

from __future__ import annotations

from typing import Any

import torch
from liars.plain import Plain, window
from polyattn.families.attention.alibi import alibi_slopes
from polyattn.kernel import Batch, Frame, LayerParams, LayerSpec
from torch import Tensor


class Numeric(Plain):
    by = ("numeric",)


class OtherMask(Numeric):
    """Sees what a layer of another spec would."""

    changes: dict[str, Any] = {}

    def other(self) -> dict[str, Any]:
        return self.changes

    def visible(self, queries: int, keys: int) -> Tensor:
        return Plain(self.spec.replace(**self.other()), self.cache, self.device).visible(
            queries, keys
        )


class IgnoresTheWindow(OtherMask):
    changes = {"sliding_window": None, "sink_tokens": 0}


class WindowOneWider(OtherMask):
    def other(self) -> dict[str, Any]:
        width = self.spec.sliding_window
        return {} if width is None else {"sliding_window": width + 1}


class WindowOneNarrower(OtherMask):
    def other(self) -> dict[str, Any]:
        width = self.spec.sliding_window
        return {} if width is None else {"sliding_window": max(1, width - 1)}


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


class IgnoresCausal(OtherMask):
    changes = {"causal": False}


class MaskOverContext(Plain):
    """What the spec says of causality holds for every call, also for one over context alone."""

    by = ("context",)

    def spec_of(self, batch: Batch) -> LayerSpec:
        return self.spec


class AlwaysCausal(Numeric):
    def visible(self, queries: int, keys: int) -> Tensor:
        return super().visible(queries, keys) & (self.distance(queries, keys) <= 0)


class IgnoresChunks(OtherMask):
    changes = {"chunk_size": None}


class ChunksFromTheQuery(Numeric):
    """Chunks are counted from the first query, not from the sequence's beginning."""

    def visible(self, queries: int, keys: int) -> Tensor:
        size = self.spec.chunk_size
        if size is None:
            return super().visible(queries, keys)
        at = torch.arange(keys - queries, keys)
        first = (at // size * size)[:, None] + (keys - queries) % size
        return (self.distance(queries, keys) <= 0) & (torch.arange(keys) >= first - size)


class ForgetsSinkTokens(OtherMask):
    changes = {"sink_tokens": 0}


class OneSinkTokenMore(OtherMask):
    def other(self) -> dict[str, Any]:
        return {"sink_tokens": self.spec.sink_tokens + 1} if self.spec.sink_tokens else {}


class IgnoresScale(Numeric):
    def scale(self) -> float:
        return float(self.spec.head_size**-0.5)


class ScalesByTheValue(Numeric):
    def scale(self) -> float:
        plain = self.spec.head_size**-0.5
        return float(self.spec.scale / plain * self.spec.v_head_size**-0.5)


class IgnoresSoftCap(Numeric):
    def capped(self, scores: Tensor) -> Tensor:
        return scores


class CapsUnscaledLogits(Numeric):
    def logits(self, query: Tensor, keys: Tensor, params: LayerParams) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", query.double(), self.grouped(keys.double()))
        return self.biased(self.capped(scores) * self.scale(), params)


class CapsTheBias(Numeric):
    """ALiBi is added before the soft cap."""

    def logits(self, query: Tensor, keys: Tensor, params: LayerParams) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", query.double(), self.grouped(keys.double()))
        return self.capped(self.biased(scores * self.scale(), params))


class IgnoresAlibi(Numeric):
    def biased(self, scores: Tensor, params: LayerParams) -> Tensor:
        return scores


class PapersSlopesAlways(Numeric):
    """The layer's own slopes are ignored."""

    def slopes(self, params: LayerParams) -> Tensor:
        return alibi_slopes(self.spec.num_heads)


class BiasByTheKeyAlone(Numeric):
    """Softmax doesn't tell the difference; the LSE does."""

    def biased(self, scores: Tensor, params: LayerParams) -> Tensor:
        if not self.spec.alibi:
            return scores
        return scores + self.slopes(params).double()[:, None, None] * torch.arange(scores.shape[2])


class BiasFartherIsBetter(Numeric):
    def slopes(self, params: LayerParams) -> Tensor:
        return -super().slopes(params)


class IgnoresSinks(Numeric):
    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, params: LayerParams
    ) -> tuple[Tensor, Tensor]:
        bare = LayerParams(None, params.alibi_slopes, params.k_scale, params.v_scale)
        return super().attend(query, keys, values, bare)


class SinksOutsideTheLse(Numeric):
    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, params: LayerParams
    ) -> tuple[Tensor, Tensor]:
        bare = LayerParams(None, params.alibi_slopes, params.k_scale, params.v_scale)
        out, _ = super().attend(query, keys, values, params)
        return out, super().attend(query, keys, values, bare)[1]


class NoMaximum(Numeric):
    """Exponentials in float32 of the logits as they are."""

    def weights(self, scores: Tensor, lse: Tensor) -> Tensor:
        powers = torch.exp(scores.float())
        return (powers / powers.sum(-1, keepdim=True)).nan_to_num(0.0).double()


class LseInBits(Numeric):
    def stored_lse(self, lse: Tensor) -> Tensor:
        return lse / torch.log(torch.tensor(2.0))


class LseOfZeroForNothing(Numeric):
    def nothing(self, out: Tensor, lse: Tensor | None) -> None:
        super().nothing(out, lse)
        if lse is not None:
            lse.zero_()


class LseWithoutSign(Numeric):
    def nothing(self, out: Tensor, lse: Tensor | None) -> None:
        super().nothing(out, lse)
        if lse is not None:
            lse.fill_(torch.inf)


class LseNeverWritten(Numeric):
    def run(self, plan: Any, frame: Frame) -> None:
        spare = None if frame.lse is None else torch.empty_like(frame.lse)
        super().run(plan, frame.but(lse=spare))


class NothingIsNothingWritten(Numeric):
    """Rows without a key are left as they were."""

    def nothing(self, out: Tensor, lse: Tensor | None) -> None:
        pass


class PaddingOfOneQuery(Numeric):
    """Padding rows have one query; those of more see the first keys of whatever their table names."""

    def length(self, batch: Batch, index: int) -> int:
        count = batch.query_lens[index]
        return batch.lens[index] or (count if count > 1 else 0)


class BlindRowsAreNan(Numeric):
    """A query before the first key has a softmax over nothing."""

    def weights(self, scores: Tensor, lse: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-1)
