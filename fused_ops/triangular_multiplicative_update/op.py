# SPDX-License-Identifier: Apache-2.0
"""The op: schema, checks, registration and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_ops import _check
from fused_ops._dispatch import Operator, Result
from fused_ops._precision import autocast_dtype, resolve_precision
from fused_ops.triangular_multiplicative_update import composition, cuda

NAME = "triangular_multiplicative_update"

_ARGUMENTS = (
    "Tensor pair",
    "Tensor? mask",
    "Tensor layer_norm_in_weight",
    "Tensor layer_norm_in_bias",
    "Tensor proj_a_weight",
    "Tensor? proj_a_bias",
    "Tensor gate_a_weight",
    "Tensor? gate_a_bias",
    "Tensor proj_b_weight",
    "Tensor? proj_b_bias",
    "Tensor gate_b_weight",
    "Tensor? gate_b_bias",
    "Tensor layer_norm_out_weight",
    "Tensor layer_norm_out_bias",
    "Tensor out_proj_weight",
    "Tensor? out_proj_bias",
    "Tensor out_gate_weight",
    "Tensor? out_gate_bias",
    "bool outgoing",
    "bool gate_normalized",
    "float eps",
    "int? max_workspace",
    "str precision",
    "ScalarType? dtype",
)


def _check_arguments(
    pair: Tensor,
    mask: Tensor | None,
    layer_norm_in_weight: Tensor,
    layer_norm_in_bias: Tensor,
    proj_a_weight: Tensor,
    proj_a_bias: Tensor | None,
    gate_a_weight: Tensor,
    gate_a_bias: Tensor | None,
    proj_b_weight: Tensor,
    proj_b_bias: Tensor | None,
    gate_b_weight: Tensor,
    gate_b_bias: Tensor | None,
    layer_norm_out_weight: Tensor,
    layer_norm_out_bias: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    out_gate_weight: Tensor,
    out_gate_bias: Tensor | None,
    outgoing: bool,
    gate_normalized: bool,
    eps: float,
    max_workspace: int | None,
    precision: str,
    dtype: torch.dtype | None,
) -> Result:
    _check.max_workspace(NAME, max_workspace)
    _check.rank_at_least(NAME, "pair", pair, 3, "(..., N, N, pair_dim)")
    n, channels = pair.shape[-2:]
    if pair.shape[-3] != n:
        raise ValueError(
            f"{NAME}: pair must have shape (..., N, N, pair_dim), got {tuple(pair.shape)}"
        )
    if mask is not None:
        _check.mask_dtype(NAME, "mask", mask)
        lead = _check.trailing(NAME, "mask", mask, (n, n), "(..., N, N)")
        _check.broadcasts(NAME, "mask", lead, tuple(pair.shape[:-3]), "pair")
    _check.rank_at_least(NAME, "proj_a_weight", proj_a_weight, 2, "(hidden_dim, pair_dim)")
    hidden = proj_a_weight.shape[0]
    parameters: dict[str, Tensor | None] = {}

    def expect(name: str, tensor: Tensor | None, shape: tuple[int, ...], text: str) -> None:
        parameters[name] = tensor
        if tensor is not None:
            _check.shape(NAME, name, tensor, shape, text)

    expect("layer_norm_in_weight", layer_norm_in_weight, (channels,), "(pair_dim,)")
    expect("layer_norm_in_bias", layer_norm_in_bias, (channels,), "(pair_dim,)")
    for name, weight, bias in (
        ("proj_a", proj_a_weight, proj_a_bias),
        ("gate_a", gate_a_weight, gate_a_bias),
        ("proj_b", proj_b_weight, proj_b_bias),
        ("gate_b", gate_b_weight, gate_b_bias),
    ):
        expect(f"{name}_weight", weight, (hidden, channels), "(hidden_dim, pair_dim)")
        expect(f"{name}_bias", bias, (hidden,), "(hidden_dim,)")
    expect("layer_norm_out_weight", layer_norm_out_weight, (hidden,), "(hidden_dim,)")
    expect("layer_norm_out_bias", layer_norm_out_bias, (hidden,), "(hidden_dim,)")
    expect("out_proj_weight", out_proj_weight, (channels, hidden), "(pair_dim, hidden_dim)")
    expect("out_proj_bias", out_proj_bias, (channels,), "(pair_dim,)")
    expect("out_gate_weight", out_gate_weight, (channels, channels), "(pair_dim, pair_dim)")
    expect("out_gate_bias", out_gate_bias, (channels,), "(pair_dim,)")
    _check.same_device(NAME, "pair", pair, {"mask": mask, **parameters})
    result = _check.result_dtype(NAME, {"pair": pair}, parameters, dtype)
    return Result(tuple(pair.shape), result, pair.device)


def _shapes(arguments: dict[str, Any]) -> dict[str, list[int]]:
    shapes = {
        "pair": list(arguments["pair"].shape),
        "hidden": [arguments["proj_a_weight"].shape[0]],
    }
    if arguments["max_workspace"] is not None:
        shapes["max_workspace"] = [arguments["max_workspace"]]
    return shapes


OPERATOR = Operator(
    NAME,
    _ARGUMENTS,
    differentiable=composition.DIFFERENTIABLE,
    check=_check_arguments,
    shapes=_shapes,
    forward=composition.forward,
    backward=composition.backward,
    device_backward=cuda.cuda_backward,
    plans_cuda=False,
)


def triangular_multiplicative_update(
    pair: Tensor,
    mask: Tensor | None,
    layer_norm_in_weight: Tensor,
    layer_norm_in_bias: Tensor,
    proj_a_weight: Tensor,
    proj_a_bias: Tensor | None,
    gate_a_weight: Tensor,
    gate_a_bias: Tensor | None,
    proj_b_weight: Tensor,
    proj_b_bias: Tensor | None,
    gate_b_weight: Tensor,
    gate_b_bias: Tensor | None,
    layer_norm_out_weight: Tensor,
    layer_norm_out_bias: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    out_gate_weight: Tensor,
    out_gate_bias: Tensor | None,
    direction: str = "incoming",
    *,
    gate_normalized: bool = False,
    eps: float = 1e-5,
    max_workspace: int | None = None,
    precision: str | None = None,
) -> Tensor:
    """Triangular multiplicative update of the pair representation.

    AlphaFold 2 supplement, Algorithms 11 (outgoing) and 12 (incoming). With
    ``x = LayerNorm(pair)``, ``a = proj_a(x) * sigmoid(gate_a(x)) * mask`` and b likewise, the
    result is ``sigmoid(out_gate(pair)) * out_proj(LayerNorm(o))`` where o is ::

        outgoing: o[..., i, j, h] = sum_k a[..., i, k, h] * b[..., j, k, h]
        incoming: o[..., i, j, h] = sum_k a[..., k, i, h] * b[..., k, j, h]

    Parameters
    ----------
    pair
        (..., N, N, pair_dim); float32, bfloat16, float16 or float64. Any number of leading axes.
    mask
        (..., N, N), bool, integer or floating, or None for all ones. It multiplies a and b, so
        fractions are legal. Leading axes may be 1. Not differentiated.
    layer_norm_in_weight, layer_norm_in_bias
        (pair_dim,)
    proj_a_weight, gate_a_weight, proj_b_weight, gate_b_weight
        (hidden_dim, pair_dim), with optional biases (hidden_dim,).
    layer_norm_out_weight, layer_norm_out_bias
        (hidden_dim,)
    out_proj_weight, out_gate_weight
        (pair_dim, hidden_dim) and (pair_dim, pair_dim), with optional biases (pair_dim,).
    direction
        "incoming" or "outgoing".
    gate_normalized
        Feed the output gate LayerNorm(pair), as AlphaFold does, instead of the raw pair.
    eps
        Added to the variance in both LayerNorms.
    max_workspace
        Bytes that the call may hold beyond its inputs and its result, or None. Less than the
        default's need makes it work on fewer hidden channels at a time, at the price of reading
        the input again for each group; when even the smallest group needs more, the smallest is
        used. The PyTorch composition splits its forward alone.
    precision
        For float32 on CUDA: "ieee", "tf32", or None to follow
        ``torch.backends.cuda.matmul.fp32_precision``.

    Returns
    -------
    Tensor
        (..., N, N, pair_dim) in the dtype of ``pair``, or of autocast where that is on.

    Raises
    ------
    ValueError
        For a wrong shape, direction, workspace or precision, or a mask that requires a gradient.
    TypeError
        For dtypes that do not mix, or a workspace that is no number.
    RuntimeError
        For tensors on different devices.
    """
    if direction not in ("incoming", "outgoing"):
        raise ValueError(f"{NAME}: direction must be 'incoming' or 'outgoing', got {direction!r}")
    _check.tensor(NAME, "pair", pair)
    _check.mask_needs_no_grad(NAME, "mask", mask)
    _check.mask_dtype(NAME, "mask", mask)
    _check.max_workspace(NAME, max_workspace)
    return OPERATOR(
        pair,
        mask,
        layer_norm_in_weight,
        layer_norm_in_bias,
        proj_a_weight,
        proj_a_bias,
        gate_a_weight,
        gate_a_bias,
        proj_b_weight,
        proj_b_bias,
        gate_b_weight,
        gate_b_bias,
        layer_norm_out_weight,
        layer_norm_out_bias,
        out_proj_weight,
        out_proj_bias,
        out_gate_weight,
        out_gate_bias,
        direction == "outgoing",
        gate_normalized,
        eps,
        max_workspace,
        resolve_precision(NAME, precision),
        autocast_dtype(pair),
    )
