# SPDX-License-Identifier: Apache-2.0
"""The op as a module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fused_ops import _check
from fused_ops._dispatch import Query
from fused_ops._module import FusedModule
from fused_ops._precision import autocast_dtype, resolve_precision
from fused_ops.tensor_matmul import reference
from fused_ops.tensor_matmul.op import NAME, OPERATOR


class TensorMatmul(FusedModule, reference.TensorMatmul):
    """Tensor times matrix, ``C[..., k] = sum_l A[..., l] * B[l, k]``; holds no parameters.

    Parameters
    ----------
    precision
        For float32 on CUDA: "ieee" (fp32-accurate), "tf32", or None to follow
        ``torch.backends.cuda.matmul.fp32_precision``.

    Raises
    ------
    ValueError
        For an unknown precision.
    """

    def __init__(self, *, precision: str | None = None) -> None:
        super().__init__()
        resolve_precision(NAME, precision)
        self.precision = precision

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply ``a`` (..., L) by ``b`` (L, K); see :func:`fused_ops.tensor_matmul`."""
        return OPERATOR(*self._operands(a, b))

    def _operands(self, a: Tensor, b: Tensor) -> list[Any]:
        _check.tensors(NAME, a=a, b=b)
        return [a, b, resolve_precision(NAME, self.precision), autocast_dtype(a)]

    def _query(self, *inputs: Any) -> Query:
        return OPERATOR.query(self._operands(*inputs))

    @classmethod
    def _arguments_of(cls, module: nn.Module) -> dict[str, Any]:
        return {}
