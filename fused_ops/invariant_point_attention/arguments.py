# SPDX-License-Identifier: Apache-2.0
"""The arguments of the op: their schema, their names, and what they must fulfil."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fused_ops import _check
from fused_ops._dispatch import Result

NAME = "invariant_point_attention"

ARGUMENTS = (
    "Tensor node",
    "Tensor pair",
    "Tensor translations",
    "Tensor rotations",
    "Tensor? node_mask",
    "Tensor? pair_value",
    "Tensor? layer_norm_weight",
    "Tensor? layer_norm_bias",
    "Tensor q_proj_weight",
    "Tensor? q_proj_bias",
    "Tensor k_proj_weight",
    "Tensor? k_proj_bias",
    "Tensor v_proj_weight",
    "Tensor? v_proj_bias",
    "Tensor q_pts_weight",
    "Tensor? q_pts_bias",
    "Tensor k_pts_weight",
    "Tensor? k_pts_bias",
    "Tensor v_pts_weight",
    "Tensor? v_pts_bias",
    "Tensor pair_bias_weight",
    "Tensor? pair_bias_bias",
    "Tensor head_weights",
    "Tensor out_proj_weight",
    "Tensor? out_proj_bias",
    "int num_heads",
    "int num_query_points",
    "int num_value_points",
    "float? scalar_scale",
    "float point_scale",
    "float bias_scale",
    "bool gathers_pair",
    "float? norm_eps",
    "float eps",
    "str precision",
    "ScalarType? dtype",
)

DIFFERENTIABLE = (
    "node",
    "pair",
    "translations",
    "rotations",
    "pair_value",
    "layer_norm_weight",
    "layer_norm_bias",
    "q_proj_weight",
    "q_proj_bias",
    "k_proj_weight",
    "k_proj_bias",
    "v_proj_weight",
    "v_proj_bias",
    "q_pts_weight",
    "q_pts_bias",
    "k_pts_weight",
    "k_pts_bias",
    "v_pts_weight",
    "v_pts_bias",
    "pair_bias_weight",
    "pair_bias_bias",
    "head_weights",
    "out_proj_weight",
    "out_proj_bias",
)


class Arguments(NamedTuple):
    """The arguments in the order of the schema, by name."""

    node: Tensor
    pair: Tensor
    translations: Tensor
    rotations: Tensor
    node_mask: Tensor | None
    pair_value: Tensor | None
    layer_norm_weight: Tensor | None
    layer_norm_bias: Tensor | None
    q_proj_weight: Tensor
    q_proj_bias: Tensor | None
    k_proj_weight: Tensor
    k_proj_bias: Tensor | None
    v_proj_weight: Tensor
    v_proj_bias: Tensor | None
    q_pts_weight: Tensor
    q_pts_bias: Tensor | None
    k_pts_weight: Tensor
    k_pts_bias: Tensor | None
    v_pts_weight: Tensor
    v_pts_bias: Tensor | None
    pair_bias_weight: Tensor
    pair_bias_bias: Tensor | None
    head_weights: Tensor
    out_proj_weight: Tensor
    out_proj_bias: Tensor | None
    num_heads: int
    num_query_points: int
    num_value_points: int
    scalar_scale: float | None
    point_scale: float
    bias_scale: float
    gathers_pair: bool
    norm_eps: float | None
    eps: float
    precision: str
    dtype: torch.dtype | None

    @property
    def value_channels(self) -> int:
        """Channels of the tensor that pair values are gathered from; 0 if none are."""
        if self.gathers_pair:
            return self.pair.shape[-1]
        return 0 if self.pair_value is None else self.pair_value.shape[-1]


def check(*values: object) -> Result:
    """Raise on arguments that do not fit each other; describe the result."""
    a = Arguments(*values)  # type: ignore[arg-type]
    node, pair = a.node, a.pair
    _check.rank_at_least(NAME, "node", node, 2, "(..., N, node_dim)")
    _check.rank_at_least(NAME, "pair", pair, 3, "(..., N, N, pair_dim)")
    _check_residues(a)
    _check.mask_dtype(NAME, "node_mask", a.node_mask)
    _check_numbers(a)
    parameters = _check_parameters(a)
    frames: dict[str, Tensor | None] = {"translations": a.translations, "rotations": a.rotations}
    activations = {"node": node, "pair": pair}
    if a.pair_value is not None:
        activations["pair_value"] = a.pair_value
    others = {**activations, "node_mask": a.node_mask, **frames, **parameters}
    _check.same_device(NAME, "node", node, others)
    # Frames mix like parameters: they usually stay in float32 beside 16-bit activations.
    dtype = _check.result_dtype(NAME, activations, {**frames, **parameters}, a.dtype)
    return Result(tuple(node.shape), dtype, node.device)


def _check_residues(a: Arguments) -> None:
    """What there is of every residue or pair of residues."""
    n, lead = a.node.shape[-2], tuple(a.node.shape[:-2])
    expected: list[tuple[str, Tensor | None, tuple[int, ...], str]] = [
        ("pair", a.pair, (n, n, a.pair.shape[-1]), "(..., N, N, pair_dim) with the N of node"),
        ("translations", a.translations, (n, 3), "(..., N, 3) with the N of node"),
        ("rotations", a.rotations, (n, 3, 3), "(..., N, 3, 3) with the N of node"),
        ("node_mask", a.node_mask, (n,), "(..., N) with the N of node"),
    ]
    if a.pair_value is not None:
        text = "(..., N, N, value_dim)"
        _check.rank_at_least(NAME, "pair_value", a.pair_value, 3, text)
        values = (n, n, a.pair_value.shape[-1])
        expected.append(("pair_value", a.pair_value, values, f"{text} with the N of node"))
    for name, tensor, shape, text in expected:
        if tensor is not None:
            own = _check.trailing(NAME, name, tensor, shape, text)
            _check.broadcasts(NAME, name, own, lead, "node")


def _check_numbers(a: Arguments) -> None:
    """Counts and options."""
    _check.rank_at_least(NAME, "q_proj_weight", a.q_proj_weight, 2, "(num_heads * d, node_dim)")
    width = a.q_proj_weight.shape[0]
    if a.num_heads < 1 or width % a.num_heads:
        raise ValueError(
            f"{NAME}: q_proj_weight must have a multiple of num_heads = {a.num_heads} rows, "
            f"got {width}"
        )
    for name in ("num_query_points", "num_value_points"):
        if getattr(a, name) < 1:
            raise ValueError(f"{NAME}: {name} must be at least 1, got {getattr(a, name)}")
    if a.norm_eps is not None and not a.norm_eps >= 0:
        raise ValueError(f"{NAME}: norm_eps must be None or at least 0, got {a.norm_eps}")
    if a.gathers_pair and a.pair_value is not None:
        raise ValueError(
            f"{NAME}: gathers_pair must be False where pair_value is given, got both: values are "
            f"gathered from one tensor"
        )
    if (a.layer_norm_weight is None) != (a.layer_norm_bias is None):
        raise ValueError(
            f"{NAME}: layer_norm_weight and layer_norm_bias must be given together, got only one"
        )


def _check_parameters(a: Arguments) -> dict[str, Tensor | None]:
    """Shapes of all parameters; returns them by name."""
    channels, width = a.node.shape[-1], a.q_proj_weight.shape[0]
    query_width = 3 * a.num_heads * a.num_query_points
    points = a.num_heads * a.num_value_points
    parameters: dict[str, Tensor | None] = {}

    def expect(name: str, shape: tuple[int, ...], text: str) -> None:
        tensor = parameters[name] = getattr(a, name)
        if tensor is not None:
            _check.shape(NAME, name, tensor, shape, text)

    expect("layer_norm_weight", (channels,), "(node_dim,)")
    expect("layer_norm_bias", (channels,), "(node_dim,)")
    for name, rows, text in (
        ("q_proj", width, "num_heads * d"),
        ("k_proj", width, "num_heads * d"),
        ("v_proj", width, "num_heads * d"),
        ("q_pts", query_width, "num_heads * points * 3"),
        ("k_pts", query_width, "num_heads * points * 3"),
        ("v_pts", 3 * points, "num_heads * points * 3"),
    ):
        expect(f"{name}_weight", (rows, channels), f"({text}, node_dim)")
        expect(f"{name}_bias", (rows,), f"({text},)")
    bias_shape = (a.num_heads, a.pair.shape[-1])
    expect("pair_bias_weight", bias_shape, "(num_heads, pair_dim)")
    expect("pair_bias_bias", (a.num_heads,), "(num_heads,)")
    expect("head_weights", (a.num_heads,), "(num_heads,)")
    features, text = width + 3 * points, "num_heads * d + num_heads * num_value_points * 3"
    if a.norm_eps is not None:
        features, text = features + points, f"{text} + num_heads * num_value_points"
    if a.value_channels:
        features += a.num_heads * a.value_channels
        text += f" + num_heads * {'pair' if a.gathers_pair else 'value'}_dim"
    expect("out_proj_weight", (channels, features), f"(node_dim, {text})")
    expect("out_proj_bias", (channels,), "(node_dim,)")
    return parameters
