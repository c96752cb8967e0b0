# SPDX-License-Identifier: Apache-2.0
"""Cases H01 to H03: sizes at which the index arithmetic of other libraries has broken.

A machine without a GPU checks the same contracts at sizes it can hold, and the arithmetic on the
real sizes in the fake kernels and the planner.
"""

import pytest
import torch
from helpers import ROUNDING, as_double, evaluate, in_double
from subjects import build, msa, randn, tri
from torch._subclasses import FakeTensorMode

import fused_ops
from fused_ops.testing import relative_error

LIMIT = 2**31


# H01: the triangular update beyond N = 2816 ------------------------------------------------------


def last_rows(module, pair, mask, count):
    """The last ``count`` rows of the eager update of one (N, N, C) pair tensor, in blocks: what
    they depend on is all of one projection and a strip of the other."""

    def projected(name, part, part_mask):
        x = module.layer_norm_in(part.to(dtype))
        value = getattr(module, f"proj_{name}")(x)
        value = value * torch.sigmoid(getattr(module, f"gate_{name}")(x))
        return value * part_mask.to(dtype).unsqueeze(-1)

    dtype = module.proj_a.weight.dtype
    outgoing = module.direction == "outgoing"
    strip = (slice(-count, None), slice(None)) if outgoing else (slice(None), slice(-count, None))
    a = projected("a", pair[strip], mask[strip])
    pieces = []
    for start in range(0, pair.shape[0], 256):  # of the columns of the result
        part = slice(start, start + 256)
        index = (part, slice(None)) if outgoing else (slice(None), part)
        b = projected("b", pair[index], mask[index])
        form = "ikh,jkh->ijh" if outgoing else "kih,kjh->ijh"
        pieces.append(torch.einsum(form, a, b))
    o = module.layer_norm_out(torch.cat(pieces, dim=1))
    gate = torch.sigmoid(module.out_gate(pair[-count:].to(dtype)))
    return gate * module.out_proj(o)


def assert_long_update(n, channels, hidden, outgoing, dtype, device):
    fused, eager = tri(channels, hidden, outgoing, dtype=dtype, device=device)
    pair = torch.randn(1, n, n, channels, dtype=dtype, device=device).requires_grad_()
    mask = torch.ones(1, n, n, device=device)
    result = fused(pair, mask)
    with torch.no_grad():
        exact = last_rows(in_double(eager), pair[0], mask[0], 2)
        theirs = last_rows(eager, pair[0], mask[0], 2)
        error, allowed = relative_error(result[0, -2:], exact), relative_error(theirs, exact)
    assert error <= 1.5 * allowed + max(ROUNDING[dtype], 2e-7)
    result.backward(torch.randn_like(result))
    del result
    for name, gradient in [
        ("pair", pair.grad),
        *((k, p.grad) for k, p in fused.named_parameters()),
    ]:
        assert torch.isfinite(gradient).all(), name
        assert gradient[-1:].any(), name


def assert_far_corner(n, corner, channels, hidden, outgoing, dtype, device):
    """With a mask that leaves only the last residues, they must come out as if alone."""
    fused, eager = tri(channels, hidden, outgoing, dtype=dtype, device=device)
    far = (slice(None), slice(-corner, None), slice(-corner, None))
    pair = torch.randn(1, n, n, channels, dtype=dtype, device=device)
    mask = torch.zeros(1, n, n, device=device)
    mask[far] = 1
    small = pair[far].clone().requires_grad_()
    pair.requires_grad_()
    result = fused(pair, mask)
    alone = fused(small)
    cotangent = torch.zeros_like(result)
    cotangent[far] = torch.randn_like(alone)
    assert relative_error(result[far], alone) <= 2 * ROUNDING[dtype]
    (gradient,) = torch.autograd.grad(result, pair, cotangent)
    (expected,) = torch.autograd.grad(alone, small, cotangent[far])
    # Measured: 1e-7 in fp32, from sums in another order. 16-bit planes hold rounded values.
    assert relative_error(gradient[far], expected) <= 8 * ROUNDING[dtype]


@pytest.mark.parametrize("outgoing", [True, False])
def test_h01_last_rows_of_a_long_triangular_update(outgoing):
    assert_long_update(277, 6, 5, outgoing, torch.float32, "cpu")
    assert_far_corner(277, 33, 6, 5, outgoing, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize("n", [2816, 2880, 2944])
def test_h01_triangular_update_beyond_2816_residues(n, outgoing):
    assert_long_update(n, 128, 128, outgoing, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("outgoing", [True, False])
def test_h01_far_corner_beyond_2816_residues(outgoing):
    # 2 * 128 * 2944^2 > 2^31, the index that overflowed in a fused projection.
    assert_far_corner(2944, 192, 128, 128, outgoing, torch.bfloat16, "cuda")


# What the largest GPUs are asked for. A plane of the first has 2^31 elements, one of the third
# more, in lines that are no multiple of 8.
LONG_UPDATES = [
    (4096, 128, 128, torch.bfloat16),
    (2944, 128, 128, torch.float32),
    (4100, 16, 128, torch.bfloat16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize(("n", "channels", "hidden", "dtype"), LONG_UPDATES)
def test_h01_last_rows_of_the_longest_updates(n, channels, hidden, dtype, outgoing):
    assert_long_update(n, channels, hidden, outgoing, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize(("n", "channels", "hidden", "dtype"), LONG_UPDATES)
def test_h01_far_corner_of_the_longest_updates(n, channels, hidden, dtype, outgoing):
    assert_far_corner(n, 192, channels, hidden, outgoing, dtype, "cuda")


def test_h01_a_longest_update_passes_2_to_the_31():
    assert any(n * n * hidden > LIMIT and n % 8 for n, _, hidden, _ in LONG_UPDATES)


# H02: many rows ----------------------------------------------------------------------------------


def assert_tail(pair, args, tail, count, dtype):
    """The last ``count`` rows of a long call, value and gradient, equal a call on them alone.

    ``tail`` takes the rows that a slice selects out of the arguments.
    """
    fused, eager = pair
    result = fused(*args)
    short = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in tail(args, slice(-count, None))
    ]
    cotangent = torch.zeros_like(result)
    rows = tail([cotangent], slice(-count, None))[0]
    rows.copy_(torch.randn(rows.shape, device=rows.device))
    alone, alone_grads = evaluate(fused, short, rows)
    # A library product may sum in another order for another number of rows.
    assert relative_error(tail([result], slice(-count, None))[0], alone) <= 4 * ROUNDING[dtype]
    exact, _ = evaluate(in_double(eager), [as_double(x) for x in short])
    assert relative_error(alone, exact) <= 64 * ROUNDING[dtype]
    (gradient,) = torch.autograd.grad(result, args[0], cotangent)
    ours = tail([gradient], slice(-count, None))[0]
    # Measured up to 10 roundings, for IPA, whose LayerNorm here has four channels.
    assert relative_error(ours, alone_grads["input 0"]) <= 16 * ROUNDING[dtype]


def test_h02_triangular_update_of_more_than_65536_rows(device):
    assert_tail(
        tri(4, 4, device=device),
        [randn(2, 257, 257, 4, device=device), torch.ones(2, 257, 257, device=device)],
        lambda args, part: [a[part] for a in args],
        1,
        torch.float32,
    )


def test_h02_msa_of_more_than_65535_rows(device):
    modules = msa(8, 4, 1, device=device)
    shared = randn(1, 5, 5, 4, device=device, grad=False)
    assert_tail(
        modules,
        [randn(1, 65537, 5, 8, device=device), shared, torch.ones(1, 65537, 5, device=device)],
        lambda args, part: [a if a is shared else a[:, part] for a in args],
        3,
        torch.float32,
    )


def test_h02_msa_batch_of_more_than_65535(device):
    modules = msa(4, 2, 2, device=device)
    count = 65537
    assert_tail(
        modules,
        [
            randn(count, 1, 3, 4, device=device),
            torch.randn(1, 3, 3, 2, device=device).expand(count, 3, 3, 2),
            torch.ones(count, 1, 3, device=device),
        ],
        lambda args, part: [a[part] for a in args],
        3,
        torch.float32,
    )


def test_h02_invariant_point_attention_batch_of_more_than_65535(device):
    modules = build("invariant_point_attention", 4, 2, 2, 1, 1, device=device)
    count = 65537
    frames = torch.eye(3, device=device).expand(count, 2, 3, 3)
    assert_tail(
        modules,
        [
            randn(count, 2, 4, device=device),
            torch.randn(count, 2, 2, 2, device=device),
            torch.randn(count, 2, 3, device=device),
            frames,
            None,
        ],
        lambda args, part: [a if a is None else a[part] for a in args],
        3,
        torch.float32,
    )


def test_h02_matmul_of_more_than_2_to_the_23_rows(device):
    modules = build("tensor_matmul")
    b = torch.randn(3, 1, device=device)
    assert_tail(
        modules,
        [randn(2**23 + 5, 3, device=device), b],
        lambda args, part: [a if a is b else a[part] for a in args],
        3,
        torch.float32,
    )


@pytest.mark.gpu
def test_h02_triangular_update_of_more_than_2_to_the_23_odd_rows():
    # 2900^2 > 2^23 rows of 127 channels: the vectorised LayerNorm that went wrong.
    assert_long_update(2900, 127, 32, True, torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_h02_msa_of_more_than_2_to_the_32_elements():
    modules = msa(32, 16, 1, dtype=torch.bfloat16, device="cuda")
    rows = 2**21 + 1  # times 64 residues times 32 channels: 8.6 GB
    shared = randn(1, 64, 64, 16, dtype=torch.bfloat16, device="cuda", grad=False)
    long = torch.randn(1, rows, 64, 32, dtype=torch.bfloat16, device="cuda").requires_grad_()
    assert long.numel() > 2**32
    assert_tail(
        modules,
        [long, shared, None],
        lambda args, part: [a if a is shared or a is None else a[:, part] for a in args],
        3,
        torch.bfloat16,
    )


def assert_deep_alignment(rows, n, c, pair_dim, heads, parts, dtype, device):
    """A deep alignment against the same in parts: results and gradients of its rows are theirs,
    those of pair tensor and parameters the sum of theirs."""
    fused, _ = msa(c, pair_dim, heads, dtype=dtype, device=device)
    pair = randn(1, n, n, pair_dim, dtype=dtype, device=device)
    whole = torch.randn(1, rows, n, c, dtype=dtype, device=device).requires_grad_()
    mask = torch.rand(1, rows, n, device=device) > 0.2
    cotangent = torch.randn(1, rows, n, c, dtype=dtype, device=device)
    result = fused(whole, pair, mask)
    wanted = {"msa": whole, "pair": pair, **dict(fused.named_parameters())}
    grads = torch.autograd.grad(result, list(wanted.values()), cotangent)
    grads = dict(zip(wanted, grads, strict=True))
    sums = {name: 0.0 for name in wanted if name != "msa"}
    for i in range(parts):
        part = slice(i * rows // parts, (i + 1) * rows // parts)
        wanted["msa"] = whole[:, part].detach().clone().requires_grad_()
        alone = fused(wanted["msa"], pair, mask[:, part])
        assert relative_error(result[:, part], alone) <= 4 * ROUNDING[dtype]
        found = torch.autograd.grad(alone, list(wanted.values()), cotangent[:, part])
        for name, gradient in zip(wanted, found, strict=True):
            if name == "msa":
                assert relative_error(grads["msa"][:, part], gradient) <= 4 * ROUNDING[dtype]
            else:
                sums[name] = sums[name] + gradient.double()
    tolerance = 128 * ROUNDING[dtype] if dtype == torch.float32 else 4 * ROUNDING[dtype]
    for name, expected in sums.items():
        assert relative_error(grads[name], expected) <= tolerance, name


def test_h02_deep_alignment_in_parts():
    assert_deep_alignment(70, 33, 8, 6, 2, 4, torch.float32, "cpu")


@pytest.mark.gpu
def test_h02_deep_alignment_of_more_than_2_to_the_31_elements():
    rows, n, c = 16400, 512, 256
    assert rows * n * c > LIMIT
    assert_deep_alignment(rows, n, c, 128, 8, 4, torch.bfloat16, "cuda")


# H03: tensor_matmul with more than 2^31 results, and L = 1 ---------------------------------------

LONG = [((1025, 128, 128, 32), (32, 128)), ((8209, 16, 32, 1), (1, 512))]


@pytest.mark.parametrize(("a", "b"), LONG)
def test_h03_shapes_of_more_than_2_to_the_31_results(a, b):
    left = torch.empty(a, device="meta", requires_grad=True)
    right = torch.empty(b, device="meta", requires_grad=True)
    result = fused_ops.tensor_matmul(left, right)
    assert result.shape == (*a[:-1], b[1]) and result.numel() > LIMIT
    assert result.stride() == torch.empty(result.shape, device="meta").stride()
    grads = torch.autograd.grad(result, [left, right], torch.empty_like(result))
    assert [g.shape for g in grads] == [a, b]


@pytest.mark.parametrize(("a", "b"), LONG)
def test_h03_one_kernel_takes_more_than_2_to_the_31_results(a, b, monkeypatch):
    archs = fused_ops._library.build_info()["archs"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with FakeTensorMode():
        arguments = torch.empty(a, device="cuda"), torch.empty(b, device="cuda")
        told = fused_ops.explain(fused_ops.TensorMatmul(precision="ieee"), *arguments)
    if any(str(arch).startswith("90") for arch in archs):
        assert told.path == "kernel", told
        assert told.launches == (4 if told.kernel.startswith("split") else 1), told
    else:  # built without CUDA or for other devices: never because of the size
        assert told.path == "composition" and "tiles" not in str(told)


def test_h03_matmul_with_one_inner_element(device):
    a, b = randn(9, 4, 32, 1, device=device), randn(1, 77, device=device)
    result = fused_ops.tensor_matmul(a, b)
    torch.testing.assert_close(result, a * b[0], atol=0, rtol=1e-6)
    cotangent = torch.randn_like(result)
    d_a, d_b = torch.autograd.grad(result, [a, b], cotangent)
    torch.testing.assert_close(d_a, (cotangent * b[0]).sum(-1, keepdim=True))
    torch.testing.assert_close(d_b, (cotangent * a).sum((0, 1, 2))[None], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("a", "b"), LONG)
def test_h03_matmul_of_more_than_2_to_the_31_results(a, b, dtype):
    left = torch.randn(a, dtype=dtype, device="cuda").requires_grad_()
    right = torch.randn(b, dtype=dtype, device="cuda").requires_grad_()
    result = fused_ops.tensor_matmul(left, right)
    assert result.numel() > LIMIT
    tolerance = 4 * ROUNDING[dtype]
    for i in (0, -1):
        exact = left[i].double() @ right.double()
        assert relative_error(result[i], exact) <= tolerance
    # One cotangent slice, shown to every row: the expected gradients then need no long product.
    piece = torch.randn(result.shape[1:], dtype=dtype, device="cuda")
    d_left, d_right = torch.autograd.grad(result, [left, right], piece.expand(result.shape))
    for i in (0, -1):
        assert relative_error(d_left[i], piece.double() @ right.double().t()) <= tolerance
    summed = left.detach().sum(0, dtype=torch.float64).flatten(0, -2)
    # Sums of 4e6 to 1.7e7 terms in fp32: not yet measured, 256 is the growth of sqrt(65536).
    error = relative_error(d_right, summed.t() @ piece.double().flatten(0, -2))
    assert error <= 256 * 2**-24 + ROUNDING[dtype]
