# SPDX-License-Identifier: Apache-2.0
"""Myoglobin through one Evoformer-plus-structure-module block, fused against reference.

Reads a crystal structure (PDB 102M) and an alignment of its sequence, runs every module of the
block in fp32 and bf16 both ways, prints errors, times and memory, shows that the structure module
does not care where the protein stands, and draws one picture.

    python examples/myoglobin.py
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

try:
    import gemmi  # noqa: F401
    import matplotlib  # noqa: F401
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ModuleNotFoundError as error:
    sys.exit(f"The demo needs {error.name}: pip install 'fused-ops[demo]'")

import myoglobin_attention
import myoglobin_features as features
import torch
from myoglobin_figure import Measurement, Picture, draw
from torch import Tensor, nn

import fused_ops
from fused_ops import reference
from fused_ops.testing import median_time, peak_memory, relative_error

DATA = Path(__file__).resolve().parent / "data" / "myoglobin"
SHIFT = 50.0  # Å
CONTACT = 8.0  # Å between CA atoms
# AlphaFold's structure module counts positions in units of 10 Å; in Å the squared distances would
# drown every other term of the attention.
ANGSTROM_PER_UNIT = 10.0
LABELS = {
    "msa_attention": "MSA row attention",
    "triangle_outgoing": "Triangle, outgoing",
    "triangle_incoming": "Triangle, incoming",
    "ipa": "Invariant point attention",
}
BLOCK = "Whole block"


class Block(nn.Module):
    """One small block: MSA and pair updates as in the Evoformer, then one IPA layer.

    ``ops`` is ``fused_ops`` or ``fused_ops.reference``: same constructors, same state dict.
    """

    def __init__(self, ops: ModuleType, args: argparse.Namespace) -> None:
        super().__init__()
        triangle = ops.TriangularMultiplicativeUpdate
        self.msa_attention = ops.MSARowAttention(args.msa_dim, args.pair_dim, args.msa_heads)
        self.triangle_outgoing = triangle(args.pair_dim, args.hidden_dim, direction="outgoing")
        self.triangle_incoming = triangle(args.pair_dim, args.hidden_dim, direction="incoming")
        self.node = nn.Linear(args.msa_dim, args.node_dim)
        self.ipa = ops.InvariantPointAttention(
            args.node_dim, args.pair_dim, args.ipa_heads, args.query_points, args.value_points
        )

    def forward(
        self,
        msa: Tensor,
        pair: Tensor,
        msa_mask: Tensor,
        pair_mask: Tensor,
        node_mask: Tensor,
        translations: Tensor,
        rotations: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs as in ``myoglobin_features.Inputs``; new MSA, pair and node representations."""
        msa = msa + self.msa_attention(msa, pair, msa_mask)
        pair = pair + self.triangle_outgoing(pair, pair_mask)
        pair = pair + self.triangle_incoming(pair, pair_mask)
        node = self.node(msa[:, 0])
        node = node + self.ipa(node, pair, translations / ANGSTROM_PER_UNIT, rotations, node_mask)
        return msa, pair, node


def initialise(block: Block, seed: int) -> None:
    """Random weights of the size that training leaves behind.

    Freshly made layers would give flat attention. Here logits differ by a few units, so attention
    has structure, and gates stay where the sigmoid still answers.
    """
    generator = torch.Generator().manual_seed(seed)
    gains = {"query": 0.9, "key": 0.9, "pair_bias": 1.6}
    gains |= {"q_pts": 0.4, "k_pts": 0.4}  # in units of 10 Å
    with torch.no_grad():
        for path, module in block.named_modules():
            if isinstance(module, nn.Linear):
                gain = gains.get(path.rpartition(".")[2], 1.0)
                module.weight.normal_(0, gain / module.in_features**0.5, generator=generator)
                if module.bias is not None:
                    module.bias.normal_(0, 0.1, generator=generator)
            elif isinstance(module, nn.LayerNorm):
                module.weight.normal_(1, 0.1, generator=generator)
                module.bias.normal_(0, 0.1, generator=generator)
        block.ipa.head_weights.uniform_(0, 1, generator=generator)


def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Round activations to ``dtype``; frames, whose last axis is 3, keep at least fp32."""
    frames = torch.promote_types(dtype, torch.float32)
    return [
        tensor.to(frames if tensor.shape[-1] == 3 else dtype)
        if tensor.is_floating_point()
        else tensor
        for tensor in tensors
    ]


def record_trajectory(block: Block, inputs: Sequence[Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """The inputs that reach each module when ``block`` runs."""
    trajectory: dict[str, tuple[Tensor, ...]] = {}
    handles = [
        block.get_submodule(name).register_forward_pre_hook(
            lambda _, arguments, name=name: trajectory.__setitem__(name, arguments)
        )
        for name in LABELS
    ]
    block(*inputs)
    for handle in handles:
        handle.remove()
    return trajectory


def worst_error(result: Any, exact: Any) -> float:
    """The relative error of a module's output, or the worst one of a block's three outputs."""
    if isinstance(result, Tensor):
        return relative_error(result, exact)
    return max(relative_error(*pair) for pair in zip(result, exact, strict=True))


def allowed(reference_error: float, dtype: torch.dtype) -> float:
    """The library's contract: 1.5 times the eager module's own error, plus what a single rounding
    of the result costs (in fp32: 2e-7)."""
    rounding = 2e-7 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    return 1.5 * reference_error + rounding


def measure(
    label: str,
    fused: nn.Module,
    eager: nn.Module,
    exact: Any,
    inputs: Sequence[Tensor],
    kernel: str,
    args: argparse.Namespace,
) -> Measurement:
    """Error, time and peak memory of both modules on one set of inputs."""
    calls = [partial(module, *inputs) for module in (fused, eager)]
    errors = [worst_error(call(), exact) for call in calls]  # this call warms up, too

    def time_both(repeats: int) -> list[float]:
        return [median_time(call, args.device, warmup=0, repeats=repeats) for call in calls]

    # Three calls at least, since one alone may meet a busy moment of the machine; and the two take
    # turns, so that such a moment meets both.
    repeats = min(max(int(args.seconds / sum(time_both(1))), 3), 50)
    rounds = min(repeats, 5)
    seconds = [
        statistics.median(times)
        for times in zip(*(time_both(repeats // rounds) for _ in range(rounds)), strict=True)
    ]
    memory = [peak_memory(call, args.device) for call in calls]
    short = str(inputs[0].dtype).removeprefix("torch.")
    return Measurement(label, short, errors, seconds, memory, kernel)


def results_table(measurements: Sequence[Measurement], dtype: torch.dtype) -> Table:
    table = Table(title=f"{dtype}: fused | reference", title_justify="left")
    table.add_column("module", no_wrap=True)
    for heading in ("error against float64", "time, ms", "speed-up", "peak memory, MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ran as", no_wrap=True)
    for row in measurements:
        ok = row.errors[0] <= allowed(row.errors[1], dtype)
        table.add_row(
            row.module,
            f"[{'green' if ok else 'red'}]{row.errors[0]:.2e}[/] | {row.errors[1]:.2e}",
            f"{row.seconds[0] * 1e3:8.2f} | {row.seconds[1] * 1e3:8.2f}",
            f"{row.seconds[1] / row.seconds[0]:.2f}x",
            f"{row.memory[0] / 2**20:7.1f} | {row.memory[1] / 2**20:7.1f}",
            row.kernel,
            end_section=row.module == LABELS["ipa"],
        )
    return table


@dataclass(frozen=True)
class Invariance:
    """How far an IPA output moved, relative to its size, when the protein did."""

    dtype: torch.dtype
    fused: float
    eager: float
    control: float  # the reference when positions move but the axes of the frames do not


def measure_invariance(
    fused: nn.Module, eager: nn.Module, inputs: Sequence[Tensor], dtype: torch.dtype, seed: int
) -> Invariance:
    """Rotate and shift the frames of the IPA inputs and compare the outputs."""
    generator = torch.Generator().manual_seed(seed)
    node, pair, translations, rotations, mask = inputs
    rotation = features.random_rotation(generator)
    direction = torch.randn(3, generator=generator, dtype=torch.float64)
    shift = direction / direction.norm() * SHIFT / ANGSTROM_PER_UNIT
    # In float64, so that the moved frames carry one rounding to fp32, as the original ones do.
    new_rotations, new_translations = (
        tensor.to(rotations)
        for tensor in features.move(
            rotations.double().cpu(), translations.double().cpu(), rotation, shift
        )
    )
    moved = (node, pair, new_translations, new_rotations, mask)
    broken = (node, pair, new_translations, rotations, mask)
    still = eager(*inputs)
    return Invariance(
        dtype,
        relative_error(fused(*moved), fused(*inputs)),
        relative_error(eager(*moved), still),
        relative_error(eager(*broken), still),
    )


def make_picture(
    block: Block,
    trajectory: dict[str, tuple[Tensor, ...]],
    protein: features.Protein,
    inputs: features.Inputs,
    measurements: Sequence[Measurement],
) -> tuple[Picture, float]:
    """The contents of the figure, and by how much the recomputed attention, carried on to the
    output, misses what the module itself returns."""
    msa, pair, mask = trajectory["msa_attention"]
    query_row = (msa[:, :1], pair, mask[:, :1])
    msa_weights, msa_output = myoglobin_attention.msa_row_attention(block.msa_attention, *query_row)
    ipa_weights, ipa_output = myoglobin_attention.invariant_point_attention(
        block.ipa, *trajectory["ipa"]
    )
    mismatch = max(
        relative_error(msa_output, block.msa_attention(*query_row)),
        relative_error(ipa_output, block.ipa(*trajectory["ipa"])),
    )
    picture = Picture(
        name=protein.name,
        residue_numbers=protein.residue_numbers,
        helices=protein.helices,
        msa_mask=inputs.msa_mask[0].numpy(),
        msa_attention=msa_weights[0, 0].mean(0).cpu().numpy(),
        ipa_attention=ipa_weights[0].mean(0).cpu().numpy(),
        ca_distance=torch.cdist(protein.ca, protein.ca).numpy(),
        contact=CONTACT,
        measurements=measurements,
    )
    return picture, mismatch


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", type=torch.device, default=torch.device(default_device), help="cpu or cuda")
    add("--output", type=Path, default=Path("myoglobin.png"), help="the picture")
    add("--rows", type=int, default=64, help="rows of the alignment, the query among them")
    add("--seconds", type=float, default=0.5, help="of timing per module, at least three calls")
    add("--seed", type=int, default=102, help="of weights, projections and the rotation")
    add("--msa-dim", type=int, default=256, help="channels of the MSA")
    add("--msa-heads", type=int, default=8, help="heads of the row attention")
    add("--pair-dim", type=int, default=128, help="channels of the pair representation")
    add("--hidden-dim", type=int, default=128, help="hidden channels of the triangle updates")
    add("--node-dim", type=int, default=384, help="channels of the nodes")
    add("--ipa-heads", type=int, default=12, help="heads of the point attention")
    add("--query-points", type=int, default=4, help="query points per head")
    add("--value-points", type=int, default=8, help="value points per head")
    return parser.parse_args(argv)


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when every error and the invariance stay within their bounds."""
    args = parse_arguments(argv)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a log file has no edge to wrap at
    threads = torch.get_num_threads()
    machine = (
        torch.cuda.get_device_name(args.device)
        if args.device.type == "cuda"
        else f"CPU, {threads} thread{'s'[: threads > 1]}"
    )
    console.print(
        f"[bold]fused_ops {fused_ops.__version__}[/], torch {torch.__version__}, {machine}"
    )

    protein = features.read_protein(DATA / "102m.cif")
    _, rows = features.parse_a3m((DATA / "msa.a3m").read_text())
    total = len(rows)
    rows = features.choose_rows(rows, args.rows)
    inputs = features.build_inputs(protein, rows, args.msa_dim, args.pair_dim, args.seed)
    observed, holes = int(protein.observed.sum()), 1 - inputs.msa_mask.double().mean().item()
    console.print(
        f"PDB {protein.name}: {observed} of {len(protein.sequence)} residues observed; query of "
        f"the alignment matches; {len(rows)} of {total} rows, {holes:.0%} of them gaps\n"
    )

    original = Block(reference, args)
    initialise(original, args.seed)
    original = original.double().to(args.device)
    arguments = [tensor.to(args.device) for tensor in astuple(inputs)]
    trajectory = record_trajectory(original, arguments)

    measurements: list[Measurement] = []
    invariances: list[Invariance] = []
    explanations: dict[str, None] = {}  # in order, each once
    failures: list[str] = []
    dtypes = (torch.float32, torch.bfloat16)
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=len(dtypes) * (len(LABELS) + 2))
        for dtype in dtypes:
            short = str(dtype).removeprefix("torch.")
            eager = copy.deepcopy(original).to(dtype)
            fused = Block(fused_ops, args).to(args.device, dtype)
            fused.load_state_dict(eager.state_dict())
            # The oracle reads the very weights and inputs that the dtype's modules read.
            oracle = copy.deepcopy(eager).double()
            for name, label in (*LABELS.items(), ("", BLOCK)):
                progress.update(task, description=f"{short}: {label}")
                stage = cast(trajectory[name] if name else arguments, dtype)
                modules: list[Any] = [block.get_submodule(name) for block in (fused, eager, oracle)]
                exact = modules[2](*cast(stage, torch.float64))
                kernel = ""
                if name:
                    explanation = fused_ops.explain(modules[0], *stage)
                    kernel = explanation.kernel or explanation.path
                    explanations[str(explanation)] = None
                measured = measure(label, modules[0], modules[1], exact, stage, kernel, args)
                measurements.append(measured)
                error, eager_error = measured.errors
                if not error <= allowed(eager_error, dtype):
                    failures.append(f"{short} {label}: error {error:.2e}, eager {eager_error:.2e}")
                progress.advance(task)
            progress.update(task, description=f"{short}: moving the protein")
            invariance = measure_invariance(
                fused.ipa, eager.ipa, cast(trajectory["ipa"], dtype), dtype, args.seed
            )
            invariances.append(invariance)
            if not invariance.fused <= allowed(invariance.eager, dtype):
                failures.append(f"{short} IPA moved by {invariance.fused:.2e}")
            progress.advance(task)
        progress.update(task, description="all measured")

    for dtype in dtypes:
        short = str(dtype).removeprefix("torch.")
        console.print(results_table([m for m in measurements if m.dtype == short], dtype))
    for line in explanations:
        console.print(line, style="dim", highlight=False)

    console.print(
        f"\nThe protein was turned at random and moved by {SHIFT:.0f} Å. Relative change of the "
        "output of invariant point attention:"
    )
    for item in invariances:
        console.print(
            f"  {item.dtype}: fused {item.fused:.1e}, reference {item.eager:.1e} "
            f"(control, moved without turning the frames' axes: {item.control:.2f})"
        )

    picture, mismatch = make_picture(original, trajectory, protein, inputs, measurements)
    if not mismatch <= 1e-12:
        failures.append(f"recomputed attention misses the module's output by {mismatch:.1e}")
    picture.machine = machine
    draw(picture, args.output)
    console.print(f"\nPicture: {args.output}")
    for failure in failures:
        console.print(f"[red]out of bounds[/]: {failure}", highlight=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
