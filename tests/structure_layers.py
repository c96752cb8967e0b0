# SPDX-License-Identifier: Apache-2.0
"""The invariant point attention of three models in plain PyTorch, and the fused op around the same
parameters.

Written from what their papers and interfaces say: parameter names, layouts and scales are theirs.
Points are columns, as there: ``R p + t``; the fused op is given the rotations transposed. All mask
by ``inf (m_i m_j - 1)``, so that only rows of residues that are there mean anything; the others are
zeroed here, as the callers of these layers do.
"""

import math

import torch
from torch import Tensor, nn

from fused_ops.functional import invariant_point_attention


class Layer(nn.Module):
    """What the three share: all but projections, scales and what pair values come from."""

    def __init__(self, c_s, c_z, c_hidden, heads, qk_points, v_points, *, inf=1e5, eps=1e-8):
        super().__init__()
        self.c_s, self.c_z, self.c_hidden = c_s, c_z, c_hidden
        self.heads, self.qk_points, self.v_points = heads, qk_points, v_points
        self.inf, self.eps = inf, eps
        self.linear_b = nn.Linear(c_z, heads)
        self.head_weights = nn.Parameter(torch.zeros(heads))
        features = heads * (c_hidden + 4 * v_points + self.value_channels())
        self.linear_out = nn.Linear(features, c_s)

    def value_channels(self) -> int:
        return self.c_z

    def pair_values(self, z: Tensor) -> Tensor:
        return z

    def project(self, s: Tensor) -> tuple[Tensor, ...]:
        """q, k, v (..., N, H, c_hidden) and local points (..., N, H, P, 3)."""
        raise NotImplementedError

    def rows(self) -> dict[str, Tensor]:
        """The projections' parameters as the fused op has them."""
        raise NotImplementedError

    def scores(self, scalars: Tensor, points: Tensor, bias: Tensor) -> Tensor:
        """Logits from q.k, weighted distances and bias."""
        scalars = scalars * math.sqrt(1.0 / (3 * self.c_hidden))
        points = points * math.sqrt(1.0 / (3 * (self.qk_points * 9.0 / 2)))
        return scalars + math.sqrt(1.0 / 3) * bias - 0.5 * points

    def forward(self, s: Tensor, z: Tensor, t: Tensor, r: Tensor, mask: Tensor) -> Tensor:
        def to_global(p: Tensor) -> Tensor:
            moved = torch.einsum("...nxy,...nhpy->...nhpx", r, p.to(r.dtype))
            return moved + t[..., None, None, :]

        q, k, v, q_pts, k_pts, v_pts = self.project(s)
        q_pts, k_pts, v_pts = to_global(q_pts), to_global(k_pts), to_global(v_pts)
        difference = q_pts.unsqueeze(-4) - k_pts.unsqueeze(-5)  # (..., i, j, H, P, 3)
        distances = difference.square().sum(dim=(-1, -2)).movedim(-1, -3)
        weights = nn.functional.softplus(self.head_weights)[:, None, None]
        scalars = torch.einsum("...ihd,...jhd->...hij", q, k)
        bias = self.linear_b(z).movedim(-1, -3)
        logits = self.scores(scalars, weights * distances, bias)
        there = (mask != 0).to(logits.dtype)
        square = there.unsqueeze(-1) * there.unsqueeze(-2)
        logits = logits + self.inf * (square - 1).unsqueeze(-3)
        a = torch.softmax(logits, dim=-1)

        o = torch.einsum("...hij,...jhd->...ihd", a.to(v.dtype), v).flatten(-2)
        gathered = torch.einsum("...hij,...jhpx->...ihpx", a.to(v_pts.dtype), v_pts)
        local = gathered - t[..., None, None, :]
        local = torch.einsum("...nxy,...nhpx->...nhpy", r, local).flatten(-3, -2)
        lengths = torch.sqrt(local.square().sum(dim=-1) + self.eps)
        values = self.pair_values(z)
        o_pair = torch.einsum("...hij,...ijc->...ihc", a.to(values.dtype), values).flatten(-2)
        parts = [o, *local.unbind(-1), lengths, o_pair]
        out = self.linear_out(torch.cat([part.to(s.dtype) for part in parts], dim=-1))
        return out * there.to(out.dtype).unsqueeze(-1)


class Monomer(Layer):
    """OpenFold's, of the monomer models: points as (xyz, head, point), keys beside values."""

    def __init__(self, c_s, c_z, c_hidden, heads, qk_points, v_points, **options):
        super().__init__(c_s, c_z, c_hidden, heads, qk_points, v_points, **options)
        self.linear_q = nn.Linear(c_s, heads * c_hidden)
        self.linear_kv = nn.Linear(c_s, 2 * heads * c_hidden)
        self.linear_q_points = nn.Linear(c_s, 3 * heads * qk_points)
        self.linear_kv_points = nn.Linear(c_s, 3 * heads * (qk_points + v_points))

    def project(self, s):
        q = self.linear_q(s).unflatten(-1, (self.heads, -1))
        k, v = self.linear_kv(s).unflatten(-1, (self.heads, -1)).chunk(2, dim=-1)

        def points(linear):
            coordinates = torch.stack(linear(s).chunk(3, dim=-1), dim=-1)
            return coordinates.unflatten(-2, (self.heads, -1))

        kv = points(self.linear_kv_points)
        sizes = [self.qk_points, self.v_points]
        return (q, k, v, points(self.linear_q_points), *kv.split(sizes, dim=-2))

    def rows(self):
        rows = {}
        for kind in ("weight", "bias"):
            k, v = getattr(self.linear_kv, kind).unflatten(0, (self.heads, 2, -1)).unbind(1)
            q_pts = getattr(self.linear_q_points, kind).unflatten(0, (3, self.heads, -1))
            kv_pts = getattr(self.linear_kv_points, kind).unflatten(0, (3, self.heads, -1))
            k_pts, v_pts = kv_pts.split([self.qk_points, self.v_points], dim=2)
            rows[f"q_proj_{kind}"] = getattr(self.linear_q, kind)
            rows[f"k_proj_{kind}"], rows[f"v_proj_{kind}"] = k.flatten(0, 1), v.flatten(0, 1)
            for name, part in (("q_pts", q_pts), ("k_pts", k_pts), ("v_pts", v_pts)):
                rows[f"{name}_{kind}"] = part.movedim(0, 2).flatten(0, 2)
        return rows


class Multimer(Layer):
    """OpenFold's, of the multimer models: one linear each, points as (head, xyz, point)."""

    def __init__(self, c_s, c_z, c_hidden, heads, qk_points, v_points, **options):
        super().__init__(c_s, c_z, c_hidden, heads, qk_points, v_points, **options)
        self.linear_q = nn.Linear(c_s, heads * c_hidden, bias=False)
        self.linear_k = nn.Linear(c_s, heads * c_hidden, bias=False)
        self.linear_v = nn.Linear(c_s, heads * c_hidden, bias=False)
        self.linear_q_points = nn.Linear(c_s, 3 * heads * qk_points)
        self.linear_k_points = nn.Linear(c_s, 3 * heads * qk_points)
        self.linear_v_points = nn.Linear(c_s, 3 * heads * v_points)

    def project(self, s):
        scalars = (self.linear_q, self.linear_k, self.linear_v)
        points = (self.linear_q_points, self.linear_k_points, self.linear_v_points)
        return (
            *(linear(s).unflatten(-1, (self.heads, -1)) for linear in scalars),
            *(linear(s).unflatten(-1, (self.heads, 3, -1)).transpose(-1, -2) for linear in points),
        )

    def scores(self, scalars, points, bias):
        scalars = scalars / math.sqrt(self.c_hidden)
        points = points * math.sqrt(1.0 / (self.qk_points * 9.0 / 2))
        return math.sqrt(1.0 / 3) * (scalars + bias - 0.5 * points)

    def rows(self):
        rows = {f"{name}_proj_weight": getattr(self, f"linear_{name}").weight for name in "qkv"}
        for name in "qkv":
            for kind in ("weight", "bias"):
                part = getattr(getattr(self, f"linear_{name}_points"), kind)
                part = part.unflatten(0, (self.heads, 3, -1)).transpose(1, 2)
                rows[f"{name}_pts_{kind}"] = part.flatten(0, 2)
        return rows


class FrameDiff(Monomer):
    """FrameDiff's: as the monomer's, but what is gathered is a narrower projection of the pairs."""

    def __init__(self, c_s, c_z, c_hidden, heads, qk_points, v_points, **options):
        super().__init__(c_s, c_z, c_hidden, heads, qk_points, v_points, **options)
        self.down_z = nn.Linear(c_z, self.value_channels())

    def value_channels(self):
        return max(1, self.c_z // 4)

    def pair_values(self, z):
        return self.down_z(z)


class Fused(nn.Module):
    """The fused op around the parameters of a :class:`Layer`."""

    def __init__(self, inner: Layer):
        super().__init__()
        self.inner = inner

    def arguments(self, s, z, t, r, mask):
        """Those of the op by name, but for those of the projections."""
        layer = self.inner
        heads, width = layer.heads, layer.heads * layer.c_hidden
        points = 3 * heads * layer.v_points
        scalars, local, rest = layer.linear_out.weight.split(
            [width, points, layer.linear_out.in_features - width - points], dim=1
        )
        local = local.unflatten(1, (3, heads, -1)).movedim(1, 3).flatten(1)
        own = isinstance(layer, FrameDiff)
        return {
            "node": s,
            "pair": z,
            "translations": t,
            "rotations": r.transpose(-1, -2),
            "node_mask": mask,
            "layer_norm_weight": None,
            "layer_norm_bias": None,
            **layer.rows(),
            "pair_bias_weight": layer.linear_b.weight,
            "pair_bias_bias": layer.linear_b.bias,
            "head_weights": layer.head_weights,
            "out_proj_weight": torch.cat([scalars, local, rest], dim=1),
            "out_proj_bias": layer.linear_out.bias,
            "num_heads": heads,
            "num_query_points": layer.qk_points,
            "num_value_points": layer.v_points,
            "scalar_scale": math.sqrt(1.0 / (3 * layer.c_hidden)),
            "point_scale": math.sqrt(1.0 / (3 * (layer.qk_points * 9.0 / 2))),
            "bias_scale": math.sqrt(1.0 / 3),
            "norm_eps": layer.eps,
            "gathers_pair": not own,
            "pair_value": layer.pair_values(z) if own else None,
        }

    def forward(self, s, z, t, r, mask):
        out = invariant_point_attention(**self.arguments(s, z, t, r, mask))
        return out * (mask != 0).to(out.dtype).unsqueeze(-1)


LAYERS = {"monomer": Monomer, "multimer": Multimer, "framediff": FrameDiff}
