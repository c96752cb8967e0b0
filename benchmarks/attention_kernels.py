# SPDX-License-Identifier: Apache-2.0
"""Row attention's kernels between the projections, against PyTorch's attention alone.

``python -m benchmarks.attention_kernels [--output FILE]``, on CUDA. A profile of the op gives the
time of each of its kernels; those of the attention (ours has the gate within) stand against all
kernels of ``scaled_dot_product_attention`` with an expanded bias and, backward, the sum of that
bias's gradient. Milliseconds of device time, medians, the second-level cache overwritten before
each call. The other benchmarks measure modules, from outside; here it is seen what a kernel takes.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fused_ops
from benchmarks import records

# (S, N, H, d): the cores, odd and short and deep ones, and other heads.
SHAPES = [
    *((128, 256, 8, 32), (512, 512, 8, 32), (256, 256, 4, 32), (768, 768, 4, 32)),
    *((128, 77, 8, 32), (128, 257, 8, 32), (128, 513, 8, 32), (128, 1025, 8, 32)),
    *((1, 256, 8, 32), (1, 1024, 8, 32), (8, 256, 8, 32), (33, 256, 8, 32), (5120, 256, 8, 32)),
    *((128, 256, 32, 8), (128, 256, 16, 16), (128, 256, 4, 64), (512, 512, 4, 64)),
    *((1, 256, 8, 64), (128, 256, 5, 48)),
]
FORWARD = ("attend_kernel",)
BACKWARD = (
    *("backward_gate_kernel", "backward_keys_kernel", "backward_queries_kernel"),
    *("backward_bias_kernel", "add_slabs_kernel"),
)
CALLS = 8
NOT_OF_A_CALL = ("FillFunctor", "Memset", "Memcpy")


def profile(call: Callable[[], object], calls: int = CALLS) -> dict[str, float]:
    """Milliseconds of each kernel of one call."""
    cache = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watch:
        for _ in range(calls):
            cache.zero_()
            call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in watch.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.device_time / 1e3)
    return {
        name: statistics.median(each) * len(each) / calls
        for name, each in times.items()
        if not any(word in name for word in NOT_OF_A_CALL)
    }


def total(times: dict[str, float], kernels: tuple[str, ...]) -> float:
    return sum(ms for name, ms in times.items() if any(kernel in name for kernel in kernels))


class Times(NamedTuple):
    sizes: dict[str, int]
    sdpa: tuple[float, float]
    """Forward, and forward and backward."""
    ours: tuple[float, float]
    kernels: dict[str, float]
    """Ours, one by one."""


def measure(S: int, N: int, H: int, d: int) -> Times:
    """Forward, and forward and backward, of both, in bf16."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    module = fused_ops.MSARowAttention(H * d, 16, H).to(**options)
    msa = torch.randn(1, S, N, H * d, **options).requires_grad_()
    pair = torch.randn(1, N, N, 16, **options).requires_grad_()
    wanted = [msa, pair, *module.parameters()]
    cotangent = torch.randn_like(msa)
    ours = profile(lambda: torch.autograd.grad(module(msa, pair), wanted, cotangent))
    with torch.no_grad():
        alone = profile(lambda: module(msa, pair))
    q, k, v = (torch.randn(S, H, N, d, **options).requires_grad_() for _ in range(3))
    bias = torch.randn(1, H, N, N, **options).requires_grad_()
    upstream = torch.randn_like(q)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(S, H, N, N))

    # Where tensors want gradients it takes slower kernels, whether gradients are recorded or not.
    plain = [x.detach() for x in (q, k, v, bias)]
    forward = sum(profile(lambda: sdpa(*plain)).values())
    try:
        leaves = (q, k, v, bias)
        both = sum(
            profile(lambda: torch.autograd.grad(sdpa(*leaves), leaves, upstream), 3).values()
        )
    except RuntimeError as error:  # out of memory; some lengths have no backward
        both = float("nan")
        print(f"SDPA with backward at {(S, N, H, d)}: {str(error).splitlines()[0][:100]}")
    parts = {kernel: total(ours, (kernel,)) for kernel in (*FORWARD, *BACKWARD)}
    return Times(
        sizes={"S": S, "N": N, "H": H, "d": d},
        sdpa=(forward, both),
        ours=(total(alone, FORWARD), total(ours, FORWARD + BACKWARD)),
        kernels=parts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_kernels")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file")
    output = parser.parse_args().output
    print(
        "S, N, H, d               SDPA forward / both      ours forward / both      times as fast"
    )
    found = []
    for sizes in SHAPES:
        one = measure(*sizes)
        found.append(one._asdict())
        (a, b), (c, d) = one.sdpa, one.ours
        print(
            f"{', '.join(map(str, sizes)):24s} {a:8.4f} / {b:8.3f}      {c:8.4f} / {d:8.3f}"
            f"      {a / c:5.2f} / {b / d:5.2f}",
            flush=True,
        )
        torch.cuda.empty_cache()
    if output is not None:
        machine = records.machine(torch.device("cuda"))
        output.write_text(json.dumps({"machine": machine, "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
