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

_BEFORE_HEAD_WEIGHTS = (
    *linear_path("layer_norm"),
    *linear_path("q_proj", bias=False),
    *linear_path("k_proj", bias=False),
    *linear_path("v_proj", bias=False),
    *linear_path("q_pts", bias=False),
    *linear_path("k_pts", bias=False),
    *linear_path("v_pts", bias=False),
    *linear_path("pair_bias", bias=False),
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
        return [
            node_repr,
            pair_repr,
            translations,
            rotations,
            node_mask,
            *gather(self, _BEFORE_HEAD_WEIGHTS),
            head_weights,
            *gather(self, _OUT_PROJ),
            self.num_heads,
            self.num_query_points,
            self.num_value_points,
            self._modules["layer_norm"].eps,  # type: ignore[union-attr]
            resolve_precision(NAME, self.precision),
            autocast_dtype(node_repr),
        ]

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
