# SPDX-License-Identifier: Apache-2.0
"""The drop-in module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fused_ops import _check
from fused_ops._dispatch import Query
from fused_ops._module import FusedModule, gather, linear_path
from fused_ops._precision import autocast_dtype, resolve_precision
from fused_ops.triangular_multiplicative_update import reference
from fused_ops.triangular_multiplicative_update.op import NAME, OPERATOR

_PARAMETERS = (
    *linear_path("layer_norm_in"),
    *linear_path("proj_a"),
    *linear_path("gate_a"),
    *linear_path("proj_b"),
    *linear_path("gate_b"),
    *linear_path("layer_norm_out"),
    *linear_path("out_proj"),
    *linear_path("out_gate"),
)


class TriangularMultiplicativeUpdate(FusedModule, reference.TriangularMultiplicativeUpdate):
    """Fused triangular multiplicative update (AlphaFold 2 supplement, Algorithms 11 and 12).

    Same constructor, parameters and numbers as
    :class:`fused_ops.reference.TriangularMultiplicativeUpdate`. The output gate reads the raw
    pair representation; :func:`fused_ops.functional.triangular_multiplicative_update` has
    AlphaFold's convention too.

    Parameters
    ----------
    pair_dim
        Channels of the pair representation.
    hidden_dim
        Channels of the two projections; need not equal ``pair_dim``.
    direction
        "incoming" or "outgoing".
    max_workspace
        Bytes that the call may hold beyond its inputs and its result, or None. Less than the
        default's need makes it work on fewer hidden channels at a time, at the price of reading
        the input again for each group; when even the smallest group needs more, the smallest is
        used. The PyTorch composition splits its forward alone.
    precision
        For float32 on CUDA: "ieee", "tf32", or None to follow
        ``torch.backends.cuda.matmul.fp32_precision``.

    Raises
    ------
    ValueError
        For an unknown direction or precision, or a negative workspace.
    """

    _optional_biases = ("proj_a", "gate_a", "proj_b", "gate_b", "out_proj", "out_gate")

    def __init__(
        self,
        pair_dim: int,
        hidden_dim: int,
        direction: str = "incoming",
        *,
        max_workspace: int | None = None,
        precision: str | None = None,
    ) -> None:
        super().__init__(pair_dim, hidden_dim, direction)
        _check.max_workspace(NAME, max_workspace)
        resolve_precision(NAME, precision)
        self.max_workspace = max_workspace
        self.precision = precision

    def forward(self, pair_repr: Tensor, pair_mask: Tensor | None = None) -> Tensor:
        """Update the pair representation.

        Parameters
        ----------
        pair_repr
            (..., N, N, pair_dim), any number of leading axes.
        pair_mask
            (..., N, N), bool, integer or floating, or None for all ones. It multiplies both
            projections, so fractions are legal. Not differentiated.

        Returns
        -------
        Tensor
            (..., N, N, pair_dim) in the dtype of ``pair_repr``, or of autocast where that is on.
        """
        return OPERATOR(*self._operands(pair_repr, pair_mask))

    def _operands(self, pair_repr: Tensor, pair_mask: Tensor | None = None) -> list[Any]:
        _check.tensor(NAME, "pair_repr", pair_repr)
        _check.mask_needs_no_grad(NAME, "pair_mask", pair_mask)
        _check.mask_dtype(NAME, "pair_mask", pair_mask)
        _check.max_workspace(NAME, self.max_workspace)
        eps: float = self._modules["layer_norm_in"].eps  # type: ignore[union-attr,assignment]
        eps_out = self._modules["layer_norm_out"].eps  # type: ignore[union-attr]
        if eps != eps_out:
            raise ValueError(
                f"{NAME}: layer_norm_out must have the eps of layer_norm_in, expected {eps}, "
                f"got {eps_out}"
            )
        return [
            pair_repr,
            pair_mask,
            *gather(self, _PARAMETERS),
            self.direction == "outgoing",
            False,
            eps,
            self.max_workspace,
            resolve_precision(NAME, self.precision),
            autocast_dtype(pair_repr),
        ]

    def _query(self, *inputs: Any) -> Query:
        return OPERATOR.query(self._operands(*inputs))

    def extra_repr(self) -> str:
        """The settings that are not the default."""
        parts = [super().extra_repr()]
        if self.max_workspace is not None:
            parts.insert(0, f"max_workspace={self.max_workspace}")
        return ", ".join(filter(None, parts))

    @classmethod
    def _arguments_of(cls, module: nn.Module) -> dict[str, Any]:
        hidden_dim, pair_dim = module.proj_a.weight.shape  # type: ignore[union-attr,misc]
        return {"pair_dim": pair_dim, "hidden_dim": hidden_dim, "direction": module.direction}


class _FixedDirection(TriangularMultiplicativeUpdate):
    """Constructor and ``from_reference`` of the two convenience classes."""

    _direction: str

    def __init__(
        self,
        pair_dim: int,
        hidden_dim: int,
        *,
        max_workspace: int | None = None,
        precision: str | None = None,
    ) -> None:
        super().__init__(
            pair_dim,
            hidden_dim,
            self._direction,
            max_workspace=max_workspace,
            precision=precision,
        )

    @classmethod
    def _arguments_of(cls, module: nn.Module) -> dict[str, Any]:
        hidden_dim, pair_dim = module.proj_a.weight.shape  # type: ignore[union-attr,misc]
        direction = getattr(module, "direction", cls._direction)
        if direction != cls._direction:
            raise ValueError(
                f"{cls.__name__}.from_reference: module must have direction "
                f"{cls._direction!r}, got {direction!r}"
            )
        return {"pair_dim": pair_dim, "hidden_dim": hidden_dim}


class TriangularMultiplicativeUpdateIncoming(_FixedDirection):
    """:class:`TriangularMultiplicativeUpdate` with direction "incoming" (Algorithm 12)."""

    _direction = "incoming"


class TriangularMultiplicativeUpdateOutgoing(_FixedDirection):
    """:class:`TriangularMultiplicativeUpdate` with direction "outgoing" (Algorithm 11)."""

    _direction = "outgoing"
