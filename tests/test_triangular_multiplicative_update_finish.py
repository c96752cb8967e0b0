# SPDX-License-Identifier: Apache-2.0
"""The kernels of the triangular update's backward at the parameters, emulated.

Workspace and results hold NaN before; references are float64.
"""

import itertools

import pytest
import torch
from emulation.build import driver

NAN, INF = float("nan"), float("inf")
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
INPUT = ("proj_a", "gate_a", "proj_b", "gate_b")
LINEARS = (*INPUT, "out_proj", "out_gate")
NORMS = tuple(f"layer_norm_{at}_{kind}" for at in ("in", "out") for kind in ("weight", "bias"))


def run(kernel, inputs, **settings):
    return driver("triangular_multiplicative_update_finish").run(kernel, inputs, **settings)


def shapes_of(channels, hidden):
    shapes = {f"layer_norm_in_{kind}": (channels,) for kind in ("weight", "bias")}
    shapes |= {f"layer_norm_out_{kind}": (hidden,) for kind in ("weight", "bias")}
    for name in LINEARS:
        lines = hidden if name in INPUT else channels
        inner = hidden if name == "out_proj" else channels
        shapes |= {f"{name}_weight": (lines, inner), f"{name}_bias": (lines,)}
    return shapes


class Problem:
    """Parameters, sums, and what is wanted of them."""

    def __init__(self, channels, hidden, slabs, rows, *, gate_normalized=False, types=None):
        self.channels, self.hidden = channels, hidden
        self.gate_normalized = gate_normalized
        types = itertools.cycle(types or [torch.float32])
        self.parameters = {
            name: torch.randn(shape).to(next(types))
            for name, shape in shapes_of(channels, hidden).items()
        }
        self.sums = {
            "input": torch.randn(slabs[0], 4 * hidden, channels),
            "out_proj": torch.randn(slabs[1], channels, hidden),
            "out_gate": torch.randn(slabs[2], channels, channels),
            "input_sums": torch.randn(rows[0], 4 * hidden),
            "output_sums": torch.randn(rows[1], 2 * channels),
        }
        self.wanted = set(self.parameters)

    def without(self, *names):
        """Sums that are missing, and the results that need them."""
        for name in names:
            del self.sums[name]
            if name == "input":
                lost = [f"{x}_weight" for x in INPUT] + ["layer_norm_in_weight"]
            elif name == "input_sums":
                lost = [f"{x}_{k}" for x in INPUT for k in ("weight", "bias")]
                lost += ["layer_norm_in_weight", "layer_norm_in_bias"]
            else:
                lost = [f"{name}_weight"]
                if name == "out_proj":
                    lost.append("layer_norm_out_weight")
                elif self.gate_normalized:
                    lost.append("layer_norm_in_weight")
            self.wanted.difference_update(lost)
        return self

    def run(self):
        settings = {"channels": self.channels, "hidden": self.hidden}
        settings["gate_normalized"] = self.gate_normalized
        for name, value in self.parameters.items():
            settings[f"{name}_type"] = TYPES[value.dtype]
            if name in self.wanted:
                settings[f"d_{name}"] = TYPES[value.dtype]
        for name, value in self.sums.items():
            settings[f"{name}_{'rows' if name.endswith('sums') else 'slabs'}"] = len(value)
        got = run("finish", {**self.parameters, **self.sums}, **settings)
        assert set(got) == self.wanted
        return {
            name: value.view(self.parameters[name].dtype).view(self.parameters[name].shape)
            for name, value in got.items()
        }

    def exact(self):
        """Results, and how much they may differ where sums are taken in fp32."""
        zero = torch.zeros((), dtype=torch.float64)
        total, size = {}, {}
        for name, value in self.sums.items():
            total[name], size[name] = value.double().sum(0), value.double().abs().sum(0)
        parts = {}
        for of in (total, size):
            split = dict(zip(INPUT, of.get("input", zero.expand(4)).chunk(4), strict=True))
            split |= {name: of.get(name, zero) for name in ("out_proj", "out_gate")}
            biases = dict(zip(INPUT, of.get("input_sums", zero.expand(4)).chunk(4), strict=True))
            biases |= dict(zip(LINEARS[4:], of["output_sums"].chunk(2), strict=True))
            parts[len(parts)] = split, biases
        return self.gradients(*parts[0]), self.gradients(*parts[1], absolute=True)

    def gradients(self, products, biases, absolute=False):
        p = {k: v.double().abs() if absolute else v.double() for k, v in self.parameters.items()}
        grads = {name: torch.zeros_like(p[name]) for name in NORMS}
        for name in LINEARS:
            product, bias = products[name], biases[name]
            norm = "layer_norm_out" if name == "out_proj" else "layer_norm_in"
            weight = p[f"{name}_weight"]
            bias = bias.expand(len(weight))
            if name == "out_gate" and not self.gate_normalized:
                grads["out_gate_weight"] = product
            else:
                outer = torch.outer(bias, p[f"{norm}_bias"])
                grads[f"{name}_weight"] = product * p[f"{norm}_weight"] + outer
                grads[f"{norm}_weight"] += (weight * product).sum(0)
                grads[f"{norm}_bias"] += bias @ weight
            grads[f"{name}_bias"] = bias
        return grads

    def check(self):
        got = self.run()
        exact, size = self.exact()
        for name, value in got.items():
            rounding = ROUNDING[value.dtype]
            allowed = rounding * exact[name].abs() + 1e-6 * size[name] + 1e-30
            assert value.isfinite().all(), name
            worst = ((value.double() - exact[name]).abs() / allowed).max().item()
            assert worst <= 1, (name, worst)
        return got


@pytest.mark.parametrize("gate_normalized", [False, True])
@pytest.mark.parametrize(
    "channels, hidden, slabs, rows",
    [
        (1, 1, (1, 1, 1), (1, 1)),
        (5, 1, (8, 33, 1), (77, 2)),
        (1, 5, (2, 1, 8), (1, 77)),
        (64, 5, (1, 8, 33), (77, 64)),
        (5, 64, (33, 8, 1), (65, 129)),
        (16, 12, (1, 1, 1), (3000, 3000)),
        (127, 64, (1, 1, 1), (3, 2)),
        (160, 5, (3, 2, 1), (5, 300)),
    ],
)
def test_finish(channels, hidden, slabs, rows, gate_normalized):
    Problem(channels, hidden, slabs, rows, gate_normalized=gate_normalized).check()


def test_finish_large():
    Problem(127, 160, (1, 2, 1), (3, 2), types=[torch.float32, torch.bfloat16]).check()


@pytest.mark.parametrize("gate_normalized", [False, True])
@pytest.mark.parametrize("kinds", [*itertools.permutations(TYPES, 2), tuple(TYPES)], ids=str)
def test_finish_types(kinds, gate_normalized):
    Problem(34, 6, (3, 2, 1), (9, 5), gate_normalized=gate_normalized, types=kinds).check()


@pytest.mark.parametrize("gate_normalized", [False, True])
@pytest.mark.parametrize(
    "missing",
    [
        ("input",),
        ("input", "input_sums"),
        ("out_proj",),
        ("out_gate",),
        ("out_proj", "out_gate"),
        ("input", "out_proj", "out_gate"),
    ],
    ids=str,
)
def test_finish_missing_sums(missing, gate_normalized):
    problem = Problem(9, 12, (3, 2, 1), (9, 5), gate_normalized=gate_normalized)
    problem.without(*missing).check()


def test_finish_missing_biases_and_single_results():
    problem = Problem(9, 12, (3, 2, 1), (9, 5), gate_normalized=True)
    everything = problem.check()
    for name in LINEARS:  # of biases that the model does not have
        problem.wanted.discard(f"{name}_bias")
    assert problem.check().keys() == {n for n in everything if not n.endswith("_bias")} | {*NORMS}
    for name, value in everything.items():
        problem.wanted = {name}
        assert torch.equal(problem.check()[name], value), name


def test_finish_is_the_same_every_time():
    problem = Problem(40, 9, (5, 9, 3), (200, 100), gate_normalized=True)
    first, second = problem.run(), problem.run()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_finish_not_finite():
    """Infinite and NaN reach the lines and columns that they reach in PyTorch."""
    problem = Problem(9, 12, (3, 2, 1), (9, 5), gate_normalized=True)
    problem.sums["input"][1, 3, 4] = INF
    problem.sums["out_proj"][0, 2, 2] = NAN
    problem.sums["output_sums"][4, 7] = -INF
    got, (exact, _) = problem.run(), problem.exact()
    for name, value in got.items():
        assert torch.equal(value.isnan(), exact[name].isnan()), name
        assert torch.equal(value.isposinf(), exact[name].isposinf()), name
        assert torch.equal(value.isneginf(), exact[name].isneginf()), name


def test_finish_overflow():
    problem = Problem(3, 4, (1, 1, 1), (1, 1), types=[torch.float16])
    problem.sums["input_sums"][0, 2] = 1e6
    assert problem.run()["proj_a_bias"][2] == INF


@pytest.mark.parametrize("gate_normalized", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_fold(dtype, gate_normalized):
    every = [*itertools.product((False, True), repeat=3)][1:]
    sizes = [(1, 1), (5, 3), (64, 33), (3, 160), (8, 8), (127, 5), (40, 64)]
    for (channels, hidden), (want_input, want_out, want_gate) in zip(sizes, every, strict=True):
        problem = Problem(channels, hidden, (0, 0, 0), (0, 0), types=[*TYPES, dtype])
        p = problem.parameters
        got = run(
            "fold", p, channels=channels, hidden=hidden, gate_normalized=gate_normalized,
            type=TYPES[dtype], input=want_input, out=want_out, gate=want_gate,
            **{f"{name}_type": TYPES[value.dtype] for name, value in p.items()},
        )  # fmt: skip
        norm = p["layer_norm_in_weight"].float()
        gate = p["out_gate_weight"].float()
        expected = {
            "input": torch.cat([p[f"{name}_weight"].float() for name in INPUT]) * norm,
            "out_proj": p["out_proj_weight"].float() * p["layer_norm_out_weight"].float(),
            "out_gate": gate * norm if gate_normalized else gate,
        }
        wanted = {"input": want_input, "out_proj": want_out, "out_gate": want_gate}
        for name, want in wanted.items():
            assert (name in got) == want
            if want:
                ours = got[name].view(dtype).view(expected[name].shape)
                assert torch.equal(ours, expected[name].to(dtype)), name
        if want_out:
            assert (got["largest"].view(torch.int32) == 0).all()
