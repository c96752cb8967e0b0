# SPDX-License-Identifier: Apache-2.0
"""The kernels for large problems, in emulation, each against float64."""

import math

import pytest
import torch
from emulation.build import driver
from helpers import randomize

from fused_ops import reference
from fused_ops.testing import relative_error

MODES = {"bf16": 0, "fp16": 1, "tf32": 2, "split": 3}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TYPE = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}
MASK_TYPE = {torch.uint8: 0, torch.int64: 4, torch.float16: 5, torch.float32: 7}
# Relative L2 errors; fp32 accuracy is that of fp32 sums.
ALLOWED = {"bf16": 6e-3, "fp16": 8e-4, "tf32": 8e-4, "split": 1e-6}
# mode, Hopper's kernels or not, (batch, n, channels, hidden, tile): every tile, every mode.
CASES = [
    ("bf16", False, (1, 17, 64, 64, 0)),
    ("bf16", True, (1, 17, 64, 64, 0)),
    ("split", True, (2, 3, 128, 128, 0)),
    ("split", False, (1, 11, 40, 72, 0)),
    ("fp16", True, (1, 11, 40, 72, 0)),
    ("tf32", True, (1, 9, 5, 3, 0)),
    ("tf32", False, (1, 11, 40, 72, 0)),
    ("bf16", True, (2, 6, 128, 100, 0)),
    ("bf16", False, (1, 5, 200, 130, 1)),
    ("split", False, (1, 3, 384, 160, 2)),
    ("tf32", False, (1, 7, 100, 33, 3)),
    ("fp16", False, (3, 1, 16, 8, 3)),
    ("fp16", False, (1, 7, 100, 33, 3)),
]
EVERY_CASE = pytest.mark.parametrize("mode,hopper,shape", CASES, ids=str)
RESIDENT_BLOCKS = 3


class Problem:
    """Inputs, parameters in float64 as they are stored, and settings of a request."""

    def __init__(self, mode, shape, *, hopper=False, outgoing=True, mask=None,
                 gate_normalized=False, weights=None, pair=None, biases=True):  # fmt: skip
        batch, n, channels, hidden, tile = shape
        self.mode, self.outgoing, self.gate_normalized = mode, outgoing, gate_normalized
        self.batch, self.n, self.channels, self.hidden = batch, n, channels, hidden
        self.pitch = -(-n // 8) * 8
        self.dtype = DTYPES.get(mode, torch.float32)
        module = reference.TriangularMultiplicativeUpdate(channels, hidden)
        self.module = randomize(module).to(weights or self.dtype)
        self.pair = torch.randn(batch, n, n, channels).to(pair or self.dtype)
        self.inputs = {"pair": self.pair}
        self.biases = biases
        for name, value in self.module.named_parameters():
            self.inputs[name.replace(".", "_")] = value.detach()
        self.settings = {
            "batch": batch,
            "n": n,
            "channels": channels,
            "hidden": hidden,
            "tile": tile,
            "mode": MODES[mode],
            "hopper": hopper,
            "outgoing": outgoing,
            "gate_normalized": gate_normalized,
            "biases": biases,
            "weight_type": TYPE[weights or self.dtype],
            "pair_type": TYPE[pair or self.dtype],
        }
        self.mask = torch.ones(batch, n, n, dtype=torch.float64)
        if mask is not None:
            values = torch.rand(batch, n, n) * 3
            values = values.to(mask)
            self.inputs["mask"] = values
            self.settings |= {"masked": 1, "mask_type": MASK_TYPE[mask]}
            self.mask = values.double()
        self.exact = {k: v.detach().double() for k, v in self.module.named_parameters()}

    def linear(self, name, x):
        bias = self.exact[f"{name}.bias"] if self.biases else None
        return torch.nn.functional.linear(x, self.exact[f"{name}.weight"], bias)

    def normalised(self, x):
        return torch.nn.functional.layer_norm(x, x.shape[-1:])

    def norm_in(self):
        x = self.normalised(self.pair.double())
        return x * self.exact["layer_norm_in.weight"] + self.exact["layer_norm_in.bias"]

    def gated(self, plane):
        """Projection, gate after the sigmoid, in float64: (batch, i, j, hidden)."""
        x = self.norm_in()
        return self.linear(f"proj_{plane}", x), torch.sigmoid(self.linear(f"gate_{plane}", x))

    def plane(self, x):
        """(batch, i, j, hidden) as the kernels number pairs: (hidden, batch, line, k)."""
        x = x if self.outgoing else x.transpose(1, 2)
        return x.permute(3, 0, 1, 2)

    def run(self, kernel, inputs=None, **settings):
        return driver("triangular_multiplicative_update").run(
            kernel, {**self.inputs, **(inputs or {})}, **{**self.settings, **settings}
        )

    def unpad(self, values):
        """The numbers of a plane without its padding."""
        return values.view(-1, self.batch, self.n, self.pitch)[..., : self.n]

    def pad(self, plane, dtype):
        """A plane with NaN in its padding."""
        padded = torch.full((*plane.shape[:-1], self.pitch), math.nan, dtype=torch.float64)
        padded[..., : self.n] = plane
        return padded.to(dtype)

    def matrix(self, values, columns):
        """Rows of pairs (batch, line, place, column) in float64."""
        dtype = self.dtype
        return values.view(dtype).view(self.batch, self.n, self.pitch, columns).double()


def planes_of(problem, got, plane, hidden):
    """What a plane of numbers stands for, and its padding."""
    values = got[plane].view(torch.float16 if problem.mode != "bf16" else torch.bfloat16).double()
    if problem.mode == "split":
        values = values + got[f"{plane}_lo"].view(torch.float16).double()
    values = values.view(-1, problem.batch, problem.n, problem.pitch)
    if "undo" in got:
        undo = got["undo"].view(2, -1)[0 if plane == "a" else 1, :hidden]
        values = values * undo.double().view(-1, 1, 1, 1)
    return values[..., : problem.n], values[..., problem.n :]


@EVERY_CASE
def test_projections(mode, hopper, shape):
    outgoing = shape[1] % 2 == 0 or mode == "bf16"
    problem = Problem(mode, shape, hopper=hopper, outgoing=outgoing, mask=torch.float32)
    got = problem.run("project")
    for plane in "ab":
        values, padding = planes_of(problem, got, plane, problem.hidden)
        projected, gate = problem.gated(plane)
        exact = problem.plane(projected * gate * problem.mask.unsqueeze(-1))
        assert relative_error(values, exact) < ALLOWED[mode]
        assert (padding == 0).all()


@pytest.mark.parametrize("mask", [torch.uint8, torch.int64, torch.float16])
@pytest.mark.parametrize("mode", ["bf16", "split"])
def test_projections_with_masks_of_other_dtypes(mode, mask):
    problem = Problem(mode, (2, 5, 16, 24, 0), mask=mask, outgoing=False, biases=False)
    got = problem.run("project")
    for plane in "ab":
        projected, gate = problem.gated(plane)
        exact = problem.plane(projected * gate * problem.mask.unsqueeze(-1))
        values, _ = planes_of(problem, got, plane, problem.hidden)
        assert relative_error(values, exact) < ALLOWED[mode]


@pytest.mark.parametrize("magnitude", [1e6, 1e-4])
@pytest.mark.parametrize("mode", ["tf32", "split"])
def test_masks_of_any_magnitude(mode, magnitude):
    problem = Problem(mode, (1, 6, 16, 24, 0), mask=torch.float32)
    problem.inputs["mask"] *= magnitude
    problem.mask = problem.inputs["mask"].double()
    got = problem.run("project")
    projected, gate = problem.gated("a")
    exact = problem.plane(projected * gate * problem.mask.unsqueeze(-1))
    values, _ = planes_of(problem, got, "a", problem.hidden)
    assert relative_error(values, exact) < ALLOWED[mode]


def test_projections_of_some_channels():
    problem = Problem("bf16", (1, 5, 64, 200, 1))
    whole = problem.run("project")
    part = problem.run("project", first_block=1, blocks=2)
    for name in "ab":
        a = whole[name].view(torch.int16).view(200, -1)[64:192]
        assert torch.equal(a, part[name].view(torch.int16).view(128, -1))


def test_projections_of_the_tall_tile():
    problem = Problem("bf16", (1, 9, 328, 72, 4), mask=torch.uint8)
    got = problem.run("project")
    for plane in "ab":
        projected, gate = problem.gated(plane)
        exact = problem.plane(projected * gate * problem.mask.unsqueeze(-1))
        values, _ = planes_of(problem, got, plane, 72)
        assert relative_error(values, exact) < ALLOWED["bf16"]


def test_stored_dtypes_may_differ():
    problem = Problem("bf16", (1, 6, 64, 64, 0), weights=torch.float32, pair=torch.float32)
    got = problem.run("project")
    projected, gate = problem.gated("b")
    values, _ = planes_of(problem, got, "b", 64)
    assert relative_error(values, problem.plane(projected * gate)) < ALLOWED["bf16"]


def test_output_of_the_tall_tile():
    problem = Problem("bf16", (1, 9, 328, 72, 4))
    stored, o = o_of(problem)
    got = problem.run("output", {"o": stored})["out"].view(problem.dtype).view(problem.pair.shape)
    gate, projected, _ = output_exact(problem, o)
    assert relative_error(got.double(), gate * projected) < ALLOWED["bf16"]


def output_exact(problem, o):
    """Gate, projection and normalised o for o (batch, i, j, hidden), in float64."""
    raw = problem.pair.double()
    gate = torch.sigmoid(
        problem.linear("out_gate", problem.norm_in() if problem.gate_normalized else raw)
    )
    normalised = problem.normalised(o)
    y = normalised * problem.exact["layer_norm_out.weight"] + problem.exact["layer_norm_out.bias"]
    return gate, problem.linear("out_proj", y), normalised


def o_of(problem):
    """A plane o as it is stored, and what it stands for."""
    scale = torch.rand(problem.batch, problem.n, problem.n, 1) * 3 + 0.3
    o = torch.randn(problem.batch, problem.n, problem.n, problem.hidden) * scale + 1
    dtype = torch.bfloat16 if problem.mode == "bf16" else torch.float32
    stored = problem.pad(o.permute(3, 0, 1, 2).double(), dtype)
    o = stored[..., : problem.n].double().permute(1, 2, 3, 0)
    return stored, o * 0.25 if problem.mode == "tf32" else o


@EVERY_CASE
def test_output(mode, hopper, shape):
    problem = Problem(mode, shape, hopper=hopper, gate_normalized=shape[1] in (9, 11))
    stored, o = o_of(problem)
    got = problem.run("output", {"o": stored})["out"].view(problem.dtype)
    gate, projected, _ = output_exact(problem, o)
    got = got.view(problem.pair.shape).double()
    assert relative_error(got, gate * projected) < ALLOWED[mode] * (3 if shape[3] < 9 else 1)


@EVERY_CASE
def test_output_backward(mode, hopper, shape):
    problem = Problem(mode, shape, hopper=hopper, gate_normalized=shape[1] == 3)
    stored, o = o_of(problem)
    grad = torch.randn(problem.pair.shape).to(problem.dtype)
    resident = RESIDENT_BLOCKS if mode == "bf16" and hopper else 0
    settings = {"out_grad_type": TYPE[problem.dtype], "resident_blocks": resident}
    got = problem.run(
        "output_backward", {"o": stored, "out_grad": grad}, keeps_gate_input=True, **settings
    )
    gate, projected, normalised = output_exact(problem, o)
    d = grad.double() * gate
    exact = {
        "out_proj_grad": d,
        "gate_grad": d * projected * (1 - gate),
        "normalised": normalised,
        "gate_input": problem.pair.double(),
    }
    if problem.gate_normalized:
        exact["gate_input"] = problem.normalised(exact["gate_input"])
    loose = 3 if shape[3] < 9 else 1
    for name, value in exact.items():
        columns = value.shape[-1]
        matrix = problem.matrix(got[name], columns)
        assert relative_error(matrix[:, :, : problem.n], value) < ALLOWED[mode] * loose, name
        assert (matrix[:, :, problem.n :] == 0).all()
    sums = got["sums"].view(-1, 2, problem.channels).double().sum(0)
    for kind, name in enumerate(("out_proj_grad", "gate_grad")):
        total = exact[name].sum((0, 1, 2))
        scale = exact[name].norm() * math.sqrt(problem.channels)
        assert (sums[kind] - total).norm() < ALLOWED[mode] * scale * loose


@EVERY_CASE
def test_projections_backward(mode, hopper, shape):
    problem = Problem(mode, shape, hopper=hopper, outgoing=shape[1] % 2 == 1, mask=torch.float32)
    wide = torch.bfloat16 if mode == "bf16" else torch.float32
    grads = {}
    for plane in "ab":
        d = torch.randn(problem.hidden, problem.batch, problem.n, problem.n)
        grads[plane] = problem.pad(d.double(), wide)
    resident = RESIDENT_BLOCKS if mode == "bf16" and hopper else 0
    inputs = {"da": grads["a"], "db": grads["b"]}
    got = problem.run("project_backward", inputs, resident_blocks=resident)
    if resident:
        got["grad"] = got["grad"].view(problem.dtype).view(4 * problem.hidden, -1).t().contiguous()
    matrix = problem.matrix(got["grad"], 4 * problem.hidden)
    exact = []
    for plane in "ab":
        projected, gate = (problem.plane(x) for x in problem.gated(plane))
        d = grads[plane][..., : problem.n].double()
        d = d * problem.plane(problem.mask.unsqueeze(-1)) * gate
        exact += [d, d * projected * (1 - gate)]
    exact = torch.cat(exact).permute(1, 2, 3, 0)
    assert relative_error(matrix[:, :, : problem.n], exact) < ALLOWED[mode]
    assert (matrix[:, :, problem.n :] == 0).all()
    normalised = problem.matrix(got["normalised"], problem.channels)
    x = problem.normalised(problem.pair.double())
    x = x if problem.outgoing else x.transpose(1, 2)
    assert relative_error(normalised[:, :, : problem.n], x) < ALLOWED[mode]
    assert (normalised[:, :, problem.n :] == 0).all()
    sums = got["sums"].view(-1, 4 * problem.hidden).double().sum(0)
    scale = exact.norm() * math.sqrt(4 * problem.hidden)
    assert (sums - exact.sum((0, 1, 2))).norm() < ALLOWED[mode] * scale


def test_backward_of_some_pairs():
    problem = Problem("fp16", (2, 9, 64, 64, 3))
    grads = [problem.pad(torch.randn(64, 2, 9, 9).double(), torch.float32) for _ in "ab"]
    inputs = {"da": grads[0], "db": grads[1]}
    whole = problem.run("project_backward", inputs)
    part = problem.run("project_backward", inputs, first_pair=64, count=96)
    rows = whole["grad"].view(torch.int16).view(-1, 256)[64:160]
    assert torch.equal(rows, part["grad"].view(torch.int16).view(96, 256))


@pytest.mark.parametrize("gate_normalized", [False, True])
def test_backward_of_some_pairs_by_blocks_that_stay(gate_normalized):
    shape = (2, 20, 128, 128, 0)
    problem = Problem("bf16", shape, hopper=True, gate_normalized=gate_normalized)
    planes = [problem.pad(torch.randn(128, 2, 20, 20).double(), torch.bfloat16) for _ in "ab"]
    inputs = {"da": planes[0], "db": planes[1]}
    settings = {"resident_blocks": RESIDENT_BLOCKS}
    whole = problem.run("project_backward", inputs, **settings)
    part = problem.run("project_backward", inputs, first_pair=480, count=480, **settings)
    grad = whole["grad"].view(torch.int16).view(512, -1)[:, 480:]
    assert torch.equal(grad, part["grad"].view(torch.int16).view(512, 480))
    stored, _ = o_of(problem)
    inputs = {"o": stored, "out_grad": torch.randn(problem.pair.shape).bfloat16()}
    settings |= {"out_grad_type": TYPE[torch.bfloat16], "keeps_gate_input": 1}
    whole = problem.run("output_backward", inputs, **settings)
    part = problem.run("output_backward", inputs, first_pair=480, count=480, **settings)
    for name in ("out_proj_grad", "gate_grad", "normalised", "gate_input"):
        rows = whole[name].view(torch.int16).view(-1, 128)[480:]
        assert torch.equal(rows, part[name].view(torch.int16).view(-1, 128)), name


def test_nan_flows():
    problem = Problem("split", (1, 9, 64, 64, 0))
    problem.pair[0, 3, 4, 7] = math.nan
    problem.pair[0, 5, 2, 1] = math.inf
    got = problem.run("project")
    values, _ = planes_of(problem, got, "a", 64)
    bad = values.isnan().all(0)[0]
    assert bad[3, 4] and bad[5, 2] and values.isnan().any(0).sum() == 2


@pytest.mark.parametrize("mode,hopper", [("bf16", False), ("fp16", True), ("tf32", False)])
def test_masks_that_are_not_finite(mode, hopper):
    problem = Problem(mode, (1, 6, 64, 64, 0), hopper=hopper, mask=torch.float32)
    mask = problem.inputs["mask"]
    mask[0, 0, :4] = torch.tensor([0.0, math.inf, -math.inf, math.nan])
    mask[0, 1, :4] = torch.tensor([1e-42, -0.0, -2.0, 1e-30])
    problem.mask = mask.double()
    values, _ = planes_of(problem, problem.run("project"), "a", 64)
    projected, gate = problem.gated("a")
    exact = problem.plane(projected * gate * problem.mask.unsqueeze(-1))
    assert torch.equal(values.isnan(), exact.isnan())
    assert torch.equal(values.isinf(), exact.isinf())
    assert torch.equal(values[values.isinf()], exact[exact.isinf()])
    finite = exact.isfinite()
    assert relative_error(values[finite], exact[finite]) < ALLOWED[mode]


@pytest.mark.parametrize("mode", ["bf16", "split"])
def test_a_mask_of_zeros_keeps_nan(mode):
    problem = Problem(mode, (1, 6, 64, 64, 0), mask=torch.float32)
    problem.inputs["mask"].zero_()
    problem.inputs["proj_a_bias"][5] = math.inf
    problem.inputs["gate_a_bias"][9] = math.nan
    problem.inputs["gate_a_bias"][11] = -math.inf  # a gate of 0
    problem.inputs["gate_a_bias"][12] = math.inf  # of 1
    values, _ = planes_of(problem, problem.run("project"), "a", 64)
    bad = values.isnan().flatten(1)
    assert bad[5].all() and bad[9].all() and bad.sum() == 2 * 36
    assert (values[~values.isnan()] == 0).all()


@pytest.mark.parametrize("mode", ["bf16", "tf32", "split"])
def test_gates_nearly_closed(mode):
    problem = Problem(mode, (1, 6, 64, 64, 0), mask=torch.float32)
    for name in ("gate_a", "out_gate"):
        bias = torch.linspace(-60, 60, 64).to(problem.dtype)
        problem.inputs[f"{name}_bias"].copy_(bias)
        problem.exact[f"{name}.bias"] = bias.double()
    values, _ = planes_of(problem, problem.run("project"), "a", 64)
    projected, gate = problem.gated("a")
    exact = problem.plane(projected * gate * problem.mask.unsqueeze(-1))
    stored, o = o_of(problem)
    out = problem.run("output", {"o": stored})["out"].view(problem.dtype)
    out = out.view(problem.pair.shape).double()
    out_gate, out_projected, _ = output_exact(problem, o)
    exact_out = out_gate * out_projected
    for channel in range(0, 64, 9):
        error = relative_error(out[..., channel], exact_out[..., channel])
        assert error < 4 * ALLOWED[mode], channel
        if mode == "bf16":  # in scaled planes small numbers have few digits
            assert relative_error(values[channel], exact[channel]) < 2 * ALLOWED[mode], channel
