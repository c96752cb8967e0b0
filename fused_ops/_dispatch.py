# SPDX-License-Identifier: Apache-2.0
"""Registration of an op with the PyTorch dispatcher, and the cheapest way to call it.

One :class:`Operator` is four dispatcher ops:

``x_forward``      runs. No autograd is registered on it, so a call costs one dispatch.
``x_backward``     returns the gradients that were asked for, as a list.
``x``              the same as ``x_forward`` with ``register_autograd``: what a graph records.
``x_composition``  the composition with a reason; the C++ host op calls it when no kernel fits.

An eager call that needs gradients goes through an ``autograd.Function``, which costs a fifth of
registered autograd; a compiled or exported one goes through ``x``. Inside, ``x_forward`` and
``x_backward`` are called, or, on plain tensors for which there is no kernel of ours and while
nobody watches, the composition itself: the dispatcher would only come back to it. A kernel that
somebody else registers for these ops is then not asked.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fused_ops import _library
from fused_ops._precision import run_composition

T = TypeVar("T")
NAMESPACE = "fused_ops"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
# What a schema takes as it is, by the type that the schema names; the rest it converts or refuses.
_PLAIN_OTHERS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int?": (int, type(None)),
    "float": (float,),
    "float?": (float, type(None)),
    "bool": (bool,),
    "str": (str,),
    "ScalarType?": (torch.dtype, type(None)),
}
_TAGS = (torch.Tag.pt2_compliant_tag,)
# Calls whose checks are remembered, of one op. Shapes repeat; a workload in which they do not
# must not fill the memory.
_REMEMBERED = 256


class Query(NamedTuple):
    """What the planner is asked about one call."""

    op: str
    shapes: dict[str, list[int]]
    strides: dict[str, list[int]]
    dtype: torch.dtype
    precision: str
    device: torch.device

    def plan(self, backward: bool = False) -> dict[str, Any]:
        """The planner's answer."""
        capability = None
        if self.device.type == "cuda":
            capability = torch.cuda.get_device_capability(self.device)
        dtype = str(self.dtype).removeprefix("torch.")
        return _library.plan(
            self.op, self.shapes, self.strides, dtype, self.precision, capability, backward
        )


class Result(NamedTuple):
    """Shape, dtype and device of a result, as found by an op's checks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """A contiguous tensor of that description."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class _Known(NamedTuple):
    """What is remembered of a call whose checks have passed."""

    result: Result
    composed: bool
    """Whether no kernel of ours takes it."""
    backward: bool
    """Whether its gradients come from the device's own backward."""


class _NoDoubleBackward(torch.autograd.Function):
    """Passes gradients through and refuses to be differentiated.

    The anchors are the tensors the gradients depend on; they tie the result into the graph even
    when the incoming gradient itself needs none.
    """

    @staticmethod
    def forward(op: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.op}: double backward is not supported; gradients of gradients through this "
            f"op are not available"
        )


class Operator:
    """A fused op: schema, fake kernels, composition and autograd, registered once.

    Parameters
    ----------
    name
        Room name; also the name of the public dispatcher op.
    arguments
        Schema of the arguments, one string each. It ends with ``str precision`` and
        ``ScalarType? dtype``.
    differentiable
        Names of the differentiable arguments, in schema order.
    check
        Takes the arguments, raises on bad ones, returns the :class:`Result` description.
    shapes
        Takes the arguments as a dict by name, returns the sizes that the planner decides by.
    forward, backward
        The composition. ``backward`` takes the incoming gradient first and, last, a list of
        flags, one for each name in ``differentiable``.
    device_backward
        Takes what ``backward`` takes, for CUDA tensors whose backward the planner gives to a
        kernel, and runs as a composition does: without autograd and autocast. It returns
        contiguous gradients in the dtypes of their tensors, or None to leave them to ``backward``.
    plans_cuda
        Whether what the planner says of a call on CUDA is remembered here, so that C++ is not
        entered where it would only come back. False for an op with kernels for most calls: the
        C++ host op is then called at once. It must check everything, a required tensor that is
        None too, and call ``x_composition`` itself.
    saves
        Whether C++ has ``x_forward_saving`` on CUDA: it returns the result, and behind it what
        the backward need not compute again then. ``device_backward`` is given that as one more
        argument, a list, empty where nothing was saved.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        differentiable: Sequence[str],
        check: Callable[..., Result],
        shapes: Callable[[dict[str, Any]], dict[str, list[int]]],
        forward: Callable[..., Tensor],
        backward: Callable[..., list[Tensor]],
        device_backward: Callable[..., list[Tensor] | None] | None = None,
        plans_cuda: bool = True,
        saves: bool = False,
    ) -> None:
        self.name = name
        self.check = check
        self._shapes = shapes
        self._compose_forward = forward
        self._compose_backward = backward
        self._device_backward = device_backward
        self._names = names = [argument.split()[-1] for argument in arguments]
        self._tensors = tuple(i for i, a in enumerate(arguments) if a.startswith("Tensor"))
        self._required = {i for i in self._tensors if arguments[i].startswith("Tensor ")}
        self.differentiable = tuple(names.index(d) for d in differentiable)
        others = [i for i in range(len(names)) if i not in self._tensors]
        self._others = operator.itemgetter(*others)  # a tuple: there are two at least
        self._other_types = tuple(_PLAIN_OTHERS[arguments[i].split()[0]] for i in others)
        self._precision = names.index("precision")
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._plans_cuda = plans_cuda
        self._saves = saves
        self._kernels: dict[tuple[str, str], bool] = {}
        self._chosen: set[tuple[str, torch.dtype, str]] = set()  # no kernel, but by choice
        schema = ", ".join(arguments)

        self.register(f"{name}_forward", f"({schema}) -> Tensor", self._run, self._fake)
        self.register(f"{name}", f"({schema}) -> Tensor", self._run_public, self._fake)
        self.register(
            f"{name}_backward",
            f"(Tensor grad, {schema}, bool[] needs) -> Tensor[]",
            self._run_backward,
            self._fake_backward,
        )
        self.register(
            f"{name}_composition",
            f"({schema}, str reason) -> Tensor",
            self._run_composition,
            lambda *args: self._fake(*args[:-1]),
        )
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}",
            self._backward,
            setup_context=lambda ctx, inputs, output: self._save(ctx, inputs),
            lib=LIBRARY,
        )
        self._forward_op = getattr(torch.ops.fused_ops, f"{name}_forward").default
        self._backward_op = getattr(torch.ops.fused_ops, f"{name}_backward").default
        self._public_op = getattr(torch.ops.fused_ops, name).default
        self._function = self._make_function()

    def __call__(self, *args: Any) -> Tensor:
        """Run the op on positional arguments in schema order."""
        if torch.compiler.is_compiling():
            return self._public_op(*args)
        if forward_ad._current_level >= 0:
            self._refuse_forward_mode(args)
        if torch.is_grad_enabled():
            for i in self.differentiable:
                if getattr(args[i], "requires_grad", False):
                    output = self._function.apply(*args)
                    return output if isinstance(output, Tensor) else output[0]
        return self._run_forward(args)

    def _run_forward(self, args: Sequence[Any]) -> Tensor:
        """Without autograd: straight to the composition where nothing else could run."""
        if self._is_for_cpp(args[0]):
            return self._call_cpp(self._forward_op, args)
        known = self._recall(args)
        if known is not None and known.composed:
            return self._compose_result(known.result, args)
        return self._forward_op(*args)

    def _run_saving(self, args: Sequence[Any]) -> Tensor | tuple[Tensor, ...]:
        """The result, and behind it what the backward is spared, where C++ saves that."""
        if self._saves and self._is_for_cpp(args[0]) and self._is_plain(args):
            op = getattr(torch.ops.fused_ops, f"{self.name}_forward_saving").default
            outputs: list[Tensor] = self._call_cpp(op, args)
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        return self._run_forward(args)

    def _is_plain(self, args: Sequence[Any]) -> bool:
        """Whether all tensors are plain ones, and no mode or transform waits to see the op."""
        return all(args[i] is None or type(args[i]) in _PLAIN_TENSORS for i in self._tensors) and (
            not self._somebody_transforms()
        )

    def _call_cpp(self, op: Callable[..., T], args: Sequence[Any]) -> T:
        try:
            return op(*args)
        except (RuntimeError, ValueError):
            for i in self._required:
                if args[i] is None:
                    raise TypeError(
                        f"{self.name}: {self._names[i]} must be a tensor, got None"
                    ) from None
            self.check(*args)  # for its own words, and TypeError, which C++ cannot raise
            raise

    def _is_for_cpp(self, first: Any) -> bool:
        """Whether C++ takes any call whose first argument is ``first``, without a look at it."""
        if self._plans_cuda or not getattr(first, "is_cuda", False):
            return False
        return self._has_kernel("forward", "cuda")

    @staticmethod
    def _nobody_watches() -> bool:
        """Whether no mode, transform, tracer or profiler of this thread waits to see the op.

        What PyTorch does not tell of is not asked: execution-trace observers, and profilers of all
        threads in the others. For plain tensors without a kernel of ours the dispatcher would then
        only come back to :meth:`_run`, at a tenth of the price of a small call; on CUDA by way of
        C++, at more.
        """
        return not (Operator._somebody_transforms() or torch.autograd._profiler_enabled())

    @staticmethod
    def _somebody_transforms() -> bool:
        return bool(
            torch._C._len_torch_dispatch_stack()
            or torch._C._len_torch_function_stack()
            or torch._C._functorch.peek_interpreter_stack()
            or torch._C._get_tracing_state()
        )

    def _signature(self, args: Sequence[Any]) -> tuple[Any, ...] | None:
        """All that the checks and the plan of a call on plain tensors depend on.

        None for other tensors than plain ones of CPU or CUDA.
        """
        if len(args) != len(self._names):
            return None
        others = self._others(args)
        for value, types in zip(others, self._other_types, strict=True):
            if type(value) not in types:  # the schema converts or refuses it
                return None
        parts: list[Any] = []
        for i in self._tensors:
            tensor = args[i]
            if tensor is None:
                if i in self._required:  # the dispatcher would let it through
                    raise TypeError(f"{self.name}: {self._names[i]} must be a tensor, got None")
                parts.append(None)
            elif type(tensor) not in _PLAIN_TENSORS:
                return None
            elif tensor.is_cpu:
                parts += (tensor.shape, tensor.dtype)
            elif tensor.is_cuda:
                # The index: a device as an object takes longer than all the rest.
                parts += (tensor.shape, tensor.dtype, tensor.get_device(), tensor.stride())
            else:
                return None
        return (*parts, *others)

    def _recall(self, args: Sequence[Any], *, profiled: bool = False) -> _Known | None:
        """What is known of a call on plain tensors that nobody watches, checked now or before.

        With ``profiled`` a profiler may watch.
        """
        if self._somebody_transforms() if profiled else not self._nobody_watches():
            return None
        signature = self._signature(args)
        if signature is None:
            return None
        known = self._known.get(signature)
        if known is None:
            result = self.check(*args)
            composed = True
            if result.device.type == "cuda":
                composed = self._question(result, args).plan()["path"] != "kernel"
            if composed:
                self._warn(result, args, backward=False)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            backward = self._is_for_device_backward(result, args)
            known = self._known[signature] = _Known(result, composed, backward)
        return known

    def _refuse_forward_mode(self, args: Sequence[Any]) -> None:
        for i in self._tensors:
            if args[i] is not None and forward_ad.unpack_dual(args[i]).tangent is not None:
                raise RuntimeError(
                    f"{self.name}: forward-mode derivatives (jvp, jacfwd, dual tensors) are not "
                    f"supported, got {self._names[i]} with a tangent"
                )

    def query(self, args: Sequence[Any]) -> Query:
        """The planner's question for a call with ``args``; checks them first."""
        return self._question(self.check(*args), args)

    def _question(self, result: Result, args: Sequence[Any]) -> Query:
        named = dict(zip(self._names, args, strict=True))
        shapes = self._shapes(named)
        strides = {
            name: list(named[name].stride())
            for name in shapes
            if isinstance(named.get(name), Tensor)
        }
        return Query(self.name, shapes, strides, result.dtype, named["precision"], result.device)

    # Registration -------------------------------------------------------------------------------

    @staticmethod
    def register(name: str, schema: str, kernel: Callable, fake: Callable) -> None:
        """Define a dispatcher op with a Python kernel for every device type and a fake one."""
        LIBRARY.define(name + schema, tags=_TAGS)
        # Serves every device type that has no kernel of its own.
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)

    # Kernels ------------------------------------------------------------------------------------

    def _run(self, *args: Any) -> Tensor:
        result = self.check(*args)
        self._warn(result, args, backward=False)
        return self._compose_result(result, args)

    def _run_public(self, *args: Any) -> Tensor:
        with torch.no_grad():
            return self._forward_op(*args)

    def _run_backward(self, grad: Tensor, *args: Any) -> list[Tensor]:
        *inputs, needs = args
        result = self.check(*inputs)
        if tuple(grad.shape) != tuple(result.shape):
            raise ValueError(
                f"{self.name}: grad must have shape {tuple(result.shape)}, got {tuple(grad.shape)}"
            )
        if grad.device != result.device or grad.dtype.is_complex or not grad.is_floating_point():
            raise TypeError(
                f"{self.name}: grad must be floating and on {result.device}, got {grad.dtype} on "
                f"{grad.device}"
            )
        if len(needs) != len(self.differentiable):
            raise ValueError(
                f"{self.name}: needs must have {len(self.differentiable)} entries, got {len(needs)}"
            )
        device = self._is_for_device_backward(result, inputs)
        return self._gradients(result, device, grad, inputs, needs, [])

    def _is_for_device_backward(self, result: Result, args: Sequence[Any]) -> bool:
        """Whether the planner gives the backward of a checked call to kernels."""
        if self._device_backward is None or result.device.type != "cuda":
            return False
        if not _library.cuda_library_status.loaded:
            return False
        return bool(self._question(result, args).plan(backward=True)["path"] == "kernel")

    def _gradients(
        self,
        result: Result,
        device: bool,
        grad: Tensor,
        args: Sequence[Any],
        needs: Sequence[bool],
        saved: list[Tensor],
    ) -> list[Tensor]:
        """The gradients of a checked call; ``device``: by the device's own backward."""
        precision = args[self._precision]
        all_args = (grad, *args, list(needs))
        if device:
            assert self._device_backward is not None
            given = (*all_args, saved) if self._saves else all_args
            grads = self._compose(self._device_backward, result, precision, given)
            if grads is not None:
                return grads
        self._warn(result, args, backward=True)
        return self._compose(self._compose_backward, result, precision, all_args)

    def _run_composition(self, *args: Any) -> Tensor:
        *inputs, reason = args
        result = self.check(*inputs)
        if reason:
            _library.warn_composition(self.name, reason)
        return self._compose_result(result, inputs)

    def _compose_result(self, result: Result, args: Sequence[Any]) -> Tensor:
        out = self._compose(self._compose_forward, result, args[self._precision], args)
        if out._is_view():
            # Autograd forbids in-place changes of a view that a Function returns; the same memory
            # as a tensor of its own may be changed.
            own = torch.empty(0, dtype=out.dtype, device=out.device)
            return own.set_(out)  # type: ignore[call-overload]  # documented, not in the stubs
        return out

    @staticmethod
    def _compose(
        function: Callable[..., T], result: Result, precision: str, args: Sequence[Any]
    ) -> T:
        return run_composition(function, result.device, result.dtype, precision, args)

    def _warn(self, result: Result, args: Sequence[Any], backward: bool) -> None:
        """Say once why a composition runs where a kernel could be expected."""
        kind = result.device.type
        if kind == "cpu":
            return
        key = f"{self.name} backward" if backward else self.name
        asked = (key, result.dtype, args[self._precision])
        if key in _library.warned or asked in self._chosen:
            return
        if kind == "cuda":
            plan = self._question(result, args).plan(backward)
            if plan["path"] == "composition":
                _library.warn_composition(key, "; ".join(plan["reasons"]))
            else:
                self._chosen.add(asked)
        else:
            _library.warn_composition(key, f"no kernels for device type {kind}")

    # Fakes --------------------------------------------------------------------------------------

    def _fake(self, *args: Any) -> Tensor:
        return self.check(*args).empty()

    def _fake_backward(self, grad: Tensor, *args: Any) -> list[Tensor]:
        *inputs, needs = args
        self.check(*inputs)
        wanted = [inputs[i] for i, need in zip(self.differentiable, needs, strict=True) if need]
        return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in wanted]

    # Autograd -----------------------------------------------------------------------------------

    def _save(self, ctx: Any, inputs: Sequence[Any], saved: Sequence[Tensor] = ()) -> None:
        ctx.save_for_backward(*(inputs[i] for i in self._tensors), *saved)
        ctx.others = tuple(None if i in self._tensors else a for i, a in enumerate(inputs))

    def _backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        args = list(ctx.others)
        tensors = ctx.saved_tensors
        for i, tensor in zip(self._tensors, tensors, strict=False):
            args[i] = tensor
        saved = list(tensors[len(self._tensors) :])
        needs = [ctx.needs_input_grad[i] for i in self.differentiable]
        grads = self._run_gradients(grad, args, needs, saved)
        if torch.is_grad_enabled():
            anchors = [args[i] for i in self.differentiable if ctx.needs_input_grad[i]]
            grads = _NoDoubleBackward.apply(self.name, len(grads), *grads, *anchors, grad)
        out: list[Tensor | None] = [None] * len(args)
        remaining = iter(grads)
        for i, need in zip(self.differentiable, needs, strict=True):
            if need:
                out[i] = next(remaining)
        return tuple(out)

    def _run_gradients(
        self, grad: Tensor, args: list[Any], needs: list[bool], saved: list[Tensor]
    ) -> list[Tensor]:
        """The gradients; without the dispatcher where it would only come back to Python."""
        if torch.compiler.is_compiling():
            return self._backward_op(grad, *args, needs)
        # Batched gradients (is_grads_batched) look like plain ones.
        batched = torch._C._functorch.is_legacy_batchedtensor(grad)
        if type(grad) in _PLAIN_TENSORS and not batched and not torch.is_grad_enabled():
            # The op takes nothing saved: a profiler would see all computed again.
            known = self._recall(args, profiled=bool(saved))
            if known is not None and not self._has_kernel("backward", known.result.device.type):
                return self._gradients(known.result, known.backward, grad, args, needs, saved)
        return self._backward_op(grad, *args, needs)

    def _has_kernel(self, which: str, device_type: str) -> bool:
        """Whether the device type has a kernel of its own for ``x_forward`` or ``x_backward``."""
        known = self._kernels.get((which, device_type))
        if known is None:
            name = f"{NAMESPACE}::{self.name}_{which}"
            known = torch._C._dispatch_has_kernel_for_dispatch_key(name, device_type.upper())
            self._kernels[which, device_type] = known
        return known

    def _make_function(self) -> type[torch.autograd.Function]:
        op = self

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(*args: Any) -> Tensor | tuple[Tensor, ...]:
                return op._run_saving(args)

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                # Zeros for what was saved would be as large as that.
                ctx.set_materialize_grads(False)
                if isinstance(output, Tensor):
                    op._save(ctx, inputs)
                    return
                _, *saved = output
                ctx.mark_non_differentiable(*saved)
                op._save(ctx, inputs, saved)

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                if grads[0] is None:  # as PyTorch's own ops: no gradient has come, none goes on
                    return (None,) * len(ctx.others)
                return op._backward(ctx, grads[0])

        # PyTorch asks for it at every call, and takes 40 us to find it out anew.
        Function.forward.__signature__ = inspect.signature(Function.forward)  # type: ignore[attr-defined]
        Function.__name__ = Function.__qualname__ = f"{self.name}_autograd"
        return Function
