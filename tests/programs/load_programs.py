"""Models of unusual shapes that test_load.py rewrites, loads and runs, in one process with an arena."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WIDTH, ROWS = 128, 2048


def nested() -> Any:
    """A step in an object in an object, in a list too, with structured arguments; and a function that calls it."""
    import tensorflow as tf

    batch = {"x": tf.TensorSpec([None, WIDTH], name="x"), "y": tf.TensorSpec([None, WIDTH], name="y")}

    class Inner(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = [tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], (i, 1)) * 0.1) for i in range(6)]

        @tf.function(input_signature=[batch, tf.TensorSpec([], name="rate")])
        def step(self, pair: Any, rate: Any = 0.1) -> Any:
            with tf.GradientTape() as tape:
                h = pair["x"]
                for weight in self.weights:
                    h = tf.tanh(h @ weight)
                loss = tf.reduce_mean((h - pair["y"]) ** 2)
            for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
                weight.assign_sub(rate * gradient)
            return {"loss": loss, "parts": (tf.reduce_mean(h), [tf.reduce_max(h)])}

        @tf.function(input_signature=[*batch.values(), tf.TensorSpec([], name="rate")])
        def served(self, x: Any, y: Any, rate: Any) -> Any:
            return {"mean": self.step({"y": y, "x": x}, rate)["parts"][0]}

    class Outer(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.also = [self.inner.step]

        @tf.function(input_signature=[batch])
        def twice(self, pair: Any) -> Any:
            return self.inner.step(pair)["loss"] + self.inner.step(pair, 0.2)["loss"]

    return Outer()


def pair(rows: int) -> Any:
    import tensorflow as tf

    return {name: tf.random.stateless_normal([rows, WIDTH], (seed, 1)) for seed, name in enumerate("xy")}


def trained(model: Any, rows: int = ROWS) -> list[bytes]:
    """Results and variables after some steps, called in each way."""
    import tensorflow as tf

    results = [model.inner.step(pair(rows), 0.1), model.inner.step(pair(rows), rate=tf.constant(0.1))]
    results += [model.also[0](pair(rows), 0.3), model.inner.step(pair(rows // 2), 0.1)]
    results.append(model.signatures["serving_default"](rate=tf.constant(0.1), **pair(rows)))
    flat = [t for result in results for t in tf.nest.flatten(result)]
    return [t.numpy().tobytes() for t in (*flat, *model.inner.weights)]


def original(folder: Path) -> tuple[str, list[bytes]]:
    """The nested model as a file, and what it gives without Grappler."""
    import tensorflow as tf

    from tfswap.exporters.function import grappler_off

    made = nested()
    path = str(folder / "model")
    tf.saved_model.save(made, path, signatures=made.inner.served)
    with grappler_off():
        return path, trained(tf.saved_model.load(path))


def peak_of(run: Any) -> int:
    import tensorflow as tf

    tf.config.experimental.reset_memory_stats("CPU:0")
    run()
    return tf.config.experimental.get_memory_info("CPU:0")["peak"]


def ways(folder: str) -> dict[str, Any]:
    """A nested model in each way: what differs from the original's bits, and what passed its limit."""
    import tensorflow as tf
    from saved_models import settle_arena

    import tfswap

    settle_arena()
    path, expected = original(Path(folder))
    given = {"function": "inner.step", "batch_size": ROWS}
    found: dict[str, Any] = {}
    for name, options in {
        "ours": {"memory_limit": "90%"},
        "portable": {"memory_limit": "90%", "portable": True, "tactics": ("recompute",)},
        "left_alone": {"memory_limit": "1GiB"},
        "policy": {"memory_limit": "90%", "policy": lambda facts: () if facts.name == "Tanh:0" else None},
    }.items():
        output = f"{folder}/{name}"
        tfswap.optimize_graph(path, output, **given, **options)
        model = tfswap.load(output)
        got: list[bytes] = []
        peak = peak_of(lambda model=model, got=got: got.extend(trained(model)))
        report = model.inner.step.report()
        found[name] = {"same": got == expected, "kept": peak <= report.memory_limit_bytes, "peak": peak}
        found[name]["moved"] = [a.tensor for a in model.inner.step.plan().evictions]
        if name == "ours":
            found["larger"] = larger(model)
            found["taped"] = refused_by_tape(model)
            found["called"] = float(model.twice(pair(ROWS)).numpy()) > 0  # by the file's plan, with room
            again = f"{folder}/again"
            tf.saved_model.save(model, again)
            saved = tf.saved_model.load(again)
            found["saved"] = float(saved.inner.step(pair(64), 0.1)["loss"]) > 0
            found["within"] = float(tf.function(lambda m=model: m.inner.step(pair(64), 0.1)["loss"])()) > 0
        del model
    return found


def larger(model: Any) -> str:
    """What a batch comes to that is larger than the file's plan is for."""
    import tfswap

    try:
        model.inner.step(pair(ROWS * 2), 0.1)
    except tfswap.InfeasibleMemoryLimit:
        return "refused"
    return "planned"


def refused_by_tape(model: Any) -> str:
    import tensorflow as tf

    import tfswap

    with tf.GradientTape() as tape:
        tape.watch(given := pair(ROWS))
        try:
            model.inner.step(given, 0.1)
        except tfswap.UnsupportedGraph as error:
            return str(error)
    return ""


def in_a_session(others_mib: int) -> str:
    """What a session says of a rewritten GraphDef, among other tensors; "" where it runs."""
    import tensorflow as tf

    import tfswap

    tf1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, WIDTH], name="x")
        h = x
        for i in range(6):
            h = tf.tanh(h @ tf1.get_variable(f"w{i}", [WIDTH, WIDTH], use_resource=True))
        loss = tf.reduce_mean(h * h, name="loss")
        tf1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        start = tf1.global_variables_initializer().name
    given = {"feeds": ["x"], "fetches": ["loss:0", "train"], "batch_size": ROWS}
    made = tfswap.optimize_graph(graph.as_graph_def(), memory_limit="80%", **given)
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.import_graph_def(made.graph_def, name="")
        session.run(start)
        held = tf1.get_session_handle(tf.ones([others_mib, 2**18])) if others_mib else None
        kept = None if held is None else session.run(held)
        values = {"x:0": [[0.5] * WIDTH] * ROWS}
        try:
            session.run(["loss:0", "train"], values)
        except tf.errors.ResourceExhaustedError as error:
            return error.message
        finally:
            del kept
    return ""


SIGNATURES = ("itself", "concrete", "of specs", "within", "open")
"""How a decorated function becomes a signature; "open" without being an attribute, and with an open batch."""


def save_signatures(folder: str) -> dict[str, int]:
    """A model for each way, with a decorated step as its signature; the limits of the steps."""
    import tensorflow as tf

    import tfswap
    from tfswap.ir.permits import TENSOR_TACTICS

    limits: dict[str, int] = {}
    for way in SIGNATURES:
        model = tf.Module()
        model.weights = [tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], (n, 1)) * 0.1) for n in range(6)]
        spec = tf.TensorSpec([None if way == "open" else ROWS, WIDTH], name="x")
        step = tfswap.optimize(
            tf.function(_training(model), input_signature=[spec]), memory_limit="75%", tactics=TENSOR_TACTICS
        )
        if way != "open":
            model.step = step
        if way in ("itself", "concrete", "open"):
            step(tf.random.stateless_normal([ROWS, WIDTH], (1, 1)))
        signature = step
        if way in ("concrete", "of specs"):
            signature = step.get_concrete_function(*([spec] if way == "of specs" else []))
        elif way == "within":
            signature = tf.function(_twice(step), input_signature=[spec])
        tf.saved_model.save(model, f"{folder}/{way}", signatures=signature)
        limits[way] = step.report().memory_limit_bytes
    return limits


def _training(model: Any) -> Any:
    import tensorflow as tf

    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for weight in model.weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_mean(h**2)
        for weight, gradient in zip(model.weights, tape.gradient(loss, model.weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return {"loss": loss}

    return train


def _twice(step: Any) -> Any:
    def twice(x: Any) -> Any:
        return {"loss": 2 * step(x)["loss"]}

    return twice


def run_signature(folder: str, way: str, others_mib: int) -> dict[str, Any]:
    """What a saved signature says, or how it peaks, in a process that has imported tfswap's ops and holds tensors."""
    import tensorflow as tf

    import tfswap.ops  # noqa: F401

    others = tf.zeros([others_mib << 18])
    step = tf.saved_model.load(f"{folder}/{way}").signatures["serving_default"]
    x = tf.random.stateless_normal([ROWS, WIDTH], (1, 1))
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    errors: list[str] = []

    def run() -> None:
        try:
            for _ in range(3):
                step(x=x)
        except tf.errors.ResourceExhaustedError as error:
            errors.append(str(error))

    peak = peak_of(run)
    return {"errors": errors, "peak": peak, "before": before, "others": int(tf.size(others))}


def load_signature(folder: str, way: str, others_mib: int) -> dict[str, Any]:
    """How a saved signature and the attribute that is the same step run where tfswap loads them, and how its function
    runs that was not saved.
    """
    import tensorflow as tf

    import tfswap
    from tfswap.compiler.model_file import ModelFile
    from tfswap.compiler.origin import Carried
    from tfswap.ir.permits import TENSOR_TACTICS

    others = tf.zeros([others_mib << 18])
    x = tf.random.stateless_normal([ROWS, WIDTH], (1, 1))
    model = tfswap.load(f"{folder}/{way}")
    signature = model.signatures["serving_default"]
    losses: list[float] = []

    def run() -> None:
        for _ in range(3):
            losses.append(float(signature(x=x)["loss"]))
        if hasattr(model, "step"):
            losses.append(float(model.step(x)["loss"]))

    peak, report = peak_of(run), signature.report()
    same = not hasattr(model, "step") or model.step.report() is report
    (kept,) = Carried.of(ModelFile.load(f"{folder}/{way}"))
    found = {"peak": peak, "limit": report.memory_limit_bytes, "planned once": same, "others": int(tf.size(others))}
    found["the file's plan"] = kept.plan.order == signature.plan().order
    small = float(signature(x=x[: ROWS // 2])["loss"]) if way == "open" else 0.0
    weights = [tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], (n, 1)) * 0.1) for n in range(6)]
    model = tf.Module()
    model.weights = weights
    step = tfswap.optimize(tf.function(_training(model)), memory_limit="75%", tactics=TENSOR_TACTICS)
    if way in ("itself", "concrete", "open"):  # as before they were saved
        step(x)
    expected = [float(step(x)["loss"]) for _ in losses]
    if way == "open":
        expected.append(float(step(x[: ROWS // 2])["loss"]))
        losses.append(small)
    return {**found, "same": losses == expected}


STEPS = {"first": "80%", "second": "95%", "third": "70%"}
"""Steps of one model that are rewritten one after another, and their limits."""


def save_steps(folder: str) -> None:
    """A model in which each of STEPS is rewritten, one file from another, in a folder that is called "made"."""
    import tensorflow as tf

    import tfswap

    model = tf.Module()
    model.weights = [tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], (n, 1)) * 0.1) for n in range(6)]
    for name in STEPS:
        spec = tf.TensorSpec([None, WIDTH], name="x")
        setattr(model, name, tf.function(_training(model), input_signature=[spec]))
    tf.saved_model.save(model, f"{folder}/0", signatures={name: getattr(model, name) for name in STEPS})
    for number, (name, limit) in enumerate(STEPS.items()):
        output = f"{folder}/{number + 1}" if number + 1 < len(STEPS) else f"{folder}/made"
        tfswap.optimize_graph(f"{folder}/{number}", output, function=name, batch_size=ROWS, memory_limit=limit)


def run_steps(folder: str, others_mib: int) -> list[dict[str, Any]]:
    """How these run, as signatures and attributes, where tfswap loads the file among other tensors."""
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import grappler_off

    others = tf.zeros([others_mib << 18])
    x = tf.random.stateless_normal([ROWS, WIDTH], (1, 1))
    original = tf.saved_model.load(f"{folder}/0")
    with grappler_off():
        expected = [float(getattr(original, name)(x)["loss"]) for name in STEPS for _ in range(2)]
    del original
    model = tfswap.load(f"{folder}/made")
    found: list[dict[str, Any]] = []
    losses: list[float] = []
    for name in STEPS:

        def run(name: str = name) -> None:
            losses.append(float(model.signatures[name](x=x)["loss"]))
            losses.append(float(getattr(model, name)(x)["loss"]))

        peak = peak_of(run)
        report = getattr(model, name).report()
        once = model.signatures[name].report().memory_limit_bytes == report.memory_limit_bytes
        found.append({"peak": peak, "limit": report.memory_limit_bytes, "once": once})
    return [*found, {"same": losses == expected, "others": int(tf.size(others))}]


def in_small_regions(folder: str) -> dict[str, Any]:
    """How a rewritten model runs that TensorFlow loads into an arena that grows."""
    import tensorflow as tf

    import tfswap.ops  # noqa: F401

    model = tf.saved_model.load(folder)
    batch = pair(ROWS)
    peak = peak_of(lambda: [model.inner.step(batch, 0.1) for _ in range(3)])
    loss = float(model.inner.step(batch, 0.1)["loss"])
    larger, errors = pair(ROWS + 1), ""
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]

    def run() -> None:
        nonlocal errors
        try:
            model.inner.step(larger, 0.1)
        except tf.errors.ResourceExhaustedError as error:
            errors = error.message

    rise = peak_of(run) - before
    return {"peak": peak, "loss": loss, "larger": errors, "rise": rise}


def drawing_loop() -> Any:
    """A step whose loop draws from a generator, so that its kernels are joined, those that encode among them."""
    import tensorflow as tf

    class Drawing(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = [tf.Variable(tf.random.stateless_normal([128, 128], (n, 1)) * 0.1) for n in range(4)]
            self.generator = tf.random.Generator.from_seed(3)

        @tf.function(input_signature=[tf.TensorSpec([512, 128])])
        def train_step(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                h = x
                for _ in tf.range(4):
                    for weight in self.weights:
                        h = tf.nn.relu(h @ weight) + 0.1 * h
                    h = h * (1 + 0.1 * self.generator.normal(h.shape))
                loss = tf.reduce_mean(h * h)
            for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
                weight.assign_sub(0.01 * gradient)
            return loss

    return Drawing()


def ran_drawing_loop(folder: str, way: str) -> dict[str, Any]:
    """What the loop's step gives, and whether the codecs are loaded then, in a process that has not loaded them before.

    Args:
        way: "plain", decorated in "memory", written to a "file", or from that: "loaded" or "verified".
    """
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import grappler_off
    from tfswap.frontends.verify_model import verify_model
    from tfswap.native import build
    from tfswap.native.load import status

    x = tf.random.stateless_normal([512, 128], (1, 2))
    made, limit = f"{folder}/made", "80%"
    tactics = ("encode",)  # or swapping would do
    assert not status(build.CODECS).loaded
    model = drawing_loop()
    if way == "plain":
        with grappler_off():
            return {"loss": float(model.train_step(x))}
    if way == "file":
        tf.saved_model.save(model, f"{folder}/model")
        return {
            "encoded": len(tfswap.optimize_graph(f"{folder}/model", made, memory_limit=limit, tactics=tactics).encoded)
        }
    if way == "verified":
        verify_model(made)
    elif way == "memory":
        step = tfswap.optimize(model.train_step, memory_limit=limit, tactics=tactics)
        return {"loss": float(step(x)), "loaded": status(build.CODECS).loaded}
    else:
        model = tfswap.load(made)
        return {"loss": float(model.train_step(x)), "loaded": status(build.CODECS).loaded}
    return {"loaded": status(build.CODECS).loaded}
