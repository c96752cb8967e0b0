# SPDX-License-Identifier: Apache-2.0
"""The contraction of split planes, run on the CPU in the emulation."""

import pytest
import torch
from emulation.build import driver

from fused_ops.testing import relative_error

NT, NN, TN = range(3)
PRODUCTS = {
    NT: lambda a, b: a @ b.mT,
    NN: lambda a, b: a @ b,
    TN: lambda a, b: a.mT @ b,
}


def random(shape):
    return torch.randn(shape)


def same_sign(shape):
    return torch.rand(shape) + 0.5


def split(x):
    """Planes hi and lo of (channels, batch, n, n), lines padded with zeros, and the undo factor."""
    n = x.shape[-1]
    largest = torch.where(x.isfinite(), x, 0).abs().amax((1, 2, 3)).clamp(min=2.0**-100)
    undo = 2.0 ** (largest.log2().floor() - 14)
    scaled = torch.nn.functional.pad(x / undo[:, None, None, None], (0, -n % 8))
    hi = scaled.half()
    return hi, (scaled - hi.float()).half(), undo


def contract(a, b, product, kernel="contract", **settings):
    """The product, after a check that the padding was not touched."""
    channels, batch, n, _ = a.shape
    inputs = {}
    for name, x in (("a", a), ("b", b)):
        inputs[f"{name}_hi"], inputs[f"{name}_lo"], inputs[f"{name}_undo"] = split(x)
    settings |= {"channels": channels, "batch": batch, "n": n, "product": product}
    run = driver("triangular_multiplicative_update_contract").run
    out = run(kernel, inputs, **settings)["out"].view(channels, batch, n, -1)
    assert (out[..., n:].contiguous().view(torch.int32) == -1).all()
    return out[..., :n]


def assert_accurate(ours, a, b, product):
    exact = PRODUCTS[product](a.double(), b.double())
    theirs = PRODUCTS[product](a, b)
    for channel in range(len(a)):
        error = relative_error(ours[channel], exact[channel])
        assert error <= 1.5 * relative_error(theirs[channel], exact[channel]) + 2e-7


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    "n, channels, batch", [(1, 3, 2), (2, 2, 2), (7, 3, 1), (17, 1, 2), (33, 2, 1), (130, 1, 1)]
)
def test_sizes(n, channels, batch, product):
    a, b = random((channels, batch, n, n)), random((channels, batch, n, n))
    assert_accurate(contract(a, b, product, seed=n), a, b, product)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("n, stages", [(33, 3), (77, 2), (132, 3)])
def test_large_tiles(n, stages, product):
    a, b = random((1, 1, n, n)), same_sign((1, 1, n, n))
    ours = contract(a, b, product, kernel="forced", rows=128, stages=stages, seed=n)
    assert_accurate(ours, a, b, product)


@pytest.mark.parametrize("product", PRODUCTS)
def test_small_tiles_with_three_stages(product):
    a, b = random((2, 1, 70, 70)), random((2, 1, 70, 70))
    ours = contract(a, b, product, kernel="forced", rows=64, stages=3)
    assert_accurate(ours, a, b, product)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("n, columns", [(3, 256), (77, 128), (130, 128), (130, 256), (270, 256)])
def test_hopper_tiles(n, columns, product):
    a, b = random((1, 1, n, n)), same_sign((1, 1, n, n))
    ours = contract(a, b, product, kernel="forced", columns=columns, seed=n)
    assert_accurate(ours, a, b, product)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("n, channels, batch", [(1, 2, 2), (17, 2, 3), (33, 1, 2), (140, 3, 1)])
def test_hopper_chooses(n, channels, batch, product):
    """Several tiles a block, and more chunks than the ring has stages."""
    a, b = random((channels, batch, n, n)), random((channels, batch, n, n))
    assert_accurate(contract(a, b, product, kernel="hopper", seed=n), a, b, product)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("tile", [{"rows": 64, "stages": 2}, {"columns": 256}], ids=str)
def test_promotes(tile, product):
    """Sums of one sign over so many that the tensor cores' truncation would show."""
    a, b = same_sign((1, 1, 256, 256)), same_sign((1, 1, 256, 256))
    assert_accurate(contract(a, b, product, kernel="forced", **tile), a, b, product)


BOTH = pytest.mark.parametrize("kernel", ["contract", "hopper"])


@BOTH
@pytest.mark.parametrize("product", PRODUCTS)
def test_scales_of_channels(product, kernel):
    """Each undo factor is in fp32's range, and what they give together, but not their product."""
    scale_a = torch.tensor([2.0**60, 2.0**-60, 2.0**115, 2.0**-95]).view(-1, 1, 1, 1)
    scale_b = torch.tensor([1.0, 2.0**60, 2.0**-100, 2.0**-20]).view(-1, 1, 1, 1)
    a, b = scale_a * random((4, 2, 9, 9)), scale_b * random((4, 2, 9, 9))
    assert_accurate(contract(a, b, product, kernel), a, b, product)


@BOTH
@pytest.mark.parametrize("product", PRODUCTS)
def test_non_finite_numbers_reach_the_results_they_belong_to(product, kernel):
    """An infinite number splits into one and NaN, so that its results are NaN or infinite."""
    a, b = random((2, 2, 37, 37)), random((2, 2, 37, 37))
    a[0, 1, 36, 3], b[1, 0, 5, 36], b[1, 1, 2, 2] = float("nan"), float("inf"), -float("inf")
    ours, theirs = contract(a, b, product, kernel), PRODUCTS[product](a, b)
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert (theirs.isnan() <= ours.isnan()).all()
    finite = theirs.isfinite()
    torch.testing.assert_close(ours[finite], theirs[finite], atol=1e-5, rtol=1e-5)


@BOTH
def test_is_deterministic(kernel):
    a, b = random((1, 1, 40, 40)), random((1, 1, 40, 40))
    one, other = (contract(a, b, NN, kernel, seed=seed) for seed in (1, 2))
    assert torch.equal(one, other)
