# SPDX-License-Identifier: Apache-2.0
"""Triangle attention: the same op, with the pair representation for the MSA and for the pair.

Around the starting node an edge (i, j) attends to the edges (i, k) with the bias of (j, k): row
attention along the rows of the pair representation, whose LayerNorm is also the bias'. Around the
ending node it is the same on the transposed pair representation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fused_ops import _check
from fused_ops._precision import autocast_dtype, resolve_precision
from fused_ops.msa_row_attention.op import OPERATOR, draw_dropout_seed

T = TypeVar("T")
NAME = "triangle_attention"


def triangle_attention(
    pair: Tensor,
    mask: Tensor | None,
    layer_norm_weight: Tensor,
    layer_norm_bias: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    pair_bias_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    num_heads: int,
    *,
    direction: str = "starting",
    dropout: float = 0.0,
    eps: float = 1e-5,
    precision: str | None = None,
) -> Tensor:
    """Gated attention among the edges of the pair representation that share a node.

    AlphaFold 2 supplement, Algorithms 13 (starting node) and 14 (ending node). With
    ``x = LayerNorm(pair)``, heads of width d and ``b = pair_bias(x)`` ::

        starting: o[..., i, j] = sum_k softmax_k(q_ij . k_ik / sqrt(d) + b_jk) v_ik
        ending:   o[..., i, j] = sum_k softmax_k(q_ij . k_kj / sqrt(d) + b_ki) v_kj
        out = out_proj(sigmoid(gate(x)) * o)

    It is :func:`msa_row_attention` of the pair representation with itself, transposed before and
    after for the ending node.

    Parameters
    ----------
    pair
        (..., N, N, pair_dim); float32, bfloat16, float16 or float64. Any number of leading axes.
    mask
        (..., N, N), bool, integer or floating, leading axes 1 or missing: edges where it is 0 are
        not there as keys; None keeps all. Not differentiated. A query whose keys are all masked
        gets attention output zero.
    layer_norm_weight, layer_norm_bias
        (pair_dim,): one LayerNorm for the projections and the bias.
    query_weight, key_weight, value_weight, gate_weight
        (num_heads * d, pair_dim); the gate has an optional bias (num_heads * d,).
    pair_bias_weight
        (num_heads, pair_dim)
    out_proj_weight, out_proj_bias
        (pair_dim, num_heads * d) and an optional (pair_dim,).
    num_heads
        Number of heads; d need not be pair_dim / num_heads.
    direction
        "starting" or "ending".
    dropout
        Probability of dropping an attention weight; draws from PyTorch's generator.
    eps
        Added to the variance in LayerNorm.
    precision
        For float32 on CUDA: "ieee", "tf32", or None to follow
        ``torch.backends.cuda.matmul.fp32_precision``.

    Returns
    -------
    Tensor
        (..., N, N, pair_dim), contiguous, in the dtype of ``pair``, or of autocast where that is
        on.

    Raises
    ------
    ValueError
        For a wrong shape, number of heads, direction or precision, or a mask that requires a
        gradient.
    TypeError
        For dtypes that do not mix.
    RuntimeError
        For tensors on different devices.
    """
    if direction not in ("starting", "ending"):
        raise ValueError(f"{NAME}: direction must be 'starting' or 'ending', got {direction!r}")
    check_edges(pair, mask, "pair", "mask")
    operands = operands_of(
        pair,
        mask,
        draw_dropout_seed(pair) if dropout > 0.0 else None,
        (
            layer_norm_weight,
            layer_norm_bias,
            query_weight,
            key_weight,
            value_weight,
            gate_weight,
            gate_bias,
            pair_bias_weight,
            out_proj_weight,
            out_proj_bias,
        ),
        num_heads,
        direction,
        dropout,
        eps,
        precision,
    )
    return attend(operands, direction)


def check_edges(pair: object, mask: Tensor | None, pair_name: str, mask_name: str) -> None:
    """What has to hold before the two can be transposed, under the names of the caller."""
    _check.tensor(NAME, pair_name, pair)
    _check.mask_needs_no_grad(NAME, mask_name, mask)
    assert isinstance(pair, Tensor)
    if pair.dim() < 3:
        _check.rank_at_least(NAME, pair_name, pair, 3, "(..., N, N, pair_dim)")
    if mask is not None and mask.dim() < 2:
        _check.rank_at_least(NAME, mask_name, mask, 2, "(..., N, N)")


def operands_of(
    pair: Tensor,
    mask: Tensor | None,
    dropout_seed: Tensor | None,
    parameters: Sequence[Tensor | None],
    num_heads: int,
    direction: str,
    dropout: float,
    eps: float,
    precision: str | None,
) -> list[Any]:
    """Arguments of the operator; ``parameters`` in the order of :func:`triangle_attention`."""
    if direction not in ("starting", "ending"):
        raise ValueError(f"{NAME}: direction must be 'starting' or 'ending', got {direction!r}")
    if direction == "ending":
        pair = pair.transpose(-2, -3)
        mask = None if mask is None else mask.transpose(-1, -2)
    norm = parameters[:2]
    return [
        pair,
        pair,
        mask,
        dropout_seed,
        *parameters[:7],
        *norm,  # the bias is one of the normalised pair
        *parameters[7:],
        num_heads,
        dropout,
        eps,
        resolve_precision(NAME, precision),
        autocast_dtype(pair),
    ]


def attend(operands: Sequence[Any], direction: str) -> Tensor:
    """The operator on operands that :func:`operands_of` has put into its frame, and back."""
    result = in_own_words(lambda: OPERATOR(*operands), operands, direction)
    if direction == "starting":
        return result
    # Not as a view: what follows reads it more than once, and may change it in place.
    return result.transpose(-2, -3).clone(memory_format=torch.contiguous_format)


def in_own_words(call: Callable[[], T], operands: Sequence[Any], direction: str) -> T:
    """``call()``; what is wrong with its arguments is told in the terms of this module.

    The operator checks them, and speaks of an MSA. A right call is not checked twice.
    """
    if torch.compiler.is_compiling():
        return call()
    try:
        return call()
    except (RuntimeError, TypeError, ValueError):
        _check_arguments(operands, direction)
        raise


def _check_arguments(operands: Sequence[Any], direction: str) -> None:
    named = dict(zip(OPERATOR._names, operands, strict=True))
    pair, mask = named["pair"], named["mask"]
    if direction == "ending":  # as they were given
        pair = pair.transpose(-2, -3)
        mask = None if mask is None else mask.transpose(-1, -2)
    num_heads = named["num_heads"]
    parameters: dict[str, Tensor | None] = {
        name: named[name]
        for name in named
        if name.endswith(("_weight", "_bias")) and not name.startswith("pair_norm")
    }
    for name, tensor in parameters.items():
        if tensor is not None or name not in ("gate_bias", "out_proj_bias"):
            _check.tensor(NAME, name, tensor)
    rows, columns, channels = pair.shape[-3:]
    lead = tuple(pair.shape[:-3])
    if rows != columns:
        raise ValueError(
            f"{NAME}: pair must have shape (..., N, N, pair_dim), got {tuple(pair.shape)}"
        )
    if mask is not None:
        _check.mask_dtype(NAME, "mask", mask)
        mask_lead = _check.trailing(NAME, "mask", mask, (rows, columns), "(..., N, N)")
        _check.broadcasts(NAME, "mask", mask_lead, lead, "pair")
    if not isinstance(num_heads, int) or isinstance(num_heads, bool):
        raise TypeError(f"{NAME}: num_heads must be an int, got {type(num_heads).__name__}")
    query = named["query_weight"]
    _check.rank_at_least(NAME, "query_weight", query, 2, "(num_heads * d, pair_dim)")
    width = query.shape[0]
    if num_heads < 1 or width % num_heads:
        raise ValueError(
            f"{NAME}: query_weight must have a multiple of num_heads = {num_heads} rows, "
            f"got {width}"
        )
    if not 0.0 <= named["dropout"] <= 1.0:
        raise ValueError(f"{NAME}: dropout must be in [0, 1], got {named['dropout']}")
    projection = ((width, channels), "(num_heads * d, pair_dim)")
    expected = {
        "layer_norm_weight": ((channels,), "(pair_dim,)"),
        "layer_norm_bias": ((channels,), "(pair_dim,)"),
        **dict.fromkeys(("query_weight", "key_weight", "value_weight", "gate_weight"), projection),
        "gate_bias": ((width,), "(num_heads * d,)"),
        "pair_bias_weight": ((num_heads, channels), "(num_heads, pair_dim)"),
        "out_proj_weight": ((channels, width), "(pair_dim, num_heads * d)"),
        "out_proj_bias": ((channels,), "(pair_dim,)"),
    }
    for name, (shape, text) in expected.items():
        tensor = parameters[name]
        if tensor is not None:
            _check.shape(NAME, name, tensor, shape, text)
    _check.same_device(NAME, "pair", pair, {"mask": mask, **parameters})
    _check.result_dtype(NAME, {"pair": pair}, parameters, named["dtype"])
