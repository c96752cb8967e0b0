# SPDX-License-Identifier: Apache-2.0
"""What msa_row_attention prepares in one launch, emulated: LayerNorm, mask bits, weights."""

import itertools

import pytest
import torch
from emulation.build import driver, span
from helpers import ROUNDING

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = {F32: 0, F16: 2, BF16: 3}
MODES = [BF16, F16, F32, F32]
MASKS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    F16,
    BF16,
    F32,
    torch.float64,
]
EPS = 1e-5
NAMES = ("norm_weight", "norm_bias", "query", "key", "value", "gate", "out_proj", "out_proj_bias")


def parameters(channels, width, types=(F32,)):
    """By name, in the types in turn."""
    made = {"norm_weight": torch.randn(channels) * 0.2 + 1, "norm_bias": torch.randn(channels)}
    made |= {name: torch.randn(width, channels) for name in ("query", "key", "value", "gate")}
    made |= {"out_proj": torch.randn(channels, width), "out_proj_bias": torch.randn(channels)}
    turns = itertools.cycle(types)
    return {name: x.to(next(turns)) for name, x in made.items()}


def run(mode, msa, weights, mask=None, offset=0, with_out=True, seed=1, **heads):
    """What the kernel makes of it; parameters lie ``offset`` elements behind aligned addresses."""
    groups, rows, n, channels = msa.shape
    inputs, settings = {"msa": span(msa)}, {}
    for name, x in weights.items():
        inputs[name] = torch.cat([x.new_full((offset,), torch.nan), x.flatten()])
        settings[f"{name}_type"] = TYPES[x.dtype]
        settings[f"{name}_offset"] = offset * x.element_size()
    for axis in range(3):
        settings[f"msa_stride{axis}"] = msa.stride(axis)
    if mask is not None:
        inputs["mask"] = span(mask)
        kind = torch.uint8 if mask.dtype == torch.bool else mask.dtype
        settings["mask_type"] = MASKS.index(kind)
        settings["mask_offset"] = mask.storage_offset() * mask.element_size()
        for axis in range(3):
            settings[f"mask_stride{axis}"] = mask.stride(axis)
    results = driver("msa_row_attention_prepare").run(
        "prepare",
        inputs,
        seed=seed,
        groups=groups,
        rows=rows,
        n=n,
        channels=channels,
        width=weights["query"].shape[0],
        mode=mode,
        msa_type=TYPES[msa.dtype],
        msa_offset=msa.storage_offset() * msa.element_size(),
        with_mask=mask is not None,
        with_out=with_out,
        with_out_bias="out_proj_bias" in weights,
        with_gate_bias="gate_bias" in weights,
        **settings,
        **heads,
    )
    return {
        name: x.view(torch.int64) if name == "present" else x.view(MODES[mode])
        for name, x in results.items()
    }


def unpacked(present, mask):
    """The bits of the words as a mask, and whether those behind the last key are zero."""
    groups, rows, n = mask.shape
    bits = (present.view(groups, rows, -1, 1) >> torch.arange(64)) & 1
    bits = bits.flatten(2).bool()
    return bits[..., :n], not bits[..., n:].any()


def norm(msa, weights):
    x, weight, bias = msa.double(), weights["norm_weight"].double(), weights["norm_bias"].double()
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def check_norm(ours, msa, weights, fp32=1e-6):
    """Each number within about one of its last places, and 1e-6 (of its terms)."""
    exact = norm(msa, weights)
    terms = exact.abs() + weights["norm_bias"].double().abs() + 1
    allowed = 2 * ROUNDING[ours.dtype] * exact.abs() + fp32 * terms
    if ours.dtype == F16:
        allowed += 2**-25
    error = (ours.view(msa.shape).double() - exact).abs()
    assert (error <= allowed).all(), (error / allowed).max()


def check_weights(results, weights, dtype):
    projections = [weights[name].to(dtype) for name in ("query", "key", "value", "gate")]
    assert torch.equal(results["projections"], torch.cat(projections).flatten())
    if "out_weight" in results:
        assert torch.equal(results["out_weight"], weights["out_proj"].to(dtype).flatten())
        bias = weights.get("out_proj_bias", torch.zeros_like(weights["norm_bias"]))
        assert torch.equal(results["out_bias"], bias.to(dtype))


def check(mode, msa, weights, mask=None, **how):
    results = run(mode, msa, weights, mask, **how)
    check_norm(results["normalised"], msa, weights)
    check_weights(results, weights, MODES[mode])
    assert ("present" in results) == (mask is not None)
    if mask is not None:
        bits, rest_is_zero = unpacked(results["present"], mask)
        assert torch.equal(bits, mask != 0)
        assert rest_is_zero
    return results


def holes(*shape):
    return torch.rand(shape) < 0.8


CHANNELS = [1, 3, 8, 33, 64, 136, 256, 384, 1032]


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("mode", range(4))
def test_channels_and_types(mode, channels):
    for number, dtype in enumerate(TYPES):
        turns = [F32, BF16, F16][number:] + [F32, BF16, F16][:number]
        msa = torch.randn(2, 2, 3, channels).to(dtype)
        check(mode, msa, parameters(channels, 5, turns), holes(2, 2, 3))


@pytest.mark.parametrize("channels", [256, 512, 520, 1024, 2048])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_many_channels(dtype, channels):
    check(0, torch.randn(1, 1, 5, channels).to(dtype), parameters(channels, 1))


@pytest.mark.parametrize("n", [1, 2, 17, 33, 64, 65, 130])
@pytest.mark.parametrize("groups, rows", [(1, 1), (1, 3), (2, 2), (3, 1)])
def test_sizes(groups, rows, n):
    msa = torch.randn(groups, rows, n, 16).bfloat16()
    check(0, msa, parameters(16, 8, [BF16]), holes(groups, rows, n))


def test_large_weights():
    check(0, torch.randn(1, 1, 2, 48).bfloat16(), parameters(48, 43))  # 2064: more than a block
    check(1, torch.randn(1, 1, 2, 8).bfloat16(), parameters(8, 300, [F16, F32]), offset=1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_views(dtype):
    weights = parameters(24, 4, [dtype])
    mode = {BF16: 0, F16: 1, F32: 2}[dtype]
    check(mode, torch.randn(2, 3, 5, 24).to(dtype).transpose(0, 1), weights)
    check(mode, torch.randn(2, 3, 5, 24).to(dtype).transpose(1, 2), weights)
    check(mode, torch.randn(3, 2, 5, 24).to(dtype).permute(1, 2, 0, 3), weights)
    check(mode, torch.randn(3, 5, 7, 40).to(dtype)[1:, 1:-1, 2:-1, 8:32], weights)  # aligned
    check(mode, torch.randn(3, 5, 7, 40).to(dtype)[1:, 1:-1, 2:-1, 9:33], weights)
    check(mode, torch.randn(3, 5, 7, 25).to(dtype)[1:, 1:-1, 2:-1, :24], weights)
    for axis in range(3):
        shape = [2, 3, 5, 24]
        shape[axis] = 1
        check(mode, torch.randn(shape).to(dtype).expand(2, 3, 5, 24), weights)
    check(mode, torch.randn(24).to(dtype).expand(2, 3, 5, 24), weights)


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_parameters_that_are_not_aligned(dtype, mode):
    check(mode, torch.randn(1, 2, 5, 16), parameters(16, 8, [dtype]), offset=1)


def test_no_out_weights_and_no_biases():
    weights = parameters(16, 8)
    results = check(0, torch.randn(1, 2, 5, 16), weights, with_out=False)
    assert set(results) == {"normalised", "projections"}
    del weights["out_proj_bias"]
    results = check(0, torch.randn(1, 2, 5, 16), weights)
    assert torch.equal(results["out_bias"], torch.zeros(16, dtype=BF16))


@pytest.mark.parametrize("dtype", [*MASKS, torch.bool], ids=str)
def test_masks(dtype):
    mask = holes(2, 3, 70).to(dtype)
    mask[0, 1] = 0
    special = {
        torch.int8: [-1, -128],
        torch.int16: [-1, 2**14, -(2**15)],
        torch.int32: [-1, 2**30, -(2**31)],
        torch.int64: [-1, 2**40, -(2**63)],
        F16: [2**-24, torch.nan, torch.inf, -0.25, -0.0],
        BF16: [1e-40, torch.nan, torch.inf, -0.25, -0.0],
        F32: [1e-45, torch.nan, torch.inf, -0.25, -0.0],
        torch.float64: [1e-300, 5e-324, torch.nan, torch.inf, -0.25, -0.0],
    }.get(dtype, [1])
    mask[1, 2, 60 : 60 + len(special)] = torch.tensor(special, dtype=dtype)
    # By bits: torch may take a subnormal number for zero on some machines.
    there = mask != 0
    weights = parameters(8, 1)
    bits, rest_is_zero = unpacked(run(0, torch.randn(2, 3, 70, 8), weights, mask)["present"], mask)
    assert torch.equal(bits, there)
    assert rest_is_zero
    if dtype.is_floating_point:
        wanted = [True] * (len(special) - 1) + [False]
        assert bits[1, 2, 60 : 60 + len(special)].tolist() == wanted


def test_masks_that_are_views():
    msa, weights = torch.randn(2, 3, 66, 8), parameters(8, 1)
    check(0, msa, weights, holes(2, 1, 66).expand(2, 3, 66))
    check(0, msa, weights, holes(2, 3, 1).expand(2, 3, 66))
    check(0, msa, weights, holes(66, 4, 4).permute(1, 2, 0)[1:3, 1:])
    check(0, msa, weights, holes(2, 3, 135).to(torch.int64)[..., 2:134:2])


@pytest.mark.parametrize("channels", [33, 136, 256])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_of_nearly_equal_numbers(dtype, channels):
    weights = parameters(channels, 1)
    if dtype == F32:
        x = 1000 + 0.01 * torch.randn(1, 2, 3, channels)
        ours = run(3, x, weights)["normalised"].view(x.shape).double()
        assert (ours - norm(x, weights)).abs().max() < 1e-3
    for value in (0.0, 1000.1, -3e4):
        x = torch.full((1, 1, 3, channels), value).to(dtype)
        check_norm(run(3, x, weights)["normalised"], x, weights)


@pytest.mark.parametrize("channels", [33, 64, 1032])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_special_numbers_flow_as_in_pytorch(dtype, channels):
    weights = parameters(channels, 1)
    msa = torch.randn(1, 2, 5, channels).to(dtype)
    msa[0, 0, 1, 0], msa[0, 1, 2, channels - 1], msa[0, 1, 4, 2] = torch.nan, torch.inf, -torch.inf
    ours = run(2, msa, weights)["normalised"].view(msa.shape)
    right = norm(msa, weights)
    assert torch.equal(ours.isnan(), right.isnan())
    check_norm(ours[right.isfinite().all(-1)], msa[right.isfinite().all(-1)], weights)
    if dtype != F16:  # the variance overflows in fp32: nothing is left but the bias
        msa = torch.randn(1, 1, 2, channels).to(dtype) * 1e36
        ours = run(2, msa, weights)["normalised"].view(msa.shape)
        assert torch.equal(ours, weights["norm_bias"].expand_as(ours))


def test_special_parameters_and_overflow():
    weights = parameters(16, 4)
    weights["norm_weight"][3], weights["norm_bias"][5] = 1e6, torch.inf
    weights["query"][0, :3] = torch.tensor([torch.inf, -torch.inf, 7e4])
    results = run(1, torch.randn(1, 1, 4, 16), weights)
    normalised = results["normalised"].view(4, 16)
    assert normalised[:, 3].isinf().all()
    assert (normalised[:, 5] == torch.inf).all()
    check_weights(results, weights, F16)


def test_nothing_depends_on_the_schedule():
    msa, weights, mask = torch.randn(1, 3, 70, 40), parameters(40, 9), holes(1, 3, 70)
    first, second = (run(0, msa, weights, mask, seed=seed) for seed in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("mode, heads, head_dim, dim", [(0, 3, 5, 8), (3, 2, 17, 24)])
def test_heads_are_filled_up_with_zeros(mode, heads, head_dim, dim):
    channels = 16
    weights = parameters(channels, heads * head_dim)
    weights["gate_bias"] = torch.randn(heads * head_dim)
    results = run(mode, torch.randn(1, 1, 3, channels), weights, heads=heads, dim=dim)

    def filled(x):
        return torch.nn.functional.pad(x, (0, dim - head_dim)).to(MODES[mode])

    rows = [
        filled(weights[name].T.reshape(channels, heads, head_dim)).flatten(1).T
        for name in ("query", "key", "value", "gate")
    ]
    assert torch.equal(results["projections"], torch.cat(rows).flatten())
    gate_bias = filled(weights["gate_bias"].view(heads, head_dim)).flatten()
    bias = torch.cat([torch.zeros(3 * heads * dim, dtype=gate_bias.dtype), gate_bias])
    assert torch.equal(results["projection_bias"], bias)
    out = filled(weights["out_proj"].view(channels, heads, head_dim))
    assert torch.equal(results["out_weight"], out.flatten())
