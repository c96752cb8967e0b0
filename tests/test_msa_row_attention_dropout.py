# SPDX-License-Identifier: Apache-2.0
"""Dropout in the kernels of MSA row attention, emulated: the composition's mask, and with it the
formulas of the op."""

import math

import pytest
import torch
from emulation.build import driver
from test_msa_row_attention_attend import MODES, pack_bias, pack_mask, problem

from fused_ops.msa_row_attention import composition

NAMES = ("dq", "dk", "dv", "dgate", "gated", "dbias")


def composition_of(rows, n, heads, seed, p):
    layout = composition._Layout.of(torch.zeros(rows, n, 1), torch.zeros(n, n, 1), heads, heads)
    return composition._Dropout.make(torch.tensor([seed]), p, layout)


def keys_of(rows, n, heads, seed, first_row=0):
    drop = composition_of(first_row + rows, n, heads, seed, 0.5)
    ids = torch.arange(first_row, first_row + rows)
    return drop.keys(ids, slice(0, heads), slice(0, n))


def kept(rows, n, heads, seed, p, first_row):
    """(rows, heads, N, N) of 0 and 1 over the share that is kept."""
    drop = composition_of(first_row + rows, n, heads, seed, p)
    some, every, queries = slice(first_row, first_row + rows), slice(0, heads), slice(0, n)
    maps = slice(0, rows * heads)
    chunk = composition._Chunk(slice(0, rows), every, queries, maps, True, True)
    return drop.keep(chunk, some, torch.float64).view(rows, heads, n, n) * drop.factor


@pytest.mark.parametrize("seed", [0, 5, -(1 << 63), (1 << 62) + 12345])
@pytest.mark.parametrize("rows, n, heads, first_row", [(1, 1, 1, 0), (3, 70, 2, 0), (2, 33, 3, 5)])
def test_keys(rows, n, heads, first_row, seed):
    out = driver("msa_row_attention_dropout").run(
        "keys",
        {"seed": torch.tensor([seed])},
        rows=rows,
        n=n,
        heads=heads,
        first_row=first_row,
    )
    keys = out["keys"].view(torch.int64).view(rows * heads, n)
    assert torch.equal(keys, keys_of(rows, n, heads, seed, first_row))


def run(projected, bias, mask, d_gated, p, *, first_row=0, dropout_seed=3, **settings):
    """Gradients by name, (groups, rows, N, heads, d); dbias (groups, heads, N, N)."""
    groups, rows, n, _, heads, dim = projected.shape
    beyond = pack_bias(torch.zeros_like(bias)).isnan()
    packed = pack_bias((bias * math.sqrt(dim)).to(projected.dtype))
    inputs = {
        "projected": projected,
        "bias": packed.masked_fill(beyond, 0.0),
        "d_gated": d_gated,
        "seed": torch.tensor([dropout_seed]),
    }
    if mask is not None:
        inputs["present"] = pack_mask(mask.view(-1, n))
    out = driver("msa_row_attention_dropout").run(
        "all",
        inputs,
        mode=MODES[projected.dtype],
        groups=groups,
        rows=rows,
        n=n,
        heads=heads,
        dim=dim,
        masked=mask is not None,
        dropped=round(p * 65536),
        first_row=first_row,
        **settings,
    )

    def as_16(name):
        return out[name].view(torch.uint8).view(projected.dtype)

    grads = as_16("d_projected").view(projected.shape).unbind(3)
    results = dict(zip(NAMES, grads, strict=False))
    results["gated"] = as_16("gated").view(groups, rows, n, heads, dim)
    results["dbias"] = out["d_bias"].view(groups, heads, n, n)
    return results


def truth(projected, bias, mask, d_gated, kept_weights, dtype=torch.float64):
    """Autograd in float64, with the kept weights' factors given."""
    leaves = projected.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()
    q, k, v, gate = leaves[0].unbind(3)
    logits = torch.einsum("grihd,grjhd->grhij", q, k) / math.sqrt(q.shape[-1])
    logits = logits + leaves[1][:, None]
    if mask is not None:
        logits = logits.masked_fill(~mask[:, :, None, None, :], -math.inf)
    weights = torch.softmax(logits, -1)
    if mask is not None:
        weights = weights.masked_fill(~mask.any(-1)[:, :, None, None, None], 0.0)
    gated = torch.einsum("grhij,grjhd->grihd", weights * kept_weights.to(dtype), v)
    gated = gated * gate.sigmoid()
    d_projected, d_bias = torch.autograd.grad(gated, leaves, d_gated.to(dtype))
    results = dict(zip(NAMES, d_projected.unbind(3), strict=False))
    return results | {"gated": gated.detach(), "dbias": d_bias}


def rounded_formulas(projected, bias, mask, d_gated, kept_weights):
    """The kernels' formulas, with their roundings to 16 bits, in fp32."""
    dtype = projected.dtype

    def round_16(x):
        return x.to(dtype).float()

    q, k, v, gate = projected.float().unbind(3)
    scale = q.shape[-1] ** -0.5
    factor = kept_weights.max().item()
    kept_weights = (kept_weights > 0).float()
    logits = torch.einsum("grihd,grjhd->grhij", q, k) * scale + bias.float()[:, None]
    keys = torch.ones(q.shape[:3], dtype=torch.bool) if mask is None else mask
    logits = logits.masked_fill(~keys[:, :, None, None, :], -math.inf)
    highest = logits.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = (logits - highest).exp()
    sums = round_16(weights).sum(-1, keepdim=True).clamp(min=1e-30)
    k, v = (x.masked_fill(~keys[..., None, None], 0.0) for x in (k, v))
    a = torch.einsum("grhij,grjhd->grihd", round_16(weights) * kept_weights, v) * factor
    a = a / sums[..., 0].transpose(2, 3)[..., None]
    g = gate.sigmoid()
    du = d_gated.float()
    da = round_16(du * g)
    p = weights / sums
    dots = (round_16(a * g) * du).sum(-1).transpose(2, 3)[..., None] / max(factor, 1e-30)
    ds = p * (torch.einsum("grihd,grjhd->grhij", da, v) * kept_weights - dots)
    dv = torch.einsum("grhij,grihd->grjhd", round_16(p) * kept_weights, da)
    return {
        "dq": round_16(torch.einsum("grhij,grjhd->grihd", round_16(ds), k) * scale * factor),
        "dk": round_16(torch.einsum("grhij,grihd->grjhd", round_16(ds), q) * scale * factor),
        "dv": round_16(dv * factor),
        "dgate": round_16(du * round_16(a * g) * (1 - g)),
        "gated": round_16(a * g),
        "dbias": ds.sum(1) * factor,
    }


def rms(x):
    return x.double().square().mean().sqrt().item()


def check(given, p=0.3, first_row=0, dropout_seed=3, **settings):
    """``given``: projected, bias, mask. Returns what the kernels gave."""
    projected = given[0]
    groups, rows, n, _, heads, _ = projected.shape
    d_gated = torch.randn(projected[:, :, :, 0].shape).to(projected.dtype)
    factors = kept(groups * rows, n, heads, dropout_seed, p, first_row)
    factors = factors.view(groups, rows, heads, n, n)
    got = run(*given, d_gated, p, first_row=first_row, dropout_seed=dropout_seed, **settings)
    expected = truth(*given, d_gated, factors)
    rounded = rounded_formulas(*given, d_gated, factors)
    largest = max(rms(x) for x in expected.values())
    for name, result in got.items():
        error = rms(result.double() - expected[name])
        allowed = 2 * rms(rounded[name].double() - expected[name]) + 1e-6 * largest
        assert error <= allowed, (name, error, allowed, rms(expected[name]))
    return got


@pytest.mark.parametrize("dtype", MODES, ids=str)
@pytest.mark.parametrize("n", [1, 17, 64, 141])
def test_any_length(n, dtype):
    check(problem(1, 3, n, 2, 32, dtype))


@pytest.mark.parametrize("dim", [8, 24, 40, 64, 128])
def test_any_width(dim):
    check(problem(1, 2, 70, 1, dim, torch.bfloat16))


@pytest.mark.parametrize("p", [0.5 / 65536, 0.01, 0.5, 0.97, 1.0])
def test_any_probability(p):
    got = check(problem(1, 2, 70, 1, 16, torch.bfloat16), p)
    if p == 1.0:
        assert all((result == 0).all() for result in got.values())


@pytest.mark.parametrize("rows, n", [(1, 20), (5, 66)])
def test_rows_of_several_groups(rows, n):
    check(problem(2, rows, n, 3, 16, torch.bfloat16), first_row=7, dropout_seed=-5)


def test_without_mask():
    projected, bias, _ = problem(1, 2, 130, 2, 32, torch.bfloat16, masked=False)
    check((projected, bias, None))


def test_whole_tiles_without_keys():
    given = problem(1, 4, 200, 1, 32, torch.bfloat16)
    mask = given[2]
    mask[0, 0, 64:] = False  # all but the first tile
    mask[0, 1, :192] = False  # all but the last
    mask[0, 1, 196] = True
    mask[0, 2, 32:64] = False  # half a tile
    mask[0, 3] = False
    got = check(given)
    for name in set(got) - {"dbias"}:
        assert (got[name][0, 3] == 0).all(), name


def test_nan_of_absent_keys_reaches_nothing():
    projected, bias, mask = problem(1, 2, 70, 1, 32, torch.bfloat16)
    mask[..., 3] = False
    d_gated = torch.randn(1, 2, 70, 1, 32).bfloat16()
    expected = run(projected, bias, mask, d_gated, 0.3)
    changed = projected.clone()
    keys = changed[:, :, :, 1]
    keys[~mask[..., None, None].expand_as(keys)] = math.nan
    got = run(changed, bias, mask, d_gated, 0.3)
    for name, result in got.items():
        assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize("where", ["query", "key", "value", "gate", "d_gated"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_reach_the_same_places(where, bad):
    """A dropped weight is zero, times NaN or infinity NaN, as in PyTorch."""
    projected, bias, mask = problem(1, 2, 70, 1, 32, torch.bfloat16)
    mask[0, 0] = True
    d_gated = torch.randn(1, 2, 70, 1, 32).bfloat16()
    if where == "d_gated":
        d_gated[0, 0, 5, 0, 0] = bad
    else:
        projected[0, 0, :, :3, :, 0] = projected[0, 0, :, :3, :, 0].abs() + 1
        d_gated[0, 0, :, 0, 0] = d_gated[0, 0, :, 0, 0].abs() + 1
        projected[0, 0, 5, ["query", "key", "value", "gate"].index(where), 0, 0] = bad
    got = run(projected, bias, mask, d_gated, 0.3)
    factors = kept(2, 70, 1, 3, 0.3, 0).view(1, 2, 1, 70, 70)
    expected = truth(projected, bias, mask, d_gated, factors)
    for name, result in got.items():
        assert torch.equal(result.isfinite(), expected[name].isfinite()), name


def test_any_schedule():
    given = problem(1, 3, 140, 1, 32, torch.bfloat16)
    d_gated = torch.randn(1, 3, 140, 1, 32).bfloat16()
    expected = run(*given, d_gated, 0.2)
    for name, result in run(*given, d_gated, 0.2, seed=2).items():
        assert torch.equal(result, expected[name]), name
