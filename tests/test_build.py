# SPDX-License-Identifier: Apache-2.0
"""The binaries: what they export and need, what importing does, what the planner answers."""

import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
import torch

import fused_ops
from fused_ops import _C

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path(fused_ops.__file__).with_name("libfused_ops_cuda.so")
MODULE = Path(_C.__file__)
INFO = _C.build_info()

needs_cuda_library = pytest.mark.skipif(
    INFO["cuda_version"] is None, reason="built with FUSED_OPS_CUDA=0 or without nvcc"
)


class Elf:
    """The dynamic part of a 64-bit little-endian shared object."""

    def __init__(self, path: Path):
        data = path.read_bytes()
        assert data[:6] == b"\x7fELF\x02\x01"
        self.needed: list[str] = []
        self.search_paths: list[str] = []
        self.exported: set[str] = set()
        self.undefined: dict[str, bool] = {}
        """Name of each strong undefined symbol; whether it asks for a version, as glibc's do."""

        header_offset = struct.unpack_from("<Q", data, 0x28)[0]
        entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
        headers = [
            struct.unpack_from("<IIQQQQIIQQ", data, header_offset + i * entry_size)
            for i in range(count)
        ]
        names = headers[names_index][4]
        sections = {self._text(data, names + h[0]): (h[4], h[5]) for h in headers}

        strings = sections[".dynstr"][0]
        start, size = sections[".dynamic"]
        for tag, value in struct.iter_unpack("<QQ", data[start : start + size]):
            if tag == 1:  # DT_NEEDED
                self.needed.append(self._text(data, strings + value))
            elif tag in (15, 29):  # DT_RPATH, DT_RUNPATH
                self.search_paths.append(self._text(data, strings + value))

        start, size = sections[".dynsym"]
        versions = sections[".gnu.version"][0]
        for i, symbol in enumerate(struct.iter_unpack("<IBBHQQ", data[start : start + size])):
            name = self._text(data, strings + symbol[0])
            weak, is_undefined = symbol[1] >> 4 == 2, symbol[3] == 0
            if is_undefined and not weak and name:
                version = struct.unpack_from("<H", data, versions + 2 * i)[0]
                self.undefined[name] = version >= 2
            elif not is_undefined:
                self.exported.add(name)

    @staticmethod
    def _text(data: bytes, offset: int) -> str:
        return data[offset : data.index(b"\0", offset)].decode()


# What the binaries hold ------------------------------------------------------------------------


def test_cuda_library_is_there_exactly_when_the_build_says_so():
    assert LIBRARY.exists() == (INFO["cuda_version"] is not None)


def test_build_info_states_the_facts():
    assert INFO["version"] == fused_ops.__version__
    assert INFO["torch_target"] == "2.11"
    assert re.match(r"(g\+\+|clang) \d+", INFO["compiler"])
    assert bool(INFO["archs"]) == (INFO["cuda_version"] is not None)
    assert all(re.fullmatch(r"\d+a?(\+PTX)?", arch) for arch in INFO["archs"])


@needs_cuda_library
def test_cuda_library_exports_nothing():
    # Its registrations run when it is loaded, so nobody needs to find a symbol in it.
    assert Elf(LIBRARY).exported == set()


def test_host_module_exports_only_its_entry_point():
    assert Elf(MODULE).exported == {"PyInit__C"}


@needs_cuda_library
def test_cuda_library_needs_torch_and_the_system_but_no_cuda_and_no_python():
    torch_libraries = {"libtorch.so", "libtorch_cpu.so", "libc10.so"}
    system = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
    system |= {"libdl.so.2", "librt.so.1", "libpthread.so.0"}  # empty since glibc 2.34
    needed = set(Elf(LIBRARY).needed)
    assert torch_libraries <= needed
    assert needed - torch_libraries <= system


@needs_cuda_library
def test_cuda_library_takes_only_stable_c_functions_from_torch():
    # PyTorch's symbols carry no version, those of glibc and libstdc++ do.
    unversioned = {name for name, versioned in Elf(LIBRARY).undefined.items() if not versioned}
    assert "torch_library_impl" in unversioned
    assert [name for name in unversioned if not re.match(r"(aoti_)?torch_[a-z0-9_]+$", name)] == []


def test_host_module_takes_nothing_from_torch_or_cuda():
    elf = Elf(MODULE)
    assert not [name for name in elf.needed if re.search(r"torch|c10|cuda|python", name)]
    assert not [name for name in elf.undefined if re.search(r"torch|c10|cuda", name)]


@pytest.mark.parametrize(
    "path", [MODULE, pytest.param(LIBRARY, marks=needs_cuda_library)], ids=lambda path: path.name
)
def test_binaries_hold_no_path_of_the_machine_that_built_them(path):
    assert Elf(path).search_paths == []
    data = path.read_bytes()
    for directory in (ROOT, Path(torch.__file__).parent, Path(sys.prefix)):
        assert str(directory).encode() not in data


def test_package_holds_one_host_module_for_this_python():
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    assert [path.name for path in MODULE.parent.glob(f"_C*{suffix}")] == [f"_C{suffix}"]


# What importing does ---------------------------------------------------------------------------

_IMPORT = """
import json, sys, time
import torch

events = []
def hook(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        events.append(f"writes {args[0]}")
    elif event in ("os.mkdir", "os.rename", "os.remove", "shutil.copyfile"):
        events.append(f"{event} {args}")
    elif event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork"):
        events.append(f"{event} {args}")
    elif event == "socket.connect":
        events.append(f"connects to {args[1]}")

modules = set(sys.modules)
sys.addaudithook(hook)
start = time.perf_counter()
import fused_ops
seconds = time.perf_counter() - start
print(json.dumps({
    "events": events,
    "modules": sorted(set(sys.modules) - modules),
    "seconds": seconds,
    "registered": torch._C._dispatch_has_kernel_for_dispatch_key(
        "fused_ops::tensor_matmul_forward", "CUDA"),
    "libraries": open("/proc/self/maps").read().count("libfused_ops_cuda.so"),
    "driver": "libcuda.so" in open("/proc/self/maps").read(),
}))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """What `import fused_ops`, after `import torch`, did in a fresh and empty home."""
    home = tmp_path_factory.mktemp("home")
    environment = {
        "HOME": str(home),
        "TMPDIR": str(home),
        "PATH": "/nonexistent",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    facts["left behind"] = [str(path.relative_to(home)) for path in home.rglob("*")]
    return facts


def test_import_writes_nothing_starts_nothing_and_connects_nowhere(imported):
    assert imported["events"] == []
    assert imported["left behind"] == []


def test_import_takes_less_than_ten_seconds(imported):
    assert imported["seconds"] < 10


@pytest.mark.parametrize(
    "name", ["gemmi", "hypothesis", "matplotlib", "rich", "torch._dynamo", "triton"]
)
def test_import_does_not_load(imported, name):
    assert name not in imported["modules"]


@needs_cuda_library
def test_import_loads_the_cuda_library_and_registers_its_kernels(imported):
    assert imported["libraries"] > 0
    assert imported["registered"]


@needs_cuda_library
@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch loads it itself")
def test_import_does_not_load_the_cuda_driver(imported):
    assert not imported["driver"]


def test_import_works_without_a_home():
    environment = {**os.environ, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    code = "import fused_ops; print(fused_ops.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == fused_ops.__version__, done.stderr


# The planner -----------------------------------------------------------------------------------

HEADLINE = {"a": [8, 256, 512, 256], "b": [256, 768]}


def plan(shapes=HEADLINE, dtype="float32", precision="ieee", capability=(9, 0), **kwargs):
    return _C.plan("tensor_matmul", shapes, dtype, precision, capability, **kwargs)


def built_capability() -> tuple[int, int]:
    """The compute capability of the first architecture of this build."""
    number = int(re.match(r"\d+", INFO["archs"][0])[0])
    return divmod(number, 10)


@needs_cuda_library
def test_planner_names_kernel_tile_and_launches_for_fp32():
    answer = plan({"a": [4, 4096, 60], "b": [60, 128]}, capability=built_capability())
    assert answer == {
        "path": "kernel",
        "kernel": "forward_sm80",
        "tile": [128, 128, 16],
        "launches": 1,
        "workspace_bytes": 0,
        "reasons": [],
    }


@needs_cuda_library
def test_planner_takes_the_small_tile_for_small_problems_and_few_columns():
    small = plan({"a": [2, 100, 64], "b": [64, 64]}, capability=built_capability())
    narrow = plan({"a": [1 << 15, 64], "b": [64, 40]}, capability=built_capability())
    assert small["tile"] == narrow["tile"] == [64, 64, 16]


@needs_cuda_library
def test_planner_takes_split_operands_for_large_problems():
    capability = built_capability()
    hopper = "90a" in INFO["archs"] and capability == (9, 0)
    arch = "sm90a" if hopper else "sm80"
    answer = plan(capability=capability)
    assert answer["kernel"] == f"split_forward_{arch}"
    assert answer["launches"] == 4
    # B in halves hi and lo, two scales a row and two a column.
    assert answer["workspace_bytes"] == 768 * 256 * 4 + 2 * 4 * 256 + 2 * 4 * 768
    back = plan(capability=capability, backward=True)
    assert back["kernel"] == f"split_reduce_{arch} and split_forward_{arch}"
    assert back["launches"] == 2 + 4
    narrow = plan({"a": [1 << 18, 128], "b": [128, 128]}, capability=capability)
    assert narrow["kernel"] == f"split_forward_{arch}"
    assert narrow["tile"] == ([128, 128, 32] if hopper else [64, 128, 32])
    # Where tiles are many, each is summed in one go.
    deep = {"a": [4096, 8192], "b": [8192, 8192]}
    assert plan(deep, capability=capability, backward=True)["launches"] == 1 + 4


@needs_cuda_library
@pytest.mark.parametrize("shapes", [{"a": [0, 3], "b": [3, 4]}, {"a": [2, 3], "b": [3, 0]}])
def test_planner_launches_nothing_for_an_empty_result(shapes):
    assert plan(shapes, capability=built_capability())["launches"] == 0


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (8, 6), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_planner_knows_which_devices_the_built_architectures_run_on(capability):
    def runs(arch: str) -> bool:
        number, exact, ptx = re.fullmatch(r"(\d+)(a?)(\+PTX)?", arch).groups()
        major, minor = divmod(int(number), 10)
        if exact:
            return capability == (major, minor)
        return (capability[0] == major and capability[1] >= minor) or bool(
            ptx and capability >= (major, minor)
        )

    answer = plan(capability=capability)
    if any(map(runs, INFO["archs"])):
        assert answer["path"] == "kernel"
    else:
        assert answer["path"] == "composition"
        assert answer["kernel"] is None
        assert answer["tile"] is None


@needs_cuda_library
def test_planner_says_which_architectures_were_built_when_a_device_is_too_old():
    answer = plan(capability=(7, 0))
    assert answer["reasons"] == [
        f"this build of fused-ops has kernels for the architectures {';'.join(INFO['archs'])}, "
        "the device has compute capability 7.0"
    ]


@pytest.mark.parametrize(
    ("dtype", "precision", "backward"),
    [
        ("bfloat16", "ieee", False),
        ("float16", "ieee", False),
        ("float64", "ieee", False),
        ("float32", "tf32", False),
        ("bfloat16", "ieee", True),
    ],
)
def test_planner_leaves_to_cublas_what_it_does_best(dtype, precision, backward):
    answer = plan(dtype=dtype, precision=precision, backward=backward)
    assert answer["path"] == "cublas"
    assert answer["reasons"] == []


@needs_cuda_library
@pytest.mark.parametrize(
    ("a", "b", "backward"),
    [
        ([8192, 128], [128, 256], False),  # too few multiplications for split operands
        ([1024, 8192], [8192, 130], False),  # too few tiles
        ([1 << 20, 64], [64, 40], False),  # tiles too empty
        ([16384, 128], [128, 100], True),
    ],
)
def test_planner_leaves_to_cublas_where_it_is_faster(a, b, backward):
    answer = plan({"a": a, "b": b}, capability=built_capability(), backward=backward)
    assert answer["path"] == "cublas"
    assert answer["reasons"] == []


@needs_cuda_library
def test_planner_tells_whichever_gradient_has_a_kernel():
    only_a = {"a": [1 << 20, 128], "b": [128, 70]}  # that of b would fill half of a tile
    answer = plan(only_a, capability=built_capability(), backward=True)
    assert answer["kernel"].startswith("split_forward")
    assert answer["launches"] == 4


@needs_cuda_library
def test_planner_refuses_more_blocks_than_a_grid_holds_and_gives_all_reasons():
    shapes = {"a": [1 << 40, 0], "b": [0, 768000]}
    answer = plan(shapes, capability=built_capability())
    assert answer["path"] == "composition"
    assert "at most 2147483647 tiles of 128x128" in answer["reasons"][0]
    assert len(plan(shapes, capability=(7, 0))["reasons"]) == 2


@needs_cuda_library
def test_planner_survives_sizes_whose_product_overflows():
    shapes = {"a": [1 << 20, 1 << 50], "b": [1 << 50, 1 << 50]}
    answer = plan(shapes, capability=built_capability(), backward=True)
    assert answer["path"] == "cublas"


@needs_cuda_library
def test_planner_merges_leading_axes_and_counts_those_that_remain():
    shapes = {"a": [2] * 10 + [4], "b": [4, 5]}
    assert plan(shapes, capability=built_capability())["path"] == "kernel"
    scattered = {"a": [10**i for i in range(10)] + [1]}
    answer = plan(shapes, capability=built_capability(), strides=scattered)
    assert answer["path"] == "composition"
    assert "at most 8 leading axes" in answer["reasons"][0]


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("tensor_matmul", HEADLINE),
        ("triangular_multiplicative_update", {"pair": [1, 5, 5, 8], "hidden": [4]}),
        (
            "msa_row_attention",
            {"msa": [1, 3, 5, 8], "pair": [1, 5, 5, 8], "num_heads": [2], "head_dim": [4]},
        ),
        ("invariant_point_attention", {"node": [1, 5, 8], "pair": [1, 5, 5, 8]}),
    ],
)
def test_planner_runs_the_composition_for_cpu_tensors(op, shapes):
    answer = _C.plan(op, shapes, "float32", "ieee", None)
    assert answer["path"] == "composition"
    assert answer["reasons"] == ["CPU tensors"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("softmax", {}, "float32", "ieee", None), "op must be one of .*tensor_matmul.*, got soft"),
        (("tensor_matmul", {"a": [2, 3]}, "float32", "ieee", None), "shapes must hold 'b'"),
        (("tensor_matmul", {"a": [], "b": [3, 4]}, "float32", "ieee", None), "a must have at"),
        (
            ("tensor_matmul", {"a": [2, 3], "b": [4, 5]}, "float32", "ieee", None),
            r"b must have shape \(3, K\), got \(4, 5\)",
        ),
        (("tensor_matmul", HEADLINE, "int8", "ieee", None), "dtype must be .*, got int8"),
        (("tensor_matmul", HEADLINE, "float32", "fast", None), "precision must be .*, got 'fast'"),
        (("msa_row_attention", {}, "float32", "ieee", (9, 0)), "shapes must hold 'msa'"),
    ],
)
def test_planner_refuses_a_bad_question(arguments, text):
    with pytest.raises(ValueError, match=text):
        _C.plan(*arguments)


# The checks of the CUDA op, which need no GPU ----------------------------------------------------


@needs_cuda_library
@pytest.mark.parametrize(
    ("a", "b", "precision", "dtype", "text"),
    [
        (torch.ones(()), torch.ones(3, 4), "ieee", None, r"a must have shape \(..., L\), got \(\)"),
        (
            torch.ones(2, 3),
            torch.ones(4, 5),
            "ieee",
            None,
            r"b must have shape \(3, K\), got \(4, 5\)",
        ),
        (torch.ones(2, 3), torch.ones(3), "ieee", None, r"b must have shape \(3, K\), got \(3,\)"),
        (
            torch.ones(2, 3).long(),
            torch.ones(3, 4),
            "ieee",
            None,
            "a must be float32, .*, got Long",
        ),
        (
            torch.ones(2, 3).double(),
            torch.ones(3, 4),
            "ieee",
            None,
            "b must be float64 when a is float64, got float32",
        ),
        (torch.ones(2, 3), torch.ones(3, 4), "ieee", torch.int32, "dtype must be .*, got Int"),
        (torch.ones(2, 3), torch.ones(3, 4), "fast", None, "precision must be .*, got 'fast'"),
    ],
)
def test_cuda_op_refuses_bad_arguments_with_op_argument_expected_and_got(
    a, b, precision, dtype, text
):
    # The kernel that is registered for CUDA is called with CPU tensors: its checks come first.
    op = torch.ops.fused_ops.tensor_matmul_forward.default
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(ValueError, match=f"^tensor_matmul: {text}"):
        op.redispatch(keys, a, b, precision, dtype)


# setup.py --------------------------------------------------------------------------------------


@pytest.fixture
def build(monkeypatch, tmp_path):
    """setup.py as a module, on a machine with no variable set and no tool on PATH."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    for name in ("FUSED_OPS_CUDA", "FUSED_OPS_CUDA_ARCHS", "FUSED_OPS_TORCH_DIR", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = importlib.util.spec_from_file_location("fused_ops_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_nvidia_smi(directory: Path, answer: str) -> None:
    script = directory / "nvidia-smi"
    script.write_text(f"#!{shutil.which('sh', path='/bin:/usr/bin')}\n{answer}\n")
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("answer", "archs"),
    [
        ("echo 9.0; echo 9.0", ["90a"]),
        ("echo 12.0; echo 8.6; echo 9.0", ["86", "90a", "120"]),
        ("echo 7.5", ["90a"]),
        ("echo 'NVIDIA-SMI has failed'; exit 9", ["90a"]),
    ],
)
def test_default_architectures_are_those_of_the_visible_gpus(build, tmp_path, answer, archs):
    fake_nvidia_smi(tmp_path, answer)
    assert build.cuda_archs() == archs


def test_default_architecture_without_a_gpu_is_hopper(build):
    assert build.cuda_archs() == ["90a"]


def test_release_architectures_become_machine_code_and_ptx(build, monkeypatch):
    monkeypatch.setenv("FUSED_OPS_CUDA_ARCHS", "80+PTX;90a;100;120+PTX")
    assert build.gencode(build.cuda_archs())[1::2] == [
        "arch=compute_80,code=[sm_80,compute_80]",
        "arch=compute_90a,code=sm_90a",
        "arch=compute_100,code=sm_100",
        "arch=compute_120,code=[sm_120,compute_120]",
    ]


@pytest.mark.parametrize("archs", ["70", "8.0", "90a,100", "sm_90"])
def test_bad_architectures_are_refused(build, monkeypatch, archs):
    monkeypatch.setenv("FUSED_OPS_CUDA_ARCHS", archs)
    with pytest.raises(SystemExit, match=r"FUSED_OPS_CUDA_ARCHS must list .*, got"):
        build.cuda_archs()


def test_cuda_can_be_demanded_and_declined(build, monkeypatch):
    monkeypatch.setenv("FUSED_OPS_CUDA", "0")
    assert not build.cuda_wanted()
    monkeypatch.setenv("FUSED_OPS_CUDA", "1")
    assert build.cuda_wanted()
    monkeypatch.setenv("FUSED_OPS_CUDA", "yes")
    with pytest.raises(SystemExit, match="FUSED_OPS_CUDA must be 0 or 1, got 'yes'"):
        build.cuda_wanted()


def test_a_torch_that_is_too_old_or_missing_is_refused(build, monkeypatch, tmp_path):
    monkeypatch.setenv("FUSED_OPS_TORCH_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match=r"torch>=2.11 must be in .*, got none"):
        build.torch_directory()
    header = tmp_path / "include/torch/headeronly/version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 9\n")
    with pytest.raises(SystemExit, match=r"got 2\.9"):
        build.torch_directory()
