# SPDX-License-Identifier: Apache-2.0
"""Modules with deployment names: bf16 master parameters, and beside them the bytes that the forward reads."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron.vllm_forward.sharding import Shard
from vllm_forward_bridge.quantization import RequantizeReport


@dataclass(frozen=True)
class View:
    """One deployment tensor: an alias of the storage of a module."""

    name: str
    """Relative to the owner's deployment name."""
    tensor: Tensor
    """Has the deployment dtype; writing into it writes into the module."""
    shape: tuple[int, ...]
    """Deployment shape; the alias may have another one with the same element order."""
    shard: Shard | None = None
    """What part of the deployment tensor the alias is; None: all of it."""

    def problems(self, source: Tensor) -> list[str]:
        """Say why a tensor cannot be copied here; nothing if it can."""
        if source.dtype == self.tensor.dtype and tuple(source.shape) == self.shape:
            return []
        wanted = f"{self.tensor.dtype} {list(self.shape)}"
        return [f"{self.name}: {source.dtype} {list(source.shape)}; {wanted} is needed, the format of the build"]

    def write(self, source: Tensor) -> None:
        """Copy this rank's part of a deployment tensor into the module."""
        own = source if self.shard is None else self.shard.share(source)
        self.tensor.copy_(own.reshape(self.tensor.shape))

    def read(self) -> Tensor:
        """Return the deployment tensor, contiguous; it may alias the module. Collective if it is sharded."""
        own = self.tensor.detach()
        whole = own if self.shard is None else self.shard.whole(own)
        return whole.reshape(self.shape).contiguous()


class Deployed(nn.Module):
    """Base of every bridged module that owns parameters or bytes.

    A subclass registers bytes with `register_bytes` and overrides the four functions at the end.
    """

    # Versions of the parameters and of the bytes derived from them; see versions.py.
    master_version = 0
    bytes_version = 0
    # (version of the bytes, what a kernel reads in their place)
    made_operands: tuple[int, tuple[Tensor, ...]] | None = None

    def register_bytes(self, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
        """Register a buffer whose dtype never changes: Float16Module casts all other floats to bf16."""
        self.register_buffer(name, tensor, persistent=persistent)
        # Not a class attribute: each instance has its own names.
        self.__dict__.setdefault("byte_names", []).append(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        kept = {name: self._buffers[name] for name in self.__dict__.get("byte_names", ())}
        self.made_operands = None
        super()._apply(fn, recurse)
        for name, before in kept.items():
            if self._buffers[name].dtype != before.dtype:
                self._buffers[name] = before.to(self._buffers[name].device)
        return self

    def operands_of_version(self, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return what `make` makes of the bytes, made again only for a new version of them."""
        if self.made_operands is None or self.made_operands[0] != self.bytes_version:
            self.made_operands = None  # free the old copy first
            self.made_operands = (self.bytes_version, make())
        return self.made_operands[1]

    def check_current(self) -> None:
        """Raise if the bytes are older than the masters."""
        if self.bytes_version != self.master_version:
            raise RuntimeError(
                f"{type(self).__name__} would run on bytes of version {self.bytes_version} while its masters have "
                f"version {self.master_version}; requantise first: optimizer_hook.install must "
                "wrap the optimizer that stepped"
            )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Name every own parameter and byte buffer `prefix + name`; all are the same on every data-parallel rank."""
        return self.named_shards({}, prefix, sharded_offsets, metadata)

    def named_shards(
        self, axes: Mapping[str, int], prefix: str, sharded_offsets: tuple, metadata: dict | None
    ) -> ShardedStateDict:
        """Name own tensors; those in `axes` are tensor-parallel shards along that axis, the others whole."""
        own: dict[str, Tensor] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        return named_tensors(own, axes, prefix, sharded_offsets, metadata)

    def deployment_views(self) -> Iterator[View]:
        """Yield an alias of each deployment tensor of this module."""
        return iter(())

    def quantize_masters(self) -> None:
        """Derive bytes from the masters alone: scales from their largest magnitudes."""

    def requantize_masters(self) -> RequantizeReport:
        """Bring the bytes up to date with the masters in place; scales and unchanged blocks stay."""
        return RequantizeReport(0, 0)

    def restore_masters(self) -> None:
        """Set the masters to the values of the bytes."""

    def derive_unsaved(self) -> None:
        """Derive the bytes that a Megatron checkpoint leaves out from the loaded masters; collective if sharded."""


class Matrix(Deployed):
    """A module with one master `weight` [..., N, K] and one weight format; base of linears and expert stacks."""

    weight: nn.Parameter
    # What part of the whole matrix the master is; None: all of it. Bytes are always whole.
    shard: Shard | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the matrix that the bytes hold."""
        shape = list(self.weight.shape)
        if self.shard is not None:
            shape[self.shard.dim] *= self.shard.size
        return tuple(shape)

    @property
    def straight_through(self) -> nn.Parameter | None:
        """The master that an op's backward uses; a shard has its own backward."""
        return self.weight if self.shard is None else None

    def whole_master(self) -> Tensor:
        """Return the whole master, detached; collective if it is sharded."""
        own = self.weight.detach()
        return own if self.shard is None else self.shard.whole(own)

    def set_master(self, whole: Tensor) -> None:
        """Copy a whole matrix, or this rank's part of it, into the master."""
        self.weight.data.copy_(whole if self.shard is None else self.shard.share(whole))


class Parameters(Deployed):
    """A module whose deployment tensors are its bf16 parameters themselves."""

    shard: Shard | None = None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Name the parameters, as shards if they are."""
        axes = {} if self.shard is None else {name: self.shard.dim for name, _ in self.named_parameters(recurse=False)}
        return self.named_shards(axes, prefix, sharded_offsets, metadata)

    def deployment_views(self) -> Iterator[View]:
        """Yield each own parameter under its own name."""
        for name, parameter in self.named_parameters(recurse=False):
            yield View(name, parameter.data, tuple(parameter.shape), self.shard)


def named_tensors(
    own: Mapping[str, Tensor], axes: Mapping[str, int], prefix: str, sharded_offsets: tuple, metadata: dict | None
) -> ShardedStateDict:
    """Name tensors of a module for a distributed checkpoint; one rank of each group writes whole ones."""
    # Megatron takes a missing group for the only rank, and two ranks would claim the same tensor.
    group = parallel_state.get_tensor_model_parallel_group()
    dp_cp_group = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
    return make_sharded_tensors_for_checkpoint(
        dict(own), prefix, dict(axes), sharded_offsets, tp_group=group, dp_cp_group=dp_cp_group
    )


def sum_reports(reports: Iterator[RequantizeReport]) -> RequantizeReport:
    """Add reports up."""
    changed = overflowed = 0
    for report in reports:
        changed += report.changed_blocks
        overflowed += report.overflowed_blocks
    return RequantizeReport(changed, overflowed)


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Allocate a parameter where Megatron allocates: on the current device."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=torch.cuda.current_device()))
