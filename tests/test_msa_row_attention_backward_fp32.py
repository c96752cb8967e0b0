# SPDX-License-Identifier: Apache-2.0
"""The kernels of the backward of MSA row attention's core for fp32 tensors, emulated.

Results hold NaN before. The truth is autograd in float64 on the very fp32 operands, the yardstick
the same in fp32.
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


def ratios(got, expected, torchs, floor):
    """Our errors, in those of PyTorch, of which none is below `floor` times the largest result."""
    floor *= max(rms(x) for x in expected.values())
    return {
        name: rms(got[name].double() - expected[name])
        / (rms(torchs[name].double() - expected[name]) + floor)
        for name in NAMES
    }


def check(given, d_gated=None, *, most=3.0, floor=2e-7, **settings):
    """Returns what the kernels gave. Where few keys compete PyTorch's error is all but zero: it
    subtracts the very products that it has summed up."""
    if d_gated is None:
        d_gated = torch.randn(given[0][:, :, :, 0].shape)
    got = run(given, d_gated, **settings)
    expected = truth(given, d_gated)
    found = ratios(got, expected, truth(given, d_gated, torch.float32), floor)
    assert max(found.values()) <= most, found
    return got


@pytest.mark.parametrize("n", [1, 2, 17, 33, 64, 77, 130])
def test_any_length(n):
    check(problem(1, 3, n, 2, 32))


@pytest.mark.parametrize("dim", [8, 24, 40, 64, 128])
@pytest.mark.parametrize("n", [20, 70])
def test_any_width(dim, n):
    check(problem(1, 2, n, 1, dim))


@pytest.mark.parametrize(("rows", "n"), [(1, 20), (9, 20), (2, 66)])
def test_rows_of_several_groups(rows, n):
    check(problem(2, rows, n, 3, 16))


@pytest.mark.parametrize("n", [31, 70])
def test_without_mask(n):
    check(problem(1, 2, n, 2, 32, masked=False))


KINDS = ["normal", "positive values", "all positive", "large", "far away", "nearly equal weights"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "dim"), [(257, 32), (130, 64), (70, 128)])
def test_accuracy_of_fp32(kind, n, dim):
    given = problem(1, 1, n, 1, dim, masked=False)
    d_gated = torch.randn(1, 1, n, 1, dim)
    if kind == "positive values":
        given[0][:, :, :, 2].abs_()
        d_gated.abs_()
    elif kind == "all positive":
        given[0][:, :, :, :3].abs_()
        d_gated.abs_()
    elif kind == "large":
        given[0][:, :, :, :2] *= 3.0
    elif kind == "far away":  # log_sums of some hundreds
        given[1].add_(300.0 * math.sqrt(dim) * torch.randn(1, 1, n, 1))
    elif kind == "nearly equal weights":
        given[0][:, :, :, :2] *= 0.1
        given[1].mul_(0.1)
    check(given, d_gated, most=1.5, floor=1e-8)


@pytest.mark.parametrize("n", [20, 200])
@pytest.mark.parametrize("same_sign", [False, True])
def test_accuracy_of_tf32(n, same_sign):
    given = problem(1, 2, n, 1, 32)
    d_gated = torch.randn(1, 2, n, 1, 32)
    if same_sign:
        given[0][:, :, :, :3].abs_()
        d_gated.abs_()
    got, expected = run(given, d_gated, mode=TF32), truth(given, d_gated)
    found = ratios(got, expected, tf32_formulas(given, d_gated), 1e-8)
    assert max(found.values()) <= 1.5, found


def test_bias_of_the_gate():
    given = problem(1, 2, 40, 2, 32)
    gate_bias, d_gated = torch.randn(2, 32), torch.randn(1, 2, 40, 2, 32)
    moved = given[0].clone()
    moved[:, :, :, 3] += gate_bias
    expected = run((moved, *given[1:]), d_gated)
    for name, result in run(given, d_gated, gate_bias=gate_bias).items():
        assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize(("dim", "tile"), [(32, 64), (128, 32)])
def test_whole_tiles_without_keys(dim, tile):
    given = problem(1, 4, 3 * tile + 8, 1, dim)
    mask = given[2]
    mask[0, 0, tile:] = False  # all but the first tile
    mask[0, 1, : 3 * tile] = False  # all but the last
    mask[0, 1, 3 * tile + 4] = True
    mask[0, 2, tile // 2 : tile] = False  # half a tile
    mask[0, 3, 1:-1] = False
    check(given)


@pytest.mark.parametrize("n", [17, 40, 70])
def test_row_without_any_key_passes_no_gradient(n):
    given = problem(1, 3, n, 2, 32)
    given[2][0, 1] = False
    # autograd of the reference gives NaN there
    others = tuple(x[:, ::2] if x.ndim > 4 or x.dtype == torch.bool else x for x in given)
    d_gated = torch.randn(1, 3, n, 2, 32)
    got, expected = run(given, d_gated), truth(others, d_gated[:, ::2])
    for name in NAMES:
        result = got[name]
        if name != "dbias":
            assert (result[0, 1] == 0).all(), name
            result = result[:, ::2]
        assert rms(result - expected[name]) <= 2e-6 * rms(expected[name]), name


@pytest.mark.parametrize(("n", "slabs"), [(20, 4), (66, 3)])
def test_slabs_of_rows(n, slabs):
    """So many rows that blocks of the bias's gradient share them; the last ones have fewer."""
    check(problem(1, 13, n, 1, 32), slabs=slabs)


def test_very_negative_logits():
    """A bias of -1e9 is how some models mask. Where all keys have it, fp32 forgets the logits."""
    projected, bias, mask = problem(1, 2, 70, 1, 32)
    bias[:, :, :, ::2] = -1e9
    bias[:, :, 5] = -1e9
    d_gated = torch.randn(1, 2, 70, 1, 32)
    d_gated[:, :, 5] = 0.0
    for result in check((projected, bias, mask), d_gated).values():
        assert result.isfinite().all()


def test_infinite_bias_of_some_keys():
    projected, bias, mask = problem(1, 2, 70, 1, 32)
    bias[:, :, :, 1:66] = -math.inf
    check((projected, bias, mask))


@pytest.mark.parametrize("n", [40, 70])
def test_nan_of_absent_keys_reaches_nothing(n):
    projected, bias, mask = problem(1, 2, n, 1, 32)
    mask[..., 3] = False
    mask[0, 0, 16:32] = False
    d_gated = torch.randn(1, 2, n, 1, 32)
    expected = run((projected, bias, mask), d_gated)
    changed, bias = projected.clone(), bias.clone()
    changed[:, :, :, 1][~mask] = math.nan
    bias[..., ~mask[0].any(0)] = math.nan
    for name, result in run((changed, bias, mask), d_gated).items():
        assert torch.equal(result, expected[name]), name


def test_nan_of_absent_values_stays_in_its_row():
    """A weight of zero times NaN is NaN in PyTorch, too."""
    projected, bias, mask = problem(1, 2, 70, 1, 32)
    mask[..., 3] = False
    d_gated = torch.randn(1, 2, 70, 1, 32)
    expected = run((projected, bias, mask), d_gated)
    changed = projected.clone()
    changed[0, 1, 3, 2] = math.nan
    got = run((changed, bias, mask), d_gated)
    for name in ("dq", "dk", "dv", "dgate", "gated"):
        assert torch.equal(got[name][0, 0], expected[name][0, 0]), name
    assert got["gated"][0, 1].isnan().all()
    assert got["dq"][0, 1].isnan().all()


# Numbers that TF32 has exactly leave no lo.
@pytest.mark.parametrize("where", ["query", "key", "value", "gate", "bias", "d_gated"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("exact", "dim", "n"), [(False, 32, 70), (True, 64, 40)])
def test_nan_and_inf_reach_the_same_places(where, bad, exact, dim, n):
    """And no others: of keys that are there, for what stands at absent ones is cut off."""
    projected, bias, mask = problem(1, 2, n, 1, dim)
    mask[0, 0] = True
    mask[0, 1, 5:30] = False
    d_gated = torch.randn(1, 2, n, 1, dim)
    if exact:
        projected, d_gated = projected.bfloat16().float(), d_gated.bfloat16().float()
    if where == "bias":
        mask[:, 1:, n - 4] = False  # a map's entry, in a single row
        bias[0, 0, 3, n - 4] = bad
    elif where == "d_gated":
        d_gated[0, 0, 5, 0, 13] = bad
    else:
        which = ["query", "key", "value", "gate"].index(where)
        projected[0, 0, 5, which, 0, 13] = bad
    given = projected, bias, mask
    got, expected = run(given, d_gated), truth(given, d_gated)
    for name, result in got.items():
        assert torch.equal(result.isfinite(), expected[name].isfinite()), name


@pytest.mark.parametrize("mode", [TF32, SPLIT])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_of_all_bits(mode, which):
    """As the device makes it: a carry turns it into zero."""
    given = problem(1, 1, 20, 1, 32, masked=False)
    given[0].view(torch.int32)[0, 0, 0, which, 0, 1] = 0x7FFFFFFF
    d_gated = torch.randn(1, 1, 20, 1, 32)
    got, expected = run(given, d_gated, mode=mode), truth(given, d_gated)
    for name, result in got.items():
        assert torch.equal(result.isnan(), expected[name].isnan()), name


@pytest.mark.parametrize("n", [20, 100])
def test_any_schedule(n):
    given, d_gated = problem(1, 2, n, 1, 32), torch.randn(1, 2, n, 1, 32)
    expected = run(given, d_gated)
    for name, result in run(given, d_gated, seed=1).items():
        assert torch.equal(result, expected[name]), name
