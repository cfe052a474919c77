"""Elementary functions of float32, in operations that every target of Triton and its interpreter have."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def expm1(x):
    """Kahan's method: the error of ``exp(x) - 1`` follows from the logarithm of the rounded ``exp(x)``."""
    e = tl.exp(x)
    near = (e - 1.0) * (x / tl.log(e))
    return tl.where(e == 1.0, x, tl.where((tl.abs(x) < 1.0) & (e - 1.0 > -1.0), near, e - 1.0))


@triton.jit
def log1p(x):
    s = 1.0 + x
    return tl.where(s == 1.0, x, tl.where(tl.abs(x) < 1.0, tl.log(s) * (x / (s - 1.0)), tl.log(s)))


@triton.jit
def tanh(x):
    """A polynomial where the exponential would cancel; past 16 tanh is 1. At most 3 units in the last place off."""
    a = tl.minimum(tl.abs(x), 16.0, propagate_nan=tl.PropagateNan.ALL)
    far = 1.0 - 2.0 / (tl.exp(2.0 * a) + 1.0)
    s = x * x
    p = ((1.57394409e-2 * s - 5.23043275e-2) * s + 1.33152470e-1) * s - 3.33327681e-1
    return tl.where(a < 0.55, p * s * x + x, tl.where(x < 0.0, -far, far))


@triton.jit
def rint(x):
    """To the nearest whole number, half to even; what has no fraction stays."""
    rounded = tl.where(x < 0.0, (x - 8388608.0) + 8388608.0, (x + 8388608.0) - 8388608.0)
    return tl.where(tl.abs(x) < 8388608.0, rounded, x)


@triton.jit
def atan(x):
    """A polynomial on arguments up to tan(pi / 8), after Cephes; larger arguments are reduced by addition."""
    a = tl.abs(x)
    large, middle = a > 2.414213562373095, a > 0.4142135623730950
    y = tl.where(large, -1.0 / a, tl.where(middle, (a - 1.0) / (a + 1.0), a))
    start = tl.where(large, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
    z = y * y
    p = ((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1
    result = start + (p * z * y + y)
    return tl.where(x < 0.0, -result, result)


@triton.jit
def power(x, y):
    """``x ** y`` by way of float64, as in C: 1 where x is 1 or y is 0, NaN where x is negative and y not whole."""
    there = tl.zeros_like(x + y) == 0.0  # of the shape of both
    base, exponent = tl.where(there, x, 0.0), tl.where(there, y, 0.0)
    a = tl.abs(base)
    result = tl.exp(exponent.to(tl.float64) * tl.log(a.to(tl.float64))).to(tl.float32)
    is_whole, by_two = tl.floor(exponent) == exponent, exponent * 0.5
    is_odd = is_whole & (tl.floor(by_two) != by_two)
    is_negative = (base < 0.0) | ((base == 0.0) & (1.0 / base < 0.0))
    result = tl.where(is_negative & is_odd, -result, result)
    result = tl.where((base < 0.0) & (a < float("inf")) & ~is_whole, float("nan"), result)
    is_one = (base == 1.0) | (exponent == 0.0) | ((base == -1.0) & (tl.abs(exponent) == float("inf")))
    return tl.where(is_one, 1.0, result)
