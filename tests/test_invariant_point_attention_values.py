# SPDX-License-Identifier: Apache-2.0
"""Invariant point attention's softmax, values and gathered pair values, emulated.

References are float64 on the operands as stored; results hold NaN before.
"""

import math

import pytest
import torch
from emulation.build import driver, span

BF16, FP16, TF32, SPLIT = range(4)
MODES = pytest.mark.parametrize("mode", range(4), ids=["bf16", "fp16", "tf32", "split"])
TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float32]
STORED = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}  # DType
# Relative L2 norms: one rounding of weights, values being exact, and one of the result.
ERROR = [2**-8, 2**-11, 2**-11, 1e-6]
# Of points, gathered with a spread of tens of A; in 16-bit modes the weights are rounded.
POINT_ERROR = [2**-8, 2**-11, 1e-6, 1e-6]
EPS = 1e-3


def round_up(x, to):
    return -(-x // to) * to


def error(result, reference):
    difference = (result.double() - reference).norm()
    return (difference / reference.norm().clamp_min(1e-30)).item()


def make_logits(batch, heads, rows, n, gain=3.0):
    """Logits, holes among the keys, and a batch element without any (the last of several)."""
    present = torch.rand(batch, n) < 0.7
    present[:, n // 2] = True
    if batch > 1:
        present[-1] = False
    logits = torch.full((batch, heads, rows, round_up(n, 8)), -math.inf)
    drawn = torch.randn(batch, heads, rows, n) * gain
    logits[..., :n] = drawn.masked_fill(~present[:, None, None], -math.inf)
    return logits, present


def small_weights(logits, n):
    """All but the first key's are subnormal numbers of fp16."""
    logits[..., :n] = torch.randn_like(logits[..., :n]) - 18
    logits[..., 0] = 0
    return logits


class Case:
    def __init__(self, mode, batch, n, heads, head_dim, points, first=0, rows=None, **options):
        torch.manual_seed(n + heads)
        self.type, self.rows, self.first = TYPES[mode], n - first if rows is None else rows, first
        self.norms, stored = options.get("norms", True), options.get("stored", True)
        frame_type, shared = options.get("frame_type", torch.float32), options.get("shared", False)
        self.batch, self.n, self.heads, self.dim, self.points = batch, n, heads, head_dim, points
        self.logits, self.present = make_logits(batch, heads, self.rows, n)
        padded = round_up(head_dim, 8)
        self.v = torch.randn(batch, heads, n, head_dim).to(self.type)
        coordinates = torch.randn(batch, heads, n, points * 3) * 30
        copies = 1 if self.type == torch.float32 else 2
        line = round_up(padded + copies * points * 3, 8)
        values = torch.zeros(batch, heads, n, line, dtype=self.type)
        values[..., :head_dim] = self.v
        high = coordinates.to(self.type)
        values[..., padded : padded + points * 3] = high
        self.coordinates = high.double()
        if copies == 2:
            low = (coordinates - high.float()).to(self.type)
            values[..., padded + points * 3 : padded + points * 6] = low
            self.coordinates = self.coordinates + low.double()
        frames = 1 if shared else batch
        self.translations = (torch.randn(frames, n, 3) * 20 + 100).to(frame_type)
        self.rotations = torch.linalg.qr(torch.randn(frames, n, 3, 3))[0].to(frame_type)
        self.centres = torch.randn(batch, 4) + 100
        self.centres[:, 3] = self.present.sum(-1)
        self.settings = {
            "mode": mode,
            "batch": batch,
            "n": n,
            "heads": heads,
            "head_dim": head_dim,
            "points": points,
            "value_channels": 5,
            "norms": self.norms,
            "first_row": first,
            "rows": self.rows,
            "frame_type": STORED[frame_type],
            "shared_frames": shared,
            "stored": stored,
        }
        self.inputs = {"logits": self.logits, "values": values, "centres": self.centres}
        self.inputs |= {"translations": self.translations, "rotations": self.rotations}

    def run(self):
        out = driver("invariant_point_attention_values").run("values", self.inputs, **self.settings)
        features = out["features"].view(torch.uint8).view(self.type).view(self.batch, self.n, -1)
        ends = [self.heads * k for k in (self.dim, 3 * self.points, self.points * self.norms, 5)]
        *parts, filling = features.split([*ends, features.shape[-1] - sum(ends)], -1)
        block = slice(self.first, self.first + self.rows)
        for part in [*parts, filling]:
            outside = torch.cat([part[:, : block.start], part[:, block.stop :]], 1)
            assert outside.isnan().all()  # other blocks' queries
        assert parts[3].isnan().all()  # gather's
        assert (filling[:, block] == 0).all()
        shape = (self.batch, self.rows, self.heads)
        parts = [part[:, block].reshape(*shape, -1).double() for part in parts[:3]]
        if "log_sums" in out:
            sums = out["log_sums"].view(self.batch, self.heads, self.n)[..., block]
            gathered = out["gathered"].view(self.batch, self.n, *shape[2:], -1)[:, block]
            parts += [gathered.double(), sums.double()]
        return parts

    def reference(self):
        dead = ~self.present.any(-1)
        logits = self.logits[..., : self.n].double()
        weights = torch.softmax(logits * math.log(2), -1)
        weights[dead] = 0
        scalars = torch.einsum("bhij,bhjc->bihc", weights, self.v.double())
        points = torch.einsum("bhij,bhjc->bihc", weights, self.coordinates).unflatten(-1, (-1, 3))
        block = slice(self.first, self.first + self.rows)
        shift = self.translations.double() - self.centres[:, None, :3].double()
        gathered = points - shift[:, block, None, None]
        rotations = self.rotations.double().expand(self.batch, -1, -1, -1)[:, block]
        local = torch.einsum("bihpd,bicd->bihpc", gathered, rotations)
        norms = (local.square().sum(-1) + EPS).sqrt()
        for x in (gathered, local, norms):
            x[dead] = 0
        sums = torch.logsumexp(logits * math.log(2), -1) / math.log(2)
        sums[dead] = math.inf
        return [scalars, local.flatten(-2), norms, gathered.flatten(-2), sums]


def check(case, mode):
    results, references = case.run(), case.reference()
    dead = ~case.present.any(-1)
    tolerances = [ERROR[mode], *[POINT_ERROR[mode]] * 2]
    tolerances += [POINT_ERROR[mode], None]
    for i, result in enumerate(results):
        reference, tolerance = references[i], tolerances[i]
        if i == 2 and not case.norms:
            continue
        assert torch.equal(result[dead], reference[dead])
        if i == 4:
            scale = 1 + reference[~dead].abs()
            assert ((result - reference)[~dead].abs() < 1e-6 * scale).all()
        elif (~dead).any():
            assert error(result[~dead], reference[~dead]) < tolerance, i


@MODES
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 8, 1),
        (2, 2, 3, 16, 4),
        (1, 17, 4, 24, 8),
        (2, 33, 3, 32, 8),
        (1, 77, 1, 32, 16),
        (1, 209, 1, 13, 3),
        (1, 18, 16, 8, 1),
        (1, 40, 1, 72, 4),
        (1, 20, 1, 256, 16),
    ],
)
def test_values(mode, sizes):
    check(Case(mode, *sizes), mode)


@MODES
def test_block_of_queries(mode):
    check(Case(mode, 2, 50, 2, 16, 4, first=7, rows=19, norms=False), mode)


@MODES
def test_results_that_are_not_wanted(mode):
    check(Case(mode, 1, 9, 2, 8, 2, stored=False), mode)


@pytest.mark.parametrize("frame_type", [torch.float32, torch.bfloat16, torch.float16])
def test_frames(frame_type):
    check(Case(SPLIT, 2, 19, 2, 8, 4, frame_type=frame_type, shared=True), SPLIT)


@MODES
@pytest.mark.parametrize("number", [math.nan, -math.inf, math.inf])
def test_logits_that_give_nan(mode, number):
    case = Case(mode, 1, 20, 2, 8, 4)
    if number == -math.inf:
        case.logits[0, 1, 3] = number
    else:
        case.logits[0, 1, 3, 10] = number
    results, references = case.run(), case.reference()
    for result, reference in zip(results[:4], references[:4], strict=True):
        assert torch.equal(result.isnan(), reference.isnan())
        assert result.isnan().any()


def test_nothing():
    for rows, n in ((0, 5), (0, 0)):
        case = Case(BF16, 1, 5, 2, 8, 4, rows=0)
        out = driver("invariant_point_attention_values").run(
            "values", case.inputs, **(case.settings | {"n": n, "rows": rows})
        )
        assert out["features"].isnan().all()


def gather(
    mode, batch, n, heads, channels, pair_type, *, first=0, rows=None, gap=0, offset=0, small=False
):
    torch.manual_seed(n + channels)
    rows = n - first if rows is None else rows
    logits, present = make_logits(batch, heads, rows, n)
    if small:
        logits, present = small_weights(logits, n), torch.ones_like(present)
    dead = ~present.any(-1)
    log_sums = torch.full((batch, heads, n), math.nan)
    sums = torch.logsumexp(logits.double() * math.log(2), -1) / math.log(2)
    sums[dead] = math.inf
    log_sums[..., first : first + rows] = sums.float()
    memory = torch.randn(offset + batch * n * (n + 1) * (channels + gap)).to(pair_type)
    strides = (n * (n + 1) * (channels + gap), (n + 1) * (channels + gap), channels + gap, 1)
    pair = memory.as_strided((batch, n, n, channels), strides, offset)
    if small:
        pair[:, :, 0] = 0
        pair *= 4096  # that the result is a normal number
    inputs = {"logits": logits, "log_sums": log_sums, "pair": span(pair)}
    out = driver("invariant_point_attention_gather").run(
        "gather",
        inputs,
        mode=mode,
        batch=batch,
        n=n,
        heads=heads,
        head_dim=8,
        points=1,
        norms=False,
        value_channels=channels,
        first_row=first,
        rows=rows,
        pair_offset=offset,
        **dict(zip(("batch_stride", "i_stride", "j_stride"), strides[:3], strict=True)),
        pair_type=STORED[pair_type],
    )
    features = out["features"].view(torch.uint8).view(TYPES[mode]).view(batch, n, -1)
    at = heads * 11
    result = features[:, first : first + rows, at : at + heads * channels]
    assert features.isnan().sum() == features.numel() - result.numel()
    weights = torch.exp2(logits[..., :n].double() - sums[..., None])
    reference = torch.einsum(
        "bhij,bijc->bihc", weights, pair[:, first : first + rows].double()
    ).flatten(-2)
    assert torch.equal(result[dead].double(), reference[dead])
    worst = max(ERROR[mode], 2**-11 if pair_type == torch.float32 and mode < SPLIT else 0)
    assert error(result[~dead], reference[~dead]) < worst


@MODES
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 8), (2, 2, 3, 16), (1, 17, 12, 128), (1, 33, 4, 40), (1, 77, 16, 8), (1, 5, 2, 200)],
)
def test_gather(mode, sizes):
    gather(mode, *sizes, TYPES[mode])


@MODES
@pytest.mark.parametrize("pair_type", STORED, ids=str)
def test_gather_of_other_types_and_strides(mode, pair_type):
    gather(mode, 2, 19, 3, 16, pair_type, first=3, rows=9, gap=8, offset=16)
    gather(mode, 1, 6, 3, 13, pair_type, gap=2, offset=1)
    gather(mode, 1, 15, 3, 16, pair_type, gap=1)  # only the stride of j is odd


@MODES
def test_small_weights_are_as_accurate(mode):
    case = Case(mode, 1, 30, 2, 16, 4)
    case.present[:] = True
    small_weights(case.logits, case.n)
    values = case.inputs["values"]
    values[:, :, 0] = 0
    values[..., :16] *= 4096  # that the result is a normal number
    case.v *= 4096
    case.v[:, :, 0] = 0
    case.coordinates[:, :, 0] = 0
    check(case, mode)
    gather(mode, 1, 30, 2, 16, TYPES[mode], small=True)
