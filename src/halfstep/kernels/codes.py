"""The integers by which kernels are chosen: algorithm, how the weight is kept, state and gradient format.

Plain integers, because compiled kernels fold them away; names for people are in algorithms.py.
"""

ADAMW, ADAM, SGD, SGD_MOMENTUM, SGD_NESTEROV, LION = range(6)
NO_KERNEL = -1
"""An algorithm that runs in plain torch on every device."""
(PLAIN, BF16_EXACT, BF16_MASTER, BF16_NONE, BF16_STOCHASTIC, FP16_EXACT, FP16_MASTER, FP16_NONE) = range(8)
BF16, FP16, FP32 = range(3)
STATE_FP32, STATE_BF16, STATE_8BIT = range(3)

BLOCK = 512
"""Elements that share one exponent in 8-bit states."""
LEAST_TOP = 40
"""The smallest block exponent: it keeps every decoded value a normal fp32 number."""
