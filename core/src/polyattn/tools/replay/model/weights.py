"""Where do a model's weights come from? A checkpoint in Hugging Face's layout, or random numbers."""

from __future__ import annotations

import json
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyattn.errors import SettingsError, WeightsError, describe, shown
from polyattn.registry.distributions import find_spec
from polyattn.spec.models import model_reader
from polyattn.tools.replay.model.decoder import Decoder
from polyattn.tools.replay.model.feed_forward import Linear, StackedExperts

Shape = tuple[int, ...]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WIDE = ("e_score_correction_bias", "A_log", ".D", "dt_bias")
"""Endings of weights that stay in float32 in models of any dtype."""
DTYPES = ("F64", "F32", "F16", "BF16")
E4M3 = "F8_E4M3"
SCALES = ("weight_scale", "weight_scale_inv")
"""Names of an e4m3 weight's scales (compressed-tensors, ModelOpt), and of scales of its blocks."""
BLOCK = 128
"""Rows and columns of a block with a scale of its own."""
BESIDE = (*SCALES, "input_scale")
"""Names of tensors beside an e4m3 weight; activations stay in the model's dtype, without a scale."""
RENAMED = (
    (re.compile(r"^model\.language_model\.|^language_model\.model\."), "model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^backbone\.embedding\."), "backbone.embeddings."),
)
"""What names stand for the same: a text tower within a larger model, Mamba's first files."""
MOST_NAMED = 4
PROJECTIONS = (Linear, StackedExperts)


class Weights(ABC):
    """A source of weights."""

    @abstractmethod
    def check(self, model: Decoder) -> None:
        """Check that the source has every weight of the model. Raises `WeightsError`."""

    @abstractmethod
    def tensor(self, name: str, shape: Shape) -> Tensor:
        """Return one weight on the CPU, in any floating-point dtype. Raises `WeightsError`."""

    def scales(self) -> dict[int, dict[str, Any]]:
        """Return the scales of layers' cached keys and values: `k_scale`, `v_scale`, else 1."""
        return {}


def shapes_of(model: Decoder) -> dict[str, Shape]:
    """Return the names and shapes of a model's weights."""
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def dtype_of(model: Decoder, name: str) -> torch.dtype:
    """Return the dtype of a weight in memory."""
    return torch.float32 if name.endswith(WIDE) else model.dtype


def bytes_of(model: Decoder) -> int:
    """Return the bytes of all weights."""
    shapes = shapes_of(model).items()
    return sum(math.prod(shape) * dtype_of(model, name).itemsize for name, shape in shapes)


def load(model: Decoder, source: Weights, device: torch.device, in_e4m3: bool = False) -> None:
    """Bring the weights into the model, on the device. Raises `WeightsError`.

    `in_e4m3`: projections, the head's apart, are rounded to e4m3 times a scale for each matrix.
    """
    for name, shape in shapes_of(model).items():
        tensor = source.tensor(name, shape)
        part = model.get_submodule(name.rpartition(".")[0])
        if in_e4m3 and len(shape) > 1 and isinstance(part, PROJECTIONS) and part is not model.head:
            tensor = rounded(tensor)
        tensor = tensor.to(device, dtype_of(model, name))
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
    model.cache_scales = source.scales()


def rounded(weight: Tensor) -> Tensor:
    """Return float32 numbers (..., rows, columns) that e4m3 holds, times a scale for each matrix."""
    weight = weight.float()
    scale = weight.abs().amax((-2, -1), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


class RandomWeights(Weights):
    """Random numbers, each weight's from the seed and its name: the same on every machine."""

    def __init__(self, seed: int):
        self.seed = seed

    def check(self, model: Decoder) -> None:
        """Do nothing: there are numbers for every shape."""

    def tensor(self, name: str, shape: Shape) -> Tensor:
        """Return what keeps activations of the order of 1, as trained weights do."""
        seed = random.Random(f"{self.seed}/{name}").getrandbits(63)
        generator = torch.Generator().manual_seed(seed)
        leaf = name.rpartition(".")[2]
        if leaf == "A_log":  # the states forget at different rates (Gu and Dao, 2023)
            return torch.arange(1, shape[-1] + 1).float().log().expand(shape).contiguous()
        if leaf == "D":
            return torch.ones(shape)
        if name.endswith(("dt_bias", "dt_proj.bias")):  # softplus of it lies in 0.001 to 0.1
            low, high = math.log(0.001), math.log(0.1)
            dt = (torch.rand(shape, generator=generator) * (high - low) + low).exp()
            return dt + torch.log(-torch.expm1(-dt))
        numbers = torch.randn(shape, generator=generator)
        if "norm" in name:
            return numbers.mul_(0.1).add_(1.0)
        if len(shape) == 1 or leaf.endswith("bias"):
            return numbers.mul_(0.1)
        if len(shape) == 3 and "conv" not in name:  # experts stacked as (experts, in, out)
            return numbers.mul_(shape[1] ** -0.5)
        return numbers.mul_(math.prod(shape[1:]) ** -0.5)


class Checkpoint(Weights):
    """A folder of safetensors files in Hugging Face's layout, one or several with an index.

    Raises `SettingsError` without the package safetensors, `WeightsError` for what can't be read.
    """

    def __init__(self, folder: Path):
        if find_spec("safetensors") is None:
            raise SettingsError(
                f'--weights={folder} needs safetensors: pip install "polyattn[weights]"'
            )
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._where: dict[str, tuple[str, str]] = {}
        for name, file in self._listed():
            renamed = name
            for pattern, text in RENAMED:
                renamed = pattern.sub(text, renamed)
            if renamed in self._where:
                raise WeightsError(
                    f"{folder}: {name} and {self._where[renamed][0]} are the same weight; keep one"
                )
            self._where[renamed] = (name, file)

    def _listed(self) -> Iterable[tuple[str, str]]:
        """Return each tensor's name and its file."""
        index = self.folder / INDEX
        if not index.is_file():
            if not (self.folder / SINGLE).is_file():
                raise WeightsError(
                    f"--weights={self.folder}: has neither {SINGLE} nor {INDEX}; name the folder "
                    f"of a checkpoint in Hugging Face's layout, or 'random'"
                )
            return [(name, SINGLE) for name in self._open(SINGLE).keys()]  # noqa: SIM118
        try:
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            pairs = [(str(name), str(file)) for name, file in listed.items()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsError(f"{index}: has no weight_map: {describe(error)}") from error
        for name, file in pairs:
            if Path(file).name != file or not (self.folder / file).is_file():
                raise WeightsError(f"{index}: {name} is in {shown(file)}, which isn't beside it")
        return pairs

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                self._files[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise WeightsError(
                    f"{self.folder / file}: can't be read, or is truncated: {describe(error)}"
                ) from error
        return self._files[file]

    def _header(self, name: str) -> tuple[Shape, str]:
        """Return a tensor's shape and dtype from its file."""
        from safetensors import SafetensorError

        own, file = self._where[name]
        try:
            part = self._open(file).get_slice(own)
            return tuple(part.get_shape()), part.get_dtype()
        except SafetensorError as error:
            raise WeightsError(f"{self.folder / file}: lacks {own}: {describe(error)}") from error

    def check(self, model: Decoder) -> None:
        """Check names, shapes and dtypes before anything is loaded."""
        wrong = []
        shapes = shapes_of(model)
        for name, shape in shapes.items():
            if name not in self._where:
                wrong.append(f"lacks {name} {shape}")
                continue
            stored, dtype = self._header(name)
            if stored != shape:
                wrong.append(f"{name} has shape {stored}, expected {shape} by the config")
            elif dtype == E4M3:
                problem = self._scale_problem(name, shape)
                wrong += [problem] if problem else []
            elif dtype not in DTYPES:
                wrong.append(f"{name} is {dtype}, expected one of {', '.join((*DTYPES, E4M3))}")
        wrong += [
            f"has {name}, which the config's model has no use for"
            for name in _unread(self._where, shapes, model)
        ]
        cfg = model.fields.cfg
        block = (cfg.get("quantization_config") or {}).get("weight_block_size")
        if block not in (None, [BLOCK, BLOCK]):
            wrong.insert(0, f"weight_block_size={shown(block)} must be [{BLOCK}, {BLOCK}]")
        if wrong and model_reader().weights_quantized(cfg):
            raise WeightsError(
                f"{self.folder}: quantization_config={shown(cfg.get('quantization_config'))}: "
                f"{wrong[0]}; quantised weights are read where they are e4m3 with their scales beside "
                "them; store the others as bfloat16 and take the field out"
            )
        if wrong:
            more = f"; and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
            raise WeightsError(
                f"{self.folder}: " + "; ".join(wrong[:MOST_NAMED]) + more + ". Give the checkpoint "
                f"of {model.fields.cfg.source}, or the config of this one"
            )

    def tensor(self, name: str, shape: Shape) -> Tensor:
        """Return one weight, as the file has it; one in e4m3 times its scale, float32."""
        own, file = self._where[name]
        tensor: Tensor = self._open(file).get_tensor(own)
        scale = self._scale_name(name) if tensor.dtype == torch.float8_e4m3fn else None
        if scale is None:
            return tensor
        by = self.tensor(scale, ()).float()
        if by.shape == self._blocks(shape):
            by = by.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[
                :, : shape[1]
            ]
        return tensor.float() * (by if by.shape == shape else by.reshape(-1, 1))

    def _scale_name(self, name: str) -> str | None:
        base = name.rpartition(".")[0]
        return next((f"{base}.{s}" for s in SCALES if f"{base}.{s}" in self._where), None)

    @staticmethod
    def _blocks(shape: Shape) -> Shape:
        return tuple(-(-n // BLOCK) for n in shape)

    def _scale_problem(self, name: str, shape: Shape) -> str | None:
        """Say why an e4m3 weight's numbers can't be known, or None."""
        scale = self._scale_name(name)
        if scale is None:
            return f"{name} is {E4M3} without a {SCALES[0]} beside it"
        stored, dtype = self._header(scale)
        rows = shape[0]
        valid = ((), (1,), (rows,), (rows, 1), self._blocks(shape))
        if len(shape) != 2 or stored not in valid or dtype not in DTYPES:
            return (
                f"{scale} is {dtype} of shape {stored}, expected one number, one a row of {shape}, or "
                f"one for each {BLOCK} x {BLOCK}"
            )
        return None

    def scales(self) -> dict[int, dict[str, Any]]:
        """Return the scales that the files hold, of a whole tensor each."""
        by_layer: dict[int, dict[str, Any]] = model_reader().cache_scales(str(self.folder))
        for index, scales in by_layer.items():
            for name, scale in scales.items():
                if isinstance(scale, Tensor):
                    raise WeightsError(
                        f"{self.folder}: {name} of layer {index} has {scale.numel()} numbers, one a "
                        "head; `run` takes one for all heads: keep their largest alone"
                    )
        return by_layer


def _unread(names: Iterable[str], shapes: Mapping[str, Shape], model: Decoder) -> list[str]:
    """Return weights of the decoder's own parts that it has no place for: another model's."""
    own = (model.layers_name.partition(".")[0] + ".", "lm_head.")
    left = []
    for name in names:
        if name in shapes or not name.startswith(own) or name.endswith("rotary_emb.inv_freq"):
            continue
        base, _, leaf = name.rpartition(".")
        if model_reader().is_cache_scale(name) or (leaf in BESIDE and f"{base}.weight" in shapes):
            continue
        layer = re.match(re.escape(model.layers_name) + r"\.(\d+)\.", name)
        beyond = layer and int(layer[1]) >= len(model.layers)  # multi-token prediction
        tower = re.match(r"model\.(vision_tower|multi_modal_projector)\.", name)
        if not (beyond or tower or (model.tied and name == "lm_head.weight")):
            left.append(name)
    return left
