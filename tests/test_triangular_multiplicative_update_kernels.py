# SPDX-License-Identifier: Apache-2.0
"""Triangular multiplicative update in every arithmetic and shape class that kernels tell apart.

The bodies are the same on both devices; the CPU takes smaller sizes, and no TF32.
"""

import contextlib
from typing import NamedTuple

import pytest
import torch
from helpers import ROUNDING, as_double, assert_parity, evaluate, in_double, randomize, strided
from torch import Tensor

import fused_ops
from fused_ops import reference
from fused_ops.testing import peak_memory, relative_error


class Mode(NamedTuple):
    """Arithmetic under test: of the tensors, of fp32 products, and the dtype that rounds alike."""

    dtype: torch.dtype
    precision: str
    rounds: torch.dtype


MODES = {
    "fp32": Mode(torch.float32, "ieee", torch.float32),
    "tf32": Mode(torch.float32, "tf32", torch.float16),  # eleven bits, as fp16 has
    "bf16": Mode(torch.bfloat16, "ieee", torch.bfloat16),
    "fp16": Mode(torch.float16, "ieee", torch.float16),
}
PLACES = [("cpu", mode) for mode in MODES if mode != "tf32"]
PLACES += [pytest.param("cuda", mode, marks=pytest.mark.gpu) for mode in MODES]
everywhere = pytest.mark.parametrize(("place", "mode"), PLACES)
CHANNELS = [(64, 32), (128, 128), (127, 31), (16, 256), (384, 128), (8, 5)]
SIZES = [("cpu", mode, n) for mode in MODES if mode != "tf32" for n in (0, 1, 17)]
SIZES += [
    pytest.param("cuda", mode, n, marks=pytest.mark.gpu)
    for mode in MODES
    for n in (0, 1, 2, 17, 33, 77, 257)
]


@contextlib.contextmanager
def arithmetic(mode: str):
    """The reference too multiplies as ``mode`` says."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = MODES[mode].precision
    try:
        yield
    finally:
        setting.fp32_precision = before


class Subject(NamedTuple):
    """A fused module, the reference around the same parameters, and inputs."""

    fused: torch.nn.Module
    eager: torch.nn.Module
    pair: Tensor
    mask: Tensor
    cotangent: Tensor


def subject(place, mode, n, channels, hidden, *, batch=1, outgoing=True) -> Subject:
    dtype = MODES[mode].dtype
    direction = "outgoing" if outgoing else "incoming"
    eager = randomize(reference.TriangularMultiplicativeUpdate(channels, hidden, direction))
    eager = eager.to(place, dtype)
    fused = fused_ops.TriangularMultiplicativeUpdate.from_reference(
        eager, precision=MODES[mode].precision
    )
    pair = torch.randn(batch, n, n, channels, device=place).to(dtype).requires_grad_()
    mask = torch.rand(batch, n, n, device=place) * (torch.rand(batch, n, n, device=place) > 0.3)
    cotangent = torch.randn(batch, n, n, channels, device=place).to(dtype)
    return Subject(fused, eager, pair, mask.to(dtype), cotangent)


def middling(place, mode) -> tuple[int, int, int]:
    """n, channels and hidden of the tests that are not about sizes.

    187 is odd, and enough for the kernels of 16-bit problems that fill a GPU.
    """
    if place == "cpu":
        return 19, 24, 20
    return 187 if MODES[mode].dtype.itemsize == 2 else 77, 128, 128


def assert_close(ours, theirs, mode, factor=4):
    """The same numbers, (value, gradients) as ``evaluate`` returns them, from another way."""
    tolerance = factor * max(ROUNDING[MODES[mode].rounds], 5e-7)
    assert relative_error(ours[0], theirs[0]) <= tolerance
    largest = max((g.double().norm().item() for g in theirs[1].values()), default=0.0)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        off = (ours[1][name].double() - gradient.double()).norm().item()
        allowed = tolerance * max(gradient.double().norm().item(), 1e-2 * largest)
        assert off <= allowed, f"gradient of {name}: off by {off:.3g}, allowed {allowed:.3g}"


# Sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "hidden"), CHANNELS)
@pytest.mark.parametrize(("place", "mode", "n"), SIZES)
def test_matches_reference_at_all_sizes(place, mode, n, channels, hidden):
    s = subject(place, mode, n, channels, hidden, outgoing=(n + channels) % 2 == 0)
    with arithmetic(mode):
        assert_parity(s.fused, s.eager, [s.pair, s.mask], MODES[mode].rounds)


@everywhere
@pytest.mark.parametrize("outgoing", [True, False])
def test_several_in_a_batch_without_a_mask(place, mode, outgoing):
    n, channels, hidden = middling(place, mode)
    s = subject(place, mode, n, channels, hidden, batch=3, outgoing=outgoing)
    with arithmetic(mode):
        assert_parity(s.fused, s.eager, [s.pair, None], MODES[mode].rounds)


class Update(torch.nn.Module):
    """The function, with the gate's input as an option, over a module's parameters."""

    def __init__(self, inner, gate_normalized):
        super().__init__()
        self.inner = inner
        self.gate_normalized = gate_normalized

    def forward(self, pair, mask):
        p = self.inner
        linears = [p.proj_a, p.gate_a, p.proj_b, p.gate_b, p.out_proj, p.out_gate]
        tensors = [t for linear in linears for t in (linear.weight, linear.bias)]
        return fused_ops.functional.triangular_multiplicative_update(
            pair,
            mask,
            p.layer_norm_in.weight,
            p.layer_norm_in.bias,
            *tensors[:8],
            p.layer_norm_out.weight,
            p.layer_norm_out.bias,
            *tensors[8:],
            direction=p.direction,
            gate_normalized=self.gate_normalized,
        )


@pytest.mark.parametrize("channels", [128, 52])  # rows of pairs begin at 16 bytes, or do not
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate_normalized", [False, True])
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pairs_and_gates_of_every_kind(place, gate_normalized, stored, channels):
    """In bf16, as autocast asks for it, with the pair representation stored as it comes."""
    n, hidden = (190, 96) if place == "cuda" else (11, 12)
    s = subject(place, "fp32", n, channels, hidden, outgoing=gate_normalized)
    update = Update(s.fused, gate_normalized)
    pair = s.pair.detach().to(stored).requires_grad_()
    with torch.autocast(place, dtype=torch.bfloat16):
        ours = evaluate(update, [pair, s.mask], s.cotangent)
    assert ours[0].dtype == torch.bfloat16
    exact = evaluate(in_double(update), [as_double(pair), s.mask.double()], s.cotangent.double())
    # Where a CPU has matrix units for bf16, results of products are rounded that elsewhere are not.
    assert_close(ours, exact, "bf16", factor=6 if place == "cpu" else 4)


# What the result must not depend on --------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("outgoing", [True, False])
def test_neither_batch_nor_padding_changes_the_result(place, mode, outgoing):
    n, channels, hidden = middling(place, mode)
    s = subject(place, mode, n, channels, hidden, batch=3, outgoing=outgoing)
    s.fused.requires_grad_(False)  # their gradients are sums over the batch
    whole = evaluate(s.fused, [s.pair, s.mask], s.cotangent)
    one = slice(1, 2)
    first = s.pair.detach()[one].requires_grad_()
    alone = evaluate(s.fused, [first, s.mask[one]], s.cotangent[one])
    part = (whole[0][one], {"input 0": whole[1]["input 0"][one]})
    assert_close(part, alone, mode)

    inside = (slice(None), slice(0, n), slice(0, n))
    shape = (1, n + 7, n + 7, channels)
    garbage = torch.randn(shape, device=place).sign().mul(1e4).to(first.dtype)
    garbage[inside] = first.detach()
    mask, cotangent = s.mask.new_zeros(shape[:-1]), torch.zeros_like(garbage)
    mask[inside], cotangent[inside] = s.mask[one], s.cotangent[one]
    value, grads = evaluate(s.fused, [garbage.requires_grad_(), mask], cotangent)
    assert torch.isfinite(grads["input 0"]).all()
    assert_close((value[inside], {"input 0": grads["input 0"][inside]}), alone, mode)


@everywhere
def test_strides_change_nothing(place, mode):
    n, channels, hidden = middling(place, mode)
    s = subject(place, mode, n, channels, hidden, batch=2)
    plain = evaluate(s.fused, [s.pair, s.mask], s.cotangent)
    turned = s.pair.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    for pair, mask, cotangent in (
        (strided(s.pair.detach()).requires_grad_(), strided(s.mask), strided(s.cotangent)),
        (turned, s.mask.mT.contiguous().mT, s.cotangent.mT.contiguous().mT),
    ):
        assert_close(evaluate(s.fused, [pair, mask], cotangent), plain, mode, factor=2)


@everywhere
def test_expanded_tensors_equal_their_copies(place, mode):
    n, channels, hidden = middling(place, mode)
    s = subject(place, mode, n, channels, hidden)
    pair = s.pair.detach().expand(3, n, n, channels).requires_grad_()
    mask = s.mask[:, :1].expand(3, n, n)
    cotangent = s.cotangent[..., :1].expand(3, n, n, channels)
    copied = evaluate(
        s.fused,
        [pair.detach().contiguous().requires_grad_(), mask.contiguous()],
        cotangent.contiguous(),
    )
    assert_close(evaluate(s.fused, [pair, mask], cotangent), copied, mode, factor=2)
    shared = evaluate(s.fused, [pair, mask[:1]], cotangent)
    assert_close(shared, copied, mode, factor=2)


def poison(place: str) -> None:
    """Leave NaN in the memory that the next allocations get."""
    if place == "cuda":
        torch.cuda.empty_cache()
    sizes = [2**k for k in range(4, 18) for _ in range(16)] + [2**20] * 8
    if place == "cuda":
        sizes += [2**26] * 2
    filled = [torch.full((size,), float("nan"), device=place) for size in sizes]
    del filled


@everywhere
@pytest.mark.parametrize(
    ("n", "channels", "hidden"), [(1, 8, 5), (17, 24, 20), (32, 64, 32), (33, 128, 128)]
)
def test_poisoned_memory_is_not_read(place, mode, n, channels, hidden):
    s = subject(place, mode, n, channels, hidden, batch=2, outgoing=n % 2 == 0)
    value, grads = evaluate(s.fused, [s.pair, s.mask], s.cotangent)
    assert torch.isfinite(value).all()
    for _ in range(2):
        poison(place)
        again, more = evaluate(s.fused, [s.pair, s.mask], s.cotangent)
        assert torch.equal(again, value)
        for name, gradient in grads.items():
            assert torch.isfinite(gradient).all(), name
            assert torch.equal(more[name], gradient), name


@everywhere
@pytest.mark.parametrize("outgoing", [True, False])
def test_results_and_gradients_repeat_bitwise(place, mode, outgoing):
    n, channels, hidden = (257, 128, 128) if place == "cuda" else (33, 24, 20)
    s = subject(place, mode, n, channels, hidden, outgoing=outgoing)
    value, first = evaluate(s.fused, [s.pair, s.mask], s.cotangent)
    for _ in range(5):
        again, grads = evaluate(s.fused, [s.pair, s.mask], s.cotangent)
        assert torch.equal(again, value)
        for name, gradient in first.items():
            assert torch.equal(grads[name], gradient), name


@everywhere
@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_infinity_and_nan_arrive_where_the_reference_has_them(place, mode, scale):
    n, channels, hidden = middling(place, mode)
    s = subject(place, mode, n, channels, hidden, batch=2)
    pair = s.pair.detach().clone()
    pair[0, 2, 3, 1] = scale
    with torch.no_grad(), arithmetic(mode):
        ours, theirs = s.fused(pair, None), s.eager(pair, None)
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert ours[1].isfinite().all() and not ours[0, 2, 3].isfinite().all()


# Which gradients ---------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize(
    "wanted",
    [
        ("pair",),
        ("layer_norm_in.weight",),
        ("gate_a.weight", "proj_b.bias"),
        ("layer_norm_out.bias",),
        ("out_proj.weight",),
        ("out_gate.bias", "pair"),
    ],
    ids="+".join,
)
def test_frozen_tensors_leave_the_other_gradients(place, mode, wanted):
    n, channels, hidden = middling(place, mode)
    s = subject(place, mode, n, channels, hidden)
    value, everything = evaluate(s.fused, [s.pair, s.mask], s.cotangent)
    s.fused.requires_grad_(False)
    for name in wanted:
        if name != "pair":
            s.fused.get_parameter(name).requires_grad_()
    pair = s.pair.detach().requires_grad_("pair" in wanted)
    some = evaluate(s.fused, [pair, s.mask], s.cotangent)
    names = {"input 0" if name == "pair" else name for name in wanted}
    assert_close(some, (value, {name: everything[name] for name in names}), mode)


# Memory ------------------------------------------------------------------------------------------


@everywhere
def test_forward_holds_three_planes_and_backward_six(place, mode):
    """Planes in the dtype of the result; fp16 keeps what sums over pairs in fp32, o among it."""
    n, channels, hidden = (1024, 128, 128) if place == "cuda" else (160, 32, 32)
    s = subject(place, mode, n, channels, hidden)
    wide = MODES[mode].dtype == torch.float16
    size = MODES[mode].dtype.itemsize
    plane, result = n * n * hidden * size, n * n * channels * size
    blocks = 12 * (2**21 if place == "cuda" else 2**18) * 4  # temporaries of a block of rows
    with torch.no_grad():
        forward = peak_memory(lambda: s.fused(s.pair, s.mask), place)
    assert forward <= result + (4 if wide else 3) * plane + blocks

    def train():
        torch.autograd.grad(s.fused(s.pair, s.mask), [s.pair, *s.fused.parameters()], s.cotangent)

    # The result and the gradient of the pair are not intermediates.
    assert peak_memory(train, place) <= 2 * result + (8 if wide else 6) * plane + blocks
