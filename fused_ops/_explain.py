# SPDX-License-Identifier: Apache-2.0
"""Which kernel a call would run, without running it."""

from __future__ import annotations

import dataclasses
from typing import Any

from fused_ops._module import FusedModule


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call would run; ``str()`` gives one line."""

    op: str
    """Name of the op."""
    path: str
    """"kernel" (a kernel of this library), "cublas", or "composition" (PyTorch calls)."""
    kernel: str | None
    """Name of the kernel, None for a composition."""
    tile: tuple[int, ...] | None
    """Tile of the kernel."""
    launches: int | None
    """Kernel launches of a forward; None for a composition, which does not count them."""
    workspace_bytes: int
    """Device memory beyond input and output."""
    reasons: tuple[str, ...]
    """Why no kernel of this library runs; empty when one does."""

    def __str__(self) -> str:
        if self.path == "kernel":
            tile = "x".join(map(str, self.tile or ()))
            return f"{self.op}: kernel {self.kernel}, tile {tile}, {self.launches} launches"
        what = "cuBLAS" if self.path == "cublas" else "PyTorch composition"
        return f"{self.op}: {what}" + (f" ({'; '.join(self.reasons)})" if self.reasons else "")


def explain(module: FusedModule, *inputs: Any, backward: bool = False) -> Explanation:
    """Tell which kernel ``module(*inputs)`` would run, or why none would.

    Nothing runs: the answer comes from the planner that the launchers use, so meta and fake
    tensors do as inputs too.

    Parameters
    ----------
    module
        A module of this library.
    *inputs
        What would be passed to its ``forward``.
    backward
        Ask about the backward pass instead.

    Raises
    ------
    TypeError
        If ``module`` is not of this library.
    ValueError, RuntimeError
        As the call itself would raise for bad inputs.
    """
    if not isinstance(module, FusedModule):
        raise TypeError(
            f"explain: module must be a module of fused_ops, got {type(module).__name__}"
        )
    query = module._query(*inputs)
    plan = query.plan(backward)
    composed = plan["path"] == "composition"
    return Explanation(
        op=query.op,
        path=plan["path"],
        kernel=plan["kernel"] or None,
        tile=tuple(plan["tile"]) if plan["tile"] else None,
        launches=None if composed else plan["launches"],
        workspace_bytes=plan["workspace_bytes"],
        reasons=tuple(plan["reasons"]),
    )
