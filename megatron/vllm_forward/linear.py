# SPDX-License-Identifier: Apache-2.0
"""Linears with Megatron's constructor whose forward reads deployment bytes and whose backward uses the master."""

# Legend: T tokens, K in features, N out features, g key/value groups, r query heads a group, d head dim, H hidden.

from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vllm_forward.bridge import Bridge
from megatron.vllm_forward.deployed import Matrix, View, empty_parameter
from megatron.vllm_forward.formats import weight_format
from megatron.vllm_forward.sharding import Shard, column_product, row_product
from vllm_forward_bridge.quantization import RequantizeReport


class Linear(Matrix):
    """y_TN = x_TK W^T in the weight format of the deployment, without bias.

    Takes the keywords that Megatron passes to its column- and row-parallel linears. Under tensor parallelism the master
    is Megatron's shard along dim `split` (of each of `sections`), and the bytes are whole.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bridge: Bridge,
        name: str,
        format: str,
        tp_group: Any,
        split: int,
        sections: tuple[int, ...] = (),
        **placement: Any,
    ) -> None:
        super().__init__()
        self.name = name
        self.kernels = bridge.kernels
        self.shard = Shard(tp_group, split, sections) if tp_group.size() > 1 else None
        shape = [output_size, input_size]
        shape[split] //= tp_group.size()
        self.weight = empty_parameter(*shape, dtype=config.params_dtype)
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=split % 2, stride=1)
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork():
                init_method(self.weight)
        self.format = weight_format(format, four_over_six=bridge.four_over_six)
        self.format.register(self)

    def product(self, x: Tensor) -> Tensor:
        """Return y_TN for contiguous rows; under tensor parallelism own columns of all rows, or own rows."""
        self.check_current()
        if self.shard is None:
            return self.format.product(self.kernels, self, x)
        product = column_product if self.shard.dim == 0 else row_product
        return product(x, self.weight, self.shard, self.whole_product)

    def whole_product(self, x_TK: Tensor) -> Tensor:
        """Return y_TN from the whole bytes; every row by itself."""
        return self.format.product(self.kernels, self, x_TK)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Multiply the last dim of x; the second value is the bias that Megatron expects."""
        rows = self.product(x.reshape(-1, x.shape[-1]))
        return rows.view(-1, *x.shape[1:-1], rows.shape[1]), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Name the master as a shard of the whole matrix, the bytes as the same on every rank."""
        axes = {} if self.shard is None else {"weight": self.shard.dim % 2}
        return self.named_shards(axes, prefix, sharded_offsets, metadata)

    def deployment_views(self) -> Iterator[View]:
        """Yield the tensors of one deployment projection."""
        return self.format.views(self, self.name)

    def quantize_masters(self) -> None:
        """Derive bytes from the master alone."""
        self.format.quantize(self)

    def requantize_masters(self) -> RequantizeReport:
        """Bring the bytes up to date with the master."""
        return self.format.requantize(self)

    def restore_masters(self) -> None:
        """Set the master to the value of the bytes."""
        self.format.restore(self)

    def derive_unsaved(self) -> None:
        """Gather the whole of a sharded BF16 matrix."""
        if not self.format.bytes_are_saved:
            self.format.requantize(self)


class QkvLinear(Linear):
    """Query, key and value in one BF16 matrix, rows ordered by key/value group: its query heads, its key, its value."""

    def __init__(self, *args: Any, num_groups: int, head_dim: int, **keywords: Any) -> None:
        super().__init__(*args, format="BF16", name="", split=0, **keywords)
        self.num_groups = num_groups
        self.head_dim = head_dim

    def deployment_views(self) -> Iterator[View]:
        """Yield q_proj, k_proj and v_proj as slices of the grouped rows."""
        whole = self.format.whole(self)
        grouped_gRH = whole.view(self.num_groups, -1, whole.shape[1])
        num_query_rows = grouped_gRH.shape[1] - 2 * self.head_dim
        sizes = (num_query_rows, self.head_dim, self.head_dim)
        for name, part in zip("qkv", grouped_gRH.split(sizes, dim=1), strict=True):
            yield View(f"{name}_proj.weight", part, (part.shape[0] * part.shape[1], part.shape[2]))
