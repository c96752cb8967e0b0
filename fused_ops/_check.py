# SPDX-License-Identifier: Apache-2.0
"""Argument checks. Every message names the op, the argument, what was expected and what came."""

from __future__ import annotations

import torch
from torch import Tensor

_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
_STORED = _FLOATS - {torch.float64}


def tensors(op: str, **values: object) -> None:
    """Require every value to be a tensor."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")


def tensor(op: str, name: str, value: object) -> None:
    """The same of one value, in half the time."""
    if not isinstance(value, Tensor):
        tensors(op, **{name: value})


def shape(op: str, name: str, tensor: Tensor, expected: tuple[int, ...], text: str) -> None:
    """Require ``tensor.shape == expected``; ``text`` names the axes, e.g. ``(hidden, pair)``."""
    if tensor.shape != expected:
        raise ValueError(
            f"{op}: {name} must have shape {text} = {expected}, got {tuple(tensor.shape)}"
        )


def rank_at_least(op: str, name: str, tensor: Tensor, rank: int, text: str) -> None:
    """Require at least ``rank`` axes."""
    if tensor.dim() < rank:
        raise ValueError(
            f"{op}: {name} must have shape {text} (at least {rank} axes), got {tuple(tensor.shape)}"
        )


def broadcasts(
    op: str, name: str, lead: tuple[int, ...], target: tuple[int, ...], owner: str
) -> None:
    """Require leading axes ``lead`` of ``name`` to broadcast to those of ``owner``."""
    fits = len(lead) <= len(target) and all(
        a == b or a == 1 for a, b in zip(reversed(lead), reversed(target), strict=False)
    )
    if not fits:
        raise ValueError(
            f"{op}: the leading axes of {name} must equal those of {owner} or be 1, "
            f"expected {target}, got {lead}"
        )


def trailing(
    op: str, name: str, tensor: Tensor, expected: tuple[int, ...], text: str
) -> tuple[int, ...]:
    """Require the last axes to be ``expected``; returns the leading ones."""
    rank_at_least(op, name, tensor, len(expected), text)
    split = tensor.dim() - len(expected)
    if tensor.shape[split:] != expected:
        raise ValueError(
            f"{op}: {name} must have shape {text} with trailing axes {expected}, "
            f"got {tuple(tensor.shape)}"
        )
    return tuple(tensor.shape[:split])


def result_dtype(
    op: str,
    activations: dict[str, Tensor],
    parameters: dict[str, Tensor | None],
    dtype: torch.dtype | None,
) -> torch.dtype:
    """Check the dtype mix and return the dtype of the result.

    Without ``dtype`` (no autocast) all activations must agree and decide. Parameters may be
    stored in any of fp32, bf16 and fp16; float64 does not mix with anything.
    """
    names = iter(activations.items())
    first_name, first = next(names)
    if first.dtype not in _FLOATS:
        raise TypeError(
            f"{op}: {first_name} must be float32, bfloat16, float16 or float64, got {first.dtype}"
        )
    for name, tensor in names:
        if tensor.dtype not in _FLOATS:
            raise TypeError(
                f"{op}: {name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}"
            )
        if tensor.dtype != first.dtype and dtype is None:
            raise TypeError(
                f"{op}: {name} must have the dtype of {first_name} outside autocast, "
                f"expected {first.dtype}, got {tensor.dtype}"
            )
    result = dtype or first.dtype
    if result not in _FLOATS:
        raise TypeError(f"{op}: dtype must be a floating dtype, got {result}")
    double = any(t.dtype == torch.float64 for t in activations.values())
    allowed = {torch.float64} if double else _STORED
    for name, parameter in parameters.items():
        if parameter is not None and parameter.dtype not in allowed:
            expected = "float64" if double else "float32, bfloat16 or float16"
            raise TypeError(
                f"{op}: {name} must be {expected} when {first_name} is {first.dtype}, "
                f"got {parameter.dtype}"
            )
    if double and result != torch.float64:
        raise TypeError(f"{op}: float64 activations give a float64 result, got dtype {result}")
    return result


def same_device(op: str, owner: str, reference: Tensor, others: dict[str, Tensor | None]) -> None:
    """Require all tensors to live on the device of ``reference``."""
    device = reference.device
    for name, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise RuntimeError(
                f"{op}: {name} must be on the device of {owner}, expected {device}, "
                f"got {tensor.device}"
            )


def max_workspace(op: str, value: object) -> None:
    """Require a number of bytes, or None."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(
            f"{op}: max_workspace must be an int (bytes) or None, got {type(value).__name__}"
        )
    if value < 0:
        raise ValueError(f"{op}: max_workspace must not be negative, got {value}")


def mask_dtype(op: str, name: str, mask: Tensor | None) -> None:
    """Require a bool, integer or floating mask that does not ask for a gradient."""
    if mask is not None and mask.is_complex():
        raise TypeError(f"{op}: {name} must be bool, integer or floating, got {mask.dtype}")


def mask_needs_no_grad(op: str, name: str, mask: Tensor | None) -> None:
    """Masks are not differentiated; asking for their gradient is an error, not a silent zero."""
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor or None, got {type(mask).__name__}")
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op}: {name} must not require a gradient (masks are not differentiated), "
            f"got requires_grad=True; pass {name}.detach()"
        )
