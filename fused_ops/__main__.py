# SPDX-License-Identifier: Apache-2.0
"""``python -m fused_ops``: what is installed, which kernels run here, and a self-test."""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fused_ops
from fused_ops import _library, reference
from fused_ops._module import FusedModule
from fused_ops.testing import relative_error

_SELF_TEST_LIMIT = 1e-5  # fp32 against float64; the ops stay below 1e-6 at these sizes


def _line(name: str, value: object) -> None:
    print(f"  {name:<18}{value}")


def _cases(device: torch.device) -> Iterator[tuple[FusedModule, nn.Module, list[Tensor]]]:
    """A small case of every op: fused module, reference with the same weights, inputs."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    n = 37
    pair, mask = draw(1, n, n, 32), draw(1, n, n) > -1
    rotations = torch.linalg.qr(draw(1, n, 3, 3).cpu().double())[0].float().to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        eager: list[tuple[type[FusedModule], nn.Module, list[Tensor]]] = [
            (
                fused_ops.TriangularMultiplicativeUpdate,
                reference.TriangularMultiplicativeUpdate(32, 24, "outgoing"),
                [pair, mask],
            ),
            (
                fused_ops.MSARowAttention,
                reference.MSARowAttention(32, 32, 4),
                [draw(1, 5, n, 32), pair, draw(1, 5, n) > -1],
            ),
            (
                fused_ops.TriangleAttention,
                reference.TriangleAttention(32, 4, direction="ending"),
                [pair, mask],
            ),
            (
                fused_ops.InvariantPointAttention,
                reference.InvariantPointAttention(32, 32, 4, 4, 8),
                [draw(1, n, 32), pair, 10 * draw(1, n, 3), rotations],
            ),
            (fused_ops.TensorMatmul, reference.TensorMatmul(), [pair, draw(32, 24)]),
        ]
    for cls, module, inputs in eager:
        module.to(device)
        yield cls.from_reference(module), module, inputs


def _self_test(device: torch.device) -> bool:
    print(f"\nself-test on {device} (fp32, error against float64)")
    passed = True
    for fused, module, inputs in _cases(device):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the report says which ops run a composition
            result: Any = fused(*inputs)
            exact = module.double()(*(x.double() if x.is_floating_point() else x for x in inputs))
            module.float()
        error = relative_error(result, exact)
        ok = error < _SELF_TEST_LIMIT
        passed &= ok
        name, plan = type(fused).__name__, fused_ops.explain(fused, *inputs)
        print(f"  {'ok  ' if ok else 'FAIL'}  {error:.1e}  {name}, {plan}")
    return passed


def main() -> int:
    """Print the report; the exit status is 0 if the self-test passes."""
    info = _library.build_info()
    print("fused-ops")
    _line("version", fused_ops.__version__)
    _line("python", platform.python_version())
    _line("torch", f"{torch.__version__} (built for CUDA {torch.version.cuda or '-'})")
    _line("stable ABI target", f"torch >= {info['torch_target'] or '?'}")
    _line("extension _C", _library.extension_status.reason or "loaded")
    _line("CUDA library", _library.cuda_library_status.reason or "loaded")
    if info["cuda_version"]:
        _line("", f"built by CUDA {info['cuda_version']} for {', '.join(info['archs'])}")
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            _line(
                f"cuda:{i}", f"{torch.cuda.get_device_name(i)}, compute capability {major}.{minor}"
            )
            devices.append(torch.device("cuda", i))
        _line("fp32 products", torch.backends.cuda.matmul.fp32_precision)
    else:
        _line("GPU", "none that torch can use; every op runs its PyTorch composition on the CPU")
    results = [_self_test(device) for device in devices]  # every device, also after a failure
    passed = all(results)
    print("\nall ops work" if passed else "\nTHE SELF-TEST FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
