# SPDX-License-Identifier: Apache-2.0
"""The attention kernel of MSA row attention for fp32 tensors, emulated.

References are float64 on the very fp32 operands; the yardstick is the same in fp32 by PyTorch.
"""

import math

import pytest
import torch
from emulation.build import driver
from test_msa_row_attention_attend import pack_bias, pack_mask

TF32, SPLIT = 2, 3


def attend(given, mode=SPLIT, gate_bias=None, seed=0):
    """``projected`` (groups, rows, N, 4, heads, d), ``bias`` (groups, heads, N, N) as stored."""
    projected, bias, mask = given
    groups, rows, n, _, heads, dim = projected.shape
    inputs = {"projected": projected.contiguous(), "bias": pack_bias(bias)}
    if mask is not None:
        inputs["present"] = pack_mask(mask.view(-1, n))
    if gate_bias is not None:
        inputs["projection_bias"] = torch.cat([torch.zeros(3 * heads * dim), gate_bias.flatten()])
    settings = {"masked": mask is not None, "biased": gate_bias is not None, "mode": mode}
    sizes = {"groups": groups, "rows": rows, "n": n, "heads": heads, "dim": dim}
    program = driver("msa_row_attention_attend_fp32")
    out = program.run("attend", inputs, seed=seed, **sizes, **settings)["out"]
    return out.view(torch.float32).view(groups, rows, n, heads, dim)


def reference(given, dtype=torch.float64, rounded=lambda x: x):
    projected, bias, mask = given
    q, k, v, gate = projected.to(dtype).unbind(3)
    scale = 1 / math.sqrt(q.shape[-1])
    logits = torch.einsum("grihd,grjhd->grhij", rounded(q), rounded(k)) * scale
    logits = logits + (bias.to(dtype) * scale)[:, None]
    if mask is not None:
        logits = logits.masked_fill(~mask[:, :, None, None, :], -math.inf)
    weights = torch.softmax(logits, -1)
    if mask is not None:
        weights = weights.masked_fill(~mask.any(-1)[:, :, None, None, None], 0.0)
    out = torch.einsum("grhij,grjhd->grihd", rounded(weights), rounded(v))
    return out * gate.sigmoid()


def to_tf32(x):
    bits = x.float().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).to(x.dtype)


def problem(groups, rows, n, heads, dim, *, masked=True):
    projected = torch.randn(groups, rows, n, 4, heads, dim)
    bias = torch.randn(groups, heads, n, n) * 2 * math.sqrt(dim)
    mask = None
    if masked:
        mask = torch.rand(groups, rows, n) > 0.3
        mask[..., 0] = True
    return projected, bias, mask


def error(out, expected):
    return float((out.double() - expected).norm() / expected.norm())


def check(given, **kwargs):
    out = attend(given, **kwargs)
    expected = reference(given)
    assert error(out, expected) <= 5e-7
    size = given[0][:, :, :, 2].abs().amax()
    assert float((out - expected).abs().amax()) <= 3e-6 * size


@pytest.mark.parametrize("n", [1, 17, 32, 33, 64, 77, 130])
def test_any_length(n):
    check(problem(1, 3, n, 2, 32))


@pytest.mark.parametrize("dim", [8, 16, 24, 40, 48, 56, 64, 72, 128])
def test_any_width(dim):
    check(problem(1, 2, 20, 1, dim))
    check(problem(1, 1, 70, 1, dim))


@pytest.mark.parametrize(("rows", "n"), [(1, 20), (5, 20), (2, 66)])
def test_rows_of_several_groups(rows, n):
    check(problem(3, rows, n, 2, 16))


@pytest.mark.parametrize("n", [31, 130])
@pytest.mark.parametrize("dim", [32, 128])
def test_without_mask(n, dim):
    check(problem(1, 2, n, 2, dim, masked=False))


def test_bias_of_the_gate():
    given = problem(1, 2, 40, 2, 32)
    gate_bias = torch.randn(2, 32)
    moved = given[0].clone()
    moved[:, :, :, 3] += gate_bias
    assert torch.equal(attend(given, gate_bias=gate_bias), attend((moved, *given[1:])))


@pytest.mark.parametrize("dim", [32, 128])
def test_whole_tiles_without_keys(dim):
    given = problem(1, 4, 210, 1, dim)
    mask = given[2]
    mask[0, 0, 64:] = False  # all but the first tile
    mask[0, 1, :192] = False  # all but the last
    mask[0, 1, 200] = True
    mask[0, 2, 32:64] = False  # half a tile
    mask[0, 3, 1:-1] = False
    check(given)


@pytest.mark.parametrize("n", [17, 130])
def test_row_without_any_key_is_zero(n):
    given = problem(1, 3, n, 2, 32)
    given[2][0, 1] = False
    check(given)
    assert (attend(given)[0, 1] == 0).all()


@pytest.mark.parametrize("kind", ["normal", "positive values", "all positive", "large"])
@pytest.mark.parametrize(("n", "dim"), [(700, 32), (130, 64), (130, 128)])
def test_accuracy_of_fp32(kind, n, dim):
    given = problem(1, 1, n, 1, dim, masked=False)
    if kind == "positive values":
        given[0][:, :, :, 2].abs_()
    elif kind == "all positive":
        given[0][:, :, :, :3].abs_()
    elif kind == "large":
        given[0][:, :, :, :2] *= 2.0
    expected = reference(given)
    ours, torchs = error(attend(given), expected), error(reference(given, torch.float32), expected)
    assert ours <= 1.2 * torchs, (ours, torchs)


@pytest.mark.parametrize("kind", ["normal", "same sign"])
def test_accuracy_of_tf32(kind):
    given = problem(1, 2, 200, 1, 32)
    if kind == "same sign":
        given[0][:, :, :, :3].abs_()
    expected = reference(given)
    ours = error(attend(given, mode=TF32), expected)
    assert ours <= 1.5 * error(reference(given, rounded=to_tf32), expected)


def test_very_negative_logits():
    """A bias of -1e9 is how some models mask. Where all keys have it, fp32 forgets the logits."""
    projected, bias, mask = problem(1, 2, 70, 1, 32)
    bias[:, :, :, ::2] = -1e9
    bias[:, :, 5] = -1e9
    out = attend((projected, bias, mask))
    expected = reference((projected, bias, mask))
    assert out.isfinite().all()
    out[:, :, 5] = expected[:, :, 5].float()
    assert error(out, expected) <= 5e-7


def test_the_largest_logit_comes_late():
    projected, bias, mask = problem(1, 2, 200, 1, 32)
    bias += torch.arange(200) * 2.0
    projected[..., 0, :, :] *= 4.0
    given = projected, bias, mask
    expected = reference(given)
    assert error(attend(given), expected) <= 1.2 * error(reference(given, torch.float32), expected)


def test_nan_of_absent_keys_reaches_nothing():
    projected, bias, mask = problem(1, 2, 70, 1, 32)
    mask[..., 3] = False
    expected = attend((projected, bias, mask))
    changed, bias = projected.clone(), bias.clone()
    changed[:, :, :, 1][~mask] = math.nan
    bias[..., ~mask[0].any(0)] = math.nan
    assert torch.equal(attend((changed, bias, mask)), expected)


# Numbers that TF32 has exactly leave no lo.
@pytest.mark.parametrize("where", ["query", "key", "value", "gate", "bias"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("exact", "dim"), [(False, 32), (True, 32), (True, 48)])
def test_nan_and_inf_reach_the_same_places(where, bad, exact, dim):
    projected, bias, mask = problem(1, 2, 70, 1, dim)
    mask[0, 0] = True
    if exact:
        projected = projected.bfloat16().float()
    if where == "bias":
        bias[0, 0, 3, 66] = bad
    else:
        which = ["query", "key", "value", "gate"].index(where)
        for position, column in ((5, 0), (27, 13), (64, 30)):
            projected[0, 0, position, which, 0, column] = bad
    given = projected, bias, mask
    out, expected = attend(given), reference(given)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())
    finite = expected.isfinite()
    assert error(out[finite], expected[finite]) <= 5e-7


@pytest.mark.parametrize("mode", [TF32, SPLIT])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("word", [0x7FFFFFFF, -1])
def test_nan_of_all_bits(mode, which, word):
    """As the device makes it: a carry turns it into zero."""
    projected, bias, mask = problem(1, 1, 20, 1, 32)
    projected.view(torch.int32)[0, 0, 0, which, 0, 1] = word
    out = attend((projected, bias, mask), mode)
    assert torch.equal(out.isnan(), reference((projected, bias, mask)).isnan())


@pytest.mark.parametrize("seed", range(2))
def test_any_schedule(seed):
    given = problem(1, 2, 140, 1, 32)
    assert torch.equal(attend(given, seed=seed + 1), attend(given))


@pytest.mark.parametrize(("rows", "channels"), [(1, 1), (3, 7), (700, 3), (5, 8), (301, 64)])
def test_bias_of_a_product(rows, channels):
    product, bias = torch.randn(rows, channels), torch.randn(channels)
    program = driver("msa_row_attention_attend_fp32")
    inputs = {"product": product, "bias": bias}
    out = program.run("add_bias", inputs, rows=rows, channels=channels)["out"]
    assert torch.equal(out.view(torch.float32).view(rows, channels), product + bias)
