# SPDX-License-Identifier: Apache-2.0
"""Build the two binaries of fused_ops with one ninja file.

``fused_ops/_C.<python>.so``        pybind11, host only: the kernel planner and the build's facts
``fused_ops/libfused_ops_cuda.so``  the CUDA kernels; knows no Python and only torch's stable C ABI

torch is located but never imported: all that is needed of it are headers, and three libraries to
name at link time. So a wheel can be made for a Python that has no torch, and the CUDA library
under a CPU-only torch. Environment variables that steer a build:

FUSED_OPS_CUDA        1: fail without nvcc; 0: no CUDA library; unset: build it when nvcc is found
FUSED_OPS_CUDA_ARCHS  e.g. ``80+PTX;90a;100;120+PTX``; default: the visible GPUs' own, else 90a
FUSED_OPS_TORCH_DIR   a torch package directory, for a Python that has no torch of its own
CUDA_HOME, CXX, MAX_JOBS  as usual; ccache is used when it is on PATH
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD = Path("build/fused_ops")  # relative like all paths to our own files: ninja runs in ROOT
EXPORTS = "csrc/exports.map"
HOST_MODULE = "fused_ops._C"
CUDA_LIBRARY = "fused_ops.libfused_ops_cuda"
TORCH_TARGET = "2.11"  # the oldest torch that the binaries run with
NVCC_PLACES = "in CUDA_HOME, on PATH or in /usr/local/cuda"
HIDDEN = ["-fvisibility=hidden", "-fvisibility-inlines-hidden"]


def sources(*patterns: str) -> list[str]:
    return sorted({str(path.relative_to(ROOT)) for p in patterns for path in ROOT.glob(p)})


HOST_SOURCES = sources("csrc/common/*.cpp", "csrc/*/plan.cpp")  # in both binaries
OP_SOURCES = sources("csrc/*/*_cuda.cpp")  # the only ones that see torch's headers
KERNEL_SOURCES = sources("csrc/*/*.cu")


def fail(text: str) -> None:
    sys.exit(f"fused-ops: {text}")


if int(setuptools.__version__.partition(".")[0]) < 77:  # it could not read pyproject.toml
    fail(f"setuptools>=77 is needed, got {setuptools.__version__}: pip install -U setuptools")


class Nvcc:
    """The CUDA compiler and what it says about its own installation."""

    @staticmethod
    def find() -> str | None:
        homes = [os.environ.get("CUDA_HOME"), None, "/usr/local/cuda"]  # None: look on PATH
        found = [shutil.which("nvcc", path=home and os.path.join(home, "bin")) for home in homes]
        return next(filter(None, found), None)

    def __init__(self, path: str):
        self.path = path
        version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        # nvcc on PATH may be a wrapper far from its headers: a dry run tells where those are.
        dryrun = [path, "--dryrun", "-x", "cu", "-c", os.devnull]
        layout = subprocess.run(dryrun, capture_output=True, text=True).stderr
        release = re.search(r"release (\d+\.\d+)", version)
        include = re.search(r'INCLUDES=.*?"-I([^"]+)"', layout)
        libraries = [d for d in re.findall(r'"-L([^"]+)"', layout) if "stubs" not in d]
        if not (release and include and libraries):
            fail(f"{path} does not answer as nvcc does; set CUDA_HOME or FUSED_OPS_CUDA=0")
        self.version, self.include, self.libraries = release[1], include[1], libraries[0]


def cuda_wanted() -> bool:
    setting = os.environ.get("FUSED_OPS_CUDA", "")
    if setting not in ("", "0", "1"):
        fail(f"FUSED_OPS_CUDA must be 0 or 1, got {setting!r}")
    return setting == "1" or (setting == "" and Nvcc.find() is not None)


def cuda_archs() -> list[str]:
    """The architectures to compile for: ``80+PTX``, ``90a``, ..."""
    if setting := os.environ.get("FUSED_OPS_CUDA_ARCHS"):
        archs = list(dict.fromkeys(filter(None, map(str.strip, setting.split(";")))))
        for arch in archs:
            match = re.fullmatch(r"(\d+)a?(\+PTX)?", arch)
            if not match or int(match[1]) < 80:
                fail(
                    "FUSED_OPS_CUDA_ARCHS must list architectures from 80 (Ampere) on, such as "
                    f"'80+PTX;90a', got {arch!r}"
                )
        return archs
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    visible = sorted({int(a + b) for a, b in re.findall(r"^(\d+)\.(\d)$", answer, re.MULTILINE)})
    return ["90a" if number == 90 else str(number) for number in visible if number >= 80] or ["90a"]


def gencode(archs: list[str]) -> list[str]:
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX")
        code = f"[sm_{number},compute_{number}]" if arch.endswith("+PTX") else f"sm_{number}"
        flags += ["-gencode", f"arch=compute_{number},code={code}"]
    return flags


def torch_directory() -> Path:
    directory = os.environ.get("FUSED_OPS_TORCH_DIR")
    if not directory:
        spec = importlib.util.find_spec("torch")  # finds the package without running it
        if spec is None or not spec.submodule_search_locations:
            fail(
                f"torch's headers were not found: install torch>={TORCH_TARGET} and build with "
                "--no-build-isolation, or set FUSED_OPS_TORCH_DIR to a torch package directory"
            )
        directory = spec.submodule_search_locations[0]
    header = Path(directory, "include/torch/headeronly/version.h")
    text = header.read_text() if header.exists() else ""
    version = re.findall(r"define TORCH_VERSION_(?:MAJOR|MINOR) (\d+)", text)
    if [*map(int, version)] < [*map(int, TORCH_TARGET.split("."))]:
        fail(f"torch>={TORCH_TARGET} must be in {directory}, got {'.'.join(version) or 'none'}")
    return Path(directory)


class Build:
    """The steps of both binaries, as one ninja file."""

    def __init__(self, version: str, nvcc: Nvcc | None, archs: list[str]):
        self.nvcc, self.archs = nvcc, archs
        self.cxx = shlex.split(os.environ.get("CXX", "g++"))
        self.host = [*self.cxx, "-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Icsrc", *HIDDEN]
        self.launcher = [path for path in [shutil.which("ccache")] if path]
        self.lines = [
            f"builddir = {BUILD}",
            "rule compile",  # the log keeps what ptxas says; a failure is shown at once
            "  command = $words > $out.log 2>&1 || { cat $out.log >&2; exit 1; }",
            "  description = compile $in",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            "  command = $words",
            "  description = link $out",
        ]
        facts = {
            "VERSION": version,
            "CUDA_VERSION": nvcc.version if nvcc else "",
            "CUDA_ARCHS": ";".join(archs),
            "TORCH_TARGET": TORCH_TARGET,
        }
        facts = [f'-DFUSED_OPS_{name}="{value}"' for name, value in facts.items()]
        self.shared = []
        for source in HOST_SOURCES:  # one file alone sees the facts: a new version recompiles it
            extra = facts if source.endswith("/build_info.cpp") else []
            self.shared.append(self.compile("host", source, [*self.host, *extra]))

    def step(self, rule: str, output: Path, inputs: list, words: list) -> Path:
        escaped = " ".join(re.sub(r"([$ :])", r"$\1", str(path)) for path in inputs)
        words = shlex.join(map(str, words)).replace("$", "$$")
        self.lines += [f"build {output}: {rule} {escaped}", f"  words = {words}"]
        return output

    def compile(self, directory: str, source: str, words: list) -> Path:
        output = BUILD / directory / f"{source.removeprefix('csrc/').replace('/', '.')}.o"
        tail = ["-MD", "-MF", f"{output}.d", "-c", source, "-o", output]
        return self.step("compile", output, [source], [*self.launcher, *words, *tail])

    def link(self, output: Path, objects: list[Path], libraries: list) -> Path:
        # The version script hides all symbols but PyInit__C, and -s drops nvcc's random names.
        flags = ["-shared", "-s", f"-Wl,--version-script={EXPORTS}", "-Wl,--exclude-libs,ALL"]
        words = [*self.cxx, *flags, "-o", output, *objects, *libraries]
        return self.step("link", output, [*objects, EXPORTS], words)

    def python_module(self) -> Path:
        import pybind11  # not at the top: asking for metadata or an sdist must not need it

        include = pybind11.get_include()
        flags = [f"-isystem{directory}" for directory in (sysconfig.get_path("include"), include)]
        flags += [f"-ffile-prefix-map={include}=pybind11"]
        tag = sysconfig.get_config_var("SOABI")
        module = self.compile(tag, "csrc/bindings.cpp", [*self.host, *flags])
        return self.link(BUILD / tag / "_C.so", [*self.shared, module], [])

    def cuda_library(self) -> Path:
        torch = torch_directory()
        target = "".join(f"{int(part):02x}" for part in TORCH_TARGET.split("."))
        hopper = [arch for arch in self.archs if arch.startswith("90a")]

        op = [*self.host, f"-DTORCH_TARGET_VERSION=0x{target:0<16}", "-DTORCH_STABLE_ONLY"]
        op += ["-DUSE_CUDA", f"-DFUSED_OPS_HAS_SM90A={int(bool(hopper))}"]
        op += [f"-isystem{torch}/include", f"-isystem{self.nvcc.include}"]
        op += [f"-ffile-prefix-map={torch}=torch"]  # torch's checks quote their file
        objects = [*self.shared, *(self.compile("cuda", source, op) for source in OP_SOURCES)]

        kernel = [self.nvcc.path, "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Icsrc"]
        kernel += [f"-Xcompiler={','.join(['-fPIC', *HIDDEN])}", "-Xptxas=-v,-warn-spills"]
        kernel += ["-ccbin", self.cxx[-1]] if "CXX" in os.environ else []
        for source in KERNEL_SOURCES:  # the suffix says what a file is for (csrc/README.md)
            archs = hopper if source.endswith("_sm90a.cu") else self.archs
            if archs:
                objects.append(self.compile("cuda", source, [*kernel, *gencode(archs)]))

        # No rpath: torch, imported before the library is loaded, has brought its three already.
        # They are recorded as needed because torch does not make their symbols global. libstdc++
        # comes first: some builds of torch export pieces of their own that are not to be used.
        libraries = ["-lstdc++", f"-L{torch}/lib", "-Wl,--no-as-needed"]
        libraries += ["-ltorch", "-ltorch_cpu", "-lc10"]
        libraries += ["-Wl,--as-needed", f"-L{self.nvcc.libraries}", "-lcudart_static"]
        libraries += ["-ldl", "-lrt", "-lpthread", "-Wl,-z,defs"]
        return self.link(BUILD / "cuda" / "libfused_ops_cuda.so", objects, libraries)

    def run(self) -> None:
        file = BUILD / f"{sysconfig.get_config_var('SOABI')}.ninja"
        (ROOT / BUILD).mkdir(parents=True, exist_ok=True)
        (ROOT / file).write_text("\n".join([*self.lines, ""]))
        try:
            from ninja import BIN_DIR  # the PyPI package, found also outside its environment
        except ImportError:
            BIN_DIR = ""
        ninja = shutil.which("ninja", path=os.pathsep.join([BIN_DIR, os.environ["PATH"]]))
        if ninja is None:
            fail("ninja was not found: pip install ninja")
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        if subprocess.run([ninja, "-f", file, "-j", jobs], cwd=ROOT).returncode:
            fail("the build failed; the compiler's message stands above")
        self.report_registers()

    def report_registers(self) -> None:
        """Gather what ptxas said about each kernel in one file, and warn of register spills."""
        logs = sorted((ROOT / BUILD / "cuda").glob("*.cu.o.log")) if self.nvcc else []
        text = "".join(f"== {log.name}\n{log.read_text()}" for log in logs)
        (ROOT / BUILD / "ptxas.log").write_text(text)
        if spills := re.findall(r"ptxas warning : Registers are spilled", text):
            print(f"fused-ops: {len(spills)} of the kernels spill registers, see {BUILD}/ptxas.log")


class BuildExt(build_ext):
    """Compile everything with ninja, then put the results where setuptools expects them."""

    def get_ext_filename(self, fullname: str) -> str:
        # No Python imports the kernel library, so its name carries no Python tag.
        package, _, name = fullname.rpartition(".")
        if name == CUDA_LIBRARY.rpartition(".")[2]:
            return os.path.join(package, f"{name}.so")
        return super().get_ext_filename(fullname)

    def run(self) -> None:
        super().run()
        if self.inplace and not self.has_cuda():  # a library of an earlier build would be loaded
            (ROOT / self.get_ext_filename(CUDA_LIBRARY)).unlink(missing_ok=True)

    def has_cuda(self) -> bool:
        return any(ext.name == CUDA_LIBRARY for ext in self.extensions)

    def build_extensions(self) -> None:
        if sys.platform != "linux" or os.uname().machine != "x86_64":
            fail("only Linux on x86-64 is supported")
        path, nvcc, archs = Nvcc.find(), None, []
        if self.has_cuda():
            if path is None:
                fail(f"FUSED_OPS_CUDA=1, but no nvcc {NVCC_PLACES}")
            nvcc, archs = Nvcc(path), cuda_archs()
            print(f"fused-ops: CUDA {nvcc.version} library for {';'.join(archs)}", flush=True)
        else:
            why = "FUSED_OPS_CUDA=0" if path else f"no nvcc {NVCC_PLACES}"
            print(f"fused-ops: the CUDA library is skipped ({why})", flush=True)

        build = Build(self.distribution.get_version(), nvcc, archs)
        outputs = {HOST_MODULE: build.python_module()}
        if nvcc:
            outputs[CUDA_LIBRARY] = build.cuda_library()
        build.run()
        stale = Path(self.get_ext_fullpath(CUDA_LIBRARY))
        stale.unlink(missing_ok=True)  # else a wheel without CUDA would carry an older build's
        for name, output in outputs.items():
            target = self.get_ext_fullpath(name)
            self.mkpath(os.path.dirname(target))
            self.copy_file(str(ROOT / output), target)


EXTENSIONS = [Extension(HOST_MODULE, ["csrc/bindings.cpp", *HOST_SOURCES])]
if cuda_wanted():
    EXTENSIONS.append(Extension(CUDA_LIBRARY, [*OP_SOURCES, *KERNEL_SOURCES, *HOST_SOURCES]))
setup(ext_modules=EXTENSIONS, cmdclass={"build_ext": BuildExt})
