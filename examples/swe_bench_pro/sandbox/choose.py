# SPDX-License-Identifier: Apache-2.0
"""Choose what isolates. There is no choice without isolation."""

from pathlib import Path

from examples.swe_bench_pro.sandbox.bubblewrap import BubblewrapHost
from examples.swe_bench_pro.sandbox.container import ContainerHost
from examples.swe_bench_pro.sandbox.modal_cloud import ModalHost
from examples.swe_bench_pro.sandbox.protocol import Limits, SandboxHost

KINDS = ("bubblewrap", "docker", "podman", "modal")


def open_host(kind: str, folder: Path, *, run_name: str, limits: Limits) -> SandboxHost:
    """Return the host of a kind.

    Args:
        kind: one of `KINDS`; bubblewrap runs local tasks, the others run the benchmark's images.
        folder: for the files of local sandboxes.
        run_name: marks what belongs to this run.
        limits: of each sandbox.

    Raises:
        ValueError: unknown kind.
        IsolationUnavailable: the kind does not work here, with what to install.
    """
    if kind == "bubblewrap":
        return BubblewrapHost(folder, run_name=run_name, limits=limits)
    if kind in ("docker", "podman"):
        return ContainerHost(kind, run_name=run_name, limits=limits)
    if kind == "modal":
        return ModalHost(run_name=run_name, limits=limits)
    raise ValueError(
        f"sandbox is {kind!r}; accepted are {', '.join(KINDS)}: commands of a model are never run without isolation"
    )
