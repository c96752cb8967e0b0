# SPDX-License-Identifier: Apache-2.0
"""Cases H19 to H22: several devices, streams, threads, CUDA graphs, data-parallel training."""

import copy
import datetime
import gc
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import evaluate
from subjects import DISPATCHED_OPS, MASKED_OPS, OPERATORS, OPS, build, inputs, operands
from torch import distributed, nn
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

import fused_ops
from fused_ops._precision import run_composition
from fused_ops.testing import relative_error

TESTS = Path(__file__).parent
ROOT = Path(fused_ops.__file__).parents[1]
SAME = 2e-6

# With one GPU a fake second device fails where the real device guard is set.
no_lone_gpu = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="fakes two CUDA devices on a machine with one"
)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def assert_same(ours, theirs):
    assert relative_error(ours[0], theirs[0]) <= SAME
    largest = max(g.norm().item() for g in theirs[1].values())
    for name, gradient in theirs[1].items():
        off = (ours[1][name].double().cpu() - gradient.double().cpu()).norm().item()
        assert off <= SAME * max(gradient.norm().item(), 0.1 * largest), name


def moved(args, device):
    return [a.detach().to(device).requires_grad_(a.requires_grad) for a in args]


# H19: tensors on another device than the current one ---------------------------------------------


def fake_operands(op, device, mode):
    """Arguments of the op as fake tensors on ``device``, which need not exist."""
    fused, _ = build(op)
    flat = operands(op, fused, inputs(op, 5, grad=False))
    with mode:
        return [
            torch.empty(a.shape, dtype=a.dtype, device=device) if isinstance(a, torch.Tensor) else a
            for a in flat
        ]


@no_lone_gpu
@pytest.mark.parametrize("op", DISPATCHED_OPS)
def test_h19_results_are_on_the_device_of_the_inputs(op):
    mode = FakeTensorMode()
    flat = fake_operands(op, "cuda:1", mode)
    with mode, torch.no_grad():
        result = OPERATORS[op](*flat)
        assert result.device == torch.device("cuda:1")
        needs = [flat[i] is not None for i in OPERATORS[op].differentiable]
        backward = getattr(torch.ops.fused_ops, f"{op}_backward")
        grads = backward(torch.empty_like(result), *flat, needs)
        assert {g.device for g in grads} == {torch.device("cuda:1")}


@no_lone_gpu
@pytest.mark.parametrize("op", DISPATCHED_OPS)
def test_h19_a_tensor_on_another_device_is_named(op):
    mode = FakeTensorMode()
    here, there = fake_operands(op, "cuda:0", mode), fake_operands(op, "cuda:1", mode)
    with mode, torch.no_grad():
        tensors = [i for i, a in enumerate(here) if isinstance(a, torch.Tensor)]
        names = OPERATORS[op]._names
        for i in tensors[1:]:
            mixed = [*here[:i], there[i], *here[i + 1 :]]
            text = rf"{op}: {names[i]} must be on the device of \w+, expected cuda:0, got cuda:1"
            with pytest.raises(RuntimeError, match=text):
                OPERATORS[op](*mixed)


@pytest.mark.parametrize("op", OPS)
def test_h19_a_module_on_another_device_is_refused(device, op):
    fused, _ = build(op, device=device)
    args = inputs(op, 5, (1,), device=device)
    other = "cpu" if device == "cuda" else "meta"
    if op == "tensor_matmul":
        args[1] = args[1].detach().to(other)
    else:
        fused = copy.deepcopy(fused).to(other)
    with pytest.raises(RuntimeError, match=rf"{op}: \w+ must be on the device of .*{other}"):
        fused(*args)


@no_lone_gpu
def test_h19_explain_asks_for_the_device_of_the_inputs(monkeypatch):
    asked = []

    def capability(device=None):
        asked.append(torch.device(device))
        return (9, 0) if torch.device(device).index == 1 else (7, 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    with FakeTensorMode():
        paths = [
            fused_ops.explain(
                fused_ops.TensorMatmul(precision="ieee"),
                torch.empty(5, 4, device=f"cuda:{i}"),
                torch.empty(4, 3, device=f"cuda:{i}"),
            ).path
            for i in (0, 1)
        ]
    assert asked == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert paths == ["composition", "kernel"]


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("op", OPS)
def test_h19_second_gpu_while_the_first_is_current(op):
    torch.cuda.set_device(0)
    fused, _ = build(op, device="cuda:0")
    args = inputs(op, 33, device="cuda:0")
    cotangent = torch.randn_like(fused(*args))
    expected = evaluate(fused, args, cotangent)
    fused_1 = copy.deepcopy(fused).to("cuda:1")
    args_1, cotangent_1 = moved(args, "cuda:1"), cotangent.to("cuda:1")
    before = torch.cuda.memory_allocated(0)
    ours = evaluate(fused_1, args_1, cotangent_1)
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.current_device() == 0
    assert ours[0].device == torch.device("cuda:1")
    assert_same(ours, expected)


# H20: streams and threads ------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_h20_eight_threads_with_their_own_lengths(device, op):
    fused, _ = build(op, device=device)
    cases = [inputs(op, 9 + i, device=device) for i in range(8)]
    cotangents = [torch.randn_like(fused(*args)) for args in cases]
    serial = [evaluate(fused, a, c) for a, c in zip(cases, cotangents, strict=True)]
    start = threading.Barrier(8)

    def work(args, cotangent):
        start.wait()
        if device == "cpu":
            return [evaluate(fused, args, cotangent) for _ in range(3)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            results = [evaluate(fused, args, cotangent) for _ in range(3)]
        stream.synchronize()
        return results

    if device == "cuda":
        torch.cuda.synchronize()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, cases, cotangents))
    for results, expected in zip(found, serial, strict=True):
        for result in results:
            assert_same(result, expected)


def test_h20_fp32_precision_of_one_thread_does_not_reach_another():
    """The setting is the process's: a composition that changes it must not let another in."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    first_in, first_out, second_in = (threading.Event() for _ in range(3))
    seen = {}

    def composition(precision):
        if precision == "tf32":
            first_in.set()
            second_in.wait(0.3)  # room for the other to come in; where it may not, time runs out
        else:
            second_in.set()
            first_out.wait(0.3)
        seen[precision] = setting.fp32_precision

    def work(precision):
        if precision == "ieee":
            first_in.wait(10)
        run_composition(composition, torch.device("cuda"), torch.float32, precision, [precision])
        if precision == "tf32":
            first_out.set()

    try:
        setting.fp32_precision = "ieee"
        threads = [
            threading.Thread(target=work, args=("tf32",)),
            threading.Thread(target=work, args=("ieee",)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert seen == {"tf32": "tf32", "ieee": "ieee"}
        assert setting.fp32_precision == "ieee"
    finally:
        setting.fp32_precision = before


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_h20_input_that_arrives_late_on_a_side_stream(op):
    fused, _ = build(op, device="cuda")
    real = inputs(op, 33, device="cuda")
    cotangent = torch.randn_like(fused(*real))
    expected = evaluate(fused, real, cotangent)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = [torch.full_like(a, float("nan")).requires_grad_(a.requires_grad) for a in real]
        torch.cuda._sleep(int(1e8))
        with torch.no_grad():
            for a, b in zip(late, real, strict=True):
                a.copy_(b)
        ours = evaluate(fused, late, cotangent)
    stream.synchronize()
    assert_same(ours, expected)


@pytest.fixture
def collect_garbage_now():
    """Collects garbage when called, and none afterwards in this test.

    A collection could free a graph or a memory pool of an earlier test, and that waits.
    """

    def collect():
        gc.collect()
        gc.disable()

    yield collect
    gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_h20_nothing_waits_for_or_runs_on_the_default_stream(op, collect_garbage_now):
    fused, _ = build(op, device="cuda")
    args = inputs(op, 33, device="cuda")
    with torch.no_grad():  # with gradients, autograd would tie the leaves to this stream
        cotangent = torch.randn_like(fused(*args))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = evaluate(fused, args, cotangent)  # the allocator now has the memory
    collect_garbage_now()
    torch.cuda.synchronize()
    torch.cuda._sleep(int(4e9))  # about two seconds, on the default stream
    busy = torch.cuda.Event()
    busy.record()
    with torch.cuda.stream(stream):
        ours = evaluate(fused, args, cotangent)
        done = torch.cuda.Event()
        done.record()
    done.synchronize()
    assert not busy.query()
    with torch.cuda.stream(stream):  # a .cpu() on the default stream would wait for the sleep
        assert torch.equal(ours[0], expected[0])
        for name, gradient in expected[1].items():
            assert torch.equal(ours[1][name], gradient), name
    assert not busy.query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("op", MASKED_OPS)
def test_h20_parameters_as_plain_attributes(op):
    """What DataParallel makes of a module in each thread: parameters that are no Parameters."""
    fused, _ = build(op)
    replica = fused._replicate_for_data_parallel()
    for name, child in fused.named_children():
        copied = child._replicate_for_data_parallel()
        for key, parameter in child._parameters.items():
            setattr(copied, key, None if parameter is None else parameter * 1)
        replica._modules[name] = copied
    for key, parameter in fused._parameters.items():
        setattr(replica, key, parameter * 1)
    args = inputs(op, 9)
    cotangent = torch.randn_like(fused(*args))
    expected = evaluate(fused, args, cotangent)
    result = replica(*args)
    grads = torch.autograd.grad(result, list(fused.parameters()), cotangent)
    assert torch.equal(result, expected[0])
    for (name, _), gradient in zip(fused.named_parameters(), grads, strict=True):
        assert torch.equal(gradient, expected[1][name]), name


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("op", MASKED_OPS)
def test_h20_data_parallel(op):
    fused, _ = build(op, device="cuda:0")
    args = inputs(op, 17, (4,), device="cuda:0")
    cotangent = torch.randn_like(fused(*args))
    expected = evaluate(fused, args, cotangent)
    assert_same(evaluate(copy.deepcopy(fused), args, cotangent), expected)
    wrapped = nn.DataParallel(fused, [0, 1])
    value, grads = evaluate(wrapped, args, cotangent)
    assert_same((value, {k.removeprefix("module."): g for k, g in grads.items()}), expected)


# H21: CUDA graphs --------------------------------------------------------------------------------


@pytest.mark.parametrize("op", DISPATCHED_OPS)
def test_h21_nothing_is_read_back_from_the_device(op):
    """What would break a capture shows without a GPU too: fake tensors hold no values."""
    mode = FakeTensorMode(allow_fallback_kernels=False)
    fused, _ = build(op)
    flat = operands(op, fused, inputs(op, 5, grad=False))
    operator = OPERATORS[op]
    needs = [flat[i] is not None for i in operator.differentiable]
    with mode, torch.no_grad():
        # The compositions themselves, on shapes alone: an .item() or a branch on data raises.
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in flat]
        result = operator._compose_forward(*fakes)
        grads = operator._compose_backward(torch.empty_like(result), *fakes, needs)
    wanted = [flat[i] for i in operator.differentiable if flat[i] is not None]
    assert [g.shape for g in grads] == [t.shape for t in wanted]


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_h21_graphed_callable_equals_eager_on_new_data(op):
    fused, _ = build(op, device="cuda")
    plain = copy.deepcopy(fused)
    graphed = torch.cuda.make_graphed_callables(fused, tuple(inputs(op, 33, device="cuda")))
    for _ in range(3):
        args = inputs(op, 33, device="cuda")
        cotangent = torch.randn_like(plain(*args))
        expected = evaluate(plain, args, cotangent)
        value = graphed(*args)
        wanted = [a for a in args if a.requires_grad] + list(fused.parameters())
        grads = torch.autograd.grad(value, wanted, cotangent)
        named = dict(zip(expected[1], (g.clone() for g in grads), strict=True))
        assert_same((value.detach().clone(), named), expected)


@pytest.mark.gpu
def test_h21_dropout_differs_between_replays_and_agrees_within_one():
    fused, _ = build("msa_row_attention", 8, 6, 2, 0.25, device="cuda")
    args = inputs("msa_row_attention", 33, device="cuda")
    graphed = torch.cuda.make_graphed_callables(fused, tuple(args))
    seen = []
    for _ in range(3):
        result = graphed(*args)
        cotangent = torch.randn_like(result)
        (gradient,) = torch.autograd.grad(result, fused.value.weight, cotangent)
        product = cotangent * (result - fused.out_proj.bias)  # linear in the values' weight
        off = (gradient * fused.value.weight).sum() - product.sum()
        assert off.abs() <= 1e-4 * product.norm()
        seen.append(result.detach().clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


CAPTURE = """
import torch
from subjects import OPS, build, inputs
from fused_ops.testing import relative_error
device = torch.device({device!r})
torch.cuda.set_device(0)
cases = [(build(op, device=device)[0], inputs(op, 17, device=device, grad=False)) for op in OPS]
for dtype in (torch.float32, torch.float64):  # cuBLAS itself allocates on its first call
    x = torch.ones(2, 8, 8, device=device, dtype=dtype)
    torch.bmm(x, x); torch.mm(x[0], x[0]); torch.addmm(x[0], x[0], x[0])
torch.cuda.synchronize(device)
for op, (fused, args) in zip(OPS, cases):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.no_grad(), torch.cuda.graph(graph):
        result = fused(*args)
    for _ in range(2):
        for a, new in zip(args, inputs(op, 17, device=device, grad=False)):
            a.copy_(new)
        with torch.cuda.device(device):
            graph.replay()
        torch.cuda.synchronize(device)
        assert relative_error(result, fused(*args)) <= 2e-6, op
"""


def run_script(script):
    path = os.pathsep.join([str(ROOT), str(TESTS)])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=300)


@pytest.mark.gpu
def test_h21_first_call_ever_inside_a_capture():
    run_script(CAPTURE.format(device="cuda:0"))


@pytest.mark.gpu
@two_gpus
def test_h21_capture_on_the_second_gpu():
    run_script(CAPTURE.format(device="cuda:1"))


# H22: the gradient contract of data-parallel training --------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_h22_gradients_have_dtype_and_strides_of_their_tensors(device, op, dtype):
    fused, _ = build(op, dtype=dtype, device=device)
    args = inputs(op, 9, dtype=dtype, device=device)
    result = fused(*args)
    result.backward(torch.randn_like(result.transpose(1, 2)).transpose(1, 2))
    for tensor in [a for a in args if a.requires_grad] + list(fused.parameters()):
        assert tensor.grad.stride() == tensor.stride()
        assert tensor.grad.dtype == tensor.dtype and tensor.grad.device == tensor.device


class Block(nn.Module):
    """All four ops in a row, every parameter in use."""

    def __init__(self):
        super().__init__()
        self.triangle = fused_ops.TriangularMultiplicativeUpdate(6, 5)
        self.row = fused_ops.MSARowAttention(8, 6, 2)
        self.points = fused_ops.InvariantPointAttention(12, 6, 3, 2, 3)
        self.head = nn.Parameter(torch.randn(12, 7))

    def forward(self, msa, pair, node, translations, rotations):
        pair = pair + self.triangle(pair)
        msa = msa + self.row(msa, pair)
        node = node + self.points(node, pair, translations, rotations)
        return msa, fused_ops.tensor_matmul(node, self.head)


def train(rank: int, device: str, folder: str) -> None:
    """One of two ranks; the second has an empty batch. Saves weights and warnings in ``folder``."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(Block().to(device), find_unused_parameters=False)
    start = {k: v.cpu().clone() for k, v in model.module.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch, n = (2, 9) if rank == 0 else (0, 9)
    shapes = [(batch, 3, n, 8), (batch, n, n, 6), (batch, n, 12), (batch, n, 3), (batch, n, 3, 3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            msa, node = model(*[torch.randn(s, device=device) for s in shapes])
            (msa.square().sum() + node.square().sum()).backward()
            optimizer.step()
    weights = {k: v.cpu() for k, v in model.module.state_dict().items()}
    messages = [str(w.message) for w in caught]
    torch.save({"start": start, "end": weights, "warnings": messages}, f"{folder}/rank{rank}.pt")
    distributed.destroy_process_group()


def test_h22_two_ranks_one_with_an_empty_batch(device, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(train, args=(device, str(tmp_path)), nprocs=2, join=True)
    first, second = (torch.load(tmp_path / f"rank{i}.pt") for i in (0, 1))
    for name, weight in first["end"].items():
        assert torch.equal(weight, second["end"][name]), name
        assert torch.isfinite(weight).all(), name
        assert not torch.equal(weight, first["start"][name]), name
    complaints = [w for w in first["warnings"] + second["warnings"] if "composition" not in w]
    assert not complaints
