"""`polyattn run --weights`: a whole model, checked before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import typer

from polyattn.device import Device
from polyattn.errors import SettingsError, shown
from polyattn.spec.layer import LayerSpec
from polyattn.spec.models import model_reader
from polyattn.tools.replay.model.decoder import Decoder
from polyattn.tools.replay.model.fields import Fields
from polyattn.tools.replay.model.weights import Checkpoint, RandomWeights, Weights, bytes_of, load

RANDOM = "random"
ASK_FROM = 4 * 2**30
"""Bytes of random weights from which on `run` asks first: drawing them takes a minute or more."""


@dataclass(frozen=True)
class Whole:
    """A model and where its weights come from, not loaded yet."""

    model: Decoder
    source: Weights
    name: str
    in_e4m3: bool = False

    @property
    def bytes(self) -> int:
        """The bytes of all weights."""
        return bytes_of(self.model)

    def describe(self) -> str:
        """Return a line about the weights."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        rounded = ", projections rounded to e4m3" * self.in_e4m3
        return f"weights: {self.name}, {self.bytes / 2**30:.3g} GiB, {dtype}{rounded}"

    def confirm(self) -> None:
        """Ask before many random weights are drawn. Raises `SettingsError` where the answer isn't yes."""
        if not isinstance(self.source, RandomWeights) or self.bytes < ASK_FROM:
            return
        what = f"--weights={RANDOM} draws {self.bytes / 2**30:.3g} GiB"
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise SettingsError(f"{what}; no terminal to ask at: pass --yes to draw them")
        if not typer.confirm(f"{what}. Go on?", err=True):
            raise SettingsError(f"{what}; the answer was no")

    def announce(self) -> None:
        """Print the reason for a wait on standard error, before the command serves."""
        drawn = isinstance(self.source, RandomWeights)
        doing = "drawing random weights" if drawn else "reading weights"
        size = f"{self.bytes / 2**30:.3g} GiB"
        print(f"polyattn: {doing}, {size}, before the first step", file=sys.stderr, flush=True)

    def load(self, device: Device) -> Decoder:
        """Return the model with its weights on the device. Raises `WeightsError`."""
        self.announce()
        load(self.model, self.source, torch.device(str(device.torch_device)), self.in_e4m3)
        return self.model


def model_of(model: str | None, weights: str | None) -> str | None:
    """Return the config: the named model's, else the checkpoint's own.

    Raises `SettingsError` where `--weights` is neither a folder nor `random`.
    """
    if weights is None or weights == RANDOM:
        return model
    try:
        folder = Path(weights).is_dir()
    except (OSError, ValueError):  # a name too long
        folder = False
    if not folder:
        raise SettingsError(
            f"--weights={shown(weights)} is no folder; name a checkpoint's, or '{RANDOM}'"
        )
    return str(Path(weights).absolute()) if model is None else model


def whole_model(
    weights: str,
    path: str,
    specs: Sequence[LayerSpec],
    seed: int,
    assume: str | None = None,
    quantization: str | None = None,
) -> Whole:
    """Return the model of a config, its weights checked against it; `assume`: read as this type.

    `quantization` "fp8": of projections, unless the checkpoint's are in e4m3 as they are.

    Raises `ConfigError` where the type isn't run whole, `WeightsError`, `SettingsError`.
    """
    model = Decoder(Fields(path, assume), specs)
    source = RandomWeights(seed) if weights == RANDOM else Checkpoint(Path(weights))
    source.check(model)
    reader, config = model_reader(), model.fields.cfg
    int8 = [index for index, spec in enumerate(specs) if spec.kv_cache_dtype == "int8"]
    if int8 and not (
        reader.cache_dtype_of(config) == "int8" and source.scales().keys() >= set(int8)
    ):
        raise SettingsError(
            f"--kv-cache-dtype=int8 needs scales of int8, which --weights={weights} doesn't bring; use "
            "int8_rows, whose rows bring theirs"
        )
    is_e4m3 = weights != RANDOM and reader.weights_quantized(config)
    named = f"{RANDOM}, seed {seed}" if weights == RANDOM else weights
    return Whole(model, source, named, quantization == "fp8" and not is_e4m3)
