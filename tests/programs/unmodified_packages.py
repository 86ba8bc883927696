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


def minibatches() -> None:
    """A sparse variational Gaussian process, which takes minibatches from an iterator inside of its step."""
    import gpflow as package
    import keras
    import tensorflow as tf

    random = np.random.default_rng(1)
    x = random.uniform(size=(65536, 1))
    y = np.sin(12.0 * x) + 0.1 * random.normal(size=x.shape)
    places = np.linspace(0.0, 1.0, 100)[:, None]
    model = package.models.SVGP(
        package.kernels.SquaredExponential(), package.likelihoods.Gaussian(), places, num_data=len(x)
    )
    batches = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(8192)
    loss = model.training_loss_closure(iter(batches), compile=True)
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    @tf.function
    def optimization_step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss()
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
        return value

    show([optimization_step() for _ in range(STEPS)], [variable.numpy() for variable in model.trainable_variables])


def tuner() -> None:
    """A grid search of KerasTuner, whose wider models run out of memory as they are."""
    import tempfile

    import keras
    import keras_tuner

    random = np.random.default_rng(1)
    x, y = (random.normal(size=(8192, width)).astype("f") for width in (256, 1))

    def build(hyperparameters: keras_tuner.HyperParameters) -> keras.Model:
        keras.utils.set_random_seed(3)
        width = hyperparameters.Choice("width", [192, 256])
        hidden = [keras.layers.Dense(width, "tanh") for _ in range(12)]
        model = keras.Sequential([keras.Input([256]), *hidden, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=False)
        return model

    with tempfile.TemporaryDirectory() as folder:
        found = keras_tuner.GridSearch(build, objective="loss", directory=folder, max_consecutive_failed_trials=1)
        found.search(x, y, batch_size=4096, epochs=1, verbose=0, shuffle=False)
        trials = found.oracle.get_best_trials(2)
        show([trial.score for trial in trials], [trial.hyperparameters.values["width"] for trial in trials])


SCRIPTS: dict[str, Callable[[], None]] = {each.__name__: each for each in (gpflow, minibatches, gpt2, tuner)}

if __name__ == "__main__":
    from keras.utils import set_random_seed

    set_random_seed(1)
    SCRIPTS[sys.argv[1]]()
