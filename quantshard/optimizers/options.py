"""Validation of the values in an optimizer's groups, which can be set between steps.

Values that pass cannot make a weight infinite by themselves: an update is at most about 10 learning rates
(`adam.largest_ratio`), and weight decay at most flips the sign of a weight.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor

from quantshard.errors import ConfigurationError, warn_user
from quantshard.numerics.adam import largest_ratio
from quantshard.numerics.muon import RATE_FACTORS
from quantshard.numerics.states import EMA_DECAY
from quantshard.optimizers.guards import LARGEST_RATE
from quantshard.presets import STATE_ARGUMENTS

_SMALLEST_EPS = 2.0**-126
"""Smallest eps for Muon, whose matrices are bfloat16: smaller values are zero on some GPUs."""

LARGEST_DECAY = 1e9
"""Largest weight decay that is added to the gradient, whose square must be finite."""


def check_adam(where: str, group: Mapping[str, Any], ratio_matters: bool = False, reads_rate: bool = True) -> None:
    """Validate the values of an Adam group.

    `where`: start of the messages. `ratio_matters`: updates must be bounded by `adam.largest_ratio`, because of the
    moments' dtypes. `reads_rate`: False if reading the learning rate would wait for a device.

    Raises:
        ConfigurationError: a value is invalid, or would make weights infinite.
    """
    beta1, beta2 = betas(where, group["betas"])
    if ratio_matters and largest_ratio(beta1, beta2) == math.inf:
        raise ConfigurationError(
            f"{where}(betas={(beta1, beta2)}): with beta1**2 >= beta2 there is no bound on an update, and "
            "exp_avg_dtype is so much coarser than exp_avg_sq_dtype that it needs one; choose a larger beta2, or the "
            "same dtype"
        )
    _check_number(where, "eps", group["eps"])
    check_rate_and_decay(where, group, group["adam_w_mode"], reads_rate)


def check_lion(where: str, group: Mapping[str, Any], reads_rate: bool = True) -> None:
    """Validate the values of a Lion group; arguments and errors as in `check_adam`."""
    betas(where, group["betas"], "with 1 no gradient would count")
    check_rate_and_decay(where, group, True, reads_rate)


def check_muon(where: str, group: Mapping[str, Any], reads_rate: bool = True) -> None:
    """Validate the values of a "muon" group; arguments and errors as in `check_adam`."""
    check_rate_and_decay(where, group, True, reads_rate)
    for name in ("momentum", "eps"):
        _check_number(where, name, group[name])
    if float(group["momentum"]) >= 1:
        raise ConfigurationError(f"{where}(momentum={group['momentum']}): with 1 or more no gradient would count")
    if float(group["eps"]) < _SMALLEST_EPS:
        raise ConfigurationError(
            f"{where}(eps={group['eps']}): use {_SMALLEST_EPS:g} or more, or a matrix of zeros would become NaN"
        )
    check_flags(where, nesterov=group["nesterov"])
    coefficients, steps, adjusts = group["ns_coefficients"], group["ns_steps"], group["adjust_lr_fn"]
    try:
        a, b, c = map(float, coefficients)
        is_finite = all(map(math.isfinite, (a, b, c)))
    except (TypeError, ValueError):
        is_finite = False
    if not is_finite:
        raise ConfigurationError(f"{where}(ns_coefficients={coefficients}): give three finite numbers, a, b and c")
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 < steps < 100:
        raise ConfigurationError(f"{where}(ns_steps={steps!r}): it must be a whole number from 1 to 99; 5 is usual")
    if adjusts is not None and adjusts not in tuple(RATE_FACTORS):
        raise ConfigurationError(f"{where}(adjust_lr_fn={adjusts!r}): use one of {', '.join(RATE_FACTORS)}, or None")


def check_rate_and_decay(where: str, group: Mapping[str, Any], decoupled: bool, reads_rate: bool = True) -> None:
    """Validate the learning rate and weight decay of a group. `decoupled`: the decay applies to the weight itself.

    Raises:
        ConfigurationError: a value is invalid, or would make weights infinite.
    """
    for name in ("lr", "weight_decay") if reads_rate else ("weight_decay",):
        _check_number(where, name, group[name])
    lr, decay = float(group["lr"]) if reads_rate else 0.0, float(group["weight_decay"])
    if decay > LARGEST_DECAY:
        raise ConfigurationError(f"{where}(weight_decay={decay}): more than {LARGEST_DECAY:g} overflows float32")
    if decoupled and lr * decay > 2:
        raise ConfigurationError(
            f"{where}(lr={lr}, weight_decay={decay}): a step would multiply weights by 1 - lr * weight_decay = "
            f"{1 - lr * decay:g}, until they are infinite; lower one of them"
        )


def betas(where: str, given: Any, with_one: str = "with 1 the bias correction divides by zero") -> tuple[float, float]:
    """Return two betas as numbers. `with_one`: what would go wrong with 1, for messages.

    Raises:
        ConfigurationError: they are not two numbers that are at least 0 and, in float32, less than 1.
    """
    try:
        beta1, beta2 = (_number(where, "betas", value) for value in given)
    except ConfigurationError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{where}(betas={given}): give two numbers, of the first and the second moment"
        ) from error
    for beta in (beta1, beta2):
        if not 0 <= beta < 1 - 2.0**-25:  # larger values round to 1 in float32
            raise ConfigurationError(
                f"{where}(betas={(beta1, beta2)}): each must be 0 or more and, in float32, less than 1; {with_one}"
            )
    return beta1, beta2


def check_decay(where: str, decay: Any) -> None:
    """Validate the decay of an average of weights.

    Raises:
        ConfigurationError: the decay is invalid.
    """
    number = _number(where, EMA_DECAY, decay)
    if not 0 <= number < 1 - 2.0**-25:  # larger values round to 1 in float32
        raise ConfigurationError(
            f"{where}({EMA_DECAY}={number}): it must be 0 or more and, in float32, less than 1: each step leaves this "
            "share of the average as it is; 0.999 is usual"
        )


def check_group_decay(optimizer: str, group: Mapping[str, Any], is_averaging: bool) -> None:
    """Check that a group sets no average decay if the optimizer keeps no averages.

    Raises:
        ConfigurationError: it does.
    """
    if group.get(EMA_DECAY) and not is_averaging:
        raise ConfigurationError(
            f"{optimizer}: a group has {EMA_DECAY} = {group[EMA_DECAY]}, and the optimizer keeps no averages; give "
            f"{optimizer}({EMA_DECAY}=...), which a group may then set to another"
        )


_SWITCHES = ("capturable", "amsgrad", "maximize", "differentiable")
_NAMES_OF_OTHERS = {"learning_rate": "lr", "epsilon": "eps", "wd": "weight_decay"}
"""Names of options in other libraries."""
_OTHERS = ("momentum", "dampening", "nesterov")
"""Entries that change updates of other optimizers. Wrappers that share groups between optimizers do not use them."""


def check_no_states(optimizer: type, group: Mapping[str, Any], inner: Collection[str] | None = None) -> None:
    """Check that a group has no option for masters, states or the whole optimizer, which would have no effect.

    Such switches are allowed if they are off, because PyTorch's optimizers put them into groups. `inner`: options of
    the inner optimizer, if the groups belong to one.

    Raises:
        ConfigurationError: a group has such an option.
    """
    names = (
        (*STATE_ARGUMENTS, *_SWITCHES)
        if inner is None
        else [option for option in STATE_ARGUMENTS if option not in inner]
    )
    for name in names:
        if name in group and (name not in _SWITCHES or group[name]):
            owner, parameters = optimizer.__name__, inspect.signature(optimizer).parameters
            raise ConfigurationError(
                f"{owner}: a group has {name} = {group[name]!r}, which is "
                + (
                    f"an option of the whole optimizer; give {owner}({name}=...), or build one optimizer for each"
                    if name in parameters
                    else f"no option of {owner}, whose groups are kept and stepped alike; leave it out"
                )
            )


def check_flags(where: str, **flags: Any) -> None:
    """Check that arguments are True or False (or 1 or 0). Any string, even "no", would count as true.

    Raises:
        ConfigurationError: an argument is something else.
    """
    for name, flag in flags.items():
        if isinstance(flag, Tensor) or flag not in (True, False):
            raise ConfigurationError(f"{where}({name}={flag!r}): it must be True or False")


def warn_of_typos(where: str, group: Mapping[str, Any], known: Collection[str], counters: Collection[str]) -> None:
    """Warn about a group entry that looks like a misspelled option or is an option of another optimizer.

    Other unknown entries can be the user's own. `counters`: known entries that the optimizer sets itself.
    """
    for name in group.keys() - {*known, "params"}:
        alias = _NAMES_OF_OTHERS.get(name)
        suggestions = [alias] if alias in known else get_close_matches(name, set(known) - set(counters), 1, cutoff=0.8)
        if suggestions:
            warn_user(f"{where}: a group has {name!r}, which does nothing; did you mean {suggestions[0]!r}?")
        elif name in _OTHERS and isinstance(group[name], int | float) and group[name]:
            warn_user(
                f"{where}: a group has {name} = {group[name]!r}, an option of other optimizers, which does nothing"
            )


def check_any(where: str, group: Mapping[str, Any], signed: bool = True) -> None:
    """Validate the values of a group of an arbitrary optimizer. `signed`: the learning rate and weight decay can be
    negative.

    Raises:
        ConfigurationError: a value is NaN, or the learning rate or weight decay is infinite or too large.
    """
    for name, value in group.items():
        if name in ("lr", "weight_decay") and isinstance(value, str):
            _number(where, name, value)
        if not isinstance(value, int | float | Tensor) or (isinstance(value, Tensor) and value.device.type != "cpu"):
            continue  # reading it would wait for the device
        if name in ("lr", "weight_decay"):
            _check_number(where, name, abs(float(value)) if signed else float(value))
        elif isinstance(value, float) and math.isnan(value):
            raise ConfigurationError(f"{where}({name}={value}): it must be a number")


def _number(where: str, name: str, value: Any) -> float:
    """Return a number as float. Strings of digits are refused, because LR schedulers multiply the value."""
    hint = ""
    try:
        number = float(value)
        if not isinstance(value, str):
            return number
        hint = "; YAML reads 1e-3 as text, and 1.0e-3 as a number"
    except (TypeError, ValueError):
        pass
    raise ConfigurationError(f"{where}({name}={value!r}): it must be a number{hint}")


def _check_number(where: str, name: str, value: Any) -> None:
    number = _number(where, name, value)
    if not 0 <= number < math.inf:
        raise ConfigurationError(f"{where}({name}={number}): it must be a finite number, 0 or more")
    if name == "lr" and number > LARGEST_RATE:
        raise ConfigurationError(
            f"{where}(lr={number}): an update is up to some ten of these, which would make weights infinite; use less "
            f"than {LARGEST_RATE:g}"
        )
