"""Lion: its bits are those of a plain float32 Lion, and what its options are is `FusedAdam`'s."""

import pytest
import torch
from torch import nn

from quantshard import Linear, quantized_model_init
from quantshard.errors import ConfigurationError
from quantshard.optimizers import Lion
from tests.distributed.models import bits, set_gradients
from tests.tensor.test_tensor import contents, differing, random, same

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
B1, B2 = (torch.tensor(beta, dtype=torch.float32).item() for beta in SETTINGS["betas"])


def stepped(p, m, grad):
    """Algorithm 2 of arXiv:2302.06675, of plain float32 tensors."""
    p = p - 1e-2 * ((B1 * m + (1 - B1) * grad).sign() + 0.1 * p)
    return p, B2 * m + (1 - B2) * grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=["fp32", "fp8"])
@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_masters_follow_lion_exactly(recipe, dtype):
    with quantized_model_init(recipe=recipe):
        model = Linear(150, 70, params_dtype=torch.bfloat16)  # of which the bias is no matrix: its states stay float32
    optimizer, twin = Lion(model.parameters(), **SETTINGS, exp_avg_dtype=dtype), model.weight.detach().clone()
    p = [optimizer.state[q]["master_param"].clone() for q in model.parameters()]
    m = [torch.zeros_like(x) for x in p]
    for step in range(4):
        set_gradients(model, step)
        m[0] = optimizer.get_unscaled_state(model.weight, "exp_avg").clone()  # of fewer bits, it is rounded
        for i, q in enumerate(model.parameters()):
            p[i], m[i] = stepped(p[i], m[i], q.grad.float())
        optimizer.step()
        twin.quantize_(p[0])
        assert all(same(optimizer.state[q]["master_param"], x) for q, x in zip(model.parameters(), p, strict=True))
        assert same(optimizer.state[model.bias]["exp_avg"], m[1])
        assert dtype is not torch.float32 or same(optimizer.state[model.weight]["exp_avg"], m[0])
        assert not differing(contents(model.weight), contents(twin)) and same(model.bias.data, p[1].bfloat16())


def test_float32_parameters_need_no_master():
    param, p, m = nn.Parameter(random(7, 5)), None, torch.zeros(7, 5)
    p, optimizer = param.detach().clone(), Lion([param], **SETTINGS)
    for step in range(3):
        param.grad = random(7, 5, seed=step) * (step != 1)  # the sign of 0 is 0, of a mean that began with it
        p, m = stepped(p, m, param.grad)
        optimizer.step()
        assert same(param.data, p) and list(optimizer.state[param]) == ["exp_avg"]


def trained(**options):
    torch.manual_seed(1)
    with quantized_model_init(recipe="mxfp8"):
        model = Linear(150, 70, params_dtype=torch.bfloat16)
    optimizer = Lion(model.named_parameters(), **SETTINGS, **options)
    for step in range(4):
        set_gradients(model, step)
        if step == 2:
            model.weight.grad[3] = torch.inf
        optimizer.step()
    assert optimizer.skipped_steps == 1
    return model, optimizer


def test_a_step_from_which_nothing_is_read_has_the_same_bits():
    options = {"exp_avg_dtype": torch.uint8, "master_weight_dtype": torch.bfloat16}
    assert bits(*trained(**options)) == bits(*trained(capturable=True, **options))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "at least 0"),
        ({"betas": (0.9, 1.0)}, "less than 1"),
        ({"exp_avg_dtype": torch.int8}, r"Lion\(exp_avg_dtype=torch.int8\)"),
    ],
)
def test_numbers_that_make_no_step_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        Lion([nn.Parameter(random(4, 4))], **settings)
