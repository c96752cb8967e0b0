# SPDX-License-Identifier: Apache-2.0
"""Tensor times matrix: ``C[..., k] = sum_l A[..., l] * B[l, k]``."""

from fused_ops.tensor_matmul.module import TensorMatmul
from fused_ops.tensor_matmul.op import tensor_matmul

__all__ = ["TensorMatmul", "tensor_matmul"]
