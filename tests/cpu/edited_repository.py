# SPDX-License-Identifier: Apache-2.0
"""Faulty repositories for tests: a tiny checkpoint with something changed."""

import dataclasses
import json

from vllm_forward_bridge.checkpoint import open_repository, write_repository
from vllm_forward_bridge.checkpoint.repository import INDEX_FILE


def edit_repository(source, target, *, tensors=None, config=None, quant=None):
    """Copy a repository with changes.

    Args:
        source: a good repository.
        target: folder to create.
        tensors: name -> tensor to store instead or in addition, or None to leave it out.
        config: function that changes config.json's object.
        quant: function that changes hf_quant_config.json's object.
    """
    good, changes = open_repository(source), tensors or {}
    specs, stored = [], {}
    for name in [*good.table, *(name for name in changes if name not in good.table)]:
        tensor = changes.get(name, good.read(name) if name in good.table else None)
        if tensor is not None:
            shard = good.table[name].shard if name in good.table else next(iter(good.headers))
            stored[name] = tensor
            specs.append(dataclasses.replace(next(iter(good.table.values())), name=name, dtype=tensor.dtype,
                                             shape=tuple(tensor.shape), shard=shard))  # fmt: skip
    files = {str(f): (source / f).read_bytes() for f in good.other_files() if str(f) != INDEX_FILE}
    for file_name, change in (("config.json", config), ("hf_quant_config.json", quant)):
        if change:
            content = json.loads(files[file_name])
            files[file_name] = json.dumps(change(content) or content)
    if quant:
        # The faults here are those of one file; agreement of the two has a test of its own.
        content = json.loads(files["config.json"])
        content.pop("quantization_config", None)
        files["config.json"] = json.dumps(content)
    write_repository(target, files, specs, stored.__getitem__)
    return target
