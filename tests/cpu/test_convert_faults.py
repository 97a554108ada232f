# SPDX-License-Identifier: Apache-2.0
"""Each public fault of this family's checkpoints that a converter can meet, with its smallest input."""

import json
import pickle
import shutil

import pytest
import torch
from edited_repository import edit_repository

from vllm_forward_bridge.checkpoint import convert_to_hf, convert_to_megatron, make_tiny_checkpoint, open_repository
from vllm_forward_bridge.checkpoint.compare import compare
from vllm_forward_bridge.checkpoint.tiny_config import FAMILIES

LAYER = "backbone.layers.1.mixer"
EXPERT = f"{LAYER}.experts.3.up_proj"
IN_PROJ = "backbone.layers.0.mixer.in_proj"
BIAS = f"{LAYER}.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults")
    for family in FAMILIES:
        make_tiny_checkpoint(path / family, family=family)
    return path


def refusal(source, tmp_path):
    """Return the message of a refused conversion; nothing may be left behind."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError) as error:
        convert_to_megatron(source, tmp_path / "megatron")
    assert sorted(p for p in tmp_path.iterdir() if not p.name.endswith(".partial")) == before
    return str(error.value)


def e4m3(source, name, at, byte):
    """Return a tensor of e4m3 bytes with one byte replaced."""
    raw = open_repository(source).fetch(name).view(torch.uint8).clone()
    raw[at] = byte
    return raw.view(torch.float8_e4m3fn)


# Tensors and scalars that are missing, extra or of another type -------------------------------------------------------


def test_quantised_head_under_an_excluding_pattern(folder, tmp_path):
    """Loaders that obey the exclude list then meet lm_head.weight_scale (vllm#44081, #45102)."""

    def exclude(quant):
        quant["quantization"]["exclude_modules"].append("lm_head*")
        del quant["quantization"]["quantized_layers"]["lm_head"]

    message = refusal(edit_repository(folder / "lightning", tmp_path / "hf", quant=exclude), tmp_path)
    assert "model-00001-of-00007.safetensors: lm_head.weight is U8 [1280, 96]; BF16 [1280, 192] is expected" in message
    assert "the quantisation map says BF16 (exclude_modules has 'lm_head*'); correct hf_quant_config.json" in message
    assert "lm_head.weight_scale (F8_E4M3 [1280, 12]) is not expected: lm_head has no such scale" in message


def test_mtp_that_no_pattern_excludes(folder, tmp_path):
    """One algorithm for all linears and no exclusion of MTP's BF16 weights (vllm#38832, #43342)."""

    def forget(quant):
        quant["quantization"]["exclude_modules"].remove("mtp*")
        layers = quant["quantization"]["quantized_layers"]
        layers["mtp.layers.0.eh_proj"] = {"quant_algo": "FP8"}

    message = refusal(edit_repository(folder / "lightning", tmp_path / "hf", quant=forget), tmp_path)
    assert "mtp.layers.0.eh_proj.weight is BF16 [192, 384]; F8_E4M3 [192, 384] is expected" in message
    assert "the quantisation map says FP8; exclude mtp.layers.0.eh_proj or quantise it" in message
    assert "mtp.layers.0.eh_proj.weight_scale: missing; F32 [] or [1] is expected" in message


def test_mtp_depth_that_the_tensors_do_not_have(folder, tmp_path):
    """A repeated MTP layer exported as two depths (Megatron-Bridge#5946)."""
    edited = edit_repository(
        folder / "lightning", tmp_path / "hf", config=lambda c: c.update(num_nextn_predict_layers=2)
    )
    message = refusal(edited, tmp_path)
    assert (
        "mtp.layers.2.eh_proj.weight: missing; BF16 [192, 384] is expected: config.json announces MTP layers" in message
    )


def test_mtp_that_the_config_does_not_announce(folder, tmp_path):
    edited = edit_repository(
        folder / "lightning", tmp_path / "hf", config=lambda c: c.update(num_nextn_predict_layers=0)
    )
    message = refusal(edited, tmp_path)
    assert (
        "mtp.layers.0.eh_proj.weight (BF16 [192, 384]) is not expected: config.json announces no such MTP layer"
        in message
    )


def test_correction_bias_in_bf16(folder, tmp_path):
    """Narrower than F32 the biases of a layer fall together (Automodel#2553, RL#3539)."""
    bias = open_repository(folder / "lightning").fetch(BIAS).bfloat16()
    message = refusal(edit_repository(folder / "lightning", tmp_path / "hf", tensors={BIAS: bias}), tmp_path)
    assert f"safetensors: {BIAS} is BF16 [8]; F32 [8] is expected: narrower than F32 the biases" in message


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_2"])
def test_missing_scale(folder, tmp_path, leaf):
    name = f"{EXPERT}.{leaf}"
    message = refusal(edit_repository(folder / "lightning", tmp_path / "hf", tensors={name: None}), tmp_path)
    assert f"{name}: missing" in message
    assert f"the quantisation map says {EXPERT} is quantised; export its scale or correct the map" in message


def test_missing_input_scale_of_w4a4(folder, tmp_path):
    name = f"{EXPERT}.input_scale"
    message = refusal(edit_repository(folder / "nano_nvfp4", tmp_path / "hf", tensors={name: None}), tmp_path)
    assert f"{name}: missing; F32 [] or [1] is expected" in message


def test_input_scale_on_w4a16(folder, tmp_path):
    edited = edit_repository(
        folder / "lightning", tmp_path / "hf", tensors={f"{EXPERT}.input_scale": torch.tensor(1.0)}
    )
    assert f"{EXPERT} has no such scale, because its format is W4A16_NVFP4" in refusal(edited, tmp_path)


def test_reciprocal_scale_of_another_exporter(folder, tmp_path):
    """compressed-tensors names its reciprocal scale differently; taking it for ModelOpt's is wrong by its square."""
    scale = open_repository(folder / "lightning").fetch(f"{EXPERT}.weight_scale_2")
    tensors = {f"{EXPERT}.weight_scale_2": None, f"{EXPERT}.weight_global_scale": 1 / scale}
    message = refusal(edit_repository(folder / "lightning", tmp_path / "hf", tensors=tensors), tmp_path)
    assert f"{EXPERT}.weight_global_scale (F32 []) is not expected" in message
    assert f"{EXPERT}.weight_scale_2: missing" in message


def test_packed_experts(folder, tmp_path):
    """All experts in one 3-D tensor, as some exporters write them (Model-Optimizer#2334)."""
    names = {f"{LAYER}.experts.{e}.up_proj.weight": None for e in range(8)}
    packed = {f"{LAYER}.experts.up_proj": torch.zeros(8, 128, 96, dtype=torch.uint8)}
    message = refusal(edit_repository(folder / "lightning", tmp_path / "hf", tensors={**names, **packed}), tmp_path)
    assert f"{LAYER}.experts.up_proj (U8 [8, 128, 96]) is not expected: no layer of the configuration has it" in message
    assert f"{LAYER}.experts.7.up_proj.weight: missing; U8 [128, 96] is expected" in message


def test_kv_scales_without_a_kv_format(folder, tmp_path):
    edited = edit_repository(
        folder / "lightning", tmp_path / "hf", quant=lambda q: q["quantization"].update(kv_cache_quant_algo=None)
    )
    message = refusal(edited, tmp_path)
    assert "k_proj.k_scale (F32 [1]) is not expected: kv_cache_quant_algo is not FP8" in message


def test_missing_kv_scales_are_one(folder, tmp_path):
    """A repository may declare FP8 K and V and store no scales: loaders then take 1, and so does the checkpoint."""
    names = [f"backbone.layers.3.mixer.{letter}_proj.{letter}_scale" for letter in "kv"]
    edited = edit_repository(folder / "lightning", tmp_path / "hf", tensors=dict.fromkeys(names))
    assert convert_to_megatron(edited, tmp_path / "megatron").tensors == 135


@pytest.mark.parametrize("factor", [2, 0.5])
def test_d_inner_by_expand(folder, tmp_path, factor):
    """The product expand x hidden_size is not the scan's width; tensors cut that way have other shapes."""
    rows = int(2 * 192 * factor)
    tensors = {
        "backbone.layers.0.mixer.out_proj.weight": torch.zeros(192, rows, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "backbone.layers.0.mixer.conv1d.bias": torch.zeros(rows + 256, dtype=torch.bfloat16),
    }
    message = refusal(edit_repository(folder / "lightning", tmp_path / "hf", tensors=tensors), tmp_path)
    assert f"out_proj.weight is F8_E4M3 [192, {rows}]; F8_E4M3 [192, 512] is expected" in message
    assert f"conv1d.bias is BF16 [{rows + 256}]; BF16 [768] is expected" in message
    assert message.count("mamba_num_heads x mamba_head_dim = 512 channels, not expand x hidden_size") == 2


def test_all_faults_of_a_repository_come_at_once(folder, tmp_path):
    tensors = {f"{EXPERT}.weight_scale": None, BIAS: None, "stray": torch.zeros(1)}
    message = refusal(edit_repository(folder / "lightning", tmp_path / "hf", tensors=tensors), tmp_path)
    assert len(message.splitlines()) == 4


def test_old_and_new_files_of_one_repository(folder, tmp_path):
    """A loader that reads the KV format from hf_quant_config.json alone finds none here (sglang#27906)."""
    edited = edit_repository(folder / "lightning", tmp_path / "hf")
    (edited / "hf_quant_config.json").unlink()
    assert open_repository(edited).config == open_repository(folder / "lightning").config
    assert convert_to_megatron(edited, tmp_path / "megatron").tensors == 135


def test_mixed_formats_in_one_qkv(folder, tmp_path):
    def mix(quant):
        quant["quantization"]["exclude_modules"].remove("backbone.layers.3.mixer.k_proj")
        quant["quantization"]["quantized_layers"]["backbone.layers.3.mixer.k_proj"] = {"quant_algo": "FP8"}

    tensors = {
        "backbone.layers.3.mixer.k_proj.weight": torch.zeros(256, 192).to(torch.float8_e4m3fn),
        "backbone.layers.3.mixer.k_proj.weight_scale": torch.tensor(0.01),
        "backbone.layers.3.mixer.k_proj.input_scale": torch.tensor([0.01]),
    }
    message = refusal(edit_repository(folder / "lightning", tmp_path / "hf", tensors=tensors, quant=mix), tmp_path)
    assert "backbone.layers.3.mixer.k_proj FP8" in message
    assert "Megatron fuses them into one linear_qkv; give all three one format" in message


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 0.0])
@pytest.mark.parametrize(
    "name", [f"{IN_PROJ}.weight_scale", f"{IN_PROJ}.input_scale", "backbone.layers.3.mixer.k_proj.k_scale"]
)
def test_scalar_scale_that_is_not_positive(folder, tmp_path, name, value):
    shape = open_repository(folder / "lightning").table[name].shape
    edited = edit_repository(folder / "lightning", tmp_path / "hf", tensors={name: torch.full(shape, value)})
    message = refusal(edited, tmp_path)
    assert f"safetensors: {name} is {value}; a finite positive scale is expected: export it again" in message


@pytest.mark.parametrize(
    ("name", "byte", "text"),
    [
        (f"{EXPERT}.weight_scale", 0x7F, "1 e4m3 values like nan; finite, not negative block scales"),
        (f"{EXPERT}.weight_scale", 0xB8, "1 e4m3 values like -1.0; finite, not negative block scales"),
        (f"{IN_PROJ}.weight", 0xFF, "1 e4m3 values like nan; finite codes"),
    ],
)
def test_e4m3_nan_or_negative_block_scale(folder, tmp_path, name, byte, text):
    changed = e4m3(folder / "lightning", name, (1, 1), byte)
    message = refusal(edit_repository(folder / "lightning", tmp_path / "hf", tensors={name: changed}), tmp_path)
    assert f".safetensors: {name} has {text}" in message
    assert "fetch or export it again" in message


@pytest.mark.parametrize(
    "change", [lambda s: s * s, torch.ones_like, lambda s: 1 / s], ids=["applied twice", "not applied", "reciprocal"]
)
@pytest.mark.parametrize(("leaf", "kind"), [("weight_scale_2", "NVFP4"), ("weight_scale", "FP8")])
def test_scale_of_the_wrong_size(folder, tmp_path, change, leaf, kind):
    """Scales that are multiplied twice or not at all give weights of absurd size (ROCmFPX#85, #87)."""
    repository = open_repository(folder / "lightning")
    wanted = [n for n, s in repository.table.items() if n.endswith(f".{leaf}") and s.num_bytes == 4]
    tensors = {name: change(repository.fetch(name)) for name in wanted}
    message = refusal(edit_repository(folder / "lightning", tmp_path / "hf", tensors=tensors), tmp_path)
    assert f"{leaf}: half of the {len(wanted)} matrices" in message, kind
    assert "the scale was applied twice, not at all, or is its reciprocal" in message


# Faults that only a comparison can see --------------------------------------------------------------------------------


def differences(folder, tmp_path, tensors):
    edited = edit_repository(folder / "lightning", tmp_path / "hf", tensors=tensors)
    result = compare(open_repository(folder / "lightning"), open_repository(edited))
    return {d.name: (d.kind, d.text) for d in result.differences if d.kind != "file"}


def test_nibble_swap_is_named(folder, tmp_path):
    name = f"{EXPERT}.weight"
    codes = open_repository(folder / "lightning").fetch(name)
    found = differences(folder, tmp_path, {name: (codes << 4) | (codes >> 4)})
    assert found == {
        name: ("bytes", "every byte has its two codes swapped; the low nibble is the first of the two elements")
    }


def test_minus_zero_lost_is_named(folder, tmp_path):
    name = f"{EXPERT}.weight"
    codes = open_repository(folder / "lightning").fetch(name)
    minus_zero = int((codes & 15 == 8).sum() + (codes >> 4 == 8).sum())
    changed = torch.where(codes & 15 == 8, codes & 0xF0, codes)
    changed = torch.where(changed >> 4 == 8, changed & 0x0F, changed)
    found = differences(folder, tmp_path, {name: changed})
    assert minus_zero > 0
    assert found == {name: ("bytes", f"{minus_zero} of 24576 elements differ in the sign of zero only")}


def test_rank_of_a_scalar_is_named(folder, tmp_path):
    names = {f"{IN_PROJ}.weight_scale": (1,), f"{IN_PROJ}.input_scale": ()}
    repository = open_repository(folder / "lightning")
    found = differences(folder, tmp_path, {n: repository.fetch(n).reshape(shape) for n, shape in names.items()})
    assert set(found) == set(names)
    assert all(
        kind == "shape" and "with equal bytes: the rank of a scalar differs" in text for kind, text in found.values()
    )
    # Both ranks are valid, so the conversion takes them, and gives them back.
    convert_to_megatron(tmp_path / "hf", tmp_path / "megatron")


def test_changed_values_are_named(folder, tmp_path):
    repository = open_repository(folder / "lightning")
    norm = repository.fetch("backbone.norm_f.weight").clone()
    norm[7] = 3.0
    scale = repository.fetch("lm_head.weight_scale_2") * 2
    found = differences(folder, tmp_path, {"backbone.norm_f.weight": norm, "lm_head.weight_scale_2": scale})
    assert found["backbone.norm_f.weight"][1].startswith("1 of 192 elements differ, most at [7]: ")
    assert found["backbone.norm_f.weight"][1].endswith("3.0 on the right")
    assert found["lm_head.weight_scale_2"][1].startswith("1 of 1 elements differ, most at []: ")


def test_missing_and_extra_and_other_files_are_named(folder, tmp_path):
    edited = edit_repository(folder / "lightning", tmp_path / "hf")
    (edited / "generation_config.json").write_text("{}")
    (edited / "new.txt").write_text("x")
    (edited / "tokenizer.json").unlink()
    result = compare(open_repository(folder / "lightning"), open_repository(edited))
    assert {(d.name, d.text) for d in result.differences} == {
        ("generation_config.json", "has other contents"), ("new.txt", "is only on the right"),
        ("tokenizer.json", "is only on the left"),
    }  # fmt: skip
    result = compare(open_repository(folder / "lightning"), open_repository(folder / "lightning_bf16"))
    kinds = {
        kind: [d.name for d in result.differences if d.kind == kind] for kind in ("missing", "dtype", "unexpected")
    }
    assert "lm_head.weight_scale" in kinds["missing"]
    assert "lm_head.weight" in kinds["dtype"]
    assert kinds["unexpected"] == []


# Damaged Megatron checkpoints -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def megatron(folder):
    convert_to_megatron(folder / "lightning", folder / "megatron")
    return folder / "megatron"


def damaged(megatron, tmp_path, name, change):
    """Return the message of an export after `change` of a file's bytes."""
    shutil.copytree(megatron, tmp_path / "damaged")
    path = tmp_path / "damaged" / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError) as error:
        convert_to_hf(tmp_path / "damaged", tmp_path / "exported")
    assert str(path) in str(error.value)
    return str(error.value)


def half(raw):
    return raw[: len(raw) // 2]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (half, "bytes that cannot be unpickled (UnpicklingError: pickle data was truncated)"),
        (lambda raw: b"", "0 bytes that cannot be unpickled (EOFError: Ran out of input)"),
        (lambda raw: b"hello", "5 bytes that cannot be unpickled"),
        (lambda raw: pickle.dumps([1]), "holds a list; the Metadata of a torch_dist checkpoint is needed"),
    ],
    ids=["half", "empty", "text", "a list"],
)
def test_damaged_metadata_is_named(megatron, tmp_path, change, text):
    message = damaged(megatron, tmp_path, "release/.metadata", change)
    assert text in message
    assert message.endswith("copy it again")


def test_damaged_block_is_named(megatron, tmp_path):
    message = damaged(megatron, tmp_path, "release/__1_0.distcp", lambda raw: raw.replace(b"data.pkl", b"data.xyz"))
    assert "no tensor at byte 0 (KeyError: 'data.pkl'); a file as torch.save writes it is needed" in message


def with_tensors(change):
    """Return a change of tensors.json by its object."""

    def changed(raw):
        stored = json.loads(raw)
        change(stored)
        return json.dumps(stored).encode()

    return changed


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (half, ["tensors.json is not JSON (", "a whole file is needed: fetch or copy it again"]),
        (lambda raw: b"{}", ["headers is None; an object is needed", "tensors is None; a list is needed"]),
        (lambda raw: b"[]", ["tensors.json holds JSON of type list; an object is needed"]),
        (with_tensors(lambda t: t["tensors"][0].update(dtype="F99")), ["'dtype': 'F99'", "a dtype of BF16, F32"]),
        (with_tensors(lambda t: t["tensors"][0].update(shape=5)), ["'shape': 5", "a shape"]),
        (with_tensors(lambda t: t["headers"].popitem()), ["and a shard of headers are needed"]),
        (with_tensors(lambda t: t.update(tensors=[])), ["lm_head.weight: missing"]),
    ],
    ids=["half", "empty object", "list", "dtype", "shape", "shard", "no tensors"],
)
def test_damaged_table_is_named(megatron, tmp_path, change, texts):
    message = damaged(megatron, tmp_path, "hf/tensors.json", change)
    assert all(text in message for text in texts)
