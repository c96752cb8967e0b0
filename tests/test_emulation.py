# SPDX-License-Identifier: Apache-2.0
"""The kernels on the CPU: is the emulation right, does it find faults, are the kernels right in it.

What the emulation is stands in ``tests/emulation/README.md``.
"""

import math
import re

import pytest
import torch
from emulation.build import SOURCES, EmulationError, driver, span

from fused_ops import reference
from fused_ops.testing import relative_error

# Faults ------------------------------------------------------------------------------------------

TOUCHED = r"AddressSanitizer: use-after-poison[\s\S]*faults\.cpp:\d+"
OUTSIDE = r"AddressSanitizer: heap-buffer-overflow[\s\S]*faults\.cpp:\d+"
# The fault that was planted in emulation/faults.cpp, and what is said of it; None where only the
# results show it.
PLANTED = {
    "missing_wait": TOUCHED,
    "never_waited": r"faults\.cpp:\d+: .* returns without having waited",
    "missing_barrier_after_write": TOUCHED,
    "missing_barrier_before_reuse": TOUCHED,
    "missing_syncwarp": None,
    "missing_zero_fill": None,
    "load_out_of_bounds": OUTSIDE,
    "store_out_of_bounds": OUTSIDE,
    "shared_overrun": OUTSIDE,
    "shared_not_given": r"uses \d+ bytes of shared memory, the launch gave",
    "swapped_fragments": None,
    "wrong_row_address": None,
    "not_transposed": None,
    "unaligned_copy": r"cp_async_16: the address in global memory is not aligned",
    "unaligned_matrix": r"ldmatrix_x4: the address in shared memory is not aligned",
    "unaligned_load": r"load_shared_16: the address in shared memory is not aligned",
    "unaligned_short_load": r"load_shared_8: the address in shared memory is not aligned",
    "unaligned_store": r"faults\.cpp:\d+:\d+: runtime error: store to misaligned address",
    "divergent_barrier": r"divergent block: one thread is in __syncthreads",
    "divergent_warp": r"divergent warp: one lane is in mma_f16",
    "wrong_mask": r"divergent warp: .* with another mask",
    "returned_lane": r"the mask names lanes that have returned",
    "deadlock": r"threads 0 to 15 wait in __syncwarp at faults\.cpp:\d+, threads 16 to 31 wait in",
    "index_overflow": r"faults\.cpp:\d+:\d+: runtime error: signed integer overflow",
}


# The same for the kernel with barriers in shared memory and warps of two kinds.
RING_PLANTED = {
    "ring_missing_wait_for_full": r"deadlock in block \d: .* wait in mbarrier_wait at faults\.cpp",
    "ring_missing_wait_for_empty": r"deadlock in block \d: threads 0 to 63 have returned",
    "ring_missing_arrival": r"deadlock in block \d: .* wait in mbarrier_wait at faults\.cpp",
    "ring_wrong_parity": r"deadlock in block \d: .* wait in mbarrier_wait at faults\.cpp",
    "ring_not_initialised": r"mbarrier_wait: the barrier has not been initialised",
    "ring_overwritten": r"the barrier has been overwritten",
    "ring_missing_named_barrier": None,
    "ring_wrong_named_barrier": r"named_barrier: others who wait there expect \d+ threads",
}
BULK_PLANTED = {
    "bulk_missing_expect": TOUCHED,
    "bulk_missing_wait": TOUCHED,
    "bulk_never_waited": r"nobody has waited for the bulk copy",
    "bulk_expects_more": r"deadlock in block \d: .* wait in mbarrier_wait at faults\.cpp",
    "bulk_unaligned": r"bulk_copy: the address in global memory is not aligned",
    "bulk_out_of_bounds": OUTSIDE,
}
# And for a warpgroup's product.
WARPGROUP_PLANTED = {
    "missing_begin": r"wgmma_f16_zero: wgmma_begin\(\) is missing",
    "never_waited": r"returns without having waited for the product",
    "early_read": None,
    "touched_sums": r"wgmma_wait: the accumulators have been written to",
    "other_sums": r"wgmma_f16_zero: other products are under way",
    "early_write": None,
    "missing_barrier": None,
    "unaligned_lines": r"wgmma: lines must begin at a multiple of 1024 bytes",
    "pieces_in_order": None,
    "other_descriptor": r"wgmma_f16_zero: lanes have different descriptors",
    "outside": r"wgmma: the address lies outside of shared memory",
}
SEEDS = pytest.mark.parametrize("seed", [1, 2])


def product(planted, seed):
    """How far the kernel of faults.cpp is off, at odd sizes."""
    a, b = torch.randn(45, 104).half(), torch.randn(104, 40).half()
    sizes = {"rows": 45, "inner": 104, "columns": 40}
    c = driver("faults").run(planted, {"a": a, "b": b}, seed=seed, **sizes)["c"]
    return (c.view(45, 40).double() - a.double() @ b.double()).abs().max()


def ring(planted, seed):
    """How far the other kernel is off."""
    x = torch.randint(-1000, 1000, (40, 64), dtype=torch.int32)
    y = driver("faults").run(planted, {"x": x}, seed=seed)["y"].view(torch.int32)
    return (y.view(40, 64) - (x + x.flip(1))).abs().max()


def bulk(planted, seed):
    """How far copied numbers are off."""
    x = torch.randint(-1000, 1000, (10, 64), dtype=torch.int32)
    y = driver("faults").run(planted, {"x": x}, seed=seed)["y"].view(torch.int32)
    return (y.view(10, 64) - x).abs().max()


def warpgroup(planted, seed):
    """How far that product is off; integers, so that a misplaced one shows and sums are exact."""
    a, b = (torch.randint(-8, 9, (count, 128)).half() for count in (64, 128))
    run = driver("warpgroup_faults").run(planted, {"a": a, "b": b}, seed=seed, inner=128)
    return (run["d"].view(64, 128).double() - a.double() @ b.double().T).abs().max()


def assert_found(run, planted, seed, said):
    if said is None:
        assert not run(planted, seed) < 1  # NaN is found too
    else:
        with pytest.raises(EmulationError, match=said):
            run(planted, seed)


@pytest.mark.parametrize("seed", range(5))
def test_right_kernels_pass(seed):
    assert product("nothing", seed) < 1e-4
    assert ring("ring_nothing", seed) == 0
    assert bulk("bulk_nothing", seed) == 0
    assert warpgroup("nothing", seed) == 0


def test_product_of_lines_across():
    a, b = (torch.randint(-8, 9, (16, count)).half() for count in (64, 128))
    run = driver("warpgroup_faults").run
    out = run("across", {"a": a, "b": b})["d"].view(64, 128)
    assert torch.equal(out.double(), a.double().T @ b.double())
    with pytest.raises(EmulationError, match="lines across must begin at a multiple of 1024"):
        run("across", {"a": a, "b": b}, offset=128)


@SEEDS
@pytest.mark.parametrize("planted", PLANTED)
def test_every_planted_fault_is_found(planted, seed):
    assert_found(product, planted, seed, PLANTED[planted])


@SEEDS
@pytest.mark.parametrize("planted", RING_PLANTED)
def test_every_fault_planted_in_the_ring_is_found(planted, seed):
    assert_found(ring, planted, seed, RING_PLANTED[planted])


@SEEDS
@pytest.mark.parametrize("planted", BULK_PLANTED)
def test_every_fault_planted_in_bulk_copies_is_found(planted, seed):
    assert_found(bulk, planted, seed, BULK_PLANTED[planted])


@SEEDS
@pytest.mark.parametrize("planted", WARPGROUP_PLANTED)
def test_every_fault_planted_in_a_warpgroup_is_found(planted, seed):
    assert_found(warpgroup, planted, seed, WARPGROUP_PLANTED[planted])


def test_every_fault_of_the_drivers_is_tried():
    def names(file):
        return set(re.findall(r'\{"(\w+)", Planted::', (SOURCES / file).read_text()))

    right = {"nothing", "ring_nothing", "bulk_nothing"}
    assert names("faults.cpp") == {*right, *PLANTED, *RING_PLANTED, *BULK_PLANTED}
    assert names("warpgroup_faults.cpp") == {"nothing", *WARPGROUP_PLANTED}


def test_a_fault_ends_its_launch_and_no_other():
    assert product("recovery", 1) < 1e-4


# Instructions ------------------------------------------------------------------------------------

FORMATS = {"fp16": 0, "bf16": 1, "tf32": 2}


def mma(name, a, b, c):
    """``c + a @ b`` by a chain of mma.sync; a and b are floats that the format holds."""
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}
    inputs = {"a": a.to(kinds[name]), "b": b.to(kinds[name]), "c": c}
    run = driver("instructions").run("mma", inputs, inner=a.shape[1], format=FORMATS[name])
    return run["d"].view(16, 8)


@pytest.mark.parametrize("name", FORMATS)
def test_mma_places_every_element(name):
    """Small integers: all sums are exact, whatever the order, and a misplaced one would show."""
    a = torch.randint(-8, 9, (16, 48)).float()
    b = torch.randint(-8, 9, (48, 8)).float()
    for c in (torch.randint(-100, 100, (16, 8)).float(), torch.zeros(16, 8)):
        assert torch.equal(mma(name, a, b, c), c + a @ b)


@pytest.mark.parametrize("name", FORMATS)
def test_mma_sums_as_the_hardware_does(name):
    """Beside 1 a unit is 2^-24, a bit more than fp32 has; what is below is cut off, not rounded."""
    a, b = torch.zeros(16, 16), torch.zeros(16, 8)
    b[:] = 1.0
    c = torch.ones(16, 8)

    def sum_of(*terms):
        a.zero_()
        a[:, : len(terms)] = torch.tensor([term * 2.0**10 for term in terms])
        return mma(name, a, b * 2.0**-10, c)[3, 5].item()

    assert sum_of(2.0**-23) == 1 + 2.0**-23
    assert sum_of(2.0**-24, 2.0**-24) == 1 + 2.0**-23  # fp32, one by one, would lose both
    assert sum_of(2.0**-24) == 1  # the extra bit does not survive the result
    assert sum_of(*[2.0**-25 * 1.5] * 4) == 1  # rounded they would be 4 units
    assert sum_of(-(2.0**-25)) == 1
    assert sum_of(-(2.0**-24)) == 1 - 2.0**-24
    # The largest product sets the unit for all others, even if it cancels in the end.
    assert sum_of(16.0, 2.0**-21, -16.0) == 1


def test_mma_loses_more_than_fp32_in_long_sums():
    a, b = torch.rand(16, 2048).half().float(), torch.rand(2048, 8).half().float()
    exact = a.double() @ b.double()
    c = mma("fp16", a, b, torch.zeros(16, 8)).double()
    rounded = torch.zeros(16, 8)
    for l in range(2048):
        rounded = torch.addcmul(rounded, a[:, l : l + 1], b[l : l + 1])
    assert (c < exact).all()  # always cut off towards zero
    assert relative_error(rounded, exact) < 1e-6  # measured 5.8e-7
    assert 1e-5 < relative_error(c, exact) < 4e-5  # measured 2.2e-5


@pytest.mark.parametrize("name", FORMATS)
def test_mma_of_extreme_numbers(name):
    smallest = {"fp16": 2.0**-24, "bf16": 2.0**-133, "tf32": 2.0**-136}[name]
    one = torch.zeros(16, 16)
    one[range(16), range(16)] = 1.0
    b = torch.zeros(16, 8)
    b[0] = smallest  # subnormal, and kept
    b[1, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    if name == "tf32":
        one, b = one[:, :8], b[:8]
    product = mma(name, one, b, torch.zeros(16, 8))
    assert (product[0, 3:] == smallest).all()
    assert product[1, 0] == math.inf and product[1, 1] == -math.inf and product[1, 2].isnan()
    assert product[0, :3].isnan().all()  # 0 * inf
    assert (product[2:, 3:] == 0).all()
    c = torch.full((16, 8), math.inf)
    c[1] = -math.inf
    product = mma(name, one, b, c)
    assert (product[0, 3:] == math.inf).all()
    assert product[1, 0].isnan() and product[1, 1] == -math.inf


def test_tf32_ignores_the_low_bits():
    a = torch.randn(16, 8)
    b = torch.eye(8)
    cut = (a.view(torch.int32) & ~0x1FFF).view(torch.float32)
    assert torch.equal(mma("tf32", a, b, torch.zeros(16, 8)), cut)


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(trans):
    rows = torch.arange(256, dtype=torch.int16) * 101
    run = driver("instructions").run("ldmatrix", {"rows": rows}, trans=trans)
    fragments = run["fragments"].view(torch.int16).view(32, 4, 2)
    for matrix in range(4):
        m = rows.view(4, 8, 8)[matrix]
        m = m.T if trans else m
        for lane in range(32):
            pair = m[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
            assert fragments[lane, matrix].tolist() == pair.tolist()


def test_shared_words():
    words = torch.arange(128, dtype=torch.int32).view(32, 4) + 1000
    out = driver("instructions").run("shared_load", {"words": words})
    words[:, 3] = 0  # of no bytes
    assert torch.equal(out["out"].view(torch.int32).view(32, 4), words)
    assert torch.equal(out["halves"].view(torch.int32).view(32, 2), words[:, 2:])


def test_transpose_8x8():
    """Row after row, two to a lane, is the order that fragments have."""
    matrix = torch.arange(64, dtype=torch.int16).view(8, 8) * 101
    run = driver("instructions").run("transpose", {"rows": matrix})
    assert torch.equal(run["columns"].view(torch.int16).view(8, 8), matrix.T)


def hard_numbers():
    """Random bit patterns; ties, neighbours of ties, subnormals, both ends of every range."""
    bits = torch.randint(-(2**31), 2**31, (200_000,)).to(torch.int32)
    half = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    exact = torch.cat([half.view(torch.float16).float(), half.view(torch.bfloat16).float()])
    ties = exact.view(torch.int32).repeat(4)
    for i, offset in enumerate((0x1000, 0x1001, 0x8000, 0x7FFF)):
        ties[i * len(exact) : (i + 1) * len(exact)] += offset
    smallest = torch.arange(-4000, 4000) * 2.0**-30
    return torch.cat([bits.view(torch.float32), ties.view(torch.float32), exact, smallest])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_rounding_to_16_bits(dtype):
    x = hard_numbers()
    run = driver("instructions").run("pack", {"x": x}, bf16=dtype == torch.bfloat16)
    ours, theirs = run["packed"].view(dtype), x.to(dtype)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert (ours.view(torch.int16)[ours.isnan()] == 0x7FFF).all()
    assert torch.equal(
        ours[~ours.isnan()].view(torch.int16), theirs[~ours.isnan()].view(torch.int16)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_every_16_bit_number(dtype):
    packed = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    run = driver("instructions").run("unpack", {"packed": packed}, bf16=dtype == torch.bfloat16)
    exact = packed.view(dtype).float()
    assert torch.equal(run["x"].isnan(), exact.isnan())
    real = ~exact.isnan()
    assert torch.equal(run["x"][real].view(torch.int32), exact[real].view(torch.int32))
    again = driver("instructions").run("pack", {"x": run["x"]}, bf16=dtype == torch.bfloat16)
    assert torch.equal(again["packed"].view(torch.int16)[real], packed[real])


def test_max_nan():
    values = torch.tensor([0.0, -0.0, 1.0, -2.0, math.inf, -math.inf, math.nan])
    x, y = values.repeat_interleave(len(values)), values.repeat(len(values))
    larger = driver("instructions").run("max_nan", {"x": x, "y": y})["larger"]
    torch.testing.assert_close(larger, torch.maximum(x, y), rtol=0, atol=0, equal_nan=True)
    assert larger[1].signbit() == larger[7].signbit() == torch.tensor(False)  # max(+0, -0)


def test_approximations_flush_subnormal_numbers():
    inf = math.inf
    x = torch.tensor(
        [2.0**127, -(2.0**127), 2.0**126, 1e-40, -1e-40, 0.0, -inf, 3.0, -126.0, -127.0]
    )
    got = driver("instructions").run("approx", {"x": x})
    reciprocal = [0.0, -0.0, 2.0**-126, inf, -inf, inf, -0.0, 1 / 3, -1 / 126, -1 / 127]
    power = [inf, 0.0, inf, 1.0, 1.0, 1.0, 0.0, 8.0, 2.0**-126, 0.0]
    for name, exact in (("reciprocal", reciprocal), ("power", power)):
        exact = torch.tensor(exact)
        torch.testing.assert_close(got[name], exact, rtol=3e-7, atol=0)
        assert torch.equal(got[name].signbit(), exact.signbit())


def test_copies_fill_up_with_zeros():
    source = torch.randint(1, 256, (17, 16), dtype=torch.uint8)
    copied = driver("instructions").run("copy", {"from": source})
    large = copied["large"].view(torch.uint8).view(17, 16)
    small = copied["small"].view(torch.uint8).view(17, 4)
    for i in range(17):
        assert large[i].tolist() == [*source[i, :i].tolist(), *[0] * (16 - i)]
        count = i % 5
        assert small[i].tolist() == [*source[i, :count].tolist(), *[0] * (4 - count)]


@pytest.mark.parametrize("seed", range(3))
def test_warp_instructions(seed):
    x = torch.randint(-1000, 1000, (32,), dtype=torch.int32)
    run = driver("instructions").run("warp", {"x": x}, seed=seed)
    lane = torch.arange(32)

    def from_lane(source, inside=True):
        return x[torch.where(torch.as_tensor(inside), source, lane) % 32]

    positive = sum(1 << i for i in range(32) if x[i] > 0)
    expected = [
        x[5].expand(32),
        from_lane(lane // 8 * 8 + (lane + 3) % 8),
        from_lane(lane - 3, lane >= 3),
        from_lane(lane - 3, lane % 16 >= 3),
        from_lane(lane + 5, lane + 5 < 32),
        from_lane(lane + 5, lane % 8 + 5 < 8),
        from_lane(lane ^ 9),
        from_lane(lane ^ 1),
        from_lane(lane ^ 2),
        torch.tensor(positive - 2**32 if positive >= 2**31 else positive).expand(32),
        torch.ones(32),
        (x == x[7]).all().expand(32),
        x.sum().expand(32),
        x.max().expand(32),
        torch.where(lane < 16, x[lane ^ 1], x[lane ^ 2]),
    ]
    ours = run["results"].view(torch.int32).view(len(expected), 32)
    assert torch.equal(ours, torch.stack([row.to(torch.int32) for row in expected]))


def test_block_instructions():
    run = driver("instructions").run("block")
    assert run["results"].view(torch.int32).view(3, 4).tolist() == [[34, 1, 0, 4950]] * 3
    assert run["total"].item() == 150


# tensor_matmul -----------------------------------------------------------------------------------


def matmul(kernel, a, b, **settings):
    """Run a kernel of tensor_matmul on views as they are; ``a`` has any number of axes."""
    axes = list(zip(a.shape, a.stride(), strict=True))[:-1]
    settings["a_axes"] = len(axes)
    for i, (size, stride) in enumerate(axes):
        settings[f"a_size{i}"] = size
        settings[f"a_stride{i}"] = stride
    settings |= {"a_offset": a.storage_offset(), "b_offset": b.storage_offset()}
    settings |= {"inner": b.shape[0], "columns": b.shape[1], "a_inner_stride": a.stride(-1)}
    settings |= {"b_inner_stride": b.stride(0), "b_column_stride": b.stride(1)}
    c = driver("tensor_matmul").run(kernel, {"a": span(a), "b": span(b)}, **settings)["c"]
    return c.view(*a.shape[:-1], b.shape[1])


def assert_matmul(kernel, a, b, **settings):
    ours = matmul(kernel, a, b, **settings)
    eager = reference.TensorMatmul()
    exact = eager(a.double(), b.double())
    allowed = 1.5 * relative_error(eager(a, b), exact) + 2e-7
    error = relative_error(ours, exact)
    assert error <= allowed, f"error {error:.3g} against float64, allowed {allowed:.3g}"


TILES = pytest.mark.parametrize("tile", [0, 1], ids=["large", "small"])
SIZES = [(1, 1, 1), (2, 17, 3), (17, 1, 33), (33, 77, 2), (77, 16, 129), (129, 33, 64)]
SIZES += [(128, 32, 128), (130, 260, 65), (257, 31, 36)]


@TILES
@pytest.mark.parametrize("rows, inner, columns", SIZES)
def test_matmul_of_odd_sizes(tile, rows, inner, columns):
    assert_matmul("forward", torch.randn(rows, inner), torch.randn(inner, columns), tile=tile)


LAYOUTS = {
    "transposed": (lambda: torch.randn(36, 77).T, lambda: torch.randn(33, 36).T),
    "transposed, aligned": (lambda: torch.randn(20, 80).T, lambda: torch.randn(36, 20).T),
    "every other": (lambda: torch.randn(70, 40)[1::2, ::2], lambda: torch.randn(40, 66)[::2, 1::2]),
    "off by one": (
        lambda: torch.randn(1 + 40 * 24)[1:].view(40, 24),
        lambda: torch.randn(25, 36)[1:],
    ),
    "rows apart": (lambda: torch.randn(40, 44)[:, 4:24], lambda: torch.randn(20, 68)[:, 4:40]),
    "three axes": (lambda: torch.randn(4, 6, 5, 24)[:, 1::2, :, 4:], lambda: torch.randn(20, 36)),
    "permuted": (lambda: torch.randn(5, 24, 9).permute(2, 0, 1), lambda: torch.randn(24, 8)),
    "expanded": (
        lambda: torch.randn(1, 7, 24).expand(6, 7, 24),
        lambda: torch.randn(24, 1).expand(24, 40),
    ),
    "one number": (
        lambda: torch.randn(1, 1).expand(40, 24),
        lambda: torch.randn(1, 1).expand(24, 40),
    ),
}


@TILES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matmul_of_views(tile, layout):
    a, b = (make() for make in LAYOUTS[layout])
    assert_matmul("forward", a, b, tile=tile)


@TILES
def test_matmul_of_nothing(tile):
    c = matmul("forward", torch.empty(40, 0), torch.empty(0, 9), tile=tile)
    assert torch.equal(c, torch.zeros(40, 9))
    assert matmul("forward", torch.empty(0, 5), torch.randn(5, 9), tile=tile).shape == (0, 9)


@TILES
def test_matmul_with_special_numbers(tile):
    a, b = torch.randn(40, 20), torch.randn(20, 36)
    a[3, 5], b[7, 9], a[11, 2] = math.inf, math.nan, -math.inf
    c = matmul("forward", a, b, tile=tile)
    torch.testing.assert_close(c, a @ b, rtol=1e-5, atol=1e-5, equal_nan=True)


# Products on split operands ----------------------------------------------------------------------

SPLIT_TILES = pytest.mark.parametrize(
    "tile", range(4), ids=["large", "small", "hopper wide", "hopper narrow"]
)
SPLIT_SIZES = [(1, 1, 1), (2, 17, 3), (33, 77, 2), (77, 16, 129), (129, 33, 64)]
SPLIT_SIZES += [(257, 31, 36), (130, 100, 261), (700, 64, 130)]  # the last: many tiles a block


@SPLIT_TILES
@pytest.mark.parametrize("rows, inner, columns", SPLIT_SIZES)
def test_split_product_of_odd_sizes(tile, rows, inner, columns):
    assert_matmul("split", torch.randn(rows, inner), torch.randn(inner, columns), tile=tile)


@SPLIT_TILES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_product_of_views(tile, layout):
    a, b = (make() for make in LAYOUTS[layout])
    assert_matmul("split", a, b, tile=tile)


def decades(count, span):
    """Powers of ten over ``span`` decades, in no order."""
    return 10.0 ** torch.linspace(-span / 2, span / 2, count)[torch.randperm(count)]


HARD = {
    "rows over ten decades": lambda: (
        torch.randn(70, 96) * decades(70, 10)[:, None],
        torch.randn(96, 40),
    ),
    "inner axis over ten decades": lambda: (
        torch.randn(70, 96) * (scale := decades(96, 10)),
        torch.randn(96, 40) / scale[:, None],
    ),
    "columns over ten decades": lambda: (
        torch.randn(70, 96),
        torch.randn(96, 40) * decades(40, 10),
    ),
    "same sign": lambda: (torch.rand(70, 256), torch.rand(256, 40)),
    "subnormal": lambda: (torch.randn(70, 40) * 1e-39, torch.randn(40, 40) * 1e20),
    "near the largest": lambda: (torch.randn(70, 40) * 1e30, torch.randn(40, 40) * 1e6),
    "an outlier in each row of b": lambda: (
        torch.randn(70, 96),
        torch.randn(96, 40).index_put(
            (torch.arange(96), torch.randint(40, (96,))), decades(96, 30)
        ),
    ),
    "zeros in between": lambda: (
        torch.randn(70, 96).where(torch.rand(70, 96) < 0.3, torch.zeros(())),
        torch.randn(96, 40).where(torch.rand(96, 1) < 0.5, torch.zeros(())),
    ),
}


@pytest.mark.parametrize("data", HARD)
def test_split_product_of_hard_data(data):
    a, b = HARD[data]()
    exact = a.double() @ b.double()
    # Sums of products are as large as their terms where nothing cancels; what cancels is allowed to
    # the terms' own precision.
    terms = a.double().abs() @ b.double().abs()
    error = (matmul("split", a, b, tile=1) - exact).abs() / terms.clamp_min(1e-300)
    assert error.max() <= 8e-7  # of one result; the accumulators truncate


@SPLIT_TILES
def test_split_product_keeps_zeros(tile):
    a, b = torch.randn(40, 40), torch.randn(40, 36)
    a[7], b[:, 5] = 0.0, 0.0
    c = matmul("split", a, b, tile=tile)
    assert (c[7] == 0).all() and (c[:, 5] == 0).all() and (c != 0).sum() == 39 * 35


@SPLIT_TILES
def test_split_product_with_special_numbers(tile):
    a, b = torch.randn(140, 50), torch.randn(50, 70)
    a[3, 5], b[7, 9], a[131, 2], a[40, 49] = math.inf, math.nan, -math.inf, 3e38
    b[49, 60] = 1e30
    c = matmul("split", a, b, tile=tile)
    torch.testing.assert_close(c, a @ b, rtol=1e-5, atol=1e-5, equal_nan=True)


def reduce(a, g, tile, slabs, **settings):
    settings |= {"rows": len(a), "lines": a.shape[1], "columns": g.shape[1]}
    settings |= {"a_stride": a.stride(0), "g_stride": g.stride(0)}
    settings |= {"a_line_stride": a.stride(1), "g_column_stride": g.stride(1)}
    tensors = {"a": span(a), "g": span(g)}
    settings |= {"a_offset": a.storage_offset(), "g_offset": g.storage_offset()}
    c = driver("tensor_matmul").run("reduce", tensors, tile=tile, slabs=slabs, **settings)["c"]
    return c.view(a.shape[1], g.shape[1])


REDUCES = pytest.mark.parametrize("tile", range(3), ids=["sm80", "hopper wide", "hopper narrow"])
REDUCE_SIZES = [(1, 1, 1), (2, 17, 3), (33, 2, 77), (257, 129, 36), (100, 132, 261), (300, 64, 8)]


def assert_reduce(a, g, tile, slabs, **settings):
    ours = reduce(a, g, tile, slabs, **settings)
    exact = a.double().T @ g.double()
    terms = a.double().abs().T @ g.double().abs()
    assert ((ours - exact).abs() / terms.clamp_min(1e-300)).max() <= 8e-7


@REDUCES
@pytest.mark.parametrize("slabs", [1, 3])
@pytest.mark.parametrize("rows, lines, columns", REDUCE_SIZES)
def test_sum_over_rows(tile, slabs, rows, lines, columns):
    slabs = min(slabs, -(-rows // 32))
    assert_reduce(torch.randn(rows, lines), torch.randn(rows, columns), tile, slabs)


def test_rings_as_a_race_checker_sees_them(monkeypatch):
    monkeypatch.setenv("FUSED_OPS_RACECHECK", "1")
    assert_matmul("split", torch.randn(130, 100), torch.randn(100, 261), tile=2)
    assert_reduce(torch.randn(300, 64), torch.randn(300, 8), 1, 3)


@REDUCES
def test_sum_over_rows_of_views(tile):
    assert_reduce(torch.randn(77, 40)[:, 4:24], torch.randn(77, 40)[:, 1:], tile, 2)
    assert_reduce(torch.randn(24, 70).T, torch.randn(70, 9), tile, 1)
    assert_reduce(torch.randn(70, 9), torch.randn(1, 1).expand(70, 24), tile, 1)
    assert_reduce(torch.randn(66, 128), torch.randn(66, 256), tile, 2, axes=2)


@REDUCES
def test_sum_over_rows_whose_scales_are_inverse(tile):
    scale = decades(200, 10)[:, None]
    assert_reduce(torch.randn(200, 40) * scale, torch.randn(200, 24) / scale, tile, 2)


@REDUCES
def test_sum_over_rows_whose_columns_span_decades(tile):
    a, g = torch.randn(200, 40) * decades(40, 20), torch.randn(200, 24) * decades(24, 20)
    a[70:100] = 0.0
    assert_reduce(a, g, tile, 2)


@REDUCES
def test_sum_over_rows_with_outliers(tile):
    a, g = torch.randn(200, 40), torch.randn(200, 24)
    a[torch.arange(200), torch.randint(40, (200,))] *= decades(200, 12)
    g[torch.arange(200), torch.randint(24, (200,))] *= decades(200, 6)
    assert_reduce(a, g, tile, 2)


@REDUCES
def test_sum_over_rows_with_special_numbers(tile):
    a, g = torch.randn(200, 70), torch.randn(200, 40)
    a[5, 3], g[7, 9], a[50, 60], a[131, 69] = math.inf, math.nan, math.nan, -math.inf
    c = reduce(a, g, tile, 2)
    torch.testing.assert_close(c, a.T @ g, rtol=1e-5, atol=1e-4, equal_nan=True)
