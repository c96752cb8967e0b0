# SPDX-License-Identifier: Apache-2.0
"""The drop-in module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fused_ops import _check
from fused_ops._dispatch import Query
from fused_ops._module import FusedModule, gather, linear_path
from fused_ops._precision import autocast_dtype, resolve_precision
from fused_ops.msa_row_attention import reference
from fused_ops.msa_row_attention.op import NAME, OPERATOR, draw_dropout_seed

_PARAMETERS = (
    *linear_path("layer_norm"),
    *linear_path("query", bias=False),
    *linear_path("key", bias=False),
    *linear_path("value", bias=False),
    *linear_path("gate"),
    *linear_path("pair_bias", bias=False),
    *linear_path("out_proj"),
)
_BEFORE_PAIR_NORM = 7  # of the tensors


class MSARowAttention(FusedModule, reference.MSARowAttention):
    """Fused MSA row attention with pair bias (AlphaFold 2 supplement, Algorithm 7).

    Same constructor, parameters and numbers as :class:`fused_ops.reference.MSARowAttention`,
    except that a query whose keys are all masked gets attention output zero instead of NaN.

    Parameters
    ----------
    msa_dim
        Channels of the MSA representation; a multiple of ``num_heads``.
    pair_dim
        Channels of the pair representation.
    num_heads
        Number of attention heads.
    dropout
        Probability of dropping an attention weight in training.
    precision
        For float32 on CUDA: "ieee", "tf32", or None to follow
        ``torch.backends.cuda.matmul.fp32_precision``.

    Raises
    ------
    ValueError
        If ``num_heads`` does not divide ``msa_dim``, or for an unknown precision.
    """

    _optional_biases = ("gate", "out_proj")

    def __init__(
        self,
        msa_dim: int,
        pair_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        precision: str | None = None,
    ) -> None:
        super().__init__(msa_dim, pair_dim, num_heads, dropout)
        resolve_precision(NAME, precision)
        self.precision = precision

    def forward(
        self, msa_repr: Tensor, pair_repr: Tensor, msa_mask: Tensor | None = None
    ) -> Tensor:
        """Attend along the rows of the MSA.

        Parameters
        ----------
        msa_repr
            (..., S, N, msa_dim), any number of leading axes.
        pair_repr
            (..., N, N, pair_dim); leading axes may be 1.
        msa_mask
            (..., S, N), bool, integer or floating: keys where it is 0 are not there; None keeps
            all. Not differentiated.

        Returns
        -------
        Tensor
            (..., S, N, msa_dim) in the dtype of ``msa_repr``, or of autocast where that is on.
        """
        return OPERATOR(*self._operands(msa_repr, pair_repr, msa_mask))

    def _operands(
        self,
        msa_repr: Tensor,
        pair_repr: Tensor,
        msa_mask: Tensor | None = None,
        *,
        draw: bool = True,
    ) -> list[Any]:
        _check.tensor(NAME, "msa_repr", msa_repr)
        _check.tensor(NAME, "pair_repr", pair_repr)
        _check.mask_needs_no_grad(NAME, "msa_mask", msa_mask)
        child = self._modules["dropout"]
        if type(child) is not nn.Dropout:
            raise TypeError(f"{NAME}: dropout must be an nn.Dropout, got {type(child).__name__}")
        dropout = child.p if self.training else 0.0
        parameters = gather(self, _PARAMETERS)
        return [
            msa_repr,
            pair_repr,
            msa_mask,
            draw_dropout_seed(msa_repr) if draw and dropout > 0.0 else None,
            *parameters[:_BEFORE_PAIR_NORM],
            None,
            None,
            *parameters[_BEFORE_PAIR_NORM:],
            self.num_heads,
            dropout,
            self._modules["layer_norm"].eps,  # type: ignore[union-attr]
            resolve_precision(NAME, self.precision),
            autocast_dtype(msa_repr),
        ]

    def _query(self, *inputs: Any) -> Query:
        return OPERATOR.query(self._operands(*inputs, draw=False))  # asking draws no number

    @classmethod
    def _arguments_of(cls, module: nn.Module) -> dict[str, Any]:
        num_heads, pair_dim = module.pair_bias.weight.shape  # type: ignore[union-attr,misc]
        dropout = module.dropout
        return {
            "msa_dim": module.query.weight.shape[1],  # type: ignore[union-attr,index]
            "pair_dim": pair_dim,
            "num_heads": num_heads,
            "dropout": dropout.p if isinstance(dropout, nn.Module) else dropout,
        }
