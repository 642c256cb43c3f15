"""One case of the kit."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.spec import LayerSpec


@dataclass(frozen=True)
class Case:
    """One test: `check` says what is looked at, `batch` names a shape."""

    check: str
    label: str
    spec: LayerSpec
    batch: str = "mixed"

    @property
    def id(self) -> str:
        """The test's id in pytest."""
        return f"{self.check}-{self.label}-{self.batch}".replace(" ", "_")
