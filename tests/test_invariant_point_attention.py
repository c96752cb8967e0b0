# SPDX-License-Identifier: Apache-2.0
"""Invariant point attention against its eager reference."""

import copy

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

import fused_ops
from fused_ops import reference
from fused_ops.functional import invariant_point_attention
from fused_ops.invariant_point_attention.op import OPERATOR
from fused_ops.testing import peak_memory, relative_error

# node_dim, pair_dim, num_heads, num_query_points, num_value_points
SMALL = (12, 5, 3, 2, 3)
USUAL = (32, 16, 4, 4, 8)
KEPT = ("layer_norm_bias", "pair_bias_weight", "out_proj_bias")  # of the names with "_bias"


def build(sizes=SMALL, dtype=torch.float32, device="cpu"):
    """A randomised reference module and the fused module around the same parameters."""
    eager = randomize(reference.InvariantPointAttention(*sizes)).to(device, dtype)
    return fused_ops.InvariantPointAttention.from_reference(eager), eager


def random_rotations(*shape, device="cpu"):
    """Proper rotations from the QR factors of normal matrices."""
    q, r = torch.linalg.qr(torch.randn(*shape, 3, 3, dtype=torch.float64))
    q = q * torch.diagonal(r, dim1=-2, dim2=-1).sign().unsqueeze(-2)
    q[..., 0] *= torch.linalg.det(q).unsqueeze(-1)
    return q.to(device)


def inputs_of(lead, n, sizes=SMALL, dtype=torch.float32, device="cpu", offset=0.0, grad=True):
    """Node, pair and the frames of a chain of CA atoms 3.8 Angstrom apart."""
    node_dim, pair_dim = sizes[:2]
    node = torch.randn(*lead, n, node_dim, device=device).to(dtype)
    pair = torch.randn(*lead, n, n, pair_dim, device=device).to(dtype)
    steps = torch.nn.functional.normalize(torch.randn(*lead, n, 3, dtype=torch.float64), dim=-1)
    frames = torch.promote_types(dtype, torch.float32)  # as SPEC.md says for 16-bit activations
    translations = (3.8 * steps.cumsum(-2) + offset).to(device, frames)
    rotations = random_rotations(*lead, n, device=device).to(frames)
    return [t.requires_grad_(grad) for t in (node, pair, translations, rotations)]


def holes(*shape, device="cpu"):
    """A mask with holes and at least one residue left."""
    mask = torch.rand(shape, device=device) > 0.3
    mask[..., 0] = True
    return mask


# Parity ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_matches_reference(device, n, dtype):
    fused, eager = build(USUAL, dtype, device)
    inputs = inputs_of((2,), n, USUAL, dtype, device)
    assert_parity(fused, eager, [*inputs, holes(2, n, device=device)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [43, 97])  # gathered on the CPU in float64, and centred in float32
@pytest.mark.parametrize("padded", [False, True])
def test_as_good_far_from_the_origin_as_near(device, padded, n, dtype):
    fused, eager = build(USUAL, dtype, device)
    inputs = inputs_of((1,), n, USUAL, dtype, device, offset=1000.0)
    cotangent = torch.randn(1, n, USUAL[0], device=device).to(dtype)
    if padded:  # most of it, at the origin
        there = torch.arange(n, device=device).expand(1, -1) < n // 3
        with torch.no_grad():
            inputs[2][~there] = 0.0
        inputs.append(there)
        cotangent = cotangent * there.unsqueeze(-1)
    ours, our_grads = evaluate(fused, inputs, cotangent)
    theirs, their_grads = evaluate(eager, inputs, cotangent)
    exact, exact_grads = evaluate(in_double(eager), [as_double(t) for t in inputs], cotangent)
    if padded:
        ours, theirs, exact = (value[there] for value in (ours, theirs, exact))
    # Not assert_result: its 1e-4 against the reference is less than the reference's own error.
    error, allowed = relative_error(ours, exact), relative_error(theirs, exact)
    # In 16 bits both are the rounding of the result.
    assert error <= (allowed / 10 if dtype == torch.float32 else 1.1 * allowed)  # measured: 1/260
    assert_gradients(our_grads, their_grads, exact_grads, dtype)


@pytest.mark.parametrize("masked", [False, True])
def test_matches_reference_over_many_blocks(device, masked):
    fused, eager = build((24, 6, 12, 4, 8), device=device)
    inputs = inputs_of((2,), 193, (24, 6), device=device)
    mask = holes(2, 193, device=device) if masked else None
    assert_parity(fused, eager, [*inputs, mask], torch.float32)


@pytest.mark.parametrize("n", [2, 131])
def test_matches_reference_over_blocks_of_batch_elements(device, n):
    fused, eager = build((8, 3, 4, 1, 2), device=device)
    assert_parity(fused, eager, inputs_of((11,), n, (8, 3), device=device), torch.float32)


@pytest.mark.parametrize(
    "sizes", [(33, 17, 3, 1, 3), (4, 1, 1, 1, 1), (6, 2, 6, 5, 1), (96, 64, 3, 4, 8)]
)
def test_matches_reference_at_odd_sizes(device, sizes):
    fused, eager = build(sizes, device=device)
    assert_parity(fused, eager, inputs_of((1,), 19, sizes, device=device), torch.float32)


@pytest.mark.parametrize(("lead", "n"), [((0,), 3), ((2,), 0), ((0,), 0), ((2, 0), 4)])
def test_empty_input_gives_empty_result_and_zero_gradients(device, lead, n):
    fused, _ = build(device=device)
    inputs = inputs_of(lead, n, device=device)
    result = fused(*inputs, torch.ones(*lead, n, device=device))
    assert result.shape == (*lead, n, SMALL[0])
    result.sum().backward()
    for tensor in inputs:
        assert tensor.grad.shape == tensor.shape
    for name, parameter in fused.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_strided_inputs_mask_and_cotangent(device):
    fused, _ = build(device=device)
    inputs, mask = inputs_of((2,), 9, device=device), holes(2, 9, device=device)
    cotangent = torch.randn(2, 9, SMALL[0], device=device)
    value, grads = evaluate(fused, [*inputs, mask], cotangent)
    others = [strided(t.detach()).requires_grad_() for t in inputs]
    other_value, other_grads = evaluate(fused, [*others, strided(mask)], strided(cotangent))
    assert torch.equal(value, other_value)
    for name, grad in grads.items():
        assert torch.equal(grad, other_grads[name]), name


def test_transposed_pair_and_expanded_cotangent(device):
    fused, eager = build(device=device)
    node, pair, translations, rotations = inputs_of((2,), 9, device=device)
    pair = pair.detach().transpose(1, 2).requires_grad_()
    inverse = rotations.detach().transpose(-1, -2).requires_grad_()
    assert_parity(fused, eager, [node, pair, translations, inverse], torch.float32)
    fused(node, pair, translations, inverse).sum().backward()  # an expanded scalar
    grads = [t.grad.clone() for t in (node, pair, inverse)]
    copies = [t.detach().contiguous().requires_grad_() for t in (node, pair, inverse)]
    result = fused(copies[0], copies[1], translations, copies[2])
    result.backward(torch.ones_like(result))
    for grad, other in zip(grads, copies, strict=True):
        assert torch.equal(grad, other.grad)


def test_leading_axes_equal_a_loop(device):
    fused, _ = build(device=device)
    inputs = inputs_of((2, 3), 7, device=device, grad=False)
    mask = holes(1, 3, 7, device=device)  # broadcasts over the first axis
    whole = fused(*inputs, mask)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(whole[i, j], fused(*(t[i, j] for t in inputs), mask[0, j]))


@pytest.mark.parametrize("pair_lead", [(), (1,), (3,), (1, 1), (1, 3), (2, 1), (2, 3)], ids=str)
def test_pair_and_frames_broadcast_over_leading_axes(device, pair_lead):
    fused, eager = build(device=device)
    node = inputs_of((2, 3), 9, device=device)[0]
    _, pair, translations, rotations = inputs_of(pair_lead, 9, device=device)
    _, _, more_translations, _ = inputs_of((2, 1), 9, device=device)
    assert_parity(fused, eager, [node, pair, translations, rotations], torch.float32)
    assert_parity(fused, eager, [node, pair, more_translations, rotations], torch.float32)


def test_expanded_pair_is_not_copied(device):
    n, sizes = 65, (8, 32, 2, 1, 1)
    fused, eager = build(sizes, device=device)
    node, _, translations, rotations = inputs_of((16,), n, sizes, device=device)
    pair = inputs_of((1,), n, sizes, device=device)[1]
    expanded = pair.detach().expand(16, n, n, sizes[1])
    assert_parity(fused, eager, [node, expanded, translations, rotations], torch.float32)
    with torch.no_grad():
        peak = peak_memory(lambda: fused(node, expanded, translations, rotations), device)
    if device == "cpu":
        assert peak < expanded.numel() * expanded.itemsize / 2


def test_three_axes_are_enough(device):
    fused, _ = build(device=device)
    inputs = inputs_of((), 7, device=device)
    torch.testing.assert_close(fused(*inputs), fused(*(t[None] for t in inputs))[0])


# Geometry ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_rigid_motion_of_the_whole_changes_nothing(device, shift):
    fused, eager = build(USUAL, device=device)
    # Moved in float64: a perfect implementation would see only the rounding of moved frames.
    inputs = inputs_of((1,), 64, USUAL, device=device, grad=False)
    node, pair, translations, rotations = inputs
    turn = random_rotations(device=device)
    moved = translations.double() @ turn + shift
    turned = rotations.double() @ turn

    def change(module, dtype):
        with torch.no_grad():
            still = module(
                node.to(dtype), pair.to(dtype), translations.to(dtype), rotations.to(dtype)
            )
            again = module(node.to(dtype), pair.to(dtype), moved.to(dtype), turned.to(dtype))
        return relative_error(again, still)

    assert change(in_double(fused), torch.float64) < (1e-9 if shift else 1e-12)
    ours, theirs = change(fused, torch.float32), change(eager, torch.float32)
    assert ours <= theirs


@pytest.mark.parametrize("outlier", [300.0, 1e4])
def test_far_residue_costs_no_more_than_in_the_reference(device, outlier):
    fused, eager = build(USUAL, device=device)
    inputs = inputs_of((1,), 193, USUAL, device=device)
    with torch.no_grad():
        inputs[2][:, 64] += outlier
    cotangent = torch.randn(1, 193, USUAL[0], device=device)
    ours, our_grads = evaluate(fused, inputs, cotangent)
    theirs, their_grads = evaluate(eager, inputs, cotangent)
    exact, exact_grads = evaluate(in_double(eager), [as_double(t) for t in inputs], cotangent)
    assert relative_error(ours, exact) <= 1.5 * relative_error(theirs, exact)
    others = torch.arange(193, device=device) != 64
    error = relative_error(ours[:, others], exact[:, others])
    assert error <= 1.5 * relative_error(theirs[:, others], exact[:, others])
    assert_gradients(our_grads, their_grads, exact_grads, torch.float32)


@pytest.mark.parametrize("n", [33, 97])
def test_eight_thousand_angstrom_from_the_origin(device, n):
    fused, _ = build(USUAL, device=device)
    node, pair, translations, rotations = inputs_of((1,), n, USUAL, device=device, grad=False)
    translations = (translations * 1024).round() / 1024 + 8192.0  # exact in float32
    with torch.no_grad():
        far = fused(node, pair, translations, rotations)
        near = fused(node, pair, translations - 8192.0, rotations)
    assert relative_error(far, near) < 1e-6  # measured: 3e-8 to 7e-8 over 8 seeds


# Masks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.half, torch.bfloat16, torch.float64],
    ids=str,
)
def test_mask_of_any_dtype(device, dtype):
    fused, _ = build(device=device)
    inputs, mask = inputs_of((2,), 9, device=device), holes(2, 9, device=device)
    assert torch.equal(fused(*inputs, mask), fused(*inputs, mask.to(dtype)))


def test_anything_but_zero_is_there(device):
    fused, _ = build(device=device)
    inputs, mask = inputs_of((2,), 9, device=device), holes(2, 9, device=device)
    odd = torch.where(mask, torch.randn(2, 9, device=device) - 3.0, 0.0)
    assert torch.equal(fused(*inputs, mask), fused(*inputs, odd))


def test_no_mask_is_a_mask_of_ones(device):
    fused, _ = build(device=device)
    inputs = inputs_of((2,), 9, device=device)
    assert torch.equal(fused(*inputs), fused(*inputs, torch.ones(2, 9, device=device)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_attend_to_gives_the_bias_and_zero_gradients(device, dtype):
    fused, _ = build(dtype=dtype, device=device)
    inputs = inputs_of((3,), 9, dtype=dtype, device=device, offset=100.0)
    mask = torch.ones(3, 9, device=device)
    mask[1] = 0
    cotangent = torch.randn(3, 9, SMALL[0], device=device)
    value, grads = evaluate(fused, [*inputs, mask], cotangent)
    assert torch.equal(value[1], fused.out_proj.bias.detach().expand(9, -1))
    for i in range(4):
        assert not grads[f"input {i}"][1].any()
    rest = [t.detach()[::2].requires_grad_() for t in inputs]
    rest_value, rest_grads = evaluate(fused, rest, cotangent[::2])
    torch.testing.assert_close(value[::2], rest_value)
    for name, grad in rest_grads.items():
        assert grads[name].isfinite().all(), name
        if name.startswith("input"):
            torch.testing.assert_close(grads[name][::2], grad)
        elif name != "out_proj.bias":
            torch.testing.assert_close(grads[name], grad)


@pytest.mark.parametrize("n", [1, 5, 31, 65])
def test_padding_does_not_leak(device, n):
    fused, _ = build(USUAL, device=device)
    inputs = inputs_of((2,), n, USUAL, device=device)
    cotangent = torch.randn(2, n, USUAL[0], device=device)
    value, grads = evaluate(fused, inputs, cotangent)
    padded = []
    for tensor, axes in zip(inputs, (1, 2, 1, 1), strict=True):
        shape = [size + 7 if 0 < i <= axes else size for i, size in enumerate(tensor.shape)]
        large = 1e4 * torch.randn(shape, device=device)
        large[tuple(slice(size) for size in tensor.shape)] = tensor.detach()
        padded.append(large.requires_grad_())
    mask = torch.arange(n + 7, device=device).expand(2, -1) < n
    zeros = torch.zeros(2, 7, USUAL[0], device=device)
    padded_value, padded_grads = evaluate(
        fused, [*padded, mask], torch.cat([cotangent, zeros], dim=1)
    )
    torch.testing.assert_close(padded_value[:, :n], value, atol=1e-5, rtol=1e-5)
    for name, grad in grads.items():
        other = padded_grads[name]
        if name.startswith("input"):
            other = other[tuple(slice(size) for size in grad.shape)]
        torch.testing.assert_close(other, grad, atol=1e-4, rtol=1e-4)
    assert not padded_grads["input 0"][:, n:].any()
    assert not padded_grads["input 1"][:, :n, n:].any()


def test_mask_that_requires_grad_is_refused(device):
    fused, _ = build(device=device)
    mask = torch.ones(1, 3, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="node_mask must not require a gradient"):
        fused(*inputs_of((1,), 3, device=device), mask)


# Values that are not numbers ---------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", range(4))
def test_not_finite_spreads_as_in_the_reference(device, which, value):
    fused, eager = build(device=device)
    inputs = inputs_of((2,), 9, device=device, grad=False)
    inputs[which][(0, 4, 2)[: inputs[which].dim()]] = value
    ours, theirs = fused(*inputs), eager(*inputs)
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert not ours[0].isfinite().all()
    assert ours[1].isfinite().all()


def test_not_finite_pair_rows_of_absent_keys_do_not_matter(device):
    fused, eager = build(device=device)
    inputs = inputs_of((1,), 9, device=device, grad=False)
    mask = torch.ones(1, 9, device=device)
    mask[0, 5] = 0
    inputs[1][:, :, 5] = float("nan")
    torch.testing.assert_close(fused(*inputs, mask), eager(*inputs, mask))


# Options -----------------------------------------------------------------------------------------


class Functional(torch.nn.Module):
    """The function over the parameters of a module."""

    def __init__(self, inner, **options):
        super().__init__()
        self.inner = inner
        self.options = options

    def forward(self, *inputs):
        named = dict(zip(OPERATOR._names, self.inner._operands(*inputs), strict=True))
        for name in ("eps", "precision", "dtype"):
            del named[name]
        return invariant_point_attention(**named, **self.options)


def test_output_projection_without_bias(device):
    fused, eager = build(device=device)
    for module in (fused, eager):
        module.out_proj.register_parameter("bias", None)
    again = fused_ops.InvariantPointAttention.from_reference(eager)
    inputs = inputs_of((2,), 9, device=device)
    assert_parity(again, eager, inputs, torch.float32)
    assert torch.equal(Functional(fused)(*inputs), fused(*inputs))


def test_heads_of_another_width_than_the_node(device):
    fused, eager = build(device=device)
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(eager, name, torch.nn.Linear(12, 21, bias=False, device=device))
    eager.out_proj = torch.nn.Linear(21 + 27, 12, device=device)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(fused, name, getattr(eager, name))
    assert_parity(fused, eager, inputs_of((2,), 9, device=device), torch.float32)


def test_eps_is_that_of_the_layer_norm(device):
    _, eager = build(device=device)
    eager.layer_norm.eps = 0.5
    fused = fused_ops.InvariantPointAttention.from_reference(eager)
    assert_parity(fused, eager, inputs_of((2,), 9, device=device), torch.float32)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_layer_norm_without_parameters_is_refused(name):
    fused, _ = build()
    fused.layer_norm.register_parameter(name, None)  # to the op: no LayerNorm at all
    with pytest.raises(TypeError, match="layer_norm must have a weight and a bias, got None"):
        fused(*inputs_of((1,), 3))


def test_options_have_the_defaults_of_the_module(device):
    fused, _ = build(device=device)
    inputs = [*inputs_of((2,), 9, device=device), holes(2, 9, device=device)]
    options = {"scalar_scale": 4**-0.5, "point_scale": 1.0, "bias_scale": 1.0}
    options |= {"gathers_pair": False, "norm_eps": None, "pair_value": None}
    named = dict(zip(OPERATOR._names, fused._operands(*inputs), strict=True)) | options
    del named["precision"], named["dtype"]
    assert torch.equal(invariant_point_attention(**named), fused(*inputs))


def test_old_arguments_keep_their_places(device):
    fused, _ = build(device=device)
    inputs = [*inputs_of((2,), 9, device=device), holes(2, 9, device=device)]
    named = dict(zip(OPERATOR._names, fused._operands(*inputs), strict=True))
    old = [name for name in OPERATOR._names if "_bias" not in name or name in KEPT]
    old = old[: old.index("num_value_points") + 1]
    old.remove("pair_value")
    result = invariant_point_attention(*(named[name] for name in old), eps=1e-5, precision=None)
    assert torch.equal(result, fused(*inputs))


# Autograd ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck(masked):
    fused, _ = build((4, 2, 2, 2, 1), torch.float64)
    inputs = inputs_of((2,), 3, (4, 2), torch.float64)
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]]) if masked else None
    parameters = dict(fused.named_parameters())

    def call(node, pair, translations, rotations, *values):
        named = dict(zip(parameters, values, strict=True))
        frames = (node, pair, translations, rotations, mask)
        return torch.func.functional_call(fused, named, frames)

    # Element by element without a mask; with one, along random directions.
    operands = (*inputs, *parameters.values())
    assert torch.autograd.gradcheck(call, operands, fast_mode=masked)


def test_gradcheck_over_broadcast_axes():
    fused, _ = build((4, 3, 2, 1, 1), torch.float64)
    fused.requires_grad_(False)
    node = inputs_of((2, 2), 3, (4, 3), torch.float64)[0]
    _, pair, translations, _ = inputs_of((1, 2), 3, (4, 3), torch.float64)
    rotations = inputs_of((2, 1), 3, (4, 3), torch.float64)[3]
    assert torch.autograd.gradcheck(fused, (node, pair, translations, rotations))


@pytest.mark.parametrize("wanted", range(16))
def test_only_one_gradient_wanted(wanted):
    fused, _ = build()
    inputs = inputs_of((2,), 7)
    cotangent = torch.randn(2, 7, SMALL[0])
    _, grads = evaluate(fused, inputs, cotangent)
    name = list(grads)[wanted]
    inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(inputs)]
    for parameter_name, parameter in fused.named_parameters():
        parameter.requires_grad_(parameter_name == name)
    _, alone = evaluate(fused, inputs, cotangent)
    assert list(alone) == [name]
    assert torch.equal(alone[name], grads[name])


def test_gradients_repeat_bitwise(device):
    fused, _ = build(USUAL, device=device)
    inputs, mask = inputs_of((1,), 300, USUAL, device=device), holes(1, 300, device=device)
    cotangent = torch.randn(1, 300, USUAL[0], device=device)
    _, first = evaluate(fused, [*inputs, mask], cotangent)
    for _ in range(5):
        _, again = evaluate(fused, [*inputs, mask], cotangent)
        for name in first:
            assert torch.equal(first[name], again[name]), name


def test_double_backward_raises(device):
    fused, _ = build(device=device)
    assert_double_backward_raises(fused, inputs_of((1,), 4, device=device), OPERATOR.name)


# Framework ---------------------------------------------------------------------------------------


def test_opcheck(device):
    fused, _ = build(device=device)
    node, pair, translations, rotations = inputs_of((1,), 4, device=device)
    pair = pair.detach().transpose(1, 2).requires_grad_()
    inputs = [node, pair, translations, rotations]
    opcheck(OPERATOR, fused._operands(*inputs, holes(1, 4, device=device)))


@pytest.mark.parametrize("masked", [False, True])
def test_compiles_without_graph_breaks(device, masked):
    fused, _ = build(device=device)

    def inputs_for(n):
        node, pair, translations, rotations = inputs_of((1,), n, device=device)
        mask = [holes(1, n, device=device)] if masked else []
        return [node, pair.transpose(1, 2), translations, rotations, *mask]

    assert_compiles(fused, inputs_for)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    fused, eager = build(USUAL, device=device)
    inputs = inputs_of((1,), 33, USUAL, device=device)
    cotangent = torch.randn(1, 33, USUAL[0], device=device)
    with torch.autocast(device, dtype=dtype):
        ours, our_grads = evaluate(fused, inputs, cotangent)
        theirs, their_grads = evaluate(eager, inputs, cotangent)
    assert ours.dtype == theirs.dtype == dtype
    exact, exact_grads = evaluate(in_double(eager), [as_double(t) for t in inputs], cotangent)
    assert_result(ours, theirs, exact, dtype)
    assert_gradients(our_grads, their_grads, exact_grads, dtype)
    assert all(g.dtype == torch.float32 for g in our_grads.values())


def test_parameters_and_frames_of_other_dtypes(device):
    fused, eager = build(USUAL, device=device)
    inputs = inputs_of((1,), 33, USUAL, torch.bfloat16, device)
    cotangent = torch.randn(1, 33, USUAL[0], device=device).bfloat16()
    ours, grads = evaluate(fused, inputs, cotangent)
    assert ours.dtype == torch.bfloat16
    theirs, _ = evaluate(copy.deepcopy(eager).bfloat16(), inputs, cotangent)
    exact, _ = evaluate(in_double(eager), [as_double(t) for t in inputs], cotangent)
    assert_result(ours, theirs, exact, torch.bfloat16)
    assert all(grads[n].dtype == p.dtype for n, p in fused.named_parameters())
    node, pair, translations, rotations = inputs
    rough = [translations.detach().bfloat16(), rotations.detach().half().requires_grad_()]
    ours, grads = evaluate(fused, [node, pair, *rough], cotangent)
    exact, _ = evaluate(in_double(eager), [as_double(t) for t in (node, pair, *rough)], cotangent)
    frames = [t.detach().float() for t in rough]  # the reference keeps its frames in fp32
    theirs, _ = evaluate(copy.deepcopy(eager).bfloat16(), [node, pair, *frames], cotangent)
    assert_result(ours, theirs, exact, torch.bfloat16)
    assert grads["input 3"].dtype == torch.float16


# Errors ------------------------------------------------------------------------------------------


def test_wrong_shapes_are_named():
    fused, _ = build()
    node, pair, translations, rotations = inputs_of((2,), 5)
    with pytest.raises(ValueError, match=r"node must have shape \(\.\.\., N, node_dim\).*got"):
        fused(node[0, 0], pair, translations, rotations)
    with pytest.raises(ValueError, match=r"pair must have shape.*got \(2, 5, 4, 5\)"):
        fused(node, pair[:, :, :4], translations, rotations)
    with pytest.raises(ValueError, match="pair_bias_weight must have shape"):
        fused(node, pair[..., :4], translations, rotations)
    with pytest.raises(ValueError, match="layer_norm_weight must have shape"):
        fused(node[..., :9], pair, translations, rotations)
    with pytest.raises(ValueError, match=r"translations must have shape.*got \(2, 4, 3\)"):
        fused(node, pair, translations[:, :4], rotations)
    with pytest.raises(ValueError, match=r"rotations must have shape.*got \(2, 5, 3, 2\)"):
        fused(node, pair, translations, rotations[..., :2])
    with pytest.raises(ValueError, match=r"node_mask must have shape.*got \(2, 4\)"):
        fused(node, pair, translations, rotations, torch.ones(2, 4))
    with pytest.raises(ValueError, match="leading axes of pair"):
        fused(node, torch.cat([pair, pair]), translations, rotations)
    with pytest.raises(ValueError, match="multiple of num_heads"):
        fused_ops.InvariantPointAttention(10, 4, 3, 2, 2)
    with pytest.raises(ValueError, match="precision"):
        fused_ops.InvariantPointAttention(*SMALL, precision="fp8")


def test_wrong_dtypes_are_named():
    fused, _ = build()
    node, pair, translations, rotations = inputs_of((1,), 3)
    with pytest.raises(TypeError, match="node must be float32"):
        fused(torch.ones(1, 3, 12, dtype=torch.int64), pair, translations, rotations)
    with pytest.raises(TypeError, match=r"pair must have the dtype of node.*got torch\.bfloat16"):
        fused(node, pair.bfloat16(), translations, rotations)
    with pytest.raises(TypeError, match=r"must be float64 when node is torch\.float64"):
        fused(node.double(), pair.double(), translations, rotations)
    with pytest.raises(TypeError, match=r"node_mask must be bool, integer or floating"):
        fused(node, pair, translations, rotations, torch.ones(1, 3, dtype=torch.complex64))


# Memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_holds_no_tensor_of_pairs(device, dtype):
    n, sizes = 256, (48, 16, 12, 4, 8)
    fused, eager = build(sizes, dtype, device)
    inputs = inputs_of((1,), n, sizes, dtype, device, grad=False)
    with torch.no_grad():
        ours = peak_memory(lambda: fused(*inputs), device)
        theirs = peak_memory(lambda: eager(*inputs), device)
    assert ours < theirs / 5
    if device == "cpu":  # on CUDA the composition takes larger blocks; the kernels come next
        blocks = 8 * 2**18 * 4  # temporaries of a block of rows, in fp32
        points = 12 * n * (2 * 14 + 25) * 8  # features of all heads, in fp64
        assert ours < blocks + 4 * points


def test_training_step_holds_little_beside_the_gradients(device):
    n, sizes = 256, (48, 16, 12, 4, 8)
    fused, eager = build(sizes, device=device)
    inputs = inputs_of((1,), n, sizes, device=device)
    cotangent = torch.randn(1, n, sizes[0], device=device)
    ours = peak_memory(lambda: evaluate(fused, inputs, cotangent), device)
    theirs = peak_memory(lambda: evaluate(eager, inputs, cotangent), device)
    assert ours < theirs / (5 if device == "cpu" else 4)  # blocks are larger on CUDA
