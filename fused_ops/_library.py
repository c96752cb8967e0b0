# SPDX-License-Identifier: Apache-2.0
"""Loading of the compiled parts, and what is known when they are missing.

``fused_ops._C`` (build facts, kernel planner) and the CUDA kernel library are both optional at
run time: without them every op runs its PyTorch composition, and the reason is kept for
:func:`fused_ops.explain`, ``python -m fused_ops`` and the one warning of a CUDA call.
"""

from __future__ import annotations

import importlib
import pathlib
import warnings
from typing import Any, NamedTuple

import torch

from fused_ops._version import __version__

_LIBRARY_NAME = "libfused_ops_cuda.so"


class Status(NamedTuple):
    """Whether a compiled part is loaded, and if not, why."""

    loaded: bool
    reason: str


_planner: Any = None
extension_status = Status(False, "not loaded yet")
cuda_library_status = Status(False, "not loaded yet")


def _load_extension() -> Status:
    global _planner
    try:
        _planner = importlib.import_module("fused_ops._C")
    except ImportError as error:
        return Status(
            False,
            f"the extension module fused_ops._C {__version__} could not be imported ({error}); "
            f"reinstall fused-ops for this Python",
        )
    built = _planner.build_info()["version"]
    if built != __version__:
        _planner = None
        return Status(
            False,
            f"fused_ops._C was built as version {built}, the Python package is {__version__}; "
            f"reinstall fused-ops",
        )
    return Status(True, "")


def _load_cuda_library() -> Status:
    path = pathlib.Path(__file__).with_name(_LIBRARY_NAME)
    if not path.exists():
        return Status(
            False,
            f"this build of fused-ops has no CUDA library ({_LIBRARY_NAME} is not installed); "
            f"reinstall with nvcc present or FUSED_OPS_CUDA=1",
        )
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return Status(
            False,
            f"{_LIBRARY_NAME} {__version__} could not be loaded into torch {torch.__version__} "
            f"({error.__cause__ or error}); fused-ops needs torch >= 2.11",
        )
    return Status(True, "")


def load() -> None:
    """Load both compiled parts; called once, after the schemas are defined."""
    global extension_status, cuda_library_status
    extension_status = _load_extension()
    cuda_library_status = _load_cuda_library()


def build_info() -> dict[str, Any]:
    """Facts about the build; versions are None where a part is missing."""
    if _planner is None:
        return {"version": __version__, "cuda_version": None, "archs": [], "torch_target": None}
    return dict(_planner.build_info())


def plan(
    op: str,
    shapes: dict[str, list[int]],
    strides: dict[str, list[int]],
    dtype: str,
    precision: str,
    capability: tuple[int, int] | None,
    backward: bool = False,
) -> dict[str, Any]:
    """What the launchers' own planner answers, with the reasons a loaded library cannot know."""
    problems = [s.reason for s in (extension_status, cuda_library_status) if not s.loaded]
    if capability is not None and problems:
        return _composition(problems)
    if _planner is None:
        return _composition(["CPU tensors"])
    return dict(
        _planner.plan(op, shapes, dtype, precision, capability, strides=strides, backward=backward)
    )


def _composition(reasons: list[str]) -> dict[str, Any]:
    return {
        "path": "composition",
        "kernel": None,
        "tile": None,
        "launches": 0,
        "workspace_bytes": 0,
        "reasons": reasons,
    }


warned: set[str] = set()


def warn_composition(op: str, reason: str) -> None:
    """Warn, once per op and process, that the PyTorch composition runs and why."""
    if op not in warned:
        warned.add(op)
        warnings.warn(
            f"{op}: running the PyTorch composition instead of a CUDA kernel: {reason}",
            stacklevel=2,
        )
