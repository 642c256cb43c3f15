"""What is one step of TRITON_ATTN or TRITON_MLA? The way it runs, its grid, its work, its merge."""

from __future__ import annotations

from typing import Any, NamedTuple

from polyattn.kernel import Batch, Place, Plan
from torch import Tensor

from polyattn_triton.configs import Config
from polyattn_triton.hopper.widening import Widening
from polyattn_triton.launch import Kept, Merge


class StepPlan(Plan):
    """One step of TRITON_ATTN. `windowless`: of the layer without its window, which hides nothing."""

    __slots__ = ("windowless",)

    def __init__(self, batch: Batch):
        super().__init__(batch)
        self.windowless = False


class AttentionPlan(StepPlan):
    """One step: the way it runs, and what its launches have in common.

    `config`: its tiles'. `rows`: of a tile's part in the workspace. `merging`: what a second kernel is to
    do, that merges parts; None: there are none for it. `variant`: what of all this a compiled kernel
    depends on. `table`: the block table's stride and last column. `fresh`: all keys are the step's own.
    `at_once`: KV heads that Hopper's own prefill goes through at a time; 0: the portable kernel runs.
    `widening`: which cached tokens it is given in 16 bits; None: it reads what there is.
    `place`: where the work list lies, or will once the plan is made; None: there is none.
    `portable`: the plan for that one, once tensors needed it. `requests`: a class (`alike`), and which
    requests' tiles are planned; None: all. `others`: the launches of other classes. `lists`: of each tile
    of rows the key tiles that a mask shows (`tile_lists`). `long`: keys from which on a sequence's pieces
    are longer; 0: all are alike. `beside`: how many launches before it it runs beside, each in a
    workspace of its own. `chosen`: the batch is over chosen pages, and needs no mask. `sent`: by which
    staging, after how many dropped steps, and for which line `work` was put there last; None: it wasn't.
    """

    __slots__ = (
        "_none", "at_once", "beside", "chosen", "config", "fresh", "grid", "inputs", "kept", "lists",
        "long", "merging", "others", "place", "portable", "requests", "rows", "sent", "splits", "table",
        "variant", "way", "widening",
    )  # fmt: skip

    def __init__(self, batch: Batch, none: Tensor):
        self.batch, self.windowless = batch, False
        self.way, self.splits, self.rows, self.fresh = "decode", 1, 0, False
        self._none, self.table = none, (0, 0)
        self.place: Place | None = None
        self.merging: Merge | None = None
        self.grid: tuple[int, int, int] = (0, 1, 1)
        self.config: Config
        self.kept: Kept
        self.variant: tuple[Any, ...]
        # By a layer's own inputs, where all that a variant's functions read lies.
        self.inputs: dict[Any, Tensor] = {}
        self.lists: Tensor | None = None
        self.chosen = False
        self.sent: tuple[Any, int, bytes] | None = None
        self.at_once = self.beside = self.long = 0
        self.portable: AttentionPlan | None = None
        self.widening: Widening | None = None
        self.requests: tuple[int, Any] | None = None
        self.others: list[AttentionPlan] = []

    @property
    def work(self) -> Tensor:
        """The work list on the device; without one no numbers."""
        return self._none if self.place is None else self.place.tensor


class Way(NamedTuple):
    """What runs: pieces of tiles or whole ones; a few query tokens a sequence or one.

    `few`: 0 for one, 1 for a few that see no key after their own, 2 for a few that see all keys.
    """

    split: bool
    few: int

    def __str__(self) -> str:
        return ("pieces" if self.split else "whole") + (", few" if self.few else "")


class LatentPlan(Plan):
    """One step: the way it runs, its grid, the tiles' work, and what merges their parts.

    `roles`: by the kernel whose warps have roles. `others`: launches after it, where parts of all tiles
    have no room.
    """

    __slots__ = ("grid", "merging", "others", "roles", "way", "work")

    def __init__(
        self,
        batch: Batch,
        way: Way,
        grid: int,
        work: Tensor,
        merging: Merge | None = None,
        roles: bool = False,
    ):
        super().__init__(batch)
        self.way, self.grid, self.work, self.merging, self.roles = way, grid, work, merging, roles
        self.others: list[LatentPlan] = []
