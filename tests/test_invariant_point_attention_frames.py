# SPDX-License-Identifier: Apache-2.0
"""Kernels of invariant point attention over residues and heads, emulated: points to the global
frame and back, and the ends of the backward. Against float64, and what autograd makes of it."""

import dataclasses

import pytest
import torch
from emulation.build import driver
from helpers import ROUNDING
from torch import Tensor

from fused_ops.testing import relative_error

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = {F32: 0, F16: 2, BF16: 3}
MODES = {"bf16": (0, BF16), "fp16": (1, F16), "tf32": (2, F32), "split": (3, F32)}
EPS = 0.25  # of lengths; large, so that it shows
SCALAR_SCALE, POINT_SCALE = 0.25, 0.5  # of the driver


def up(count, to=8):
    return -(-count // to) * to


@dataclasses.dataclass
class Case:
    """Sizes and a mode, with the widths that the headers give them."""

    batch: int = 2
    n: int = 5
    heads: int = 3
    head_dim: int = 8
    query_points: int = 4
    value_points: int = 8
    value_channels: int = 0
    norms: bool = False
    mode: str = "bf16"
    frames_type: torch.dtype = F32
    shared: bool = False  # frames, by all batch elements

    @property
    def dtype(self):
        return MODES[self.mode][1]

    @property
    def rounding(self):
        return ROUNDING[self.dtype]

    @property
    def dim(self):
        return up(self.head_dim)

    @property
    def copies(self):
        return 1 if self.dtype == F32 else 2

    @property
    def line(self):
        return up(3 * self.query_points, 4)

    @property
    def moment_one(self):
        return self.dim + self.copies * 3 * self.query_points

    @property
    def moments(self):
        return up(self.moment_one + 1)

    @property
    def values(self):
        return up(self.dim + self.copies * 3 * self.value_points)

    @property
    def filled(self):
        return self.heads * 3 * (self.dim + 2 * self.query_points + self.value_points)

    @property
    def feature_parts(self):
        """Widths of a head's scalars, points, lengths and pair values."""
        lengths = self.value_points if self.norms else 0
        return [self.head_dim, 3 * self.value_points, lengths, self.value_channels]

    @property
    def features_filled(self):
        return self.heads * sum(self.feature_parts)

    def settings(self):
        names = ("batch", "n", "heads", "head_dim", "query_points", "value_points")
        return {
            **{name: getattr(self, name) for name in (*names, "value_channels", "norms")},
            "mode": MODES[self.mode][0],
            "frames_type": TYPES[self.frames_type],
            "translations_stride": 0 if self.shared else 3 * self.n,
            "rotations_stride": 0 if self.shared else 9 * self.n,
            "norm_eps_millionths": round(EPS * 1e6),
        }

    def frames(self, far=0.0):
        """Translations, rotations (not quite: nine free numbers), centres; the last batch element
        of several has no key."""
        count = 1 if self.shared else self.batch
        translations = (torch.randn(count, self.n, 3) * 10 + far).to(self.frames_type)
        rotations = torch.linalg.qr(torch.randn(count, self.n, 3, 3)).Q
        rotations = (rotations + 0.05 * torch.randn(rotations.shape)).to(self.frames_type)
        centres = torch.full((self.batch, 4), float(self.n))
        centres[:, :3] = far + torch.randn(self.batch, 3)
        if self.batch > 1:
            centres[-1, 3] = 0
        return {"translations": translations, "rotations": rotations, "centres": centres}

    def double_frames(self, frames):
        """Translations less the centre, as fp32 has them, and rotations, of each batch element."""
        shift = frames["translations"].float() - frames["centres"][:, None, :3]
        rotations = frames["rotations"].double().expand(self.batch, self.n, 3, 3)
        return shift.double(), rotations

    def split(self, rows, parts):
        """Columns (heads, part) of a row after another."""
        pieces = rows.double().split([self.heads * part for part in parts], -1)
        return [x.unflatten(-1, (self.heads, part)) for x, part in zip(pieces, parts, strict=True)]

    def points_of(self, projected):
        """q, k, v, and the local points (batch, n, heads, points, 3)."""
        points = [3 * self.query_points] * 2 + [3 * self.value_points]
        parts = self.split(projected[..., : self.filled], [self.dim] * 3 + points)
        return parts[:3], [x.unflatten(-1, (-1, 3)) for x in parts[3:]]

    def run(self, kernel, inputs, **settings):
        name = "invariant_point_attention_frames"
        return driver(name).run(kernel, inputs, **{**self.settings(), **settings})


def turned(points, rotations):
    return torch.einsum("bihpc,bicd->bihpd", points, rotations)


def turned_back(points, rotations):
    return torch.einsum("bihpd,bicd->bihpc", points, rotations)


def lines(tensor, dtype, case, width):
    """As (batch, n, heads, width)."""
    x = tensor.view(dtype).view(case.batch, case.heads, case.n, width)
    return x.transpose(1, 2).double()


def close(ours: Tensor, exact: Tensor, tolerance: float):
    assert ours.shape == exact.shape
    assert relative_error(ours, exact) <= tolerance


CASES = [
    Case(mode="bf16"),
    Case(mode="fp16", batch=1, n=17, heads=4, head_dim=16, query_points=1, value_points=1),
    Case(mode="tf32", n=2, heads=12, head_dim=32, frames_type=BF16, shared=True, norms=True),
    Case(mode="split", n=3, heads=1, head_dim=21, query_points=16, value_points=16),
    Case(mode="bf16", n=1, heads=16, head_dim=24, query_points=8, value_channels=5, norms=True),
    Case(mode="fp16", n=3, heads=3, head_dim=136, value_points=4, value_channels=40, norms=True),
    Case(mode="split", batch=1, n=33, heads=3, head_dim=8, value_channels=32, norms=True),
    Case(mode="bf16", batch=1, n=77, heads=1, head_dim=32, frames_type=F16, value_points=5),
    Case(mode="tf32", batch=3, n=2, heads=2, head_dim=256, query_points=3, value_channels=130),
    Case(mode="bf16", batch=1, n=2, heads=2, head_dim=256, query_points=16, value_points=16),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.mode}-{c.n}-{c.head_dim}")


# Forward ----------------------------------------------------------------------------------------


def projected_of(case):
    projected = torch.randn(case.batch, case.n, up(case.filled)) * 3
    projected[..., case.filled :] = 0
    return projected.to(case.dtype)


def sum_of_parts(line, first, numbers, copies):
    """Points that were stored in `copies` parts."""
    return sum(line[..., first + c * numbers : first + (c + 1) * numbers] for c in range(copies))


def check_frames(case, projected, frames, bias=None, moments=True):
    inputs = {"projected": projected, **frames}
    if bias is not None:
        inputs["projection_bias"] = bias
        projected = projected + bias
    out = case.run("frames", inputs, bias=bias is not None, moments=moments)
    assert torch.equal(out["projected"].view(case.dtype), projected.flatten())
    shift, rotations = case.double_frames(frames)
    scalars, points = case.points_of(projected)
    globals_ = [turned(x, rotations) + shift[:, :, None, None] for x in points]
    for name, exact in zip(("q_points", "k_points"), globals_, strict=False):
        line = lines(out[name], F32, case, case.line)
        close(line[..., : 3 * case.query_points], exact.flatten(-2), 3e-7)
        assert (line[..., 3 * case.query_points :] == 0).all()
    # Two numbers of 16 bits have about twice their digits; on the way they are of fp32.
    precision = max(case.rounding**2, 2e-7) if case.copies == 2 else 3e-7
    wanted = [("values", 2, case.values)]
    if moments:
        wanted += [("q_moments", 0, case.moments), ("k_moments", 1, case.moments)]
    for name, kind, width in wanted:
        line = lines(out[name], case.dtype, case, width)
        assert torch.equal(line[..., : case.dim], scalars[kind])
        numbers = points[kind][0, 0, 0].numel()
        exact = globals_[kind].flatten(-2)
        close(sum_of_parts(line, case.dim, numbers, case.copies), exact, precision)
        high = line[..., case.dim : case.dim + numbers]
        close(high, exact, case.rounding + 3e-7)
        rest = line[..., case.dim + case.copies * numbers :]
        if name != "values":
            assert (rest[..., 0] == 1).all()
            rest = rest[..., 1:]
        assert (rest == 0).all()


@each_case
def test_frames(case):
    torch.manual_seed(0)
    check_frames(case, projected_of(case), case.frames())
    check_frames(case, projected_of(case), case.frames(), moments=False)


@pytest.mark.parametrize("moments", [False, True])
@each_case
def test_bias(case, moments):
    if case.dtype != F32:
        case = dataclasses.replace(case, mode="tf32")
    projected = projected_of(case)
    bias = torch.randn(projected.shape[-1])
    bias[case.filled :] = 0
    check_frames(case, projected, case.frames(), bias, moments)


def test_far_away():
    """A shift of everything does not matter."""
    case = Case(mode="bf16", batch=1, n=9)
    check_frames(case, projected_of(case), case.frames(far=8192.0))


def test_beyond_the_largest_number():
    """Coordinates that fp16 does not reach are large, not infinite; infinities and NaN stay."""
    case = Case(mode="fp16", batch=1, n=4, query_points=1, value_points=1)
    frames = case.frames()
    frames["rotations"] = torch.eye(3).expand(1, 4, 3, 3).contiguous()
    frames["centres"][:, :3] = 0
    frames["translations"] = torch.tensor([[[1e6, -1e6, 1.0], [7e4, 65519, -7e4]] * 2])
    frames["translations"][0, 2] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    projected = torch.zeros_like(projected_of(case))
    inputs = {"projected": projected, **frames}
    out = case.run("frames", inputs, bias=False, moments=True)
    values = lines(out["values"], F16, case, case.values)
    for x in (values, lines(out["q_moments"], F16, case, case.moments)):
        high, low = x[0, :, 0, 8:11], x[0, :, 0, 11:14]
        assert high[0].tolist() == [65504, -65504, 1]
        assert high[1].tolist() == [65504, 65504, -65504]
        assert low[0].tolist() == [65504, -65504, 0]
        assert low[1].tolist() == [4496, 15, -4496]
        assert high[2, :2].tolist() == [torch.inf, -torch.inf] and high[2, 2].isnan()
        assert (low[2, :2] == 0).all()


# Backward ---------------------------------------------------------------------------------------


def brought_back(gathered, rotations):
    """Local points and their lengths from gathered points less the translation."""
    local = turned_back(gathered, rotations)
    return local, (local.square().sum(-1) + EPS).sqrt()


def joined(case, parts):
    """Columns (heads, part) one after the other, up to a multiple of 8, of the mode's type."""
    row = torch.cat([x.flatten(2) for x in parts], -1)
    return torch.nn.functional.pad(row, (0, up(row.shape[-1]) - row.shape[-1])).to(case.dtype)


def output_of(case):
    """Features' gradient, features, and gathered points. Where no key is there, NaN."""
    shape = (case.batch, case.n, case.heads)
    d_features = joined(case, [torch.randn(*shape, part) for part in case.feature_parts])
    features = joined(case, [torch.randn(*shape, part) for part in case.feature_parts])
    gathered = torch.randn(*shape, case.value_points, 3) * 10
    if case.batch > 1:
        d_features[-1], features[-1], gathered[-1] = torch.nan, torch.nan, torch.nan
    return d_features, features, gathered


def here(case):
    """Of batch elements, those with a key."""
    return slice(0, case.batch - 1 if case.batch > 1 else 1)


@each_case
def test_output_backward(case):
    torch.manual_seed(0)
    frames = case.frames()
    d_features, features, gathered = output_of(case)
    inputs = {**frames, "d_features": d_features, "features": features, "gathered": gathered}
    out = case.run("output_backward", inputs)
    line = lines(out["d_gathered"], case.dtype, case, case.values)
    dots = lines(out["row_dots"], F32, case, 1)[..., 0]
    if case.batch > 1:
        assert (line[-1] == 0).all() and (dots[-1] == 0).all()

    shift, rotations = case.double_frames(frames)
    d_parts = case.split(d_features[..., : case.features_filled], case.feature_parts)
    parts = case.split(features[..., : case.features_filled], case.feature_parts)
    leaf = gathered.double().requires_grad_()
    local, lengths = brought_back(leaf, rotations)
    loss = (local.flatten(-2) * d_parts[1]).sum()
    if case.norms:
        loss = loss + (lengths * d_parts[2]).sum()
    (d_points,) = torch.autograd.grad(loss, leaf)

    filled, numbers = case.dim + case.copies * 3 * case.value_points, 3 * case.value_points
    some = here(case)
    assert torch.equal(line[some, ..., : case.head_dim], d_parts[0][some])
    assert (line[..., case.head_dim : case.dim] == 0).all() and (line[..., filled:] == 0).all()
    points = line[..., case.dim : case.dim + numbers]
    close(points[some], d_points.flatten(-2)[some], case.rounding + 1e-6)
    if case.copies == 2:
        assert torch.equal(points, line[..., case.dim + numbers : filled])

    # Of d_gathered as it has been rounded.
    whole = (gathered.double() + shift[:, :, None, None]).flatten(-2)
    exact = (d_parts[0] * parts[0]).sum(-1) + (d_parts[3] * parts[3]).sum(-1)
    exact = exact + (points * whole).sum(-1)
    close(dots[some], exact[some], 1e-6)


def test_no_length():
    """The gradient of a length of 0 is 0."""
    case = Case(batch=1, n=3, norms=True, mode="split")
    frames = case.frames()
    d_features, features, gathered = output_of(case)
    gathered[:, 1] = 0
    inputs = {**frames, "d_features": d_features, "features": features, "gathered": gathered}
    line = {}
    for eps in (0, 250000):
        out = case.run("output_backward", inputs, norm_eps_millionths=eps)
        line[eps] = lines(out["d_gathered"], F32, case, case.values)
    assert line[0].isfinite().all()
    assert torch.equal(line[0][:, 1], line[250000][:, 1])
    assert not torch.equal(line[0], line[250000])


@each_case
@pytest.mark.parametrize("weights_type", [F32, BF16])
def test_frames_backward(case, weights_type):
    torch.manual_seed(0)
    frames = case.frames()
    shift, rotations = case.double_frames(frames)
    projected = projected_of(case)
    d_features, _, gathered = output_of(case)
    head_weights = (torch.randn(case.heads) * 3).to(weights_type)
    shape = (case.batch, case.heads, case.n)
    queries, keys = (torch.randn(*shape, case.moments) for _ in range(2))
    values = torch.randn(*shape, up(case.dim + 3 * case.value_points))

    local = [x.clone().requires_grad_() for x in case.points_of(projected)[1]]
    at = [shift.clone().requires_grad_(), rotations.clone().requires_grad_()]
    points = [turned(x, at[1]) + at[0][:, :, None, None] for x in local]
    q, k = (x.detach().float().flatten(-2).transpose(1, 2) for x in points[:2])
    pad = (0, case.line - q.shape[-1])
    stored = [torch.nn.functional.pad(x, pad, value=torch.nan).contiguous() for x in (q, k)]
    if case.batch > 1:
        for x in (queries, keys, values):
            x[-1] = torch.nan

    inputs = {**frames, "projected": projected, "d_features": d_features, "gathered": gathered}
    inputs |= {"head_weights": head_weights, "q_points": stored[0], "k_points": stored[1]}
    inputs |= {"d_queries": queries, "d_keys": keys, "d_values": values}
    settings = {"head_weights_type": TYPES[weights_type]}
    out = case.run("frames_backward", inputs, of_frames=1, **settings)
    alone = case.run("frames_backward", inputs, of_frames=0, **settings)
    assert torch.equal(alone["d_projected"].view(torch.int32), out["d_projected"].view(torch.int32))

    # The gradients with respect to global points, by the formula; the rest is autograd's.
    weight = POINT_SCALE * torch.nn.functional.softplus(head_weights.double())
    grads = []
    for sums, own in ((queries.double(), q.double()), (keys.double(), k.double())):
        others = sum_of_parts(sums, case.dim, 3 * case.query_points, case.copies)
        one = sums[..., case.moment_one : case.moment_one + 1]
        grads.append(weight[:, None, None] * (others - own * one))
    grads.append(values.double()[..., case.dim : case.dim + 3 * case.value_points])
    grads = [x.transpose(1, 2).unflatten(-1, (-1, 3)) for x in grads]
    some = here(case)
    loss = sum((x[some] * grad[some]).sum() for x, grad in zip(points, grads, strict=True))
    d_parts = case.split(d_features[..., : case.features_filled], case.feature_parts)
    reached = gathered.double() + shift[:, :, None, None]  # does not move with the own frame
    back, lengths = brought_back(reached - at[0][:, :, None, None], at[1])
    loss = loss + (back.flatten(-2)[some] * d_parts[1][some]).sum()
    if case.norms:
        loss = loss + (lengths[some] * d_parts[2][some]).sum()
    exact = torch.autograd.grad(loss, [*local, *at])

    width = up(case.filled)
    d_projected = out["d_projected"].view(case.dtype).view(case.batch, case.n, width).double()
    d_translations = out["d_translations"].view(case.batch, case.n, 3)
    d_rotations = out["d_rotations"].view(case.batch, case.n, 3, 3)
    assert (d_projected[..., case.filled :] == 0).all()
    if case.batch > 1:
        assert all((x[-1] == 0).all() for x in (d_projected, d_translations, d_rotations))
    d_scalars, d_points = case.points_of(d_projected)
    scales = (SCALAR_SCALE, SCALAR_SCALE, 1.0)
    for ours, sums, scale in zip(d_scalars, (queries, keys, values), scales, strict=True):
        wanted = scale * sums.double()[..., : case.dim].transpose(1, 2)
        close(ours[some], wanted[some], case.rounding)
    for ours, wanted in zip(d_points, exact[:3], strict=True):
        close(ours[some], wanted[some], case.rounding + 1e-6)
    close(d_translations.double()[some], exact[3][some], 1e-6)
    close(d_rotations.double()[some], exact[4][some], 1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "batch, n, heads, points, first, rows, parts",
    [
        (1, 1, 1, 1, 0, 1, 0),
        (2, 2, 3, 4, 1, 1, 0),
        (1, 17, 16, 1, 0, 17, 0),
        (2, 33, 4, 8, 7, 19, 0),
        (1, 77, 3, 16, 0, 77, 2),
        (2, 40, 1, 5, 16, 24, 64),
        (1, 300, 2, 4, 100, 20, 0),
    ],
)
def test_distances_backward(batch, n, heads, points, first, rows, parts, mode):
    torch.manual_seed(0)
    case = Case(batch=batch, n=n, heads=heads, query_points=points, mode=mode)
    shape = (batch, heads, n, points, 3)
    q, k = torch.randn(shape) * 5, torch.randn(shape) * 5 + 1
    d_logits = torch.zeros(batch, heads, rows, up(n))
    d_logits[..., :n] = torch.randn(batch, heads, rows, n)
    if n > 1:
        d_logits[..., n // 2] = 0  # a residue that is not there, and nowhere
        k[:, :, n // 2] = torch.nan
    d_logits = d_logits.to(case.dtype)
    pad = (0, case.line - 3 * points)
    stored = [torch.nn.functional.pad(x.flatten(-2), pad) for x in (q, k)]
    head_weights = torch.randn(heads) * 3
    inputs = {"d_logits": d_logits, "q_points": stored[0], "k_points": stored[1]}
    inputs["head_weights"] = head_weights
    settings = {"first_row": first, "rows": rows, "parts": parts}
    out = case.run("distances_backward", inputs, add_sums=0, **settings)
    sums = out["sums"].view(-1, heads)
    assert sums.shape[0] == (parts or min(64, batch * -(-n // 16) * -(-n // 256)))
    block = q[:, :, first : first + rows, None].double()
    distances = (block - k.double().nan_to_num()[:, :, None]).square().sum((-1, -2))
    slopes = -POINT_SCALE / 2 * torch.sigmoid(head_weights.double())
    terms = d_logits[..., :n].double() * distances * slopes[:, None, None]
    wanted = terms.sum((0, 2, 3))
    # The terms nearly cancel.
    allowed = 1e-6 * terms.square().sum().sqrt() * n**0.5
    assert (sums.double().sum(0) - wanted).abs().max() <= allowed
    again = case.run("distances_backward", inputs, add_sums=1, **settings)["sums"].view(-1, heads)
    torch.testing.assert_close(again, sums + 0.5, rtol=1e-5, atol=1e-3)


def test_sums_of_nothing():
    case = Case(batch=1, n=4)
    points = torch.randn(1, 3, 4, 12)
    inputs = {"d_logits": torch.zeros(0), "q_points": points, "k_points": points}
    inputs["head_weights"] = torch.zeros(3)
    settings = {"first_row": 2, "rows": 0, "parts": 0}
    sums = case.run("distances_backward", inputs, add_sums=0, **settings)["sums"]
    assert sums.shape == (3,) and (sums == 0).all()
    assert (case.run("distances_backward", inputs, add_sums=1, **settings)["sums"] == 0.5).all()


@pytest.mark.parametrize("batch, n", [(0, 5), (2, 0)])
def test_nothing(batch, n):
    case = Case(batch=batch, n=n)
    empty = torch.zeros(0)
    inputs = dict.fromkeys(("translations", "rotations", "centres", "projected"), empty)
    out = case.run("frames", inputs, bias=False, moments=True)
    assert all(x.numel() == 0 for x in out.values())
    inputs |= dict.fromkeys(("features", "d_features", "gathered"), empty)
    case.run("output_backward", inputs)
    names = ("q_points", "k_points", "d_queries", "d_keys", "d_values", "head_weights")
    inputs |= dict.fromkeys(names, empty)
    case.run("frames_backward", inputs, of_frames=1, head_weights_type=0)
