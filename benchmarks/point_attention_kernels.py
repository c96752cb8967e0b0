# SPDX-License-Identifier: Apache-2.0
"""Invariant point attention, kernel by kernel, in its plain form and in AlphaFold's.

``python -m benchmarks.point_attention_kernels [--output FILE]``, on CUDA. For each case, in
milliseconds: device time, the sum of all kernels of a call from a profile with a cold second-level
cache; wall time a call, back to back; and a replay of a CUDA graph. The longest kernels follow.
AlphaFold's form gathers pair values and has lengths of points, no LayerNorm, and biases; it is a
call of the op, for no module of the library has it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fused_ops
from benchmarks import records
from benchmarks.attention_kernels import profile
from benchmarks.invariant_point_attention import make
from fused_ops import functional

BF16, FP32 = torch.bfloat16, torch.float32


class Shape(NamedTuple):
    form: str
    dtype: torch.dtype
    B: int
    N: int
    c: int = 384
    z: int = 128
    H: int = 12
    d: int = 32
    Pq: int = 4
    Pv: int = 8
    backward: bool = False


HEADLINE: dict[str, Any] = {"c": 64, "z": 32, "H": 4, "d": 16}
SHAPES = [
    Shape("plain", FP32, 2, 32, **HEADLINE),
    *(Shape("plain", BF16, 1, n) for n in (256, 512, 1024)),
    Shape("plain", FP32, 1, 1024),
    *(Shape("alphafold", BF16, 1, n, d=16) for n in (1024, 2048)),
    *(Shape("plain", BF16, 1, n, backward=True) for n in (256, 512, 1024)),
    Shape("alphafold", BF16, 1, 512, d=16, backward=True),
    Shape("plain", FP32, 1, 512, backward=True),
    Shape("plain", FP32, 2, 32, **HEADLINE, backward=True),
]


def plain(s: Shape) -> tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]:
    eager, inputs = make(s.B, s.N, s.c, s.z, s.H, s.Pq, s.Pv)
    module = fused_ops.InvariantPointAttention.from_reference(eager).to("cuda", s.dtype)
    node, pair = (x.to("cuda", s.dtype) for x in inputs[:2])
    frames = [x.cuda() for x in inputs[2:]]
    return module, [node, pair, *frames], list(module.parameters())


def alphafold(s: Shape) -> tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]:
    _, inputs = make(s.B, s.N, s.c, s.z, s.H, s.Pq, s.Pv)
    rows = [s.H * s.d] * 3 + [3 * s.H * p for p in (s.Pq, s.Pq, s.Pv)]
    options: dict[str, Any] = {"device": "cuda", "dtype": s.dtype}
    weights = [torch.randn(row, s.c, **options) / s.c**0.5 for row in rows]
    biases = [torch.zeros(row, **options) for row in rows]
    of_bias = torch.randn(s.H, s.z, **options) / s.z**0.5
    heads = torch.zeros(s.H, device="cuda")
    features = s.H * (s.d + 4 * s.Pv + s.z)
    out = torch.randn(s.c, features, **options) / features**0.5
    out_bias = torch.zeros(s.c, **options)
    names = ("q_proj", "k_proj", "v_proj", "q_pts", "k_pts", "v_pts")
    named: dict[str, Any] = {f"{name}_bias": x for name, x in zip(names, biases, strict=True)}
    named |= {"scalar_scale": (3 * s.d) ** -0.5, "point_scale": (13.5 * s.Pq) ** -0.5}
    named |= {"bias_scale": 3**-0.5, "gathers_pair": True, "norm_eps": 1e-8}
    fixed: list[Any] = [None, None, None, *weights, of_bias, heads, out, out_bias, s.H, s.Pq, s.Pv]

    def call(*tensors: Any) -> Tensor:
        return functional.invariant_point_attention(*tensors, *fixed, **named)

    node, pair = (x.to("cuda", s.dtype) for x in inputs[:2])
    parameters = [*weights, *biases, of_bias, heads, out, out_bias]
    return call, [node, pair, *(x.cuda() for x in inputs[2:])], parameters


def wall(call: Callable[[], object], calls: int = 30) -> float:
    """Milliseconds a call, back to back; the median of several rounds."""
    for _ in range(3):
        call()
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(rounds)


def replay(call: Callable[[], object]) -> float:
    graph = torch.cuda.CUDAGraph()
    call()
    with torch.cuda.graph(graph):
        call()
    return wall(graph.replay)


def kernel(name: str) -> str:
    """A short name: ours without parameters, others cut off."""
    ours = re.search(r"(\w+)_kernel\b", name)
    return ours[1] if ours and "fused_ops" in name else re.sub(r"\W+", " ", name)[:28].strip()


def measure(s: Shape) -> dict[str, Any]:
    torch.manual_seed(0)
    call, inputs, parameters = (plain if s.form == "plain" else alphafold)(s)
    graph = None
    if s.backward:
        wanted = [x.requires_grad_() for x in (*inputs, *parameters)]
        cotangent = torch.randn(inputs[0].shape, device="cuda").to(s.dtype)

        def run() -> object:
            return torch.autograd.grad(call(*inputs), wanted, cotangent)

        times, ms = profile(run), wall(run)
    else:
        with torch.no_grad():

            def run() -> object:
                return call(*inputs)

            times, ms, graph = profile(run), wall(run), replay(run)
    kernels: dict[str, float] = {}
    for name, each in times.items():
        kernels[kernel(name)] = kernels.get(kernel(name), 0.0) + each
    sizes = {**s._asdict(), "dtype": str(s.dtype).removeprefix("torch.")}
    return {
        "sizes": sizes,
        "device_ms": sum(times.values()),
        "wall_ms": ms,
        "graph_ms": graph,
        "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.point_attention_kernels")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file")
    output = parser.parse_args().output
    found = []
    for shape in SHAPES:
        one = measure(shape)
        found.append(one)
        graph = "-" if one["graph_ms"] is None else f"{one['graph_ms']:.4f}"
        name = f"{shape.form} {one['sizes']['dtype']} B={shape.B} N={shape.N} d={shape.d}"
        print(
            f"{name}{' with backward' if shape.backward else ''}: device {one['device_ms']:.4f}, "
            f"wall {one['wall_ms']:.4f}, graph {graph}"
        )
        longest = list(one["kernels"].items())[:12]
        print("    " + ", ".join(f"{name} {ms * 1e3:.1f}" for name, ms in longest), flush=True)
        torch.cuda.empty_cache()
    if output is not None:
        machine = records.machine(torch.device("cuda"))
        output.write_text(json.dumps({"machine": machine, "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
