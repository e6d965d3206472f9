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
"""The most elements that share one exponent in 8-bit states; a block never crosses the end of a row."""
PANEL = 64
"""Elements that share one hashed word of random bits; whole panels make a block."""
SHORT_ROW = 16
"""Rows shorter than this keep bf16 states where 8-bit ones are asked for: exponents would take as much."""
LONG_VECTOR = 1 << 20
"""Tensors of one dimension and this many elements are flattened models, and count as one row."""
LEAST_EXPONENT = 40
"""The smallest block exponent: it keeps every decoded value a normal fp32 number."""
