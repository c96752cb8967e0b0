# SPDX-License-Identifier: Apache-2.0
"""The two launches for small row attention, run on the CPU, against float64."""

import math
import re

import pytest
import torch
from emulation.build import EmulationError, driver, span
from helpers import ROUNDING

from fused_ops import _C

TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}
MODES = [torch.bfloat16, torch.float16, torch.float32, torch.float32]
MASKS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SPLIT = 3


def parameters(channels, pair_channels, heads, head_dim, types=(F32,), biases=True, normed=True):
    """By name; their dtypes take turns."""
    width = heads * head_dim
    made = {
        "layer_norm_weight": 1 + 0.3 * torch.randn(channels),
        "layer_norm_bias": 0.3 * torch.randn(channels),
        **{
            f"{name}_weight": torch.randn(width, channels) / channels**0.5
            for name in ("query", "key", "value", "gate")
        },
        "pair_bias_weight": torch.randn(heads, pair_channels) / pair_channels**0.5,
        "out_proj_weight": torch.randn(channels, width) / width**0.5,
    }
    if biases:
        made["gate_bias"] = torch.randn(width)
        made["out_proj_bias"] = torch.randn(channels)
    if normed:
        made["pair_norm_weight"] = 1 + 0.3 * torch.randn(pair_channels)
        made["pair_norm_bias"] = 0.3 * torch.randn(pair_channels)
    return {name: x.to(types[i % len(types)]) for i, (name, x) in enumerate(made.items())}


def run(msa, pair, mask, made, heads, mode=SPLIT, offset=0, seed=1):
    """(groups, rows, N, channels) of the kernels; parameters begin ``offset`` elements further."""
    groups, rows, n, channels = msa.shape
    inputs, settings = {"msa": span(msa), "pair": span(pair)}, {}
    for name, x in {"msa": msa, "pair": pair}.items():
        settings[f"{name}_type"] = TYPES[x.dtype]
        settings[f"{name}_offset"] = x.storage_offset() * x.element_size()
        for axis in range(3):
            settings[f"{name}_stride{axis}"] = x.stride(axis)
    if mask is not None:
        inputs["mask"] = span(mask)
        kind = torch.uint8 if mask.dtype == torch.bool else mask.dtype
        settings["mask_type"] = MASKS.index(kind)
        settings["mask_offset"] = mask.storage_offset() * mask.element_size()
        for axis in range(3):
            settings[f"mask_stride{axis}"] = mask.stride(axis)
    for name, x in made.items():
        inputs[name] = torch.cat([x.new_full((offset,), torch.nan), x.flatten()])
        settings[f"{name}_type"] = TYPES[x.dtype]
        settings[f"{name}_offset"] = offset * x.element_size()
    out = driver("msa_row_attention_small").run(
        "forward",
        inputs,
        seed=seed,
        groups=groups,
        rows=rows,
        n=n,
        channels=channels,
        pair_channels=pair.shape[-1],
        heads=heads,
        head_dim=made["query_weight"].shape[0] // heads,
        mode=mode,
        **settings,
    )["out"]
    return out.view(MODES[mode]).view(msa.shape)


def expected(msa, pair, mask, made, heads):
    """The op by its definition, in float64."""
    made = {name: x.double() for name, x in made.items()}
    groups, rows, n, channels = msa.shape
    norm = torch.nn.functional.layer_norm
    x = norm(msa.double(), (channels,), made["layer_norm_weight"], made["layer_norm_bias"])
    q, k, v, g = (
        (x @ made[f"{name}_weight"].T).unflatten(-1, (heads, -1))
        for name in ("query", "key", "value", "gate")
    )
    z = pair.double()
    if "pair_norm_weight" in made:
        z = norm(z, z.shape[-1:], made["pair_norm_weight"], made["pair_norm_bias"])
    bias = (z @ made["pair_bias_weight"].T).movedim(-1, 1).unsqueeze(1)
    logits = torch.einsum("gsihd,gsjhd->gshij", q, k) / q.shape[-1] ** 0.5 + bias
    alive = torch.ones(groups, rows, 1, 1, 1, dtype=torch.bool)
    if mask is not None:
        there = (mask != 0)[:, :, None, None]
        logits = logits.masked_fill(~there, -math.inf)
        alive = there.any(-1, keepdim=True).movedim(-1, 2).movedim(-1, -1)
    attended = torch.einsum("gshij,gsjhd->gsihd", logits.softmax(-1), v)
    attended = attended.flatten(-2)
    gate = g.flatten(-2)
    if "gate_bias" in made:
        gate = gate + made["gate_bias"]
    gated = torch.where(alive.view(groups, rows, 1, 1), attended * gate.sigmoid(), 0.0)
    out = gated @ made["out_proj_weight"].T
    return out + made["out_proj_bias"] if "out_proj_bias" in made else out


def check(msa, pair, mask, made, heads, mode=SPLIT, **how):
    ours = run(msa, pair, mask, made, heads, mode, **how)
    exact = expected(msa, pair, mask, made, heads)
    error = (ours.double() - exact).abs()
    allowed = ROUNDING[ours.dtype] * exact.abs() + 3e-6 * (1 + exact.abs())
    assert (error <= allowed).all(), (error / allowed).nan_to_num(1e9).max()
    return ours


def tensors(groups, rows, n, channels, pair_channels, dtype=F32):
    msa = torch.randn(groups, rows, n, channels).to(dtype)
    return msa, torch.randn(groups, n, n, pair_channels).to(dtype)


def holes(*shape):
    mask = torch.rand(shape) < 0.8
    mask[..., 0] = True
    return mask


# groups, rows, N, channels, channels of the pair, heads, width of a head
SIZES = [
    (2, 2, 32, 64, 32, 4, 16),  # the headline's, with fewer rows
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 17, 33, 5, 3, 8),
    (1, 2, 33, 20, 7, 2, 24),
    (2, 1, 5, 12, 40, 5, 5),
    (1, 1, 66, 24, 8, 9, 8),
    (1, 2, 31, 128, 128, 4, 32),
    (1, 2, 19, 100, 72, 1, 100),
    (1, 1, 40, 64, 128, 2, 64),
    (1, 1, 20, 256, 256, 8, 32),
    (1, 1, 4, 48, 16, 32, 8),
    (1, 1, 97, 16, 16, 2, 128),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes):
    groups, rows, n, channels, pair_channels, heads, head_dim = sizes
    made = parameters(channels, pair_channels, heads, head_dim)
    msa, pair = tensors(groups, rows, n, channels, pair_channels)
    check(msa, pair, holes(groups, rows, n), made, heads)


def test_blocks_that_take_several_tiles_and_many_queries():
    """More positions than blocks of projections at once, and the kernel for many queries."""
    made = parameters(4, 3, 16, 8)
    msa, pair = tensors(1, 70, 15, 4, 3)
    check(msa, pair, holes(1, 70, 15), made, 16)


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_types(mode, dtype):
    for turns in ((dtype,), (F32, BF16, F16)):
        made = parameters(24, 12, 3, 8, turns)
        msa, pair = tensors(2, 2, 9, 24, 12, dtype)
        check(msa, pair, holes(2, 2, 9), made, 3, mode)
        check(msa, pair.float(), None, made, 3, mode)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_is_missing_and_what_is_not_aligned(dtype):
    msa, pair = tensors(1, 2, 7, 20, 12, dtype)
    made = parameters(20, 12, 2, 8, (dtype,), biases=False, normed=False)
    check(msa, pair, None, made, 2)
    check(msa, pair, None, parameters(20, 12, 2, 8, (dtype,)), 2, offset=1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_views(dtype):
    made = parameters(24, 8, 2, 8, (dtype,))
    msa, pair = tensors(3, 2, 6, 24, 8, dtype)
    mask = holes(3, 2, 6)
    right = run(msa, pair, mask, made, 2)

    def turned(x):
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    assert torch.equal(run(turned(msa), turned(pair), turned(mask), made, 2), right)
    msa = torch.randn(2, 6, 8, 32).to(dtype)[:, 1:3, 2:, 5:29]
    pair = torch.randn(8, 8, 9).to(dtype)[1:7, 2:, 1:].expand(2, 6, 6, 8)
    check(msa, pair, holes(1, 1, 6).expand(2, 2, 6), made, 2)
    square = torch.randn(1, 6, 6, 24).to(dtype).transpose(1, 2)  # triangle attention, ending
    check(square, square, None, parameters(24, 24, 2, 8, (dtype,)), 2)


@pytest.mark.parametrize("dtype", [*MASKS, torch.bool], ids=str)
def test_masks(dtype):
    made = parameters(8, 4, 1, 8)
    msa, pair = tensors(1, 4, 40, 8, 4)
    mask = holes(1, 4, 40).to(dtype)
    mask[0, 1] = 0
    mask[0, 2, :35] = 0
    mask[0, 2, 35] = 1
    mask[..., -1] = 0
    special = {
        torch.int8: [-1, -128],
        torch.int16: [-(2**15)],
        torch.int32: [-(2**31)],
        torch.int64: [2**40, -(2**63)],
        F16: [2**-24, torch.nan, torch.inf],
        BF16: [1e-40, torch.nan],
        F32: [1e-45, torch.nan, -0.25],
        torch.float64: [1e-300, 5e-324, torch.nan],
    }.get(dtype, [1])
    mask[0, 3, 3 : 3 + len(special)] = torch.tensor(special, dtype=dtype)
    if dtype.is_floating_point:
        mask[0, 0, 5] = -0.0
    pair[:, :, -1] = torch.nan  # of a key that is never there
    ours = run(msa, pair, mask, made, 1)
    pair[:, :, -1] = 0.0
    right = run(msa, pair, (mask != 0).to(torch.uint8), made, 1)
    assert torch.equal(ours, right)
    assert torch.equal(ours[0, 1], made["out_proj_bias"].expand(40, 8))
    exact = expected(msa, pair, mask, made, 1)
    assert (ours - exact)[0, [0, 2, 3]].abs().max() < 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("n", [12, 36])
def test_special_numbers_reach_what_they_reach_in_pytorch(n, bad):
    made = parameters(16, 8, 2, 8)
    msa, pair = tensors(1, 5, n, 16, 8)
    mask = torch.ones(1, 5, n, dtype=torch.bool)
    mask[0, 1, 4] = mask[0, 2, :4] = mask[0, 3, :] = False
    msa[0, 1, 4, 3] = bad  # of an absent key: its value is NaN, times zero
    msa[0, 3, 2, 0] = bad  # of a row without keys
    msa[0, 4, 2, 0] = bad
    pair[0, 5, 3, 1] = bad  # removed in row 2, a logit in the others
    ours = run(msa, pair, mask, made, 2)
    exact = expected(msa, pair, mask, made, 2)
    assert torch.equal(ours.isnan(), exact.isnan())
    assert exact[0, 2].isfinite().all()
    assert torch.equal(ours[0, 3], made["out_proj_bias"].expand(n, 16))
    made["gate_bias"][3] = bad
    made["pair_norm_bias"][2] = -bad
    ours, exact = (f(msa, pair, mask, made, 2) for f in (run, expected))
    assert torch.equal(ours.isnan(), exact.isnan())


def test_large_logits():
    made = parameters(16, 8, 2, 8)
    made["query_weight"] *= 10
    made["pair_bias_weight"] *= 30
    msa, pair = tensors(1, 3, 20, 16, 8)
    ours, exact = (f(msa, pair, holes(1, 3, 20), made, 2) for f in (run, expected))
    assert ours.isfinite().all()
    torch.testing.assert_close(
        run(msa, pair, None, made, 2).double(),
        expected(msa, pair, None, made, 2),
        atol=2e-4,
        rtol=0,
    )
    assert exact.shape == ours.shape


def test_nothing_depends_on_the_schedule():
    made = parameters(24, 8, 3, 8)
    msa, pair = tensors(2, 2, 20, 24, 8)
    mask = holes(2, 2, 20)
    first, second = (run(msa, pair, mask, made, 3, seed=seed) for seed in (1, 2))
    assert torch.equal(first, second)


def test_what_is_small():
    def fits(groups, rows, n, channels, pair_channels, heads, head_dim):
        names = ("groups", "rows", "n", "channels", "pair_channels", "heads", "head_dim")
        sizes = (groups, rows, n, channels, pair_channels, heads, head_dim)
        settings = dict(zip(names, sizes, strict=True))
        return bool(driver("msa_row_attention_small").run("fits", **settings)["fits"])

    assert fits(2, 8, 32, 64, 32, 4, 16)  # the headline
    assert fits(1, 32, 32, 128, 128, 4, 32)
    assert all(fits(*sizes) for sizes in SIZES)
    assert not fits(1, 128, 256, 256, 128, 8, 32)
    assert not fits(1, 2, 129, 8, 8, 1, 8)
    assert not fits(1, 2, 8, 257, 8, 1, 8)
    assert not fits(1, 2, 8, 8, 257, 1, 8)
    assert not fits(1, 2, 8, 8, 8, 33, 8)
    assert not fits(1, 2, 33, 8, 8, 32, 8)
    assert not fits(1, 1 << 40, 8, 8, 8, 1, 8)
    assert not fits(1 << 40, 1, 1, 8, 8, 1, 8)
    assert not fits(1, 16, 64, 256, 128, 8, 32)
    made = parameters(8, 8, 1, 8)
    msa, pair = tensors(1, 1, 129, 8, 8)
    with pytest.raises(EmulationError, match="small_forward must get a small problem"):
        run(msa, pair, None, made, 1)


# The planner ------------------------------------------------------------------------------------

ARCHS = _C.build_info()["archs"]


def plan(groups, rows, n, channels, pair_channels, heads, head_dim, dropout=0, **how):
    shapes = {
        "msa": [groups, rows, n, channels],
        "pair": [groups, n, n, pair_channels],
        "num_heads": [heads],
        "head_dim": [head_dim],
        "dropout": [dropout],
    }
    capability = divmod(int(re.match(r"\d+", ARCHS[0])[0]), 10)
    dtype = how.pop("dtype", "float32")
    return _C.plan("msa_row_attention", shapes, dtype, "ieee", capability, **how)


@pytest.mark.skipif(not ARCHS, reason="built with FUSED_OPS_CUDA=0 or without nvcc")
def test_the_planner_takes_two_launches_where_they_fit():
    headline = (2, 8, 32, 64, 32, 4, 16)
    for dtype in ("float32", "bfloat16", "float16"):
        answer = plan(*headline, dtype=dtype)
        assert (answer["path"], answer["kernel"]) == ("kernel", "small_sm80")
        assert answer["launches"] == 2
        assert answer["workspace_bytes"] == 4 * (4 * 2 * 8 * 32 * 64 + 2 * 4 * 32 * 32)
    assert plan(1, 0, 32, 64, 32, 4, 16)["kernel"] == "none for an empty result"
    for large in ((1, 128, 256, 256, 128, 8, 32), (1, 1, 129, 64, 32, 4, 16)):
        assert "attend_sm80" in plan(*large, dtype="bfloat16")["kernel"]
    assert "attend_fp32_dropout_sm80" in plan(*headline, dropout=1)["kernel"]
    assert "attend_dropout_sm80" in plan(*headline, dropout=1, dtype="bfloat16")["kernel"]
    assert plan(*headline, dtype="float64")["path"] == "composition"
    assert plan(*headline, backward=True)["kernel"] != "small_sm80"
