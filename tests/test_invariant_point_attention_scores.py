# SPDX-License-Identifier: Apache-2.0
"""The kernels of the scores' backward of invariant point attention, emulated: dS, its sums over
queries and over keys, and those of the weights.

Results hold NaN before; references are float64 on the very operands.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from emulation.build import driver
from torch import Tensor

BF16, FP16, TF32, SPLIT = range(4)
TYPES = {BF16: torch.bfloat16, FP16: torch.float16, TF32: torch.float32, SPLIT: torch.float32}
# Of rounding to nearest, root mean square and generous: 16-bit operands, TF32, fp32's accuracy.
ROUNDING = {BF16: 2.5e-3, FP16: 3e-4, TF32: 4e-4, SPLIT: 1e-6}
# Of dS as it is stored. In fp32 modes only its product has an error.
STORED = {BF16: 2.5e-3, FP16: 3e-4, TF32: 6e-4, SPLIT: 1e-6}
MODES = pytest.mark.parametrize(
    "mode", [BF16, FP16, TF32, SPLIT], ids=["bf16", "fp16", "tf32", "fp32"]
)
FEW, MANY = 1000, 0  # multiprocessors: small tiles, or large ones where there are any


def up(count, to):
    return -(-count // to) * to


@dataclass
class Shape:
    mode: int
    batch: int = 1
    n: int = 33
    heads: int = 1
    dim: int = 16
    query_points: int = 4
    value_points: int = 8
    first_row: int = 0
    rows: int | None = None

    def __post_init__(self):
        if self.rows is None:
            self.rows = self.n - self.first_row

    @property
    def copies(self):
        return 1 if self.mode in (TF32, SPLIT) else 2

    @property
    def type(self):
        return TYPES[self.mode]

    @property
    def value_line(self):
        return up(self.dim + self.copies * 3 * self.value_points, 8)

    @property
    def moment_line(self):
        return up(self.dim + self.copies * 3 * self.query_points + 1, 8)

    @property
    def value_filled(self):
        return self.dim + 3 * self.value_points

    @property
    def block(self):
        return slice(self.first_row, self.first_row + self.rows)


def problem(s: Shape, *, pair_values=False, holes=True, accumulate=False):
    """Operands by name, in double precision where they are exact, and the mask."""
    lead = (s.batch, s.heads, s.n)
    copies = s.copies
    values = torch.zeros(*lead, s.value_line)
    values[..., : s.dim + copies * 3 * s.value_points] = torch.randn(
        *lead, s.dim + copies * 3 * s.value_points
    )
    values[..., s.value_filled :] *= 1e-2  # low parts
    gathered = torch.zeros(*lead, s.value_line)
    gathered[..., : s.value_filled] = torch.randn(*lead, s.value_filled)
    if copies == 2:
        gathered[..., s.value_filled :][..., : 3 * s.value_points] = gathered[
            ..., s.dim : s.value_filled
        ]
    moments = {}
    for name in ("q_moments", "k_moments"):
        one = s.dim + copies * 3 * s.query_points
        moments[name] = torch.zeros(*lead, s.moment_line)
        moments[name][..., :one] = torch.randn(*lead, one)
        moments[name][..., one] = 1
    present = torch.ones(s.batch, s.n, dtype=torch.bool)
    if holes:
        present = torch.rand(s.batch, s.n) > 0.3
        present[:, :1] = True
    if s.batch > 1:
        present[1] = False
    logits = torch.full((s.batch, s.heads, s.n, up(s.n, 8)), -math.inf)
    logits[..., : s.n] = torch.randn(s.batch, s.heads, s.n, s.n) * 3
    logits[..., : s.n].masked_fill_(~present[:, None, None, :], -math.inf)
    log_sums = torch.logsumexp(logits.double() * math.log(2), -1) / math.log(2)
    log_sums = log_sums.masked_fill(log_sums == -math.inf, math.inf).float()
    pair_dots = torch.zeros_like(logits)
    pair_dots[..., : s.n] = torch.randn(s.batch, s.heads, s.n, s.n)
    given = {
        "values": values.to(s.type),
        "d_gathered": gathered.to(s.type),
        "logits": logits[:, :, s.block].contiguous(),
        "log_sums": log_sums,
        "row_dots": torch.randn(lead),
        **{name: x.to(s.type) for name, x in moments.items()},
    }
    if pair_values:
        given["pair_dots"] = pair_dots[:, :, s.block].contiguous()
    if accumulate:
        given["d_keys"] = torch.randn(*lead, s.moment_line)
        given["d_values"] = torch.randn(*lead, up(s.value_filled, 8))
        given["d_values"][..., s.value_filled :] = 0
    return given, present


def settings(s: Shape, multiprocessors, seed=0):
    return {
        "batch": s.batch,
        "n": s.n,
        "heads": s.heads,
        "dim": s.dim,
        "query_points": s.query_points,
        "value_points": s.value_points,
        "first_row": s.first_row,
        "rows": s.rows,
        "mode": s.mode,
        "multiprocessors": multiprocessors,
        "seed": seed,
    }


def program(s: Shape):
    fp32 = s.type == torch.float32
    return driver("invariant_point_attention_scores" + ("_fp32" if fp32 else ""))


def as_type(out, dtype):
    return out.view(torch.uint8).view(dtype) if out.numel() else torch.empty(0, dtype=dtype)


def keys_backward(s, given, multiprocessors=FEW, seed=0):
    names = ["values", "d_gathered", "logits", "log_sums", "row_dots", "q_moments"]
    names += [name for name in ("pair_dots", "d_keys", "d_values") if name in given]
    out = program(s).run(
        "keys",
        {name: given[name] for name in names},
        pair_values="pair_dots" in given,
        accumulate="d_keys" in given,
        **settings(s, multiprocessors, seed),
    )
    lead = (s.batch, s.heads)
    return {
        "d_logits": as_type(out["d_logits"], s.type).view(*lead, s.rows, up(s.n, 8)),
        "d_keys": out["d_keys"].view(*lead, s.n, s.moment_line),
        "d_values": out["d_values"].view(*lead, s.n, up(s.value_filled, 8)),
    }


def queries_backward(s, given, d_logits, multiprocessors=FEW, seed=0):
    inputs = {"d_logits": d_logits, "k_moments": given["k_moments"]}
    out = program(s).run("queries", inputs, **settings(s, multiprocessors, seed))
    return out["d_queries"].view(s.batch, s.heads, s.n, s.moment_line)


def close(out: Tensor, expected: Tensor, rounding: float):
    assert out.isfinite().all()
    error = (out.double() - expected).norm()
    if expected.numel() < 32:  # the largest error of a rounding, not the usual one
        rounding *= 1.6
    assert error <= rounding * expected.norm() + 1e-12, error / expected.norm()


def check_keys(s, given, multiprocessors=FEW, seed=0):
    out = keys_backward(s, given, multiprocessors, seed)
    exact = {name: x.double() for name, x in given.items()}
    rows = s.block
    log_sums, row_dots = exact["log_sums"][:, :, rows, None], exact["row_dots"][:, :, rows, None]
    weights = torch.exp2(exact["logits"] - log_sums)[..., : s.n]
    gathered = exact["d_gathered"][:, :, rows]
    d_weights = gathered @ exact["values"].mT
    if "pair_dots" in exact:
        d_weights = d_weights + exact["pair_dots"][..., : s.n]
    scores = weights * (d_weights - row_dots)
    d_logits = out["d_logits"]
    close(d_logits[..., : s.n], scores, STORED[s.mode])
    assert (d_logits[..., : s.n][weights == 0] == 0).all()
    assert (d_logits[..., s.n :] == 0).all()
    # Of dS as it has been stored; so this product's own error is that of its operands alone.
    d_keys = d_logits[..., : s.n].double().mT @ exact["q_moments"][:, :, rows]
    d_values = weights.mT @ gathered[..., : s.value_filled]
    for name, sums in (("d_keys", d_keys), ("d_values", d_values)):
        got = out[name].double()
        if name in exact:
            got = got - exact[name]
        if name == "d_values":
            assert (got[..., s.value_filled :] == 0).all()
            got = got[..., : s.value_filled]
        # As an operand 16-bit dS is exact; weights are rounded.
        exact_operands = name == "d_keys" and s.mode in (BF16, FP16)
        rounding = 1e-6 if exact_operands else ROUNDING[s.mode]
        close(got, sums, rounding if name not in exact else rounding + 1e-6)
    return out


def check_queries(s, given, d_logits, multiprocessors=FEW, seed=0):
    out = queries_backward(s, given, d_logits, multiprocessors, seed)
    expected = d_logits[..., : s.n].double() @ given["k_moments"].double()
    assert out[:, :, : s.first_row].isnan().all()  # other blocks' are left alone
    assert out[:, :, s.first_row + s.rows :].isnan().all()
    close(out[:, :, s.block], expected, 4e-4 if s.mode == TF32 else 1e-6)
    return out


def check(s, multiprocessors=FEW, seed=0, **which):
    given, _ = problem(s, **which)
    out = check_keys(s, given, multiprocessors, seed)
    check_queries(s, given, out["d_logits"], multiprocessors, seed)


@MODES
@pytest.mark.parametrize("n", [1, 2, 17, 33, 77])
def test_any_length(n, mode):
    check(Shape(mode, n=n, heads=2))


@MODES
@pytest.mark.parametrize("n", [64, 130])
def test_large_tiles(n, mode):
    check(Shape(mode, n=n), MANY, pair_values=True)


@MODES
@pytest.mark.parametrize(
    "dim, query_points, value_points",
    [(8, 1, 1), (8, 4, 16), (24, 8, 4), (32, 4, 8), (64, 4, 8), (104, 16, 16)],
)
def test_any_width(dim, query_points, value_points, mode):
    check(Shape(mode, n=34, dim=dim, query_points=query_points, value_points=value_points))


@MODES
def test_widest(mode):
    check(Shape(mode, n=17, dim=256, query_points=16, value_points=16), pair_values=True)


@MODES
@pytest.mark.parametrize("heads", [3, 4, 12, 16])
def test_any_heads(heads, mode):
    check(Shape(mode, n=17, heads=heads, dim=8, query_points=1, value_points=1))


@MODES
@pytest.mark.parametrize("multiprocessors", [FEW, MANY], ids=["few", "many"])
def test_block_of_queries(multiprocessors, mode):
    """A batch element without any residue, too; sums are added to those of an earlier block."""
    s = Shape(mode, batch=2, n=77, heads=2, first_row=19, rows=37)
    check(s, multiprocessors, pair_values=True, accumulate=True)


@MODES
def test_without_queries(mode):
    s = Shape(mode, n=9, first_row=9, rows=0)
    given, _ = problem(s)
    out = keys_backward(s, given)
    assert (out["d_keys"] == 0).all() and (out["d_values"] == 0).all()
    given, _ = problem(s, accumulate=True)
    assert torch.equal(keys_backward(s, given)["d_keys"], given["d_keys"])


@MODES
def test_without_residues(mode):
    s = Shape(mode, n=0)
    given, _ = problem(s, accumulate=True)
    assert keys_backward(s, given)["d_logits"].numel() == 0


@MODES
def test_infinite_values_of_absent_keys_reach_nothing(mode):
    s = Shape(mode, n=33)
    given, present = problem(s)
    absent = ~present[0]
    assert absent.any()
    given["values"][0, 0, absent] = 0
    clean = check_keys(s, given)
    given["values"][0, 0, absent] = math.inf
    dirty = keys_backward(s, given)
    for name in clean:
        assert torch.equal(clean[name], dirty[name]), name


@MODES
def test_same_bits_every_time(mode):
    s = Shape(mode, n=77, heads=2)
    given, _ = problem(s)
    first, second = (keys_backward(s, given, seed=seed) for seed in (0, 1))
    for name in first:
        assert torch.equal(first[name], second[name]), name
    queries = [queries_backward(s, given, first["d_logits"], seed=seed) for seed in (0, 1)]
    assert torch.equal(*queries)


@pytest.mark.parametrize("mode", [TF32, SPLIT])
@pytest.mark.parametrize("n, first, rows", [(1, 0, 1), (2, 1, 1), (33, 0, 33), (77, 16, 40)])
def test_settled_row_dots_make_sums_over_keys_zero(n, first, rows, mode):
    torch.manual_seed(0)
    s = Shape(mode, batch=2, n=n, heads=3, first_row=first, rows=rows)
    given, _ = problem(s)
    once = keys_backward(s, given)["d_logits"]
    inputs = {"d_logits": once, "row_dots": given["row_dots"]}
    settled = program(s).run("settle", inputs, **settings(s, FEW))["row_dots"].view(2, 3, n)
    outside = torch.ones(n, dtype=torch.bool)
    outside[s.block] = False
    assert torch.equal(settled[..., outside], given["row_dots"][..., outside])
    wanted = given["row_dots"][..., s.block].double() + once.double().sum(-1)
    assert (settled[..., s.block].double() - wanted).abs().max() < 1e-5
    again = keys_backward(s, given | {"row_dots": settled})["d_logits"]
    assert again.double().sum(-1).abs().max() < 1e-5
    assert once.double().sum(-1).abs().max() > 0.1
