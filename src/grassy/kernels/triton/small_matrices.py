"""The K x K part of the step in Triton: `reference._step` between its passes over the columns.

PRECISION is the precision of matmuls. "tf32x3" uses three TF32 matmuls of split operands on tensor cores and is almost
as accurate as float32. "ieee" is float32, for GPUs without TF32 tensor cores.
"""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Return A B."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def cosm1_sinc(x, eye, PRECISION: tl.constexpr):
    """Compute `geometry.cosm1_sinc`: Taylor polynomials of degree 5 for ‖X‖ <= 1, then doublings of the angle."""
    size = tl.sum(tl.sum(x * eye, axis=1), axis=0)
    doublings = tl.maximum(tl.ceil(0.5 * tl.log2(tl.maximum(size, 1.0))), 0.0).to(tl.int32)
    x = x * tl.exp2(-2.0 * doublings.to(tl.float32))
    xx = dot(x, x, PRECISION)
    cosm1 = eye / 40320 - x / 3628800  # 1/8!, 1/10!
    sinc = eye / 362880 - x / 39916800  # 1/9!, 1/11!
    cosm1 = eye / 24 - x / 720 + dot(xx, cosm1, PRECISION)
    sinc = eye / 120 - x / 5040 + dot(xx, sinc, PRECISION)
    cosm1 = -x / 2 + dot(xx, cosm1, PRECISION)
    sinc = eye - x / 6 + dot(xx, sinc, PRECISION)
    for _ in range(doublings):
        sinc += dot(cosm1, sinc, PRECISION)
        cosm1 = 2 * dot(cosm1, cosm1, PRECISION) + 4 * cosm1
    return cosm1, sinc


@triton.jit
def largest_singular_value(a, PRECISION: tl.constexpr):
    """Return the square root of the largest eigenvalue of A, as `reference._largest_eigenvalue`."""
    tiny: tl.constexpr = 1.1754944e-38
    scale = tl.maximum(tl.max(tl.max(tl.abs(a), axis=1), axis=0), tiny)
    a = a / scale
    norm = tl.maximum(tl.sqrt(tl.sum(tl.sum(a * a, axis=1), axis=0)), tiny)
    logarithm = tl.log(scale) + tl.log(norm)
    share = 0.5
    for _ in range(8):  # not unrolled: large matmuls compile slowly
        a = a / norm
        a = dot(a, a, PRECISION)
        norm = tl.maximum(tl.sqrt(tl.sum(tl.sum(a * a, axis=1), axis=0)), tiny)
        logarithm += tl.log(norm) * share
        share *= 0.5
    return tl.exp(0.5 * logarithm)
