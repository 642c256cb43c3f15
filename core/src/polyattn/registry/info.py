"""What does a plugin declare of a backend, and how is it proven? `BackendInfo`: data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from polyattn.device import Device, arch_matches
from polyattn.errors import PluginError, SpecError, describe, nearest, shown
from polyattn.registry.capabilities import ANY_PLATFORM, Capabilities
from polyattn.registry.requirements import requirement_syntax_problem
from polyattn.registry.validate import (
    BACKEND_NAME,
    PLATFORM_NAME,
    PLUGIN_NAME,
    is_arch_pattern,
    path_problems,
)
from polyattn.spec.features import FEATURES
from polyattn.spec.kinds import PHASES, AttentionKind
from polyattn.spec.layer import LayerSpec

OWN = "polyattn"
"""The prefix of the packages whose backends the records cover."""

HOST = "x86_64"
"""The architecture whose records are those of the platform `"cpu"`."""


@dataclass(frozen=True)
class Record:
    """Results of a backend's kit on one architecture.

    - `where`: the architecture. `build`: which of a backend's builds ran; "" where there is but one.
    - `runs`: which instruction set ran; "" where a backend has but one.
    - `whole`: each case that the claims have today passed. `cases`: how many passed; `of`: how many there
      are today, 0 where the result doesn't say which passed.
    - `commit`: "" where it doesn't say. `date`. `path`: of the result file in the repository.
    """

    where: str
    build: str
    runs: str
    whole: bool
    cases: int
    of: int
    commit: str
    date: str
    path: str

    @property
    def text(self) -> str:
        """The number of cases that passed, as text."""
        return f"{self.cases} of {self.of} cases" if self.of else f"{self.cases} cases"


@cache
def _all() -> dict[str, tuple[Record, ...]]:
    """Return each backend's records, the strongest first."""
    text = files("polyattn.data").joinpath("proofs.json").read_text(encoding="utf-8")
    return {
        name: tuple(
            sorted((Record(**row) for row in rows), key=lambda r: (not r.whole, -r.cases, r.path))
        )
        for name, rows in json.loads(text).items()
    }


API_VERSION = 1
"""The number of the contract of the three doors, `polyattn.plugin`, `kernel` and `host`.

It changes when a name of a door goes, or changes its meaning or its arguments.
"""
LARGEST_SCORE = 10**6


class Proof(str, Enum):
    """How far a claim about a platform is proven, strongest first.

    Attributes:
        MEASURED: a record of results has each case of today's claims, on one architecture.
        IN_PART: a record has some of them.
        EMULATED: cases ran in an emulator of the instruction set.
        COMPILED: kernels compiled for it.
        INTERPRETED: cases ran in the kernel language's interpreter.
        SIGNATURE: calls were compared with the library's signatures.
        DECLARED: the plugin claims a run there, without a record.
        UNPROVEN: none of these.

    Examples:
        >>> Proof("measured in part").name
        'IN_PART'

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
    """How much a backend is preferred under conditions. A condition of None holds everywhere.

    Attributes:
        score: compares across plugins: 0 is a fallback that always works, 50 a good general kernel, 100
            the best known for the hardware.
        platform: of the device.
        archs: arch patterns of the device; empty: every arch.
        phase: of the step.
        kind: of the layer.
        needs: a feature (`polyattn.spec.features`) that the layer has.
        over: the layer's heads have more elements than this.
        cached: whether the layer has a cache.
        why: shown by `polyattn explain`.

    Examples:
        >>> fast = Priority(score=80, platform="cuda", archs=("sm_90",), why="tensor cores of sm_90")
        >>> fast.applies(LayerSpec(num_heads=8, head_size=64), Device("cuda", "sm_90"), "prefill")
        True

    """

    score: int
    platform: str | None = None
    archs: tuple[str, ...] = ()
    phase: str | None = None
    kind: AttentionKind | None = None
    needs: str | None = None
    over: int = 0
    cached: bool | None = None
    why: str = ""

    def problems(self) -> Iterator[str]:
        """Yield the errors of its score and conditions."""
        if abs(self.score) > LARGEST_SCORE:
            yield f"Priority.score={shown(self.score)}: scores go from 0 to 100"
        if self.platform is not None and not PLATFORM_NAME.fullmatch(self.platform):
            yield f"Priority.platform={shown(self.platform)} can't be a platform's name"
        if self.phase is not None and self.phase not in PHASES:
            yield f"Priority.phase={shown(self.phase)} is unknown{nearest(self.phase, PHASES)}"
        if self.needs is not None and self.needs not in FEATURES:
            yield f"Priority.needs={shown(self.needs)} is unknown{nearest(self.needs, FEATURES)}"
        for pattern in self.archs:
            if not is_arch_pattern(pattern):
                yield (
                    f"Priority.archs: {shown(pattern)} is no arch pattern; write 'sm_90', 'sm_80+' or "
                    "'sm_80-sm_90'"
                )

    def applies(self, spec: LayerSpec, device: Device, phase: str) -> bool:
        """Return whether this priority is for such a layer.

        Args:
            spec: the layer.
            device: where it runs.
            phase: `"prefill"`, `"decode"` or a service's name.

        """
        return (
            self.platform in (None, device.platform)
            and self.phase in (None, phase)
            and self.kind in (None, spec.kind)
            and (self.needs is None or self.needs in spec.features)
            and spec.head_size > self.over
            and self.cached in (None, spec.cached)
            and (not self.archs or any(arch_matches(p, device.arch) for p in self.archs))
        )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One build of a backend's library: a package that brings it, with claims of its own.

    Attributes:
        name: of the build, as users know the package.
        path: as in `BackendInfo`.
        capabilities: what this build claims.
        probe: as in `BackendInfo`.
        requires: as in `BackendInfo`.
        install: as in `BackendInfo`.

    Examples:
        >>> claims = Capabilities(platforms={"cuda": ("sm_80+",)})
        >>> Variant(name="flash-attn", path="mine.flash:Flash", capabilities=claims).requires
        ()

    """

    name: str
    path: str
    capabilities: Capabilities
    probe: str | None = None
    requires: tuple[str, ...] = ()
    install: str = ""

    def problems(self) -> Iterator[str]:
        """Yield the errors of its name and paths."""
        if not PLUGIN_NAME.fullmatch(self.name):
            yield (
                f"Variant.name={shown(self.name)} can't be a build's name; use letters, digits, '_', "
                "'-' and '.', 64 at most"
            )
        yield from _build_problems(self)


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """A backend as a plugin declares it, in a module that imports neither torch nor its library.

    Attributes:
        name: letters, digits, `_` and `-`; written and looked up in upper case.
        summary: for people.
        path: `"package.module:Class"`, imported only when the backend is chosen.
        capabilities: what it claims.
        probe: `"package.module:function"` or None. Called without arguments on a real device, it
            returns None if the backend can run here, else the reason as text. It doesn't import the
            vendor's library but looks it up with `find_spec` and `installed` of `polyattn.plugin`.
        runs: `"package.module:function"` or None. Called after a probe without objection, it returns a
            word for what of it runs here (an instruction set), or None. Text after the word is for
            people.
        variant_check: `"package.module:function"` or None, of a backend that claims `"variant"`. It
            takes an `AttentionVariant` and returns None, or why this backend can't serve it.
        rows_check: as `variant_check`, of a backend that claims `"rows"`: it takes a cache's `RowFormat`.
        requires: packages that must be installed, as requirement strings (`"flash-attn>=2.7"`).
        install: the command that installs them.
        priorities: the first one that applies counts; none: score 0.
        proof: platform or arch to how far its claims there are proven. "measured" counts if a record of
            results says so.
        proof_of_runs: what `runs` may return to how far that is proven, if not as far as its arch.
        by_name_only: it serves only if the user names it.
        variants: all builds of the library, the preferred one first, if they differ in what they can
            do; the fields above are then the first one's. A profile assumes that one. On a device,
            builds count that claim its platform and are installed. A kernel that an interpreter runs in
            tests is a build on platform `"cpu"`.
        build: which of the variants this is, once that is known.
        aliases: other engines' names for such a kernel (vLLM's `CPU_ATTN`), looked up as `name` is.

    Examples:
        >>> claims = Capabilities(platforms={"cuda": ("sm_80+",)})
        >>> info = BackendInfo(
        ...     name="MY_ATTN", summary="mine", path="mine.kernels:MyAttention", capabilities=claims
        ... )
        >>> list(info.problems())
        []

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
        """Return a backend of several builds.

        Args:
            variants: the builds, the preferred one first.
            fields: the other fields of `BackendInfo`, which they share.

        """
        return cls(variants=variants, **_claims(variants[0]), **fields)

    def problems(self) -> Iterator[str]:
        """Yield the errors of its names, paths, proofs and builds."""
        for where, name in (("name=", self.name), *(("aliases: ", a) for a in self.aliases)):
            if not BACKEND_NAME.fullmatch(name):
                yield (
                    f"BackendInfo.{where}{shown(name)} can't be a backend's name; use letters, digits, "
                    "_ and -, 64 at most"
                )
        called = [name.upper() for name in (self.name, *self.aliases)]
        if len(set(called)) < len(called):
            yield f"BackendInfo.aliases: {shown(called)} has a name twice, the backend's own included"
        yield from _build_problems(self)
        for where in self.proof:
            if not is_arch_pattern(where):
                yield f"BackendInfo.proof: {shown(where)} is neither a platform nor an arch"
        for name in self.proof_of_runs:
            if not PLUGIN_NAME.fullmatch(name):
                yield f"BackendInfo.proof_of_runs: {shown(name)} can't be named by `runs`"
        if self.build:
            yield f"BackendInfo.build={shown(self.build)} is not declared; declare variants"
        names = [build.name for build in self.variants]
        if len(set(names)) < len(names):
            yield f"BackendInfo.variants: {shown(names)} names a build twice"
        if self.variants and self.builds[0] != replace(
            self, variants=(), build=self.variants[0].name
        ):
            yield (
                "BackendInfo.variants: the backend's own claims aren't those of its first build; declare "
                "it with BackendInfo.of_variants(...)"
            )

    def canonical(self) -> BackendInfo:
        """Return it with its names in upper case, as look-ups need them."""
        name, aliases = self.name.upper(), tuple(alias.upper() for alias in self.aliases)
        same = (name, aliases) == (self.name, self.aliases)
        return self if same else replace(self, name=name, aliases=aliases)

    @cached_property
    def builds(self) -> tuple[BackendInfo, ...]:
        """The backend as each of its variants, the preferred one first; itself where it has none."""
        return tuple(map(self.as_built, self.variants)) or (self,)

    def builds_on(self, platform: str) -> tuple[BackendInfo, ...]:
        """Return the builds that claim a platform.

        Args:
            platform: `"cuda"`.

        """
        where = {platform, ANY_PLATFORM}
        return tuple(b for b in self.builds if where & b.capabilities.platforms.keys())

    def as_built(self, variant: Variant) -> BackendInfo:
        """Return the backend as one of its variants: that build's claims, path and requirements.

        Args:
            variant: one of `variants`.

        """
        return replace(self, variants=(), build=variant.name, **_claims(variant))

    def __hash__(self) -> int:
        return hash((self.name, self.path))

    def priority(self, spec: LayerSpec, device: Device, phase: str) -> Priority:
        """Return the first of its priorities that applies, or a score of 0.

        Args:
            spec: the layer.
            device: where it runs.
            phase: `"prefill"`, `"decode"` or a service's name.

        """
        return next(
            (p for p in self.priorities if p.applies(spec, device, phase)), Priority(score=0)
        )

    def proof_on(self, device: Device, runs: str = "") -> Proof:
        """Return how far this backend is proven on a device: by arch, else by platform.

        Args:
            device: the device.
            runs: the instruction set or build that runs there, which may be proven to another degree.

        """
        return self.proven(device.arch, device.platform, runs)[0]

    def proof_at(self, where: str) -> Proof:
        """Return how far it is proven, whichever of its builds runs there.

        Args:
            where: an arch or a platform.

        """
        return self.proven(where, where)[0]

    def records(self, where: str, runs: str = "") -> tuple[Record, ...]:
        """Return its recorded runs of the kit, the strongest first; only our plugins have any.

        A backend that isn't one of its builds has the records of the preferred one.

        Args:
            where: an arch or a platform.
            runs: an instruction set, whose records alone count; `""`: all.

        """
        build = self.build or (self.variants[0].name if self.variants else "")
        if self.path.partition(".")[0].partition("_")[0] != OWN:
            return ()
        return tuple(
            record
            for record in _all().get(self.name, ())
            if record.where == (HOST if where == "cpu" else where)
            and build in ("", record.build)
            and (not runs or record.runs == runs)
        )

    def proven(self, arch: str, platform: str, runs: str = "") -> tuple[Proof, Record | None]:
        """Return the degree of proof and its record; a declared degree has None.

        Nobody can declare "measured".

        Args:
            arch: the device's.
            platform: the device's.
            runs: the instruction set or build that runs there.

        """
        name, _, _ = runs.partition(" ")
        declared = [self.proof[where] for where in (arch, platform) if where in self.proof]
        if declared and name in self.proof_of_runs:
            declared.insert(0, self.proof_of_runs[name])
        if declared[:1] == [Proof.MEASURED]:
            for record in self.records(arch, name):
                return (Proof.MEASURED if record.whole else Proof.IN_PART), record
        weaker = (proof for proof in declared if proof not in (Proof.MEASURED, Proof.IN_PART))
        return next(weaker, Proof.DECLARED if declared else Proof.UNPROVEN), None


def _build_problems(info: BackendInfo | Variant) -> Iterator[str]:
    kind = type(info).__name__
    yield from path_problems(f"{kind}.path", info.path, "Class")
    yield from path_problems(f"{kind}.probe", info.probe, "function")
    for name in ("runs", "variant_check", "rows_check") if isinstance(info, BackendInfo) else ():
        yield from path_problems(f"{kind}.{name}", getattr(info, name), "function")
    for text in info.requires:
        problem = requirement_syntax_problem(text)
        if problem:
            yield f"{kind}.requires: {problem}"


def _claims(variant: Variant) -> dict[str, Any]:
    """The fields of a build, under the names that they have in `BackendInfo`."""
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


def function_at(owner: str, name: str, source: Any) -> Any:
    """Return an owner's function, which may be passed by its path. Raises `SpecError`."""
    if not isinstance(source, str):
        return source
    try:
        return load_object(source)
    except Exception as error:
        raise SpecError(
            f"{owner}: {name}={shown(source)} can't be loaded: {describe(error)}"
        ) from error
