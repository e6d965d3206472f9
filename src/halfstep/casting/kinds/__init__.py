"""Kinds of op that have several implementations on a CPU, one file each.

All implementations take tensors of the compute dtype and give the compute dtype, forward and backward, so
that a choice never changes a dtype, only last bits and time. `rounded` is fp32 arithmetic on the 16-bit
values, its result rounded: the numbers of a tensor core with fp32 accumulation. Autograd saves the 16-bit
tensors.
"""

from collections.abc import Mapping

from halfstep.casting.kinds.attention import ATTENTION
from halfstep.casting.kinds.convolution import CONVOLUTION
from halfstep.casting.kinds.kind import Kind
from halfstep.casting.kinds.products import BATCH, LINEAR
from halfstep.casting.kinds.recurrent import GRU, LSTM, RNN

KINDS: Mapping[str, Kind] = {
    "convolution": CONVOLUTION,
    "linear": LINEAR,
    "bmm": BATCH,
    "attention": ATTENTION,
    "lstm": LSTM,
    "gru": GRU,
    "rnn_tanh": RNN,
}
"""By the names that files of choices speak of them."""
