# SPDX-License-Identifier: Apache-2.0
"""The kernels that read the pair tensor once for all heads, emulated: logits, and pair dots.

Results hold NaN before; references are float64 on the very operands the kernels get.
"""

import math

import pytest
import torch
from emulation.build import driver

MODES = {"bf16": 0, "fp16": 1, "tf32": 2, "split": 3}
TYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}
TYPE["split"] = torch.float32
CODE = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}
# 16-bit operands are exact, as are their products: what is left is the sum in fp32. Of TF32 both
# operands are rounded to 11 bits, and of few products nothing averages out.
TOLERANCE = {"bf16": 2e-6, "fp16": 2e-6, "tf32": 2 * 2**-11, "split": 1e-6}
SCALES = (0.17, 0.23, 0.57)


def up(count, to):
    return -(-count // to) * to


def pack_mask(mask):
    words = -(-mask.shape[1] // 64)
    bits = torch.zeros(mask.shape[0], words * 64, dtype=torch.int64)
    bits[:, : mask.shape[1]] = mask.long()
    weights = torch.tensor([1 << i if i < 63 else -(1 << 63) for i in range(64)])
    return (bits.view(mask.shape[0], words, 64) * weights).sum(-1)


class Problem:
    def __init__(self, mode, batch=1, n=17, heads=3, dim=16, points=4, channels=24, **other):
        torch.manual_seed(n * 7 + heads)
        self.mode, self.batch, self.n, self.heads, self.dim = mode, batch, n, heads, dim
        self.points, self.channels = points, channels
        self.first = other.get("first", 0)
        self.rows = other.get("rows", n - self.first)
        self.pair_type = other.get("pair_type", TYPE[mode])
        self.weight_type = other.get("weight_type", torch.float32)
        self.offset = other.get("offset", 0)
        if other.get("shared"):
            self.storage = torch.randn(n, n, channels).to(self.pair_type)
            self.pair = self.storage.expand(batch, n, n, channels)
        else:
            gap = other.get("gap", 0)  # between lines
            size = batch * n * n * (channels + gap) + self.offset
            self.storage = torch.randn(size).to(self.pair_type)
            whole = self.storage[self.offset :].view(batch, n, n, channels + gap)
            whole = whole.transpose(1, 2) if other.get("transposed") else whole
            self.pair = whole[..., :channels]
        self.mask = None
        if other.get("masked", True):
            self.mask = torch.rand(batch, n) > 0.3
        self.weight = torch.randn(heads, channels)
        if TYPE[mode] != torch.float32:  # so that it is exact in the products
            self.weight = self.weight.to(TYPE[mode])
        self.weight = self.weight.to(self.weight_type)
        self.bias = torch.randn(heads).to(self.weight_type) if other.get("bias", True) else None
        self.head_weights = torch.linspace(-30, 40, heads).to(self.weight_type)
        width = heads * dim
        columns = up(3 * width + 3 * heads * points * 3, 8)
        self.projected = torch.randn(batch, n, columns).to(TYPE[mode])
        line = up(points * 3, 4)
        self.q_points, self.k_points = torch.zeros(2, batch, heads, n, line)
        for x in (self.q_points, self.k_points):
            x[..., : points * 3] = torch.randn(batch, heads, n, points * 3) * 3
        self.gathered_at = heads * dim + heads * points * 3
        features = up(self.gathered_at + heads * channels, 8)
        self.d_features = torch.randn(batch, n, features).to(TYPE[mode])

    def settings(self):
        stride = self.pair.stride()
        return {
            "batch": self.batch,
            "n": self.n,
            "heads": self.heads,
            "dim": self.dim,
            "points": self.points,
            "channels": self.channels,
            "mode": MODES[self.mode],
            "first_row": self.first,
            "rows": self.rows,
            "pair_type": CODE[self.pair_type],
            "offset": self.offset,
            "batch_stride": stride[0],
            "i_stride": stride[1],
            "j_stride": stride[2],
            "weight_type": CODE[self.weight_type],
            "masked": self.mask is not None,
            "has_bias": self.bias is not None,
        }

    def result(self, name, inputs, seed):
        run = driver("invariant_point_attention_logits").run
        out = run(name, inputs, seed=seed, **self.settings())[name]
        return out.view(self.batch, self.heads, self.rows, up(self.n, 8))

    def logits(self, seed=0):
        inputs = {
            "projected": self.projected,
            "q_points": self.q_points,
            "k_points": self.k_points,
            "pair": self.storage,
            "weight": self.weight,
            "head_weights": self.head_weights,
            "scales": torch.tensor(SCALES),
        }
        if self.mask is not None:
            inputs["present"] = pack_mask(self.mask)
        if self.bias is not None:
            inputs["bias"] = self.bias
        return self.result("logits", inputs, seed)

    def pair_dots(self, seed=0):
        return self.result("pair_dots", {"pair": self.storage, "d_features": self.d_features}, seed)

    def block(self, x):
        """Of (..., queries, keys) the block's queries."""
        return x[..., self.first : self.first + self.rows, :]

    def pair_as_read(self):
        return self.pair.to(TYPE[self.mode]).double()

    def expected_logits(self):
        """Without the mask."""
        width = self.heads * self.dim
        q, k = (
            self.projected[..., : 2 * width].double().unflatten(-1, (2, self.heads, -1)).unbind(2)
        )
        scalar, point, bias = SCALES
        out = scalar * torch.einsum("bihd,bjhd->bhij", q, k)
        out += bias * torch.einsum("bijc,hc->bhij", self.pair_as_read(), self.weight.double())
        if self.bias is not None:
            out += bias * self.bias.double()[:, None, None]
        apart = self.q_points.double()[:, :, :, None] - self.k_points.double()[:, :, None]
        w = torch.nn.functional.softplus(self.head_weights.double())
        out -= point / 2 * w[:, None, None] * apart.square().sum(-1)
        return self.block(out * math.log2(math.e))

    def expected_pair_dots(self):
        end = self.gathered_at + self.heads * self.channels
        d = self.d_features[..., self.gathered_at : end].double()
        d = d.unflatten(-1, (self.heads, self.channels))
        return self.block(torch.einsum("bijc,bihc->bhij", self.pair_as_read(), d))


def close(out, expected, mode):
    """By heads: those with large weights of distances would hide the others."""
    there = expected.isfinite().all((1, 2))
    assert there.any() or expected.numel() == 0
    for h in range(expected.shape[0]):
        error = (out[h].double() - expected[h]).norm()
        assert error <= TOLERANCE[mode] * expected[h].norm(), error / expected[h].norm()


def check_logits(problem):
    out, expected = problem.logits(), problem.expected_logits()
    n = problem.n
    assert (out[..., n:] == -math.inf).all()
    for b in range(problem.batch):
        there = slice(None) if problem.mask is None else problem.mask[b]
        if problem.mask is not None:
            assert (out[b, ..., :n][..., ~problem.mask[b]] == -math.inf).all()
        close(out[b, ..., :n][..., there], expected[b][..., there], problem.mode)


def check_pair_dots(problem):
    out, expected = problem.pair_dots(), problem.expected_pair_dots()
    assert (out[..., problem.n :] == 0).all()
    for b in range(problem.batch):
        close(out[b, ..., : problem.n], expected[b], problem.mode)


CASES = [
    {"n": 1, "heads": 1, "dim": 8, "points": 1, "channels": 8, "masked": False},
    {"n": 2, "heads": 4, "dim": 24, "points": 8},
    {"n": 17, "heads": 12, "dim": 32, "points": 4, "channels": 128},
    {"n": 33, "heads": 3, "dim": 72, "points": 16, "channels": 40, "first": 5, "rows": 11},
    {"n": 77, "heads": 16, "dim": 16, "points": 4, "channels": 16, "first": 70, "rows": 3},
]
ALL_MODES = pytest.mark.parametrize("mode", MODES)


@ALL_MODES
@pytest.mark.parametrize("case", range(len(CASES)))
def test_logits(case, mode):
    check_logits(Problem(mode, **CASES[case]))


@ALL_MODES
@pytest.mark.parametrize("case", range(len(CASES)))
def test_pair_dots(case, mode):
    check_pair_dots(Problem(mode, **CASES[case]))


LAYOUTS = [
    {"batch": 2, "transposed": True, "gap": 8},
    {"batch": 2, "shared": True},
    {"gap": 1, "offset": 3},
    {"channels": 7, "bias": False},
    {"channels": 1},
    {"channels": 296},  # more than a block holds weights of
    {"channels": 2 * 64 + 3},
]


@ALL_MODES
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_any_layout(layout, mode):
    problem = Problem(mode, n=11, **LAYOUTS[layout])
    check_logits(problem)
    check_pair_dots(problem)


@pytest.mark.parametrize("pair_type", CODE, ids=str)
@ALL_MODES
def test_any_type(mode, pair_type):
    for channels in (16, 13):
        problem = Problem(mode, n=9, channels=channels, pair_type=pair_type)
        check_logits(problem)
        check_pair_dots(problem)


@pytest.mark.parametrize("weight_type", CODE, ids=str)
def test_any_type_of_weights(weight_type):
    check_logits(Problem("split", n=9, weight_type=weight_type))


@ALL_MODES
def test_widest_heads(mode):
    check_logits(Problem(mode, n=5, heads=2, dim=256))


def test_batch_element_without_residues():
    problem = Problem("bf16", batch=3, n=12)
    problem.mask[1] = False
    assert (problem.logits()[1] == -math.inf).all()


@pytest.mark.parametrize("sizes", [{"n": 0}, {"batch": 0}, {"n": 9, "rows": 0}])
def test_nothing(sizes):
    problem = Problem("bf16", **sizes)
    assert problem.logits().numel() == 0
    assert problem.pair_dots().numel() == 0


@ALL_MODES
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["query", "key", "pair", "points"])
def test_what_is_not_finite_reaches_its_logits_and_no_absent_key(where, bad, mode):
    problem = Problem(mode, n=18)
    problem.mask[:] = True
    problem.mask[0, 4] = False
    if where == "query":
        problem.projected[0, 3, 5] = bad
    elif where == "key":
        problem.projected[0, 3:5, problem.heads * problem.dim + 5] = bad
    elif where == "pair":
        problem.pair[0, 3, 3:5, 6] = bad
    else:
        problem.k_points[0, 1, 3:5, 2] = bad
    out = problem.logits()
    assert (out[..., 4] == -math.inf).all()
    there = problem.mask[0]
    finite = problem.expected_logits()[..., there].isfinite()
    assert torch.equal(out[..., :18][..., there].isfinite(), finite)
    assert not finite.all()


@pytest.mark.parametrize("seed", range(2))
def test_any_schedule(seed):
    problem = Problem("bf16", n=33, heads=4)
    assert torch.equal(problem.logits(seed + 1), problem.logits())
    assert torch.equal(problem.pair_dots(seed + 1), problem.pair_dots())
