"""Multi-tensor Adam gives the bits of the oracle: `adam`, `rounding` and `numerics`, for everything that is stored."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from quantshard import formats, numerics, sharding
from quantshard.collectives.flat_max import FlatMax
from quantshard.formats import Scaling
from quantshard.kernels.optimizer import multi_tensor
from quantshard.kernels.optimizer.formulas import quotient_by_root
from quantshard.kernels.optimizer.parameters import StepPasses, passes_of
from quantshard.kernels.optimizer.plan import StepLaunchPlan, settings_row
from quantshard.kernels.optimizer.stored import MatrixRegion, PlainTensor, ScaledTensor, StepParameter
from quantshard.numerics.adam import Bound, Hyperparameters, adam
from quantshard.numerics.states import StateKind
from quantshard.optimizers.state import round_to
from quantshard.recipe import QuantSpec
from quantshard.state_storage import state_quant_spec
from quantshard.tensor import storage as storages
from quantshard.tensor.parameter_state import AMAX_HISTORY, WEIGHT_STREAM
from quantshard.tensor.requantize import Requantization
from quantshard.tensor.storage import QuantizedStorage
from tests.covering import exhaustive

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of overflows, in the interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED = -987654321987654321
KEY = 123456789123456789
DRAW = 5

ROLES = ("exp_avg", "exp_avg_sq", "master_param", "param")
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
DELAYED = Scaling(history=4)
CELLS = {
    "delayed": QuantSpec(formats.FP8_E4M3, DELAYED),
    "newest": QuantSpec(formats.FP8_E4M3, replace(DELAYED, most_recent=True, margin=1)),
    "current": QuantSpec(formats.FP8_E4M3),
    "e5m2": QuantSpec(formats.FP8_E5M2, Scaling(power_of_two=True)),
    "block": QuantSpec(formats.FP8_128X128, Scaling(power_of_two=True, epsilon=1e-6)),
    "rowwise": QuantSpec(formats.FP8_1XROW),
    "mxfp8": QuantSpec(formats.MXFP8_32X32),
    "mxfp8_both": QuantSpec(formats.MXFP8_BOTH),
    "mxfp4": QuantSpec(formats.MXFP4_32X32),
    "nvfp4": QuantSpec(formats.NVFP4_16X16),
    "nvfp4_both": QuantSpec(formats.NVFP4_BOTH),
}

HYPER = Hyperparameters(3, 0.01, 0.9, 0.999, 1e-8, 0.1, True, True)


@triton.jit
def quotient_kernel(a, b, c, written, asked, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(written + at, quotient_by_root(x, y, c))
    tl.store(asked + at, tl.div_rn(x, tl.sqrt_rn(y) + c))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter does not run what is written out in PTX")
@pytest.mark.parametrize("c", [0.0, 1e-8, 1.0, 3e20, -1e-3])
def test_root_and_quotient_have_the_bits_of_the_instructions(c):
    """Of any bits; and of fours that all lie where one check lets them through."""
    size, generator = 1 << 24, torch.Generator(DEVICE).manual_seed(0)
    for low, high in ((0, 1 << 31), ((127 - 59) << 23, (127 + 59) << 23)):
        drawn = torch.randint(low, high, (2, size), generator=generator, device=DEVICE).to(torch.int32)
        a, b = drawn.view(torch.float32)
        a[::2] *= -1
        written, asked = torch.empty_like(a), torch.empty_like(a)
        quotient_kernel[(size // 1024,)](a, b, c, written, asked, 1024, enable_fp_fusion=False)
        same = (written.view(torch.int32) == asked.view(torch.int32)) | (written.isnan() & asked.isnan())
        assert bool(same.all()), (c, a[~same][:3], b[~same][:3])


def settings(**changes):
    return replace(HYPER, **changes)


@dataclass
class Thing:
    """One state or weight, for the oracle and for the kernel alike: plain, a low half, or in components."""

    plain: Tensor | None = None
    storage: QuantizedStorage | None = None
    shared: frozenset = frozenset()

    def clone(self):
        return Thing(
            None if self.plain is None else self.plain.clone(),
            None if self.storage is None else self.storage.clone(),
            self.shared,
        )

    def live(self):
        if self.plain is not None:
            return [self.plain]
        history = self.storage.state.get(AMAX_HISTORY)
        return [*self.storage.components.values(), *([] if history is None else [history])]

    def read(self):
        return self.plain.float() if self.storage is None else self.storage.dequantize()

    def for_plan(self):
        if self.storage is None:
            is_low = self.plain.dtype is torch.int16
            return PlainTensor(self.plain, StateKind.REMAINDER if is_low else StateKind.PLAIN)
        s = self.storage
        return ScaledTensor(
            s.spec.format, s.spec.scaling, s.shard, s.components, s.state.get(AMAX_HISTORY), self.shared
        )


def values_of(shape, spread=3.0):
    x = torch.randn(shape) * torch.exp(torch.randn(shape) * spread)
    if x.numel() > 3:
        x.view(-1)[:4] = torch.tensor([0.0, -0.0, 1e-40, -2.0])
    return x


def make(kind, shard, values, nonnegative=False):
    """A thing of this kind that holds the values, rounded to nearest."""
    if kind in FLOATS:
        return Thing(values.to(FLOATS[kind]).to(DEVICE))
    cell = CELLS.get(kind) or state_quant_spec(STATES[kind], nonnegative)
    history = torch.zeros(cell.scaling.history, device=DEVICE)
    storage = storages.empty(cell, shard, DEVICE, {AMAX_HISTORY: history} if cell.scaling.history else {})
    storage = storage.map(torch.zero_)
    if values.numel():
        Requantization(storage, values.to(DEVICE), {}, FlatMax()).commit(values.to(DEVICE))
    return Thing(storage=storage)


@dataclass
class Case:
    """A parameter, its gradient, and the amaxes that other ranks are taken to have."""

    weight: Thing
    exp_avg: Thing
    exp_avg_sq: Thing
    master: Thing | None
    rectangle: MatrixRegion
    grad: Tensor | None
    stream: int = 0
    group: int = 0
    kinds: tuple[str, str] = ("float32", "float32")

    @property
    def bound(self):
        """A first moment that alone, or more so, shares a scale is kept within what the second allows."""
        if self.kinds[0] not in ("fp8", "fp16"):
            return Bound.NONE
        ratio = {("fp8", "fp16"), *itertools.product(("fp8", "fp16"), ("bfloat16", "float32"))}
        return Bound.RATIO if self.kinds in ratio else Bound.UPDATE

    def parameter(self):
        stored = {role: thing.for_plan() for role, thing in self.things().items()}
        return StepParameter(stored, self.rectangle, self.group, self.stream, KEY, WEIGHT_STREAM, self.bound)

    def things(self):
        held = zip(ROLES, (self.exp_avg, self.exp_avg_sq, self.master, self.weight), strict=True)
        return {role: thing for role, thing in held if thing is not None}

    def clone(self):
        fields = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "master_param": "master", "param": "weight"}
        return replace(self, **{fields[role]: thing.clone() for role, thing in self.things().items()})

    def words(self, key, draw, stream):
        rectangle = self.rectangle
        words = numerics.random_words(
            key, draw, stream, rectangle.global_shape, rectangle.origin, rectangle.shape, device=DEVICE
        )
        return words

    def oracle(self, h, others):
        """What `optimizers.kernel_step.ParameterStep` does."""
        if self.grad is None:
            return
        low = self.master is not None and self.master.plain is not None and self.master.plain.dtype is torch.int16
        source = self.weight if self.master is None else self.master
        master = numerics.join_bfloat16(self.weight.plain, self.master.plain) if low else source.read()
        new = adam(self.grad, master, self.exp_avg.read(), self.exp_avg_sq.read(), h, self.bound)
        if low:
            for target, half in zip(
                (self.weight.plain, self.master.plain), numerics.split_bfloat16(new.master), strict=True
            ):
                target.copy_(half)
        values = dict(zip(ROLES, (new.exp_avg, new.exp_avg_sq, new.master, new.master), strict=True))
        for role, thing in self.things().items():
            if low and role in ("master_param", "param"):
                continue
            swapped = role == "exp_avg_sq"  # the words of the first moment, halves exchanged
            stream = self.stream + ROLES.index("exp_avg" if swapped else role)
            words = self.words(SEED, h.step, stream)
            words = words >> 16 | (words & 0xFFFF) << 16 if swapped else words
            if role == "param":
                words = None if self.master is not None else words
                if self.master is None and thing.storage is not None:
                    words = self.words(KEY, DRAW, WEIGHT_STREAM)
            self.write(thing, values[role], words, role == "exp_avg_sq", others.get(role, {}))

    def write(self, thing, values, words, keep_positive, others):
        if thing.storage is None:
            new = round_to(values, thing.plain.dtype, words)
            if keep_positive and thing.plain.dtype is torch.bfloat16:
                new.masked_fill_((new == 0) & (values > 0), 2.0**-133)
            thing.plain.copy_(new)
            return
        begun = Requantization(thing.storage, values, {}, FlatMax())
        for name, amaxes in others.items():
            begun.amaxes[name] = torch.maximum(begun.amaxes[name], amaxes)
        begun.commit(values, words)
        if keep_positive:
            for copy in thing.storage.spec.format.copies.values():
                codes = thing.storage.components[copy.codes.name]
                bits = codes.view(torch.uint8 if codes.itemsize == 1 else torch.int16)
                bits.masked_fill_((bits == 0) & (values > 0), 1)


def case(weight, moments="float32", master="float32", shape=(5, 7), *, second=None, grad_dtype=torch.bfloat16,
         cut=None, stream=4, group=0):  # fmt: skip
    """`cut`: (global shape, origin) of a rectangle of `shape`."""
    global_shape, origin = cut or (shape, (0, 0))
    extents = tuple((o, o + n) for o, n in zip(origin, shape, strict=True))
    shard = sharding.Shard(global_shape, extents)
    values = values_of(shape)
    made = make(weight, shard, values)
    if master == "low":
        held = Thing(numerics.split_bfloat16(values)[1].to(DEVICE))
        made.plain.copy_(numerics.split_bfloat16(values)[0])
    else:
        held = None if master is None else make(master, shard, values)
    squares = make(second or moments, shard, values_of(shape, 8).abs(), nonnegative=True)
    return Case(
        made, make(moments, shard, values_of(shape, 4)), squares, held,
        MatrixRegion(global_shape, origin, shape), values_of(shape).clamp(-1e18, 1e18).to(grad_dtype).to(DEVICE),
        stream, group, (moments, second or moments),
    )  # fmt: skip


def step(plan, cases, groups, skip=None, others=None):
    plan.take(
        [c.grad for c in cases],
        [settings_row(group, group.step, 0.0) for group in groups],
        SEED,
        [DRAW] * len(cases),
    )
    plan.update(skip)
    for (number, role, component), amaxes in plan.amaxes.items():
        found = (others or {}).get((number, role), {}).get(component)
        if found is not None:
            amaxes.copy_(torch.maximum(amaxes, found))
    plan.finish()


def bits(tensor):
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_equal(found, expected):
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        for role, thing in a.things().items():
            for x, y in zip(thing.live(), b.things()[role].live(), strict=True):
                same = (bits(x) == bits(y)) | (x.isnan() & y.isnan())
                assert bool(same.all()), (number, role, tuple(x.shape), x[~same][:5], y[~same][:5], int((~same).sum()))


def check(*cases, groups=(HYPER,), others=None, steps=1):
    torch.manual_seed(0)
    expected = [c.clone() for c in cases]
    plan = StepLaunchPlan([c.parameter() for c in cases], len(groups), torch.device(DEVICE))
    for number in range(steps):
        now = [replace(h, step=h.step + number) for h in groups]
        for n, c in enumerate(expected):
            c.oracle(now[c.group], {role: grids for (m, role), grids in (others or {}).items() if m == n})
        step(plan, cases, now, others=others)
    assert_equal(cases, expected)
    return plan


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("weight", CELLS)
def test_quantized_weights_with_float32_states(weight):
    check(case(weight, shape=(2, 6)))


@pytest.mark.parametrize("weight", ["delayed", "block", "mxfp8_both", "nvfp4"])
def test_tiles_of_several_blocks(weight):
    check(case(weight, shape=(34, 130), grad_dtype=torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    "weight",
    exhaustive([(w,) for w in ("delayed", "current", "block", "mxfp8_both", "nvfp4")], [("mxfp8_both",)]),
)
def test_many_tiles(weight):
    check(case(weight, shape=(5, 34)), case(weight, shape=(131, 257), grad_dtype=torch.float16), steps=2)


WIDE = {
    512: ((5, 416), None),
    256: ((9, 240), None),
    128: ((3, 416), ((7, 1024), (2, 448))),
}
"""By the columns of its tiles the shape of a part, and the matrix and place where it is cut from one."""


WIDE_CASES = [
    ("delayed", "fp8", "fp8", "float32"), ("current", "fp8", "bfloat16", "fp16"), ("rowwise", "fp16", "fp16", None),
    ("bfloat16", "fp8", "fp8", "low"), ("newest", "fp8", "fp8", "bfloat16"),
]  # fmt: skip


# tests/optimizers/test_on_kernels.py has the wide tiles of a preset
@pytest.mark.exhaustive
@pytest.mark.parametrize("weight, moments, second, master", WIDE_CASES)
def test_wide_tiles_of_scaled_states(weight, moments, second, master):
    """As many columns as the part fills; and where tiles begin at columns of the whole matrix."""
    cases = [case(weight, moments, master, shape, second=second, cut=cut) for shape, cut in WIDE.values()]
    plan = check(*cases, steps=2)
    widths = {number: launch.config.cols for launch in plan._first for number in launch.members}
    assert [widths[number] for number in range(len(cases))] == [*WIDE]
    cut = case(weight, moments, master, (34, 2640), second=second, cut=((40, 3072), (3, 432)))  # in 6 x 2 tiles of 512
    assert {launch.config.cols for launch in check(cut)._first} == {512}


def test_an_empty_shard_of_wide_tiles():
    check(case("delayed", "fp8", shape=(0, 512), cut=((4, 512), (4, 0))), case("delayed", "fp8", shape=(3, 512)))


@pytest.mark.parametrize(
    "weight, moments", [("block", "fp8"), ("mxfp8_both", "fp8"), ("nvfp4", "fp16"), ("delayed", "float32")]
)
def test_tiles_with_blocks_of_several_rows_or_no_scaled_states_are_narrow(weight, moments):
    plan = check(case(weight, moments, shape=(17, 512)))
    assert {launch.config.cols for launch in plan._first} == {128}


STATES_AND_MASTERS = [
    ("bfloat16", "fp8", "bfloat16"), ("fp16", "fp16", "fp16"), ("fp8", "bfloat16", None), ("fp8", "fp8", "float32"),
]  # fmt: skip


@pytest.mark.parametrize("moments, second, master", STATES_AND_MASTERS)
def test_states_and_masters_of_fewer_bits(moments, second, master):
    check(case("mxfp8", moments, master, (5, 132), second=second))


@pytest.mark.parametrize("moments, second", [("fp8", "float32"), ("fp8", "fp16"), ("fp16", "bfloat16")])
def test_a_first_moment_that_is_kept_within_what_the_second_allows(moments, second):
    """And there are elements where it is not within it before."""
    c = case("mxfp8", moments, shape=(3, 132), second=second)
    outside = c.exp_avg.read().abs() > HYPER.largest_ratio * c.exp_avg_sq.read().sqrt()
    assert c.bound is Bound.RATIO and bool(outside.any())
    check(c, steps=2)


EVERY_STATE_AND_MASTER = [("current", *both) for both in itertools.product(STATES, ("bfloat16", "fp16", None))]
SOME = [cell for number, cell in enumerate(EVERY_STATE_AND_MASTER) if number % 2 == 0]
EVERY_STATE_AND_MASTER += [("block", "fp8", "bfloat16"), ("block", "bfloat16", "fp16"), ("block", "float32", None)]
SOME += [("block", "fp8", "bfloat16")]
"""Each state with one or two masters, each master with two states."""


@pytest.mark.slow
@pytest.mark.parametrize("weight, moments, master", exhaustive(EVERY_STATE_AND_MASTER, SOME))
def test_every_state_and_master(weight, moments, master):
    check(case(weight, moments, master, (5, 132)), steps=2)


@pytest.mark.parametrize("weight, master, moments, shape", [
    ("float32", None, "bfloat16", (1, 1)), ("bfloat16", "float32", "float32", (1, 4099)),
    ("bfloat16", "low", "bfloat16", (3, 6)), ("bfloat16", None, "fp8", (2, 5)), ("float16", "float32", "fp16", (2, 5)),
    ("float16", None, "float32", (2, 5)), ("bfloat16", "float32", "float32", (0, 5)),
])  # fmt: skip
def test_plain_weights(weight, master, moments, shape):
    check(case(weight, moments, master, shape))


@pytest.mark.parametrize("weight", ["delayed", "mxfp8_both", "nvfp4_both", "rowwise", "block"])
def test_quantized_weights_without_masters(weight):
    check(case(weight, master=None, shape=(4, 34)))


CUTS = [
    ("block", "fp8", "float32", (150, 290), (125, 131), (6, 9)),
    ("mxfp4", "float32", "float32", (40, 64), (17, 6), (9, 10)),
    ("nvfp4", "float32", "float32", (40, 64), (17, 6), (9, 10)),
    ("delayed", "fp16", "fp8", (9, 300), (2, 120), (5, 12)), ("mxfp8", "float32", None, (70, 70), (31, 33), (2, 5)),
    ("bfloat16", "float32", None, (1, 9001), (0, 4090), (1, 13)),
    ("bfloat16", "bfloat16", None, (7, 3), (5, 0), (1, 3)),
]  # fmt: skip


@pytest.mark.parametrize("weight, moments, master, global_shape, origin, shape", CUTS)
def test_rectangles_whose_blocks_other_ranks_share(weight, moments, master, global_shape, origin, shape):
    c = case(weight, moments, master, shape, cut=(global_shape, origin))
    others = {}
    for role, thing in c.things().items():
        if thing.storage is None:
            continue
        names = storages.scale_names(thing.storage.spec)
        thing.shared = frozenset(names)
        by_name = thing.storage.spec.format.by_name
        others[0, role] = {
            name: torch.rand(thing.storage.shard.component_shape(by_name[name]), device=DEVICE) * 1e3 for name in names
        }
    check(c, others=others)


def test_shared_blocks_are_measured_in_every_tile(monkeypatch):
    """Also where another tile has weights that are larger by far."""
    factors = iter([100.0])

    def values(shape, spread=3.0):
        x = torch.randn(shape)
        x[:, :128] *= next(factors, 1.0)
        return x

    monkeypatch.setitem(globals(), "values_of", values)
    c = case("nvfp4", "fp8", "fp16", (4, 256), second="fp8", cut=((8, 256), (0, 0)))
    c.weight.shared = frozenset(["scale_inv", "amax"])
    check(c)


def test_blocks_of_a_rectangle_that_nobody_shares():
    check(case("mxfp8", "float32", "float32", (6, 40), cut=((128, 200), (64, 32))))


def test_ways():
    out_grads = {weight: passes_of(case(weight).parameter()) for weight in CELLS}
    assert {weight for weight, way in out_grads.items() if way is StepPasses.ONCE} == {
        "delayed", "newest", "block", "mxfp8", "mxfp8_both", "mxfp4",
    }  # fmt: skip
    assert StepPasses.TWICE not in out_grads.values()
    assert passes_of(case("current", master="bfloat16").parameter()) is StepPasses.TWICE
    assert passes_of(case("delayed", master=None).parameter()) is StepPasses.TWICE


def test_groups_and_gradients_of_several_dtypes_and_none():
    groups = (
        settings(decoupled=False, lr=1.5), settings(weight_decay=0.0, bias_correction=False, beta1=0.5, step=70),
        settings(weight_decay=0.0, decoupled=False, eps=0.0),
    )  # fmt: skip
    cases = [
        case("bfloat16", shape=(2, 3), grad_dtype=dtype, group=group) for group, dtype in enumerate(FLOATS.values())
    ]
    missing = case("mxfp8_both", shape=(2, 3))
    missing.grad = None
    check(*cases, missing, groups=groups)


def test_a_skipped_step_changes_nothing():
    cases = [case(weight, "fp8", shape=(2, 3)) for weight in ("delayed", "current", "bfloat16")]
    before = [c.clone() for c in cases]
    plan = StepLaunchPlan([c.parameter() for c in cases], 1, torch.device(DEVICE))
    step(plan, cases, [HYPER], skip=torch.tensor(True, device=DEVICE))
    assert_equal(cases, before)
    step(plan, cases, [HYPER], skip=torch.tensor(False, device=DEVICE))
    for c in before:
        c.oracle(HYPER, {})
    assert_equal(cases, before)


@pytest.mark.parametrize("weight", ["block", "current"])
def test_gradients_that_are_not_finite(weight):
    c = case(weight, shape=(3, 20), grad_dtype=torch.float32)
    c.grad.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    check(c, groups=(settings(eps=0.0),))


def test_nothing_outside_of_a_tensor_counts():
    """There Adam makes NaN of zeros, if eps is zero."""
    cases = [case("block", shape=(2, 3)), case("current", shape=(2, 3))]
    for c in cases:
        c.grad.fill_(0.5)
    check(*cases, groups=(settings(eps=0.0),))
    assert all(bool(c.master.plain.isfinite().all()) for c in cases)


@pytest.mark.parametrize("master", ["float32", "low"])
def test_ties_of_bfloat16(master):
    c = case("bfloat16", "float32", master, (1, 2))
    high, low = numerics.split_bfloat16(torch.tensor([[1.0 + 2**-8, -1.0 - 2**-8]], device=DEVICE))
    c.weight.plain.copy_(high)
    c.master.plain.copy_(low if master == "low" else numerics.join_bfloat16(high, low))
    check(c, groups=(settings(lr=0.0),))


def test_large_values():
    cases = [case(weight, shape=(2, 3)) for weight in ("current", "mxfp8_both", "nvfp4", "bfloat16", "float16")]
    for c in cases:
        (c.master.plain if c.master else c.weight.plain).view(-1)[1:4] = torch.tensor([-3e38, 1e30, 448.0])
    check(*cases)


def test_a_history_without_amaxes():
    c = case("delayed", shape=(3, 5))
    c.weight.storage.state[AMAX_HISTORY].zero_()
    check(c)


def test_step_and_rate_on_the_device():
    host = [settings(step=1234567), settings(step=7, lr=0.5), settings(step=2, bias_correction=False)]
    device = [replace(h, step=torch.tensor(h.step, device=DEVICE), lr=torch.tensor(h.lr, device=DEVICE)) for h in host]
    cases = [case("bfloat16", "bfloat16", shape=(2, 3), group=group) for group in range(3)]
    again = [c.clone() for c in cases]
    for chosen, groups in ((cases, host), (again, device)):
        step(StepLaunchPlan([c.parameter() for c in chosen], 3, torch.device(DEVICE)), chosen, groups)
    assert_equal(cases, again)


def test_a_graph_that_was_replayed_leaves_its_own_table():
    """The next step brings all that it works with, also what it brought before."""
    device = settings(step=torch.tensor(1, device=DEVICE), lr=torch.tensor(0.5, device=DEVICE))
    c = case("bfloat16", shape=(2, 3))
    plan, expected = StepLaunchPlan([c.parameter()], 1, torch.device(DEVICE)), c.clone()
    for _ in range(2):
        step(plan, [c], [device])
        expected.oracle(device, {})
        plan._captured.append(plan._table.cpu())
        plan._table.zero_()
    assert_equal([c], [expected])


def test_gradients_in_any_layout():
    c = case("bfloat16", shape=(16, 32))
    expected = c.clone()
    expected.oracle(HYPER, {})
    c.grad = torch.cat([c.grad.t().flatten(), c.grad.new_zeros(9)])[:512].view(32, 16).t()
    step(StepLaunchPlan([c.parameter()], 1, torch.device(DEVICE)), [c], [HYPER])
    assert_equal([c], [expected])


def test_amaxes_of_many_tensors():
    tensors = [torch.randn(n, device=DEVICE).to(dtype) for n in (1, 70001, 0, 5) for dtype in FLOATS.values()]
    tensors[4][70000] = -99.0
    tensors += [
        torch.tensor([[1.0, float("nan")], [float("inf"), 0.0]], device=DEVICE),
        torch.randn(6, 5).to(DEVICE).t(),
    ]
    found = multi_tensor.exceeding(tensors, None)
    expected = [x.abs().amax().float() if x.numel() else torch.zeros((), device=DEVICE) for x in tensors]
    assert found.isnan().tolist() == [x.isnan().item() for x in expected]
    assert torch.equal(found.nan_to_num(), torch.stack(expected).nan_to_num())


def test_gradients_beyond_a_limit():
    values = [1e19, 1.1e19, float("inf"), float("nan"), -2e19, 0.0]
    tensors = [torch.tensor([0.0, value], device=DEVICE) for value in values]
    tensors += [torch.tensor([value], device=DEVICE, dtype=torch.float16) for value in (65504.0, float("inf"))]
    expected = [0.0, 1.0, 2.0, 2.0, 1.0, 0.0, 0.0, 2.0]
    assert multi_tensor.exceeding(tensors, 1e19).tolist() == expected
    # in bfloat16 the limit is rounded up, as a comparison in PyTorch does; the next number is beyond it
    tensors = [torch.tensor(value, device=DEVICE, dtype=torch.bfloat16) for value in (1.0016e19, 1.0087e19)]
    assert multi_tensor.exceeding(tensors, 1e19).tolist() == [numerics.exceeds(x, 1e19).item() for x in tensors]
    assert [numerics.exceeds(x, 1e19).item() for x in tensors] == [0.0, 1.0]
