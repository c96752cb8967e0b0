# SPDX-License-Identifier: Apache-2.0
"""From an mmCIF file and an A3M alignment to the tensors of a structure model.

Nothing here is learned: features are one-hot encodings sent through fixed random projections, so
that the tensors have realistic sizes, masks and geometry.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gemmi
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

AMINO_ACIDS = "ARNDCQEGHILKMFPSTWYV"
UNKNOWN = len(AMINO_ACIDS)
GAP = UNKNOWN + 1
NUM_TOKENS = GAP + 1

MAX_RELATIVE_POSITION = 32
# The bins of AlphaFold's template distogram, in Å; the last one is open.
DISTOGRAM_EDGES = torch.linspace(3.25, 50.75, 39)


@dataclass(frozen=True)
class Protein:
    """One chain, indexed by its full sequence; residues the crystal does not show are masked."""

    name: str
    sequence: str
    residue_numbers: np.ndarray  # (N,), the authors' numbers
    backbone: Tensor  # (N, 3, 3) float64, atoms N, CA, C, in Å
    observed: Tensor  # (N,) bool: all three atoms are there
    helices: list[tuple[int, int]]  # first and last index of each helix

    @property
    def ca(self) -> Tensor:
        return self.backbone[:, 1]


def read_protein(path: Path, chain_name: str = "A") -> Protein:
    """Read one polymer chain of an mmCIF file.

    A residue's place is its ``label_seq_id``, which counts the full sequence of the entity, so
    unresolved loops leave holes and never shift what follows. Its name is checked against the
    sequence there.
    """
    structure = gemmi.read_structure(str(path))
    structure.setup_entities()
    polymer = structure[0][chain_name].get_polymer()
    entity = structure.get_entity_of(polymer)
    if entity is None:
        raise ValueError(f"{path.name}: chain {chain_name} has no polymer entity")
    names = [gemmi.Entity.first_mon(item) for item in entity.full_sequence]
    length = len(names)

    backbone = torch.zeros(length, 3, 3, dtype=torch.float64)
    observed = torch.zeros(length, dtype=torch.bool)
    index_of: dict[str, int] = {}  # by the authors' number and insertion code
    known: list[tuple[int, int]] = []
    for residue in polymer.first_conformer():
        index = (residue.label_seq or 0) - 1
        if not 0 <= index < length or names[index] != residue.name:
            expected = names[index] if 0 <= index < length else "no residue"
            raise ValueError(
                f"{path.name}: {residue} stands at label_seq_id {residue.label_seq}, where the "
                f"sequence has {expected}"
            )
        index_of[str(residue.seqid)] = index
        known.append((index, residue.seqid.num or 0))
        atoms = [residue.find_atom(name, "*") for name in ("N", "CA", "C")]
        if all(atom is not None for atom in atoms):
            backbone[index] = torch.tensor([atom.pos.tolist() for atom in atoms])
            observed[index] = True
    if not known:
        raise ValueError(f"{path.name}: chain {chain_name} has no residues")

    # Unresolved residues have no author's number here; they continue their neighbours' count.
    numbers = np.empty(length, dtype=int)
    for index in range(length):
        nearest, number = min(known, key=lambda item: abs(item[0] - index))
        numbers[index] = number + index - nearest

    helices = [
        (index_of[str(helix.start.res_id.seqid)], index_of[str(helix.end.res_id.seqid)])
        for helix in structure.helices
        if helix.start.chain_name == chain_name
    ]
    sequence = gemmi.one_letter_code(names)
    return Protein(structure.name, sequence, numbers, backbone, observed, helices)


def parse_a3m(text: str) -> tuple[list[str], list[str]]:
    """Names and aligned rows of an A3M alignment, the query first.

    Lower-case letters are insertions relative to the query and are dropped, as are the dots that
    some programs pad them with; every row then has the query's length.
    """
    names: list[str] = []
    rows: list[str] = []
    for line in text.splitlines():
        if line.startswith(">"):
            names.append(line[1:].strip())
            rows.append("")
        elif line.strip() and not line.startswith("#"):
            if not rows:
                raise ValueError("A3M: expected a '>' line before the first sequence")
            rows[-1] += "".join(c for c in line.strip() if not c.islower() and c != ".")
    if not rows:
        raise ValueError("A3M: expected at least one sequence, got none")
    for name, row in zip(names, rows, strict=True):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"A3M: expected {len(rows[0])} aligned columns, as in the query, "
                f"got {len(row)} in {name!r}"
            )
    return names, rows


def check_query(query: str, protein: Protein) -> None:
    """Refuse an alignment whose query is not, letter by letter, the sequence of the structure."""
    if len(query) != len(protein.sequence):
        raise ValueError(
            f"the query of the alignment has {len(query)} residues, "
            f"{protein.name} has {len(protein.sequence)}"
        )
    for index, (ours, theirs) in enumerate(zip(query, protein.sequence, strict=True)):
        if ours != theirs:
            raise ValueError(
                f"at residue {protein.residue_numbers[index]} the query of the alignment has "
                f"{ours}, {protein.name} has {theirs}"
            )


def choose_rows(rows: list[str], count: int) -> list[str]:
    """The query and ``count - 1`` rows spread evenly over the file.

    The file is sorted by search score: its head alone holds near-complete rows, while the
    fragments, and with them most holes of the mask, stand towards its end.
    """
    if count >= len(rows):
        return rows
    picked = np.linspace(0, len(rows) - 1, count).round().astype(int)
    return [rows[index] for index in picked]


def msa_tokens(rows: list[str]) -> Tensor:
    """Aligned rows as token numbers (S, N): 20 amino acids, unknown, gap."""
    table = {letter: index for index, letter in enumerate(AMINO_ACIDS)} | {"-": GAP}
    return torch.tensor([[table.get(letter, UNKNOWN) for letter in row] for row in rows])


def msa_features(tokens: Tensor) -> Tensor:
    """One-hot tokens beside the token frequencies of their column, (S, N, 2 * NUM_TOKENS).

    The column profile makes two residues of one kind at two places different, as a model's
    cluster profile does.
    """
    one_hot = functional.one_hot(tokens, NUM_TOKENS).double()
    profile = one_hot.mean(0, keepdim=True).expand_as(one_hot)
    return torch.cat([one_hot, profile], dim=-1)


def pair_features(protein: Protein) -> Tensor:
    """Clipped relative positions and CA distogram, one-hot, (N, N, 65 + 39)."""
    place = torch.arange(len(protein.sequence))
    limit = MAX_RELATIVE_POSITION
    offset = (place[None, :] - place[:, None]).clamp(-limit, limit) + limit
    relative = functional.one_hot(offset, 2 * limit + 1).double()
    distance = torch.cdist(protein.ca, protein.ca)
    bins = torch.bucketize(distance, DISTOGRAM_EDGES.double(), right=True) - 1
    distogram = functional.one_hot(bins.clamp(min=0), len(DISTOGRAM_EDGES)).double()
    both = protein.observed[:, None] & protein.observed[None, :]
    # As in AlphaFold, a pair closer than the first edge (here: a residue and itself) has no bin.
    distogram = distogram * (both & (bins >= 0))[..., None]
    return torch.cat([relative, distogram], dim=-1)


def backbone_frames(backbone: Tensor) -> tuple[Tensor, Tensor]:
    """Rotations (N, 3, 3) and translations (N, 3) by Gram-Schmidt from N, CA, C (N, 3, 3).

    AlphaFold 2 supplement, Algorithm 21: the x axis points from CA to C, the y axis lies in the
    plane of the three atoms on N's side. AlphaFold multiplies column vectors, so its axes are the
    columns of R; here points are rows, ``p @ R + t``, and the axes are the rows of R.
    """
    n, ca, c = backbone.unbind(-2)
    x_axis = functional.normalize(c - ca, dim=-1)
    towards_n = n - ca
    inside = (towards_n * x_axis).sum(-1, keepdim=True) * x_axis
    y_axis = functional.normalize(towards_n - inside, dim=-1)
    z_axis = torch.linalg.cross(x_axis, y_axis)
    return torch.stack([x_axis, y_axis, z_axis], dim=-2), ca


def random_rotation(generator: torch.Generator) -> Tensor:
    """A proper rotation (3, 3), uniform over all of them, float64."""
    gaussian = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    q = q * r.diagonal().sign()  # makes the factorisation unique, and with it q uniform
    return q * torch.linalg.det(q).sign()


def move(
    rotations: Tensor, translations: Tensor, rotation: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Frames of the whole protein after x -> x @ rotation + shift."""
    return rotations @ rotation, translations @ rotation + shift


def random_projection(features: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    """Features (..., F) through a fixed Gaussian matrix to (..., dim), at unit mean square."""
    matrix = torch.randn(features.shape[-1], dim, generator=generator, dtype=torch.float64)
    projected = features @ matrix
    return projected / projected.square().mean().sqrt()


@dataclass(frozen=True)
class Inputs:
    """What the block reads; batch size 1 leads every tensor."""

    msa: Tensor  # (1, S, N, msa_dim)
    pair: Tensor  # (1, N, N, pair_dim)
    msa_mask: Tensor  # (1, S, N) bool, false at gaps
    pair_mask: Tensor  # (1, N, N) bool, true where both residues are observed
    node_mask: Tensor  # (1, N) bool, true where the residue is observed
    translations: Tensor  # (1, N, 3), in Å
    rotations: Tensor  # (1, N, 3, 3)


def build_inputs(
    protein: Protein, rows: list[str], msa_dim: int, pair_dim: int, seed: int
) -> Inputs:
    """All tensors of one protein and its alignment, float64 on the CPU."""
    check_query(rows[0], protein)
    generator = torch.Generator().manual_seed(seed)
    tokens = msa_tokens(rows)
    observed = protein.observed
    rotations, translations = backbone_frames(protein.backbone)
    identity = torch.eye(3, dtype=torch.float64)
    rotations = torch.where(observed[:, None, None], rotations, identity)
    return Inputs(
        msa=random_projection(msa_features(tokens), msa_dim, generator)[None],
        pair=random_projection(pair_features(protein), pair_dim, generator)[None],
        msa_mask=(tokens != GAP)[None],
        pair_mask=(observed[:, None] & observed[None, :])[None],
        node_mask=observed[None],
        translations=translations[None],
        rotations=rotations[None],
    )
