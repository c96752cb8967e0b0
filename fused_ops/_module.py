# SPDX-License-Identifier: Apache-2.0
"""What the drop-in modules share: cheap gathering of parameters and ``from_reference``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.utils.parametrize
from torch import Tensor, nn
from typing_extensions import Self

from fused_ops._dispatch import Query

LinearPath = tuple[str, bool]
"""Name of a linear or LayerNorm, and whether its bias is wanted."""


def linear_path(name: str, bias: bool = True) -> tuple[LinearPath, ...]:
    """Paths of the parameters of the linear or LayerNorm ``name``."""
    return ((name, bias),)


_PLAIN = (nn.Linear, nn.LayerNorm)


def gather(module: nn.Module, paths: Sequence[LinearPath]) -> list[Tensor | None]:
    """Weights and biases of submodules, in order.

    Reading ``_modules`` and ``_parameters`` directly costs a fraction of attribute access and
    cannot go stale. Parametrized submodules, whose weights are computed, take the slow way; what
    is neither plain nor parametrized is refused, since its forward would never be called.
    """
    children = module._modules
    gathered: list[Tensor | None] = []
    for name, bias in paths:
        child: Any = children.get(name)
        stored: dict[str, Tensor | None] = child._parameters if type(child) in _PLAIN else {}
        if "weight" not in stored or (bias and "bias" not in stored):
            gathered.append(_parameter(module, name, "weight"))
            if bias:
                gathered.append(_parameter(module, name, "bias"))
        elif bias:
            gathered += (stored["weight"], stored["bias"])
        else:
            gathered.append(stored["weight"])
    return gathered


def _parameter(module: nn.Module, name: str, key: str) -> Tensor | None:
    """A parameter of a submodule; one that is computed if it is known to be current."""
    child = getattr(module, name)
    if type(child) in _PLAIN and key in child._parameters:
        return child._parameters[key]
    parametrized = isinstance(child, _PLAIN) and nn.utils.parametrize.is_parametrized(child)
    replica = type(child) in _PLAIN and getattr(child, "_is_replica", False)  # of DataParallel
    if parametrized or replica:
        return cast("Tensor | None", getattr(child, key))
    what = f"{type(child).__module__}.{type(child).__qualname__}"
    if type(child) in _PLAIN:
        what += f" whose {key} a hook computes"
    raise TypeError(
        f"{type(module).__name__}: {name} must be an nn.Linear or nn.LayerNorm, plain or "
        f"parametrized, for the fused op reads its parameters without calling it, got {what}"
    )


class FusedModule(nn.Module):
    """Base of the drop-in modules; each also derives from its eager reference module.

    The submodules hold parameters only: the fused op reads the parameters and never calls the
    submodules, so forward hooks on them do not fire.
    """

    precision: str | None

    _optional_biases: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def _arguments_of(cls, module: nn.Module) -> dict[str, Any]:
        """Constructor arguments that describe ``module``."""
        raise NotImplementedError

    def _query(self, *inputs: Any) -> Query:
        """The planner's question for a call with ``inputs``."""
        raise NotImplementedError

    @classmethod
    def from_reference(
        cls, module: nn.Module, *, precision: str | None = None, **options: Any
    ) -> Self:
        """Build the fused module around the parameters of a reference module.

        Parameters
        ----------
        module
            The eager reference module of the same name, or any module with the same parameter
            names and shapes.
        precision
            As in the constructor.
        **options
            The constructor's other keyword-only arguments, where it has some.

        Returns
        -------
        The fused module. It shares the ``nn.Parameter`` objects of ``module`` (nothing is
        copied), and takes over its training mode.

        Raises
        ------
        TypeError
            If ``module`` lacks a parameter that the op needs.
        RuntimeError
            If the state dicts do not match.
        """
        try:
            arguments = cls._arguments_of(module)
        except AttributeError as error:
            raise TypeError(
                f"{cls.__name__}.from_reference: module must have the parameters of "
                f"{cls.__name__}, got {type(module).__name__} ({error})"
            ) from error
        with torch.device("meta"):
            fused = cls(**arguments, precision=precision, **options)
        for name, child in fused.named_children():
            theirs = getattr(module, name)
            # The parameters of another kind of module would not say what it does.
            if isinstance(theirs, nn.Module) and type(theirs) is not type(child):
                raise TypeError(
                    f"{cls.__name__}.from_reference: {name} must be a plain "
                    f"nn.{type(child).__name__}, got {type(theirs).__name__}"
                )
        for name in cls._optional_biases:
            if getattr(module, name).bias is None:
                getattr(fused, name).register_parameter("bias", None)
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm):
                getattr(fused, name).eps = child.eps
        fused.load_state_dict(module.state_dict(keep_vars=True), assign=True)
        return fused.train(module.training)

    def extra_repr(self) -> str:
        return "" if self.precision is None else f"precision={self.precision!r}"
