# SPDX-License-Identifier: Apache-2.0
"""The tolerance rules and the tricks that all test files share.

A result is held against the eager reference run in float64 on the same rounded inputs and
weights. What it may be off by is measured, not guessed: the error that the eager reference makes
in the dtype under test (docs/numerics.md).
"""

import copy
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fused_ops.testing import relative_error

ROUNDING = {
    torch.float32: 2**-24,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    torch.float64: 2**-53,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Sizes that are not multiples of anything, and the smallest.
SIZES = [1, 2, 17, 33, 77]


def randomize(module: nn.Module) -> nn.Module:
    """Give every parameter of ``module`` a random value of moderate size.

    Zeros and ones, as constructors leave them, hide errors: a bias of 0, a weight of 1.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif "norm" in name and name.endswith("weight"):
                parameter.normal_(mean=1.0, std=0.2)
            else:
                parameter.normal_(std=0.3)
    return module


def strided(tensor: Tensor) -> Tensor:
    """The same values as a slice of a larger tensor: strides and storage offset in every test."""
    shape = [*(size + 2 for size in tensor.shape[:-1]), 2 * tensor.shape[-1] + 1]
    poison = float("nan") if tensor.is_floating_point() else 1
    large = torch.full(shape, poison, dtype=tensor.dtype, device=tensor.device)
    index = (*(slice(1, -1) for _ in tensor.shape[:-1]), slice(1, None, 2))
    view = large[index]
    view.copy_(tensor)
    return view.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else view


def in_double(module: nn.Module) -> nn.Module:
    """A float64 copy of ``module`` with the same (rounded) parameter values."""
    return copy.deepcopy(module).double()


def as_double(value: object) -> object:
    """A detached float64 leaf of a floating tensor; anything else as it is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def evaluate(
    module: nn.Module, inputs: Sequence[object], cotangent: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run ``module``; returns the result and the gradients by name (input position, parameter).

    The cotangent is random unless given; ``.mean()`` or ``.sum()`` would hide errors.
    """
    wanted: dict[str, Tensor] = {
        f"input {i}": x for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad
    }
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            wanted[name.removeprefix("inner.")] = parameter  # test modules that wrap another
    result = module(*inputs)
    if not wanted or cotangent is None:
        return result.detach(), {}
    grads = torch.autograd.grad(result, list(wanted.values()), cotangent.to(result.dtype))
    return result.detach(), dict(zip(wanted, grads, strict=True))


def assert_result(
    ours: Tensor, reference: Tensor, oracle: Tensor, dtype: torch.dtype, *, factor: float = 1.5
) -> None:
    """The rule for results: 1.5 times the reference's error, plus a rounding."""
    assert ours.shape == oracle.shape
    if oracle.numel() == 0:
        return
    error = relative_error(ours, oracle)
    allowed = factor * relative_error(reference, oracle)
    allowed += 2e-7 if dtype == torch.float32 else ROUNDING[dtype]
    assert error <= allowed, f"error {error:.3g} against float64, allowed {allowed:.3g}"
    if dtype == torch.float32:
        torch.testing.assert_close(ours, reference, atol=1e-4, rtol=1e-4)


def assert_gradients(
    ours: dict[str, Tensor],
    reference: dict[str, Tensor],
    oracle: dict[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """The rule for gradients: ||a-c|| <= 2||b-c|| + 1e-6||c|| + 5e-7 R sqrt(numel)."""
    assert ours.keys() == oracle.keys()
    scale = ROUNDING[dtype] / ROUNDING[torch.float32]
    largest = max(
        (g.square().mean().sqrt().item() for g in oracle.values() if g.numel()), default=0
    )
    for name, exact in oracle.items():
        a, b, c = ours[name].double(), reference[name].double(), exact.double()
        assert a.shape == c.shape, name
        off = (a - c).norm().item()
        allowed = 2 * (b - c).norm().item() + scale * (
            1e-6 * c.norm().item() + 5e-7 * largest * c.numel() ** 0.5
        )
        assert off <= allowed, f"gradient of {name}: off by {off:.3g}, allowed {allowed:.3g}"


def assert_parity(
    fused: nn.Module,
    reference: nn.Module,
    inputs: Sequence[object],
    dtype: torch.dtype,
    *,
    reference_inputs: Sequence[object] | None = None,
    factor: float = 1.5,
) -> None:
    """Hold ``fused`` against ``reference`` (same weights) in value and every gradient."""
    inputs_again = list(inputs) if reference_inputs is None else list(reference_inputs)
    oracle_module = in_double(reference)
    oracle_inputs = [as_double(x) for x in inputs_again]
    with torch.no_grad():
        shape = fused(*inputs).shape
    device = next(x.device for x in inputs if isinstance(x, Tensor))
    cotangent = torch.randn(shape, device=device).to(dtype)
    ours, our_grads = evaluate(fused, inputs, cotangent)
    theirs, their_grads = evaluate(reference, inputs_again, cotangent)
    exact, exact_grads = evaluate(oracle_module, oracle_inputs, cotangent)
    assert ours.dtype == theirs.dtype
    assert_result(ours, theirs, exact, dtype, factor=factor)
    assert_gradients(our_grads, their_grads, exact_grads, dtype)


def opcheck(operator, args: Sequence[object]) -> None:
    """``torch.library.opcheck`` of all four dispatcher ops, with leaf inputs that require grad
    (detached inputs let a broken autograd registration pass)."""
    name = operator.name
    ops = torch.ops.fused_ops
    needs = [args[i] is not None for i in operator.differentiable]
    grad = torch.randn(operator.check(*args).shape, device=args[0].device).to(
        operator.check(*args).dtype
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # autograd's note on ops without registered autograd
        torch.library.opcheck(getattr(ops, name).default, tuple(args))
        torch.library.opcheck(getattr(ops, f"{name}_forward").default, tuple(args))
        torch.library.opcheck(getattr(ops, f"{name}_backward").default, (grad, *args, needs))
        torch.library.opcheck(getattr(ops, f"{name}_composition").default, (*args, ""))


def assert_compiles(
    module: nn.Module, inputs_for: Callable[[int], Sequence[object]], lengths=(33, 48, 65, 127)
) -> None:
    """``torch.compile(fullgraph, dynamic)`` equals eager in value and gradient over ``lengths``
    with at most two compilations."""
    torch._dynamo.reset()
    graphs = 0

    def backend(graph, example_inputs):
        nonlocal graphs
        graphs += 1
        return torch._dynamo.backends.debugging.aot_eager(graph, example_inputs)

    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for length in lengths:
        inputs = inputs_for(length)
        with torch.no_grad():
            cotangent = torch.randn_like(module(*inputs))
        value, grads = evaluate(module, inputs, cotangent)
        compiled_value, compiled_grads = evaluate(compiled, inputs, cotangent)
        assert torch.equal(value, compiled_value)
        for (name, grad), other in zip(grads.items(), compiled_grads.values(), strict=True):
            assert torch.equal(grad, other), name
    assert graphs <= 2


def assert_double_backward_raises(module: nn.Module, inputs: Sequence[object], op: str) -> None:
    """Also when the cotangent needs no gradient, where ``once_differentiable`` stays silent."""
    inputs = list(inputs)
    first = next(i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad)
    result = module(*inputs)
    (grad,) = torch.autograd.grad(result, inputs[first], torch.ones_like(result), create_graph=True)
    try:
        torch.autograd.grad(grad.square().sum(), inputs[first])
    except RuntimeError as error:
        assert op in str(error) and "double backward" in str(error)
    else:
        raise AssertionError("double backward went through in silence")
