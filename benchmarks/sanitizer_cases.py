# SPDX-License-Identifier: Apache-2.0
"""Small odd shapes through every CUDA kernel, to be run under compute-sanitizer."""

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
        a = torch.randn(1, rows, inner, device="cuda")
        b = torch.randn(inner, columns, device="cuda")
        for left in (a, a.transpose(1, 2).contiguous().transpose(1, 2), a.expand(2, -1, -1)):
            for right in (b, b.t().contiguous().t()):
                result = multiply(left, right)
                expected = left.double() @ right.double()
                assert (result - expected).norm() <= 1e-5 * (1 + expected.norm())
    torch.cuda.synchronize()
    print("all cases right")


if __name__ == "__main__":
    main()
