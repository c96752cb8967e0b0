# SPDX-License-Identifier: Apache-2.0
"""What takes part in a benchmark: the fused module and all that it is held against.

Each class makes a module with the weights of the eager reference and says when it cannot take
part. Whatever computes something else than the reference says what, and brings its own definition,
so that its error too is an error and not a difference of conventions.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import fused_ops
from benchmarks.attention_core import Attend, AttentionCore, softmax_attention
from benchmarks.case import BOTH, FORWARD, Case
from fused_ops import reference


class Skip(Exception):
    """Why something does not take part."""


class Setting(NamedTuple):
    """What an opponent is asked to take part in."""

    case: Case
    mode: str
    direction: str
    device: torch.device


class Entry(NamedTuple):
    """A module ready to run, its inputs, and what defines its result (run in float64)."""

    module: nn.Module
    inputs: list[Tensor]
    definition: nn.Module


class Opponent:
    """Makes an :class:`Entry` out of the reference module."""

    name: ClassVar[str]
    ops: ClassVar[tuple[str, ...]] = ()
    """Ops it exists for; empty: all."""
    note: ClassVar[str] = ""
    """What it computes differently, or leaves out."""
    same_work: ClassVar[bool] = True
    """Whether it does all of the op; otherwise no share of the roofline is given."""
    compiles: ClassVar[bool] = False
    """Whether it takes seconds to get ready; such ones are measured after all others."""
    package: ClassVar[str] = ""
    """The package that it needs."""

    @classmethod
    def check(cls, setting: Setting) -> None:
        """Raise :class:`Skip` with the reason if it cannot take part in ``setting``."""
        if cls.package:
            if setting.device.type != "cuda":
                raise Skip(f"{cls.package} runs on CUDA only")
            cls.library()

    @classmethod
    def library(cls) -> Any:
        """Its package, imported."""
        try:
            return importlib.import_module(cls.package)
        except Exception as error:  # a broken installation raises what it likes
            raise Skip(f"{cls.package} cannot be imported ({first_line(error)})") from error

    @classmethod
    def enter(cls, eager: nn.Module, inputs: list[Tensor]) -> Entry:
        return Entry(cls.build(eager), inputs, eager)

    @classmethod
    def build(cls, eager: nn.Module) -> nn.Module:
        raise NotImplementedError


def first_line(error: BaseException) -> str:
    """What an error says, short enough for a report."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]


def named(path: str) -> Any:
    """The thing called ``package.module:attribute``."""
    module, _, attributes = path.partition(":")
    try:
        return functools.reduce(getattr, attributes.split("."), importlib.import_module(module))
    except (AttributeError, ImportError, ValueError) as error:
        raise Skip(f"there is no {path!r} ({first_line(error)})") from error


class Fused(Opponent):
    name = "fused"
    core: ClassVar[str] = ""
    """``package.module:function``, an :data:`Attend` of ours that no module shows by itself."""

    @classmethod
    def build(cls, eager: nn.Module) -> nn.Module:
        if isinstance(eager, AttentionCore):
            if not cls.core:
                raise Skip("the attention of ours alone is measured where --core names it")
            return AttentionCore(named(cls.core))
        module: nn.Module = getattr(fused_ops, type(eager).__name__).from_reference(eager)
        return module


class Eager(Opponent):
    name = "eager"

    @classmethod
    def build(cls, eager: nn.Module) -> nn.Module:
        return eager


class Compiled(Opponent):
    """torch.compile of the reference in its default mode."""

    name = "compile"
    compiles = True

    @classmethod
    def check(cls, setting: Setting) -> None:
        if setting.device.type == "cpu" and setting.direction != FORWARD:
            raise Skip("on the CPU its forward alone is measured; a backward compiles for long")
        if setting.direction not in (FORWARD, BOTH):
            raise Skip("a single gradient is not compiled on its own")

    @classmethod
    def build(cls, eager: nn.Module) -> nn.Module:
        torch.compiler.reset()
        return cast("nn.Module", torch.compile(eager, dynamic=False))


class FusedOp(Opponent):
    """The op without its module: what remains of a call when the parameters are at hand."""

    name = "op"

    @classmethod
    def build(cls, eager: nn.Module) -> nn.Module:
        return _Op(Fused.build(eager))


class _Op(nn.Module):
    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        self.fused = fused
        room = type(fused).__module__.rpartition(".")[0]
        self.operator: Callable[..., Tensor] = importlib.import_module(f"{room}.op").OPERATOR
        self.operands: list[Any] | None = None

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.operands is None:
            self.operands = self.fused._operands(*inputs)  # type: ignore[operator]
        return self.operator(*self.operands)


class Matmul(Opponent):
    name = "torch.matmul"
    ops = ("tensor_matmul",)

    @classmethod
    def build(cls, eager: nn.Module) -> nn.Module:
        return _Matmul()


class _Matmul(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.matmul(a, b)


# Row attention and triangle attention around a given attention core, and the core alone.

ROW_OPS = ("msa_row_attention", "triangle_attention")


def project(eager: nn.Module, first: Tensor, *pair: Tensor) -> tuple[Tensor, ...]:
    """Normalised MSA, or pair where there is no other, then q, k, v and bias for an
    :data:`Attend`."""
    modules: Any = eager
    if getattr(eager, "direction", "starting") != "starting":
        raise ValueError("around the ending node the pair would have to be transposed")
    x = modules.layer_norm(first)
    q, k, v = (
        layer(x).unflatten(-1, (modules.num_heads, -1)).transpose(-2, -3)
        for layer in (modules.query, modules.key, modules.value)
    )
    return x, q, k, v, modules.pair_bias(*(pair or (x,))).movedim(-1, -3)


class _RowAttention(nn.Module):
    def __init__(self, eager: nn.Module, attend: Attend) -> None:
        super().__init__()
        self.eager: Any = eager
        self.attend = attend

    def forward(self, *inputs: Tensor) -> Tensor:
        *tensors, mask = inputs
        x, q, k, v, bias = project(self.eager, *tensors)
        o = self.attend(q, k, v, bias, mask).transpose(-2, -3).flatten(-2)
        out: Tensor = self.eager.out_proj(torch.sigmoid(self.eager.gate(x)) * o)
        return out


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """PyTorch's fused kernels take four axes; expanded over the rows, the bias is no copy when
    the batch is 1."""
    batch, rows = q.shape[:2]
    expanded = bias.unsqueeze(1).expand(batch, rows, *bias.shape[1:]).flatten(0, 1)
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=expanded)
    return out.unflatten(0, (batch, rows))


class Attention(Opponent):
    """The module around somebody's attention, or that attention alone."""

    ops = (*ROW_OPS, "attention_core")

    @classmethod
    def attend(cls) -> Attend:
        raise NotImplementedError

    @classmethod
    def build(cls, eager: nn.Module) -> nn.Module:
        if isinstance(eager, AttentionCore):
            return AttentionCore(cls.attend())
        return _RowAttention(eager, cls.attend())


class Sdpa(Attention):
    """PyTorch's attention."""

    name = "sdpa"
    note = "without the mask, which here masks nothing"

    @classmethod
    def attend(cls) -> Attend:
        return sdpa


class SdpaCore(Opponent):
    """What no module built on PyTorch's attention can come under."""

    name = "sdpa core"
    ops = ROW_OPS
    note = "the attention alone, its projections made before"
    same_work = False

    @classmethod
    def enter(cls, eager: nn.Module, inputs: list[Tensor]) -> Entry:
        *tensors, mask = inputs
        with torch.no_grad():
            _, *projected = project(eager, *tensors)
        alone = [*(t.contiguous() for t in projected), mask]
        return Entry(AttentionCore(sdpa), alone, AttentionCore(softmax_attention))


class Flex(Attention):
    """FlexAttention, the bias added by its score function."""

    name = "flex"
    note = Sdpa.note
    compiles = True

    @classmethod
    def check(cls, setting: Setting) -> None:
        if setting.device.type != "cuda":
            raise Skip("FlexAttention is measured on CUDA only")
        sizes = setting.case.sizes
        if (sizes["d"] if "d" in sizes else sizes["c"] // sizes["H"]) < 16:
            raise Skip("FlexAttention takes heads of 16 channels and more")

    @classmethod
    def attend(cls) -> Attend:
        torch.compiler.reset()
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)

        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
            batch, rows = q.shape[:2]
            bias = bias.contiguous()

            def score(one: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return one + bias[b // rows, h, i, j]

            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            out: Tensor = compiled(q, k, v, score_mod=score)
            return out.unflatten(0, (batch, rows))

        return attend


class CuEquivarianceAttention(Attention):
    """cuEquivariance's triangle attention, the rows as its first N."""

    name = "cuequivariance"
    package = "cuequivariance_torch"

    @classmethod
    def attend(cls) -> Attend:
        attention = cls.library().triangle_attention

        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = attention(
                *(t.contiguous() for t in (q, k, v)),
                bias.unsqueeze(1).contiguous(),
                mask=mask[:, :, None, None, :],  # True keeps
            )
            return out

        return attend


class Trifast(Attention):
    """trifast's triangle attention, which takes square problems only."""

    name = "trifast"
    package = "trifast"

    @classmethod
    def check(cls, setting: Setting) -> None:
        super().check(setting)
        sizes = setting.case.sizes
        if sizes.get("S", sizes["N"]) != sizes["N"]:
            raise Skip("it takes as many rows as columns")

    @classmethod
    def attend(cls) -> Attend:
        attention = cls.library().triangle_attention

        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
            heads_first = (t.transpose(1, 2).contiguous() for t in (q, k, v))
            out: Tensor = attention(*heads_first, bias.contiguous(), ~mask)  # True masks
            return out.transpose(1, 2)

        return attend


# Triangular multiplicative update.


class CuEquivarianceTriangle(Opponent):
    """cuEquivariance's update with our weights: a above b in its joint projections."""

    name = "cuequivariance"
    ops = ("triangular_multiplicative_update",)
    note = "its output gate reads the normalised pair"
    package = "cuequivariance_torch"

    @classmethod
    def enter(cls, eager: nn.Module, inputs: list[Tensor]) -> Entry:
        update = cls.library().triangle_multiplicative_update
        return Entry(_CuEquivarianceTriangle(eager, update), inputs, GateNormalised(eager))


class _CuEquivarianceTriangle(nn.Module):
    def __init__(self, eager: nn.Module, update: Callable[..., Tensor]) -> None:
        super().__init__()
        self.eager: Any = eager
        self.update = update
        for kind, name in (("proj", "p_in"), ("gate", "g_in")):
            for part in ("weight", "bias"):
                pieces = [getattr(getattr(eager, f"{kind}_{x}"), part) for x in "ab"]
                joined = nn.Parameter(torch.cat([piece.detach() for piece in pieces]))
                self.register_parameter(f"{name}_{part}", joined)

    def forward(self, pair: Tensor, mask: Tensor) -> Tensor:
        e = self.eager
        return self.update(
            pair,
            direction=e.direction,
            mask=mask.to(pair.dtype),
            norm_in_weight=e.layer_norm_in.weight,
            norm_in_bias=e.layer_norm_in.bias,
            p_in_weight=self.p_in_weight,
            p_in_bias=self.p_in_bias,
            g_in_weight=self.g_in_weight,
            g_in_bias=self.g_in_bias,
            norm_out_weight=e.layer_norm_out.weight,
            norm_out_bias=e.layer_norm_out.bias,
            p_out_weight=e.out_proj.weight,
            p_out_bias=e.out_proj.bias,
            g_out_weight=e.out_gate.weight,
            g_out_bias=e.out_gate.bias,
            eps=e.layer_norm_in.eps,
        )


class GateNormalised(nn.Module):
    """The reference update but for its output gate, which reads the normalised pair as in
    AlphaFold."""

    def __init__(self, eager: nn.Module) -> None:
        super().__init__()
        if not isinstance(eager, reference.TriangularMultiplicativeUpdate):
            raise TypeError(f"expected the reference update, got {type(eager).__name__}")
        self.eager = eager

    def forward(self, pair: Tensor, mask: Tensor) -> Tensor:
        # The reference's result without its gate, times the other gate.
        e = self.eager
        x = e.layer_norm_in(pair)
        factor = mask.to(x.dtype).unsqueeze(-1)
        a = e.proj_a(x) * torch.sigmoid(e.gate_a(x)) * factor
        b = e.proj_b(x) * torch.sigmoid(e.gate_b(x)) * factor
        sum_ = "...ikh,...jkh->...ijh" if e.direction == "outgoing" else "...kih,...kjh->...ijh"
        o = e.out_proj(e.layer_norm_out(torch.einsum(sum_, a, b)))
        out: Tensor = torch.sigmoid(e.out_gate(x)) * o
        return out


OPPONENTS: tuple[type[Opponent], ...] = (
    Fused,
    Eager,
    Matmul,
    Sdpa,
    SdpaCore,
    CuEquivarianceTriangle,
    CuEquivarianceAttention,
    Trifast,
    Compiled,
    Flex,
)
"""All but :class:`FusedOp`, which the overhead suite alone asks for."""


def find(name: str, op: str) -> type[Opponent]:
    """The opponent called ``name`` that exists for ``op``."""
    everyone: tuple[type[Opponent], ...] = (*OPPONENTS, FusedOp)
    for opponent in everyone:
        if opponent.name == name and (not opponent.ops or op in opponent.ops):
            return opponent
    raise LookupError(f"no opponent {name!r} for {op}")


def names(op: str, *, compiles: bool = False) -> tuple[str, ...]:
    """Those that exist for ``op``: the quick ones, or those that compile."""
    return tuple(o.name for o in OPPONENTS if (not o.ops or op in o.ops) and o.compiles == compiles)
