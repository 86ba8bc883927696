"""Training scripts that do not import tfswap, with models of packages as they are: `unmodified_packages.py NAME`."""

import sys
from collections.abc import Callable

import numpy as np
from unmodified_scripts import STEPS, show


def gpflow() -> None:
    """A sparse Gaussian process in double precision, by GPflow's own training loop."""
    import gpflow as package

    random = np.random.default_rng(1)
    x = random.uniform(size=(16384, 1))
    y = np.sin(12.0 * x) + 0.1 * random.normal(size=x.shape)
    places = np.linspace(0.0, 1.0, 100)[:, None]
    model = package.models.SGPR((x, y), package.kernels.SquaredExponential(), places)
    found = package.optimizers.Scipy().minimize(
        model.training_loss, model.trainable_variables, options={"maxiter": STEPS}
    )
    show([found.fun], [variable.numpy() for variable in model.trainable_variables])


def gpt2() -> None:
    """KerasHub's GPT-2 with random weights, narrower than its smallest preset, trained by `fit`."""
    import keras
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=512,
        num_layers=4,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=256,
        max_sequence_length=128,
    )
    model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    model.compile(
        keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False
    )
    random = np.random.default_rng(1)
    tokens = random.integers(0, 512, (STEPS * 16, 129))
    x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones([STEPS * 16, 128], bool)}
    history = model.fit(x, tokens[:, 1:], batch_size=16, shuffle=False, verbose=0)
    show(history.history["loss"], model.get_weights())


SCRIPTS: dict[str, Callable[[], None]] = {each.__name__: each for each in (gpflow, gpt2)}

if __name__ == "__main__":
    from keras.utils import set_random_seed

    set_random_seed(1)
    SCRIPTS[sys.argv[1]]()
