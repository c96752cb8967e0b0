# SPDX-License-Identifier: Apache-2.0
"""The kernels of the backward of MSA row attention's core, emulated.

Results hold NaN before. The truth is autograd in float64 on the very 16-bit operands; how far a
kernel may be from it is what the same formulas cost in torch with the same roundings to 16 bits.
"""

import math

import pytest
import torch
from emulation.build import driver
from test_msa_row_attention_attend import MODES, pack_bias, pack_mask, problem, reference, storable

NAMES = ("dq", "dk", "dv", "dgate", "gated", "dbias")


def run(projected, bias, mask, d_gated, *, slabs=None, **settings):
    """Gradients by name, (groups, rows, N, heads, d); dbias (groups, heads, N, N)."""
    groups, rows, n, _, heads, dim = projected.shape
    beyond = pack_bias(torch.zeros_like(bias)).isnan()
    packed = pack_bias((bias * math.sqrt(dim)).to(projected.dtype))
    # Zeros beyond N, as the kernel of the bias stores them.
    inputs = {
        "projected": projected,
        "bias": packed.masked_fill(beyond, 0.0),
        "d_gated": d_gated,
    }
    if mask is not None:
        inputs["present"] = pack_mask(mask.view(-1, n))
    out = driver("msa_row_attention_backward").run(
        "backward",
        inputs,
        mode=MODES[projected.dtype],
        groups=groups,
        rows=rows,
        n=n,
        heads=heads,
        dim=dim,
        masked=mask is not None,
        **settings,
    )

    def as_16(name):
        return out[name].view(torch.uint8).view(projected.dtype)

    grads = as_16("d_projected").view(projected.shape).unbind(3)
    results = dict(zip(NAMES, grads, strict=False))
    results["gated"] = as_16("gated").view(groups, rows, n, heads, dim)
    results["dbias"] = out["d_bias"].view(groups, heads, n, n)
    if slabs is not None:
        assert out["partial"].numel() == slabs * bias.numel()
    return results


def truth(projected, bias, mask, d_gated):
    leaves = projected.double().requires_grad_(), bias.double().requires_grad_()
    gated = reference(*leaves, mask)
    d_projected, d_bias = torch.autograd.grad(gated, leaves, d_gated.double())
    results = dict(zip(NAMES, d_projected.unbind(3), strict=False))
    return results | {"gated": gated.detach(), "dbias": d_bias}


def rounded_formulas(projected, bias, mask, d_gated):
    """The kernels' formulas, with their roundings to 16 bits, in fp32."""
    dtype = projected.dtype

    def round_16(x):
        return x.to(dtype).float()

    q, k, v, gate = projected.float().unbind(3)
    scale = q.shape[-1] ** -0.5
    logits = torch.einsum("grihd,grjhd->grhij", q, k) * scale + bias.float()[:, None]
    keys = torch.ones(q.shape[:3], dtype=torch.bool) if mask is None else mask
    logits = logits.masked_fill(~keys[:, :, None, None, :], -math.inf)
    highest = logits.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = (logits - highest).exp()
    sums = round_16(weights).sum(-1, keepdim=True).clamp(min=1e-30)
    k, v = (x.masked_fill(~keys[..., None, None], 0.0) for x in (k, v))
    a = (
        torch.einsum("grhij,grjhd->grihd", round_16(weights), v)
        / sums[..., 0].transpose(2, 3)[..., None]
    )
    g = gate.sigmoid()
    du = d_gated.float()
    da = round_16(du * g)
    p = weights / sums
    dots = (round_16(a * g) * du).sum(-1).transpose(2, 3)[..., None]
    ds = p * (torch.einsum("grihd,grjhd->grhij", da, v) - dots)
    results = {
        "dq": round_16(torch.einsum("grhij,grjhd->grihd", round_16(ds), k) * scale),
        "dk": round_16(torch.einsum("grhij,grihd->grjhd", round_16(ds), q) * scale),
        "dv": round_16(torch.einsum("grhij,grihd->grjhd", round_16(p), da)),
        "dgate": round_16(du * round_16(a * g) * (1 - g)),
        "gated": round_16(a * g),
        "dbias": ds.sum(1),
    }
    return results


def rms(x):
    return x.double().square().mean().sqrt().item()


def check(given, **settings):
    """``given``: projected, bias, mask. Returns what the kernels gave."""
    projected = given[0]
    d_gated = torch.randn(projected[:, :, :, 0].shape).to(projected.dtype)
    got = run(*given, d_gated, **settings)
    expected, rounded = truth(*given, d_gated), rounded_formulas(*given, d_gated)
    largest = max(rms(x) for x in expected.values())
    for name, result in got.items():
        error = rms(result.double() - expected[name])
        allowed = 2 * rms(rounded[name].double() - expected[name]) + 1e-6 * largest
        assert error <= allowed, (name, error, allowed, rms(expected[name]))
    return got


@pytest.mark.parametrize("dtype", MODES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 17, 33, 64, 77, 130])
def test_any_length(n, dtype):
    check(problem(1, 3, n, 2, 32, dtype))


@pytest.mark.parametrize("dim", [8, 24, 40, 64, 104, 128])
@pytest.mark.parametrize("n", [9, 33, 70])
def test_any_width(dim, n):
    check(problem(1, 2, n, 1, dim, torch.bfloat16))


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("n", [20, 40, 66])
def test_rows_of_several_groups(rows, n):
    check(problem(2, rows, n, 3, 16, torch.bfloat16))


@pytest.mark.parametrize("n", [33, 130])
def test_without_mask(n):
    projected, bias, _ = problem(1, 2, n, 2, 32, torch.bfloat16, masked=False)
    check((projected, bias, None))


def test_whole_tiles_without_keys():
    given = problem(1, 4, 200, 1, 32, torch.bfloat16)
    mask = given[2]
    mask[0, 0, 64:] = False  # all but the first tile
    mask[0, 1, :192] = False  # all but the last
    mask[0, 1, 196] = True
    mask[0, 2, 32:64] = False  # half a tile
    mask[0, 3, 1:-1] = False
    check(given)


@pytest.mark.parametrize("n", [17, 40, 130])
def test_row_without_any_key_passes_no_gradient(n):
    given = problem(1, 3, n, 2, 32, torch.bfloat16)
    given[2][0, 1] = False
    got = check(given)
    for name in set(got) - {"dbias"}:
        assert (got[name][0, 1] == 0).all(), name


@pytest.mark.parametrize("n", [20, 66])
def test_slabs_of_rows(n):
    """So many rows that blocks of the bias's gradient share them; the last ones have fewer."""
    check(problem(1, 13, n, 1, 16, torch.bfloat16), slabs=4 if n == 20 else 3)


@pytest.mark.parametrize("dtype", MODES, ids=str)
def test_large_logits(dtype):
    """Weights that are all but zero or one; the largest logit comes late for some queries."""
    projected, bias, mask = problem(1, 2, 140, 1, 32, dtype, gain=6.0)
    bias.add_(torch.arange(140) * 0.5)  # by columns
    check((projected, storable(bias, 32, dtype), mask))


def test_infinite_bias_of_some_keys():
    projected, bias, mask = problem(1, 2, 70, 1, 32, torch.bfloat16)
    bias[:, :, :, 1:66] = -math.inf
    check((projected, bias, mask))


@pytest.mark.parametrize("n", [40, 70])
def test_nan_of_absent_keys_reaches_nothing(n):
    projected, bias, mask = problem(1, 2, n, 1, 32, torch.bfloat16)
    mask[..., 3] = False
    mask[0, 0, 16:32] = False
    d_gated = torch.randn(1, 2, n, 1, 32).bfloat16()
    expected = run(projected, bias, mask, d_gated)
    changed = projected.clone()
    keys = changed[:, :, :, 1]
    keys[~mask[..., None, None].expand_as(keys)] = math.nan
    bias = bias.clone()
    bias[..., ~mask[0].any(0)] = math.nan
    got = run(changed, bias, mask, d_gated)
    for name, result in got.items():
        assert torch.equal(result, expected[name]), name


def test_nan_of_absent_values_stays_in_its_row():
    """A weight of zero times NaN is NaN in PyTorch, too."""
    projected, bias, mask = problem(1, 2, 70, 1, 32, torch.bfloat16)
    mask[..., 3] = False
    d_gated = torch.randn(1, 2, 70, 1, 32).bfloat16()
    expected = run(projected, bias, mask, d_gated)
    changed = projected.clone()
    changed[0, 1, 3, 2] = math.nan
    got = run(changed, bias, mask, d_gated)
    for name in ("dq", "dk", "dv", "dgate", "gated"):
        assert torch.equal(got[name][0, 0], expected[name][0, 0]), name
    assert got["gated"][0, 1].isnan().all()
    assert got["dq"][0, 1].isnan().all()


@pytest.mark.parametrize("where", ["query", "key", "value", "gate", "bias", "d_gated"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_reach_the_same_places(where, bad):
    """And no others: of keys that are there, for what stands at absent ones is cut off."""
    projected, bias, mask = problem(1, 3, 70, 1, 32, torch.bfloat16)
    mask[0, 0] = True
    mask[0, 1, 5:40] = False
    d_gated = torch.randn(1, 3, 70, 1, 32).bfloat16()
    if where == "bias":
        mask[:, 1:, 66] = False  # a map's entry, in a single row
        bias[0, 0, 3, 66] = bad
    elif where == "d_gated":
        d_gated[0, 0, 5, 0, 0] = bad
    else:
        # Without a dot product that is zero, or infinite of both signs.
        projected[0, 0, :, :3, :, 0] = projected[0, 0, :, :3, :, 0].abs() + 1
        d_gated[0, 0, :, 0, 0] = d_gated[0, 0, :, 0, 0].abs() + 1
        projected[0, 0, 5, ["query", "key", "value", "gate"].index(where), 0, 0] = bad
    got = run(projected, bias, mask, d_gated)
    expected = truth(projected, bias, mask, d_gated)
    for name, result in got.items():
        assert torch.equal(result.isfinite(), expected[name].isfinite()), name


@pytest.mark.parametrize("seed", range(2))
def test_any_schedule(seed):
    given = problem(1, 3, 140, 1, 32, torch.bfloat16)
    d_gated = torch.randn(1, 3, 140, 1, 32).bfloat16()
    expected = run(*given, d_gated)
    for name, result in run(*given, d_gated, seed=seed + 1).items():
        assert torch.equal(result, expected[name]), name
