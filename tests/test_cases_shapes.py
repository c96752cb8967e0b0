# SPDX-License-Identifier: Apache-2.0
"""Cases H04 to H08: lengths, channels, empty tensors, strides and leading axes."""

import pytest
import torch
from helpers import assert_parity, evaluate, strided
from subjects import (
    MASKED_OPS,
    OPS,
    PAIR_OPS,
    build,
    detached,
    inputs,
    ipa,
    msa,
    randn,
    tri,
)

import fused_ops
from fused_ops.testing import relative_error

# Agreement of one call with the same numbers in another layout or batch: sums in another order.
# Measured on the CPU: at most 4e-7.
SAME = 2e-6


def assert_same(ours, theirs, tolerance=SAME):
    """Value and every gradient agree; each is (value, gradients) as ``evaluate`` returns them."""
    assert relative_error(ours[0], theirs[0]) <= tolerance
    assert ours[1].keys() == theirs[1].keys()
    largest = max((g.norm().item() for g in theirs[1].values()), default=0.0)
    for name, gradient in theirs[1].items():
        off = (ours[1][name].double() - gradient.double()).norm().item()
        assert off <= tolerance * max(gradient.norm().item(), 1e-2 * largest), name


# H04: short, odd and padded lengths --------------------------------------------------------------

LENGTHS = (1, 2, 3, 5, 17, 31, 33, 43, 63, 65, 127, 129)


def padded(op, args, extra):
    """The arguments with ``extra`` more residues of +-1e4 that the mask says are not there."""
    *tensors, mask = args
    n = mask.shape[-1]
    residue_axes = {
        "triangular_multiplicative_update": [(1, 2)],
        "triangle_attention": [(1, 2)],
        "msa_row_attention": [(2,), (1, 2)],
        "invariant_point_attention": [(1,), (1, 2), (1,), (1,)],
    }[op]
    out = []
    for tensor, axes in zip(tensors, residue_axes, strict=True):
        shape = [s + extra if i in axes else s for i, s in enumerate(tensor.shape)]
        garbage = torch.full(shape, 1e4, device=tensor.device)
        garbage = garbage * torch.randn(shape, device=tensor.device).sign()
        inside = tuple(slice(0, n) if i in axes else slice(None) for i in range(tensor.dim()))
        garbage[inside] = tensor.detach()
        out.append((garbage.requires_grad_(), inside))
    shape = list(mask.shape)
    mask_axes = (1, 2) if op in PAIR_OPS else (mask.dim() - 1,)
    for axis in mask_axes:
        shape[axis] += extra
    long_mask = mask.new_zeros(shape)
    long_mask[tuple(slice(0, s) for s in mask.shape)] = mask
    return [t for t, _ in out], long_mask, [index for _, index in out]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("op", MASKED_OPS)
def test_h04_short_odd_and_padded_lengths(device, op, n):
    fused, eager = build(op, device=device)
    cropped = inputs(op, n, (1,), device=device)
    assert_parity(fused, eager, cropped, torch.float32)

    tensors, mask, inside = padded(op, cropped, 7)
    y = fused(*cropped)
    cotangent = torch.randn_like(y)
    value, grads = evaluate(fused, cropped, cotangent)
    long = fused(*tensors, mask)
    long_cotangent = torch.zeros_like(long)
    long_cotangent[inside[0]] = cotangent
    long_value, long_grads = evaluate(fused, [*tensors, mask], long_cotangent)
    torch.testing.assert_close(long_value[inside[0]], value, atol=1e-4, rtol=1e-4)
    for i, index in enumerate(inside):
        assert torch.isfinite(long_grads[f"input {i}"]).all()
        long_grads[f"input {i}"] = long_grads[f"input {i}"][index]
    for name, gradient in grads.items():
        torch.testing.assert_close(
            long_grads[name], gradient, atol=1e-4 * max(1, gradient.abs().max()), rtol=1e-4
        )


@pytest.mark.parametrize("n", LENGTHS)
def test_h04_short_and_odd_lengths_of_a_matmul(device, n):
    fused, eager = build("tensor_matmul")
    assert_parity(fused, eager, inputs("tensor_matmul", n, (1,), device=device), torch.float32)


# H05: channel and head sizes ---------------------------------------------------------------------


@pytest.mark.parametrize(("d", "heads"), [(264, 8), (1024, 4), (8, 8), (96, 4), (100, 5)])
def test_h05_msa_channels_and_heads(device, d, heads):
    fused, eager = msa(d, 16, heads, device=device)
    args = inputs("msa_row_attention", 9, (1,), device=device, rows=2, sizes=(d, 16))
    # On an H200 cuBLAS sums the 1024 products of a projection in one chain for the composition's
    # orientation and in several for the reference's: 8.1e-7 against 3.2e-7 at d = 1024.
    assert_parity(fused, eager, args, torch.float32, factor=1.5 if device == "cpu" else 3.0)


@pytest.mark.parametrize(("c", "hidden"), [(4, 1), (64, 96), (127, 127), (128, 256)])
@pytest.mark.parametrize("outgoing", [True, False])
def test_h05_triangular_channels(device, c, hidden, outgoing):
    fused, eager = tri(c, hidden, outgoing, device=device)
    args = inputs("triangular_multiplicative_update", 9, (1,), device=device, sizes=(c,))
    assert_parity(fused, eager, args, torch.float32)


@pytest.mark.parametrize("sizes", [(33, 17, 3, 1, 3), (1, 1, 1, 1, 1), (264, 5, 8, 4, 8)])
def test_h05_invariant_point_attention_channels_heads_and_points(device, sizes):
    fused, eager = ipa(*sizes, device=device)
    args = inputs("invariant_point_attention", 9, (1,), device=device, sizes=sizes)
    assert_parity(fused, eager, args, torch.float32)


@pytest.mark.parametrize(("inner", "columns"), [(1, 1), (7, 3), (127, 129), (264, 5), (3, 1025)])
def test_h05_matmul_inner_size_and_columns(device, inner, columns):
    fused, eager = build("tensor_matmul")
    args = [randn(2, 3, 5, inner, device=device), randn(inner, columns, device=device)]
    assert_parity(fused, eager, args, torch.float32)


def test_h05_indivisible_heads_are_refused_by_the_constructor():
    with pytest.raises(ValueError, match=r"msa_dim must be a multiple of num_heads.*100.*3"):
        fused_ops.MSARowAttention(100, 16, 3)
    with pytest.raises(ValueError, match=r"node_dim must be a multiple of num_heads.*100.*3"):
        fused_ops.InvariantPointAttention(100, 16, 3, 4, 4)


# H06: zero-size inputs ---------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "rows", "n"), [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
@pytest.mark.parametrize("op", OPS)
def test_h06_zero_size_inputs(device, op, batch, rows, n):
    fused, eager = build(op, device=device)
    # Only the MSA and the matmul have rows: (2, 0, 5) is an ordinary call of the other two.
    args = inputs(op, n, (batch,), device=device, rows=rows)
    result = fused(*args)
    assert result.shape == eager(*args).shape
    result.sum().backward()
    wanted = {f"input {i}": a for i, a in enumerate(args) if a.requires_grad}
    for name, tensor in {**wanted, **dict(fused.named_parameters())}.items():
        assert tensor.grad is not None, name  # None would hang a DDP rank with an empty batch
        assert tensor.grad.shape == tensor.shape and tensor.grad.dtype == tensor.dtype
        if result.numel() == 0:
            assert not tensor.grad.any(), name
    assert (torch.ones(3, device=device) * 2).sum().item() == 6  # an error would surface here


def test_h06_matmul_over_nothing_gives_zeros(device):
    a, b = randn(2, 3, 3, 0, device=device), randn(0, 5, device=device)
    result = fused_ops.tensor_matmul(a, b)
    assert result.shape == (2, 3, 3, 5) and not result.any()
    result.sum().backward()
    assert a.grad.shape == a.shape and b.grad.shape == b.shape
    empty = fused_ops.tensor_matmul(
        torch.randn(2, 4, device=device), torch.randn(4, 0, device=device)
    )
    assert empty.shape == (2, 0)


# H07: non-contiguous inputs and output gradients -------------------------------------------------


def shrunk(tensor):
    """The same values as ``big[:, :-5, :-5]``, the layout of a cropped pair representation."""
    pads = [0, 0, 0, 5, 0, 5] if tensor.dim() > 2 else [0, 0, 0, 5]
    big = torch.nn.functional.pad(tensor.detach(), pads, value=float("nan"))
    view = big[..., :-5, :-5, :] if tensor.dim() > 2 else big[..., :-5, :]
    return view


def turned(tensor):
    """The same values in a buffer whose axes before the last are stored the other way round."""
    if tensor.dim() < 3:
        return tensor.detach().t().contiguous().t()
    return tensor.detach().transpose(-2, -3).contiguous().transpose(-2, -3)


def every_second_channel(tensor):
    """The same values as ``x[..., ::2]``."""
    big = tensor.detach().repeat_interleave(2, dim=-1)
    big[..., 1::2] = float("nan")
    return big[..., ::2]


LAYOUTS = {"sliced": shrunk, "transposed": turned, "every second": every_second_channel}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_h07_non_contiguous_inputs(device, op, layout):
    fused, eager = build(op, device=device)
    plain = inputs(op, 9, device=device)
    views = [LAYOUTS[layout](a).requires_grad_(a.requires_grad) for a in plain]
    assert all(torch.equal(a, v) for a, v in zip(plain, views, strict=True))
    assert not views[0].is_contiguous()
    cotangent = torch.randn_like(fused(*plain))
    assert_same(evaluate(fused, views, cotangent), evaluate(fused, plain, cotangent))
    assert_parity(fused, eager, views, torch.float32, reference_inputs=plain)


@pytest.mark.parametrize("op", OPS)
def test_h07_non_contiguous_output_gradients(device, op):
    fused, _ = build(op, device=device)
    args = inputs(op, 9, device=device)
    y = fused(*args)
    weight = torch.randn(y.transpose(1, 2).shape, device=device)
    wanted = [a for a in args if a.requires_grad] + list(fused.parameters())

    def check(loss, cotangent):
        ours = torch.autograd.grad(loss(fused(*args)), wanted)
        theirs = torch.autograd.grad(fused(*args), wanted, cotangent)
        names = [str(i) for i in range(len(wanted))]
        assert_same(
            (y.detach(), dict(zip(names, ours, strict=True))),
            (y.detach(), dict(zip(names, theirs, strict=True))),
        )

    check(lambda y: y.sum(), torch.ones_like(y))  # an expanded scalar
    check(lambda y: (y.transpose(1, 2) * weight).sum(), weight.transpose(1, 2).contiguous())
    picked = torch.zeros_like(y)
    picked[..., ::2] = weight.transpose(1, 2)[..., ::2]
    check(lambda y: (y * weight.transpose(1, 2))[..., ::2].sum(), picked)
    grad = torch.autograd.grad(fused(*args), wanted, strided(picked))
    for ours, theirs in zip(grad, torch.autograd.grad(fused(*args), wanted, picked), strict=True):
        assert relative_error(ours, theirs) <= SAME


# H08: leading axes and a broadcast pair ----------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_h08_leading_axes_equal_a_loop(device, op):
    fused, eager = build(op, device=device)
    args = inputs(op, 7, (2, 3), device=device)
    assert_parity(fused, eager, args, torch.float32)
    whole = fused(*args)
    assert whole.shape[:2] == (2, 3)
    for i in range(2):
        for j in range(3):
            one = [a[i, j] if a.dim() > 2 else a for a in args]
            torch.testing.assert_close(whole[i, j], fused(*one), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lead", [(1,), (), (1, 1)])
@pytest.mark.parametrize("op", ["msa_row_attention", "invariant_point_attention"])
def test_h08_one_pair_for_a_batch(device, op, lead):
    fused, eager = build(op, device=device)
    args = inputs(op, 7, (2,) if len(lead) < 2 else (3, 2), device=device)
    args[1] = randn(*lead, 7, 7, 6, device=device)
    # The reference wants the leading axes spelled out where there are none.
    full = (
        args[1].detach().expand(*args[0].shape[: len(args[-1].shape) - 1 - (op[0] == "m")], 7, 7, 6)
    )
    spelled = [args[0], full, *args[2:]]
    torch.testing.assert_close(fused(*args), eager(*spelled), atol=1e-4, rtol=1e-4)
    if lead:
        assert_parity(fused, eager, args, torch.float32)


@pytest.mark.parametrize("op", ["msa_row_attention", "invariant_point_attention"])
def test_h08_gradient_of_an_expanded_pair_is_the_sum(device, op):
    fused, _ = build(op, device=device)
    args = inputs(op, 7, (3,), device=device)
    one = args[1].detach()[:1].clone().requires_grad_()
    args[1] = one.expand(3, 7, 7, 6)
    cotangent = torch.randn_like(fused(*args))
    (through_view,) = torch.autograd.grad(fused(*args), one, cotangent)
    args[1] = one
    (direct,) = torch.autograd.grad(fused(*args), one, cotangent)
    each = detached(args)
    each[1] = one.detach().repeat(3, 1, 1, 1).requires_grad_()
    (separate,) = torch.autograd.grad(fused(*each), each[1], cotangent)
    assert relative_error(through_view, separate.sum(0, keepdim=True)) <= SAME
    assert relative_error(direct, separate.sum(0, keepdim=True)) <= SAME


@pytest.mark.parametrize("op", MASKED_OPS)
def test_h08_leading_axes_that_do_not_fit_are_refused(op):
    fused, _ = build(op)
    for i, name in enumerate(
        {
            "triangular_multiplicative_update": [None, "mask"],
            "triangle_attention": [None, "mask"],
            "msa_row_attention": [None, "pair", "mask"],
            "invariant_point_attention": [None, "pair", "translations", "rotations", "node_mask"],
        }[op]
    ):
        if name is None:
            continue
        args = inputs(op, 5, (2,))
        args[i] = args[i].detach().repeat_interleave(2, 0)
        with pytest.raises(ValueError, match=rf"{op}: the leading axes of {name} .*\(2,\).*\(4,\)"):
            fused(*args)
