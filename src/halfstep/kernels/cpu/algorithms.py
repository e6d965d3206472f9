# Numba infers types: parameters have none, and its intrinsics are called without their first argument.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportUnknownLambdaType=false
"""CPU kernels: optim/algorithms.py once more, as what emits it for a number or a vector of them."""

from halfstep.kernels import codes as L

# The first result emits the new weight when it is called, which may be after the moments of another vector: a
# processor looks a few hundred operations ahead, and those that wait for a root would fill that up.


def moments(g, m, v, s):
    v = v * s[3] + (g * g) * s[4]
    root = v.sqrt() * s[5] + s[6]
    return m + (g - m) * s[2], v, root


def adamw(w, g, m, v, s):
    m, v, root = moments(g, m, v, s)
    return lambda: w() * s[1] - s[7] * (m / root), m, v


def adam(w, g, m, v, s):
    w = w()
    m, v, root = moments(g + s[1] * w, m, v, s)
    return lambda: w - s[7] * (m / root), m, v


def lion(w, g, m, v, s):
    return lambda: w() * s[1] - (m * s[2] + g * s[3]).sign_times(s[6]), m * s[4] + g * s[5], v


def sgd(w, g, m, v, s):
    w = w()
    return lambda: w - s[4] * (g + s[1] * w), m, v


def sgd_momentum(w, g, m, v, s):
    w = w()
    m = m * s[2] + (g + s[1] * w) * s[3]
    return lambda: w - s[4] * m, m, v


def sgd_nesterov(w, g, m, v, s):
    w = w()
    g = g + s[1] * w
    m = m * s[2] + g * s[3]
    return lambda: w - s[4] * (g + m * s[5]), m, v


ALGORITHMS = {
    L.ADAMW: adamw,
    L.ADAM: adam,
    L.LION: lion,
    L.SGD: sgd,
    L.SGD_MOMENTUM: sgd_momentum,
    L.SGD_NESTEROV: sgd_nesterov,
}
