"""What tells a quantized parameter from others, its identity, attributes, hooks and address, is that of a plain one."""

import ast
import copy
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import quantshard
from quantshard import Linear, QuantizedTensor, autocast, limits, quantized_model_init, requantize_
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.optimizers import FusedAdam, MasterWeights
from quantshard.tensor import component_loading, components
from tests.tensor.test_tensor import MXFP8, NVFP4, contents, cut, differing, every_cell, same, weight

MOVES = {
    "to the same device": lambda m: m.to("cpu"),
    "to the same dtype": lambda m: m.to(torch.bfloat16),
    "cpu": nn.Module.cpu,
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "float": nn.Module.float,
    "double": nn.Module.double,
    "to": lambda m: m.to("cpu", torch.float16),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "apply": lambda m: m._apply(torch.clone),
}
every_move = pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)


def linear(features=64, recipe="mxfp8"):
    torch.manual_seed(0)
    with quantized_model_init(recipe=recipe):
        return Linear(features, features, params_dtype=torch.bfloat16, device="cpu")


def described(param, before, held):
    """What a framework may have noted about a parameter, and what it holds on to."""
    return {
        "is the object": param is before,
        "attributes": {name: value for name, value in vars(param).items() if name in ("is_embedding", "noted")},
        "weakly held": held() is param,
        "requires_grad": param.requires_grad,
        "dtype": param.dtype,
        "gradient": None if param.grad is None else (param.grad.dtype, param.grad.is_leaf),
    }


@every_move
@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_move_keeps_what_it_keeps_of_a_plain_parameter(move, with_gradient):
    """The bias is the plain one. Hooks too: an optimizer that steps in them would train nothing, in silence."""
    model, found, calls = linear(), {}, []
    before, held = dict(model.named_parameters()), {}
    for name, param in before.items():
        param.is_embedding, param.noted = True, [name]
        held[name] = weakref.ref(param)
        param.register_post_accumulate_grad_hook(lambda p, name=name: calls.append((name, p is before[name])))
        if with_gradient:
            param.grad = torch.ones_like(param)
    move(model)
    for name, param in model.named_parameters():
        found[name] = described(param, before[name], held[name])
        assert found[name].pop("attributes") == {"is_embedding": True, "noted": [name]}
    assert found["weight"] == found["bias"]
    assert list(dict(model.named_parameters())) == ["weight", "bias"]
    (model.weight.dequantize().sum() + model.bias.sum()).backward()
    assert sorted(calls) == [("bias", True), ("weight", True)]


def test_a_gradient_moves_along():
    model = linear()
    values = torch.randn(64, 64).bfloat16()
    model.weight.grad = gradient = values.clone()
    model.float()
    assert model.weight.grad is gradient and torch.equal(gradient, values.float())


def test_to_the_meta_device_and_back():
    """A plain parameter is replaced then; a quantized one remains, with its attributes and key."""
    model = linear()
    param, key = model.weight, model.weight.quantized_storage.state["key"].clone()
    param.noted = "here"
    for move in (lambda: model.to("meta"), lambda: model.to_empty(device="cpu")):
        param.grad = torch.zeros(64, 64, dtype=torch.bfloat16, device=param.device)
        move()
        assert model.weight is param and param.noted == "here" and param.grad.device == param.device
        assert isinstance(param, nn.Parameter) and torch.equal(param.quantized_storage.state["key"], key)


def test_a_tied_weight_stays_tied():
    model = nn.Sequential(linear(), linear())
    model[1].weight = model[0].weight
    model.half()
    assert model[1].weight is model[0].weight and model[0].weight.dtype == torch.float16


@every_cell
def test_deepcopy_keeps_attributes(cell):
    """As of other tensor subclasses; of a plain parameter they are dropped. What they refer to is copied once."""
    param = nn.Parameter(weight(cell))
    param.noted, param.same = ["here"], param
    copied = copy.deepcopy(param)
    assert copied.noted == ["here"] and copied.noted is not param.noted and copied.same is copied
    assert isinstance(copied, nn.Parameter) and copied.quantized_storage is not param.quantized_storage
    assert not hasattr(copy.deepcopy(weight(cell)), "noted")


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, eps=1e-3),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.1),
    "MasterWeights": lambda params: MasterWeights(torch.optim.AdamW, params, lr=0.1),
}


def codes(tensor):
    return next(iter(tensor.quantized_storage.components.values()))


def trained(model, optimizer):
    """How many codes a step changes; the optimizer may refuse it."""
    before = codes(model.weight).clone()
    with autocast(recipe="mxfp8"):
        model(torch.ones(8, 64, dtype=model.weight.dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return int((codes(model.weight) != before).sum())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("move", ["cpu", "to the same device", "half", "to_empty"])
def test_an_optimizer_built_before_a_move_trains_the_model_or_says_why_not(make, steps, move):
    model = linear()
    optimizer = make(model.parameters())
    for _ in range(steps):
        assert trained(model, optimizer) > 1000
    MOVES[move](model)
    if move == "to_empty":
        model.reset_parameters()
    if move == "to_empty" and make is not OPTIMIZERS["AdamW"]:
        with pytest.raises(ConfigurationError, match="was given new values"):
            trained(model, optimizer)
        optimizer.reseed_masters()
    elif move == "half" and steps and make is OPTIMIZERS["AdamW"]:
        with pytest.raises(RuntimeError, match=r"expected dtype c10::BFloat16 for `end` but got dtype c10::Half"):
            trained(model, optimizer)  # the states, as those of a plain parameter
        return
    assert trained(model, optimizer) > 1000


# ----------------------------------------------------------------------------------------------------------- versions


WRITES = {
    "quantize_": lambda t: t.quantize_(torch.ones(48, 40)),
    "requantize_": lambda t: requantize_([(t, torch.ones(48, 40))]),
    "copy_": lambda t: t.copy_(weight(t.quantized_storage.spec, seed=1)),
    "itself": lambda t: t.copy_(t.clone()),
    "load": lambda t: component_loading.load_components(
        t, components.state_of(weight(t.quantized_storage.spec, seed=1)), "weight"
    ),
    "arithmetic": lambda t: t.mul_(0.5),
    "in place": lambda t: codes(t).zero_(),
}
"""Ways to give new values."""


@every_cell
def test_every_write_has_a_version_of_its_own(cell):
    """So no two storages have equal ones by chance, as counts would be, where one takes the place of another."""
    tensors = [weight(cell), weight(cell)]
    versions = [tensor.quantized_storage.version for tensor in tensors]
    for name, write in WRITES.items():
        for tensor in tensors:
            before = tensor.quantized_storage.seen_version()
            write(tensor)
            assert (tensor.quantized_storage.version != before) == (name != "in place")
            versions.append(tensor.quantized_storage.seen_version())
    assert len(set(versions)) == len(versions)


def test_no_one_but_the_storage_numbers_versions():
    """One that were counted on elsewhere could be that of another write."""
    package = Path(quantshard.__file__).parent
    written = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "version" and isinstance(node.ctx, ast.Store)
    ]
    assert [place for place in written if not place.startswith("tensor/storage.py")] == []


@every_cell
def test_copies_and_looks_keep_the_version(cell):
    tensor = weight(cell)
    for write in (lambda t: None, *WRITES.values()):
        seen = tensor.quantized_storage.seen_version()
        write(tensor)
        copies = [tensor.clone(), tensor.to(torch.half), tensor.detach(), copy.deepcopy(tensor), tensor.split(48)[0]]
        storages = [tensor.quantized_storage.piece(0, 0, 24), *(made.quantized_storage for made in copies)]
        assert {storage.seen_version() for storage in storages} == {tensor.quantized_storage.seen_version()}
        assert (write in WRITES.values()) == (tensor.quantized_storage.seen_version() != seen)
    assert torch.empty_like(tensor).quantized_storage.seen_version() != tensor.quantized_storage.seen_version()


def test_padding_a_shard_anew_loses_no_write():
    """As FSDP2 does in its first forward: what `dcp.load` has written before is noticed after."""
    shard = weight(MXFP8, 5).split(2)[2]
    before = shard.quantized_storage.seen_version()
    codes(shard).zero_()
    padded = shard.new_zeros(2, 40)
    padded.narrow(0, 0, 1).copy_(shard)
    assert padded.narrow(0, 0, 1).quantized_storage.seen_version() != before


def test_weights_of_inference_mode_have_versions_too():
    with torch.inference_mode():
        tensor = weight(MXFP8)
        before = tensor.quantized_storage.seen_version()
        tensor.quantize_(torch.ones(48, 40))
        assert tensor.quantized_storage.seen_version() != before


# -------------------------------------------------------------------------------------------------------------- .data


@every_cell
def test_data_can_be_a_copy_of_another_dtype(cell):
    """Frameworks raise the precision of parameters so, in which a quantized one has its gradient."""
    param = nn.Parameter(weight(cell, dtype=torch.bfloat16))
    param.noted, before, ident = "here", contents(param), id(param)
    param.data = param.data.to(torch.float32)
    assert (id(param), param.dtype, param.noted) == (ident, torch.float32, "here")
    assert isinstance(param, nn.Parameter) and param.is_leaf and param.requires_grad
    assert not differing(before, contents(param))
    param.dequantize().sum().backward()
    assert param.grad.dtype == torch.float32


def test_data_is_an_alias():
    param, other = nn.Parameter(weight(MXFP8)), weight(MXFP8, seed=1)
    param.data = other
    assert param.data_ptr() == other.data_ptr() and param.quantized_storage is other.quantized_storage


@pytest.mark.parametrize(
    "other",
    [
        weight(NVFP4),
        weight(MXFP8, 40, 48),
        weight(MXFP8).view(-1),
        weight(MXFP8, 96).split(48)[1],
        weight(MXFP8).to("meta"),
    ],
    ids=["format", "shape", "flat", "place", "meta"],
)
def test_data_of_another_kind_is_refused(other):
    param = nn.Parameter(weight(MXFP8))
    before = contents(param)
    with pytest.raises(UnsupportedOperationError) as error:
        param.data = other
    assert str(limits.REFUSALS["assigned data"]) in str(error.value) and repr(other) in str(error.value)
    assert not differing(before, contents(param))


# ------------------------------------------------------------------------------------------------------------ address


@every_cell
def test_the_address_is_that_of_the_codes(cell):
    tensor = weight(cell)
    assert tensor.data_ptr() == codes(tensor).data_ptr() != 0
    for handle in (tensor.detach(), tensor.view(-1), nn.Parameter(tensor), tensor[:], tensor.data):
        assert handle.data_ptr() == tensor.data_ptr()
    for other in (tensor.clone(), copy.deepcopy(tensor), tensor.half(), torch.empty_like(tensor)):
        assert other.data_ptr() not in (0, tensor.data_ptr())
    tensor.quantize_(torch.ones(48, 40))
    assert tensor.data_ptr() == codes(tensor).data_ptr()


@every_cell
def test_every_shard_has_an_address_of_its_own(cell):
    """Also those without rows: libraries that pair parameters by it would train one in place of all of them."""
    shards = cut(weight(cell, 5), [(0, 8)])
    assert [shard.shape[0] for shard in shards] == [1] * 5 + [0] * 3
    addresses = [shard.data_ptr() for shard in shards]
    assert len(set(addresses)) == 8 and 0 not in addresses
    assert addresses == [shard.view(-1).data_ptr() for shard in shards]


def test_placeholders_and_meta():
    tensor = weight(MXFP8)
    placeholders = [tensor.new_zeros(24, 40), tensor.new_empty(0)]
    assert len({tensor.data_ptr(), 0, *(p.data_ptr() for p in placeholders)}) == 4
    meta = tensor.to("meta")
    assert meta.data_ptr() == torch.empty(3, device="meta").data_ptr() == 0


def test_sizes_are_those_of_the_values():
    """Nominal, as the dtype is, and consistent: what `explain` tells is the bytes that are held."""
    tensor = weight(MXFP8, dtype=torch.bfloat16)
    assert tensor.element_size() == 2 and tensor.nbytes == 2 * tensor.numel() == tensor.untyped_storage().nbytes()
    with pytest.raises(RuntimeError, match="data pointer"):
        tensor.untyped_storage().data_ptr()


# ---------------------------------------------------------------------------------------------------------- gradients


def test_a_gradient_flows_through_every_look():
    values = torch.randn(48, 40)
    for look in (
        lambda p: p,
        lambda p: p.view(-1).dequantize().view(48, 40) if p.dim() == 2 else p,
        lambda p: p.clone(),
        lambda p: p.half().float(),
        lambda p: p[:],
        lambda p: torch.cat([part.dequantize() for part in p.split(5)]),
    ):
        param = nn.Parameter(weight(MXFP8))
        seen = look(param)
        read = seen.dequantize() if isinstance(seen, QuantizedTensor) else seen
        (read * values).sum().backward()
        torch.testing.assert_close(param.grad, values, rtol=1e-3, atol=1e-3)  # `half` rounds the gradient


@pytest.mark.filterwarnings("ignore:aten.*reads the dequantized values")
def test_plain_modules_multiply_with_the_values_of_a_quantized_weight():
    x = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
    plain, table = nn.Linear(64, 64, dtype=torch.bfloat16), nn.Embedding(64, 64)
    weight = linear().weight
    for multiply in (lambda: plain(x), lambda: x @ plain.weight, lambda: table(torch.tensor([1]))):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            results = []
            for plain.weight in (weight, nn.Parameter(weight.dequantize())):
                table.weight = plain.weight
                with mode():
                    results.append(multiply())
            assert same(*results)
