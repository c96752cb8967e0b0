# SPDX-License-Identifier: Apache-2.0
"""What invariant point attention prepares in one launch, emulated: LayerNorm, mask, centres,
weights."""

import dataclasses
import itertools

import pytest
import torch
from emulation.build import driver, span
from helpers import ROUNDING

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = {F32: 0, F16: 2, BF16: 3}
MODES = [BF16, F16, F32, F32]
MASKS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
MASKS += [F16, BF16, F32, torch.float64]
EPS = 1e-5


def round_up(count, to=8):
    return -(-count // to) * to


@dataclasses.dataclass
class Sizes:
    channels: int = 16
    heads: int = 3
    head_dim: int = 16
    query_points: int = 4
    value_points: int = 8
    value_channels: int = 0
    norms: bool = True

    def linears(self):
        """Rows of each weight: what is asked of the nodes."""
        width, points = self.heads * self.head_dim, 3 * self.heads
        return {
            "q": width,
            "k": width,
            "v": width,
            "q_points": points * self.query_points,
            "k_points": points * self.query_points,
            "v_points": points * self.value_points,
        }

    @property
    def features(self):
        of_head = self.head_dim + 3 * self.value_points + self.value_channels
        return self.heads * (of_head + (self.value_points if self.norms else 0))


def parameters(sizes, types=(F32,), biases=True, norm=True):
    """By name, in the types in turn."""
    made = {}
    if norm:
        made["norm_weight"] = torch.randn(sizes.channels) * 0.2 + 1
        made["norm_bias"] = torch.randn(sizes.channels)
    for name, rows in sizes.linears().items():
        made[f"{name}_weight"] = torch.randn(rows, sizes.channels)
        if biases:
            made[f"{name}_bias"] = torch.randn(rows)
    made["out_weight"] = torch.randn(sizes.channels, sizes.features)
    if biases:
        made["out_bias"] = torch.randn(sizes.channels)
    turns = itertools.cycle(types)
    return {name: x.to(next(turns)) for name, x in made.items()}


def run(mode, sizes, node, translations, weights=None, mask=None, offset=0, nodes=True, seed=1):
    """Parameters lie ``offset`` elements behind aligned addresses. Without a batch axis the
    translations are shared."""
    batch, n, channels = node.shape
    inputs, settings = {"node": span(node)}, {}
    for name, x in ((weights or {}) | {"translations": translations}).items():
        inputs[name] = torch.cat([x.new_full((offset,), torch.nan), x.flatten()])
        settings[f"{name}_type"] = TYPES[x.dtype]
        settings[f"{name}_offset"] = offset * x.element_size()
    if mask is not None:
        inputs["mask"] = span(mask)
        kind = torch.uint8 if mask.dtype == torch.bool else mask.dtype
        settings["mask_type"] = MASKS.index(kind)
        settings["mask_offset"] = mask.storage_offset() * mask.element_size()
        settings["mask_stride0"], settings["mask_stride1"] = mask.stride()
    results = driver("invariant_point_attention_prepare").run(
        "prepare",
        inputs,
        seed=seed,
        batch=batch,
        n=n,
        mode=mode,
        dim=round_up(sizes.head_dim),
        node_type=TYPES[node.dtype],
        node_offset=node.storage_offset() * node.element_size(),
        node_stride0=node.stride(0),
        node_stride1=node.stride(1),
        translations_stride=3 * n if translations.dim() == 3 else 0,
        with_mask=mask is not None,
        with_nodes=nodes,
        with_weights=weights is not None and "q_weight" in weights,
        **dataclasses.asdict(sizes),
        **settings,
    )
    kinds = {"present": torch.int64, "centres": F32}
    return {name: x.view(kinds.get(name, MODES[mode])) for name, x in results.items()}


def check_nodes(ours, node, weights):
    x = node.double()
    if "norm_weight" not in weights:
        assert torch.equal(ours.view(node.shape), node.to(ours.dtype))
        return
    weight, bias = weights["norm_weight"].double(), weights["norm_bias"].double()
    exact = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    allowed = 2 * ROUNDING[ours.dtype] * exact.abs() + 1e-6 * (exact.abs() + bias.abs() + 1)
    if ours.dtype == F16:
        allowed += 2**-25
    error = (ours.view(node.shape).double() - exact).abs()
    assert (error <= allowed).all(), (error / allowed).max()


def packed(sizes, weights, kind, dtype):
    """The six projections' weights or biases, filled up."""
    pad = torch.nn.functional.pad
    parts = []
    for name, rows in sizes.linears().items():
        x = weights.get(f"{name}_{kind}", torch.zeros(rows, 1)).to(dtype).view(rows, -1)
        if not name.endswith("points"):
            x = x.view(sizes.heads, sizes.head_dim, -1)
            x = pad(x, (0, 0, 0, round_up(sizes.head_dim) - sizes.head_dim)).flatten(0, 1)
        parts.append(x)
    all_rows = torch.cat(parts)
    return pad(all_rows, (0, 0, 0, round_up(len(all_rows)) - len(all_rows))).flatten()


def check_weights(results, sizes, weights, dtype):
    assert torch.equal(results["projections"], packed(sizes, weights, "weight", dtype))
    assert torch.equal(results["projection_bias"], packed(sizes, weights, "bias", dtype))
    filling = round_up(sizes.features) - sizes.features
    out = torch.nn.functional.pad(weights["out_weight"].to(dtype), (0, filling))
    assert torch.equal(results["out_weight"], out.flatten())
    bias = weights.get("out_bias", torch.zeros(sizes.channels)).to(dtype)
    assert torch.equal(results["out_bias"], bias)


def centre_of(t):
    """The same rule in float64, of one batch element's residues that are there."""
    t = t.double()
    t = t[(t.abs() < 1e15).all(-1)]
    if len(t) == 0:
        return torch.zeros(3, dtype=torch.float64)
    centre = t.mean(0)
    for _ in range(2):
        distances = (t - centre).norm(dim=-1)
        centre = t[distances <= 3 * distances.mean()].mean(0)
    return centre


def check_centres(centres, translations, mask, batch):
    centres = centres.view(batch, 4)
    for b in range(batch):
        t = translations[b] if translations.dim() == 3 else translations
        t = t if mask is None else t[mask[b] != 0]
        assert centres[b, 3] == len(t)
        exact = centre_of(t)
        size = t.double().nan_to_num(0, 0, 0).abs().max().item() if len(t) else 0.0
        size = size if size < 1e15 else exact.abs().max().item()
        assert (centres[b, :3].double() - exact).abs().max() <= 3e-7 * size + 1e-30


def check(mode, sizes, node, translations, weights, mask=None, **how):
    results = run(mode, sizes, node, translations, weights, mask, **how)
    batch, n, _ = node.shape
    if how.get("nodes", True):
        check_nodes(results["normalised"], node, weights)
    else:
        assert "normalised" not in results
    if "q_weight" in weights:
        check_weights(results, sizes, weights, MODES[mode])
    check_centres(results["centres"], translations, mask, batch)
    assert ("present" in results) == (mask is not None)
    if mask is not None:
        bits = (results["present"].view(batch, -1, 1) >> torch.arange(64)) & 1
        bits = bits.flatten(1).bool()
        assert torch.equal(bits[:, :n], mask != 0)
        assert not bits[:, n:].any()
    return results


def holes(*shape):
    return torch.rand(shape) < 0.7


def protein(*shape):
    return torch.randn(*shape, 3) * 20


@pytest.mark.parametrize("n", [1, 2, 17, 33, 77])
@pytest.mark.parametrize("mode", range(4))
def test_sizes(mode, n):
    sizes = Sizes(channels=[8, 24, 33, 40][mode], heads=[1, 3, 4, 2][mode])
    for batch, kind in ((1, F32), (3, BF16), (2, F16)):
        mask = holes(batch, n)
        mask[batch - 1] = batch < 3  # the last of three has no residue at all
        node = torch.randn(batch, n, sizes.channels).to(kind)
        weights = parameters(sizes, [F32, BF16, F16])
        check(mode, sizes, node, protein(batch, n), weights, mask)


HEADS = [
    Sizes(heads=1, head_dim=8, query_points=1, value_points=1, norms=False),
    Sizes(heads=3, head_dim=5, query_points=4, value_points=8, value_channels=3),
    Sizes(channels=5, heads=4, head_dim=17, query_points=8, value_points=16),
    Sizes(heads=12, head_dim=16, query_points=4, value_points=8, value_channels=8),
    Sizes(channels=9, heads=16, head_dim=24, query_points=16, value_points=1),
    Sizes(channels=8, heads=3, head_dim=72, query_points=1, value_points=4, norms=False),
    Sizes(channels=8, heads=1, head_dim=249, query_points=4, value_points=4),
]


@pytest.mark.parametrize("sizes", HEADS, ids=str)
@pytest.mark.parametrize("mode", range(4))
def test_weights(mode, sizes):
    node, t = torch.randn(1, 3, sizes.channels), protein(1, 3)
    for biases, offset, kind in ((True, 0, F32), (False, 0, BF16), (True, 1, F16)):
        weights = parameters(sizes, [kind, F32], biases)
        results = run(mode, sizes, node, t, weights, offset=offset)
        check_weights(results, sizes, weights, MODES[mode])


@pytest.mark.parametrize("channels", [1, 8, 33, 256, 384, 520, 1032])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_layer_norm_and_conversion(dtype, channels):
    sizes = Sizes(channels=channels)
    node = (torch.randn(2, 5, channels) * 2 + 1).to(dtype)
    norm = {"norm_weight": torch.randn(channels), "norm_bias": torch.randn(channels)}
    for mode in range(3):
        check(mode, sizes, node, protein(2, 5), norm)
        check(mode, sizes, node, protein(2, 5), {})
    check(0, sizes, node, protein(2, 5), {}, nodes=False)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_views(dtype):
    sizes = Sizes(channels=24)
    weights = {"norm_weight": torch.randn(24), "norm_bias": torch.randn(24)}
    for node in (
        torch.randn(5, 3, 24).to(dtype).transpose(0, 1),
        torch.randn(5, 7, 40).to(dtype)[1:4, 1:6, 8:32],
        torch.randn(5, 7, 40).to(dtype)[1:4, 1:6, 9:33],
        torch.randn(24).to(dtype).expand(3, 5, 24),
        torch.randn(1, 5, 24).to(dtype).expand(3, 5, 24),
    ):
        mask = holes(5, 7)[:3, 1:6]
        check(2, sizes, node, protein(3, 5), weights, mask)
        check(0, sizes, node, protein(5), {}, holes(10, 3)[::2].T)  # shared frames
        check(1, sizes, node, protein(5).to(dtype), weights, holes(5).expand(3, 5))


@pytest.mark.parametrize("dtype", [*MASKS, torch.bool], ids=str)
def test_masks(dtype):
    mask = holes(2, 70).to(dtype)
    if dtype.is_floating_point:
        mask[1, 60:64] = torch.tensor([torch.nan, torch.inf, -0.25, -0.0], dtype=dtype)
    else:
        mask[1, 60] = 1 if dtype == torch.bool else torch.iinfo(dtype).max // 2 + 1
    check(0, Sizes(channels=8), torch.randn(2, 70, 8), protein(2, 70), {}, mask)


def centres(translations, mask=None, **how):
    batch, n = (1, len(translations)) if translations.dim() == 2 else translations.shape[:2]
    node = torch.zeros(1, 1, 1).expand(batch, n, 1)
    results = run(2, Sizes(channels=1), node, translations, None, mask, nodes=False, **how)
    return results["centres"].view(batch, 4)


@pytest.mark.parametrize("n", [1, 2, 7, 130, 1024, 1025, 1500])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_centres(dtype, n):
    t = (protein(3, n) + 50 * torch.randn(3, 1, 3)).to(dtype)
    mask = holes(3, n)
    mask[1] = False
    mask[2, : n // 2] = False
    found = centres(t, mask)
    check_centres(found, t, mask, 3)
    assert torch.equal(found[1], torch.zeros(4))
    check_centres(centres(t), t, None, 3)


@pytest.mark.parametrize("where", [0, 3, -1])
@pytest.mark.parametrize("n", [9, 17, 200, 1300])
def test_one_residue_far_away_does_not_move_the_centre(n, where):
    t = protein(n)
    others = torch.ones(n, dtype=torch.bool)
    others[where] = False
    without = centres(t, others[None])[0, :3]
    t[where] = 1e4
    assert (centres(t)[0, :3] - without).abs().max() < 1e-2
    check_centres(centres(t), t, None, 1)


def test_the_second_round_leaves_out_what_the_first_one_kept():
    t = protein(100)
    t[50] = 5e3
    t[[3, 60, 99]] = 300.0
    others = (t.abs() < 200).all(-1)
    without = centres(t, others[None])[0, :3]
    assert (centres(t)[0, :3] - without).abs().max() < 1e-2
    check_centres(centres(t), t, None, 1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e38, -3e20])
@pytest.mark.parametrize("n", [2, 40, 1030])
def test_what_is_not_finite_has_no_part_in_the_centre(n, bad):
    t = protein(n)
    others = torch.ones(n, dtype=torch.bool)
    others[0] = others[n - 1] = n == 2
    others[0] = False
    t[~others, torch.arange(n)[~others] % 3] = bad
    found = centres(t)[0]
    assert found[3] == n
    assert torch.equal(found[:3], centres(t, others[None])[0, :3])
    nothing = centres(torch.full((n, 3), bad))[0]
    assert nothing.tolist() == [0.0, 0.0, 0.0, n]
    # Nor have residues that are not there.
    hidden = torch.where(others[:, None], t, torch.tensor(1e3))
    assert torch.equal(centres(t, others[None]), centres(hidden, others[None]))


def test_a_protein_far_away_has_the_same_distances_from_its_centre():
    t = (protein(300) * 1024).round() / 1024  # so that the shift is exact
    near = t - centres(t)[0, :3]
    for shift in (1000.0, -4000.0, 8000.0):
        moved = t + shift
        assert torch.equal(moved - shift, t)
        assert (moved - centres(moved)[0, :3] - near).abs().max() <= abs(shift) * 2**-22


def test_nothing_depends_on_the_schedule():
    sizes = Sizes(channels=40, head_dim=13)
    weights, node, t = parameters(sizes), torch.randn(2, 70, 40), protein(2, 70)
    mask = holes(2, 70)
    first, second = (run(0, sizes, node, t, weights, mask, seed=seed) for seed in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_nothing_to_do():
    sizes = Sizes(channels=8)
    for batch, n in ((0, 5), (2, 0)):
        results = run(2, sizes, torch.zeros(batch, n, 8), protein(batch, n), {})
        assert results["normalised"].numel() == 0
