# SPDX-License-Identifier: Apache-2.0
"""Triangle attention, the second module of msa_row_attention, against its eager reference."""

import copy
import inspect
import math
import pickle

import pytest
import torch
from helpers import (
    DTYPES,
    SIZES,
    as_double,
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
from fused_ops.functional import msa_row_attention, triangle_attention
from fused_ops.msa_row_attention.op import OPERATOR

DIRECTIONS = ["starting", "ending"]
both = pytest.mark.parametrize("direction", DIRECTIONS)


@pytest.fixture(params=["whole", "blocks"])
def blocking(request, monkeypatch):
    """On the CPU a small problem is one block and takes a shorter way: each is tested both ways."""
    if request.param == "blocks":
        monkeypatch.setattr(_compose, "_CPU_BLOCK_ELEMENTS", 200)


def build(c=8, heads=2, d=None, direction="starting", dtype=torch.float32, device="cpu", p=0.0):
    """A randomised reference module and the fused module around the same parameters."""
    eager = randomize(reference.TriangleAttention(c, heads, d, direction, p))
    eager = eager.to(device, dtype)
    return fused_ops.TriangleAttention.from_reference(eager), eager


def random(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def mask_of(*shape, device="cpu"):
    """Holes, and no row or column without a key (there the reference gives NaN)."""
    mask = torch.rand(shape, device=device) > 0.3
    if mask.numel():
        mask[..., 0] = True
        mask[..., 0, :] = True
    return mask


class WithDeadQueries(torch.nn.Module):
    """The reference, with the documented result for queries that have no keys."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, pair, mask):
        axis = -1 if self.inner.direction == "starting" else -2
        dead = (mask == 0).all(axis, keepdim=True)
        result = self.inner(pair, (mask != 0) | dead)
        return torch.where(dead.unsqueeze(-1), self.inner.out_proj.bias, result)


def call_function(module, pair, mask=None, **options):
    m = module
    return triangle_attention(
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
        **{"direction": m.direction, **options},
    )


# The definition ----------------------------------------------------------------------------------


@both
def test_the_reference_is_the_formula(direction):
    n, heads, d = 4, 2, 3
    module = randomize(reference.TriangleAttention(5, heads, d, direction)).double()
    pair, mask = torch.randn(n, n, 5).double(), mask_of(n, n)
    x = module.layer_norm(pair)
    q, k, v, gate = (
        f(x).unflatten(-1, (heads, d))
        for f in (module.query, module.key, module.value, module.gate)
    )
    bias = module.pair_bias(x)
    out = torch.empty(n, n, heads, d).double()
    for i in range(n):
        for j in range(n):
            for h in range(heads):
                if direction == "starting":
                    keys = [(i, other) for other in range(n) if mask[i, other]]
                    biases = [(j, edge[1]) for edge in keys]
                else:
                    keys = [(other, j) for other in range(n) if mask[other, j]]
                    biases = [(edge[0], i) for edge in keys]
                logits = torch.stack(
                    [
                        q[i, j, h] @ k[edge][h] / math.sqrt(d) + bias[other][h]
                        for edge, other in zip(keys, biases, strict=True)
                    ]
                )
                weights = torch.softmax(logits, 0)
                values = torch.stack([v[edge][h] for edge in keys])
                out[i, j, h] = torch.sigmoid(gate[i, j, h]) * (weights @ values)
    torch.testing.assert_close(module(pair, mask), module.out_proj(out.flatten(-2)))


def test_the_ending_node_is_the_starting_node_of_the_transposed_pair(device):
    starting, eager = build(12, 3, 5, device=device)
    ending = fused_ops.TriangleAttention(12, 3, 5, "ending").to(device)
    ending.load_state_dict(eager.state_dict())
    pair, mask = random(2, 9, 9, 12, device=device), mask_of(2, 9, 9, device=device)
    turned = starting(pair.transpose(1, 2), mask.transpose(1, 2)).transpose(1, 2)
    assert torch.equal(ending(pair, mask), turned)
    assert not torch.allclose(ending(pair, mask), starting(pair, mask))


def test_it_is_row_attention_of_the_pair_with_itself(device):
    fused, m = build(8, 2, 3, device=device)
    pair, mask = random(2, 9, 9, 8, device=device), mask_of(2, 9, 9, device=device)
    norm = m.layer_norm.weight, m.layer_norm.bias
    expected = msa_row_attention(
        pair,
        pair,
        mask,
        *norm,
        m.query.weight,
        m.key.weight,
        m.value.weight,
        m.gate.weight,
        m.gate.bias,
        m.pair_bias.weight,
        m.out_proj.weight,
        m.out_proj.bias,
        2,
        pair_norm_weight=norm[0],
        pair_norm_bias=norm[1],
    )
    assert torch.equal(fused(pair, mask), expected)


# Parity ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
@both
def test_matches_reference(device, direction, n, dtype):
    fused, eager = build(24, 4, 8, direction, dtype, device)
    pair = random(2, n, n, 24, dtype=dtype, device=device)
    assert_parity(fused, eager, [pair, mask_of(2, n, n, device=device)], dtype)
    if n < 77:
        assert_parity(fused, eager, [pair, None], dtype)


@pytest.mark.usefixtures("blocking")
@pytest.mark.parametrize("sizes", [(3, 1, None), (7, 4, 1), (6, 3, 16), (33, 1, 40), (96, 6, None)])
@both
def test_head_width_is_free(device, direction, sizes):
    fused, eager = build(*sizes, direction, device=device)
    assert fused.query.weight.shape[0] == sizes[1] * (sizes[2] or sizes[0] // sizes[1])
    pair, mask = random(1, 13, 13, sizes[0], device=device), mask_of(1, 13, 13, device=device)
    assert_parity(fused, eager, [pair, mask], torch.float32)


@pytest.mark.usefixtures("blocking")
@pytest.mark.parametrize(
    ("lead", "mask_lead"),
    [((), ()), ((3,), (3,)), ((3,), ()), ((2, 3), (2, 3)), ((2, 3), (2, 1)), ((2, 3), (3,))],
)
@both
def test_leading_axes(device, direction, lead, mask_lead):
    fused, eager = build(8, 2, 3, direction, device=device)
    pair, mask = random(*lead, 7, 7, 8, device=device), mask_of(*mask_lead, 7, 7, device=device)
    assert_parity(fused, eager, [pair, mask], torch.float32)
    whole, masks = fused(pair, mask), mask.expand(*lead, 7, 7)
    for index in _compose.lead_indices(lead):
        torch.testing.assert_close(whole[index], fused(pair[index], masks[index]))


@both
def test_empty_input_gives_empty_result_and_zero_gradients(device, direction):
    fused, _ = build(8, 2, 3, direction, device=device)
    for lead, n in (((0,), 5), ((2,), 0), ((), 0), ((0, 2), 0)):
        pair = random(*lead, n, n, 8, device=device)
        result = fused(pair, torch.ones(pair.shape[:-1], device=device))
        assert result.shape == pair.shape and result.is_contiguous()
        fused.zero_grad()
        result.sum().backward()
        assert pair.grad.shape == pair.shape
        for name, parameter in fused.named_parameters():
            assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.usefixtures("blocking")
@both
def test_any_strides(device, direction):
    fused, eager = build(8, 2, 3, direction, device=device)
    pair, mask = random(2, 9, 9, 8, device=device), mask_of(2, 9, 9, device=device)
    cotangent = torch.randn(2, 9, 9, 8, device=device)
    value, grads = evaluate(fused, [pair, mask], cotangent)
    sliced = strided(pair.detach()).requires_grad_(), strided(mask)
    turned = pair.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    other_way = turned, mask.transpose(1, 2).contiguous().transpose(1, 2)
    for args in (sliced, other_way):
        for other in (cotangent, strided(cotangent)):
            again, again_grads = evaluate(fused, args, other)
            assert again.is_contiguous()
            torch.testing.assert_close(again, value)
            for name, grad in grads.items():
                torch.testing.assert_close(again_grads[name], grad, atol=1e-5, rtol=1e-5)
    expanded = pair.detach()[:1, :1].expand(2, 9, 9, 8).requires_grad_()
    assert_parity(fused, eager, [expanded, mask[:1].expand(2, 9, 9)], torch.float32)


@both
def test_missing_biases(device, direction):
    _, eager = build(8, 2, 3, direction, device=device)
    for child in (eager.gate, eager.out_proj):
        child.register_parameter("bias", None)
    fused = fused_ops.TriangleAttention.from_reference(eager)
    args = [random(2, 9, 9, 8, device=device), mask_of(2, 9, 9, device=device)]
    assert_parity(fused, eager, args, torch.float32)
    assert torch.equal(call_function(fused, *args), fused(*args))


@both
def test_function_and_module_agree(device, direction):
    fused, eager = build(8, 2, 3, direction, device=device)
    args = [random(2, 9, 9, 8, device=device), mask_of(2, 9, 9, device=device)]
    assert torch.equal(call_function(eager, *args), fused(*args))
    for module in (fused, eager):
        module.layer_norm.eps = 0.5
    assert_parity(fused, eager, [*args], torch.float32)
    assert torch.equal(call_function(eager, *args, eps=0.5, precision="ieee"), fused(*args))


# Masks -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("blocking")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@both
def test_query_without_keys_attends_to_nothing(device, direction, dtype):
    fused, eager = build(8, 2, 3, direction, dtype, device)
    pair, mask = random(2, 9, 9, 8, dtype=dtype, device=device), mask_of(2, 9, 9, device=device)
    own = (0, 4) if direction == "starting" else (0, slice(None), 4)
    mask[own] = False
    mask[1] = False
    result = fused(pair, mask)
    assert torch.equal(result[own], eager.out_proj.bias.expand(9, 8))
    assert torch.equal(result[1], eager.out_proj.bias.expand(9, 9, 8))
    (grad,) = torch.autograd.grad(result, pair, torch.randn_like(result))
    assert torch.isfinite(grad).all() and grad[0].any() and not grad[1].any()
    if dtype != torch.float64:
        assert_parity(fused, WithDeadQueries(eager), [pair, mask], dtype)


@both
def test_masked_edges_are_no_keys_whatever_stands_there(device, direction):
    fused, _ = build(8, 2, 3, direction, device=device)
    pair = random(1, 12, 12, 8, device=device).detach()
    mask = torch.ones(1, 12, 12, device=device)
    mask[:, 9:], mask[:, :, 9:] = 0, 0
    short = fused(pair[:, :9, :9])
    torch.testing.assert_close(fused(pair, mask)[:, :9, :9], short)
    pair[:, 9:], pair[:, :, 9:] = 1e4, -1e4
    torch.testing.assert_close(fused(pair, mask)[:, :9, :9], short)


@both
def test_only_keys_are_masked(device, direction):
    """An edge that is not there still gets a result: what the mask hides are keys."""
    fused, eager = build(8, 2, 3, direction, device=device)
    pair, mask = random(1, 5, 5, 8, device=device), torch.ones(1, 5, 5, device=device)
    mask[0, 2, 3] = 0
    changed = (fused(pair, mask) - fused(pair)).abs().sum(-1)[0] > 1e-4
    expected = torch.zeros(5, 5, dtype=torch.bool, device=device)
    expected[(2,) if direction == "starting" else (slice(None), 3)] = True
    assert torch.equal(changed, expected)
    torch.testing.assert_close(fused(pair, mask), eager(pair, mask))


@both
def test_masks_of_all_dtypes(device, direction):
    fused, _ = build(8, 2, 3, direction, device=device)
    pair, mask = random(2, 9, 9, 8, device=device), mask_of(2, 9, 9, device=device)
    expected = fused(pair, mask)
    for dtype in (torch.uint8, torch.int64, torch.half, torch.bfloat16, torch.float64):
        assert torch.equal(fused(pair, mask.to(dtype)), expected)
    assert torch.equal(fused(pair, torch.where(mask, math.inf, -0.0)), expected)


# Dropout -----------------------------------------------------------------------------------------


@both
def test_dropout(device, direction):
    fused, _ = build(8, 2, 3, direction, device=device, p=0.4)
    pair = random(2, 9, 9, 8, device=device)
    torch.manual_seed(3)
    first, second = fused(pair), fused(pair)
    torch.manual_seed(3)
    assert torch.equal(fused(pair), first) and not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(call_function(fused, pair, dropout=0.4), first)
    cotangent = torch.randn_like(first)
    results = []
    for call in (fused, lambda *x: checkpoint(fused, *x, use_reentrant=False)):
        torch.manual_seed(11)
        value = call(pair)
        results.append((value, *torch.autograd.grad(value, pair, cotangent)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with torch.no_grad():
        many = torch.stack([fused(pair[:1]) for _ in range(100)])
        plain = fused.eval()(pair[:1])
    assert torch.equal(fused(pair[:1]), plain)
    assert ((many.mean(0) - plain).abs() < 6 * many.std(0) / math.sqrt(100)).all()


# Autograd ----------------------------------------------------------------------------------------


@both
def test_gradcheck(direction):
    fused, _ = build(3, 2, 2, direction, torch.float64)
    pair = random(2, 3, 3, 3, dtype=torch.float64)
    mask = torch.tensor([[[1, 0, 1], [0, 0, 0], [1, 0, 0]], [[1, 1, 1], [1, 0, 0], [0, 1, 1]]])
    parameters = dict(fused.named_parameters())

    def call(pair, *values):
        named = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(fused, named, (pair, mask))

    assert torch.autograd.gradcheck(call, (pair, *parameters.values()))


@both
def test_only_one_gradient_wanted(direction):
    fused, _ = build(8, 2, 3, direction)
    pair, mask = random(2, 7, 7, 8), mask_of(2, 7, 7)
    cotangent = torch.randn(2, 7, 7, 8)
    _, grads = evaluate(fused, [pair, mask], cotangent)
    for wanted, expected in grads.items():
        fused.requires_grad_(False)
        one = pair.detach()
        if wanted == "input 0":
            one.requires_grad_()
        else:
            fused.get_parameter(wanted).requires_grad_()
        _, alone = evaluate(fused, [one, mask], cotangent)
        assert list(alone) == [wanted]
        assert torch.equal(alone[wanted], expected), wanted


@both
def test_gradients_repeat_bitwise(device, direction):
    fused, _ = build(16, 4, 8, direction, device=device)
    args = [random(1, 33, 33, 16, device=device), mask_of(1, 33, 33, device=device)]
    cotangent = torch.randn(1, 33, 33, 16, device=device)
    value, first = evaluate(fused, args, cotangent)
    for _ in range(3):
        again_value, again = evaluate(fused, args, cotangent)
        assert torch.equal(value, again_value)
        assert all(torch.equal(first[name], again[name]) for name in first)


@both
def test_double_backward_raises(device, direction):
    fused, _ = build(8, 2, 3, direction, device=device)
    assert_double_backward_raises(fused, [random(1, 4, 4, 8, device=device)], OPERATOR.name)


# Framework ---------------------------------------------------------------------------------------


def test_opcheck(device):
    """Of the operator, with one tensor for the MSA and the pair, as it is called here."""
    fused, _ = build(6, 2, 2, "ending", device=device)
    pair, mask = random(1, 4, 4, 6, device=device), mask_of(1, 4, 4, device=device)
    flat = fused._operands(pair, mask)
    flat[0] = flat[1] = flat[0].detach().requires_grad_()  # a leaf, transposed
    opcheck(OPERATOR, flat)


@pytest.mark.parametrize("masked", [False, True])
@both
def test_compiles_without_graph_breaks(device, direction, masked):
    fused, _ = build(8, 2, 3, direction, device=device)
    assert_compiles(
        fused,
        lambda n: [
            random(1, n, n, 8, device=device),
            mask_of(1, n, n, device=device) if masked else None,
        ],
        lengths=(17, 24, 33, 39),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@both
def test_autocast(device, direction, dtype):
    fused, eager = build(16, 4, 8, direction, device=device)
    args = [random(1, 33, 33, 16, device=device), mask_of(1, 33, 33, device=device)]
    cotangent = torch.randn(1, 33, 33, 16, device=device)
    with torch.autocast(device, dtype=dtype):
        ours, our_grads = evaluate(fused, args, cotangent)
        theirs, their_grads = evaluate(eager, args, cotangent)
    assert ours.dtype == theirs.dtype == dtype
    exact, exact_grads = evaluate(in_double(eager), [as_double(a) for a in args], cotangent)
    assert_result(ours, theirs, exact, dtype)
    assert_gradients(our_grads, their_grads, exact_grads, dtype)
    assert all(g.dtype == torch.float32 for g in our_grads.values())


@both
def test_result_is_contiguous_and_no_view(device, direction):
    fused, _ = build(8, 2, 3, direction, device=device)
    for n in (1, 2, 9):
        pair = random(1, n, n, 8, device=device)
        for result in (fused(pair), fused(pair.detach())):
            assert result.is_contiguous() and not result._is_view()


@both
def test_explain(direction):
    fused, _ = build(8, 2, 3, direction)
    pair = random(1, 5, 5, 8)
    for backward in (False, True):
        told = fused_ops.explain(fused, pair, torch.ones(1, 5, 5), backward=backward)
        assert str(told) == "msa_row_attention: PyTorch composition (CPU tensors)"
    with pytest.raises(ValueError, match=r"triangle_attention: pair must have shape .*\(1, 4, 5,"):
        fused_ops.explain(fused, pair[:, :4])


NODES = {
    "starting": fused_ops.TriangleAttentionStartingNode,
    "ending": fused_ops.TriangleAttentionEndingNode,
}


@both
def test_convenience_classes(direction):
    fused, eager = build(8, 2, 3, direction, p=0.25)
    cls, pair = NODES[direction], random(1, 5, 5, 8)
    names = list(inspect.signature(cls).parameters)
    assert names == ["pair_dim", "num_heads", "head_dim", "dropout", "precision"]
    node = cls.from_reference(eager, precision="ieee")
    assert node.query.weight is eager.query.weight
    assert (node.direction, node.head_dim, node.dropout.p) == (direction, 3, 0.25)
    assert isinstance(node, fused_ops.TriangleAttention)
    again = cls(8, 2, 3, dropout=0.25)
    again.load_state_dict(node.state_dict())
    for other in (again, copy.deepcopy(node), pickle.loads(pickle.dumps(node))):
        assert type(other) is cls
        assert torch.equal(other.eval()(pair), fused.eval()(pair))
    text = rf"{cls.__name__}.from_reference: module must have direction '{direction}', got"
    _, opposite = build(8, 2, 3, DIRECTIONS[direction == "starting"])
    with pytest.raises(ValueError, match=text):
        cls.from_reference(opposite)
    del opposite.direction  # a model's own class, which has its direction in its name
    assert cls.from_reference(opposite).direction == direction
    with pytest.raises(
        TypeError, match=r"must have the parameters of TriangleAttention.*direction"
    ):
        fused_ops.TriangleAttention.from_reference(opposite)
    assert repr(again).startswith(f"{cls.__name__}(\n  (layer_norm)")
    assert "\n  precision='ieee'\n" in repr(node)


def test_repr_tells_the_direction_that_is_not_the_default():
    cls = fused_ops.TriangleAttention
    assert cls(8, 2).extra_repr() == ""
    assert cls(8, 2, precision="tf32").extra_repr() == "precision='tf32'"
    assert cls(8, 2, None, "ending").extra_repr() == "direction='ending'"
    assert cls(8, 2, 3, "ending", precision="tf32").extra_repr() == (
        "direction='ending', precision='tf32'"
    )


# Errors ------------------------------------------------------------------------------------------


def test_wrong_constructor_arguments_are_named():
    cls = fused_ops.TriangleAttention
    with pytest.raises(ValueError, match=r"pair_dim must be a multiple of num_heads.*got 8, 3"):
        cls(8, 3)
    assert cls(8, 3, 5).query.weight.shape == (15, 8)
    for bad, text in (
        ((8, 2, 0), "head_dim must be at least 1, got 0"),
        ((8, 2, None, "middle"), "direction must be 'starting' or 'ending', got 'middle'"),
    ):
        with pytest.raises(ValueError, match=text):
            cls(*bad)


@both
def test_wrong_arguments_are_named(direction):
    fused, _ = build(8, 2, 3, direction)
    pair, mask = random(2, 5, 5, 8), mask_of(2, 5, 5)

    def refused(kind, text, *args):
        for context in (torch.no_grad(), torch.enable_grad()):
            with context, pytest.raises(kind, match=f"triangle_attention: {text}"):
                fused(*args)

    refused(TypeError, r"pair_repr must be a torch\.Tensor, got list", [1.0])
    refused(TypeError, r"pair_mask must be a torch\.Tensor or None, got list", pair, [1.0])
    refused(ValueError, r"pair_repr must have shape .*at least 3 axes.*got \(5, 8\)", pair[0, 0])
    refused(
        ValueError,
        r"pair must have shape \(\.\.\., N, N, pair_dim\), got \(2, 4, 5, 8\)",
        pair[:, :4],
    )
    refused(ValueError, r"layer_norm_weight must have shape \(pair_dim,\) = \(7,\)", pair[..., :7])
    refused(
        ValueError, r"pair_mask must have shape .*at least 2 axes.*got \(5,\)", pair, mask[0, 0]
    )
    refused(ValueError, r"mask must have shape .*got \(2, 5, 4\)", pair, mask[..., :4])
    refused(
        ValueError, r"the leading axes of mask .*\(2,\), got \(4,\)", pair, mask.repeat(2, 1, 1)
    )
    refused(TypeError, "mask must be bool, integer or floating", pair, mask.to(torch.complex64))
    refused(TypeError, r"pair must be float32.*got torch\.int64", pair.detach().long())
    refused(TypeError, r"layer_norm_weight must be float64 when pair is", pair.double())
    refused(
        RuntimeError,
        "mask must be on the device of pair, expected cpu, got meta",
        pair,
        mask.to("meta"),
    )


@pytest.mark.parametrize(
    ("name", "change", "kind", "text"),
    [
        ("query_weight", lambda w: w[:5], ValueError, r"a multiple of num_heads = 2 rows, got 5"),
        ("query_weight", lambda w: w[0], ValueError, r"query_weight must have shape .*at least 2"),
        ("key_weight", lambda w: w[:4], ValueError, r"key_weight must have shape .*\(6, 8\), got"),
        ("gate_bias", lambda w: w[:4], ValueError, r"gate_bias must have shape .*\(6,\), got \(4"),
        ("pair_bias_weight", lambda w: w[:1], ValueError, r"pair_bias_weight must .*\(2, 8\), got"),
        ("out_proj_weight", lambda w: w.t(), ValueError, r"out_proj_weight .*\(8, 6\), got \(6, 8"),
        ("out_proj_bias", lambda w: w.double(), TypeError, r"out_proj_bias must be float32"),
        ("value_weight", lambda w: None, TypeError, r"value_weight must be a torch\.Tensor, got N"),
        ("value_weight", lambda w: 1.0, TypeError, r"value_weight must be a torch\.Tensor, got f"),
        (
            "key_weight",
            lambda w: w.to("meta"),
            RuntimeError,
            r"key_weight must be on the device of",
        ),
        ("num_heads", lambda h: 0, ValueError, r"a multiple of num_heads = 0 rows"),
        ("num_heads", lambda h: 2.0, TypeError, r"num_heads must be an int, got float"),
        ("dropout", lambda p: 1.5, ValueError, r"dropout must be in \[0, 1\], got 1\.5"),
        ("direction", lambda d: "up", ValueError, r"direction must be 'starting' or 'ending'"),
        ("precision", lambda p: "fp8", ValueError, r"precision must be None, 'ieee' or 'tf32'"),
    ],
)
@both
def test_wrong_arguments_of_the_function_are_named(direction, name, change, kind, text):
    m, _ = build(8, 2, 3, direction)
    arguments = {
        "pair": torch.randn(2, 5, 5, 8),
        "mask": None,
        **{key.replace(".", "_"): p.detach() for key, p in m.named_parameters()},
        "num_heads": 2,
        "direction": direction,
        "dropout": 0.0,
        "precision": None,
    }
    right = triangle_attention(**arguments)
    with pytest.raises(kind, match=f"triangle_attention: .*{text}"):
        triangle_attention(**{**arguments, name: change(arguments[name])})
    assert torch.equal(triangle_attention(**arguments), right)
