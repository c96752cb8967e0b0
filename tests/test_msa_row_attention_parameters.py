# SPDX-License-Identifier: Apache-2.0
"""The ends of MSA row attention's backward, emulated: LayerNorm, and sums over positions."""

import pytest
import torch
from emulation.build import driver, span
from helpers import ROUNDING

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = {F32: 0, F16: 2, BF16: 3}
EPS = 1e-5


def through_norm(source, weight, grad, parts=3):
    """Gradients of source, weight and bias."""
    groups, rows, n, channels = source.shape
    out = driver("msa_row_attention_parameters").run(
        "norm_backward",
        {"source": span(source), "weight": weight, "grad": grad},
        groups=groups,
        rows=rows,
        n=n,
        channels=channels,
        source_offset=source.storage_offset() * source.element_size(),
        source_type=TYPES[source.dtype],
        weight_type=TYPES[weight.dtype],
        grad_type=TYPES[grad.dtype],
        parts=parts,
        **{f"source_stride{axis}": source.stride(axis) for axis in range(3)},
    )
    sums = out["sums"].view(parts, 2, channels).double().sum(0)
    return out["out"].view(source.dtype).view(source.shape), sums[1], sums[0]


def check(source, weight, grad, **settings):
    leaves = [x.double().detach().requires_grad_() for x in (source, weight)]
    bias = torch.zeros(source.shape[-1], dtype=torch.float64, requires_grad=True)
    result = torch.nn.functional.layer_norm(leaves[0], bias.shape, leaves[1], bias, EPS)
    expected = torch.autograd.grad(result, [*leaves, bias], grad.double())
    got = through_norm(source, weight, grad, **settings)
    for ours, exact in zip(got, expected, strict=True):
        scale = max(exact.abs().max().item(), 1e-1)
        allowed = ROUNDING.get(ours.dtype, 0.0) + 2e-6
        assert (ours.double() - exact).abs().max().item() <= allowed * scale


@pytest.mark.parametrize("grad_type", TYPES, ids=str)
@pytest.mark.parametrize("source_type", TYPES, ids=str)
@pytest.mark.parametrize("channels", [1, 5, 8, 64, 256, 384, 1032])
def test_layer_norm(channels, source_type, grad_type):
    source = (torch.randn(2, 3, 5, channels) * 2 + 1).to(source_type)
    weight = torch.randn(channels).to(source_type)
    check(source, weight, torch.randn(source.shape).to(grad_type))


@pytest.mark.parametrize("channels", [6, 64])
def test_views(channels):
    source = torch.randn(4, 3, 2, channels + 3)[..., 3:].transpose(0, 2)
    check(source, torch.randn(channels), torch.randn(source.shape), parts=1)
    source = torch.randn(1, 3, 2, channels).expand(2, 3, 2, channels)
    check(source, torch.randn(channels), torch.randn(source.shape), parts=40)


def test_numbers_far_from_zero():
    """Their mean is known to more digits than an fp32 sum has."""
    source = torch.randn(1, 2, 8, 64) + 3000
    check(source, torch.randn(64), torch.randn(source.shape))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("columns, first", [(1, 0), (3, 1), (64, 2), (70, 10), (200, 0)])
@pytest.mark.parametrize("positions", [1, 7, 300])
def test_column_sums(positions, columns, first, dtype):
    matrix = torch.randn(positions, columns + first + 4).to(dtype)
    out = driver("msa_row_attention_parameters").run(
        "column_sums",
        {"grad": matrix},
        groups=1,
        rows=1,
        n=positions,
        channels=columns,
        grad_offset=first * matrix.element_size(),
        grad_type=TYPES[dtype],
        grad_stride=matrix.shape[1],
    )
    sums = out["sums"].view(-1, columns).double().sum(0)
    exact = matrix[:, first : first + columns].double().sum(0)
    torch.testing.assert_close(sums, exact, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("slabs, heads, dim, filled, inner", [(1, 1, 8, 8, 1), (33, 3, 8, 5, 70)])
def test_finish(slabs, heads, dim, filled, inner):
    slab = torch.randn(slabs, heads, dim, inner)
    out = driver("msa_row_attention_parameters").run(
        "finish",
        {"from": slab},
        slabs=slabs,
        heads=heads,
        dim=dim,
        filled=filled,
        inner=inner,
    )
    exact = slab.double().sum(0)
    weight = out["weight"].view(heads, filled, inner)
    torch.testing.assert_close(weight.double(), exact[:, :filled], atol=1e-5, rtol=1e-6)
    rounded = out["all"].view(BF16).view(exact.shape)
    torch.testing.assert_close(rounded.double(), exact, atol=1e-5, rtol=2**-8)
