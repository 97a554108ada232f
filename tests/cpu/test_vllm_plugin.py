# SPDX-License-Identifier: Apache-2.0
"""The plugin's switch and refusals, and what it takes from the installed vLLM; most of it without importing vLLM."""

import ast
import importlib.util
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import SimpleNamespace

import child_tests
import pytest

from vllm_forward_bridge.vllm_plugin import strict
from vllm_forward_bridge.vllm_plugin.switch import (
    ARCHITECTURE,
    ARGUMENTS,
    KEY,
    complete,
    is_on,
    package_digest,
    switch_value,
)

HERE = Path(__file__).parent
INSIDE = HERE / "inside_vllm.py"
PLUGIN = HERE.parents[1] / "vllm_forward_bridge" / "vllm_plugin"
VLLM = importlib.util.find_spec("vllm")
needs_vllm = pytest.mark.skipif(VLLM is None, reason="vLLM is not installed: pip install 'vllm-forward-bridge[vllm]'")

# ---- the switch ----

Arguments = make_dataclass(
    "Arguments", [("additional_config", dict), *((name, object, field(default="stock")) for name in ARGUMENTS)]
)


def test_complete_fills_in_every_argument():
    arguments = Arguments({KEY: {}, "other": 1})
    complete(arguments)
    assert {name: getattr(arguments, name) for name in ARGUMENTS} == dict(ARGUMENTS)
    assert arguments.additional_config == {KEY: {"digest": package_digest()}, "other": 1}


def test_complete_lists_every_contradiction():
    arguments = Arguments({KEY: {}}, **{name: "mine" for name in ARGUMENTS})
    with pytest.raises(ValueError, match=f"additional_config has '{KEY}'") as raised:
        complete(arguments)
    for name, wanted in ARGUMENTS.items():
        assert f"{name} is 'mine'; only {wanted!r} is proven" in str(raised.value)


@pytest.mark.parametrize(
    ("additional_config", "on"), [({KEY: {}}, True), ({}, False), ({"other": 1}, False), (None, False), (KEY, False)]
)
def test_switch_is_one_key(additional_config, on):
    assert is_on(additional_config) is on


# ---- refusals ----


@dataclass
class Violation:
    """A value that a bridged engine must not have, and the name its refusal carries."""

    path: str
    value: object
    name: str


VIOLATIONS = [
    Violation("model_config.architecture", "LlamaForCausalLM", "architecture"),
    Violation("model_config.dtype", "torch.float16", "dtype"),
    Violation("model_config.runner_type", "pooling", "runner_type"),
    *(
        Violation(f"parallel_config.{kind}_parallel_size", 2, f"{kind}_parallel_size")
        for kind in ("tensor", "pipeline", "data", "prefill_context", "decode_context")
    ),
    *(
        Violation(f"parallel_config.{name}", True, name)
        for name in ("enable_expert_parallel", "enable_eplb", "enable_dbo")
    ),
    Violation("parallel_config.worker_cls", "vllm.v1.worker.gpu_worker.Worker", "worker_cls"),
    *(Violation(name, object(), name) for name in ("speculative_config", "lora_config", "kv_transfer_config")),
    Violation("use_v2_model_runner", True, "use_v2_model_runner"),
    Violation("scheduler_config.async_scheduling", True, "async_scheduling"),
    Violation("cache_config.enable_prefix_caching", True, "enable_prefix_caching"),
    Violation("cache_config.mamba_cache_mode", "all", "mamba_cache_mode"),
    Violation("cache_config.cache_dtype", "fp8", "kv cache dtype"),
    Violation("cache_config.calculate_kv_scales", True, "calculate_kv_scales"),
    Violation("model_config.logprobs_mode", "raw_logprobs", "logprobs_mode"),
    Violation("model_config.max_logprobs", 20, "max_logprobs"),
    Violation("model_config.logits_processors", None, "logits_processors"),
    Violation("model_config.enforce_eager", False, "enforce_eager"),
    Violation("compilation_config.mode", "VLLM_COMPILE", "compilation mode"),
]


def proven_config():
    """Return the part of a VllmConfig that decides, as a bridged engine has it."""
    return SimpleNamespace(
        additional_config={KEY: switch_value()},
        model_config=SimpleNamespace(
            architecture=ARCHITECTURE, dtype="torch.bfloat16", runner_type="generate",
            logprobs_mode="processed_logprobs", max_logprobs=0, logits_processors=ARGUMENTS["logits_processors"],
            enforce_eager=True,
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=False, mamba_cache_mode="none", cache_dtype="bfloat16", calculate_kv_scales=False
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, prefill_context_parallel_size=1,
            decode_context_parallel_size=1, enable_expert_parallel=False, enable_eplb=False, enable_dbo=False,
            worker_cls=ARGUMENTS["worker_cls"],
        ),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        compilation_config=SimpleNamespace(mode=SimpleNamespace(name="NONE")),
        speculative_config=None, lora_config=None, kv_transfer_config=None, use_v2_model_runner=False,
    )  # fmt: skip


def violate(config, violation):
    *owners, attribute = violation.path.split(".")
    for owner in owners:
        config = getattr(config, owner)
    setattr(config, attribute, violation.value)


def test_the_proven_engine_is_accepted():
    strict.refuse_unproven(proven_config())


@pytest.mark.parametrize("violation", VIOLATIONS, ids=lambda violation: violation.name)
def test_one_violation_is_refused(violation):
    config = proven_config()
    violate(config, violation)
    with pytest.raises(ValueError, match=f"- {violation.name} is .*; accepted is .*, because") as raised:
        strict.refuse_unproven(config)
    assert str(raised.value).count("\n  - ") == 1


def test_all_violations_are_in_one_error():
    config = proven_config()
    config.additional_config = {}
    for violation in VIOLATIONS:
        violate(config, violation)
    with pytest.raises(ValueError, match="outside the bridge's contract") as raised:
        strict.refuse_unproven(config)
    lines = str(raised.value).split("\n  - ")[1:]
    assert len(lines) == len(VIOLATIONS) + 1
    assert f"additional_config lacks '{KEY}'" in lines[0]
    assert [line.split(" is ")[0] for line in lines[1:]] == [violation.name for violation in VIOLATIONS]


@pytest.mark.parametrize("digest", [None, "0" * 16])
def test_an_engine_that_was_not_configured_by_this_code_is_refused(digest):
    # None: the key was given, but no plugin completed the arguments.
    config = proven_config()
    config.additional_config = {KEY: {} if digest is None else {"digest": digest}}
    with pytest.raises(ValueError, match=f"configured by code with digest {digest!r}") as raised:
        strict.refuse_unproven(config)
    assert package_digest() in str(raised.value)


def test_attention_pages_end_with_a_key_tile():
    assert [strict.page_problem(size) for size in (128, 1152)] == ["", ""]
    assert "attention pages hold 544 tokens" in strict.page_problem(544)


# ---- what the plugin takes from vLLM, read from the installed sources ----


def source_of(module):
    """Parse an installed module of vLLM without importing it; None if there is none."""
    path = Path(VLLM.submodule_search_locations[0]).parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text()) if file.exists() else None


def imported(tree):
    """Return name -> (module, name there) of every `from vllm... import`."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm" and node.level == 0
        for alias in node.names
    }


def defined(module, name):
    """Return (tree, node) of the class or function behind a name, followed through imports; None if it is neither."""
    tree = source_of(module)
    if tree is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return tree, node
    again = imported(tree).get(name)
    return defined(*again) if again else None


def method_of(module, name, method):
    """Return a method from a class of vLLM or the nearest of its bases that has it."""
    tree, node = defined(module, name)
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == method:
            return part
    for base in map(base_name, node.bases):
        local = any(isinstance(other, ast.ClassDef) and other.name == base for other in tree.body)
        place = (module_of(tree, module, name), base) if local else imported(tree).get(base)
        found = method_of(*place, method) if place and defined(*place) else None
        if found:
            return found
    return None


def module_of(tree, module, name):
    """Return the module that defines `name`, which `module` may only pass on."""
    here = any(isinstance(node, ast.ClassDef) and node.name == name for node in source_of(module).body)
    return module if here else module_of(tree, *imported(source_of(module))[name])


def base_name(base):
    return base_name(base.value) if isinstance(base, ast.Subscript) else getattr(base, "id", "")


def parameters(method):
    arguments = method.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def subclasses():
    """Yield (class of the plugin, (module, name) of a base in vLLM)."""
    for file in sorted(PLUGIN.glob("*.py")):
        tree = ast.parse(file.read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                yield from (
                    (node, imported(tree)[name]) for name in map(base_name, node.bases) if name in imported(tree)
                )


@needs_vllm
def test_every_name_that_the_plugin_imports_exists():
    wanted = {place for file in PLUGIN.glob("*.py") for place in imported(ast.parse(file.read_text())).values()}
    assert len(wanted) > 15
    missing = [place for place in wanted if defined(*place) is None and source_of(".".join(place)) is None]
    assert missing == []


OVERRIDDEN = {
    "ReplayBuilder": {"build", "update_block_table"},
    "ReplayBackend": {"get_builder_cls"},
    "PagedBuilder": {"__init__", "build", "update_block_table", "use_cascade_attention"},
    "PagedImpl": {"__init__", "forward"},
    "PagedBackend": {"get_name", "get_impl_cls", "get_builder_cls", "get_supported_kernel_block_sizes"},
    "BridgeMamba": {"get_state_shape", "get_state_dtype", "mamba_type", "get_attn_backend"},
    "BridgedNemotronH": {"get_mamba_state_shape_from_config", "get_mamba_state_copy_func"},
    "RequestState": {"__init__", "validate_params", "is_argmax_invariant", "apply", "update_state"},
    "BridgeSampler": {"forward", "compute_logprobs", "gather_logprobs"},
    "BridgeWorker": {"init_device", "initialize_from_config", "compile_or_warm_up_model"},
}  # fmt: skip
"""Methods of vLLM that the plugin replaces by subclassing: vLLM must still have and call them."""


@needs_vllm
def test_overridden_methods_exist_and_take_what_vllm_passes():
    found: dict[str, set[str]] = {}
    problems = []
    for ours, base in subclasses():
        for method in (part for part in ours.body if isinstance(part, ast.FunctionDef)):
            theirs = method_of(*base, method.name)
            # A constructor that nobody but this package calls may take other arguments.
            if theirs is None or (method.name == "__init__" and method.name not in OVERRIDDEN[ours.name]):
                continue
            found.setdefault(ours.name, set()).add(method.name)
            lacking = [name for name in parameters(theirs) if name not in parameters(method)]
            if lacking and not (method.args.kwarg or method.args.vararg):
                problems.append(f"{ours.name}.{method.name} lacks {', '.join(lacking)} of {'.'.join(base)}")
    assert problems == []
    assert found == OVERRIDDEN


# ---- inside vLLM: its import changes process-wide settings, so it happens in a process of its own ----


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return child_tests.run(INSIDE, tmp_path_factory.mktemp("vllm"), {"VLLM_LOGGING_LEVEL": "ERROR"})


@needs_vllm
@pytest.mark.parametrize("name", child_tests.names(INSIDE))
def test_inside_vllm(request, name):
    child_tests.check(request.getfixturevalue("report")[name])
