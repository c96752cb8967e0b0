# SPDX-License-Identifier: Apache-2.0
"""The op: schema, checks, registration and the public function."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops import _check
from fused_ops._dispatch import Operator, Result
from fused_ops._precision import autocast_dtype, resolve_precision
from fused_ops.invariant_point_attention import composition

NAME = "invariant_point_attention"

_ARGUMENTS = (
    "Tensor node",
    "Tensor pair",
    "Tensor translations",
    "Tensor rotations",
    "Tensor? node_mask",
    "Tensor layer_norm_weight",
    "Tensor layer_norm_bias",
    "Tensor q_proj_weight",
    "Tensor k_proj_weight",
    "Tensor v_proj_weight",
    "Tensor q_pts_weight",
    "Tensor k_pts_weight",
    "Tensor v_pts_weight",
    "Tensor pair_bias_weight",
    "Tensor head_weights",
    "Tensor out_proj_weight",
    "Tensor? out_proj_bias",
    "int num_heads",
    "int num_query_points",
    "int num_value_points",
    "float eps",
    "str precision",
    "ScalarType? dtype",
)

DIFFERENTIABLE = (
    "node",
    "pair",
    "translations",
    "rotations",
    "layer_norm_weight",
    "layer_norm_bias",
    "q_proj_weight",
    "k_proj_weight",
    "v_proj_weight",
    "q_pts_weight",
    "k_pts_weight",
    "v_pts_weight",
    "pair_bias_weight",
    "head_weights",
    "out_proj_weight",
    "out_proj_bias",
)


def _check_arguments(
    node: Tensor,
    pair: Tensor,
    translations: Tensor,
    rotations: Tensor,
    node_mask: Tensor | None,
    layer_norm_weight: Tensor,
    layer_norm_bias: Tensor,
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
    eps: float,
    precision: str,
    dtype: torch.dtype | None,
) -> Result:
    _check.rank_at_least(NAME, "node", node, 2, "(..., N, node_dim)")
    _check.rank_at_least(NAME, "pair", pair, 3, "(..., N, N, pair_dim)")
    n, channels = node.shape[-2:]
    lead = tuple(node.shape[:-2])
    pair_channels = pair.shape[-1]
    for name, tensor, shape, text in (
        ("pair", pair, (n, n, pair_channels), "(..., N, N, pair_dim) with the N of node"),
        ("translations", translations, (n, 3), "(..., N, 3) with the N of node"),
        ("rotations", rotations, (n, 3, 3), "(..., N, 3, 3) with the N of node"),
        ("node_mask", node_mask, (n,), "(..., N) with the N of node"),
    ):
        if tensor is not None:
            own = _check.trailing(NAME, name, tensor, shape, text)
            _check.broadcasts(NAME, name, own, lead, "node")
    _check.mask_dtype(NAME, "node_mask", node_mask)
    _check.rank_at_least(NAME, "q_proj_weight", q_proj_weight, 2, "(num_heads * d, node_dim)")
    width = q_proj_weight.shape[0]
    if num_heads < 1 or width % num_heads:
        raise ValueError(
            f"{NAME}: q_proj_weight must have a multiple of num_heads = {num_heads} rows, "
            f"got {width}"
        )
    for name, count in (
        ("num_query_points", num_query_points),
        ("num_value_points", num_value_points),
    ):
        if count < 1:
            raise ValueError(f"{NAME}: {name} must be at least 1, got {count}")
    parameters: dict[str, Tensor | None] = {}

    def expect(name: str, tensor: Tensor | None, shape: tuple[int, ...], text: str) -> None:
        parameters[name] = tensor
        if tensor is not None:
            _check.shape(NAME, name, tensor, shape, text)

    query_width = 3 * num_heads * num_query_points
    value_width = 3 * num_heads * num_value_points
    expect("layer_norm_weight", layer_norm_weight, (channels,), "(node_dim,)")
    expect("layer_norm_bias", layer_norm_bias, (channels,), "(node_dim,)")
    for name, weight in (
        ("q_proj_weight", q_proj_weight),
        ("k_proj_weight", k_proj_weight),
        ("v_proj_weight", v_proj_weight),
    ):
        expect(name, weight, (width, channels), "(num_heads * d, node_dim)")
    points = "(num_heads * points * 3, node_dim)"
    expect("q_pts_weight", q_pts_weight, (query_width, channels), points)
    expect("k_pts_weight", k_pts_weight, (query_width, channels), points)
    expect("v_pts_weight", v_pts_weight, (value_width, channels), points)
    expect(
        "pair_bias_weight", pair_bias_weight, (num_heads, pair_channels), "(num_heads, pair_dim)"
    )
    expect("head_weights", head_weights, (num_heads,), "(num_heads,)")
    expect(
        "out_proj_weight",
        out_proj_weight,
        (channels, width + value_width),
        "(node_dim, num_heads * d + num_heads * num_value_points * 3)",
    )
    expect("out_proj_bias", out_proj_bias, (channels,), "(node_dim,)")
    frames: dict[str, Tensor | None] = {"translations": translations, "rotations": rotations}
    _check.same_device(
        NAME, "node", node, {"pair": pair, "node_mask": node_mask, **frames, **parameters}
    )
    # Frames mix like parameters: they usually stay in float32 beside 16-bit activations.
    result = _check.result_dtype(
        NAME, {"node": node, "pair": pair}, {**frames, **parameters}, dtype
    )
    return Result(tuple(node.shape), result, node.device)


OPERATOR = Operator(
    NAME,
    _ARGUMENTS,
    differentiable=DIFFERENTIABLE,
    check=_check_arguments,
    shapes=lambda a: {
        "node": list(a["node"].shape),
        "pair": list(a["pair"].shape),
        "num_heads": [a["num_heads"]],
        "head_dim": [a["q_proj_weight"].shape[0] // a["num_heads"]],
        "num_query_points": [a["num_query_points"]],
        "num_value_points": [a["num_value_points"]],
    },
    forward=composition.forward,
    backward=composition.backward,
)


def invariant_point_attention(
    node: Tensor,
    pair: Tensor,
    translations: Tensor,
    rotations: Tensor,
    node_mask: Tensor | None,
    layer_norm_weight: Tensor,
    layer_norm_bias: Tensor,
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
    eps: float = 1e-5,
    precision: str | None = None,
) -> Tensor:
    """Attention over residues by features, by pair bias and by distances of points in space.

    After AlphaFold 2 supplement, Algorithm 22, without the pair-value output. Points are rows:
    a local point p of residue i is ``p @ R_i + t_i`` in the global frame. With
    ``x = LayerNorm(node)`` and w = softplus(head_weights) ::

        logits[..., h, i, j] = q . k / sqrt(d) - w_h / 2 * sum_p |q_p(i) - k_p(j)|^2
                               + pair_bias(pair)[..., i, j, h]
        out = out_proj([sum_j a v, local_i(sum_j a v_pts)])    with a = softmax_j(logits)

    Parameters
    ----------
    node
        (..., N, node_dim); float32, bfloat16, float16 or float64. Any number of leading axes.
    pair
        (..., N, N, pair_dim); leading axes may be 1 or missing, here and below.
    translations
        (..., N, 3), in the length unit the points are learnt in (Angstrom or nm).
    rotations
        (..., N, 3, 3), proper rotations; the rows are the axes of the frame. Frames may stay in
        float32 beside 16-bit activations.
    node_mask
        (..., N), bool, integer or floating: residues where it is 0 are not attended to; None
        keeps all. Not differentiated. With nothing to attend to, the attention output is zero.
    layer_norm_weight, layer_norm_bias
        (node_dim,)
    q_proj_weight, k_proj_weight, v_proj_weight
        (num_heads * d, node_dim)
    q_pts_weight, k_pts_weight, v_pts_weight
        (num_heads * points * 3, node_dim), rows ordered (head, point, xyz).
    pair_bias_weight
        (num_heads, pair_dim)
    head_weights
        (num_heads,), before the softplus.
    out_proj_weight, out_proj_bias
        (node_dim, num_heads * d + num_heads * num_value_points * 3) and an optional (node_dim,).
    num_heads, num_query_points, num_value_points
        Numbers of heads, of query and key points, and of value points of each head.
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
        For a wrong shape, count or precision, or a mask that requires a gradient.
    TypeError
        For dtypes that do not mix.
    RuntimeError
        For tensors on different devices.
    """
    _check.tensors(NAME, node=node, pair=pair, translations=translations, rotations=rotations)
    _check.mask_needs_no_grad(NAME, "node_mask", node_mask)
    return OPERATOR(
        node,
        pair,
        translations,
        rotations,
        node_mask,
        layer_norm_weight,
        layer_norm_bias,
        q_proj_weight,
        k_proj_weight,
        v_proj_weight,
        q_pts_weight,
        k_pts_weight,
        v_pts_weight,
        pair_bias_weight,
        head_weights,
        out_proj_weight,
        out_proj_bias,
        num_heads,
        num_query_points,
        num_value_points,
        eps,
        resolve_precision(NAME, precision),
        autocast_dtype(node),
    )
