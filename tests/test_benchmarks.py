# SPDX-License-Identifier: Apache-2.0
"""The benchmark package: that it measures what it says and writes it down, never how fast."""

import dataclasses
import importlib
import json
import pathlib
import pickle
import subprocess
import sys
import time
import types

import pytest
import torch
from helpers import randomize

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    accuracy,
    attention_core,
    measure,
    opponents,
    records,
    report,
    round_summary,
    sanitizer_cases,
    suites,
    timing,
)
from benchmarks.case import BOTH, FORWARD, MODES, arithmetic  # noqa: E402
from benchmarks.measure import Job  # noqa: E402
from benchmarks.records import Record, Results  # noqa: E402
from benchmarks.roofline import floor_ms, rate  # noqa: E402

main = importlib.import_module("benchmarks.__main__")
CPU = torch.device("cpu")
RATES = {"copy": 1e10, "fp32": 1e11}
TINY = {
    "tensor_matmul": (1, 3, 5, 4, 6),
    "triangular_multiplicative_update": (1, 5, 4, 3),
    "msa_row_attention": (1, 2, 5, 8, 4, 2),
    "invariant_point_attention": (1, 5, 8, 4, 2, 2, 3),
    "triangle_attention": (1, 5, 8, 2, 3),
    "attention_core": (1, 5, 5, 2, 4),
}
# One a room; triangle attention is a second module of one, and the attention core is no module.
ROOMS = [op for op in suites.OPS if op not in ("triangle_attention", "attention_core")]
MODULES = [*ROOMS, "triangle_attention"]
KINDS = {"triangle_attention": "small", "attention_core": "core"}


def tiny(op, kind=None):
    """The first CPU case of an op, where it has one, with sizes that take no time."""
    kind = kind or KINDS.get(op, "headline")
    cases = [c for c in suites.CASES if c.op == op and c.kind == kind]
    case = next((c for c in cases if c.device != "cuda"), cases[0])
    return dataclasses.replace(case, sizes=dict(zip(case.sizes, TINY[op], strict=True)))


def record(opponent="fused", *, suite="headline", kind="headline", sizes=None, **metrics):
    return Record(
        suite=suite,
        op="triangular_multiplicative_update",
        sizes=sizes or {"B": 2, "N": 32, "c": 64, "h": 32},
        dtype="fp32",
        direction=FORWARD,
        opponent=opponent,
        kind=kind,
        flops=10**8,
        bytes=10**6,
        metrics=metrics,
    )


MACHINE = {
    "device": "cuda",
    "gpu": "A GPU",
    "fused_ops": "0.1.0",
    "torch": "2.11.0",
    "commit": "abc",
    "date": "2026-01-01",
    "rates": {"copy": 4e12, "fp32": 5e13, "fp16": 6e14, "bf16": 6e14, "tf32": 3e14, "split": 2e14},
}


@pytest.fixture
def stored(tmp_path):
    """A small file as a GPU run leaves it."""
    found = [record("fused", device_ms=0.1), record("eager", device_ms=0.3)]
    found += [record("compile", device_ms=0.2)]
    for n in (64, 128, 256):
        sizes = {"B": 1, "N": n, "c": 128, "h": 128}
        metrics = {"real": {"device_ms": n / 64}, "memory": {"peak_mib": n, "extra_mib": 1.0}}
        found += [
            record(name, suite=suite, kind="scaling", sizes=sizes, **values)
            for name in ("fused", "eager")
            for suite, values in metrics.items()
        ]
    path = tmp_path / "gpu.json"
    Results(MACHINE, found, ["trifast: not here"], []).write(path)
    return path


# The command line


def test_defaults_are_those_of_the_device():
    options = main.parse(["--device", "cpu"])
    assert (options.seconds, options.budget) == main.DEFAULTS["cpu"]
    assert main.default_output({"device": "cpu"}).name == "cpu.json"
    assert main.default_output({"gpu": "NVIDIA H200"}).name == "nvidia-h200.json"
    assert main.default_output({"device": "cpu"}, part=True).name == "cpu-part.json"
    line = "--device cpu --op tensor_matmul --suite real --suite memory --dtype bf16 "
    options = main.parse(
        [*line.split(), *["--seconds", "0", "--budget", "7", "--output", "x.json"]]
    )
    assert options.suite == ["real", "memory"]
    assert options.op == ["tensor_matmul"]
    assert options.dtype == ["bf16"]
    assert (options.seconds, options.budget) == (0, 7)
    assert options.output == pathlib.Path("x.json")


@pytest.mark.parametrize(
    "bad",
    [
        ["--suite", "fast"],
        ["--op", "gemm"],
        ["--dtype", "fp8"],
        ["--device", "tpu"],
        ["--direction", "sideways"],
        ["--opponent", "nobody"],
    ],
)
def test_unknown_choices_are_refused(bad, capsys):
    with pytest.raises(SystemExit):
        main.parse(bad)
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize("bad", ["N", "N=", "N=big", "=3", "3=N", "N=-1"])
def test_what_is_no_size_is_refused(bad, capsys):
    with pytest.raises(SystemExit):
        main.parse(["--size", bad])
    assert "expected a size such as N=512, got" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device_is_refused(capsys):
    with pytest.raises(SystemExit):
        main.parse(["--device", "cuda"])
    assert "torch sees no CUDA device" in capsys.readouterr().err


# The plan


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_plan_covers_every_op_and_suite_with_the_headline_first(kind):
    plan = list(suites.plan(kind))
    jobs = [job for job in plan if isinstance(job, Job)]
    assert plan.count("accuracy") == 1
    assert {job.suite for job in jobs} == set(suites.SUITES) - {"accuracy"}
    for suite in ("headline", "real", "memory", "overhead"):
        there = {job.case.op for job in jobs if job.suite == suite}
        assert there >= set(ROOMS) and there <= set(MODULES)
        assert ("triangle_attention" in there) is (
            suite == "overhead" or (suite == "real" and kind == "cuda")
        )
    first_other = next(i for i, job in enumerate(plan) if getattr(job, "suite", "") != "headline")
    assert {job.case.op for job in plan[:first_other]} == set(ROOMS)
    assert all(job.case.device in ("", kind) for job in jobs)
    assert {job.mode for job in jobs} == ({"fp32"} if kind == "cpu" else set(MODES))
    for job in jobs:
        for name in job.opponents:
            opponents.find(name, job.case.op)


def test_plan_obeys_its_options():
    jobs = list(suites.plan("cuda", ["headline"], ["msa_row_attention"], ["bf16"], False))
    assert {(job.suite, job.case.op, job.mode) for job in jobs} == {
        ("headline", "msa_row_attention", "bf16")
    }
    assert not any("compile" in job.opponents for job in jobs)
    compiling = suites.plan("cuda", ["headline"], ["msa_row_attention"], ["bf16"])
    assert any("flex" in job.opponents for job in compiling)
    assert not list(suites.plan("cpu", ["headline"], suites.OPS, ["tf32"]))


def test_the_plan_of_the_triangular_issue():
    op = ["triangular_multiplicative_update"]

    def contests(*suite, **options):
        jobs = list(suites.plan("cuda", suite, op, **options))
        assert {job.case.op for job in jobs} <= set(op)
        quick = [job for job in jobs if "compile" not in job.opponents]
        assert jobs[: len(quick)] == quick  # those that compile come last
        return {(*job.case.sizes.values(), job.mode, job.direction) for job in quick}

    both = (FORWARD, BOTH)
    table = {
        (1, n, 128, 128, mode, direction)
        for n in (256, 512, 1024)
        for mode in ("bf16", "fp32", "tf32")
        for direction in both
    }
    headline = {(2, 32, 64, 32, m, d) for m in ("fp32", "tf32", "bf16") for d in both}
    assert contests("issue") == table | headline
    beside = contests("lengths", "channels")
    for sizes in ((77, 128, 128), (1025, 128, 128), (256, 256, 256), (384, 384, 128)):
        assert {c[-2:] for c in beside if c[1:-2] == sizes} == {
            (mode, direction) for mode in ("bf16", "fp32") for direction in both
        }
    assert contests("large") == {
        (1, n, 128, 128, mode, direction)
        for n, mode in ((2944, "fp32"), (4096, "bf16"))
        for direction in both
    }
    some = contests("issue", modes=["bf16"], directions=[FORWARD], sizes=[("N", 512), ("B", 1)])
    assert some == {(1, 512, 128, 128, "bf16", FORWARD)}
    ours = list(suites.plan("cuda", ["issue", "accuracy"], op, names=["fused", "cuequivariance"]))
    assert {job.opponents for job in ours} == {("fused", "cuequivariance")}
    assert not list(suites.plan("cpu", suites.EXTRA[1:]))
    assert not {job.suite for job in suites.plan("cuda") if job != "accuracy"} & set(suites.EXTRA)


def test_the_plan_of_the_attention_issue():
    ops = ["msa_row_attention", "triangle_attention", "attention_core"]
    jobs = list(suites.plan("cuda", ["issue"], ops, compiling=False))
    contests = [(*job.case.sizes.values(), job.mode, job.direction) for job in jobs]
    assert contests == [
        (2, 8, 32, 64, 32, 4, "fp32", FORWARD),  # the headline, once
        (1, 128, 256, 256, 128, 8, "bf16", FORWARD),
        (1, 512, 256, 256, 128, 8, "bf16", FORWARD),
        (1, 512, 256, 256, 128, 8, "bf16", BOTH),
        (1, 128, 768, 256, 128, 8, "bf16", FORWARD),
        (1, 128, 768, 256, 128, 8, "fp32", FORWARD),
        (1, 128, 768, 256, 128, 8, "fp32", BOTH),
        (1, 256, 128, 4, 32, "bf16", FORWARD),
        (1, 768, 128, 4, 32, "bf16", FORWARD),
        (1, 256, 256, 4, 32, "bf16", FORWARD),
        (1, 768, 768, 4, 32, "bf16", FORWARD),
    ]
    assert [job.case.op for job in jobs] == [ops[0]] * 7 + [ops[1]] * 2 + [ops[2]] * 2
    for job in jobs:
        assert {"fused", "eager", "sdpa", "cuequivariance", "trifast"} <= set(job.opponents)
        assert "time" in job.metrics
    later = list(suites.plan("cuda", ["issue"], ops))[len(jobs) :]
    assert all({"compile", "flex"} == set(job.opponents) for job in later)
    assert len(later) == len(jobs)


def test_the_plan_of_the_attention_cores():
    jobs = list(suites.plan("cuda", ["core"], compiling=False))
    assert {job.case.op for job in jobs} == {"attention_core"}
    assert {(*job.case.sizes.values(), job.mode, job.direction) for job in jobs} == {
        (1, *sizes, "bf16", direction)
        for sizes in ((128, 256, 8, 32), (512, 512, 8, 32), (256, 256, 4, 32), (768, 768, 4, 32))
        for direction in (FORWARD, BOTH)
    }
    assert set(jobs[0].opponents) == {"fused", "eager", "sdpa", "cuequivariance", "trifast"}


def test_a_case_may_leave_out_an_opponent():
    case = dataclasses.replace(
        tiny("triangular_multiplicative_update"),
        without={"eager": "too large"},
        metrics=frozenset({"memory"}),
    )
    job = Job("large", case, "fp32", FORWARD, ("fused", "eager"), case.metrics)
    outcome = measure.run(job, CPU, 0.0, RATES)
    assert [r.opponent for r in outcome.records] == ["fused"]
    assert outcome.records[0]["peak_mib"] > 0 and outcome.records[0]["error"] is None
    assert outcome.skipped == [f"eager, {case.op} {case.name}: too large"]
    assert "large: triangular" in report.text(Results(MACHINE, outcome.records, [], []))


def test_issue_shapes_are_there():
    sizes = [tuple(c.sizes.values()) for c in suites.CASES if c.op == "tensor_matmul"]
    for wanted in (
        (8, 256, 512, 256, 768),
        (1, 512, 512, 128, 128),
        (1, 256, 256, 128, 512),
        (1, 1, 8192, 8192, 8192),
        (1, 77, 77, 64, 64),
    ):
        assert wanted in sizes
    headline = next(c for c in suites.CASES if c.op == "tensor_matmul" and c.kind == "headline")
    assert set(headline.directions) == {FORWARD, BOTH, "dA", "dB"}
    assert set(headline.modes) == set(MODES)


# Work and limits


def test_work_of_a_product_is_counted():
    case = tiny("tensor_matmul")
    rows, inner, columns = 15, 4, 6
    assert case.work(FORWARD, "fp32") == (
        2 * rows * inner * columns,
        4 * (rows * inner + inner * columns + rows * columns),
    )
    flops, moved = case.work(BOTH, "bf16")
    assert flops == 3 * 2 * rows * inner * columns
    assert moved == 2 * (3 * rows * inner + 3 * inner * columns + 2 * rows * columns)


def test_floor_takes_the_slower_of_bytes_and_operations():
    rates = MACHINE["rates"]
    assert floor_ms(0, 4 * 10**9, "bf16", rates) == pytest.approx(1.0)
    assert floor_ms(6 * 10**11, 0, "bf16", rates) == pytest.approx(1.0)
    assert rate("fp32", rates) == rates["split"]  # three fp16 products beat the fp32 units
    assert rate("bf16", RATES) == RATES["fp32"]  # as the CPU multiplies


def test_arithmetic_sets_the_precision_and_puts_it_back():
    before = torch.get_float32_matmul_precision()
    try:
        with arithmetic("tf32"):
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


# Measuring


@pytest.mark.parametrize("op", MODULES)
def test_a_job_yields_every_cpu_metric(op):
    case = tiny(op)
    for direction in case.directions:
        job = Job("headline", case, "fp32", direction, opponents.names(op))
        outcome = measure.run(job, CPU, 0.0, RATES)
        assert {"fused", "eager"} <= {r.opponent for r in outcome.records}
        for r in outcome.records:
            assert r["wall_ms"] > 0
            assert r["error"] < 2e-6, r
            assert r["peak_mib"] >= r["extra_mib"] >= 0
            assert r["device_ms"] is None
            assert (r["roofline"] is None) == (r.opponent == "sdpa core")
            assert r.note or r.opponent in ("fused", "eager", "torch.matmul")


def ours_by_name(q, k, v, bias, mask):
    return attention_core.softmax_attention(q, k, v, bias, mask)


@pytest.mark.parametrize(
    ("core", "reason"),
    [
        ("", "the attention of ours alone is measured where --core names it"),
        ("fused_ops:attend", "there is no 'fused_ops:attend' (module 'fused_ops' has no attribute"),
        ("torch:ops.fused_ops.no_such", "there is no 'torch:ops.fused_ops.no_such' ("),
        ("no_such_package:x", "there is no 'no_such_package:x' (No module named"),
        (":x", "there is no ':x' ("),
        ("test_benchmarks:ours_by_name", None),
    ],
)
def test_an_attention_core_is_measured_where_there_is_one(monkeypatch, core, reason):
    monkeypatch.setattr(opponents.Fused, "core", core)
    case = tiny("attention_core")
    for direction in (FORWARD, BOTH):
        names = opponents.names(case.op)
        outcome = measure.run(Job("core", case, "fp32", direction, names), CPU, 0.0, RATES)
        there = {r.opponent: r for r in outcome.records}
        assert set(there) == {"eager", "sdpa"} | ({"fused"} if reason is None else set())
        assert all(r["error"] < 2e-6 and r["wall_ms"] > 0 for r in there.values())
        skipped = [text for text in outcome.skipped if text.startswith("fused")]
        assert [
            text[len("fused, attention_core: ") :][: len(reason or "")] for text in skipped
        ] == ([] if reason is None else [reason])
        assert "core: attention_core" in report.text(Results(MACHINE, outcome.records, [], []))


@pytest.mark.gpu
def test_an_attention_core_on_a_gpu(monkeypatch):
    monkeypatch.setattr(opponents.Fused, "core", "test_benchmarks:ours_by_name")
    case = tiny("attention_core")
    for direction in (FORWARD, BOTH):
        job = Job("core", case, "bf16", direction, opponents.names(case.op))
        outcome = measure.run(job, torch.device("cuda"), 0.0, MACHINE["rates"])
        there = {r.opponent: r for r in outcome.records}
        assert {"fused", "eager"} <= set(there)
        assert all(r["device_ms"] > 0 and r["error"] < 3e-2 for r in there.values())


def test_the_core_is_named_on_the_command_line(monkeypatch, tmp_path):
    monkeypatch.setattr(opponents.Fused, "core", "")
    monkeypatch.setattr(main, "measure_rates", lambda device: RATES)
    line = ["--device", "cpu", "--budget", "0", "--output", str(tmp_path / "x.json")]
    assert main.main([*line, "--core", "a.b:c"]) == 0
    assert opponents.Fused.core == "a.b:c"
    assert main.main(line) == 0
    assert opponents.Fused.core == ""


@pytest.mark.gpu
@pytest.mark.parametrize("op", MODULES)
def test_a_job_on_a_gpu_yields_every_metric(op):
    for direction in (FORWARD, BOTH):
        job = Job("headline", tiny(op), "fp32", direction, opponents.names(op))
        outcome = measure.run(job, torch.device("cuda"), 0.0, MACHINE["rates"])
        assert {"fused", "eager"} <= {r.opponent for r in outcome.records}
        for r in outcome.records:
            for metric in ("device_ms", "wall_ms", "host_ms", "launches"):
                assert r[metric] > 0, metric
            assert direction == BOTH or r.opponent not in ("fused", "eager") or r["graph_ms"] > 0
            assert r["peak_mib"] >= r["extra_mib"] >= 0
            assert r["error"] < 2e-5


def test_bf16_error_is_against_the_rounded_inputs():
    job = Job("headline", tiny("msa_row_attention"), "bf16", BOTH, ("fused", "eager"))
    for r in measure.run(job, CPU, 0.0, RATES).records:
        assert 1e-4 < r["error"] < 3e-2


def test_a_wrong_opponent_shows_its_error_and_a_broken_one_its_reason(monkeypatch):
    class Wrong(opponents.Opponent):
        name = "wrong"

        @classmethod
        def build(cls, eager):
            return Doubled()

    class Broken(Wrong):
        name = "broken"

        @classmethod
        def build(cls, eager):
            raise ValueError("no such kernel\nand a long story")

    class Doubled(torch.nn.Module):
        def forward(self, a, b):
            return 2 * (a @ b)

    monkeypatch.setattr(opponents, "OPPONENTS", (*opponents.OPPONENTS, Wrong, Broken))
    job = Job("headline", tiny("tensor_matmul"), "fp32", FORWARD, ("fused", "wrong", "broken"))
    outcome = measure.run(job, CPU, 0.0, RATES)
    assert [r.opponent for r in outcome.records] == ["fused", "wrong"]
    assert outcome.records[1]["error"] == pytest.approx(1.0)
    assert outcome.skipped == ["broken, tensor_matmul (fp32): ValueError: no such kernel"]


def test_ours_failing_is_an_error(monkeypatch):
    def build(eager):
        raise ValueError("broken")

    monkeypatch.setattr(opponents.Fused, "build", build)
    job = Job("headline", tiny("tensor_matmul"), "fp32", FORWARD, ("fused", "eager"))
    with pytest.raises(ValueError, match="broken"):
        measure.run(job, CPU, 0.0, RATES)


@pytest.mark.parametrize("op", ["msa_row_attention", "triangle_attention", "attention_core"])
@pytest.mark.parametrize("name", ["cuequivariance", "flex", "trifast"])
def test_opponents_that_are_not_there_say_why(name, op):
    job = Job("real", tiny(op), "fp32", FORWARD, (name,))
    outcome = measure.run(job, CPU, 0.0, RATES)
    assert not outcome.records
    assert "CUDA only" in outcome.skipped[0]


def test_relative_error_is_the_one_of_the_tests():
    torch.manual_seed(0)
    exact = torch.randn(7, 5, dtype=torch.float64)
    off = exact + 1e-3 * torch.randn(7, 5, dtype=torch.float64)
    assert measure.relative_error([off], [exact]) == pytest.approx(
        ((off - exact).norm() / exact.norm()).item()
    )
    with pytest.raises(ValueError, match="shape"):
        measure.relative_error([off[:3]], [exact])


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_cuequivariance_gets_our_weights_and_its_own_gate(direction):
    """Its update, played by the formula in its documentation, equals the definition it is held
    against."""
    from fused_ops.reference import TriangularMultiplicativeUpdate

    def update(x, direction, mask, eps, **w):
        norm = torch.nn.functional.layer_norm
        linear = torch.nn.functional.linear
        y = norm(x, x.shape[-1:], w["norm_in_weight"], w["norm_in_bias"], eps)
        ab = linear(y, w["p_in_weight"], w["p_in_bias"])
        ab = ab * torch.sigmoid(linear(y, w["g_in_weight"], w["g_in_bias"])) * mask[..., None]
        a, b = ab.chunk(2, dim=-1)
        equation = "bikd,bjkd->bijd" if direction == "outgoing" else "bkid,bkjd->bijd"
        o = torch.einsum(equation, a, b)
        o = norm(o, o.shape[-1:], w["norm_out_weight"], w["norm_out_bias"], eps)
        gate = torch.sigmoid(linear(y, w["g_out_weight"], w["g_out_bias"]))
        return linear(o, w["p_out_weight"], w["p_out_bias"]) * gate

    eager = randomize(TriangularMultiplicativeUpdate(6, 4, direction)).double()
    pair, mask = torch.randn(2, 5, 5, 6).double(), torch.rand(2, 5, 5) > 0.3
    theirs = opponents._CuEquivarianceTriangle(eager, update)(pair, mask)
    torch.testing.assert_close(theirs, opponents.GateNormalised(eager)(pair, mask))
    assert not torch.allclose(theirs, eager(pair, mask))


@pytest.mark.parametrize("name", ["cuequivariance", "trifast"])
def test_attention_peers_get_axes_and_masks_as_they_document(name, monkeypatch):
    """Each peer is played by softmax on its own axes and its own meaning of the mask."""
    from fused_ops.reference import MSARowAttention, TriangleAttention

    def cuequivariance(q, k, v, bias, mask):
        assert bias.dim() == 5 and bias.shape[1] == 1
        logits = q @ k.mT * q.shape[-1] ** -0.5 + bias
        return torch.softmax(logits.masked_fill(~mask, -1e9), dim=-1) @ v

    def trifast(q, k, v, b, mask):  # (B, H, N, N, d), (B, H, N, N), (B, N, N)
        logits = q @ k.mT * q.shape[-1] ** -0.5 + b.unsqueeze(2)
        return torch.softmax(logits.masked_fill(mask[:, None, :, None, :], -1e9), dim=-1) @ v

    opponent = opponents.find(name, "msa_row_attention")
    library = type("Library", (), {"triangle_attention": staticmethod(locals()[name])})
    monkeypatch.setattr(opponent, "library", classmethod(lambda cls: library))
    eager = randomize(MSARowAttention(8, 4, 2)).double()
    msa, pair = torch.randn(2, 5, 5, 8).double(), torch.randn(2, 5, 5, 4).double()
    mask = torch.rand(2, 5, 5) > 0.3
    mask[..., 0] = True
    torch.testing.assert_close(opponent.build(eager)(msa, pair, mask), eager(msa, pair, mask))
    triangle = randomize(TriangleAttention(4, 2, 3)).double()
    torch.testing.assert_close(opponent.build(triangle)(pair, mask), triangle(pair, mask))
    ending = TriangleAttention(4, 2, 3, "ending").double()
    with pytest.raises(ValueError, match="would have to be transposed"):
        opponent.build(ending)(pair, mask)
    core = attention_core.AttentionCore()
    q, k, v = torch.randn(3, 2, 5, 2, 5, 3).double()
    bias = torch.randn(2, 2, 5, 5).double()
    alone = opponent.build(core)(q, k, v, bias, mask)
    torch.testing.assert_close(alone, core(q, k, v, bias, mask))


def test_accuracy_suite_holds_the_rule_and_covers_the_patterns(monkeypatch):
    monkeypatch.setattr(accuracy, "INNER", (16, 64))
    found = list(accuracy.run(CPU))
    assert {r.inputs for r in found} == set(accuracy.PATTERNS)
    assert {r.direction for r in found} == {FORWARD, "dA", "dB"}
    for r in found:
        assert r["allowed"] == pytest.approx(1.5 * r["reference_error"] + 2e-7)
        assert r["ratio"] <= 1


def test_patterns_span_ten_decades():
    a, _ = accuracy.scaled_rows(50, 8, 4, CPU)
    norms = a.norm(dim=1)
    assert norms.max() / norms.min() > 1e9
    a, b = accuracy.scaled_inner(8, 50, 4, CPU)
    assert a.norm(dim=0).max() / a.norm(dim=0).min() > 1e9
    assert (a @ b).abs().max() < 1e3


class Event:
    """A CUDA event that reads the host's clock."""

    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


@pytest.fixture
def no_cuda(monkeypatch):
    """The parts of torch.cuda that the clocks use, without a device."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    monkeypatch.setattr(timing, "_CACHE_BYTES", 16)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **{**k, "device": "cpu"}))


def test_clocks_visit_their_calls_in_turn(no_cuda):
    order = []
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    assert len(timing.device(calls, 0.0)) == 2
    # Thrice each to see how long the host takes, then in turn.
    assert order == ["a"] * 3 + ["b"] * 3 + ["a", "b"] * 5
    order.clear()
    timing.host(calls, [10.0, 0.1], 0.0)  # about 20 ms of each are issued together, at most 50
    assert order == 3 * (["a"] * 2 + ["b"] * 50)


def test_graphs_are_replayed_in_batches(no_cuda):
    replays = []
    graph = type("Graph", (), {"replay": lambda self: replays.append(time.sleep(1e-3))})()
    (milliseconds,) = timing.graph([graph], 0.0)
    assert milliseconds >= 1.0
    assert len(replays) >= 2 + 5


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_no_kernels_without_a_device(no_cuda):
    assert timing.launches(lambda: torch.ones(3) + 1) == []


def test_a_job_on_cuda_yields_every_metric(no_cuda, monkeypatch):
    monkeypatch.setattr(timing, "capture", lambda call: call)
    monkeypatch.setattr(timing, "graph", lambda graphs, seconds: [0.5 for _ in graphs])
    monkeypatch.setattr(timing, "launches", lambda call: ["one", "two"])
    monkeypatch.setattr(timing, "memory", lambda call, results, device: (2**21, results))
    job = Job("headline", tiny("tensor_matmul"), "fp32", FORWARD, ("fused", "eager"))
    eager, inputs = job.case.prepare(CPU, "fp32")
    entered = []
    for name in job.opponents:
        opponent = opponents.find(name, "tensor_matmul")
        entry = opponent.enter(eager, inputs)
        call = measure.caller(entry, FORWARD, torch.float32)
        entered.append(measure.Entered(opponent, entry, call, 2**20))
    device = types.SimpleNamespace(type="cuda")
    for r in measure._measure(job, device, 0.0, MACHINE["rates"], entered):
        assert r["device_ms"] > 0 and r["wall_ms"] > 0 and r["host_ms"] > 0
        assert (r["graph_ms"], r["launches"], r["peak_mib"], r["extra_mib"]) == (0.5, 2, 2, 1)
        flops, moved = job.case.work(FORWARD, "fp32")
        floor = floor_ms(flops, moved, "fp32", MACHINE["rates"])
        assert r["roofline"] == pytest.approx(floor / r["device_ms"])


def test_memory_beyond_the_results():
    x = torch.randn(1000)
    assert timing.size((x, None, x.double())) == 12000
    peak, extra = timing.memory(lambda: (x * 2) + 1, 4000, CPU)
    assert 8000 <= peak < 8100  # two tensors, and a scalar or so
    assert 4000 <= extra < 4100


# End to end


class Pool:
    """Stands for the process pool: what would cross to the child and back must be picklable."""

    def __init__(self, *args, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, *args):
        result = pickle.dumps(function(*pickle.loads(pickle.dumps(args))))
        return type("Future", (), {"result": lambda self: pickle.loads(result)})()


def test_every_suite_runs_to_json_and_table(monkeypatch, tmp_path, capsys):
    kinds = [("headline", op) for op in ROOMS]
    kinds += [
        ("small", "triangle_attention"),
        ("real", "tensor_matmul"),
        ("scaling", "tensor_matmul"),
        ("small", "tensor_matmul"),
    ]
    monkeypatch.setattr(suites, "CASES", [tiny(op, kind) for kind, op in kinds])
    monkeypatch.setattr(accuracy, "INNER", (16,))
    monkeypatch.setattr(main, "measure_rates", lambda device: RATES)
    monkeypatch.setattr(main, "ProcessPoolExecutor", Pool)
    monkeypatch.setenv("FUSED_OPS_COMMIT", "abc1234")
    path = tmp_path / "new" / "cpu.json"
    status = main.main(["--device", "cpu", "--seconds", "0", "--no-compile", "--output", str(path)])
    assert status == 0
    data = json.loads(path.read_text())
    assert data["machine"]["commit"] == "abc1234"
    assert data["machine"]["torch"] == torch.__version__
    assert {"cpu", "cores", "threads", "python", "date", "rates"} <= data["machine"].keys()
    assert {r["suite"] for r in data["records"]} == set(suites.SUITES)
    assert data["failed"] == []
    printed = capsys.readouterr().out
    for suite in suites.SUITES:
        assert f"{suite}: tensor_matmul" in printed
    assert "compile, flex: --no-compile" in printed


def test_a_spent_budget_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(main, "measure_rates", lambda device: RATES)
    path = tmp_path / "cpu.json"
    assert main.main(["--device", "cpu", "--budget", "0", "--output", str(path)]) == 0
    assert "the budget of 0 s was spent" in capsys.readouterr().out
    assert records.read(path).records == []


def test_a_failing_job_fails_the_run_but_not_the_others(monkeypatch, tmp_path, capsys):
    def fail(job, *args):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(main, "measure_rates", lambda device: RATES)
    monkeypatch.setattr(main, "_run", fail)
    path = tmp_path / "cpu.json"
    arguments = ["--device", "cpu", "--suite", "overhead", "--output", str(path)]
    assert main.main(arguments) == 1
    assert len(records.read(path).failed) == len(list(suites.plan("cpu", ["overhead"])))
    assert "out of luck" in capsys.readouterr().out


def test_needs_neither_matplotlib_nor_rich():
    code = (
        "import sys; sys.modules['matplotlib'] = sys.modules['rich'] = None\n"
        "import benchmarks.__main__ as main; main.parse(['--device', 'cpu'])\n"
        "import benchmarks.round_summary, benchmarks.sanitizer_cases"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# What is made of the file


def test_file_comes_back_as_it_was_written(stored):
    results = records.read(stored)
    assert results.machine == MACHINE
    assert results.records[0] == record("fused", device_ms=0.1)
    assert results.skipped == ["trifast: not here"]
    assert not list(stored.parent.glob("*.partial"))


def stored_benchmarks():
    """What suites have measured; rounds and profiles of kernels have forms of their own."""
    paths = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
    return [path for path in paths if "records" in json.loads(path.read_text())]


@pytest.mark.parametrize("path", stored_benchmarks(), ids=lambda p: p.name)
def test_stored_results_can_be_read_and_shown(path):
    results = records.read(path)
    assert results.records
    assert report.text(results)


def test_files_of_another_schema_are_refused(tmp_path):
    path = tmp_path / "old.json"
    path.write_text('{"machine": {}, "rows": []}')
    with pytest.raises(ValueError, match="schema 2"):
        records.read(path)


def test_table_compares_and_tells_what_is_missing(stored):
    text = report.text(records.read(stored))
    assert "A GPU" in text
    assert "3.00x as fast" in text
    assert "copy 4 TB/s" in text
    assert "trifast: not here" in text
    wall = next(line for line in text.splitlines() if "compile" in line)
    assert " - " in wall  # what was not measured


def test_pictures_of_a_stored_file(stored):
    plots = importlib.import_module("benchmarks.plots")
    assert plots.main([str(stored)]) == 0
    for name in ("headline", "scaling", "memory", "roofline"):
        for suffix, magic in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            picture = stored.with_name(f"gpu-{name}.{suffix}")
            assert picture.read_bytes().startswith(magic), picture
    assert not stored.with_name("gpu-real.png").exists()  # nothing to show there
    assert "times faster than eager PyTorch" in stored.with_name("gpu-headline.svg").read_text()


def test_round_summary(stored, capsys):
    stored.with_name("gpu-tests.xml").write_text(
        '<testsuites><testsuite tests="3" skipped="1" time="7">'
        '<testcase classname="a" name="b"><failure/></testcase><testcase/></testsuite></testsuites>'
    )
    assert round_summary.main(str(stored.parent), "tests=FAILED (7 s)", "memcheck=ok (1 s)") == 1
    printed = capsys.readouterr().out
    assert "3.00x eager" in printed
    assert "2.00x compile" in printed
    assert "1 passed, 1 failed" in printed
    assert "a::b" in printed
    facts = json.loads(stored.with_name("gpu-round.json").read_text())
    assert facts["steps"]["memcheck"] == "ok (1 s)"
    assert facts["tests"]["failed"] == ["a::b"]


def test_round_summary_without_anything(tmp_path, capsys):
    assert round_summary.main(str(tmp_path), "report=ok (1 s)") == 0
    assert "report" in capsys.readouterr().out


def test_gpu_round_is_valid_shell():
    subprocess.run(["bash", "-n", str(ROOT / "benchmarks" / "gpu_round.sh")], check=True)


def test_sanitizer_cases_know_the_kernels_of_the_sources():
    names = sanitizer_cases.kernels_of_the_sources()
    assert {"forward_kernel", "split_forward_kernel", "add_slabs_kernel"} <= names
    for rows, inner, columns in sanitizer_cases.LARGE:
        assert 2 * rows * inner * columns >= 5e7


def test_the_same_shape_in_a_scaling_line_is_another_contest():
    assert record(kind="scaling").contest != record(kind="real").contest


@pytest.mark.parametrize("wrong", [["--budget", "-1"], ["--seconds", "-1"], ["--output", "."]])
def test_wrong_arguments_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        main.parse(["--device", "cpu", *wrong])
    assert "must" in capsys.readouterr().err
