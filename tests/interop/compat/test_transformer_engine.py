"""Scripts as users of TransformerEngine write them, with their imports changed and nothing else."""

import importlib
import inspect
import textwrap

import pytest
import torch

import quantshard as qs
import quantshard.compat.transformer_engine.pytorch as te
from quantshard import recipe
from quantshard.compat.transformer_engine.arguments import ARGUMENTS
from quantshard.compat.transformer_engine.common import recipe as te_recipe
from quantshard.errors import ConfigurationError

TE = "transformer_engine"
OURS = "quantshard.compat.transformer_engine"

QUICKSTART = """
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe
    from transformer_engine.common.recipe import DelayedScaling, Format

    fp8_recipe = recipe.DelayedScaling(
        margin=0, interval=1, fp8_format=recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max",
        scaling_factor_compute_algo=None, override_linear_precision=(False, False, False), reduce_amax=True,
    )
    assert fp8_recipe.delayed() and not fp8_recipe.mxfp8()
    model = te.Linear(48, 32, bias=True)
    inp = torch.randn(16, 48, device=device, requires_grad=True)
    with te.fp8_autocast(enabled=True, calibrating=False, fp8_recipe=fp8_recipe, fp8_group=None):
        out = model(inp, is_first_microbatch=True) + model(inp, is_first_microbatch=False)
    result = out
"""

LAYERS = """
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Format, MXFP8BlockScaling
    from transformer_engine.pytorch.attention import RotaryPositionEmbedding
    from transformer_engine.pytorch.distributed import checkpoint
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_model_init

    with fp8_model_init(enabled=True, recipe=MXFP8BlockScaling(margin=0, fp8_format=Format.E4M3)):
        assert FP8GlobalStateManager.with_fp8_parameters()
        model = te.TransformerLayer(
            64, 128, 4, layer_number=1, self_attn_mask_type="causal", tp_group=None, tp_size=1,
            params_dtype=torch.float32, get_rng_state_tracker=None, fuse_wgrad_accumulation=False, seq_length=8,
            micro_batch_size=2,
            sequence_parallel=False, apply_residual_connection_post_layernorm=False, layer_type="encoder",
            drop_path_rate=0.0, set_parallel_mode=False, fuse_qkv_params=True, ub_tp_comm_overlap=False,
            hidden_dropout=0.0, attention_dropout=0.0,
        )
    rope = RotaryPositionEmbedding(16)(8)
    x = torch.randn(8, 2, 64, device=device, requires_grad=True)
    assert not FP8GlobalStateManager.is_fp8_enabled()
    with te.fp8_autocast(fp8_recipe=MXFP8BlockScaling()):
        assert FP8GlobalStateManager.is_fp8_enabled() and FP8GlobalStateManager.get_fp8_recipe().mxfp8()
        result = checkpoint(
            model, x, attention_mask=None, rotary_pos_emb=rope.to(device), is_first_microbatch=None,
            distribute_saved_activations=False, tp_group=None, get_rng_state_tracker=None,
        )
"""

OPTIMIZER = """
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling, Format
    from transformer_engine.pytorch.optimizers import FusedAdam
    from transformer_engine.pytorch.tensor import QuantizedTensor

    recipe = Float8BlockScaling(fp8_format=Format.E4M3, x_block_scaling_dim=1, w_block_scaling_dim=2)
    with te.quantized_model_init(enabled=True, recipe=recipe, preserve_high_precision_init_val=True):
        model = te.LayerNormMLP(48, 96, ub_overlap_ag=False, device=device)
    optimizer = FusedAdam(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), master_weights=True, master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32, use_decoupled_grad=False,
        store_param_remainders=False,
    )
    for param in model.parameters():
        if isinstance(param, QuantizedTensor):
            optimizer.initialize_state(param, False)
            kept = param.get_high_precision_init_val()
            optimizer.set_scaled_state(param, "master_param", kept.to(param.device).float())
            param.clear_high_precision_init_val()
    before = model.fc1_weight.dequantize().clone()
    for step in range(3):
        with te.autocast(enabled=True, recipe=recipe):
            loss = model(torch.randn(16, 48, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model.fc1_weight.dequantize() != before).any()
    result = model(torch.randn(16, 48, device=device, requires_grad=True))
"""


def run(script: str, **names: object) -> torch.Tensor:
    space: dict[str, object] = {"device": "cuda" if torch.cuda.is_available() else "cpu", **names}
    exec(textwrap.dedent(script).replace(TE, OURS), space)  # texts of this file
    result = space["result"]
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.filterwarnings("ignore:.*an amax history was made in this forward")  # built outside of fp8_model_init
@pytest.mark.parametrize("script", [QUICKSTART, LAYERS, OPTIMIZER], ids=["quickstart", "layers", "optimizer"])
def test_scripts_run(script: str) -> None:
    torch.manual_seed(0)
    out = run(script)
    out.square().mean().backward()
    assert out.isfinite().all()


def test_fp8_autocast_is_autocast() -> None:
    """The same bits as by the new names; and high precision where it is off."""
    torch.manual_seed(0)
    layer = te.Linear(48, 32)
    x, found = torch.randn(7, 48, device=layer.weight.device), {}
    for name in ("mxfp8", "current"):
        with te.fp8_autocast(enabled=True, fp8_recipe=name):
            old = layer(x)
        with qs.autocast(recipe=name):
            found[name] = layer(x)
        assert torch.equal(old, found[name])
    assert not torch.equal(found["mxfp8"], found["current"])
    with te.fp8_autocast(enabled=False, fp8_recipe="mxfp8"):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    with pytest.raises(ConfigurationError, match="_graph"):
        te.fp8_autocast(_graph=True)
    with pytest.raises(ConfigurationError, match="calibrating=True"):
        te.autocast(calibrating=True)


def test_paths_hold_what_they_name() -> None:
    for path in ("", ".common", ".common.recipe", ".pytorch", *(f".pytorch.{n}" for n in te.__all__ if _is_module(n))):
        module = importlib.import_module(OURS + path)
        assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
    assert issubclass(te.Linear, qs.Linear) and te.optimizers.FusedAdam is qs.optimizers.FusedAdam
    assert type(te_recipe.MXFP8BlockScaling()) is recipe.MXFP8BlockScaling


def _is_module(name: str) -> bool:
    return inspect.ismodule(getattr(te, name)) and name != "recipe"


def test_names_that_are_not_here_say_what_to_use() -> None:
    assert not set(te.NOT_HERE) & set(te.__all__)
    for name, instead in te.NOT_HERE.items():
        assert not hasattr(te, name)
        with pytest.raises(AttributeError) as caught:
            getattr(te, name)
        assert name in str(caught.value) and instead in str(caught.value)
    with pytest.raises(AttributeError, match="no_such"):
        getattr(te, "no_such")  # noqa: B009
    with pytest.raises(ImportError):
        exec(f"from {OURS}.pytorch import moe_permute")


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "fp8_block_scaling", "nvfp4"])
def test_availability_is_that_of_native_products(name: str) -> None:
    available, reason = getattr(te, f"is_{name}_available")(return_reason=True)
    assert getattr(te, f"is_{name}_available")() is available
    assert getattr(te.quantization.FP8GlobalStateManager, f"is_{name}_available")() == (available, reason)
    assert available is (reason == "")
    if not torch.cuda.is_available():
        assert not available and "CPU" in reason
    assert te.is_bf16_available() and te.is_bf16_available(return_reason=True) == (True, "")


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in te_recipe.__all__ for name in ARGUMENTS.get(kind, {})]
)
def test_arguments_of_one_value(kind: str, name: str) -> None:
    """That value, and None, give the recipe without the argument; others are refused by name."""
    make = getattr(te_recipe, kind)
    plain = getattr(recipe, kind)()
    for value in (ARGUMENTS[kind][name].default, None):
        same = make(**{name: value})
        assert same == plain and hash(same) == hash(plain) and isinstance(same, make)
    if ARGUMENTS[kind][name].default:
        with pytest.raises(ConfigurationError, match=name):
            make(**{name: False})
    for other in (7, "other", te_recipe.MMParams(use_split_accumulator=False)):
        with pytest.raises(ConfigurationError, match=rf"{kind}\({name}="):
            make(**{name: other})


def test_formats_are_refused_where_they_are_not_those_of_the_recipe() -> None:
    formats = te_recipe.Format
    assert te_recipe.Float8BlockScaling(fp8_format=formats.E4M3) == te_recipe.Float8BlockScaling()
    assert te_recipe.NVFP4BlockScaling(fp4_format=formats.E2M1, fp8_format=formats.E4M3).nvfp4()
    refused = {
        te_recipe.DelayedScaling: formats.E5M2,
        te_recipe.Float8CurrentScaling: formats.E2M1,
        te_recipe.Float8BlockScaling: formats.HYBRID,
        te_recipe.MXFP8BlockScaling: formats.E5M2,
        te_recipe.NVFP4BlockScaling: formats.HYBRID,
    }
    for kind, other in refused.items():
        with pytest.raises(ConfigurationError, match="fp8_format"):
            kind(fp8_format=other)


def test_predicates_tell_recipes_apart() -> None:
    asked = ("delayed", "float8_current_scaling", "float8_block_scaling", "mxfp8", "nvfp4", "custom")
    answers = {name: [q for q in asked if getattr(recipe.resolve(name), q)()] for name in recipe.NAMES}
    assert answers == {
        "delayed": ["delayed"],
        "current": ["float8_current_scaling"],
        "tensorwise": ["float8_current_scaling"],
        "block": ["float8_block_scaling"],
        "blockwise": ["float8_block_scaling"],
        "rowwise": [],
        "mxfp8": ["mxfp8"],
        "nvfp4": ["nvfp4"],
        "fp8-weights": ["custom"],
        "mxfp8-weights": ["custom"],
        "nvfp4-weights": ["custom"],
        "bf16": [],
    }
    assert [name for name in recipe.NAMES if recipe.resolve(name).float8_per_tensor_scaling()] == [
        "delayed",
        "current",
        "tensorwise",
    ]
    assert recipe.TableRecipe("mine", {}).custom()
