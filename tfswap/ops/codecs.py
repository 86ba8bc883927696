"""The codec ops as Python functions, for tests and for graphs written by hand.

Importing this module builds their library if needed and registers them; `import tfswap.ops` does not.

The passes do not call these functions: they write the nodes (tfswap.ir.custom_ops). docs/encodings.md describes each
op. Every function raises tf.errors.InvalidArgumentError (eager) or ValueError (graph) for types and shapes that do not
fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfswap.native.load import load_codecs

load_codecs()

# Tensors are Any: TensorFlow's stubs have no precise type for symbolic and eager ones.


def encode_mask(tensor: Any, predicate: str, name: str | None = None) -> Any:
    """One bit per value: x > 0 ("positive"), 0 < x < 6 ("relu6"), or the bool itself ("true")."""
    return load_codecs().ops.tfswap_encode_mask(tensor=tensor, predicate=predicate, name=name)


def decode_mask(mask: Any, shape: Any, dtype: Any = "bool", name: str | None = None) -> Any:
    """The mask's bits as a tensor of that shape: bools, or ones and zeros of a floating type."""
    return load_codecs().ops.tfswap_decode_mask(mask=mask, shape=shape, T=dtype, name=name)


def multiply_by_mask(gradients: Any, mask: Any, name: str | None = None) -> Any:
    """ReluGrad or Relu6Grad of features whose mask of "positive" or "relu6" is given."""
    return load_codecs().ops.tfswap_multiply_by_mask(gradients=gradients, mask=mask, name=name)


def leaky_relu_grad_from_mask(gradients: Any, mask: Any, alpha: float = 0.2, name: str | None = None) -> Any:
    """LeakyReluGrad of features whose mask of "positive" is given."""
    return load_codecs().ops.tfswap_leaky_relu_grad_from_mask(gradients=gradients, mask=mask, alpha=alpha, name=name)


def select_by_mask(mask: Any, then: Any, otherwise: Any, shape: Any, name: str | None = None) -> Any:
    """SelectV2 of a condition of that shape given as a mask; either value may be a scalar."""
    arguments = {"mask": mask, "then": then, "else_": otherwise, "shape": shape}
    return load_codecs().ops.tfswap_select_by_mask(**arguments, name=name)


def encode_max_pool(
    image: Any,
    ksize: Sequence[int],
    strides: Sequence[int],
    padding: str,
    explicit_paddings: Sequence[int] = (),
    name: str | None = None,
) -> Any:
    """Where in its window the maximum of each value of MaxPool(image, ...) lies, in 4 or 8 bits."""
    return load_codecs().ops.tfswap_encode_max_pool(
        image=image,
        ksize=ksize,
        strides=strides,
        padding=padding,
        explicit_paddings=explicit_paddings,
        name=name,
    )


def max_pool_grad_from_positions(
    gradients: Any,
    positions: Any,
    shape: Any,
    ksize: Sequence[int],
    strides: Sequence[int],
    padding: str,
    explicit_paddings: Sequence[int] = (),
    name: str | None = None,
) -> Any:
    """MaxPoolGrad of an image of that shape whose positions are given."""
    return load_codecs().ops.tfswap_max_pool_grad_from_positions(
        gradients=gradients,
        positions=positions,
        shape=shape,
        ksize=ksize,
        strides=strides,
        padding=padding,
        explicit_paddings=explicit_paddings,
        name=name,
    )


def encode_integers(tensor: Any, minimum: int, dtype: Any, name: str | None = None) -> Any:
    """`tensor - minimum` in uint8, uint16 or uint32; a value that does not fit is an error."""
    return load_codecs().ops.tfswap_encode_integers(tensor=tensor, minimum=minimum, U=dtype, name=name)


def decode_integers(encoded: Any, minimum: int, dtype: Any, name: str | None = None) -> Any:
    """Undoes `encode_integers` of a tensor of that dtype."""
    return load_codecs().ops.tfswap_decode_integers(encoded=encoded, minimum=minimum, T=dtype, name=name)


def encode_sparse(tensor: Any, capacity: int, name: str | None = None) -> tuple[Any, Any]:
    """The values that are not zero, with their places: (encoded, spill).

    `encoded` has room for `capacity` of them. `spill` is a handle of the others, in host memory.

    Raises:
        tf.errors.ResourceExhaustedError: there are others, and host memory is at its limit.
    """
    encoded, spill = load_codecs().ops.tfswap_encode_sparse(tensor=tensor, capacity=capacity, name=name)
    return encoded, spill


def decode_sparse(encoded: Any, spill: Any, shape: Any, capacity: int, dtype: Any, name: str | None = None) -> Any:
    """Undoes `encode_sparse` of a tensor of that shape and dtype, with the same capacity."""
    return load_codecs().ops.tfswap_decode_sparse(
        encoded=encoded, spill=spill, shape=shape, capacity=capacity, T=dtype, name=name
    )


def encode_floats(tensor: Any, format: str, name: str | None = None) -> Any:
    """The values rounded to float16, bfloat16, float8_e4m3fn, float8_e5m2, gist_float8 or gist_float10."""
    return load_codecs().ops.tfswap_encode_floats(tensor=tensor, format=format, name=name)


def decode_floats(encoded: Any, shape: Any, format: str, dtype: Any, name: str | None = None) -> Any:
    """The values that `encode_floats` kept, as dtype."""
    return load_codecs().ops.tfswap_decode_floats(encoded=encoded, shape=shape, format=format, T=dtype, name=name)


def encode_groups(tensor: Any, seed: int = 0, bits: int = 8, group_size: int = 256, name: str | None = None) -> Any:
    """The values rounded at random to 2**bits levels per group of neighbours; bits is 4 or 8."""
    return load_codecs().ops.tfswap_encode_groups(tensor=tensor, seed=seed, bits=bits, group_size=group_size, name=name)


def decode_groups(
    encoded: Any, shape: Any, dtype: Any, bits: int = 8, group_size: int = 256, name: str | None = None
) -> Any:
    """The values that `encode_groups` kept, as dtype."""
    return load_codecs().ops.tfswap_decode_groups(
        encoded=encoded, shape=shape, T=dtype, bits=bits, group_size=group_size, name=name
    )
