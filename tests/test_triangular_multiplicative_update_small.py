# SPDX-License-Identifier: Apache-2.0
"""The two launches for small triangular updates, run on the CPU, against float64."""

import copy
import itertools

import pytest
import torch
from emulation.build import EmulationError, driver, span
from helpers import ROUNDING, randomize

from fused_ops import reference
from fused_ops.testing import relative_error

TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}
MASKS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def made(channels, hidden, direction="outgoing", dtype=F32, biases=True):
    module = randomize(reference.TriangularMultiplicativeUpdate(channels, hidden, direction))
    if not biases:
        for name in ("proj_a", "gate_a", "proj_b", "gate_b", "out_proj", "out_gate"):
            getattr(module, name).bias = None
    return module.to(dtype).requires_grad_(False)


def expected(module, pair, mask, gate_normalized=False):
    """The op by its definition, in the module's dtype."""
    if not gate_normalized:
        return module(pair, mask)
    gate = torch.sigmoid(module.out_gate(module.layer_norm_in(pair)))
    ungated = copy.deepcopy(module)
    ungated.out_gate.weight.zero_()
    ungated.out_gate.bias = torch.nn.Parameter(torch.full_like(ungated.out_proj.bias, 1e4))
    return gate * ungated(pair, mask)


def run(module, pair, mask=None, output=None, gate_normalized=False, seed=1, offset=0):
    """What the kernels make of it; parameters lie ``offset`` elements behind aligned addresses."""
    output = output or pair.dtype
    batch, n, _, channels = pair.shape
    inputs = {"pair": span(pair)}
    settings = {
        "batch": batch,
        "n": n,
        "channels": channels,
        "hidden": module.proj_a.weight.shape[0],
        "outgoing": module.direction == "outgoing",
        "gate_normalized": gate_normalized,
        "output_type": TYPES[output],
        "pair_type": TYPES[pair.dtype],
        "pair_offset": pair.storage_offset(),
    }
    assert pair.stride(3) == 1 or channels == 1
    for axis in range(3):
        settings[f"pair_stride{axis}"] = pair.stride(axis)
    if mask is not None:
        inputs["mask"] = span(mask)
        kind = torch.uint8 if mask.dtype == torch.bool else mask.dtype
        settings["mask_kind"] = MASKS.index(kind)
        settings["mask_offset_bytes"] = mask.storage_offset() * mask.element_size()
        for axis in range(3):
            settings[f"mask_stride{axis}"] = mask.stride(axis)
    for name, parameter in module.named_parameters():
        name = name.replace(".", "_")
        inputs[name] = torch.cat([parameter.new_full((offset,), torch.nan), parameter.flatten()])
        settings[f"{name}_type"] = TYPES[parameter.dtype]
        settings[f"{name}_offset"] = offset
    tool = driver("triangular_multiplicative_update_small")
    out = tool.run("forward", inputs, seed=seed, **settings)["out"]
    if output != F32:
        out = out.view(output)[-pair.numel() :]
    return out.view(pair.shape)


def check(module, pair, mask=None, output=None, gate_normalized=False, **how):
    """Within 1.5 times the error that PyTorch makes in fp32, and one rounding of the result."""
    out = run(module, pair, mask, output, gate_normalized, **how)
    exact = expected(copy.deepcopy(module).double(), pair.double(), mask, gate_normalized)
    single = expected(copy.deepcopy(module).float(), pair.float(), mask, gate_normalized)
    allowed = 1.5 * relative_error(single, exact) + 2e-7
    if out.dtype != F32:
        allowed += ROUNDING[out.dtype]
    error = relative_error(out, exact)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def holes(*shape):
    return (torch.rand(shape) < 0.8).float()


SHAPES = [(64, 32), (8, 5), (1, 1), (127, 31), (33, 128)]
SIZES = [(3, 1), (2, 2), (3, 3), (2, 17), (1, 33)]


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("batch, n", SIZES)
@pytest.mark.parametrize("channels, hidden", SHAPES)
def test_sizes(channels, hidden, batch, n, direction):
    pair = torch.randn(batch, n, n, channels) + 0.5
    check(made(channels, hidden, direction), pair, holes(batch, n, n))


def test_wide():
    check(made(128, 128, "incoming"), torch.randn(1, 9, 9, 128), holes(1, 9, 9))


@pytest.mark.parametrize("channels, hidden", [(64, 32), (20, 36), (7, 9)])
@pytest.mark.parametrize(
    "pair, parameters, output",
    [t for t in itertools.product([F32, F16, BF16], repeat=3) if t[0] == t[2] or t[1] == F32][1:],
)
def test_types(pair, parameters, output, channels, hidden):
    module = made(channels, hidden, dtype=parameters)
    check(module, torch.randn(1, 5, 5, channels).to(pair), holes(1, 5, 5), output)


def test_parameters_of_mixed_types():
    module = made(16, 8)
    for number, parameter in enumerate(module.parameters()):
        parameter.data = parameter.data.to([F16, BF16, F32][number % 3])
    single = copy.deepcopy(module).float()  # the same, rounded, in one type
    pair, mask = torch.randn(2, 5, 5, 16), holes(2, 5, 5)
    assert torch.equal(run(module, pair, mask), run(single, pair, mask))


@pytest.mark.parametrize("dtype", [*MASKS, torch.bool], ids=str)
def test_masks(dtype):
    mask = holes(2, 6, 6)
    if dtype.is_floating_point:
        mask = mask * torch.rand(2, 6, 6) * 2 - 0.25
    elif dtype not in {torch.bool, torch.uint8}:
        mask = mask * 7 - 3
    check(made(8, 12), torch.randn(2, 6, 6, 8), mask.to(dtype))


def test_shared_and_strided_masks():
    module, pair = made(8, 12, "incoming"), torch.randn(2, 6, 6, 8)
    check(module, pair, holes(1, 6, 6).expand(2, 6, 6))
    check(module, pair, holes(6, 2, 8).permute(1, 2, 0)[:, 1:7])
    check(module, pair)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_views(direction, dtype):
    module = made(16, 8, direction)
    check(module, torch.randn(2, 7, 7, 16).to(dtype).transpose(1, 2))
    check(module, torch.randn(3, 9, 10, 20).to(dtype)[1:, 1:-1, 2:-1, 3:-1])  # not aligned
    check(module, torch.randn(3, 9, 10, 24).to(dtype)[1:, 1:-1, 2:-1, 4:-4])  # aligned
    check(module, torch.randn(1, 7, 7, 16).to(dtype).expand(2, 7, 7, 16))


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_parameters_that_are_not_aligned(dtype):
    check(made(16, 8, dtype=dtype), torch.randn(1, 5, 5, 16), offset=1)


@pytest.mark.parametrize("channels, hidden", [(64, 32), (7, 70)])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("gate_normalized", [True, False])
def test_biases_and_gates(channels, hidden, biases, gate_normalized):
    module = made(channels, hidden, "incoming", biases=biases)
    if gate_normalized and not biases:  # what expected() needs
        module.out_proj.bias = torch.nn.Parameter(torch.zeros(channels), requires_grad=False)
    pair = torch.randn(2, 5, 5, channels) * 3
    check(module, pair, holes(2, 5, 5), gate_normalized=gate_normalized)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_special_numbers_show_where_they_do_in_pytorch(direction, value):
    module, pair = made(16, 8, direction), torch.randn(2, 9, 9, 16)
    pair[1, 2, 5, 3] = value
    mask = torch.ones(2, 9, 9)
    mask[1, 2, 5] = 0  # times zero it is NaN still
    right, out = module(pair, mask), run(module, pair, mask)
    assert torch.equal(out.isnan(), right.isnan())
    assert out[0].isfinite().all()
    assert 0 < out[1].isnan().sum() < out[1].numel()


def test_saturated_gates():
    module, pair = made(16, 8), torch.randn(1, 5, 5, 16)
    module.out_gate.bias.copy_(torch.linspace(-150, 150, 16))
    module.gate_a.bias.copy_(torch.linspace(-110, 110, 8))
    check(module, pair)
    assert run(module, pair).isfinite().all()


def test_large_numbers_and_equal_ones():
    module = made(16, 8)
    check(module, torch.randn(1, 5, 5, 16) * 1e12)
    pair = torch.randn(1, 5, 5, 1).expand(1, 5, 5, 16).contiguous() * 1e4
    check(module, pair)  # the LayerNorm gives zeros


def test_nothing_depends_on_the_schedule():
    module, pair = made(16, 40), torch.randn(1, 6, 6, 16)
    assert torch.equal(run(module, pair, seed=1), run(module, pair, seed=2))


def test_which_problems_fit():
    def fits(batch, n, channels, hidden):
        sizes = {"batch": batch, "n": n, "channels": channels, "hidden": hidden}
        return bool(driver("triangular_multiplicative_update_small").run("fits", **sizes)["fits"])

    assert fits(2, 32, 64, 32)
    assert fits(8, 32, 64, 32)
    assert fits(1, 24, 128, 128)
    assert not fits(1, 4, 129, 32)
    assert not fits(1, 4, 64, 129)
    assert not fits(1, 256, 128, 128)
    assert not fits(2**40, 2**20, 1, 1)
    with pytest.raises(EmulationError, match="small_forward must get a small problem"):
        run(made(1, 130), torch.randn(1, 1, 1, 1))
