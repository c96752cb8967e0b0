# SPDX-License-Identifier: Apache-2.0
"""How a call finds its arithmetic: the fp32 precision setting and autocast.

Both are read here and passed to the op as arguments, so that a backward uses what its forward
used and a compiled graph does not depend on hidden state.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")

PRECISIONS = ("ieee", "tf32")
_MATMUL = torch.backends.cuda.matmul  # found once: the way there is dear in a small call
# What reading ``_MATMUL.fp32_precision`` comes to, after a chain of comparisons that takes longer.
_read_fp32_precision: Callable[[str, str], str] = getattr(
    torch._C, "_get_fp32_precision_getter", lambda *_: _MATMUL.fp32_precision
)


def _global_fp32_precision() -> str:
    # Only fp32_precision may be read: reading allow_tf32 raises once the newer setting was used.
    # The setting "none" means the default, IEEE.
    return "tf32" if _read_fp32_precision("cuda", "matmul") == "tf32" else "ieee"


# What torch.compiler.assume_constant_result sets. The decorator itself imports all of dynamo:
# seconds, and a cache folder, at every import of this package.
_global_fp32_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


def resolve_precision(op: str, precision: str | None) -> str:
    """``precision``, or what ``torch.backends.cuda.matmul.fp32_precision`` says when None."""
    if precision is None:
        return _global_fp32_precision()
    if precision not in PRECISIONS:
        raise ValueError(f"{op}: precision must be None, 'ieee' or 'tf32', got {precision!r}")
    return precision


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast asks products on ``tensor`` to run in; None outside autocast.

    As for ``nn.Linear``, float64 tensors are left alone.
    """
    # The type of the device costs as much as all the rest together.
    device_type = "cuda" if tensor.is_cuda else "cpu" if tensor.is_cpu else tensor.device.type
    if not _autocast_enabled(device_type) or tensor.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device_type)


def _autocast_enabled(device_type: str) -> bool:
    # "meta" knows no autocast, and older PyTorch raises when asked.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


# The precision of cuBLAS products is a setting of the process. Compositions that depend on it take
# turns, so that one thread's precision does not reach another's.
_setting_lock = threading.RLock()


@contextlib.contextmanager
def _composition_scope(device: torch.device, dtype: torch.dtype, precision: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if _autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda" and dtype == torch.float32:
            stack.enter_context(_setting_lock)
            if _global_fp32_precision() != precision:
                previous = _MATMUL.fp32_precision
                _MATMUL.fp32_precision = precision
                stack.callback(setattr, _MATMUL, "fp32_precision", previous)
        yield


def run_composition(
    function: Callable[..., T],
    device: torch.device,
    dtype: torch.dtype,
    precision: str,
    args: Sequence[Any],
) -> T:
    """Call a composition without autograd and autocast, fp32 products as ``precision`` says.

    ``dtype`` is that of the result.
    """
    kind = device.type
    nothing_to_set = (
        (kind == "cpu" or dtype != torch.float32)
        and not torch.is_grad_enabled()
        and not _autocast_enabled(kind)
    )
    if nothing_to_set:  # small calls would spend a tenth of their time on the scope
        return function(*args)
    with _composition_scope(device, dtype, precision):
        return function(*args)
