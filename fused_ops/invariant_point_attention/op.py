# SPDX-License-Identifier: Apache-2.0
"""The op: its registration and the public function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fused_ops import _check
from fused_ops._dispatch import Operator
from fused_ops._precision import autocast_dtype, resolve_precision
from fused_ops.invariant_point_attention import composition
from fused_ops.invariant_point_attention.arguments import ARGUMENTS, DIFFERENTIABLE, NAME, check
from fused_ops.invariant_point_attention.cuda import cuda_backward


def _shapes(a: dict[str, Any]) -> dict[str, list[int]]:
    """What the planner decides by."""
    shapes = {
        "node": list(a["node"].shape),
        "pair": list(a["pair"].shape),
        "num_heads": [a["num_heads"]],
        "head_dim": [a["q_proj_weight"].shape[0] // a["num_heads"]],
        "num_query_points": [a["num_query_points"]],
        "num_value_points": [a["num_value_points"]],
        "gathers_pair": [int(a["gathers_pair"])],
        "has_norms": [int(a["norm_eps"] is not None)],
    }
    if a["pair_value"] is not None:
        shapes["pair_value"] = list(a["pair_value"].shape)
    return shapes


OPERATOR = Operator(
    NAME,
    ARGUMENTS,
    differentiable=DIFFERENTIABLE,
    check=check,
    shapes=_shapes,
    forward=composition.forward,
    backward=composition.backward,
    device_backward=cuda_backward,
    plans_cuda=False,
    saves=True,
)


def invariant_point_attention(
    node: Tensor,
    pair: Tensor,
    translations: Tensor,
    rotations: Tensor,
    node_mask: Tensor | None,
    layer_norm_weight: Tensor | None,
    layer_norm_bias: Tensor | None,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    q_pts_weight: Tensor,
    k_pts_weight: Tensor,
    v_pts_weight: Tensor,
    pair_bias_weight: Tensor,
    head_weights: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    num_heads: int,
    num_query_points: int,
    num_value_points: int,
    *,
    pair_value: Tensor | None = None,
    gathers_pair: bool = False,
    q_proj_bias: Tensor | None = None,
    k_proj_bias: Tensor | None = None,
    v_proj_bias: Tensor | None = None,
    q_pts_bias: Tensor | None = None,
    k_pts_bias: Tensor | None = None,
    v_pts_bias: Tensor | None = None,
    pair_bias_bias: Tensor | None = None,
    scalar_scale: float | None = None,
    point_scale: float = 1.0,
    bias_scale: float = 1.0,
    norm_eps: float | None = None,
    eps: float = 1e-5,
    precision: str | None = None,
) -> Tensor:
    """Attention over residues by features, by pair bias and by distances of points in space.

    After AlphaFold 2 supplement, Algorithm 22. The defaults are the layer of
    :class:`fused_ops.InvariantPointAttention`, which gathers scalars and points; ``gathers_pair``
    or ``pair_value``, ``norm_eps`` and the scales make it that of OpenFold or of FrameDiff. Points
    are rows: a local point p of residue i is ``p @ R_i + t_i`` in the global frame. With
    ``x = LayerNorm(node)`` and ``w = point_scale * softplus(head_weights)`` ::

        logits[..., h, i, j] = scalar_scale * q . k - w_h / 2 * sum_p |q_p(i) - k_p(j)|^2
                               + bias_scale * pair_bias(pair)[..., i, j, h]
        a = softmax_j(logits),  l = local_i(sum_j a v_pts)
        out = out_proj([sum_j a v, l, sqrt(|l|^2 + norm_eps), sum_j a value_ij])

    The lengths are there if ``norm_eps`` is, the last part if ``gathers_pair`` or ``pair_value``.

    Parameters
    ----------
    node
        (..., N, node_dim); float32, bfloat16, float16 or float64. Any number of leading axes.
    pair
        (..., N, N, pair_dim), as ``node``; leading axes may be 1 or missing, here and below.
    translations
        (..., N, 3), in the length unit the points are learnt in (Angstrom or nm).
    rotations
        (..., N, 3, 3), proper rotations; the rows are the axes of the frame, so that libraries
        that take points as columns pass theirs transposed. Frames may stay in float32 beside
        16-bit activations.
    node_mask
        (..., N), bool, integer or floating: residues where it is 0 are not attended to; None
        keeps all. Not differentiated. With nothing to attend to, all features are zero.
    layer_norm_weight, layer_norm_bias
        (node_dim,) both, or None both: ``x`` is ``node`` then.
    q_proj_weight, k_proj_weight, v_proj_weight
        (num_heads * d, node_dim); d is free of node_dim.
    q_pts_weight, k_pts_weight, v_pts_weight
        (num_heads * points * 3, node_dim), rows ordered (head, point, xyz).
    pair_bias_weight
        (num_heads, pair_dim)
    head_weights
        (num_heads,), before the softplus.
    out_proj_weight, out_proj_bias
        (node_dim, F) and an optional (node_dim,). The F features are, in this order, scalars
        (num_heads, d), local points (num_heads, num_value_points, 3), their lengths (num_heads,
        num_value_points), and pair values (num_heads, channels of the tensor they come from).
    num_heads, num_query_points, num_value_points
        Numbers of heads, of query and key points, and of value points of each head.
    pair_value
        (..., N, N, value_dim), as ``node``: what the weights gather for each query and head beside
        scalars and points. Not with ``gathers_pair``.
    gathers_pair
        Whether ``pair`` is gathered so.
    q_proj_bias, k_proj_bias, v_proj_bias, q_pts_bias, k_pts_bias, v_pts_bias, pair_bias_bias
        Of as many elements as the weight has rows; None adds nothing. The softmax does not see
        ``pair_bias_bias``, whose gradient is zero but for rounding.
    scalar_scale
        None for 1 / sqrt(d). OpenFold has sqrt(1 / (3 d)).
    point_scale
        Factor of the softplus of the head weights. OpenFold has sqrt(1 / (3 (9 / 2) Pq)), with Pq
        the ``num_query_points``; the coordinates' unit squared may be put here too.
    bias_scale
        Factor of the pair bias. OpenFold has sqrt(1 / 3).
    norm_eps
        At least 0: the lengths of the local points are features too, as the square root of the
        sum of squares and this. None: they are not. The derivative of a length of 0 is taken as 0.
    eps
        Added to the variance in LayerNorm.
    precision
        For float32 on CUDA: "ieee", "tf32", or None to follow
        ``torch.backends.cuda.matmul.fp32_precision``.

    Returns
    -------
    Tensor
        (..., N, node_dim) in the dtype of ``node``, or of autocast where that is on.

    Raises
    ------
    ValueError
        For a wrong shape, count or precision, both of ``pair_value`` and ``gathers_pair``, one of
        the LayerNorm's parameters alone, a negative ``norm_eps``, or a mask that requires a
        gradient.
    TypeError
        For dtypes that do not mix.
    RuntimeError
        For tensors on different devices.

    Notes
    -----
    No tensor of size N * N * num_heads times points or channels is made, forward or backward. What
    is kept for the backward are the arguments, and by CUDA kernels what they have made of each
    node: the projections, the features and the sums of the softmax. Working memory is a few blocks
    of attention weights, and the gradients themselves.

    References
    ----------
    Jumper et al. 2021, supplementary Algorithm 22; OpenFold's ``InvariantPointAttention``
    (``gathers_pair``, ``norm_eps=1e-8``, biases); FrameDiff, Yim et al. 2023, whose layer gathers
    a narrower projection of the pair representation (``pair_value``).
    """
    _check.tensors(NAME, node=node, pair=pair, translations=translations, rotations=rotations)
    _check.mask_needs_no_grad(NAME, "node_mask", node_mask)
    return OPERATOR(
        node,
        pair,
        translations,
        rotations,
        node_mask,
        pair_value,
        layer_norm_weight,
        layer_norm_bias,
        q_proj_weight,
        q_proj_bias,
        k_proj_weight,
        k_proj_bias,
        v_proj_weight,
        v_proj_bias,
        q_pts_weight,
        q_pts_bias,
        k_pts_weight,
        k_pts_bias,
        v_pts_weight,
        v_pts_bias,
        pair_bias_weight,
        pair_bias_bias,
        head_weights,
        out_proj_weight,
        out_proj_bias,
        num_heads,
        num_query_points,
        num_value_points,
        scalar_scale,
        point_scale,
        bias_scale,
        gathers_pair,
        norm_eps,
        eps,
        resolve_precision(NAME, precision),
        autocast_dtype(node),
    )
