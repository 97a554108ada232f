# SPDX-License-Identifier: Apache-2.0
"""The converted checkpoint under Megatron's own loader and saver, in other layouts than it was written in."""

import shutil

import pytest
import torch

from megatron.vllm_forward.cpu_device import on_cpu_if_needed
from vllm_forward_bridge.checkpoint import convert_to_hf, convert_to_megatron, make_tiny_checkpoint, open_repository
from vllm_forward_bridge.checkpoint.compare import changed_masters, compare
from vllm_forward_bridge.checkpoint.megatron_checkpoint import MegatronCheckpoint
from vllm_forward_bridge.checkpoint.megatron_keys import CARRIED
from vllm_forward_bridge.checkpoint.torch_dist_reader import TorchDistReader
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.quantization import Nvfp4Bytes, requantize_nvfp4

dist_checkpointing = pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is not installed")
ShardedTensor = dist_checkpointing.ShardedTensor

# Dim that Megatron splits over TP, by the end of the key; experts are split over EP in dim 0.
COLUMNS = ("out_proj.weight", "linear_proj.weight", "shared_experts.linear_fc2.weight")


@pytest.fixture(scope="module", autouse=True)
def gloo(tmp_path_factory):
    """Give Megatron the one-process group that its checkpoint functions ask for."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("gloo") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("megatron")
    make_tiny_checkpoint(path / "hf")
    convert_to_megatron(path / "hf", path / "megatron")
    return path


@pytest.fixture(scope="module")
def whole(folder):
    """Return every tensor of the checkpoint, read by our own reader."""
    reader = TorchDistReader(folder / "megatron" / "release")
    return {key: reader.read(key, (0,) * len(shape), shape) for key, (_, shape) in reader.table().items()}


def shards(key, tensor, tp, ep):
    """Return [(dim, rank, ranks)] of one tensor's shards in a layout."""
    if ".experts.experts." in key:
        return [(0, rank, ep) for rank in range(ep)]
    if (
        key.startswith(CARRIED)
        or tensor.dim() == 0
        or tensor.shape == (1,)
        or "norm" in key
        and "mixer.norm" not in key
    ):
        return [(0, 0, 1)]
    dim = 1 if key.endswith(COLUMNS) else 0
    return [(dim, rank, tp) for rank in range(tp)]


def sharded(key, tensor, part, data=True):
    dim, rank, ranks = part
    piece = tensor.chunk(ranks, dim)[rank].contiguous() if tensor.dim() else tensor
    offsets = [] if ranks == 1 else [part]
    return ShardedTensor.from_rank_offsets(key, piece if data else torch.empty_like(piece), *offsets), piece


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 4), (2, 8)])
def test_megatron_loads_every_shard_of_other_layouts(folder, whole, tp, ep):
    wanted, request = {}, {}
    for key, tensor in whole.items():
        for part in shards(key, tensor, tp, ep):
            name = f"{key}@{part}"
            request[name], wanted[name] = sharded(key, tensor, part, data=False)
    assert len(request) > len(whole) or (tp, ep) == (1, 1)
    loaded = dist_checkpointing.load(request, str(folder / "megatron" / "release"), validate_access_integrity=False)
    for name, want in wanted.items():
        assert_same_bits(loaded[name], want, name)


def test_megatron_loads_single_experts_as_its_sequential_experts_do(folder, whole):
    key = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    request = {
        str(e): ShardedTensor.from_rank_offsets(
            key, torch.empty(128, 192, dtype=torch.bfloat16), (0, e, 8), prepend_axis_num=1
        )
        for e in range(8)
    }
    loaded = dist_checkpointing.load(request, str(folder / "megatron" / "release"), validate_access_integrity=False)
    for expert in range(8):
        assert_same_bits(loaded[str(expert)], whole[key][expert], f"expert {expert}")


def test_megatron_pipeline_stage_loads_its_layers_alone(folder, whole):
    request = {
        key: sharded(key, t, (0, 0, 1), data=False)[0] for key, t in whole.items() if key.startswith("decoder.layers.3")
    }
    loaded = dist_checkpointing.load(request, str(folder / "megatron" / "release"), validate_access_integrity=False)
    assert len(request) == 5
    for key in request:
        assert_same_bits(loaded[key], whole[key], key)


def test_megatron_padded_vocabulary_loads(folder, whole):
    key = "embedding.word_embeddings.weight"
    padded = torch.empty(1408, 192, dtype=torch.bfloat16)
    request = {"e": ShardedTensor.from_rank_offsets(key, padded, allow_shape_mismatch=True)}
    loaded = dist_checkpointing.load(request, str(folder / "megatron" / "release"), validate_access_integrity=False)
    assert_same_bits(loaded["e"][:1280], whole[key], "rows of the vocabulary")


def test_megatron_common_state_names_the_model(folder):
    state = dist_checkpointing.load_common_state_dict(str(folder / "megatron" / "release"))
    assert (state["checkpoint_version"], state["iteration"]) == (3.0, 0)
    assert (state["args"].num_layers, state["args"].hybrid_layer_pattern, state["args"].hidden_size) == (
        5,
        "MEM*E",
        192,
    )


def test_megatron_training_finds_the_release(folder):
    checkpointing = pytest.importorskip("megatron.training.checkpointing", reason="megatron.training is not installed")
    root = str(folder / "megatron")
    assert checkpointing.checkpoint_exists(root)
    name = checkpointing.find_checkpoint_rank_0(root, 0, release=True)
    assert name == f"{root}/release"
    assert checkpointing._get_checkpoint_format(name, None) == "torch_dist"


def save(folder, tensors, tp, ep):
    """Save with Megatron's own writer, all ranks' shards from this process."""
    folder.mkdir(parents=True)
    state = {
        f"{key}@{part}": sharded(key, tensor, part)[0]
        for key, tensor in tensors.items()
        for part in shards(key, tensor, tp, ep)
    }
    with on_cpu_if_needed():
        dist_checkpointing.save({"model": state, "iteration": 7}, str(folder), validate_access_integrity=False)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("7")


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 4)])
def test_export_of_what_megatron_saved_is_byte_equal(folder, whole, tmp_path, tp, ep):
    run = tmp_path / "run"
    save(run / "iter_0000007", whole, tp, ep)
    shutil.copytree(folder / "megatron" / "hf", run / "hf")
    convert_to_hf(run, tmp_path / "back")
    result = compare(open_repository(folder / "hf"), open_repository(tmp_path / "back"))
    assert result.same, result.differences
    assert result.tensors == 182


def trained(whole):
    """Return the tensors after a step that changed one expert, with its bytes requantised."""
    after = {key: tensor.clone() for key, tensor in whole.items() if not key.startswith(CARRIED)}
    base = "decoder.layers.1.mlp.experts.experts.linear_fc1"
    master = after[f"{base}.weight"]
    master[5, 7, 40:44] += 0.05
    old = Nvfp4Bytes(
        after[f"{base}.nvfp4_codes"], after[f"{base}.nvfp4_block_scale"].view(torch.float8_e4m3fn),
        after[f"{base}.nvfp4_global_scale"],
    )  # fmt: skip
    new, report = requantize_nvfp4(master, old, four_over_six=True)
    assert report.changed_blocks == 1
    after[f"{base}.nvfp4_codes"] = new.codes
    after[f"{base}.nvfp4_block_scale"] = new.block_scale.view(torch.uint8)
    return after


def test_export_of_a_trained_checkpoint_takes_its_bytes_and_the_base_for_the_rest(folder, whole, tmp_path):
    run = tmp_path / "run"
    save(run / "iter_0000007", trained(whole), 1, 2)
    with pytest.raises(
        ValueError, match="has no hf/tensors.json.*name the checkpoint that the run started from as base"
    ):
        convert_to_hf(run, tmp_path / "back")
    convert_to_hf(run, tmp_path / "back", base=folder / "megatron")
    original, exported = open_repository(folder / "hf"), open_repository(tmp_path / "back")
    result = compare(original, exported)
    changed = {difference.name: difference.text for difference in result.differences}
    module = "backbone.layers.1.mixer.experts.5.up_proj"
    assert set(changed) <= {f"{module}.weight", f"{module}.weight_scale"}
    assert f"{module}.weight" in changed
    assert all(" elements differ" in text for text in changed.values())
    masters = list(changed_masters(MegatronCheckpoint(run, folder / "megatron"), original))
    assert [(m.name, m.text[:9]) for m in masters] == [(f"{module}.weight", "4 of 2457")]


def test_export_finds_carried_tensors_in_the_release_of_the_same_root(folder, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder / "megatron", run)
    save(run / "iter_0000007", {key: t for key, t in whole.items() if not key.startswith(CARRIED)}, 1, 1)
    convert_to_hf(run, tmp_path / "back")
    assert compare(open_repository(folder / "hf"), open_repository(tmp_path / "back")).same


@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        ("output_layer.nvfp4_", "output_layer: has a master but no codes bytes; an export takes the bytes"),
        (
            "decoder.layers.0.mixer.in_proj.fp8_codes.",
            "decoder.layers.0.mixer.in_proj: has a master but no codes bytes",
        ),
        ("carried.mtp", "carried.mtp.layers.0.eh_proj.weight: missing; training does not save it"),
        (
            "decoder.final_norm",
            "decoder.final_norm.weight: missing; torch.bfloat16 [192] is expected for backbone.norm_f",
        ),
    ],
)
def test_export_names_what_a_checkpoint_lacks(folder, whole, tmp_path, dropped, message):
    run = tmp_path / "run"
    save(run / "iter_0000007", {key: t for key, t in whole.items() if not key.startswith(dropped)}, 1, 1)
    shutil.copytree(folder / "megatron" / "hf", run / "hf")
    with pytest.raises(ValueError) as error:
        convert_to_hf(run, tmp_path / "back")
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == [run]


def test_export_names_another_model_and_a_dtype(folder, whole, tmp_path):
    run = tmp_path / "run"
    other = dict(whole)
    other["decoder.final_norm.weight"] = torch.ones(96, dtype=torch.bfloat16)
    other["decoder.layers.1.mlp.router.expert_bias"] = whole["decoder.layers.1.mlp.router.expert_bias"].bfloat16()
    save(run / "iter_0000007", other, 1, 1)
    shutil.copytree(folder / "megatron" / "hf", run / "hf")
    with pytest.raises(ValueError) as error:
        convert_to_hf(run, tmp_path / "back")
    assert "decoder.final_norm.weight is torch.bfloat16 [96]; torch.bfloat16 [192] is expected" in str(error.value)
    assert "router.expert_bias is torch.bfloat16 [8]; torch.float32 [8] is expected" in str(error.value)


def test_export_reads_padded_vocabulary_rows(folder, whole, tmp_path):
    run, padded = tmp_path / "run", dict(whole)
    for key in (
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "output_layer.nvfp4_codes",
        "output_layer.nvfp4_block_scale",
    ):
        rows = torch.full((128, whole[key].shape[1]), 7).to(whole[key].dtype)
        padded[key] = torch.cat((whole[key], rows))
    save(run / "iter_0000007", padded, 2, 1)
    shutil.copytree(folder / "megatron" / "hf", run / "hf")
    convert_to_hf(run, tmp_path / "back")
    assert compare(open_repository(folder / "hf"), open_repository(tmp_path / "back")).same


def test_export_names_a_truncated_file_and_a_missing_tracker(folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder / "megatron", run)
    file = run / "release" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-4000])
    with pytest.raises(
        ValueError, match=r"__1_0.distcp: has \d+ bytes, .metadata lists blocks up to \d+; .*copy it again"
    ):
        convert_to_hf(run, tmp_path / "back")
    (run / "latest_checkpointed_iteration.txt").write_text("newest")
    with pytest.raises(ValueError, match="says 'newest'; 'release' or a number is expected"):
        MegatronCheckpoint(run)
    (run / "latest_checkpointed_iteration.txt").write_text("12")
    with pytest.raises(ValueError, match="iter_0000012: latest_checkpointed_iteration.txt names it"):
        MegatronCheckpoint(run)
    (run / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(ValueError, match="has neither .metadata nor latest_checkpointed_iteration.txt"):
        MegatronCheckpoint(run)
