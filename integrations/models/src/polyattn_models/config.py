"""What does a `config.json` say? Its fields under their own names, defaults included."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyattn.errors import ConfigError, finite, nearest, shown

from polyattn_models.classes import ModelClass, model_class
from polyattn_models.mamba_ssm import is_mamba_ssm, translated

Source = Mapping[str, Any] | str | os.PathLike[str] | object
"""A mapping, a config object (`to_dict`), the path of a `config.json` or of its directory."""

MAX_LAYERS, MAX_SIZE = 10_000, 2**40
"""What no model has more of: a number beyond is a slip, and would fill the memory."""
MAX_DEPTH = 8
"""How deep a field that is read may lie; quantisation's lists of modules may lie deeper."""
RENAMED = {"lfm2-vl": "lfm2_vl"}
"""Types that older files call otherwise than transformers does today."""


class Config:
    """The fields of a model or of one of its towers; a missing one has its class's default.

    `read` collects the fields that the reader reads. The other ones must be harmless.
    """

    def __init__(self, values: Mapping[str, Any], source: str, model_type: str = ""):
        self.source, self.model_type = source, model_type
        self.cls: ModelClass = model_class(model_type)
        self.values = self._renamed(values)
        self.read: set[str] = set()
        self.parts: list[Config] = []

    def _renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values under their class's own names instead of their aliases."""
        out = dict(values)
        for alias, name in self.cls.aliases.items():
            if alias in out:
                value = out.pop(alias)
                if out.setdefault(name, value) != value:
                    raise self.error(alias, value, f"contradicts {name}={out[name]!r}; drop one")
        return out

    def error(self, name: str, value: Any, remedy: str) -> ConfigError:
        """Return the error about a field's value."""
        return ConfigError(f"{self.source}: {name}={shown(value, 200)} {remedy}")

    def given(self, name: str) -> bool:
        """Return whether the file itself has the field, null or not."""
        name = self._own(name)
        self.read.add(name)
        return name in self.values

    def _own(self, name: str) -> str:
        return self.cls.aliases.get(name, name)

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of `names` that is there and not null, else its class's default."""
        names = tuple(map(self._own, names))
        self.read.update(names)
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        for name in names:
            if name not in self.values and self.cls.fields.get(name) is not None:
                return self.cls.fields[name]
        return default

    def need(self, *names: str) -> int:
        """Return a positive integer under the first of its `names` that is there."""
        value = self.get(*names)
        if value is None:
            more = f" (or {', '.join(map(repr, names[1:]))})" if names[1:] else ""
            raise ConfigError(f"{self.source}: lacks the field {names[0]!r}{more}; add it")
        return self._integer(next((n for n in names if n in self.values), names[0]), value)

    def integer(self, name: str) -> int | None:
        """Return a positive integer, or None where the field is null or missing."""
        value = self.get(name)
        return None if value is None else self._integer(name, value)

    def _integer(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(name, value, "must be a positive integer")
        limit = MAX_LAYERS if "layer" in name or name == "depth" else MAX_SIZE
        if value > limit:
            raise self.error(name, value, f"must be at most {limit}")
        return value

    def number(self, name: str, default: float | None = None) -> float | None:
        """Return a finite number, or the default where the field is null or missing."""
        value = self.get(name)
        if value is None:
            return default
        if not finite(value):
            raise self.error(name, value, "must be a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, value, "must be true or false")
        return value

    def items(self, name: str, kind: type, count: int | None = None) -> list[Any] | None:
        """Return a list whose entries are of `kind`, `count` of them, or None where missing."""
        value = self.get(name)
        if value is None:
            return None
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        if not listed or any(type(entry) not in (kind, bool) for entry in value):
            raise self.error(name, value, f"must be a list of {kind.__name__}")
        if count is not None and len(value) != count:
            raise self.error(name, value, f"has {len(value)} entries for {count} layers")
        return list(value)

    def only(self, name: str, *valid: Any) -> None:
        """Refuse every value of a field but these: another one changes what attention computes."""
        value = self.get(name)
        if value is not None and value not in valid:
            wanted = " or ".join(map(repr, valid)) if valid else "absent"
            raise self.error(name, value, f"can't be served; only {wanted} is understood")

    def part(self, name: str, default_type: str = "", aliases: tuple[str, ...] = ()) -> Config:
        """Return a sub-config, as the config of its own type."""
        value = self.get(name, *aliases)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(name, value, "must be a JSON object")
        own = value.get("model_type") or default_type
        if own == self.model_type and default_type:  # older files call a tower by its model's type
            own = default_type
        if not isinstance(own, str):
            raise self.error(f"{name}.model_type", own, "must be a string")
        for shared in ("dtype", "torch_dtype"):
            if shared in self.values and not value.get(shared):
                value = {**value, shared: self.values[shared]}
        part = Config(value, f"{self.source}: {name}", own)
        self.parts.append(part)
        return part

    def layer_values(self, index: int) -> Mapping[str, Any] | None:
        """Return what `per_layer_config` says of a layer; None where the file has no such field."""
        own = self.get("per_layer_config")
        if own is None:
            return None
        values = own.get(index, own.get(str(index))) if isinstance(own, Mapping) else own
        if values is not None and not isinstance(values, Mapping):
            raise self.error("per_layer_config", own, "must be a JSON object of JSON objects")
        return values or {}

    @property
    def dtype(self) -> str:
        """The model's dtype; a config that has none is served in bfloat16."""
        value = self.get("dtype", "torch_dtype", default="bfloat16")
        return str(value).removeprefix("torch.")


def read_config(config: Source) -> Config:
    """Return the config behind a mapping, a config object, a file or a directory.

    A text tower's fields are the model's own where it has no others. Raises `ConfigError`.
    """
    values, source = read_values(config)
    text = values.get("text_config")
    if isinstance(text, Mapping) and "num_hidden_layers" not in values:
        values = {**values, **text}
    return Config(values, source)


def text_config(config: Source, assume: str | None = None) -> Config:
    """Return the config of a model's text tower, as its type or the type to `assume` has it.

    Raises `ConfigError`.
    """
    values, source = read_values(config)
    cfg = Config(values, source, assume or str(values.get("model_type")))
    if isinstance(values.get("text_config"), Mapping):
        return cfg.part("text_config", f"{cfg.model_type}_text")
    return cfg


def read_values(config: Source) -> tuple[Mapping[str, Any], str]:
    """Return the fields, mamba_ssm's under Hugging Face's names, and what an error calls their source."""
    if isinstance(config, (str, os.PathLike)):
        values, source = _read_model(Path(config))
    else:
        values = config.to_dict() if hasattr(config, "to_dict") else config
        source = "config"
    values = _with_special_floats(values)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: must be a JSON object, not {type(values).__name__}")
    model = values.get("model_type")
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"{source}: model_type={model!r} must be a string")
    if model in RENAMED:
        values = {**values, "model_type": RENAMED[model]}
    return (translated(values, source) if is_mamba_ssm(values) else values), source


MODELOPT = "hf_quant_config.json"
"""What ModelOpt writes beside a `config.json`: the checkpoint's quantisation, its cache's among it."""


def _read_model(path: Path) -> tuple[Any, str]:
    path = path / "config.json" if path.is_dir() else path
    values, beside = _read_file(path), path.with_name(MODELOPT)
    if isinstance(values, dict) and "quantization_config" not in values and beside.is_file():
        values["quantization_config"] = _read_file(beside)
    return values, str(path)


def _read_file(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; name a config.json or its directory") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON, or truncated: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error}") from error


def _with_special_floats(value: Any, depth: int = 0) -> Any:
    """Return a config with the infinities that transformers 5 writes as `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        if depth < MAX_DEPTH:
            return {name: _with_special_floats(each, depth + 1) for name, each in value.items()}
    if type(value) is list and depth < MAX_DEPTH:
        return [_with_special_floats(each, depth + 1) for each in value]
    return value


def unknown_choice(cfg: Config, name: str, value: Any, valid: Sequence[str]) -> ConfigError:
    """Return the error about a value outside a list."""
    return cfg.error(name, value, f"is unknown{nearest(str(value), valid)}")
