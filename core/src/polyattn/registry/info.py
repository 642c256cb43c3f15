"""What does a plugin declare of a backend? `BackendInfo`: data, which imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from polyattn.device import Device, arch_matches
from polyattn.errors import PluginError, shown
from polyattn.registry.capabilities import ANY_PLATFORM, Capabilities
from polyattn.registry.proofs import records_of
from polyattn.spec.features import features
from polyattn.spec.kinds import AttentionKind
from polyattn.spec.layer import LayerSpec

API_VERSION = 1
"""The number of the contract of the three doors, `polyattn.plugin`, `kernel` and `host`.

It changes when a name of a door goes, or changes its meaning or its arguments.
"""


class Proof(str, Enum):
    """How far a claim about a platform has been proven, strongest first.

    MEASURED and IN_PART are what records of results say (`registry.proofs`), of one build on one
    architecture; DECLARED is a plugin's word that it ran there, without a record.
    """

    MEASURED = "measured"
    IN_PART = "measured in part"
    EMULATED = "emulated"
    COMPILED = "compiled"
    INTERPRETED = "interpreted"
    SIGNATURE = "signature"
    DECLARED = "declared"
    UNPROVEN = "unproven"


@dataclass(frozen=True, kw_only=True)
class Priority:
    """How much a backend should be preferred, where the conditions hold (None: anywhere).

    Scores compare across plugins: 0 is a fallback that always works, 50 a good general kernel,
    100 the best known for the hardware. `needs`: a feature (`polyattn.spec.features`) that the layer
    must ask for. `why` is shown by `polyattn explain`.
    """

    score: int
    platform: str | None = None
    archs: tuple[str, ...] = ()
    phase: str | None = None
    kind: AttentionKind | None = None
    needs: str | None = None
    why: str = ""

    def applies(self, spec: LayerSpec, device: Device, phase: str) -> bool:
        """Whether this priority speaks of `phase` of `spec` on `device`."""
        return (
            self.platform in (None, device.platform)
            and self.phase in (None, phase)
            and self.kind in (None, spec.kind)
            and (self.needs is None or self.needs in features(spec))
            and (not self.archs or any(arch_matches(p, device.arch) for p in self.archs))
        )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One build of a backend's library: a package that brings it, with claims of its own.

    The fields are `BackendInfo`'s; `name` is the build's, as users know the package.
    """

    name: str
    path: str
    capabilities: Capabilities
    probe: str | None = None
    requires: tuple[str, ...] = ()
    install: str = ""


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """A backend as a plugin declares it, in a module that imports neither torch nor its library.

    - `name`: letters, digits, `_` and `-`; written and looked up in upper case.
    - `aliases`: names that engines have for such a kernel (vLLM's `CPU_ATTN`), looked up as `name` is.
    - `path`: `"package.module:Class"`, imported only when the backend is chosen.
    - `probe`: `"package.module:function"`, or None. Called without arguments on a real device; it
      returns None when the backend can run here, else the reason as text. It must not import
      the vendor's library: look it up with `polyattn.plugin`'s `find_spec` and `installed`.
    - `runs`: `"package.module:function"`, or None. Called as the probe is, where that found nothing
      against the backend; returns in a word what of it runs here (an instruction set), or None.
      What follows the word, after a space, is for readers (what its build lacks).
    - `variant_check`: `"package.module:function"`, or None. Of a backend that claims `"variant"`: takes a
      layer's `AttentionVariant` and returns None, or why this backend can't serve it.
    - `rows_check`: likewise, of a backend that claims `"rows"`: takes a cache's `RowFormat`.
    - `requires`: packages that must be installed, as requirement strings (`"flash-attn>=2.7"`).
    - `install`: what the user does when they are not.
    - `priorities`: the first that applies counts; none means score 0.
    - `proof`: platform (or arch) to how far the claims there are proven. "measured" counts where a record
      of results says so; without one it is "declared", or what is declared of the platform.
    - `proof_of_runs`: what `runs` may name (an instruction set) to how far that is proven, where it
      isn't as far as its arch.
    - `by_name_only`: it serves where the user names it, and is never chosen by itself.
    - `variants`: where several builds of one library differ in what they can do, all of them, the
      preferred one first; path, capabilities, probe, requires and install above are then that one's.
      A profile assumes it; on a device the builds count that claim its platform and are installed
      there. So a kernel that runs in an interpreter for tests is a build on platform `"cpu"`.
    - `build`: which of the variants this is, once that is known.
    """

    name: str
    summary: str
    path: str
    capabilities: Capabilities
    probe: str | None = None
    runs: str | None = None
    variant_check: str | None = None
    rows_check: str | None = None
    requires: tuple[str, ...] = ()
    install: str = ""
    priorities: tuple[Priority, ...] = ()
    proof: Mapping[str, Proof] = field(default_factory=dict)
    proof_of_runs: Mapping[str, Proof] = field(default_factory=dict)
    by_name_only: bool = False
    variants: tuple[Variant, ...] = ()
    build: str = ""
    aliases: tuple[str, ...] = ()

    @classmethod
    def of_variants(cls, *variants: Variant, **fields: Any) -> BackendInfo:
        """Return a backend of several builds, the preferred one first; `fields` are what they share."""
        return cls(variants=variants, **_claims(variants[0]), **fields)

    @property
    def builds(self) -> tuple[BackendInfo, ...]:
        """The backend as each of its variants, the preferred one first; itself where it has none."""
        return tuple(map(self.as_built, self.variants)) or (self,)

    def builds_on(self, platform: str) -> tuple[BackendInfo, ...]:
        """Return the builds that claim a platform."""
        where = {platform, ANY_PLATFORM}
        return tuple(b for b in self.builds if where & b.capabilities.platforms.keys())

    def as_built(self, variant: Variant) -> BackendInfo:
        """Return the backend as one of its variants: that build's claims, path and requirements."""
        return replace(self, variants=(), build=variant.name, **_claims(variant))

    def __hash__(self) -> int:
        return hash((self.name, self.path))

    def priority(self, spec: LayerSpec, device: Device, phase: str) -> Priority:
        """Return the first of its priorities that applies, or a score of 0."""
        return next(
            (p for p in self.priorities if p.applies(spec, device, phase)), Priority(score=0)
        )

    def proof_on(self, device: Device, runs: str = "") -> Proof:
        """Return how far this backend is proven on `device`: by arch, else by platform.

        `runs`: what of it runs there, which may be proven to another degree.
        """
        name, _, _ = runs.partition(" ")
        return self._proven(device.arch, device.platform, name)

    def proof_at(self, arch: str, platform: str) -> Proof:
        """Return the same of an architecture, whatever of it runs there."""
        return self._proven(arch, platform, "")

    def _proven(self, arch: str, platform: str, runs: str) -> Proof:
        """Return what records say, else what is declared; "measured" isn't anybody's to declare."""
        declared = [self.proof[where] for where in (arch, platform) if where in self.proof]
        if declared and runs in self.proof_of_runs:
            declared.insert(0, self.proof_of_runs[runs])
        records = records_of(self, arch, runs)
        if records and declared[:1] == [Proof.MEASURED]:
            return Proof.MEASURED if records[0].whole else Proof.IN_PART
        for proof in declared:
            if proof not in (Proof.MEASURED, Proof.IN_PART):
                return proof
        return Proof.DECLARED if declared else Proof.UNPROVEN


def _claims(variant: Variant) -> dict[str, Any]:
    """What a build says for itself, by the names that a `BackendInfo` has for it."""
    names = ("path", "capabilities", "probe", "requires", "install")
    return {name: getattr(variant, name) for name in names}


def load_object(path: str) -> Any:
    """Import `"package.module:name"`. Raises what the import raises, or `AttributeError`.

    An import that exits raises `PluginError`: a plugin doesn't end its host.
    """
    import importlib

    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except SystemExit as error:
        raise PluginError(f"the import of {path} exits, with {shown(error.code)}") from error
