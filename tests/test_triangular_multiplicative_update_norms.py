# SPDX-License-Identifier: Apache-2.0
"""The kernels that take gradients back through the LayerNorms of the triangular update, emulated.

Padding and what must not be touched hold NaN; references are float64.
"""

import itertools

import pytest
import torch
from emulation.build import driver, span

NAN = float("nan")
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
# Of the plane o and of the gradient, by mode.
MODES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.float32),
    (torch.float32, torch.float32),
]
EPS = 1e-5


def run(kernel, inputs, **settings):
    return driver("triangular_multiplicative_update_norms").run(kernel, inputs, **settings)


def pitch_of(n):
    return -(-n // 8) * 8


def norm_backward(x, g):
    """Through a LayerNorm over the last axis without weight and bias, in float64."""
    x, g = x.double(), g.double()
    mean = x.mean(-1, keepdim=True)
    rstd = (x.var(-1, unbiased=False, keepdim=True) + EPS) ** -0.5
    xhat = (x - mean) * rstd
    return rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))


def assert_close(ours, exact, rounding, fp32=5e-6):
    """To a rounding of each number, and of fp32 the size of all."""
    allowed = rounding * exact.abs() + fp32 * exact.norm() / max(exact.numel(), 1) ** 0.5 + 1e-30
    worst = ((ours.double() - exact).abs() / allowed).max().item()
    assert worst <= 1, worst


# norm_out ----------------------------------------------------------------------------------------


def norm_out_problem(mode, batch, n, hidden, mean=0.5):
    o_type, grad_type = MODES[mode]
    pitch = pitch_of(n)
    o = torch.full((hidden, batch * n, pitch), NAN, dtype=o_type)
    o[..., :n] = torch.randn(hidden, batch * n, n) + mean
    grad = torch.full((batch * n, pitch, hidden), NAN, dtype=grad_type)
    grad[:, :n] = torch.randn(batch * n, n, hidden)
    return o, grad


def check_norm_out(mode, o, grad, n, lines, undo=None, largest=True, offset=0, fp32=5e-6):
    hidden, all_lines, pitch = o.shape
    first, last = lines
    part = grad[first:last].contiguous()
    memory = part.view(-1)
    if offset:
        memory = torch.cat([memory.new_zeros(offset), memory])
    before = torch.full((hidden,), 0.25)
    inputs = {"o": o, "grad": memory, "largest": before}
    if undo is not None:
        inputs["o_undo"] = undo
    result = run(
        "norm_out",
        inputs,
        mode=mode,
        batch=all_lines // n,
        n=n,
        hidden=hidden,
        first_pair=first * pitch,
        count=(last - first) * pitch,
        grad_offset=offset * part.element_size(),
        with_undo=undo is not None,
        with_largest=largest,
    )
    ours = result["o"].view(o.dtype).view(o.shape)
    x = o[:, first:last, :n].double()
    if undo is not None:
        x = x * undo.double()[:, None, None]
    exact = norm_backward(x.permute(1, 2, 0), part[:, :n]).permute(2, 0, 1)
    done = ours[:, first:last]
    finite = exact.isfinite()
    assert torch.equal(done[..., :n].isfinite(), finite)
    assert_close(done[..., :n][finite], exact[finite], ROUNDING[o.dtype], fp32)
    assert (done[..., n:] == 0).all()
    for rest in (slice(0, first), slice(last, None)):
        assert torch.equal(ours[:, rest].isnan(), o[:, rest].isnan())
        assert torch.equal(ours[:, rest].nan_to_num(), o[:, rest].nan_to_num())
    if largest:
        values = done[..., :n].float().abs().flatten(1).nan_to_num(0, 0, 0)
        assert torch.equal(result["largest"], values.amax(1).clamp(min=0.25))


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "batch, n, hidden",
    [
        (1, 1, 128),
        (2, 7, 128),
        (1, 17, 64),
        (1, 33, 5),
        (2, 2, 1),
        (1, 7, 16),
        (1, 9, 127),
        (1, 2, 512),
        (1, 3, 160),
        (1, 17, 128),
    ],
)
def test_norm_out(mode, batch, n, hidden):
    o, grad = norm_out_problem(mode, batch, n, hidden)
    undo = 2.0 ** torch.randint(-3, 3, (hidden,)) if mode in (2, 3) else None
    check_norm_out(mode, o, grad, n, (0, batch * n), undo=undo, largest=mode != 0 or n == 17)


@pytest.mark.parametrize("mode", [0, 1, 3])
def test_norm_out_part(mode):
    """Some of the lines; a gradient that does not begin at 16 bytes; bf16 with an undo."""
    o, grad = norm_out_problem(mode, 2, 9, 64)
    undo = 2.0 ** torch.randint(-3, 3, (64,))
    check_norm_out(mode, o, grad, 9, (4, 13), undo=undo)
    check_norm_out(mode, o, grad, 9, (4, 13), undo=undo, offset=1)


def test_norm_out_large_mean():
    o, grad = norm_out_problem(3, 1, 5, 128, mean=1000.0)
    check_norm_out(3, o, grad, 5, (0, 5), fp32=2e-4)


@pytest.mark.parametrize("mode", [0, 1, 3])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_norm_out_not_finite(mode, bad):
    o, grad = norm_out_problem(mode, 1, 9, 20)
    o[3, 1, 2] = bad
    grad[4, 5, 6] = bad
    check_norm_out(mode, o, grad, 9, (0, 9))


# split -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch, n, hidden", [(1, 1, 1), (2, 7, 5), (1, 70, 3)])
@pytest.mark.parametrize("with_lo", [False, True])
def test_split(batch, n, hidden, with_lo):
    plane = torch.zeros(hidden, batch * n, pitch_of(n))
    scale = torch.tensor([1.0, 1e-30, 3e37, 0.0, 1e-42])[:hidden, None, None]
    plane[..., :n] = torch.randn(hidden, batch * n, n) * scale
    largest = plane.abs().flatten(1).amax(1)
    if n == 7:
        plane[0, 3, 3], plane[1, 3, 4], plane[2, 0, 0] = NAN, float("inf"), -float("inf")
    result = run(
        "split",
        {"plane": plane, "largest": largest},
        batch=batch,
        n=n,
        hidden=hidden,
        with_lo=with_lo,
    )
    undo = result["undo"].double()[:, None, None]
    hi = result["hi"].view(torch.float16).view(plane.shape)
    assert torch.equal(hi.isfinite(), plane.isfinite())
    top = hi.nan_to_num().abs().flatten(1).amax(1)
    usual = largest > 2.0**-112
    assert (top[usual] >= 2**14).all() and (top <= 2**15).all()
    total = hi.double()
    rounding = 2.0**-11
    if with_lo:
        lo = result["lo"].view(torch.float16).view(plane.shape).double()
        total = total + lo
        rounding = 2.0**-22
    finite = plane.isfinite()
    error = ((total * undo - plane.double()).abs() / undo)[finite]
    allowed = (plane.double().abs() * rounding / undo + 2.0**-25)[finite]
    assert (error <= allowed).all()


# norm_in -----------------------------------------------------------------------------------------


def check_norm_in(
    pair,
    grad_type,
    outgoing,
    gate=True,
    gate_normalized=False,
    lines=None,
    out_type=None,
    fp32=5e-6,
):
    batch, n, _, channels = pair.shape
    out_type = out_type or pair.dtype
    pitch = pitch_of(n)
    first, last = lines or (0, batch * n)
    grad = torch.full((batch * n, pitch, channels), NAN, dtype=grad_type)
    grad[:, :n] = torch.randn(batch * n, n, channels)
    gate_grad = torch.full((batch * n, pitch, channels), NAN, dtype=grad_type)
    gate_grad[:, :n] = torch.randn(batch * n, n, channels)
    if not gate:
        gate_grad[:, :n] = 0
    size = batch * n * n * channels
    memory_of_out = torch.full((size + size % 2,), NAN, dtype=out_type)  # in words of 32 bits
    memory = span(pair)
    result = run(
        "norm_in",
        {"pair": memory, "grad": grad[first:last], "gate_grad": gate_grad, "out": memory_of_out},
        batch=batch,
        n=n,
        channels=channels,
        outgoing=outgoing,
        gate_normalized=gate_normalized,
        first_pair=first * pitch,
        count=(last - first) * pitch,
        pair_type=TYPES[pair.dtype],
        pair_offset=pair.storage_offset() * pair.element_size(),
        batch_stride=pair.stride(0),
        i_stride=pair.stride(1),
        j_stride=pair.stride(2),
        grad_type=TYPES[grad_type],
        with_gate=gate,
        output_type=TYPES[out_type],
    )
    ours = result["out"].view(out_type)
    assert ours[size:].isnan().all()
    ours = ours[:size].view(pair.shape)
    g = grad[:, :n].view(batch, n, n, channels).double()
    written = torch.zeros(batch * n, dtype=torch.bool)
    written[first:last] = True
    written = written.view(batch, n, 1, 1).expand_as(ours)
    if not outgoing:
        g, written = g.transpose(1, 2), written.transpose(1, 2)
    from_gate = gate_grad[:, :n].view(batch, n, n, channels).double()
    if gate_normalized:
        exact = norm_backward(pair, g + from_gate)
    else:
        exact = norm_backward(pair, g) + from_gate
    finite = exact.isfinite() & written
    assert torch.equal(ours.isfinite(), finite)
    if out_type == torch.float16:
        fp32 = max(fp32, 1e-5)  # below its normal range, numbers have fixed steps
    assert_close(ours[finite], exact[finite], ROUNDING[out_type], fp32)


def make_pair(batch, n, channels, dtype, mean=0.5):
    return (torch.randn(batch, n, n, channels) + mean).to(dtype)


@pytest.mark.parametrize("outgoing", [False, True])
@pytest.mark.parametrize(
    "batch, n, channels, dtype",
    [
        (1, 1, 128, torch.bfloat16),
        (2, 2, 5, torch.float32),
        (1, 7, 128, torch.float32),
        (2, 7, 64, torch.float16),
        (1, 17, 16, torch.bfloat16),
        (1, 33, 1, torch.float32),
        (1, 5, 127, torch.bfloat16),
        (1, 3, 160, torch.float32),
        (1, 3, 160, torch.bfloat16),
        (1, 3, 512, torch.float32),
        (1, 3, 512, torch.float16),
        (1, 3, 511, torch.float16),
        (1, 9, 128, torch.bfloat16),
    ],
)
def test_norm_in(batch, n, channels, dtype, outgoing):
    pair = make_pair(batch, n, channels, dtype)
    check_norm_in(pair, dtype, outgoing, gate_normalized=n % 3 == 0)


@pytest.mark.parametrize("pair_type, grad_type", [*itertools.product(TYPES, TYPES)])
def test_norm_in_types(pair_type, grad_type):
    """Every pairing, and results of another type than the pair; no gradient through the gate."""
    out_type = {torch.float32: torch.float16, torch.float16: torch.bfloat16}.get(
        grad_type, torch.float32
    )
    check_norm_in(make_pair(1, 3, 24, pair_type), grad_type, False, out_type=out_type)
    check_norm_in(make_pair(1, 3, 300, pair_type), grad_type, True, gate=False)


@pytest.mark.parametrize("outgoing", [False, True])
@pytest.mark.parametrize("gate_normalized", [False, True])
def test_norm_in_part(outgoing, gate_normalized):
    pair = make_pair(2, 9, 16, torch.float32)
    for lines in ((0, 4), (4, 13), (13, 18)):
        check_norm_in(pair, torch.float32, outgoing, True, gate_normalized, lines)


def test_norm_in_views():
    whole = make_pair(2, 7, 48, torch.bfloat16)
    check_norm_in(whole.transpose(1, 2)[..., 8:40], torch.bfloat16, False)
    check_norm_in(whole[:, 1:6, 1:6, 3:35], torch.bfloat16, True)  # not aligned
    check_norm_in(whole[:, :1, :1].expand(2, 5, 5, 48), torch.bfloat16, True)


def test_norm_in_large_mean():
    pair = make_pair(1, 5, 128, torch.float32, mean=1000.0)
    check_norm_in(pair, torch.float32, True, fp32=2e-4)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_norm_in_not_finite(bad):
    pair = make_pair(1, 9, 24, torch.float32)
    pair[0, 2, 3, 4] = bad
    check_norm_in(pair, torch.float32, False)
