"""Splits a step by heads (Ulysses): ranks exchange tokens for heads, attend, and exchange back.

Every rank holds all keys of its own heads. So it computes an ordinary step of a layer with fewer heads,
over an ordinary cache (DeepSpeed-Ulysses, arXiv 2309.14509). Where there are fewer KV heads than ranks,
neighbours hold the same one, as all hold an MLA layer's latents.
"""

from __future__ import annotations

from polyattn import LayerSpec, StepPlan
from polyattn.errors import SpecError
from polyattn.host import Frame, Op

from polyattn_context_parallel.ops import keys_by, room_for_out, write_out
from polyattn_context_parallel.shards import Shares, own_heads

__all__ = ["ByHeads", "heads_of_rank", "own_heads"]


def heads_of_rank(spec: LayerSpec, size: int) -> LayerSpec:
    """Return the layer that each of `size` ranks computes: `spec` with the rank's share of heads.

    Raises `SpecError` if the heads don't divide evenly.
    """
    kv = 1 if spec.latent else spec.num_kv_heads
    even = spec.num_heads % size == 0 and (kv % size == 0 or size % kv == 0)
    if not even:
        raise SpecError(
            f"num_heads={spec.num_heads}, num_kv_heads={spec.num_kv_heads} can't be sharded over "
            f"{size} ranks: num_heads must be a multiple, num_kv_heads a multiple or a divisor; "
            "shard keys by block instead (keys='blocks')"
        )
    heads = spec.num_heads // size
    return spec.replace(num_heads=heads, num_kv_heads=heads if spec.latent else max(kv // size, 1))


class ByHeads(Op):
    """An ordinary step of the rank's own heads, between two exchanges.

    `own`: each rank has its own tokens with all heads. Otherwise every rank has all tokens.
    `by_heads`: each rank gets only its own heads.
    """

    def __init__(self, plan: StepPlan, shares: Shares, own: bool, by_heads: bool):
        self.plan, self.shares, self.own, self.by_heads = plan, shares, own, by_heads
        self.inner = (plan,)

    def run(self, frame: Frame) -> None:
        shares = self.shares
        forth, back = (
            (shares.to_heads, shares.to_tokens)
            if self.own
            else (shares.own_heads, shares.all_heads)
        )
        query, (key, value) = forth(frame.query), keys_by(forth, frame)
        inner = frame.but(query=query, key=key, value=value)
        if self.by_heads:
            self.plan.run(inner)
            return
        self.plan.run(room_for_out(inner, frame))
        write_out(frame, inner, back)
