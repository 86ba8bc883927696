"""Damages files in random ways and runs the command line on them: each command ends with a status and one error line.

A damage is a list of edits, each a kind and two numbers that say where and to what, so that hypothesis finds the least
one that fails. `python tests/support/fuzz_files.py COUNT [SEED]` runs many, in processes of their own that may die, and
prints those that failed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Edit = tuple[str, int, int]
WORDS = (
    "",
    "x",
    "x:0",
    "x:y:99",
    "^x",
    "inputs",
    "\x1b[31m",
    "\x9b2J\u202e",
    "x\ntfswap: fine",
    "é" * 40,
    "Const",
    "MatMul",
    "Tfswap>SwapOut",
    ":",
    "a/b",
)
NUMBERS = 0, 1, 2, -1, 7, 99, 2**31 - 1, -(2**31), 2**40, 10**12
VALUES: tuple[Any, ...] = (None, True, -1, 10**400, 2**63, 0.5, "", "x\x1b[2J", [], {}, [[]], {"a": 1}, [None], [-1])


def _functions(proto: Any) -> Any:
    return proto.meta_graphs[0].graph_def.library.function


def _nodes(proto: Any) -> list[tuple[Any, Any]]:
    return [(f.node_def, node) for f in _functions(proto) for node in f.node_def]


def _pick(items: Sequence[Any], number: int) -> Any:
    return items[number % len(items)]


def _edit_node(proto: Any, kind: str, where: int, what: int) -> None:
    nodes = _nodes(proto)
    owner, node = _pick(nodes, where)
    inputs, attributes = node.input, sorted(node.attr)
    other = _pick(nodes, what)[1]
    if kind == "drop node":
        owner.remove(node)
    elif kind == "rename node":
        node.name = _pick((*WORDS, other.name), what)
    elif kind == "copy node":
        owner.add().CopyFrom(other)
    elif kind == "change op":
        node.op = _pick((*WORDS, other.op), what)
    elif kind == "rewire" and inputs:
        inputs[what % len(inputs)] = _pick((*WORDS, f"{other.name}:output:0", f"^{other.name}", other.name), what // 7)
    elif kind == "drop input" and inputs:
        del inputs[what % len(inputs)]
    elif kind == "add input":
        inputs.append(_pick((*WORDS, *other.input), what))
    elif kind == "device":
        node.device = _pick(WORDS, what)
    elif attributes:
        _edit_attribute(node.attr, _pick(attributes, what // 11), kind, what, other)


def _edit_attribute(attr: Any, name: str, kind: str, what: int, other: Any) -> None:
    if kind == "drop attribute":
        del attr[name]
    elif kind == "swap attribute" and other.attr:
        attr[name].CopyFrom(other.attr[_pick(sorted(other.attr), what)])
    elif kind == "number attribute":
        if attr[name].WhichOneof("value") == "list" and attr[name].list.i:
            attr[name].list.i[0] = _pick(NUMBERS, what)
        else:
            attr[name].i = _pick(NUMBERS, what)
    elif kind == "type attribute":
        if attr[name].WhichOneof("value") == "list" and attr[name].list.type:
            attr[name].list.type[what % len(attr[name].list.type)] = what % 140
        else:
            attr[name].type = what % 140
    elif kind == "shape attribute":
        attr[name].shape.dim.add(size=_pick(NUMBERS, what))
    elif kind == "text attribute":
        attr[name].s = _pick(WORDS, what).encode()
    elif kind == "function attribute":
        attr[name].func.name = _pick(WORDS, what)
    elif kind == "tensor attribute" and attr[name].WhichOneof("value") == "tensor":
        tensor = attr[name].tensor
        tensor.tensor_content = os.urandom(0) + bytes(what % 9)
        tensor.tensor_shape.dim.add(size=_pick(NUMBERS, what))


def _edit_function(proto: Any, kind: str, where: int, what: int) -> None:
    function = _pick(_functions(proto), where)
    signature = function.signature
    if kind == "drop function":
        _functions(proto).remove(function)
    elif kind == "rename function":
        signature.name = _pick(WORDS, what)
    elif kind == "drop result" and function.ret:
        del function.ret[_pick(sorted(function.ret), what)]
    elif kind == "change result" and function.ret:
        function.ret[_pick(sorted(function.ret), what)] = _pick(WORDS, what)
    elif kind == "drop argument" and signature.input_arg:
        del signature.input_arg[what % len(signature.input_arg)]
    elif kind == "argument type" and signature.input_arg:
        _pick(signature.input_arg, what // 3).type = what % 140
    elif kind == "argument name" and signature.input_arg:
        _pick(signature.input_arg, what // 3).name = _pick(WORDS, what)
    elif kind == "drop output" and signature.output_arg:
        del signature.output_arg[what % len(signature.output_arg)]
    elif kind == "control result" and function.control_ret:
        function.control_ret[_pick(sorted(function.control_ret), what)] = _pick(WORDS, what)
    elif kind == "drop argument attributes" and function.arg_attr:
        del function.arg_attr[_pick(sorted(function.arg_attr), what)]
    elif kind == "move argument attributes" and function.arg_attr:
        function.arg_attr[what % 10**6].CopyFrom(function.arg_attr[min(function.arg_attr)])


def _edit_objects(proto: Any, kind: str, where: int, what: int) -> None:
    graph = proto.meta_graphs[0].object_graph_def
    node = _pick(graph.nodes, where)
    if kind == "drop object":
        graph.nodes.remove(node)
    elif kind == "child" and node.children:
        child = _pick(node.children, what)
        child.node_id = _pick(NUMBERS[:8], what // 3)
    elif kind == "child name" and node.children:
        _pick(node.children, what).local_name = _pick(WORDS, what // 3)
    elif kind == "concrete function" and graph.concrete_functions:
        concrete = graph.concrete_functions[_pick(sorted(graph.concrete_functions), where)]
        concrete.bound_inputs.append(_pick(NUMBERS[:8], what))
    elif kind == "drop concrete function" and graph.concrete_functions:
        del graph.concrete_functions[_pick(sorted(graph.concrete_functions), where)]
    elif kind == "concrete name" and node.WhichOneof("kind") == "function":
        node.function.concrete_functions.append(_pick(WORDS, what))
    elif kind == "variable":
        node.variable.dtype = what % 140
        node.variable.shape.dim.add(size=_pick(NUMBERS, what))
    elif kind == "function spec" and node.WhichOneof("kind") == "function":
        node.function.function_spec.fullargspec.none_value.SetInParent()


_NODE = "drop node,rename node,copy node,change op,rewire,drop input,add input,device,drop attribute,swap attribute"
_ATTRIBUTE = "number attribute,type attribute,shape attribute,text attribute,function attribute,tensor attribute"
_FUNCTION = "drop function,rename function,drop result,change result,drop argument,argument type,argument name"
_MORE = "drop output,control result,drop argument attributes,move argument attributes"
_OBJECT = "drop object,child,child name,concrete function,drop concrete function,concrete name,variable,function spec"
EDITS: dict[str, Callable[[Any, str, int, int], None]] = {
    **dict.fromkeys(f"{_NODE},{_ATTRIBUTE}".split(","), _edit_node),
    **dict.fromkeys(f"{_FUNCTION},{_MORE}".split(","), _edit_function),
    **dict.fromkeys(_OBJECT.split(","), _edit_objects),
}
FILES = "saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001"
BYTES = "flip bytes", "cut", "remove", "insert"
KINDS = (*EDITS, *BYTES)


def damage(model: Path, edits: Sequence[Edit]) -> None:
    """Change the files of a SavedModel in place."""
    from google.protobuf.message import DecodeError
    from tensorflow.core.protobuf import saved_model_pb2

    for kind, where, what in edits:
        if kind in BYTES:
            _damage_bytes(model / _pick(FILES, where), kind, where // 3, what)
            continue
        path = model / FILES[0]
        with contextlib.suppress(DecodeError, FileNotFoundError, ZeroDivisionError, IndexError):
            proto = saved_model_pb2.SavedModel.FromString(path.read_bytes())
            EDITS[kind](proto, kind, where, what)
            path.write_bytes(proto.SerializeToString())


def _damage_bytes(path: Path, kind: str, where: int, what: int) -> None:
    if not path.exists():
        return
    content = bytearray(path.read_bytes())
    place = where * 977 % max(1, len(content))
    if kind == "flip bytes":
        for at in range(place, min(place + 1 + what % 3, len(content))):
            content[at] ^= 1 + what % 255
    elif kind == "cut":
        del content[place:]
    elif kind == "insert":
        content[place:place] = bytes([what % 256]) * (1 + what % 5)
    path.write_bytes(content)
    if kind == "remove":
        path.unlink()


def damage_json(text: str, edits: Sequence[Edit]) -> str:
    """The text of a plan or a profile, changed."""
    for kind, where, what in edits:
        if kind in BYTES:
            place = where % max(1, len(text))
            text = text[:place] + ("[" * 100_000 if kind == "insert" else chr(what % 0x250)) + text[place + what % 3 :]
            continue
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            continue
        places = list(_places(content))
        if places:
            owner, key = _pick(places, where)
            if what % 4 == 0:
                del owner[key]
            else:
                owner[key] = _pick(VALUES, what // 4)
        text = json.dumps(content)
    return text


def _places(content: Any) -> Any:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(items):
        yield content, key
        yield from _places(value)


# Each has a damaged model, plan and profile. Where a model is damaged the plan is not, and so on.
MODEL_COMMANDS = (
    "verify MODEL",
    "verify MODEL SOUND",
    "verify SOUND MODEL",
    "analyze MODEL --memory_limit 80%",
    "optimize MODEL OUT --memory_limit 80%",
    "explain MODEL",
    "trace MODEL OUT.trace.json",
    "simulate MODEL --limits 2",
    "fit MODEL --memory_limit 2MiB --function train_step",
)
JSON_COMMANDS = "analyze SOUND --plan JSON", "explain SOUND --profile JSON", "optimize SOUND OUT --plan JSON"


def failure(arguments: Sequence[str], *, as_json: bool) -> str | None:
    """What is wrong with how a command ended; None where nothing is."""
    import traceback

    from tfswap.frontends import cli
    from tfswap.support.printable import printable

    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = cli.main([*arguments, *(["--json"] if as_json else [])])
    except BaseException:
        return traceback.format_exc()[-1500:]
    # The others are progress, and where help is.
    lines = re.findall(r"^(?!tfswap: \d+ s: |Try: ).+", err.getvalue(), re.MULTILINE)
    if status not in (0, 1, 2, 3):
        return f"exit status {status}"
    has_error = len(lines) == 1 or (not lines and status == 1 and bool(out.getvalue()))  # `verify` prints what differs
    if "Traceback" in err.getvalue() or (status in (1, 2) and not has_error):
        return f"status {status} with {err.getvalue()!r}"
    if as_json:
        try:
            json.loads(out.getvalue())
        except ValueError:
            return f"no JSON: {out.getvalue()!r}"
    written = out.getvalue() + err.getvalue()
    return f"control characters: {written!r}" if printable(written) != written else None


def save_models(folder: Path) -> tuple[Path, Path]:
    """A small model, and the same rewritten."""
    import tensorflow as tf

    import tfswap

    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = [tf.Variable(tf.random.stateless_normal([32, 32], (i, 1)) * 0.1) for i in range(3)]

        @tf.function(input_signature=[tf.TensorSpec([256, 32])])
        def train_step(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                h = x
                for w in self.w:
                    h = tf.nn.relu(h @ w)
                h = tf.cond(tf.reduce_sum(h) > 0, lambda: h * 2.0, lambda: h)
                loss = tf.reduce_mean(h * h)
            for w, g in zip(self.w, tape.gradient(loss, self.w), strict=True):
                w.assign_sub(0.1 * g)
            return loss

    plain, rewritten = folder / "plain", folder / "rewritten"
    tf.saved_model.save(Model(), str(plain))
    tfswap.optimize_graph(str(plain), str(rewritten), memory_limit="80%", tactics=("swap",))
    return plain, rewritten


def run(models: Sequence[Path], folder: Path, which: int, edits: Sequence[Edit]) -> str | None:
    """Damage one file and run one command on it; what is wrong with how it ended."""
    command = _pick((*MODEL_COMMANDS, *JSON_COMMANDS), which)
    plain, rewritten = models
    source = rewritten if command == "verify MODEL" else plain
    with tempfile.TemporaryDirectory(dir=folder) as work:
        shutil.copytree(source, f"{work}/model")
        if command in MODEL_COMMANDS:
            damage(Path(work, "model"), edits)
        else:
            saved = rewritten / "tfswap_plan.json" if "--plan" in command else folder / "profile.json"
            Path(work, "x.json").write_text(damage_json(saved.read_text(), edits), encoding="utf-8", errors="replace")
        names = {"MODEL": f"{work}/model", "SOUND": str(plain), "JSON": f"{work}/x.json", "OUT": f"{work}/out"}
        arguments = [names.get(word, word.replace("OUT.", f"{work}/out.")) for word in command.split()]
        return failure(arguments, as_json=bool(which // 16 % 2))


def save_profile(folder: Path) -> None:
    from tfswap.kernels.hardware import Rates
    from tfswap.kernels.profile import Density, Profile, Timed

    kernels = (Timed("MatMul", "MatMul", "f32[256,32],f32[32,32]->f32[256,32]", 1e-5),)
    made = Profile(
        "cpu", "a machine", "0", Rates(1e9, 1e9, 1e9, 1e9, 1e9, 1e-6), None, kernels, (Density("x", "", 0.5),)
    )
    made.save(folder / "profile.json")


def drawn(random_: random.Random) -> tuple[int, list[Edit]]:
    edits = [
        (random_.choice(KINDS), random_.randrange(10**6), random_.randrange(10**6))
        for _ in range(random_.choice((1, 1, 2)))
    ]
    return random_.randrange(10**6), edits


def main(count: int, seed: int) -> None:
    """Runs in a child, which is started again after the damage that ends it."""
    done = failed = 0
    while done < count:
        child = subprocess.Popen(
            [sys.executable, __file__, "--child", str(seed), str(done), str(count)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("@"):
                done = int(line[1:])
            else:
                failed += line.startswith("FAILED")
                print(line, end="", flush=True)
        if child.wait():
            print(f"FAILED number {done} (seed {seed}) ended the process: {child.returncode} {drawn_at(seed, done)}")
            failed, done = failed + 1, done + 1
    print(f"{done} damaged files, {failed} failed")


def drawn_at(seed: int, number: int) -> tuple[int, list[Edit]]:
    return drawn(random.Random(f"{seed} {number}"))


def _child(seed: int, first: int, count: int) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TFSWAP_PLAN_CACHE", "off")
    os.environ.setdefault("TFSWAP_CALIBRATION", "off")
    with tempfile.TemporaryDirectory() as made:
        models = save_models(Path(made))
        save_profile(Path(made))
        for number in range(first, count):
            print(f"@{number}", flush=True)
            wrong = run(models, Path(made), *drawn_at(seed, number))
            if wrong is not None:
                print(f"FAILED number {number} (seed {seed}): {drawn_at(seed, number)}\n{wrong}", flush=True)
        print(f"@{count}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        _child(*map(int, sys.argv[2:]))
    else:
        main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
