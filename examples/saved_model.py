"""A Keras model's training step in a SavedModel, rewritten by the command line, and trained from both files.

    python examples/saved_model.py
    python examples/saved_model.py --limit 50% --keep smaller   # keeps the rewritten file in the folder smaller

What trains need not have the model's code: the file and one import are enough, `tfswap.ops`, or `tfswap.ops.codecs`
where the plan encodes. The README.txt in the file's folder says which, and this program imports what it says.

The peak before that is predicted is TensorFlow's as it is by default. Its own optimizers are off in both trainings
(side_by_side.py), so the step as it is takes more here. Under a minute on two cores.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from side_by_side import ROOM, compare, run, settle, trained

BATCH, SIZE, CLASSES = 32, 64, 10


def small_resnet() -> Any:
    """Four stages of two residual blocks."""
    import keras

    layers = keras.layers

    def convolved(h: Any, filters: int, stride: int = 1) -> Any:
        h = layers.Conv2D(filters, 3, stride, "same", use_bias=False)(h)
        return layers.BatchNormalization()(h)

    images = keras.Input((SIZE, SIZE, 3))
    h = layers.ReLU()(convolved(images, 32))
    for filters in (32, 64, 128, 256):
        h = layers.ReLU()(convolved(h, filters, stride=2))
        for _ in range(2):
            inner = convolved(layers.ReLU()(convolved(h, filters)), filters)
            h = layers.ReLU()(layers.Add()([h, inner]))
    logits = layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(h))
    return keras.Model(images, logits)


def save(folder: str) -> None:
    """Save a small ResNet with its optimizer and a function that trains it, for any batch."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)

    class Trainer(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = small_resnet()
            self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
            self.optimizer.build(self.model.trainable_variables)

        @tf.function(
            input_signature=[
                tf.TensorSpec([None, SIZE, SIZE, 3], name="images"),
                tf.TensorSpec([None], tf.int32, name="labels"),
            ]
        )
        def train(self, images: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.loss(labels, self.model(images, training=True))
            variables = self.model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

    tf.saved_model.save(Trainer(), folder)


def child(folder: str, steps: int) -> dict[str, Any]:
    """Train from a file, with the ops that its README.txt names."""
    import tensorflow as tf

    readme = Path(folder, "README.txt")  # a file that was not rewritten has none
    for line in readme.read_text(encoding="utf-8").splitlines() if readme.exists() else ():
        if line.strip().startswith("import tfswap"):
            print(line.strip(), file=sys.stderr)
            importlib.import_module(line.split()[1])
    settle()
    trainer = tf.saved_model.load(folder)
    images = tf.random.stateless_uniform([BATCH, SIZE, SIZE, 3], seed=(1, 2))
    labels = tf.random.stateless_uniform([BATCH], seed=(3, 4), maxval=CLASSES, dtype=tf.int32)
    return trained(trainer.train, (images, labels), steps)


def tfswap(*words: object) -> str:
    """Run tfswap's command line."""
    command = ["tfswap", *map(str, words)]
    print("$", *command, flush=True)
    program = [sys.executable, "-m", "tfswap", *command[1:]]
    done = subprocess.run(program, env=os.environ | ROOM, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="60%", help="share of the predicted peak of the step as it is, or bytes")
    parser.add_argument("--keep", type=Path, help="where the rewritten file goes; by default it is thrown away")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--child", choices=("save", "train"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(save(args.folder) if args.child == "save" else child(args.folder, args.steps)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        model, smaller = os.path.join(scratch, "model"), args.keep or os.path.join(scratch, "smaller")
        run("--child", "save", "--folder", model)
        how = (f"--batch_size={BATCH}", f"--memory_limit={args.limit}", "--function=train")
        figures = Path(scratch, "report.json")
        print(tfswap("optimize", model, smaller, *how, f"--save={figures}"))
        plain = run("--child", "train", "--folder", model, "--steps", args.steps)
        planned = run("--child", "train", "--folder", smaller, "--steps", args.steps)
        return compare(plain, planned, json.loads(figures.read_text())["memory_limit_bytes"])


if __name__ == "__main__":
    raise SystemExit(main())
