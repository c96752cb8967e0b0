# SPDX-License-Identifier: Apache-2.0
"""Gradients of the pair tensor and of the bias projection of invariant point attention, emulated.

Results hold NaN before; references are float64 on the very operands.
"""

import dataclasses
import math

import pytest
import torch
from emulation.build import EmulationError, driver, span

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {FP32: 0, FP16: 2, BF16: 3}
MODES = {"bf16": (0, BF16), "fp16": (1, FP16), "tf32": (2, FP32), "split": (3, FP32)}
EVERY_MODE = pytest.mark.parametrize("mode", MODES)
# Of operands and results, in the L2 norm: a rounding to 8, 11, 11 bits; fp32's products of halves.
TOLERANCE = {"bf16": 3e-3, "fp16": 4e-4, "tf32": 6e-4, "split": 3e-7}
# Of the weight and the pair tensor alone, as sums are fp32: those that are stored so are exact.
EXACT = 5e-7


@dataclasses.dataclass
class Problem:
    mode: str
    n: int
    heads: int = 3
    channels: int = 32
    batch: int = 1
    block: tuple[int, int] | None = None  # first row, rows
    bias: bool = True
    features: bool = False
    grad: bool = True
    sums: bool = True
    pair_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    weight_dtype: torch.dtype = FP32
    dim: int = 16
    points: int = 4
    norms: bool = False
    spare: int = 0  # of the pair tensor's lines
    scale: float = 1 / math.sqrt(3)
    multiprocessors: int = 2

    def __post_init__(self):
        self.number, self.dtype = MODES[self.mode]
        self.pair_dtype = self.pair_dtype or self.dtype
        self.grad_dtype = self.grad_dtype or self.dtype
        self.first, self.rows = self.block or (0, self.n)
        b, n, h, c, r = self.batch, self.n, self.heads, self.channels, self.rows
        line = -(-n // 8) * 8
        present = torch.rand(b, n) > 0.3
        present[:, :1] = True
        if b > 1:
            present[-1] = False  # no residue at all
        self.scores = torch.zeros(b, h, r, line)
        self.scores[..., :n] = torch.randn(b, h, r, n) * present[:, None, None]
        self.scores = self.scores.to(self.dtype)
        self.logits = torch.full((b, h, r, line), -math.inf)
        self.logits[..., :n] = torch.randn(b, h, r, n) * 3
        self.logits[..., :n].masked_fill_(~present[:, None, None], -math.inf)
        sums = torch.logsumexp(self.logits.double() * math.log(2), -1) / math.log(2)
        sums[sums == -math.inf] = math.inf
        self.log_sums = torch.full((b, h, n), math.nan)
        self.log_sums[:, :, self.first : self.first + r] = sums
        whole = torch.randn(b, n, n + 1, c + self.spare)
        self.pair = whole.to(self.pair_dtype)[:, :, 1:, self.spare :]
        self.weight = torch.randn(h, c).to(self.weight_dtype)
        values_at = h * self.dim + h * 3 * self.points + (h * self.points if self.norms else 0)
        filled = values_at + h * c
        self.d_features = torch.full((b, n, -(-filled // 8) * 8), math.nan)
        self.values = slice(values_at, filled)
        self.d_features[..., self.values] = torch.randn(b, n, h * c)
        self.d_features = self.d_features.to(self.dtype)

    def run(self, before=None, sums_before=None, **settings):
        inputs = {"bias_scale": torch.tensor([self.scale])}
        if self.bias:
            inputs |= {"d_logits": self.scores, "weight": self.weight}
        if self.features:
            inputs |= {"logits": self.logits, "log_sums": self.log_sums}
            inputs["d_features"] = self.d_features
        settings |= {"has_bias": self.bias, "has_features": self.features}
        settings |= {"has_grad": self.grad, "has_sums": self.sums}
        settings |= {"first_row": self.first, "rows": self.rows, "mode": self.number}
        settings |= {name: getattr(self, name) for name in ("batch", "n", "heads", "channels")}
        settings |= {name: getattr(self, name) for name in ("dim", "points", "norms")}
        settings |= {"value_channels": self.channels if self.features else 0}
        settings |= {"weight_type": DTYPES[self.weight_dtype]}
        settings |= {"grad_type": DTYPES[self.grad_dtype]}
        settings |= {"multiprocessors": self.multiprocessors}
        if self.sums:
            inputs["pair"] = span(self.pair)
            strides = dict(
                zip(("batch_stride", "i_stride", "j_stride"), self.pair.stride(), strict=False)
            )
            settings |= {"offset": self.pair.storage_offset(), **strides}
            settings |= {"pair_type": DTYPES[self.pair_dtype]}
        if before is not None:
            inputs["grad_before"] = before
            settings["grad_before"] = True
        if sums_before is not None:
            inputs["sums_before"] = sums_before
            settings["sums_before"] = True
        name = "invariant_point_attention_pair_backward"
        out = driver(name).run("pair_backward", inputs, **settings)
        results = {}
        if self.grad:
            grad = out["grad"].view(torch.uint8).view(self.grad_dtype)
            results["grad"] = grad.view(self.batch, self.n, self.n, self.channels)
        if self.sums:
            results["sums"] = out["sums"].view(-1, self.heads, self.channels + 1)
        return results

    def mine(self, x):
        """The block's rows of axis 1."""
        return x[:, self.first : self.first + self.rows]

    def reference(self):
        scores = self.scores[..., : self.n].double()
        expected = torch.zeros(self.batch, self.rows, self.n, self.channels, dtype=torch.float64)
        if self.bias:
            weight = self.weight.double() * self.scale
            expected += torch.einsum("bhij,hc->bijc", scores, weight)
        if self.features:
            logits = self.logits[..., : self.n].double()
            log_sums = self.log_sums[:, :, self.first : self.first + self.rows, None].double()
            weights = torch.exp2(logits - log_sums)
            values = self.mine(self.d_features)[..., self.values].double()
            values = values.view(self.batch, self.rows, self.heads, self.channels)
            expected += torch.einsum("bhij,bihc->bijc", weights, values)
        sums = torch.einsum("bhij,bijc->hc", scores, self.mine(self.pair).double())
        # Terms have both signs: what the sums are held against, as they might cancel.
        squares = torch.einsum("bhij,bijc->hc", scores**2, self.mine(self.pair).double() ** 2)
        return expected, sums, scores.sum((0, 2, 3)), squares.sum().sqrt()


def error(result, expected, size=None):
    size = expected.norm() if size is None else size
    return ((result.double() - expected).norm() / (size + 1e-30)).item()


def check(problem, **settings):
    out = problem.run(**settings)
    expected, sums, alone, size = problem.reference()
    tolerance = TOLERANCE[problem.mode]
    if problem.grad:
        grad = out["grad"]
        wanted = tolerance
        if problem.grad_dtype != FP32:
            wanted = max(tolerance, TOLERANCE["bf16" if problem.grad_dtype == BF16 else "fp16"])
        assert error(problem.mine(grad), expected) <= wanted
        assert grad[:, : problem.first].isnan().all()
        assert grad[:, problem.first + problem.rows :].isnan().all()
    if problem.sums:
        exact = problem.pair_dtype == problem.dtype and problem.mode != "tf32"
        total = out["sums"].double().sum(0)
        assert error(total[:, :-1], sums, size) <= (EXACT if exact else tolerance)
        assert error(total[:, -1], alone, problem.scores.double().norm()) <= EXACT
    return out


@EVERY_MODE
@pytest.mark.parametrize("n", [1, 2, 17, 33, 77])
def test_any_length(mode, n):
    check(Problem(mode, n, channels=40, features=n % 2 == 1))


@EVERY_MODE
@pytest.mark.parametrize("heads", [1, 4, 8, 12, 16])
def test_any_heads(mode, heads):
    check(Problem(mode, 18, heads=heads, channels=64, features=True, dim=8, points=1))


@EVERY_MODE
@pytest.mark.parametrize("channels", [1, 5, 8, 20, 33, 100, 136])
def test_any_channels(mode, channels):
    check(Problem(mode, 9, channels=channels, features=True, dim=72, points=3, norms=True))


@pytest.mark.parametrize("mode", ["bf16", "split"])
@pytest.mark.parametrize("channels", [128, 160, 264])
def test_channels_of_several_warps_and_blocks(mode, channels):
    check(Problem(mode, 10, heads=12, channels=channels, multiprocessors=1))


@EVERY_MODE
@pytest.mark.parametrize("block", [(0, 5), (5, 7), (16, 3), (18, 1)])
def test_blocks_of_queries(mode, block):
    check(Problem(mode, 19, batch=3, block=block, features=True, dim=24, points=8))


@EVERY_MODE
@pytest.mark.parametrize("pair_dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("spare", [0, 3, 8])
def test_pairs_of_any_type_and_strides(mode, pair_dtype, spare):
    problem = Problem(mode, 11, batch=2, pair_dtype=pair_dtype, spare=spare, grad=False)
    check(problem)


@pytest.mark.parametrize("mode", ["bf16", "split"])
@pytest.mark.parametrize("pair_dtype", [BF16, FP16, FP32], ids=str)
def test_pairs_of_any_type_of_several_tiles(mode, pair_dtype):
    check(Problem(mode, 70, channels=64, pair_dtype=pair_dtype, block=(3, 4), grad=False))


@EVERY_MODE
@pytest.mark.parametrize("channels", [12, 15, 24])
@pytest.mark.parametrize("grad_dtype", [BF16, FP16, FP32], ids=str)
def test_gradient_of_any_type(mode, channels, grad_dtype):
    check(Problem(mode, 20, channels=channels, grad_dtype=grad_dtype, features=True, sums=False))


@pytest.mark.parametrize("mode", ["bf16", "tf32"])
@pytest.mark.parametrize("weight_dtype", [BF16, FP16, FP32], ids=str)
def test_weight_of_any_type(mode, weight_dtype):
    check(Problem(mode, 20, channels=24, weight_dtype=weight_dtype, sums=False))


@EVERY_MODE
def test_pair_values_alone(mode):
    check(Problem(mode, 37, batch=2, channels=48, bias=False, features=True, sums=False, points=16))


@EVERY_MODE
@pytest.mark.parametrize("channels", [16, 21])
def test_fp32_gradient_is_added_to(mode, channels):
    problem = Problem(mode, 13, channels=channels, block=(2, 9), grad_dtype=FP32, features=True)
    alone = problem.run()["grad"]
    before = torch.randn(1, 13, 13, channels)
    grad = problem.run(before=before)["grad"]
    assert torch.equal(problem.mine(grad), problem.mine(before) + problem.mine(alone))
    others = torch.tensor([0, 1, 11, 12])
    assert torch.equal(grad[:, others], before[:, others])


@EVERY_MODE
def test_sums_are_added_to_those_of_another_block(mode):
    problem = Problem(mode, 21, channels=24, block=(3, 4))
    alone = problem.run()["sums"]
    before = torch.randn(alone.shape)
    assert torch.equal(problem.run(sums_before=before)["sums"], before + alone)


@pytest.mark.parametrize("mode", ["fp16", "split"])
def test_parts_without_tiles_are_zero(mode):
    """As many parts as the whole problem has, of which a block of queries is a small part."""
    out = check(Problem(mode, 34, block=(33, 1), multiprocessors=8))
    assert (out["sums"] == 0).flatten(1).all(1).sum() > 2


@pytest.mark.parametrize("mode", ["bf16", "tf32"])
def test_sums_of_nothing_are_zero(mode):
    for problem in (Problem(mode, 0, grad=False), Problem(mode, 5, batch=0, grad=False)):
        assert (problem.run()["sums"] == 0).all()
    problem = Problem(mode, 0, grad=False)
    before = torch.randn(problem.run()["sums"].shape)
    assert torch.equal(problem.run(sums_before=before)["sums"], before)


@pytest.mark.parametrize("mode", ["bf16", "split"])
@pytest.mark.parametrize("where", ["scores", "weight", "pair", "d_features"])
def test_nan_reaches_what_it_reaches_in_pytorch(mode, where):
    problem = Problem(mode, 20, channels=40, features=True)
    at = {"scores": (0, 1, 3, 18), "weight": (1, 37), "pair": (0, 2, 19, 5)}
    at["d_features"] = (0, 4, problem.values.start + 45)
    getattr(problem, where)[at[where]] = math.nan
    out = problem.run()
    expected, sums, alone, _ = problem.reference()
    assert torch.equal(out["grad"].isnan(), expected.isnan())
    total = out["sums"].sum(0)
    assert torch.equal(total[:, :-1].isnan(), sums.isnan())
    assert torch.equal(total[:, -1].isnan(), alone.isnan())


def test_batch_element_without_residues_has_no_gradient():
    out = Problem("bf16", 20, batch=2, features=True).run()
    assert (out["grad"][1] == 0).all()


@EVERY_MODE
def test_any_schedule(mode):
    problem = Problem(mode, 70, heads=12, channels=64, block=(1, 6), features=True)
    out = problem.run()
    for seed in (1, 2):
        again = problem.run(seed=seed)
        assert torch.equal(again["sums"], out["sums"])
        assert torch.equal(problem.mine(again["grad"]), problem.mine(out["grad"]))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(EmulationError, match="up to 16 heads, got 17"):
        Problem("bf16", 3, heads=17).run()
    with pytest.raises(EmulationError, match="dS and parts with the sums"):
        Problem("bf16", 3, bias=False).run()
    problem = Problem("bf16", 3)
    with pytest.raises(EmulationError, match="fp32 sums to add to"):
        problem.run(before=torch.zeros(1, 3, 3, 32, dtype=BF16))
