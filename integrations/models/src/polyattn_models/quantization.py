"""What does a checkpoint say about its cached keys and values: their dtype and their scales?"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyattn.errors import ConfigError, describe

from polyattn_models.config import Config

WHERE = ("quantization_config", "compression_config")
PLAIN: tuple[Any, ...] = (None, False, "", "none", "auto", [], {})
"""Values that leave the cache as it is."""
STATIC: dict[str, tuple[Any, ...]] = {
    "type": ("float", "int"),
    "num_bits": (8,),
    "dynamic": (None, False),
    "symmetric": (None, True),
    "strategy": (None, "tensor", "attn_head"),
}
"""Fields of compressed-tensors' `QuantizationArgs` that say e4m3 or int8, by stored scales."""
QUARK_E4M3: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp8_e4m3",),
    "qscheme": ("per_tensor",),
    "is_dynamic": (None, False),
}
"""Quark's fields of an output that say the same."""
ALGORITHMS = {"FP8": "fp8_e4m3", "NVFP4": "nvfp4"}
"""ModelOpt's; what it stores as a layer's scale is what numbers are divided by, of both."""
CACHE_ALONE = ("compressed-tensors", "modelopt")
"""Methods that may be of the cache alone."""
OF_WEIGHTS = ("config_groups", "quant_algo")
SCALE = re.compile(
    r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:attn\.)?"
    r"(?:(?P<both>kv_scale)|(?:[a-z_]*proj\.)?(?P<one>[kv])_scale|(?P<out>[kv])_proj\.output_scale)$"
)
"""Names of scales: compressed-tensors', ModelOpt's, Quark's, AutoFP8's (one for both)."""


def cache_dtype_of(cfg: Config) -> str:
    """Return the `kv_cache_dtype` that a model's checkpoint, or one of its towers', asks for.

    `"auto"` is the model's own dtype. compressed-tensors and fp8 call the field `kv_cache_scheme`,
    ModelOpt `kv_cache_quant_algo`, Quark `kv_cache_group`. Raises `ConfigError` for a scheme that is
    neither e4m3 or int8 with stored scales nor ModelOpt's nvfp4, and for parts that differ.
    """
    dtypes = {cache_dtype_of(part) for part in cfg.parts}
    for place in WHERE:
        stated = cfg.values.get(place)
        for path, value in _schemes(stated, place):
            dtype = "fp8_e4m3" if _is_quark_e4m3(path, value, stated) else _dtype_of(path, value)
            if dtype is None or dtypes - {"auto", dtype}:
                raise cfg.error(
                    path,
                    value,
                    "is a format of cached keys and values that isn't read; name the cache's dtype "
                    "yourself, such as kv_cache_dtype='fp8_e4m3' or the model's own dtype",
                )
            dtypes.add(dtype)
    return next(iter(dtypes - {"auto"}), "auto")


def _dtype_of(path: str, value: Any) -> str | None:
    if path.endswith(".kv_cache_quant_algo"):
        return ALGORITHMS.get(str(value).upper())
    if not path.endswith(".kv_cache_scheme") or not isinstance(value, Mapping):
        return None
    static = all(value.get(name) in valid for name, valid in STATIC.items())
    return {"float": "fp8_e4m3", "int": "int8"}[value["type"]] if static else None


def _is_quark_e4m3(path: str, value: Any, scheme: Any) -> bool:
    """Whether Quark's layers of keys and values have outputs in e4m3, by one stored scale each."""
    if not path.endswith(".kv_cache_group") or not isinstance(value, list):
        return False
    layers = scheme.get("layer_quant_config")
    outputs = [
        layers[name].get("output_tensors")
        for name in value
        if isinstance(layers, Mapping) and isinstance(layers.get(name), Mapping)
    ]
    return len(outputs) == len(value) and all(
        isinstance(output, Mapping)
        and all(output.get(k) in valid for k, valid in QUARK_E4M3.items())
        for output in outputs
    )


def _schemes(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Return every field about the cache, at any depth, with its path."""
    if not isinstance(value, Mapping):
        return
    for name, inner in value.items():
        if "kv_cache" in str(name) and inner not in PLAIN:
            yield f"{path}.{name}", inner
        else:
            yield from _schemes(inner, f"{path}.{name}")


def weights_quantized(config: Config) -> bool:
    """Return whether a checkpoint's scheme covers more than cached keys and values, as far as it says.

    compressed-tensors lists other tensors in `config_groups`, ModelOpt names their `quant_algo`; the
    name of any other method says it.
    """
    for place in WHERE:
        value = config.values.get(place)
        if value in PLAIN:
            continue
        if not isinstance(value, Mapping) or value.get("quant_method") not in CACHE_ALONE:
            return True
        parts = (value, value.get("quantization") or {})
        if any(part.get(name) not in PLAIN for part in parts for name in OF_WEIGHTS):
            return True
    return False


def is_cache_scale(name: str) -> bool:
    """Return whether a checkpoint's tensor is a scale of cached keys or values, by its name."""
    return SCALE.search(name) is not None


def cache_scales(folder: str | Path) -> dict[int, dict[str, Any]]:
    """Return the scales of cached keys and values that a checkpoint's safetensors files hold.

    By layer: `k_scale`, `v_scale` or both, as `Attention` takes them: a number, or a tensor (KV heads,)
    of one a head. Layers without any are left out; theirs are 1.

        scales = cache_scales("Llama-3.1-8B-Instruct-FP8-KV")
        layers = [Attention(group, **scales.get(index, {})) for index in range(32)]

    Raises `ConfigError` for a file that can't be read and for a scale that isn't positive and finite.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ConfigError(
            f'{folder}: its scales need safetensors: pip install "polyattn[weights]"'
        ) from error
    scales: dict[int, dict[str, Any]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if SCALE.search(name)]  # noqa: SIM118
                tensors = {name: file.get_tensor(name) for name in names}
        except Exception as error:
            raise ConfigError(
                f"{path}: can't be read, or is truncated: {describe(error)}"
            ) from error
        for name, tensor in tensors.items():
            match = SCALE.search(name)
            assert match is not None
            which = "kv" if match["both"] else match["one"] or match["out"]
            values = tensor.float().flatten()
            if not all(math.isfinite(value) and value > 0 for value in values.tolist()):
                raise ConfigError(
                    f"{path}: {name}={values.tolist()} must be positive and finite; remove it from "
                    "the file where the checkpoint has no scale"
                )
            scale = float(values) if values.numel() == 1 else values
            scales.setdefault(int(match[1]), {}).update(
                {f"{letter}_scale": scale for letter in which}
            )
    return scales
