# SPDX-License-Identifier: Apache-2.0
"""The myoglobin example: features, frames, attention maps, and the program as a whole.

gemmi, matplotlib and rich belong to the test environment; without them this file fails to import,
which is meant.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import gemmi
import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import myoglobin  # noqa: E402
import myoglobin_attention  # noqa: E402
import myoglobin_features as features  # noqa: E402

import fused_ops  # noqa: E402
from fused_ops import reference  # noqa: E402
from fused_ops.testing import median_time, peak_memory, relative_error  # noqa: E402

DATA = EXAMPLES / "data" / "myoglobin"
N = 154
MIB = 2**20


@pytest.fixture(scope="module")
def protein() -> features.Protein:
    return features.read_protein(DATA / "102m.cif")


@pytest.fixture(scope="module")
def rows() -> list[str]:
    return features.parse_a3m((DATA / "msa.a3m").read_text())[1]


@pytest.fixture(scope="module")
def inputs(protein: features.Protein, rows: list[str]) -> features.Inputs:
    return features.build_inputs(protein, features.choose_rows(rows, 16), 24, 20, seed=1)


# Structure


def test_structure_holds_the_whole_chain(protein: features.Protein) -> None:
    assert protein.name == "102M"
    assert len(protein.sequence) == N
    assert protein.observed.all()
    # Met 0 starts the chain; the mutation that names the entry, H64A, and the heme's histidine.
    assert protein.residue_numbers.tolist() == list(range(N))
    assert [protein.sequence[place] for place in (0, 1, 64, 93)] == ["M", "V", "A", "H"]
    assert len(protein.helices) == 8
    # Consecutive trans residues: one virtual bond length all along the chain.
    bonds = (protein.ca[1:] - protein.ca[:-1]).norm(dim=-1)
    assert ((bonds - 3.8).abs() < 0.15).all()


def test_unresolved_residues_leave_holes(tmp_path: Path, protein: features.Protein) -> None:
    structure = gemmi.read_structure(str(DATA / "102m.cif"))
    chain = structure[0]["A"]
    for index in (81, 80, 79):
        del chain[index]
    for atom in ("CA", "C"):
        chain[10].remove_atom(atom, "\0")
    path = tmp_path / "holes.cif"
    structure.make_mmcif_document().write_file(str(path))

    holed = features.read_protein(path)
    assert holed.sequence == protein.sequence
    assert (~holed.observed).nonzero().flatten().tolist() == [10, 79, 80, 81]
    assert holed.residue_numbers.tolist() == protein.residue_numbers.tolist()
    seen = holed.observed
    assert torch.equal(holed.backbone[seen], protein.backbone[seen])

    built = features.build_inputs(holed, [holed.sequence], 8, 8, seed=0)
    assert not built.pair_mask[0, 80].any()
    assert not built.pair_mask[0, :, 80].any()
    assert torch.equal(built.node_mask[0], seen)
    assert built.rotations.isfinite().all()
    assert torch.linalg.det(built.rotations).allclose(torch.ones((), dtype=torch.float64))


def test_structure_with_a_foreign_residue_is_refused(tmp_path: Path) -> None:
    text = (DATA / "102m.cif").read_text()
    path = tmp_path / "wrong.cif"
    assert text.count("\n1 2   VAL n") == 1  # the entity's sequence; the atoms still say VAL
    path.write_text(text.replace("\n1 2   VAL n", "\n1 2   TRP n"))
    with pytest.raises(ValueError, match="label_seq_id 2"):
        features.read_protein(path)


def test_query_must_match_the_structure(protein: features.Protein) -> None:
    features.check_query(protein.sequence, protein)
    with pytest.raises(ValueError, match="155 residues, 102M has 154"):
        features.check_query(protein.sequence + "G", protein)
    wild_type = protein.sequence[:64] + "H" + protein.sequence[65:]
    with pytest.raises(ValueError, match="residue 64 the query of the alignment has H"):
        features.check_query(wild_type, protein)


# Alignment


def test_a3m_parser() -> None:
    text = "#A3M#\n>query one\nMKV\nLA\n\n>hit/2-5\n-KvvvV.L-\n"
    assert features.parse_a3m(text) == (["query one", "hit/2-5"], ["MKVLA", "-KVL-"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one sequence"),
        ("MKV\n", "before the first sequence"),
        (">q\nMKV\n>h\nMKVL\n", "expected 3 aligned columns.* got 4 in 'h'"),
    ],
)
def test_a3m_parser_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        features.parse_a3m(text)


def test_alignment(rows: list[str]) -> None:
    assert len(rows) == 771
    assert {len(row) for row in rows} == {N}
    chosen = features.choose_rows(rows, 64)
    assert len(chosen) == 64
    assert (chosen[0], chosen[-1]) == (rows[0], rows[-1])
    assert features.choose_rows(rows, 10_000) == rows
    assert features.choose_rows(rows, 1) == rows[:1]


def test_tokens() -> None:
    tokens = features.msa_tokens(["AV-X", "RBJZ"])
    unknown = features.UNKNOWN
    assert tokens.tolist() == [[0, 19, features.GAP, unknown], [1, unknown, unknown, unknown]]


# Features


def test_input_shapes_and_masks(inputs: features.Inputs, rows: list[str]) -> None:
    assert inputs.msa.shape == (1, 16, N, 24)
    assert inputs.pair.shape == (1, N, N, 20)
    assert inputs.msa_mask.shape == (1, 16, N)
    assert inputs.pair_mask.shape == (1, N, N)
    assert inputs.translations.shape == (1, N, 3)
    assert inputs.rotations.shape == (1, N, 3, 3)
    for tensor in (inputs.msa, inputs.pair):
        assert tensor.square().mean().item() == pytest.approx(1)
    letters = np.array([list(row) for row in features.choose_rows(rows, 16)])
    assert np.array_equal(inputs.msa_mask[0].numpy(), letters != "-")
    assert inputs.msa_mask[0, 0].all()  # the query has no gaps
    interior = inputs.msa_mask[0, 1:, 20:130]
    assert not interior.all()  # holes, not only ragged ends
    assert interior.any(-1).all()


def test_inputs_are_reproducible(
    protein: features.Protein, rows: list[str], inputs: features.Inputs
) -> None:
    again = features.build_inputs(protein, features.choose_rows(rows, 16), 24, 20, seed=1)
    other = features.build_inputs(protein, features.choose_rows(rows, 16), 24, 20, seed=2)
    assert torch.equal(again.msa, inputs.msa)
    assert torch.equal(again.pair, inputs.pair)
    assert not torch.equal(other.pair, inputs.pair)


def test_pair_features(protein: features.Protein) -> None:
    relative, distogram = features.pair_features(protein).split((65, 39), dim=-1)
    assert (relative.sum(-1) == 1).all()
    assert relative[10, 10].argmax() == 32
    assert relative[10, 15].argmax() == 37
    assert relative[15, 10].argmax() == 27
    assert relative[0, N - 1].argmax() == 64
    off_diagonal = ~torch.eye(N, dtype=torch.bool)
    assert (distogram.sum(-1) == off_diagonal).all()
    assert torch.equal(distogram, distogram.transpose(0, 1))
    place = int(distogram[3, 40].argmax())
    distance = (protein.ca[3] - protein.ca[40]).norm()
    assert features.DISTOGRAM_EDGES[place] <= distance < features.DISTOGRAM_EDGES[place + 1]


# Frames


def test_frames_are_rigid(protein: features.Protein) -> None:
    rotations, translations = features.backbone_frames(protein.backbone)
    identity = torch.eye(3, dtype=torch.float64).expand(N, 3, 3)
    torch.testing.assert_close(rotations @ rotations.mT, identity, rtol=0, atol=1e-14)
    torch.testing.assert_close(rotations.mT @ rotations, identity, rtol=0, atol=1e-14)
    determinants = torch.linalg.det(rotations)
    torch.testing.assert_close(determinants, torch.ones_like(determinants), rtol=0, atol=1e-14)
    assert torch.equal(translations, protein.ca)


def test_frames_place_a_residue_where_it_is(protein: features.Protein) -> None:
    """A residue in local coordinates (CA at the origin, C on x, N in the xy plane with y > 0),
    sent through ``p @ R + t``, is the residue of the file."""
    rotations, translations = features.backbone_frames(protein.backbone)
    n, ca, c = (protein.backbone - translations[:, None]).unbind(1)
    length = c.norm(dim=-1)
    x = (n * c).sum(-1) / length
    y = (n.square().sum(-1) - x.square()).sqrt()
    zero = torch.zeros_like(x)
    local = torch.stack(
        [
            torch.stack([x, y, zero], -1),
            torch.zeros_like(ca),
            torch.stack([length, zero, zero], -1),
        ],
        dim=1,
    )
    placed = torch.einsum("nac,ncd->nad", local, rotations) + translations[:, None]
    torch.testing.assert_close(placed, protein.backbone, rtol=0, atol=1e-12)
    # AlphaFold's ideal geometry is what crystals show, within the spread of bond angles.
    ideal = torch.tensor([[-0.525, 1.363, 0], [0, 0, 0], [1.526, 0, 0]], dtype=torch.float64)
    placed = ideal @ rotations + translations[:, None]
    assert (placed - protein.backbone).norm(dim=-1).max() < 0.25  # measured 0.205 Å


def test_frames_turn_with_the_protein(protein: features.Protein) -> None:
    generator = torch.Generator().manual_seed(3)
    rotation = features.random_rotation(generator)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(3, dtype=torch.float64))
    assert torch.linalg.det(rotation).item() == pytest.approx(1)
    shift = torch.tensor([50.0, -20.0, 10.0], dtype=torch.float64)
    expected = features.move(*features.backbone_frames(protein.backbone), rotation, shift)
    found = features.backbone_frames(protein.backbone @ rotation + shift)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ops", [fused_ops, reference], ids=["fused", "reference"])
@torch.no_grad()
def test_ipa_does_not_move_with_the_protein(ops, inputs: features.Inputs) -> None:
    generator = torch.Generator().manual_seed(4)
    torch.manual_seed(4)
    module = ops.InvariantPointAttention(24, 20, 3, 4, 8)
    node, pair = inputs.msa[:, 0].float(), inputs.pair.float()
    rotation = features.random_rotation(generator)
    translations = inputs.translations / myoglobin.ANGSTROM_PER_UNIT
    shift = torch.tensor([3.0, -4.0, 0.0], dtype=torch.float64)
    moved = features.move(inputs.rotations, translations, rotation, shift)
    here = module(node, pair, translations.float(), inputs.rotations.float())
    there = module(node, pair, moved[1].float(), moved[0].float())
    # Positions near 5 are stored to 2e-7, so squared distances and hence logits to a few 1e-6.
    assert relative_error(there, here) < 1e-5
    broken = module(node, pair, moved[1].float(), inputs.rotations.float())
    assert relative_error(broken, here) > 1e-2


# Attention maps


@torch.no_grad()
def test_recomputed_attention_gives_the_modules_output(inputs: features.Inputs) -> None:
    torch.manual_seed(5)
    msa_module = reference.MSARowAttention(24, 20, 4).double()
    weights, output = myoglobin_attention.msa_row_attention(
        msa_module, inputs.msa, inputs.pair, inputs.msa_mask
    )
    torch.testing.assert_close(output, msa_module(inputs.msa, inputs.pair, inputs.msa_mask))
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert (weights.masked_select(~inputs.msa_mask[:, :, None, None, :]) == 0).all()

    ipa = reference.InvariantPointAttention(24, 20, 3, 4, 8).double()
    frames = (inputs.translations / 10, inputs.rotations)
    mask = torch.arange(N)[None] < 140
    arguments = (inputs.msa[:, 0], inputs.pair, *frames, mask)
    weights, output = myoglobin_attention.invariant_point_attention(ipa, *arguments)
    torch.testing.assert_close(output, ipa(*arguments))
    assert (weights[..., 140:] == 0).all()


# The program

SMALL = ["--device=cpu", "--rows=8", "--seconds=0.01", "--msa-dim=32", "--msa-heads=4"]
SMALL += ["--pair-dim=16", "--hidden-dim=16", "--node-dim=48", "--ipa-heads=4"]


def test_main_writes_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "myoglobin.png"
    assert myoglobin.main([*SMALL, "--output", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 50_000
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    printed = capsys.readouterr().out
    for text in ("154 of 154 residues", "float32", "bfloat16", *myoglobin.LABELS.values()):
        assert text in printed
    assert "out of bounds" not in printed


def test_main_fails_when_a_module_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit status is worth something: an IPA that forgets the shift is caught twice."""
    forward = fused_ops.InvariantPointAttention.forward

    def wrong(self, node, pair, translations, rotations, *rest):
        return forward(self, node, pair, translations * 1.001, rotations, *rest) + (
            1e-3 * translations.mean().to(node.dtype)
        )

    monkeypatch.setattr(fused_ops.InvariantPointAttention, "forward", wrong)
    assert myoglobin.main([*SMALL, "--output", str(tmp_path / "wrong.png")]) == 1
    printed = capsys.readouterr().out
    assert "float32 Invariant point attention: error" in printed
    assert "float32 IPA moved by" in printed


def test_runs_as_a_script_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "myoglobin.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--output" in done.stdout


# fused_ops.testing


def test_relative_error() -> None:
    a = torch.tensor([3.0, 4.0])
    assert relative_error(a, a) == 0
    assert relative_error(a * 1.5, a) == pytest.approx(0.5)
    assert relative_error(torch.ones(0, 3), torch.ones(0, 3)) == 0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(a, torch.zeros(2)) == math.inf
    assert math.isnan(relative_error(torch.tensor([math.nan, 0]), a))
    assert relative_error(torch.tensor([1e200]).double(), torch.tensor([1e-200]).double()) > 1e300
    with pytest.raises(ValueError, match="shape"):
        relative_error(torch.ones(2, 1), torch.ones(1, 2))


def test_median_time() -> None:
    calls: list[int] = []
    assert 0 < median_time(lambda: calls.append(1), "cpu", warmup=2, repeats=3) < 1
    assert len(calls) == 5
    with pytest.raises(ValueError, match="repeats"):
        median_time(lambda: None, "cpu", repeats=0)


def test_peak_memory_counts_what_lives_at_once() -> None:
    def two_at_once() -> None:
        first, second = torch.empty(16 * MIB), torch.empty(16 * MIB)
        del first, second

    def one_after_the_other() -> torch.Tensor:
        for _ in range(3):
            block = torch.empty(16 * MIB)
            del block
        return torch.empty(MIB)

    assert peak_memory(two_at_once, "cpu") == 128 * MIB
    assert peak_memory(one_after_the_other, "cpu") == 64 * MIB
    assert peak_memory(lambda: None, "cpu") == 0
    with pytest.raises(ValueError, match="meta"):
        peak_memory(lambda: None, "meta")


def test_peak_memory_sees_inside_operators() -> None:
    # A strided operand of a matmul is copied inside the operator: 16 MiB beside 16 MiB of result.
    x = torch.randn(2048, 2 * 2048)[:, ::2]
    eye = torch.eye(2048)
    assert peak_memory(lambda: x @ eye, "cpu") == 32 * MIB

    with torch.library._scoped_library("fused_ops_test", "FRAGMENT") as library:
        library.define("two_planes(Tensor x) -> Tensor")

        def two_planes(x: torch.Tensor) -> torch.Tensor:
            plane = x + 1
            return (plane * 2).sum()

        library.impl("two_planes", two_planes, "CPU")
        y = torch.randn(4 * MIB)
        peak = peak_memory(lambda: torch.ops.fused_ops_test.two_planes(y), "cpu")
        assert 32 * MIB <= peak <= 32 * MIB + 1024


@pytest.mark.gpu
def test_peak_memory_on_cuda() -> None:
    def two_at_once() -> None:
        first = torch.empty(16 * MIB, device="cuda")
        second = torch.empty(16 * MIB, device="cuda")
        del first, second

    assert peak_memory(two_at_once, "cuda") == 128 * MIB
    assert median_time(two_at_once, "cuda", warmup=1, repeats=3) > 0


@pytest.mark.gpu
def test_main_on_cuda(tmp_path: Path) -> None:
    arguments = ["--device", "cuda", "--output", str(tmp_path / "myoglobin.png")]
    assert myoglobin.main(arguments) == 0
