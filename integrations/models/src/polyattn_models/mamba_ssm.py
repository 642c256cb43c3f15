"""What does a config of the mamba_ssm library say? The same under Hugging Face's names.

The Mamba checkpoints of state-spaces have no `model_type`, and a layer's sizes in `ssm_cfg`
with the defaults of its class (`mamba_ssm/modules/mamba_simple.py`, `mamba2.py`). They are translated
like transformers' `convert_mamba2_ssm_checkpoint_to_pytorch.py` does, with the fields of `ssm_cfg` that
it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyattn.errors import ConfigError, nearest

LAYERS: dict[str, tuple[str, dict[str, tuple[str, Any]]]] = {
    "Mamba1": ("mamba", {
        "d_state": ("state_size", 16), "d_conv": ("conv_kernel", 4), "expand": ("expand", 2),
        "dt_rank": ("time_step_rank", "auto"), "bias": ("use_bias", False),
        "conv_bias": ("use_conv_bias", True),
    }),
    "Mamba2": ("mamba2", {
        "d_state": ("state_size", 128), "d_conv": ("conv_kernel", 4), "expand": ("expand", 2),
        "headdim": ("head_dim", 64), "ngroups": ("n_groups", 1),
        "dt_limit": ("time_step_limit", [0.0, float("inf")]), "chunk_size": ("chunk_size", 256),
        "bias": ("use_bias", False), "conv_bias": ("use_conv_bias", True),
    }),
}  # fmt: skip
"""The type of each `ssm_cfg["layer"]`; of each of its fields Hugging Face's name and the default."""

BESIDE = (
    "dt_min", "dt_max", "dt_init", "dt_init_floor", "dt_scale", "A_init_range", "conv_init",
    "use_fast_path", "use_mem_eff_path", "layer",
)  # fmt: skip
"""Fields of `ssm_cfg` that training starts with, or that choose among equal implementations."""

ONLY = {"d_ssm": None, "D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False}
MODEL_ONLY = {"d_intermediate": 0, "attn_layer_idx": [], "rms_norm": True}
"""Fields that change what a layer computes, and the value that transformers' classes have."""

MODEL = {
    "d_model", "n_layer", "vocab_size", "ssm_cfg", "attn_cfg", "residual_in_fp32",
    "fused_add_norm", "pad_vocab_size_multiple", "tie_embeddings", "torch_dtype", "dtype",
    "architectures", "transformers_version", "norm_epsilon", "initializer_cfg", *MODEL_ONLY,
}  # fmt: skip


def is_mamba_ssm(values: Mapping[str, Any]) -> bool:
    """Return whether these are fields of mamba_ssm's, which has no `model_type`."""
    return "model_type" not in values and {"d_model", "n_layer", "ssm_cfg"} <= values.keys()


def translated(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the fields under the names of transformers' Mamba or Mamba-2 classes.

    Raises `ConfigError` about fields that are unknown, or have a value that those classes lack.
    """
    layer = values["ssm_cfg"]
    if not isinstance(layer, Mapping):
        raise ConfigError(f"{source}: ssm_cfg={layer!r} must be a JSON object")
    kind = layer.get("layer", "Mamba1")
    if kind not in LAYERS:
        raise ConfigError(
            f"{source}: ssm_cfg.layer={kind!r} is unknown{nearest(str(kind), LAYERS)}"
        )
    model_type, names = LAYERS[kind]
    _check(values, MODEL, MODEL_ONLY, source, "")
    _check(layer, {*names, *BESIDE, *ONLY}, ONLY, source, "ssm_cfg.")
    fields = {ours: layer.get(theirs, default) for theirs, (ours, default) in names.items()}
    out = {
        "model_type": model_type,
        "hidden_size": values["d_model"],
        "num_hidden_layers": values["n_layer"],
        "vocab_size": _padded(values, source),
        "layer_norm_epsilon": values.get("norm_epsilon", 1e-5),
        "residual_in_fp32": values.get("residual_in_fp32", True),
        "tie_word_embeddings": values.get("tie_embeddings", True),
        **{name: values[name] for name in ("torch_dtype", "dtype") if name in values},
        **fields,
    }
    width = _positive(fields["expand"], source, "ssm_cfg.expand") * _positive(
        values["d_model"], source, "d_model"
    )
    if model_type == "mamba2":
        size = _positive(fields["head_dim"], source, "ssm_cfg.headdim")
        if width % size:
            raise ConfigError(
                f"{source}: ssm_cfg.headdim={size!r} doesn't divide expand x d_model = {width}"
            )
        out["num_heads"] = width // size
    return out


def _check(
    fields: Mapping[str, Any], known: set[str], only: Mapping[str, Any], source: str, prefix: str
) -> None:
    """Refuse unknown fields, and values that transformers' classes lack."""
    for name, value in fields.items():
        if name not in known:
            raise ConfigError(
                f"{source}: {prefix}{name}={value!r} is unknown{nearest(name, known)}; "
                "where it changes no layer, drop it"
            )
        if name in only and value not in (None, only[name]):
            raise ConfigError(
                f"{source}: {prefix}{name}={value!r} can't be served; only {only[name]!r} is "
                "understood"
            )


def _padded(values: Mapping[str, Any], source: str) -> int:
    """Return the rows of the embedding: the vocabulary, up to the multiple that it is padded to."""
    size = _positive(values.get("vocab_size"), source, "vocab_size")
    multiple = _positive(
        values.get("pad_vocab_size_multiple", 1), source, "pad_vocab_size_multiple"
    )
    return -(-size // multiple) * multiple


def _positive(value: Any, source: str, name: str) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{source}: {name}={value!r} must be a positive integer")
    return value
