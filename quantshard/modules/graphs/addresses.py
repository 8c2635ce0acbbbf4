"""What graphs take for fixed besides arguments: where a module's tensors lie, who is trained, and what is around."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.collectives.process_groups import world
from quantshard.modules.base.state_dict import ComponentStateDict
from quantshard.modules.contexts import context
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import KEY


class GraphAddresses:
    """What the graphs of a module hold of it: addresses of its tensors, and who is trained."""

    def __init__(self, module: nn.Module | None, draws: bool) -> None:
        self._draws = draws
        self._owners = [] if module is None else list(module.named_modules())
        self._params: list[tuple[str, nn.Module, str, Mapping[str, Tensor]]] = []
        for path, each in self._owners:
            states = each.plain_states if isinstance(each, ComponentStateDict) else {}
            names = [name for name, _ in each.named_parameters(recurse=False)]
            self._params += [(path, each, name, states.get(name, {})) for name in names]
        self._held = [
            (path, each, name) for path, each in self._owners for name, _ in each.named_buffers(recurse=False)
        ]
        self._known = self._facts()

    def changed(self) -> str | None:
        """The name of the first that is no longer what it was at the capture."""
        now = self._facts()
        if now == self._known:
            return None
        labels = [path or "the module" for path, _ in self._owners]
        labels += [f"{path}.{name}".lstrip(".") for path, _, name, *_ in (*self._params, *self._held)]
        pairs = zip(labels, now, self._known, strict=True)
        return next(label for label, found, known in pairs if found != known)

    def _facts(self) -> list[Any]:
        found: list[Any] = [_of_module(path, each) for path, each in self._owners]
        found += [self._of_parameter(each, name, state) for _, each, name, state in self._params]
        for _, each, name in self._held:
            buffer = private_torch.registered_buffer(each, name)
            found.append(buffer if buffer is None else buffer.data_ptr())
        return found

    def _of_parameter(self, module: nn.Module, name: str, state: Mapping[str, Tensor]) -> Any:
        param = private_torch.registered_parameter(module, name)
        if param is None:
            return None
        local = private_torch.local_tensor(param)
        if isinstance(local, QuantizedTensor):
            storage = local.quantized_storage
            held, state = [part.data_ptr() for part in storage.components.values()], storage.state
        else:
            held = [local.data_ptr()]
        held += [value.data_ptr() for key, value in state.items() if key != KEY]
        key = int(state[KEY]) if self._draws and KEY in state else 0  # the graph has its value
        return id(param), param.requires_grad, key, held


def _of_module(path: str, module: nn.Module) -> Any:
    """Its mode, which modules it calls, and whether Python runs around it that a graph would not run."""
    return module.training, [id(child) for child in module.children()], path and private_torch.has_call_hooks(module)


def surroundings() -> tuple[Any, ...]:
    """What a forward depends on besides its arguments and its module."""
    in_autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if in_autocast else None
    return context.current_setting(), dtype, world()
