# SPDX-License-Identifier: Apache-2.0
"""Tensor times matrix against its eager reference."""

import pytest
import torch
from helpers import (
    DTYPES,
    assert_compiles,
    assert_double_backward_raises,
    assert_gradients,
    assert_parity,
    assert_result,
    evaluate,
    opcheck,
    strided,
)

import fused_ops
from fused_ops import reference, tensor_matmul
from fused_ops.tensor_matmul.op import OPERATOR
from fused_ops.testing import peak_memory, relative_error

FUSED = fused_ops.TensorMatmul()
EAGER = reference.TensorMatmul()

# (shape of A, K): every tile edge, vectors that are aligned and not, tall, wide, deep.
CASES = [
    ((1,), 1),
    ((2, 3, 5, 7), 11),
    ((1, 1, 1, 64), 64),
    ((2, 17, 33, 77), 257),
    ((3, 64, 64, 32), 128),
    ((1, 129, 127, 65), 63),
    ((5000, 3), 2),
    ((2, 1000), 260),
    ((4, 8192), 36),
    ((257, 1), 512),
]


def operands(a_shape, k, dtype=torch.float32, device="cpu"):
    a = torch.randn(a_shape, device=device).to(dtype).requires_grad_()
    b = torch.randn(a_shape[-1], k, device=device).to(dtype).requires_grad_()
    return a, b


# Parity ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("a_shape", "k"), CASES)
def test_matches_reference(device, a_shape, k, dtype):
    assert_parity(FUSED, EAGER, operands(a_shape, k, dtype, device), dtype)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 129, 20000])
@pytest.mark.parametrize("k", [1, 64, 65, 129, 256])
def test_every_tile_edge(device, rows, k):
    a, b = operands((rows, 37), k, device=device)
    with torch.no_grad():
        error = relative_error(FUSED(a, b), EAGER(a.double(), b.double()))
        allowed = 1.5 * relative_error(EAGER(a, b), EAGER(a.double(), b.double())) + 2e-7
    assert error <= allowed


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.randn(300, 256, device=d).abs(),
        lambda d: torch.randn(300, 256, device=d) * torch.randn(300, 1, device=d).mul(3).exp(),
        lambda d: torch.randn(300, 8192, device=d),
    ],
    ids=["same sign", "rows over decades", "long sums"],
)
def test_accuracy_on_hard_data(device, make):
    a = make(device)
    b = torch.randn(a.shape[1], 130, device=device)
    if (a > 0).all():
        b = b.abs()
    exact = EAGER(a.double(), b.double())
    allowed = 1.5 * relative_error(EAGER(a, b), exact) + 2e-7
    assert relative_error(FUSED(a, b), exact) <= allowed


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)])
def test_zero_sizes(device, shape):
    a, b = operands(shape, 6, device=device)
    result = FUSED(a, b)
    assert result.shape == (*shape[:-1], 6)
    assert not result.any()
    result.sum().backward()
    assert a.grad.shape == a.shape
    assert not b.grad.any()


def test_no_columns(device):
    a, b = operands((2, 3, 4), 0, device=device)
    result = FUSED(a, b)
    assert result.shape == (2, 3, 0)
    result.sum().backward()
    assert not a.grad.any()


def test_zeros_infinities_and_nan_come_out_as_ieee_gives_them(device):
    a, b = (t.detach() for t in operands((70, 40), 66, device=device))
    a[3] = 0
    a[5, 7] = float("inf")
    a[9, 2] = float("nan")
    b[:, 11] = 0
    result = FUSED(a, b)
    expected = EAGER(a.double(), b.double())
    assert not result[3].any()
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())
    finite = expected.isfinite()
    torch.testing.assert_close(result[finite].double(), expected[finite], atol=1e-4, rtol=1e-4)


# Layouts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        strided,
        lambda t: t.detach().transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t.detach().transpose(0, -1).contiguous().transpose(0, -1),
        lambda t: t.detach()[:, ::2],
        lambda t: t.detach().flip(0),
        lambda t: t.detach()[:1].expand(3, *t.shape[1:]),
        lambda t: t.detach()[:, :1].expand(-1, 5, *t.shape[2:]),
    ],
    ids=["slice", "batch", "columns", "step", "flip", "expand0", "expand1"],
)
def test_any_strides_of_a(device, layout):
    a, b = operands((3, 8, 9, 20), 12, device=device)
    view = layout(a).detach()
    with torch.no_grad():
        torch.testing.assert_close(FUSED(view, b), EAGER(view, b), atol=1e-5, rtol=1e-5)
    whole = view.contiguous().requires_grad_()
    view.requires_grad_()
    cotangent = torch.randn(*view.shape[:-1], 12, device=device)
    for one, other in zip(
        torch.autograd.grad(FUSED(view, b), (view, b), cotangent),
        torch.autograd.grad(FUSED(whole, b), (whole, b), cotangent),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


def test_transposed_and_strided_b(device):
    a, b = operands((4, 33, 20), 36, device=device)
    with torch.no_grad():
        expected = EAGER(a, b)
        transposed = b.t().contiguous().t()
        torch.testing.assert_close(FUSED(a, transposed), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(FUSED(a, strided(b.detach())), expected, atol=1e-5, rtol=1e-5)
        column = b[:, :1].expand(-1, 7)
        torch.testing.assert_close(FUSED(a, column), EAGER(a, column), atol=1e-5, rtol=1e-5)


def test_many_leading_axes(device):
    a = torch.randn(2, 1, 3, 1, 2, 2, 3, 5, device=device).transpose(0, 4).transpose(2, 6)
    b = torch.randn(5, 4, device=device)
    torch.testing.assert_close(FUSED(a, b), EAGER(a, b), atol=1e-5, rtol=1e-5)


def test_expanded_operand_is_not_copied(device):
    n = 96
    a = torch.randn(1, n, n, 64, device=device).expand(8, n, n, 64)
    b = torch.randn(64, 64, device=device)
    result_bytes = 8 * n * n * 64 * 4
    with torch.no_grad():
        FUSED(a, b)
        peak = peak_memory(lambda: FUSED(a, b), device)
    assert peak <= result_bytes * 1.02 + 2**20


# Dtypes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matrix_is_read_as_it_is_stored(device, dtype, stored):
    a, b = operands((2, 17, 24), 10, device=device)
    a, b = a.detach().to(dtype), b.detach().to(stored)
    result = FUSED(a, b)
    assert result.dtype == dtype
    common = a.float(), b.float()
    exact = EAGER(a.double(), b.double())
    allowed_by = EAGER(*common).to(dtype) if stored == dtype else EAGER(a, b.to(dtype))
    assert_result(result, allowed_by, exact, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    a, b = operands((2, 9, 24), 10, device=device)
    cotangent = torch.randn(2, 9, 10, device=device)
    with torch.autocast(device, dtype=dtype):
        ours, our_grads = evaluate(FUSED, [a, b], cotangent)
        theirs, their_grads = evaluate(EAGER, [a, b], cotangent)
    assert ours.dtype == theirs.dtype == dtype
    exact, exact_grads = evaluate(
        EAGER, [t.detach().double().requires_grad_() for t in (a, b)], cotangent
    )
    assert_result(ours, theirs, exact, dtype)
    assert_gradients(our_grads, their_grads, exact_grads, dtype)


# Autograd and framework --------------------------------------------------------------------------


def test_gradcheck(device):
    a, b = operands((2, 3, 4), 5, torch.float64, device)
    assert torch.autograd.gradcheck(tensor_matmul, (a, b))


@pytest.mark.parametrize("which", [0, 1])
def test_only_one_gradient_wanted(device, which):
    a, b = operands((2, 3, 4), 5, device=device)
    cotangent = torch.randn(2, 3, 5, device=device)
    both = torch.autograd.grad(FUSED(a, b), (a, b), cotangent)
    one = [a, b]
    one[1 - which] = one[1 - which].detach()
    (alone,) = torch.autograd.grad(FUSED(*one), one[which], cotangent)
    assert torch.equal(alone, both[which])


def test_gradients_repeat_bitwise(device):
    a, b = operands((4, 999, 65), 70, device=device)
    cotangent = torch.randn(4, 999, 70, device=device)
    first = torch.autograd.grad(FUSED(a, b), (a, b), cotangent)
    for _ in range(5):
        again = torch.autograd.grad(FUSED(a, b), (a, b), cotangent)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_double_backward_raises(device):
    assert_double_backward_raises(FUSED, operands((2, 3, 4), 5, device=device), OPERATOR.name)


def test_opcheck(device):
    a, b = operands((2, 3, 4), 5, device=device)
    a = a.detach().transpose(0, 1).requires_grad_()
    opcheck(OPERATOR, [a, b, "ieee", None])


def test_compiles_without_graph_breaks(device):
    assert_compiles(FUSED, lambda n: operands((1, n, n, 6), 5, device=device))


def test_runs_on_poisoned_memory(device):
    """Every element of the result is written: freed memory full of NaN does not show through."""
    a, b = (t.detach() for t in operands((130, 50), 70, device=device))
    expected = EAGER(a, b)
    for _ in range(3):
        torch.full((130, 70), float("nan"), device=device)
        torch.testing.assert_close(FUSED(a, b), expected, atol=1e-5, rtol=1e-5)


# Errors ------------------------------------------------------------------------------------------


def test_wrong_arguments_are_named(device):
    a = torch.randn(2, 3, device=device)
    with pytest.raises(ValueError, match=r"tensor_matmul: b must have shape \(.*3.*got \(4, 5\)"):
        tensor_matmul(a, torch.randn(4, 5, device=device))
    with pytest.raises(ValueError, match="b must have shape"):
        tensor_matmul(a, torch.randn(3, device=device))
    with pytest.raises(ValueError, match=r"a must have shape \(\.\.\., L\)"):
        tensor_matmul(torch.randn((), device=device), torch.randn(3, 4, device=device))
    with pytest.raises(ValueError, match="precision must be"):
        tensor_matmul(a, torch.randn(3, 4, device=device), precision="fp64")
    # The C++ op can raise ValueError and RuntimeError but not TypeError.
    with pytest.raises((TypeError, ValueError), match=r"b must be .*float64"):
        tensor_matmul(a, torch.randn(3, 4, device=device).double())
    with pytest.raises((TypeError, ValueError), match="a must be float32"):
        tensor_matmul(torch.ones(2, 3, device=device, dtype=torch.int32), a.t())


@pytest.mark.gpu
def test_mixed_devices_are_named():
    with pytest.raises(RuntimeError, match="b must be on the device of a"):
        tensor_matmul(torch.randn(2, 3, device="cuda"), torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="must be on the device of a"):
        tensor_matmul(torch.randn(2, 3), torch.randn(3, 4, device="cuda"))
    assert torch.equal(torch.zeros(1, device="cuda").cpu(), torch.zeros(1))


@pytest.mark.gpu
def test_the_kernel_runs_on_the_gpu():
    a, b = (t.detach() for t in operands((4, 64, 64), 64, device="cuda"))
    explanation = fused_ops.explain(FUSED, a, b)
    assert explanation.path == "kernel", str(explanation)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        tensor_matmul(a, b)
        torch.cuda.synchronize()
    assert any("tensor_matmul" in event.key for event in profile.key_averages())
