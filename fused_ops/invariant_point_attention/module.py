# SPDX-License-Identifier: Apache-2.0
"""The drop-in module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fused_ops import _check
from fused_ops._dispatch import Query
from fused_ops._module import FusedModule, gather, linear_path
from fused_ops._precision import autocast_dtype, resolve_precision
from fused_ops.invariant_point_attention import reference
from fused_ops.invariant_point_attention.op import NAME, OPERATOR

_LAYER_NORM = linear_path("layer_norm")
_PROJECTIONS = tuple(
    linear_path(name, bias=False)[0]
    for name in ("q_proj", "k_proj", "v_proj", "q_pts", "k_pts", "v_pts", "pair_bias")
)
_OUT_PROJ = linear_path("out_proj")


class InvariantPointAttention(FusedModule, reference.InvariantPointAttention):
    """Fused invariant point attention (after AlphaFold 2 supplement, Algorithm 22).

    Same constructor, parameters and numbers as
    :class:`fused_ops.reference.InvariantPointAttention`.

    Parameters
    ----------
    node_dim
        Channels of the residue representation; a multiple of ``num_heads``.
    pair_dim
        Channels of the pair representation.
    num_heads
        Number of attention heads.
    num_query_points
        Query (and key) points of each head, at least 1.
    num_value_points
        Value points of each head, at least 1.
    precision
        For float32 on CUDA: "ieee", "tf32", or None to follow
        ``torch.backends.cuda.matmul.fp32_precision``.

    Raises
    ------
    ValueError
        If ``num_heads`` does not divide ``node_dim``, or for an unknown precision.
    """

    _optional_biases = ("out_proj",)

    def __init__(
        self,
        node_dim: int,
        pair_dim: int,
        num_heads: int,
        num_query_points: int,
        num_value_points: int,
        *,
        precision: str | None = None,
    ) -> None:
        super().__init__(node_dim, pair_dim, num_heads, num_query_points, num_value_points)
        resolve_precision(NAME, precision)
        self.precision = precision

    def forward(
        self,
        node_repr: Tensor,
        pair_repr: Tensor,
        translations: Tensor,
        rotations: Tensor,
        node_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend over residues.

        Parameters
        ----------
        node_repr
            (..., N, node_dim), any number of leading axes.
        pair_repr
            (..., N, N, pair_dim); leading axes may be 1, here and below.
        translations
            (..., N, 3), in the length unit the points are learnt in (Angstrom or nm).
        rotations
            (..., N, 3, 3), rows are the axes of the frame: a local point p lies at
            ``p @ R + t``.
        node_mask
            (..., N), bool, integer or floating: residues where it is 0 are not attended to;
            None keeps all. Not differentiated.

        Returns
        -------
        Tensor
            (..., N, node_dim) in the dtype of ``node_repr``, or of autocast where that is on.
        """
        return OPERATOR(*self._operands(node_repr, pair_repr, translations, rotations, node_mask))

    def _operands(
        self,
        node_repr: Tensor,
        pair_repr: Tensor,
        translations: Tensor,
        rotations: Tensor,
        node_mask: Tensor | None = None,
    ) -> list[Any]:
        _check.tensors(
            NAME,
            node_repr=node_repr,
            pair_repr=pair_repr,
            translations=translations,
            rotations=rotations,
        )
        _check.mask_needs_no_grad(NAME, "node_mask", node_mask)
        try:
            head_weights = self._parameters["head_weights"]
        except KeyError:  # parametrized
            head_weights = self.head_weights
        q, k, v, q_pts, k_pts, v_pts, pair_bias = gather(self, _PROJECTIONS)
        return [
            node_repr,
            pair_repr,
            translations,
            rotations,
            node_mask,
            None,  # pair_value
            *self._layer_norm(),
            q,
            None,  # here and below, its bias
            k,
            None,
            v,
            None,
            q_pts,
            None,
            k_pts,
            None,
            v_pts,
            None,
            pair_bias,
            None,
            head_weights,
            *gather(self, _OUT_PROJ),
            self.num_heads,
            self.num_query_points,
            self.num_value_points,
            None,  # scalar_scale: the usual one
            1.0,  # point_scale
            1.0,  # bias_scale
            False,  # gathers_pair
            None,  # norm_eps: no lengths
            self._modules["layer_norm"].eps,  # type: ignore[union-attr]
            resolve_precision(NAME, self.precision),
            autocast_dtype(node_repr),
        ]

    def _layer_norm(self) -> list[Tensor | None]:
        parameters = gather(self, _LAYER_NORM)
        if parameters[0] is None or parameters[1] is None:  # to the op: no LayerNorm at all
            raise TypeError(f"{NAME}: layer_norm must have a weight and a bias, got None")
        return parameters

    def _query(self, *inputs: Any) -> Query:
        return OPERATOR.query(self._operands(*inputs))

    @classmethod
    def _arguments_of(cls, module: nn.Module) -> dict[str, Any]:
        num_heads, pair_dim = module.pair_bias.weight.shape  # type: ignore[union-attr,misc]
        return {
            "node_dim": module.q_proj.weight.shape[1],  # type: ignore[union-attr,index]
            "pair_dim": pair_dim,
            "num_heads": num_heads,
            "num_query_points": module.q_pts.weight.shape[0] // (3 * num_heads),  # type: ignore[union-attr,index]
            "num_value_points": module.v_pts.weight.shape[0] // (3 * num_heads),  # type: ignore[union-attr,index]
        }
