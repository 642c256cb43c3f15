"""Launch configurations, as data: which tile sizes for which chip, phase and head size.

Rows are tried in order; the first whose conditions hold is used. `measured` says where a row comes
from. BLOCK_M counts (query token, head of its group) rows, BLOCK_N keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from polyattn.kernel import AttentionKind, LayerSpec, arch_matches


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch parameters of one kernel variant."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Row:
    """A configuration and where it applies: padded head sizes up to `head`, bytes of a key's element.

    `plain`: not where a key's position enters more than the length does (window, chunks, ALiBi),
    which takes registers.
    """

    arch: str
    phase: str
    head: int
    bytes: int
    config: Config
    measured: str = ""
    plain: bool = False


TABLE: tuple[Row, ...] = (
    Row("sm_90", "prefill", 64, 2, Config(128, 64, 8, 3), "H200: 364 us at 1 x 4,096"),
    Row("sm_90", "paged", 64, 2, Config(128, 64, 4, 3), "H200: 434 us at 4 x 512 after 4,096"),
    Row("sm_90", "prefill", 128, 2, Config(128, 64, 8, 3), "H200: 334 us at 1 x 4,096"),
    Row("sm_90", "prefill", 256, 2, Config(128, 64, 8, 2), "H200: 380 us at 1 x 4,096"),
    # Many programs: four a multiprocessor must fit.
    Row("sm_90", "decode", 128, 1, Config(16, 64, 2, 3), "H200: 159 us at 64 x 4,096"),
    Row("sm_90", "decode", 64, 2, Config(16, 64, 2, 3), "H200: 129 us at 64 x 4,096"),
    Row("sm_90", "decode", 128, 2, Config(16, 64, 4, 2), "H200: 241 us at 64 x 4,096", plain=True),
    Row("sm_90", "decode", 128, 2, Config(16, 32, 2, 4), "H200: 243 us at 64 x 4,096"),
    Row("sm_90", "decode", 256, 2, Config(16, 32, 2, 2), "H200: 485 us at 64 x 4,096"),
    Row("sm_90", "decode", 128, 4, Config(16, 32, 4, 3), "H200: 602 us at 64 x 4,096"),
    # Few: the time that one program takes for a tile counts.
    Row("sm_90", "few", 128, 1, Config(16, 64, 4, 3), "H200: 16.4 us at 1 x 8,192"),
    Row("sm_90", "few", 128, 2, Config(16, 64, 4, 3), "H200: 16.2 us at 1 x 8,192"),
    Row("sm_90", "few", 256, 2, Config(16, 32, 4, 3), "H200: 27.0 us at 1 x 8,192"),
    # Heads of 264 to 512, then of up to 576, which are padded to 1,024 columns.
    Row(
        "sm_90",
        "prefill",
        512,
        2,
        Config(64, 32, 8, 2),
        "H100: a step in 853 us, by torch in 3,000",
    ),
    Row("sm_90", "decode", 512, 2, Config(16, 32, 8, 2), "H100: in the same step"),
    Row("sm_90", "prefill", 1024, 2, Config(32, 16, 8, 2)),
    Row("sm_90", "decode", 1024, 2, Config(16, 16, 8, 2)),
    Row("sm_80+", "prefill", 64, 2, Config(128, 64, 4, 3)),
    Row("sm_80+", "prefill", 128, 2, Config(128, 32, 4, 3)),
    Row("sm_80+", "prefill", 256, 2, Config(64, 32, 4, 2)),
    Row("sm_80+", "decode", 128, 2, Config(16, 64, 4, 2)),
    Row("sm_80+", "decode", 256, 2, Config(16, 32, 4, 2)),
    Row("sm_80+", "decode", 128, 4, Config(16, 32, 4, 2)),
    Row("sm_80+", "prefill", 512, 2, Config(32, 16, 8, 2)),
    Row("sm_80+", "decode", 512, 2, Config(16, 16, 4, 2)),
    Row("sm_80+", "prefill", 1024, 2, Config(16, 16, 8, 1)),
    Row("sm_80+", "decode", 1024, 2, Config(16, 16, 8, 1)),
    # AMD: wavefronts of 64, 64 KB of LDS (160 on gfx950), so fewer stages.
    Row("gfx942", "prefill", 128, 2, Config(128, 64, 4, 1)),
    Row("gfx950", "prefill", 128, 2, Config(128, 64, 4, 2)),
    Row("gfx90a", "prefill", 128, 2, Config(64, 64, 4, 1)),
    # Wide heads (192 of MLA's expanded prefill): the tallest tile without spills, by its machine code.
    Row("gfx942", "prefill", 256, 2, Config(64, 32, 4, 1)),
    Row("gfx950", "prefill", 256, 2, Config(64, 32, 4, 1)),
    Row("gfx90a", "prefill", 256, 2, Config(64, 32, 4, 1)),
    Row("gfx90a", "prefill", 512, 2, Config(32, 16, 8, 1)),
    Row("gfx942", "prefill", 512, 2, Config(32, 16, 8, 1)),
    Row("gfx950", "prefill", 512, 2, Config(32, 16, 8, 1)),
    Row("any", "decode", 128, 2, Config(16, 64, 4, 1)),
    Row("any", "prefill", 128, 2, Config(64, 32, 4, 1)),
    Row("any", "decode", 1024, 4, Config(16, 16, 4, 1)),
    Row("any", "prefill", 1024, 4, Config(16, 16, 4, 1)),
)


HOPPER: dict[int, Config] = {
    64: Config(128, 128, 12, 3),
    128: Config(128, 128, 12, 2),
    256: Config(128, 64, 12, 2),
}
"""Of `hopper.prefill`, by head size: each group of four warps computes 64 rows, one copies."""


class Pipe(NamedTuple):
    """How `hopper.prefill` is kept busy.

    `stages`: tiles of keys and values in shared memory. `queries`: items whose queries lie there.
    `turns`: its groups take turns at the tensor cores.
    """

    stages: int
    queries: int
    turns: bool = True


HOPPER_PIPES: dict[int, tuple[Pipe, Pipe]] = {
    64: (Pipe(3, 2), Pipe(6, 1)),
    128: (Pipe(2, 2), Pipe(3, 1)),
    256: (Pipe(2, 1), Pipe(2, 1)),
}
"""By head size: of whole tiles, and of pieces, of which a program has few, so that what would hold the
next one's query holds keys on their way."""
SLOWER_BY_TOKEN = frozenset({64})
"""Its head sizes for which the portable kernel is faster over keys by token (H200: 668 us at 1 x 8,192,
with it 709); over pages that is the slower one."""


UNTUNED_APART = {"paged": "prefill", "few": "decode"}
"""Phases (prefill over pages, decode by few programs) that use another's without their own."""


def pick(arch: str, phase: str, head: int, element_bytes: int, plain: bool) -> Config:
    """Return the first row's configuration that applies."""
    for row in TABLE:
        fits = row.arch == "any" or arch_matches(row.arch, arch)
        fits = fits and row.phase == phase and (plain or not row.plain)
        if fits and head <= row.head and element_bytes <= row.bytes:
            return row.config
    if phase in UNTUNED_APART:
        return pick(arch, UNTUNED_APART[phase], head, element_bytes, plain)
    raise LookupError(f"no configuration for {arch}, {phase}, head size {head}")


@dataclass(frozen=True)
class PrefixConfig:
    """Tiles of rows that share keys, and what they take a program, in tenths of a microsecond.

    A launch has tiles of `tall` rows, and of as few as one row of the batch needs. `on_one`: programs
    that a multiprocessor holds. `small_us`, `tall_us`: a key tile of either; `item_us`: a tile beside its
    keys, from its first load to its part.
    """

    tall: int
    block_n: int
    num_warps: int
    num_stages: int
    on_one: int
    small_us: int
    tall_us: int
    item_us: int


@dataclass(frozen=True)
class PrefixRow:
    """A configuration and where it applies: padded head sizes up to `head`, bytes of a key's element."""

    arch: str
    head: int
    bytes: int
    config: PrefixConfig


PREFIX_TABLE: tuple[PrefixRow, ...] = (
    PrefixRow("sm_90", 128, 2, PrefixConfig(16, 64, 4, 3, 3, 22, 22, 40)),
    PrefixRow("sm_90", 128, 2, PrefixConfig(32, 64, 4, 3, 2, 18, 22, 40)),
    PrefixRow("sm_90", 128, 2, PrefixConfig(64, 64, 4, 3, 2, 18, 24, 40)),
    PrefixRow("sm_90", 128, 2, PrefixConfig(128, 128, 8, 3, 1, 16, 30, 45)),
)
"""Of every chip and size that has none, tiles of up to 64 rows by the decode kernel's configuration."""


def prefix_configs(arch: str, head: int, element_bytes: int) -> tuple[PrefixConfig, ...]:
    """Return the configurations that were measured, the lowest tiles first."""
    return tuple(
        row.config
        for row in PREFIX_TABLE
        if arch_matches(row.arch, arch) and head <= row.head and element_bytes <= row.bytes
    )


@dataclass(frozen=True)
class MLAConfig:
    """Tile sizes of the MLA kernel: heads and rows. `apart`: see the kernel's comment.

    `hopper`: the kernel of `hopper.mla`, which has its own pipeline and needs Gluon. `roles`: the
    kernels with roles, `hopper.latents` and those for few heads, attend to pages that they can take.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    apart: bool = False
    hopper: bool = False
    roles: bool = False


@dataclass(frozen=True)
class MLARow:
    """A configuration and where it applies: up to `heads` heads, bytes an element.

    `latent`: the latent's and the rope part's width, in a cache of the model's own type, or (`e4m3`) of
    that, where the kernel takes no other.
    """

    arch: str
    heads: int
    bytes: int
    config: MLAConfig
    measured: str = ""
    latent: tuple[int, int] | None = None
    e4m3: bool = False


MLA_TABLE: tuple[MLARow, ...] = (
    MLARow(
        "sm_90",
        1 << 30,
        2,
        MLAConfig(64, 64, 8, 1, hopper=True, roles=True),
        "H200: 404 TFLOP/s at 64 x 4,096",
        latent=(512, 64),
    ),
    MLARow(
        "sm_90",
        1 << 30,
        2,
        MLAConfig(64, 64, 8, 1, hopper=True, roles=True),
        "H200: 16 heads, 64 x 4,096: 57 us; 128, in lockstep: 217 (H100: 222, portable 324)",
        latent=(512, 64),
        e4m3=True,
    ),
    MLARow("sm_90+", 16, 2, MLAConfig(16, 32, 4, 2)),
    MLARow("sm_90", 1 << 30, 2, MLAConfig(64, 64, 8, 2, True), "H200: 277 TFLOP/s at 64 x 4,096"),
    MLARow("sm_90+", 1 << 30, 2, MLAConfig(64, 32, 8, 2)),
    MLARow("any", 1 << 30, 2, MLAConfig(16, 16, 4, 1)),
    MLARow("any", 1 << 30, 4, MLAConfig(16, 16, 4, 1)),
)


def pick_mla(spec: LayerSpec, arch: str, gluon: bool) -> MLAConfig:
    """Return the first row's configuration that applies. `gluon`: this Triton has it."""
    assert spec.latent is not None
    latent = (spec.latent.rank, spec.latent.rope_head_size)
    element_bytes = 4 if spec.dtype == "float32" else 2
    for row in MLA_TABLE:
        fits = row.arch == "any" or arch_matches(row.arch, arch)
        if row.latent is not None:
            stored = "fp8_e4m3" if row.e4m3 else spec.dtype
            fits = fits and row.latent == latent and spec.stored_dtype == stored
        if row.config.hopper and not gluon:
            continue
        if fits and spec.num_heads <= row.heads and element_bytes <= row.bytes:
            return row.config
    raise LookupError(f"no MLA configuration for {arch}, {spec.num_heads} heads")


@dataclass(frozen=True)
class ScanConfig:
    """Tile sizes of the recurrent kernels: values (Mamba-1's decode: channels) and tokens of a chunk."""

    block_v: int
    chunk: int
    num_warps: int
    num_stages: int


SCANS: dict[tuple[AttentionKind, str], ScanConfig] = {
    (AttentionKind.MAMBA1, "decode"): ScanConfig(64, 1, 2, 1),
    (AttentionKind.MAMBA2, "prefill"): ScanConfig(64, 64, 4, 2),  # H200: 1087 us at 8 x 4,096
    (AttentionKind.LINEAR, "prefill"): ScanConfig(64, 64, 4, 2),
    (AttentionKind.GDN, "prefill"): ScanConfig(64, 64, 4, 2),  # H200: 990 us at 8 x 4,096
    (AttentionKind.KDA, "prefill"): ScanConfig(64, 16, 4, 3),  # H200: 1,683 us at 8 x 4,096
    (AttentionKind.RWKV7, "prefill"): ScanConfig(64, 16, 4, 3),  # H200: 1,366 us at 8 x 4,096
    (AttentionKind.MAMBA2, "decode"): ScanConfig(64, 1, 4, 1),
    (AttentionKind.LINEAR, "decode"): ScanConfig(64, 1, 4, 1),
    (AttentionKind.GDN, "decode"): ScanConfig(64, 1, 4, 1),
}
"""By kind and phase, whatever the chip."""


@dataclass(frozen=True)
class WalkConfig:
    """What a walk through chunks takes in pieces, in units of a chunk of a program that walks alone.

    `on_one`: programs of states of 128 keys that a multiprocessor runs beside each other in the time of
    one. `left`: a chunk of the launch that finds what pieces leave. `carry`: what each earlier piece
    costs a program of the other launch. `begin`: a launch.
    """

    on_one: float
    left: float
    carry: float
    begin: float


WALKS: dict[AttentionKind, WalkConfig] = {
    AttentionKind.MAMBA2: WalkConfig(1.56, 0.73, 0.28, 0.38),
    AttentionKind.LINEAR: WalkConfig(1.36, 0.44, 0.56, 2.44),
    AttentionKind.GDN: WalkConfig(1.7, 0.85, 1.56, 0.9),
    AttentionKind.KDA: WalkConfig(1.25, 0.67, 2.49, 0.38),
    AttentionKind.RWKV7: WalkConfig(1.22, 0.73, 2.98, 4.77),
}
"""Fitted to an H200."""
FEW_TOKENS = {AttentionKind.GDN: ScanConfig(64, 16, 4, 1)}
"""Where products are of float32, keys are wide, or a multiprocessor has less than 228 KiB for tiles."""


def prompt_config(spec: LayerSpec, arch: str) -> ScanConfig:
    """Return the configuration of a layer's prompts, in chunks."""
    usual = SCANS[spec.kind, "prefill"]
    little = arch.startswith(("sm_", "gfx")) and not arch_matches("sm_90-sm_103", arch)
    few = spec.dtype == "float32" or spec.head_size > 128 or little
    return FEW_TOKENS.get(spec.kind, usual) if few else usual


@dataclass(frozen=True)
class SelectiveConfig:
    """Channels of a program of Mamba-1's prefill, tokens that it loads ahead, and its speed.

    `alone`, `full`: the time of a token where a program has a scheduler to itself, and how much of
    one it takes up where many share it; the unit is the first configuration's `alone`.
    """

    channels: int
    ahead: int
    alone: float
    full: float


SELECTIVE: tuple[SelectiveConfig, ...] = (
    SelectiveConfig(128, 2, 1.0, 0.78),
    SelectiveConfig(64, 8, 0.61, 0.41),
    SelectiveConfig(32, 4, 0.47, 0.285),
)
"""Of 16 states a channel, most channels first; H200: 0.55 us a token, the first alone."""
