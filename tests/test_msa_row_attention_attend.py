# SPDX-License-Identifier: Apache-2.0
"""The kernel of MSA row attention's logits, softmax, values and gate, emulated.

The result holds NaN before; references are float64 on the very 16-bit operands.
"""

import math

import pytest
import torch
from emulation.build import driver

MODES = {torch.bfloat16: 0, torch.float16: 1}
ROUNDING = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


def pack_bias(bias):
    """(groups, heads, N, N) in the order of the kernel's blocks; NaN in the padding."""
    n = bias.shape[-1]
    blocks, key_blocks = -(-n // 16), -(-n // 64) * 4
    padded = bias.new_full((*bias.shape[:2], 16 * blocks, 16 * key_blocks), math.nan)
    padded[..., :n, :n] = bias
    # Query block, half of its rows, row; key block, half of its columns, pair of columns.
    split = padded.view(*bias.shape[:2], blocks, 2, 8, key_blocks, 2, 4, 2)
    return split.permute(0, 1, 2, 5, 4, 7, 6, 3, 8).contiguous()


def pack_mask(mask):
    """(rows, N) -> (rows, words) of 64 bits."""
    rows, n = mask.shape
    words = -(-n // 64)
    bits = torch.zeros(rows, words * 64, dtype=torch.int64)
    bits[:, :n] = mask.long()
    weights = torch.tensor([1 << i if i < 63 else -(1 << 63) for i in range(64)])
    return (bits.view(rows, words, 64) * weights).sum(-1)


# With many multiprocessors the blocks of any problem here are few, which has a tile of its own.
FEW_BLOCKS, MANY_BLOCKS = 1000, 0
BOTH = pytest.mark.parametrize("blocks", [FEW_BLOCKS, MANY_BLOCKS], ids=["few", "many"])


def attend(projected, bias, mask, heads, blocks=MANY_BLOCKS, seed=0):
    """``projected`` (groups, rows, N, 4, heads, d), ``bias`` (groups, heads, N, N)."""
    groups, rows, n, _, _, dim = projected.shape
    inputs = {
        "projected": projected,
        "bias": pack_bias((bias * math.sqrt(dim)).to(projected.dtype)),
    }
    settings = {"masked": mask is not None, "multiprocessors": blocks, "seed": seed}
    if mask is not None:
        inputs["present"] = pack_mask(mask.view(-1, n))
    sizes = {"groups": groups, "rows": rows, "n": n, "heads": heads, "dim": dim}
    mode = MODES[projected.dtype]
    out = driver("msa_row_attention_attend").run("attend", inputs, mode=mode, **sizes, **settings)
    out = out["out"].view(torch.uint8).view(projected.dtype)
    return out.view(groups, rows, n, heads, dim)


def reference(projected, bias, mask):
    q, k, v, gate = projected.double().unbind(3)
    dim = q.shape[-1]
    logits = torch.einsum("grihd,grjhd->grhij", q, k) / math.sqrt(dim)
    logits = logits + bias.double()[:, None]
    if mask is not None:
        logits = logits.masked_fill(~mask[:, :, None, None, :], -math.inf)
    weights = torch.softmax(logits, -1)
    if mask is not None:
        weights = weights.masked_fill(~mask.any(-1)[:, :, None, None, None], 0.0)
    return torch.einsum("grhij,grjhd->grihd", weights, v) * gate.sigmoid()


def storable(bias, dim, dtype):
    """The nearest bias that is exact in ``dtype`` when stored, times sqrt(dim)."""
    return (bias * math.sqrt(dim)).to(dtype).double() / math.sqrt(dim)


def problem(groups, rows, n, heads, dim, dtype, *, masked=True, gain=1.0):
    projected = torch.randn(groups, rows, n, 4, heads, dim)
    projected[..., :2, :, :] *= gain
    bias = storable(torch.randn(groups, heads, n, n) * 2, dim, dtype)
    mask = None
    if masked:
        mask = torch.rand(groups, rows, n) > 0.3
        mask[..., 0] = True
    return projected.to(dtype), bias, mask


def check(given, heads, blocks=MANY_BLOCKS):
    projected, bias, mask = given
    dtype = projected.dtype
    out = attend(projected, bias, mask, heads, blocks)
    expected = reference(*given)
    # Weights and results are rounded; the largest value bounds a sum with weights of sum one.
    size = projected[:, :, :, 2].double().abs().amax((2, 4), keepdim=True)
    error = (out.double() - expected).abs()
    assert (error <= ROUNDING[dtype] * size + 1e-6).all(), error.max()
    norm = expected.norm()
    assert error.norm() <= 0.3 * ROUNDING[dtype] * norm + 1e-6, error.norm() / norm


@pytest.mark.parametrize("dtype", MODES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 17, 33, 64, 77, 130])
def test_any_length(n, dtype):
    check(problem(1, 3, n, 2, 32, dtype), 2)


@pytest.mark.parametrize("dtype", MODES, ids=str)
@pytest.mark.parametrize("n", [65, 77, 128, 257])
def test_any_length_of_few_blocks(n, dtype):
    check(problem(1, 2, n, 1, 32, dtype), 1, FEW_BLOCKS)


@pytest.mark.parametrize("dim", [8, 16, 24, 40, 48, 64, 72, 128])
@pytest.mark.parametrize("n", [9, 33, 70])
def test_any_width(dim, n):
    check(problem(1, 2, n, 1, dim, torch.bfloat16), 1)


@pytest.mark.parametrize("dim", [8, 24, 40, 48])
def test_any_width_of_few_blocks(dim):
    check(problem(1, 2, 70, 1, dim, torch.bfloat16), 1, FEW_BLOCKS)


@pytest.mark.parametrize("dim", [56, 64])
def test_long_rows_of_wide_heads(dim):
    check(problem(1, 2, 290, 1, dim, torch.bfloat16), 1)


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("n", [20, 40, 66])
def test_rows_of_several_groups(rows, n):
    check(problem(3, rows, n, 3, 16, torch.bfloat16), 3)


@BOTH
def test_rows_of_several_groups_of_long_rows(blocks):
    check(problem(3, 2, 131, 3, 16, torch.bfloat16), 3, blocks)


@BOTH
@pytest.mark.parametrize("n", [33, 130])
def test_without_mask(n, blocks):
    projected, bias, _ = problem(1, 2, n, 2, 32, torch.bfloat16, masked=False)
    check((projected, bias, None), 2, blocks)


@BOTH
def test_whole_tiles_without_keys(blocks):
    given = problem(1, 4, 270, 1, 32, torch.bfloat16)
    mask = given[2]
    mask[0, 0, 64:] = False  # all but the first tile
    mask[0, 1, :192] = False  # all but the last
    mask[0, 1, 200] = True
    mask[0, 2, 32:64] = False  # half a tile
    mask[0, 3, 1:-1] = False
    check(given, 1, blocks)


@BOTH
@pytest.mark.parametrize("n", [17, 40, 130])
def test_row_without_any_key_is_zero(n, blocks):
    given = problem(1, 3, n, 2, 32, torch.bfloat16)
    given[2][0, 1] = False
    check(given, 2, blocks)


@BOTH
@pytest.mark.parametrize("dtype", MODES, ids=str)
def test_large_logits(dtype, blocks):
    """Weights that are all but zero or one; the largest logit comes late for some queries."""
    given = problem(1, 2, 200, 1, 32, dtype, gain=6.0)
    given[1].add_(torch.arange(200) * 0.5)  # by columns
    projected, bias, mask = given
    bias = storable(bias, 32, dtype)
    check((projected, bias, mask), 1, blocks)


def test_very_negative_logits():
    """A bias of -1e9 is how some models mask. Where all keys have it, fp32 forgets the logits."""
    projected, bias, mask = problem(1, 2, 70, 1, 32, torch.bfloat16)
    bias[:, :, :, ::2] = -1e9
    bias[:, :, 5] = -1e9
    bias = storable(bias, 32, torch.bfloat16)
    out = attend(projected, bias, mask, 1)
    expected = reference(projected, bias, mask)
    assert out.isfinite().all()
    out[:, :, 5] = expected[:, :, 5].to(out.dtype)
    assert (out.double() - expected).norm() <= 0.01 * expected.norm()


def test_infinite_bias_of_some_keys():
    projected, bias, mask = problem(1, 2, 70, 1, 32, torch.bfloat16)
    bias[:, :, :, 1:66] = -math.inf
    out = attend(projected, bias, mask, 1)
    expected = reference(projected, bias, mask)
    assert (out.double() - expected).norm() <= 0.01 * expected.norm()


def test_nan_of_absent_keys_reaches_nothing():
    projected, bias, mask = problem(1, 2, 70, 1, 32, torch.bfloat16)
    mask[..., 3] = False
    absent = ~mask
    changed = projected.clone()
    changed[:, :, :, 1][absent[..., None, None].expand_as(changed[:, :, :, 1])] = math.nan
    expected = attend(projected, bias, mask, 1)
    bias = bias.clone()
    bias[..., absent[0].all(0)] = math.nan
    assert torch.equal(attend(changed, bias, mask, 1), expected)


@BOTH
@pytest.mark.parametrize("at", [3, 66, 100])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_values_of_absent_keys_reach_what_they_reach_in_pytorch(at, bad, blocks):
    """NaN and infinity times a weight of zero are NaN; in tiles without any key, too."""
    projected, bias, mask = problem(1, 3, 130, 1, 32, torch.bfloat16)
    mask[..., 64:128] = False
    mask[..., at] = False
    projected[0, 1, at, 2, 0, 5] = bad
    out = attend(projected, bias, mask, 1, blocks)
    assert torch.equal(out.isnan(), reference(projected, bias, mask).isnan())
    assert out.isnan().any()


@pytest.mark.parametrize("where", ["query", "key", "bias"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_reach_the_same_places(where, bad):
    projected, bias, mask = problem(1, 2, 70, 1, 32, torch.bfloat16)
    projected[:, 0, :, :2, :, 0] = projected[:, 0, :, :2, :, 0].abs() + 1
    mask[:] = True
    if where == "bias":
        bias[0, 0, 3, 66] = bad
    else:
        projected[0, 0, 5, 0 if where == "query" else 1, 0, 0] = bad
    out = attend(projected, bias, mask, 1)
    expected = reference(projected, bias, mask)
    assert torch.equal(out.isnan(), expected.isnan())


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_any_schedule(seed, blocks):
    projected, bias, mask = problem(1, 2, 140, 1, 32, torch.bfloat16)
    out = attend(projected, bias, mask, 1, blocks)
    assert torch.equal(attend(projected, bias, mask, 1, blocks, seed=seed + 1), out)
