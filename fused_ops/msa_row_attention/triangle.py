# SPDX-License-Identifier: Apache-2.0
"""The drop-in modules of triangle attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fused_ops._dispatch import Query
from fused_ops._module import FusedModule, gather, linear_path
from fused_ops._precision import resolve_precision
from fused_ops.msa_row_attention import triangle_reference
from fused_ops.msa_row_attention.op import OPERATOR, draw_dropout_seed
from fused_ops.msa_row_attention.triangle_op import (
    NAME,
    attend,
    check_edges,
    in_own_words,
    operands_of,
)

_PARAMETERS = (
    *linear_path("layer_norm"),
    *linear_path("query", bias=False),
    *linear_path("key", bias=False),
    *linear_path("value", bias=False),
    *linear_path("gate"),
    *linear_path("pair_bias", bias=False),
    *linear_path("out_proj"),
)


class TriangleAttention(FusedModule, triangle_reference.TriangleAttention):
    """Fused triangle attention (AlphaFold 2 supplement, Algorithms 13 and 14).

    Same constructor, parameters and numbers as :class:`fused_ops.reference.TriangleAttention`,
    except that a query whose keys are all masked gets attention output zero instead of NaN.

    Parameters
    ----------
    pair_dim
        Channels of the pair representation.
    num_heads
        Number of attention heads.
    head_dim
        Channels of a head; ``pair_dim / num_heads`` where it is None.
    direction
        "starting" or "ending": the node that the edges of an attention share.
    dropout
        Probability of dropping an attention weight in training.
    precision
        For float32 on CUDA: "ieee", "tf32", or None to follow
        ``torch.backends.cuda.matmul.fp32_precision``.

    Raises
    ------
    ValueError
        If there is no ``head_dim`` and ``num_heads`` does not divide ``pair_dim``, or for an
        unknown direction or precision.
    """

    _optional_biases = ("gate", "out_proj")

    def __init__(
        self,
        pair_dim: int,
        num_heads: int,
        head_dim: int | None = None,
        direction: str = "starting",
        dropout: float = 0.0,
        *,
        precision: str | None = None,
    ) -> None:
        super().__init__(pair_dim, num_heads, head_dim, direction, dropout)
        resolve_precision(NAME, precision)
        self.precision = precision

    def forward(self, pair_repr: Tensor, pair_mask: Tensor | None = None) -> Tensor:
        """Attend among the edges that start, or end, at the same node.

        Parameters
        ----------
        pair_repr
            (..., N, N, pair_dim), any number of leading axes.
        pair_mask
            (..., N, N), bool, integer or floating, or None for all ones: edges where it is 0 are
            not there as keys. Not differentiated.

        Returns
        -------
        Tensor
            (..., N, N, pair_dim), contiguous, in the dtype of ``pair_repr``, or of autocast where
            that is on.
        """
        return attend(self._operands(pair_repr, pair_mask), self.direction)

    def _operands(
        self, pair_repr: Tensor, pair_mask: Tensor | None = None, *, draw: bool = True
    ) -> list[Any]:
        check_edges(pair_repr, pair_mask, "pair_repr", "pair_mask")
        child = self._modules["dropout"]
        if type(child) is not nn.Dropout:
            raise TypeError(f"{NAME}: dropout must be an nn.Dropout, got {type(child).__name__}")
        dropout = child.p if self.training else 0.0
        return operands_of(
            pair_repr,
            pair_mask,
            draw_dropout_seed(pair_repr) if draw and dropout > 0.0 else None,
            gather(self, _PARAMETERS),
            self.num_heads,
            self.direction,
            dropout,
            self._modules["layer_norm"].eps,  # type: ignore[union-attr,arg-type]
            self.precision,
        )

    def _query(self, *inputs: Any) -> Query:
        operands = self._operands(*inputs, draw=False)  # asking draws no number
        return in_own_words(lambda: OPERATOR.query(operands), operands, self.direction)

    def extra_repr(self) -> str:
        """The settings that are not the default."""
        direction = "" if self.direction == "starting" else f"direction={self.direction!r}"
        return ", ".join(filter(None, (direction, super().extra_repr())))

    @classmethod
    def _arguments_of(cls, module: nn.Module) -> dict[str, Any]:
        num_heads, pair_dim = module.pair_bias.weight.shape  # type: ignore[union-attr,misc]
        dropout = module.dropout
        return {
            "pair_dim": pair_dim,
            "num_heads": num_heads,
            "head_dim": module.query.weight.shape[0] // num_heads,  # type: ignore[union-attr,index]
            "direction": cls._direction_of(module),
            "dropout": dropout.p if isinstance(dropout, nn.Module) else dropout,
        }

    @classmethod
    def _direction_of(cls, module: nn.Module) -> Any:
        return module.direction


class _FixedDirection(TriangleAttention):
    """Constructor and ``from_reference`` of the two convenience classes."""

    _direction: str

    def __init__(
        self,
        pair_dim: int,
        num_heads: int,
        head_dim: int | None = None,
        dropout: float = 0.0,
        *,
        precision: str | None = None,
    ) -> None:
        super().__init__(
            pair_dim, num_heads, head_dim, self._direction, dropout, precision=precision
        )

    def extra_repr(self) -> str:
        """The settings that are not the default; the class names the direction."""
        return FusedModule.extra_repr(self)

    @classmethod
    def _arguments_of(cls, module: nn.Module) -> dict[str, Any]:
        arguments = super()._arguments_of(module)
        del arguments["direction"]
        return arguments

    @classmethod
    def _direction_of(cls, module: nn.Module) -> Any:
        direction = getattr(module, "direction", cls._direction)
        if direction != cls._direction:
            raise ValueError(
                f"{cls.__name__}.from_reference: module must have direction "
                f"{cls._direction!r}, got {direction!r}"
            )
        return direction


class TriangleAttentionStartingNode(_FixedDirection):
    """:class:`TriangleAttention` with direction "starting" (Algorithm 13)."""

    _direction = "starting"


class TriangleAttentionEndingNode(_FixedDirection):
    """:class:`TriangleAttention` with direction "ending" (Algorithm 14)."""

    _direction = "ending"
