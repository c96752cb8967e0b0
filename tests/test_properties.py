# SPDX-License-Identifier: Apache-2.0
"""Property tests: shapes, strides and masks that nobody thought of.

Hypothesis draws the case and a seed; the numbers come from torch. Runs are the same every time.
"""

import pytest
import torch
from helpers import assert_parity, evaluate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from subjects import MASKED_OPS, OPS, PAIR_OPS, build, inputs, rotations

import fused_ops
from fused_ops.testing import relative_error

settings.register_profile(
    "fused_ops",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FIXED = settings.get_profile("fused_ops")

# The same numbers in another layout or batch: sums in another order, nothing else.
SAME = 2e-6

seeds = st.integers(0, 2**31 - 1)
leads = st.lists(st.integers(1, 3), max_size=2).map(tuple)
layouts = st.sampled_from(
    ["plain", "permuted", "sliced", "every second", "reversed axes", "expanded"]
)
mask_dtypes = st.sampled_from(
    [torch.bool, torch.uint8, torch.int64, torch.half, torch.bfloat16, torch.float32, torch.float64]
)


@st.composite
def cases(draw, op):
    """(arguments in odd layouts, the same numbers plain) for a random shape of ``op``."""
    n, rows = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    lead = draw(leads)
    torch.manual_seed(draw(seeds))
    plain = inputs(op, n, lead, rows=rows)
    odd = []
    for i, tensor in enumerate(plain):
        view, value = relaid(draw(layouts), tensor.detach(), draw(seeds), is_rotation(op, i))
        plain[i] = value.contiguous().requires_grad_(tensor.requires_grad)
        odd.append(view.requires_grad_(tensor.requires_grad))
    return odd, plain


def is_rotation(op, i):
    return op == "invariant_point_attention" and i == 3


def relaid(layout, tensor, seed, rotation):
    """A view in the layout asked for, and its values; ``expanded`` changes the values."""
    if layout == "permuted" and tensor.dim() > 1:
        order = torch.randperm(tensor.dim(), generator=torch.Generator().manual_seed(seed)).tolist()
        inverse = [order.index(i) for i in range(len(order))]
        view = tensor.permute(order).contiguous().permute(inverse)
    elif layout == "reversed axes":
        view = tensor.permute(*reversed(range(tensor.dim()))).contiguous()
        view = view.permute(*reversed(range(tensor.dim())))
    elif layout == "sliced":
        big = torch.full([s + 3 for s in tensor.shape], float("nan"))
        view = big[tuple(slice(1, 1 + s) for s in tensor.shape)]
        view.copy_(tensor)
    elif layout == "every second":
        big = torch.full([2 * s for s in tensor.shape], float("nan"))
        view = big[tuple(slice(None, None, 2) for _ in tensor.shape)]
        view.copy_(tensor)
    elif layout == "expanded":
        # Any axis may be repeated but those that make a rotation a rotation.
        axes = tensor.dim() - (2 if rotation else 0)
        if axes == 0:
            return tensor.clone(), tensor
        axis = seed % axes
        view = tensor.narrow(axis, 0, 1).expand(tensor.shape)
        return view, view.clone()
    else:
        view = tensor.clone()
    return view, tensor


@pytest.mark.parametrize("op", OPS)
@settings(FIXED, max_examples=20)
@given(data=st.data())
def test_any_shape_and_strides_equal_the_reference_on_plain_copies(op, data):
    odd, plain = data.draw(cases(op))
    if op == "msa_row_attention":  # of all-masked rows the reference makes NaN; see below
        for masks in (odd, plain):
            masks[-1] = (plain[-1] + (plain[-1].sum(-1, keepdim=True) == 0)).detach()
    if op == "invariant_point_attention":
        for masks in (odd, plain):
            masks[-1] = (plain[-1] + (plain[-1].sum(-1, keepdim=True) == 0)).detach()
    if op == "triangle_attention":
        for masks in (odd, plain):
            masks[-1] = (plain[-1] + (plain[-1].sum(-2, keepdim=True) == 0)).detach()
    fused, eager = build(op)
    assert_parity(fused, eager, odd, torch.float32, reference_inputs=plain)


class WithDeadRows(torch.nn.Module):
    """The reference, with the documented result for queries that have no keys."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        *tensors, mask = args
        ending = getattr(self.inner, "direction", None) == "ending"
        dead = (mask == 0).all(-2 if ending else -1, keepdim=True)
        result = self.inner(*tensors, (mask != 0) | dead)
        return torch.where(dead.unsqueeze(-1), self.inner.out_proj.bias, result)


@pytest.mark.parametrize("op", MASKED_OPS)
@settings(FIXED, max_examples=20)
@given(data=st.data())
def test_any_mask_equals_the_reference(op, data):
    n, lead = data.draw(st.integers(1, 9)), data.draw(leads)
    torch.manual_seed(data.draw(seeds))
    *tensors, mask = inputs(op, n, lead)
    share = data.draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))  # of all-masked rows, often
    mask = (torch.rand(mask.shape) < share).to(data.draw(mask_dtypes))
    if mask.dtype.is_floating_point and op == "triangular_multiplicative_update":
        mask = mask * torch.rand(mask.shape).to(mask.dtype)  # there it is a factor
    elif mask.dtype not in (torch.bool, torch.uint8):
        mask = mask * torch.randint(1, 9, mask.shape).to(mask.dtype) * -1  # anything but zero
    fused, eager = build(op)
    fitting = eager if op == "triangular_multiplicative_update" else WithDeadRows(eager)
    # Fractions of float64 masks are rounded by both, to the dtype of the activations.
    exact = mask.float() if mask.dtype == torch.float64 else mask
    assert_parity(fused, fitting, [*tensors, exact], torch.float32)
    assert relative_error(fused(*tensors, mask), fused(*tensors, exact)) == 0


@pytest.mark.parametrize("op", MASKED_OPS)
@settings(FIXED, max_examples=12)
@given(n=st.integers(1, 9), batch=st.integers(2, 5), seed=seeds)
def test_batch_order_only_permutes_the_result(op, n, batch, seed):
    torch.manual_seed(seed)
    fused, _ = build(op)
    args = inputs(op, n, (batch,))
    order = torch.randperm(batch)
    shuffled = [a.detach()[order].requires_grad_(a.requires_grad) for a in args]
    cotangent = torch.randn_like(fused(*args))
    value, grads = evaluate(fused, args, cotangent)
    other, other_grads = evaluate(fused, shuffled, cotangent[order])
    assert relative_error(other, value[order]) <= SAME
    largest = max(g.norm().item() for g in grads.values())
    for name, gradient in grads.items():
        expected = gradient[order] if name.startswith("input") else gradient
        off = (other_grads[name] - expected).norm().item()
        assert off <= SAME * max(expected.norm().item(), 0.1 * largest), name


@pytest.mark.parametrize("op", MASKED_OPS)
@settings(FIXED, max_examples=12)
@given(
    n=st.integers(1, 8), extra=st.integers(1, 9), scale=st.sampled_from([0.0, 1.0, 1e4]), seed=seeds
)
def test_padding_changes_nothing(op, n, extra, scale, seed):
    torch.manual_seed(seed)
    fused, _ = build(op)
    *long, mask = (a.detach() for a in inputs(op, n + extra, (1,)))
    axes = {
        "triangular_multiplicative_update": [(1, 2)],
        "triangle_attention": [(1, 2)],
        "msa_row_attention": [(2,), (1, 2)],
        "invariant_point_attention": [(1,), (1, 2), (1,), (1,)],
    }[op]
    short = []
    for tensor, own in zip(long, axes, strict=True):
        inside = tuple(slice(0, n) if i in own else slice(None) for i in range(tensor.dim()))
        short.append(tensor[inside].clone())
        tensor.mul_(scale)
        tensor[inside] = short[-1]
    own = (1, 2) if op in PAIR_OPS else (mask.dim() - 1,)
    inside = tuple(slice(0, n) if i in own else slice(None) for i in range(mask.dim()))
    short_mask = mask[inside].clone()
    mask.zero_()
    mask[inside] = short_mask
    expected = fused(*short, short_mask)
    result = fused(*long, mask)
    valid = tuple(slice(0, n) if i in axes[0] else slice(None) for i in range(result.dim()))
    torch.testing.assert_close(result[valid], expected, atol=2e-5, rtol=2e-5)


@settings(FIXED, max_examples=12)
@given(n=st.integers(1, 8), seed=seeds, distance=st.sampled_from([0.0, 1.0, 100.0]))
def test_invariant_point_attention_does_not_see_a_rigid_motion(n, seed, distance):
    torch.manual_seed(seed)
    fused, _ = build("invariant_point_attention")
    node, pair, t, r, mask = inputs("invariant_point_attention", n)
    turn, shift = rotations(), distance * torch.randn(3)
    moved = fused(node, pair, t @ turn + shift, r @ turn, mask)
    # The frames themselves are fp32: a shift by 100 costs them two digits.
    tolerance = 1e-5 * (1 + distance)
    torch.testing.assert_close(moved, fused(node, pair, t, r, mask), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@settings(FIXED)
@given(lead=leads, inner=st.integers(0, 9), columns=st.integers(0, 9), seed=seeds)
def test_matmul_of_integers_is_exact_and_linear(dtype, lead, inner, columns, seed):
    torch.manual_seed(seed)
    # Sums of at most 9 products up to 9 stay below 256, where bf16 still holds every integer.
    a, other = torch.randint(-3, 4, (*lead, inner)), torch.randint(-3, 4, (*lead, inner))
    b = torch.randint(-3, 4, (inner, columns))

    def multiply(x, y):
        return fused_ops.tensor_matmul(x.to(dtype), y.to(dtype))

    product = multiply(a, b)
    assert product.dtype == dtype
    assert torch.equal(product.long(), a @ b)
    assert torch.equal(multiply(a + other, b), product + multiply(other, b))
    assert torch.equal(multiply(-2 * a, b), -2 * product)
    assert torch.equal(multiply(a, b.flip(1)), product.flip(-1))


@settings(FIXED)
@given(lead=leads, inner=st.integers(1, 9), columns=st.integers(1, 9), layout=layouts, seed=seeds)
def test_matmul_gradients_of_integers_are_exact(lead, inner, columns, layout, seed):
    torch.manual_seed(seed)
    a, b = torch.randint(-3, 4, (*lead, inner)), torch.randint(-3, 4, (inner, columns))
    grad = torch.randint(-3, 4, (*lead, columns))
    grad, grad_values = relaid(layout, grad.float(), seed, False)
    left, left_values = relaid(layout, a.float(), seed, False)
    right, right_values = relaid(layout, b.float(), seed + 1, False)
    left, right = left.requires_grad_(), right.requires_grad_()
    d_a, d_b = torch.autograd.grad(fused_ops.tensor_matmul(left, right), [left, right], grad)
    assert torch.equal(d_a, grad_values @ right_values.t())
    flat = left_values.reshape(-1, inner), grad_values.reshape(-1, columns)
    assert torch.equal(d_b, flat[0].t() @ flat[1])
