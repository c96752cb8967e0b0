# SPDX-License-Identifier: Apache-2.0
"""Invariant point attention in its general form, in every arithmetic that kernels tell apart.

The bodies are the same on both devices; the CPU takes smaller sizes.
"""

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
)
from test_invariant_point_attention import holes, inputs_of
from test_msa_row_attention_kernels import everywhere, lengths, tf32
from torch import nn
from torch.nn import functional

import fused_ops
from fused_ops.functional import invariant_point_attention
from fused_ops.testing import relative_error

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "q_pts", "k_pts", "v_pts")


class General(nn.Module):
    """The definition, with all that models add to it."""

    def __init__(
        self,
        node_dim,
        pair_dim,
        heads,
        head_dim,
        query_points,
        value_points,
        *,
        bias=True,
        norm=True,
        value_dim=0,
        gathers_pair=False,
        norm_eps=None,
        scales=(None, 1.0, 1.0),
    ):
        super().__init__()
        self.heads, self.query_points, self.value_points = heads, query_points, value_points
        self.gathers_pair, self.norm_eps, self.scales = gathers_pair, norm_eps, scales
        widths = [heads * head_dim] * 3
        widths += [heads * 3 * points for points in (query_points, query_points, value_points)]
        for name, width in zip(PROJECTIONS, widths, strict=True):
            setattr(self, name, nn.Linear(node_dim, width, bias=bias))
        self.pair_bias = nn.Linear(pair_dim, heads, bias=bias)
        self.head_weights = nn.Parameter(torch.zeros(heads))
        features = head_dim + (3 if norm_eps is None else 4) * value_points
        features += pair_dim if gathers_pair else value_dim
        self.out_proj = nn.Linear(heads * features, node_dim, bias=bias)
        self.layer_norm = nn.LayerNorm(node_dim) if norm else None

    def forward(self, node, pair, translations, rotations, mask=None, pair_value=None):
        h, (scalar, point, pair_scale) = self.heads, self.scales
        x = node if self.layer_norm is None else self.layer_norm(node)
        q, k, v = (getattr(self, name)(x).unflatten(-1, (h, -1)) for name in PROJECTIONS[:3])

        def place(name):
            local = getattr(self, name)(x).unflatten(-1, (h, -1, 3)).to(rotations.dtype)
            moved = torch.einsum("...nhpc,...ncd->...nhpd", local, rotations)
            return moved + translations[..., None, None, :]

        q_pts, k_pts, v_pts = (place(name) for name in PROJECTIONS[3:])
        scalar = q.shape[-1] ** -0.5 if scalar is None else scalar
        logits = torch.einsum("...ihd,...jhd->...hij", q, k) * scalar
        difference = q_pts.unsqueeze(-4) - k_pts.unsqueeze(-5)
        squared = difference.square().sum(dim=(-1, -2)).movedim(-1, -3)
        weight = functional.softplus(self.head_weights)[:, None, None]
        logits = logits - 0.5 * point * weight * squared
        logits = logits + pair_scale * self.pair_bias(pair).movedim(-1, -3)
        if mask is not None:
            logits = logits.masked_fill((mask == 0)[..., None, None, :], -math.inf)
        a = torch.softmax(logits, dim=-1)
        features = [torch.einsum("...hij,...jhd->...ihd", a.to(v.dtype), v).flatten(-2)]
        gathered = torch.einsum("...hij,...jhpd->...ihpd", a.to(v_pts.dtype), v_pts)
        centred = gathered - translations[..., None, None, :]
        local = torch.einsum("...nhpd,...ncd->...nhpc", centred, rotations)
        features.append(local.flatten(-3))
        if self.norm_eps is not None:
            features.append((local.square().sum(-1) + self.norm_eps).sqrt().flatten(-2))
        source = pair if self.gathers_pair else pair_value
        if source is not None:
            features.append(
                torch.einsum("...hij,...ijc->...ihc", a.to(source.dtype), source).flatten(-2)
            )
        return self.out_proj(torch.cat([f.to(v.dtype) for f in features], dim=-1))


class Fused(General):
    """The op around the parameters of the definition."""

    def __init__(self, eager):
        nn.Module.__init__(self)
        self.__dict__.update(eager.__dict__)

    def forward(self, node, pair, translations, rotations, mask=None, pair_value=None):
        e = self
        scalar, point, pair_scale = e.scales
        weights = [getattr(e, name).weight for name in PROJECTIONS]
        norm = e.layer_norm
        return invariant_point_attention(
            node,
            pair,
            translations,
            rotations,
            mask,
            None if norm is None else norm.weight,
            None if norm is None else norm.bias,
            *weights,
            e.pair_bias.weight,
            e.head_weights,
            e.out_proj.weight,
            e.out_proj.bias,
            e.heads,
            e.query_points,
            e.value_points,
            pair_value=pair_value,
            **{f"{name}_bias": getattr(e, name).bias for name in PROJECTIONS},
            pair_bias_bias=e.pair_bias.bias,
            scalar_scale=scalar,
            point_scale=point,
            bias_scale=pair_scale,
            gathers_pair=e.gathers_pair,
            norm_eps=e.norm_eps,
        )


def modules(place, dtype, *sizes, **options):
    """The general form, fused and eager, around the same parameters."""
    eager = randomize(General(*sizes, **options)).to(place, dtype)
    return Fused(eager), eager


def tensors(place, dtype, lead, n, node_dim, pair_dim, value_dim=0, offset=0.0):
    inputs = inputs_of(lead, n, (node_dim, pair_dim), dtype, place, offset=offset)
    value = None
    if value_dim:
        value = torch.randn(*lead, n, n, value_dim, device=place).to(dtype).requires_grad_()
    return inputs, value


def check(fused, eager, inputs, mask, value, dtype):
    """The value alone, against float64, by the rule for results; in fp32 also with TF32."""
    with torch.no_grad():
        given = [*(x.detach() for x in inputs), mask, None if value is None else value.detach()]
        exact = in_double(eager)(*(as_double(x) for x in given[:4]), mask, as_double(given[5]))
        assert_result(fused(*given), eager(*given), exact, dtype)
        if dtype == torch.float32 and inputs[0].is_cuda:
            with tf32():  # an operand rounded to eleven bits, each time
                allowed = 1.5 * relative_error(eager(*given), exact) + 2**-10
                assert relative_error(fused(*given), exact) <= allowed


ALPHAFOLD = {"gathers_pair": True, "norm_eps": 1e-8, "norm": False}
ALPHAFOLD["scales"] = ((3 * 16) ** -0.5, (3 * 4 * 9 / 2) ** -0.5, 3**-0.5)


@everywhere
@pytest.mark.parametrize("n", [1, 2, 17, 33, 64, 77, 128, 257])
def test_any_length(place, dtype, n):
    if place == "cpu" and n > 100:
        n = n // 8 + 1
    for options in ({}, ALPHAFOLD):
        fused, eager = modules(place, dtype, 264, 32, 4, 16, 4, 8, **options)
        inputs, value = tensors(place, dtype, (2,), n, 264, 32)
        for mask in (None, holes(2, n, device=place)):
            check(fused, eager, inputs, mask, value, dtype)


@everywhere
@pytest.mark.parametrize("head_dim", [1, 8, 12, 16, 24, 32, 48, 64, 128, 256])
def test_any_width_of_a_head(place, dtype, head_dim):
    fused, eager = modules(place, dtype, 40, 24, 3, head_dim, 4, 8)
    for n in lengths(place, 19, 150):
        inputs, _ = tensors(place, dtype, (1,), n, 40, 24)
        check(fused, eager, inputs, holes(1, n, device=place), None, dtype)


@everywhere
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 13, 16])
def test_any_number_of_heads(place, dtype, heads):
    fused, eager = modules(place, dtype, 40, 24, heads, 8, 4, 8, **ALPHAFOLD)
    for n in lengths(place, 19, 150):
        inputs, _ = tensors(place, dtype, (1,), n, 40, 24)
        check(fused, eager, inputs, holes(1, n, device=place), None, dtype)


@everywhere
@pytest.mark.parametrize("points", [(1, 1), (2, 5), (8, 4), (16, 16), (3, 12)])
def test_any_number_of_points(place, dtype, points):
    fused, eager = modules(place, dtype, 40, 24, 3, 16, *points, norm_eps=1e-8)
    for n in lengths(place, 19, 150):
        inputs, _ = tensors(place, dtype, (1,), n, 40, 24)
        check(fused, eager, inputs, holes(1, n, device=place), None, dtype)


@everywhere
@pytest.mark.parametrize("channels", [(1, 1, 1), (7, 5, 3), (33, 127, 65), (256, 264, 32)])
def test_any_channels(place, dtype, channels):
    c, z, values = channels
    fused, eager = modules(place, dtype, c, z, 5, 8, 2, 3, value_dim=values)
    for n in lengths(place, 19, 140):
        inputs, value = tensors(place, dtype, (2,), n, c, z, values)
        check(fused, eager, inputs, holes(2, n, device=place), value, dtype)


FORMS = {
    "plain": {"bias": False},
    "alphafold": ALPHAFOLD,
    "framediff": {"value_dim": 8, "norm_eps": 1e-8, "norm": False, "scales": (0.2, 0.3, 0.6)},
}


@everywhere
@pytest.mark.parametrize("n", [2, 33, 77, 257])
@pytest.mark.parametrize("form", FORMS)
def test_value_and_gradients(place, dtype, form, n):
    if place == "cpu":
        n = n // 4 + 1
    options = FORMS[form]
    value_dim = options.get("value_dim", 0)
    fused, eager = modules(place, dtype, 48, 24, 12, 16, 4, 8, **options)
    inputs, value = tensors(place, dtype, (2,), n, 48, 24, value_dim)
    assert_parity(fused, eager, [*inputs, holes(2, n, device=place), value], dtype)


@everywhere
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 256])
def test_gradients_of_any_width(place, dtype, head_dim):
    fused, eager = modules(place, dtype, 40, 20, 3, head_dim, 3, 5)
    for n in lengths(place, 13, 70):
        inputs, _ = tensors(place, dtype, (1,), n, 40, 20)
        assert_parity(fused, eager, [*inputs, holes(1, n, device=place)], dtype)


@everywhere
def test_blocks_of_queries(place, dtype):
    """More logits than exist at a time, so that sums over queries come in parts."""
    n = 61 if place == "cpu" else 1090
    fused, eager = modules(place, dtype, 32, 16, 12, 8, 2, 2, **ALPHAFOLD)
    inputs, _ = tensors(place, dtype, (2,), n, 32, 16)
    assert_parity(fused, eager, [*inputs, holes(2, n, device=place)], dtype)


@everywhere
@pytest.mark.parametrize(
    "lead, pair_lead", [((3,), (1,)), ((2, 3), (3,)), ((2, 3), (2, 1)), ((), ())]
)
def test_shared_pairs_and_frames(place, dtype, lead, pair_lead):
    fused, eager = modules(place, dtype, 264, 16, 4, 8, 2, 2, value_dim=8)
    n = 17
    (node, *_), _ = tensors(place, dtype, lead, n, 264, 16)
    (_, pair, translations, rotations), value = tensors(place, dtype, pair_lead, n, 264, 16, 8)
    mask = holes(*pair_lead, n, device=place)
    assert_parity(fused, eager, [node, pair, translations, rotations, mask, value], dtype)


@everywhere
def test_no_key(place, dtype):
    """Where a batch element has no residue, the result is the output bias, and gradients are 0."""
    fused, _ = modules(place, dtype, 264, 16, 4, 8, 2, 3, **ALPHAFOLD)
    for n in lengths(place, 9, 70):
        inputs, _ = tensors(place, dtype, (2,), n, 264, 16)
        mask = holes(2, n, device=place)
        mask[1] = False
        result = fused(*inputs, mask)
        assert torch.equal(result[1], fused.out_proj.bias.expand(n, -1))
        grads = torch.autograd.grad(result.float().square().sum(), [*inputs, *fused.parameters()])
        assert all(grad.isfinite().all() for grad in grads)
        assert not any(grad[1].any() for grad in grads[:4])


@everywhere
def test_masked_residues_hold_anything(place, dtype):
    fused, _ = modules(place, dtype, 264, 16, 4, 8, 2, 3, **ALPHAFOLD)
    for n in lengths(place, 9, 70):
        inputs, _ = tensors(place, dtype, (1,), n, 264, 16)
        mask = holes(1, n, device=place)
        mask[:, -1] = False
        with torch.no_grad():
            clean = fused(*inputs, mask)
            inputs[2][:, -1] = 1e7
            other = fused(*inputs, mask)
        torch.testing.assert_close(other[:, :-1], clean[:, :-1])


@everywhere
def test_gradients_are_the_same_every_time(place, dtype):
    fused, _ = modules(place, dtype, 48, 24, 12, 16, 4, 8, **ALPHAFOLD)
    n = 20 if place == "cpu" else 300
    inputs, _ = tensors(place, dtype, (1,), n, 48, 24)
    wanted = [*inputs, *fused.parameters()]
    once, twice = (
        torch.autograd.grad(fused(*inputs).float().sin().sum(), wanted) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


@everywhere
def test_only_what_is_asked_for(place, dtype):
    fused, _ = modules(place, dtype, 48, 24, 4, 16, 4, 8, **FORMS["framediff"])
    n = 13 if place == "cpu" else 90
    inputs, value = tensors(place, dtype, (1,), n, 48, 24, 8)
    mask = holes(1, n, device=place)
    wanted = [*inputs, value, *fused.parameters()]
    result = fused(*inputs, mask, value)
    cotangent = torch.randn_like(result)
    all_of_them = torch.autograd.grad(result, wanted, cotangent, retain_graph=True)
    for one, expected in zip(wanted, all_of_them, strict=True):
        (alone,) = torch.autograd.grad(result, [one], cotangent, retain_graph=True)
        assert torch.equal(alone, expected)


@everywhere
def test_parameters_of_another_dtype(place, dtype):
    """Mixed precision as training has it: parameters stay in fp32."""
    if dtype == torch.float32:
        pytest.skip("nothing is mixed")
    _, eager = modules(place, torch.float32, 264, 32, 4, 16, 4, 8, **ALPHAFOLD)
    fused = Fused(eager)
    n = 17 if place == "cpu" else 65
    inputs, _ = tensors(place, dtype, (1,), n, 264, 32)
    mask = holes(1, n, device=place)
    cotangent = torch.randn(1, n, 264, device=place).to(dtype)
    ours, our_grads = evaluate(fused, [*inputs, mask], cotangent)
    lower = in_double(eager).to(dtype)
    theirs, their_grads = evaluate(lower, [*inputs, mask], cotangent)
    exact, exact_grads = evaluate(
        in_double(eager), [*(as_double(x) for x in inputs), mask], cotangent.double()
    )
    assert_result(ours, theirs, exact, dtype)
    assert_gradients(our_grads, their_grads, exact_grads, dtype)


@pytest.mark.gpu
def test_memory_is_linear_and_a_block():
    """Beyond inputs, result and the pair gradient: O(N) and a block of queries."""
    n = 2048
    fused, _ = modules("cuda", torch.bfloat16, 384, 128, 12, 16, 4, 8, **ALPHAFOLD)
    (node, pair, translations, rotations), _ = tensors("cuda", torch.bfloat16, (1,), n, 384, 128)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        fused(node, pair, translations, rotations)
    assert torch.cuda.max_memory_allocated() - before < 120 << 20
    torch.cuda.reset_peak_memory_stats()
    fused(node, pair, translations, rotations).float().sum().backward()
    beyond = torch.cuda.max_memory_allocated() - before - pair.numel() * 2
    assert beyond < 300 << 20


@pytest.mark.gpu
def test_long_protein_trains():
    """N = 4096 on one GPU: a pair tensor of 2^31 elements, and as large a gradient."""
    n = 4096
    fused, _ = modules("cuda", torch.bfloat16, 384, 128, 12, 16, 4, 8, **ALPHAFOLD)
    (node, pair, translations, rotations), _ = tensors("cuda", torch.bfloat16, (1,), n, 384, 128)
    result = fused(node, pair, translations, rotations)
    result.float().sin().sum().backward()
    assert result.isfinite().all()
    # The last queries alone are the same as among all.
    rows = slice(n - 40, n)
    assert pair.grad[:, rows].isfinite().all()
    assert pair.grad[:, rows].any()
    with torch.no_grad():
        exact = _rows_of_the_definition(fused, rows, node, pair, translations, rotations)
    assert relative_error(result[:, rows], exact) < 3e-2


def _rows_of_the_definition(eager, rows, node, pair, translations, rotations):
    """Some rows of the definition's result, in float64."""
    e = in_double(eager)
    node, translations, rotations = (x.double() for x in (node, translations, rotations))
    h, (scalar, point, pair_scale) = e.heads, e.scales
    q, k, v = (getattr(e, name)(node).unflatten(-1, (h, -1)) for name in PROJECTIONS[:3])

    def place(name):
        local = getattr(e, name)(node).unflatten(-1, (h, -1, 3))
        moved = torch.einsum("...nhpc,...ncd->...nhpd", local, rotations)
        return moved + translations[..., None, None, :]

    q_pts, k_pts, v_pts = (place(name) for name in PROJECTIONS[3:])
    out = []
    for at in range(rows.start, rows.stop):
        pairs = pair[:, at].double()
        logits = torch.einsum("bhd,bjhd->bhj", q[:, at], k) * scalar
        squared = (q_pts[:, None, at] - k_pts).square().sum((-1, -2)).mT
        logits = logits - 0.5 * point * functional.softplus(e.head_weights)[:, None] * squared
        a = torch.softmax(logits + pair_scale * e.pair_bias(pairs).mT, dim=-1)
        gathered = torch.einsum("bhj,bjhpd->bhpd", a, v_pts) - translations[:, at, None, None]
        local = torch.einsum("bhpd,bcd->bhpc", gathered, rotations[:, at])
        features = [torch.einsum("bhj,bjhd->bhd", a, v).flatten(1), local.flatten(1)]
        features.append((local.square().sum(-1) + e.norm_eps).sqrt().flatten(1))
        features.append(torch.einsum("bhj,bjc->bhc", a, pairs).flatten(1))
        out.append(e.out_proj(torch.cat(features, dim=-1)))
    return torch.stack(out, dim=1)


@pytest.mark.gpu
def test_every_plan_is_a_kernel():
    module = fused_ops.InvariantPointAttention(64, 32, 4, 4, 8).cuda()
    inputs, _ = tensors("cuda", torch.float32, (2,), 32, 64, 32)
    assert fused_ops.explain(module, *inputs).path == "kernel"
    assert fused_ops.explain(module, *inputs, backward=True).path == "kernel"
