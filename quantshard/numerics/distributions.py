"""Uniform and normal numbers from random words (`numerics.random_words`), with the same bits on every device.

Used for initial weights, which belong to the global element like the words do. Source: Wichura's AS241 (Applied
Statistics 37, 1988; normal quantiles).
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.numerics import in_chunks


def uniform(words: Tensor) -> Tensor:
    """Map words int64 in [0, 2**32) to float64 in (0, 1): exactly (word + 0.5) / 2**32, never 0 or 1, mean 1/2."""
    return (words.double() + 0.5) * 2.0**-32


# Wichura's AS241, PPND16: numerators and denominators, highest degree first. Its third region, |z| > 6.4, cannot occur:
# 0.5 / 2**32 has z = -6.34.
_CENTRE_NUMERATOR: Final = (
    *(2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457),
    *(13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080),
)
_CENTRE_DENOMINATOR: Final = (
    *(5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867),
    *(5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0),
)
_TAIL_NUMERATOR: Final = (
    *(7.7454501427834140764e-4, 0.022723844989269184583, 0.24178072517745061177, 1.2704582524523683826),
    *(3.6478483247632046050, 5.7694972214606914055, 4.6303378461565452959, 1.4234371107496835773),
)
_TAIL_DENOMINATOR: Final = (
    *(1.0507500716444168432e-9, 5.4759380849953449460e-4, 0.015198666563616457197, 0.14810397642748007459),
    *(0.68976733498510000455, 1.6763848301838038494, 2.0531916266377588219, 1.0),
)
_LN2_HIGH: Final = 0.693147180369123816490  # 33 bits, so its product with an exponent is exact (fdlibm)
_LN2_LOW: Final = 1.90821492927058770002e-10


def normal(words: Tensor) -> Tensor:
    """Map words int64 in [0, 2**32) to float32 standard normal numbers: the quantile of `uniform(words)`, rounded.
    AS241 in float64, from single exact operations, so the result is the same on every device. |z| is at most 6.34."""
    return in_chunks(lambda w: _normal_quantile(uniform(w)).float(), words)


def _normal_quantile(p: Tensor) -> Tensor:
    """Return the normal quantile of float64 in [2**-33, 1 - 2**-33], correct to about 1e-15 of the result."""
    centred = p - 0.5
    r = 0.180625 - centred * centred
    z = centred * (_polynomial(r, _CENTRE_NUMERATOR) / _polynomial(r, _CENTRE_DENOMINATOR))
    in_tail = centred.abs() > 0.425
    q = centred[in_tail]
    minus_log = -_log(0.5 - q.abs())
    r = numerics.sqrt(minus_log.float()).double()
    for _ in range(2):  # Heron's method: from 24 correct bits to 48 to all
        r = (r + minus_log / r) * 0.5
    tail = _polynomial(r - 1.6, _TAIL_NUMERATOR) / _polynomial(r - 1.6, _TAIL_DENOMINATOR)
    z[in_tail] = torch.where(q < 0, -tail, tail)
    return z


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        value = value.mul_(x).add_(c)
    return value


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of positive float64: x = 2**e * m, m in [1/sqrt 2, sqrt 2), log m = 2 atanh((m-1) / (m+1)).
    The series of atanh goes to degree 23; the omitted terms are below 2e-20."""
    m, e = torch.frexp(x)
    small = m < 0.5**0.5
    m, e = torch.where(small, m * 2.0, m), (e - small.to(e.dtype)).double()
    s = (m - 1.0) / (m + 1.0)
    series = _polynomial(s * s, [1.0 / (2 * k + 1) for k in range(11, -1, -1)])
    return e * _LN2_HIGH + (s * 2.0 * series + e * _LN2_LOW)
