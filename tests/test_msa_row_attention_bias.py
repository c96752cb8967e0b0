# SPDX-License-Identifier: Apache-2.0
"""The kernel that makes MSA row attention's bias of the pair tensor, emulated.

References are float64. All numbers of the block layout are compared, padding included; results are
NaN before the kernel writes them.
"""

import dataclasses

import pytest
import torch
from emulation.build import driver, span

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = {F32: 0, F16: 2, BF16: 3}
ROUNDING = {F32: 2**-24, F16: 2**-11, BF16: 2**-8}
MODES = {"bf16": (0, BF16), "fp16": (1, F16), "tf32": (2, F32), "split": (3, F32)}
EPS = 1e-5
SCALE = 1.75


def blocks_of(numbers):
    """(groups, heads, N, N) to the block layout of msa_row_attention.h, padded with zeros."""
    groups, heads, n, _ = numbers.shape
    blocks, key_blocks = -(-n // 16), -(-n // 64) * 4
    padded = numbers.new_zeros(groups, heads, 16 * blocks, 16 * key_blocks)
    padded[:, :, :n, :n] = numbers
    # Query 16 I + 8 a + g; key 16 J + 8 b + 2 t + e.
    split = padded.view(groups, heads, blocks, 2, 8, key_blocks, 2, 4, 2)
    return split.permute(0, 1, 2, 5, 4, 7, 6, 3, 8).reshape(-1)


@dataclasses.dataclass
class Problem:
    pair: torch.Tensor  # (groups, N, N, channels), any strides but of channels
    weight: torch.Tensor
    norm_weight: torch.Tensor | None = None
    norm_bias: torch.Tensor | None = None

    def run(self, mode, **settings):
        groups, n, _, channels = self.pair.shape
        memory = span(self.pair)
        offset = self.pair.storage_offset() * self.pair.element_size()
        inputs = {"pair": memory, "weight": self.weight}
        if self.norm_weight is not None:
            inputs |= {"norm_weight": self.norm_weight, "norm_bias": self.norm_bias}
        number, dtype = MODES[mode]
        types = {f"{name}_type": TYPES[x.dtype] for name, x in inputs.items()}
        strides = dict(
            zip(("group_stride", "i_stride", "j_stride"), self.pair.stride()[:3], strict=True)
        )
        result = driver("msa_row_attention_bias").run(
            "bias",
            inputs,
            groups=groups,
            n=n,
            channels=channels,
            heads=self.weight.shape[0],
            mode=number,
            normed=self.norm_weight is not None,
            scale_percent=round(100 * SCALE),
            pair_offset=offset,
            **strides,
            **types,
            **settings,
        )["bias"]
        return result.view(dtype) if result.numel() else torch.empty(0, dtype=dtype)

    def exact(self, mode):
        """The result, and what rounding may change it by."""
        dtype = MODES[mode][1]
        x = self.pair.double()
        slack = torch.zeros_like(x)
        if self.norm_weight is not None:
            deviation = x - x.mean(-1, keepdim=True)
            rstd = (deviation.square().mean(-1, keepdim=True) + EPS) ** -0.5
            part = deviation * rstd * self.norm_weight.double()
            # Of the mean, relative to the largest number; of the other steps.
            slack = 4e-7 * (x.abs().amax(-1, keepdim=True) * rstd + 1) * self.norm_weight.double()
            slack = slack.abs() + 2e-7 * part.abs()
            x = part + self.norm_bias.double()
        weight = self.weight.double()
        numbers = SCALE * torch.einsum("gijc,hc->ghij", x, weight)
        operands = torch.einsum("gijc,hc->ghij", x.abs(), weight.abs())
        # Products of 16-bit operands: one rounding of each, and sums that the tensor cores cut off.
        accuracy = 2e-7 if dtype == F32 else 2.0 * ROUNDING[dtype] + 2e-6
        allowed = accuracy * operands + torch.einsum("gijc,hc->ghij", slack, weight.abs())
        allowed = SCALE * allowed + ROUNDING[dtype] * numbers.abs()
        if dtype == F16:
            allowed += 2**-24
        return blocks_of(numbers), blocks_of(allowed)

    def check(self, mode, **settings):
        ours = self.run(mode, **settings)
        exact, allowed = self.exact(mode)
        error = (ours.double() - exact).abs()
        assert ours.shape == exact.shape
        assert (error <= allowed).all(), (error / allowed).nan_to_num(1e9).max()


def problem(groups, n, heads, channels, dtype, normed, weight_dtype=F32, mean=0.5):
    pair = (torch.randn(groups, n, n, channels) + mean).to(dtype)
    made = Problem(pair, (torch.randn(heads, channels) / channels**0.5).to(weight_dtype))
    if normed:
        made.norm_weight = (1 + 0.3 * torch.randn(channels)).to(weight_dtype)
        made.norm_bias = (0.3 * torch.randn(channels)).to(weight_dtype)
    return made


# Each kernel; that of "tf32" is that of "split".
ALL = [(mode, dtype) for mode in ("bf16", "fp16", "split") for dtype in TYPES]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("mode, dtype", ALL)
@pytest.mark.parametrize(
    "groups, n, heads, channels",
    [
        (1, 1, 1, 1),
        (2, 17, 4, 128),
        (3, 2, 12, 136),
        (1, 5, 5, 7),
        (2, 3, 8, 33),
    ],
)
def test_bias(groups, n, heads, channels, mode, dtype, normed):
    problem(groups, n, heads, channels, dtype, normed).check(mode)


@pytest.mark.parametrize("mode, dtype", [("bf16", BF16), ("split", F32)])
@pytest.mark.parametrize(
    "groups, n, heads, channels",
    [(3, 33, 1, 16), (1, 50, 8, 64), (2, 2, 5, 2048), (1, 4, 24, 128), (1, 3, 33, 260)],
)
def test_sizes(groups, n, heads, channels, mode, dtype):
    problem(groups, n, heads, channels, dtype, True).check(mode)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_tf32(dtype):
    problem(1, 17, 8, 64, dtype, True).check("tf32")


@pytest.mark.parametrize("weight_dtype", [F16, BF16])
@pytest.mark.parametrize("mode", ["bf16", "fp16", "split"])
def test_types_of_parameters(mode, weight_dtype):
    problem(1, 3, 8, 40, BF16, True, weight_dtype).check(mode)


def strided(pair, kind):
    """The same numbers, stored differently. Beside them lies NaN."""
    groups, n, _, channels = pair.shape
    if kind == "transposed":
        return pair.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "expanded":
        return pair[:1, :, :1].expand(pair.shape)
    if kind == "padded":
        larger = pair.new_full((groups, n + 1, n + 2, channels + 8), torch.nan)
        larger = larger[:, 1:, 1 : n + 1, :channels]
    elif kind == "words":
        larger = pair.new_full((groups, n, n, channels + 2), torch.nan)[..., 2:]
    else:
        larger = pair.new_full((groups, n, n, channels + 3), torch.nan)[..., 1 : channels + 1]
    return larger.copy_(pair)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kind", ["transposed", "expanded", "padded", "words", "odd"])
@pytest.mark.parametrize("mode, dtype", [("bf16", BF16), ("fp16", F16), ("split", F32)])
def test_strides(kind, mode, dtype, normed):
    made = problem(2, 18, 5, 40, dtype, normed)
    made.pair = strided(made.pair, kind)
    made.check(mode)


@pytest.mark.parametrize("mode, dtype", [("bf16", F32), ("split", F32), ("fp16", BF16)])
def test_large_mean(mode, dtype):
    """The mean is taken off before anything is multiplied."""
    problem(1, 4, 4, 136, dtype, True, mean=300.0).check(mode)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("mode, dtype", [("bf16", BF16), ("fp16", F16), ("split", F32)])
@pytest.mark.parametrize("channels", [40, 136])
def test_not_finite(mode, dtype, normed, channels):
    made = problem(1, 18, 5, channels, dtype, normed)
    made.weight[3, 7] = 0.0
    made.pair[0, 17, 2, 7] = torch.inf
    made.pair[0, 3, 16, 1] = torch.nan
    ours = made.run(mode)
    exact, _ = made.exact(mode)
    finite = exact.isfinite()
    assert torch.equal(ours.isnan(), exact.isnan())
    assert torch.equal(ours.isinf(), exact.isinf())
    assert torch.equal(ours[exact.isinf()].sign().double(), exact[exact.isinf()].sign())
    # And nothing else is touched.
    made.pair[0, 17, 2, 7] = made.pair[0, 3, 16, 1] = 0.0
    assert torch.equal(ours[finite], made.run(mode)[finite])


@pytest.mark.parametrize("mode", ["bf16", "split"])
def test_constant_rows(mode):
    """What is left of a LayerNorm of equal numbers is its bias."""
    made = problem(1, 3, 2, 260, F32, True)
    made.pair[:] = 12345.0
    made.check(mode)


def test_bf16_is_rounded_to_nearest_even():
    """Numbers halfway between two of bf16."""
    made = Problem(torch.zeros(1, 4, 4, 2), torch.ones(1, 2, dtype=F32))
    made.pair[..., 0] = 128 + torch.arange(16.0).view(4, 4)
    made.pair[..., 1] = 0.5
    ours = made.run("bf16")
    exact = blocks_of((made.pair.sum(-1) * SCALE).to(BF16)[:, None])
    assert torch.equal(ours, exact)


def test_order_of_blocks_does_not_matter():
    made = problem(2, 33, 8, 32, BF16, True)
    assert torch.equal(made.run("bf16", seed=1), made.run("bf16", seed=2))


@pytest.mark.parametrize("groups, n", [(0, 3), (2, 0)])
def test_nothing_to_do(groups, n):
    made = problem(2, 3, 4, 8, BF16, True)
    made.pair = made.pair[:groups, :n, :n]
    assert made.run("bf16").numel() == 0


def test_fp16_that_overflows_becomes_the_largest_number():
    """Stored times sqrt(d) a bias may leave fp16; infinities and NaN stay what they are."""
    made = Problem(torch.zeros(1, 4, 4, 1), torch.ones(1, 1, dtype=F32))
    made.pair[0, 0, :, 0] = torch.tensor([6e4, -6e4, torch.inf, torch.nan])
    ours = made.run("fp16").float()
    expected = blocks_of((made.pair[..., 0] * SCALE)[:, None]).clamp(-65504, 65504)
    expected[expected == 65504] = torch.where(
        blocks_of(made.pair[..., 0][:, None]).isinf(), torch.inf, 65504.0
    )[expected == 65504]
    torch.testing.assert_close(ours, expected, equal_nan=True)
