# SPDX-License-Identifier: Apache-2.0
"""Case H18: torch.compile, fake kernels, autocast inside a compiled region, dynamic lengths."""

import warnings

import pytest
import torch
from helpers import assert_compiles, evaluate
from subjects import OPERATORS, OPS, build, inputs, operands


def permuted(args):
    """The same values with the axes before the last stored the other way round."""
    out = []
    for a in args:
        if a.dim() < 3:
            out.append(a)
            continue
        view = a.detach().transpose(-2, -3).contiguous().transpose(-2, -3)
        out.append(view.requires_grad_(a.requires_grad))
    return out


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_h18_opcheck_of_permuted_inputs(device, op, dtype):
    """Schema, fake kernel and autograd registration, also as autocast calls the op.

    The rooms' own tests run every check of opcheck, the slow ones too.
    """
    fused, _ = build(op, device=device)
    flat = operands(op, fused, permuted(inputs(op, 4, device=device)))
    flat[-1] = dtype
    operator, ops = OPERATORS[op], torch.ops.fused_ops
    needs = [flat[i] is not None for i in operator.differentiable]
    grad = torch.randn(operator.check(*flat).shape, device=device).to(dtype or torch.float32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # autograd's note on ops without registered autograd
        for name, args in (
            (operator.name, flat),
            (f"{operator.name}_forward", flat),
            (
                f"{operator.name}_backward",
                [grad.transpose(1, 2).contiguous().transpose(1, 2), *flat, needs],
            ),
            (f"{operator.name}_composition", [*flat, ""]),
        ):
            torch.library.opcheck(getattr(ops, name).default, tuple(args), test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_h18_fake_kernels_give_dtypes_and_strides_of_the_real_ones(device, op, dtype):
    fused, _ = build(op, dtype=dtype, device=device)
    args = permuted(inputs(op, 4, dtype=dtype, device=device))
    flat = operands(op, fused, args)
    operator = OPERATORS[op]
    forward = getattr(torch.ops.fused_ops, f"{operator.name}_forward")
    backward = getattr(torch.ops.fused_ops, f"{operator.name}_backward")
    needs = [flat[i] is not None for i in operator.differentiable]
    with torch.no_grad():
        real = forward(*flat)
        grads = backward(torch.randn_like(real), *flat, needs)
    with torch._subclasses.FakeTensorMode() as mode, torch.no_grad():
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in flat]
        fake = forward(*fakes)
        fake_grads = backward(torch.empty_like(fake), *fakes, needs)
    for ours, theirs in zip([real, *grads], [fake, *fake_grads], strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
        assert theirs.device.type == device


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_h18_compiles_without_graph_breaks(device, op, autocast):
    torch._dynamo.reset()
    fused, _ = build(op, device=device)
    args = permuted(inputs(op, 9, device=device))
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        cotangent = torch.randn_like(fused(*args))
        value, grads = evaluate(fused, args, cotangent)
        compiled_value, compiled_grads = evaluate(compiled, args, cotangent)
    assert value.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert torch.equal(value, compiled_value)
    for (name, gradient), other in zip(grads.items(), compiled_grads.values(), strict=True):
        assert torch.equal(gradient, other), name


@pytest.mark.parametrize("op", OPS)
def test_h18_lengths_share_a_compilation(device, op):
    fused, _ = build(op, device=device)
    assert_compiles(fused, lambda n: permuted(inputs(op, n, (1,), device=device)))


def test_h18_dropout_compiles_and_differs_from_call_to_call(device):
    torch._dynamo.reset()
    fused, _ = build("msa_row_attention", 8, 6, 2, 0.5, device=device)
    args = inputs("msa_row_attention", 9, device=device)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    first, second = compiled(*args), compiled(*args)
    assert not torch.equal(first, second)
    # One seed serves forward and backward: Euler's identity, as in H16.
    cotangent = torch.randn_like(first)
    (gradient,) = torch.autograd.grad(first, fused.value.weight, cotangent)
    product = cotangent * (first - fused.out_proj.bias)
    assert abs((gradient * fused.value.weight).sum() - product.sum()) <= 1e-4 * product.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["tensor_matmul", "msa_row_attention"])  # a kernel, a composition
def test_h18_inductor(op):
    torch._dynamo.reset()
    fused, _ = build(op, device="cuda")
    args = permuted(inputs(op, 33, device="cuda"))

    def block(*args):
        return torch.nn.functional.gelu(fused(args[0] * 2, *args[1:])) + 1

    compiled = torch.compile(block, fullgraph=True)
    wanted = [a for a in args if a.requires_grad] + list(fused.parameters())
    cotangent = torch.randn_like(block(*args))
    torch.testing.assert_close(compiled(*args), block(*args), atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad(compiled(*args), wanted, cotangent)
    theirs = torch.autograd.grad(block(*args), wanted, cotangent)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 * max(1, b.abs().max().item()), rtol=1e-4)
