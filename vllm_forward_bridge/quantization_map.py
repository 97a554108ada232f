# SPDX-License-Identifier: Apache-2.0
"""Which module of a checkpoint has which weight format, read from ModelOpt's metadata. Imports no torch."""

import fnmatch
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

WEIGHT_FORMATS = ("BF16", "FP8", "NVFP4", "W4A16_NVFP4")
NVFP4_GROUP_SIZE = 16
_LINEAR_SUFFIXES = ("_proj", "lm_head")


@dataclass(frozen=True)
class QuantizationMap:
    """Which module has which weight format; a module that is not named is BF16."""

    formats: Mapping[str, str] = field(default_factory=dict)
    """MIXED_PRECISION: format of each module that is named."""
    kv_cache: str | None = None
    exclude_modules: tuple[str, ...] = ()
    default_format: str = "BF16"
    """Format of every linear that is neither named nor excluded: a repository with one algorithm."""

    def format_of(self, module: str) -> str:
        """Return the format of `module` (Hugging Face name without `.weight`): one of `WEIGHT_FORMATS`."""
        if self.excluding_pattern(module):
            return "BF16"
        return self.formats.get(module) or (self.default_format if module.endswith(_LINEAR_SUFFIXES) else "BF16")

    def excluding_pattern(self, module: str) -> str | None:
        """Return the entry of exclude_modules that keeps `module` in BF16, if there is one."""
        names, globs = _names_and_globs(self.exclude_modules)
        if module in names:
            return module
        return next((pattern for pattern in globs if fnmatch.fnmatchcase(module, pattern)), None)


def parse_quantization(quant: Mapping | None, problems: list[str]) -> QuantizationMap:
    """Build the map from hf_quant_config.json's `quantization` or config.json's `quantization_config`.

    Args:
        quant: the parsed object; None for a repository that is not quantised.
        problems: what is wrong is added here.
    """
    if quant is None:
        return QuantizationMap()
    algo, formats, default = quant.get("quant_algo"), {}, "BF16"
    exclude = _excluded(quant, problems)
    if algo == "MIXED_PRECISION":
        formats = _layer_formats(quant.get("quantized_layers"), problems)
    elif algo in WEIGHT_FORMATS[1:]:
        default = algo
        _check_group_size("quantization", quant, problems)
    elif algo is not None:
        accepted = ", ".join(WEIGHT_FORMATS[1:])
        problems.append(f"quant_algo is {algo!r}; accepted are MIXED_PRECISION, {accepted}: their bytes are known")
    found = QuantizationMap(formats, _kv_cache(quant, problems), exclude, default)
    for module in formats:
        pattern = found.excluding_pattern(module)
        if pattern:
            problems.append(
                f"{module} is in quantized_layers, but exclude_modules has {pattern!r}, which wins in every loader; "
                "remove one of the two, to agree with the tensors"
            )
    return found


def disagreements(config_json: Mapping | None, quant_json: Mapping | None) -> list[str]:
    """Compare config.json's quantization_config with hf_quant_config.json; loaders read one or the other."""
    if config_json is None or quant_json is None:
        return []
    one, other = parse_quantization(config_json, []), parse_quantization(quant_json, [])
    return [
        f"{what} differs between config.json's quantization_config and hf_quant_config.json; make them agree"
        for what, field_name in (
            ("the map of formats", "formats"),
            ("the KV cache's format", "kv_cache"),
            ("the quantization algorithm", "default_format"),
        )
        if getattr(one, field_name) != getattr(other, field_name)
    ] + (
        ["the list of excluded modules differs between config.json and hf_quant_config.json; make them agree"]
        if set(one.exclude_modules) != set(other.exclude_modules)
        else []
    )


def is_list_of_strings(value: object) -> bool:
    """Tell whether a value of a JSON file is a list of strings."""
    return isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value)


def _excluded(quant: Mapping, problems: list[str]) -> tuple[str, ...]:
    key = "exclude_modules" if "exclude_modules" in quant else "ignore"
    given = quant.get(key)
    if given is None:
        return ()
    if not is_list_of_strings(given):
        problems.append(f"{key} is {given!r}; a list of module names and patterns is needed")
        return ()
    return tuple(given)


def _layer_formats(layers: object, problems: list[str]) -> dict[str, str]:
    if not layers:
        problems.append("quant_algo is MIXED_PRECISION without quantized_layers; the format of each module is needed")
        return {}
    if not isinstance(layers, Mapping):
        problems.append(f"quantized_layers is {layers!r}; an object is needed, with the format of each module")
        return {}
    formats = {}
    for module, entry in layers.items():
        if not isinstance(entry, Mapping):
            problems.append(f"quantized_layers gives {entry!r} to {module}; an object with its quant_algo is needed")
            continue
        formats[module] = str(entry.get("quant_algo"))
        _check_group_size(module, entry, problems)
    unknown = sorted(set(formats.values()) - set(WEIGHT_FORMATS))
    for algo in unknown:
        modules = [module for module, given in formats.items() if given == algo]
        problems.append(
            f"quantized_layers gives {algo} to {len(modules)} modules, the first is {modules[0]}; accepted are "
            f"{', '.join(WEIGHT_FORMATS[1:])}: only their bytes are known here"
        )
    return formats


def _check_group_size(where: str, entry: Mapping, problems: list[str]) -> None:
    group = entry.get("group_size")
    if group not in (None, NVFP4_GROUP_SIZE):
        problems.append(f"{where} has group_size {group}; only {NVFP4_GROUP_SIZE} is accepted, the NVFP4 block length")


def _kv_cache(quant: Mapping, problems: list[str]) -> str | None:
    scheme = quant.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        is_fp8 = (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
        scheme = "FP8" if is_fp8 else str(dict(scheme))
    kv_cache = quant.get("kv_cache_quant_algo") or scheme
    if kv_cache not in (None, "FP8"):
        problems.append(f"kv_cache_quant_algo is {kv_cache!r}; only FP8 or none is accepted: K and V are e4m3 codes")
    return kv_cache


@functools.cache
def _names_and_globs(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    globs = tuple(pattern for pattern in patterns if set(pattern) & set("*?["))
    return frozenset(patterns).difference(globs), globs
