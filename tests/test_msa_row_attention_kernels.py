# SPDX-License-Identifier: Apache-2.0
"""MSA row attention and triangle attention in every arithmetic that kernels tell apart.

The bodies are the same on both devices; the CPU takes smaller sizes.
"""

import contextlib
import math

import pytest
import torch
from helpers import (
    as_double,
    assert_gradients,
    assert_parity,
    assert_result,
    evaluate,
    in_double,
    randomize,
    strided,
)
from test_msa_row_attention import FusedGeneral, General, kept, mask_of
from torch.utils._python_dispatch import TorchDispatchMode

import fused_ops
from fused_ops import reference
from fused_ops.msa_row_attention import op
from fused_ops.testing import relative_error

TYPES = [torch.bfloat16, torch.float16, torch.float32]
PLACES = [("cpu", dtype) for dtype in TYPES]
PLACES += [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in TYPES]
everywhere = pytest.mark.parametrize(("place", "dtype"), PLACES)


@contextlib.contextmanager
def tf32():
    """Products of fp32 numbers with one TF32 product's error, of the reference too."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32"
    try:
        yield
    finally:
        setting.fp32_precision = before


def modules(place, dtype, channels, pair_channels, heads, head_dim, **options):
    """The general form, fused and eager, around the same parameters."""
    eager = General(channels, pair_channels, heads, head_dim, **options).to(place, dtype)
    return FusedGeneral(eager), eager


def tensors(place, dtype, lead, s, n, channels, pair_channels, pair_lead=None):
    msa = torch.randn(*lead, s, n, channels, device=place).to(dtype).requires_grad_()
    pair_lead = lead if pair_lead is None else pair_lead
    pair = torch.randn(*pair_lead, n, n, pair_channels, device=place).to(dtype).requires_grad_()
    return msa, pair


def lengths(place, few, many):
    """On a GPU a size that the two launches for small problems take, and one that they leave."""
    return (few,) if place == "cpu" else (few, many)


def check(fused, eager, msa, pair, mask, dtype):
    """The value alone, against float64, by the rule for results; in fp32 also with TF32."""
    with torch.no_grad():
        inputs = [msa.detach(), pair.detach(), mask]
        exact = in_double(eager)(*(as_double(x) for x in inputs[:2]), mask)
        assert_result(fused(*inputs), eager(*inputs), exact, dtype)
        if dtype == torch.float32 and msa.is_cuda:
            with tf32():  # an operand rounded to eleven bits, each time
                allowed = 1.5 * relative_error(eager(*inputs), exact) + 2**-10
                assert relative_error(fused(*inputs), exact) <= allowed


def check_gradients(fused, eager, msa, pair, mask, dtype, factor=1.5):
    """Value and every gradient, by the rules."""
    if mask is not None:  # the reference has NaN where no key is there
        mask = mask.clone()
        mask[..., 0] = True
    assert_parity(fused, eager, [msa, pair, mask], dtype, factor=factor)


@everywhere
@pytest.mark.parametrize("head_dim", [1, 5, 8, 16, 17, 24, 32, 48, 64, 100, 128])
def test_any_width_of_a_head(place, dtype, head_dim):
    fused, eager = modules(place, dtype, 40, 24, 3, head_dim)
    for n in lengths(place, 37, 150):
        msa, pair = tensors(place, dtype, (1,), 3, n, 40, 24)
        check(fused, eager, msa, pair, mask_of(1, 3, n, device=place), dtype)


@everywhere
@pytest.mark.parametrize("n", [1, 2, 17, 33, 64, 77, 128, 257, 513])
def test_any_length(place, dtype, n):
    if place == "cpu" and n > 100:
        n = n // 8 + 1
    fused, eager = modules(place, dtype, 64, 32, 4, 16, pair_norm=False)
    for s in (1, 2, *lengths(place, 5, 4096 // n + 1)):
        msa, pair = tensors(place, dtype, (1,), s, n, 64, 32)
        check(fused, eager, msa, pair, mask_of(1, s, n, device=place), dtype)
        check(fused, eager, msa, pair, None, dtype)


@everywhere
@pytest.mark.parametrize("s", [0, 1, 33, 130])
def test_any_depth(place, dtype, s):
    fused, eager = modules(place, dtype, 32, 16, 2, 16)
    n = 20 if place == "cpu" else 65
    msa, pair = tensors(place, dtype, (1,), s, n, 32, 16)
    check(fused, eager, msa, pair, mask_of(1, s, n, device=place), dtype)


@everywhere
@pytest.mark.parametrize("channels", [(1, 1, 1), (7, 5, 2), (33, 127, 5), (256, 264, 12)])
def test_any_channels(place, dtype, channels):
    c, z, heads = channels
    fused, eager = modules(place, dtype, c, z, heads, 8, bias=False)
    for n in lengths(place, 19, 140):
        msa, pair = tensors(place, dtype, (2,), 3, n, c, z)
        check(fused, eager, msa, pair, mask_of(2, 3, n, device=place), dtype)


LEADS = [
    ((), ()),
    ((2,), (1,)),
    ((2,), ()),
    ((2, 3), (2, 3)),
    ((2, 3), (2, 1)),
    ((2, 3), (1, 3)),  # rows of a group do not follow each other
    ((2, 3), (3,)),
    ((2, 1, 3), (2, 1, 1)),
    ((1, 2), (1, 1)),
]


@everywhere
@pytest.mark.parametrize("lead, pair_lead", LEADS)
def test_leading_axes(place, dtype, lead, pair_lead):
    fused, eager = modules(place, dtype, 24, 16, 2, 8)
    for n in lengths(place, 21, 133):
        msa, pair = tensors(place, dtype, lead, 3, n, 24, 16, pair_lead)
        for mask_lead in ((), lead):
            mask = mask_of(*mask_lead, 3, n, device=place)
            expanded = mask.expand(*lead, 3, n)
            check(fused, eager, msa, pair, expanded, dtype)
            assert torch.equal(fused(msa, pair, mask), fused(msa, pair, expanded))


@everywhere
def test_views(place, dtype):
    fused, eager = modules(place, dtype, 32, 16, 2, 16)
    for n in lengths(place, 22, 130):
        msa, pair = tensors(place, dtype, (2,), 4, n, 32, 16)
        mask = mask_of(2, 4, n, device=place)
        result = fused(msa, pair, mask)
        assert torch.equal(
            fused(strided(msa.detach()), strided(pair.detach()), strided(mask)), result
        )
        turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (msa, pair)]
        assert torch.equal(fused(*turned, mask), result)
        one = msa.detach()[:1, :1].expand(3, 4, -1, -1)
        check(fused, eager, one, pair.detach()[:1].expand(3, -1, -1, -1), None, dtype)


@everywhere
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_masks(place, dtype, kind):
    """Holes, padding, rows without keys; what is not there may be NaN."""
    fused, eager = modules(place, dtype, 32, 16, 2, 16)
    for n in lengths(place, 40, 200):
        msa, pair = tensors(place, dtype, (1,), 5, n, 32, 16)
        mask = mask_of(1, 5, n, device=place)
        mask[0, 1, n // 3 :] = False
        mask[0, 2] = False
        mask[0, 3, : n // 2] = False
        mask[..., -2:] = False
        check(fused, eager, msa, pair, mask, dtype)
        pair = pair.detach().clone()
        expected = fused(msa, pair, mask)
        pair[:, :, -2:] = math.nan
        ours = fused(msa, pair, mask.to(kind))
        assert torch.equal(ours, expected)
        bias = eager.out_proj.bias
        assert torch.equal(ours[0, 2], bias.expand_as(ours[0, 2]))


@everywhere
def test_parameters_of_another_type(place, dtype):
    """Parameters in fp32, activations in 16 bits; and a pair tensor that stayed in fp32."""
    if dtype == torch.float32:
        pytest.skip("nothing is of another type")
    eager = General(32, 16, 2, 16).to(place)
    fused = FusedGeneral(eager)
    for n in lengths(place, 30, 150):
        msa, pair = tensors(place, dtype, (1,), 3, n, 32, 16)
        mask = mask_of(1, 3, n, device=place)
        with torch.no_grad(), torch.autocast(place, dtype):
            ours = fused(msa, pair, mask)
            theirs = eager(msa, pair, mask)
        exact = in_double(eager)(as_double(msa), as_double(pair), mask)
        assert_result(ours, theirs, exact, dtype)
        with torch.no_grad(), torch.autocast(place, dtype):
            ours = fused(msa, pair.float(), mask)
        assert_result(ours, theirs, exact, dtype)


@everywhere
def test_large_logits(place, dtype):
    """Weights that are nearly zero or one, and exponents far beyond fp16's range."""
    fused, eager = modules(place, dtype, 32, 16, 2, 16)
    with torch.no_grad():
        eager.query.weight.mul_(6)
        eager.pair_bias.weight.mul_(10)
    for n in lengths(place, 40, 150):
        msa, pair = tensors(place, dtype, (1,), 4, n, 32, 16)
        check(fused, eager, msa, pair, mask_of(1, 4, n, device=place), dtype)


@everywhere
@pytest.mark.parametrize("direction", ["starting", "ending"])
def test_triangle_attention(place, dtype, direction):
    eager = randomize(reference.TriangleAttention(32, 2, 16, direction)).to(place, dtype)
    fused = fused_ops.TriangleAttention.from_reference(eager)
    for n in lengths(place, 21, 77):
        pair = torch.randn(2, n, n, 32, device=place).to(dtype).requires_grad_()
        mask = mask_of(2, n, n, device=place)
        mask[..., 0, :] = mask[..., 0] = True
        assert_parity(fused, eager, [pair, mask], dtype)


@everywhere
@pytest.mark.parametrize("n, head_dim", [(1, 8), (2, 16), (17, 8), (33, 24), (77, 32), (257, 16)])
def test_gradients_of_any_length(place, dtype, n, head_dim):
    if place == "cpu" and n > 100:
        n = n // 8 + 1
    fused, eager = modules(place, dtype, 40, 24, 3, head_dim)
    for s in (1, 5):
        msa, pair = tensors(place, dtype, (2,), s, n, 40, 24)
        check_gradients(fused, eager, msa, pair, mask_of(2, s, n, device=place), dtype)
        check_gradients(fused, eager, msa, pair, None, dtype)


@everywhere
@pytest.mark.parametrize("head_dim", [1, 5, 17, 40, 64, 100, 128])
def test_gradients_of_any_width_of_a_head(place, dtype, head_dim):
    fused, eager = modules(place, dtype, 48, 16, 2, head_dim, bias=False)
    n = 21 if place == "cpu" else 90
    msa, pair = tensors(place, dtype, (1,), 3, n, 48, 16)
    check_gradients(fused, eager, msa, pair, mask_of(1, 3, n, device=place), dtype)


@everywhere
@pytest.mark.parametrize("head_dim", [8, 24, 32, 48, 64, 100, 128])
@pytest.mark.parametrize("n", [9, 30, 60])
def test_many_short_rows(place, dtype, n, head_dim):
    """More than small problems' kernels take, of rows that are shorter than a tile."""
    rows = 3 if place == "cpu" else 4200 // n
    fused, eager = modules(place, dtype, 48, 16, 2, head_dim)
    msa, pair = tensors(place, dtype, (1,), rows, n, 48, 16)
    mask = mask_of(1, rows, n, device=place)
    check(fused, eager, msa, pair, mask, dtype)
    check_gradients(fused, eager, msa, pair, mask, dtype)


@everywhere
@pytest.mark.parametrize("channels", [(1, 1, 1), (7, 5, 2), (33, 127, 5), (256, 264, 12)])
def test_gradients_of_any_channels(place, dtype, channels):
    c, z, heads = channels
    for pair_norm in (False, True):
        fused, eager = modules(place, dtype, c, z, heads, 8, pair_norm=pair_norm)
        msa, pair = tensors(place, dtype, (1,), 4, 19, c, z)
        mask = mask_of(1, 4, 19, device=place)
        # With one channel the result is the same number everywhere: its error is a matter of luck.
        check_gradients(fused, eager, msa, pair, mask, dtype, factor=3.0 if c == 1 else 1.5)


@everywhere
@pytest.mark.parametrize("lead, pair_lead", LEADS)
def test_gradients_of_leading_axes(place, dtype, lead, pair_lead):
    fused, eager = modules(place, dtype, 24, 16, 2, 8)
    msa, pair = tensors(place, dtype, lead, 3, 21, 24, 16, pair_lead)
    mask = mask_of(*lead, 3, 21, device=place)
    check_gradients(fused, eager, msa, pair, mask, dtype)


@everywhere
def test_gradients_of_views(place, dtype):
    fused, eager = modules(place, dtype, 32, 16, 2, 16)
    msa, pair = tensors(place, dtype, (2,), 4, 22, 32, 16)
    mask = mask_of(2, 4, 22, device=place)

    def gradients(msa, pair):
        msa, pair = msa.detach().requires_grad_(), pair.detach().requires_grad_()
        result = fused(msa, pair, mask)
        leaves = [msa, pair, *fused.parameters()]
        return torch.autograd.grad(result.transpose(1, 2).sin().sum(), leaves)

    expected = gradients(msa, pair)
    turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (msa, pair)]
    for ours in (gradients(*turned), gradients(strided(msa.detach()), strided(pair.detach()))):
        for a, b in zip(ours, expected, strict=True):
            assert torch.equal(a, b)


@everywhere
def test_gradients_of_some_tensors_are_those_of_all(place, dtype):
    fused, _ = modules(place, dtype, 32, 16, 2, 16)
    msa, pair = tensors(place, dtype, (2,), 4, 22, 32, 16)
    mask = mask_of(2, 4, 22, device=place)
    leaves = [msa, pair, *fused.parameters()]
    result = fused(msa, pair, mask)
    grad = torch.randn_like(result)
    expected = torch.autograd.grad(result, leaves, grad)
    again = torch.autograd.grad(fused(msa, pair, mask), leaves, grad)
    for i, leaf in enumerate(leaves):
        one = torch.autograd.grad(fused(msa, pair, mask), [leaf], grad)[0]
        assert torch.equal(again[i], expected[i])
        assert one.dtype == leaf.dtype
        assert torch.equal(one, expected[i])


class Watching(TorchDispatchMode):
    """Sees the ops, so that they go through the dispatcher, and nothing is saved for backward."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


@everywhere
def test_gradients_do_not_depend_on_what_was_saved(place, dtype):
    fused, _ = modules(place, dtype, 40, 24, 3, 16)
    n = 30 if place == "cpu" else 150  # beyond what small problems' kernels take
    msa, pair = tensors(place, dtype, (2,), 4, n, 40, 24)
    mask = mask_of(2, 4, n, device=place)
    leaves = [msa, pair, *fused.parameters()]
    result = fused(msa, pair, mask)
    grad = torch.randn_like(result)
    saved = torch.autograd.grad(result, leaves, grad)
    with Watching() as watching:
        result = fused(msa, pair, mask)
        formed_again = torch.autograd.grad(result, leaves, grad)
    assert "msa_row_attention_forward" in watching.seen
    for a, b in zip(saved, formed_again, strict=True):
        assert torch.equal(a, b)


@everywhere
def test_gradients_of_rows_without_keys(place, dtype):
    """They are finite, and those of what cannot matter are zero."""
    fused, _ = modules(place, dtype, 32, 16, 2, 16)
    msa, pair = tensors(place, dtype, (1,), 4, 70, 32, 16)
    mask = mask_of(1, 4, 70, device=place)
    mask[0, 1] = False
    mask[..., -3:] = False
    result = fused(msa, pair, mask)
    grads = torch.autograd.grad(result, [msa, pair, *fused.parameters()], torch.randn_like(result))
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][0, 1].any()
    assert not grads[1][0, :, -3:].any()
    mask[:] = False
    result = fused(msa, pair, mask)
    grads = torch.autograd.grad(result, [msa, pair], torch.randn_like(result))
    assert not any(g.any() for g in grads)


@everywhere
def test_gradients_under_autocast(place, dtype):
    """Parameters and pair tensor in fp32, activations in 16 bits: each gradient has its type."""
    if dtype == torch.float32:
        pytest.skip("nothing is of another type")
    eager = General(32, 16, 2, 16).to(place)
    fused = FusedGeneral(eager)
    msa, pair = tensors(place, dtype, (1,), 3, 30, 32, 16)
    pair = pair.detach().float().requires_grad_()
    mask = mask_of(1, 3, 30, device=place)
    mask[..., 0] = True
    cotangent = torch.randn_like(msa)
    with torch.autocast(place, dtype):
        _, ours = evaluate(fused, [msa, pair, mask], cotangent)
        _, theirs = evaluate(eager, [msa, pair, mask], cotangent)
    double = [as_double(x) for x in (msa, pair)]
    _, exact = evaluate(in_double(eager), [*double, mask], cotangent)
    assert_gradients(ours, theirs, exact, dtype)
    leaves = {"input 0": msa, "input 1": pair, **dict(eager.named_parameters())}
    assert {name: x.dtype for name, x in ours.items()} == {
        name: x.dtype for name, x in leaves.items()
    }


@pytest.mark.gpu
@pytest.mark.parametrize("groups, rows", [(1, 9000), (40, 220)])
def test_gradients_of_more_than_is_taken_at_a_time(groups, rows):
    """They are those of the parts: rows of the MSA and of parameters that all share."""
    eager = General(16, 8, 8, 32).to("cuda", torch.bfloat16)
    fused = FusedGeneral(eager)
    msa, pair = tensors("cuda", torch.bfloat16, (groups,), rows, 64, 16, 8)
    mask = mask_of(groups, rows, 64, device="cuda")
    grad = torch.randn_like(msa)
    leaves = [msa, pair, *fused.parameters()]
    whole = torch.autograd.grad(fused(msa, pair, mask), leaves, grad)
    sums = [torch.zeros_like(x, dtype=torch.float64) for x in leaves]
    step = max(1, rows // 4)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        some = torch.autograd.grad(
            fused(msa[:, part], pair, mask[:, part]), leaves, grad[:, part].contiguous()
        )
        for total, one in zip(sums, some, strict=True):
            total += one.double()
    largest = max(exact.norm() for exact in sums[2:])
    for ours, exact in zip(whole, sums, strict=True):
        # What shifts all logits of a query alike has no gradient but noise.
        assert (ours.double() - exact).norm() <= 0.02 * exact.norm() + 1e-3 * largest


# Dropout -----------------------------------------------------------------------------------------

SEED = -(1 << 60) + 12345


class Dropping(General):
    """The reference with the very weights dropped that the hash of the docs tells."""

    def __init__(self, *args, p, **options):
        super().__init__(*args, **options)
        self.p = p

    def drop(self, weights):
        heads, n = weights.shape[-3:-1]
        keep = kept(self.p, SEED, weights[..., 0, 0, 0].numel(), n, heads, weights.device)
        dropped = round(self.p * 65536)
        factor = 65536 / (65536 - dropped) if dropped < 65536 else 0.0
        return weights * (keep.view(weights.shape) * factor).to(weights.dtype)


class FusedDropping(FusedGeneral):
    def forward(self, msa, pair, mask=None):
        return super().forward(msa, pair, mask, dropout=self.inner.p)


@pytest.fixture
def dropping(monkeypatch):
    """As :func:`modules`, with a probability; the seed is the same each time."""
    monkeypatch.setattr(
        op, "draw_dropout_seed", lambda like: torch.tensor([SEED], device=like.device)
    )

    def make(place, dtype, *sizes, p, **options):
        eager = Dropping(*sizes, p=p, **options).to(place, dtype)
        return FusedDropping(eager), eager

    return make


@everywhere
@pytest.mark.parametrize("n, head_dim", [(1, 8), (2, 16), (17, 8), (33, 24), (77, 32), (257, 16)])
def test_dropout_of_any_length(place, dtype, n, head_dim, dropping):
    if place == "cpu" and n > 100:
        n = n // 8 + 1
    fused, eager = dropping(place, dtype, 40, 24, 3, head_dim, p=0.3)
    msa, pair = tensors(place, dtype, (2,), 5, n, 40, 24)
    check_gradients(fused, eager, msa, pair, mask_of(2, 5, n, device=place), dtype)
    check_gradients(fused, eager, msa, pair, None, dtype)


@everywhere
@pytest.mark.parametrize("head_dim", [1, 17, 40, 64, 100, 128])
def test_dropout_of_any_width_of_a_head(place, dtype, head_dim, dropping):
    fused, eager = dropping(place, dtype, 48, 16, 2, head_dim, p=0.2, bias=False)
    n = 21 if place == "cpu" else 90
    msa, pair = tensors(place, dtype, (1,), 3, n, 48, 16)
    check_gradients(fused, eager, msa, pair, mask_of(1, 3, n, device=place), dtype)


@everywhere
@pytest.mark.parametrize("p", [2**-18, 2**-16, 0.01, 0.9])
def test_dropout_of_any_probability(place, dtype, p, dropping):
    fused, eager = dropping(place, dtype, 24, 16, 2, 16, p=p)
    n = 21 if place == "cpu" else 130
    msa, pair = tensors(place, dtype, (1,), 3, n, 24, 16)
    check_gradients(fused, eager, msa, pair, mask_of(1, 3, n, device=place), dtype)


@everywhere
def test_dropout_of_all(place, dtype, dropping):
    fused, eager = dropping(place, dtype, 24, 16, 2, 16, p=1.0)
    n = 21 if place == "cpu" else 130
    msa, pair = tensors(place, dtype, (1,), 3, n, 24, 16)
    result = fused(msa, pair, mask_of(1, 3, n, device=place))
    assert torch.equal(result, eager.out_proj.bias.expand_as(result))
    assert not any(g.any() for g in torch.autograd.grad(result.float().sum(), [msa, pair]))


@everywhere
@pytest.mark.parametrize("lead, pair_lead", LEADS)
def test_dropout_of_leading_axes(place, dtype, lead, pair_lead, dropping):
    """Rows count in the caller's order, whatever order they are taken in."""
    fused, eager = dropping(place, dtype, 24, 16, 2, 8, p=0.3)
    msa, pair = tensors(place, dtype, lead, 3, 21, 24, 16, pair_lead)
    mask = mask_of(*lead, 3, 21, device=place)
    check_gradients(fused, eager, msa, pair, mask, dtype)


@everywhere
def test_dropout_without_gradients_is_the_same(place, dtype, dropping):
    """Whether the forward saves for the backward or not."""
    fused, _ = dropping(place, dtype, 24, 16, 2, 8, p=0.3)
    msa, pair = tensors(place, dtype, (2,), 3, 70, 24, 16)
    expected = fused(msa, pair)
    with torch.no_grad():
        assert torch.equal(fused(msa, pair), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("groups, rows", [(1, 9000), (40, 220)])
def test_dropout_of_more_than_is_taken_at_a_time(groups, rows, dropping):
    fused, eager = dropping("cuda", torch.bfloat16, 16, 8, 8, 32, p=0.25)
    msa, pair = tensors("cuda", torch.bfloat16, (groups,), rows, 64, 16, 8)
    with torch.no_grad():
        torch.testing.assert_close(fused(msa, pair), eager(msa, pair), atol=0.05, rtol=0.05)


@pytest.mark.gpu
def test_dropout_has_kernels():
    for dtype, kernel in ((torch.bfloat16, "attend_dropout"), (torch.float32, "fp32_dropout")):
        module = fused_ops.MSARowAttention(64, 16, 4, dropout=0.1).to("cuda", dtype)
        msa, pair = tensors("cuda", dtype, (1,), 3, 30, 64, 16)
        plan = fused_ops.explain(module, msa, pair)
        assert plan.path == "kernel" and kernel in plan.kernel


def _poison() -> None:
    """Fills the allocator's free memory with NaN."""
    blocks = [torch.full((1 << size,), math.nan, device="cuda") for size in range(8, 24)]
    del blocks


@everywhere
def test_memory_that_nobody_wrote_is_not_read(place, dtype):
    fused, _ = modules(place, dtype, 40, 20, 2, 20)
    for n in lengths(place, 70, 170):
        msa, pair = tensors(place, dtype, (2,), 3, n, 40, 20)
        mask = mask_of(2, 3, n, device=place)
        expected = fused(msa, pair, mask)
        for _ in range(3):
            if place == "cuda":
                _poison()
            assert torch.equal(fused(msa, pair, mask), expected)


@pytest.mark.gpu
def test_plan_names_the_kernels():
    module = fused_ops.MSARowAttention(64, 16, 4).to("cuda", torch.bfloat16)
    for n, kernel, launches in ((30, "small_sm80", 2), (150, "attend_sm80", 3)):
        msa, pair = tensors("cuda", torch.bfloat16, (1,), 3, n, 64, 16)
        plan = fused_ops.explain(module, msa, pair)
        assert plan.path == "kernel" and kernel in plan.kernel
        assert plan.launches == launches


@pytest.mark.gpu
@pytest.mark.parametrize("groups, rows", [(1, 9000), (40, 220), (3, 3000)])
def test_more_than_is_taken_at_a_time(groups, rows):
    """Projections of more than a gigabyte come in parts: rows of a group, or groups."""
    eager = General(16, 8, 8, 32).to("cuda", torch.bfloat16)
    fused = FusedGeneral(eager)
    msa, pair = tensors("cuda", torch.bfloat16, (groups,), rows, 64, 16, 8)
    mask = mask_of(groups, rows, 64, device="cuda")
    with torch.no_grad():
        result = fused(msa, pair, mask)
        for group in {0, groups // 2, groups - 1}:
            for row in (0, rows // 2, rows - 1):
                one = fused(
                    msa[group : group + 1, row : row + 1],
                    pair[group : group + 1],
                    mask[group : group + 1, row : row + 1],
                )
                torch.testing.assert_close(result[group, row], one[0, 0], atol=0.02, rtol=0.02)


@everywhere
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [20, 100])
def test_nan_and_inf_of_absent_positions_reach_the_same_places(place, dtype, at, bad):
    fused, eager = modules(place, dtype, 32, 16, 2, 16)
    n = 30 if place == "cpu" else 200
    at = at // 8 if place == "cpu" else at
    msa, pair = tensors(place, dtype, (1,), 4, n, 32, 16)
    mask = mask_of(1, 4, n, device=place)
    mask[0, 1, at] = mask[0, 2, at // 2 :] = False
    msa = msa.detach().clone()
    msa[0, 1:3, at, 3] = bad
    ours, theirs = fused(msa, pair, mask), eager(msa, pair, mask)
    assert not theirs.isfinite().all()
    assert torch.equal(ours.isfinite(), theirs.isfinite())
