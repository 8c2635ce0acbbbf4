"""Facts that a CUDA graph relies on apart from arguments: tensor addresses, trained parameters and contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.collectives.process_groups import world
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.contexts import context
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import KEY


class GraphAddresses:
    """Addresses of a module's tensors and its `requires_grad` flags at the time of a capture."""

    def __init__(self, module: nn.Module | None, draws: bool) -> None:
        self._draws = draws
        self._owners = [] if module is None else list(module.named_modules())
        self._params: list[tuple[str, nn.Module, str, Mapping[str, Tensor]]] = []
        for path, owner in self._owners:
            states = owner.plain_states if isinstance(owner, QuantizedModule) else {}
            names = [name for name, _ in owner.named_parameters(recurse=False)]
            self._params += [(path, owner, name, states.get(name, {})) for name in names]
        self._held = [
            (path, owner, name) for path, owner in self._owners for name, _ in owner.named_buffers(recurse=False)
        ]
        self._known = self._facts()

    def changed(self) -> str | None:
        """Return the name of the first module or tensor that changed since the capture, or None."""
        facts = self._facts()
        if facts == self._known:
            return None
        labels = [path or "the module" for path, _ in self._owners]
        labels += [f"{path}.{name}".lstrip(".") for path, _, name, *_ in (*self._params, *self._held)]
        pairs = zip(labels, facts, self._known, strict=True)
        return next(label for label, current, captured in pairs if current != captured)

    def _facts(self) -> list[Any]:
        facts: list[Any] = [_of_module(path, owner) for path, owner in self._owners]
        facts += [self._of_parameter(owner, name, state) for _, owner, name, state in self._params]
        for _, owner, name in self._held:
            buffer = private_torch.registered_buffer(owner, name)
            facts.append(buffer if buffer is None else buffer.data_ptr())
        return facts

    def _of_parameter(self, module: nn.Module, name: str, state: Mapping[str, Tensor]) -> Any:
        param = private_torch.registered_parameter(module, name)
        if param is None:
            return None
        local = private_torch.local_tensor(param)
        if isinstance(local, QuantizedTensor):
            storage = local.quantized_storage
            addresses, state = [part.data_ptr() for part in storage.components.values()], storage.state
        else:
            addresses = [local.data_ptr()]
        addresses += [value.data_ptr() for key, value in state.items() if key != KEY]
        # the graph contains the value of the random key
        key = int(state[KEY]) if self._draws and KEY in state else 0
        return id(param), param.requires_grad, key, addresses


def _of_module(path: str, module: nn.Module) -> Any:
    """Return a module's mode, its children, and whether it has Python hooks that a replay would not run."""
    return module.training, [id(child) for child in module.children()], path and private_torch.has_call_hooks(module)


def surroundings() -> tuple[Any, ...]:
    """Return the contexts that a forward depends on: quantshard's and torch's autocast, and the process group."""
    in_autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if in_autocast else None
    return context.current_setting(), dtype, world()
