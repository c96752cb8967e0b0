# SPDX-License-Identifier: Apache-2.0
"""Compiles the drivers of the emulation and runs kernels through them.

``driver("tensor_matmul").run("forward", {"a": a, "b": b}, tile=0, ...)`` returns what the kernel
wrote. Objects are kept in ``build/emulation/`` and made anew when a source or header they include
is newer; of several processes that want one at a time, the first makes it. ``CXX`` names the
compiler; nothing else is needed.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import shlex
import subprocess
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "emulation"
COMPILER = shlex.split(os.environ.get("CXX", "g++"))

# Where a variable is at each instruction took the compiler a third of its time: gdb shows some as
# optimized out, lines are right.
COMMON = ["-std=c++17", "-g", "-fno-var-tracking", "-ffp-contract=off"]
COMMON += ["-Wall", "-Wextra", "-Wno-unknown-pragmas"]
COMMON += [f"-I{ROOT / path}" for path in ("tests/emulation/stand_in", "tests", "csrc")]
# Sums in a kernel are not reassociated, so -Og computes what -O2 does. It compiles in half the time
# of -O1, and a kernel takes hardly longer: most of that is the machinery and the sanitizers.
KERNELS = ["-Og", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# The machinery is used by every instruction of a kernel, and touches none of its memory where it is
# compiled without the sanitizers.
MACHINERY = {
    "fiber": ["-O2", "-fsanitize=address"],
    "block": ["-O2", "-fsanitize=address"],
    "copies": ["-O2", "-fsanitize=address"],
    "barriers": ["-O2", "-fsanitize=address"],
    "warpgroup": ["-O2", "-fsanitize=address"],
    "driver": ["-O1", "-fsanitize=address"],
    "tensor_core": ["-O3"],
}
# Drivers whose launchers another one needs, which links their object instead of compiling them.
PARTS = {
    "msa_row_attention_backward": ["msa_row_attention_attend"],
    "msa_row_attention_backward_fp32": ["msa_row_attention_attend_fp32"],
}


class EmulationError(Exception):
    """A driver that failed; its text is what the sanitizer or the emulation said."""


@functools.cache
def _folder() -> pathlib.Path:
    version = subprocess.run(
        [*COMPILER, "--version"], check=True, capture_output=True, text=True
    ).stdout
    key = repr((version, COMPILER, COMMON, KERNELS, MACHINERY))
    folder = ROOT / "build" / "emulation" / hashlib.sha256(key.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise EmulationError(f"{shlex.join(command)}\n{done.stderr}")


@contextlib.contextmanager
def _alone(product: pathlib.Path) -> Iterator[None]:
    """Let no other process make ``product`` meanwhile; whoever waited finds it made."""
    with open(product.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        yield


def _is_current(product: pathlib.Path, dependencies: list[pathlib.Path]) -> bool:
    if not product.exists():
        return False
    made = product.stat().st_mtime
    return all(path.exists() and path.stat().st_mtime < made for path in dependencies)


@functools.cache
def _object(name: str) -> pathlib.Path:
    product = _folder() / f"{name}.o"
    listed = _folder() / f"{name}.d"
    with _alone(product):
        dependencies = []
        if listed.exists():
            words = listed.read_text().replace("\\\n", " ").split()
            dependencies = [pathlib.Path(word) for word in words[1:]]
        if not dependencies or not _is_current(product, dependencies):
            flags = [*COMMON, *MACHINERY.get(name, KERNELS)]
            scratch = product.with_suffix(".part.o")  # none is left half written
            command = [*COMPILER, *flags, "-MMD", "-MF", str(listed)]
            _call([*command, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(scratch)])
            scratch.replace(product)
    return product


class Driver:
    """A program of ``tests/emulation/``, compiled."""

    def __init__(self, program: pathlib.Path):
        self.program = program

    def run(
        self, kernel: str, inputs: Mapping[str, Tensor] | None = None, **settings: int
    ) -> dict[str, Tensor]:
        """Run a kernel; returns what it wrote, as float32 vectors (``view`` gives other types), or
        as bytes where their number is not a multiple of four."""
        inputs = inputs or {}
        data = [
            x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for x in inputs.values()
        ]
        lines = [f"kernel {kernel}"]
        lines += [f"set {name} {int(value)}" for name, value in settings.items()]
        lines += [f"input {name} {len(x)}" for name, x in zip(inputs, data, strict=True)]
        request = ("\n".join([*lines, "data"]) + "\n").encode() + b"".join(data)
        # Long enough for any test; a kernel that waits for itself in a loop would never end.
        done = subprocess.run([self.program], input=request, capture_output=True, timeout=300)
        if done.returncode != 0:
            raise EmulationError(done.stderr.decode(errors="replace"))
        header, _, rest = done.stdout.partition(b"data\n")
        outputs = {}
        for line in header.decode().splitlines():
            _, name, size = line.split()
            words = np.float32 if int(size) % 4 == 0 else np.uint8
            values = np.frombuffer(rest[: int(size)], dtype=words)
            outputs[name] = torch.from_numpy(values.copy())
            rest = rest[int(size) :]
        return outputs


@functools.cache
def driver(name: str) -> Driver:
    """Compile ``tests/emulation/<name>.cpp`` if it must be, and link it to the machinery."""
    objects = [_object(part) for part in (name, *PARTS.get(name, ()), *MACHINERY)]
    program = _folder() / name
    with _alone(program):
        if not _is_current(program, objects):
            scratch = program.with_suffix(".part")
            flags = [flag for flag in KERNELS if flag.startswith("-fsanitize")]
            _call([*COMPILER, *flags, *map(str, objects), "-o", str(scratch)])
            scratch.replace(program)
    return Driver(program)


def span(tensor: Tensor) -> Tensor:
    """The memory of a view, from the beginning of its storage to its last element, not further."""
    last = tensor.storage_offset()
    last += sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size = last + 1 if tensor.numel() else 0
    return tensor.detach().as_strided((size,), (1,), 0)
