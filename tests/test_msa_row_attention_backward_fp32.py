# SPDX-License-Identifier: Apache-2.0
"""The kernels of the backward of MSA row attention's core for fp32 tensors, emulated.

Results hold NaN before. The truth is autograd in float64 on the very fp32 operands; the yardstick is
the same in fp32 by PyTorch.
"""

import math

import pytest
import torch
from emulation.build import driver
from test_msa_row_attention_attend import pack_bias, pack_mask
from test_msa_row_attention_attend_fp32 import SPLIT, TF32, problem, reference, to_tf32
from test_msa_row_attention_backward import NAMES, rms


def run(given, d_gated, *, mode=SPLIT, gate_bias=None, slabs=None, **settings):
    """Gradients by name, (groups, rows, N, heads, d); dbias (groups, heads, N, N)."""
    projected, bias, mask = given
    groups, rows, n, _, heads, dim = projected.shape
    beyond = pack_bias(torch.zeros_like(bias)).isnan()
    # Zeros beyond N, as the kernel of the bias stores them.
    inputs = {
        "projected": projected,
        "bias": pack_bias(bias).masked_fill(beyond, 0.0),
        "d_gated": d_gated,
    }
    if mask is not None:
        inputs["present"] = pack_mask(mask.view(-1, n))
    if gate_bias is not None:
        inputs["projection_bias"] = torch.cat([torch.zeros(3 * heads * dim), gate_bias.flatten()])
    settings |= {"masked": mask is not None, "biased": gate_bias is not None, "mode": mode}
    sizes = {"groups": groups, "rows": rows, "n": n, "heads": heads, "dim": dim}
    program = driver("msa_row_attention_backward_fp32")
    out = program.run("backward", inputs, **sizes, **settings)
    out = {name: x.view(torch.float32) for name, x in out.items()}
    results = dict(zip(NAMES, out["d_projected"].view(projected.shape).unbind(3), strict=False))
    results["gated"] = out["gated"].view(groups, rows, n, heads, dim)
    results["dbias"] = out["d_bias"].view(groups, heads, n, n)
    if slabs is not None:
        assert out["partial"].numel() == slabs * bias.numel()
    return results


def truth(given, d_gated, dtype=torch.float64):
    projected, bias, mask = given
    leaves = projected.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()
    gated = reference((*leaves, mask), dtype)
    d_projected, d_bias = torch.autograd.grad(gated, leaves, d_gated.to(dtype))
    results = dict(zip(NAMES, d_projected.unbind(3), strict=False))
    # The bias as it is, not as it is stored.
    return results | {"gated": gated.detach(), "dbias": d_bias * math.sqrt(projected.shape[-1])}


def tf32_formulas(given, d_gated):
    """The kernels' formulas in float64, with operands rounded to TF32."""
    projected, bias, mask = given
    q, k, v, gate = projected.double().unbind(3)
    r, scale = to_tf32, q.shape[-1] ** -0.5
    logits = torch.einsum("grihd,grjhd->grhij", r(q), r(k)) + bias.double()[:, None]
    if mask is not None:
        logits = logits.masked_fill(~mask[:, :, None, None, :], -math.inf)
    p = torch.softmax(logits * scale, -1)
    a = torch.einsum("grhij,grjhd->grihd", r(p), r(v))
    g, du = gate.sigmoid(), d_gated.double()
    da = du * g
    dots = (a * da).sum(-1).transpose(2, 3)[..., None]
    ds = p * (torch.einsum("grihd,grjhd->grhij", r(da), r(v)) - dots)
    return {
        "dq": torch.einsum("grhij,grjhd->grihd", r(ds), r(k)) * scale,
        "dk": torch.einsum("grhij,grihd->grjhd", r(ds), r(q)) * scale,
        "dv": torch.einsum("grhij,grihd->grjhd", r(p), r(da)),
        "dgate": du * a * g * (1 - g),
        "gated": a * g,
        "dbias": ds.sum(1),
    }


def ratios(got, expected, torchs):
    """Our errors, in those of PyTorch; names by size."""
    floor = 1e-8 * max(rms(x) for x in expected.values())
    return {
        name: rms(got[name].double() - expected[name])
        / (rms(torchs[name].double() - expected[name]) + floor)
        for name in NAMES
    }


def check(given, most=1.6, d_gated=None, **settings):
    """Returns what the kernels gave."""
    if d_gated is None:
        d_gated = torch.randn(given[0][:, :, :, 0].shape)
    got = run(given, d_gated, **settings)
    expected = truth(given, d_gated)
    found = ratios(got, expected, truth(given, d_gated, torch.float32))
    assert max(found.values()) <= most, found
    return got
