# SPDX-License-Identifier: Apache-2.0
"""Backward on CUDA: one C++ op, ``csrc/invariant_point_attention/backward_cuda.cpp``.

It runs the room's kernels and the matrix products between them; docs/ops/ has the formulae.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_ops.invariant_point_attention.arguments import DIFFERENTIABLE

_FRAMES = ("translations", "rotations")
# Their places among the differentiable arguments and among the op's.
_PLACES = tuple((DIFFERENTIABLE.index(name), 2 + i) for i, name in enumerate(_FRAMES))


def cuda_backward(grad: Tensor, *args: Any) -> list[Tensor] | None:
    """Gradients of the wanted tensors among ``DIFFERENTIABLE``; None where there are no residues.

    Arguments as :func:`composition.backward` takes them, and last what
    ``invariant_point_attention_forward_saving`` has saved: the projected nodes, and in one piece
    of memory the features and what the softmax left; or nothing.
    """
    *args_of_op, needs, saved = args
    if grad.numel() == 0:
        return None
    # Not looked up at import: the library that defines it is loaded later, if at all.
    op = torch.ops.fused_ops.invariant_point_attention_backward_cuda.default
    # Hooks of saved tensors may have given them other strides.
    kept, projected = (t.contiguous() for t in saved) if saved else (None, None)
    grads: list[Tensor] = op(grad, kept, projected, *args_of_op, needs)
    for place, argument in _PLACES:
        # Those of frames come in fp32, for each batch element.
        if needs[place]:
            frames, at = args_of_op[argument], sum(needs[:place])
            if grads[at].shape != frames.shape:
                grads[at] = grads[at].sum_to_size(frames.shape)
            grads[at] = grads[at].to(frames.dtype)
    return grads
