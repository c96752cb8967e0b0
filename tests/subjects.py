# SPDX-License-Identifier: Apache-2.0
"""Small instances of the four ops and of triangle attention, a second module of one of them: alike
enough that one test can run over all."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from helpers import randomize
from torch import Tensor, nn

import fused_ops
from fused_ops import reference
from fused_ops.invariant_point_attention.op import OPERATOR as IPA_OPERATOR
from fused_ops.msa_row_attention.op import OPERATOR as MSA_OPERATOR
from fused_ops.tensor_matmul.op import OPERATOR as MATMUL_OPERATOR
from fused_ops.triangular_multiplicative_update.op import OPERATOR as TRIANGLE_OPERATOR

OPS = (
    "tensor_matmul",
    "triangular_multiplicative_update",
    "msa_row_attention",
    "invariant_point_attention",
    "triangle_attention",
)
# Those with parameters and a mask.
MASKED_OPS = OPS[1:]
# Those with dispatcher ops of their own; triangle attention calls msa_row_attention's.
DISPATCHED_OPS = OPS[:-1]
# Those whose argument and mask are a whole pair representation.
PAIR_OPS = ("triangular_multiplicative_update", "triangle_attention")
MODULES = {
    "tensor_matmul": "TensorMatmul",
    "triangular_multiplicative_update": "TriangularMultiplicativeUpdate",
    "msa_row_attention": "MSARowAttention",
    "invariant_point_attention": "InvariantPointAttention",
    "triangle_attention": "TriangleAttention",
}
OPERATORS = {
    "tensor_matmul": MATMUL_OPERATOR,
    "triangular_multiplicative_update": TRIANGLE_OPERATOR,
    "msa_row_attention": MSA_OPERATOR,
    "invariant_point_attention": IPA_OPERATOR,
    "triangle_attention": MSA_OPERATOR,
}
SIZES = {
    "tensor_matmul": (),
    "triangular_multiplicative_update": (8, 5),
    "msa_row_attention": (8, 6, 2),
    "invariant_point_attention": (12, 6, 3, 2, 3),
    "triangle_attention": (8, 2, 3, "ending"),  # the direction that transposes
}
ROWS = 3


class Pair(NamedTuple):
    """A fused module and the eager reference around the same parameters."""

    fused: nn.Module
    eager: nn.Module


def build(op: str, *sizes: object, dtype=torch.float32, device="cpu", **options) -> Pair:
    """The modules of ``op`` with random parameters; ``sizes`` as the constructor takes them."""
    name = MODULES[op]
    eager = getattr(reference, name)(*(sizes or SIZES[op]), **options)
    eager = randomize(eager).to(device, dtype)
    return Pair(getattr(fused_ops, name).from_reference(eager), eager)


def tri(c: int, h: int, outgoing: bool = True, **options) -> Pair:
    direction = "outgoing" if outgoing else "incoming"
    return build("triangular_multiplicative_update", c, h, direction, **options)


def msa(c: int, pair_dim: int, heads: int, dropout: float = 0.0, **options) -> Pair:
    return build("msa_row_attention", c, pair_dim, heads, dropout, **options)


def ipa(c: int, pair_dim: int, heads: int, query: int, value: int, **options) -> Pair:
    return build("invariant_point_attention", c, pair_dim, heads, query, value, **options)


def randn(*shape: int, dtype=torch.float32, device="cpu", grad: bool = True) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


def rotations(*lead: int, device="cpu") -> Tensor:
    """Random proper rotations (*lead, 3, 3), made on the CPU: the same on every device."""
    q, r = torch.linalg.qr(torch.randn(*lead, 3, 3, dtype=torch.float64))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    q = q * torch.linalg.det(q)[..., None, None]  # of an odd dimension: -q turns a mirror round
    return q.float().to(device)


def holes(*shape: int, device="cpu") -> Tensor:
    """A 0/1 mask with holes that leaves every row something."""
    mask = (torch.rand(shape) > 0.3).float()
    mask[..., :1] = 1
    return mask.to(device)


def inputs(
    op: str,
    n: int,
    lead: Sequence[int] = (2,),
    dtype=torch.float32,
    device="cpu",
    *,
    grad: bool = True,
    rows: int = ROWS,
    sizes: Sequence[object] = (),
) -> list[Tensor]:
    """Arguments for a module of ``op``, the mask (with holes) last; frames stay in float32."""
    lead = tuple(lead)
    sizes = tuple(sizes) or SIZES[op]
    options = {"dtype": dtype, "device": device, "grad": grad}
    if op == "tensor_matmul":
        return [randn(*lead, n, rows, 8, **options), randn(8, 7, **options)]
    if op in PAIR_OPS:
        mask = holes(*lead, n, n, device=device)
        mask[..., :1, :] = 1  # nor is a column left without anything
        return [randn(*lead, n, n, sizes[0], **options), mask]
    if op == "msa_row_attention":
        return [
            randn(*lead, rows, n, sizes[0], **options),
            randn(*lead, n, n, sizes[1], **options),
            holes(*lead, rows, n, device=device),
        ]
    frames = torch.float64 if dtype == torch.float64 else torch.float32
    return [
        randn(*lead, n, sizes[0], **options),
        randn(*lead, n, n, sizes[1], **options),
        randn(*lead, n, 3, dtype=frames, device=device, grad=grad),
        rotations(*lead, n, device=device).to(frames).requires_grad_(grad),
        holes(*lead, n, device=device),
    ]


def operands(op: str, module: nn.Module, args: Sequence[object]) -> list[object]:
    """``args`` and the parameters of ``module`` in the order of the dispatcher's schema."""
    if op == "tensor_matmul":
        return [*args, "ieee", None]
    return module._operands(*args)


def detached(args: Sequence[object]) -> list[object]:
    """Fresh leaves with the same values and the same wish for a gradient."""
    return [
        a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a
        for a in args
    ]
