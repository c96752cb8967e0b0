# SPDX-License-Identifier: Apache-2.0
"""Backward on CUDA: one C++ op, ``csrc/msa_row_attention/backward_cuda.cpp``.

It runs the room's kernels and the matrix products between them; docs/ops/ has the formulae.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cuda_backward(grad: Tensor, *args: Any) -> list[Tensor] | None:
    """Gradients of the wanted tensors among ``DIFFERENTIABLE``; None where there are no positions.

    Arguments as :func:`composition.backward` takes them, and last what
    ``msa_row_attention_forward_saving`` has saved: the gated attention and the logarithms of the
    softmax's sums, in fp32 with a factor for each; or nothing.
    """
    *args_of_op, saved = args
    if grad.numel() == 0:
        return None
    # Not looked up at import: the library that defines it is loaded later, if at all.
    op = torch.ops.fused_ops.msa_row_attention_backward_cuda.default
    # Hooks of saved tensors may have given them other strides.
    gated, log_sums = (t.contiguous() for t in saved) if saved else (None, None)
    grads: list[Tensor] = op(grad, gated, log_sums, *args_of_op)
    return grads
