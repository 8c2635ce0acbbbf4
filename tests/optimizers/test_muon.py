"""Muon in one process: beside `torch.optim.Muon`, beside a plain float32 oracle, its groups, and what it refuses."""

import math

import pytest
import torch
from torch import nn

from quantshard import Linear, quantized_model_init
from quantshard.errors import ConfigurationError, NonFiniteGradientError
from quantshard.numerics import muon
from quantshard.optimizers import FusedAdam, Muon, averaged_weights, muon_groups
from tests.distributed.models import bits, set_gradients
from tests.tensor.test_tensor import contents, differing, random, same

torch_muon = pytest.importorskip("torch.optim._muon")

SETTINGS = muon.MuonSettings(0.02, 0.95, True, 0.1, muon.COEFFICIENTS, 5, muon.EPS, "original")
SHAPES = [(70, 131), (131, 70), (1, 9), (9, 1), (64, 64), (200, 7)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 1e4])
def test_the_iteration_has_the_bits_of_pytorchs(shape, size):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * size
    expected = torch_muon._zeropower_via_newtonschulz(matrix.clone(), muon.COEFFICIENTS, 5, muon.EPS)
    assert same(muon.orthogonalized(matrix.bfloat16(), SETTINGS), expected)


def test_large_gradients_are_orthogonalized_and_zeros_stay():
    """Sums of squares of 1e19 overflow float32, and division by an infinite norm gives zeros, in silence."""
    matrix = torch.randn(30, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    for factor in (1.0, 2.0**60):
        values = torch.linalg.svdvals(muon.orthogonalized(matrix * factor, SETTINGS).float())
        assert 0.6 < values.min() and values.max() < 1.3
    assert not muon.orthogonalized(torch.zeros(3, 5, dtype=torch.bfloat16), SETTINGS).any()


def test_rates_of_shapes_are_pytorchs():
    for name in (*muon.RATE_FACTORS, None):
        for shape in SHAPES:
            settings = Muon([nn.Parameter(random(4, 4))], lr=0.02, adjust_lr_fn=name)
            [group] = settings.param_groups
            assert settings.settings(group).adjusted_lr(shape) == torch_muon._adjust_lr(0.02, name, shape)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(70, 131), (131, 40)], ids=str)
def test_it_follows_pytorchs_muon(shape, nesterov):
    """Within what torch.lerp's contracted products change, which round to another bfloat16 once in some 2^14 elements.

    So what is orthogonalized differs by about 2^-8 in these, 2^-15 of its norm, and the iteration multiplies that by at
    most a^5 < 2^9: an update differs by 2^-6 of its own norm.
    """
    param = nn.Parameter(random(*shape))
    twin = nn.Parameter(param.detach().clone())
    options = {"lr": 0.02, "nesterov": nesterov, "weight_decay": 0.1}
    ours, theirs = Muon([param], **options), torch.optim.Muon([twin], **options)
    assert list(ours.state[param]) == ["momentum_buffer"]
    for step in range(5):
        twin.data.copy_(param.data)
        before = param.detach().clone()
        param.grad = random(*shape, seed=step)
        twin.grad = param.grad.clone()
        ours.step()
        theirs.step()
        assert (param - twin).norm() <= 2.0**-6 * (param - before).norm()
        buffers = [optimizer.state[p]["momentum_buffer"] for optimizer, p in ((ours, param), (theirs, twin))]
        assert torch.allclose(*buffers, rtol=0, atol=2.0**-21 * param.grad.abs().max().item())


def stepped(p, m, grad):
    """One step of Jordan et al.'s, of plain float32 tensors."""
    m = m + (1 - 0.95) * (grad - m)
    update = m - (1 - 0.95) * (m - grad)
    direction = torch_muon._zeropower_via_newtonschulz(update.clone(), muon.COEFFICIENTS, 5, muon.EPS)
    factor = max(1, p.shape[0] / p.shape[1]) ** 0.5
    return p * (1 - 0.02 * 0.1) - 0.02 * factor * direction.float(), m


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=["fp32", "fp8"])
@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_masters_follow_it_exactly_and_adamw_is_fused_adam(recipe, dtype):
    def model():
        torch.manual_seed(4)
        with quantized_model_init(recipe=recipe):
            return nn.Sequential(Linear(70, 150, params_dtype=torch.bfloat16), nn.Embedding(9, 4))

    ours, theirs = model(), model()
    adamw = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = Muon(muon_groups(ours, head=(), adamw=adamw), lr=0.02, momentum_buffer_dtype=dtype)
    assert [group["param_names"] for group in optimizer.param_groups] == [["0.weight"], ["1.weight"], ["0.bias"]]
    pairs = [{"params": [theirs[1].weight]}, {"params": [theirs[0].bias], "weight_decay": 0.0}]
    adam = FusedAdam(pairs, **adamw)
    weight, twin = ours[0].weight, ours[0].weight.detach().clone()
    p, m = optimizer.state[weight]["master_param"].clone(), torch.zeros(150, 70)
    for step in range(4):
        for each in (ours, theirs):
            set_gradients(each, step)
        m = optimizer.get_unscaled_state(weight, "momentum_buffer").clone()  # of fewer bits, it is rounded
        p, m = stepped(p, m, weight.grad.float())
        optimizer.step()
        adam.step()
        twin.quantize_(p)
        assert same(optimizer.state[weight]["master_param"], p) and not differing(contents(weight), contents(twin))
        assert dtype is not torch.float32 or same(optimizer.state[weight]["momentum_buffer"], m)
        for one, other in ((ours[1].weight, theirs[1].weight), (ours[0].bias, theirs[0].bias)):
            assert same(one.data, other.data)
            held = adam.state[other]
            assert held.keys() == optimizer.state[one].keys()
            assert all(same(optimizer.state[one][name], value) for name, value in held.items())


def build(**options):
    torch.manual_seed(1)
    with quantized_model_init(recipe="mxfp8"):
        model = nn.Sequential(Linear(70, 50, params_dtype=torch.bfloat16), Linear(50, 9, params_dtype=torch.bfloat16))
    return model, Muon(muon_groups(model, head="1", adamw={"lr": 1e-3}), lr=0.02, **options)


@pytest.mark.parametrize("options", [{}, {"momentum_buffer_dtype": torch.bfloat16, "master_weights": False}])
def test_a_state_dict_goes_on_with_the_same_bits(options):
    """Random words belong to the step, so a copy that was built otherwise draws the same."""
    model, optimizer = build(**options)
    for step in range(2):
        set_gradients(model, step)
        optimizer.step()
    copy, other = build(**options)
    copy.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    for each, its in ((model, optimizer), (copy, other)):
        set_gradients(each, 2)
        its.step()
    assert bits(model, optimizer) == bits(copy, other)
    with pytest.raises(Exception, match="momentum_buffer"):
        build(momentum_buffer_dtype=torch.uint8)[1].load_state_dict(optimizer.state_dict())


def test_averages_and_parameters_without_a_gradient():
    model, optimizer = build(ema_decay=0.5)
    set_gradients(model, 0)
    optimizer.step()
    set_gradients(model, 1)
    weight = model[0].weight
    weight.grad, before = None, contents(weight)
    bias = model[0].bias.detach().clone()
    average = optimizer.get_unscaled_state(weight, "ema_param").clone()
    optimizer.step()
    assert not differing(before, contents(weight)) and not same(model[0].bias.data, bias)
    master = optimizer.state[weight]["master_param"]
    assert same(optimizer.get_unscaled_state(weight, "ema_param"), average + (0.5 / 0.75) * (master - average))
    with averaged_weights(model, optimizer):
        assert torch.isfinite(model(torch.ones(2, 70, dtype=torch.bfloat16))).all()


def test_steps_in_a_row_that_are_skipped_end_with_the_parameters_name():
    model, optimizer = build(max_skipped_in_a_row=2)
    set_gradients(model, 0)
    model[0].weight.grad[1, 2] = torch.nan
    optimizer.step()
    with pytest.raises(NonFiniteGradientError, match=r"first in 0\.weight"):
        optimizer.step()


@pytest.mark.parametrize(
    ("group", "options", "message"),
    [
        ({}, {"momentum": 1.0}, r"momentum=1\.0 must be finite, .* less than 1"),
        ({}, {"ns_steps": 100}, "use 1 to 99"),
        ({}, {"ns_coefficients": (1.0, 2.0, math.nan)}, "finite coefficients"),
        ({}, {"adjust_lr_fn": "moonshot"}, "use original, match_rms_adamw"),
        ({}, {"eps": 0.0}, r"eps=0\.0 is invalid"),
        ({}, {"lr": -1.0}, "at least 0"),
        ({}, {"momentum_buffer_dtype": torch.int8}, r"Muon\(momentum_buffer_dtype=torch.int8\)"),
        ({"algorithm": "adam"}, {}, "algorithm='adam'; use 'muon' or 'adamw'"),
        ({"betas": (0.9, 0.9)}, {}, "betas has no effect with algorithm='muon'"),
        ({"algorithm": "adamw", "lr": 1e-3, "ns_steps": 3}, {}, "ns_steps has no effect"),
        ({"algorithm": "adamw"}, {"lr": 0.02}, r"set lr; only adjust_lr_fn="),
        ({"algorithm": "adamw", "lr": 1e-3, "betas": (0.9, 1.0)}, {}, "less than 1"),
    ],
)
def test_what_makes_no_step_is_refused(group, options, message):
    with pytest.raises(ConfigurationError, match=message):
        Muon([{"params": [nn.Parameter(random(4, 4))], **group}], **options)


def test_what_is_no_matrix_is_refused_by_name():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Conv1d(8, 8, 3))
    with pytest.raises(
        ConfigurationError, match=r"not 2-D: 0\.weight \(8,\), .*1\.bias \(8,\); .* 5 such parameters .*muon_gro"
    ):
        Muon(model.named_parameters())
    with pytest.raises(ConfigurationError, match=r"not 2-D: parameter 1 \(8,\)"):
        Muon([model[1].weight, model[1].bias])
    optimizer = Muon([("weight", model[1].weight)], adjust_lr_fn="match_rms_adamw", lr=3e-4)
    with pytest.raises(ConfigurationError, match=r"param_groups\[1\]: not 2-D: parameter 0 \(8,\)"):
        optimizer.add_param_group({"params": [model[0].weight]})
    optimizer.add_param_group({"params": [("norm", model[0].weight)], "algorithm": "adamw"})
    assert optimizer.param_groups[1]["lr"] == 3e-4 and optimizer.param_groups[1]["eps"] == 1e-8
    assert list(optimizer.state[model[0].weight]) == ["exp_avg", "exp_avg_sq"]


class Decoder(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.positions = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.experts = nn.Parameter(torch.zeros(3, 8, 8))
        self.out = nn.Linear(8, 20, bias=False)
        if tied:
            self.out.weight = self.embed.weight


def names_of(groups):
    return [[name for name, _ in group["params"]] for group in groups]


def test_a_models_parameters_are_divided():
    with pytest.raises(ConfigurationError, match=r"'bets'.*use lr, betas, eps"):
        muon_groups(Decoder(), head="out", adamw={"bets": (0.9, 0.95)})
    groups = muon_groups(Decoder(), head="out", adamw={"lr": 3e-4, "weight_decay": 0.1})
    vectors = ["layers.0.bias", "layers.1.bias"]
    others = ["experts", "embed.weight", "positions.weight", "out.weight"]
    assert names_of(groups) == [["layers.0.weight", "layers.1.weight"], others, vectors]
    assert [group.get("weight_decay") for group in groups] == [None, 0.1, 0.0]
    tied = names_of(muon_groups(Decoder(tied=True)))
    assert tied == [["layers.0.weight", "layers.1.weight"], others[:3], vectors]
    patterns = names_of(muon_groups(Decoder(), head=["out.weight", "layers.*.weight"], adamw={"lr": 1e-3}))
    assert patterns == [[*others[:3], "layers.0.weight", "layers.1.weight", "out.weight"], vectors]
    of_transformers = Decoder()
    of_transformers.get_output_embeddings = lambda: of_transformers.out
    assert names_of(muon_groups(of_transformers))[1] == others


def test_a_head_that_is_not_known_is_asked_for():
    with pytest.raises(ConfigurationError, match=r"not known; name it, as head='out', or give head=\(\)"):
        muon_groups(Decoder())
    with pytest.raises(ConfigurationError, match=r"head='lm_head'\): no module or parameter has that name; .*experts"):
        muon_groups(Decoder(), head="lm_head")


def test_parameters_that_take_others_places_or_are_unfrozen_have_their_groups_states():
    model, optimizer = build()
    twin, _ = build()
    groups = zip(optimizer.param_groups, [["0.weight"], ["1.weight"], ["0.bias", "1.bias"]], strict=True)
    for group, names in groups:
        assert group["param_names"] == names
        group["params"][:] = [dict(twin.named_parameters())[name] for name in names]
    for step in range(2):  # as one that was built over the twin
        set_gradients(twin, step)
        optimizer.step()
        set_gradients(model, step)
        if step == 0:
            built_later = Muon(muon_groups(model, head="1", adamw={"lr": 1e-3}), lr=0.02)
        built_later.step()
    assert bits(twin, optimizer) == bits(model, built_later)

    frozen, _ = build()
    frozen.requires_grad_(False)
    optimizer = Muon(muon_groups(frozen, head="1", adamw={"lr": 1e-3}), lr=0.02)
    assert not optimizer.state
    for param in (frozen[0].weight, frozen[1].weight):
        param.requires_grad_(True)
        optimizer.initialize_state(param)
    assert [[*state] for state in optimizer.state.values()] == [
        ["momentum_buffer", "master_param"],
        ["exp_avg", "exp_avg_sq", "master_param"],
    ]
