# SPDX-License-Identifier: Apache-2.0
"""MSA row attention with pair bias against its eager reference."""

import copy
import math

import pytest
import torch
from helpers import (
    DTYPES,
    SIZES,
    assert_compiles,
    assert_double_backward_raises,
    assert_gradients,
    assert_parity,
    assert_result,
    evaluate,
    in_double,
    opcheck,
    randomize,
    strided,
)
from torch.utils.checkpoint import checkpoint

import fused_ops
from fused_ops import _compose, reference
from fused_ops.functional import msa_row_attention
from fused_ops.msa_row_attention import composition
from fused_ops.msa_row_attention.op import OPERATOR
from fused_ops.testing import peak_memory


@pytest.fixture(params=["whole", "blocks"])
def blocking(request, monkeypatch):
    """On the CPU a small problem is one block and takes a shorter way: each is tested both ways."""
    if request.param == "blocks":
        monkeypatch.setattr(_compose, "_CPU_BLOCK_ELEMENTS", 200)


def build(msa_dim, pair_dim, num_heads, dtype=torch.float32, device="cpu", dropout=0.0):
    """A randomised reference module and the fused module around the same parameters."""
    eager = randomize(reference.MSARowAttention(msa_dim, pair_dim, num_heads, dropout))
    eager = eager.to(device, dtype)
    return fused_ops.MSARowAttention.from_reference(eager), eager


def random(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def inputs_of(lead, s, n, msa_dim, pair_dim, dtype=torch.float32, device="cpu", pair_lead=None):
    """(msa, pair), both requiring gradients."""
    return [
        random(*lead, s, n, msa_dim, dtype=dtype, device=device),
        random(
            *(lead if pair_lead is None else pair_lead), n, n, pair_dim, dtype=dtype, device=device
        ),
    ]


def mask_of(*shape, device="cpu"):
    """Holes, and no row without a key (there the reference gives NaN)."""
    mask = torch.rand(shape, device=device) > 0.3
    if mask.numel():
        mask[..., 0] = True
    return mask


class General(torch.nn.Module):
    """The op's definition with everything optional: LayerNorm on the pair, any head width, no
    biases. Rows without keys have attention output zero, as the fused op defines it."""

    def __init__(self, msa_dim, pair_dim, num_heads, head_dim, pair_norm=True, bias=True):
        super().__init__()
        width = num_heads * head_dim
        self.num_heads = num_heads
        self.layer_norm = torch.nn.LayerNorm(msa_dim)
        self.query = torch.nn.Linear(msa_dim, width, bias=False)
        self.key = torch.nn.Linear(msa_dim, width, bias=False)
        self.value = torch.nn.Linear(msa_dim, width, bias=False)
        self.gate = torch.nn.Linear(msa_dim, width, bias=bias)
        self.pair_norm = torch.nn.LayerNorm(pair_dim) if pair_norm else torch.nn.Identity()
        self.pair_bias = torch.nn.Linear(pair_dim, num_heads, bias=False)
        self.out_proj = torch.nn.Linear(width, msa_dim, bias=bias)
        randomize(self)

    def forward(self, msa, pair, mask=None):
        x = self.layer_norm(msa)
        q, k, v = (
            f(x).unflatten(-1, (self.num_heads, -1)) for f in (self.query, self.key, self.value)
        )
        logits = torch.einsum("...sihd,...sjhd->...shij", q, k) / math.sqrt(q.shape[-1])
        logits = logits + self.pair_bias(self.pair_norm(pair)).movedim(-1, -3).unsqueeze(-4)
        if mask is not None:
            absent = (mask == 0).expand(msa.shape[:-1])
            none = absent.all(-1, keepdim=True)
            logits = logits.masked_fill((absent & ~none)[..., None, None, :], float("-inf"))
        weights = self.drop(torch.softmax(logits, -1))
        attended = torch.einsum("...shij,...sjhd->...sihd", weights, v)
        attended = attended.flatten(-2)
        if mask is not None:
            attended = attended.masked_fill(none[..., None], 0.0)
        return self.out_proj(torch.sigmoid(self.gate(x)) * attended)

    def drop(self, weights):
        """For dropout: (..., S, heads, N, N)."""
        return weights


class FusedGeneral(torch.nn.Module):
    """:class:`General` computed by the function."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, msa, pair, mask=None, **options):
        m = self.inner
        norm = m.pair_norm if isinstance(m.pair_norm, torch.nn.LayerNorm) else None
        return msa_row_attention(
            msa,
            pair,
            mask,
            m.layer_norm.weight,
            m.layer_norm.bias,
            m.query.weight,
            m.key.weight,
            m.value.weight,
            m.gate.weight,
            m.gate.bias,
            m.pair_bias.weight,
            m.out_proj.weight,
            m.out_proj.bias,
            m.num_heads,
            pair_norm_weight=None if norm is None else norm.weight,
            pair_norm_bias=None if norm is None else norm.bias,
            **options,
        )


# Parity ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("blocking")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_matches_reference(device, n, dtype):
    fused, eager = build(24, 20, 4, dtype, device)
    msa, pair = inputs_of((2,), 3, n, 24, 20, dtype, device)
    assert_parity(fused, eager, [msa, pair, mask_of(2, 3, n, device=device)], dtype)
    assert_parity(fused, eager, [msa, pair, None], dtype)


@pytest.mark.parametrize("s, n, heads", [(19, 65, 8), (2, 257, 4), (1, 520, 1)])
def test_matches_reference_over_many_blocks(device, s, n, heads):
    fused, eager = build(32, 16, heads, device=device)
    inputs = [*inputs_of((1,), s, n, 32, 16, device=device), mask_of(1, s, n, device=device)]
    assert_parity(fused, eager, inputs, torch.float32)


@pytest.mark.usefixtures("blocking")
@pytest.mark.parametrize("channels", [(3, 1, 1), (4, 7, 4), (96, 64, 3), (127, 33, 1)])
def test_matches_reference_at_odd_channels(device, channels):
    fused, eager = build(*channels, device=device)
    inputs = inputs_of((1,), 3, 19, channels[0], channels[1], device=device)
    assert_parity(fused, eager, [*inputs, None], torch.float32)


@pytest.mark.parametrize("lead, s, n", [((0,), 3, 5), ((2,), 0, 5), ((2,), 3, 0), ((0,), 0, 0)])
def test_empty_input_gives_empty_result_and_zero_gradients(device, lead, s, n):
    fused, _ = build(8, 6, 2, device=device)
    msa, pair = inputs_of(lead, s, n, 8, 6, device=device)
    result = fused(msa, pair, torch.ones(msa.shape[:-1], device=device))
    assert result.shape == msa.shape
    result.sum().backward()
    assert msa.grad.shape == msa.shape
    assert pair.grad.shape == pair.shape and not pair.grad.any()
    for name, parameter in fused.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.usefixtures("blocking")
def test_strided_inputs_mask_and_cotangent(device):
    fused, _ = build(8, 6, 2, device=device)
    msa, pair = inputs_of((2,), 3, 9, 8, 6, device=device)
    mask = mask_of(2, 3, 9, device=device)
    cotangent = strided(torch.randn(2, 3, 9, 8, device=device))
    value, grads = evaluate(fused, [msa, pair, mask], cotangent)
    others = [strided(t.detach()).requires_grad_() for t in (msa, pair)]
    other_value, other_grads = evaluate(fused, [*others, strided(mask)], cotangent)
    assert torch.equal(value, other_value)
    for name, grad in grads.items():
        assert torch.equal(grad, other_grads[name]), name


@pytest.mark.usefixtures("blocking")
def test_transposed_inputs_and_expanded_cotangent(device):
    fused, eager = build(8, 6, 2, device=device)
    msa = random(2, 9, 3, 8, device=device).detach().transpose(1, 2).requires_grad_()
    pair = random(2, 9, 9, 6, device=device).detach().transpose(1, 2).requires_grad_()
    assert_parity(fused, eager, [msa, pair, None], torch.float32)
    fused(msa, pair).sum().backward()  # the cotangent is an expanded scalar
    plain = [t.detach().contiguous().requires_grad_() for t in (msa, pair)]
    result = fused(*plain)
    result.backward(torch.ones_like(result))
    torch.testing.assert_close(msa.grad, plain[0].grad)
    torch.testing.assert_close(pair.grad, plain[1].grad)


@pytest.mark.usefixtures("blocking")
def test_expanded_inputs(device):
    fused, eager = build(8, 6, 2, device=device)
    msa = random(1, 1, 9, 8, device=device).detach().expand(2, 3, 9, 8).requires_grad_()
    pair = random(1, 1, 9, 6, device=device).detach().expand(2, 9, 9, 6).requires_grad_()
    mask = mask_of(1, 1, 9, device=device).expand(2, 3, 9)
    assert_parity(fused, eager, [msa, pair, mask], torch.float32)


@pytest.mark.usefixtures("blocking")
@pytest.mark.parametrize(
    "lead, pair_lead, mask_lead",
    [
        ((), (), ()),
        ((4,), (1,), (4,)),
        ((4,), (), (1,)),
        ((2, 3), (2, 3), (3,)),
        ((2, 3), (2, 1), (2, 1)),
        ((2, 3), (1, 3), ()),
        ((2, 3), (3,), (2, 3)),
        ((2, 1, 3), (1, 1, 3), (1, 1, 1)),
    ],
)
def test_leading_axes_and_broadcast_pair(device, lead, pair_lead, mask_lead):
    fused, eager = build(8, 6, 2, device=device)
    msa, pair = inputs_of(lead, 3, 7, 8, 6, device=device, pair_lead=pair_lead)
    mask = mask_of(*mask_lead, 3, 7, device=device)
    # The reference's own broadcasting defines the meaning; gradients of pair come back summed.
    assert_parity(fused, eager, [msa, pair, mask], torch.float32)
    whole = fused(msa, pair, mask)
    pairs, masks = pair.expand(*lead, 7, 7, 6), mask.expand(*lead, 3, 7)
    for index in _compose.lead_indices(lead):
        one = fused(msa[index], pairs[index], masks[index])
        torch.testing.assert_close(whole[index], one)


def test_results_do_not_depend_on_the_blocks(monkeypatch):
    """Every branch of the blocking: several groups, rows, heads and queries at a time."""
    fused, _ = build(12, 10, 3)
    inputs = [*inputs_of((2, 2), 3, 17, 12, 10, pair_lead=(2, 1)), mask_of(2, 1, 3, 17)]
    cotangent = torch.randn(2, 2, 3, 17, 12)
    value, grads = evaluate(fused, inputs, cotangent)
    for budget in (2000, 700, 100, 1):
        monkeypatch.setattr(_compose, "_CPU_BLOCK_ELEMENTS", budget)
        other, other_grads = evaluate(fused, inputs, cotangent)
        torch.testing.assert_close(other, value)
        for name, grad in grads.items():
            torch.testing.assert_close(other_grads[name], grad, atol=1e-4, rtol=1e-4)


def test_a_small_call_takes_the_short_way_and_no_other(monkeypatch):
    class Short(Exception):
        pass

    def short(*args):
        raise Short

    monkeypatch.setattr(composition, "_attend_in_one_block", short)

    def takes_it(lead=(2,), pair_lead=None, dtype=torch.float32, dropout=0.0):
        fused, _ = build(8, 6, 2, dtype, dropout=dropout)
        try:
            with torch.no_grad():
                fused(*inputs_of(lead, 3, 9, 8, 6, dtype, pair_lead=pair_lead))
        except Short:
            return True
        return False

    assert takes_it() and takes_it((2, 3), (2, 1)) and takes_it(dtype=torch.float64)
    assert not takes_it((2, 3), (1, 3))  # rows of one bias do not lie together
    assert not takes_it(dropout=0.5) and not takes_it(dtype=torch.float16)
    # One element less than the largest tensor, the maps (2, 3, 2, 9, 9), then than the pairs.
    monkeypatch.setattr(_compose, "_CPU_BLOCK_ELEMENTS", 971)
    assert not takes_it() and takes_it((1,))
    monkeypatch.setattr(_compose, "_CPU_BLOCK_ELEMENTS", 972)
    assert takes_it()


# Masks -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("blocking")
@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int32, torch.int64, torch.half, torch.bfloat16, torch.float64],
    ids=str,
)
def test_mask_of_any_dtype(device, dtype):
    fused, _ = build(8, 6, 2, device=device)
    inputs = inputs_of((2,), 3, 9, 8, 6, device=device)
    mask = mask_of(2, 3, 9, device=device)
    assert torch.equal(fused(*inputs, mask), fused(*inputs, mask.to(dtype)))


@pytest.mark.usefixtures("blocking")
def test_anything_but_zero_is_there(device):
    fused, _ = build(8, 6, 2, device=device)
    inputs = inputs_of((2,), 3, 9, 8, 6, device=device)
    mask = mask_of(2, 3, 9, device=device)
    odd = torch.where(mask, torch.tensor([-2.0, 1e-30, math.inf] * 3, device=device), -0.0)
    assert torch.equal(fused(*inputs, mask), fused(*inputs, odd))


@pytest.mark.usefixtures("blocking")
def test_no_mask_is_a_mask_of_ones(device):
    fused, _ = build(8, 6, 2, device=device)
    inputs = inputs_of((2,), 3, 9, 8, 6, device=device)
    assert torch.equal(fused(*inputs), fused(*inputs, torch.ones(2, 3, 9, device=device)))


@pytest.mark.usefixtures("blocking")
def test_masked_keys_have_no_influence(device):
    fused, _ = build(8, 6, 2, device=device)
    msa, pair = (t.detach() for t in inputs_of((1,), 3, 12, 8, 6, device=device))
    mask = torch.ones(1, 3, 12, device=device)
    mask[..., 9:] = 0
    whole = fused(msa, pair, mask)
    short = fused(msa[:, :, :9], pair[:, :9, :9])
    torch.testing.assert_close(whole[:, :, :9], short)
    pair[:, :, 9:] = math.nan  # also not when the padding holds no numbers
    pair[:, :, 10] = math.inf
    msa[:, :, 9:] = 1e4
    torch.testing.assert_close(fused(msa, pair, mask)[:, :, :9], short)


@pytest.mark.usefixtures("blocking")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_row_without_keys_attends_to_nothing(device, dtype):
    general = General(8, 6, 2, 4).to(device, dtype)
    fused = FusedGeneral(general)
    inputs = inputs_of((2,), 3, 9, 8, 6, dtype, device)
    mask = mask_of(2, 3, 9, device=device)
    mask[0, 1] = False
    mask[1] = False
    result = fused(*inputs, mask)
    expected = general.out_proj.bias.expand(9, 8)
    assert torch.equal(result[0, 1], expected)
    assert torch.equal(result[1], expected.expand(3, 9, 8))
    grads = torch.autograd.grad(result, inputs, torch.randn_like(result))
    assert not grads[0][0, 1].any() and not grads[0][1].any() and not grads[1][1].any()
    assert grads[0][0, 0].any() and grads[1][0].any()
    if dtype != torch.float64:
        assert_parity(fused, general, [*inputs, mask], dtype)


@pytest.mark.usefixtures("blocking")
def test_module_gives_finite_gradients_where_all_is_masked(device):
    fused, eager = build(8, 6, 2, device=device)
    inputs = inputs_of((1,), 2, 5, 8, 6, device=device)
    mask = torch.zeros(1, 2, 5, dtype=torch.bool, device=device)
    result = fused(*inputs, mask)
    assert torch.equal(result, eager.out_proj.bias.expand_as(result))
    result.sum().backward()
    assert eager.out_proj.bias.grad.eq(10).all()
    for name, parameter in fused.named_parameters():
        assert not parameter.grad.any() or name == "out_proj.bias", name


def test_mask_that_requires_grad_is_refused(device):
    fused, _ = build(8, 6, 2, device=device)
    mask = torch.ones(1, 2, 5, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="msa_mask must not require a gradient"):
        fused(*inputs_of((1,), 2, 5, 8, 6, device=device), mask)


@pytest.mark.usefixtures("blocking")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["msa", "pair"])
def test_nan_and_inf_reach_the_same_places(device, where, bad):
    fused, eager = build(8, 6, 2, device=device)
    msa, pair = (t.detach() for t in inputs_of((2,), 3, 9, 8, 6, device=device))
    mask = mask_of(2, 3, 9, device=device)
    mask[0, 1, 3], mask[0, 2, 3] = True, False
    with torch.no_grad():
        eager.pair_bias.weight[:, 1] = torch.tensor([0.5, -0.5])  # inf becomes inf and -inf
    (msa if where == "msa" else pair)[0, 2, 3, 1] = bad
    ours, theirs = fused(msa, pair, mask), eager(msa, pair, mask)
    assert not theirs.isfinite().all()
    assert torch.equal(ours.isfinite(), theirs.isfinite())


# Options -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("blocking")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_pair_norm_head_width_and_missing_biases(device, pair_norm, bias, dtype):
    general = General(10, 6, 3, 7, pair_norm, bias).to(device, dtype)
    inputs = [*inputs_of((2,), 3, 17, 10, 6, dtype, device), mask_of(2, 3, 17, device=device)]
    assert_parity(FusedGeneral(general), general, inputs, dtype)


def test_function_and_module_agree(device):
    fused, eager = build(8, 6, 2, device=device)
    eager.pair_norm = torch.nn.Identity()
    inputs = [*inputs_of((2,), 3, 9, 8, 6, device=device), mask_of(2, 3, 9, device=device)]
    assert torch.equal(fused(*inputs), FusedGeneral(eager)(*inputs))


def test_eps_is_that_of_the_layer_norm(device):
    fused, eager = build(8, 6, 2, device=device)
    for module in (fused, eager):
        module.layer_norm.eps = 0.5
    inputs = inputs_of((2,), 3, 9, 8, 6, device=device)
    assert_parity(fused, eager, [*inputs, None], torch.float32)


def test_state_dict_is_the_references():
    fused, eager = build(8, 6, 2)
    again = fused_ops.MSARowAttention(8, 6, 2)
    again.load_state_dict(eager.state_dict())
    assert list(again.state_dict()) == list(eager.state_dict())
    inputs = inputs_of((1,), 2, 5, 8, 6)
    assert torch.equal(again(*inputs), fused(*inputs))


# Dropout -----------------------------------------------------------------------------------------


def dropped_counts(p, n=64, s=32, heads=4, seed=7, lead=(2,), device="cpu"):
    """How many of the n uniform weights of each query are kept: (*lead, s, n, heads).

    Constant keys and values, an open gate and the identity as output projection turn the result
    into the number of kept weights / (n (1 - p)).
    """
    one = torch.ones(heads, device=device)
    zeros = torch.zeros(heads, heads, device=device)
    eye = torch.eye(heads, device=device)
    result = OPERATOR(
        torch.randn(*lead, s, n, heads, device=device),
        torch.zeros(n, n, 1, device=device),
        None,
        torch.tensor([seed], device=device),
        0 * one,
        one,
        zeros,
        zeros,
        eye,
        zeros,
        40 * one,
        None,
        None,
        torch.zeros(heads, 1, device=device),
        eye,
        None,
        heads,
        p,
        1e-5,
        "ieee",
        None,
    )
    return result * n * (1 - round(p * 65536) / 65536)


def kept(p, seed, rows, n, heads, device="cpu"):
    """Which weights are kept, as the composition has it: (rows, heads, n, n)."""
    tensors = (torch.zeros(rows, n, 1, device=device), torch.zeros(n, n, 1, device=device))
    layout = composition._Layout.of(*tensors, heads, heads)
    drop = composition._Dropout(torch.tensor([seed], device=device), p, layout)
    chunk = composition._Chunk(
        slice(0, rows), slice(0, heads), slice(0, n), slice(0, rows * heads), True, True
    )
    return drop.keep(chunk, slice(0, rows), torch.float32).view(rows, heads, n, n).bool()


def hashed(seed, row, heads, head, i, j):
    """The number of one weight, in Python's integers."""
    word, long = (1 << 32) - 1, (1 << 64) - 1

    def mix(x):
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ (x >> 33)) * factor & long
        return x ^ (x >> 33)

    golden = 0x9E3779B97F4A7C15
    key = mix(((row * heads + head) * golden + mix(seed & long)) & long)
    key = mix((key + i * golden) & long)
    x = ((key & word) + (j >> 1) * 0x9E3779B9) & word
    x = (x ^ (x >> 16)) * 0x7FEB352D & word
    x = (x ^ (x >> 15) ^ (key >> 32)) * 0x846CA68B & word
    x ^= x >> 16
    return x >> 16 if j % 2 else x & 0xFFFF


@pytest.mark.parametrize("seed", [0, 7, -(1 << 63), -123456789012345])
def test_dropout_is_the_hash_of_the_docs(seed):
    for p, n in ((0.3, 7), (0.5 / 65536, 4), (1 - 1 / 65536, 9), (1.0, 3)):
        mask = kept(p, seed, 3, n, 2)
        for at in torch.cartesian_prod(*(torch.arange(size) for size in mask.shape)).tolist():
            row, head, i, j = at
            expected = hashed(seed, row, 2, head, i, j) >= round(p * 65536)
            assert mask[row, head, i, j].item() == expected


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_of_neighbours_is_independent(p):
    """Pearson's statistic of what four weights do together: neighbours along two axes (seed, row,
    head, query, key), or four in a row along one, from even and odd positions on."""
    share = round(p * 65536) / 65536
    mask = torch.stack([kept(p, seed, 8, 64, 8) for seed in range(8)]).long()
    bits = (torch.arange(16)[:, None] >> torch.arange(4)) & 1
    odds = torch.where(bits == 1, 1 - share, share).double().prod(1)
    for one in range(mask.dim()):
        for other in range(one, mask.dim()):
            for first in (0, 1):
                pattern = mask.movedim(one, 0)[first:].unfold(
                    0, *((4, 4) if one == other else (2, 2))
                )
                if one != other:
                    pattern = pattern.movedim(-1, 0)  # (2, pairs, the other axes)
                    pattern = pattern.movedim(other + 1, 0)[first:].unfold(0, 2, 2).movedim(1, -1)
                    pattern = pattern.flatten(-2)
                code = (pattern.reshape(-1, 4) * torch.tensor([1, 2, 4, 8])).sum(1)
                counts = torch.bincount(code, minlength=16).double()
                expected = odds * len(code)
                statistic = ((counts - expected).square() / expected).sum().item()
                assert statistic < 60, (one, other, first)  # 15 degrees of freedom


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_independently_at_its_rate(device, p):
    n = 64
    counts = dropped_counts(p, n, device=device)
    torch.testing.assert_close(counts, counts.round(), atol=1e-3, rtol=0)
    total = counts.numel() * n  # 1048576 weights
    deviation = math.sqrt(p * (1 - p))
    assert abs(counts.mean().item() / n - (1 - p)) < 5 * deviation / math.sqrt(total)
    # Independent weights make binomial counts, over queries and over each other axis.
    expected = n * p * (1 - p)
    assert counts.var().item() == pytest.approx(expected, rel=5 * math.sqrt(2 / counts.numel()))
    for axis in range(counts.dim()):
        means = counts.mean(tuple(a for a in range(counts.dim()) if a != axis))
        each = counts.numel() / len(means)
        assert (means - n * (1 - p)).abs().max() < 6 * math.sqrt(expected / each)
        if len(means) > 2:
            neighbours = counts.movedim(axis, 0) - n * (1 - p)
            covariance = (neighbours[1:] * neighbours[:-1]).mean().item()
            assert abs(covariance) < 5 * expected / math.sqrt(neighbours[1:].numel())


def test_dropout_differs_between_seeds_and_positions():
    first, second = dropped_counts(0.5, seed=1), dropped_counts(0.5, seed=2)
    high = dropped_counts(0.5, seed=1 + (1 << 40))  # the upper half of the seed counts
    for other in (second, high):
        correlation = torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation.item()) < 5 / math.sqrt(first.numel())
    assert not torch.equal(first[0], first[1])


def test_dropout_repeats_with_the_generator_and_only_in_training(device):
    fused, _ = build(8, 6, 2, device=device, dropout=0.3)
    inputs = inputs_of((2,), 3, 9, 8, 6, device=device)
    torch.manual_seed(3)
    first, second = fused(*inputs), fused(*inputs)
    torch.manual_seed(3)
    assert torch.equal(fused(*inputs), first)
    assert not torch.equal(first, second)
    fused.eval()
    state = torch.get_rng_state()
    assert torch.equal(fused(*inputs), fused(*inputs))
    assert torch.equal(torch.get_rng_state(), state)  # evaluation draws nothing


def test_dropout_averages_to_evaluation(device):
    fused, _ = build(8, 6, 2, dtype=torch.float64, device=device, dropout=0.4)
    msa, pair = (t.detach() for t in inputs_of((), 2, 9, 8, 6, torch.float64, device))
    draws, batches = 1000, 4
    many = torch.cat([fused(msa.expand(draws, -1, -1, -1), pair) for _ in range(batches)])
    expected = fused.eval()(msa, pair)
    error = (many.mean(0) - expected).abs()
    assert (error < 6 * many.std(0) / math.sqrt(draws * batches)).all()


def test_dropout_one_gives_zero_attention(device):
    fused, eager = build(8, 6, 2, device=device, dropout=1.0)
    inputs = inputs_of((2,), 3, 9, 8, 6, device=device)
    result = fused(*inputs)
    assert torch.equal(result, eager.out_proj.bias.expand_as(result))
    for grad in torch.autograd.grad(result.sum(), inputs):
        assert not grad.any()


def test_dropout_is_the_same_under_checkpointing(device):
    fused, _ = build(8, 6, 2, device=device, dropout=0.3)
    inputs = inputs_of((2,), 3, 9, 8, 6, device=device)
    cotangent = torch.randn(2, 3, 9, 8, device=device)
    results = []
    for call in (fused, lambda *x: checkpoint(fused, *x, use_reentrant=False)):
        torch.manual_seed(11)
        value = call(*inputs)
        results.append((value, *torch.autograd.grad(value, inputs, cotangent)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_dropout_does_not_depend_on_the_blocks_nor_on_the_pairs_layout(monkeypatch):
    fused, _ = build(12, 10, 3, dropout=0.3)
    msa, pair = inputs_of((2, 2), 3, 17, 12, 10, pair_lead=(1, 2))
    cotangent = torch.randn(2, 2, 3, 17, 12)

    def run(pair):
        torch.manual_seed(5)
        return evaluate(fused, [msa, pair], cotangent)

    value, grads = run(pair)
    torch.testing.assert_close(run(pair.expand(2, 2, 17, 17, 10))[0], value)
    for budget in (2000, 700, 100):
        monkeypatch.setattr(_compose, "_CPU_BLOCK_ELEMENTS", budget)
        other, other_grads = run(pair)
        torch.testing.assert_close(other, value)
        for name, grad in grads.items():
            torch.testing.assert_close(other_grads[name], grad, atol=1e-4, rtol=1e-4)


# Autograd ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout, masked", [(0.0, True), (0.4, False)])
def test_gradcheck(dropout, masked):
    fused, _ = build(4, 2, 2, torch.float64, dropout=dropout)
    msa, pair = inputs_of((2,), 1, 3, 4, 2, torch.float64, pair_lead=(1,))
    mask = torch.tensor([[[1, 0, 1]], [[0, 0, 0]]]) if masked else None
    parameters = dict(fused.named_parameters())

    def call(msa, pair, *values):
        torch.manual_seed(0)
        named = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(fused, named, (msa, pair, mask))

    assert torch.autograd.gradcheck(call, (msa, pair, *parameters.values()))


def test_gradcheck_of_the_options():
    general = General(3, 2, 2, 1).double()
    fused = FusedGeneral(general)
    msa, pair = inputs_of((), 2, 3, 3, 2, torch.float64)
    parameters = dict(fused.named_parameters())

    def call(msa, pair, *values):
        named = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(fused, named, (msa, pair))

    assert torch.autograd.gradcheck(call, (msa, pair, *parameters.values()))


WANTED = [
    "input 0",
    "input 1",
    "layer_norm.weight",
    "layer_norm.bias",
    "query.weight",
    "key.weight",
    "value.weight",
    "gate.weight",
    "gate.bias",
    "pair_norm.weight",
    "pair_norm.bias",
    "pair_bias.weight",
    "out_proj.weight",
    "out_proj.bias",
]


@pytest.mark.parametrize("wanted", WANTED)
def test_only_one_gradient_wanted(wanted):
    general = General(8, 6, 2, 4)
    call = FusedGeneral(general)
    inputs = inputs_of((2,), 3, 7, 8, 6)
    mask = mask_of(2, 3, 7)
    cotangent = torch.randn(2, 3, 7, 8)
    _, grads = evaluate(call, [*inputs, mask], cotangent)
    assert set(grads) == set(WANTED)
    general.requires_grad_(False)
    inputs = [t.detach() for t in inputs]
    if wanted.startswith("input"):
        inputs[int(wanted[-1])].requires_grad_()
    else:
        general.get_parameter(wanted).requires_grad_()
    _, alone = evaluate(call, [*inputs, mask], cotangent)
    assert list(alone) == [wanted]
    assert torch.equal(alone[wanted], grads[wanted])


def test_gradients_repeat_bitwise(device):
    fused, _ = build(32, 16, 4, device=device)
    inputs = [*inputs_of((1,), 12, 65, 32, 16, device=device), mask_of(1, 12, 65, device=device)]
    cotangent = torch.randn(1, 12, 65, 32, device=device)
    value, first = evaluate(fused, inputs, cotangent)
    for _ in range(5):
        again_value, again = evaluate(fused, inputs, cotangent)
        assert torch.equal(value, again_value)
        for name in first:
            assert torch.equal(first[name], again[name]), name


def test_double_backward_raises(device):
    fused, _ = build(8, 6, 2, device=device)
    assert_double_backward_raises(fused, inputs_of((1,), 2, 4, 8, 6, device=device), OPERATOR.name)


# Framework ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_opcheck(device, dropout):
    fused, _ = build(6, 5, 2, device=device, dropout=dropout)
    msa, pair = inputs_of((1,), 2, 4, 6, 5, device=device)
    pair = pair.detach().transpose(1, 2).requires_grad_()
    opcheck(OPERATOR, fused._operands(msa, pair, mask_of(1, 2, 4, device=device)))


@pytest.mark.parametrize("masked", [False, True])
def test_compiles_without_graph_breaks(device, masked):
    fused, _ = build(8, 6, 2, device=device)
    assert_compiles(
        fused,
        lambda n: [
            *inputs_of((1,), 2, n, 8, 6, device=device),
            mask_of(1, 2, n, device=device) if masked else None,
        ],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    fused, eager = build(16, 12, 4, device=device)
    inputs = [*inputs_of((1,), 4, 33, 16, 12, device=device), mask_of(1, 4, 33, device=device)]
    cotangent = torch.randn(1, 4, 33, 16, device=device)
    with torch.autocast(device, dtype=dtype):
        ours, our_grads = evaluate(fused, inputs, cotangent)
        theirs, their_grads = evaluate(eager, inputs, cotangent)
    assert ours.dtype == theirs.dtype == dtype
    doubles = [t.detach().double().requires_grad_() for t in inputs[:2]]
    exact, exact_grads = evaluate(in_double(eager), [*doubles, inputs[2]], cotangent)
    assert_result(ours, theirs, exact, dtype)
    assert_gradients(our_grads, their_grads, exact_grads, dtype)
    assert all(g.dtype == torch.float32 for g in our_grads.values())


def test_parameters_stay_in_float32_beside_16_bit_activations(device):
    fused, eager = build(16, 12, 4, device=device)
    inputs = inputs_of((1,), 4, 33, 16, 12, torch.bfloat16, device)
    cotangent = torch.randn(1, 4, 33, 16, device=device).bfloat16()
    ours, grads = evaluate(fused, inputs, cotangent)
    assert ours.dtype == torch.bfloat16
    theirs, _ = evaluate(copy.deepcopy(eager).bfloat16(), inputs, cotangent)
    exact, _ = evaluate(in_double(eager), [t.detach().double() for t in inputs], cotangent)
    assert_result(ours, theirs, exact, torch.bfloat16)
    assert all(grads[name].dtype == p.dtype for name, p in fused.named_parameters())


# Errors ------------------------------------------------------------------------------------------


def test_wrong_shapes_are_named():
    fused, _ = build(8, 6, 2)
    msa, pair = inputs_of((2,), 3, 5, 8, 6)
    with pytest.raises(ValueError, match=r"pair must have shape \(\.\.\., N, N, pair_dim\).*got"):
        fused(msa, pair[:, :4])
    with pytest.raises(ValueError, match="leading axes of pair must equal those of msa or be 1"):
        fused(msa, torch.randn(3, 5, 5, 6))
    with pytest.raises(ValueError, match=r"msa must have shape .*at least 3 axes.*got \(5, 8\)"):
        fused(msa[0, 0], pair)
    with pytest.raises(ValueError, match="layer_norm_weight must have shape"):
        fused(torch.randn(2, 3, 5, 7), pair)
    with pytest.raises(ValueError, match="pair_bias_weight must have shape"):
        fused(msa, torch.randn(2, 5, 5, 7))
    with pytest.raises(ValueError, match=r"mask must have shape.*got \(2, 3, 4\)"):
        fused(msa, pair, torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match="leading axes of mask"):
        fused(msa, pair, torch.ones(3, 3, 5))
    with pytest.raises(ValueError, match="msa_dim must be a multiple of num_heads"):
        fused_ops.MSARowAttention(8, 6, 3)
    with pytest.raises(ValueError, match="precision"):
        fused_ops.MSARowAttention(8, 6, 2, precision="fp8")


def test_wrong_options_of_the_op_are_named():
    fused, _ = build(8, 6, 2)
    good = fused._operands(*inputs_of((2,), 3, 5, 8, 6))

    def call(index, value):
        return OPERATOR(*good[:index], value, *good[index + 1 :])

    with pytest.raises(ValueError, match="multiple of num_heads = 3"):
        call(16, 3)
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\], got 1\.5"):
        call(17, 1.5)
    with pytest.raises(ValueError, match="dropout_seed must be one int64"):
        call(3, torch.zeros(1))
    with pytest.raises(ValueError, match="pair_norm_weight and pair_norm_bias must be given"):
        call(11, torch.ones(6))


def test_wrong_dtypes_are_named():
    fused, _ = build(8, 6, 2)
    msa, pair = inputs_of((2,), 3, 5, 8, 6)
    with pytest.raises(TypeError, match="msa must be float32"):
        fused(msa.long(), pair)
    with pytest.raises(TypeError, match="pair must have the dtype of msa outside autocast"):
        fused(msa, pair.half())
    with pytest.raises(TypeError, match=r"must be float64 when msa is torch\.float64"):
        fused(msa.double(), pair.double())
    with pytest.raises(TypeError, match="mask must be bool, integer or floating"):
        fused(msa, pair, torch.ones(2, 3, 5, dtype=torch.complex64))


# Memory ------------------------------------------------------------------------------------------

BLOCK_BYTES = 4 * 2**18  # one block on the CPU, in fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_holds_the_bias_and_a_few_blocks(device, dtype):
    s, n, c, heads = 16, 192, 64, 8
    fused, eager = build(c, 32, heads, dtype, device)
    inputs = [t.detach() for t in inputs_of((1,), s, n, c, 32, dtype, device)]
    mask = mask_of(1, s, n, device=device)
    with torch.no_grad():
        ours = peak_memory(lambda: fused(*inputs, mask), device)
        theirs = peak_memory(lambda: eager(*inputs, mask), device)
    assert ours < theirs
    if device == "cpu":  # on CUDA the composition takes larger blocks; the kernels come next
        result = s * n * c * dtype.itemsize
        bias = heads * n * n * 4
        assert ours <= result + bias + 10 * BLOCK_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_holds_two_biases_the_gradients_and_a_few_blocks(device, dtype):
    s, n, c, heads = 16, 192, 64, 8
    fused, eager = build(c, 32, heads, dtype, device)
    inputs = inputs_of((1,), s, n, c, 32, dtype, device)
    mask = mask_of(1, s, n, device=device)
    cotangent = torch.randn(1, s, n, c, device=device).to(dtype)
    ours = peak_memory(lambda: evaluate(fused, [*inputs, mask], cotangent), device)
    theirs = peak_memory(lambda: evaluate(eager, [*inputs, mask], cotangent), device)
    assert ours < theirs
    if device == "cpu":
        result = s * n * c * dtype.itemsize
        gradients = (s * n * c + n * n * 32) * dtype.itemsize
        bias = heads * n * n * 4
        assert ours <= result + gradients + 2 * bias + 20 * BLOCK_BYTES


def test_expanded_inputs_are_not_copied():
    s, n, c = 512, 128, 64
    fused, _ = build(c, 256, 4)
    msa = torch.randn(1, 1, n, c).expand(1, s, n, c)
    pair = torch.randn(1, 1, n, 256).expand(1, n, n, 256)
    with torch.no_grad():
        ours = peak_memory(lambda: fused(msa, pair), "cpu")
    # A copy would be 16 blocks for either.
    assert ours <= (s * n * c + 4 * n * n) * 4 + 14 * BLOCK_BYTES


@pytest.mark.parametrize("num_heads", [2.0, True, "2", None])
@pytest.mark.parametrize("warm", [False, True], ids=["first", "after a right call"])
def test_number_of_heads_is_an_int_on_every_path(num_heads, warm):
    """A wrong type is refused by the schema, and what it leaves behind harms no right call."""
    fused = fused_ops.MSARowAttention(8, 6, 2).eval()
    args = fused._operands(torch.randn(2, 3, 5, 8), torch.randn(2, 5, 5, 6))
    where = OPERATOR._names.index("num_heads")
    wrong = [*args[:where], num_heads, *args[where + 1 :]]
    with torch.no_grad():
        right = OPERATOR(*args) if warm else None
        # True is converted to 1, which the weights do not fit.
        with pytest.raises((RuntimeError, ValueError), match="num_heads"):
            OPERATOR(*wrong)
        result = OPERATOR(*args)
    assert right is None or torch.equal(result, right)
