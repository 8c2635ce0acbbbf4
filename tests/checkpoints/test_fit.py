"""Checkpoints that are whole and do not fit: an error by name, not damage; and what fits though it is not the same."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import quantshard as qs
from quantshard import checkpoints
from quantshard.checkpoints import Manager
from quantshard.checkpoints.disk.manifest import DamagedError
from quantshard.checkpoints.inspection import verify
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.errors import CheckpointError
from quantshard.interop.layouts.source import CheckpointModel
from quantshard.optimizers import FusedAdam, MasterWeights
from tests.checkpoints.small import built
from tests.tensor.test_tensor import differing, same

SCHEDULES: dict[str, Callable[[Any], object]] = {
    "none": lambda optimizer: None,
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 10),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.5, total_steps=10),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": lambda model: FusedAdam(model.named_parameters(), lr=1e-3),
    "MasterWeights": lambda model: MasterWeights(torch.optim.AdamW, model.named_parameters(), lr=1e-3),
    "AdamW": lambda model: torch.optim.AdamW(model.named_parameters(), lr=1e-3),
}


def mxfp8(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    with qs.quantized_model_init(recipe="mxfp8"):
        return nn.Sequential(qs.Linear(24, 18, params_dtype=dtype), qs.LayerNorm(18, params_dtype=dtype))


def held(optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    states = {} if optimizer is None else optimizer.state_dict()["state"]
    return {f"{n}.{k}": torch.as_tensor(v).clone() for n, state in states.items() for k, v in state.items()}


@contextmanager
def refused(words: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """It ends in an error in one line that is not of damage, and the model is as it was."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    states = held(optimizer)
    groups = [dict(group) for group in ([] if optimizer is None else optimizer.param_groups)]
    with warnings.catch_warnings(), pytest.raises(CheckpointError) as caught:
        warnings.simplefilter("error")
        yield
    message = str(caught.value)
    assert re.search(words, message) and "\n" not in message, message
    assert not isinstance(caught.value, DamagedError)
    assert not differing(before, model.state_dict()) and not differing(states, held(optimizer))
    assert optimizer is None or optimizer.param_groups == groups


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of two checkpoints; the older one would be taken if the newer were damaged."""
    with Manager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, *built("mxfp8"))
    return tmp_path / "run"


# Groups ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("there", SCHEDULES)
@pytest.mark.parametrize("here", SCHEDULES)
def test_what_a_schedule_adds_to_groups_need_not_be_there(tmp_path: Path, kind: str, there: str, here: str) -> None:
    """It is loaded where the checkpoint has it, and stays as it is where not."""
    first, second = (nn.Linear(3, 3) if kind == "AdamW" else mxfp8() for _ in range(2))
    saved, own = OPTIMIZERS[kind](first), OPTIMIZERS[kind](second)
    SCHEDULES[there](saved)
    saved.param_groups[0]["lr"] = 0.125
    checkpoints.save(tmp_path / "c", first, saved)
    SCHEDULES[here](own)
    before = dict(own.param_groups[0])
    checkpoints.load(tmp_path / "c", second, own)
    theirs, found = saved.param_groups[0], own.param_groups[0]
    assert found["lr"] == 0.125 and found.keys() == before.keys() | theirs.keys()
    for key in ("initial_lr", "max_lr", "min_lr"):
        assert key not in found or found[key] == theirs.get(key, before.get(key))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_schedule_goes_on_from_the_rate_that_was_loaded(kind: str, tmp_path: Path) -> None:
    first, second = (nn.Linear(3, 3) if kind == "AdamW" else mxfp8() for _ in range(2))
    saved, own = OPTIMIZERS[kind](first), OPTIMIZERS[kind](second)
    LambdaLR(saved, lambda step: 0.5**step)
    rate = saved.param_groups[0]["initial_lr"]
    checkpoints.save(tmp_path / "c", first, saved)
    checkpoints.load(tmp_path / "c", second, own)
    LambdaLR(own, lambda step: 0.5**step, last_epoch=2)
    assert own.param_groups[0]["lr"] == rate / 8


def test_groups_without_names_are_loaded_into_groups_with_names(tmp_path: Path) -> None:
    model, other = mxfp8(), mxfp8()
    checkpoints.save(tmp_path / "c", model, FusedAdam(model.parameters(), lr=0.125))
    optimizer = FusedAdam(other.named_parameters(), lr=1e-3)
    checkpoints.load(tmp_path / "c", other, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in other.named_parameters()]


def test_an_entry_of_groups_that_holds_others(tmp_path: Path) -> None:
    """DCP saves each of them by itself; a checkpoint may have some."""
    model, optimizer = built("mxfp8")
    optimizer.param_groups[0]["mine"] = {"a": 1, "deep": [{"b": 2}]}
    checkpoints.save(tmp_path / "c", model, optimizer)
    model, optimizer = built("mxfp8", seed=9)
    optimizer.param_groups[0]["mine"] = {"a": 5, "deep": [{"b": 6, "c": 7}]}
    checkpoints.load(tmp_path / "c", model, optimizer)
    assert optimizer.param_groups[0]["mine"] == {"a": 1, "deep": [{"b": 2, "c": 7}]}


class Counting(torch.optim.SGD):
    """Its state is a number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-3)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"seen": 0}


def test_states_that_are_no_tensors(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = Counting(model.parameters())
    optimizer.state[model.bias]["seen"] = 7
    checkpoints.save(tmp_path / "c", model, optimizer)
    other = nn.Linear(3, 3)
    optimizer = Counting(other.parameters())
    checkpoints.load(tmp_path / "c", other, optimizer)
    assert [optimizer.state[param]["seen"] for param in other.parameters()] == [0, 7]
    assert len(optimizer.state) == 2


# Another optimizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"exp_avg_dtype": torch.bfloat16},
            r"its group 0 has no 'rounding_seed', optimizer\.state\.0\.exp_avg is torch\.float32 \[18, 24\] there and "
            r"torch\.bfloat16 \[18, 24\] here; build it with the options that it was saved with, load with "
            r"requantize=True to convert states of other dtypes, or load the model alone and call the "
            r"optimizer's reseed_masters\(\)$",
        ),
        (
            {"exp_avg_sq_dtype": torch.uint8},
            "'rounding_seed', it lacks 2 of this one's tensors .*exp_avg_sq_scale_",
        ),
        ({"master_weights": False}, r"it has 4 tensors that this one lacks \(first: \['optimizer.state.0.master_param"),
    ],
)
def test_other_options(run: Path, options: dict[str, Any], says: str) -> None:
    model, optimizer = built("mxfp8", seed=9, **options)
    with Manager(run) as manager, refused(f"step-000002 is of another optimizer: .*{says}", model, optimizer):
        manager.restore(model, optimizer)


def test_wider_states_than_those_that_were_saved(tmp_path: Path) -> None:
    """No bit would be lost, and they were rounded stochastically until now."""
    checkpoints.save(tmp_path / "c", *built("mxfp8", exp_avg_dtype=torch.bfloat16))
    model, optimizer = built("mxfp8", seed=9)
    with refused(r"another optimizer: optimizer\.state\.0\.exp_avg is torch\.bfloat16 ", model, optimizer):
        checkpoints.load(tmp_path / "c", model, optimizer)


def test_another_number_of_groups(run: Path) -> None:
    model, _ = built("mxfp8", seed=9)
    decayed, others = [model[0].weight, model[1].weight], [model[0].bias, model[1].bias]
    optimizer = FusedAdam([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-3)
    with Manager(run) as manager, refused("its number of groups is 1 and this one's 2, ", model, optimizer):
        manager.restore(model, optimizer)
    checkpoints.save(run.parent / "c", model, optimizer)
    model, optimizer = built("mxfp8")
    with refused("its number of groups is 2 and this one's 1, ", model, optimizer):
        checkpoints.load(run.parent / "c", model, optimizer)


def test_another_class_of_optimizer(run: Path) -> None:
    """Its options are in `defaults`, and those that MasterWeights adds beside them."""
    model, _ = built("mxfp8", seed=9)
    optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    with Manager(run) as manager, refused("its group 0 has no 'amsgrad', it lacks 8 of this one's", model, optimizer):
        manager.restore(model, optimizer)
    plain = nn.Linear(3, 3)
    checkpoints.save(run.parent / "c", plain, torch.optim.SGD(plain.parameters(), lr=1e-3))
    optimizer = MasterWeights(torch.optim.SGD, plain.parameters(), lr=1e-3)
    with refused("its group 0 has no 'skipped_in_a_row'", plain, optimizer):
        checkpoints.load(run.parent / "c", plain, optimizer)


def test_a_rate_in_a_tensor_where_there_is_none(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    checkpoints.save(tmp_path / "c", model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.125)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with refused(
        r"optimizer\.param_groups\.0\.lr is torch\.float32 \[\] there and not a tensor here", model, optimizer
    ):
        checkpoints.load(tmp_path / "c", model, optimizer)


def test_without_an_optimizer(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "c", built("mxfp8")[0], None)
    model, optimizer = built("mxfp8", seed=9)
    with refused(
        r"was saved without an optimizer; load the model alone and call .* reseed_masters\(\)$", model, optimizer
    ):
        checkpoints.load(tmp_path / "c", model, optimizer)
    checkpoints.load(tmp_path / "c", model)
    optimizer.reseed_masters()


# Other parameters, by their names -------------------------------------------------------------------------------------


class InGroups:
    """In place of a model, gives its parameters in groups."""

    def __init__(self, *groups: list[tuple[str, nn.Parameter]]) -> None:
        self.groups = groups

    def named_parameters(self) -> list[dict[str, Any]]:
        return [{"params": group} for group in self.groups]


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_in_another_order(kind: str, tmp_path: Path) -> None:
    """Of the same shapes and in the same number, so that only their names tell."""
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    saved, own = (OPTIMIZERS[kind](model) for model in models)
    names = [name for name, _ in models[1].named_parameters()]
    own.param_groups[0]["param_names"] = [*names[2:], *names[:2]]
    for model, optimizer in zip(models, (saved, own), strict=True):
        stepped(model, optimizer)
    checkpoints.save(tmp_path / "c", models[0], saved)
    says = "its group 0 has '0.weight' as parameter 0, not '1.weight'; pass the same parameters"
    with refused(f"another optimizer: {says}", models[1], own):
        checkpoints.load(tmp_path / "c", models[1], own)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_in_other_groups(kind: str, tmp_path: Path) -> None:
    """As many groups, of as many parameters together."""
    model, make = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), OPTIMIZERS[kind]
    named = list(model.named_parameters())
    saved, own = (make(InGroups(named[:first], named[first:])) for first in (1, 2))
    stepped(model, saved)
    checkpoints.save(tmp_path / "c", model, saved)
    with refused("its group 0 has 1 parameters, not 2; load the model alone", model, own):
        checkpoints.load(tmp_path / "c", model, own)


# Modules in wrappers --------------------------------------------------------------------------------------------------


def recomputing(wrapped: bool) -> nn.Sequential:
    layer, norm = mxfp8()
    return nn.Sequential(checkpoint_wrapper(layer) if wrapped else layer, norm)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("by_dcp", [True, False], ids=["by its own names, as earlier releases", "saved"])
def test_activation_checkpointing_is_turned_on_or_off(kind: str, there: bool, by_dcp: bool, tmp_path: Path) -> None:
    source, model = recomputing(there), recomputing(not there)
    saved, own = (OPTIMIZERS[kind](m) for m in (source, model))
    stepped(source, saved)
    if by_dcp:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save({"model": source.state_dict(), "optimizer": saved.state_dict()}, checkpoint_id=tmp_path / "c")
    else:
        checkpoints.save(tmp_path / "c", source, saved)
        (stored,) = SafeReader(tmp_path / "c").value("optimizer.param_groups.0.param_names")[:1]
        assert stored == "0.weight"
    assert kind != "FusedAdam" or "0.weight" in CheckpointModel(tmp_path / "c").masters
    names = own.param_groups[0]["param_names"]
    checkpoints.load(tmp_path / "c", model, own)
    assert not differing(source.state_dict(), model.state_dict()) and not differing(held(saved), held(own))
    assert own.param_groups[0]["param_names"] == names


@pytest.mark.parametrize("there", [True, False])
def test_an_optimizer_alone_is_loaded_whatever_is_wrapped(there: bool) -> None:
    source, model = recomputing(there), recomputing(not there)
    saved, own = (OPTIMIZERS["FusedAdam"](m) for m in (source, model))
    stepped(source, saved)
    model.load_state_dict(source.state_dict())
    own.load_state_dict(saved.state_dict())
    assert not differing(held(saved), held(own))


def test_wrapped_modules_are_quantized_anew_and_loaded_from_rank_0(tmp_path: Path) -> None:
    source, states = built("block")
    checkpoints.save(tmp_path / "c", source, states)
    model, optimizer = built("mxfp8", seed=9)
    wrapped = nn.Sequential(*map(checkpoint_wrapper, model))
    with pytest.warns(match="2 from fp8_128x128 to mxfp8_32x32 by their masters"):
        checkpoints.load(tmp_path / "c", wrapped, optimizer, requantize=True)
    with refused("0.weight: the state dict holds 'fp8_128x128', but this model's weight is 'mxfp8_32x32'", wrapped):
        checkpoints.load_from_rank0(wrapped, source.state_dict())


# Another dtype --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("there", "here"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_another_dtype_of_plain_tensors(tmp_path: Path, there: torch.dtype, here: torch.dtype) -> None:
    source, model = mxfp8(there), mxfp8(here)
    with torch.no_grad():
        source[0].bias.fill_(1.0625)
    with Manager(tmp_path) as manager:
        manager.save(1, source, FusedAdam(source.parameters()))
        says = rf"another model: model\.0\.bias is {there} there and {here} here; build the model with that dtype"
        with refused(says, model):
            manager.restore(model)
        with refused(says, model):
            manager.restore(model, requantize=True)
        manager.restore(model, requantize=True, lossy=True)
    for name in ("0.bias", "1.weight", "1.bias"):
        assert same(model.state_dict()[name], source.state_dict()[name].to(here)), name


def test_masters_take_what_a_narrower_parameter_cannot(tmp_path: Path) -> None:
    """Then it is no cast that loses bits, so `requantize` alone does it."""
    source, model = mxfp8(torch.float32), mxfp8()
    with torch.no_grad():
        source[0].bias.fill_(1 + 2**-20)
    checkpoints.save(tmp_path / "c", source, FusedAdam(source.parameters()))
    optimizer = FusedAdam(model.parameters())
    checkpoints.load(tmp_path / "c", model, optimizer, requantize=True)
    assert (optimizer.get_unscaled_state(model[0].bias, "master_param") == 1 + 2**-20).all()
    assert (model[0].bias == 1).all()


def test_masters_of_another_kind_that_the_optimizer_cannot_take(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "c", *built("block", master_weight_dtype=torch.float16))
    model, _ = built("mxfp8", seed=9)
    optimizer = MasterWeights(torch.optim.AdamW, model.named_parameters(), lr=1e-3)
    with refused("cannot convert the master of 0.weight", model, optimizer):
        checkpoints.load(tmp_path / "c", model, optimizer, requantize=True)


@pytest.mark.parametrize("layer", [nn.Linear, qs.Linear])
def test_the_meta_device(layer: type[nn.Module], tmp_path: Path) -> None:
    """Said before anything is written, and of a module of PyTorch's too, into which it would load nothing."""
    make: Any = layer
    checkpoints.save(tmp_path / "c", nn.Sequential(nn.Linear(3, 3), make(3, 3)), None)
    model = nn.Sequential(nn.Linear(3, 3), make(3, 3, device="meta"))
    before = model[0].weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"c: model.1.bias is on the meta device"):
        checkpoints.load(tmp_path / "c", model)
    assert same(model[0].weight.detach(), before)


# Nothing there --------------------------------------------------------------------------------------------------------


def test_a_place_without_a_checkpoint_is_said_as_it_is(run: Path) -> None:
    """Nothing, a folder of other things, a file, and a folder of checkpoints."""
    (run / "step-000003").mkdir()  # what a kill left
    (run.parent / "killed" / ".step-000004.abc.tmp").mkdir(parents=True)
    (run.parent / "killed" / ".step-000004.abc.tmp" / ".metadata").touch()
    (run.parent / "file").touch()
    (run.parent / "empty").mkdir()
    says = "it has no .metadata; choose another"
    for path in (run / "nothing", run.parent / "empty", run.parent / "file", run.parent / "killed", run):
        with pytest.raises(DamagedError) as caught:  # as such the Manager goes on to the one before
            checkpoints.load(path, mxfp8())
        assert str(caught.value) == f"{path} is not a complete checkpoint: {says}"
        assert verify(path).problems == (str(caught.value),)


def frozen(*layers: int) -> tuple[nn.Sequential, FusedAdam]:
    """Layers that were frozen before the optimizer was built over all of them."""
    torch.manual_seed(9)
    with qs.quantized_model_init(recipe="mxfp8"):
        model = nn.Sequential(*[qs.Linear(32, 32, bias=False, params_dtype=torch.bfloat16) for _ in range(3)])
    for number in layers:
        model[number].requires_grad_(False)
    optimizer = FusedAdam(model.named_parameters(), lr=1e-2)
    changed_by_step(model, optimizer)
    return model, optimizer


def changed_by_step(model: nn.Module, optimizer: FusedAdam) -> set[str]:
    """The weights that a step has changed."""
    before = {name: param.detach().dequantize() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    return {name for name, param in model.named_parameters() if not same(before[name], param.detach().dequantize())}


def test_layers_that_are_frozen_on_one_side_alone(tmp_path: Path) -> None:
    """The optimizer is built with the layers frozen as in the checkpoint; then others are."""
    checkpoints.save(tmp_path / "trained", *frozen())
    model, optimizer = frozen(1, 2)
    says = (
        r"trained is of another optimizer: it has states of 3 parameters and this one of 1 \(frozen ones have none\),"
    )
    with refused(says, model, optimizer):
        checkpoints.load(tmp_path / "trained", model, optimizer)
    model, optimizer = frozen()
    checkpoints.load(tmp_path / "trained", model, optimizer)
    model[1].requires_grad_(False)
    assert changed_by_step(model, optimizer) == {"0.weight", "2.weight"}

    checkpoints.save(tmp_path / "frozen", *frozen(0))
    model, optimizer = frozen()
    says = r"frozen is of another optimizer: it has states of 2 parameters and this one of 3 \(frozen ones have none\),"
    with refused(says, model, optimizer):
        checkpoints.load(tmp_path / "frozen", model, optimizer)
    model, optimizer = frozen(0)
    checkpoints.load(tmp_path / "frozen", model, optimizer)
    optimizer.initialize_state(model[0].requires_grad_(True).weight)
    assert changed_by_step(model, optimizer) == {"0.weight", "1.weight", "2.weight"}


def test_an_optimizer_over_fewer_parameters(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "c", *frozen())
    model, _ = frozen(0)
    optimizer = FusedAdam([pair for pair in model.named_parameters() if pair[1].requires_grad], lr=1e-2)
    with refused("of another optimizer: it has states of 3 parameters and this one of 2 ", model, optimizer):
        checkpoints.load(tmp_path / "c", model, optimizer)
