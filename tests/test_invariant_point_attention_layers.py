# SPDX-License-Identifier: Apache-2.0
"""Invariant point attention as OpenFold and FrameDiff have it, against their layers written plainly
(``structure_layers.py``), and what the options promise."""

import pytest
import torch
from helpers import (
    DTYPES,
    as_double,
    assert_compiles,
    assert_parity,
    evaluate,
    in_double,
    opcheck,
    randomize,
    strided,
)
from structure_layers import LAYERS, Fused
from subjects import holes, rotations

from fused_ops.functional import invariant_point_attention
from fused_ops.invariant_point_attention.arguments import ARGUMENTS, DIFFERENTIABLE, Arguments
from fused_ops.invariant_point_attention.op import OPERATOR
from fused_ops.testing import peak_memory, relative_error

# c_s, c_z, c_hidden, heads, query points, value points
ODD = (12, 5, 7, 3, 2, 3)
USUAL = (24, 16, 8, 4, 4, 8)


def build(layer, sizes=USUAL, dtype=torch.float32, device="cpu", **options):
    """The fused op and the plain layer around the same random parameters."""
    eager = randomize(LAYERS[layer](*sizes, **options)).to(device, dtype)
    return Fused(eager), eager


def inputs_of(lead, n, sizes=USUAL, dtype=torch.float32, device="cpu", offset=0.0, grad=True):
    """Node, pair, the frames of a chain, and a mask with holes."""
    steps = torch.nn.functional.normalize(torch.randn(*lead, n, 3, dtype=torch.float64), dim=-1)
    frames = torch.promote_types(dtype, torch.float32)
    tensors = [
        torch.randn(*lead, n, sizes[0], device=device).to(dtype),
        torch.randn(*lead, n, n, sizes[1], device=device).to(dtype),
        (1.5 * steps.cumsum(-2) + offset).to(device, frames),
        rotations(*lead, n, device=device).to(frames),
    ]
    return [*(t.requires_grad_(grad) for t in tensors), holes(*lead, n, device=device)]


TINY = (3, 2, 2, 2, 1, 1)
OPTIONS = {  # name of the case: what differs from the op's defaults
    "pair": {"gathers_pair": True, "norm_eps": 0.1},
    "own": {"pair_value": 3, "norm_eps": 0.0, "scalar_scale": 0.3},
    "lengths": {"norm_eps": 1e-8, "point_scale": 0.4},
    "scales": {"bias_scale": 0.7, "point_scale": 1.7, "scalar_scale": 0.2},
}


def arguments(case, n=3, lead=(2,), sizes=TINY, norm=True, dtype=torch.float64, device="cpu"):
    """Random arguments of the op by name, all biases given, with the options of a case."""
    c, cz, d, heads, query, value = sizes
    options = dict(OPTIONS[case])
    channels = options.pop("pair_value", 0)
    features = heads * (d + (4 if "norm_eps" in options else 3) * value)
    features += heads * (cz if "gathers_pair" in options else channels)

    def randn(*shape):
        return torch.randn(shape, dtype=torch.float64).to(device, dtype)

    named = dict(zip(Arguments._fields, inputs_of(lead, n, sizes, dtype, device), strict=False))
    if channels:
        named["pair_value"] = randn(*lead, n, n, channels)
    named["layer_norm_weight"] = randn(c) if norm else None
    named["layer_norm_bias"] = randn(c) if norm else None
    for name, shape in {
        "q_proj": (heads * d, c),
        "k_proj": (heads * d, c),
        "v_proj": (heads * d, c),
        "q_pts": (3 * heads * query, c),
        "k_pts": (3 * heads * query, c),
        "v_pts": (3 * heads * value, c),
        "pair_bias": (heads, cz),
        "out_proj": (c, features),
    }.items():
        named[f"{name}_weight"] = randn(*shape) * shape[1] ** -0.5
        named[f"{name}_bias"] = randn(shape[0]) * 0.3
    named["head_weights"] = randn(heads)
    numbers = {"num_heads": heads, "num_query_points": query, "num_value_points": value}
    for name in DIFFERENTIABLE:
        if named.get(name) is not None:
            named[name].requires_grad_()
    return {**named, **numbers, **options}


def differentiable(named):
    """Names of the tensors that want a gradient, in schema order."""
    return [name for name in DIFFERENTIABLE if named.get(name) is not None]


def gradients(named, cotangent):
    wanted = differentiable(named)
    result = invariant_point_attention(**named)
    grads = torch.autograd.grad(result, [named[name] for name in wanted], cotangent)
    return result.detach(), dict(zip(wanted, grads, strict=True))


# Parity ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 17, 77])
@pytest.mark.parametrize("layer", LAYERS)
def test_is_the_layer_of_the_model(device, layer, n, dtype):
    fused, eager = build(layer, USUAL, dtype, device)
    assert_parity(fused, eager, inputs_of((2,), n, USUAL, dtype, device), dtype)


@pytest.mark.parametrize("sizes", [ODD, (8, 1, 3, 1, 1, 1), (16, 64, 72, 2, 16, 1)])
@pytest.mark.parametrize("layer", LAYERS)
def test_is_the_layer_of_the_model_at_odd_sizes(device, layer, sizes):
    fused, eager = build(layer, sizes, device=device)
    assert_parity(fused, eager, inputs_of((1,), 19, sizes, device=device), torch.float32)


@pytest.mark.parametrize("layer", LAYERS)
def test_is_the_layer_of_the_model_to_the_last_digits(device, layer):
    fused, eager = build(layer, ODD, torch.float64, device)
    inputs = inputs_of((2,), 17, ODD, torch.float64, device)
    cotangent = torch.randn(2, 17, ODD[0], dtype=torch.float64, device=device)
    ours, our_grads = evaluate(fused, inputs, cotangent)
    theirs, their_grads = evaluate(eager, inputs, cotangent)
    assert relative_error(ours, theirs) < 1e-13  # measured: 6e-16
    largest = max(grad.abs().max() for grad in their_grads.values())
    for name, grad in their_grads.items():
        assert (our_grads[name] - grad).abs().max() < 1e-13 * largest, name


@pytest.mark.parametrize("layer", LAYERS)
def test_is_the_layer_of_the_model_over_many_blocks(device, layer):
    sizes = (16, 6, 4, 12, 2, 3)
    fused, eager = build(layer, sizes, device=device)
    assert_parity(fused, eager, inputs_of((2,), 193, sizes, device=device), torch.float32)


@pytest.mark.parametrize("layer", LAYERS)
def test_is_the_layer_of_the_model_over_blocks_of_batch_elements(device, layer):
    fused, eager = build(layer, ODD, device=device)
    assert_parity(fused, eager, inputs_of((5,), 131, ODD, device=device), torch.float32)


@pytest.mark.parametrize("pair_lead", [(), (1, 3), (2, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_leading_axes_of_the_pairs_may_broadcast(device, layer, pair_lead):
    fused, eager = build(layer, ODD, device=device)
    node, _, *frames, mask = inputs_of((2, 3), 9, ODD, device=device)
    pair = inputs_of(pair_lead, 9, ODD, device=device)[1]
    assert_parity(fused, eager, [node, pair, *frames, mask], torch.float32)


@pytest.mark.parametrize(
    ("pair_lead", "value_lead"), [((2, 1), (3,)), ((), (2, 3)), ((2, 3), (1, 1))]
)
def test_pairs_and_their_values_may_broadcast_differently(pair_lead, value_lead):
    named = arguments("own", 5, (2, 3))
    shapes = {"pair": (*pair_lead, 5, 5, 2), "pair_value": (*value_lead, 5, 5, 3)}
    for name, shape in shapes.items():
        named[name] = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(2, 3, 5, TINY[0], dtype=torch.float64)
    value, grads = gradients(named, cotangent)
    full = dict(named)
    for name in shapes:
        full[name] = named[name].detach().expand(2, 3, 5, 5, -1).contiguous().requires_grad_()
    full_value, full_grads = gradients(full, cotangent)
    torch.testing.assert_close(value, full_value)
    for name, grad in grads.items():
        expected = full_grads[name].sum_to_size(grad.shape)
        torch.testing.assert_close(grad, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("case", ["pair", "own"])
def test_strides_do_not_matter(device, case):
    named = arguments(case, 9, sizes=ODD, dtype=torch.float32, device=device)
    cotangent = torch.randn(2, 9, ODD[0], device=device)
    value, grads = gradients(named, cotangent)
    for name in ("node", "pair", "pair_value"):
        if name in named and named[name] is not None:
            named[name] = strided(named[name].detach()).requires_grad_()
    other_value, other_grads = gradients(named, strided(cotangent))
    assert torch.equal(value, other_value)
    for name, grad in grads.items():
        assert torch.equal(grad, other_grads[name]), name


# Options -----------------------------------------------------------------------------------------


def test_no_layer_norm_is_the_op_on_a_normalised_node(device):
    named = arguments("pair", 7, device=device)
    bare = dict(named, layer_norm_weight=None, layer_norm_bias=None)
    parameters = named["layer_norm_weight"], named["layer_norm_bias"]
    bare["node"] = torch.nn.functional.layer_norm(named["node"], (TINY[0],), *parameters)
    torch.testing.assert_close(
        invariant_point_attention(**named), invariant_point_attention(**bare)
    )


def test_pairs_as_pair_values_are_the_pairs_gathered(device):
    named = arguments("pair", 7, device=device)
    cotangent = torch.randn(2, 7, TINY[0], dtype=torch.float64, device=device)
    value, grads = gradients(named, cotangent)
    own = named["pair"].detach().clone().requires_grad_()
    named = dict(named, pair_value=own, gathers_pair=False)
    other_value, other_grads = gradients(named, cotangent)
    torch.testing.assert_close(value, other_value)
    torch.testing.assert_close(grads["pair"], other_grads["pair"] + other_grads["pair_value"])


def test_bias_of_the_pair_bias_changes_nothing(device):
    named = arguments("scales", 7, device=device)
    cotangent = torch.randn(2, 7, TINY[0], dtype=torch.float64, device=device)
    value, grads = gradients(named, cotangent)
    torch.testing.assert_close(invariant_point_attention(**dict(named, pair_bias_bias=None)), value)
    assert grads["pair_bias_bias"].abs().max() < 1e-12 * grads["pair_bias_weight"].abs().max()


@pytest.mark.parametrize("case", OPTIONS)
def test_nothing_to_attend_to_gives_the_bias_and_zero_gradients(device, case):
    named = arguments(case, 5, (3,), norm=False, dtype=torch.float32, device=device)
    mask = torch.ones(3, 5, device=device)
    mask[1] = 0
    named["node_mask"] = mask
    value, grads = gradients(named, torch.randn(3, 5, TINY[0], device=device))
    assert torch.equal(value[1], named["out_proj_bias"].detach().expand(5, -1))
    for name, grad in grads.items():
        assert grad.isfinite().all(), name
        if name in ("node", "pair", "translations", "rotations", "pair_value"):
            assert not grad[1].any(), name
            assert grad[0].any(), name


@pytest.mark.parametrize("norm_eps", [0.0, 1e-8])
def test_zero_features_in_one_frame_have_finite_gradients(device, norm_eps):
    named = arguments("lengths", 5, norm=False, dtype=torch.float32, device=device)
    named["norm_eps"] = norm_eps
    with torch.no_grad():
        named["node"].zero_()
        named["translations"].zero_()
        named["rotations"].copy_(torch.eye(3, device=device).expand(2, 5, 3, 3))
        for name, value in named.items():
            if name.endswith("_bias") and name != "layer_norm_bias":
                value.zero_()
    value, grads = gradients(named, torch.randn(2, 5, TINY[0], device=device))
    assert value.isfinite().all()
    for name, grad in grads.items():
        assert grad.isfinite().all(), name
    # Lengths have no direction to grow into: what is left comes by way of the points.
    points = TINY[3] * (TINY[2] + 3 * TINY[5])
    with torch.no_grad():
        named["out_proj_weight"][:, :points] = 0
    _, grads = gradients(named, torch.randn(2, 5, TINY[0], device=device))
    assert not grads["v_pts_weight"].any()
    assert not grads["translations"].any()


@pytest.mark.parametrize("layer", LAYERS)
def test_rigid_motion_of_the_whole_changes_nothing(device, layer):
    fused, eager = build(layer, device=device)
    node, pair, t, r, mask = inputs_of((1,), 64, device=device, grad=False)
    turn = rotations(device=device).double()  # proper to fp32's accuracy: made so again
    turn = torch.linalg.qr(turn)[0]
    turn = turn * torch.linalg.det(turn)
    moved = t.double() @ turn.mT + 4000.0
    turned = turn @ r.double()

    def change(module, dtype):
        with torch.no_grad():
            still = module(node.to(dtype), pair.to(dtype), t.to(dtype), r.to(dtype), mask)
            again = module(node.to(dtype), pair.to(dtype), moved.to(dtype), turned.to(dtype), mask)
        return relative_error(again, still)

    assert change(in_double(fused), torch.float64) < 1e-8
    assert change(fused, torch.float32) <= change(eager, torch.float32)


# Autograd ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("case", OPTIONS)
def test_gradcheck(case, norm):
    named = arguments(case, norm=norm)
    named["node_mask"] = torch.tensor([[1, 0, 1], [0, 0, 0]]) if norm else None
    # The softmax does not see it, and numbers that are all rounding cannot be compared.
    named["pair_bias_bias"].requires_grad_(False)
    wanted = [name for name in differentiable(named) if named[name].requires_grad]

    def call(*values):
        return invariant_point_attention(**dict(named, **dict(zip(wanted, values, strict=True))))

    # Element by element without a mask; with one, along random directions.
    assert torch.autograd.gradcheck(call, [named[name] for name in wanted], fast_mode=norm)


@pytest.mark.parametrize("case", ["pair", "own"])
def test_only_one_gradient_wanted(case):
    named = arguments(case, 5, dtype=torch.float32)
    cotangent = torch.randn(2, 5, TINY[0])
    _, grads = gradients(named, cotangent)
    for name, grad in grads.items():
        alone = {
            key: value.detach() if isinstance(value, torch.Tensor) else value
            for key, value in named.items()
        }
        alone[name].requires_grad_()
        (own,) = torch.autograd.grad(invariant_point_attention(**alone), alone[name], cotangent)
        assert torch.equal(own, grad), name


@pytest.mark.parametrize("layer", ["monomer", "framediff"])
def test_gradients_repeat_bitwise(device, layer):
    fused, _ = build(layer, (16, 6, 4, 12, 2, 3), device=device)
    inputs = inputs_of((1,), 193, (16, 6), device=device)
    cotangent = torch.randn(1, 193, 16, device=device)
    _, first = evaluate(fused, inputs, cotangent)
    _, again = evaluate(fused, inputs, cotangent)
    for name in first:
        assert torch.equal(first[name], again[name]), name


# Framework ---------------------------------------------------------------------------------------


def test_names_are_those_of_the_schema():
    assert tuple(argument.split()[-1] for argument in ARGUMENTS) == Arguments._fields


def flat(named):
    defaults = {"point_scale": 1.0, "bias_scale": 1.0, "gathers_pair": False}
    defaults |= {"eps": 1e-5, "precision": "ieee"}
    return [named.get(name, defaults.get(name)) for name in Arguments._fields]


@pytest.mark.parametrize("case", OPTIONS)
def test_opcheck(device, case):
    named = arguments(case, 3, dtype=torch.float32, device=device)
    opcheck(OPERATOR, flat(named))


def test_planner_is_asked_with_the_options():
    shapes = OPERATOR.query(flat(arguments("own", 5))).shapes
    assert shapes["pair_value"] == [2, 5, 5, 3]
    assert (shapes["gathers_pair"], shapes["has_norms"]) == ([0], [1])
    shapes = OPERATOR.query(flat(arguments("pair", 5))).shapes
    assert "pair_value" not in shapes
    assert (shapes["gathers_pair"], shapes["has_norms"]) == ([1], [1])
    shapes = OPERATOR.query(flat(arguments("scales", 5))).shapes
    assert (shapes["gathers_pair"], shapes["has_norms"]) == ([0], [0])


@pytest.mark.parametrize("layer", ["monomer", "framediff"])
def test_compiles_without_graph_breaks(device, layer):
    fused, _ = build(layer, ODD, device=device)
    assert_compiles(fused, lambda n: inputs_of((1,), n, ODD, device=device), lengths=(33, 48, 65))


@pytest.mark.parametrize("layer", ["monomer", "framediff"])
def test_autocast(device, layer):
    fused, eager = build(layer, device=device)
    inputs = inputs_of((1,), 33, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        ours, theirs = fused(*inputs), eager(*inputs)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    exact = in_double(eager)(*(as_double(value) for value in inputs))
    assert relative_error(ours, exact) <= 1.5 * relative_error(theirs, exact) + 2**-8


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "change", "text"),
    [
        ("own", {"gathers_pair": True}, "gathers_pair must be False where pair_value is given"),
        ("own", {"norm_eps": -1.0}, r"norm_eps must be None or at least 0, got -1\.0"),
        ("own", {"norm_eps": float("nan")}, "norm_eps must be None or at least 0, got nan"),
        (
            "own",
            {"norm_eps": None},
            r"out_proj_weight must have shape .* = \(3, 16\), got \(3, 18\)",
        ),
        ("own", {"pair_value": None}, r"out_proj_weight .*num_value_points\) = \(3, 12\), got"),
        ("pair", {"gathers_pair": False}, r"out_proj_weight must have shape"),
        ("pair", {"layer_norm_bias": None}, "must be given together, got only one"),
        ("pair", {"layer_norm_weight": None}, "must be given together, got only one"),
    ],
)
def test_options_that_do_not_fit_are_named(case, change, text):
    with pytest.raises(ValueError, match=f"invariant_point_attention: .*{text}"):
        invariant_point_attention(**dict(arguments(case), **change))


@pytest.mark.parametrize(
    "name", ["pair_value", *(n for n in DIFFERENTIABLE if n.endswith("_bias"))]
)
def test_wrong_shapes_dtypes_and_devices_are_named(name):
    named = arguments("own", 4)
    if name == "pair_value":
        shape = r"pair_value must have shape \(\.\.\., N, N, value_dim\)"
        wrong = [named[name][:, :3], named[name][0, 0]]
        with pytest.raises(ValueError, match="leading axes of pair_value must equal"):
            invariant_point_attention(**dict(named, pair_value=named[name].repeat(2, 1, 1, 1)))
    else:
        shape = f"{name} must have shape"
        wrong = [named[name][:-1], named[name][None]]
    for value in wrong:
        with pytest.raises(ValueError, match=shape):
            invariant_point_attention(**{**named, name: value})
    kind = "must have the dtype of node" if name == "pair_value" else "must be float64"
    with pytest.raises(TypeError, match=f"{name} {kind}"):
        invariant_point_attention(**{**named, name: named[name].detach().float()})
    with pytest.raises(RuntimeError, match=f"{name} must be on the device of node"):
        invariant_point_attention(**{**named, name: named[name].detach().to("meta")})


# Memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["monomer", "framediff"])
def test_holds_no_tensor_of_pairs_and_heads(device, layer):
    n, sizes = 256, (16, 32, 4, 12, 4, 8)
    fused, eager = build(layer, sizes, device=device)
    inputs = inputs_of((1,), n, sizes, device=device, grad=False)
    with torch.no_grad():
        ours = peak_memory(lambda: fused(*inputs), device)
        theirs = peak_memory(lambda: eager(*inputs), device)
    assert ours < theirs / 5
