# SPDX-License-Identifier: Apache-2.0
import json
import struct

import pytest
import torch
from edited_repository import edit_repository
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_forward_bridge.checkpoint import TensorSpec, make_tiny_checkpoint, open_repository, write_repository
from vllm_forward_bridge.checkpoint.repository import INDEX_FILE, partial_folder
from vllm_forward_bridge.parity.bits import assert_same_bits

BIAS = "backbone.layers.1.mixer.gate.e_score_correction_bias"
EXPERT = "backbone.layers.1.mixer.experts.3.up_proj"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("repository") / "tiny"
    make_tiny_checkpoint(path)
    return path


@pytest.fixture
def copy(tiny, tmp_path):
    return edit_repository(tiny, tmp_path / "copy")


def fault(path):
    with pytest.raises(ValueError) as error:
        open_repository(path)
    return str(error.value)


def last_shard(path):
    return sorted(path.glob("*.safetensors"))[-1]


def test_repository_reads_as_the_safetensors_package_does(tiny):
    repository = open_repository(tiny)
    assert len(repository.headers) == 7
    for shard in repository.headers:
        with safe_open(tiny / shard, "pt") as file:
            for name in file.keys():
                want = file.get_tensor(name)
                assert_same_bits(repository.read(name).clone(), want, f"mapped {name}")
                assert_same_bits(repository.fetch(name), want, f"fetched {name}")
                assert_same_bits(torch.cat([b.view(torch.uint8) for b in repository.blocks(name)]),
                                 want.reshape(-1).view(torch.uint8), f"blocks of {name}")  # fmt: skip


def test_repository_index_lists_every_tensor_and_the_size(tiny):
    repository, index = open_repository(tiny), json.loads((tiny / INDEX_FILE).read_text())
    assert index["weight_map"] == {name: spec.shard for name, spec in repository.table.items()}
    assert index["metadata"]["total_size"] == sum(spec.num_bytes for spec in repository.table.values())


def test_repository_reads_one_file_without_an_index(tiny, tmp_path):
    good = open_repository(tiny)
    save_file({name: good.fetch(name) for name in good.names()}, tmp_path / "model.safetensors")
    for name in ("config.json", "hf_quant_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    single = open_repository(tmp_path)
    assert_same_bits(single.fetch(BIAS), good.fetch(BIAS), "bias")


def test_repository_reads_a_tensor_that_is_not_aligned(tmp_path, tiny):
    good = open_repository(tiny)
    specs = [TensorSpec(name, s.dtype, s.shape, "model.safetensors") for name, s in good.table.items()]
    files = {name: (tiny / name).read_text() for name in ("config.json", "hf_quant_config.json")}
    write_repository(tmp_path / "one", files, specs, good.fetch)
    path = tmp_path / "one" / "model.safetensors"
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    path.write_bytes(struct.pack("<Q", length + 1) + raw[8 : 8 + length] + b" " + raw[8 + length :])
    assert_same_bits(open_repository(tmp_path / "one").read(BIAS), good.fetch(BIAS), "bias behind an odd header")


def test_repository_truncated_file(copy):
    path = last_shard(copy)
    path.write_bytes(path.read_bytes()[:-10])
    message = fault(copy)
    assert path.name in message
    assert "it is cut off: fetch it" in message
    assert "mtp.layers." in message


def test_repository_truncated_inside_the_header(copy):
    path = last_shard(copy)
    path.write_bytes(path.read_bytes()[:100])
    assert f"{path.name}: 100 bytes cannot hold the header" in fault(copy)


def test_repository_header_that_is_not_json(copy):
    path = last_shard(copy)
    raw = bytearray(path.read_bytes())
    raw[8] = ord("x")
    path.write_bytes(raw)
    assert f"{path.name}: the header is not JSON" in fault(copy)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("[]", "the header is not JSON (of type list, not an object)"),
        ('{"a":5}', "a lacks a valid dtype, shape or data_offsets in the header"),
        ('{"a":{"dtype":"BF16","shape":[-1],"data_offsets":[0,2]}}', "a lacks a valid dtype, shape or data_offsets"),
        ('{"a":{"dtype":"BF16","shape":[1],"data_offsets":[2]}}', "a lacks a valid dtype, shape or data_offsets"),
    ],
)
def test_repository_header_of_other_types(copy, header, text):
    path = last_shard(copy)
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"00")
    assert f"{path.name}: {text}" in fault(copy)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{}", ": has no weight_map; an object with the file of each tensor is needed"),
        ('{"weight_map": [5]}', ": has weight_map [5]; an object with the file of each tensor is needed"),
        ('{"weight_map": {"a": null}}', ": has weight_map {'a': None}; an object with the file of each"),
        ("5", " holds JSON of type int; an object is needed"),
        ('{"weight_map": {', " is not JSON"),
    ],
)
def test_repository_index_without_a_map(copy, content, text):
    (copy / INDEX_FILE).write_text(content)
    assert f"{INDEX_FILE}{text}" in fault(copy)


def test_repository_trailing_bytes(copy):
    path = last_shard(copy)
    path.write_bytes(path.read_bytes() + b"123")
    assert f"{path.name}: 3 bytes after the last tensor" in fault(copy)


def test_repository_offsets_that_do_not_fit_the_shape(copy):
    path = last_shard(copy)
    raw = path.read_bytes()
    assert raw.count(b'"shape":[8,192]') == 1
    path.write_bytes(raw.replace(b'"shape":[8,192]', b'"shape":[9,192]'))
    assert "mtp.layers.1.mixer.gate.weight (BF16 [9, 192]) has bytes" in fault(copy)


def test_repository_shard_missing_from_disk_and_from_the_index(copy):
    path = last_shard(copy)
    path.rename(path.with_name("stray.safetensors"))
    message = fault(copy)
    assert f"{path.name}: listed in {INDEX_FILE} but not there; fetch it" in message
    assert f"stray.safetensors: not in {INDEX_FILE}; its tensors would be lost" in message


def test_repository_tensor_missing_from_the_index_and_from_its_shard(copy):
    index = json.loads((copy / INDEX_FILE).read_text())
    shard = index["weight_map"].pop(BIAS)
    index["weight_map"]["backbone.layers.9.norm.weight"] = shard
    (copy / INDEX_FILE).write_text(json.dumps(index))
    message = fault(copy)
    assert f"{shard}: holds {BIAS}, which {INDEX_FILE} lists nowhere" in message
    assert f"{shard}: lacks backbone.layers.9.norm.weight, which {INDEX_FILE} lists there" in message


def test_repository_tensor_in_two_shards(copy):
    first, second = sorted(copy.glob("*.safetensors"))[:2]
    save_file({"backbone.norm_f.weight": torch.ones(192, dtype=torch.bfloat16)}, second)
    message = fault(copy)
    assert f"{second.name}: backbone.norm_f.weight is also in {first.name}; one of them must go" in message


def test_repository_without_an_index(copy):
    (copy / INDEX_FILE).unlink()
    assert f"{INDEX_FILE}: not there" in fault(copy)


def test_write_repository_refuses_an_existing_folder_and_wrong_tensors(tmp_path):
    spec = TensorSpec("a", torch.float32, (2,), "model.safetensors")
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        write_repository(tmp_path, {}, [spec], lambda _: torch.zeros(2))
    for tensor in (torch.zeros(3), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1)):
        with pytest.raises(ValueError, match=r"F32 \[2\] was announced"):
            write_repository(tmp_path / "new", {}, [spec], lambda _, t=tensor: t)
        assert not (tmp_path / "new").exists()
    write_repository(tmp_path / "new", {}, [spec], lambda _: torch.ones(2))
    assert not partial_folder(tmp_path / "new").exists()


def test_repository_ignores_what_a_download_tool_keeps(copy):
    (copy / ".git" / "lfs").mkdir(parents=True)
    (copy / ".git" / "lfs" / "object").write_text("large")
    (copy / ".cache").mkdir()
    (copy / ".cache" / "state").write_text("x")
    (copy / "folder").mkdir()
    (copy / "folder" / "note.md").write_text("kept")
    names = [str(path) for path in open_repository(copy).other_files()]
    assert "folder/note.md" in names
    assert not [name for name in names if name.startswith((".git/", ".cache/"))]
