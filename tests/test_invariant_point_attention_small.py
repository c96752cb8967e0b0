# SPDX-License-Identifier: Apache-2.0
"""The two launches for small invariant point attention, run on the CPU, against float64."""

import math

import pytest
import torch
from emulation.build import driver, span

from fused_ops import reference

TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}
MODES = [torch.bfloat16, torch.float16, torch.float32, torch.float32]
MASKS = {torch.bool: 0, torch.int64: 4, torch.bfloat16: 6, torch.float32: 7}
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SPLIT = 3
LIMIT = {BF16: 3e-3, F16: 4e-4, F32: 3e-6}  # of the relative L2 error
NORM_EPS = 1e-8
SCALES = (0.25, 0.125, 0.5)  # of scalars, points and bias: whole thousandths


def parameters(sizes, types=(F32,), biases=False, normed=True, values=0, norms=False):
    """By name; their dtypes take turns."""
    channels, pair, heads, dim, query_points, value_points = sizes
    features = heads * (dim + 3 * value_points + values + (value_points if norms else 0))
    rows = {
        "q": (heads * dim, channels),
        "k": (heads * dim, channels),
        "v": (heads * dim, channels),
        "q_points": (heads * query_points * 3, channels),
        "k_points": (heads * query_points * 3, channels),
        "v_points": (heads * value_points * 3, channels),
        "pair_bias": (heads, pair),
        "out": (channels, features),
    }
    made = {f"{name}_weight": torch.randn(shape) / shape[1] ** 0.5 for name, shape in rows.items()}
    made["head_weights"] = torch.randn(heads)
    if biases:
        made |= {f"{name}_bias": torch.randn(shape[0]) for name, shape in rows.items()}
    if normed:
        made["norm_weight"] = 1 + 0.3 * torch.randn(channels)
        made["norm_bias"] = 0.3 * torch.randn(channels)
    return {name: x.to(types[i % len(types)]) for i, (name, x) in enumerate(made.items())}


def tensors(batch, n, channels, pair, spread=5.0, dtype=F32):
    turns = torch.linalg.qr(torch.randn(batch, n, 3, 3))[0].contiguous()
    return {
        "node": torch.randn(batch, n, channels).to(dtype),
        "pair": torch.randn(batch, n, n, pair).to(dtype),
        "translations": spread * torch.randn(batch, n, 3),
        "rotations": turns,
    }


def run(given, made, sizes, mask=None, mode=SPLIT, norms=False, scales=SCALES, seed=1):
    inputs, settings = {}, {}
    for name, x in given.items():
        inputs[name] = span(x)
        settings[f"{name}_type"] = TYPES[x.dtype]
        settings[f"{name}_offset"] = x.storage_offset() * x.element_size()
        for axis in range(x.dim() - 1):
            settings[f"{name}_stride{axis}"] = x.stride(axis)
    for name, x in made.items():
        inputs[name] = x.flatten()
        settings[f"{name}_type"] = TYPES[x.dtype]
    if mask is not None:
        inputs["mask"] = span(mask)
        settings["mask_type"] = MASKS[mask.dtype]
        settings |= {f"mask_stride{axis}": mask.stride(axis) for axis in range(2)}
    channels, pair, heads, dim, query_points, value_points = sizes
    batch, n, _ = given["node"].shape
    result = driver("invariant_point_attention_small").run(
        "forward",
        inputs,
        seed=seed,
        batch=batch,
        n=n,
        channels=channels,
        pair_channels=pair,
        value_channels=given["pair_values"].shape[-1] if "pair_values" in given else 0,
        heads=heads,
        head_dim=dim,
        query_points=query_points,
        value_points=value_points,
        norms=int(norms),
        mode=mode,
        scalar_scale=round(1000 * scales[0]),
        point_scale=round(1000 * scales[1]),
        bias_scale=round(1000 * scales[2]),
        **settings,
    )["result"]
    return result.view(MODES[mode]).view(batch, n, channels)


def expected(given, made, sizes, mask=None, norms=False, scales=SCALES):
    """The op by its definition, in float64."""
    given = {name: x.double() for name, x in given.items()}
    made = {name: x.double() for name, x in made.items()}
    heads, moves, turns = sizes[2], given["translations"], given["rotations"]
    x = given["node"]
    if "norm_weight" in made:
        x = torch.nn.functional.layer_norm(
            x, x.shape[-1:], made["norm_weight"], made["norm_bias"], 1e-5
        )

    def linear(x, name):
        return torch.nn.functional.linear(x, made[f"{name}_weight"], made.get(f"{name}_bias"))

    def points(name):
        local = linear(x, name).unflatten(-1, (heads, -1, 3))
        return torch.einsum("bnhpc,bncd->bnhpd", local, turns) + moves[:, :, None, None]

    q, k, v = (linear(x, name).unflatten(-1, (heads, -1)) for name in "qkv")
    away = points("q_points")[:, :, None] - points("k_points")[:, None]
    weight = torch.nn.functional.softplus(made["head_weights"])[:, None, None]
    logits = scales[0] * torch.einsum("bihd,bjhd->bhij", q, k)
    logits += scales[2] * linear(given["pair"], "pair_bias").movedim(-1, 1)
    logits -= scales[1] * weight / 2 * away.square().sum((-1, -2)).movedim(-1, 1)
    alive = torch.ones(x.shape[0], 1, 1, dtype=torch.bool)
    if mask is not None:
        there = mask != 0
        logits = logits.masked_fill(~there[:, None, None], -math.inf)
        alive = there.any(-1)[:, None, None]
    weights = logits.softmax(-1)
    moved = torch.einsum("bhij,bjhpd->bihpd", weights, points("v_points")) - moves[:, :, None, None]
    local = torch.einsum("bihpd,bicd->bihpc", moved, turns)
    features = [torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2), local.flatten(2)]
    if norms:
        features.append((local.square().sum(-1) + NORM_EPS).sqrt().flatten(2))
    if "pair_values" in given:
        gathered = torch.einsum("bhij,bijc->bihc", weights, given["pair_values"])
        features.append(gathered.flatten(2))
    return linear(torch.where(alive, torch.cat(features, -1), 0.0), "out")


def error_of(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm()).item()


def check(given, made, sizes, mask=None, mode=SPLIT, **how):
    ours = run(given, made, sizes, mask, mode, **how)
    exact = expected(given, made, sizes, mask, how.get("norms", False))
    assert error_of(ours, exact) < LIMIT[ours.dtype]
    return ours


def holes(*shape):
    mask = torch.rand(shape) < 0.7
    mask[..., 0] = True
    return mask


# batch, N; channels, of the pair, heads, width of a head, query points, value points
PROBLEMS = [
    (2, 32, (64, 32, 4, 16, 4, 8)),  # the headline's
    (1, 1, (1, 1, 1, 1, 1, 1)),
    (3, 2, (12, 5, 3, 8, 1, 4)),
    (2, 17, (33, 20, 3, 24, 4, 1)),
    (1, 33, (20, 7, 2, 72, 8, 2)),
    (1, 61, (16, 8, 12, 8, 1, 8)),
    (1, 77, (16, 8, 4, 16, 4, 4)),
    (1, 5, (130, 72, 16, 32, 16, 8)),
    (2, 9, (100, 128, 1, 32, 16, 16)),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_sizes(problem):
    torch.manual_seed(1)
    batch, n, sizes = problem
    check(tensors(batch, n, *sizes[:2]), parameters(sizes), sizes, holes(batch, n))


@pytest.mark.parametrize("mode", range(4))
def test_modes(mode):
    torch.manual_seed(2)
    sizes = (24, 12, 3, 12, 4, 5)
    dtype = MODES[mode]
    given = tensors(2, 19, 24, 12, dtype=dtype)
    given["pair_values"] = torch.randn(2, 19, 19, 20).to(dtype)
    made = parameters(sizes, (dtype, F32), biases=True, values=20, norms=True)
    ours = check(given, made, sizes, holes(2, 19), mode, norms=True)
    assert (
        torch.equal(ours, run(given, made, sizes, holes(2, 19) | True, mode, norms=True)) is False
    )


@pytest.mark.parametrize("n", [6, 40])
def test_pair_values_lengths_and_biases_without_layer_norm(n):
    torch.manual_seed(3)
    sizes = (16, 8, 5, 16, 4, 4)
    given = tensors(2, n, 16, 8)
    given["pair_values"] = torch.randn(2, n, n, 36)
    made = parameters(sizes, biases=True, normed=False, values=36, norms=True)
    check(given, made, sizes, norms=True)


def test_strides_and_types():
    torch.manual_seed(4)
    sizes = (16, 8, 2, 8, 4, 4)
    given = {
        "node": torch.randn(11, 2, 20).to(BF16).transpose(0, 1)[..., 3:19],
        "pair": torch.randn(11, 11, 2, 9).to(F16).movedim(2, 0)[..., 1:],
        "translations": (4 * torch.randn(1, 11, 3)).expand(2, 11, 3),
        "rotations": torch.randn(2, 11, 3, 3).to(BF16),
    }
    for mask in (holes(11, 2).T, holes(2, 11).to(BF16), holes(2, 11).long()):
        check(given, parameters(sizes, (F32, BF16, F16)), sizes, mask)


def test_without_keys_there_is_the_bias_alone():
    torch.manual_seed(5)
    sizes = (16, 8, 2, 8, 4, 4)
    given, made = tensors(2, 7, 16, 8), parameters(sizes, biases=True, norms=True)
    mask = holes(2, 7)
    mask[1] = False
    given["translations"][1, 3] = torch.nan
    given["node"][1, 2] = torch.nan
    ours = run(given, made, sizes, mask, norms=True)
    assert torch.equal(ours[1], made["out_bias"].expand(7, 16))
    assert ours[0].isfinite().all()


def test_not_a_number_spreads():
    torch.manual_seed(6)
    sizes = (16, 8, 2, 8, 4, 4)
    given, made = tensors(2, 7, 16, 8), parameters(sizes)
    given["node"][0, 3, 5] = torch.nan
    ours = run(given, made, sizes)
    assert ours[0].isnan().all()
    assert ours[1].isfinite().all()


def test_nothing_to_do():
    sizes = (16, 8, 2, 8, 4, 4)
    assert run(tensors(0, 7, 16, 8), parameters(sizes), sizes).shape == (0, 7, 16)


@pytest.mark.parametrize("n", [16, 40])
@pytest.mark.parametrize("place", ["origin", "shifted", "a residue far away"])
def test_as_exact_as_the_reference(place, n):
    """Over a few problems: of one the errors of a single weight may decide."""
    names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "q_pts": "q_points"}
    names |= {"k_pts": "k_points", "v_pts": "v_points", "out_proj": "out", "layer_norm": "norm"}
    sizes = (64, 32, 4, 16, 4, 8)
    squares = torch.zeros(2)
    for seed in range(4):
        torch.manual_seed(seed)
        module = reference.InvariantPointAttention(64, 32, 4, 4, 8)
        given = tensors(1, n, 64, 32)
        if place == "shifted":
            given["translations"] += torch.tensor([4000.0, -3000.0, 2500.0])
        elif place != "origin":
            given["translations"][0, 0] = torch.tensor([1e4, -1e4, 5e3])
        mask = holes(1, n)
        made = {}
        for name, x in module.state_dict().items():
            first, _, last = name.partition(".")
            made[f"{names.get(first, first)}_{last}" if last else name] = x
        ours = run(given, made, sizes, mask, scales=(0.25, 1.0, 1.0))
        values = list(given.values())
        plain = module(*values, mask)
        exact = module.double()(*(x.double() for x in values), mask)
        squares += torch.tensor([error_of(ours, exact) ** 2, error_of(plain, exact) ** 2])
    assert squares[0] <= 1.5**2 * squares[1]
    assert squares[0] <= 4 * (1e-6) ** 2  # wherever the molecule is


def test_small_enough():
    def fits(batch, n, channels, pair, heads, dim, values=0):
        settings = {"query_points": 4, "value_points": 8, "norms": 0, "value_channels": values}
        return (
            driver("invariant_point_attention_small")
            .run(
                "fits",
                {},
                batch=batch,
                n=n,
                channels=channels,
                pair_channels=pair,
                heads=heads,
                head_dim=dim,
                **settings,
            )["fits"]
            .view(F32)
            .item()
        )

    assert fits(2, 32, 64, 32, 4, 16)
    assert fits(1, 128, 64, 32, 4, 16)
    assert not fits(1, 129, 64, 32, 4, 16)
    assert not fits(1, 256, 384, 128, 12, 32)
    assert not fits(1, 32, 257, 32, 4, 16)
    assert not fits(1, 32, 64, 32, 4, 16, 256)
    assert not fits(10**9, 32, 64, 32, 4, 16)
