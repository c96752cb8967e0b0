# SPDX-License-Identifier: Apache-2.0
"""tensor_matmul at sizes where CUDA takes the kernels on split operands.

Small ones run in test_emulation.py; the CPU's turn here is an eighth of the rows.
"""

import pytest
import torch
from helpers import evaluate, strided

import fused_ops
from fused_ops import reference, tensor_matmul
from fused_ops.testing import relative_error

FUSED = fused_ops.TensorMatmul()
EAGER = reference.TensorMatmul()

# (rows, L, K), multiples of nothing: all three products on split operands; their narrow tiles; a
# long inner axis.
SIZES = [(12289, 250, 509), (70001, 103, 107), (12301, 8192, 250)]


def decades(count, span, device):
    """Powers of ten over ``span`` decades, in no order."""
    exponents = torch.linspace(-span / 2, span / 2, count, device=device)
    return 10.0 ** exponents[torch.randperm(count, device=device)]


def normal(rows, inner, k, device):
    if device == "cpu":
        rows, inner = rows // 8, min(inner, 1024)
    a = torch.randn(rows, inner, device=device)
    b = torch.randn(inner, k, device=device)
    return a, b, torch.randn(rows, k, device=device)


def rows_over_decades(*sizes):
    a, b, g = normal(*sizes)
    return a * decades(len(a), 10, a.device)[:, None], b, g


def inner_axis_over_decades(*sizes):
    a, b, g = normal(*sizes)
    scale = decades(len(b), 10, a.device)
    return a * scale, b / scale[:, None], g


def inverse_rows(*sizes):
    """As a normalisation behind the product gives it: small rows have large gradients."""
    a, b, g = normal(*sizes)
    scale = decades(len(a), 10, a.device)[:, None]
    return a * scale, b, g / scale


def same_sign(*sizes):
    return tuple(t.abs() for t in normal(*sizes))


def outliers(*sizes):
    a, b, g = normal(*sizes)
    for t in (a, b, g):
        where = torch.randint(t.shape[1], (len(t), 1), device=t.device)
        t.scatter_(1, where, decades(len(t), 8, t.device)[:, None])
    return a, b, g


DATA = [normal, rows_over_decades, inner_axis_over_decades, inverse_rows, same_sign, outliers]


NAMES = ("result", "gradient of a", "gradient of b")


def run(module, a, b, g):
    """The result and both gradients."""
    result, grads = evaluate(module, [t.detach().requires_grad_() for t in (a, b)], g)
    return result, grads["input 0"], grads["input 1"]


def assert_accurate(a, b, g):
    """Forward and both gradients within the parity rule, against float64."""
    ours, theirs = run(FUSED, a, b, g), run(EAGER, a, b, g)
    exact = run(EAGER, a.double(), b.double(), g.double())
    for name, one, other, right in zip(NAMES, ours, theirs, exact, strict=True):
        error, allowed = relative_error(one, right), 1.5 * relative_error(other, right) + 2e-7
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("make", DATA, ids=lambda make: make.__name__)
@pytest.mark.parametrize("sizes", SIZES)
def test_accuracy(device, sizes, make):
    assert_accurate(*make(*sizes, device))


LAYOUTS = {
    "sliced": lambda a, b, g: (strided(a), strided(b), strided(g)),
    "transposed": lambda a, b, g: tuple(t.t().contiguous().t() for t in (a, b, g)),
    "one row": lambda a, b, g: (a[:1].expand_as(a), b, g),
    "one gradient": lambda a, b, g: (a, b, g[:1].expand_as(g)),
    "axes": lambda a, b, g: (
        a[: len(a) // 6 * 6].view(2, 3, len(a) // 6, -1).transpose(0, 2),
        b,
        g[: len(g) // 6 * 6].view(2, 3, len(g) // 6, -1).transpose(0, 2),
    ),
    "unaligned": lambda a, b, g: (a[1:, 1:], b[1:, 1:], g[1:, 1:]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views(device, layout):
    a, b, g = LAYOUTS[layout](*normal(12300, 254, 510, device))
    assert_accurate(a.detach(), b.detach(), g)


def test_special_numbers(device):
    a, b, g = normal(*SIZES[0], device)
    a[3], b[:, 11] = 0, 0
    a[5, 7], a[9, 2], a[1400, 249], b[100, 200] = float("inf"), float("nan"), -float("inf"), 3e38
    a[50, 100] = 3e38
    ours, theirs = run(FUSED, a, b, g), run(EAGER, a, b, g)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.isinf(), other.isinf())
        finite = other.isfinite() & (other.abs() < 1e30)
        torch.testing.assert_close(one[finite], other[finite], atol=2e-3, rtol=1e-4)
    assert not ours[0][3, :11].any()
    assert not ours[0][60:1400, 11].any()


def test_is_deterministic(device):
    tensors = normal(*SIZES[0], device)
    for one, other in zip(run(FUSED, *tensors), run(FUSED, *tensors), strict=True):
        assert torch.equal(one, other)


def test_gradient_op(device):
    a, _, g = normal(*SIZES[0], device)
    ours = torch.ops.fused_ops.tensor_matmul_reduce(a, g, "ieee", None)
    assert relative_error(ours, a.double().t() @ g.double()) < 1e-6
    small = a[:70, :20].requires_grad_(), g[:70, :9]
    torch.library.opcheck(
        torch.ops.fused_ops.tensor_matmul_reduce.default,
        (small[0].detach(), small[1], "ieee", None),
        test_utils=("test_schema", "test_faketensor"),
    )
    with pytest.raises(ValueError, match="leading axes of a"):
        torch.ops.fused_ops.tensor_matmul_reduce(a[1:], g, "ieee", None)


def test_function_takes_precision(device):
    a, b, _ = normal(*SIZES[0], device)
    exact = a.double() @ b.double()
    assert relative_error(tensor_matmul(a, b, precision="ieee"), exact) < 1e-6
    assert relative_error(tensor_matmul(a, b, precision="tf32"), exact) < 2e-3
