"""Steps that read text: strings take bytes of a CPU's arena, and sizes depend on the text."""

from __future__ import annotations

import pytest
from processes import on_arena

pytest.importorskip("tensorflow")


def split():
    import tensorflow as tf

    import tfswap
    from tfswap.runtime.dynamic_sizes import find_data_dependent_sizes

    count, most = 4000, 20
    too_little, limit = 4_300_000, 4_660_000

    def info(reset=False):
        if reset:
            tf.config.experimental.reset_memory_stats("CPU:0")
        return tf.config.experimental.get_memory_info("CPU:0")

    text = tf.constant([" ".join(["ab"] * most)] * count)
    weight = tf.Variable(tf.random.stateless_normal([4, 4], [1, 2]))
    table = tf.Variable(tf.random.stateless_normal([100, 4], [1, 3]))

    def train(lines):
        with tf.GradientTape() as tape:
            words = tf.strings.join([tf.strings.split(lines).to_tensor(shape=[count, most]), "x"])
            h = tf.nn.relu(tf.gather(table, tf.strings.to_hash_bucket_fast(words, 100)) @ weight)
            loss = tf.reduce_mean(h * h)
        for variable, gradient in zip((weight, table), tape.gradient(loss, (weight, table)), strict=True):
            variable.assign_sub(tf.convert_to_tensor(gradient))
        return loss

    try:
        tfswap.optimize(tf.function(train, autograph=False), memory_limit=too_little)(text)
        floor = 0
    except tfswap.InfeasibleMemoryLimit as refusal:
        floor = refusal.floor_bytes
    step = tfswap.optimize(tf.function(train, autograph=False), memory_limit=limit)
    loss = step(text)
    info(reset=True)
    step(text)
    peak = info()["peak"]
    traced = tf.function(train, autograph=False).get_concrete_function(text)
    sizes = find_data_dependent_sizes(traced, [text], lambda function: function)
    before = info(reset=True)["current"]
    (*_, words) = sizes.sizes(traced, [text])
    of_sizes = info()["peak"] - before
    # Last: what an unoptimised step leaves in the arena, and where, depends on the timing of its threads.
    weight.assign(tf.random.stateless_normal([4, 4], [1, 2]))
    table.assign(tf.random.stateless_normal([100, 4], [1, 3]))
    expected = tf.function(train, autograph=False)(text)
    return {
        "same": loss.numpy().tobytes() == expected.numpy().tobytes(),
        "floor": floor,
        "limit": limit,
        "peak": peak,
        "planned": step.plan().planned_peak_bytes,
        "base": step.report().baseline_peak_bytes,
        "words": words,
        "of_sizes": of_sizes,
    }


def test_strings_count() -> None:
    """Each word takes 24 bytes, and where it begins another 16: while rows are padded 4.3 MB are needed. To count the
    words before takes none of the arena.
    """
    found = on_arena(split)
    assert found["same"]
    assert 4_480_000 < found["floor"] <= found["limit"]
    assert found["peak"] == found["planned"] <= found["limit"] < found["base"]
    assert found["words"] == [80_000]
    assert found["of_sizes"] < 10_000


@pytest.mark.slow
def test_plans_of_text_hold_in_any_process() -> None:
    """Each process has regions of its own addresses, and constants in other places."""
    found = [on_arena(split) for _ in range(20)]
    assert [each["peak"] - each["planned"] for each in found] == [0] * 20


def vectorised():
    import keras
    import tensorflow as tf

    import tfswap

    layers = keras.layers
    words = [str(i) for i in range(200)]
    texts = tf.constant([" ".join(words[(7 * i + j) % 200] for j in range(10 + (5 * i) % 23)) for i in range(64)])
    targets = tf.reshape(tf.cast(tf.range(64) % 2, tf.float32), [64, 1])

    def model():
        # The table is not trained: TensorFlow adds the rows of a word that occurs twice in any order.
        keras.utils.set_random_seed(0)
        vectors = layers.TextVectorization(vocabulary=words, output_mode="int")
        dense = [layers.Dense(128, activation="gelu") for _ in range(3)]
        body = [layers.Embedding(202, 128, trainable=False), *dense, layers.GlobalMaxPooling1D()]
        made = keras.Sequential([layers.Input((), dtype="string"), vectors, *body, layers.Dense(1)])
        made.compile("sgd", "mse")
        return made

    def bits(made):
        return [weight.tobytes().hex() for weight in made.get_weights()]

    data = tf.data.Dataset.from_tensor_slices((texts, targets)).batch(32)
    plain = model()
    plain.fit(data, epochs=2, verbose=0)
    planned = model()
    tfswap.keras.optimize(planned, memory_limit="60%")
    planned.fit(data, epochs=2, verbose=0)
    return {"same": bits(planned) == bits(plain)}


def test_words_are_looked_up_in_the_step() -> None:
    """How many there are, and how many the longest text has, follows from the texts."""
    assert on_arena(vectorised)["same"]
