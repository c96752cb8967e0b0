# SPDX-License-Identifier: Apache-2.0
"""Cases H23 to H26: state, installation, broken installations, memory."""

import copy
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from helpers import evaluate
from subjects import (
    MASKED_OPS,
    MODULES,
    OPERATORS,
    OPS,
    PAIR_OPS,
    SIZES,
    build,
    inputs,
    msa,
    randn,
    tri,
)
from torch._subclasses import FakeTensorMode

import fused_ops
from fused_ops import _library, reference
from fused_ops.testing import peak_memory, relative_error

PACKAGE = Path(fused_ops.__file__).parent

# H23: state dicts, copies, pickles, devices, meta ------------------------------------------------


def through_pickle(module):
    return pickle.loads(pickle.dumps(module))


def through_torch_save(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def through_saved_weights(module):
    """From a file that holds tensors only, into a module that never held memory of its own."""
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    op = next(op for op in OPS if MODULES[op] == type(module).__name__)
    with torch.device("meta"):
        empty = type(module)(*SIZES[op])
    empty.load_state_dict(torch.load(buffer, weights_only=True), assign=True)
    return empty


def through_reference(module):
    op = next(op for op in OPS if MODULES[op] == type(module).__name__)
    eager = getattr(reference, MODULES[op])(*SIZES[op])
    eager.load_state_dict(module.state_dict())
    back = type(module)(*SIZES[op])
    back.load_state_dict(eager.state_dict())
    return back


COPIES = [
    copy.deepcopy,
    through_pickle,
    through_torch_save,
    through_saved_weights,
    through_reference,
]


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("op", OPS)
def test_h23_copies_are_equal(op, copied):
    fused, _ = build(op)
    args = inputs(op, 9)
    expected = fused(*args)
    expected.sum().backward()
    other = copied(fused)
    assert type(other) is type(fused)
    assert torch.equal(other(*args), expected)
    cotangent = torch.randn_like(expected)
    _, grads = evaluate(fused, args, cotangent)
    _, other_grads = evaluate(other, args, cotangent)
    assert all(torch.equal(other_grads[name], g) for name, g in grads.items())
    for (name, mine), theirs in zip(fused.named_parameters(), other.parameters(), strict=True):
        assert mine.data_ptr() != theirs.data_ptr(), name


@pytest.mark.parametrize("op", OPS)
def test_h23_state_dict_holds_only_documented_keys(device, op):
    fused, eager = build(op, device=device)
    documented = list(eager.state_dict())
    assert list(fused.state_dict()) == documented
    before = dict(vars(fused))
    args = inputs(op, 9, device=device)
    fused(*args).sum().backward()
    with torch.no_grad():
        fused(*args)
    assert list(fused.state_dict()) == documented
    assert vars(fused).keys() == before.keys()  # a forward leaves nothing behind on the module
    assert list(fused.buffers()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_h23_module_moves_to_the_gpu_and_back(op):
    fused, _ = build(op)
    args = inputs(op, 9)
    expected = fused(*args)
    fused.cuda()
    there = [a.detach().cuda().requires_grad_(a.requires_grad) for a in args]
    assert relative_error(fused(*there), expected) < 1e-5
    fused.cpu()
    assert torch.equal(fused(*args), expected)
    assert relative_error(fused.cuda()(*there), expected) < 1e-5


@pytest.mark.parametrize("op", MASKED_OPS)
def test_h23_module_changes_dtype_and_back(device, op):
    fused, _ = build(op, device=device)
    args = inputs(op, 9, device=device)
    expected = fused(*args)
    fused.double()
    doubles = [a.detach().double() for a in args]
    assert fused(*doubles).dtype == torch.float64
    assert relative_error(fused(*doubles), expected) < 1e-5
    assert torch.equal(fused.float()(*args), expected)


# H24: import and CPU use without GPU, driver, home -----------------------------------------------

CPU_USE = """
import time
start = time.perf_counter()
import fused_ops  # before torch
seconds = time.perf_counter() - start
import torch
from subjects import OPS, build, inputs
for op in OPS:
    for dtype in (torch.float32, torch.bfloat16):
        fused, eager = build(op, dtype=dtype)
        args = inputs(op, 9, dtype=dtype)
        result = fused(*args)
        result.backward(torch.randn_like(result))
        assert torch.isfinite(result).all() and result.dtype == dtype
        assert (result - eager(*args)).abs().max() < (1e-4 if dtype == torch.float32 else 0.3), op
        assert all(torch.isfinite(p.grad).all() for p in fused.parameters())
        assert "CPU" in str(fused_ops.explain(fused, *args))
assert not torch.cuda.is_initialized()
maps = open("/proc/self/maps").read()
if torch.version.cuda is None:  # PyTorch for CUDA may look for the driver by itself
    assert "libcuda.so" not in maps, "the driver was loaded"
assert seconds < 60, seconds  # ten on an idle machine, tests/test_build.py measures that
"""


def environment(**more):
    path = os.pathsep.join([str(PACKAGE.parent), str(Path(__file__).parent)])
    return {**os.environ, "PYTHONPATH": path, **more}


def test_h24_cpu_use_without_gpu_and_home(tmp_path):
    there = environment(CUDA_VISIBLE_DEVICES="", HOME="/nonexistent", PYTHONDONTWRITEBYTECODE="1")
    there.pop("XDG_CACHE_HOME", None)
    subprocess.run(
        [sys.executable, "-W", "error::UserWarning:fused_ops", "-c", CPU_USE],
        check=True,
        env=there,
        cwd=tmp_path,
        timeout=300,
    )
    assert list(tmp_path.iterdir()) == []


# H25: a missing or mismatched extension, an unsupported GPU --------------------------------------


def remove_everything(package):
    for library in package.glob("*.so"):
        library.unlink()


def rename_library(package):
    for library in package.glob("libfused_ops_cuda*.so"):
        library.rename(library.with_name("libfused_ops_cuda_old.so"))


def write_garbage(package):
    (package / "libfused_ops_cuda.so").write_bytes(b"this is not a library")


def break_symbol(package):
    """As if built against a PyTorch that has a function which the found one lacks."""
    library = package / "libfused_ops_cuda.so"
    data = library.read_bytes()
    assert b"torch_library_impl\0" in data
    library.write_bytes(data.replace(b"torch_library_impl\0", b"torch_library_imXX\0"))


def change_version(package):
    version = package / "_version.py"
    version.write_text(version.read_text().replace(fused_ops.__version__, "9.9.9"))


BREAK = {
    "everything missing": remove_everything,
    "library renamed": rename_library,
    "library is garbage": write_garbage,
    "undefined symbol": break_symbol,
    "another version": change_version,
    "intact": lambda package: None,
}

# Imports torch once, then forks: each child imports its own broken copy of the package.
PROBE = """
import contextlib, io, json, os, sys, traceback, warnings
import torch
from torch._subclasses import FakeTensorMode

def probe(folder):
    sys.path.insert(0, folder)
    # An editable install would lend its own binaries to the copy.
    sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import fused_ops
        from fused_ops import _library
        at_import = [str(w.message) for w in caught]
    module = fused_ops.TriangularMultiplicativeUpdate(6, 4)
    x = torch.randn(1, 5, 5, 6, requires_grad=True)
    result = module(x)
    result.sum().backward()
    matmul = fused_ops.TensorMatmul(precision="ieee")
    with FakeTensorMode():
        args = [torch.empty(5, 4, device="cuda"), torch.empty(4, 3, device="cuda")]
        told = fused_ops.explain(matmul, *args)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):  # as a CUDA call does before it runs the composition
                if told.path == "composition":
                    _library.warn_composition(told.op, "; ".join(told.reasons))
        warned = [str(w.message) for w in caught]
    from fused_ops import __main__
    report = io.StringIO()
    with contextlib.redirect_stdout(report):
        status = __main__.main()  # python -m fused_ops
    return {
        "report": " ".join(report.getvalue().split()),
        "status": status,
        "file": fused_ops.__file__,
        "at_import": at_import,
        "right": bool(torch.isfinite(result).all() and x.grad.any()),
        "cpu": str(fused_ops.explain(module, x)),
        "path": told.path,
        "told": str(told),
        "warned": warned,
        "extension": list(_library.extension_status),
        "library": list(_library.cuda_library_status),
    }

with FakeTensorMode():  # what all children need is loaded once
    torch.empty(2, device="cuda") + 1

children = {}
for folder in sys.argv[1:]:
    child = os.fork()
    children[child] = folder
    if child == 0:
        code = 1
        try:
            answer = json.dumps(probe(folder))
            with open(os.path.join(folder, "answer.json"), "w") as file:
                file.write(answer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
for child, folder in children.items():
    assert os.waitpid(child, 0)[1] == 0, folder
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """What each broken copy of the package says about itself."""
    root = tmp_path_factory.mktemp("broken")
    folders = {}
    for name, harm in BREAK.items():
        folder = root / name.replace(" ", "_")
        shutil.copytree(PACKAGE, folder / "fused_ops", ignore=shutil.ignore_patterns("__pycache__"))
        if name != "undefined symbol" or has_library():
            harm(folder / "fused_ops")
            folders[name] = folder
    environ = environment(CUDA_VISIBLE_DEVICES="")  # a process that used CUDA must not fork
    environ.pop("PYTHONPATH")
    (root / "probe.py").write_text(PROBE)
    command = [sys.executable, str(root / "probe.py"), *map(str, folders.values())]
    done = subprocess.run(command, env=environ, cwd=root, timeout=300, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return {n: json.loads((f / "answer.json").read_text()) for n, f in folders.items()}


def has_library():
    return _library.build_info()["cuda_version"] is not None


needs_library = pytest.mark.skipif(not has_library(), reason="built without the CUDA library")


@pytest.mark.parametrize("name", [n for n in BREAK if n != "undefined symbol"])
def test_h25_broken_installation_still_runs_on_the_cpu(broken, name):
    answer = broken[name]
    assert f"/broken0/{name.replace(' ', '_')}/" in answer["file"]
    assert answer["right"]
    assert answer["at_import"] == []  # a machine without a GPU need not hear of it
    assert "PyTorch composition" in answer["cpu"]


@pytest.mark.parametrize(
    ("name", "status", "texts"),
    [
        ("everything missing", "extension", [f"fused_ops._C {fused_ops.__version__}", "reinstall"]),
        ("everything missing", "library", ["libfused_ops_cuda.so is not installed", "nvcc"]),
        (
            "library renamed",
            "library",
            ["libfused_ops_cuda.so is not installed", "FUSED_OPS_CUDA=1"],
        ),
        (
            "library is garbage",
            "library",
            [fused_ops.__version__, f"torch {torch.__version__}", "torch >= 2.11"],
        ),
        ("another version", "extension", [fused_ops.__version__, "9.9.9", "reinstall"]),
    ],
)
def test_h25_broken_installation_says_what_was_built_and_found_and_the_fix(
    broken, name, status, texts
):
    answer = broken[name]
    loaded, reason = answer[status]
    assert not loaded
    for text in texts:
        assert text in reason
    assert answer["path"] == "composition"
    assert reason in answer["told"]
    assert len(answer["warned"]) == 1
    assert reason in answer["warned"][0] and "tensor_matmul" in answer["warned"][0]


@needs_library
def test_h25_library_for_another_torch_names_symbol_and_versions(broken):
    answer = broken["undefined symbol"]
    loaded, reason = answer["library"]
    assert not loaded
    for text in ("torch_library_imXX", f"torch {torch.__version__}", "torch >= 2.11"):
        assert text in reason
    assert answer["right"] and reason in answer["told"] and len(answer["warned"]) == 1


@needs_library
def test_h25_intact_copy_loads_both_parts(broken):
    answer = broken["intact"]
    assert answer["extension"] == [True, ""] and answer["library"] == [True, ""]


@pytest.mark.parametrize("name", [n for n in BREAK if n not in ("undefined symbol", "intact")])
def test_h25_report_tells_what_is_broken(broken, name):
    answer = broken[name]
    assert answer["status"] == 0  # on the CPU everything works
    for loaded, reason in (answer["extension"], answer["library"]):
        assert loaded or (len(reason) > 60 and " ".join(reason.split()) in answer["report"])


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("op", OPS)
def test_h25_unsupported_gpu_is_told_by_explain(monkeypatch, op, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    archs = _library.build_info()["archs"]
    with FakeTensorMode():
        options = {"precision": "ieee"} if op == "tensor_matmul" else {}
        module = getattr(fused_ops, MODULES[op])(*SIZES[op], **options)
        for child in module.modules():
            for key, p in child._parameters.items():
                if p is not None:
                    child._parameters[key] = torch.nn.Parameter(torch.empty(p.shape, device="cuda"))
        shapes = {
            "tensor_matmul": [(3, 8), (8, 7)],
            "triangular_multiplicative_update": [(1, 5, 5, 8)],
            "triangle_attention": [(1, 5, 5, 8)],
            "msa_row_attention": [(1, 3, 5, 8), (1, 5, 5, 6)],
            "invariant_point_attention": [(1, 5, 12), (1, 5, 5, 6), (1, 5, 3), (1, 5, 3, 3)],
        }[op]
        told = fused_ops.explain(module, *[torch.empty(s, device="cuda") for s in shapes])
    assert told.path in ("kernel", "composition")
    assert (told.path == "composition") == bool(told.reasons)
    if capability < (8, 0):
        assert told.path == "composition"
    if op == "tensor_matmul" and told.path == "composition" and archs:
        text = str(told)
        assert f"{capability[0]}.{capability[1]}" in text or "".join(map(str, capability)) in text
        assert any(str(arch).removesuffix("+PTX") in text for arch in archs)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_h25_a_composition_warns_once_and_says_what_explain_says(monkeypatch, op):
    monkeypatch.setattr(_library, "warned", set())
    monkeypatch.setattr(OPERATORS[op], "_known", {})  # what has warned is not checked again
    fused, _ = build(op, device="cuda")
    args = inputs(op, 9, device="cuda", grad=False)
    told = fused_ops.explain(fused, *args)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(3):
            fused(*args)
    messages = [str(w.message) for w in caught if OPERATORS[op].name in str(w.message)]
    if told.path == "composition":
        assert len(messages) == 1
        assert all(reason in messages[0] for reason in told.reasons)
    else:
        assert messages == []


# H26: peak memory --------------------------------------------------------------------------------


def test_h26_matmul_of_an_expanded_tensor_copies_nothing(device):
    n = 512 if device == "cuda" else 96
    one = torch.randn(1, n, n, 128, device=device)
    wide, b = one.expand(8, n, n, 128), randn(128, 16, device=device)
    out = 8 * n * n * 16 * 4
    copied = 8 * one.numel() * 4
    with torch.no_grad():
        assert peak_memory(lambda: fused_ops.tensor_matmul(wide, b), device) <= 1.01 * out + 2**16
    assert torch.equal(fused_ops.tensor_matmul(wide, b)[7], fused_ops.tensor_matmul(wide[:1], b)[0])

    def train():
        fused_ops.tensor_matmul(wide, b).sum().backward()

    assert peak_memory(train, device) < min(copied / 2, 3 * out)


@pytest.mark.parametrize("op", MASKED_OPS)
def test_h26_expanded_inputs_are_not_copied(device, op):
    sizes = {
        "triangular_multiplicative_update": (32, 8),
        "triangle_attention": (32, 2, 4, "ending"),
        "msa_row_attention": (8, 64, 2),
        "invariant_point_attention": (12, 64, 3, 2, 3),
    }[op]
    n, block = (1025, 2**25) if device == "cuda" else (161, 2**18)
    fused, _ = build(op, *sizes, device=device)
    args = [a.detach() for a in inputs(op, n, (4,), device=device, sizes=sizes)]
    which = 0 if op in PAIR_OPS else 1
    expanded = list(args)
    expanded[which] = args[which][:1].expand(args[which].shape)
    plain = [a.contiguous() for a in expanded]

    def peak(these):
        with torch.no_grad():
            return peak_memory(lambda: fused(*these), device)

    few_blocks = 2.5 * block * 4  # only blocks of rows may be copied
    assert few_blocks < plain[which].numel() * 4 * 0.65
    assert peak(expanded) <= peak(plain) + few_blocks


def test_h26_msa_training_step_holds_no_attention_maps(device):
    # The whole of the issue on a GPU; there the maps of all rows would be 8.6 GB.
    rows, n, heads = (256, 1024, 8) if device == "cuda" else (64, 256, 8)
    fused, _ = msa(64, 16, heads, device=device)
    args = [
        randn(1, rows, n, 64, device=device),
        randn(1, n, n, 16, device=device),
        torch.ones(1, rows, n, device=device),
    ]
    maps = rows * heads * n * n * 4

    def train():
        fused(*args).sum().backward()

    peak = peak_memory(train, device)
    assert peak < maps / 3


@pytest.mark.parametrize("outgoing", [True, False])
def test_h26_triangular_training_step_holds_few_planes(device, outgoing):
    n, channels, hidden = (1024, 128, 128) if device == "cuda" else (160, 32, 32)
    fused, _ = tri(channels, hidden, outgoing, device=device)
    pair = randn(1, n, n, channels, device=device)
    cotangent = torch.randn_like(pair)
    plane = n * n * hidden * 4
    peak = peak_memory(lambda: fused(pair).backward(cotangent), device)
    blocks = (2**25 if device == "cuda" else 2**18) * 4 * 12  # temporaries of a block of rows
    assert peak <= (6 + 2) * plane + blocks  # six planes, the result and the gradient


def settled_memory():
    """What is allocated once autograd's thread has let go of what its last step was given."""
    torch.cuda.synchronize()
    readings = [torch.cuda.memory_allocated()]
    while len(readings) < 10 or len(set(readings[-10:])) > 1:
        time.sleep(0.01)
        readings.append(torch.cuda.memory_allocated())
    return readings[-1]


@pytest.mark.parametrize("op", OPS)
def test_h26_memory_returns_to_where_it_was(device, op):
    fused, _ = build(op, device=device)
    args = inputs(op, 33, device=device)
    wanted = [a for a in args if a.requires_grad] + list(fused.parameters())

    def steps(count):
        for _ in range(count):
            torch.autograd.grad(fused(*args).sum(), wanted)

    if device == "cuda":
        steps(1)  # cuBLAS takes its workspace
        before = settled_memory()
        steps(3)
        assert settled_memory() == before
    else:
        one, several = peak_memory(lambda: steps(1), device), peak_memory(lambda: steps(4), device)
        assert several <= one + args[0].numel() * 4 / 2
