# SPDX-License-Identifier: Apache-2.0
"""The op: schema, checks, registration and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_ops import _check
from fused_ops._dispatch import Operator, Result
from fused_ops._precision import autocast_dtype, resolve_precision, run_composition
from fused_ops.tensor_matmul import composition

NAME = "tensor_matmul"


def _check_arguments(a: Tensor, b: Tensor, precision: str, dtype: torch.dtype | None) -> Result:
    _check.rank_at_least(NAME, "a", a, 1, "(..., L)")
    if b.dim() != 2 or b.shape[0] != a.shape[-1]:
        raise ValueError(
            f"{NAME}: b must have shape (L, K) with L = {a.shape[-1]} as in a, got {tuple(b.shape)}"
        )
    _check.same_device(NAME, "a", a, {"b": b})
    result = _check.result_dtype(NAME, {"a": a}, {"b": b}, dtype)
    return Result((*a.shape[:-1], b.shape[1]), result, a.device)


OPERATOR = Operator(
    NAME,
    ("Tensor a", "Tensor b", "str precision", "ScalarType? dtype"),
    differentiable=composition.DIFFERENTIABLE,
    check=_check_arguments,
    shapes=lambda args: {"a": list(args["a"].shape), "b": list(args["b"].shape)},
    forward=composition.forward,
    backward=composition.backward,
)


def _check_reduce(a: Tensor, grad: Tensor, precision: str, dtype: torch.dtype | None) -> Result:
    if a.dim() < 1 or grad.shape[:-1] != a.shape[:-1] or grad.dim() != a.dim():
        raise ValueError(
            f"{NAME}: the gradient must have the leading axes of a, expected "
            f"{(*a.shape[:-1], 'K')}, got {tuple(grad.shape)}"
        )
    _check.same_device(NAME, "a", a, {"the gradient": grad})
    result = _check.result_dtype(NAME, {"a": a}, {"the gradient": grad}, dtype)
    kept = torch.float64 if result == torch.float64 else torch.float32
    return Result((a.shape[-1], grad.shape[-1]), kept, a.device)


def _run_reduce(*args: Any) -> Tensor:
    result = _check_reduce(*args)
    return run_composition(composition.reduce, result.device, result.dtype, args[2], args)


# The gradient of b by itself: C++ has kernels for it, and comes back here where none fits.
for _name in (f"{NAME}_reduce", f"{NAME}_reduce_composition"):
    Operator.register(
        _name,
        "(Tensor a, Tensor grad, str precision, ScalarType? dtype) -> Tensor",
        _run_reduce,
        lambda *args: _check_reduce(*args).empty(),
    )


def tensor_matmul(a: Tensor, b: Tensor, *, precision: str | None = None) -> Tensor:
    """Multiply the last axis of a tensor by a matrix: ``C[..., k] = sum_l A[..., l] * B[l, k]``.

    Parameters
    ----------
    a
        (..., L), any number of leading axes and any strides; float32, bfloat16, float16 or
        float64.
    b
        (L, K); the dtype of ``a``, or another of float32, bfloat16, float16 as it is stored.
    precision
        For float32 on CUDA: "ieee" (fp32-accurate), "tf32", or None to follow
        ``torch.backends.cuda.matmul.fp32_precision``.

    Returns
    -------
    Tensor
        (..., K) in the dtype of ``a``, or of autocast where that is on. L = 0 gives zeros.

    Raises
    ------
    ValueError
        For a wrong shape or precision.
    TypeError
        For dtypes that do not mix; a ValueError where C++ checks them, under a profiler on CUDA.
    RuntimeError
        For tensors on different devices.
    """
    _check.tensors(NAME, a=a, b=b)
    return OPERATOR(a, b, resolve_precision(NAME, precision), autocast_dtype(a))
