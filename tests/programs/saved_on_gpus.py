"""SavedModels of steps on several GPUs: saved, rewritten, loaded and trained, in processes of their own."""

from __future__ import annotations

from typing import Any

import several_gpus
import tensorflow as tf
from gpu_compare import draws

import tfswap
from tfswap.exporters.function import memory_optimizer_off

ROWS = 1024
DEVICES = tf.saved_model.LoadOptions(experimental_variable_policy="save_variable_devices")


def pipeline() -> tuple[Any, str]:
    """Layers on one device after the other; the file has the devices of variables."""
    variables, step, _ = several_gpus.pipeline()
    return _module(variables, step), "save_variable_devices"


def without_devices() -> tuple[Any, str | None]:
    """The same; the file has no device of a variable."""
    return pipeline()[0], None


def with_the_host() -> tuple[Any, str]:
    """An embedding on the CPU, layers on a GPU, and a message that the CPU prints."""
    variables, step, _ = several_gpus.with_the_host()
    made = _module(variables, step)
    made.train_step = tf.function(step, input_signature=[tf.TensorSpec([None], tf.int32, name="tokens")])
    return made, "save_variable_devices"


def replicas() -> tuple[Any, str]:
    """Two replicas that are placed by hand, each with half of the batch. (Of a MirroredStrategy's variable TensorFlow
    saves one for all replicas.)
    """
    devices = several_gpus.gpus()
    copies = []
    for device in devices:
        with tf.device(device):
            copies.append(several_gpus.layers(8))

    def step(x: Any) -> Any:
        losses, gradients = [], []
        for device, part, variables in zip(devices, tf.split(x, len(devices)), copies, strict=True):
            with tf.device(device), tf.GradientTape() as tape:
                h = part
                for variable in variables:
                    h = tf.nn.relu(tf.sin(h @ variable))
                losses.append(tf.reduce_mean(h))
                gradients.append(tape.gradient(losses[-1], variables))
        for device, variables in zip(devices, copies, strict=True):
            with tf.device(device):
                for variable, *parts in zip(variables, *gradients, strict=True):
                    variable.assign_sub(0.1 * tf.add_n(parts))
        return tf.add_n(losses)

    return _module([each for variables in copies for each in variables], step), "save_variable_devices"


KINDS = {"pipeline": pipeline, "without_devices": without_devices, "replicas": replicas, "with_the_host": with_the_host}


def _module(variables: Any, step: Any) -> Any:
    made = tf.Module()
    made.layers = variables
    made.train_step = tf.function(step, input_signature=[tf.TensorSpec([None, 64], name="x")])
    return made


def save(kind: str, folder: str, limit: Any = "75%") -> dict[str, Any]:
    """Save a model, and rewrite it."""
    model, policy = KINDS[kind]()
    options = tf.saved_model.SaveOptions(experimental_variable_policy=policy)
    tf.saved_model.save(model, f"{folder}/model", options=options)
    report = tfswap.optimize_graph(f"{folder}/model", f"{folder}/smaller", memory_limit=limit, batch_size=ROWS)
    return {
        "limits": {name: each.memory_limit_bytes for name, each in report.devices.items()},
        "moves": {name: bool(each.swapped or each.recomputed) for name, each in report.devices.items()},
    }


def _given(tokens: bool) -> tf.Tensor:
    with tf.device("CPU:0" if tokens else "GPU:0"):
        return tf.constant(draws(ROWS).view("i") % 100 if tokens else draws(ROWS, 64))


def load_without_devices(path: str, tokens: bool = False) -> dict[str, Any]:
    """What a step says whose variables are all on the first GPU, and whether it has changed them."""
    import tfswap.ops.codecs  # noqa: F401

    model = tf.saved_model.load(path)
    before = [each.numpy().tobytes() for each in model.layers]
    try:
        model.train_step(_given(tokens))
        said = ""
    except tf.errors.FailedPreconditionError as error:
        said = error.message
    return {"said": said, "same": before == [each.numpy().tobytes() for each in model.layers]}


def train(path: str, by: str, tokens: bool = False, steps: int = 3, **options: Any) -> dict[str, Any]:
    """The bits of losses and variables after some steps, and each device's highest peak.

    Args:
        by: "tensorflow" or "tfswap".
        tokens: whether the step takes these.
        options: of `tfswap.load`.
    """
    import tfswap.ops.codecs

    with memory_optimizer_off():
        model = tfswap.load(path, **options) if by == "tfswap" else tf.saved_model.load(path, options=DEVICES)
        x = _given(tokens)
        bits, highest = [], dict.fromkeys(several_gpus.gpus(), 0)
        for _ in range(steps):
            loss, peaks = several_gpus.peaks_of(lambda: model.train_step(x).numpy())
            bits.append(loss.tobytes().hex())
            highest = {device: max(highest[device], peak) for device, peak in peaks.items()}
    found: dict[str, Any] = {"peaks": highest, "devices": sorted({each.device[-5:] for each in model.layers})}
    found["bits"] = [*bits, *(each.numpy().tobytes().hex() for each in model.layers)]
    if by == "tfswap":
        step = model.train_step
        found["planned"] = {device: step.plan(device).planned_peak_bytes for device in step.report().devices}
        found["limits"] = {device: step.plan(device).limit_bytes for device in found["planned"]}
        found["orders"] = {device: list(step.plan(device).order) for device in found["planned"]}
    return found
