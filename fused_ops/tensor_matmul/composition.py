# SPDX-License-Identifier: Apache-2.0
"""PyTorch composition of the op: library matrix products without copies of expanded operands."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops._compose import (
    Arithmetic,
    Rows,
    arithmetic,
    block_length,
    blocks,
    cast,
    matmul,
)

DIFFERENTIABLE = ("a", "b")


def forward(a: Tensor, b: Tensor, precision: str, dtype: torch.dtype | None) -> Tensor:
    """Result (*lead, K) for ``a`` (*lead, L) and ``b`` (L, K)."""
    result = dtype or a.dtype
    return _product(a, b, result, arithmetic(a.device, result))


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, math_: Arithmetic) -> Tensor:
    """``a @ b`` as ``dtype``."""
    if a.dtype == b.dtype == dtype == math_.matmul and a.is_contiguous():
        return torch.matmul(a, b)  # folds the leading axes without a copy
    out = torch.empty((*a.shape[:-1], b.shape[1]), dtype=dtype, device=a.device)
    _multiply(a, b, out, math_)
    return out


def _multiply(a: Tensor, b: Tensor, out: Tensor, math_: Arithmetic) -> None:
    """``out = a @ b``."""
    if out.numel() == 0:
        return
    if a.dim() == 1:
        return _multiply(a.unsqueeze(0), b, out.unsqueeze(0), math_)
    # A batch axis of stride 0 repeats one slice: multiply once, copy the result.
    for axis, stride in enumerate(a.stride()[:-1]):
        if stride == 0 and a.shape[axis] > 1:
            first = out.narrow(axis, 0, 1)
            _multiply(a.narrow(axis, 0, 1), b, first, math_)
            out.narrow(axis, 1, a.shape[axis] - 1).copy_(first)
            return
    direct = a.dtype == b.dtype == out.dtype == math_.matmul
    rows = Rows(a, 1)
    flat_out = _flat(out)
    if direct and rows.viewable and flat_out is not None:
        torch.mm(rows[slice(0, rows.length)], b, out=flat_out)
        return
    if flat_out is not None:
        width = max(a.shape[-1], out.shape[-1])
        for block in blocks(rows.length, block_length(a.device, width)):
            flat_out[block] = matmul(rows[block], b, math_)
        return
    for one_a, one_out in zip(a, out, strict=True):
        _multiply(one_a, b, one_out, math_)


def _flat(out: Tensor) -> Tensor | None:
    """``out`` as (rows, K) if its strides allow that."""
    try:
        return out.view(-1, out.shape[-1])
    except RuntimeError:
        return None


def reduce(a: Tensor, grad: Tensor, precision: str, dtype: torch.dtype | None) -> Tensor:
    """``a^T @ grad`` over all leading axes: (L, K) in the elementwise dtype."""
    math_ = arithmetic(a.device, dtype or a.dtype)
    return cast(_reduce(a, grad, math_), math_.elementwise)


def _reduce(a: Tensor, grad: Tensor, math_: Arithmetic) -> Tensor:
    """The same in whatever dtype it comes: that of the product, where it is one."""
    shape = (a.shape[-1], grad.shape[-1])
    a_rows, grad_rows = Rows(a, 1), Rows(grad, 1)
    length = a_rows.length
    if not length or not all(shape):
        return torch.zeros(shape, dtype=math_.elementwise, device=a.device)
    every = slice(0, length)
    if a_rows.viewable and grad_rows.viewable and a.dtype == math_.matmul:
        return torch.mm(a_rows[every].t(), cast(grad_rows[every], math_.matmul))
    out = torch.zeros(shape, dtype=math_.elementwise, device=a.device)
    for block in blocks(length, block_length(a.device, max(shape))):
        out += matmul(a_rows[block].t(), grad_rows[block], math_)
    return out


def backward(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    precision: str,
    dtype: torch.dtype | None,
    needs: list[bool],
) -> list[Tensor]:
    """Gradients of the wanted operands: ``grad @ b^T`` and ``a^T @ grad``."""
    math_ = arithmetic(a.device, dtype or a.dtype)
    # In plain fp32 on CUDA both products may have kernels of ours; C++ decides.
    kernels = a.is_cuda and a.dtype == b.dtype == grad.dtype == torch.float32
    kernels = kernels and precision == "ieee" and dtype in (None, torch.float32)
    out = []
    if needs[0]:
        if kernels:
            out.append(torch.ops.fused_ops.tensor_matmul_forward(grad, b.t(), precision, None))
        else:
            out.append(_product(grad, b.t(), a.dtype, math_))
    if needs[1]:
        if kernels:
            d_b = torch.ops.fused_ops.tensor_matmul_reduce(a, grad, precision, None)
        else:
            d_b = _reduce(a, grad, math_)
        out.append(d_b.to(b.dtype))
    return out
