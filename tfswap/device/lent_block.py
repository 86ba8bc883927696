"""Memory of a device's arena in which swapped tensors of another device wait."""

from __future__ import annotations

import itertools
import weakref

_numbers = itertools.count(1)


class LentBlock:
    """A block of a device's arena. It exists as long as this object does, and until the last copy from or to it ends.

    Args:
        lender: the name of the device.
        nbytes: its size.

    Attributes:
        number: its number in this process, which SwapOut has.

    Raises tf.errors.ResourceExhaustedError where the arena has no such room.
    """

    def __init__(self, lender: str, nbytes: int):
        import tensorflow as tf

        from tfswap.native.load import load

        self.lender = lender
        self.nbytes = nbytes
        self.number = next(_numbers)
        library = load()
        with tf.init_scope(), tf.device(lender):
            library.ops.tfswap_lend_block(number=self.number, nbytes=nbytes)
        weakref.finalize(self, library.c.tfswap_drop_block, self.number)
