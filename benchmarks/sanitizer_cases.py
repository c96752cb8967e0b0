# SPDX-License-Identifier: Apache-2.0
"""Small odd shapes through every CUDA kernel, to be run under compute-sanitizer.

Inputs are made and results compared on the CPU, so that besides ours only copies and fills run on
the device: the tools need no filter on kernel names, and initcheck sees all that is written. A
backward runs only where the plan names a kernel of ours.

``--only matmul``, ``triangle``, ``attention`` or ``points`` runs the cases of one op.

``--kernels`` runs the same under PyTorch's profiler instead and tells which kernels were reached.
"""

from __future__ import annotations

import copy
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fused_ops
from benchmarks import timing
from fused_ops import functional

# Rows, inner, columns. The first kernel takes the small ones; the large ones are just large enough
# for those on split operands, and the second one, with few columns, for their narrow tiles.
SMALL = ((1, 1, 1), (17, 33, 5), (77, 257, 65), (129, 16, 129), (2000, 40, 260), (3, 0, 4))
LARGE = ((6200, 171, 509), (66000, 101, 107))
# N, channels, hidden, dtype: the kernels for small triangles, those for many channels, and, with
# many pairs, those of Hopper.
TRIANGLES = (
    (17, 33, 21, torch.float32),
    (5, 16, 136, torch.float32),
    (13, 40, 130, torch.bfloat16),
    (6, 9, 129, torch.float16),
    (6, 264, 40, torch.bfloat16),
    (187, 16, 16, torch.float32),
    (187, 24, 72, torch.bfloat16),
    (187, 8, 16, torch.float16),
)

# Rows, N, msa_dim, pair_dim, heads, dtype: for the two launches that take few positions, lines of
# each length, few queries and many; for the others, which take more than 256 channels or 128
# positions, rows of one and of several tiles of keys, heads of all widths in shared memory, some of
# them filled up.
ATTENTIONS = (
    (3, 17, 24, 7, 3, torch.float32),
    (4, 32, 64, 32, 4, torch.float32),
    (5, 40, 64, 16, 2, torch.float16),
    (2, 70, 120, 132, 2, torch.float32),
    (3, 33, 65, 33, 13, torch.bfloat16),
    (1, 9, 200, 24, 2, torch.bfloat16),
    (3, 17, 264, 7, 11, torch.bfloat16),
    (2, 40, 264, 16, 33, torch.float16),
    (3, 33, 264, 33, 8, torch.bfloat16),
    (2, 20, 264, 7, 3, torch.bfloat16),
    (1, 131, 65, 40, 5, torch.bfloat16),
    (1, 130, 120, 132, 2, torch.bfloat16),
    (3, 17, 264, 7, 11, torch.float32),
    (2, 40, 264, 24, 3, torch.float32),
    (1, 130, 65, 40, 5, torch.float32),
)
# Rows, N, msa_dim, heads, dtype.
ATTENTION_BACKWARDS = (
    (5, 17, 24, 3, torch.bfloat16),
    (3, 40, 72, 3, torch.float16),
    (2, 70, 80, 2, torch.bfloat16),
    (2, 70, 65, 5, torch.bfloat16),
    (2, 20, 120, 2, torch.bfloat16),
    (1, 33, 128, 1, torch.bfloat16),
    (3, 20, 24, 3, torch.float32),
    (2, 70, 65, 5, torch.float32),
    (1, 40, 80, 2, torch.float32),
    (1, 33, 128, 1, torch.float32),
)

# N, node_dim, pair_dim, heads, width of a head, query and value points, channels of gathered pairs
# (-1: the pair tensor itself), dtype: small ones in two launches, then heads of all widths that
# kernels tell apart, and channels that are no multiple of anything.
POINTS = (
    (17, 24, 7, 3, 8, 2, 3, 0, torch.float32),
    (32, 64, 32, 4, 16, 4, 8, -1, torch.bfloat16),
    (33, 264, 16, 12, 16, 4, 8, 0, torch.bfloat16),
    (45, 264, 24, 4, 32, 4, 8, -1, torch.float16),
    (19, 265, 33, 3, 13, 3, 5, 9, torch.bfloat16),
    (21, 264, 8, 2, 72, 1, 1, 8, torch.bfloat16),
    (9, 264, 136, 1, 256, 16, 16, -1, torch.bfloat16),
    (33, 264, 16, 12, 16, 4, 8, -1, torch.float32),
    (19, 265, 33, 3, 13, 3, 5, 9, torch.float32),
    (9, 264, 8, 1, 256, 16, 16, 0, torch.float32),
)


def layouts(matrix: Tensor) -> Iterator[Tensor]:
    """The same values row by row and column by column."""
    yield matrix
    yield matrix.mT.contiguous().mT


def check(result: Tensor, exact: Tensor) -> None:
    error, size = (result.cpu() - exact).norm(), exact.norm()
    assert error <= 1e-5 * (1 + size), f"off by {error:.3g}, norm {size:.3g}"


def run(rows: int, inner: int, columns: int) -> int:
    """All layouts of one shape; returns the number of backward passes that were ours."""
    multiply = fused_ops.TensorMatmul(precision="ieee")
    a, b = torch.randn(1, rows, inner), torch.randn(inner, columns)
    grad = torch.randn(1, rows, columns)
    exact = a.double() @ b.double()
    backwards = 0
    large = (rows, inner, columns) in LARGE  # the tools are slow
    for left in layouts(a):
        for right in [b] if large else layouts(b):
            leaves = [x.cuda().requires_grad_() for x in (left, right)]
            with torch.no_grad():
                for copies in (1,) if large else (1, 2):  # a batch axis of stride 0
                    check(multiply(leaves[0].expand(copies, -1, -1), leaves[1]), exact)
            if fused_ops.explain(multiply, *leaves, backward=True).path == "kernel":
                gradients = torch.autograd.grad(multiply(*leaves), leaves, grad.cuda())
                check(gradients[0], grad.double() @ b.double().T)
                check(gradients[1], a[0].double().T @ grad[0].double())
                backwards += 1
    return backwards


def run_triangle(n: int, channels: int, hidden: int, dtype: torch.dtype) -> int:
    """Forward and backward of both directions; returns the number of backward passes."""
    directions: tuple[str, ...] = ("outgoing", "incoming")
    if n > 100:  # the tools are slow
        directions = directions[:1] if dtype == torch.float32 else directions[1:]
    for direction in directions:
        module = fused_ops.TriangularMultiplicativeUpdate(channels, hidden, direction).to(dtype)
        pair = torch.randn(1, n, n, channels, dtype=dtype)
        mask = torch.rand(1, n, n) > 0.3
        grad = torch.randn(pair.shape, dtype=dtype)
        on_cuda = copy.deepcopy(module).cuda()
        ours = pair.cuda().requires_grad_()
        result = on_cuda(ours, mask.cuda())
        if n < 100:
            with torch.no_grad():
                on_cuda(ours, None)
        (gradient,) = torch.autograd.grad(result, [ours], grad.cuda(), retain_graph=True)
        wanted = [ours, *on_cuda.parameters()]
        torch.autograd.grad(result, wanted, grad.cuda())
        exact = pair.double().requires_grad_()
        expected = module.double()(exact, mask)
        expected.backward(grad.double())
        assert exact.grad is not None
        near = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        for one, other in ((result, expected), (gradient, exact.grad)):
            error = (one.detach().cpu().double() - other.detach()).norm()
            assert error <= near * other.norm(), f"off by {error:.3g}"
    return 2 * len(directions)


def run_attention(
    rows: int, n: int, channels: int, pair_channels: int, heads: int, dtype: torch.dtype
) -> None:
    """The forward, with and without a mask; of two groups, and with a norm of the pair."""
    module = fused_ops.MSARowAttention(channels, pair_channels, heads).to(dtype)
    msa = torch.randn(2, rows, n, channels, dtype=dtype)
    pair = torch.randn(2, n, n, pair_channels, dtype=dtype)
    mask = torch.rand(2, rows, n) > 0.3
    mask[..., 0] = True
    mask[0, 0, n // 2 :] = False
    narrow = 1 + (pair_channels - 1) // 128  # heads that kernels take
    triangle = fused_ops.TriangleAttention(pair_channels, narrow, direction="ending").to(dtype)
    near = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    cases = ((module, (msa, pair, mask)), (module, (msa, pair[:1], None)), (triangle, (pair,)))
    with torch.no_grad():
        for given, inputs in cases:
            (result,), (exact,) = (_attend(given, inputs, device) for device in ("cuda", "cpu"))
            error = (result.cpu().double() - exact).norm()
            assert error <= near * exact.norm(), f"off by {error:.3g}"


def run_attention_backward(rows: int, n: int, channels: int, heads: int, dtype: torch.dtype) -> int:
    """With a mask, and with a norm of the pair. Returns the number of backward passes."""
    module = fused_ops.MSARowAttention(channels, 16, heads).to(dtype)
    msa, pair = torch.randn(2, rows, n, channels), torch.randn(2, n, n, 16)
    mask = torch.rand(2, rows, n) > 0.3
    mask[..., 0] = True
    triangle = fused_ops.TriangleAttention(24, 1).to(dtype)
    cases = ((module, (msa, pair, mask)), (triangle, (torch.randn(1, 17, 17, 24),)))
    near = 1e-4 if dtype == torch.float32 else 5e-2
    for given, inputs in cases:
        typed = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        ours, exact = (_attend(given, typed, device) for device in ("cuda", "cpu"))
        largest = max(x.norm() for x in exact)
        for a, b in zip(ours, exact, strict=True):
            error = (a.cpu().double() - b).norm()
            # What shifts all logits of a query alike has no gradient but noise.
            assert error <= near * (b.norm() + largest / 10), f"off by {error:.3g}"
    return len(cases)


def _attend(given: torch.nn.Module, inputs: Sequence[Tensor | None], device: str) -> list[Tensor]:
    """The result, on the CPU in float64, and all gradients where there is a graph."""
    module = copy.deepcopy(given).to(device)
    tensors = [None if x is None else x.to(device) for x in inputs]
    if device == "cpu":
        module.double()
        tensors = [x.double() if x is not None and x.is_floating_point() else x for x in tensors]
    if not torch.is_grad_enabled():
        return [module(*tensors)]
    leaves = [x.requires_grad_() for x in tensors if x is not None and x.is_floating_point()]
    result = module(*tensors)
    weights = torch.linspace(-1, 1, result.numel(), device=device).sin().view(result.shape)
    wanted = [*leaves, *module.parameters()]
    return [result.detach(), *torch.autograd.grad(result, wanted, weights.to(result.dtype))]


def run_points(
    n: int,
    channels: int,
    pair_channels: int,
    heads: int,
    width: int,
    query_points: int,
    value_points: int,
    value_channels: int,
    dtype: torch.dtype,
) -> int:
    """Forward and backward with a mask, lengths and biases; one pair tensor of two elements."""
    gathers_pair = value_channels < 0
    gathered = pair_channels if gathers_pair else value_channels
    features = heads * (width + 4 * value_points + gathered)
    rows = [heads * width] * 3 + [3 * heads * query_points] * 2 + [3 * heads * value_points]
    weights = [torch.randn(row, channels).to(dtype) / channels**0.5 for row in rows]
    biases = [torch.randn(row).to(dtype) for row in rows]
    of_bias, head_weights = torch.randn(heads, pair_channels).to(dtype), torch.randn(heads)
    out = torch.randn(channels, features).to(dtype) / features**0.5
    node = torch.randn(2, n, channels).to(dtype)
    pair = torch.randn(1, n, n, pair_channels).to(dtype)
    value = torch.randn(2, n, n, gathered).to(dtype) if value_channels > 0 else None
    translations = 5 * torch.randn(2, n, 3)
    rotations = torch.linalg.qr(torch.randn(2, n, 3, 3))[0]
    mask = torch.rand(2, n) > 0.3
    mask[:, 0] = True
    tensors = [node, pair, translations, rotations, value, *weights, *biases, of_bias]
    tensors += [head_weights, out]

    def attend(device: str) -> list[Tensor]:
        exact = torch.float64 if device == "cpu" else None
        given = [None if x is None else x.to(device, exact or x.dtype) for x in tensors]
        for x in given:
            if x is not None:
                x.requires_grad_(torch.is_grad_enabled())
        many, (w_bias, w_heads, w_out) = given[5:17], given[17:]
        names = ("q_proj", "k_proj", "v_proj", "q_pts", "k_pts", "v_pts")
        named: dict[str, Any] = {"pair_value": given[4], "gathers_pair": gathers_pair}
        named |= {f"{name}_bias": x for name, x in zip(names, many[6:], strict=True)}
        named |= {"point_scale": 0.3, "bias_scale": 0.6, "norm_eps": 1e-8}
        arguments: list[Any] = [*given[:4], mask.to(device), None, None, *many[:6], w_bias]
        arguments += [w_heads, w_out, None, heads, query_points, value_points]
        result = functional.invariant_point_attention(*arguments, **named)
        if not torch.is_grad_enabled():
            return [result]
        cotangent = torch.linspace(-1, 1, result.numel(), device=device).sin().view(result.shape)
        wanted = [x for x in given if x is not None]
        return [result.detach(), *torch.autograd.grad(result, wanted, cotangent.to(result.dtype))]

    near = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            ours, exact = attend("cuda"), attend("cpu")
        largest = max(x.norm() for x in exact)
        for a, b in zip(ours, exact, strict=True):
            error = (a.cpu().double() - b).norm()
            assert error <= near * (b.norm() + largest / 10), f"off by {error:.3g}"
    return 1


def run_dropout(n: int, heads: int, dtype: torch.dtype) -> int:
    """A training step with dropout, whose mask nobody else has: its numbers are finite."""
    module = fused_ops.MSARowAttention(48, 16, heads, dropout=0.25).to("cuda", dtype)
    msa = torch.randn(1, 2, n, 48, dtype=dtype).cuda().requires_grad_()
    pair = torch.randn(1, n, n, 16, dtype=dtype).cuda().requires_grad_()
    mask = (torch.rand(1, 2, n) > 0.3).cuda()
    result = module(msa, pair, mask)
    grads = torch.autograd.grad(result.sin().sum(), [msa, pair, *module.parameters()])
    assert all(x.isfinite().all() for x in (result, *grads))
    return 1


def run_all() -> None:
    backwards = 0
    chosen = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""
    if chosen in ("", "matmul"):
        backwards += sum(run(*shape) for shape in (*SMALL, *LARGE))
    if chosen in ("", "triangle"):
        backwards += sum(run_triangle(*triangle) for triangle in TRIANGLES)
    if chosen in ("", "attention"):
        for attention in ATTENTIONS:
            run_attention(*attention)
        backwards += sum(run_attention_backward(*backward) for backward in ATTENTION_BACKWARDS)
        for dtype in (torch.bfloat16, torch.float32):
            backwards += run_dropout(70, 2, dtype)
    if chosen in ("", "points"):
        backwards += sum(run_points(*points) for points in POINTS)
    torch.cuda.synchronize()
    print(f"all cases right, {backwards} backward passes among them")


def kernels_of_the_sources() -> set[str]:
    """Names of all kernels in csrc/, for a report on those that no case reached."""
    csrc = pathlib.Path(__file__).parents[1] / "csrc"
    pattern = re.compile(r"__global__[^{;]*?(\w+_kernel)\(", flags=re.DOTALL)
    files = (*csrc.rglob("*.cu"), *csrc.rglob("*.cuh"))
    return {name for path in files for name in pattern.findall(path.read_text())}


def report_kernels() -> int:
    """Print which of our kernels the cases reach; 1 if none."""
    launched = timing.launches(run_all)
    ours = [name for name in launched if "fused_ops" in name]
    names = [match[1] for name in ours if (match := re.search(r"(\w+_kernel)\b", name))]
    reached = {name: names.count(name) for name in dict.fromkeys(names)}
    print("launched: " + ", ".join(f"{name} {count}x" for name, count in reached.items()))
    missing = sorted(kernels_of_the_sources() - set(reached))
    print("not reached: " + (", ".join(missing) or "none"))
    return 0 if reached else 1


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(4)  # the tools run side by side
    if sys.argv[1:] == ["--kernels"]:
        sys.exit(report_kernels())
    run_all()
