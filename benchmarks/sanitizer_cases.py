# SPDX-License-Identifier: Apache-2.0
"""Small odd shapes through every CUDA kernel, to be run under compute-sanitizer.

Inputs are made on the CPU and copied: with a filter on our kernels, initcheck sees copies but not
what PyTorch's kernels write, and would call every input uninitialised.
"""

import torch

import fused_ops


def main() -> None:
    multiply = fused_ops.TensorMatmul(precision="ieee")
    for rows, inner, columns in (
        (1, 1, 1),
        (17, 33, 5),
        (77, 257, 65),
        (129, 16, 129),
        (2000, 40, 260),
        (3, 0, 4),
    ):
        a, b = torch.randn(1, rows, inner), torch.randn(inner, columns)
        for left in (a, a.transpose(1, 2).contiguous().transpose(1, 2)):
            for right in (b, b.t().contiguous().t()):
                expected = left.double() @ right.double()
                on_device = left.cuda(), right.cuda()
                for copies in (1, 2):
                    result = multiply(on_device[0].expand(copies, -1, -1), on_device[1]).cpu()
                    assert (result - expected).norm() <= 1e-5 * (1 + expected.norm())
    torch.cuda.synchronize()
    print("all cases right")


if __name__ == "__main__":
    main()
