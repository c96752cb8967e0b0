# SPDX-License-Identifier: Apache-2.0
"""Triangular multiplicative update against its eager reference."""

import copy

import pytest
import torch
from helpers import (
    DTYPES,
    ROUNDING,
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

import fused_ops
from fused_ops import reference
from fused_ops.functional import triangular_multiplicative_update
from fused_ops.testing import peak_memory, relative_error
from fused_ops.triangular_multiplicative_update import composition
from fused_ops.triangular_multiplicative_update.op import OPERATOR

DIRECTIONS = ["incoming", "outgoing"]


@pytest.fixture(params=["joined", "separate"])
def projections(request, monkeypatch):
    """On the CPU the four projections of a small problem are one product: both ways are tested."""
    if request.param == "separate":
        monkeypatch.setattr(composition, "_FEW_WEIGHTS", 0)


def build(pair_dim, hidden_dim, direction="incoming", dtype=torch.float32, device="cpu"):
    """A randomised reference module and the fused module around the same parameters."""
    eager = randomize(reference.TriangularMultiplicativeUpdate(pair_dim, hidden_dim, direction))
    eager = eager.to(device, dtype)
    return fused_ops.TriangularMultiplicativeUpdate.from_reference(eager), eager


def pair_of(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def mask_of(*shape, device="cpu"):
    """A fractional mask with holes."""
    return torch.rand(shape, device=device) * (torch.rand(shape, device=device) > 0.3)


# Parity ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("projections")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_matches_reference(device, direction, n, dtype):
    fused, eager = build(24, 20, direction, dtype, device)
    pair = pair_of(2, n, n, 24, dtype=dtype, device=device)
    assert_parity(fused, eager, [pair, mask_of(2, n, n, device=device).to(dtype)], dtype)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_matches_reference_over_many_blocks(device, direction):
    fused, eager = build(32, 48, direction, device=device)
    pair = pair_of(1, 257, 257, 32, device=device)
    assert_parity(fused, eager, [pair, mask_of(1, 257, 257, device=device)], torch.float32)


@pytest.mark.usefixtures("projections")
@pytest.mark.parametrize("channels", [(4, 1), (1, 4), (64, 96), (127, 127)])
def test_matches_reference_at_odd_channels(device, channels):
    fused, eager = build(*channels, device=device)
    pair = pair_of(1, 19, 19, channels[0], device=device)
    assert_parity(fused, eager, [pair, None], torch.float32)


@pytest.mark.parametrize("shape", [(0, 3, 3, 8), (2, 0, 0, 8), (0, 0, 0, 8)])
def test_empty_input_gives_empty_result_and_zero_gradients(device, shape):
    fused, _ = build(8, 4, device=device)
    pair = pair_of(*shape, device=device)
    result = fused(pair, torch.ones(shape[:-1], device=device))
    assert result.shape == shape
    result.sum().backward()
    assert pair.grad.shape == shape
    for name, parameter in fused.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.usefixtures("projections")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_strided_input_mask_and_cotangent(device, direction):
    fused, eager = build(8, 12, direction, device=device)
    pair, mask = pair_of(2, 9, 9, 8, device=device), mask_of(2, 9, 9, device=device)
    cotangent = strided(torch.randn(2, 9, 9, 8, device=device))
    value, grads = evaluate(fused, [pair, mask], cotangent)
    other = strided(pair.detach()).requires_grad_()
    other_value, other_grads = evaluate(fused, [other, strided(mask)], cotangent)
    assert torch.equal(value, other_value)
    for name, grad in grads.items():
        assert torch.equal(grad, other_grads[name]), name


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_transposed_input_and_expanded_cotangent(device, direction):
    fused, eager = build(8, 12, direction, device=device)
    base = pair_of(2, 9, 9, 8, device=device)
    transposed = base.detach().transpose(1, 2).requires_grad_()
    assert_parity(fused, eager, [transposed, None], torch.float32)
    fused(transposed).sum().backward()  # the cotangent is an expanded scalar
    contiguous = transposed.detach().contiguous().requires_grad_()
    fused(contiguous).backward(torch.ones_like(base))
    assert torch.equal(transposed.grad, contiguous.grad)


@pytest.mark.usefixtures("projections")
def test_leading_axes_equal_a_loop(device):
    fused, _ = build(6, 5, device=device)
    pair = pair_of(2, 3, 7, 7, 6, device=device).detach()
    mask = mask_of(1, 3, 7, 7, device=device)  # broadcasts over the first axis
    whole = fused(pair, mask)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(whole[i, j], fused(pair[i, j], mask[0, j]))
    expanded = pair[:1].expand(4, 3, 7, 7, 6)
    torch.testing.assert_close(fused(expanded, mask)[3], whole[0])


def test_three_axes_are_enough(device):
    fused, _ = build(6, 5, device=device)
    pair, mask = pair_of(7, 7, 6, device=device), mask_of(7, 7, device=device)
    torch.testing.assert_close(fused(pair, mask), fused(pair[None], mask[None])[0])


# Masks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.half, torch.bfloat16, torch.float64],
    ids=str,
)
def test_mask_of_any_dtype(device, dtype):
    fused, _ = build(8, 4, device=device)
    pair = pair_of(2, 9, 9, 8, device=device)
    mask = (torch.rand(2, 9, 9, device=device) > 0.4).float()
    assert torch.equal(fused(pair, mask), fused(pair, mask.to(dtype)))


def test_no_mask_is_a_mask_of_ones(device):
    fused, _ = build(8, 4, device=device)
    pair = pair_of(2, 9, 9, 8, device=device)
    assert torch.equal(fused(pair), fused(pair, torch.ones(2, 9, 9, device=device)))


@pytest.mark.usefixtures("projections")
def test_all_zero_mask_stays_finite(device):
    fused, eager = build(8, 4, device=device)
    pair = pair_of(2, 9, 9, 8, device=device)
    assert_parity(fused, eager, [pair, torch.zeros(2, 9, 9, device=device)], torch.float32)


def test_mask_that_requires_grad_is_refused(device):
    fused, _ = build(8, 4, device=device)
    mask = torch.ones(1, 3, 3, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="pair_mask must not require a gradient"):
        fused(torch.randn(1, 3, 3, 8, device=device), mask)


# Options -----------------------------------------------------------------------------------------


class GateFromNormalized(torch.nn.Module):
    """AlphaFold's convention, composed from the reference module's parameters."""

    def __init__(self, eager):
        super().__init__()
        self.inner = copy.deepcopy(eager)

    def forward(self, pair, mask):
        inner = self.inner
        x = inner.layer_norm_in(pair)
        a = inner.proj_a(x) * torch.sigmoid(inner.gate_a(x)) * mask[..., None]
        b = inner.proj_b(x) * torch.sigmoid(inner.gate_b(x)) * mask[..., None]
        o = torch.einsum("...ikh,...jkh->...ijh", a, b)
        return torch.sigmoid(inner.out_gate(x)) * inner.out_proj(inner.layer_norm_out(o))


class FunctionalUpdate(torch.nn.Module):
    """The function with the options under test, over the same parameters."""

    def __init__(self, inner, **options):
        super().__init__()
        self.inner = inner
        self.options = options

    def forward(self, pair, mask):
        p = self.inner
        linears = ("proj_a", "gate_a", "proj_b", "gate_b")
        weights = [t for n in linears for t in (getattr(p, n).weight, getattr(p, n).bias)]
        return triangular_multiplicative_update(
            pair,
            mask,
            p.layer_norm_in.weight,
            p.layer_norm_in.bias,
            *weights,
            p.layer_norm_out.weight,
            p.layer_norm_out.bias,
            p.out_proj.weight,
            p.out_proj.bias,
            p.out_gate.weight,
            p.out_gate.bias,
            **self.options,
        )


@pytest.mark.usefixtures("projections")
def test_gate_from_the_normalised_input(device):
    _, eager = build(8, 12, "outgoing", device=device)
    theirs = GateFromNormalized(eager)
    ours = FunctionalUpdate(theirs.inner, direction="outgoing", gate_normalized=True)
    pair, mask = pair_of(2, 9, 9, 8, device=device), mask_of(2, 9, 9, device=device)
    assert_parity(ours, theirs, [pair, mask], torch.float32)


@pytest.mark.usefixtures("projections")
@pytest.mark.parametrize(
    "names",
    [("proj_a", "gate_a", "proj_b", "gate_b", "out_proj", "out_gate"), ("gate_a", "proj_b")],
    ids=["all", "some"],
)
def test_linears_without_bias(device, names):
    _, eager = build(8, 12, device=device)
    for name in names:
        getattr(eager, name).register_parameter("bias", None)
    fused = fused_ops.TriangularMultiplicativeUpdate.from_reference(eager)
    pair, mask = pair_of(2, 9, 9, 8, device=device), mask_of(2, 9, 9, device=device)
    assert_parity(fused, eager, [pair, mask], torch.float32)
    assert_parity(FunctionalUpdate(fused), eager, [pair, mask], torch.float32)


def test_convenience_classes_fix_the_direction():
    for cls, direction in (
        (fused_ops.TriangularMultiplicativeUpdateIncoming, "incoming"),
        (fused_ops.TriangularMultiplicativeUpdateOutgoing, "outgoing"),
    ):
        module = cls(8, 4)
        assert module.direction == direction
        eager = reference.TriangularMultiplicativeUpdate(8, 4, direction)
        assert list(module.state_dict()) == list(eager.state_dict())
        built = cls.from_reference(eager)
        assert torch.equal(built.proj_a.weight, eager.proj_a.weight)
        wrong = "outgoing" if direction == "incoming" else "incoming"
        with pytest.raises(ValueError, match="direction"):
            cls.from_reference(reference.TriangularMultiplicativeUpdate(8, 4, wrong))


# Autograd ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradcheck(direction):
    fused, _ = build(5, 3, direction, torch.float64)
    pair = pair_of(1, 4, 4, 5, dtype=torch.float64)
    mask = mask_of(1, 4, 4)
    parameters = dict(fused.named_parameters())

    def call(pair, *values):
        named = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(fused, named, (pair, mask))

    assert torch.autograd.gradcheck(call, (pair, *parameters.values()))


@pytest.mark.parametrize("gate_normalized", [False, True])
@pytest.mark.parametrize(
    "wanted", ["pair", "layer_norm_in.weight", "proj_b.bias", "out_gate.weight"]
)
def test_only_one_gradient_wanted(wanted, gate_normalized):
    fused, _ = build(6, 5)
    call = FunctionalUpdate(fused, gate_normalized=gate_normalized)
    pair, mask = pair_of(1, 7, 7, 6), mask_of(1, 7, 7)
    cotangent = torch.randn(1, 7, 7, 6)
    _, grads = evaluate(call, [pair, mask], cotangent)
    fused.requires_grad_(False)
    if wanted == "pair":
        one = {"input 0": grads["input 0"]}
    else:
        pair = pair.detach()
        fused.get_parameter(wanted).requires_grad_()
        one = {wanted: grads[wanted]}
    _, alone = evaluate(call, [pair, mask], cotangent)
    assert alone.keys() == one.keys()
    for name in one:
        assert torch.equal(alone[name], one[name])


def test_gradients_repeat_bitwise(device):
    fused, _ = build(16, 24, device=device)
    pair, mask = pair_of(1, 65, 65, 16, device=device), mask_of(1, 65, 65, device=device)
    cotangent = torch.randn(1, 65, 65, 16, device=device)
    _, first = evaluate(fused, [pair, mask], cotangent)
    for _ in range(5):
        _, again = evaluate(fused, [pair, mask], cotangent)
        for name in first:
            assert torch.equal(first[name], again[name]), name


def test_double_backward_raises(device):
    fused, _ = build(6, 5, device=device)
    assert_double_backward_raises(fused, [pair_of(1, 4, 4, 6, device=device)], OPERATOR.name)


# Framework ---------------------------------------------------------------------------------------


def test_opcheck(device):
    fused, _ = build(6, 5, device=device)
    pair = pair_of(1, 4, 4, 6, device=device).detach().transpose(1, 2).requires_grad_()
    opcheck(OPERATOR, fused._operands(pair, mask_of(1, 4, 4, device=device)))


def test_compiles_without_graph_breaks(device):
    fused, _ = build(6, 5, device=device)
    assert_compiles(
        fused,
        lambda n: [
            pair_of(1, n, n, 6, device=device).transpose(1, 2),
            mask_of(1, n, n, device=device),
        ],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    fused, eager = build(16, 24, device=device)
    pair, mask = pair_of(1, 33, 33, 16, device=device), mask_of(1, 33, 33, device=device)
    cotangent = torch.randn(1, 33, 33, 16, device=device)
    with torch.autocast(device, dtype=dtype):
        ours, our_grads = evaluate(fused, [pair, mask], cotangent)
        theirs, their_grads = evaluate(eager, [pair, mask], cotangent)
    assert ours.dtype == theirs.dtype == dtype
    exact, exact_grads = evaluate(
        in_double(eager), [pair.detach().double().requires_grad_(), mask.double()], cotangent
    )
    assert_result(ours, theirs, exact, dtype)
    assert_gradients(our_grads, their_grads, exact_grads, dtype)
    assert all(g.dtype == torch.float32 for g in our_grads.values())


def test_parameters_stay_in_float32_beside_16_bit_activations(device):
    fused, eager = build(16, 24, device=device)
    pair = pair_of(1, 33, 33, 16, dtype=torch.bfloat16, device=device)
    cotangent = torch.randn(1, 33, 33, 16, device=device).bfloat16()
    ours, grads = evaluate(fused, [pair], cotangent)
    assert ours.dtype == torch.bfloat16
    rounded = copy.deepcopy(eager).bfloat16()
    theirs, _ = evaluate(rounded, [pair], cotangent)
    exact, _ = evaluate(in_double(eager), [pair.detach().double()], cotangent)
    assert_result(ours, theirs, exact, torch.bfloat16)
    assert all(grads[n].dtype == p.dtype for n, p in fused.named_parameters())


# Errors ------------------------------------------------------------------------------------------


def test_wrong_shapes_are_named():
    fused, _ = build(8, 4)
    with pytest.raises(ValueError, match=r"pair must have shape \(\.\.\., N, N, pair_dim\).*got"):
        fused(torch.randn(1, 3, 4, 8))
    with pytest.raises(ValueError, match="layer_norm_in_weight must have shape"):
        fused(torch.randn(1, 3, 3, 7))
    with pytest.raises(ValueError, match=r"mask must have shape.*got \(1, 3, 4\)"):
        fused(torch.randn(1, 3, 3, 8), torch.ones(1, 3, 4))
    with pytest.raises(ValueError, match="leading axes of mask"):
        fused(torch.randn(1, 3, 3, 8), torch.ones(2, 3, 3))
    with pytest.raises(ValueError, match="direction"):
        fused_ops.TriangularMultiplicativeUpdate(8, 4, "sideways")
    with pytest.raises(ValueError, match="precision"):
        fused_ops.TriangularMultiplicativeUpdate(8, 4, precision="fp8")


def test_wrong_workspaces_are_named():
    cls = fused_ops.TriangularMultiplicativeUpdate
    for wrong, kind in ((-1, ValueError), (1.5, TypeError), ("1", TypeError), (True, TypeError)):
        text = f"{OPERATOR.name}: max_workspace must .*got"
        with pytest.raises(kind, match=text):
            cls(8, 4, max_workspace=wrong)
        with pytest.raises(kind, match=text):
            cls.from_reference(cls(8, 4), max_workspace=wrong)
        fused, _ = build(8, 4)
        with pytest.raises(kind, match=text):
            FunctionalUpdate(fused, max_workspace=wrong)(torch.randn(1, 3, 3, 8), None)
        fused.max_workspace = wrong
        with pytest.raises(kind, match=text):
            fused(torch.randn(1, 3, 3, 8))
    flat = build(8, 4)[0]._operands(torch.randn(1, 3, 3, 8))
    flat[OPERATOR._names.index("max_workspace")] = -1
    with pytest.raises(ValueError, match="max_workspace must not be negative, got -1"):
        torch.ops.fused_ops.triangular_multiplicative_update(*flat)


def test_wrong_dtypes_are_named():
    fused, _ = build(8, 4)
    with pytest.raises(TypeError, match="pair must be float32"):
        fused(torch.ones(1, 3, 3, 8, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"must be float64 when pair is torch\.float64"):
        fused(torch.randn(1, 3, 3, 8, dtype=torch.float64))


# Memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_holds_at_most_three_planes(device, dtype):
    n, c, h = 200, 32, 32
    fused, eager = build(c, h, dtype=dtype, device=device)
    pair = pair_of(1, n, n, c, dtype=dtype, device=device).detach()
    mask = torch.ones(1, n, n, device=device)
    plane = n * n * h * dtype.itemsize
    result = n * n * c * dtype.itemsize
    with torch.no_grad():
        ours = peak_memory(lambda: fused(pair, mask), device)
        theirs = peak_memory(lambda: eager(pair, mask), device)
    # Temporaries of a block of rows in fp32. On CUDA the whole of this problem is one block.
    block = 8 * min(n * n * max(c, h), 2**18 if device == "cpu" else 2**21) * 4
    assert ours <= result + 3 * plane + block
    if device == "cpu":
        assert ours < theirs


# How many bytes 257 * 257 pairs of 24 channels take without blocks: two planes and more in fp32.
FEW = [0, 2**20, 257 * 257 * 24 * 6]


@pytest.mark.parametrize("max_workspace", FEW)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_small_workspace_leaves_the_result(device, direction, dtype, max_workspace):
    fused, eager = build(16, 24, direction, dtype, device)
    fused = fused_ops.TriangularMultiplicativeUpdate.from_reference(
        eager, max_workspace=max_workspace
    )
    pair = pair_of(2, 77, 77, 16, dtype=dtype, device=device)
    assert_parity(fused, eager, [pair, mask_of(2, 77, 77, device=device).to(dtype)], dtype)


@pytest.mark.usefixtures("projections")
@pytest.mark.parametrize("hidden", [1, 2, 7])
def test_a_small_workspace_at_few_channels_and_without_biases(device, hidden):
    _, eager = build(6, hidden, device=device)
    for name in ("proj_a", "gate_b"):
        getattr(eager, name).register_parameter("bias", None)
    fused = fused_ops.TriangularMultiplicativeUpdate.from_reference(eager, max_workspace=0)
    pair = pair_of(3, 9, 9, 6, device=device)
    assert_parity(fused, eager, [pair, mask_of(1, 9, 9, device=device)], torch.float32)
    assert fused(pair[:0]).shape == (0, 9, 9, 6)


def test_a_large_workspace_changes_nothing(device):
    fused, eager = build(16, 24, device=device)
    pair = pair_of(1, 33, 33, 16, device=device)
    result = fused(pair)
    fused.max_workspace = 2**40
    assert torch.equal(fused(pair), result)


def test_workspace_goes_through_the_dispatcher_compile_and_explain(device):
    fused, _ = build(6, 5, device=device)
    fused.max_workspace = 0
    assert "max_workspace=0" in repr(fused)
    pair = pair_of(1, 4, 4, 6, device=device).detach().transpose(1, 2).requires_grad_()
    opcheck(OPERATOR, fused._operands(pair, mask_of(1, 4, 4, device=device)))
    assert_compiles(
        fused, lambda n: [pair_of(1, n, n, 6, device=device), mask_of(1, n, n, device=device)]
    )
    call = FunctionalUpdate(fused, max_workspace=0)
    assert_compiles(
        call,
        lambda n: [pair_of(1, n, n, 6, device=device), mask_of(1, n, n, device=device)],
        (9, 12),
    )
    assert fused_ops.explain(fused, pair).op == OPERATOR.name
    names = [
        a.name
        for a in torch.ops.fused_ops.triangular_multiplicative_update.default._schema.arguments
    ]
    assert names[-4:] == ["eps", "max_workspace", "precision", "dtype"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_workspace_lowers_the_peak(device, dtype):
    # On CUDA blocks of rows are eight times as large.
    n, c, h = (1024, 16, 128) if device == "cuda" else (192, 8, 32)
    fused, _ = build(c, h, dtype=dtype, device=device)
    pair = pair_of(1, n, n, c, dtype=dtype, device=device).detach()
    results, peaks = [], []
    with torch.no_grad():
        for fused.max_workspace in (None, 0):
            results.append(fused(pair))
            peaks.append(peak_memory(lambda: fused(pair), device))
    assert relative_error(*results) <= max(2 * ROUNDING[dtype], 2e-6)
    assert peaks[1] <= peaks[0] - n * n * h * dtype.itemsize / 2
